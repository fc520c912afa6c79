"""What a filter of per-record budgets knows, in memory and as bytes: who has spent what."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int64]
#: Kinds of entries in a filter's file.
SNAPSHOT, CHARGE, ADD, REMOVE, RELEASE = range(5)
_SNAPSHOT_HEAD = struct.Struct("<dQ")
_MARK_BYTES = 8


class BadEntry(ValueError):
    """An entry that no filter has written."""


class SpendingTable:
    """Records with what they have spent, and the marks of the releases that they paid for.

    Attributes:
        ids: the owner's numbers, int64, shape ``(n,)``.
        spent: in units of the budget, int64, shape ``(n,)``.
        present: which records take part, bool, shape ``(n,)``.
        name: drawn when the table was made, 16 hexadecimal digits; tells its file from others.
        marks: one drawn for each marked release, 16 hexadecimal digits.
    """

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self.spent: Ids = np.empty(0, np.int64)
        self.present: NDArray[np.bool_] = np.empty(0, bool)
        self.name = new_mark()
        self.marks: list[str] = []
        self._index()

    def find(self, ids: Ids) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Rows of ids and which of them are known; the rows of the others mean nothing."""
        if not len(self.ids):
            return np.zeros(len(ids), np.intp), np.zeros(len(ids), bool)
        places = np.minimum(np.searchsorted(self._sorted, ids), len(self.ids) - 1)
        return self._order[places], self._sorted[places] == ids

    def admit(self, ids: Ids) -> None:
        """Let records take part; those that are new have spent nothing."""
        slots, known = self.find(ids)
        self.present[slots[known]] = True
        new = ids[~known]
        self.ids = np.concatenate([self.ids, new])
        self.spent = np.concatenate([self.spent, np.zeros(len(new), np.int64)])
        self.present = np.concatenate([self.present, np.ones(len(new), bool)])
        self._index()

    # ------------------------------------------------------------------ bytes

    def charge_entry(self, slots: NDArray[np.intp], spent: Ids) -> bytes:
        """The body of an entry that says what the records in ``slots`` have spent now."""
        return self.ids[slots].tobytes() + spent.tobytes()

    def snapshot(self, budget: float) -> bytes:
        """The body of an entry that stands for all earlier ones."""
        head = _SNAPSHOT_HEAD.pack(budget, len(self.ids))
        marks = bytes.fromhex(self.name + "".join(self.marks))
        return head + self.ids.tobytes() + self.spent.tobytes() + self.present.tobytes() + marks

    def restore(self, entries: Sequence[tuple[int, bytes]]) -> float:
        """Take in the entries of a file; files of earlier versions have neither name nor marks.

        Returns:
            The budget that the file was made for.

        Raises:
            BadEntry: for an entry that no filter has written.
        """
        (first, snapshot), *changes = entries
        if first != SNAPSHOT:
            raise BadEntry("it is no state of a filter")
        budget, count = _SNAPSHOT_HEAD.unpack_from(snapshot)
        numbers = np.frombuffer(snapshot, np.int64, 2 * count, _SNAPSHOT_HEAD.size)
        self.ids, self.spent = numbers[:count].copy(), numbers[count:].copy()
        self.present = np.frombuffer(snapshot, bool, count, _SNAPSHOT_HEAD.size + 16 * count).copy()
        marks = snapshot[_SNAPSHOT_HEAD.size + 17 * count :]
        self.name, *self.marks = [
            marks[at : at + _MARK_BYTES].hex() for at in range(0, len(marks), _MARK_BYTES)
        ] or [""]
        self._index()
        for kind, body in changes:
            self._apply(kind, body)
        return float(budget)

    def _apply(self, kind: int, body: bytes) -> None:
        if kind == RELEASE:
            self.marks.append(body[:_MARK_BYTES].hex())
            body = body[_MARK_BYTES:]
        numbers = np.frombuffer(body, np.int64)
        if kind == ADD:
            self.admit(numbers)
            return
        ids = numbers if kind == REMOVE else numbers[: len(numbers) // 2]
        slots, known = self.find(ids)
        if kind not in (CHARGE, REMOVE, RELEASE) or not known.all():
            raise BadEntry("it holds an entry that no filter has written")
        if kind == REMOVE:
            self.present[slots] = False
        else:
            self.spent[slots] = numbers[len(ids) :]

    def _index(self) -> None:
        self._order = np.argsort(self.ids)
        self._sorted = self.ids[self._order]


def new_mark() -> str:
    """A random number that nobody else has, as 16 hexadecimal digits."""
    return secrets.token_hex(_MARK_BYTES)


def checked_ids(ids: ArrayLike) -> Ids:
    """Numbers of records as int64, shape ``(n,)``; raise ``ValueError`` unless they are whole and each comes once."""
    given = np.atleast_1d(np.asarray(ids))
    whole = given.dtype.kind in "iu" and np.can_cast(given.dtype, np.int64)
    if given.ndim != 1 or (given.size and not whole):
        raise ValueError(f"ids: {given.ndim} dimensions, {given.dtype}; want int64 of shape (n,)")
    checked = given.astype(np.int64)
    if len(np.unique(checked)) != len(checked):
        raise ValueError("ids: some record is named twice; add up its costs and name it once")
    return checked


def checked_costs(costs: ArrayLike, count: int) -> NDArray[np.float64]:
    """Costs as float64, shape ``(count,)``; raise ``ValueError`` unless they are costs of Gaussian releases."""
    given = np.asarray(costs)
    if given.dtype.kind not in "iuf" or given.shape not in ((), (count,)):
        raise ValueError(
            f"costs: {given.ndim} dimensions, {given.dtype}; want one number, or one for each of ids"
        )
    amounts = np.array(np.broadcast_to(given, (count,)), np.float64)
    if not (np.isfinite(amounts).all() and (amounts >= 0).all()):
        raise ValueError("costs: some are negative, NaN or infinite; a cost is Δ² / (2σ²)")
    return amounts
