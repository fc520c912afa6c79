"""Lower bounds on ε, reached by an adversary; the distance to the stated ε bounds the accountant's error.

The adversary keeps to one pair of neighbouring inputs in every release of a mechanism. What is done to its loss
distribution can only lower the figure: outcomes are merged (post-processing), losses are rounded down, and releases
without a bound here are left out. Adaptive adversaries may reach more, so the true worst case lies between this and
the upper bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import gaussian_and_others, merge_charges
from pl_privknn.privacy.mechanisms.argmax import ExponentialArgmax
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, DominatingPair, Mechanism, check_adjacency
from pl_privknn.privacy.mechanisms.gaussian import Gaussian
from pl_privknn.privacy.mechanisms.laplace import Laplace

Floats = NDArray[np.float64]

# Pairs of a family that are tried as the one pair of a steady adversary.
_CANDIDATES = 16
# Pieces that the part of a Laplace release between both centres is cut into.
_PIECES = 400
# Standard deviations of a number of heads beyond which it counts as nothing: a mass of 10⁻⁵⁶.
_DEVIATIONS = 16
# Outcomes of all tosses of a coin that are distinguished.
_OUTCOMES = 4096
# δ is asked for a little larger than it is, by far more than what the composition's truncated tails add.
_SLACK = 1e-6


def epsilon_lower(charges: Sequence[Charge], *, delta: float, adjacency: Adjacency = "add_remove") -> float:
    """Lower bound on ε of all releases together: no accountant can state less.

    Args:
        charges: as in :func:`~pl_privknn.privacy.accounting.accountant.account`. Several families of pairs
            (screening with arg-max, say) each answer with one pair throughout; the pairs are chosen one family
            after the other.
        delta: target δ.
        adjacency: neighbouring relation of every charge.

    Returns:
        ε at ``delta``, at least 0. Shuffling and mechanisms that only state a bound count as
        nothing.

    Raises:
        ValueError: for a δ outside (0, 1), an unknown adjacency, or a mechanism that is not defined under it.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, account, epsilon_lower
        >>> releases = [Charge(Gaussian(sigma=20.0, sampling_rate=0.2), 500)]
        >>> stated = account(releases, delta=1e-5).epsilon
        >>> f"{epsilon_lower(releases, delta=1e-5):.3f} {stated:.3f}"
        '0.823 0.823'
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    merged = merge_charges(Charge(c.mechanism.bare, c.count) for c in charges)
    coins, families = [], []
    for charge in merged:
        if (pairs := _pairs(charge.mechanism, adjacency)) is not None:
            found = _candidates(*pairs)
            if len(found) == 1 or (found and isinstance(charge.mechanism, DominatingPair)):
                coins.append((*found[0], charge.count))
            elif found:
                families.append((found, charge.count))
    pieces = _Pieces(tuple(merged), adjacency)
    # Every family's widest pair to begin with; then each family looks for a better one, given the others.
    chosen = [(*found[0], count) for found, count in families]
    if not families:
        return pieces.rest(coins, delta).epsilon(delta) if coins or pieces.any else 0.0
    best = 0.0
    for place, (found, count) in enumerate(families):
        others = (*coins, *chosen[:place], *chosen[place + 1 :])
        rest = pieces.rest(others, delta) if others or pieces.any else None
        tried = {}
        for p, q in found:
            tried[p, q] = max(
                _binomial_epsilon(p, q, count, rest, delta),
                _binomial_epsilon(q, p, count, rest and rest.swapped(), delta),
            )
        chosen[place] = (*max(tried, key=lambda pair: tried[pair]), count)
        best = max(best, *tried.values())
    return best


def _pairs(mechanism: Mechanism, adjacency: Adjacency) -> tuple[Floats, Floats] | None:
    """Pairs that a record can cause, as ``(p, q)`` of shape ``(pairs, outcomes)``."""
    if isinstance(mechanism, ExponentialArgmax):
        # The family's rows lie above its members; these are members: odds that the record multiplies by g.
        mechanism.dominating_pairs(adjacency)
        without = np.arange(-40, 41) / 8 - mechanism.log_gain / 2
        present, absent = (1 / (1 + np.exp(-odds)) for odds in (without + mechanism.log_gain, without))
        present = (1 - mechanism.sampling_rate) * absent + mechanism.sampling_rate * present
        return np.stack([present, 1 - present], axis=1), np.stack([absent, 1 - absent], axis=1)
    if isinstance(mechanism, DominatingPair):
        log_p, log_q = mechanism.log_pair(adjacency)
        return np.exp(log_p)[None], np.exp(log_q)[None]
    return mechanism.dominating_pairs(adjacency)


def _candidates(p: Floats, q: Floats) -> list[tuple[float, float]]:
    """The widest pairs as coins: of their outcomes only whether they are likelier with the record is kept."""
    with np.errstate(divide="ignore", invalid="ignore"):
        width = np.nansum((p - q) * np.log(p / q), axis=1)
    found = []
    for k in np.argsort(-width)[:_CANDIDATES]:
        likelier = p[k] > q[k]
        present, absent = float(p[k, likelier].sum()), float(q[k, likelier].sum())
        if 0 < present < 1 and 0 < absent < 1:
            found.append((present, absent))
    return found


@dataclasses.dataclass(frozen=True)
class _Rest:
    """Lower bound on the privacy profile, at every real ε, of the releases outside a family."""

    total: pld.Composition

    def delta(self, epsilon: Floats) -> Floats:
        away = np.abs(epsilon)
        reverse = 1 - np.exp(-away) + np.exp(-away) * self.total.add.delta(away)
        return np.where(epsilon >= 0, self.total.remove.delta(away), reverse)

    def swapped(self) -> _Rest:
        return _Rest(pld.Composition(self.total.add, self.total.remove))

    def epsilon(self, delta: float) -> float:
        return self.total.epsilon(delta * (1 + _SLACK))


