"""What the accountant says of a list of charges."""

from __future__ import annotations

import dataclasses
from typing import Any

from pl_privknn.privacy.guarantee import Level
from pl_privknn.privacy.mechanisms.base import Adjacency


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """Total privacy cost of a list of charges.

    Attributes:
        epsilon: the smallest of the valid totals below (improved RDP, PLD and, where computed, exact).
        epsilon_rdp: from RDP with the improved conversion.
        epsilon_rdp_classic: from RDP with the classic conversion over orders up to 1024, as papers print it.
        epsilon_pld: from privacy loss distributions.
        epsilon_exact: exact worst case; None where it was not asked for or does not apply.
        delta: δ of all of them.
        adjacency: neighbouring relation of all of them.
        guarantee: that of the weakest charge: ``"unconditional"``, ``"conditional"`` or ``"none"``
            (see :class:`~pl_privknn.privacy.guarantee.Guarantee`).
        reason: what weakens it, with the mechanisms that it belongs to; empty if unconditional.
        conditional: names of the conditional mechanisms.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, account
        >>> report = account([Charge(Gaussian(sigma=4.0))], delta=1e-5)
        >>> f"{report.epsilon:.3f}, by Rényi DP {report.epsilon_rdp:.3f}, {report.guarantee}"
        '0.926, by Rényi DP 1.012, unconditional'
    """

    epsilon: float
    epsilon_rdp: float
    epsilon_rdp_classic: float
    epsilon_pld: float
    epsilon_exact: float | None
    delta: float
    adjacency: Adjacency
    guarantee: Level = "unconditional"
    reason: str = ""
    conditional: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {**dataclasses.asdict(self), "conditional": list(self.conditional)}
