"""A mechanism whose stated cost holds only under a condition that its user names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.guarantee import Level
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


@dataclasses.dataclass(frozen=True)
class Conditional(Mechanism):
    """Another mechanism, with the condition under which its sensitivity is what it says.

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
    def label(self) -> str:
        """Name of the inner mechanism: the condition speaks for itself."""
        return self.inner.label

    def rdp(self, orders: NDArray[np.float64], adjacency: Adjacency) -> NDArray[np.float64]:
        """RDP of ``inner``."""
        return self.inner.rdp(orders, adjacency)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of ``inner``."""
        return self.inner.pld(adjacency, discretization)

    def outcome_pairs(self, adjacency: Adjacency) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Family of ``inner``."""
        return self.inner.outcome_pairs(adjacency)

    def gaussian_mu(self, adjacency: Adjacency) -> float | None:
        """μ of ``inner``."""
        return self.inner.gaussian_mu(adjacency)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """Pure ε of ``inner``."""
        return self.inner.pure_epsilon(adjacency)

    def to_record(self) -> dict[str, Any]:
        """The mechanism as JSON, with the record of ``inner`` inside."""
        return {"mechanism": self.kind, "inner": self.inner.to_record(), "condition": self.condition}
