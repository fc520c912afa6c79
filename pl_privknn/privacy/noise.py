"""The source of protective randomness: every coin and every noise draw of a release comes from here.

Exact samplers of discrete noise: integers, coins, discrete Laplace, discrete and rounded Gaussian.

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

import abc
import hashlib
import math
import numbers
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int, check_non_negative, check_positive

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


Shape = int | Sequence[int]


class NoiseSource(abc.ABC):
    """Draws noise from 64-bit random words; subclasses say where the words come from.

    What is covered against floating-point attacks (Mironov 2012: the spacing of floating-point results of a
    noisy sum gives away the value before the noise):

    * :meth:`discrete_gaussian`, :meth:`discrete_laplace`, :meth:`integers` and :meth:`bernoulli` are exact:
      their decisions compare whole numbers only. Whole numbers (votes, counts) noised with them are covered.
    * :meth:`rounded_normal` is normal noise rounded to whole numbers, exact if the error bounds stated there hold. A
      sum of whole numbers plus such noise is the rounded sum with ideal normal noise, and covered.
    * :meth:`normal`, :meth:`laplace` and :meth:`gumbel` are float64 approximations of continuous noise. Their
      distribution is accurate to rounding far into the tails, yet the sum of data and noise is **not**
      covered. A release that shows only an arg-max or a pass/fail gives such an attack far less to read than
      released sums, but the proof is for ideal real numbers.
    * Timing is not covered for any of them.

    All results are new tensors on the CPU. A shape is a whole number or a sequence of them.

    Attributes:
        cryptographic: whether an adversary who saw past draws learns nothing about later ones.

    Example:
        >>> from pl_privknn.privacy import NoiseSource, SystemNoise
        >>> isinstance(SystemNoise().stream("aggregation", 3), NoiseSource)
        True
    """

    cryptographic: ClassVar[bool] = False

    @abc.abstractmethod
    def random_words(self, count: int) -> NDArray[np.uint64]:
        """``count`` independent uniform 64-bit words, shape ``(count,)``."""

    @abc.abstractmethod
    def stream(self, *key: int | str) -> NoiseSource:
        """An independent child source for ``key``, for instance for one row of a ledger.

        For a seeded source the child depends on the seed and the key alone, not on what was drawn before, so
        a resumed run that draws each row's noise from that row's own stream repeats no other row's noise.

        Raises:
            ValueError: if the key is empty or has a part that is neither a whole number nor a string.
        """

    def uniform(self, shape: Shape) -> Tensor:
        """Uniform float64 in the open interval (0, 1): multiples of 2**-53, never 0 and never 1."""
        dims = _dims(shape)
        draws = self.random_words(math.prod(dims)) >> np.uint64(11)
        while len(zeros := np.flatnonzero(draws == 0)):
            draws[zeros] = self.random_words(len(zeros)) >> np.uint64(11)
        return torch.from_numpy(draws.astype(np.float64) * 2.0**-53).view(dims)

    def integers(self, shape: Shape, below: int) -> Tensor:
        """Uniform int64 in ``[0, below)``, exactly; ``below`` from 1 to 2**63."""
        dims = _dims(shape)
        draws = integers(self, math.prod(dims), check_int("below", below, maximum=1 << 63))
        return torch.from_numpy(draws).view(dims)

    def bernoulli(self, shape: Shape, p: float) -> Tensor:
        """Bool coins, true with probability exactly the float ``p``: 1 is always true, 0 never.

        Raises:
            ValueError: if ``p`` lies outside [0, 1].
        """
        dims = _dims(shape)
        if check_non_negative("p", p) > 1:
            raise ValueError(f"p={p!r} must be a probability in [0, 1]")
        return torch.from_numpy(coins(self, math.prod(dims), Fraction(p))).view(dims)

    def normal(self, shape: Shape, scale: float) -> Tensor:
        """Float64 noise of the normal distribution with mean 0 and standard deviation ``scale``.

        Inverse distribution function of a tail probability that is drawn with full relative precision, so
        the tails are those of the normal distribution beyond 13 standard deviations (53-bit uniforms would
        end at 8.2).
        """
        dims = _dims(shape)
        scale = check_positive("scale", scale)
        sign, tail = self._signed_tails(math.prod(dims))
        return torch.special.ndtri(tail).mul_(-scale).mul_(sign).view(dims)

    def rounded_normal(self, shape: Shape, sigma: float) -> Tensor:
        """Int64 noise, normal noise of deviation sigma rounded: P[X = n] = Φ((n+½)/sigma) − Φ((n−½)/sigma).

        Of whole numbers x, x + round(Z) = round(x + Z): what is released is post-processing of ideal normal noise, so
        it costs what that costs. ``sigma`` is at most 2**54. Quantiles in float64 are trusted to a hundred times the
        error that comparison with multiple precision finds, and multiple precision decides what they leave open; see
        :func:`pl_privknn.privacy.noise.rounded_normal`.
        """
        dims = _dims(shape)
        draws = rounded_normal(self, math.prod(dims), check_positive("sigma", sigma))
        return torch.from_numpy(draws).view(dims)

    def laplace(self, shape: Shape, scale: float) -> Tensor:
        """Float64 noise of density exp(-abs(x) / scale) / (2 scale), by inverse distribution function."""
        dims = _dims(shape)
        scale = check_positive("scale", scale)
        sign, tail = self._signed_tails(math.prod(dims))
        return tail.mul_(2).log_().mul_(-scale).mul_(sign).view(dims)

    def gumbel(self, shape: Shape, scale: float) -> Tensor:
        """Float64 noise with P[x <= t] = exp(-exp(-t / scale)), accurate in both tails."""
        dims = _dims(shape)
        scale = check_positive("scale", scale)
        sign, tail = self._signed_tails(math.prod(dims))
        # -log U is exponential; near U = 1 it has to be computed from 1 - U, which is drawn precisely.
        exponential = torch.where(sign > 0, -torch.log1p(-tail), -torch.log(tail))
        return exponential.log_().mul_(-scale).view(dims)

    def discrete_gaussian(self, shape: Shape, sigma: float) -> Tensor:
        """Exact int64 noise, P[X = x] proportional to exp(-x² / (2 sigma²)); sigma at most 2**40.

        Canonne, Kamath, Steinke (2020); see :func:`pl_privknn.privacy.noise.discrete_gaussian`.
        """
        dims = _dims(shape)
        sigma = check_positive("sigma", sigma)
        draws = discrete_gaussian(self, math.prod(dims), Fraction(sigma))
        return torch.from_numpy(draws).view(dims)

    def discrete_laplace(self, shape: Shape, scale: float) -> Tensor:
        """Exact int64 noise, P[X = x] proportional to exp(-abs(x) / scale); scale at most 2**40.

        Canonne, Kamath, Steinke (2020); see :func:`pl_privknn.privacy.noise.discrete_laplace`.
        """
        dims = _dims(shape)
        scale = check_positive("scale", scale)
        draws = discrete_laplace(self, math.prod(dims), Fraction(scale))
        return torch.from_numpy(draws).view(dims)

    def exponential_choice(self, scores: Tensor, scale: float) -> Tensor:
        """Exact choices among the last dimension's places, with P[y] proportional to exp(scores[y] / scale).

        See :func:`pl_privknn.privacy.noise.exponential_choice`.

        Args:
            scores: whole numbers, shape ``(..., c)``.
            scale: above 0.

        Returns:
            int64, shape ``(...)``.

        Raises:
            ValueError: for floating-point scores.
        """
        if scores.is_floating_point():
            raise ValueError(f"scores: dtype {scores.dtype}; exact choices want whole numbers (int64)")
        scale = check_positive("scale", scale)
        rows = scores.reshape(-1, scores.shape[-1]).cpu().long().numpy()
        chosen = torch.from_numpy(exponential_choice(self, rows, Fraction(scale)))
        return chosen.view(scores.shape[:-1]).to(scores.device)

    def _signed_tails(self, count: int) -> tuple[Tensor, Tensor]:
        """Signs (±1) and tail probabilities in (0, 1/2], float64, shape ``(count,)``.

        One bit is the sign, 63 bits the probability; where those leave fewer than 53 significant bits, 64
        more are appended, so small probabilities keep full relative precision, down to 2**-129.
        """
        words = self.random_words(count)
        sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        words >>= np.uint64(1)
        tail = words.astype(np.float64)
        short = np.flatnonzero(words < np.uint64(1 << 53))
        tail[short] += (self.random_words(len(short)).astype(np.float64) + 0.5) * 2.0**-64
        tail *= 2.0**-64
        return torch.from_numpy(sign), torch.from_numpy(tail)


class SystemNoise(NoiseSource):
    """The operating system's cryptographic generator: the source for real runs.

    It keeps no state and buffers nothing, so copies, pickles, threads and forked processes never share a
    draw. :meth:`stream` returns the source itself: all its draws are independent anyway.

    Example:
        >>> from pl_privknn.privacy import SystemNoise
        >>> SystemNoise().cryptographic, SystemNoise().bernoulli(3, 1.0).tolist()
        (True, [True, True, True])
    """

    cryptographic: ClassVar[bool] = True

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """``count`` words from ``os.urandom``."""
        return np.frombuffer(bytearray(os.urandom(8 * count)), np.uint64)

    def stream(self, *key: int | str) -> SystemNoise:
        """The source itself."""
        _digest(*key)  # refuses the keys that a seeded source would refuse
        return self

    def __repr__(self) -> str:
        return "SystemNoise()"


class SeededNoise(NoiseSource):
    """Reproducible noise for tests and simulations; **it protects nothing**.

    Whoever knows the seed can subtract the noise, and the generator behind it is not cryptographic.

    The words are the exclusive or of two torch generators, seeded with two halves of a hash of the seed:
    torch's CPU generator uses 32 bits of its seed, and among 60,000 streams some two would coincide.
    A copy or a pickle continues from the same place on its own: both then draw the same noise.

    Args:
        seed: whole number in [0, 2**64).

    Example:
        >>> from pl_privknn.privacy import SeededNoise
        >>> again = SeededNoise(7).normal(5, 1.0) == SeededNoise(7).normal(5, 1.0)
        >>> bool(again.all()), SeededNoise(7).cryptographic
        (True, False)
    """

    def __init__(self, seed: int) -> None:
        self.seed = check_int("seed", seed, minimum=0, maximum=2**64 - 1)
        digest = _digest(self.seed)
        halves = (digest[8:12], digest[12:16])
        self._generators = tuple(
            torch.Generator("cpu").manual_seed(int.from_bytes(half, "little")) for half in halves
        )

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """``count`` words of the two generators."""
        first, second = (
            torch.empty(count, dtype=torch.int64, device="cpu").random_(-(1 << 63), None, generator=generator)
            for generator in self._generators
        )
        words: NDArray[np.uint64] = first.bitwise_xor_(second).numpy().view(np.uint64)
        return words

    def stream(self, *key: int | str) -> SeededNoise:
        """``SeededNoise`` whose seed is a hash of this seed and ``key``."""
        _digest(*key)
        return SeededNoise(int.from_bytes(_digest(self.seed, *key)[:8], "little"))

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed, "states": [generator.get_state() for generator in self._generators]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._generators = tuple(torch.Generator("cpu") for _ in state["states"])
        for generator, generator_state in zip(self._generators, state["states"], strict=True):
            generator.set_state(generator_state)

    def __repr__(self) -> str:
        return f"SeededNoise(seed={self.seed})"


def default_noise() -> NoiseSource:
    """The source for real runs: :class:`SystemNoise`.

    Example:
        >>> from pl_privknn.privacy import default_noise
        >>> default_noise().cryptographic
        True
    """
    return SystemNoise()


def _dims(shape: Shape) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, numbers.Integral) else shape
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ValueError(f"shape={shape!r} must be a whole number or a sequence of whole numbers")
    return tuple(check_int("shape", size, minimum=0) for size in sizes)


def _digest(*key: int | str) -> bytes:
    """SHA-256 of a key; parts are tagged and preceded by their length, so no two keys read the same."""
    if not key:
        raise ValueError("key=() must have at least one whole number or string")
    digest = hashlib.sha256(b"pl_privknn.privacy.noise")
    for part in key:
        if isinstance(part, bool) or not isinstance(part, numbers.Integral | str):
            raise ValueError(f"key={part!r} must be a whole number or a string")
        tag, text = (b"s", part) if isinstance(part, str) else (b"i", str(int(part)))
        encoded = text.encode()
        digest.update(tag + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
