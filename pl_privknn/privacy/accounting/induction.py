"""Backward induction over a family of pairs: the worst privacy profile of many adaptive releases, compiled.

**What is computed.** A release of the family has one of the pairs (p_k, q_k), k = 1 … m, of distributions
over a few outcomes o; an adversary picks k before every release, seeing all earlier outcomes. Write L_ko =
p_ko / q_ko and, for convex W on [0, ∞) with W(0) = 0 and final slope 1,

    (F W)(r) = max_k Σ_o q_ko · W(r·L_ko),      an outcome with q_ko = 0 counting as r·p_ko.

With W₀(r) = (r − 1)₊ and V_n = FⁿW₀, V_n(r) is the largest value of Σ_t (r·P(t) − Q(t))₊ over all adaptive
strategies, t running over the transcripts of n releases (dynamic programming: r times the likelihood ratio
so far is all that the rest of the game depends on). Because (r·s)·(L − 1/s)₊ scales, one induction holds
the whole profile: sup over strategies of the hockey-stick divergence is δ_n(ε) = e^ε·V_n(e^{−ε}) for every
real ε.

**The other direction is free.** For one strategy, Σ(rQ − P)₊ = r·Σ(P/r − Q)₊ + r − 1. The supremum over
strategies on both sides gives the profile of the pairs (q_k, p_k) from that of the pairs (p_k, q_k).

**Grid.** Values are kept at r_i = e^{ih} and as the *excess* U = V − (r − 1)₊ ≥ 0, which vanishes on both
sides, so small tails keep their relative accuracy; for r ≥ 1 use Σ_o (r·p_o − q_o) = r − 1. Multiplying r
by L_ko moves ln r by the same amount at every grid point, so linear interpolation is a fixed stencil of two
neighbours for each outcome. It never under-estimates: if the kept values are at least V_j at the grid
points, then V_j being convex is at most its chords, hence at most theirs, and the next values are again at
least V_{j+1}. Outside the active range [r_a, r_b] the kept function is U(r) = U(r_a)·r/r_a on the left (V
is convex, V(0) = 0) and U(r) = U(r_b) on the right (V has slope at most 1), upper bounds too.
Floating-point rounding (relative 1e-16 an operation, sums of positive terms only) is covered by an
inflation of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting.contenders import undominated
from pl_privknn.privacy.accounting.pld import LossMeasure
from pl_privknn.privacy.accounting.stencils import Stencils

Floats = NDArray[np.float64]

#: Largest |ln r| on the grid, nats; double precision ends at 708.
FARTHEST = 600.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """Upper bound on the worst privacy profile of a number of adaptive releases.

    Attributes:
        spacing: h, distance of grid points in ln r = −ε.
        first: grid index of the first value; negative.
        excess: U at r = e^{h·first}, e^{h·(first+1)}, …, shape ``(n,)``.
    """

    spacing: float
    first: int
    excess: Floats

    def delta(self) -> tuple[Floats, Floats]:
        """ε ascending and δ(ε) at the grid points, for the remove direction."""
        log_r = self.spacing * (self.first + np.arange(len(self.excess), dtype=np.float64))
        with np.errstate(over="ignore"):
            delta = np.exp(-log_r) * self.excess + np.maximum(-np.expm1(-log_r), 0.0)
        epsilon: Floats = -log_r[::-1]
        return epsilon, np.minimum(delta, 1.0)[::-1]

    def losses(self) -> LossMeasure:
        """The pair whose profile connects the grid values by straight lines; it dominates all strategies.

        A kink of V at r_i, of size s, is upper mass s and lower mass s·r_i at the loss −ln r_i. The slope at
        r → 0 is mass of an infinite loss; the excess at r → ∞ is lower mass where the upper has none.
        """
        index = self.first + np.arange(len(self.excess))
        ratio = np.exp(self.spacing * index)
        slopes = np.diff(self.excess) / (ratio[:-1] * math.expm1(self.spacing))
        never_below = float(self.excess[0] / ratio[0])
        kinks = np.diff(np.concatenate([[never_below], slopes, [0.0]]))
        kinks[index == 0] += 1.0
        kinks = np.maximum(kinks, 0.0)
        return LossMeasure(
            losses=np.concatenate([-self.spacing * index, [math.inf, -math.inf]]),
            upper=np.concatenate([kinks, [never_below, 0.0]]),
            lower=np.concatenate([kinks * ratio, [0.0, float(self.excess[-1])]]),
        )


def spread(p: Floats, q: Floats) -> float:
    """Root mean square loss of the family's widest pair, from Σ(p − q)·ln(p/q); 0 where none is finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = (p - q) * np.log(p / q)
    return math.sqrt(float(np.max(np.sum(np.where(np.isfinite(terms), terms, 0.0), axis=1))))


