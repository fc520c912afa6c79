"""The private state of an Ind-KNN labeler: budgets, and which records they belong to."""

from __future__ import annotations

import io
import math
import secrets
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.labelers.base import ChargesLedger
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters
from pl_privknn.labelers.ind_knn.identities import changed_numbers, read_ids
from pl_privknn.labelers.ind_knn.stream import StreamState, make_private, write_private
from pl_privknn.privacy.ledger import LedgerRun
from pl_privknn.privacy.per_record.budgets import BUDGET_SPREAD
from pl_privknn.privacy.per_record.filter import IndividualFilter
from pl_privknn.privacy.per_record.journal import JournalError
from pl_privknn.privacy.per_record.record_key import RecordKey, as_bytes

#: How records are told apart: by the owner's numbers, or by keyed digests.
_BY_NUMBER, _BY_DIGEST = "numbers", "digests"
#: The number of the shard, and of how many, where there is one table.
_WHOLE = (0, 1)


class LabelerState(StreamState):
    """A stream whose budgets belong to records, wherever those stand in the table.

    The folder holds ``budgets`` (the filter's file, locked while it is open), ``state.json`` with the key of the
    digests, where the owner numbers the records ``digests.npz``, by which changed numbers are noticed, and where
    groups have an ε of their own ``limits.npz``, by which changed members are.

    Args:
        parameters: public constants of the stream.
        folder: where the state lives, **private**; None keeps it in memory, and a new process starts anew.
        openings: where the count of openings begins.
        shard: number of the shard that the records are, and how many shards there are.
        leader: name of the stream in shard 0, for the others.

    Attributes:
        begun_elsewhere: whether records of any shard have spent something.
        marks: how far the budgets of all shards have come; for shard 0.

    Raises:
        JournalError: if the folder is damaged, incomplete, an older or second copy, or in use, or another shard's.
        ValueError: if its budgets are of another size.
    """

    def __init__(
        self,
        parameters: IndKNNParameters,
        folder: Path | None,
        openings: int = 0,
        shard: tuple[int, int] = _WHOLE,
        leader: str | None = None,
    ) -> None:
        self.shard, self.begun_elsewhere = shard, False
        self.marks: tuple[str, ...] = ()
        self.folder = None if folder is None else folder.resolve()
        self._known: dict[int, bytes] = {}
        self._limits: dict[int, float] = {}
        path = file = None
        if self.folder is not None:
            path, file = self.folder / "budgets", self.folder / "state.json"
            if file.exists() and not path.exists():
                raise JournalError(
                    f"{folder}: the file 'budgets' is missing; put it back, or start a new run or state_dir, which "
                    "charges a new stream"
                )
            make_private(self.folder)
        budgets = IndividualFilter(parameters.budget, path)
        try:
            key = secrets.token_hex(32)
            is_new = file is None or not file.exists()
            place = {"shard": list(shard), "leader": leader} if is_new and shard != _WHOLE else {}
            super().__init__(budgets, file, openings=openings, key=key, identities=None, **place)
            if (stored := tuple(self.content.get("shard", _WHOLE))) != shard:
                raise JournalError(
                    f"{folder} holds the budgets of shard {stored[0]} of {stored[1]}, and this is shard {shard[0]} "
                    f"of {shard[1]}; start as many processes as before, or a new run or state_dir, which charges a "
                    "new stream"
                )
            if "paid_runs" in self.content:  # of an earlier version, which numbered records by position
                self.content["identities"] = _BY_NUMBER
            self.key = RecordKey(bytes.fromhex(self.content["key"]))
            self._read_digests()
            self._read_limits()
        except BaseException:
            budgets.close()
            raise

    @property
    def begun(self) -> bool:
        """Whether anything was charged to any record of the stream."""
        return self.budgets.begun or self.begun_elsewhere

    def vouch(self, ledger: ChargesLedger) -> None:
        """Note how far the budgets of all shards have come; see the base."""
        if isinstance(ledger, LedgerRun) and self.folder is not None and self.marks:
            ledger.note(self._shards_topic, " ".join(self.marks))
        super().vouch(ledger)

    def noted_of_shards(self, ledger: ChargesLedger) -> list[str] | None:
        """What :meth:`vouch` noted of shards; None where it never did."""
        noted = ledger.noted(self._shards_topic) if isinstance(ledger, LedgerRun) else None
        return None if noted is None else noted.split()

    @property
    def _shards_topic(self) -> str:
        return f"{self._topic} shards"

    def identify(
        self, ids: Any, digests: Tensor | None, features: Tensor, labels: Tensor
    ) -> NDArray[np.int64]:
        """The numbers under which the filter knows the records of a table.

        Args:
            ids: the owner's numbers (see :func:`~pl_privknn.labelers.ind_knn.identities.read_ids`), or None.
            digests: uint8, shape ``(n, 16)``; of the records as the data module gives them, or None.
            features: float, shape ``(n, d)``; they stand for the records where neither is given.
            labels: int64, shape ``(n,)``.

        Returns:
            Int64, shape ``(n,)``. **Private**.

        Raises:
            ValueError: where it is not certain that every record keeps its own budget. It shows nothing of them.
        """
        if digests is not None and len(digests) != len(labels):
            raise ValueError(
                "private_digests: want one for each record; set them before each fit, or not at all"
            )
        if ids is not None:
            numbers = read_ids(ids, len(labels))
            self._check_numbers(numbers, digests)
        else:
            own = self.key.digests(features, labels) if digests is None else digests
            numbers, following = self.key.numbers(own)
            self._check_digests(numbers, following)
        self._check_shard(numbers)
        wanted = _BY_DIGEST if ids is None else _BY_NUMBER
        if not self.begun:
            # Nobody has spent anything: the stream may still be about other records.
            self.budgets.remove(np.setdiff1d(self.budgets.active(0.0), numbers))
        if self.content["identities"] != wanted:
            self.content["identities"] = wanted
            self.save()
        return numbers

    def hold_limits(self, numbers: NDArray[np.int64], limits: NDArray[np.float64] | None) -> None:
        """Hold every record to what it may spend in all: once a query was answered, to what it might then.

        Args:
            numbers: of :meth:`identify`.
            limits: what each may spend, ``(n,)``; None for the whole budget.

        Raises:
            ValueError: where a record may spend more or less than before.
        """
        now = {} if limits is None else dict(zip(numbers.tolist(), limits.tolist(), strict=True))
        if self.begun and (bool(now) != bool(self._limits) or not self._are_held(now)):
            raise ValueError(
                "groups: some private records are in another group than before, or groups have other ε, or the "
                "stream began without or with groups; go back to those, or start a new run or state_dir, which "
                "charges a new stream"
            )
        known = self._limits | now if self.begun else now
        if known != self._limits:
            self._limits = known
            self._write_table("limits", limits=np.array(list(known.values())), numbers=_keys(known))

    def _are_held(self, now: dict[int, float]) -> bool:
        known = self._limits
        return all(
            math.isclose(known.get(n, limit), limit, rel_tol=BUDGET_SPREAD) for n, limit in now.items()
        )

    def _check_shard(self, numbers: NDArray[np.int64]) -> None:
        # Shards don't know each other's records: one that moved would get a second budget where it comes.
        is_same = np.array_equal(np.sort(numbers), self.budgets.active(0.0))
        if self.shard != _WHOLE and self.begun and not is_same:
            raise self._moved()

    def _moved(self) -> ValueError:
        return ValueError(
            f"private records: shard {self.shard[0]} of {self.shard[1]} must hold those with which the stream began, "
            "all of them and no others; go back to those, or start a new run or state_dir, which charges a new stream"
        )

    def _check_digests(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        if not self.begun:
            return
        if self.content["identities"] == _BY_NUMBER:
            raise ValueError(
                "ids: the budgets belong to records by their numbers; give every record its number with ids"
            )
        known = self.budgets.active(0.0)
        if not np.isin(numbers, known).all():
            raise ValueError(
                "private records: some are not those that the budgets belong to (other records, or the same in other "
                "features, sizes or preprocessing); go back to those, or start a new run or state_dir, which charges "
                "a new stream, and give every record a lasting number with ids if this is to change again"
            )
        if np.isin(following, known).any():
            raise ValueError(
                "private records: of some that are equal not all are there, and which of them are can't be told; put "
                "them back, give every record a lasting number with ids from the start, or start a new run or "
                "state_dir, which charges a new stream"
            )

    def _check_numbers(self, numbers: NDArray[np.int64], digests: Tensor | None) -> None:
        begun = self.begun
        if begun and self.content["identities"] == _BY_DIGEST:
            raise ValueError(
                "ids: the budgets belong to records without numbers; leave ids out, or start a new run or state_dir, "
                "which charges a new stream"
            )
        if digests is None:
            return
        now = dict(zip(numbers.tolist(), as_bytes(digests), strict=True))
        if begun and changed_numbers(self._known, now):
            raise ValueError(
                "ids: some private records come under another number than before, and would get another budget; give "
                "the numbers in the data module's order, and every record its own"
            )
        if begun and self.shard != _WHOLE and now != self._known:
            raise self._moved()
        known = self._known | now if begun else now
        if known != self._known:
            self._known = known
            self._write_digests()

    def _read_digests(self) -> None:
        if stored := self._read_table("digests", "digests"):
            digests = as_bytes(torch.from_numpy(stored[1]))
            self._known = dict(zip(stored[0].tolist(), digests, strict=True))

    def _write_digests(self) -> None:
        digests = np.frombuffer(b"".join(self._known.values()), np.uint8).reshape(len(self._known), -1)
        self._write_table("digests", numbers=_keys(self._known), digests=digests)

    def _read_limits(self) -> None:
        if stored := self._read_table("limits", "limits"):
            self._limits = dict(zip(stored[0].tolist(), stored[1].tolist(), strict=True))

    def _read_table(self, name: str, values: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Numbers of records and what a file holds of them; None where there is none."""
        if self.folder is None or not (path := self.folder / f"{name}.npz").exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                return stored["numbers"], stored[values]
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise JournalError(f"{path} is damaged; put back an undamaged copy that is up to date") from None

    def _write_table(self, name: str, **arrays: Any) -> None:
        if self.folder is not None:
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)
            write_private(self.folder / f"{name}.npz", buffer.getvalue())


def _keys(known: dict[int, Any]) -> NDArray[np.int64]:
    return np.fromiter(known, np.int64, len(known))