class _Pieces:
    """Gaussian and Laplace releases of a list, to be composed on a grid with coins."""

    def __init__(self, charges: tuple[Charge, ...], adjacency: Adjacency) -> None:
        whole, others = gaussian_and_others(charges, adjacency)
        self.gaussians = [(whole, 1.0, 1)] if whole > 0 else []
        self.measures: list[tuple[pld.LossMeasure, int]] = []
        for mechanism, count in ((c.mechanism, c.count) for c in others):
            if isinstance(mechanism, Gaussian):
                mu, rate = mechanism.l2_sensitivity / mechanism.sigma, mechanism.sampling_rate
                self.gaussians.append((mu, rate, count))
            elif isinstance(mechanism, Laplace):
                losses = _laplace_losses(mechanism.l1_sensitivity / mechanism.scale, mechanism.sampling_rate)
                self.measures.append((losses, count))
        self.any = bool(self.gaussians or self.measures)

    def rest(self, coins: Sequence[tuple[float, float, int]], delta: float) -> _Rest:
        """All of them and coins of probability p against q, each tossed some number of times."""
        coin_losses = [_coin_losses(p, q, count) for p, q, count in coins]
        widths = [(min(mu, g * math.sqrt(math.expm1(min(mu * mu, 50.0)))), n) for mu, g, n in self.gaussians]
        steps = [width / (20 if n > 100 else 200) for width, n in widths]
        everything = [*self.measures, *((losses, 1) for losses in coin_losses)]
        variance = sum(width**2 * count for width, count in widths)
        for losses, count in everything:
            spread = math.sqrt(float(losses.upper @ losses.losses**2 - (losses.upper @ losses.losses) ** 2))
            variance += spread**2 * count
            # Rounding down costs half a step a release, of √count times its deviation in all.
            steps.append(max(spread, 1e-9) / (1000 * math.sqrt(count)))
        finest = math.sqrt(variance) / (1000 * max(1, sum(count for _, count in everything)))
        step = 2.0 ** math.floor(math.log2(max(min(steps), finest)))
        if self.gaussians:  # pieces of a Gaussian are found one by one
            step = max(step, 2.0 ** math.floor(math.log2(max(width for width, _ in widths) / 500)))
        while True:
            parts = []
            try:
                for mu, rate, count in self.gaussians:
                    losses = _coarsened(mu, rate, step)
                    parts.append((pld.to_distribution(losses, losses.reversed(), step), count))
                for losses, count in everything:
                    both = pld.to_distribution(losses, losses.reversed(), step, pessimistic=False)
                    parts.append((both, count))
                return _Rest(pld.compose(parts, delta))
            except pld.GridTooFine as error:
                step *= error.factor


def _coin_losses(p: float, q: float, count: int) -> pld.LossMeasure:
    """The total of a coin's tosses; heads that are next to impossible count as nothing."""
    from scipy.stats import binom

    heads = _likely_heads(p, q, count)
    losses = heads * math.log(p / q) + (count - heads) * math.log((1 - p) / (1 - q))
    return pld.LossMeasure(losses, binom.pmf(heads, count, p), binom.pmf(heads, count, q))


def _likely_heads(p: float, q: float, count: int) -> Floats:
    widths = {x: _DEVIATIONS * math.sqrt(count * x * (1 - x)) + 40 for x in (p, q)}
    ends = [count * x + sign * width for x, width in widths.items() for sign in (-1, 1)]
    return np.arange(max(0, math.floor(min(ends))), min(count, math.ceil(max(ends))) + 1, dtype=np.float64)


def _laplace_losses(pure: float, rate: float) -> pld.LossMeasure:
    """A Laplace release of which only the piece is seen in which it lies; centres 0 and ``pure``, scale 1."""
    edges = np.linspace(0.0, pure, _PIECES + 1)
    below = np.concatenate([[0.0], 1 - np.exp(-edges) / 2, [1.0]])  # of the one at 0
    shifted = np.concatenate([[0.0], np.exp(edges - pure) / 2, [1.0]])
    lower = np.diff(below)
    upper = (1 - rate) * lower + rate * np.diff(shifted)
    return pld.LossMeasure(np.log(upper / lower), upper, lower)


def _binomial_epsilon(p: float, q: float, count: int, rest: _Rest | None, delta: float) -> float:
    """ε of ``count`` coins of probability p against q, composed with ``rest``; 0 where a coin is certain."""
    from scipy.stats import binom

    if not (0 < p < 1 and 0 < q < 1):
        return 0.0
    heads = _likely_heads(p, p, count)
    masses = binom.pmf(heads, count, p)
    losses = heads * math.log(p / q) + (count - heads) * math.log((1 - p) / (1 - q))
    if (block := len(heads) // _OUTCOMES) > 1:  # neighbouring outcomes are merged
        starts = np.arange(0, len(heads), block)
        least = np.minimum.reduceat(losses, starts)
        of_q = masses * np.exp(np.repeat(least, block)[: len(heads)] - losses)
        masses = np.add.reduceat(masses, starts)
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.where(masses > 0, least + np.log(masses / np.add.reduceat(of_q, starts)), least)

    def profile(epsilon: float) -> float:
        left = epsilon - losses
        value = rest.delta(left) if rest else np.maximum(-np.expm1(np.minimum(left, 0.0)), 0.0)
        return float(masses @ value)

    low, high = 0.0, 1.0
    delta *= 1 + _SLACK
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


@functools.lru_cache(maxsize=32)
def _coarsened(mu: float, sampling_rate: float, step: float) -> pld.LossMeasure:
    return coarsened_gaussian(mu, sampling_rate, step)
