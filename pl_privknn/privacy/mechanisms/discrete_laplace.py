"""The discrete Laplace (two-sided geometric) mechanism for whole-number releases."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_positive, check_rate
from pl_privknn.privacy.mechanisms.base import (
    MAX_LISTED,
    UNSTATED,
    AdditiveNoise,
    Adjacency,
    DominatingPair,
    require_unsampled,
    sample_pairs,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class DiscreteLaplace(AdditiveNoise, DominatingPair):
    """Release whole numbers plus noise with P(x) = (1−r)/(1+r)·r^|x|, r = e^{−1/b} (Ghosh et al. 2009).

    Drawn exactly in integers, it has no floating-point side channel (Mironov 2012; Canonne, Kamath, Steinke
    2020, Algorithm 2). For a shift D the ratio at x is e^{(2x−D)/b} for x from 0 to D and constant
    beyond, so D + 1 outcomes tell everything; the pair is pure D/b-DP. A shift split over several
    coordinates is dominated by one of the same L1 length, as for :class:`Laplace`: each inner outcome
    keeps at least its mass, and both extreme ones lose some.

    Attributes:
        scale: b, in the units of the released numbers.
        l1_sensitivity: whole number; the L1 distance that one record can move the release.
        sampling_rate: Poisson rate in (0, 1] at which records take part.

    Example:
        >>> from pl_privknn.privacy import Charge, DiscreteLaplace, epsilon_for_delta
        >>> release = DiscreteLaplace(scale=20.0, l1_sensitivity=2)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.1
    """

    kind: ClassVar[str] = "discrete_laplace"

    scale: float
    l1_sensitivity: int = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(l1_sensitivity=1, sampling_rate=1.0)
        object.__setattr__(self, "scale", check_positive("scale", self.scale))
        object.__setattr__(
            self, "l1_sensitivity", check_int("l1_sensitivity", self.l1_sensitivity, maximum=MAX_LISTED)
        )
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate))

    @property
    def deviation(self) -> float:
        """√2·b, which the discrete distribution's deviation does not pass."""
        return math.sqrt(2.0) * self.scale

    def add_noise(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Return whole-number ``values`` plus fresh noise, as a new int64 tensor of the same shape.

        Raises:
            ValueError: for floating-point ``values``; round first, and set the sensitivity of the rounded.
        """
        if values.is_floating_point():
            raise ValueError(f"values: dtype {values.dtype}; discrete noise wants whole numbers (int64)")
        return values.long() + noise.discrete_laplace(tuple(values.shape), self.scale).to(values.device)

    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Outcomes at or below 0, 1, …, D−1, at or above D, for noise about D and about 0."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        decay = 1 / self.scale
        steps = np.arange(self.l1_sensitivity + 1, dtype=np.float64)
        log_q = np.log(-np.expm1(-decay)) - np.log1p(np.exp(-decay)) - decay * steps
        log_q[[0, -1]] = -np.log1p(np.exp(-decay)) - decay * steps[[0, -1]]
        return sample_pairs(log_q[::-1], log_q, self.sampling_rate)
