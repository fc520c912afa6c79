"""What processes without the ledger know of a private training."""

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
    """Facts of a training that the first process, which has the ledger, tells the others.

    Attributes:
        planned: number of steps that the guarantee covers.
        noise_multiplier: noise over the clipping norm.
        num_charges: rows that the run had paid when this process joined it.
        lost: paid steps that are not in the weights.
        steps: how far it is.
        last_reports: the guarantee and what was spent, as they were told last.
    """

    planned: int
    noise_multiplier: float
    num_charges: int
    lost: int
    steps: FollowedSteps
    last_reports: tuple[PrivacyReport, PrivacyReport]

    ledger = folder = None

    def hear(self, left: int, row: int, reports: tuple[PrivacyReport, PrivacyReport] | None) -> None:
        """Something was released; ``reports`` where a row was paid for it."""
        self.steps.left, self.steps.row = left, row
        if reports is not None:
            self.last_reports = reports

    def reports(self, exact: bool = False) -> tuple[PrivacyReport, PrivacyReport]:
        """The guarantee stated beforehand and what was spent, as the first process tells them."""
        return self.last_reports

    def summary(self) -> None:
        """Only the first process has the ledger that a summary is made of."""

    def state(self) -> dict[str, Any]:
        """Only the first process's checkpoint is written."""
        return {}

    def close(self) -> None:
        """Nothing is open."""
