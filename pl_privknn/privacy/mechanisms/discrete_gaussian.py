"""The discrete Gaussian mechanism for whole-number releases."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_positive, check_rate
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import (
    UNSTATED,
    AdditiveNoise,
    Adjacency,
    envelope,
    require_unsampled,
    sample_pairs,
)

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]

# σ² over the squared sensitivity from which the lattice sums of _lattice_pairs are equal to 1e-17.
_SMOOTH = 2.1
_REACH = 13.0
# Largest sensitivity: all divisors of its square are tried.
_LARGEST_LENGTH = 1e6
# Largest deviation of a lattice that is listed point by point; beyond it the RDP curve is used, a little looser.
_LISTED = 2e5


@dataclasses.dataclass(frozen=True)
class DiscreteGaussian(AdditiveNoise):
    """Release whole numbers plus noise with P(x) ∝ e^{−x²/2σ²} on every coordinate.

    Drawn exactly in integers, it has no floating-point side channel. For a shift v of squared length
    m = |v|² the loss is (2Y − m)/2σ² with Y = v·x, so only Y matters. Without sampling ε(α) ≤ αm/2σ²
    (Canonne, Kamath, Steinke 2020, Theorem 4 and Corollary 16), as for the Gaussian.

    For the PLD: P(Y) = e^{−Y²/2mσ²}·Θ(Y), where Θ sums e^{−|z|²/2σ²} over a shifted lattice of dimension
    one less than v's. By Poisson summation Θ is constant over the multiples of g = gcd(v) up to a relative
    e^{−2π²σ²/m}, below 1e-17 for σ² ≥ 2.1 m. So each v gives the pair of a discrete Gaussian on gℤ with
    parameter √m·σ, one for each g whose square divides m, and the release is dominated by their envelope;
    shorter shifts are marginals of longer ones. The sums over such lattices are trapezoidal rules for the
    Gaussian's integrals and as exact as those, so the sampled RDP is the Gaussian's. Below σ² = 2.1 m only
    the RDP bound is used, and sampling is refused.

    Attributes:
        sigma: parameter σ, about the standard deviation.
        l2_sensitivity: L2 distance that one record can move the release; its square is a whole number.
        sampling_rate: Poisson rate in (0, 1] at which records take part.

    Example:
        >>> from pl_privknn.privacy import Charge, DiscreteGaussian, epsilon_for_delta
        >>> release = DiscreteGaussian(sigma=4.0)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.927
    """

    kind: ClassVar[str] = "discrete_gaussian"

    sigma: float
    l2_sensitivity: float = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(l2_sensitivity=1.0, sampling_rate=1.0)
        object.__setattr__(self, "sigma", check_positive("sigma", self.sigma))
        length = check_positive("l2_sensitivity", self.l2_sensitivity)
        object.__setattr__(self, "l2_sensitivity", length)
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate))
        if length > _LARGEST_LENGTH:
            raise ValueError(f"l2_sensitivity={length!r} must be at most {_LARGEST_LENGTH:g}")
        if self.square < 1 or abs(length**2 - self.square) > 1e-6 * self.square:
            raise ValueError(
                f"l2_sensitivity={self.l2_sensitivity!r} must be the square root of a whole number, since "
                "whole-number releases move by whole numbers; round its square down"
            )
        if self.sampling_rate < 1 and not self._smooth:
            raise ValueError(
                f"sigma={self.sigma!r} must be at least {math.sqrt(_SMOOTH):.3g} times l2_sensitivity when "
                "sampling_rate is below 1; use more noise or sampling_rate=1"
            )

    @property
    def square(self) -> int:
        """Squared L2 sensitivity."""
        return round(self.l2_sensitivity**2)

    @property
    def _smooth(self) -> bool:
        return self.sigma * self.sigma >= _SMOOTH * self.square

    @property
    def deviation(self) -> float:
        """σ, which the discrete distribution's deviation does not pass."""
        return self.sigma

    def add_noise(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Return whole-number ``values`` plus fresh noise, as a new int64 tensor of the same shape.

        Raises:
            ValueError: for floating-point ``values``; round first, and set the sensitivity of the rounded.
        """
        if values.is_floating_point():
            raise ValueError(f"values: dtype {values.dtype}; discrete noise wants whole numbers (int64)")
        return values.long() + noise.discrete_gaussian(tuple(values.shape), self.sigma).to(values.device)

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return rdp.gaussian_rdp(math.sqrt(self.square) / self.sigma, self.sampling_rate, orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the envelope over all shifts, or of the RDP curve for small noise."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        if not self._smooth or self.sigma * self.l2_sensitivity > _LISTED:
            return super().pld(adjacency, discretization)
        remove, add = _measures(self.sigma, self.square, self.sampling_rate)
        return pld.to_distribution(remove, add, discretization)


@functools.lru_cache(maxsize=16)
def _measures(sigma: float, square: int, rate: float) -> tuple[pld.LossMeasure, pld.LossMeasure]:
    pairs = [
        _lattice_pair(sigma, square, step, rate)
        for step in range(1, math.isqrt(square) + 1)
        if square % (step * step) == 0
    ]
    # Mass beyond the reach (below 1e-36) counts as an infinite loss, in both directions.
    lost = 2 * math.exp(-_REACH * _REACH / 2)
    tails = pld.LossMeasure(np.array([-math.inf, math.inf]), np.full(2, lost), np.full(2, lost))
    if len(pairs) == 1:
        p, q = (np.exp(log) for log in pairs[0])
        remove = pld.LossMeasure(pairs[0][0] - pairs[0][1], p, q)
        return remove.joined(tails), remove.reversed().joined(tails)
    size = max(len(log_p) for log_p, _ in pairs)
    p, q = (
        np.stack([np.pad(np.exp(pair[side]), (0, size - len(pair[side]))) for pair in pairs])
        for side in (0, 1)
    )
    return envelope(p, q).joined(tails), envelope(q, p).joined(tails)


def _lattice_pair(sigma: float, square: int, step: int, rate: float) -> tuple[Floats, Floats]:
    """(log p, log q) of a discrete Gaussian on multiples of ``step``, moved by ``square``; sampled."""
    spread = sigma * math.sqrt(square)
    low, high = (-_REACH * spread, square + _REACH * spread)
    y = step * np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=np.float64)
    log_q, log_p = -((y / spread) ** 2) / 2, -(((y - square) / spread) ** 2) / 2
    log_total = np.log(np.sum(np.exp(log_q)))
    return sample_pairs(log_p - log_total, log_q - log_total, rate)
