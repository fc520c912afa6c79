"""What a paid search over settings of a private training will do, and what it costs, before anything is paid."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jsonargparse import ArgumentError
from pytorch_lightning import LightningDataModule, LightningModule
from scipy.optimize import brentq

from pl_privknn._checks import check_finite, check_int, check_positive, shown
from pl_privknn.baselines import NoisySGD
from pl_privknn.comparison.spec import SpecError
from pl_privknn.configuration import ReadsFlatArguments, class_named, known_classes, made_by, one_line
from pl_privknn.nested_settings import get, merged, put
from pl_privknn.privacy.accounting.calibration import CalibrationError
from pl_privknn.privacy.accounting.rdp import ORDERS, epsilon_improved
from pl_privknn.privacy.mechanisms import Charge, DiscreteGaussian, RepeatAndSelect
from pl_privknn.privacy.noisy_steps import step_mechanism, steps_per_epoch
from pl_privknn.training.network_checks import EXAMPLES, made_up
from pl_privknn.training.paid_accuracy import check_rows
from pl_privknn.training.settings import PoissonBatches, TrainingBudget

_MOST_NOISE = 1e6
_TOLERANCE = 2e-4
_SETTINGS = "model.init_args."
#: What the cost of a candidate depends on, and the places of its files.
_FIXED = ("batches", "budget", "files", "steps_per_charge", "noise_source")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A search: the best of a random number of private trainings with settings drawn at random.

    Attributes:
        document: the configuration of one candidate, its settings still to be put in.
        settings: what may be drawn: dotted paths and values.
        steps: noisy steps of a candidate.
        delta: δ of the guarantee.
        noise_multiplier: of each step, found for ε of the whole search.
        mechanism: the whole search.
    """

    document: dict[str, Any]
    settings: tuple[dict[str, Any], ...]
    steps: int
    delta: float
    noise_multiplier: float
    mechanism: RepeatAndSelect

    @property
    def score(self) -> DiscreteGaussian:
        """The release of a candidate's score, a count of right predictions."""
        found = self.mechanism.candidate[1].mechanism
        assert isinstance(found, DiscreteGaussian)
        return found

    def candidate(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of a candidate."""
        document = merged(self.document, None)
        for path, value in setting.items():
            put(document, path, value)
        return document

    def plan(self) -> dict[str, Any]:
        """In plain types, for the ledger's reader and to know the search again."""
        return {
            "tuning": "NoisySGD",
            "document": self.document,
            "settings": list(self.settings),
            "steps": self.steps,
            "noise_multiplier": self.noise_multiplier,
            "search": self.mechanism.to_record(),
        }


def tuning_of(
    document: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]],
    epsilon: float,
    mean: float | None = None,
    score_noise: float = 50.0,
) -> Tuning:
    """Read what is asked for and find the noise with which the whole search costs ``epsilon``.

    Args:
        document: configuration of a training by :class:`~pl_privknn.baselines.noisy_sgd.NoisySGD`.
        values: for each dotted path below ``model.init_args`` the values to draw from.
        epsilon: of the whole search.
        mean: expected number of candidates; by default as many as there are settings.
        score_noise: parameter σ of the noise on a candidate's count of right predictions.

    Raises:
        SpecError: for another model, settings that change what a candidate costs, and whatever does not parse.
        CalibrationError: where no noise meets ``epsilon``.
    """
    if class_named(str(get(document, "model.class_path"))) is not NoisySGD:
        raise SpecError("model.class_path: tune trains candidates by NoisySGD; give a configuration of it")
    arguments = get(document, "model.init_args") or {}
    if arguments.get("noise_source") is not None:
        raise SpecError(
            "model.init_args.noise_source: a search draws from the operating system's generator; leave it out"
        )
    for path in values:
        first = path.removeprefix(_SETTINGS).split(".")[0]
        if not path.startswith(_SETTINGS) or first in _FIXED or first in _grouped():
            raise SpecError(
                f"--set {path}: want a path below model.init_args that changes nothing of a candidate's cost, so "
                f"not of {', '.join(_FIXED)}"
            )
    epochs = get(document, "trainer.max_epochs")
    if get(document, "trainer.max_steps") not in (None, -1) or epochs is None:
        raise SpecError(
            "trainer.max_epochs: the number of steps is part of the guarantee; give it, and no max_steps"
        )
    try:
        rate = PoissonBatches(**(arguments.get("batches") or {})).rate
        delta = TrainingBudget(**(arguments.get("budget") or {})).delta
    except (TypeError, ValueError) as error:
        raise SpecError(f"model.init_args: {one_line(error)}") from error
    steps = check_int("trainer.max_epochs", epochs) * steps_per_epoch(rate)
    settings = tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
    expected = float(len(settings)) if mean is None else check_finite("--mean", mean)
    score = Charge(DiscreteGaussian(score_noise, 1.0, 1.0))

    def search(noise: float) -> RepeatAndSelect:
        return RepeatAndSelect((Charge(step_mechanism(noise, 1.0, rate), steps), score), expected)

    noise = _noise_within(check_positive("--epsilon", epsilon), delta, search)
    kept = {name: value for name, value in arguments.items() if name not in ("budget", "files")}
    budget = {"noise_multiplier": noise, "delta": delta}
    trainer = {name: get(document, f"trainer.{name}") for name in ("accelerator", "precision")}
    base = {
        "data": dict(document.get("data") or {}),
        "model": {"class_path": "NoisySGD", "init_args": {**kept, "budget": budget}},
        "trainer": {
            "max_epochs": epochs,
            "devices": 1,
            **{name: given for name, given in trainer.items() if given},
        },
    }
    found = Tuning(base, settings, steps, delta, noise, search(noise))
    data = made_data(base["data"])
    for setting in settings:  # a setting that can't be read is found out before anything is paid
        module = made_model(found.candidate(setting), data, shown(setting))
        twin = copy.deepcopy(module.network).double().eval()
        inputs = made_up((EXAMPLES, *module.input_shape(data.image_shape)), torch.float64)
        check_rows(twin, inputs, data.num_classes, "network:")
    return found


