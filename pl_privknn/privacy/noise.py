"""The source of protective randomness: every coin and every noise draw of a release comes from here."""

from __future__ import annotations

import abc
import hashlib
import math
import numbers
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int, check_non_negative, check_positive
from pl_privknn.privacy import samplers

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
        draws = samplers.integers(self, math.prod(dims), check_int("below", below, maximum=1 << 63))
        return torch.from_numpy(draws).view(dims)

    def bernoulli(self, shape: Shape, p: float) -> Tensor:
        """Bool coins, true with probability exactly the float ``p``: 1 is always true, 0 never.

        Raises:
            ValueError: if ``p`` lies outside [0, 1].
        """
        dims = _dims(shape)
        if check_non_negative("p", p) > 1:
            raise ValueError(f"p={p!r} must be a probability in [0, 1]")
        return torch.from_numpy(samplers.coins(self, math.prod(dims), Fraction(p))).view(dims)

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
        :func:`pl_privknn.privacy.samplers.rounded_normal`.
        """
        dims = _dims(shape)
        draws = samplers.rounded_normal(self, math.prod(dims), check_positive("sigma", sigma))
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

        Canonne, Kamath, Steinke (2020); see :func:`pl_privknn.privacy.samplers.discrete_gaussian`.
        """
        dims = _dims(shape)
        sigma = check_positive("sigma", sigma)
        draws = samplers.discrete_gaussian(self, math.prod(dims), Fraction(sigma))
        return torch.from_numpy(draws).view(dims)

    def discrete_laplace(self, shape: Shape, scale: float) -> Tensor:
        """Exact int64 noise, P[X = x] proportional to exp(-abs(x) / scale); scale at most 2**40.

        Canonne, Kamath, Steinke (2020); see :func:`pl_privknn.privacy.samplers.discrete_laplace`.
        """
        dims = _dims(shape)
        scale = check_positive("scale", scale)
        draws = samplers.discrete_laplace(self, math.prod(dims), Fraction(scale))
        return torch.from_numpy(draws).view(dims)

    def exponential_choice(self, scores: Tensor, scale: float) -> Tensor:
        """Exact choices among the last dimension's places, with P[y] proportional to exp(scores[y] / scale).

        See :func:`pl_privknn.privacy.samplers.exponential_choice`.

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
        chosen = torch.from_numpy(samplers.exponential_choice(self, rows, Fraction(scale)))
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
