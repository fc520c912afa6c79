"""Groups of arguments shared by private training and labelling: the budget and the ledger's files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pl_privknn._checks import check_open_unit, check_path, check_positive
from pl_privknn.privacy.mechanisms.base import Unit, check_unit


@dataclasses.dataclass(frozen=True)
class Budget:
    """Budget of a run.

    Args:
        delta: δ of the guarantee.
        unit: unit of privacy: ``"record"``, or ``"person"`` with all records that the data module's
            ``private_groups`` ascribe to them.
        max_epsilon: budget of the ledger; a run whose worst case passes it raises ``BudgetExceeded`` at once. None:
            no limit, the ε is only stated.

    Raises:
        ValueError: for an argument out of its range.
    """

    delta: float = 1e-5
    max_epsilon: float | None = None
    unit: Unit = "record"

    def __post_init__(self) -> None:
        check_open_unit("delta", self.delta)
        check_unit(self.unit)
        if self.max_epsilon is not None:
            check_positive("max_epsilon", self.max_epsilon)


@dataclasses.dataclass(frozen=True)
class LedgerFiles:
    """Files of a run's ledger outside its folder.

    Args:
        ledger_path: a ledger that several runs over the same private data share; by default ``ledger.sqlite`` in the
            run's folder.
        ledger_head_path: a file, best in another place than the ledger, in which the ledger's head is noted after
            each charge; a ledger that was put back or rewritten is then refused.

    Raises:
        ValueError: for a value that is no path.
    """

    ledger_path: str | Path | None = None
    ledger_head_path: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("ledger_path", "ledger_head_path"):  # checkpoints hold plain types alone
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_path(name, value))
