"""The Gaussian mechanism, Poisson-sampled or not."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_positive, check_rate
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import STEP, UNSTATED, AdditiveNoise, Adjacency, require_unsampled

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource


@dataclasses.dataclass(frozen=True)
class Gaussian(AdditiveNoise):
    """Release a vector plus independent N(0, σ²) noise on every coordinate.

    With μ = l2_sensitivity / σ and rate γ the worst pair is ((1−γ)·N(0, 1) + γ·N(μ, 1), N(0, 1)), in both
    directions (Mironov, Talwar, Zhang 2019; Zhu, Dong, Wang 2022). Without sampling: ε(α) = αμ²/2.

    Attributes:
        sigma: standard deviation of the noise, in the units of the released vector.
        l2_sensitivity: L2 distance that one record can move the vector under the adjacency of the ledger:
            √2 for votes of the k nearest records, √k for counts of which a record changes k by one, clipping
            norm C for sums of clipped gradients. 1 where it is not stated.
        sampling_rate: Poisson rate in (0, 1] at which records take part; 1 where it is not stated.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> release = Gaussian(sigma=40.0, l2_sensitivity=2**0.5)
        >>> round(epsilon_for_delta([Charge(release, 100)], delta=1e-5), 3)
        1.356
    """

    kind: ClassVar[str] = "gaussian"

    sigma: float
    l2_sensitivity: float = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(l2_sensitivity=1.0, sampling_rate=1.0)
        object.__setattr__(self, "sigma", check_positive("sigma", self.sigma))
        object.__setattr__(self, "l2_sensitivity", check_positive("l2_sensitivity", self.l2_sensitivity))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    @property
    def deviation(self) -> float:
        """σ."""
        return self.sigma

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        if not values.is_floating_point():
            return self._draw_multiples(values.long() * round(1 / STEP), STEP, noise)
        return values.double() + noise.normal(tuple(values.shape), self.sigma).to(values.device)

    def add_noise_to_multiples(self, counts: Tensor, step: float, noise: NoiseSource) -> Tensor:
        """:meth:`add_noise` to whole numbers of a step, as a new float64 tensor of multiples of ``step``.

        Args:
            counts: whole numbers (int64), of which one record moves ``counts * step`` by ``l2_sensitivity`` at most.
            step: a power of two, public; σ / step at most 2**54.
            noise: where the noise comes from.

        Raises:
            ValueError: for other numbers than whole ones, or another step.
        """
        if counts.is_floating_point():
            raise ValueError(f"counts: dtype {counts.dtype}; expected int64 for noise on multiples")
        if math.frexp(check_positive("step", step))[0] != 0.5:
            raise ValueError(f"step={step!r} must be a power of two, so that no product with it is rounded")
        return self.draw(
            counts.long(),
            noise,
            lambda counts, noise: self._draw_multiples(counts, step, noise),
            lambda counts: counts.double() * step,
        )

    def _draw_multiples(self, counts: Tensor, step: float, noise: NoiseSource) -> Tensor:
        drawn = noise.rounded_normal(tuple(counts.shape), self.sigma / step)
        return (counts + drawn.to(counts.device)).double() * step

    def rdp(self, orders: NDArray[np.float64], adjacency: Adjacency) -> NDArray[np.float64]:
        """RDP of one release; see :func:`pl_privknn.privacy.accounting.rdp.gaussian_rdp`."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return rdp.gaussian_rdp(self.l2_sensitivity / self.sigma, self.sampling_rate, orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of one release by connect-the-dots; see :func:`pl_privknn.privacy.accounting.pld.gaussian_losses`."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return _distribution(self.l2_sensitivity / self.sigma, self.sampling_rate, discretization)

    def gaussian_mu(self, adjacency: Adjacency) -> float | None:
        """μ, unless the release is sampled."""
        return self.l2_sensitivity / self.sigma if self.sampling_rate == 1.0 else None


@functools.lru_cache(maxsize=32)
def _distribution(mu: float, sampling_rate: float, discretization: float) -> PrivacyLossDistribution:
    remove = pld.gaussian_losses(mu, sampling_rate, discretization)
    # N(0, 1) against N(μ, 1) is its own mirror image; the mixture is not.
    return pld.to_distribution(remove, None if sampling_rate == 1.0 else remove.reversed(), discretization)
