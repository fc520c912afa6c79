"""Budgets per record: every private record takes part until its own budget is spent, then never again."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pl_privknn._checks import check_choice, check_non_negative, check_positive
from pl_privknn.privacy.per_record import budgets
from pl_privknn.privacy.per_record.budgets import Conversion
from pl_privknn.privacy.per_record.journal import Journal, JournalError
from pl_privknn.privacy.per_record.table import (
    ADD,
    CHARGE,
    RELEASE,
    REMOVE,
    SNAPSHOT,
    BadEntry,
    Ids,
    SpendingTable,
    checked_costs,
    checked_ids,
    new_mark,
)

Excess = Literal["raise", "clip", "exclude"]


class IndividualBudgetExceeded(RuntimeError):
    """A charge would pass some record's budget; nothing was charged to anybody."""


class IndividualFilter(contextlib.AbstractContextManager["IndividualFilter"]):
    """A privacy filter with one budget per record, for streams of Gaussian releases.

    A record with sensitivity Δ_i in a Gaussian release of noise deviation σ pays ρ_i = Δ_i² / (2σ²), known
    before the release; a record that takes no part pays nothing. The filter keeps every record's sum of ρ_i
    at or below the common budget B, whatever is asked and however the queries, noise and sensitivities depend
    on earlier answers. Then the whole stream is μ-Gaussian DP with μ = √(2B), as one Gaussian release with
    noise multiplier 1/μ (fully adaptive composition: Smith, Thakurta 2022; individual filter: Koskela,
    Tobaben, Honkela 2023), and has RDP(α) = α B at every α (Feldman, Zrnic 2021). Neighbouring datasets
    differ by one record more or less.

    **The state is private.** What a record has left tells how often it was near the queries. Remaining
    budgets, paid amounts, the active set and this object's file are for the data's owner alone and must
    reach no log and no answer; exceptions name no record and no amount.

    **The stop is exact.** Amounts are whole multiples of a power of two (B is 2**60 to 2**61 of them), costs
    are rounded up and B is held exactly, so sums have no rounding error, don't depend on the order of
    charges, and never exceed B; a cost of exactly :meth:`remaining` can be paid.

    **The state survives a crash.** With a ``path`` every change is on disk before the method returns; see
    :class:`~pl_privknn.privacy.per_record.journal.Journal`. Inside :meth:`batch` the charges are written together
    at its end, so nothing that was paid for in a batch may be released before the batch has ended. After a crash the
    state holds every completed change and perhaps the one under way: budget can be wasted, never forgotten.

    Methods may be called from several threads; while a batch is open the other threads wait.

    Args:
        budget: B, from 1e-200 to 1e200, in units of ρ = μ²/2.
        path: the file of the state, made if missing; without it the state lives in memory only and a crash
            forgets what was spent, which suits simulations.

    Raises:
        ValueError: if the file was made for another budget.
        JournalError: if the file is damaged or in use.
    """

    #: The file is rewritten as one entry when it has grown beyond this and beyond eight times that entry.
    compact_bytes: int = 1 << 25

    def __init__(self, budget: float, path: str | Path | None = None) -> None:
        if not 1e-200 <= check_positive("budget", budget) <= 1e200:
            raise ValueError(f"budget={budget!r} must be from 1e-200 to 1e200")
        self._budget, self._units = float(budget), budgets.BudgetUnits(float(budget))
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._table = SpendingTable()
        self._batched: list[NDArray[np.intp]] | None = None
        self._unfinished = False
        first = (SNAPSHOT, self._table.snapshot(self._budget))
        self._journal = Journal(path, first) if path is not None else None
        if self._journal is not None:
            try:
                self._replay(self._journal)
            except BaseException:
                self._journal.close()
                raise
            self._journal.entries.clear()

    @classmethod
    def from_epsilon(
        cls, epsilon: float, delta: float, conversion: Conversion = "gdp", path: str | Path | None = None
    ) -> IndividualFilter:
        """A filter whose stream is (ε, δ)-DP, for instance ``from_epsilon(1.0, 1e-5, path="budgets")``."""
        return cls(budgets.budget_for_epsilon(epsilon, delta, conversion), path)

    @property
    def budget(self) -> float:
        """B: the stream has RDP(α) = α B."""
        return self._budget

    @property
    def mu(self) -> float:
        """√(2B): the stream is μ-Gaussian DP."""
        return math.sqrt(2 * self._budget)

    def epsilon(self, delta: float, conversion: Conversion = "gdp") -> float:
        """ε of the whole stream, whatever is charged; a public number."""
        return budgets.epsilon_of_budget(self._budget, delta, conversion)

    @property
    def mark(self) -> str:
        """How many marked charges there were, and what was drawn for the last one; public.

        Noted where the answers go, it shows later whether the file is an older copy: see :meth:`has_mark`.
        """
        with self._reading():
            marks = self._table.marks
            return f"{len(marks)}:{marks[-1] if marks else self._table.name}"

    @property
    def name(self) -> str:
        """Drawn when the filter was made, and public; copies of its file share it."""
        return self._table.name

    @property
    def begun(self) -> bool:
        """Whether anything was ever charged."""
        with self._reading():
            return bool(self._table.marks) or bool(self._table.spent.any())

    def has_mark(self, mark: str) -> bool:
        """Whether this filter was once at ``mark``; an older copy of its file, or another's, was not."""
        number, _, drawn = mark.partition(":")
        with self._reading():
            if number == "0":
                return drawn == self._table.name
            known = self._table.marks
            return number.isdecimal() and 0 < int(number) <= len(known) and known[int(number) - 1] == drawn

    def add(self, ids: ArrayLike) -> None:
        """Admit records. New ones get a full budget, ones removed before get back what they had left.

        Records that are present already stay as they are, so a resumed run may add its whole table again.

        Args:
            ids: the owner's lasting numbers of the records, whole, each at most once. A record must always
                come under the same number: a second number would give it a second budget.
        """
        with self._writing():
            wanted = checked_ids(ids)
            slots, known = self._table.find(wanted)
            change = wanted[~known | ~self._table.present[slots]] if len(self._table.ids) else wanted
            if len(change):
                self._change(ADD, change.tobytes(), lambda: self._table.admit(change))

    def remove(self, ids: ArrayLike) -> None:
        """Take records out of all further releases. Their numbers and what they spent stay on record.

        Raises:
            ValueError: if some were never added. Removing a record twice is no error.
        """
        with self._writing():
            slots = self._slots(ids)
            slots = slots[self._table.present[slots]]
            if len(slots):
                body = self._table.ids[slots].tobytes()
                self._change(REMOVE, body, lambda: self._table.present.__setitem__(slots, False))

    def charge(
        self, ids: ArrayLike, costs: ArrayLike, excess: Excess = "raise", *, marked: bool = False
    ) -> NDArray[np.float64]:
        """Take the costs of one release from its records' budgets, before the noise is drawn.

        Args:
            ids: the records that take part, each once, shape ``(n,)``.
            costs: ρ_i = Δ_i² / (2σ²), shape ``(n,)`` or one number for all.
            excess: where a cost is more than its record has left: ``"raise"`` refuses the whole charge;
                ``"clip"`` takes what is left, and the caller must scale that record's contribution by
                √(paid / cost) or less; ``"exclude"`` takes nothing, and the caller must leave the record out.
            marked: draw a :attr:`mark` for this charge. It is written with it, also where nobody pays, so that
                the number of marks tells nothing of the records.

        Returns:
            What each record paid, float64, shape ``(n,)``. Private.

        Raises:
            IndividualBudgetExceeded: with ``"raise"``, if some cost is more than its record has left.
            ValueError: for records that are unknown, removed or named twice, and for costs that are negative,
                NaN, infinite or of another shape. Nothing is charged.
            RuntimeError: for a marked charge inside :meth:`batch`.
            JournalError: if the charge could not be written: release nothing, and open the filter again.
        """
        check_choice("excess", excess, ("raise", "clip", "exclude"))
        with self._writing():
            if marked and self._batched is not None:
                raise RuntimeError("marked=True: a batch is open, which is written at its end; end it first")
            slots = self._slots(ids)
            if not self._table.present[slots].all():
                raise ValueError("ids: some records were removed; leave them out or add them again")
            amounts = checked_costs(costs, len(slots))
            units = self._units.from_amounts(amounts)
            left = self._left(slots)
            over = units > left
            if over.any():
                if excess == "raise":
                    raise IndividualBudgetExceeded("costs: some pass a record's budget; nothing was charged")
                units = np.where(over, left if excess == "clip" else 0, units)
                amounts = np.where(over, self._units.to_amounts(units), amounts)
            paying = units > 0
            slots, after = slots[paying], (self._table.spent[slots] + units)[paying]
            if marked:
                self._release(slots, after)
            elif len(slots) and self._batched is not None:
                self._batched.append(slots)  # before the next line, so an interrupt between loses nothing
                self._table.spent[slots] = after
            elif len(slots):
                body = self._table.charge_entry(slots, after)
                self._change(CHARGE, body, lambda: self._table.spent.__setitem__(slots, after))
            return amounts

    def remaining(self, ids: ArrayLike) -> NDArray[np.float64]:
        """What records have left, rounded down, float64; 0 for removed ones. Private."""
        with self._reading():
            slots = self._slots(ids)
            return self._units.to_amounts(np.where(self._table.present[slots], self._left(slots), 0))

    def active(self, minimum: float) -> NDArray[np.int64]:
        """Sorted ids of the records that can pay a cost of ``minimum``. Private."""
        minimum = check_non_negative("minimum", minimum)
        with self._reading():
            left = self._units.total - self._table.spent
            can_pay = self._table.present & (left >= self._units.from_amounts(np.array([minimum])))
            return np.sort(self._table.ids[can_pay])

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Write the charges made inside together, with one wait for the disk, at the end.

        Charges count at once for what follows, and are on disk when the block has ended: release no answer
        before. Also when the block ends by an exception, the charges made are kept and written.

        Raises:
            JournalError: at the end, if writing fails: release nothing.
        """
        with self._writing():
            if self._batched is not None:
                raise RuntimeError("batch: a batch is open already; end it first")
            self._batched = []
            try:
                yield
            finally:
                touched, self._batched = self._batched, None
                if touched:
                    slots = np.unique(np.concatenate(touched))
                    body = self._table.charge_entry(slots, self._table.spent[slots])
                    self._change(CHARGE, body, lambda: None)

    def close(self) -> None:
        """Close the file and let others open it. A filter without a file can go on."""
        if self._journal is not None:
            self._journal.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an IndividualFilter can't be copied or pickled: each copy would spend the same budget"
        )

    def __repr__(self) -> str:
        return f"IndividualFilter(budget={self._budget!r})"

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # before the mutex, which a fork may have copied while it was held
            raise JournalError("this filter was opened by another process; only that one can use it")
        with self._mutex:
            if self._unfinished:
                raise JournalError(
                    "an earlier change of this filter did not finish; close it and open it again"
                )
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._reading():
            yield
            journal = self._journal
            if journal is not None and self._batched is None and journal.size > self.compact_bytes:
                snapshot = self._table.snapshot(self._budget)
                if journal.size > 8 * len(snapshot):
                    journal.rewrite(SNAPSHOT, snapshot)

    def _change(self, kind: int, body: bytes, apply: Callable[[], None]) -> None:
        """Write a change, then make it; interrupted in between, the filter has to be opened again."""
        self._unfinished = True
        if self._journal is not None:
            self._journal.append(kind, body)
        apply()
        self._unfinished = False

    def _release(self, slots: NDArray[np.intp], after: Ids) -> None:
        mark, table = new_mark(), self._table

        def apply() -> None:
            table.marks.append(mark)
            table.spent[slots] = after

        self._change(RELEASE, bytes.fromhex(mark) + table.charge_entry(slots, after), apply)

    def _slots(self, ids: ArrayLike) -> NDArray[np.intp]:
        slots, known = self._table.find(checked_ids(ids))
        if not known.all():
            raise ValueError("ids: some records were never added; add them first")
        return slots

    def _left(self, slots: NDArray[np.intp]) -> Ids:
        return np.asarray(self._units.total - self._table.spent[slots], np.int64)

    def _replay(self, journal: Journal) -> None:
        try:
            stored = self._table.restore(journal.entries)
        except BadEntry as error:
            raise JournalError(f"{journal.path} is refused: {error}") from None
        if abs(stored - self._budget) > budgets.BUDGET_SPREAD * self._budget:
            raise ValueError(
                f"budget={self._budget!r} differs from {stored!r}, with which {journal.path} was made; "
                "a budget can't change under a stream that has begun"
            )
        self._budget, self._units = stored, budgets.BudgetUnits(stored)
        if (self._table.spent < 0).any() or (self._table.spent > self._units.total).any():
            raise JournalError(f"{journal.path} is refused: it holds more than a whole budget")
        if not self._table.name:  # a file of an earlier version
            self._table.name = new_mark()
            journal.rewrite(SNAPSHOT, self._table.snapshot(self._budget))
