"""The ledger: what was promised and what was paid, on disk before any noise is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.privacy.accountant import PrivacyReport, account
from pl_privknn.privacy.ledger_books import Books, filter_epsilon, filter_order
from pl_privknn.privacy.ledger_store import LedgerCorrupt, RowStore
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, check_adjacency

__all__ = ["BudgetExceeded", "Ledger", "LedgerCorrupt", "LedgerReport", "LedgerRun"]


class BudgetExceeded(RuntimeError):
    """A plan or charge would pass ``max_epsilon``. Nothing was written, drawn or released."""


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """The totals of a ledger.

    Attributes:
        guarantee: of the worst case stated beforehand: for each run and mechanism the larger of what was
            planned and what was charged.
        spent: of what was charged in fact; for information.
        filter: how the budget is kept: ``{"rule", "order", "epsilon"}`` (see :class:`Ledger`).
        head: hash of the last row; note it elsewhere to detect a ledger that was rewritten as a whole.
        rows: number of rows.
    """

    guarantee: PrivacyReport
    spent: PrivacyReport
    filter: dict[str, Any]
    head: str
    rows: int

    @property
    def epsilon(self) -> float:
        """ε of the guarantee."""
        return self.guarantee.epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of what was charged in fact."""
        return self.spent.epsilon


