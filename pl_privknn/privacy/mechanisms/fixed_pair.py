"""Mechanisms whose worst pair is one pair of distributions over listed outcomes; pure DP among them."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_positive, check_rate
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism, require_unsampled
from pl_privknn.privacy.mechanisms.outcomes import sample_pairs

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]


class FixedPair(Mechanism):
    """Base for mechanisms that can list the outcomes of their worst pair."""

    @abc.abstractmethod
    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Log-probabilities (log p, log q) of the outcomes with and without the record, shape ``(n,)``."""

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release: the larger divergence of both directions."""
        log_p, log_q = self.log_pair(adjacency)
        return rdp.pairs_rdp(log_p[None, :], log_q[None, :], orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of one release by connect-the-dots."""
        remove = _measure(self, adjacency)
        return pld.to_distribution(remove, remove.reversed(), discretization)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """Largest loss of any outcome."""
        log_p, log_q = self.log_pair(adjacency)
        return float(np.max(np.abs(log_p - log_q)))


@functools.lru_cache(maxsize=32)
def _measure(mechanism: FixedPair, adjacency: Adjacency) -> pld.LossMeasure:
    log_p, log_q = mechanism.log_pair(adjacency)
    return pld.LossMeasure(log_p - log_q, np.exp(log_p), np.exp(log_q))


@dataclasses.dataclass(frozen=True)
class PureDP(FixedPair):
    """Any release of which only ε-differential privacy is known.

    Randomised response with that ε, (e^ε, 1)/(1+e^ε) against (1, e^ε)/(1+e^ε), dominates every ε-DP pair
    (Kairouz, Oh, Viswanath 2015, Theorem 3.4). It serves local randomisers such as Collision or Separation,
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
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate))

    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Randomised response, sampled."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        total = np.logaddexp(self.epsilon, 0.0)
        likely, unlikely = self.epsilon - total, -total
        return sample_pairs(np.array([likely, unlikely]), np.array([unlikely, likely]), self.sampling_rate)
