"""Rényi filter at one fixed order, for releases that are chosen in view of earlier answers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from pl_privknn.privacy.accounting.accountant import total_pure_epsilon
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism


@dataclasses.dataclass(frozen=True)
class RenyiFilter:
    """Running total of Rényi divergences at one fixed order and at order ∞.

    If every release is admitted only while the sum stays within a bound ρ fixed beforehand, the whole is
    (order, ρ)-RDP although mechanisms and parameters may depend on all earlier answers (Feldman and Zrnic
    2021; Haney et al. 2023 for interleaved runs). For minima over several orders and for privacy
    loss distributions that is not proven. ρ turns into ε by the improved conversion (Balle et al. 2020;
    Canonne et al. 2020).

    Order ∞ may join the one order: a sum of pure ε bounds the loss of every outcome, whatever the releases depended
    on. Take E, any set of outcomes, apart into those whose pure ε add up to at most ε, for which
    P(E₁) ≤ e^ε Q(E₁) outcome by outcome, and the others, all of which the filter at the one order admits:
    P(E₂) ≤ e^ε Q(E₂) + δ. Together that is (ε, δ).

    Attributes:
        order: α > 1, fixed before the first release.
        delta: δ of the budget.
        adjacency: neighbouring relation.
    """

    order: float
    delta: float
    adjacency: Adjacency

    def total(self, charges: Iterable[Charge]) -> float:
        """ρ: sum of the charges' Rényi divergences at the order; ``inf`` where one has none there."""
        return sum(charge.count * _rdp(charge.mechanism, self.order, self.adjacency) for charge in charges)

    def epsilon(self, charges: Iterable[Charge]) -> float:
        """ε of :meth:`total`, or the sum of pure ε where that is less."""
        releases = list(charges)
        total = self.total(releases)
        by_order = max(0.0, total + _conversion(self.order, self.delta)) if total else 0.0
        return min(by_order, total_pure_epsilon(releases, self.adjacency))


def best_order(max_epsilon: float, delta: float) -> float:
    """Order at which a Gaussian mechanism that spends (ε, δ) exactly has its best conversion.

    For a Gaussian ε(α) = αB, and the order that admits the largest B is the one sought.
    """
    orders = 1 + np.geomspace(1e-3, 1e4, 4000)
    conversion = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return float(orders[np.argmax((max_epsilon - conversion) / orders)])


def _conversion(order: float, delta: float) -> float:
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@functools.lru_cache(maxsize=1024)
def _rdp(mechanism: Mechanism, order: float, adjacency: Adjacency) -> float:
    return float(mechanism.rdp(np.array([order]), adjacency)[0])
