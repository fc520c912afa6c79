"""State of a private training in the processes that have no ledger."""

from __future__ import annotations

import dataclasses
from typing import Any

from pl_privknn.privacy.accounting.accountant import PrivacyReport


@dataclasses.dataclass
class FollowedSteps:
    """Progress of the first process: steps that are left, and the position of the last row paid."""

    left: int
    row: int = 0


@dataclasses.dataclass
class FollowedRun:
    """Facts of a training that the first process, which has the ledger, sends to the others.

    Attributes:
        planned: number of steps that the guarantee covers.
        noise_multiplier: noise over the clipping norm.
        num_charges: rows that the run had paid when this process joined it.
        lost: paid steps that are not in the weights.
        steps: how far it is.
        last_reports: the guarantee and the spent budget, as received last.
    """

    planned: int
    noise_multiplier: float
    num_charges: int
    lost: int
    steps: FollowedSteps
    last_reports: tuple[PrivacyReport, PrivacyReport]

    ledger = folder = None

    def hear(self, left: int, row: int, reports: tuple[PrivacyReport, PrivacyReport] | None) -> None:
        """Update after a release; ``reports`` are given where a ledger row was charged."""
        self.steps.left, self.steps.row = left, row
        if reports is not None:
            self.last_reports = reports

    def reports(self, exact: bool = False) -> tuple[PrivacyReport, PrivacyReport]:
        """Guarantee and spent budget, as received from the first process."""
        return self.last_reports

    def summary(self) -> None:
        """None: only the first process has the ledger of a summary."""

    def state(self) -> dict[str, Any]:
        """Empty: only the first process's checkpoint is written."""
        return {}

    def close(self) -> None:
        """Do nothing: no file is open."""
