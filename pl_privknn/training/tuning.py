"""Paid search over settings of a private training: plan and run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_finite, check_int, check_positive, check_rate, shown
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.config import ConfigurationError, as_group, class_named, get, merged, one_line, put
from pl_privknn.privacy.accounting.calibration import CalibrationError, Parameter, calibrate
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.mechanisms import Charge, Gaussian, RepeatAndSelect
from pl_privknn.privacy.mechanisms.base import noise_guarantee
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.noisy_steps import step_mechanism, steps_per_epoch
from pl_privknn.privacy.private_store import FILE_NAME, PrivateStore
from pl_privknn.privacy.redaction import redacted, silenced
from pl_privknn.privacy.run import FactsFile, Run
from pl_privknn.privacy.settings import Budget
from pl_privknn.training.configured import made_data, made_training, private_trainings
from pl_privknn.training.noisy_sgd import NoisySGD

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_MODEL, _CALLBACK = "model.init_args", "trainer.callbacks.0.init_args"
#: What the cost of a candidate depends on, and the places of its files.
_FIXED = (
    "budget", "noise_multiplier", "expected_batch_size", "private_records", "run_dir",
    "options.ledger_path", "options.ledger_head_path", "options.steps_per_charge", "options.noise_source",
)  # fmt: skip
#: What changes what the steps cost.
_UNPAID = ("groups",)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Search for the best of a random number of private trainings with random settings.

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
    def score(self) -> Gaussian:
        """The release of a candidate's score, a count of right predictions."""
        found = self.mechanism.candidate[1].mechanism
        assert isinstance(found, Gaussian)
        return found

    def candidate(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of a candidate."""
        document = merged(self.document, None)
        for path, value in setting.items():
            put(document, path, value)
        return document

    def plan(self) -> dict[str, Any]:
        """The search as plain types, for the ledger's reader and to identify it on resume."""
        return {
            "tuning": "NoisySGD" if "callbacks" not in self.document["trainer"] else "PrivateTraining",
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
    """Read a search and find the noise with which it costs ``epsilon`` in all.

    Args:
        document: configuration of a training by :class:`~pl_privknn.training.noisy_sgd.NoisySGD` or
            :class:`~pl_privknn.training.private_training.PrivateTraining`.
        values: for each dotted path below ``model.init_args``, or below ``trainer.callbacks.0.init_args`` where that
            is ``PrivateTraining``, the values to draw from.
        epsilon: of the whole search.
        mean: expected number of candidates; by default as many as there are settings.
        score_noise: parameter σ of the noise on a candidate's count of right predictions.

    Raises:
        ConfigurationError: for another model, settings that change its cost, and what does not parse.
        CalibrationError: where no noise meets ``epsilon``.
    """
    place = _place_of_training(document)
    arguments = get(document, place) or {}
    options = arguments.get("options") or {}
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"{place}.options={shown(options)} must be a section of arguments")
    if options.get("noise_source") is not None:
        raise ConfigurationError(
            f"{place}.options.noise_source: a search draws from the operating system's generator; leave it out"
        )
    for path in values:
        _check_path(path, place)
    epochs = get(document, "trainer.max_epochs")
    if get(document, "trainer.max_steps") not in (None, -1) or epochs is None:
        raise ConfigurationError(
            "trainer.max_epochs: the number of steps is part of the guarantee; give it, and no max_steps"
        )
    try:
        batch = check_int("expected_batch_size", arguments.get("expected_batch_size", 1024))
        rate = check_rate(
            "expected_batch_size / private_records",
            batch / check_int("private_records", arguments.get("private_records")),
        )
        delta = as_group("budget", arguments.get("budget"), Budget()).delta
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{place}: {one_line(error)}") from error
    steps = check_int("trainer.max_epochs", epochs) * steps_per_epoch(rate)
    settings = tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
    expected = float(len(settings)) if mean is None else check_finite("--mean", mean)
    score = Charge(Gaussian(score_noise, 1.0, 1.0))

    def search(noise: float) -> RepeatAndSelect:
        return RepeatAndSelect((Charge(step_mechanism(noise, 1.0, rate), steps), score), expected)

    try:
        noise = calibrate(
            lambda noise: [Charge(search(noise))],
            Parameter("noise_multiplier", 1.0, _LEAST_NOISE, _MOST_NOISE, rising=False),
            epsilon=check_positive("--epsilon", epsilon),
            delta=delta,
            exact=False,
        ).value
    except CalibrationError as error:
        raise CalibrationError(
            f"--epsilon {epsilon}: {error}; give candidates' scores more noise (--score-noise), or a smaller --mean"
        ) from error
    base: dict[str, Any] = {name: merged(document.get(name) or {}, None) for name in ("data", "model")}
    trainer = {name: get(document, f"trainer.{name}") for name in ("accelerator", "precision")}
    base["trainer"] = {
        "max_epochs": epochs,
        "devices": 1,
        **{name: given for name, given in trainer.items() if given},
    }
    kept = {name: value for name, value in arguments.items() if name not in ("budget", "run_dir")}
    kept["options"] = {
        name: value for name, value in options.items() if name not in ("ledger_path", "ledger_head_path")
    }
    settled = {**kept, "noise_multiplier": noise, "budget": {"delta": delta}}
    if place == _MODEL:
        put(base, place, settled)
    else:
        base["trainer"]["callbacks"] = [{"class_path": "PrivateTraining", "init_args": settled}]
    found = Tuning(base, settings, steps, delta, noise, search(noise))
    data = made_data(base["data"])
    for setting in settings:  # a setting that can't be read is found out before anything is paid
        made_training(found.candidate(setting), data, shown(setting))
    return found


def _place_of_training(document: Mapping[str, Any]) -> str:
    """Section that holds the arguments of the private training."""
    places = list(private_trainings(document))
    if places == ["model"] and class_named(str(get(document, "model.class_path"))) is NoisySGD:
        return _without_unpaid(_MODEL, get(document, _MODEL))
    if len(places) != 1 or places[0] == "model":
        raise ConfigurationError(
            "model.class_path: tune trains candidates by NoisySGD or by the callback PrivateTraining"
        )
    callbacks = get(document, "trainer.callbacks")
    if isinstance(callbacks, list) and len(callbacks) > 1:
        raise ConfigurationError(
            "trainer.callbacks: a search trains with PrivateTraining alone; leave other callbacks out"
        )
    return _without_unpaid(_CALLBACK, get(document, f"{places[0]}.init_args"))


def _without_unpaid(place: str, arguments: Any) -> str:
    """Section of a training's arguments, checked for settings whose cost the search does not cover."""
    if given := [name for name in _UNPAID if (arguments or {}).get(name) is not None]:
        raise ConfigurationError(
            f"{place}.{given[0]}: a search is charged for steps and scores only; leave it out"
        )
    return place


def _check_path(path: str, place: str) -> None:
    for where in (_CALLBACK, _MODEL):
        if where in (_MODEL, place) and path.startswith(f"{where}."):
            # The module that a callback trains has no say in what a candidate costs.
            first, *rest = path.removeprefix(f"{where}.").split(".")
            stated = {first, ".".join([first, *rest[:1]])}
            if where == place and (stated & {*_FIXED, *_UNPAID} or stated == {"options"}):
                break
            return
    below = _MODEL if place == _MODEL else f"{_MODEL} or {_CALLBACK}"
    names = ", ".join(_FIXED)
    raise ConfigurationError(
        f"--set {path}: expected a path below {below} that changes nothing of a candidate's cost, so not of {names}"
    )


_SEARCH, _RESULT, _CHECKPOINT, _BEST = "tuning.json", "result.json", "model.ckpt", "best.yaml"
# How many candidates there are, and all but the best of them, must never be seen.
_SECRET = ".candidates"
_SCHEMA = "CREATE TABLE best (only INTEGER PRIMARY KEY CHECK (only = 1), model BLOB NOT NULL);"


class TuningRun(Run):
    """Search in a folder, started or continued; see :func:`~pl_privknn.training.tuning.tuning_of`.

    The whole search is one charge, written before the first candidate is trained. What only the search may know (how
    many candidates there are, their scores, the best one so far) lies in a folder that its owner alone may read, and
    is deleted at the end. A candidate that a crash interrupts is trained anew, since nothing of it was shown.

    Args:
        tuning: what to search.
        output: folder of the search.
        ledger_path: a ledger that several runs over the same records share; the folder's own if None.
        max_epsilon: budget of the ledger; a search that passes it is refused before anything is drawn.
        noise: source of all coins and noise.

    Raises:
        BudgetExceeded: if the search does not fit the ledger's budget; for others see
            :class:`~pl_privknn.privacy.run.Run`.
    """

    def __init__(
        self,
        tuning: Tuning,
        output: Path,
        ledger_path: Path | None = None,
        max_epsilon: float | None = None,
        noise: NoiseSource | None = None,
    ) -> None:
        self.tuning, self.output = tuning, output
        self.noise = default_noise() if noise is None else noise
        super().__init__(
            output,
            lambda: FactsFile(output / _SEARCH),
            tuning.plan(),
            budget=Budget(max_epsilon, tuning.delta),
            ledger_path=ledger_path,
        )

    def plan(self) -> tuple[Sequence[Charge], dict[str, Any]]:
        """Plan of the whole search as one charge."""
        return [Charge(self.tuning.mechanism).with_guarantee(noise_guarantee(self.noise))], self.tuning.plan()

    def run(self) -> dict[str, Any]:
        """Search, and return what ``result.json`` says: the best setting, its noisy score, ε.

        Raises:
            ValueError: for a folder whose search is paid for and its state lost.
        """
        try:
            if (self.output / _RESULT).is_file():
                shutil.rmtree(self.output / _SECRET, ignore_errors=True)
                return dict(json.loads((self.output / _RESULT).read_text(encoding="utf-8")))
            with contextlib.closing(self._paid()) as store:
                state = store.fact("state")
                with silenced():  # a candidate's output would reveal their number
                    data = made_data(self.tuning.document["data"])
                    while state["done"] < len(state["drawn"]):
                        self._try_next(store, state, data)
                result = self._finish(store, state)
            shutil.rmtree(self.output / _SECRET)
            return result
        finally:
            self.close()

    def _paid(self) -> PrivateStore:
        """Draw the candidates and charge the search, or continue one that is charged."""
        run, run_id = self.ledger_run, self.run_id
        store = PrivateStore(self.output / _SECRET / FILE_NAME, _SCHEMA, one_place=False)
        try:
            if store.fact("state") is None:
                if run.num_charges:
                    raise ValueError(
                        f"--output {self.output}: its search is paid for and its state is lost; choose "
                        "another folder for a new search, which is charged again"
                    )
                count = self.tuning.mechanism.draw_count(self.noise.stream("count", run_id))
                drawn = (
                    self.noise.stream("settings", run_id).integers(count, len(self.tuning.settings)).tolist()
                )
                store.note("seeded", not self.noise.cryptographic)
                store.note("state", {"drawn": drawn, "done": 0, "setting": None, "score": None})
            if store.fact("seeded") == self.noise.cryptographic:
                came = "from a seed" if store.fact("seeded") else "from the operating system"
                raise ValueError(
                    f"--output {self.output}: the one charge of its search says that all noise comes {came}; "
                    "continue as it began, or choose another folder for a new search, which is charged again"
                )
            if not run.num_charges:
                run.charge(self.tuning.mechanism, noise=self.noise, adjacencies=("add_remove",))
        except BaseException:
            store.close()
            raise
        return store

    def _try_next(self, store: PrivateStore, state: dict[str, Any], data: Any) -> None:
        place = state["done"]
        folder = self.output / _SECRET / "run"
        shutil.rmtree(folder, ignore_errors=True)
        document = self.tuning.candidate(self.tuning.settings[state["drawn"][place]])
        module, callback = made_training(document, data, "a candidate")
        callback.run_dir = folder
        callback.noise_source = self.noise.stream("candidate", place)
        callbacks = [] if isinstance(module, NoisySGD) else [callback]
        trainer = pl.package_of(module, data).Trainer(
            **{**document["trainer"], "callbacks": callbacks}, default_root_dir=folder, **TRAINS_ALONE
        )
        trainer.fit(module, data)
        if callback.planned_steps != self.tuning.steps:
            raise ValueError(
                f"trainer: a candidate planned {callback.planned_steps} steps, the search {self.tuning.steps}"
            )
        right = redacted(_right, module, data)
        score = int(self.tuning.score.add_noise(right, self.noise.stream("score", place)))
        state["done"] = place + 1
        with store.writing() as db:
            if state["score"] is None or score > state["score"]:
                buffer = io.BytesIO()
                torch.save({"state_dict": module.state_dict()}, buffer)
                db.execute("INSERT OR REPLACE INTO best VALUES (1, ?)", (buffer.getvalue(),))
                state.update(setting=self.tuning.settings[state["drawn"][place]], score=score)
            store.note("state", state)

    def _finish(self, store: PrivateStore, state: dict[str, Any]) -> dict[str, Any]:
        report = self.ledger.report()
        result = {
            "setting": state["setting"],
            "right_noisy": state["score"],
            "epsilon": report.epsilon,
            "delta": self.tuning.delta,
            "guarantee": report.guarantee.guarantee,
            "noise_multiplier": self.tuning.noise_multiplier,
            "steps": self.tuning.steps,
        }
        write_durably(self.output / _CHECKPOINT, store.read("SELECT model FROM best").fetchone()[0])
        document = merged(self.tuning.candidate(state["setting"]), None)
        write_durably(self.output / _BEST, yaml.safe_dump(document, sort_keys=False))
        write_durably(self.output / _RESULT, json.dumps(result, indent=2) + "\n")
        return result


@torch.no_grad()
def _right(module: pl.LightningModule, data: Any) -> torch.Tensor:
    """Number of private records predicted correctly, int64 ``(1,)``; a record changes it by 1.

    Each is predicted alone, on a copy of the module, so that no other record has a say in it.
    """
    total = 0
    for x, y in data.private_batches():
        for image, label in zip(x.split(1), y, strict=True):
            alone = copy.deepcopy(module, {id(module._trainer): None}).eval()
            with contextlib.suppress(Exception):  # a prediction that fails counts as wrong, without a message
                total += int(alone(image.to(module.device)).reshape(-1).argmax()) == int(label)
    return torch.tensor([total])
