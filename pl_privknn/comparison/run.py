"""Runs of a comparison: configuration, plan, fingerprint and folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser

from pl_privknn import _lightning as pl
from pl_privknn._checks import at_most
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.comparison.spec import Comparison, Method, epsilon_text
from pl_privknn.config import (
    ConfigurationError,
    argument_names,
    class_named,
    get,
    known_classes,
    merged,
    one_line,
    put,
)
from pl_privknn.planning import plan_of, solve
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest


@dataclasses.dataclass(frozen=True)
class Run:
    """Run of one method at one ε with one seed.

    Attributes:
        comparison: the comparison it belongs to.
        method: the method.
        epsilon: target ε, ``math.inf`` for none.
        seed: of training, of query selection and, with ``noise_seeded``, of noise.
        document: configuration of ``privknn fit`` before calibration.
    """

    comparison: Comparison
    method: Method
    epsilon: float
    seed: int
    document: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def private(self) -> bool:
        """Whether the run has a finite target ε."""
        return self.epsilon < math.inf

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"{self.method.name} ε={epsilon_text(self.epsilon)} seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """All settings that determine the run's outcome, as plain types."""
        return {
            "document": self.document,
            "target_epsilon": epsilon_text(self.epsilon),
            "find": self.method.find if self.private else None,
        }

    @property
    def fingerprint(self) -> str:
        """Hash of :attr:`identity`."""
        return fingerprint(self.identity)

    @property
    def result_name(self) -> str:
        """File name of the run's JSON result."""
        return f"{self.method.name}__eps_{epsilon_text(self.epsilon)}__seed_{self.seed}.json"

    def folder(self, output: Path) -> Path:
        """Folder of the run within that of the comparison."""
        return output / self.method.name / f"eps_{epsilon_text(self.epsilon)}" / f"seed_{self.seed}"


def fingerprint(content: Any) -> str:
    """Hash of a value of plain types."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def runs_of(comparison: Comparison) -> Iterator[Run]:
    """All runs of a comparison, seed by seed, so that the first seed gives a complete comparison."""
    for seed in comparison.seeds:
        for method in comparison.methods:
            for epsilon in method.epsilons:
                yield Run(comparison, method, epsilon, seed, document_of(comparison, method, epsilon, seed))


def document_of(comparison: Comparison, method: Method, epsilon: float, seed: int) -> dict[str, Any]:
    """Configuration of one run: shared sections, sections of the method, and settings fixed by the comparison.

    The comparison's δ, adjacency and unit are those of the budget of the labelling, or of a baseline that takes one;
    so is ε, unless the method sets it. Labelers and baselines receive its noise source where they take one.

    Raises:
        ConfigurationError: for a method that has no way to reach ε.
    """
    base = comparison.base
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    shared: dict[str, Any] = {
        "seed_everything": seed,
        "data": base["data"],
        "trainer": merged(quiet, base["trainer"]),
    }
    if method.kind != "baseline":
        shared["model"] = base["student"]
    if method.kind == "labeler":
        shared["labeling"] = base["labeling"]
    document = merged(shared, method.sections)
    for path, value in method.settings.get(epsilon, {}).items():
        put(document, path, value)
    if method.kind == "true_labels":
        put(document, "data.init_args.train_on_truth", True)
        return document
    where, budget = "model", "model.init_args.budget"
    if method.kind == "labeler":
        where, budget = "labeling.labeler", "labeling.budget"
        put(document, "labeling.options.seed", seed)
        put(document, "labeling.options.progress", False)
    found, arguments = class_named(str(get(document, f"{where}.class_path"))), f"{where}.init_args"
    names = [] if found is None else argument_names(found)
    kept = {"delta": comparison.delta, "adjacency": comparison.adjacency, "unit": comparison.unit}
    if epsilon < math.inf and get(document, f"{budget}.epsilon") is None:
        kept["epsilon"] = epsilon
    spends = any(name.split(".")[0] == "budget" for name in names)
    if method.kind == "labeler" or spends:
        for name, value in kept.items():
            put(document, f"{budget}.{name}", value)
    values: dict[str, Any] = {"progress": False}
    if comparison.noise_seeded:
        key = (
            f"{comparison.name}|{method.name}|{epsilon_text(epsilon)}|{seed}"  # no two runs share their noise
        )
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
        source = {"class_path": "pl_privknn.privacy.noise.SeededNoise", "init_args": {"seed": drawn}}
        values["noise_source"] = source
    if epsilon < math.inf and not spends and method.find is None and epsilon not in method.settings and found:
        raise ConfigurationError(
            f"methods.{method.name}: no setting gives ε={epsilon_text(epsilon)}; add find, or "
            "settings for it, or list the method's own epsilons"
        )
    for name, value in values.items():
        places = [path for path in names if path.split(".")[-1] == name]
        if places:
            put(document, f"{arguments}.{name if name in places else places[0]}", value)
    return document


def with_run_settings(document: dict[str, Any], run: Run, folder: Path) -> dict[str, Any]:
    """Configuration with the settings of folder and loggers, which do not affect the outcome."""
    placed = merged(document, None)
    wandb = run.comparison.wandb
    if wandb is not None and wandb["mode"] != "disabled":
        logger: dict[str, Any] = {
            "class_path": "pytorch_lightning.loggers.WandbLogger",
            "init_args": {
                "project": wandb["project"],
                "name": run.label,
                "id": run.fingerprint[:16],
                "offline": wandb["mode"] == "offline",
                "save_dir": str(folder),
                "group": run.comparison.name,
                "job_type": run.method.name,
                **{key: wandb[key] for key in ("entity", "tags") if key in wandb},
            },
        }
        others = placed["trainer"].get("logger")
        listed = others if isinstance(others, list) else [others] if isinstance(others, dict) else []
        placed["trainer"]["logger"] = [*listed, logger]
        placed["attach_ledger"] = wandb["attach_ledger"]
    return placed


def with_values(document: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a configuration with other values at dotted paths."""
    copy = merged(document, None)
    for path, value in values.items():
        put(copy, path, value)
    return copy


