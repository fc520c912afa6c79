"""Privacy loss distributions on a grid: connect-the-dots for one release.

A release with the pair (P, Q) is described by where its loss ``log(P/Q)`` lies and how much of P and of Q
lies there (:class:`LossMeasure`). Connect-the-dots (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022) moves
the mass of each grid cell to the cell's two ends so that both its P-mass and its Q-mass are kept; that is the
tightest pair on the grid that dominates. Doing so with masses, instead of second differences of the privacy
profile, needs no subtraction of nearly equal numbers, so grids as fine as 1e-9 stay usable.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting.rdp import sampled_loss

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


Floats = NDArray[np.float64]

_EMPTY: Floats = np.empty(0)
#: Standard deviations of Gaussian noise that are kept; the mass beyond (1e-32) counts as an infinite loss.
GAUSSIAN_REACH = 12.0
_LARGE_MU = 1e4


@dataclasses.dataclass(frozen=True)
class LossMeasure:
    """Masses of two distributions, upper and lower, along the privacy loss log(upper/lower).

    Attributes:
        losses: losses of atoms, shape ``(n,)``; ±inf where one of the masses is zero.
        upper: mass of the upper distribution at each atom, shape ``(n,)``.
        lower: mass of the lower distribution at each atom, shape ``(n,)``.
        first_cell: grid index j of the first cell; cell i spans losses ((j+i)·h, (j+i+1)·h].
        cell_upper: upper mass of each cell, shape ``(m,)``.
        cell_lower: lower mass of each cell, shape ``(m,)``.
    """

    losses: Floats = dataclasses.field(default_factory=lambda: _EMPTY)
    upper: Floats = dataclasses.field(default_factory=lambda: _EMPTY)
    lower: Floats = dataclasses.field(default_factory=lambda: _EMPTY)
    first_cell: int = 0
    cell_upper: Floats = dataclasses.field(default_factory=lambda: _EMPTY)
    cell_lower: Floats = dataclasses.field(default_factory=lambda: _EMPTY)

    def reversed(self) -> LossMeasure:
        """Copy with the upper and the lower distribution exchanged."""
        return LossMeasure(
            -self.losses,
            self.lower,
            self.upper,
            -(self.first_cell + len(self.cell_upper)),
            self.cell_lower[::-1],
            self.cell_upper[::-1],
        )

    def on_grid(self, discretization: float) -> tuple[int, Floats, float]:
        """Connect-the-dots: ``(index of the first grid point, upper masses, infinite-loss mass)``."""
        finite = np.isfinite(self.losses)
        scaled = self.losses[finite] / discretization
        cells = np.floor(scaled)
        # Share of an atom's upper mass that goes to the cell's right end.
        share = np.expm1(-(scaled - cells) * discretization) / math.expm1(-discretization)
        indices = cells.astype(np.int64)
        bounds = [int(i) for i in (indices.min(), indices.max() + 1)] if len(indices) else []
        if len(self.cell_upper):
            bounds += [self.first_cell, self.first_cell + len(self.cell_upper)]
        low, high = (min(bounds), max(bounds)) if bounds else (0, 0)
        masses = np.zeros(high - low + 1)
        upper = self.upper[finite]
        masses += np.bincount(indices - low, upper * (1 - share), len(masses))
        masses += np.bincount(indices - low + 1, upper * share, len(masses))
        if len(self.cell_upper):
            left_ends = discretization * (self.first_cell + np.arange(len(self.cell_upper)))
            # A ratio beyond e^700 is taken for e^700, which sends more mass to the right: pessimistic, and finite.
            ratio = np.exp(np.minimum(left_ends, 700.0))
            right = (self.cell_upper - ratio * self.cell_lower) / -math.expm1(-discretization)
            right = np.clip(right, 0.0, self.cell_upper)
            start = self.first_cell - low
            masses[start : start + len(right)] += self.cell_upper - right
            masses[start + 1 : start + 1 + len(right)] += right
        # Rounding a loss of -inf up to the lowest grid point is pessimistic.
        masses[0] += float(np.sum(self.upper[np.isneginf(self.losses)]))
        return low, masses, float(np.sum(self.upper[np.isposinf(self.losses)]))


#: All mass at an infinite loss: a release that gives the record away, which dominates every other one.
NOTHING_HIDDEN = LossMeasure(np.array([math.inf]), np.array([1.0]), np.array([0.0]))


def to_distribution(
    remove: LossMeasure, add: LossMeasure | None, discretization: float
) -> PrivacyLossDistribution:
    """Convert losses of both directions to dp-accounting's object; ``add=None`` where both are equal."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    def pmf(measure: LossMeasure) -> pld_pmf.DensePLDPmf:
        low, masses, infinity = measure.on_grid(discretization)
        return pld_pmf.DensePLDPmf(discretization, low, masses, infinity, True)

    return privacy_loss_distribution.PrivacyLossDistribution(pmf(remove), None if add is None else pmf(add))


