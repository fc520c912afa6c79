"""Mechanisms whose release is one of a few outcomes and whose worst pair is a family of pairs."""

from __future__ import annotations

import abc
import functools
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]

# Below this both probabilities of an outcome count as zero: e^-660 changes no δ that can be asked for.
_TINY = 1e-287


class OutcomeMechanism(Mechanism):
    """Base for releases of one of a few outcomes (pass or fail, a class).

    Subclasses list their pairs in logarithms. Poisson sampling is exact (:func:`sample_pairs`): a record
    that takes part with probability γ turns the pair (P, Q) into ((1−γ)Q + γP, Q), and by joint convexity
    of every divergence the worst case over the samples of the other records is the worst case over the
    family (Zhu, Yu, Chandraker, Wang 2020, Theorem 7; Zhu and Wang 2019 for the mixture).

    RDP takes the maximum over the family and over both directions at each order. The PLD belongs to the
    upper envelope of the family's privacy profiles: for finitely many outcomes each profile is a maximum of
    lines in e^ε, one for each set of most likely outcomes, so the envelope's pair is the upper convex hull
    of the points (q(S), p(S)): no grid is needed to find it.
    """

    @abc.abstractmethod
    def log_outcome_pairs(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Logarithms of :meth:`outcome_pairs`, finite where probabilities underflow."""

    def outcome_pairs(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """The family of pairs; see :meth:`Mechanism.outcome_pairs`."""
        log_p, log_q = self.log_outcome_pairs(adjacency)
        p, q = np.exp(log_p), np.exp(log_q)
        never = np.maximum(p, q) < _TINY
        p[never] = 0.0
        q[never] = 0.0
        return p, q

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release; see :meth:`Mechanism.rdp`."""
        return rdp.pairs_rdp(*self.log_outcome_pairs(adjacency), orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the family's envelope; see :meth:`Mechanism.pld`."""
        remove, add = _envelope(self, adjacency)
        return pld.to_distribution(remove, add, discretization)


def sample_pairs(log_p: Floats, log_q: Floats, rate: float) -> tuple[Floats, Floats]:
    """The pairs ((1−γ)Q + γP, Q) of Poisson sampling at rate γ, in logarithms."""
    if rate == 1.0:
        return log_p, log_q
    return np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + log_p), log_q


@functools.lru_cache(maxsize=64)
def _envelope(mechanism: OutcomeMechanism, adjacency: Adjacency) -> tuple[pld.LossMeasure, pld.LossMeasure]:
    p, q = mechanism.outcome_pairs(adjacency)
    return envelope(p, q), envelope(q, p)


def envelope(upper: Floats, lower: Floats) -> pld.LossMeasure:
    """Pair that dominates every row of a family, as atoms of its loss log(upper/lower).

    Args:
        upper: shape ``(pairs, outcomes)``.
        lower: shape ``(pairs, outcomes)``.

    The hull is walked in two halves. Points of sets with lower mass up to ½ are (lower(S), upper(S)) and
    hold large losses; beyond, the complements' (1−lower(S), 1−upper(S)) are used, so that small
    probabilities are never a difference of numbers near 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(upper > 0, upper / lower, 0.0)
    order = np.argsort(-ratio, axis=1, kind="stable")
    upper = np.take_along_axis(upper, order, axis=1)
    lower = np.take_along_axis(lower, order, axis=1)
    heads_x, heads_y = np.cumsum(lower, axis=1)[:, :-1].ravel(), np.cumsum(upper, axis=1)[:, :-1].ravel()
    tails_x = np.cumsum(lower[:, ::-1], axis=1)[:, ::-1][:, 1:].ravel()
    tails_y = np.cumsum(upper[:, ::-1], axis=1)[:, ::-1][:, 1:].ravel()
    hull = _upper_hull(heads_x, heads_y)
    x, y = np.append(heads_x[hull], 1.0), np.append(heads_y[hull], 1.0)
    cx, cy = np.append(tails_x[hull], 0.0), np.append(tails_y[hull], 0.0)
    lower_mass = np.where(x <= 0.5, np.diff(x, prepend=0.0), -np.diff(cx, prepend=1.0))
    upper_mass = np.where(x <= 0.5, np.diff(y, prepend=0.0), -np.diff(cy, prepend=1.0))
    keep = upper_mass > 0
    upper_mass, lower_mass = upper_mass[keep], np.maximum(lower_mass[keep], 0.0)
    with np.errstate(divide="ignore"):
        losses = np.log(upper_mass) - np.log(lower_mass)
    return pld.LossMeasure(losses, upper_mass, lower_mass)


def _upper_hull(x: Floats, y: Floats) -> NDArray[np.int64]:
    """Indices, by ascending x, of the points on the upper hull of all points with (0, 0) and (1, 1)."""
    order = np.lexsort((y, x))
    hull: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    xs, ys = x.tolist(), y.tolist()
    for i in [*order.tolist(), -1]:
        px, py = (1.0, 1.0) if i < 0 else (xs[i], ys[i])
        while len(hull) >= 2:
            (ax, ay, _), (bx, by, _) = hull[-2], hull[-1]
            if (by - ay) * (px - ax) > (py - ay) * (bx - ax):
                break
            hull.pop()
        # The first point stays unless a point straight above it comes.
        hull.append((px, py, i))
    return np.array([i for _, _, i in hull if i >= 0], dtype=np.int64)
