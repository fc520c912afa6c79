"""Plans: what a configuration may release at most, and the value of one of its settings at which that costs ε.

The cost of a configuration is what the ``plan`` of its teacher, or of its private training, says; nothing is run, and
no private record is read.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser

from pl_privknn._checks import check_choice, check_int, check_positive, check_rate, shown
from pl_privknn.config import (
    ConfigurationError,
    class_named,
    get,
    instantiate,
    known_classes,
    made_by,
    merged,
    one_line,
    put,
)
from pl_privknn.labelers.base import stated_plan
from pl_privknn.labelers.statistics import MOST_RELEASES
from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Mechanism
from pl_privknn.privacy.verification import Releases

if TYPE_CHECKING:
    from pl_privknn._lightning import LightningModule
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.datamodules import PrivatePublicDataModule
    from pl_privknn.training import PrivateTraining

#: What has no part in a plan, and may be large, read files, or run other code.
_LEFT_OUT = ("features", "teachers", "network", "extractor", "feature_head", "augment", "views")
#: Sections that ε can depend on.
_SECTIONS = ("labeling", "model", "trainer")
_DIGITS = 6
_MOST = 10_000_000
#: Settings that ε grows with, by name: smallest and largest value. Whole limits are those of whole numbers.
_RISING: dict[str, tuple[float, float]] = {
    "epsilon": (1e-9, 1e6),
    "budget": (1e-9, 1e6),
    "sampling_rate": (1e-6, 1.0),
    "expected_batch_size": (1, _MOST),
    "batch_size": (1, _MOST),
    "releases": (1, MOST_RELEASES),
    **dict.fromkeys(
        ("queries_per_round", "max_answers", "rounds", "steps", "max_epochs", "max_steps"), (1, _MOST)
    ),
}
#: All others are taken for noise, which ε falls with.
_NOISE = (1e-2, 1e9)


@dataclasses.dataclass(frozen=True)
class FreeParameter:
    """The setting of a configuration that is found for an ε.

    Attributes:
        parameter: its dotted path.
        low: smallest value allowed.
        high: largest value allowed.
        rising: whether ε grows with it, as with a number of queries; ε falls with noise.
        whole: whether it is a whole number.
        exact: search on the exact worst case too (slower, a little less noise).
        tied: further settings, each a factor times the found one.
    """

    parameter: str
    low: float
    high: float
    rising: bool = False
    whole: bool = False
    exact: bool = False
    tied: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def values(self, value: float) -> dict[str, float]:
        """The setting and those tied to it, by their dotted paths."""
        chosen = int(value) if self.whole else value
        tied = {path: float(f"{factor * value:.{_DIGITS}g}") for path, factor in self.tied.items()}
        return {self.parameter: chosen, **tied}

    def filled(self, document: Mapping[str, Any], value: float) -> dict[str, Any]:
        """A copy of a configuration with :meth:`values` in it."""
        copy = merged(document, None)
        for path, chosen in self.values(value).items():
            put(copy, path, chosen)
        return copy

    def start(self, document: Mapping[str, Any]) -> float:
        """Where a search starts: at the configuration's own value, or in the middle."""
        stated = _number(document, self.parameter) or math.sqrt(self.low * self.high)
        return min(max(stated, self.low), self.high)


