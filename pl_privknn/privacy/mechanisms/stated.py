"""Stated costs: a pure ε, a capped stream of Gaussian releases, a release whose cost holds under a condition."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_open_unit, check_positive, check_rate
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import (
    Adjacency,
    Charge,
    DominatingPair,
    Level,
    Mechanism,
    require_unsampled,
    sample_pairs,
)

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource


Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class PureDP(DominatingPair):
    """Any release of which only ε-differential privacy is known.

    Randomised response with that ε, (e^ε, 1)/(1+e^ε) against (1, e^ε)/(1+e^ε), dominates every ε-DP pair
    (Kairouz, Oh, Viswanath 2015, Theorem 3.4). It serves local randomisers such as Collision,
    whose message depends on one record alone, and noisy maxima with Laplace noise.

    Attributes:
        epsilon: ε of one release under the adjacency of the ledger.
        sampling_rate: Poisson rate in (0, 1] at which records take part.

    Example:
        >>> from pl_privknn.privacy import Charge, PureDP, epsilon_for_delta
        >>> release = PureDP(epsilon=0.1)
        >>> round(epsilon_for_delta([Charge(release, 10)], delta=1e-5), 3)
        0.994
    """

    kind: ClassVar[str] = "pure_dp"

    epsilon: float
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_positive("epsilon", self.epsilon))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Randomised response, sampled."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        total = np.logaddexp(self.epsilon, 0.0)
        likely, unlikely = self.epsilon - total, -total
        return sample_pairs(np.array([likely, unlikely]), np.array([unlikely, likely]), self.sampling_rate)


@dataclasses.dataclass(frozen=True)
class Exposure(DominatingPair):
    """An event of small probability that gives a record away: (0, δ)-differential privacy.

    With the noisy counts of partitions, of which those above a threshold are released, a record that is the only one
    of its partition is exposed where that one's noisy count is above it. Otherwise a table with the record and one
    without release the same partitions, with the noise of their counts. Composed with other releases δ adds up:
    δ(ε) = δ₁ + (1 − δ₁)·δ₂(ε).

    Attributes:
        delta: probability of the event.

    Example:
        >>> from pl_privknn.privacy import Charge, Exposure, Gaussian, delta_for_epsilon
        >>> noise = Charge(Gaussian(sigma=4.0))
        >>> f"{delta_for_epsilon([noise], 1.0):.2e} {delta_for_epsilon([Charge(Exposure(1e-6)), noise], 1.0):.2e}"
        '2.92e-06 3.92e-06'
    """

    kind: ClassVar[str] = "exposure"

    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", check_open_unit("delta", self.delta))

    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Exposed with the record, exposed without it, neither."""
        event, rest = math.log(self.delta), math.log1p(-self.delta)
        return np.array([event, -math.inf, rest]), np.array([-math.inf, event, rest])

    def loss_scale(self, adjacency: Adjacency) -> tuple[float, float]:
        """No loss but an infinite one."""
        return 0.0, 0.0


