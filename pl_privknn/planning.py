"""Plans of configurations: the releases they are charged for, and calibration of a setting to a target ε.

The cost of a configuration is the ``plan`` of its teacher or private training; nothing is run, and no private record
is read.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import (
    MAX_EPSILON,
    MIN_EPSILON,
    check_choice,
    check_int,
    check_positive,
    check_rate,
    shown,
)
from pl_privknn.config import (
    ConfigurationError,
    build,
    class_named,
    get,
    known_class,
    merged_sections,
    put,
)
from pl_privknn.labelers.base import SpendsBudget, stated_plan
from pl_privknn.labelers.released_sums import MOST_RELEASES
from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism
from pl_privknn.privacy.verify import Releases

if TYPE_CHECKING:
    from pl_privknn.callbacks.private_labeler import PrivateLabeler

# What has no part in a plan, and may be large, read files, or run other code.
_LEFT_OUT = ("features", "teachers", "network", "extractor", "feature_head", "augment", "views")
# Classes that train on the private records, by name: their import takes long.
_TRAININGS = {
    "pl_privknn.training.noisy_sgd.NoisySGD",
    "pl_privknn.training.private_training.PrivateTraining",
}
#: Sections that ε can depend on.
_SECTIONS = ("labeling", "model", "trainer")
_DIGITS = 6
_MOST = 10_000_000
#: Settings that increase ε, by name, with smallest and largest value; integer limits mark integer settings.
_RISING: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("epsilon", "rho"), (MIN_EPSILON, MAX_EPSILON)),
    "sampling_rate": (1e-6, 1.0),
    "expected_batch_size": (1, _MOST),
    "batch_size": (1, _MOST),
    "releases": (1, MOST_RELEASES),
    **dict.fromkeys(
        ("queries_per_round", "max_answers", "rounds", "steps", "max_epochs", "max_steps"), (1, _MOST)
    ),
}
#: Limits of all other settings, which are assumed to be noise, which lowers ε.
_NOISE = (1e-2, 1e9)


def private_trainings(document: Mapping[str, Any], own_code: bool = True) -> Iterator[str]:
    """Dotted paths of the sections that train on the private records themselves.

    Args:
        document: the configuration.
        own_code: import classes of other packages too.
    """
    callbacks = get(document, "trainer.callbacks")
    count = len(callbacks) if isinstance(callbacks, list) else 0
    for place in ("model", "trainer.callbacks", *(f"trainer.callbacks.{number}" for number in range(count))):
        found = _class(get(document, f"{place}.class_path"), own_code)
        parents = [f"{kind.__module__}.{kind.__name__}" for kind in getattr(found, "__mro__", ())]
        if not _TRAININGS.isdisjoint(parents):
            yield place


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a configuration trains on the private records itself."""
    return "labeling" not in document and any(private_trainings(document))


def default_parameter(document: Mapping[str, Any], own_code: bool = False) -> str:
    """Dotted path of the default setting to calibrate, named by the class of the teacher or private training.

    Args:
        document: the configuration.
        own_code: see :func:`plan_of`.

    Raises:
        ConfigurationError: where there is none, or its section is not stated.
    """
    place = "labeling.labeler"
    if get(document, place) is None:
        place = next(private_trainings(document, own_code), "")
    if not place:
        raise ConfigurationError(_NOTHING)
    found = _class(get(document, f"{place}.class_path") or get(document, place), own_code)
    if found is not None and issubclass(found, SpendsBudget):
        arguments = f"{place}.init_args"
        if all(get(document, f"{arguments}.{name}") is None for name in found.free_parameters):
            own = get(document, f"{arguments}.budget.epsilon") is not None
            return f"{arguments}.budget.epsilon" if own else "labeling.budget.epsilon"
    return _named_by(document, place, own_code)


def _screenings(document: Mapping[str, Any], parameter: str) -> dict[str, float]:
    """Path of a screening's noise in a configuration, and its ratio to the noise of the answers."""
    noise = _number(document, parameter)
    sections = parameter.split(".")[:-1]
    places = [
        ".".join([*sections[:end], "screening.noise", *form, "sigma"])
        for end in range(2, len(sections) + 1)
        for form in ((), ("init_args",))
    ]
    stated = {place: _number(document, place) for place in places}
    return {place: value / noise for place, value in stated.items() if value and noise}


def _number(document: Mapping[str, Any], path: str) -> float | None:
    """Positive number at a dotted path; None where there is none."""
    stated = get(document, path)
    number = isinstance(stated, int | float) and not isinstance(stated, bool)
    return stated if number and 0 < stated < math.inf else None