def reach(p: Floats, q: Floats, steps: int, *, spacing: float, tail: float) -> tuple[Floats, Floats]:
    """How far the total loss goes, upwards with the record and downwards without it, but for a rare tail.

    Chernoff's bound for every adaptive strategy: with κ(λ) = max_k log E_p[e^{λ·loss}], the process
    e^{λ·total − jκ} is a supermartingale, so P[total > x] ≤ e^{jκ(λ) − λx}. Losses are those after
    interpolation on the grid. Outcomes rarer than the tail and infinite losses are left out.

    Args:
        p: probabilities with the record, shape ``(pairs, outcomes)``.
        q: probabilities without it, same shape.
        steps: number of releases.
        spacing: h of the grid.
        tail: the tail's probability, over all releases.

    Returns:
        Distances in nats after 1, 2, …, ``steps`` releases, each of shape ``(steps,)``, never decreasing.
    """
    share = _share(tail, steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = np.log(p / q)
    moving = (np.maximum(p, q) > share) & np.isfinite(losses)
    losses = np.where(moving, losses, 0.0)
    near = spacing * np.floor(losses / spacing)
    weight = np.expm1(losses - near) / math.expm1(spacing)
    ends = np.concatenate([near, near + spacing], axis=1)
    lower = np.concatenate([q * (1 - weight), q * weight], axis=1)
    upper = np.concatenate(
        [p * np.exp(near - losses) * (1 - weight), p * np.exp(near + spacing - losses) * weight], axis=1
    )
    scale = max(spread(p, q), 1e-12)
    return _upper_reach(upper, ends, scale, steps, share), _upper_reach(lower, -ends, scale, steps, share)


def _share(tail: float, steps: int) -> float:
    return tail / (4 * steps)


def _upper_reach(masses: Floats, losses: Floats, scale: float, steps: int, share: float) -> Floats:
    largest = max(float(np.max(losses)), 0.0)
    low, high = 0.1 / (scale * math.sqrt(steps)), 300.0 / scale
    rates = np.geomspace(min(low, 1 / largest) if largest > 0 else low, high, 200)
    with np.errstate(over="ignore", invalid="ignore"):
        moments = [float(np.max(np.sum(masses * np.expm1(rate * losses), axis=1))) for rate in rates]
        growth = np.log1p(np.maximum(moments, 0.0))
    count = np.arange(1, steps + 1)
    # Never farther than the largest losses can add up to.
    distance: Floats = np.multiply(count, largest, dtype=np.float64)
    for rate, kappa in zip(rates, growth, strict=True):
        if math.isfinite(kappa):
            np.minimum(distance, (count * kappa - math.log(share)) / rate, out=distance)
    return np.maximum.accumulate(np.maximum(distance, 0.0))


def worst_profiles(
    p: Floats, q: Floats, steps: Sequence[int], *, spacing: float, tail: float
) -> list[Profile]:
    """Worst privacy profile of each number of releases in ``steps``, in one induction.

    Args:
        p: probabilities with the record, shape ``(pairs, outcomes)``, rows summing to one.
        q: probabilities without it, same shape.
        steps: numbers of releases, each at least 1.
        spacing: h of the grid. Interpolation adds up to h²/4 to the variance of the loss of each release.
        tail: masses this small may count as infinite losses, in all; any positive number is valid.

    Returns:
        One :class:`Profile` for each entry of ``steps``.

    Raises:
        ValueError: where p and q are not such arrays.
    """
    p, q = undominated(*_checked(p, q))
    total = max(steps)
    kept = np.maximum(p, q) > _share(tail, total)
    distances = [np.minimum(far, FARTHEST) for far in reach(p, q, total, spacing=spacing, tail=tail)]
    left, right = (np.ceil(far / spacing).astype(np.int64) + 1 for far in distances)
    plan = Stencils.build(p, q, kept, spacing, int(left[-1]), int(right[-1]))
    grid = np.arange(-left[-1], right[-1] + 1)
    # An outcome that is left out is worth at most r·p_o for r < 1 and q_o beyond.
    rare = float(np.max(np.where(kept, 0.0, np.maximum(p, q)).sum(axis=1)))
    slack = rare * np.exp(np.minimum(spacing * grid, 0.0))
    wanted = np.array(sorted(set(steps)), dtype=np.int64)
    found = plan.run(slack, left, right, wanted, spacing)
    rounding = 1 + 4 * (p.shape[1] + 3) * np.finfo(np.float64).eps * wanted
    position = {int(step): place for place, step in enumerate(wanted)}
    profiles = []
    for step in steps:
        low, high = int(left[-1] - left[step - 1]), int(left[-1] + right[step - 1] + 1)
        excess = found[position[step], low:high] * rounding[position[step]]
        profiles.append(Profile(spacing, -int(left[step - 1]), excess))
    return profiles


def _checked(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    p, q = np.atleast_2d(np.asarray(p, dtype=np.float64)), np.atleast_2d(np.asarray(q, dtype=np.float64))
    if p.shape != q.shape or p.ndim != 2 or p.size == 0:
        raise ValueError(
            f"p, q: shapes {p.shape} and {q.shape} must be equal and of the form (pairs, outcomes)"
        )
    for name, values in (("p", p), ("q", q)):
        if not np.all(values >= 0) or np.max(np.abs(values.sum(axis=1) - 1)) > 1e-9:
            raise ValueError(f"{name}: every row must hold probabilities that sum to one")
    return p, q
