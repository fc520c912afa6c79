"""What can be read from a ledger: its totals, its runs, its head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pl_privknn.privacy.ledger.balance import Balance, RunBalance
from pl_privknn.privacy.ledger.budget import LedgerReport, make_report, reached
from pl_privknn.privacy.ledger.store import LedgerCorrupt, RowStore
from pl_privknn.privacy.mechanisms.base import Adjacency

if TYPE_CHECKING:
    from typing_extensions import Self


class LedgerReader:
    """The reading half of :class:`~pl_privknn.privacy.ledger.ledger.Ledger`."""

    _balance: Balance
    _store: RowStore

    @classmethod
    def open_readonly(cls, path: str | Path) -> Self:
        """Open an existing ledger for reports; works in read-only folders and while others write.

        Raises:
            FileNotFoundError: if there is no such file.
            LedgerCorrupt: as in the constructor.
        """
        ledger = cls.__new__(cls)
        ledger._balance = Balance()
        ledger._store = RowStore(path, readonly=True)
        try:
            ledger._sync()
        except BaseException:
            ledger._store.close()
            raise
        return ledger

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self._store.path

    @property
    def adjacency(self) -> Adjacency:
        """Neighbouring relation of every row."""
        return self._balance.adjacency

    @property
    def delta(self) -> float:
        """δ of the budget in force."""
        return self._balance.delta

    @property
    def max_epsilon(self) -> float | None:
        """The budget in force."""
        return self._balance.max_epsilon

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that stated a plan or charged something, in order of appearance."""
        self._sync()
        return list(self._balance.runs)

    def report(self, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of the whole ledger.

        Args:
            delta: δ of the report; the budget's by default.
            exact: also compute the exact worst case (seconds).
        """
        self._sync()
        balance = self._balance
        return make_report(balance, balance.guarantee(), balance.spent(), balance.late, delta, exact)

    def run_report(self, run_id: str, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of one run alone, as if it were the only one.

        Raises:
            ValueError: if the ledger has no such run.
        """
        run = self._run_balance(run_id)
        return make_report(
            self._balance, [*run.guaranteed().values()], [*run.charged.values()], run.late, delta, exact
        )

    def within_budget(self) -> bool | None:
        """Whether the guarantee keeps the budget by the rule that applies; None where there is no budget."""
        self._sync()
        budget = self._balance.max_epsilon
        if budget is None:
            return None
        return reached(self._balance, self._balance.guarantee(), bool(self._balance.late))[0] <= budget

    @property
    def head(self) -> str:
        """Hash of the last row."""
        self._sync()
        return self._balance.head

    def check_head(self, head: str, where: str) -> int:
        """Position of the row whose hash was noted earlier.

        Args:
            head: the hash.
            where: who noted it, for the message.

        Raises:
            LedgerCorrupt: if no row carries it.
        """
        position = self._store.position_of(head)
        if position is None:
            raise LedgerCorrupt(
                f"{self.path}: no row carries the head {head} noted by {where}; since then the ledger was rewritten, "
                "cut, or replaced by an older copy or a new one. Restore the ledger of that time or a later one: "
                "with this one ε would be wrong"
            )
        return position

    def charges_after(self, run_id: str, position: int) -> int:
        """How many charges of a run stand behind a row."""
        self._sync()
        return sum(place > position for place in self._balance.run(run_id).charge_rows)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def _noted(self, topic: str) -> str | None:
        self._sync()
        return self._balance.notes.get(topic)

    def _run_balance(self, run_id: str) -> RunBalance:
        self._sync()
        if run_id not in self._balance.runs:
            known = ", ".join(self._balance.runs) or "none"
            raise ValueError(f"run_id={run_id!r} is not in the ledger {self.path}; its runs are: {known}")
        return self._balance.runs[run_id]

    def _sync(self) -> None:
        with self._store.reading():
            for body in self._store.read_after(self._balance.position, self._balance.head):
                self._balance.apply(body)
