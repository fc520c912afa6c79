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
:mod:`pl_privknn.privacy.accounting.induction`.

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
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, check_adjacency, merged

Floats = NDArray[np.float64]

#: Work that one family may take, in stencil evaluations: one pair of distributions, two outcomes, a grid
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
# Order at which twice the Rényi divergence over the order stands for the variance of the loss.
_VARIANCE_ORDER = 1.05


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """How ``count`` releases of a family are cut into blocks, and the grid that they are computed on.

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
            work: budget in stencil evaluations.
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
        work: budget for each family, in stencil evaluations, most of which turn out to be spared. Valid at any value.
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
    families = [c for c in releases if c.mechanism.outcome_pairs(adjacency) is not None]
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
        if not count:  # a family whose pairs are all alike tells nothing
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
        work: budget in stencil evaluations.
        coarsen: factor on the spacing of the grid.

    Returns:
        ``(losses, times)``: the pair in the remove direction and how often it is composed.

    Raises:
        ValueError: where p and q are not rows of probabilities of one shape.
    """
    # Compiled on first use; only those who ask for exact figures wait for it.
    from pl_privknn.privacy.accounting import induction

    count = check_int("count", count)
    budget, stretch = work, coarsen
    while True:
        plan = BlockPlan.choose(count, p.shape[0], p.shape[1], budget)
        # A family of disjoint pairs has no finite loss; any grid will do.
        spacing = stretch * (induction.spread(p, q) or 1.0) / plan.divisions
        tail = 1e-6 * delta / (plan.blocks + 1)
        up, down = induction.reach(p, q, plan.size, spacing=spacing, tail=tail)
        nats = up + down
        too_far = nats[-1] > induction.FARTHEST and plan.size > 1
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
    profiles = induction.worst_profiles(p, q, steps, spacing=spacing, tail=tail)
    return list(zip((profile.losses() for profile in profiles), (plan.blocks, 1), strict=False))


@functools.lru_cache(maxsize=32)
def _block_losses(
    mechanism: Mechanism, count: int, adjacency: Adjacency, delta: float, work: float, coarsen: float
) -> list[tuple[pld.LossMeasure, int]]:
    pairs = mechanism.outcome_pairs(adjacency)
    if pairs is None:
        raise ValueError(f"{mechanism.kind}: has one fixed pair; compose its privacy loss distribution")
    p, q = pairs
    telling = np.any(p != q, axis=1)
    if not telling.any():
        return []
    return adaptive_losses(p[telling], q[telling], count, delta=delta, work=work, coarsen=coarsen)


def _rdp(mechanism: Mechanism, adjacency: Adjacency) -> float:
    return float(mechanism.rdp(np.array([_VARIANCE_ORDER]), adjacency)[0])