def free_parameter(
    document: Mapping[str, Any],
    path: str | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
    rising: bool = False,
    exact: bool = False,
    tied: Mapping[str, float] | None = None,
) -> FreeParameter:
    """A setting to look for, with the limits that go with its name unless others are given.

    Args:
        document: the configuration.
        path: dotted path of the setting; by default that which the teacher's or the training's class names.
        low: smallest value allowed.
        high: largest value allowed.
        rising: whether ε grows with it, for a name that is not known.
        exact: see :class:`FreeParameter`.
        tied: likewise. Where the class names the setting, a screening's noise is tied to that of the answers, as the
            configuration states both.

    Raises:
        ValueError: for limits that don't fit, or a configuration whose class names no such setting.
    """
    parameter = default_parameter(document) if path is None else path
    for place in (parameter, *(tied or {})):
        check_choice("the section of " + place, place.split(".")[0], _SECTIONS)
    ties = {**(_screenings(document, parameter) if path is None else {}), **(tied or {})}
    # Of a list, such as one of a number for each round, the list has the name.
    name = next((word for word in reversed(parameter.split(".")) if not word.isdigit()), "")
    lowest, highest = _RISING.get(name, _NOISE)
    whole = isinstance(highest, int)
    check = check_int if whole else check_rate if highest == 1 else check_positive
    lowest = lowest if low is None else check("low", low)
    highest = highest if high is None else check("high", high)
    if lowest >= highest:
        raise ValueError(f"low={lowest:g} must be below high={highest:g}")
    return FreeParameter(parameter, lowest, highest, rising or name in _RISING, whole, exact, ties)


def default_parameter(document: Mapping[str, Any]) -> str:
    """The dotted path of the setting that the class of a configuration's teacher, or private training, names.

    Raises:
        ConfigurationError: where there is none, or its section is not stated.
    """
    place = "labeling.labeler"
    if get(document, place) is None:
        place = next(private_trainings(document, known_classes().get), "")
    if not place:
        raise ConfigurationError(_NOTHING)
    return _named_by(document, place)


def _screenings(document: Mapping[str, Any], parameter: str) -> dict[str, float]:
    """Where a configuration states a screening's noise beside that of the answers, and the factor between them."""
    noise = _number(document, parameter)
    sections = parameter.split(".")[:-1]
    places = [".".join([*sections[:end], "screening.sigma"]) for end in range(2, len(sections) + 1)]
    stated = {place: _number(document, place) for place in places}
    return {place: value / noise for place, value in stated.items() if value and noise}


def _number(document: Mapping[str, Any], path: str) -> float | None:
    """The number above 0 at a dotted path; None where there is none."""
    stated = get(document, path)
    number = isinstance(stated, int | float) and not isinstance(stated, bool)
    return stated if number and 0 < stated < math.inf else None


