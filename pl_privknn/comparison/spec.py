"""What a comparison is: its methods, values of ε and seeds, and what all of them share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pl_privknn._checks import check_positive
from pl_privknn.planning import FreeParameter
from pl_privknn.privacy.mechanisms import Adjacency


class SpecError(ValueError):
    """A comparison that can't be run as it is written; the message names the key, its value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of a comparison; see docs/guides/comparison.md for each key.

    Attributes:
        name: names its folder.
        title: names it in tables and plots.
        kind: ``"labeler"`` (a teacher and the shared student), ``"baseline"`` (a model of its own)
            or ``"true_labels"`` (the shared student on the true labels of public images).
        labeling: section of a labeler.
        model: section of a baseline.
        trainer: a baseline's own trainer settings.
        epsilon_to: dotted paths that receive ε itself.
        calibrate: what is found for each ε.
        settings: overrides by ε, dotted paths to values.
        nonprivate: overrides that take the noise out, for ε = inf; None where that isn't defined.
        epsilons: the values of ε that this method runs at, inf among them.
    """

    name: str
    title: str
    kind: str
    labeling: dict[str, Any] | None
    model: dict[str, Any] | None
    trainer: dict[str, Any]
    epsilon_to: tuple[str, ...]
    calibrate: FreeParameter | None
    settings: Mapping[float, Mapping[str, Any]]
    nonprivate: Mapping[str, Any] | None
    epsilons: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison as its YAML states it.

    Attributes:
        name: names the folder ``runs/compare/NAME``.
        base: ``data``, ``student``, ``trainer`` and shared ``labeling`` settings.
        delta: δ of every run.
        adjacency: neighbouring relation of every run.
        noise_seeded: draw protective noise from seeds, for benchmarks; it protects nothing.
        seeds: one run each.
        epsilons: targets, ascending, ``math.inf`` last.
        methods: in the order of the YAML.
        wandb: settings of the W&B group, or None.
    """

    name: str
    base: dict[str, Any]
    delta: float
    adjacency: Adjacency
    noise_seeded: bool
    seeds: tuple[int, ...]
    epsilons: tuple[float, ...]
    methods: tuple[Method, ...]
    wandb: dict[str, Any] | None


def epsilon_text(epsilon: float) -> str:
    """ε as it stands in names of folders and in tables: ``0.5``, ``inf``."""
    return f"{epsilon:g}"


def read_epsilon(where: str, value: Any) -> float:
    """ε above 0, or the word ``inf``.

    Raises:
        SpecError: otherwise.
    """
    if isinstance(value, str) and value.strip().lower().lstrip(".") == "inf":
        return math.inf
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise SpecError(f"{where}: ε={value!r} must be a number above 0, or inf") from None
    if isinstance(value, float) and value == math.inf:
        return value
    try:
        return check_positive("ε", value)
    except ValueError:
        raise SpecError(f"{where}: ε={value!r} must be a number above 0, or inf (no privacy)") from None
