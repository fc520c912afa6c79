"""Plans: what a teacher may do within an ε, found before anything is asked."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_choice, check_int, check_open_unit, check_positive, check_rate
from pl_privknn.privacy.accountant import PrivacyReport, account, epsilon_for_delta
from pl_privknn.privacy.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import (
    Adjacency,
    Charge,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    Mechanism,
    NoisyScreening,
    check_adjacency,
)

ChargesAt = Callable[[Mapping[str, Any]], list[Charge]]

#: Additive noise by name: class, its noise parameter, and that parameter for noise of deviation 1.
_NOISES: dict[str, tuple[type[Mechanism], str, float]] = {
    "gaussian": (Gaussian, "sigma", 1.0),
    "discrete_gaussian": (DiscreteGaussian, "sigma", 1.0),
    "laplace": (Laplace, "scale", math.sqrt(0.5)),
    "discrete_laplace": (DiscreteLaplace, "scale", math.sqrt(0.5)),
    "exponential_argmax": (ExponentialArgmax, "scale", math.sqrt(6.0) / math.pi),
}
NOISES: tuple[str, ...] = tuple(_NOISES)
ADDITIVE_NOISES: tuple[str, ...] = NOISES[:-1]

_MOST_QUERIES = 10_000_000


@dataclasses.dataclass(frozen=True)
class Plan:
    """A teacher's parameters and what they cost.

    Attributes:
        teacher: what the plan is for.
        found: the parameter that was looked for; None where all were given.
        target: ε that was asked for; None where all parameters were given.
        parameters: every parameter, the found one among them.
        charges: the most that may be released.
        report: total of ``charges``.
        counted: the parameter that stands on the axis of :meth:`curve`.
        fragment: configuration, for :meth:`yaml`.
        charges_at: releases as a function of the parameters.
    """

    teacher: str
    found: str | None
    target: float | None
    parameters: Mapping[str, Any]
    charges: tuple[Charge, ...]
    report: PrivacyReport
    counted: str
    fragment: Mapping[str, Any] = dataclasses.field(repr=False)
    charges_at: ChargesAt = dataclasses.field(repr=False, compare=False)

    @property
    def epsilon(self) -> float:
        """The guarantee: the smallest valid total."""
        return self.report.epsilon

    def yaml(self) -> str:
        """The plan as configuration: ``labeling`` of ``privknn fit`` for labelers, else the records."""
        text: str = importlib.import_module("yaml").safe_dump(
            _plain(self.fragment), sort_keys=False, default_flow_style=None, width=100
        )
        return text

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        return {
            "teacher": self.teacher,
            "found": self.found,
            "target": self.target,
            "parameters": dict(self.parameters),
            **self.report.to_dict(),
            "records": [charge.to_record() for charge in self.charges],
            "fragment": _plain(self.fragment),
        }

    def curve(self, points: int = 24) -> list[tuple[int, float]]:
        """(number, ε) from 1 to twice the planned number, by the better of RDP and PLD."""
        last = 2 * int(self.parameters[self.counted])
        counts = sorted({max(1, round(last * (i / points) ** 2)) for i in range(1, points + 1)})
        delta, adjacency = self.report.delta, self.report.adjacency
        return [
            (count, epsilon_for_delta(self._charges(count), delta, adjacency))
            for count in [*counts, int(self.parameters[self.counted])]
        ]

    def plot(self, path: str | Path) -> None:
        """Draw ε against the number of queries into a file, whose ending says the format.

        Raises:
            ValueError: for an ending that matplotlib doesn't know.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        curve = sorted(self.curve())
        figure = Figure(figsize=(6, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot([n for n, _ in curve], [eps for _, eps in curve], label="RDP or PLD, the smaller")
        axes.plot([self.parameters[self.counted]], [self.epsilon], "o", label="this plan")
        if self.target is not None:
            axes.axhline(self.target, linestyle="--", color="gray", label=f"target ε = {self.target:g}")
        axes.set_xlabel(self.counted.replace("_", " "))
        axes.set_ylabel(f"ε at δ = {self.report.delta:g}, {self.report.adjacency}")
        axes.set_title(self.teacher)
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(str(path))

    def _charges(self, count: int) -> list[Charge]:
        return self.charges_at({**self.parameters, self.counted: count})


def plan_private_knn(
    *,
    delta: float,
    k: int = 300,
    epsilon: float | None = None,
    noise_scale: float | None = None,
    queries: int | None = None,
    sampling_rate: float | None = None,
    max_answers: int | None = None,
    answer_share: float | None = None,
    num_classes: int = 10,
    noise: str = "gaussian",
    screening: bool = True,
    threshold: float | None = None,
    sigma_ratio: float = 3.0,
    rounds: int = 1,
    exact: bool = True,
    exact_search: bool = False,
) -> Plan:
    """Plan Private-kNN: leave out one of ``noise_scale``, ``queries`` and ``sampling_rate``; it is found.

    Args:
        delta: target δ.
        k: neighbours that vote.
        epsilon: target ε; left out, all parameters must be given and the plan states what they cost.
        noise_scale: σ of Gaussian noise, b of the other kinds, in votes.
        queries: of all rounds together.
        sampling_rate: γ.
        max_answers: the most answers of all rounds together. This or ``answer_share``; both left out, every
            query may be answered.
        answer_share: answers as a share of the queries, in (0, 1], for plans whose queries are found.
        num_classes: public number of classes.
        noise: one of :data:`NOISES`.
        screening: whether queries are screened.
        threshold: T in votes; 0.6 k by default.
        sigma_ratio: screening noise over the standard deviation of the aggregation noise; 3 as in the paper.
        rounds: of queries, for the configuration.
        exact: give the exact worst case too.
        exact_search: also search on it.

    Raises:
        ValueError: naming the argument; :class:`~pl_privknn.privacy.calibration.CalibrationError` where the
            target can't be met.
    """
    k, num_classes = check_int("k", k), check_int("num_classes", num_classes, minimum=2)
    rounds, ratio = check_int("rounds", rounds), check_positive("sigma_ratio", sigma_ratio)
    check_choice("noise", noise, NOISES)
    if max_answers is not None and answer_share is not None:
        raise ValueError(
            f"max_answers={max_answers!r}, answer_share={answer_share!r}: give one of them, or neither"
        )
    cap = None if max_answers is None else check_int("max_answers", max_answers)
    share = 1.0 if answer_share is None else check_rate("answer_share", answer_share)
    voted = float(f"{0.6 * k:.6g}") if threshold is None else threshold

    def answers(values: Mapping[str, Any]) -> int:
        asked = int(values["queries"])
        return min(asked, cap) if cap is not None else math.ceil(share * asked - 1e-9)

    def mechanisms(values: Mapping[str, Any]) -> tuple[NoisyScreening | None, Mechanism]:
        rate, scale = values["sampling_rate"], values["noise_scale"]
        aggregation = _noise(noise, scale, math.sqrt(2.0), 2, rate)
        if not screening:
            return None, aggregation
        sigma = float(f"{ratio * scale / _NOISES[noise][2]:.6g}")
        return NoisyScreening(k, voted, sigma, num_classes, rate), aggregation

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        screen, aggregation = mechanisms(values)
        first = [] if screen is None else [Charge(screen, values["queries"])]
        return [*first, Charge(aggregation, answers(values))]

    given = {"noise_scale": noise_scale, "queries": queries, "sampling_rate": sampling_rate}
    start = _noise_start(epsilon, delta, math.sqrt(2.0) * (sampling_rate or 1.0), (queries or 1) * share)
    values, found, report = _solve(
        charges_at,
        given,
        {"noise_scale": start * _NOISES[noise][2], "queries": 1000, "sampling_rate": 0.1},
        epsilon,
        delta,
        "add_remove",
        exact,
        exact_search,
    )
    screen, aggregation = mechanisms(values)
    asked = int(values["queries"])
    each, more = divmod(asked, rounds)
    if each == 0:
        raise ValueError(f"rounds={rounds!r} must be at most the number of queries, {asked}")
    arguments: dict[str, Any] = {"k": k, "sampling_rate": values["sampling_rate"]}
    if screen is not None:
        arguments["screening"] = {"threshold": screen.threshold, "sigma": screen.sigma}
    arguments["noise"] = _class(aggregation, _NOISES[noise][1])
    fragment = {
        "labeling": {
            "labeler": {"class_path": "PrivateKNN", "init_args": arguments},
            "rounds": rounds,
            "queries_per_round": each if not more else [each + (i < more) for i in range(rounds)],
            "max_answers": answers(values),
            "delta": delta,
            **({} if epsilon is None else {"max_epsilon": epsilon}),
        }
    }
    parameters = {"k": k, **values, "max_answers": answers(values), "noise": noise, "num_classes": num_classes}
    if screen is not None:
        parameters |= {"threshold": screen.threshold, "screening_sigma": screen.sigma}
    charges = tuple(charges_at(values))
    return Plan("PrivateKNN", found, epsilon, parameters, charges, report, "queries", fragment, charges_at)


def plan_reverse_knn(
    *,
    delta: float,
    k: int = 1,
    epsilon: float | None = None,
    noise_scale: float | None = None,
    rounds: int | None = None,
    noise: str = "laplace",
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> Plan:
    """Plan reverse kNN: leave out ``noise_scale`` or ``rounds``; it is found.

    Args:
        delta: target δ.
        k: queries that a record votes for.
        epsilon: target ε of all rounds; as in :func:`plan_private_knn`.
        noise_scale: b or σ, in counts.
        rounds: releases of the whole table of counts.
        noise: one of :data:`ADDITIVE_NOISES`.
        adjacency: a replaced record moves twice as much as an added one.
        exact: as in :func:`plan_private_knn`.

    Raises:
        ValueError: as :func:`plan_private_knn`.
    """
    check_choice("noise", noise, ADDITIVE_NOISES)
    moved = check_int("k", k) * (2 if check_adjacency(adjacency) == "replace_one" else 1)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        mechanism = _noise(noise, values["noise_scale"], math.sqrt(moved), moved, 1.0)
        return [Charge(mechanism, values["rounds"])]

    values, found, report = _solve(
        charges_at,
        {"noise_scale": noise_scale, "rounds": rounds},
        {"noise_scale": _noise_start(epsilon, delta, moved, rounds or 1), "rounds": 1},
        epsilon,
        delta,
        adjacency,
        exact,
    )
    charges = tuple(charges_at(values))
    arguments: dict[str, Any] = {"k": k, "noise": _class(charges[0].mechanism, _NOISES[noise][1])}
    if adjacency != "add_remove":
        arguments["adjacency"] = adjacency
    fragment = {
        "labeling": {
            "labeler": {"class_path": "ReverseKNN", "init_args": arguments},
            "rounds": values["rounds"],
            "delta": delta,
            "adjacency": adjacency,
            **({} if epsilon is None else {"max_epsilon": epsilon}),
        }
    }
    parameters = {"k": k, **values, "noise": noise}
    return Plan("ReverseKNN", found, epsilon, parameters, charges, report, "rounds", fragment, charges_at)


def plan_release(
    *,
    delta: float,
    noise: str = "gaussian",
    sensitivity: float = 1.0,
    epsilon: float | None = None,
    noise_scale: float | None = None,
    count: int | None = None,
    sampling_rate: float | None = 1.0,
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> Plan:
    """Plan plain noisy releases: leave out one of ``noise_scale``, ``count`` and ``sampling_rate``.

    Args:
        delta: target δ.
        noise: one of :data:`ADDITIVE_NOISES`.
        sensitivity: L2 for Gaussian kinds, L1 for Laplace kinds, under ``adjacency``.
        epsilon: as in :func:`plan_private_knn`.
        noise_scale: σ or b.
        count: number of releases.
        sampling_rate: Poisson rate; None to find it.
        adjacency: neighbouring relation.
        exact: as in :func:`plan_private_knn`.

    Raises:
        ValueError: as :func:`plan_private_knn`.
    """
    check_choice("noise", noise, ADDITIVE_NOISES)
    length = check_positive("sensitivity", sensitivity)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        mechanism = _noise(noise, values["noise_scale"], length, length, values["sampling_rate"])
        return [Charge(mechanism, values["count"])]

    start = _noise_start(epsilon, delta, length * (sampling_rate or 1.0), count or 1)
    values, found, report = _solve(
        charges_at,
        {"noise_scale": noise_scale, "count": count, "sampling_rate": sampling_rate},
        {"noise_scale": start, "count": 100, "sampling_rate": 0.1},
        epsilon,
        delta,
        adjacency,
        exact,
    )
    charges = tuple(charges_at(values))
    parameters = {"noise": noise, "sensitivity": length, **values}
    fragment = {"releases": [charge.to_record() for charge in charges]}
    return Plan(f"{noise} release", found, epsilon, parameters, charges, report, "count", fragment, charges_at)


def plan_noisy_sgd(
    *,
    delta: float,
    records: int,
    batch_size: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: int | None = None,
) -> Plan:
    """Plan NoisySGD with Poisson batches: leave out ``noise_multiplier`` or ``epochs``.

    The rate is ``batch_size / records`` and there are ⌈epochs / rate⌉ steps; the trainer must use both.

    Args:
        delta: target δ.
        records: private records; a public number here.
        batch_size: expected size of a Poisson batch.
        epsilon: as in :func:`plan_private_knn`.
        noise_multiplier: noise on the sum of clipped gradients over the clipping norm.
        epochs: passes over the records.

    Raises:
        ValueError: as :func:`plan_private_knn`.
    """
    records, batch_size = check_int("records", records), check_int("batch_size", batch_size)
    if batch_size > records:
        raise ValueError(f"batch_size={batch_size} must be at most records={records}")
    rate = batch_size / records

    def steps(values: Mapping[str, Any]) -> int:
        return -(-int(values["epochs"]) * records // batch_size)

    def charges_at(values: Mapping[str, Any]) -> list[Charge]:
        return [Charge(Gaussian(values["noise_multiplier"], 1.0, rate), steps(values))]

    start = max(0.5, _noise_start(epsilon, delta, rate, (epochs or 1) / rate))
    values, found, report = _solve(
        charges_at,
        {"noise_multiplier": noise_multiplier, "epochs": epochs},
        {"noise_multiplier": start, "epochs": 10},
        epsilon,
        delta,
        "add_remove",
        exact=False,
    )
    charges = tuple(charges_at(values))
    parameters = {
        "records": records,
        "batch_size": batch_size,
        **values,
        "sampling_rate": rate,
        "steps": steps(values),
    }
    fragment = {"releases": [charge.to_record() for charge in charges]}
    return Plan("NoisySGD", found, epsilon, parameters, charges, report, "epochs", fragment, charges_at)


# What may be looked for: its limits, whether ε grows with it, and whether it is whole.
_FREE: dict[str, tuple[float, float, bool, bool]] = {
    "noise_scale": (1e-2, 1e9, False, False),
    "noise_multiplier": (0.2, 1e6, False, False),
    "sampling_rate": (1e-6, 1.0, True, False),
    **dict.fromkeys(("queries", "count", "rounds", "epochs"), (1, _MOST_QUERIES, True, True)),
}


def _solve(
    charges_at: ChargesAt,
    given: Mapping[str, Any],
    starts: Mapping[str, float],
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency,
    exact: bool = True,
    exact_search: bool = False,
) -> tuple[dict[str, Any], str | None, PrivacyReport]:
    """Check what was given, find what was not."""
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    values: dict[str, Any] = {}
    for name, value in given.items():
        _, _, _, whole = _FREE[name]
        if value is not None:
            check = check_rate if name == "sampling_rate" else check_int if whole else check_positive
            values[name] = check(name, value)
    missing = [name for name in given if name not in values]
    if epsilon is None:
        if missing:
            raise ValueError(
                f"epsilon=None, {missing[0]}=None: give a target epsilon, or every one of {', '.join(given)}"
            )
        report = account(charges_at(values), delta=delta, adjacency=adjacency, exact=exact)
        return values, None, report
    epsilon = check_positive("epsilon", epsilon)
    if len(missing) != 1:
        stated = ", ".join(f"{name}={values.get(name)!r}" for name in given)
        raise ValueError(f"{stated}: leave out exactly one of them, the one to be found for epsilon={epsilon:g}")
    name = missing[0]
    low, high, rising, whole = _FREE[name]
    found = calibrate(
        lambda value: charges_at({**values, name: value}),
        Parameter(name, min(max(starts[name], low), high), low, high, rising, whole),
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        exact=exact,
        exact_search=exact_search,
    )
    return {**{key: values.get(key, found.value) for key in given}}, name, found.report


def _noise(kind: str, scale: float, l2: float, l1: float, rate: float) -> Mechanism:
    if kind == "exponential_argmax":
        return ExponentialArgmax(scale, "swap", rate)
    if kind == "gaussian":
        return Gaussian(scale, l2, rate)
    if kind == "discrete_gaussian":
        return DiscreteGaussian(scale, l2, rate)
    if kind == "laplace":
        return Laplace(scale, l1, rate)
    return DiscreteLaplace(scale, check_int("sensitivity", l1), rate)


def _noise_start(epsilon: float | None, delta: float, length: float, releases: float) -> float:
    """The textbook's Gaussian noise for as many releases: only where the search starts."""
    size = math.sqrt(2 * math.log(1.25 / check_open_unit("delta", delta)) * releases)
    return length * size / (1.0 if epsilon is None else check_positive("epsilon", epsilon))


def _class(mechanism: Mechanism, field: str) -> dict[str, Any]:
    return {"class_path": type(mechanism).__name__, "init_args": {field: getattr(mechanism, field)}}


def _plain(value: Any) -> Any:
    """Copy with plain types, whole floats as whole numbers, so that YAML reads as one would write it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return value