def _noise_within(epsilon: float, delta: float, search: Callable[[float], RepeatAndSelect]) -> float:
    """The least noise with which a search costs ``epsilon`` at most, by Rényi DP, the tightest there is for it."""

    def excess(log_noise: float) -> float:
        curve = search(math.exp(log_noise)).rdp(ORDERS, "add_remove")
        return math.log(max(epsilon_improved(ORDERS, curve, delta), 1e-12) / epsilon)

    high = math.log(_MOST_NOISE)
    if excess(high) > 0:
        raise CalibrationError(
            f"--epsilon {epsilon}: the scores of the candidates alone cost more; give them more noise "
            "(--score-noise), or a smaller --mean"
        )
    low = 0.0
    while excess(low) <= 0:
        low -= 1.0
    found = float(brentq(excess, low, high, xtol=_TOLERANCE))
    while excess(found) > 0:
        found += _TOLERANCE
    return math.exp(found)


def made_data(section: Mapping[str, Any]) -> Any:
    """The data module of a configuration."""
    known_classes()
    parser = ReadsFlatArguments(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    try:
        return made_by(parser, {"data": merged(section, None)}).data
    except (ArgumentError, TypeError, ValueError) as error:
        raise SpecError(f"data: {one_line(error)}") from error


def made_model(document: Mapping[str, Any], data: Any, name: str) -> NoisySGD:
    """The module of a candidate's configuration, of the data's classes and shape where it does not say."""
    section = merged(document["model"], None)
    stated = {
        "num_classes": data.num_classes, "in_channels": data.image_shape[0], "image_size": data.image_shape[-1],
    }  # fmt: skip
    section["init_args"] = {**stated, **section["init_args"]}
    parser = ReadsFlatArguments(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        made: NoisySGD = made_by(parser, {"model": section}).model
    except (ArgumentError, ArithmeticError, TypeError, ValueError) as error:
        raise SpecError(f"{name}: {one_line(error)}") from error
    return made


def _grouped() -> set[str]:
    return {field.name for group in (PoissonBatches, TrainingBudget) for field in dataclasses.fields(group)}