@dataclasses.dataclass(frozen=True)
class Conditional(Mechanism):
    """Mechanism whose stated cost holds under a condition, which the guarantee names.

    Noise and cost are those of ``inner``. What changes is that every record and report carries
    ``guarantee="conditional"`` and the condition. For instance votes of teachers whose partition was made
    from all records at once (guided PATE): moving one record may shift others between teachers, so that one
    vote's change as its sensitivity is an assumption.

    Attributes:
        inner: the mechanism that draws the noise, or its record.
        condition: what has to hold, in words that a reviewer understands.

    Raises:
        ValueError: for an empty condition, or an ``inner`` that is conditional already.

    Example:
        >>> from pl_privknn.privacy import Charge, Conditional, Gaussian, account
        >>> release = Conditional(Gaussian(sigma=4.0), "the partition is taken as given")
        >>> report = account([Charge(release)], delta=1e-5)
        >>> f"{report.epsilon:.3f} {report.guarantee}"
        '0.926 conditional'
    """

    kind: ClassVar[str] = "conditional"
    guarantee: ClassVar[Level] = "conditional"

    inner: Mechanism
    condition: str

    def __post_init__(self) -> None:
        if isinstance(self.inner, dict):
            object.__setattr__(self, "inner", Charge.from_record(self.inner).mechanism)
        if not isinstance(self.inner, Mechanism):
            raise ValueError(f"inner={self.inner!r} must be a mechanism or the record of one")
        if self.inner.guarantee == "conditional":
            raise ValueError(f"inner={self.inner.kind!r} is conditional; put both conditions into one")
        if not isinstance(self.condition, str) or not self.condition.strip():
            raise ValueError(f"condition={self.condition!r} must say what has to hold for the stated cost")
        object.__setattr__(self, "reason", self.condition)

    @property
    def bare(self) -> Mechanism:
        """``inner``."""
        return self.inner

    @property
    def label(self) -> str:
        """Name of the inner mechanism."""
        return self.inner.label

    def rdp(self, orders: NDArray[np.float64], adjacency: Adjacency) -> NDArray[np.float64]:
        """RDP of ``inner``."""
        return self.inner.rdp(orders, adjacency)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of ``inner``."""
        return self.inner.pld(adjacency, discretization)

    def dominating_pairs(
        self, adjacency: Adjacency
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Family of ``inner``."""
        return self.inner.dominating_pairs(adjacency)

    def gaussian_mu(self, adjacency: Adjacency) -> float | None:
        """μ of ``inner``."""
        return self.inner.gaussian_mu(adjacency)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """Pure ε of ``inner``."""
        return self.inner.pure_epsilon(adjacency)

    def to_record(self) -> dict[str, Any]:
        """The mechanism as JSON, with the record of ``inner`` inside."""
        return {"mechanism": self.kind, "inner": self.inner.to_record(), "condition": self.condition}


@dataclasses.dataclass(frozen=True)
class NoNoise(Mechanism):
    """A release without noise: the baseline of a private training, whose ε is infinite.

    Example:
        >>> from pl_privknn.privacy import Charge, account
        >>> from pl_privknn.privacy.mechanisms import NoNoise
        >>> report = account([Charge(NoNoise(), 10)], delta=1e-5)
        >>> report.epsilon, report.guarantee
        (inf, 'none')
    """

    kind: ClassVar[str] = "no_noise"
    guarantee: ClassVar[Level] = "none"
    reason: ClassVar[str] = "no noise was added (epsilon=inf)"

    def add_noise(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Return ``values`` as float64; nothing is drawn."""
        return self.draw(values, noise)

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        return values.double()

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """Infinite at every order."""
        return np.full(len(orders), math.inf)


@dataclasses.dataclass(frozen=True)
class GaussianDPStream(Mechanism):
    """Mechanism of a whole stream of Gaussian releases: μ-Gaussian DP in total, whatever its length.

    A filter on Σμ² per record makes the stream, chosen fully adaptively, μ-Gaussian-DP with μ² the cap
    (Smith and Thakurta 2022; Koskela, Tobaben, Honkela 2023): as one release of the pair N(0, 1), N(μ, 1).
    A cap B on the RDP slope of Ind-KNN's records (ε(α) ≤ Bα) is μ = √(2B).

    Attributes:
        mu: Gaussian-DP parameter of the whole stream, under the adjacency that its filter was set for.

    Example:
        >>> from pl_privknn.privacy import Charge, GaussianDPStream, epsilon_for_delta
        >>> release = GaussianDPStream(mu=0.25)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.926
    """

    kind: ClassVar[str] = "gaussian_dp_stream"

    mu: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", check_positive("mu", self.mu))

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """αμ²/2."""
        return rdp.gaussian_rdp(self.mu, 1.0, orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of N(μ, 1) against N(0, 1)."""
        return pld.to_distribution(pld.gaussian_losses(self.mu, 1.0, discretization), None, discretization)

    def gaussian_mu(self, adjacency: Adjacency) -> float:
        """μ."""
        return self.mu
