"""Trade-off curves: an attacker's error rates at a stated ε.

An attacker who sees everything that is released decides whether a record was there.
Of all such tests, the best one at each false-positive rate follows from the privacy loss distribution (Neyman and
Pearson; Dong, Roth, Su 2022; Zhu, Dong, Wang 2022): it says "there" where the loss is large. A dominating pair bounds
every test on the releases, so the rates here are upper bounds, like ε, and need no δ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pl_privknn._checks import at_most, check_open_unit
from pl_privknn.privacy.accounting.accountant import (
    compose_charges,
    gaussian_and_others,
    merge_charges,
    total_pure_epsilon,
)
from pl_privknn.privacy.accounting.pld import Composition, Direction
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency

Floats = NDArray[np.float64]

#: False-positive rates that reports name.
RATES = (0.001, 0.01, 0.1)
# δ near which totals are composed: masses are hardly tilted there, and what is cut off is below 1e-12 in all.
_NEAR = 0.01
# Error rates below this one are lost in what is cut off.
_SMALLEST_RATE = 1e-9
# Losses above this have no float64 ratio.
_LARGEST_LOSS = 700.0


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Trade-off curve: bounds on an attacker's missed detections at each rate of false positives.

    Attributes:
        totals: distributions of the total loss, each of which dominates the releases.
        gaussian: μ where the releases are together exactly one Gaussian release, so that no grid is needed.
        smallest_rate: the error rate down to which :attr:`mu` holds.

    Example:
        >>> from pl_privknn.privacy import Charge, PureDP, trade_off
        >>> found = trade_off([Charge(PureDP(epsilon=1.0))])
        >>> {name: round(rate, 3) for name, rate in found.to_dict().items()}["advantage"]
        0.462
    """

    totals: tuple[Composition, ...]
    gaussian: float | None
    smallest_rate: float

    def true_positive_rate(self, fpr: ArrayLike) -> Floats:
        """Largest true-positive rate at each false-positive rate in [0, 1], same shape.

        The attacker's question may be put either way, "was the record there" or "was it not"; this is the larger.

        Raises:
            ValueError: for a rate outside [0, 1].
        """
        rates = np.asarray(fpr, dtype=np.float64)
        if not np.all((rates >= 0) & (rates <= 1)):
            raise ValueError(f"fpr={fpr!r} must lie in [0, 1]")
        if self.gaussian is not None:
            return _gaussian_rate(self.gaussian, rates)
        ways = [
            [_rate(total.remove, total.add, rates) for total in self.totals],
            [_rate(total.add, total.remove, rates) for total in self.totals],
        ]
        return np.max([np.min(way, axis=0) for way in ways], axis=0)

    @property
    def advantage(self) -> float:
        """Largest difference of true- and false-positive rate; the total variation distance, δ at ε = 0."""
        if self.gaussian is not None:
            return math.erf(self.gaussian / math.sqrt(8))
        zero = np.zeros(1)
        return min(float(side.delta(zero)[0]) for t in self.totals for side in (t.remove, t.add))

    @functools.cached_property
    def mu(self) -> float:
        """μ such that no test does better than the best one against a single Gaussian release of that μ.

        Exact for Gaussian releases. For others it covers all tests whose error rates are both at least
        :attr:`smallest_rate`: rarer events may reveal more, as where a sampled record is drawn every time.
        """
        if self.gaussian is not None:
            return self.gaussian
        return min(_mu(total, self.smallest_rate) for total in self.totals)

    def to_dict(self) -> dict[str, float]:
        """The rates at :data:`RATES`, the advantage and μ, as reports show them."""
        found = self.true_positive_rate(RATES)
        return {
            **{f"tpr_at_fpr_{rate:g}": float(value) for rate, value in zip(RATES, found, strict=True)},
            "advantage": self.advantage,
            "gaussian_dp_mu": self.mu,
        }

    def plot(self, path: str | Path) -> None:
        """Plot the true- against the false-positive rate to a file in the format of its suffix.

        Raises:
            ValueError: for an ending that matplotlib doesn't know.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rates = np.geomspace(1e-4, 1.0, 400)
        figure = Figure(figsize=(5.5, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(rates, self.true_positive_rate(rates), label="strongest attack, at most")
        if self.gaussian is None and math.isfinite(self.mu):
            bound = _gaussian_rate(self.mu, rates)
            axes.plot(rates, bound, ":", label=f"Gaussian DP with μ = {self.mu:.3g}")
        axes.plot(rates, rates, "--", color="gray", label="guessing")
        axes.plot(RATES, self.true_positive_rate(RATES), "o", color="tab:blue")
        axes.set(xscale="log", yscale="log", ylim=(1e-4, 1.1))
        axes.set_xlabel("false-positive rate")
        axes.set_ylabel("true-positive rate")
        axes.legend()
        figure.savefig(str(path))


def trade_off(
    charges: Sequence[Charge],
    *,
    delta: float = 1e-5,
    adjacency: Adjacency = "add_remove",
    exact: bool = True,
) -> TradeOff:
    """Error rates of the best attack on all releases together, chosen adaptively or not.

    Args:
        charges: as in :func:`~pl_privknn.privacy.accounting.accountant.account`.
        delta: the error rate down to which :attr:`TradeOff.mu` is to hold (to 1e-9 at least); the rates themselves
            need none.
        adjacency: neighbouring relation of every charge.
        exact: use the exact worst case too, where it applies (seconds).

    Raises:
        ValueError: for a δ outside (0, 1), an unknown adjacency, or a mechanism that is not defined under it.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, trade_off
        >>> found = trade_off([Charge(Gaussian(sigma=4.0))])  # ε = 0.926 at δ = 1e-5
        >>> found.true_positive_rate([0.001, 0.01, 0.1]).round(4).tolist(), round(found.mu, 2)
        ([0.0023, 0.0189, 0.1511], 0.25)
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    return _trade_off(tuple(merge_charges(charges)), delta, adjacency, exact)


