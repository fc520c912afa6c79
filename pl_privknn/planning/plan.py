"""Plans: what any teacher may do within an ε. Leave one parameter out, and it is found before anything is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_int, check_open_unit, check_positive, check_rate
from pl_privknn.documents import write_yaml
from pl_privknn.labelers.statistics import MOST_RELEASES
from pl_privknn.planning.utility import Utility, hopeless
from pl_privknn.privacy.accounting.accountant import PrivacyReport, account, epsilon_for_delta
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import Adjacency, Charge, check_adjacency

ChargesAt = Callable[[Mapping[str, Any]], list[Charge]]

_MOST = 10_000_000
#: What may be looked for: its limits, whether ε grows with it, and whether it is whole.
FREE: dict[str, tuple[float, float, bool, bool]] = {
    "noise_scale": (1e-2, 1e9, False, False),
    "noise_multiplier": (0.2, 1e6, False, False),
    "sampling_rate": (1e-6, 1.0, True, False),
    "budget": (1e-9, 1e6, True, False),
    "releases": (1, MOST_RELEASES, True, True),
    **dict.fromkeys(("queries", "count", "rounds", "epochs", "steps"), (1, _MOST, True, True)),
}


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
        utility: what becomes of queries, for teachers that count votes.
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
    utility: tuple[Utility, ...] = ()

    @property
    def epsilon(self) -> float:
        """The guarantee: the smallest valid total."""
        return self.report.epsilon

    def yaml(self) -> str:
        """The plan as configuration: ``labeling`` of ``privknn fit`` for labelers, else the records."""
        return write_yaml(_plain(self.fragment), flow_style=None, width=100)

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
            "utility": [dataclasses.asdict(found) for found in self.utility],
            "warnings": hopeless(self.utility),
        }

    def curve(self, points: int = 24) -> list[tuple[int, float]]:
        """(number, ε) from 1 to twice the planned number, by the better of RDP and PLD."""
        planned = int(self.parameters[self.counted])
        counts = {max(1, round(2 * planned * (i / points) ** 2)) for i in range(1, points + 1)}
        delta, adjacency = self.report.delta, self.report.adjacency
        charges = {n: self.charges_at({**self.parameters, self.counted: n}) for n in counts | {planned}}
        return [(n, epsilon_for_delta(charges[n], delta, adjacency)) for n in sorted(charges)]

    def plot(self, path: str | Path) -> None:
        """Draw ε against the number of queries into a file, whose ending says the format.

        Raises:
            ValueError: for an ending that matplotlib doesn't know.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        curve = self.curve()
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


def solve(
    charges_at: ChargesAt,
    given: Mapping[str, Any],
    starts: Mapping[str, float],
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency,
    exact: bool = True,
    exact_search: bool = False,
) -> tuple[dict[str, Any], str | None, PrivacyReport]:
    """Check what was given and find what was not.

    Args:
        charges_at: releases as a function of the parameters.
        given: the parameters that may be looked for; None where not given.
        starts: where a search starts, for each of them.
        epsilon: target, or None where all are given.
        delta: target δ.
        adjacency: neighbouring relation.
        exact: give the exact worst case too.
        exact_search: also search on it.

    Returns:
        All parameters, the name of the found one, and the total.

    Raises:
        ValueError: naming the argument; :class:`~pl_privknn.privacy.accounting.calibration.CalibrationError` where
            the target can't be met.
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    values: dict[str, Any] = {}
    for name, value in given.items():
        _, _, _, whole = FREE[name]
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
        raise ValueError(
            f"{stated}: leave out exactly one of them, the one to be found for epsilon={epsilon:g}"
        )
    name = missing[0]
    low, high, rising, whole = FREE[name]
    found = calibrate(
        lambda value: charges_at({**values, name: value}),
        Parameter(name, min(max(starts[name], low), high), low, high, rising, whole),
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        exact=exact,
        exact_search=exact_search,
    )
    return {key: values.get(key, found.value) for key in given}, name, found.report


def _plain(value: Any) -> Any:
    """Copy with plain types, whole floats as whole numbers, so that YAML reads as one would write it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return value
