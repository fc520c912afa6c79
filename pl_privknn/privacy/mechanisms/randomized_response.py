"""Randomised response: each record's owner randomises its message before it is sent."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.privacy.mechanisms.base import Adjacency, DominatingPair

if TYPE_CHECKING:
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]

# Places whose losses are added one by one.
_MOST = 10**4


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(DominatingPair):
    """Keep each value with probability 1−f, else send one of the others, uniformly (Warner 1965).

    One value has the losses ±L and 0, L = log((1−f)(n−1)/f); ``differing`` values of a message are noised
    independently, so their losses add up, and the message is pure (differing·L)-DP. A bit that may change
    in ``differing`` = 2kr places gets f = 1/(e^{ε/2kr} + 1) for a message of ε.

    The cost is that of one record's message. Under ``replace_one`` two records' messages are compared; under
    ``add_remove`` an absent record is one that sends its noised null message (all bits zero), so that who
    takes part is no secret. One charge covers all clients, since each record is in one message only.

    Attributes:
        flip_probability: f, from 0 to (n−1)/n, both excluded.
        num_values: n, the values that one place of the message can take; 2 for bits.
        differing: largest number of places in which two neighbouring messages differ.

    Example:
        >>> from pl_privknn.privacy import Charge, RandomizedResponse, epsilon_for_delta
        >>> release = RandomizedResponse(flip_probability=0.25)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        1.099
    """

    kind: ClassVar[str] = "randomized_response"

    flip_probability: float
    num_values: int = 2
    differing: int = 1

    def __post_init__(self) -> None:
        flip = check_open_unit("flip_probability", self.flip_probability)
        object.__setattr__(self, "flip_probability", flip)
        object.__setattr__(self, "num_values", check_int("num_values", self.num_values, minimum=2))
        object.__setattr__(self, "differing", check_int("differing", self.differing, maximum=_MOST))
        if self.loss <= 0:
            raise ValueError(
                f"flip_probability={self.flip_probability!r} must be below (n-1)/n = "
                f"{1 - 1 / self.num_values:.4g}, where the message would carry no information"
            )

    @classmethod
    def for_epsilon(cls, epsilon: float, num_values: int = 2, differing: int = 1) -> RandomizedResponse:
        """The mechanism whose whole message is pure ε-DP: f = (n−1)/(e^{ε/differing} + n − 1)."""
        others = num_values - 1
        return cls(others / (math.exp(epsilon / differing) + others), num_values, differing)

    @property
    def loss(self) -> float:
        """L, the pure ε of one place of the message."""
        keep, flip = 1 - self.flip_probability, self.flip_probability
        return math.log(keep) + math.log(self.num_values - 1) - math.log(flip)

    def randomize(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Noise every value of ``values`` (whole numbers below ``num_values``, or bool) independently.

        Returns:
            A new tensor of the same shape and dtype.
        """
        return self.draw(values, noise)

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        flipped = noise.bernoulli(tuple(values.shape), self.flip_probability).to(values.device)
        step = noise.integers(tuple(values.shape), self.num_values - 1).to(values.device) + 1
        moved = (values.long() + step) % self.num_values
        return moved.where(flipped, values.long()).to(values.dtype)

    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Distribution of the summed loss, from −differing·L to differing·L in steps of L."""
        keep, flip = 1 - self.flip_probability, self.flip_probability
        other = flip / (self.num_values - 1)
        one = np.array([other, flip - other, keep])
        total = np.ones(1)
        for _ in range(self.differing):
            total = np.convolve(total, one)
        steps = np.arange(-self.differing, self.differing + 1)
        # With two values a loss of 0 occurs only in even sums; outcomes that cannot occur are left out.
        possible = total > 0
        log_p = np.log(total[possible])
        return log_p, log_p - self.loss * steps[possible]

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """differing·L."""
        return self.differing * self.loss