def _named_by(document: Mapping[str, Any], place: str, own_code: bool) -> str:
    section = get(document, place)
    name = section.get("class_path") if isinstance(section, Mapping) else section
    found = _class(name, own_code)
    names: tuple[str, ...] = getattr(found, "free_parameters", ())
    if found is not None and issubclass(found, Mechanism):
        names = (dataclasses.fields(found)[0].name,)  # type: ignore[arg-type]
    if not names:
        raise ConfigurationError(
            f"{place}={shown(name)}: its class names no setting to calibrate; name one (--find PATH)"
        )
    arguments = f"{place}.init_args"
    chosen = next((name for name in names if get(document, f"{arguments}.{name}") is not None), names[0])
    inner = get(document, f"{arguments}.{chosen}")
    if isinstance(inner, Mapping | str):
        return _named_by(document, f"{arguments}.{chosen}", own_code)
    wanted = inspect.signature(found).parameters.get(chosen) if found is not None else None
    if inner is None and wanted is not None and "float" not in str(wanted.annotation):
        raise ConfigurationError(
            f"{arguments}.{chosen} is not stated; write its class and arguments out, or name another setting "
            "(--find PATH)"
        )
    return f"{arguments}.{chosen}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Configuration with one of its settings calibrated to a target ε.

    Attributes:
        found: dotted path of the calibrated setting.
        values: values set, by dotted paths; the calibrated setting first.
        target: target ε.
        report: cost of the configuration.
        charges: its planned releases.
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
        """ε of the guarantee: the smallest valid bound."""
        return self.report.epsilon

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        records = [charge.to_record() for charge in self.charges]
        stated = {"found": self.found, "values": dict(self.values), "target": self.target}
        return {**stated, **self.report.to_dict(), "records": records}


def plan_of(
    document: Mapping[str, Any], source: str | Path, num_classes: int | None = None, own_code: bool = False
) -> Releases:
    """Planned releases of a configuration, before its first query or step.

    The data module is only used for the number of classes and, where a teacher's cost depends on it and all public
    examples are queried, the number of public examples.

    Args:
        document: the configuration, or a fragment of it.
        source: its file, for messages.
        num_classes: number of classes, for a fragment without ``data``.
        own_code: allow classes of other packages, whose code then runs; not for files from an untrusted source.

    Raises:
        ConfigurationError: for sections that don't parse, name disallowed classes, or are incomplete.
    """
    return _releases(document, source, _Data(document.get("data"), num_classes, own_code))


def solve(
    document: Mapping[str, Any],
    path: str | None,
    epsilon: float,
    *,
    source: str | Path,
    low: float | None = None,
    high: float | None = None,
    rising: bool = False,
    tied: Mapping[str, float] | None = None,
    delta: float | None = None,
    adjacency: Adjacency | None = None,
    exact: bool = True,
    num_classes: int | None = None,
    own_code: bool = False,
) -> Plan:
    """Calibrate a setting of a configuration to a target ε.

    Args:
        document: the configuration.
        path: dotted path of the setting; None for the one that the class of the teacher, or of the training, names.
            A screening's noise then keeps its ratio to the noise of the answers.
        epsilon: target ε.
        source: see :func:`plan_of`.
        low: smallest value allowed; the default depends on the setting's name, as for ``high``.
        high: largest value allowed.
        rising: whether ε grows with the setting, for a name that is not known.
        tied: further settings, as factors of the calibrated one.
        delta: target δ; the configuration's own by default.
        adjacency: neighbouring relation; the configuration's own by default.
        exact: compute and calibrate by the exact worst case too (slower, slightly less noise).
        num_classes: see :func:`plan_of`.
        own_code: see :func:`plan_of`.

    Raises:
        ValueError: as :func:`plan_of`; also for invalid limits, and where the target can't be met.
    """
    epsilon = check_positive("epsilon", epsilon)
    name = default_parameter(document, own_code) if path is None else path
    ties = {**(_screenings(document, name) if path is None else {}), **(tied or {})}
    for place in (name, *ties):
        check_choice("the section of " + place, place.split(".")[0], _SECTIONS)
    parameter = parameter_of(document, name, low=low, high=high, rising=rising, epsilon=epsilon)
    data = _Data(document.get("data"), num_classes, own_code)

    def values(value: float) -> dict[str, float]:
        chosen = int(value) if parameter.whole else value
        return {name: chosen, **{at: float(f"{factor * value:.{_DIGITS}g}") for at, factor in ties.items()}}

    def filled(value: float) -> dict[str, Any]:
        copy = merged_sections(document, None)
        for at, chosen in values(value).items():
            put(copy, at, chosen)
        return copy

    stated = _releases(filled(parameter.start), source, data)
    delta, adjacency = stated.delta if delta is None else delta, adjacency or stated.adjacency
    assert delta is not None
    assert adjacency is not None
    found = calibrate(
        lambda value: _releases(filled(value), source, data).charges,
        parameter,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        exact=exact,
    )
    report = dataclasses.replace(found.report, unit=stated.unit or "record")
    return Plan(name, values(found.value), epsilon, report, found.charges, filled(found.value))


