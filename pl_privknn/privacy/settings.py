"""Groups of arguments that private trainings and labelling share: the budget, and where a run's files are."""

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
class RunFiles:
    """Where a run keeps its files.

    Args:
        run_dir: the run's folder; by default the trainer's log folder, or a new one in ``runs/`` where it has none.
            Repeating a run in the folder of an interrupted one continues it.
        ledger_path: a ledger that several runs over the same private data share; by default ``ledger.sqlite`` in the
            run's folder.
        ledger_head_path: a file, best in another place than the ledger, in which the ledger's head is noted after
            each charge; a ledger that was put back or rewritten is then refused.
    """

    run_dir: str | Path | None = None
    ledger_path: str | Path | None = None
    ledger_head_path: str | Path | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # checkpoints hold plain types alone
            if (value := getattr(self, field.name)) is not None:
                object.__setattr__(self, field.name, check_path(field.name, value))

    def within(self, run_dir: str | Path | None) -> RunFiles:
        """These files, with the run's folder where it is given apart from them.

        Raises:
            ValueError: where both name one.
        """
        if run_dir is None:
            return self
        if self.run_dir is not None:
            raise ValueError(f"run_dir={str(run_dir)!r} and files.run_dir={self.run_dir!r}: give one of them")
        return dataclasses.replace(self, run_dir=run_dir)

    @property
    def paths(self) -> tuple[Path | None, Path | None, Path | None]:
        """The three of them."""
        run, ledger, head = (
            None if path is None else Path(path)
            for path in (self.run_dir, self.ledger_path, self.ledger_head_path)
        )
        return run, ledger, head
