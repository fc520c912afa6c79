"""Exact samplers of discrete noise: integers, coins, discrete Laplace, discrete and rounded Gaussian.

Every accept/reject decision compares whole numbers: a parameter given as a float is taken for the rational
number that it exactly is, and a coin of rational probability a/b is tossed by comparing the binary digits of
a/b with fresh random bits until they differ. So the samples follow the stated distributions exactly (given
perfect random bits), which closes the floating-point attacks of Mironov (2012) for noise added to whole
numbers. Only the rounded Gaussian, whose probabilities are not rational, rests on error bounds of functions that
were compared with others. The running time depends on the values drawn: timing is not covered.

References:
    Canonne, Kamath, Steinke. The Discrete Gaussian for Differential Privacy. NeurIPS 2020, Algorithms 1-3.
    Mironov. On Significance of the Least Significant Bits for Differential Privacy. CCS 2012.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray

_WORD = 1 << 64
#: Larger noise is refused, so that sums and products below stay inside 64-bit integers.
MAX_SCALE = float(1 << 40)
#: As much for rounded noise, whose values have to lie inside 64-bit integers.
MAX_ROUNDED = float(1 << 54)
_ONE = Fraction(1)
# Quantiles of float64 tail probabilities from 2**-64 to 1/2 are wrong by at most 2**-51.8 (1 + |z|), as mpmath finds;
# more than a hundred times that is allowed for, which covers the rounding of probabilities and products, too.
_GUARD = 2.0**-45
# Error of a probability in multiple precision, in units of the last bit that it is compared at: below 2**-28.
_SLACK = 2.0**-16


class RandomWords(Protocol):
    """The one primitive that the samplers need."""

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """``count`` independent uniform 64-bit words."""
        ...


def integers(source: RandomWords, count: int, below: int) -> NDArray[np.int64]:
    """Uniform whole numbers in ``[0, below)``, by rejection (no modulo bias).

    Args:
        source: random words.
        count: how many.
        below: from 1 to 2**63.
    """
    if not 1 <= below <= 1 << 63:
        raise ValueError(f"below={below!r} must be a whole number from 1 to 2**63")
    result = np.zeros(count, np.int64)
    bits = (below - 1).bit_length()
    open_places = np.arange(count) if bits else np.arange(0)
    while len(open_places):
        draws = (source.random_words(len(open_places)) >> np.uint64(64 - bits)).astype(np.int64)
        accepted = draws <= below - 1
        result[open_places[accepted]] = draws[accepted]
        open_places = open_places[~accepted]
    return result


def coins(source: RandomWords, count: int, p: Fraction) -> NDArray[np.bool_]:
    """Independent coins that are true with probability exactly ``p``.

    A byte decides 255 of 256 coins, so a million coins cost little more than a million random bytes.

    Args:
        source: random words.
        count: how many.
        p: probability, a rational number in ``[0, 1]``.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={float(p)!r} must be a probability in [0, 1]")
    if p in (0, 1):
        return np.full(count, p == 1)
    digit, rest = divmod(p * 256, _ONE)
    draws = source.random_words(-(-count // 8)).view(np.uint8)[:count]
    result: NDArray[np.bool_] = draws < digit
    undecided = np.flatnonzero(draws == digit)
    if len(undecided) and rest:
        result[undecided] = coins_by_ratio(
            source, [rest.numerator], rest.denominator, np.zeros(len(undecided), np.intp)
        )
    return result


def coins_by_ratio(
    source: RandomWords, numerators: list[int], denominator: int, which: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Independent coins, coin ``j`` true with probability exactly ``numerators[which[j]] / denominator``.

    Args:
        source: random words.
        numerators: whole numbers of at least 0; a ratio of 1 or more means always true.
        denominator: whole number above 0, of any size.
        which: the group of each coin, shape ``(count,)``.
    """
    certain = np.array([numerator >= denominator for numerator in numerators], bool)
    capped = [min(numerator, denominator - 1) for numerator in numerators]
    digits = np.array([(numerator << 64) // denominator for numerator in capped], np.uint64)
    words = source.random_words(len(which))
    limits = digits[which]
    result = (words < limits) | certain[which]
    # Equal words have a chance of 2**-64 each; the digits that follow decide them.
    for place in np.flatnonzero((words == limits) & ~certain[which]):
        rest = (capped[which[place]] << 64) % denominator
        result[place] = _next_digits(source, rest, denominator)
    return result


def _next_digits(source: RandomWords, numerator: int, denominator: int) -> bool:
    while numerator:
        digit, numerator = divmod(numerator << 64, denominator)
        word = int(source.random_words(1)[0])
        if word != digit:
            return word < digit
    return False


def coins_exp(
    source: RandomWords, numerators: list[int], denominator: int, which: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Independent coins, coin ``j`` true with probability exactly exp(-numerators[which[j]] / denominator).

    Algorithm 1 of Canonne, Kamath, Steinke (2020): for γ in [0, 1] toss coins of probability γ/1, γ/2, γ/3 …
    until one is false; exp(-γ) is the chance that an even number of them came true. A larger γ is split into
    its whole part (so many coins of exp(-1)) and the rest.

    Args:
        source: random words.
        numerators: whole numbers of at least 0.
        denominator: whole number above 0, of any size.
        which: the group of each coin, shape ``(count,)``.
    """
    # A coin survives 2**62 tosses of exp(-1) never: the cap on the counter is no cut in the distribution.
    wholes = np.array([min(numerator // denominator, 1 << 62) for numerator in numerators], np.int64)
    alive = np.ones(len(which), bool)
    tosses = wholes[which]
    pending = np.flatnonzero(tosses)
    while len(pending):
        survived = _exp_of_fraction(source, [1], 1, np.zeros(len(pending), np.intp))
        alive[pending[~survived]] = False
        tosses[pending] -= 1
        pending = pending[survived & (tosses[pending] > 0)]
    rests = [numerator % denominator for numerator in numerators]
    left = np.flatnonzero(alive)
    alive[left] = _exp_of_fraction(source, rests, denominator, which[left])
    return alive


def _exp_of_fraction(
    source: RandomWords, numerators: list[int], denominator: int, which: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Coins of exp(-γ) for ratios γ in [0, 1]."""
    result = np.ones(len(which), bool)
    running = np.arange(len(which))
    step = 1
    while len(running):
        groups, inverse = np.unique(which[running], return_inverse=True)
        came_true = coins_by_ratio(
            source, [numerators[group] for group in groups], denominator * step, inverse.astype(np.intp)
        )
        running = running[came_true]
        result[running] ^= True
        step += 1
    return result


def discrete_laplace(source: RandomWords, count: int, scale: Fraction) -> NDArray[np.int64]:
    """Samples of the discrete Laplace distribution, P[X = x] proportional to exp(-|x| / scale).

    With m = ⌈scale⌉ the magnitude is written u + m v, u in [0, m): u is drawn uniformly and kept with
    probability exp(-u / scale), v counts coins of exp(-m / scale) up to the first false one. (Algorithm 2 of
    Canonne, Kamath, Steinke 2020 with blocks of ⌈scale⌉ in place of the numerator of the scale, which is
    huge for a float.) A sign is added and the second zero rejected.

    Args:
        source: random words.
        count: how many.
        scale: above 0 and at most ``MAX_SCALE``.
    """
    _check_scale("scale", scale)
    return _laplace(source, count, scale)


def _laplace(source: RandomWords, count: int, scale: Fraction) -> NDArray[np.int64]:
    block = -(-scale.numerator // scale.denominator)
    result = np.zeros(count, np.int64)
    places = np.arange(count)
    while len(places):
        low = integers(source, len(places), block)
        values, which = np.unique(low, return_inverse=True)
        kept = coins_exp(
            source, [int(u) * scale.denominator for u in values], scale.numerator, which.astype(np.intp)
        )
        low = low[kept]
        magnitude = low + block * _count_until_false(source, len(low), block / scale)
        negative = coins(source, len(low), Fraction(1, 2))
        accepted = ~(negative & (magnitude == 0))
        done = places[kept][accepted]
        result[done] = np.where(negative, -magnitude, magnitude)[accepted]
        kept[kept] = accepted
        places = places[~kept]
    return result


def _count_until_false(source: RandomWords, count: int, gamma: Fraction) -> NDArray[np.int64]:
    """Number of coins of exp(-gamma) that come true before the first false one."""
    result = np.zeros(count, np.int64)
    running = np.arange(count)
    while len(running):
        running = running[
            coins_exp(source, [gamma.numerator], gamma.denominator, np.zeros(len(running), np.intp))
        ]
        result[running] += 1
    return result


def discrete_gaussian(source: RandomWords, count: int, sigma: Fraction) -> NDArray[np.int64]:
    """Samples of the discrete Gaussian distribution, P[X = x] proportional to exp(-x² / (2 sigma²)).

    Algorithm 3 of Canonne, Kamath, Steinke (2020): y from the discrete Laplace distribution of scale
    t = ⌊sigma⌋ + 1 is kept with probability exp(-(|y| - sigma²/t)² / (2 sigma²)). ``sigma`` is the parameter
    of the mass function; the standard deviation is at most that, and for sigma of 1 or more equal to it in
    all digits that matter.

    Args:
        source: random words.
        count: how many.
        sigma: above 0 and at most ``MAX_SCALE``.
    """
    _check_scale("sigma", sigma)
    p, q = (sigma * sigma).as_integer_ratio()
    t = sigma.numerator // sigma.denominator + 1
    result = np.zeros(count, np.int64)
    places = np.arange(count)
    while len(places):
        proposals = _laplace(source, len(places), Fraction(t))
        values, which = np.unique(np.abs(proposals), return_inverse=True)
        numerators = [(int(y) * q * t - p) ** 2 for y in values]
        kept = coins_exp(source, numerators, 2 * p * q * t * t, which.astype(np.intp))
        result[places[kept]] = proposals[kept]
        places = places[~kept]
    return result


def rounded_normal(source: RandomWords, count: int, sigma: float) -> NDArray[np.int64]:
    """Samples of round(Z), Z normal with mean 0 and deviation ``sigma``: P[X = n] = Φ((n+½)/sigma) − Φ((n−½)/sigma).

    A word is a sign and the first 63 bits of a uniform tail probability T below 1/2. The quantiles at both ends of
    what is left open of T, moved apart by more than their error in float64, nearly always round to the same number,
    which is then certain. The others are decided in multiple precision, with more bits of T where these are needed.

    Args:
        source: random words.
        count: how many.
        sigma: above 0 and at most ``MAX_ROUNDED``. From 2**40 on most draws need multiple precision, some
            milliseconds each.
    """
    if not 0 < sigma <= MAX_ROUNDED:
        raise ValueError(f"sigma={sigma!r} must be above 0 and at most 2**54")
    words = source.random_words(count)
    tails = words >> np.uint64(1)
    low = np.maximum(np.rint(sigma * _distance(tails + np.uint64(1), -_GUARD)), 0.0)
    # At 0 the quantile is infinite. Nothing lies beyond 2**62, 256 deviations, but for one draw in 10**14000.
    high = np.minimum(np.rint(sigma * _distance(tails, _GUARD)), 2.0**62)
    result = low.astype(np.int64)
    context = mpmath.mp.clone()
    for place in np.flatnonzero(low < high):
        bounds = int(low[place]), int(high[place])
        result[place] = _rounded(source, int(tails[place]), *bounds, context.mpf(sigma), context)
    return np.where(words & np.uint64(1), -result, result)


def _distance(tails: NDArray[np.uint64], guard: float) -> NDArray[np.float64]:
    """Deviations beyond which the tail probability is ``tails / 2**64``, moved outwards by a guard."""
    quantiles: NDArray[np.float64] = -torch.special.ndtri(
        torch.from_numpy(tails.astype(np.float64) * 2.0**-64)
    ).numpy()
    return quantiles + guard * (1 + quantiles)


def _rounded(
    source: RandomWords, tail: int, low: int, high: int, sigma: mpmath.mpf, context: mpmath.MPContext
) -> int:
    """The whole number, ``low`` to ``high``, next to a normal value whose tail probability begins with ``tail``."""
    bits = 64
    while low < high:
        middle = (low + high) // 2
        context.prec = bits + 32
        # P[Z > middle + 1/2], in units of the last bit of the tail known so far.
        beyond = context.erfc((middle + context.mpf(0.5)) / (sigma * context.sqrt(2))) * (1 << (bits - 1))
        if tail + 1 <= beyond - _SLACK:
            low = middle + 1
        elif tail >= beyond + _SLACK:
            high = middle
        else:
            tail, bits = tail << 64 | int(source.random_words(1)[0]), bits + 64
    return low


def exponential_choice(source: RandomWords, scores: NDArray[np.int64], scale: Fraction) -> NDArray[np.int64]:
    """One column for each row, column y with probability proportional to exp(scores[y] / scale).

    A uniform column is kept with probability exp(-(largest score - its score) / scale): on average at most as
    many proposals as there are columns. Which rows take longer depends on their scores: timing is not covered.

    Args:
        source: random words.
        scores: shape ``(rows, columns)``.
        scale: above 0 and at most ``MAX_SCALE``.
    """
    _check_scale("scale", scale)
    behind = scores.max(axis=1, keepdims=True) - scores
    result = np.zeros(len(scores), np.int64)
    places = np.arange(len(scores))
    while len(places):
        columns = integers(source, len(places), scores.shape[1])
        gaps, which = np.unique(behind[places, columns], return_inverse=True)
        numerators = [int(gap) * scale.denominator for gap in gaps]
        kept = coins_exp(source, numerators, scale.numerator, which.astype(np.intp))
        result[places[kept]] = columns[kept]
        places = places[~kept]
    return result


def _check_scale(name: str, scale: Fraction) -> None:
    if not 0 < scale <= MAX_SCALE:
        raise ValueError(f"{name}={float(scale)!r} must be above 0 and at most 2**40")
