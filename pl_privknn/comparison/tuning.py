"""What a paid search over settings of a private training will do, and what it costs, before anything is paid."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy.optimize import brentq

from pl_privknn._checks import check_finite, check_int, check_open_unit, check_positive, check_rate, shown
from pl_privknn.comparison.spec import SpecError
from pl_privknn.comparison.trainings import made_data, made_training, training_sections, trains_itself
from pl_privknn.config import class_named, get, merged, one_line, put
from pl_privknn.privacy.accounting.calibration import CalibrationError
from pl_privknn.privacy.accounting.rdp import ORDERS, epsilon_improved
from pl_privknn.privacy.mechanisms import Charge, DiscreteGaussian, RepeatAndSelect
from pl_privknn.privacy.noisy_steps import step_mechanism, steps_per_epoch
from pl_privknn.training import NoisySGD

_MOST_NOISE = 1e6
_TOLERANCE = 2e-4
_MODEL, _CALLBACK = "model.init_args", "trainer.callbacks.0.init_args"
#: What the cost of a candidate depends on, and the places of its files.
_FIXED = (
    "epsilon", "delta", "noise_multiplier", "expected_batch_size", "expected_records", "files",
    "steps_per_charge", "noise_source",
)  # fmt: skip
#: What changes what the steps cost.
_UNPAID = ("groups",)


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
            "tuning": "NoisySGD" if trains_itself(self.document) else "PrivateTraining",
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
        document: configuration of a training by :class:`~pl_privknn.training.noisy_sgd.NoisySGD` or
            :class:`~pl_privknn.training.private_training.PrivateTraining`.
        values: for each dotted path below ``model.init_args``, or below ``trainer.callbacks.0.init_args`` where that
            is ``PrivateTraining``, the values to draw from.
        epsilon: of the whole search.
        mean: expected number of candidates; by default as many as there are settings.
        score_noise: parameter σ of the noise on a candidate's count of right predictions.

    Raises:
        SpecError: for another model, settings that change what a candidate costs, and whatever does not parse.
        CalibrationError: where no noise meets ``epsilon``.
    """
    place = _place_of_training(document)
    arguments = get(document, place) or {}
    if arguments.get("noise_source") is not None:
        raise SpecError(
            f"{place}.noise_source: a search draws from the operating system's generator; leave it out"
        )
    for path in values:
        _check_path(path, place)
    epochs = get(document, "trainer.max_epochs")
    if get(document, "trainer.max_steps") not in (None, -1) or epochs is None:
        raise SpecError(
            "trainer.max_epochs: the number of steps is part of the guarantee; give it, and no max_steps"
        )
    try:
        batch = check_int("expected_batch_size", arguments.get("expected_batch_size", 1024))
        rate = check_rate(
            "expected_batch_size / expected_records",
            batch / check_int("expected_records", arguments.get("expected_records")),
        )
        delta = check_open_unit("delta", arguments.get("delta", 1e-5))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{place}: {one_line(error)}") from error
    steps = check_int("trainer.max_epochs", epochs) * steps_per_epoch(rate)
    settings = tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
    expected = float(len(settings)) if mean is None else check_finite("--mean", mean)
    score = Charge(DiscreteGaussian(score_noise, 1.0, 1.0))

    def search(noise: float) -> RepeatAndSelect:
        return RepeatAndSelect((Charge(step_mechanism(noise, 1.0, rate), steps), score), expected)

    noise = _noise_within(check_positive("--epsilon", epsilon), delta, search)
    base: dict[str, Any] = {name: merged(document.get(name) or {}, None) for name in ("data", "model")}
    trainer = {name: get(document, f"trainer.{name}") for name in ("accelerator", "precision")}
    base["trainer"] = {
        "max_epochs": epochs,
        "devices": 1,
        **{name: given for name, given in trainer.items() if given},
    }
    kept = {name: value for name, value in arguments.items() if name not in ("epsilon", "files")}
    settled = {**kept, "noise_multiplier": noise, "delta": delta}
    if place == _MODEL:
        put(base, place, settled)
    else:
        base["trainer"]["callbacks"] = [{"class_path": "PrivateTraining", "init_args": settled}]
    found = Tuning(base, settings, steps, delta, noise, search(noise))
    data = made_data(base["data"])
    for setting in settings:  # a setting that can't be read is found out before anything is paid
        made_training(found.candidate(setting), data, shown(setting))
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


def _place_of_training(document: Mapping[str, Any]) -> str:
    """Where the arguments of the private training stand."""
    if class_named(str(get(document, "model.class_path"))) is NoisySGD:
        return _MODEL
    own, others = training_sections(document)
    if len(own) != 1 or trains_itself(document):
        raise SpecError(
            "model.class_path: tune trains candidates by NoisySGD or by the callback PrivateTraining"
        )
    if others:
        raise SpecError(
            "trainer.callbacks: a search trains with PrivateTraining alone; leave other callbacks out"
        )
    arguments = own[0].get("init_args") or {}
    if given := [name for name in _UNPAID if arguments.get(name) is not None]:
        raise SpecError(f"{_CALLBACK}.{given[0]}: a search pays for steps and scores alone; leave it out")
    return _CALLBACK


def _check_path(path: str, place: str) -> None:
    for where in (_CALLBACK, _MODEL):
        if where in (_MODEL, place) and path.startswith(f"{where}."):
            # The module that a callback trains has no say in what a candidate costs.
            if where == place and path.removeprefix(f"{where}.").split(".")[0] in (*_FIXED, *_UNPAID):
                break
            return
    below = _MODEL if place == _MODEL else f"{_MODEL} or {_CALLBACK}"
    names = ", ".join(_FIXED)
    raise SpecError(
        f"--set {path}: want a path below {below} that changes nothing of a candidate's cost, so not of {names}"
    )
