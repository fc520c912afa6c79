"""Exact worst case of adaptive composition where releases have families of pairs.

Screening and arg-max releases have no single worst pair of output distributions: an adversary who sees
earlier answers may pick the pair, release by release, that suits the likelihood ratio reached so far. This
module bounds the privacy profile of *every* fully adaptive composition of a list of charges from above, and
attains the supremum up to the grid wherever a family's releases fit into one block.

Notation: r is Σ P / Σ Q over what was seen so far, W(r) ≥ 0 the value of the game from there on; values are
convex, W(0) = 0, slope at most 1, and the game ends with (r − e^ε)₊. A fixed pair (or one that dominates a
release, which for convex W is at least as good for the adversary) acts by the linear operator (G W)(r) =
E_q[W(r·p/q)]; a family by the maximum (F W)(r) = max_k (G_k W)(r). Linear operators commute with each
other. F is monotone, sublinear and commutes with scaling of r.

**1. Order.** For convex W, F G W ≤ G F W: F G W = max_k G_k G W = max_k G (G_k W) ≤ G (max_k G_k W). If the
adversary also chooses which kind of release comes next, the value with n family and m fixed releases left
obeys V(n, m) = max(F V(n−1, m), G V(n, m−1)) ≤ Gᵐ Fⁿ W₀ by induction, so the fixed releases belong *first
in time* (outermost), and the bound is attained by making them first. Putting them last, that is into W₀,
gives FⁿGᵐ W₀, the least of all orders: it would under-state releases that are interleaved, as screenings
and answers are.

**2. One induction for every ε.** (r − e^ε)₊ = e^ε·(r·e^{−ε} − 1)₊, so V_M = F^M (r − 1)₊ gives the worst
profile of M adaptive releases at every ε: δ_M(ε) = e^ε·V_M(e^{−ε}); see
below.

**3. Blocks.** δ_M is a privacy profile: as a function of s = e^ε it is s·V_M(1/s), convex, and lies between
(1 − s)₊ and 1. So it belongs to some fixed pair B (Zhu, Dong, Wang 2022). For each hockey stick F^M (r −
s)₊ = B (r − s)₊; every convex W above is a mixture of hockey sticks (and of r itself), F^M is sublinear,
hence F^M W ≤ B W. With n = aM + b: GᵐFⁿW₀ ≤ Gᵐ Bᵃ B_b W₀, where only fixed pairs are left, and those are
composed as privacy loss distributions. M = n is exact; M = 1 is the envelope of :meth:`Mechanism.pld`; the
excess falls like 1/M. The cost grows like M^1.5 and does not depend on n, so M follows from a budget of
work.

**4. Several families.** One is taken in blocks, all others by their envelopes E ≥ F, fixed pairs that may
then be pulled to the front as in 1. Each family is tried as the blocked one and the smallest result counts.
Multiplying the block profiles of two families is *not* proven: blocks need consecutive releases, and
F₁F₂F₁F₂… can't be sorted into F₁F₁…F₂F₂… because maxima don't commute.

**5. Directions.** Removing compares P with Q, adding Q with P, for all releases alike; ε is the larger of
both.

Backward induction over a family of pairs
-----------------------------------------
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
by L_ko moves ln r by the same amount at every grid point, so linear interpolation takes fixed weights of two
neighbours for each outcome. It never under-estimates: if the kept values are at least V_j at the grid
points, then V_j being convex is at most its chords, hence at most theirs, and the next values are again at
least V_{j+1}. Outside the active range [r_a, r_b] the kept function is U(r) = U(r_a)·r/r_a on the left (V
is convex, V(0) = 0) and U(r) = U(r_b) on the right (V has slope at most 1), upper bounds too.
Floating-point rounding (relative 1e-16 an operation, sums of positive terms only) is covered by an
inflation of the result.

**Pruning.** At every grid point and release the induction takes the best of all pairs of a family. Most can't be the
best one somewhere; the result does not change by a bit where pairs that provably lose are left out.

**Everywhere.** A pair of two outcomes with likelihood ratios a < 1 < b takes W(r) to the chord of W over [ra, rb], at
r. For convex W a wider interval gives a higher chord, so a pair whose interval lies within another's never counts.

**Near a point.** On the grid r_m = e^{mh} let V be the values, piecewise linear in r, and κ_m ≥ 0 the kink of V at
r_m. A pair turns V(r_i) into Σ_d c(d)·V(r_{i+d}), with Σ c(d) = Σ c(d)e^{dh} = 1. By summation by parts it gains

    Σ_d c(d)·V(r_{i+d}) − V(r_i) = r_i Σ_d κ_{i+d}·t(d),     t(d) = Σ_j c(j)(e^{jh} − e^{dh})₊ − (1 − e^{dh})₊ ≥ 0.

Write v_m = V_{m+1} − V_m − e^h(V_m − V_{m−1}), which is r_m·κ_m·(e^h − 1), and τ(d) = t(d)e^{−dh}/(e^h − 1): the gain
is Σ_d v_{i+d}·τ(d). Where every ratio v_{m+1}/v_m about i lies in [e^α, e^β], v_{i+d}/v_i lies between e^{αd} and
e^{βd}. So pair k loses to pair g at i if Σ_d (τ_g − τ_k)(d)·w(d) > 0, where w(d) is the one of the two that is worse
for g. Values become smooth after some releases: α and β are then close together, and of hundreds of pairs a handful
is left, neighbours of each other in the order of their ratios.

**Rounding.** The v are differences of values: where one is less than 1e-9 of its value nothing is concluded, so their
relative error stays below 1e-6, by which α and β are moved apart. A pair counts as beaten by a margin of 1e-4 of the
gain, and at least 0.01·v_i, far more than the rounding of weights and sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_open_unit, check_positive, compiled
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.pld import LossMeasure
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, check_adjacency, merged

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Grid points whose ratios are looked at together.
BLOCK = 32
#: Ranges of ln(v_{m+1}/v_m) are 2^c·UNIT wide, c = 0 … CLASSES − 1, and begin at multiples of half their width.
UNIT = 2.0**-12
CLASSES = 12
# Pairs that move ln r by more cells are always tried, and all are where the table of gains would be large.
_WIDEST = 512
_LARGEST = 4_000_000
# Likelihood ratios are hardly more accurate than this.
_SAME = 2e-15


def undominated(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Pairs that no other pair of the family dominates, ordered by likelihood ratio.

    Args:
        p: probabilities with the record, shape ``(pairs, outcomes)``.
        q: probabilities without it, same shape.

    Returns:
        The rows that are left; all of them, in order, where there are more than two outcomes.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = p / q
    if np.isnan(ratios).any():
        return p, q
    low, high = ratios.min(axis=1), ratios.max(axis=1)
    order = np.lexsort((-high, low))
    if p.shape[1] == 2:
        before = np.concatenate([[0.0], np.maximum.accumulate(high[order])[:-1]])
        order = order[high[order] > before * (1 + _SAME)]
    return p[order], q[order]


def gains(shifts: Ints, near: Floats, far: Floats, spacing: float) -> Floats:
    """τ(d) of the leading pairs, as many as can be left out where they lose.

    Args:
        shifts: grid cells by which an outcome moves ln r, shape ``(pairs, outcomes)``.
        near: weight of the cell's left end, same shape.
        far: weight of its right end.
        spacing: h of the grid.

    Returns:
        Shape ``(n, 2·reach + 1)``, n at most the number of pairs; no rows where nothing may be left out.
    """
    scale = near * np.exp(spacing * shifts) + far * np.exp(spacing * (shifts + 1))
    whole = np.maximum(np.abs((near + far).sum(axis=1) - 1), np.abs(scale.sum(axis=1) - 1)) <= 1e-13
    plain = whole & (np.abs(shifts).max(axis=1) < _WIDEST)
    number = len(plain) if plain.all() else int(np.argmin(plain))
    reach = int(np.abs(shifts[:number]).max(initial=0)) + 1
    if number * (2 * reach + 1) > _LARGEST:
        number = 0
    cells = np.arange(-reach, reach + 1)
    table = np.zeros((number, len(cells)))
    for weight, place in ((near, shifts), (far, shifts + 1)):
        for o in range(shifts.shape[1]):
            apart = np.exp(spacing * place[:number, o])[:, None] - np.exp(spacing * cells)
            # For d < 0 the same sum seen from the other side, without cancellation.
            table += weight[:number, o, None] * np.maximum(np.where(cells < 0, -apart, apart), 0.0)
    return table * np.exp(-spacing * cells) / math.expm1(spacing)


@compiled(error_model="numpy")
def find_ratios(
    values: Floats, zero: int, first: int, last: int, growth: float, least: Floats, most: Floats
) -> None:
    """Smallest and largest v_{m+1}/v_m of each block of grid points; 0 and infinity where they say nothing.

    Args:
        values: U at all grid points; V = U + (r − 1)₊.
        zero: place of r = 1.
        first: place of the first value that is not extrapolated.
        last: place after the last one.
        growth: e^h.
        least: where the smallest go, shape ``(blocks,)``.
        most: where the largest go.
    """
    for block in range(least.shape[0]):
        begin = block * BLOCK
        least[block], most[block] = 0.0, np.inf
        if begin <= first or begin + BLOCK + 1 >= last - 1:
            continue
        low, high, sound = np.inf, 0.0, True
        kink = values[begin + 1] - values[begin] - growth * (values[begin] - values[begin - 1])
        if begin == zero:
            kink += growth - 1
        for m in range(begin, begin + BLOCK):
            following = values[m + 2] - values[m + 1] - growth * (values[m + 1] - values[m])
            if m + 1 == zero:
                following += growth - 1
            sound = sound and kink > 1e-9 * values[m] and following > 1e-9 * values[m + 1]
            ratio = following / kink
            low, high = min(low, ratio), max(high, ratio)
            kink = following
        if sound:
            least[block], most[block] = low, high


@compiled(error_model="numpy")
def unpruned(table: Floats, low: float, high: float, known: Ints) -> tuple[int, int]:
    """First and last + 1 of the leading pairs that may be the best where all ratios lie in [low, high].

    Args:
        table: what :func:`gains` returned.
        low: smallest ratio.
        high: largest one.
        known: ranges found before, shape ``(CLASSES, 4 / UNIT + 4, 2)``; −1 to begin with.
    """
    pairs = table.shape[0]
    if not (low > 0.4 and high < 2.5):
        return 0, pairs
    bottom, top = math.log(low) - 1e-6, math.log(high) + 1e-6
    width, kind = UNIT, 0
    start = math.floor(bottom / (width / 2))
    while start * width / 2 + width < top:
        width, kind = 2 * width, kind + 1
        if kind == CLASSES:
            return 0, pairs
        start = math.floor(bottom / (width / 2))
    place = int(start + 2 / width) + 1
    if known[kind, place, 0] < 0:
        found = _unbeaten(table, start * width / 2, start * width / 2 + width)
        known[kind, place, 0], known[kind, place, 1] = found
    return known[kind, place, 0], known[kind, place, 1]


@compiled(error_model="numpy")
def _unbeaten(table: Floats, low: float, high: float) -> tuple[int, int]:
    pairs, cells = table.shape
    reach = cells // 2
    middle = np.exp((low + high) / 2 * (np.arange(cells) - reach))
    champion, best = 0, -1.0
    for k in range(pairs):
        gain = 0.0
        for d in range(cells):
            gain += table[k, d] * middle[d]
        if gain > best:
            champion, best = k, gain
    first, last = pairs, 0
    for k in range(pairs):
        ahead = 0.0
        for d in range(cells):
            difference = table[champion, d] - table[k, d]
            slope = low if (difference > 0) == (d > reach) else high
            ahead += difference * math.exp(slope * (d - reach))
        if ahead <= max(1e-4 * best, 0.01):
            first, last = min(first, k), k + 1
    return first, last


_TILE = 128


class InterpolationGrid(NamedTuple):
    """Interpolation weights of every outcome of every pair, and the contribution of (r − 1)₊ in addition to U.

    Attributes:
        shifts: grid cells by which an outcome moves ln r, shape ``(pairs, outcomes)``.
        near: weight of the cell's left end, same shape.
        far: weight of its right end.
        starts: position of the first grid point with a direct contribution, shape ``(pairs,)``.
        stops: position after the last one.
        offsets: where a pair's contributions begin in ``direct``.
        direct: contributions Σ(r·p − q)₊ for r < 1 and Σ(q − r·p)₊ for r ≥ 1, all pairs in a row.
        pad: grid points to keep beyond each end, so that shifted reads stay inside.
        gains: what :func:`~pl_privknn.privacy.accounting.exact.gains` returned for them.
    """

    shifts: Ints
    near: Floats
    far: Floats
    starts: Ints
    stops: Ints
    offsets: Ints
    direct: Floats
    pad: int
    gains: Floats

    @classmethod
    def build(
        cls, p: Floats, q: Floats, kept: NDArray[np.bool_], spacing: float, left: int, right: int
    ) -> InterpolationGrid:
        """Weights of the pairs ``(p, q)`` of shape ``(pairs, outcomes)``, where ``kept``, on −left … right cells."""
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.log(p / q)
        moving = kept & np.isfinite(losses)
        jump = np.where(moving, losses, 0.0)
        shifts = np.floor(jump / spacing).astype(np.int64)
        weight = np.clip(np.expm1(jump - shifts * spacing) / math.expm1(spacing), 0.0, 1.0)
        # Farther than the whole grid: the edge's value, which is not smaller than the value there.
        span = left + right + 2
        outside = np.abs(shifts) > span
        shifts = np.clip(shifts, -span, span)
        weight[outside] = 0.0
        mass = np.where(moving, q, 0.0)

        starts, stops = np.empty(len(p), dtype=np.int64), np.empty(len(p), dtype=np.int64)
        pieces: list[Floats] = []
        for k in range(len(p)):
            which = kept[k] & (p[k] != q[k])
            low = -np.max(losses[k, which], initial=0.0) / spacing
            high = -np.min(losses[k, which], initial=0.0) / spacing
            first = int(max(math.floor(max(low, -left)), -left))
            last = int(min(math.ceil(min(high, right)), right))
            log_r = spacing * np.arange(first, last + 1)
            piece = np.zeros(len(log_r))
            for o in np.flatnonzero(which):
                if p[k, o] == 0:
                    piece += np.where(log_r < 0, 0.0, q[k, o])
                elif q[k, o] == 0:
                    piece += np.where(log_r < 0, p[k, o] * np.exp(np.minimum(log_r, 0.0)), 0.0)
                else:
                    gain = q[k, o] * np.expm1(np.minimum(log_r + losses[k, o], 700.0))
                    piece += np.maximum(np.where(log_r < 0, gain, -gain), 0.0)
            starts[k], stops[k] = first + left, last + 1 + left
            pieces.append(piece)
        lengths = stops - starts
        near, far = mass * (1 - weight), mass * weight
        offsets, direct, pad = (
            np.cumsum(lengths) - lengths,
            np.concatenate(pieces),
            int(np.max(np.abs(shifts))) + 2,
        )
        table = gains(shifts, near, far, spacing)
        return cls(shifts, near, far, starts, stops, offsets, direct, pad, table)

    def run(self, slack: Floats, left: Ints, right: Ints, wanted: Ints, spacing: float) -> Floats:
        """U after each wanted number of releases, on the largest range.

        Args:
            slack: what is added after each release, at every grid point.
            left: grid points below r = 1 that are computed at each release.
            right: grid points above it.
            wanted: numbers of releases, ascending.
            spacing: h of the grid.

        Returns:
            Shape ``(len(wanted), len(slack))``.
        """
        decay = np.exp(-spacing * np.arange(len(slack) + self.pad + 1))
        return _run(self, slack, left, right, decay, wanted, math.exp(spacing))


@compiled(error_model="numpy")
def _run(
    grid: InterpolationGrid,
    slack: Floats,
    left: Ints,
    right: Ints,
    decay: Floats,
    wanted: Ints,
    growth: float,
) -> Floats:
    shifts, near, far, starts, stops, offsets, direct, pad, table = grid
    pairs, outcomes = shifts.shape
    # The leading pairs are tried where they may be the best, the others everywhere.
    leading, reach = table.shape[0], table.shape[1] // 2
    points = slack.shape[0]
    zero = pad + left[-1]
    current = np.zeros(points + 2 * pad)
    following = np.zeros(points + 2 * pad)
    gain = np.zeros(_TILE)
    result = np.zeros((wanted.shape[0], points))
    blocks = current.shape[0] // BLOCK + 1
    least, most = np.zeros(blocks), np.zeros(blocks)
    known = np.full((CLASSES, int(4 / UNIT) + 4, 2), -1)
    low, high, done = zero, zero, 0
    for step in range(1, wanted[-1] + 1):
        if leading:
            find_ratios(current, zero, low, high, growth, least, most)
        low, high = zero - left[step - 1], zero + right[step - 1] + 1
        for begin in range(low, high, _TILE):
            end = min(begin + _TILE, high)
            size = end - begin
            lowest, highest = np.inf, 0.0
            for block in range((begin - reach) // BLOCK, (end - 1 + reach) // BLOCK + 1):
                lowest, highest = min(lowest, least[block]), max(highest, most[block])
            first, last = unpruned(table, lowest, highest, known)
            best = following[begin:end]
            for i in range(size):
                best[i] = 0.0
            for place in range(first, last + pairs - leading):
                k = place if place < last else place - last + leading
                # Two outcomes at a time, so that pass/fail releases touch the buffer once.
                a, b, at = near[k, 0], far[k, 0], begin + shifts[k, 0]
                c, d, to = near[k, 1], far[k, 1], begin + shifts[k, 1]
                one, two = current[at : at + size + 1], current[to : to + size + 1]
                for i in range(size):
                    gain[i] = a * one[i] + b * one[i + 1] + c * two[i] + d * two[i + 1]
                for o in range(2, outcomes):
                    a, b, at = near[k, o], far[k, o], begin + shifts[k, o]
                    one = current[at : at + size + 1]
                    for i in range(size):
                        gain[i] += a * one[i] + b * one[i + 1]
                origin = offsets[k] - starts[k] - pad
                for i in range(max(starts[k] + pad, begin), min(stops[k] + pad, end)):
                    gain[i - begin] += direct[origin + i]
                for i in range(size):
                    best[i] = max(best[i], gain[i])
            for i in range(size):
                best[i] += slack[begin + i - pad]
        for i in range(low):
            following[i] = following[low] * decay[low - i]
        for i in range(high, following.shape[0]):
            following[i] = following[high - 1]
        current, following = following, current
        if step == wanted[done]:
            result[done, :] = current[pad : pad + points]
            done += 1
    return result


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
    """Bounds of the total loss, upwards with the record and downwards without it, but for a rare tail.

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
    """
    p, q = undominated(p, q)
    total = max(steps)
    kept = np.maximum(p, q) > _share(tail, total)
    distances = [np.minimum(far, FARTHEST) for far in reach(p, q, total, spacing=spacing, tail=tail)]
    left, right = (np.ceil(far / spacing).astype(np.int64) + 1 for far in distances)
    plan = InterpolationGrid.build(p, q, kept, spacing, int(left[-1]), int(right[-1]))
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


#: Work that one family may take, in interpolations: one pair of distributions, two outcomes, a grid
#: point and a release.
WORK = 6e9
# Grid cells in the root mean square loss of the widest pair: at least, and at most where work is left over.
# With d cells ε comes out too large by about 0.15 / d² of itself.
_DIVISIONS = 16
_MOST_DIVISIONS = 64
# Limits for families with rare outcomes of large loss, whose grids are long.
_LEAST_WORK, _MOST_DIRECT, _SHORT_BLOCK = 1e6, 2e7, 64
# Grid points that the finite losses of one block may take in the final composition.
_MOST_POINTS = 2.0**19
# Order at which twice the Rényi divergence over the order approximates the variance of the loss.
_VARIANCE_ORDER = 1.05


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Blocks of ``count`` releases of a family, and the grid that they are computed on.

    Attributes:
        size: M, releases in a block.
        blocks: number of whole blocks.
        rest: releases left over, fewer than M.
        divisions: grid cells in the root mean square loss of the widest pair.
    """

    size: int
    blocks: int
    rest: int
    divisions: float

    @classmethod
    def choose(cls, count: int, pairs: int, outcomes: int, work: float = WORK) -> BlockPlan:
        """Largest blocks, of nearly equal size, that the budget of work allows; all at once if possible.

        Args:
            count: number of releases.
            pairs: pairs in the family.
            outcomes: outcomes of a pair.
            work: budget in interpolations.
        """
        # Some 17 standard deviations of points at the last release; √j / √M on average is 2/3.
        unit = pairs * max(outcomes, 2) / 2 * 17 * 2 / 3
        affordable = max(1, int((work / (unit * _DIVISIONS)) ** (2 / 3)))
        number = math.ceil(count / affordable)
        size = math.ceil(count / number)
        room = work / (unit * size**1.5) if number == 1 else 0.0
        divisions = min(max(room, _DIVISIONS), _MOST_DIVISIONS)
        return cls(size, count // size, count % size, divisions)


def exact_epsilon(
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    work: float = WORK,
    coarsen: float = 1.0,
) -> float | None:
    """Upper bound on ε of every fully adaptive composition of all charges, a fraction of a percent above it.

    Args:
        charges: releases, in any order; equal mechanisms are merged.
        delta: target δ in (0, 1).
        adjacency: neighbouring relation of every charge.
        work: budget for each family, in interpolations, most of which turn out to be spared. Valid at any value.
        coarsen: factor on the spacing of the grid, for error control. Valid at any value.

    Returns:
        ε, or None where no charge has a family of pairs: composing privacy loss distributions is then exact.

    Raises:
        ValueError: for a δ outside (0, 1), or where a mechanism is not defined under ``adjacency``.

    Example:
        >>> from pl_privknn.privacy import Charge, NoisyScreening, exact_epsilon
        >>> screening = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10)
        >>> round(exact_epsilon([Charge(screening, 20)], delta=1e-5), 2)
        1.82
    """
    delta = check_open_unit("delta", delta)
    found = exact_compositions(charges, delta=delta, adjacency=adjacency, work=work, coarsen=coarsen)
    return min(total.epsilon(delta) for total in found) if found else None


def exact_compositions(
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    work: float = WORK,
    coarsen: float = 1.0,
    near: float | None = None,
) -> list[pld.Composition]:
    """Total losses that each dominate the composition, one for each family taken in blocks.

    Args:
        charges: as in :func:`exact_epsilon`.
        delta: where accuracy matters; the results are upper bounds at every ε ≥ 0.
        adjacency: as in :func:`exact_epsilon`.
        work: as in :func:`exact_epsilon`.
        coarsen: as in :func:`exact_epsilon`.
        near: δ near which the whole is accurate, where that is another than the tails' δ.

    Returns:
        The totals; empty where no charge has a family.
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    work, coarsen = check_positive("work", work), check_positive("coarsen", coarsen)
    releases = list(merged(charges).values())
    families = [c for c in releases if c.mechanism.dominating_pairs(adjacency) is not None]
    if not families:
        return []
    gaussian = math.sqrt(sum(c.count * (c.mechanism.gaussian_mu(adjacency) or 0.0) ** 2 for c in releases))
    others = [c for c in releases if c.mechanism.gaussian_mu(adjacency) is None]
    variance = sum(c.count * 2 * _rdp(c.mechanism, adjacency) / _VARIANCE_ORDER for c in releases)

    totals = []
    for family in families:
        blocks = _block_losses(family.mechanism, family.count, adjacency, delta, work, coarsen)
        rest = [c for c in others if c is not family]
        count = sum(c.count for c in rest) + sum(n for _, n in blocks) + (gaussian > 0)
        if not count:  # a family whose pairs are all alike costs nothing
            nothing = pld.Direction(np.zeros(1), np.zeros(1), 0.0)
            totals.append(pld.Composition(nothing, nothing))
            continue
        step = pld.choose_discretization(variance, count)
        widest = max((float(np.ptp(m.losses[np.isfinite(m.losses)])) for m, _ in blocks), default=0.0)
        while widest / step > _MOST_POINTS:
            step *= 2
        parts = [(c.mechanism.pld(adjacency, step), c.count) for c in rest]
        if gaussian > 0:
            parts.append((pld.to_distribution(pld.gaussian_losses(gaussian, 1.0, step), None, step), 1))
        parts += [(pld.to_distribution(m, m.reversed(), step), n) for m, n in blocks]
        totals.append(pld.compose(parts, delta if near is None else near))
    return totals


def adaptive_losses(
    p: Floats, q: Floats, count: int, *, delta: float, work: float = WORK, coarsen: float = 1.0
) -> list[tuple[pld.LossMeasure, int]]:
    """Fixed pairs that together dominate ``count`` adaptive releases of a family.

    Args:
        p: probabilities with the record, shape ``(pairs, outcomes)``.
        q: probabilities without it, same shape.
        count: number of releases, at least 1.
        delta: where accuracy matters.
        work: budget in interpolations.
        coarsen: factor on the spacing of the grid.

    Returns:
        ``(losses, times)``: the pair in the remove direction and how often it is composed.
    """
    budget, stretch = work, coarsen
    while True:
        plan = BlockPlan.choose(count, p.shape[0], p.shape[1], budget)
        # A family of disjoint pairs has no finite loss; any grid will do.
        spacing = stretch * (spread(p, q) or 1.0) / plan.divisions
        tail = 1e-6 * delta / (plan.blocks + 1)
        up, down = reach(p, q, plan.size, spacing=spacing, tail=tail)
        nats = up + down
        too_far = nats[-1] > FARTHEST and plan.size > 1
        too_wide = len(p) * nats[0] / spacing > _MOST_DIRECT
        too_long = p.size / 2 * nats.sum() / spacing > max(2 * work, _LEAST_WORK)
        # A grid as coarse as one nat is not made coarser.
        if not too_far and (spacing >= 1 or not (too_wide or too_long)):
            break
        # Rare outcomes of large loss reach much farther than usual: shorter blocks, then a coarser grid.
        if too_far or (plan.size > _SHORT_BLOCK and not too_wide):
            budget /= 4
        else:
            stretch *= 2
    steps = [plan.size] + ([plan.rest] if plan.rest else [])
    profiles = worst_profiles(p, q, steps, spacing=spacing, tail=tail)
    return list(zip((profile.losses() for profile in profiles), (plan.blocks, 1), strict=False))


@functools.lru_cache(maxsize=32)
def _block_losses(
    mechanism: Mechanism, count: int, adjacency: Adjacency, delta: float, work: float, coarsen: float
) -> list[tuple[pld.LossMeasure, int]]:
    p, q = mechanism.dominating_pairs(adjacency)  # type: ignore[misc]  # a family
    telling = np.any(p != q, axis=1)
    if not telling.any():
        return []
    return adaptive_losses(p[telling], q[telling], count, delta=delta, work=work, coarsen=coarsen)


def _rdp(mechanism: Mechanism, adjacency: Adjacency) -> float:
    return float(mechanism.rdp(np.array([_VARIANCE_ORDER]), adjacency)[0])
