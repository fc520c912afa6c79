"""ε that an adversary reaches who keeps to one pair of neighbouring inputs of a family, beside Gaussian releases.

What is done to the adversary's loss can only lower the figure: outcomes are merged, and intervals of the Gaussian's
line are seen as a whole. So no accountant may state less.
"""

import functools
import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian

CANDIDATES = 16  # pairs that are tried
DEVIATIONS = 16  # of a number of heads, beyond which it counts as nothing
OUTCOMES = 4096  # of all tosses of a coin that are distinguished
SLACK = 1e-6  # of δ: far more than what the composition's truncated tails add


def epsilon_lower_bound(charges, delta):
    """Lower bound on ε of one screening or arg-max charge, and of a Gaussian one that may stand beside it."""
    (family,) = (charge for charge in charges if not isinstance(charge.mechanism, Gaussian))
    beside = [charge for charge in charges if charge is not family]
    rest = gaussians(beside[0], delta) if beside else None
    found = [
        coin_epsilon(*pair[::way], family.count, rest and rest[::way], delta)
        for pair in coins(family.mechanism)
        for way in (1, -1)
    ]
    return max(found, default=0.0)


def coins(mechanism):
    """The widest pairs; of their outcomes only whether they are likelier with the record is kept."""
    if isinstance(mechanism, ExponentialArgmax):
        # The family's rows lie above its members; these are members: odds that the record multiplies by g.
        without = np.arange(-40, 41) / 8 - mechanism.log_gain / 2
        present, absent = (1 / (1 + np.exp(-odds)) for odds in (without + mechanism.log_gain, without))
        present = (1 - mechanism.sampling_rate) * absent + mechanism.sampling_rate * present
        p, q = (np.stack([side, 1 - side], axis=1) for side in (present, absent))
    else:
        p, q = mechanism.dominating_pairs("add_remove")
    with np.errstate(divide="ignore", invalid="ignore"):
        width = np.nansum((p - q) * np.log(p / q), axis=1)
    for k in np.argsort(-width)[:CANDIDATES]:
        likelier = p[k] > q[k]
        present, absent = float(p[k, likelier].sum()), float(q[k, likelier].sum())
        if 0 < present < 1 and 0 < absent < 1:
            yield present, absent


def coin_epsilon(p, q, count, rest, delta):
    """ε of ``count`` coins of probability p against q, composed with ``rest``."""
    width = DEVIATIONS * math.sqrt(count * p * (1 - p)) + 40
    heads = np.arange(max(0, math.floor(count * p - width)), min(count, math.ceil(count * p + width)) + 1.0)
    masses = binom.pmf(heads, count, p)
    losses = heads * math.log(p / q) + (count - heads) * math.log((1 - p) / (1 - q))
    if (block := len(heads) // OUTCOMES) > 1:  # neighbouring outcomes are merged
        starts = np.arange(0, len(heads), block)
        least = np.minimum.reduceat(losses, starts)
        of_q = masses * np.exp(np.repeat(least, block)[: len(heads)] - losses)
        masses = np.add.reduceat(masses, starts)
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.where(masses > 0, least + np.log(masses / np.add.reduceat(of_q, starts)), least)

    def profile(epsilon):
        left = epsilon - losses
        if rest is None:
            return float(masses @ np.maximum(-np.expm1(np.minimum(left, 0.0)), 0.0))
        away = np.abs(left)
        reverse = 1 - np.exp(-away) + np.exp(-away) * rest[1].delta(away)
        return float(masses @ np.where(left >= 0, rest[0].delta(away), reverse))

    delta *= 1 + SLACK
    low, high = 0.0, 1.0
    if profile(0.0) <= delta:
        return 0.0
    while profile(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if profile(middle) > delta else (low, middle)
    return low


def gaussians(charge, delta):
    """Total loss of Gaussian releases in both directions, from below."""
    mechanism, count = charge.mechanism, charge.count
    mu, rate = mechanism.l2_sensitivity / mechanism.sigma, mechanism.sampling_rate
    width = min(mu, rate * math.sqrt(math.expm1(min(mu * mu, 50.0))))
    losses = coarsened_gaussian(mu, rate, 2.0 ** math.floor(math.log2(width / 20)))
    step = losses.losses[1] - losses.losses[0]
    total = pld.compose([(pld.to_distribution(losses, losses.reversed(), step), count)], delta)
    return total.remove, total.add


@functools.lru_cache(maxsize=8)
def coarsened_gaussian(mu, rate, step):
    """A grid pair that the (sampled) Gaussian pair dominates, its losses multiples of ``step``.

    The line is cut into intervals whose likelihood ratio as a whole is exactly e^{i·step}, i = 0, ±1, …, one after
    the other from the middle outwards; the tails that are left count as nothing.
    """

    def mass(a, b):
        return float(ndtr(b) - ndtr(a)) if a + b < 0 else float(ndtr(-a) - ndtr(-b))

    def masses(a, b):
        lower = mass(a, b)
        return (1 - rate) * lower + rate * mass(a - mu, b - mu), lower

    def place(loss):
        """Where the loss is ``loss``; −inf below the smallest."""
        inner = math.expm1(loss) / rate
        return math.log1p(inner) / mu + mu / 2 if inner > -1 else -math.inf

    index, upper, lower = [], [], []
    for sign in (1, -1):
        edge = place(-step / 2)
        i = 0 if sign > 0 else -1
        while True:
            centre, far = place(i * step), place((i + sign) * step)
            far = min(max(far, -12.0), mu + 12.0)

            def miss(x, edge=edge, i=i):
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
