"""What a run may release at most, from its labeler's own plan, and the noise that meets a target ε."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from pl_privknn import _lightning as pl
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.comparison.run import Run, fingerprint
from pl_privknn.comparison.spec import SpecError
from pl_privknn.configuration import instantiate, known_classes, made_by, one_line
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.nested_settings import get, merged, put
from pl_privknn.planning.configuration_plan import labeling_plan
from pl_privknn.planning.setting_search import Calibrate
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run's configuration with nothing left open.

    Attributes:
        document: configuration of ``privknn fit``.
        calibrated: dotted paths of the parameters that were found, and their values.
        epsilon: ε of the plan; None where the model states its plan itself, or for runs without privacy.
        guarantee: how far that ε will hold; None where there is none.
    """

    document: dict[str, Any]
    calibrated: dict[str, float]
    epsilon: float | None
    guarantee: Guarantee | None


class Planner:
    """Reads sections with the command line's own classes; remembers what it found for other seeds.

    Args:
        data: the shared data section.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        known_classes()
        self._data_section = dict(data)
        self._known: dict[str, Planned] = {}

    def check(self, run: Run) -> None:
        """Parse the run's configuration as ``privknn fit`` will, without making anything of it.

        Raises:
            SpecError: for sections that don't parse.
        """
        document, wanted = run.document, run.method.calibrate
        if run.private and wanted is not None:  # some allowed value, where one has yet to be found
            document = wanted.filled(document, round(wanted.middle) if wanted.whole else wanted.middle)
        try:
            # A copy: the parser puts what it made of nested classes into what it is given.
            _whole_parser().parse_object(merged(document, None))
        except (ArgumentError, TypeError, ValueError) as error:
            raise SpecError(f"{run.label}: {one_line(error)}") from error

    def plan(self, run: Run) -> Planned:
        """Find the run's noise where that is to be found, and check that its plan keeps the target.

        Raises:
            SpecError: where no allowed value meets the target, or the plan passes it.
        """
        key = fingerprint({**run.identity, "document": _without_seed(run.document)})
        if key not in self._known:
            self._known[key] = self._plan(run)
        found = self._known[key]
        document = merged(run.document, None)
        for path, value in found.calibrated.items():
            put(document, path, value)
        return dataclasses.replace(found, document=document)

    def charges(self, document: Mapping[str, Any]) -> list[Charge]:
        """The most that the labeler of a configuration may release.

        Raises:
            ValueError: for a section that doesn't parse.
        """
        # Extractors have no part in a plan, and may be large.
        section = {name: value for name, value in document["labeling"].items() if name != "features"}
        labeling = instantiate({"labeling": section}, {"labeling": PrivateLabeler}).labeling
        public = self._public_examples if labeling.selects_all else None
        return labeling_plan(labeling, self._data.num_classes, "labeling", public)

    def _plan(self, run: Run) -> Planned:
        if not run.private or run.method.kind != "labeler":
            return Planned(run.document, {}, None, None)
        limit, comparison = run.epsilon, run.comparison
        calibrated = {} if run.method.calibrate is None else self._calibrated(run, run.method.calibrate)
        document = merged(run.document, None)
        for path, value in calibrated.items():
            put(document, path, value)
        try:
            charges = self.charges(document)
        except ValueError as error:
            raise SpecError(f"{run.label}: {error}") from error
        report = account(charges, delta=comparison.delta, adjacency=comparison.adjacency, exact=False)
        if report.epsilon > limit:
            report = account(charges, delta=comparison.delta, adjacency=comparison.adjacency, exact=True)
        if report.epsilon > limit:
            raise SpecError(
                f"{run.label}: its plan costs ε={report.epsilon:.4g}; give it more noise or fewer queries at this "
                "ε (settings), or let the noise be found (calibrate)"
            )
        guarantee = weakest(charge.guarantee for charge in charges)
        return Planned(document, calibrated, report.epsilon, guarantee)

    def _calibrated(self, run: Run, wanted: Calibrate) -> dict[str, float]:
        try:
            found = wanted.search(
                run.document,
                self.charges,
                epsilon=run.epsilon,
                delta=run.comparison.delta,
                adjacency=run.comparison.adjacency,
            )
        except (ValueError, OverflowError) as error:
            raise SpecError(f"{run.label}: calibrate {wanted.parameter}: {error}") from error
        return wanted.values(found.value)

    @functools.cached_property
    def _data(self) -> PrivatePublicDataModule:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(PrivatePublicDataModule, "data")
        try:
            made: PrivatePublicDataModule = made_by(parser, {"data": self._data_section}).data
        except (ArgumentError, TypeError, ValueError) as error:
            raise SpecError(f"base.data: {one_line(error)}") from error
        return made

    @functools.cached_property
    def _public_examples(self) -> int:
        self._data.prepare_data()
        self._data.setup("fit")
        return len(self._data.public)


def _without_seed(document: dict[str, Any]) -> dict[str, Any]:
    """What a plan depends on: seeds of training, selection and noise don't change it."""
    plain = merged(document, None)
    plain.pop("seed_everything")
    if get(plain, "labeling"):
        plain["labeling"].pop("seed", None)
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