@functools.lru_cache(maxsize=16)
def _trade_off(charges: tuple[Charge, ...], delta: float, adjacency: Adjacency, exact: bool) -> TradeOff:
    smallest = max(delta, _SMALLEST_RATE)
    mu, others = gaussian_and_others(charges, adjacency)
    if not others:
        return TradeOff((), mu, smallest)
    # What dominates everything: a release that gives the record away.
    totals = [_symmetric(Direction(np.zeros(1), np.zeros(1), 1.0))]
    try:
        with np.errstate(all="ignore"):
            totals.append(compose_charges(charges, _NEAR, adjacency))
    except (ArithmeticError, MemoryError):
        pass
    if (pure := total_pure_epsilon(charges, adjacency)) < _LARGEST_LOSS:
        # Randomised response dominates every ε-DP release (Kairouz, Oh, Viswanath 2015, Theorem 3.4).
        likely = 1 / (1 + math.exp(-pure))
        totals.append(_symmetric(Direction(np.array([pure]), np.array([likely]), 0.0)))
    if exact:
        from pl_privknn.privacy.accounting.exact import exact_compositions  # loads a compiler

        totals += exact_compositions(charges, delta=delta, adjacency=adjacency, near=_NEAR)
    return TradeOff(tuple(totals), None, smallest)


def attack_in_words(rates: Mapping[str, Any], unit: str = "record") -> str:
    """Sentence about the strongest attack from the result of :meth:`TradeOff.to_dict`."""
    return (
        f"detects at most {at_most(100 * rates['tpr_at_fpr_0.01'], 3)} % of the private {unit}s at 1 % false alarms; "
        f"guessing detects 1 % (advantage {at_most(rates['advantage'], 3)}, Gaussian DP μ = "
        f"{at_most(rates['gaussian_dp_mu'], 3)})"
    )


def _symmetric(direction: Direction) -> Composition:
    return Composition(direction, direction)


def _gaussian_rate(mu: float, fpr: Floats) -> Floats:
    from scipy.special import ndtr, ndtri

    return np.maximum(ndtr(ndtri(fpr) + mu), fpr)


def _rate(ahead: Direction, behind: Direction, fpr: Floats) -> Floats:
    """TPR at each FPR where ``ahead`` is the loss under the distribution that the test is to find.

    Every ε gives a valid line, TPR ≤ e^ε·FPR + δ(ε); the loss of the atom at which the test's threshold lies
    gives the tightest. Losses below 0 come from the other direction, with the roles of both errors exchanged.
    """
    upper, lower = ahead.above
    at = _last_reaching(lower, fpr)
    ratio = np.exp(np.minimum(ahead.losses, _LARGEST_LOSS))
    found = upper[at + 1] + ratio[np.maximum(at, 0)] * np.maximum(fpr - lower[at + 1], 0.0)
    found = np.where(at >= 0, found, fpr + float(ahead.delta(np.zeros(1))[0]) - ahead.infinity)
    found = np.minimum(found + ahead.infinity, 1.0)

    upper, lower = behind.above
    rest = 1.0 - fpr
    reached = upper + behind.infinity
    at = _last_reaching(reached, rest)
    ratio = np.exp(-behind.losses)
    missed = lower[at + 1] + ratio[np.maximum(at, 0)] * np.maximum(rest - reached[at + 1], 0.0)
    missed = np.where(at >= 0, missed, rest - float(behind.delta(np.zeros(1))[0]))
    return np.clip(np.minimum(found, 1.0 - missed), fpr, 1.0)


def _last_reaching(falling: Floats, values: Floats) -> NDArray[np.int64]:
    """Last atom at and above which at least each value lies; −1 where all atoms together fall short."""
    at: NDArray[np.int64] = len(falling) - 1 - np.searchsorted(falling[::-1], values, side="left")
    return np.minimum(at, len(falling) - 2)


def _mu(total: Composition, smallest: float) -> float:
    """Smallest μ whose trade-off covers the total's wherever both error rates are at least ``smallest``.

    The total's trade-off is a polygon and the Gaussian one is concave, so its corners and the ends decide.
    """
    from scipy.special import ndtri

    edge = np.array([smallest])
    ends = [_rate(*pair, edge) for pair in ((total.remove, total.add), (total.add, total.remove))]
    largest = float(np.max(ndtri(np.concatenate(ends)) - ndtri(edge)))
    for side in (total.remove, total.add):
        upper, lower = side.above
        reached = upper + side.infinity
        corners = (lower >= smallest) & (reached <= 1 - smallest)
        largest = max(largest, float(np.max(ndtri(reached[corners]) - ndtri(lower[corners]), initial=0.0)))
    return largest
