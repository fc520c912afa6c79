"""The contract of mechanisms that noise votes: what they draw, and what a labeler fills in."""

from __future__ import annotations

import abc
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pl_privknn.privacy.mechanisms.base import Mechanism

if TYPE_CHECKING:
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

#: Default of the fields that depend on what is noised. Where nobody states them, they become what
#: :meth:`VoteNoise.settle` says, or what :meth:`VoteNoise.for_votes` gets.
UNSTATED: Any = None

_Noise = TypeVar("_Noise", bound="VoteNoise")


class VoteNoise(Mechanism):
    """Noise by which the class with the most votes is chosen.

    Example:
        >>> from pl_privknn.privacy.mechanisms import Gaussian, VoteNoise
        >>> noise = Gaussian(sigma=25.0).for_votes(l1=2.0, l2=2**0.5, rate=0.15)
        >>> isinstance(noise, VoteNoise), noise.deviation, noise.sampling_rate
        (True, 25.0, 0.15)
    """

    _unstated: ClassVar[frozenset[str]] = frozenset()

    @property
    @abc.abstractmethod
    def deviation(self) -> float:
        """Standard deviation of the noise on one vote."""

    @abc.abstractmethod
    def argmax(self, votes: Tensor, noise: NoiseSource) -> Tensor:
        """Draw the noise and choose.

        Args:
            votes: votes of each class, shape ``(..., c)``.
            noise: where the noise comes from.

        Returns:
            int64, shape ``(...)``.
        """

    def for_votes(self: _Noise, l1: float, l2: float, rate: float = 1.0) -> _Noise:
        """The same noise for votes, or other sums, whose sensitivity is known.

        Args:
            l1: L1 distance that one record can move the votes.
            l2: L2 distance.
            rate: Poisson rate in (0, 1] at which records take part.

        Returns:
            The frozen mechanism that both draws and accounts.

        Raises:
            ValueError: if this mechanism states another value.
        """
        return self._completed(l1_sensitivity=l1, l2_sensitivity=l2, sampling_rate=rate)

    def settle(self, **defaults: Any) -> None:
        """Give unstated fields their values, and remember which they were; for ``__post_init__``."""
        unstated = frozenset(name for name in defaults if getattr(self, name) is UNSTATED)
        for name in unstated:
            object.__setattr__(self, name, defaults[name])
        object.__setattr__(self, "_unstated", unstated)

    def _completed(self: _Noise, **known: Any) -> _Noise:
        names = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        wanted = {name: value for name, value in known.items() if name in names}
        for name, value in wanted.items():
            stated = getattr(self, name)
            if name in self._unstated or stated == value:
                continue
            if stated != 1.0:
                raise ValueError(
                    f"noise.{name}={stated!r} differs from the labeler's {value!r}; leave it out"
                )
            # Configurations that version 0.1 saved hold this default, which the user never stated.
            warnings.warn(
                f"noise.{name}=1.0 is not what the labeler releases, and {value!r} is charged; leave it out, the "
                "next version refuses it",
                FutureWarning,
                stacklevel=3,
            )
        completed: _Noise = dataclasses.replace(self, **wanted)  # type: ignore[type-var]
        return completed


class AdditiveNoise(VoteNoise):
    """Noise that is added to every number of a release and paid for as such, so that all of them may be shown.

    Example:
        >>> import torch
        >>> from pl_privknn.privacy import Gaussian, SeededNoise
        >>> noisy = Gaussian(sigma=25.0).add_noise(torch.tensor([200, 60, 40]), SeededNoise(0))
        >>> noisy.shape, noisy.dtype
        (torch.Size([3]), torch.float64)
    """

    @abc.abstractmethod
    def add_noise(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Return ``values`` plus fresh noise, as a new tensor of the same shape."""

    def argmax(self, votes: Tensor, noise: NoiseSource) -> Tensor:
        """Add noise and take the largest; see :meth:`VoteNoise.argmax`."""
        return self.add_noise(votes, noise).argmax(dim=-1)
