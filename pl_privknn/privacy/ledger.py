"""The privacy ledger: plans and charges of all runs, on disk before any noise is drawn."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pl_privknn import __version__
from pl_privknn._checks import InputError, check_int
from pl_privknn.privacy.accounting.accountant import best_order
from pl_privknn.privacy.mechanisms.base import (
    Adjacency,
    Charge,
    Mechanism,
    Unit,
    check_known,
    check_unit,
    merged,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.budget import (
    NOISE_MARKS,
    Balance,
    Budget,
    BudgetExceeded,
    LedgerReport,
    RunBalance,
    beyond,
    check_budget,
    count_of,
    larger,
    make_report,
    reached,
)
from pl_privknn.privacy.sqlite_file import LedgerCorrupt, RowStore


class ChargesLedger(Protocol):
    """Protocol of a ledger for labelers and baselines: charge, then draw."""

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
        unit: Unit = "record",
    ) -> int:
        """Record ``count`` releases durably, or raise ``BudgetExceeded``; returns the row's position."""
        ...

    def charged(self, mechanism: Mechanism) -> int:
        """Number of releases by this mechanism that the run has charged."""
        ...

    def note(self, topic: str, text: str) -> None:
        """Note a public fact as durably as a charge."""
        ...

    def noted(self, topic: str) -> str | None:
        """The last note on a topic in the whole ledger, or None."""
        ...

    @property
    def run_id(self) -> str:
        """Id of the run."""

    @property
    def origin(self) -> str:
        """Hash of the ledger's first row, which identifies it."""


class LedgerRun:
    """Handle of one run on a ledger, to which labelers and baselines charge releases; see :meth:`Ledger.run`."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self.ledger = ledger
        self.run_id = run_id

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
        unit: Unit = "record",
    ) -> int:
        """Charge ``count`` releases; the row is on disk when this returns. Draw only afterwards.

        Within the plan this takes milliseconds. Beyond it the budget is checked again. Several processes may
        charge the same run.

        Args:
            mechanism: what is released.
            count: how often.
            noise: the source that will draw. The row says whether it is cryptographic; where it is not, the
                guarantee of the ledger is none.
            adjacencies: neighbouring relations under which ``mechanism`` states its cost. A charge that leaves
                this or ``noise`` out makes the ledger's guarantee conditional.
            unit: unit of privacy under which it does so.

        Returns:
            position of the row, which no other charge will ever have.

        Raises:
            BudgetExceeded: if the charge would pass the budget; nothing was written.
            ValueError: for a count that is not a whole number of at least 1, a ledger of another unit or of an
                adjacency that is not among ``adjacencies``, or a mechanism that is not defined under it.
            OSError: if the disk refuses; nothing may be drawn then.
        """
        ledger, budget = self.ledger, self.ledger.budget
        charge = Charge(mechanism, check_int("count", count))
        check_known(charge)
        if adjacencies is not None and budget.adjacency not in adjacencies:
            raise InputError(
                f"adjacency={budget.adjacency!r} of the ledger {ledger.path}: this charge ({mechanism.label}) states "
                f"its cost under {' or '.join(map(repr, adjacencies))} only; use a ledger of that adjacency, or "
                "parameters that hold under the ledger's. Nothing was charged and nothing was drawn"
            )
        if check_unit(unit) != budget.unit:
            raise InputError(
                f"unit={unit!r}: the ledger {ledger.path} counts by {budget.unit}, and units are never composed; use "
                f"a ledger of unit {unit!r}, or a teacher that protects a {budget.unit}. Nothing was charged or drawn"
            )
        stated = {}
        if noise is not None and adjacencies is not None:
            stated = {"noise": "cryptographic" if noise.cryptographic else "seeded"}
        with ledger._writing():
            run = ledger._balance.run(self.run_id)
            if (after := run.after(charge)) is not None:
                granted = {**run.guaranteed(), mechanism: after}
                check_budget(ledger._balance, self.run_id, [charge], granted, "a charge of")
            return ledger._append("charge", {"run": self.run_id, "charge": charge.to_record(), **stated})

    def note(self, topic: str, text: str) -> None:
        """Note a public fact in the ledger, as durably as a charge and at no privacy cost.

        State that is kept elsewhere (what a teacher has left to spend, for instance) notes here how far it has
        come, and is found out later where an older copy of it was put back.

        Args:
            topic: what the note is about. The last one on each topic counts, whichever run wrote it.
            text: nothing private.
        """
        with self.ledger._writing():
            if self.ledger._balance.notes.get(topic) != text:
                self.ledger._append("note", {"run": self.run_id, "topic": topic, "text": text})

    def noted(self, topic: str) -> str | None:
        """The last note on a topic in the whole ledger, or None."""
        self.ledger._sync()
        return self.ledger._balance.notes.get(topic)

    def charged(self, mechanism: Mechanism) -> int:
        """Number of releases by this mechanism that the run has charged."""
        return count_of(self.ledger._run_balance(self.run_id).charged, mechanism)

    @property
    def origin(self) -> str:
        """Hash of the ledger's first row, which identifies the ledger wherever its file is."""
        return self.ledger._balance.origin

    @property
    def num_charges(self) -> int:
        """Number of charges that the run has made."""
        return self.ledger.charges_after(self.run_id, 0)

    def report(self, delta: float | None = None, exact: bool = False) -> LedgerReport:
        """Totals of this run alone; ``run.ledger.report()`` gives the totals of all runs."""
        return self.ledger.run_report(self.run_id, delta, exact)

    @property
    def epsilon(self) -> float:
        """ε of this run's guarantee alone, at the budget's δ."""
        return self.report().epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of the charges that this run has made, at the budget's δ."""
        return self.report().epsilon_spent


