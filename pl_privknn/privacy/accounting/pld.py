"""Privacy loss distributions on a grid: connect-the-dots for one release.

A release with the pair (P, Q) is described by where its loss ``log(P/Q)`` lies and how much of P and of Q
lies there (:class:`LossMeasure`). Connect-the-dots (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022) moves
the mass of each grid cell to the cell's two ends so that both its P-mass and its Q-mass are kept; that is the
tightest pair on the grid that dominates. Doing so with masses, instead of second differences of the privacy
profile, needs no subtraction of nearly equal numbers, so grids as fine as 1e-9 stay usable.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting.rdp import log_delta_improved, sampled_loss

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]

_EMPTY: Floats = np.empty(0)
#: Standard deviations of Gaussian noise that are kept; the mass beyond (1e-32) counts as an infinite loss.
GAUSSIAN_REACH = 12.0
_LARGE_MU = 1e4


@dataclasses.dataclass(frozen=True)
class LossMeasure:
    """How the masses of two distributions, upper and lower, lie along the privacy loss log(upper/lower).

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
        """The same pair with upper and lower exchanged."""
        return LossMeasure(
            -self.losses,
            self.lower,
            self.upper,
            -(self.first_cell + len(self.cell_upper)),
            self.cell_lower[::-1],
            self.cell_upper[::-1],
        )

    def joined(self, atoms: LossMeasure) -> LossMeasure:
        """This measure with the atoms of another one added."""
        return dataclasses.replace(
            self,
            losses=np.append(self.losses, atoms.losses),
            upper=np.append(self.upper, atoms.upper),
            lower=np.append(self.lower, atoms.lower),
        )

    def floored(self, discretization: float) -> tuple[int, Floats, float]:
        """Losses rounded down, as :meth:`on_grid` returns them: nowhere more than the pair's own profile."""
        finite = np.isfinite(self.losses)
        indices = np.floor(self.losses[finite] / discretization).astype(np.int64)
        low = int(indices.min())
        masses = np.bincount(indices - low, self.upper[finite]).astype(np.float64)
        infinite = float(np.sum(self.upper[np.isposinf(self.losses)]))
        return low, masses, infinite

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


def to_distribution(
    remove: LossMeasure, add: LossMeasure | None, discretization: float, pessimistic: bool = True
) -> PrivacyLossDistribution:
    """dp-accounting's object for a pair of directions; ``add=None`` where both are the same.

    With ``pessimistic=False`` a bound from below, for measures of atoms alone.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    def pmf(measure: LossMeasure) -> pld_pmf.DensePLDPmf:
        points = measure.on_grid if pessimistic else measure.floored
        low, masses, infinity = points(discretization)
        return pld_pmf.DensePLDPmf(discretization, low, masses, infinity, pessimistic)

    return privacy_loss_distribution.PrivacyLossDistribution(pmf(remove), None if add is None else pmf(add))


def unsampled_loss(losses: Floats, sampling_rate: float) -> Floats:
    """The u with log(1−γ+γe^u) = loss; -inf for losses of log(1−γ) and below, which sampling rules out."""
    if sampling_rate == 1.0:
        return losses
    with np.errstate(divide="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / sampling_rate, -1.0))
    return np.where(losses > 30.0, losses - math.log(sampling_rate), near)


def gaussian_losses(mu: float, sampling_rate: float, discretization: float) -> LossMeasure:
    """Losses of the mixture (1−γ)·N(0, 1) + γ·N(μ, 1) against N(0, 1): the remove direction.

    The loss log(1−γ+γe^{μx−μ²/2}) grows with x, so each grid cell is an interval of x.
    """
    from scipy.special import ndtr

    reach = mu * np.array([-GAUSSIAN_REACH, mu + GAUSSIAN_REACH]) - mu * mu / 2
    smallest, largest = sampled_loss(reach, sampling_rate)
    first, last = math.floor(smallest / discretization), math.ceil(largest / discretization)
    edges = discretization * np.arange(first, last + 1)
    x = unsampled_loss(edges, sampling_rate) / mu + mu / 2

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


def from_rdp(orders: Floats, curve: Floats, discretization: float) -> PrivacyLossDistribution:
    """A dominating pair for all that is known from an RDP curve valid in both directions.

    The conversion gives an upper bound h(ε) on the privacy profile at every ε ≥ 0, and by
    ``H_{−ε}(P‖Q) = 1 − e^{−ε} + e^{−ε}·H_ε(Q‖P)`` at every ε < 0. A privacy profile is convex in e^ε, so it
    lies below the largest convex function below h, which in turn is the profile of some pair.
    """
    # At most a million grid points; what is left beyond them counts as an infinite loss.
    reach = min(rdp_reach(orders, curve), 2.0**19 * discretization)
    points = min(20_000, max(200, math.ceil(reach / discretization)))
    stride = max(1, math.ceil(reach / discretization / points))
    indices = stride * np.arange(-points, points + 1)
    eps = discretization * indices
    ahead = np.exp(log_delta_improved(orders, curve, np.abs(eps)))
    bound = np.where(eps >= 0, ahead, -np.expm1(eps) + np.exp(np.minimum(eps, 0.0)) * ahead)
    x = np.exp(eps)
    hull = lower_hull(x, bound)
    x, bound, indices = x[hull], bound[hull], indices[hull]
    slopes = np.concatenate([[-1.0], np.maximum(np.diff(bound) / np.diff(x), -1.0), [0.0]])
    lower = np.maximum(np.diff(slopes), 0.0)
    upper = x * lower
    # The upper masses and the infinite one sum to 1 up to what is below the first point: put it there.
    infinity = float(bound[-1])
    upper[0] = max(upper[0], 1.0 - infinity - float(np.sum(upper[1:])))
    measure = LossMeasure(
        np.append(discretization * indices, math.inf), np.append(upper, infinity), np.append(lower, 0.0)
    )
    return to_distribution(measure, None, discretization)


def rdp_reach(orders: Floats, curve: Floats) -> float:
    """An ε, at most 600, beyond which the conversion of an RDP curve leaves a δ below e^−75."""
    low, high = 0.0, 600.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.asarray(log_delta_improved(orders, curve, middle))) > -75.0:
            low = middle
        else:
            high = middle
    return high


def lower_hull(x: Floats, y: Floats) -> NDArray[np.int64]:
    """Indices of the lower convex hull of points with strictly increasing x (monotone chain)."""
    hull: list[int] = []
    xs, ys = x.tolist(), y.tolist()
    for i in range(len(xs)):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (ys[b] - ys[a]) * (xs[i] - xs[a]) < (ys[i] - ys[a]) * (xs[b] - xs[a]):
                break
            hull.pop()
        hull.append(i)
    return np.array(hull, dtype=np.int64)


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
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    while gaussian_delta(mu, high) > delta:
        high *= 2
    while high - low > 1e-12 * max(high, 1e-6):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high
