"""Calibration: search for the free parameter of a plan by bisection on the accountant."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from pl_privknn._checks import check_open_unit, check_positive
from pl_privknn.privacy.accounting.accountant import PrivacyReport, account
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency

# Relative dent in ε that the accountant's grids may cause between neighbouring values of a parameter.
_WOBBLE = 5e-3
# Relative distance of ε from its target at which the search ends.
_TOLERANCE = 1e-3
# Significant digits of values that are tried: at first, and at most.
_DIGITS, _MOST_DIGITS = 4, 6


class CalibrationError(ValueError):
    """Raised where no value of the free parameter meets the target, or ε is not monotone in it."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The free parameter of a search.

    Attributes:
        name: for messages.
        start: where the search starts, above 0.
        low: smallest value allowed, above 0.
        high: largest value allowed.
        rising: whether ε grows with it, as with a number of queries or a sampling rate; ε falls with noise.
        whole: whether it is a whole number. Others are tried to four significant digits, more where the target
            needs them, so that the value that is printed is the very one that was accounted.
    """

    name: str
    start: float
    low: float
    high: float
    rising: bool
    whole: bool = False

    def snap(self, value: float, digits: int = _DIGITS) -> float:
        """Nearest value within the limits, rounded to this number of significant digits."""
        inside = min(max(value, self.low), self.high)
        return round(inside) if self.whole else min(max(float(f"{inside:.{digits}g}"), self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Result of the search.

    Attributes:
        name: the parameter.
        value: the least noise, or the most queries or sampling, that meets the target.
        charges: the releases at ``value``.
        report: their total, with the exact figure if asked for; ``report.epsilon`` never exceeds the target.
        tried: every (value, ε) that the search has accounted, ascending by value.
    """

    name: str
    value: float
    charges: tuple[Charge, ...]
    report: PrivacyReport
    tried: tuple[tuple[float, float], ...]


def calibrate(
    charges: Callable[[float], Sequence[Charge]],
    parameter: Parameter,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> Calibration:
    """Find the value of one parameter at which the releases cost ``epsilon``, or slightly less.

    The search uses the better of RDP and PLD, and from where that ends the exact worst case, in steps that are
    interpolated in the logarithms and bisected where that is slow. It stops between two neighbouring whole
    numbers, or where ε is within a thousandth of the target. Each value was accounted itself, so nothing hangs on
    the assumption that ε moves one way; that is checked over all values tried, because otherwise a better value
    might lie elsewhere.

    Args:
        charges: releases as a function of the parameter.
        parameter: what to look for, and where.
        epsilon: target ε.
        delta: target δ.
        adjacency: neighbouring relation.
        exact: state the exact worst case and search on it too: less noise for the same ε, at some seconds a step.

    Raises:
        CalibrationError: if no allowed value meets the target, or ε is not monotone.
        ValueError: for an ε or δ out of range, and from the mechanisms.
    """
    epsilon, delta = check_positive("epsilon", epsilon), check_open_unit("delta", delta)
    adjacency = check_adjacency(adjacency)

    def fast(value: float) -> float:
        return account(charges(value), delta=delta, adjacency=adjacency, exact=False).epsilon

    def slow(value: float) -> float:
        return account(charges(value), delta=delta, adjacency=adjacency, exact=True).epsilon

    search = _Search(parameter, epsilon)
    value = search.run(fast, parameter.start, factor=2.0)
    if exact and slow(value) < fast(value):
        # The exact figure is never above the fast one, so the search goes on from a value that is good.
        search = _Search(parameter, epsilon)
        value = search.run(slow, value, factor=1.05)
    found = tuple(charges(value))
    report = account(found, delta=delta, adjacency=adjacency, exact=exact)
    if report.epsilon > epsilon:
        raise CalibrationError(
            f"{parameter.name}={value:g} costs ε={report.epsilon:.6g} when accounted again, above "
            f"epsilon={epsilon:g}; the charges must depend on the parameter alone"
        )
    return Calibration(parameter.name, value, found, report, search.tried)


class _Search:
    """One bracketing search that caches accounted values."""

    def __init__(self, parameter: Parameter, target: float) -> None:
        self.parameter, self.target, self._digits = parameter, target, _DIGITS
        self._known: dict[float, float] = {}

    @property
    def tried(self) -> tuple[tuple[float, float], ...]:
        return tuple(sorted(self._known.items()))

    def run(self, cost: Callable[[float], float], start: float, factor: float) -> float:
        good, bad = self._bracket(cost, self.parameter.snap(start), factor)
        if bad is not None:
            good = self._narrow(cost, good, bad)
        self._check_monotone()
        return good

    def _epsilon(self, cost: Callable[[float], float], value: float) -> float:
        if value not in self._known:
            self._known[value] = cost(value)
        return self._known[value]

    def _bracket(
        self, cost: Callable[[float], float], start: float, factor: float
    ) -> tuple[float, float | None]:
        """Bracket of the target: a value that meets it and one beyond it, or None where even the limit meets it."""
        parameter, value = self.parameter, start
        meets = self._epsilon(cost, value) <= self.target
        # Towards dearer values from one that meets the target, towards cheaper ones otherwise.
        grow = parameter.rising == meets
        while True:
            step = value * factor if grow else value / factor
            following = parameter.snap(step)
            if parameter.whole and following == value:
                following = parameter.snap(value + (1 if grow else -1))
            if following == value:
                if meets:
                    return value, None
                raise CalibrationError(
                    f"epsilon={self.target:g} can't be met: {parameter.name}={value:g}, the "
                    f"{'largest' if grow else 'smallest'} allowed, costs ε={self._epsilon(cost, value):.4g}; "
                    "raise epsilon or delta, or ask for less"
                )
            if (self._epsilon(cost, following) <= self.target) != meets:
                return (value, following) if meets else (following, value)
            value, factor = following, min(factor * factor, 16.0)

    def _narrow(self, cost: Callable[[float], float], good: float, bad: float) -> float:
        parameter = self.parameter
        for turn in range(200):
            if not parameter.whole and self._known[good] >= self.target * (1 - _TOLERANCE):
                break
            share = 0.5
            low, high = self._known[good], self._known[bad]
            if turn % 3 < 2 and low > 0 and math.isfinite(high):
                # Aims a little inside the target, so that most steps bring up the good end.
                aim = math.log(self.target * (1 - _TOLERANCE / 2))
                share = (aim - math.log(low)) / (math.log(high) - math.log(low))
                share = min(max(share, 0.02), 0.98)
            middle = parameter.snap(good * (bad / good) ** share, self._digits)
            if middle in (good, bad):
                middle = parameter.snap(math.sqrt(good * bad), self._digits)
            if middle in (good, bad):
                if abs(good - bad) <= 1 if parameter.whole else self._digits == _MOST_DIGITS:
                    break
                if not parameter.whole:
                    self._digits += 1
                    continue
                middle = good + (1 if bad > good else -1)
            if self._epsilon(cost, middle) <= self.target:
                good = middle
            else:
                bad = middle
        return good

    def _check_monotone(self) -> None:
        tried = self.tried if self.parameter.rising else self.tried[::-1]
        for (cheap, less), (dear, more) in itertools.pairwise(tried):
            if more < less * (1 - _WOBBLE) - 1e-9:
                way = "grow" if self.parameter.rising else "fall"
                raise CalibrationError(
                    f"ε does not {way} with {self.parameter.name}: {less:.6g} at {cheap:g}, {more:.6g} at "
                    f"{dear:g}; look for a parameter that moves ε one way"
                )