class Ledger:
    """All releases about one private data set, in one SQLite file that several runs may share.

    A run first states its *plan*, the most that it may release; the plan is checked against the budget and
    written down. Then it charges each release before drawing its noise: the row is committed and synced when
    :meth:`LedgerRun.charge` returns. A crash can waste budget, it can't forget any. The guarantee of a ledger
    takes for each run and mechanism the larger of planned and charged, and composes all runs.

    **How the budget is kept.** Plans stated before the first charge are fixed before anything was released,
    so ordinary composition covers them: the smallest ε of RDP, PLD and, if needed, the exact worst case.
    Interleaving runs and stopping early change nothing (Haney et al. 2023). An analyst who states a further plan
    after that, or charges beyond a plan, may have looked at answers before choosing its parameters. For that
    fully adaptive choice the ledger uses a Rényi filter at one order, fixed when the ledger is made (Feldman
    and Zrnic 2021, "Individual privacy accounting via a Rényi filter"), with the improved conversion to ε, and
    also the plain sum of pure ε, where every release has one: ten releases of pure ε 0.1 fit into a budget of 1.
    PLD totals and minima over further orders are not proven valid as filters.

    **What the report says then.** ``report().filter["rule"]`` names the rule that applied, ``"composition"`` or
    ``"renyi filter"``. Under the second one ε of the guarantee is still that of composition, which holds if
    the later parameters did not depend on earlier answers, so it is marked conditional, with this reason;
    whatever they depended on, the filter keeps the ledger within the budget. To avoid it, state all plans
    first: ``ledger.run(…, plan=…)`` for every run, then charge.

    Args:
        path: the file, made if missing. It holds public facts only: parameters, counts, times.
        budget: of all runs together; a ledger has one for life.
        run_file: the file of the run that charges, made if missing; see
            :class:`~pl_privknn.privacy.sqlite_file.RowStore`.

    Raises:
        ValueError: for another budget than the ledger's.
        LedgerCorrupt: if the file is no ledger, or its rows do not fit their hashes.

    Example:
        >>> import tempfile
        >>> from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger
        >>> plan = [Charge(Gaussian(sigma=40.0), 100)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Ledger(f"{folder}/ledger.sqlite", Budget(epsilon=2.0)).run("first", plan=plan)
        ...     position = run.charge(plan[0].mechanism, 40)
        ...     print(f"promised {run.epsilon:.3f}, spent {run.epsilon_spent:.3f}")
        ...
        promised 0.926, spent 0.561
    """

    def __init__(self, path: str | Path, budget: Budget = Budget(), *, run_file: Path | None = None) -> None:
        order = best_order(budget.epsilon or 1.0, budget.delta)
        self._balance = Balance()
        opening = _row("open", {**dataclasses.asdict(budget), "filter_order": order})
        self._store = RowStore.create(path, opening, run_file)
        try:
            self._sync()
            for name, asked in dataclasses.asdict(budget).items():
                if (known := getattr(self.budget, name)) != asked:
                    raise ValueError(
                        f"{name}={asked!r}, but the ledger {self.path} was opened with {name}={known!r}; use that, "
                        "or another ledger: what was promised under one is never changed, nor composed with another"
                    )
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
    ) -> LedgerRun:
        """State a run's worst case and return the handle to which it charges.

        Args:
            run_id: lasting name of the run. The same id with the same plan, or with none, continues the run
                and writes nothing.
            plan: the most that the run may release, over its whole life. Without a plan every charge is
                checked by itself.
            description: public facts for the reader of the ledger, as JSON; written with the plan.

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
            run = self._balance.run(run_id)
            if run.planned and wanted and (beyond(wanted, run.planned) or beyond(run.planned, wanted)):
                raise ValueError(
                    f"run_id={run_id!r} has another plan in the ledger {self.path}; continue it with the same "
                    "parameters, or use another run_id"
                )
            if run_id not in self._balance.runs or (wanted and not run.planned):
                granted = run.guaranteed()
                if asked := beyond(wanted, granted):
                    check_budget(self._balance, run_id, asked, larger(granted, wanted), "the plan of")
                self._append("plan", content)
        return LedgerRun(self, run_id)

    @property
    def file(self) -> RowStore:
        """The file of the rows and, where a run has opened the ledger, of the run's tables."""
        return self._store

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self._store.path

    @property
    def budget(self) -> Budget:
        """The budget in force."""
        return self._balance.budget

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
        budget = self.budget.epsilon
        if budget is None:
            return None
        return reached(self._balance, self._balance.guarantee(), bool(self._balance.late))[0] <= budget

    @property
    def head(self) -> str:
        """Hash of the last row."""
        self._sync()
        return self._balance.head

    def check_head(self, head: str, where: str) -> int:
        """Position of the row that has this hash, noted earlier.

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
        """Number of a run's charges after a row."""
        self._sync()
        return sum(place > position for place in self._balance.run(run_id).charge_rows)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    # ------------------------------------------------------------------ inner work

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction over verified rows; its own rows are verified afterwards.

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


