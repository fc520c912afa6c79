"""Sources of protective randomness: every coin and every noise draw of a release.

Whole numbers get exact noise: coins and integers compare random bits with the digits of a rational number, rounded
normal and Laplace noise, thresholds and choices compare them with probabilities in float64, and in multiple precision
where float64 does not suffice. This prevents the floating-point attacks of Mironov (2012). The running time depends
on the values drawn: timing is not covered.

References:
    Mironov. On Significance of the Least Significant Bits for Differential Privacy. CCS 2012.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import math
import numbers
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, ClassVar

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int, check_non_negative, check_positive

_WORD = 1 << 64
#: Larger rounded noise is refused, so that its values lie inside 64-bit integers.
MAX_ROUNDED = float(1 << 54)
# Quantiles of float64 tail probabilities from 2**-64 to 1/2 are wrong by at most 2**-51.8 (1 + |z|), as mpmath finds;
# more than a hundred times that is allowed for, which covers the rounding of probabilities and products, too.
_GUARD = 2.0**-45
# Error of a probability in multiple precision, in units of the last bit that it is compared at: below 2**-28.
_SLACK = 2.0**-16
# Values that fit the cache together, and of which torch computes functions in one thread.
_BLOCK = 1 << 15


class Known:
    """Uniform number in [0, 1) of which the first bits are known; more are drawn where a comparison needs them.

    Args:
        source: of further bits.
        digits: the first bits, as a whole number.
        bits: how many these are.
    """

    def __init__(self, source: NoiseSource, digits: int, bits: int) -> None:
        self._source, self._digits, self._bits = source, digits, bits

    def is_below(self, probability: Callable[[mpmath.MPContext], mpmath.mpf]) -> bool:
        """Whether the number is below a probability, which is computed in the precision of the given context."""
        context = mpmath.mp.clone()
        while True:
            context.prec = self._bits + 64
            edge = probability(context) * (1 << self._bits)
            if self._digits + 1 <= edge - _SLACK or self._digits >= edge + _SLACK:
                return bool(self._digits < edge)
            word = int(self._source.random_words(1)[0])
            self._digits, self._bits = self._digits << 64 | word, self._bits + 64


@dataclasses.dataclass(frozen=True)
class Law:
    """A symmetric distribution of scale 1.

    Attributes:
        quantile: the value beyond which a tail probability in (0, 1/2) lies, in float64.
        tail: the probability beyond a value of at least 0, in multiple precision.
    """

    quantile: Callable[[Tensor], Tensor]
    tail: Callable[[mpmath.mpf, mpmath.MPContext], mpmath.mpf]


NORMAL = Law(
    lambda tail: -torch.special.ndtri(tail), lambda value, context: context.erfc(value / context.sqrt(2)) / 2
)
LAPLACE = Law(lambda tail: -torch.log(2 * tail), lambda value, context: context.exp(-value) / 2)


def _tail(law: Law, value: Fraction, context: mpmath.MPContext) -> mpmath.mpf:
    return law.tail(_exact(value, context), context)


def _ncdf(value: Fraction, context: mpmath.MPContext) -> mpmath.mpf:
    return context.ncdf(_exact(value, context))


def _exact(value: Fraction, context: mpmath.MPContext) -> mpmath.mpf:
    return context.mpf(value.numerator) / value.denominator


Shape = int | Sequence[int]


class NoiseSource(abc.ABC):
    """Base class of noise samplers on 64-bit random words; subclasses generate the words.

    What is covered against floating-point attacks (Mironov 2012: the spacing of floating-point results of a
    noisy sum gives away the value before the noise):

    * :meth:`integers` and :meth:`bernoulli` are exact: their decisions compare whole numbers only.
    * :meth:`rounded_normal`, :meth:`rounded_laplace`, :meth:`normal_at_least` and :meth:`exponential_choice` are
      exact if the error bounds of float64 functions stated here hold (more than a hundred times what comparison with
      multiple precision finds); what these leave open is decided in multiple precision. A sum of whole numbers plus
      rounded noise is the rounded sum with ideal noise, and covered.
    * :meth:`normal` and :meth:`laplace` are float64 approximations of continuous noise. Their distribution is
      accurate to rounding far into the tails, yet the sum of data and noise is **not** covered.
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
        bits = (check_int("below", below, maximum=1 << 63) - 1).bit_length()
        result = np.zeros(math.prod(dims), np.int64)
        pending = np.arange(len(result)) if bits else np.arange(0)
        while len(pending):  # by rejection: there is no modulo bias
            draws = (self.random_words(len(pending)) >> np.uint64(64 - bits)).astype(np.int64)
            accepted = draws <= below - 1
            result[pending[accepted]] = draws[accepted]
            pending = pending[~accepted]
        return torch.from_numpy(result).view(dims)

    def bernoulli(self, shape: Shape, p: float) -> Tensor:
        """Bool coins, true with probability exactly the float ``p``: 1 is always true, 0 never.

        A byte decides 255 of 256 coins, so a million coins cost little more than a million random bytes; the binary
        digits of ``p`` that follow decide the others.

        Raises:
            ValueError: if ``p`` lies outside [0, 1].
        """
        dims = _dims(shape)
        if check_non_negative("p", p) > 1:
            raise ValueError(f"p={p!r} must be a probability in [0, 1]")
        count = math.prod(dims)
        if p in (0, 1):
            return torch.full(dims, p == 1, device="cpu")
        digit, rest = divmod(Fraction(p) * 256, 1)
        draws = self.random_words(-(-count // 8)).view(np.uint8)[:count]
        result = draws < digit
        pending = np.flatnonzero(draws == digit)
        while len(pending) and rest:
            digit, rest = divmod(rest * _WORD, 1)
            words = self.random_words(len(pending))
            result[pending] = words < np.uint64(digit)
            pending = pending[words == np.uint64(digit)]
        return torch.from_numpy(result).view(dims)

    def normal(self, shape: Shape, scale: float) -> Tensor:
        """Float64 noise of the normal distribution with mean 0 and standard deviation ``scale``.

        Inverse distribution function of a tail probability that is drawn with full relative precision, so
        the tails are those of the normal distribution beyond 13 standard deviations (53-bit uniforms would
        end at 8.2).
        """
        return self._continuous(shape, scale, NORMAL)

    def rounded_normal(self, shape: Shape, sigma: float) -> Tensor:
        """Int64 noise, normal noise of deviation sigma rounded: P[X = n] = Φ((n+½)/sigma) − Φ((n−½)/sigma).

        Of whole numbers x, x + round(Z) = round(x + Z): what is released is post-processing of ideal normal noise, so
        it costs what that costs. ``sigma`` is at most 2**54.
        """
        return self._rounded(shape, check_positive("sigma", sigma), NORMAL)

    def rounded_laplace(self, shape: Shape, scale: float) -> Tensor:
        """Int64 noise, Laplace noise rounded; see :meth:`rounded_normal`."""
        return self._rounded(shape, check_positive("scale", scale), LAPLACE)

    def normal_at_least(self, thresholds: Tensor, scale: float) -> Tensor:
        """Whether fresh normal noise of deviation ``scale`` reaches each threshold; bool, exact.

        A coin of the probability Φ(−threshold/scale): a random word decides it where float64 suffices, else multiple
        precision does.

        Args:
            thresholds: finite, any shape; taken as the float64 numbers that they are.
            scale: above 0.
        """
        flat = thresholds.detach().cpu().double().reshape(-1).numpy()
        scale = check_positive("scale", scale)
        reach = torch.special.ndtr(torch.from_numpy(flat / -scale)).numpy()
        words = self.random_words(len(flat))
        numbers = words.astype(np.float64) * 2.0**-64
        result: NDArray[np.bool_] = numbers < reach
        for place in np.flatnonzero(np.abs(numbers - reach) <= _GUARD):
            edge = -Fraction(float(flat[place])) / Fraction(scale)
            known = Known(self, int(words[place]), 64)
            result[place] = known.is_below(functools.partial(_ncdf, edge))
        return torch.from_numpy(result).view(thresholds.shape).to(thresholds.device)

    def laplace(self, shape: Shape, scale: float) -> Tensor:
        """Float64 noise of density exp(-abs(x) / scale) / (2 scale), by inverse distribution function."""
        return self._continuous(shape, scale, LAPLACE)

    def exponential_choice(self, scores: Tensor, scale: float) -> Tensor:
        """Choices among the last dimension's places, exactly with P[y] proportional to exp(scores[y] / scale).

        A random word is compared with the cumulated probabilities; those too close to it for float64 are
        computed in multiple precision.

        Args:
            scores: finite, shape ``(..., c)``; taken as the float64 numbers that they are.
            scale: above 0.

        Returns:
            int64, shape ``(...)``.
        """
        rows = scores.detach().reshape(-1, scores.shape[-1]).cpu().double().numpy()
        scale = check_positive("scale", scale)
        behind = rows.max(axis=1, keepdims=True) - rows
        edges = np.exp(behind / -scale).cumsum(axis=1)
        edges = edges[:, :-1] / edges[:, -1:]
        words = self.random_words(len(rows))
        numbers, guard = words.astype(np.float64)[:, None] * 2.0**-64, _GUARD * rows.shape[1]
        low, high = ((edges + move <= numbers).sum(axis=1) for move in (guard, -guard))
        for place in np.flatnonzero(low < high):
            known, gaps = Known(self, int(words[place]), 64), behind[place].tolist()

            def cumulated(context: mpmath.MPContext, last: int, gaps: list[float] = gaps) -> mpmath.mpf:
                weights = [context.exp(_exact(-Fraction(gap) / Fraction(scale), context)) for gap in gaps]
                return context.fsum(weights[: last + 1]) / context.fsum(weights)

            while low[place] < high[place] and not known.is_below(
                functools.partial(cumulated, last=int(low[place]))
            ):
                low[place] += 1
        return torch.from_numpy(low.astype(np.int64)).view(scores.shape[:-1]).to(scores.device)

    def _continuous(self, shape: Shape, scale: float, law: Law) -> Tensor:
        """Samples of scale · Z, Z of the law, in float64."""
        dims = _dims(shape)
        scale = check_positive("scale", scale)
        sign, tail = self._signed_tails(math.prod(dims))
        return law.quantile(tail).mul_(scale).mul_(sign).view(dims)

    def _rounded(self, shape: Shape, scale: float, law: Law) -> Tensor:
        """Samples of round(scale · Z), Z of the law: P[X = n] = F((n+½)/scale) − F((n−½)/scale).

        A word is a sign and the first 63 bits of a uniform tail probability T below 1/2. The quantiles at both ends
        of what is left open of T, moved apart by more than their error in float64, nearly always round to the same
        number, which is then certain. The others are decided in multiple precision, with more bits of T where these
        are needed. From a scale of 2**40 on these are most, at some milliseconds each.
        """
        dims = _dims(shape)
        if not 0 < scale <= MAX_ROUNDED:
            raise ValueError(f"scale={scale!r} must be above 0 and at most 2**54")
        words = self.random_words(math.prod(dims))
        tails = words >> np.uint64(1)

        def distance(numbers: NDArray[np.uint64], guard: float) -> NDArray[np.float64]:
            quantiles = law.quantile(torch.from_numpy(numbers.astype(np.float64) * 2.0**-64)).numpy()
            moved: NDArray[np.float64] = np.rint(scale * (quantiles + guard * (1 + quantiles)))
            return moved

        low = np.maximum(distance(tails + np.uint64(1), -_GUARD), 0.0)
        # At 0 the quantile is infinite. Nothing lies beyond 2**62, 256 scales, but for one draw in 10**100.
        high = np.minimum(distance(tails, _GUARD), 2.0**62)
        result = low.astype(np.int64)
        for place in np.flatnonzero(low < high):
            least, most, known = int(low[place]), int(high[place]), Known(self, int(tails[place]), 64)
            while least < most:
                middle = (least + most) // 2
                beyond = Fraction(2 * middle + 1, 2) / Fraction(scale)
                if known.is_below(functools.partial(_tail, law, beyond)):
                    least = middle + 1
                else:
                    most = middle
            result[place] = least
        return torch.from_numpy(np.where(words & np.uint64(1), -result, result)).view(dims)

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
    """Noise from the operating system's cryptographic generator: the source for real runs.

    It keeps no state and buffers nothing, so copies, pickles, threads and forked processes never share a
    draw. :meth:`stream` returns the source itself: all its draws are independent anyway.

    Example:
        >>> from pl_privknn.privacy import SystemNoise
        >>> SystemNoise().cryptographic, SystemNoise().bernoulli(3, 1.0).tolist()
        (True, [True, True, True])
    """

    cryptographic: ClassVar[bool] = True

    def normal(self, shape: Shape, scale: float) -> Tensor:
        """See :meth:`NoiseSource.normal`; drawn in blocks, by as many threads as torch has."""
        dims = _dims(shape)
        total = math.prod(dims)
        counts = [min(_BLOCK, total - start) for start in range(0, total, _BLOCK)] or [0]
        draw = functools.partial(super().normal, scale=scale)
        if len(counts) == 1 or torch.get_num_threads() == 1:
            return torch.cat(list(map(draw, counts))).view(dims)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return torch.cat(list(threads.map(draw, counts))).view(dims)

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

    A person who knows the seed can subtract the noise, and the generator is not cryptographic.

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
    """Noise source for real runs: :class:`SystemNoise`.

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
    """SHA-256 of a key; parts are tagged and preceded by their length, so different keys have different bytes."""
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
