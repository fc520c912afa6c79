"""The ledger: what was promised and what was paid, on disk before any noise is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn import __version__
from pl_privknn._checks import check_open_unit, check_positive
from pl_privknn.privacy.ledger.balance import Balance, RunBalance, beyond, larger
from pl_privknn.privacy.ledger.budget import BudgetExceeded, LedgerReport, check_budget, make_report, reached
from pl_privknn.privacy.ledger.renyi_filter import best_order
from pl_privknn.privacy.ledger.run import LedgerRun
from pl_privknn.privacy.ledger.run_folder import HeadFile
from pl_privknn.privacy.ledger.store import LedgerCorrupt, RowStore
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency, check_known, merged

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BudgetExceeded", "Ledger", "LedgerCorrupt", "LedgerReport", "LedgerRun"]


class Ledger:
    """All releases about one private data set, in one SQLite file that several runs may share.

    A run first states its *plan*, the most that it may release; the plan is checked against the budget and
    written down. Then it charges each release before drawing its noise: the row is committed and synced when
    :meth:`LedgerRun.charge` returns. A crash can waste budget, it can't forget any. The guarantee of a ledger
    takes for each run and mechanism the larger of planned and charged, and composes all runs.

    **How the budget is kept.** Plans stated before the first charge are fixed before anything was released,
    so ordinary composition covers them: the smallest ε of RDP, PLD and, if needed, the exact worst case.
    Interleaving runs and stopping early change nothing (Haney et al. 2023). Whoever states a further plan
    after that, or charges beyond a plan, may have looked at answers before choosing its parameters. For that
    fully adaptive choice the ledger uses a Rényi filter at one order, fixed when the ledger is made (Feldman
    and Zrnic 2021, "Individual privacy accounting via a Rényi filter"), with the improved conversion to ε; PLD
    totals and minima over orders are not proven valid as filters.

    **What the report says then.** ``report().filter["rule"]`` tells which rule applied, ``"composition"`` or
    ``"renyi filter"``. Under the second one ε of the guarantee is still that of composition, which holds if
    the later parameters did not depend on earlier answers, so it is marked conditional, with this reason;
    whatever they depended on, the filter keeps the ledger within ``max_epsilon``. To avoid it, state all plans
    first: ``ledger.run(…, plan=…)`` for every run, then charge.

    Args:
        path: the file, made if missing. It holds public facts only: parameters, counts, times.
        adjacency: neighbouring relation; a ledger has one for life.
        delta: δ of the budget.
        max_epsilon: the budget; None for no limit.
        allow_budget_change: write a visible budget row where ``delta`` or ``max_epsilon`` differ from those in
            force, instead of refusing.
        head_path: a file, best in another place, that notes the head hash after every row; a ledger that does
            not hold the noted head is refused (:class:`~pl_privknn.privacy.ledger.run_folder.HeadFile`).

    Raises:
        ValueError: for another adjacency or budget than the ledger's, or a new budget that is already passed.
        LedgerCorrupt: if the file is no ledger, its rows do not fit their hashes, or it is an older copy.
        FileNotFoundError: if it is missing although ``head_path`` has its head.

    Example:
        >>> import tempfile
        >>> from pl_privknn.privacy import Charge, Gaussian, Ledger
        >>> plan = [Charge(Gaussian(sigma=40.0), 100)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Ledger(f"{folder}/ledger.sqlite", delta=1e-5, max_epsilon=2.0).run("first", plan=plan)
        ...     position = run.charge(plan[0].mechanism, 40)
        ...     print(f"promised {run.epsilon:.3f}, spent {run.epsilon_spent:.3f}")
        ...
        promised 0.926, spent 0.561
    """

    def __init__(
        self,
        path: str | Path,
        *,
        adjacency: Adjacency = "add_remove",
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        allow_budget_change: bool = False,
        head_path: str | Path | None = None,
    ) -> None:
        adjacency = check_adjacency(adjacency)
        delta = check_open_unit("delta", delta)
        if max_epsilon is not None:
            max_epsilon = check_positive("max_epsilon", max_epsilon)
        budget = {
            "delta": delta,
            "max_epsilon": max_epsilon,
            "filter_order": best_order(max_epsilon or 1.0, delta),
        }
        self._balance = Balance()
        kept = None if head_path is None else HeadFile(head_path)
        if kept is not None and kept.head is not None and not Path(path).exists():
            raise FileNotFoundError(
                f"there is no ledger at {path}, but head_path={str(head_path)!r} holds the head of one; restore it, "
                "or give a new ledger a head_path of its own"
            )
        self._store = RowStore.create(path, _row("open", {"adjacency": adjacency, **budget}))
        try:
            self._sync()
            if self._balance.adjacency != adjacency:
                raise ValueError(
                    f"adjacency={adjacency!r}, but the ledger {self.path} counts under "
                    f"{self._balance.adjacency!r}; use that, or another ledger: they are never composed"
                )
            if not self._has_budget(delta, max_epsilon):
                if not allow_budget_change:
                    raise ValueError(
                        f"delta={delta}, max_epsilon={max_epsilon}, but the ledger {self.path} keeps delta="
                        f"{self._balance.delta}, max_epsilon={self._balance.max_epsilon}; pass those, or "
                        "allow_budget_change=True to write the new budget into the ledger"
                    )
                self._change_budget(budget)
            if kept is not None:
                if kept.head is not None:
                    self.check_head(kept.head, f"head_path={str(head_path)!r}")
                self.witness(kept.note)
        except BaseException:
            self._store.close()
            raise

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
            run_id: lasting name of the run. The same id with the same plan, or with none, continues the run
                and writes nothing.
            plan: the most that the run may release, over its whole life. Without a plan every charge is
                checked by itself.
            description: public facts for the reader of the ledger, as JSON; written with the plan.
            extend: allow a plan that differs from the run's earlier one, larger in some mechanism. The
                guarantee then covers the larger count of each.

        Raises:
            BudgetExceeded: if the guarantee of all runs together would pass the budget; nothing was written.
            ValueError: if the run has another plan, ``run_id`` is empty, ``description`` is not JSON, or a
                mechanism is not defined under the ledger's adjacency.
        """
        if not isinstance(run_id, str) or not run_id:
            raise ValueError(f"run_id={run_id!r} must be a non-empty string")
        for charge in plan:
            check_known(charge)
        wanted = merged(plan)
        content = {
            "run": run_id,
            "plan": [charge.to_record() for charge in wanted.values()],
            "description": description or {},
        }
        with self._writing():
            run, known = self._balance.run(run_id), run_id in self._balance.runs
            if not known or beyond(wanted, run.planned) or (wanted and beyond(run.planned, wanted)):
                if run.planned and not (extend and beyond(wanted, run.planned)):
                    raise ValueError(
                        f"run_id={run_id!r} has another plan in the ledger {self.path}; continue it with the "
                        "same parameters, use another run_id, or pass extend=True with a plan that is larger "
                        "in some mechanism"
                    )
                granted = run.guaranteed()
                if asked := beyond(wanted, granted):
                    check_budget(self._balance, run_id, asked, larger(granted, wanted), "the plan of")
                self._append("plan", content)
        return LedgerRun(self, run_id)

    def witness(self, note: Callable[[str], None]) -> None:
        """Have the head hash noted now and after each row that is written here, before anybody may draw.

        Args:
            note: takes the hash and keeps it durably.
        """
        note(self.head)
        self._store.witnesses.append(note)

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

    # ------------------------------------------------------------------ inner work

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction over rows that are known, after which its own are known too.

        A file that is written in place under this object then disagrees with what it knows.
        """
        with self._store.writing():
            self._sync()
            yield
        self._sync()

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

    def _append(self, kind: str, content: dict[str, Any]) -> int:
        try:
            return self._store.append(_row(kind, content))
        except (TypeError, ValueError) as error:
            raise ValueError(f"description: must be JSON without NaN or infinity ({error})") from error

    def _has_budget(self, delta: float, max_epsilon: float | None) -> bool:
        return (delta, max_epsilon) == (self._balance.delta, self._balance.max_epsilon)

    def _change_budget(self, budget: dict[str, Any]) -> None:
        delta, max_epsilon = budget["delta"], budget["max_epsilon"]
        with self._writing():
            if self._has_budget(delta, max_epsilon):  # another process was faster
                return
            granted = self.report(delta).epsilon
            if max_epsilon is not None and granted > max_epsilon:
                raise ValueError(
                    f"max_epsilon={max_epsilon:g} is below ε={granted:.4g} at δ={delta:g}, which the runs in "
                    f"{self.path} have been granted already; a budget can't be taken back"
                )
            if self._balance.num_charges:  # the filter's order is fixed with the first release
                budget = {**budget, "filter_order": self._balance.order}
            self._append("budget", budget)
        self._sync()


def _row(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return {"kind": kind, "time": now, "version": __version__, **content}
