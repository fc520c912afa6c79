"""The Laplace mechanism, Poisson-sampled or not."""

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

Floats = NDArray[np.float64]

# ε₀ from which every order's divergence is taken for that of order ∞, of which it falls short by a few dozen nats.
_LARGE = 1e5


@dataclasses.dataclass(frozen=True)
class Laplace(AdditiveNoise):
    """Release a vector plus independent Laplace noise of scale b (not 1/b) on every coordinate.

    With ε₀ = l1_sensitivity / b the worst pair is (Lap(ε₀), Lap(0)), in one coordinate: the likelihood ratio
    is e^u with u in [−ε₀, ε₀], and under Lap(0) u has an atom of ½ at −ε₀, the density ¼e^{−(u+ε₀)/2}, and an
    atom of ½e^{−ε₀} at ε₀. A shift split over several coordinates, ε₀ = a + b, gives a pair with the same
    density inside or more, and less in the two extreme atoms; mass moved inwards from both ends, its
    totals under both distributions kept, is a randomisation of the one-coordinate pair, so that one
    dominates. Sampling replaces the ratio e^u by 1 − γ + γe^u.

    Attributes:
        scale: b, in the units of the released vector; the noise's standard deviation is √2·b.
        l1_sensitivity: L1 distance that one record can move the vector under the adjacency of the ledger.
        sampling_rate: Poisson rate in (0, 1] at which records take part.

    Example:
        >>> from pl_privknn.privacy import Charge, Laplace, epsilon_for_delta
        >>> release = Laplace(scale=20.0, l1_sensitivity=2.0)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.1
    """

    kind: ClassVar[str] = "laplace"

    scale: float
    l1_sensitivity: float = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(l1_sensitivity=1.0, sampling_rate=1.0)
        object.__setattr__(self, "scale", check_positive("scale", self.scale))
        object.__setattr__(self, "l1_sensitivity", check_positive("l1_sensitivity", self.l1_sensitivity))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    @property
    def deviation(self) -> float:
        """√2·b."""
        return math.sqrt(2.0) * self.scale

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        if values.is_floating_point():
            return values.double() + noise.laplace(tuple(values.shape), self.scale).to(values.device)
        drawn = noise.rounded_laplace(tuple(values.shape), self.scale / STEP).to(values.device)
        return (values.long() * round(1 / STEP) + drawn).double() * STEP

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release: the atoms' terms plus Gauss-Legendre quadrature of the density's."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return _rdp(self.l1_sensitivity / self.scale, self.sampling_rate, orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of one release by connect-the-dots."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return _distribution(self.l1_sensitivity / self.scale, self.sampling_rate, discretization)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """l1_sensitivity / b, or log(1−γ+γe^that) when sampled."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return float(rdp.sampled_loss(np.array(self.l1_sensitivity / self.scale), self.sampling_rate))


def _rdp(pure: float, rate: float, orders: Floats) -> Floats:
    if pure > _LARGE:
        return np.full(len(orders), float(rdp.sampled_loss(np.array(pure), rate)))
    # Panels halve towards both ends, so that e^{±αu} is resolved wherever it is not negligible.
    halvings = max(2, math.ceil(math.log2(max(pure, 1e-4) / 1e-4)))
    outer = pure * (1 - 0.5 ** np.arange(halvings + 1))
    edges = np.concatenate([[-pure], -outer[:0:-1], outer, [pure]])
    nodes, weights = np.polynomial.legendre.leggauss(48)
    half = np.diff(edges)[:, None] / 2
    u = (edges[:-1, None] + half * (1 + nodes)).ravel()
    log_weight = np.log((half * weights / 4).ravel()) - (u + pure) / 2
    u = np.concatenate([[-pure], u, [pure]])
    log_lower = np.concatenate([[math.log(0.5)], log_weight, [math.log(0.5) - pure]])
    log_ratio = rdp.sampled_loss(u, rate)
    log_ratio, log_lower = log_ratio[:, None], log_lower[:, None]
    curve = rdp.largest_log_moments(orders, log_ratio, log_lower)
    if rate < 1:
        curve = np.maximum(curve, rdp.largest_log_moments(orders, -log_ratio, log_lower + log_ratio))
    return curve / (orders - 1)


@functools.lru_cache(maxsize=32)
def _distribution(pure: float, rate: float, discretization: float) -> PrivacyLossDistribution:
    def mixed(lower: Floats, upper: Floats) -> Floats:
        return (1 - rate) * lower + rate * upper

    ends = np.array([-pure, pure])
    first, u = pld.cell_edges(ends, rate, discretization)
    u = u.clip(-pure, pure)
    # Masses of the density between edges, under Lap(0) and Lap(ε₀); each a difference in its own units.
    widths = np.diff(u)
    lower = -0.5 * np.exp(-(u[:-1] + pure) / 2) * np.expm1(-widths / 2)
    upper = -0.5 * np.exp((u[1:] - pure) / 2) * np.expm1(-widths / 2)
    atoms_lower = 0.5 * np.exp(-(ends + pure) / 2)
    atoms_upper = 0.5 * np.exp((ends - pure) / 2)
    remove = pld.LossMeasure(
        rdp.sampled_loss(ends, rate),
        mixed(atoms_lower, atoms_upper),
        atoms_lower,
        first,
        mixed(lower, upper),
        lower,
    )
    return pld.to_distribution(remove, None if rate == 1.0 else remove.reversed(), discretization)
