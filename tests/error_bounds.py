"""Error control of the exact worst case: figures from below and above, on a coarse and a fine grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accounting import composition, exact, pld
from pl_privknn.privacy.accounting.accountant import merge_charges
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge
from pl_privknn.privacy.mechanisms.gaussian import Gaussian

Floats = NDArray[np.float64]

# Pairs of a family that are tried as the one pair of a steady adversary.
_CANDIDATES = 16


@dataclasses.dataclass(frozen=True)
class Bracket:
    """Bounds on ε of the worst adaptive adversary.

    Attributes:
        lower: what an adversary reaches who always picks the same pair of one family.
        upper: upper bound on the fine grid; what :func:`pl_privknn.privacy.accounting.exact.exact_epsilon` returns.
        coarse: upper bound on a grid of twice the spacing. Errors fall with the square of the spacing, so
            the grid's part of the error of ``upper`` is about ``(coarse − upper) / 3``.
    """

    lower: float
    upper: float
    coarse: float


def exact_bracket(
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    work: float = exact.WORK,
) -> Bracket | None:
    """Bracket the exact worst case; None where no charge has a family of pairs.

    Args:
        charges: as in :func:`pl_privknn.privacy.accounting.exact.exact_epsilon`.
        delta: target δ.
        adjacency: neighbouring relation of every charge.
        work: as there.

    Raises:
        ValueError: as there.
    """

    def upper(coarsen: float) -> float | None:
        return exact.exact_epsilon(charges, delta=delta, adjacency=adjacency, work=work, coarsen=coarsen)

    fine, coarse = upper(1.0), upper(2.0)
    if fine is None or coarse is None:
        return None
    return Bracket(steady_epsilon(charges, delta=delta, adjacency=adjacency), fine, coarse)


def steady_epsilon(charges: Sequence[Charge], *, delta: float, adjacency: Adjacency = "add_remove") -> float:
    """Lower bound on ε: one family answers with one fixed pair throughout, Gaussian releases beside it.

    Of the pair's outcomes only whether they are likelier with the record is kept, so that transcripts follow
    a binomial law, used in closed form. Gaussian releases are coarsened (:func:`coarsened_gaussian`), all
    other charges are left out. Each of these steps can only lower ε.
    """
    delta = check_open_unit("delta", delta)
    merged = merge_charges(charges)
    rest = _gaussians(merged, delta)
    best = rest.epsilon(delta) if rest else 0.0
    for charge in merged:
        pairs = charge.mechanism.outcome_pairs(adjacency)
        if pairs is not None:
            p, q = pairs
            with np.errstate(divide="ignore", invalid="ignore"):
                width = np.nansum((p - q) * np.log(p / q), axis=1)
            for k in np.argsort(-width)[:_CANDIDATES]:
                likelier = p[k] > q[k]
                present, absent = float(p[k, likelier].sum()), float(q[k, likelier].sum())
                best = max(
                    best,
                    _binomial_epsilon(present, absent, charge.count, rest, delta),
                    _binomial_epsilon(absent, present, charge.count, rest and rest.swapped(), delta),
                )
    return best


@dataclasses.dataclass(frozen=True)
class _Rest:
    """Profile, at every real ε, of the releases beside the family, from below."""

    total: composition.Composition

    def delta(self, epsilon: Floats) -> Floats:
        away = np.abs(epsilon)
        reverse = 1 - np.exp(-away) + np.exp(-away) * self.total.add.delta(away)
        return np.where(epsilon >= 0, self.total.remove.delta(away), reverse)

    def swapped(self) -> _Rest:
        return _Rest(composition.Composition(self.total.add, self.total.remove))

    def epsilon(self, delta: float) -> float:
        return self.total.epsilon(delta)


def _gaussians(charges: Sequence[Charge], delta: float) -> _Rest | None:
    used = [(c.mechanism, c.count) for c in charges if isinstance(c.mechanism, Gaussian)]
    parts = [(m.l2_sensitivity / m.sigma, m.sampling_rate, n) for m, n in used if m.sampling_rate < 1]
    whole = math.sqrt(sum(n * (m.l2_sensitivity / m.sigma) ** 2 for m, n in used if m.sampling_rate == 1))
    if whole > 0:
        parts.append((whole, 1.0, 1))
    if not parts:
        return None
    widths = [(g * math.sqrt(math.expm1(min(mu * mu, 50.0))), n) for mu, g, n in parts]
    step = 2.0 ** math.floor(math.log2(min(width / (20 if n > 100 else 200) for width, n in widths)))
    pieces = []
    for mu, rate, count in parts:
        losses = coarsened_gaussian(mu, rate, step)
        pieces.append((pld.to_distribution(losses, losses.reversed(), step), count))
    return _Rest(composition.compose(pieces, delta))


def _binomial_epsilon(p: float, q: float, count: int, rest: _Rest | None, delta: float) -> float:
    """ε of ``count`` coins of probability p against q, composed with ``rest``; 0 where a coin is certain."""
    from scipy.stats import binom

    if not (0 < p < 1 and 0 < q < 1):
        return 0.0
    centre, width = count * p, 40 * math.sqrt(count * p * (1 - p)) + 40
    heads = np.arange(max(0, math.floor(centre - width)), min(count, math.ceil(centre + width)) + 1)
    masses = binom.pmf(heads, count, p)
    losses = heads * math.log(p / q) + (count - heads) * math.log((1 - p) / (1 - q))

    def profile(epsilon: float) -> float:
        left = epsilon - losses
        value = rest.delta(left) if rest else np.maximum(-np.expm1(np.minimum(left, 0.0)), 0.0)
        return float(masses @ value)

    low, high = 0.0, 1.0
    if profile(0.0) <= delta:
        return 0.0
    while profile(high) > delta and high < 1e9:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if profile(middle) > delta else (low, middle)
    return low


def coarsened_gaussian(mu: float, sampling_rate: float, step: float) -> pld.LossMeasure:
    """A grid pair that the (sampled) Gaussian pair dominates, its losses multiples of ``step``.

    The line is cut into intervals whose likelihood ratio as a whole is exactly e^{i·step}, i = 0, ±1, …, one
    after the other from the middle outwards; the tails that are left count as nothing. To see only the
    interval is a post-processing, so the privacy profile is nowhere larger.

    Args:
        mu: sensitivity over standard deviation.
        sampling_rate: Poisson rate γ; the pair is (1−γ)·N(0, 1) + γ·N(μ, 1) against N(0, 1).
        step: grid spacing, well below the root mean square loss.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr

    def mass(a: float, b: float) -> float:
        return float(ndtr(b) - ndtr(a)) if a + b < 0 else float(ndtr(-a) - ndtr(-b))

    def masses(a: float, b: float) -> tuple[float, float]:
        lower = mass(a, b)
        return (1 - sampling_rate) * lower + sampling_rate * mass(a - mu, b - mu), lower

    def place(loss: float) -> float:
        """Where the loss is ``loss``; −inf below the smallest."""
        inner = math.expm1(loss) / sampling_rate
        return math.log1p(inner) / mu + mu / 2 if inner > -1 else -math.inf

    index, upper, lower = [], [], []
    for sign in (1, -1):
        edge = place(-step / 2)
        i = 0 if sign > 0 else -1
        while True:
            centre, far = place(i * step), place((i + sign) * step)
            far = min(max(far, -12.0), mu + 12.0)

            def miss(x: float, edge: float = edge, i: int = i) -> float:
                above, below = masses(min(edge, x), max(edge, x))
                return above - math.exp(i * step) * below

            reachable = math.isfinite(centre) and abs(far - edge) > 1e-9 and (far - centre) * sign > 0
            if not reachable or miss(far) * sign < 0:
                break
            new = float(brentq(miss, centre, far, xtol=1e-14, rtol=1e-14))
            above, below = masses(min(edge, new), max(edge, new))
            index.append(i)
            # Equal up to the rounding of the root; the smaller of both.
            upper.append(min(above, math.exp(i * step) * below))
            lower.append(min(below, math.exp(-i * step) * above))
            edge, i = new, i + sign
    order = np.argsort(index)
    grid = np.array(index, dtype=np.float64)[order]
    return pld.LossMeasure(grid * step, np.array(upper)[order], np.array(lower)[order])