def _named_by(document: Mapping[str, Any], place: str) -> str:
    section = get(document, place)
    name = section.get("class_path") if isinstance(section, Mapping) else section
    found = known_classes().get(str(name))
    names: tuple[str, ...] = getattr(found, "free_parameters", ())
    if found is not None and issubclass(found, Mechanism):
        names = (dataclasses.fields(found)[0].name,)  # type: ignore[arg-type]
    if not names:
        raise ConfigurationError(
            f"{place}={shown(name)}: its class names no setting to look for; name one (--find PATH)"
        )
    arguments = f"{place}.init_args"
    chosen = next((name for name in names if get(document, f"{arguments}.{name}") is not None), names[0])
    inner = get(document, f"{arguments}.{chosen}")
    if isinstance(inner, Mapping | str):
        return _named_by(document, f"{arguments}.{chosen}")
    wanted = inspect.signature(found).parameters.get(chosen) if found is not None else None
    if inner is None and wanted is not None and "float" not in str(wanted.annotation):
        raise ConfigurationError(
            f"{arguments}.{chosen} is not stated; write its class and arguments out, or name another setting "
            "(--find PATH)"
        )
    return f"{arguments}.{chosen}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A configuration that keeps an ε, by one of its settings.

    Attributes:
        found: dotted path of the setting that was looked for.
        values: what was set, by dotted paths; the found setting first.
        target: ε that was asked for.
        report: what the configuration costs.
        charges: the most that it may release.
        document: the configuration with ``values`` in it.
    """

    found: str
    values: Mapping[str, float]
    target: float
    report: PrivacyReport
    charges: tuple[Charge, ...]
    document: Mapping[str, Any] = dataclasses.field(repr=False)

    @property
    def epsilon(self) -> float:
        """The guarantee: the smallest valid total."""
        return self.report.epsilon

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        records = [charge.to_record() for charge in self.charges]
        stated = {"found": self.found, "values": dict(self.values), "target": self.target}
        return {**stated, **self.report.to_dict(), "records": records}


class Cost:
    """Cost of configurations with one ``data`` section.

    Args:
        data: the section; None for a fragment, whose number of classes is then given.
        path: where the configuration came from, for messages.
        num_classes: number of classes, where no data section tells it.
        own_code: let sections name classes of other packages, whose code then runs; files of strangers may not.
    """

    def __init__(
        self, data: Any, path: str | Path, num_classes: int | None = None, own_code: bool = False
    ) -> None:
        self.path, self.own_code = path, own_code
        self._section = data
        self._stated = None if num_classes is None else check_int("num_classes", num_classes, minimum=2)

    def releases(self, document: Mapping[str, Any]) -> Releases:
        """The most that a configuration may release.

        Raises:
            ConfigurationError: for sections that don't parse, name classes that may not be named, or say too little.
        """
        try:
            places = list(private_trainings(document, self._class))
            labeling = document.get("labeling")
            if labeling is not None:
                made = self._made({"labeling": labeling}, "labeling")
                if made.labeler is not None:
                    if places:
                        raise ConfigurationError(
                            f"{places[0]} trains on the private records and asks no teacher; leave labeling.labeler "
                            "out"
                        )
                    charges = labeling_plan(made, self.num_classes, lambda: self.public_examples)
                    return Releases(tuple(charges), made.delta, made.adjacency, made.unit)
            if not places:
                raise ConfigurationError(_NOTHING)
            training = self._made(document, places[0])
            training = getattr(training, "private_training", training)  # of a NoisySGD
            steps = planned_steps(document.get("trainer") or {}, training.steps_per_epoch)
            return Releases(tuple(training.plan(steps)), training.delta, "add_remove", training.unit)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.path}: {error}") from error

    def plan(
        self,
        document: Mapping[str, Any],
        free: FreeParameter,
        epsilon: float,
        delta: float | None = None,
        adjacency: Adjacency | None = None,
        exact: bool = True,
    ) -> Plan:
        """Find the value of a setting at which a configuration keeps ε.

        Args:
            document: the configuration.
            free: the setting.
            epsilon: target ε.
            delta: target δ; the configuration's own by default.
            adjacency: neighbouring relation; likewise.
            exact: state the exact worst case too.

        Raises:
            ValueError: as :meth:`releases`; also where the target can't be met.
        """
        epsilon, start = check_positive("epsilon", epsilon), free.start(document)
        if free.parameter.endswith(".epsilon"):  # a class that finds its noise itself keeps it, as a rule
            start = min(max(epsilon, free.low), free.high)
        stated = self.releases(free.filled(document, start))
        delta, adjacency = stated.delta if delta is None else delta, adjacency or stated.adjacency
        assert delta is not None
        assert adjacency is not None
        found = calibrate(
            lambda value: self.releases(free.filled(document, value)).charges,
            Parameter(free.parameter, start, free.low, free.high, free.rising, free.whole),
            epsilon=epsilon,
            delta=delta,
            adjacency=adjacency,
            exact=exact,
            exact_search=free.exact,
        )
        filled = free.filled(document, found.value)
        values = free.values(found.value)
        report = dataclasses.replace(found.report, unit=stated.unit or "record")
        return Plan(free.parameter, values, epsilon, report, found.charges, filled)

    @functools.cached_property
    def num_classes(self) -> int:
        """Number of classes: as given, as the data section states it, or as its data module does."""
        if self._stated is not None:
            return self._stated
        if self._section is None:
            raise ConfigurationError(
                "num_classes=None: there is no data section that tells it; pass it (--num-classes)"
            )
        stated = get(self._section, "init_args.num_classes")
        return int(self.data.num_classes) if stated is None else check_int("data.num_classes", stated, 2)

    @functools.cached_property
    def public_examples(self) -> int:
        """Size of the public set, which is read for it."""
        return len(self.data.load_public())

    @functools.cached_property
    def data(self) -> PrivatePublicDataModule:
        """The data module, of this project."""
        from pl_privknn.datamodules.base import PrivatePublicDataModule

        section = self._section
        if section is None:
            raise ConfigurationError(
                "there is no data section, which tells the classes and, for selection: all, the number of queries"
            )
        found: Any = self._made(
            {"data": {"class_path": section} if isinstance(section, str) else section}, "data"
        )
        if not isinstance(found, PrivatePublicDataModule):
            raise ConfigurationError(f"data.class_path={shown(type(found).__name__)} must name a data module")
        return found

    def _class(self, name: Any) -> type | None:
        return class_named(str(name)) if self.own_code else known_classes().get(str(name))

    def _made(self, document: Mapping[str, Any], place: str) -> Any:
        """The object of a section, without what has no part in a plan."""
        from pl_privknn.callbacks import PrivateLabeler

        section = _without(get(document, place))
        own_classes = not self.own_code
        if place == "labeling":
            return instantiate({place: section}, {place: PrivateLabeler}, own_classes).labeling
        if not isinstance(section, Mapping) or set(section) - {"class_path", "init_args"}:
            raise ConfigurationError(
                f"{place}={shown(section)} must have a class_path, and its arguments as init_args"
            )
        found = self._class(section.get("class_path"))
        if found is None:
            raise ConfigurationError(
                f"{place}.class_path={shown(section.get('class_path'))} is not a class"
                f"{' of this project; run privknn fit and audit its ledger instead' if own_classes else ''}"
            )
        return instantiate({"made": section.get("init_args") or {}}, {"made": found}, own_classes).made


def plan_of_config(document: dict[str, Any], path: str | Path, num_classes: int | None = None) -> Releases:
    """The plan that a configuration states before its first query, or its first step.

    Only the project's own classes may be named, and of the data nothing but the number of classes is asked; where a
    teacher's cost depends on the number of public examples and all are asked about, also that.

    Args:
        document: the configuration, or a fragment of it.
        path: where it came from, for messages.
        num_classes: number of classes, for a fragment without ``data``.

    Raises:
        ConfigurationError: for sections that don't parse, name other classes, or say too little.
    """
    return Cost(document.get("data"), path, num_classes).releases(document)


def labeling_plan(
    labeling: PrivateLabeler, num_classes: int, public_examples: int | Callable[[], int]
) -> list[Charge]:
    """The most that a labeling section can cost.

    Args:
        labeling: the section's callback.
        num_classes: number of classes.
        public_examples: size of the public set; called for only where the cost of asking about all depends on it.
    """
    labeler = labeling.labeler
    assert labeler is not None
    if not labeling.selects_all:
        queries = sum(labeling.queries_per_round)
        # As the callback states it: a round of no queries smooths earlier counts anew and releases nothing.
        return _charges(labeling, queries, num_classes, sum(map(bool, labeling.queries_per_round)))
    few, many = (_charges(labeling, n, num_classes, labeling.rounds) for n in (2, 10**6))
    if few == many:
        return many
    size = public_examples() if callable(public_examples) else public_examples
    return _charges(labeling, size * labeling.rounds, num_classes, labeling.rounds)


def _charges(labeling: PrivateLabeler, queries: int, num_classes: int, rounds: int) -> list[Charge]:
    assert labeling.labeler is not None
    answers = queries if labeling.max_answers is None else min(labeling.max_answers, queries)
    return stated_plan(labeling.labeler, queries, answers, num_classes, rounds=rounds)


def planned_steps(trainer: Mapping[str, Any], steps_per_epoch: int) -> int:
    """Steps that a trainer takes, by its section of a configuration.

    Args:
        trainer: the section; 20 epochs are the command's own default.
        steps_per_epoch: of a loader that is not cut short.

    Raises:
        ConfigurationError: for a number of steps that is not known beforehand.
    """
    if not isinstance(trainer, Mapping):
        raise ConfigurationError(f"trainer={shown(trainer)}: want a section of settings, such as max_epochs")
    limit = trainer.get("limit_train_batches")
    if isinstance(limit, float) and not (limit > 1 and limit.is_integer()):  # as Lightning reads it
        steps_per_epoch = int(check_rate("trainer.limit_train_batches", limit) * steps_per_epoch)
    elif limit is not None:
        steps_per_epoch = min(check_int("trainer.limit_train_batches", limit), steps_per_epoch)
    most = trainer.get("max_steps", -1)
    bounded = most not in (None, -1)
    epochs = trainer.get("max_epochs", 20)
    if epochs is None:  # Lightning's own default
        epochs = -1 if bounded else 1000
    steps = math.inf if epochs == -1 else check_int("trainer.max_epochs", epochs) * steps_per_epoch
    steps = min(steps, check_int("trainer.max_steps", most)) if bounded else steps
    if not math.isfinite(steps):
        raise ConfigurationError(
            "trainer.max_epochs=-1: the number of steps is part of the guarantee; set max_epochs or max_steps"
        )
    return check_int("trainer steps", steps)


_NOTHING = (
    "there is no labeler in labeling, no NoisySGD as model and no PrivateTraining among trainer.callbacks, so there "
    "is no cost to state"
)


def private_trainings(
    document: Mapping[str, Any], class_of: Callable[[str], type | None] = class_named
) -> Iterator[str]:
    """Dotted paths of the sections that train on the private records themselves.

    Args:
        document: the configuration.
        class_of: finds a class by its name; by default also those of other packages, which are imported.
    """
    from pl_privknn.training import NoisySGD, PrivateTraining

    callbacks = get(document, "trainer.callbacks")
    count = len(callbacks) if isinstance(callbacks, list) else 0
    for place in ("model", "trainer.callbacks", *(f"trainer.callbacks.{number}" for number in range(count))):
        found = class_of(str(get(document, f"{place}.class_path")))
        if found is not None and issubclass(found, NoisySGD | PrivateTraining):
            yield place


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a configuration trains on the private records itself."""
    return "labeling" not in document and any(private_trainings(document))


