"""One run of a comparison: its configuration, its plan, its fingerprint, its folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """One method at one ε with one seed.

    Attributes:
        comparison: what it belongs to.
        method: the method.
        epsilon: the target, ``math.inf`` for none.
        seed: of training, of the choice of queries and, where the comparison says so, of noise.
        document: configuration of ``privknn fit`` before calibration.
    """

    comparison: Comparison
    method: Method
    epsilon: float
    seed: int
    document: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def private(self) -> bool:
        """Whether the run has an ε."""
        return self.epsilon < math.inf

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.method.name} ε={epsilon_text(self.epsilon)} seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the run's outcome depends on, as plain types."""
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
        """Name of the run's JSON."""
        return f"{self.method.name}__eps_{epsilon_text(self.epsilon)}__seed_{self.seed}.json"

    def folder(self, output: Path) -> Path:
        """The run's folder in the comparison's."""
        return output / self.method.name / f"eps_{epsilon_text(self.epsilon)}" / f"seed_{self.seed}"


def fingerprint(content: Any) -> str:
    """Hash of plain types."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def runs_of(comparison: Comparison) -> Iterator[Run]:
    """All runs: seed by seed, so that a first picture is there after one seed."""
    for seed in comparison.seeds:
        for method in comparison.methods:
            for epsilon in method.epsilons:
                yield Run(comparison, method, epsilon, seed, document_of(comparison, method, epsilon, seed))


def document_of(comparison: Comparison, method: Method, epsilon: float, seed: int) -> dict[str, Any]:
    """The configuration of one run: the shared sections, the method's own, and what fairness fixes.

    Classes that have an argument ``delta``, ``adjacency`` or ``noise_source`` receive the comparison's.
    """
    base = comparison.base
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    document: dict[str, Any] = {
        "seed_everything": seed,
        "data": merged(base["data"], None),
        "model": merged(method.model or base["student"], None),
        "trainer": merged(merged(quiet, base["trainer"]), method.trainer),
    }
    if method.kind == "true_labels":
        put(document, "data.init_args.train_on_truth", True)
    if method.labeling is not None:
        document["labeling"] = merged(base["labeling"], method.labeling)
    changes = [
        *method.settings.get(epsilon, {}).items(),
        *((path, epsilon) for path in method.epsilon_to if epsilon < math.inf),
    ]
    for path, value in changes:
        put(document, path, value)
    if method.labeling is not None:
        values = {
            "budget.delta": comparison.delta,
            "budget.adjacency": comparison.adjacency,
            "budget.unit": comparison.unit,
            "options.seed": seed,
            "options.progress": False,
        }
        if epsilon < math.inf:
            values["budget.max_epsilon"] = epsilon
        for name, value in values.items():
            put(document, f"labeling.{name}", value)
    _fill_in(document, comparison, method, epsilon, seed)
    return document


def place_in(document: dict[str, Any], run: Run, folder: Path) -> dict[str, Any]:
    """The configuration with what the run's place and loggers need, which its outcome does not depend on."""
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


def noise_seed(comparison: str, method: str, epsilon: float, seed: int) -> int:
    """A seed below 2**63 that no two runs of a comparison share."""
    key = f"{comparison}|{method}|{epsilon_text(epsilon)}|{seed}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def argument_path(class_path: str, name: str) -> str | None:
    """Where a class takes an argument: its name, or that of its group before it; None where it doesn't."""
    found = class_named(class_path)
    names = [] if found is None else argument_names(found)
    return name if name in names else next((path for path in names if path.endswith(f".{name}")), None)


def _fill_in(
    document: dict[str, Any], comparison: Comparison, method: Method, epsilon: float, seed: int
) -> None:
    where = "labeling.labeler" if method.labeling is not None else "model"
    if method.kind == "true_labels":
        return
    values: dict[str, Any] = {
        "delta": comparison.delta,
        "adjacency": comparison.adjacency,
        "unit": comparison.unit,
        "progress": False,
    }
    if method.model is not None and epsilon < math.inf:
        values["max_epsilon"] = epsilon
    if comparison.noise_seeded:
        drawn = noise_seed(comparison.name, method.name, epsilon, seed)
        values["noise_source"] = {
            "class_path": "pl_privknn.privacy.noise.SeededNoise",
            "init_args": {"seed": drawn},
        }
    for name, value in values.items():
        if place := argument_path(get(document, f"{where}.class_path"), name):
            put(document, f"{where}.init_args.{place}", value)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run's configuration with nothing left open.

    Attributes:
        document: configuration of ``privknn fit``.
        calibrated: dotted paths of the settings that were found, and their values.
        epsilon: ε of the plan; None where the model states its plan itself, or for runs without privacy.
        guarantee: how far that ε will hold; None where there is none.
    """

    document: dict[str, Any]
    calibrated: dict[str, float]
    epsilon: float | None
    guarantee: Guarantee | None


_SOURCE = "the comparison"


class Planner:
    """Plans runs; remembers what it found for other seeds."""

    def __init__(self) -> None:
        known_classes()
        self._known: dict[str, Planned] = {}

    def check(self, run: Run) -> None:
        """Parse the run's configuration as ``privknn fit`` will, without making anything of it.

        Raises:
            ConfigurationError: for sections that don't parse.
        """
        # A copy: the parser puts what it made of nested classes into what it is given.
        document = merged(run.document, None)
        if run.private and run.method.find is not None:  # some allowed value, where one has yet to be found
            put(document, run.method.find, 1)
        try:
            _whole_parser().parse_object(document)
        except (ArgumentError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{run.label}: {one_line(error)}") from error

    def plan(self, run: Run) -> Planned:
        """Find the run's noise where that is to be found, and check that its plan keeps the target.

        Raises:
            ConfigurationError: where no allowed value meets the target, or the plan passes it.
        """
        key = fingerprint({**run.identity, "document": _without_seed(run.document)})
        if key not in self._known:
            self._known[key] = self._plan(run)
        found = self._known[key]
        document = merged(run.document, None)
        for path, value in found.calibrated.items():
            put(document, path, value)
        return dataclasses.replace(found, document=document)

    def _plan(self, run: Run) -> Planned:
        if not run.private or run.method.kind != "labeler":
            return Planned(run.document, {}, None, None)
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
                "(settings), or let the noise be found (find)"
            )
        return Planned(run.document, calibrated, epsilon, weakest(charge.guarantee for charge in charges))


def _without_seed(document: dict[str, Any]) -> dict[str, Any]:
    """Parts of a plan that ε depends on: seeds of training, selection and noise are left out."""
    plain = merged(document, None)
    plain.pop("seed_everything")
    if get(plain, "labeling"):
        plain["labeling"]["options"].pop("seed")
        plain["labeling"]["labeler"].get("init_args", {}).pop("noise_source", None)
    return plain


@functools.cache
def _whole_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PrivateLabeler, "labeling")
    parser.add_subclass_arguments(pl.both("LightningDataModule"), "data")
    parser.add_subclass_arguments(pl.both("LightningModule"), "model")
    parser.add_class_arguments(pl.Trainer, "trainer")
    parser.add_argument("--seed_everything", type=int)
    return parser