class Planned(NamedTuple):
    """Plan of a run before its start.

    Attributes:
        calibrated: dotted paths and values of calibrated settings.
        epsilon: ε of the plan; None where the model states its own plan, or for runs without privacy.
        guarantee: guarantee of that ε; None where there is none.
    """

    calibrated: dict[str, float]
    epsilon: float | None
    guarantee: Guarantee | None


_SOURCE = "the comparison"


class Planner:
    """Planner of runs; reuses calibrated settings for all seeds."""

    def __init__(self) -> None:
        known_classes()
        self._known: dict[tuple[str, float], Planned] = {}
        self._parsed: set[str] = set()

    def check(self, run: Run) -> None:
        """Parse the run's configuration as ``privknn fit`` does, without instantiating it.

        Raises:
            ConfigurationError: for sections that don't parse.
        """
        # A valid placeholder for a setting that is yet to be calibrated.
        document = with_values(run.document, {run.method.find: 1} if run.private and run.method.find else {})
        labeling, trainer = document.pop("labeling", {}), document.pop("trainer")
        parts = [
            *({name: section} for name, section in document.items()),
            *({"labeling": {name: value}} for name, value in labeling.items()),
            *({"trainer": {name: value}} for name, value in trainer.items()),
        ]
        for part in parts:  # parts shared by many runs are parsed once
            if (key := fingerprint(part)) in self._parsed:
                continue
            try:
                # Without defaults, which would be parsed once more at each level of nested classes.
                _whole_parser().parse_object(part, defaults=False)
            except (ArgumentError, TypeError, ValueError) as error:
                raise ConfigurationError(f"{run.label}: {one_line(error)}") from error
            self._parsed.add(key)

    def plan(self, run: Run) -> Planned:
        """Calibrate the run's noise where requested, and check that its plan keeps the target.

        Raises:
            ConfigurationError: where no allowed value meets the target, or the plan exceeds it.
        """
        key = run.method.name, run.epsilon  # ε does not depend on seeds
        if key not in self._known:
            self._known[key] = self._plan(run)
        return self._known[key]

    def _plan(self, run: Run) -> Planned:
        if not run.private or run.method.kind != "labeler":
            return Planned({}, None, None)
        wanted, comparison = run.method.find, run.comparison
        target: dict[str, Any] = {
            "delta": comparison.delta,
            "adjacency": comparison.adjacency,
            "exact": False,
        }
        try:
            if wanted is not None:
                found = solve(run.document, wanted, run.epsilon, **target, source=_SOURCE, own_code=True)
                calibrated, charges, epsilon = dict(found.values), found.charges, found.epsilon
            else:
                calibrated, charges = {}, plan_of(run.document, _SOURCE, own_code=True).charges
                epsilon = account(charges, **target).epsilon
                if epsilon > run.epsilon:
                    epsilon = account(charges, **{**target, "exact": True}).epsilon
        except (ValueError, OverflowError) as error:
            what = "" if wanted is None else f"find {wanted}: "
            raise ConfigurationError(f"{run.label}: {what}{error}") from error
        if epsilon > run.epsilon:
            raise ConfigurationError(
                f"{run.label}: its plan costs ε={at_most(epsilon)}; give it more noise or fewer queries at this ε "
                "(settings), or calibrate the noise (find)"
            )
        return Planned(calibrated, epsilon, weakest(charge.guarantee for charge in charges))


@functools.cache
def _whole_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PrivateLabeler, "labeling")
    parser.add_subclass_arguments(pl.both("LightningDataModule"), "data")
    parser.add_subclass_arguments(pl.both("LightningModule"), "model")
    parser.add_class_arguments(pl.Trainer, "trainer")
    parser.add_argument("--seed_everything", type=int)
    return parser
