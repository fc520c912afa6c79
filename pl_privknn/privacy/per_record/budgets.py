"""Between (ε, δ) and the budget of a stream of Gaussian releases, RDP(α) = α B or √(2B)-Gaussian DP."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_choice, check_open_unit, check_positive

Conversion = Literal["gdp", "rdp", "rdp_classic"]
CONVERSIONS: tuple[Conversion, ...] = ("gdp", "rdp", "rdp_classic")
#: Relative spread that :func:`budget_for_epsilon` allows for: other machines round its steps otherwise.
BUDGET_SPREAD = 1e-9


def budget_for_epsilon(epsilon: float, delta: float, conversion: Conversion = "gdp") -> float:
    """The largest budget B per record, RDP(α) = α B for every α, that keeps a stream (ε, δ)-DP.

    * ``"gdp"``: B = μ²/2 for the largest μ with Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) <= δ (Dong, Roth, Su 2022,
      Corollary 2.13). The tightest; valid since everything charged is Gaussian.
    * ``"rdp"``: the improved conversion, ε = min over α of αB + log(1−1/α) − (log δ + log α)/(α−1) (Canonne,
      Kamath, Steinke 2020).
    * ``"rdp_classic"``: ε = min over α of αB + log(1/δ)/(α−1) (Mironov 2017), that is
      B = (√(ε + log 1/δ) − √log 1/δ)².

    The result is rounded down by some 1e-9 of itself.

    >>> [round(budget_for_epsilon(1.0, 1e-5, c), 5) for c in ("gdp", "rdp", "rdp_classic")]
    [0.03593, 0.03056, 0.02082]

    Raises:
        ValueError: unless ``epsilon`` is above 0 and ``delta`` lies in (0, 1).
    """
    epsilon = check_positive("epsilon", epsilon)
    delta = check_open_unit("delta", delta)
    check_choice("conversion", conversion, CONVERSIONS)
    if conversion == "rdp_classic":
        log_inverse = -math.log(delta)
        budget = (epsilon / (math.sqrt(epsilon + log_inverse) + math.sqrt(log_inverse))) ** 2
    else:
        budget = _largest(lambda trial: epsilon_of_budget(trial, delta, conversion) <= epsilon)
    return budget * (1 - 2 * BUDGET_SPREAD)


def epsilon_of_budget(budget: float, delta: float, conversion: Conversion = "gdp") -> float:
    """The ε of a budget B per record; the inverse of :func:`budget_for_epsilon`, rounded up.

    Raises:
        ValueError: unless ``budget`` is above 0 and ``delta`` lies in (0, 1).
    """
    budget = check_positive("budget", budget)
    delta = check_open_unit("delta", delta)
    check_choice("conversion", conversion, CONVERSIONS)
    if conversion == "rdp_classic":
        return budget + 2 * math.sqrt(-budget * math.log(delta))
    if conversion == "rdp":
        return _epsilon_rdp(budget, delta)
    mu = math.sqrt(2 * budget)
    if _gdp_delta(mu, 0.0) <= delta:
        return 0.0
    too_small = _largest(lambda trial: _gdp_delta(mu, trial) > delta)
    return too_small * (1 + 1e-12)


def _gdp_delta(mu: float, epsilon: float) -> float:
    from scipy.special import log_ndtr

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    # The difference of two nearly equal terms is taken as e^a (1 − e^(b − a)), which keeps its digits.
    gap = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)) - first
    return -math.exp(first) * math.expm1(gap) if gap < 0 else 0.0


def _epsilon_rdp(budget: float, delta: float) -> float:
    def epsilon(log_excess: NDArray[np.float64]) -> NDArray[np.float64]:
        alpha = 1 + np.exp(log_excess)
        return alpha * budget + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)

    grid = np.linspace(-20.0, 60.0, 2001)  # α − 1; every α gives a valid ε, so the grid costs tightness only
    for _ in range(4):
        best = int(np.argmin(epsilon(grid)))
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 2001)
    return max(0.0, float(epsilon(grid).min()))


def _largest(fits: Callable[[float], bool]) -> float:
    """The largest float above 0 that fits, for a property that holds up to some number and not beyond."""
    low, high = 1e-300, 1.0
    while fits(high):
        low, high = high, high * 2
    while high - low > 1e-13 * low:
        # Halve the exponents first: the answer may be many orders of magnitude from 1.
        middle = math.sqrt(low) * math.sqrt(high) if high > 4 * low else low + (high - low) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class BudgetUnits:
    """Amounts of a budget as whole numbers of a power of two, of which the budget holds 2**60 to 2**61.

    A float is a whole number of units, or is rounded up to one, so sums are exact and don't depend on order.

    Attributes:
        total: the budget in units, exactly.
    """

    _BITS = 61  # two budgets still fit into a signed 64-bit integer

    def __init__(self, budget: float) -> None:
        self._shift = self._BITS - math.frexp(budget)[1]
        self.total = int(math.ldexp(budget, self._shift))

    def from_amounts(self, amounts: NDArray[np.float64]) -> NDArray[np.int64]:
        """Units, rounded up; amounts beyond the budget become at most 2**61, which is beyond it too."""
        with np.errstate(over="ignore"):
            units = np.minimum(np.ceil(np.ldexp(amounts, self._shift)), 2.0**self._BITS).astype(np.int64)
        return np.maximum(units, amounts > 0)  # an amount may vanish in the scaling; it still costs a unit

    def to_amounts(self, units: NDArray[np.int64]) -> NDArray[np.float64]:
        """Amounts, rounded down to a float."""
        floats = units.astype(np.float64)
        floats = np.where(floats.astype(np.int64) > units, np.nextafter(floats, 0.0), floats)
        return np.ldexp(floats, -self._shift)