def unsampled_loss(losses: Floats, sampling_rate: float) -> Floats:
    """The u with log(1−γ+γe^u) = loss; -inf for losses of log(1−γ) and below, which sampling rules out."""
    if sampling_rate == 1.0:
        return losses
    with np.errstate(divide="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / sampling_rate, -1.0))
    return np.where(losses > 30.0, losses - math.log(sampling_rate), near)


def cell_edges(ends: Floats, sampling_rate: float, discretization: float) -> tuple[int, Floats]:
    """Cells of a grid over the losses of a sampled release.

    Args:
        ends: smallest and largest loss without sampling.
        sampling_rate: Poisson rate γ.
        discretization: spacing of the grid.

    Returns:
        The first cell, and the loss without sampling at the edges of all of them.
    """
    smallest, largest = sampled_loss(ends, sampling_rate)
    first, last = math.floor(smallest / discretization), math.ceil(largest / discretization)
    return first, unsampled_loss(discretization * np.arange(first, last + 1), sampling_rate)


def gaussian_losses(mu: float, sampling_rate: float, discretization: float) -> LossMeasure:
    """Losses of the mixture (1−γ)·N(0, 1) + γ·N(μ, 1) against N(0, 1): the remove direction.

    The loss log(1−γ+γe^{μx−μ²/2}) grows with x, so each grid cell is an interval of x.
    """
    from scipy.special import ndtr

    reach = mu * np.array([-GAUSSIAN_REACH, mu + GAUSSIAN_REACH]) - mu * mu / 2
    first, edges = cell_edges(reach, sampling_rate, discretization)
    x = edges / mu + mu / 2

    def masses(points: Floats) -> tuple[Floats, float, float]:
        below, above = ndtr(points), ndtr(-points)
        # Differences of the tail that is the smaller one keep their relative accuracy.
        cells = np.where(points[1:] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
        return np.maximum(cells, 0.0), float(below[0]), float(above[-1])

    base, base_below, base_above = masses(x)
    shifted, shifted_below, shifted_above = masses(x - mu)

    def mixed(without: Floats, present: Floats) -> Floats:
        return (1 - sampling_rate) * without + sampling_rate * present

    tails_base = np.array([base_below, base_above])
    tails_mixed = mixed(tails_base, np.array([shifted_below, shifted_above]))
    return LossMeasure(
        np.array([-math.inf, math.inf]), tails_mixed, tails_base, first, mixed(base, shifted), base
    )


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of μ-Gaussian-DP: Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle and Wang 2018, Theorem 8)."""
    from scipy.special import log_ndtr

    first, second = float(log_ndtr(mu / 2 - epsilon / mu)), epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest ε ≥ 0 at which μ-Gaussian-DP holds with ``delta``, by bisection (upper end, to 1e-12)."""
    from scipy.special import ndtri

    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if mu > _LARGE_MU:
        # The second term is less than the first by a factor of about μ, and its rounding errors are not: left out.
        return max(0.0, mu * mu / 2 - mu * float(ndtri(delta)))
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    while gaussian_delta(mu, high) > delta:
        high *= 2
    return bisect(lambda eps: gaussian_delta(mu, eps) <= delta, high, 0.0, absolute=1e-18, relative=1e-12)


#: Points of a composed distribution, at most: some 400 MB of work arrays.
MAX_POINTS = 1 << 24
#: Finest grid: finer ones leave nothing of a mass's differences.
FINEST = 2.0**-40

# From this δ on the FFT runs on masses that are hardly tilted.
_NO_TILT = 1e-4


class GridTooFine(Exception):
    """The composition would need more points than :data:`MAX_POINTS`.

    Attributes:
        factor: how much coarser the grid has to be, a power of two.
    """

    def __init__(self, points: int) -> None:
        super().__init__(points)
        self.factor = 2.0 ** math.ceil(math.log2(points / MAX_POINTS))


@dataclasses.dataclass(frozen=True)
class Direction:
    """Total loss of a composition in one direction, on a grid.

    Attributes:
        losses: ascending and at least 0, shape ``(n,)``, n ≥ 1; smaller losses play no part at any ε ≥ 0.
        masses: upper mass at each loss, shape ``(n,)``.
        infinity: mass of an infinite loss, truncated tails included.
    """

    losses: Floats
    masses: Floats
    infinity: float

    @classmethod
    def from_grid(cls, first: int, masses: Floats, step: float, infinity: float) -> Direction:
        """Make a total loss from masses at losses ``step·(first + i)``; losses below 0 are dropped."""
        masses = masses[max(0, -first) :]
        first = max(first, 0)
        if not len(masses):
            return cls(np.zeros(1), np.zeros(1), infinity)
        losses: Floats = step * np.arange(first, first + len(masses), dtype=np.float64)
        return cls(losses, masses, infinity)

    @functools.cached_property
    def above(self) -> tuple[Floats, Floats]:
        """Upper and lower mass at and above each grid point, each with a closing 0."""
        lower = self.masses * np.exp(-self.losses)
        closing: Floats = np.zeros(1)
        upper_sum = np.concatenate([np.cumsum(self.masses[::-1])[::-1], closing])
        return upper_sum, np.concatenate([np.cumsum(lower[::-1])[::-1], closing])

    def delta(self, epsilon: Floats) -> Floats:
        """Hockey-stick divergence at each ε ≥ 0."""
        upper, lower = self.above
        at = np.searchsorted(self.losses, epsilon, side="right")
        value = upper[at] - _scaled(lower[at], np.asarray(epsilon, dtype=np.float64))
        return np.clip(self.infinity + np.maximum(value, 0.0), 0.0, 1.0)

    def epsilon(self, delta: float) -> float:
        """Smallest ε ≥ 0 with δ(ε) ≤ delta; inf where there is none."""
        if not self.infinity <= delta or not np.isfinite(self.masses).all():
            return math.inf
        upper, lower = self.above
        # δ at each grid point, where only the points beyond it count; 0 beyond the last.
        beyond = self.infinity + np.maximum(upper[1:] - _scaled(lower[1:], self.losses), 0.0)
        first = int(np.argmax(beyond <= delta))
        ceiling = float(self.losses[first])
        # Between the grid point before and this one, this one and those beyond count.
        excess = self.infinity + float(upper[first]) - delta
        if excess <= 0:
            return 0.0
        if lower[first] <= 0:
            return ceiling
        return min(max(0.0, math.log(excess) - math.log(lower[first])), ceiling)


def _scaled(lower: Floats, epsilon: Floats) -> Floats:
    """e^ε·lower without overflow where lower is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.exp(epsilon + np.log(lower))


@dataclasses.dataclass(frozen=True)
class Composition:
    """Total loss of a composition in both directions (one object twice where they agree)."""

    remove: Direction
    add: Direction

    def delta(self, epsilon: Floats) -> Floats:
        """Larger hockey-stick divergence of both directions, shape of ``epsilon``."""
        return np.maximum(self.remove.delta(epsilon), self.add.delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Smallest ε ≥ 0 at which both directions stay within ``delta``."""
        return max(self.remove.epsilon(delta), self.add.epsilon(delta))


def compose(
    parts: Sequence[tuple[PrivacyLossDistribution, int]], delta: float, epsilon: float | None = None
) -> Composition:
    """Compose ``count`` copies of each distribution, with full relative accuracy near ``delta``.

    All parts must share one grid. Cost: one FFT a part and direction, whatever the counts.

    Args:
        parts: pairs of a distribution from :meth:`Mechanism.pld` and how often it is composed.
        delta: where accuracy matters. The FFT runs on exponentially tilted masses, whose bulk lies where
            the tail of the total is about ``delta``, so its rounding noise (relative 1e-16 a composition)
            is small relative to δ, however small that is.
        epsilon: where accuracy matters, if δ at an ε is wanted: losses far below the tail of mass ``delta``
            are not accurate where single outcomes have much mass.
    """
    remove = [(d._pmf_remove.to_dense_pmf(), n) for d, n in parts]
    if all(d._symmetric for d, _ in parts):
        total = _compose_direction(remove, delta, epsilon)
        return Composition(total, total)
    add = [(d._pmf_add.to_dense_pmf(), n) for d, n in parts]
    return Composition(_compose_direction(remove, delta, epsilon), _compose_direction(add, delta, epsilon))


def _compose_direction(
    parts: Sequence[tuple[Any, int]], delta: float, epsilon: float | None = None
) -> Direction:
    from scipy import fft

    pieces: list[tuple[Floats, int, int]] = []
    log_finite = 0.0
    for pmf, count in parts:
        masses = np.maximum(pmf._probs, 0.0)
        used = np.flatnonzero(masses)
        if not len(used):
            return Direction(np.zeros(1), np.zeros(1), 1.0)
        pieces.append((masses[used[0] : used[-1] + 1], int(pmf._lower_loss) + int(used[0]), count))
        infinite = min(float(pmf._infinity_mass), 1.0)
        log_finite += count * math.log1p(-infinite) if infinite < 1 else -math.inf
    step = float(parts[0][0]._discretization)
    infinity = -math.expm1(log_finite)
    if len(pieces) == 1 and pieces[0][2] == 1:
        masses, offset, _ = pieces[0]
        return Direction.from_grid(offset, masses, step, infinity)

    means, spread = 0.0, 0.0
    for masses, offset, count in pieces:
        grid = np.arange(len(masses)) + offset
        weight = masses / masses.sum()
        mean = float(grid @ weight)
        means += count * mean
        spread += count * float((grid - mean) ** 2 @ weight)
    # Everything below is in units of grid steps; theta is the exponential tilt per step.
    scale = max(math.sqrt(spread), 1e-3)
    # Down to where even the longest tail of one release is hardly tilted.
    longest = max(len(masses) for masses, _, _ in pieces)
    thetas = np.geomspace(min(1e-2 / scale, 1 / longest), 60.0 / scale, 100)
    upper_log_mgf = _log_mgf(pieces, thetas)

    def upper_reach(tail: float) -> tuple[float, int]:
        reach = (upper_log_mgf - math.log(tail)) / thetas
        reach[~np.isfinite(reach)] = math.inf
        best = int(np.argmin(reach))
        return float(reach[best]), best

    _, best = upper_reach(delta)
    if delta > _NO_TILT:
        # Rounding noise is small relative to δ anyway, and hockey sticks this large reach far into the bulk.
        best = 0
    if epsilon is not None:
        # Saddle point at ε: the tilted bulk lies there.
        best = int(np.argmin(upper_log_mgf - thetas * (epsilon / step)))
    theta, log_scale = float(thetas[best]), float(upper_log_mgf[best])
    top = math.ceil(upper_reach(delta * 1e-10)[0])
    # Chernoff bounds of the tilted total, whose log-moments are differences of the untilted ones.
    top = max(top, math.ceil(_reach(pieces, theta, log_scale, thetas, +1)))
    bottom = math.floor(-_reach(pieces, theta, log_scale, thetas, -1))
    largest = sum(count * (offset + len(masses) - 1) for masses, offset, count in pieces)
    top = min(top, largest)
    bottom = max(bottom, sum(count * offset for _, offset, count in pieces))
    top = max(top, bottom)
    if top - bottom >= MAX_POINTS:
        raise GridTooFine(top - bottom + 1)
    length = fft.next_fast_len(top - bottom + 1, real=True)

    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    centre = 0
    for masses, offset, count in pieces:
        with np.errstate(divide="ignore"):
            log_tilted = np.log(masses) + theta * (np.arange(len(masses)) + offset)
        tilted = np.exp(log_tilted - np.max(log_tilted))
        tilted /= tilted.sum()
        middle = round(float(np.arange(len(tilted)) @ tilted))
        # The bulk around index 0 keeps phases small, so powers with huge counts stay accurate.
        folded = np.bincount((np.arange(len(tilted)) - middle) % length, tilted, minlength=length)
        centre += count * (offset + middle)
        spectrum *= fft.rfft(folded) ** count
    total = np.maximum(fft.irfft(spectrum, length), 0.0)
    total = np.roll(total, (centre - bottom) % length)
    with np.errstate(divide="ignore"):
        masses = np.exp(np.minimum(np.log(total) + log_scale - theta * (bottom + np.arange(length)), 0.0))
    missing = 0.0
    if bottom + length <= largest:
        missing = math.exp(min(0.0, float(np.min(upper_log_mgf - thetas * (bottom + length)))))
    return Direction.from_grid(bottom, masses, step, min(1.0, infinity + missing))


def _log_mgf(pieces: Sequence[tuple[Floats, int, int]], thetas: Floats) -> Floats:
    """Logarithm of E[e^{θ·loss}] of the total at each θ, losses in grid steps, shape of ``thetas``."""
    total = np.zeros_like(thetas)
    for masses, offset, count in pieces:
        rising = thetas >= 0
        sums = np.empty_like(thetas)
        sums[rising] = _geometric_sums(masses, thetas[rising])
        sums[~rising] = _geometric_sums(masses[::-1], -thetas[~rising])
        peak = np.maximum(0.0, thetas * (len(masses) - 1))
        total += count * (np.log(sums) + peak + thetas * offset)
    return total


def _geometric_sums(masses: Floats, slopes: Floats) -> Floats:
    """Σ of masses[n-1-i]·e^{-slope·i} for each slope ≥ 0: a product of matrices instead of n powers a slope."""
    width = math.isqrt(len(masses) - 1) + 1
    height = -(-len(masses) // width)
    rows = np.concatenate([np.zeros(height * width - len(masses)), masses]).reshape(height, width)
    within = np.exp(-np.outer(np.arange(width)[::-1], slopes))
    found: Floats = np.sum(rows @ within * np.exp(-np.outer(width * np.arange(height)[::-1], slopes)), axis=0)
    return found


def _reach(
    pieces: Sequence[tuple[Floats, int, int]], theta: float, log_scale: float, thetas: Floats, sign: int
) -> float:
    """Bound on the grid steps of the tilted total in one direction, but for a mass of 1e-20."""
    extra = thetas[::3]
    return float(np.min((_log_mgf(pieces, theta + sign * extra) - log_scale + 46.0) / extra))


def choose_discretization(variance: float, releases: int, span: float = 0.0) -> float:
    """Grid spacing (a power of two) at which connect-the-dots costs less than about 0.01 % of ε.

    Moving losses to grid points adds up to h²/6 to the variance of each release's loss, so h is a small
    part of the root mean square loss; few releases are cheap and get a finer grid still.

    Args:
        variance: about the variance of the total loss, nats².
        releases: number of releases composed.
        span: about the largest loss of any one release; at most some half a million points cover it, so for
            very heavy tails the grid is coarser (and the result still an upper bound).
    """
    spread = math.sqrt(variance) if 0 < variance < math.inf else 1.0
    fine = 2.0**-14 if releases == 1 else 2.0**-11
    # The lower limit keeps some three million points across ±20 standard deviations.
    share = max(min(0.03 / math.sqrt(releases), fine), 2.0**-16)
    return 2.0 ** math.floor(math.log2(max(spread * share, span * 2.0**-18, FINEST)))


def bisect(
    holds: Callable[[float], bool], good: float, bad: float, *, absolute: float = 0.0, relative: float = 0.0
) -> float:
    """Bisect for the border of a property, and return a number beside it at which the property holds.

    A root finder ends on either side of a root; here every answer was tried itself.

    Args:
        holds: the property.
        good: a number at which it holds.
        bad: a number, above or below, at which it does not.
        absolute: width of the last interval.
        relative: the same as a share of the answer; the larger width counts.
    """
    while abs(bad - good) > max(absolute, relative * abs(good)):
        middle = (good + bad) / 2
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