class Ledger:
    """All releases about one private data set, in one SQLite file that several runs may share.

    A run first states its *plan*, the most that it may release; the plan is checked against the budget and
    written down. Then it charges each release before drawing its noise: the row is committed and synced when
    :meth:`LedgerRun.charge` returns. A crash can waste budget, it can't forget any.

    **How the budget is kept.** The first plan is fixed before anything was released, so ordinary composition
    covers it: the smallest ε of RDP, PLD and, if needed, the exact worst case. Whoever adds a further plan,
    or charges beyond a plan, may have looked at answers before choosing its parameters. For that fully
    adaptive choice the ledger uses a Rényi filter at one order fixed when the ledger was made (Feldman and
    Zrnic, 2021, "Individual privacy accounting via a Rényi filter"), with the improved conversion to ε; PLD
    totals and minima over orders are not proven valid as filters. The report says which rule applied.

    Args:
        path: the file, made if missing. It holds public facts only: parameters, counts, times.
        adjacency: neighbouring relation; a ledger has one for life.
        delta: δ of the budget.
        max_epsilon: the budget; None for no limit.
        allow_budget_change: write a new budget row where ``delta`` or ``max_epsilon`` differ from those in
            force, instead of refusing.

    Raises:
        ValueError: for another adjacency or budget than the ledger's.
        LedgerCorrupt: if the file is no ledger or its rows do not fit their hashes.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        adjacency: Adjacency = "add_remove",
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        allow_budget_change: bool = False,
    ) -> None:
        adjacency = check_adjacency(adjacency)
        delta = check_open_unit("delta", delta)
        if max_epsilon is not None:
            max_epsilon = check_positive("max_epsilon", max_epsilon)
        self._store = RowStore(path)
        self._books = Books()
        self._reports: dict[Any, PrivacyReport] = {}
        with self._store.writing():
            self._sync()
            if not self._books.opened:
                order = filter_order(1.0 if max_epsilon is None else max_epsilon, delta)
                opening = {"adjacency": adjacency, "delta": delta, "max_epsilon": max_epsilon}
                self._append("open", {**opening, "filter_order": order})
            elif self._books.adjacency != adjacency:
                raise ValueError(
                    f"adjacency={adjacency!r}, but the ledger {self.path} counts under "
                    f"{self._books.adjacency!r}; use that, or another ledger: they are never composed"
                )
            elif (delta, max_epsilon) != (self._books.delta, self._books.max_epsilon):
                if not allow_budget_change:
                    raise ValueError(
                        f"delta={delta}, max_epsilon={max_epsilon}, but the ledger {self.path} keeps delta="
                        f"{self._books.delta}, max_epsilon={self._books.max_epsilon}; pass those, or "
                        "allow_budget_change=True to write the new budget into the ledger"
                    )
                self._append("budget", {"delta": delta, "max_epsilon": max_epsilon})
        self._sync()

    @classmethod
    def open_readonly(cls, path: str | Path) -> Ledger:
        """Open an existing ledger for reports; works in read-only folders and while others write.

        Raises:
            FileNotFoundError: if there is no such file.
            LedgerCorrupt: as in the constructor.
        """
        ledger = cls.__new__(cls)
        ledger._store = RowStore(path, readonly=True)
        ledger._books = Books()
        ledger._reports = {}
        ledger._sync()
        if not ledger._books.opened:
            raise LedgerCorrupt(f"{path}: the ledger has no opening row")
        return ledger

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self._store.path

    @property
    def adjacency(self) -> Adjacency:
        """Neighbouring relation of every row."""
        return self._books.adjacency

    @property
    def delta(self) -> float:
        """δ of the budget in force."""
        return self._books.delta

    @property
    def max_epsilon(self) -> float | None:
        """The budget in force."""
        return self._books.max_epsilon

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that stated a plan or charged something."""
        self._sync()
        return list(self._books.run_ids())

    def run(
        self,
        run_id: str,
        plan: Sequence[Charge] = (),
        description: dict[str, Any] | None = None,
        *,
        extend: bool = False,
    ) -> LedgerRun:
        """State a run's worst case and get the handle with which it pays.

        Args:
            run_id: lasting name of the run. The same id with the same plan continues the run and writes
                nothing.
            plan: the most that the run may release. Without one every charge is checked by itself.
            description: public facts for the reader of the ledger.
            extend: allow a plan that is larger than the run's earlier one.

        Raises:
            BudgetExceeded: if the guarantee of all runs together would pass the budget.
            ValueError: if the run has another plan, or ``run_id`` is empty.
        """
        if not isinstance(run_id, str) or not run_id:
            raise ValueError(f"run_id={run_id!r} must be a non-empty string")
        wanted = _counts(plan)
        with self._store.writing():
            self._sync()
            current = self._books.planned.get(run_id, {})
            if wanted != current:
                grows = all(wanted.get(mechanism, 0) >= count for mechanism, count in current.items())
                if current and not (extend and grows):
                    raise ValueError(
                        f"run_id={run_id!r} has another plan in the ledger {self.path}; continue it with the "
                        "same parameters, use another run_id, or pass extend=True with a plan that is "
                        "nowhere smaller"
                    )
                trial = self._books.copy()
                trial.apply_plan(run_id, wanted)
                self._check(trial, f"the plan of run {run_id}")
                records = [charge.to_record() for charge in plan]
                self._append("plan", {"run": run_id, "plan": records, "description": description or {}})
        return LedgerRun(self, run_id)

    def report(self, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of the whole ledger.

        Args:
            delta: δ of the report; the budget's by default.
            exact: also compute the exact worst case (seconds).
        """
        self._sync()
        delta = self.delta if delta is None else check_open_unit("delta", delta)
        return LedgerReport(
            guarantee=self._account(self._books.guarantee(), delta, exact),
            spent=self._account(self._books.spent(), delta, exact),
            filter=self._filter(self._books, delta),
            head=self._books.head,
            rows=self._books.position,
        )

    def run_report(self, run_id: str, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of one run alone, as if it were the only one."""
        self._sync()
        delta = self.delta if delta is None else check_open_unit("delta", delta)
        return LedgerReport(
            guarantee=self._account(self._books.guarantee(run_id), delta, exact),
            spent=self._account(self._books.spent(run_id), delta, exact),
            filter=self._filter(self._books, delta),
            head=self._books.head,
            rows=self._books.position,
        )

    def has_hash(self, sealed: str) -> bool:
        """Whether some row carries this hash: a head that was noted earlier must."""
        return any(body["hash"] == sealed for body in self._store.read_after(0, None)[0])

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    # ------------------------------------------------------------------ for LedgerRun

    def _charge(self, run_id: str, mechanism: Mechanism, count: int) -> int:
        charge = Charge(mechanism, check_int("count", count))
        with self._store.writing():
            self._sync()
            planned = self._books.planned.get(run_id, {}).get(mechanism, 0)
            paid = self._books.charged.get(run_id, {}).get(mechanism, 0)
            if paid + charge.count > planned:
                trial = self._books.copy()
                trial.apply_charge(run_id, charge)
                self._check(trial, f"{charge.count} more releases of {mechanism.kind}")
            return self._append("charge", {"run": run_id, "charge": charge.to_record()})

    def _num_charges(self, run_id: str) -> int:
        self._sync()
        return self._books.num_charges.get(run_id, 0)

    # ------------------------------------------------------------------ inner work

    def _sync(self) -> None:
        head = self._books.head if self._books.position else None
        bodies, position, sealed = self._store.read_after(self._books.position, head)
        for body in bodies:
            self._books.apply(body)
        self._books.position, self._books.head = position, sealed

    def _append(self, kind: str, content: dict[str, Any]) -> int:
        from pl_privknn import __version__

        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return self._store.append({"kind": kind, "time": now, "version": __version__, **content})

    def _account(self, charges: list[Charge], delta: float, exact: bool) -> PrivacyReport:
        key = (tuple(charges), delta, exact)
        if key not in self._reports:
            self._reports[key] = account(charges, delta=delta, adjacency=self.adjacency, exact=exact)
        return self._reports[key]

    def _check(self, trial: Books, what: str) -> None:
        """Raise :class:`BudgetExceeded` where the books as they would be pass the budget."""
        budget = self._books.max_epsilon
        charges = trial.guarantee()
        if budget is None:
            # The mechanisms must at least be defined under this adjacency: an error now, not at the report.
            self._account(charges, trial.delta, exact=False)
            return
        if trial.planned_in_one_go:
            reached = self._account(charges, trial.delta, exact=False).epsilon
            if reached > budget:
                reached = self._account(charges, trial.delta, exact=True).epsilon
            rule = "composition of one plan"
        else:
            reached = filter_epsilon(charges, trial.order, trial.delta, self.adjacency)
            rule = f"Rényi filter at order {trial.order:g}"
        if reached > budget:
            raise BudgetExceeded(
                f"{what} would bring ε to {reached:.4g} at δ={trial.delta:g} ({rule}), above "
                f"max_epsilon={budget:g}; nothing was drawn. Ask fewer queries, cap the answers (max_answers), "
                "add noise, sample less, or raise the budget"
            )

    def _filter(self, books: Books, delta: float) -> dict[str, Any]:
        one_plan = books.planned_in_one_go
        return {
            "rule": "one plan" if one_plan else "renyi filter",
            "order": books.order,
            "epsilon": filter_epsilon(books.guarantee(), books.order, delta, self.adjacency),
        }


class LedgerRun:
    """One run's handle on a ledger: what labelers and baselines pay with. Get it from :meth:`Ledger.run`."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self.ledger = ledger
        self.run_id = run_id

    def charge(self, mechanism: Mechanism, count: int = 1) -> int:
        """Pay for ``count`` releases; the row is on disk when this returns. Draw only afterwards.

        Within the plan this takes milliseconds. Beyond it the budget is checked again.

        Returns:
            position of the row, which no other charge will ever have.

        Raises:
            BudgetExceeded: if the charge would pass the budget; nothing was written.
            ValueError: for a count that is not a whole number of at least 1.
        """
        return self.ledger._charge(self.run_id, mechanism, count)

    @property
    def num_charges(self) -> int:
        """How many charges the run has made."""
        return self.ledger._num_charges(self.run_id)

    def report(self, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of this run alone; see :meth:`Ledger.report` for those of everybody."""
        return self.ledger.run_report(self.run_id, delta, exact)


def _counts(charges: Sequence[Charge]) -> dict[Mechanism, int]:
    counts: dict[Mechanism, int] = {}
    for charge in charges:
        counts[charge.mechanism] = counts.get(charge.mechanism, 0) + charge.count
    return counts