def parameter_of(
    document: Mapping[str, Any],
    path: str,
    *,
    low: float | None = None,
    high: float | None = None,
    rising: bool = False,
    epsilon: float | None = None,
) -> Parameter:
    """Parameter that :func:`solve` calibrates, starting at the configuration's value or the middle of the limits.

    Args:
        document: the configuration.
        path: see :func:`solve`, as for the others.
        low: smallest value allowed.
        high: largest value allowed.
        rising: whether ε grows with it.
        epsilon: target ε, the start of the search for a setting of this name.

    Raises:
        ValueError: for invalid limits.
    """
    # An item of a list, such as a number for each round, has the name of the list.
    name = next((word for word in reversed(path.split(".")) if not word.isdigit()), "")
    lowest, highest = _RISING.get(name, _NOISE)
    whole = isinstance(highest, int)
    check = check_int if whole else check_rate if highest == 1 else check_positive
    lowest = lowest if low is None else check("low", low)
    highest = highest if high is None else check("high", high)
    if lowest >= highest:
        raise ValueError(f"low={lowest:g} must be below high={highest:g}")
    start = _number(document, path) or math.sqrt(lowest * highest)
    if epsilon is not None and name == "epsilon":  # a class that calibrates its own noise usually keeps it
        start = epsilon
    return Parameter(
        path, min(max(start, lowest), highest), lowest, highest, rising or name in _RISING, whole
    )


class _Data:
    """Facts about a ``data`` section that a plan needs, computed on demand."""

    def __init__(self, section: Any, num_classes: int | None, own_code: bool) -> None:
        self._section, self.own_code = section, own_code
        self._stated = None if num_classes is None else check_int("num_classes", num_classes, minimum=2)

    @functools.cached_property
    def num_classes(self) -> int:
        """Number of classes: as given, as stated in the data section, or from its data module."""
        if self._stated is not None:
            return self._stated
        if self._section is None:
            raise ConfigurationError(
                "num_classes=None: there is no data section that states it; pass it (--num-classes)"
            )
        stated = get(self._section, "init_args.num_classes")
        return int(self._made.num_classes) if stated is None else check_int("data.num_classes", stated, 2)

    @functools.cached_property
    def public_examples(self) -> int:
        """Number of public examples; reads the public set."""
        return len(self._made.load_public())

    @functools.cached_property
    def _made(self) -> Any:
        if self._section is None:
            raise ConfigurationError(
                "there is no data section, which gives the classes and, for FullSelection, the number of queries"
            )
        return build({"data": _pruned(self._section)}, own_code=self.own_code).data


def _releases(document: Mapping[str, Any], source: str | Path, data: _Data) -> Releases:
    try:
        places = list(private_trainings(document, data.own_code))
        labeling = document.get("labeling")
        if labeling is not None:
            made = _made(document, "labeling", data.own_code)
            if made.labeler is not None:
                if places:
                    raise ConfigurationError(
                        f"{places[0]} trains on the private records and uses no teacher; leave out labeling.labeler"
                    )
                charges = labeling_plan(made, data.num_classes, lambda: data.public_examples)
                return Releases(tuple(charges), made.delta, made.budget.adjacency, made.budget.unit)
        if not places:
            raise ConfigurationError(_NOTHING)
        training = _made(document, places[0], data.own_code)
        training = getattr(training, "private_training", training)  # of a NoisySGD
        steps = planned_steps(document.get("trainer") or {}, training.steps_per_epoch)
        return Releases(tuple(training.plan(steps)), training.delta, "add_remove", training.unit)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _class(name: Any, own_code: bool) -> type | None:
    return class_named(str(name)) if own_code else known_class(str(name))


def _made(document: Mapping[str, Any], place: str, own_code: bool) -> Any:
    """Object built from a section, without the parts that do not affect the plan."""
    section = _pruned(get(document, place))
    if place == "labeling":
        return build({place: section}, own_code=own_code).callbacks[0]
    found = _class(get(section, "class_path"), own_code)
    if found is None or set(section) - {"class_path", "init_args"}:
        raise ConfigurationError(
            f"{place}={shown(section)} must have the class_path of a class"
            f"{'' if own_code else ' of this project'}, and its arguments as init_args"
        )
    if place == "model":
        return build({place: section}, own_code=own_code).module
    return build({"trainer": {"callbacks": section}}, own_code=own_code).callbacks[0]


def _pruned(section: Any) -> Any:
    """Copy of a section without the settings that do not affect a plan."""
    if not isinstance(section, Mapping):
        return section
    return {name: _pruned(value) for name, value in section.items() if name not in _LEFT_OUT}


def labeling_plan(
    labeling: PrivateLabeler, num_classes: int, public_examples: int | Callable[[], int]
) -> list[Charge]:
    """Planned releases of a labeling section.

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
    """Number of steps of a trainer, from its section of a configuration.

    Args:
        trainer: the section; 20 epochs are the command's own default.
        steps_per_epoch: of a loader that is not cut short.

    Raises:
        ConfigurationError: for a number of steps that is not known beforehand.
    """
    if not isinstance(trainer, Mapping):
        raise ConfigurationError(
            f"trainer={shown(trainer)}: expected a section of settings, such as max_epochs"
        )
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
    "is no privacy cost"
)
