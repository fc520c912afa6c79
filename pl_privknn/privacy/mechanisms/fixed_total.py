"""Totals that stand in a ledger as one entry."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_positive
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class FixedTotal(Mechanism):
    """A whole stream of Gaussian releases whose cost to any one record is capped beforehand.

    A filter on Σμ² per record makes the stream, chosen fully adaptively, μ-Gaussian-DP with μ² the cap
    (Smith and Thakurta 2022; Koskela, Tobaben, Honkela 2023): as one release of the pair N(0, 1), N(μ, 1).
    A cap B on the RDP slope of Ind-KNN's records (ε(α) ≤ Bα) is μ = √(2B).

    Attributes:
        mu: Gaussian-DP parameter of the whole stream, under the adjacency that its filter was set for.

    Example:
        >>> from pl_privknn.privacy import Charge, FixedTotal, epsilon_for_delta
        >>> release = FixedTotal(mu=0.25)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.926
    """

    kind: ClassVar[str] = "fixed_total"

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