def made_data(section: Mapping[str, Any]) -> Any:
    """The data module of a configuration, of whatever package.

    Raises:
        ConfigurationError: for a section that does not parse.
    """
    from pl_privknn import _lightning as pl

    known_classes()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.both("LightningDataModule"), "data")
    try:
        return made_by(parser, {"data": merged(section, None)}).data
    except (ArgumentError, TypeError, ValueError) as error:
        raise ConfigurationError(f"data: {one_line(error)}") from error


def made_training(
    document: Mapping[str, Any], data: Any, name: str
) -> tuple[LightningModule, PrivateTraining]:
    """The module, and the callback that trains it, which may be the module's own.

    A module's classes, task and image size are those of the data where its class asks for them and the file does not
    say.

    Args:
        document: the configuration of a private training.
        data: the data module.
        name: of the training, for messages.

    Raises:
        ConfigurationError: for sections that don't parse.
    """
    from pl_privknn.training import PrivateTraining

    section = document.get("model")
    if not isinstance(section, Mapping) or "class_path" not in section:
        raise ConfigurationError(f"{name}: model: want a class_path, and its arguments as init_args")
    made = class_named(str(section["class_path"]))
    if made is None:
        raise ConfigurationError(
            f"{name}: model.class_path={section['class_path']!r} is no class that can be imported"
        )
    channels, _, side = data.image_shape
    stated = {"num_classes": data.num_classes, "task": data.task, "in_channels": channels, "image_size": side}
    asked = inspect.signature(made).parameters
    arguments = {key: value for key, value in stated.items() if key in asked}
    place = next(private_trainings(document))
    try:
        module = instantiate(
            {"model": arguments | merged(section.get("init_args") or {}, None)}, {"model": made}
        ).model
        if place == "model":
            return module, module.private_training
        callback = {"training": get(document, f"{place}.init_args") or {}}
        return module, instantiate(callback, {"training": PrivateTraining}).training
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _without(section: Any) -> Any:
    """A copy without what has no part in a plan."""
    if not isinstance(section, Mapping):
        return section
    return {name: _without(value) for name, value in section.items() if name not in _LEFT_OUT}