_STAMPED = ("open", "plan")


def _row(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    # Times of charges would show how long each step took, and so how many records it drew.
    stamped = (
        {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds")} if kind in _STAMPED else {}
    )
    return {"kind": kind, **stamped, "version": __version__, **content}


class FreeLedger:
    """Run in memory without a budget, for tests and for benchmarks on public data.

    Never for a release: what it notes is gone with the process, and no budget stops it.

    Args:
        limit: refuse after so many charges, as a budget that is spent does; None never refuses.
        start: position of the first row. Seeded noise is a function of the row, so a ledger that goes on where
            another one stopped starts at that one's number of rows.

    Attributes:
        rows: the charges in order, marked as a real ledger marks them: no guarantee where their noise is
            seeded, a conditional one where the charge did not state its noise and adjacencies.

    Example:
        >>> from pl_privknn import Gaussian
        >>> ledger = FreeLedger(limit=1)
        >>> ledger.charge(Gaussian(5.0), 3)
        0
        >>> ledger.rows[0].count, ledger.rows[0].guarantee.level
        (3, 'conditional')
    """

    def __init__(self, limit: int | None = None, start: int = 0) -> None:
        self.limit = None if limit is None else check_int("limit", limit, minimum=0)
        self.start = check_int("start", start, minimum=0)
        self.rows: list[Charge] = []
        self.run_id, self.origin, self._notes = "free", secrets.token_hex(16), dict[str, str]()

    def charged(self, mechanism: Mechanism) -> int:
        """Number of charged releases by this mechanism."""
        return sum(row.count for row in self.rows if row.mechanism == mechanism)

    def note(self, topic: str, text: str) -> None:
        """Note a public fact."""
        self._notes[topic] = text

    def noted(self, topic: str) -> str | None:
        """The last note on a topic, or None."""
        return self._notes.get(topic)

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
        unit: Unit = "record",
    ) -> int:
        """Note ``count`` releases; see :class:`~pl_privknn.privacy.ledger.ChargesLedger`.

        Raises:
            BudgetExceeded: beyond ``limit`` charges; nothing was noted.
            ValueError: for a count or a mechanism that a real ledger refuses.
        """
        charge = Charge(mechanism, count)
        check_known(charge)
        if self.limit is not None and len(self.rows) >= self.limit:
            raise BudgetExceeded(
                f"limit={self.limit}: this ledger takes no more charges; nothing was charged and nothing was drawn",
                math.nan, Budget(),
            )  # fmt: skip
        stated = None
        if noise is not None and adjacencies is not None:
            stated = "cryptographic" if noise.cryptographic else "seeded"
        self.rows.append(charge.with_guarantee(NOISE_MARKS[stated]))
        return self.start + len(self.rows) - 1
