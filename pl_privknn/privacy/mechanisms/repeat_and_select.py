"""Selection of the best of a random number of candidates by a private score."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_finite, shown
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

_EVERY = 8
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class RepeatAndSelect(Mechanism):
    """Run a candidate a random number K of times and release the best run alone, with its score.

    P[K = k] = (1 − 1/m)^(k−1) / m for k ≥ 1, with m the mean: the truncated negative binomial distribution of η = 1
    in Papernot, Steinke (2022). Their Theorem 2 gives ε'(α) = ε(α) + ln(m) / (α − 1) + 2·min over β of
    ((1 − 1/β)·ε(β) + ln(m) / β). It holds where neither K nor any other run is ever shown. A run may choose its
    settings at random, if each of them costs no more than what ``candidate`` says.

    Attributes:
        candidate: the releases of one run, that of its score among them.
        mean: m, the expected number of runs, at least 1.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, RepeatAndSelect, epsilon_for_delta
        >>> one = Charge(Gaussian(8.0))
        >>> best_of_ten = RepeatAndSelect((one,), mean=10.0)
        >>> round(epsilon_for_delta([one], 1e-5), 2), round(epsilon_for_delta([Charge(best_of_ten)], 1e-5), 2)
        (0.43, 1.07)
    """

    kind: ClassVar[str] = "repeat_and_select"

    candidate: tuple[Charge, ...]
    mean: float

    def __post_init__(self) -> None:
        if not isinstance(self.candidate, list | tuple):
            raise ValueError(f"candidate={shown(self.candidate)}: expected a list of charges")
        charges = tuple(
            charge if isinstance(charge, Charge) else Charge.from_record(charge) for charge in self.candidate
        )
        if not charges or any(charge.guarantee.level != "unconditional" for charge in charges):
            raise ValueError("candidate: expected at least one charge, each with an unconditional guarantee")
        object.__setattr__(self, "candidate", charges)
        if check_finite("mean", self.mean) < 1:
            raise ValueError(f"mean={self.mean!r} must be at least 1")
        object.__setattr__(self, "mean", float(self.mean))

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """Theorem 2 of the paper with η = 1; RDP does not fall with its order, which helps at low ones."""
        grid = np.union1d(orders, rdp.ORDERS)
        one = sum(charge.count * charge.mechanism.rdp(grid, adjacency) for charge in self.candidate)
        log_mean = math.log(self.mean)
        constant = 2 * np.min((1 - 1 / grid) * one + log_mean / grid)
        made = one + log_mean / (grid - 1) + constant
        found: Floats = np.minimum.accumulate(made[::-1])[::-1][np.searchsorted(grid, orders)]
        return found

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of a pair that dominates the RDP curve at some of its orders; all of them would take seconds."""
        orders = rdp.ORDERS[::_EVERY]
        return pld.from_rdp(orders, self.rdp(orders, adjacency), discretization)

    def draw_count(self, noise: NoiseSource) -> int:
        """K, which only the search may know."""
        return int(self.draw((), noise))

    def _draw(self, values: tuple[()], noise: NoiseSource) -> Tensor:
        import torch

        count = 1
        while not bool(noise.bernoulli(1, 1 / self.mean)):
            count += 1
        return torch.tensor(count)

    def to_record(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_record`."""
        candidate = [charge.to_record() for charge in self.candidate]
        return {"mechanism": self.kind, "candidate": candidate, "mean": self.mean}
