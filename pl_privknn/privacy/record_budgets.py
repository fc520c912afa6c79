"""Budgets of single records: conversion from (ε, δ), identification of records, and the table of spent budgets."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import InputError, check_choice, check_open_unit, check_positive
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.pld import bisect
from pl_privknn.privacy.files import read_numbers
from pl_privknn.privacy.ledger import ChargesLedger
from pl_privknn.privacy.mechanisms.base import Mechanism, Unit
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_state import PrivateStore, PrivateStoreError

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
_DIGEST_BYTES = 16
_NEW_STREAM = "start a new run or state_dir, which charges a new stream"

# ---------------------------------------------------------------------- (ε, δ) and budgets

Conversion = Literal["gdp", "rdp", "rdp_classic"]
CONVERSIONS: tuple[Conversion, ...] = ("gdp", "rdp", "rdp_classic")
#: Relative spread that :func:`budget_for_epsilon` allows for: other machines round its steps otherwise.
BUDGET_SPREAD = 1e-9


def budget_for_epsilon(epsilon: float, delta: float, conversion: Conversion = "gdp") -> float:
    """The largest budget B per record, RDP(α) = α B for every α, that keeps a stream (ε, δ)-DP.

    * ``"gdp"``: B = μ²/2 for the largest μ with Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) <= δ (Dong, Roth, Su 2022,
      Corollary 2.13). The tightest; valid since everything charged is Gaussian.
    * ``"rdp"``: the improved conversion, ε = min over α of αB + log(1−1/α) − (log δ + log α)/(α−1) (Canonne,
      Kamath, Steinke 2020).
    * ``"rdp_classic"``: ε = min over α of αB + log(1/δ)/(α−1) (Mironov 2017), that is
      B = (√(ε + log 1/δ) − √log 1/δ)².

    The result is rounded down by some 1e-9 of itself.

    >>> [round(budget_for_epsilon(1.0, 1e-5, c), 5) for c in ("gdp", "rdp", "rdp_classic")]
    [0.03593, 0.03056, 0.02082]

    Raises:
        ValueError: unless ``epsilon`` is above 0 and ``delta`` lies in (0, 1).
    """
    epsilon = check_positive("epsilon", epsilon)
    delta = check_open_unit("delta", delta)
    check_choice("conversion", conversion, CONVERSIONS)
    if conversion == "rdp_classic":
        log_inverse = -math.log(delta)
        budget = (epsilon / (math.sqrt(epsilon + log_inverse) + math.sqrt(log_inverse))) ** 2
    else:
        budget = _largest(lambda trial: epsilon_of_budget(trial, delta, conversion) <= epsilon)
    return budget * (1 - 2 * BUDGET_SPREAD)


def epsilon_of_budget(budget: float, delta: float, conversion: Conversion = "gdp") -> float:
    """Convert a budget B per record to ε; inverse of :func:`budget_for_epsilon`, rounded up.

    Raises:
        ValueError: unless ``budget`` is above 0 and ``delta`` lies in (0, 1).
    """
    budget = check_positive("budget", budget)
    delta = check_open_unit("delta", delta)
    check_choice("conversion", conversion, CONVERSIONS)
    if conversion == "rdp_classic":
        return budget + 2 * math.sqrt(-budget * math.log(delta))
    if conversion == "rdp":
        return _epsilon_rdp(budget, delta)
    return pld.gaussian_epsilon(math.sqrt(2 * budget), delta) * (1 + 1e-12)


def _epsilon_rdp(budget: float, delta: float) -> float:
    def epsilon(log_excess: NDArray[np.float64]) -> NDArray[np.float64]:
        alpha = 1 + np.exp(log_excess)
        return alpha * budget + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)

    grid = np.linspace(-20.0, 60.0, 2001)  # α − 1; every α gives a valid ε, so the grid costs tightness only
    for _ in range(4):
        best = int(np.argmin(epsilon(grid)))
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 2001)
    return max(0.0, float(epsilon(grid).min()))


def _largest(fits: Callable[[float], bool]) -> float:
    """Largest float above 0 with a property that holds up to some number only."""
    low, high = 1e-300, 1.0
    while fits(high):
        low, high = high, high * 2
    # The exponents first: the answer may be many orders of magnitude from 1.
    near = math.exp(bisect(lambda log: fits(math.exp(log)), math.log(low), math.log(high), absolute=1e-3))
    return bisect(fits, near, min(high, near * 1.01), relative=1e-13)


# ---------------------------------------------------------------------- who is who


@dataclasses.dataclass(frozen=True)
class RecordKey:
    """Identification of records by their content, whatever their position in the table.

    A digest is of one record alone, under a key that never leaves the private state: without the key it reveals
    nothing of the record, not even to somebody who guesses it.

    Attributes:
        key: from the operating system's generator, 16 to 64 bytes; **private**.
    """

    key: bytes = dataclasses.field(repr=False)

    def digests(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Digests of records.

        Args:
            rows: images or features, one in each place of the first dimension.
            labels: int64, shape ``(n,)``, or ``(n, l)`` for several whole numbers a record.

        Returns:
            uint8, shape ``(n, 16)``. **Private**.
        """
        content = rows.detach().cpu().contiguous().numpy()
        kind = f"{content.dtype} {content.shape[1:]}".encode()
        found = bytearray()
        numbers = labels.cpu().numpy().astype("<i8")
        for row, label in zip(content, numbers, strict=True):
            found += self._hash(kind + label.tobytes() + row.tobytes(), _DIGEST_BYTES)
        return torch.frombuffer(found or bytearray(1), dtype=torch.uint8)[: len(found)].view(
            -1, _DIGEST_BYTES
        )

    def numbers(self, digests: Tensor) -> tuple[Ids, Ids]:
        """Numbers of records; equal records are counted, so each copy has a different one.

        Args:
            digests: uint8, shape ``(n, 16)``.

        Returns:
            The records' numbers, int64, shape ``(n,)``, and those that one copy more of each different record
            would have. Both **private**.
        """
        copies: Counter[bytes] = Counter()
        numbers = []
        for digest in as_bytes(digests):
            numbers.append(self._number(digest, copies[digest]))
            copies[digest] += 1
        following = [self._number(digest, count) for digest, count in copies.items()]
        return np.array(numbers, np.int64), np.array(following, np.int64)

    def _number(self, digest: bytes, copy: int) -> int:
        return int.from_bytes(self._hash(digest + copy.to_bytes(8, "little"), 8), "little", signed=True)

    def _hash(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self.key, digest_size=size).digest()


def as_bytes(digests: Tensor) -> list[bytes]:
    """Each row of a uint8 tensor as bytes."""
    data, width = digests.contiguous().numpy().tobytes(), digests.shape[1]
    return [data[at : at + width] for at in range(0, len(data), width)]


def changed_numbers(known: Mapping[int, bytes], now: Mapping[int, bytes]) -> bool:
    """Whether a record has another number than before.

    That is so where a digest that is known comes under a number that never had it, while a number that had it
    has lost it. Where all have kept it, the newcomer is an equal record.

    Args:
        known: digests of numbers, as they were.
        now: digests of the numbers in the table.
    """
    owners: dict[bytes, set[int]] = {}
    for number, digest in known.items():
        owners.setdefault(digest, set()).add(number)
    return any(
        number not in owners.get(digest, {number})
        and any(now.get(owner) != digest for owner in owners[digest])
        for number, digest in now.items()
    )


def read_ids(ids: Any, count: int) -> Ids:
    """Read the record numbers given by the owner, an array or the path of a ``.npy`` file, one integer per record.

    Raises:
        ValueError: unless there is one whole number for each record, and each once.
        FileNotFoundError: if there is no such file.
    """
    given = np.asarray(read_numbers("ids", ids) if isinstance(ids, str | Path) else ids)
    whole = (given.dtype.kind in "iu" and np.can_cast(given.dtype, np.int64)) or not given.size
    if given.shape != (count,) or not whole or len(np.unique(given)) != count:
        raise ValueError(
            f"ids: shape and numbers must be those of the records, one whole number for each ({given.dtype} given), "
            "and no number twice"
        )
    return given.astype(np.int64)


# ---------------------------------------------------------------------- the table

_ROW = np.dtype([("id", np.int64), ("allowed", np.int64), ("spent", np.int64)])
_SCHEMA = """
CREATE TABLE budgets (
    id      INTEGER PRIMARY KEY,
    allowed INTEGER NOT NULL,
    spent   INTEGER NOT NULL DEFAULT 0,
    digest  BLOB,
    CONSTRAINT budget CHECK (spent BETWEEN 0 AND allowed)
);
CREATE TABLE calls (number INTEGER PRIMARY KEY, mark TEXT NOT NULL);
CREATE TABLE runs (run TEXT PRIMARY KEY, charged INTEGER NOT NULL);
"""


class BudgetTable(PrivateStore):
    """Budgets of private records, or persons, in a stream of answers, and their spending; **private**.

    Amounts are whole quanta, so sums are exact; the file itself refuses to hold a record that has spent more than it
    may. A record that is taken out keeps its row, or it would come back with a new budget.

    The stream is one release in a ledger, so its budgets must never be spent twice under one entry. Refused are

    * *an older copy put back*: every call draws a mark, even if no record pays, that is written with what it cost and
      noted in the ledger before its answers are returned. A table without the ledger's last mark is older;
    * *a lost table*: the ledger says that this run has paid for a stream, and the table knows nothing of the run;
    * *a second copy*, see :class:`~pl_privknn.privacy.private_state.PrivateStore`;
    * *other noise*: what the ledger says of the noise holds for all answers, so all come from one kind of source.

    A run is noted here before its ledger is charged, with the number of such charges that it had by then. So the
    ledger alone says whether the stream is paid for, and a crash in between neither forgets nor repeats a charge.

    Args:
        path: the file; None keeps the budgets in memory, and a new process starts a new stream.
        budget: the most that any record may spend.
        quantum: what amounts are whole multiples of.
        schema: SQL of further tables.
        **facts: what the table must have been made with, such as the number of its shard.

    Attributes:
        numbers: under which there are budgets, int64, ascending.
        left: what each has left, in quanta, float64. What is taken from it is written by :meth:`spend`.
        unit: whose budgets these are.
        begun_elsewhere: whether records in other shards of the stream have answered.
        key: recognises records.

    Raises:
        PrivateStoreError: for a file that is damaged, in use, a second copy, or made with other ``facts``.
        ValueError: if it was made for another budget.
    """

    def __init__(
        self,
        path: Path | None,
        budget: float,
        quantum: float,
        schema: str = "",
        **facts: Any,
    ) -> None:
        super().__init__(path, _SCHEMA + schema)
        self.begun_elsewhere, self.quantum = False, quantum
        self.unit: Unit = "record"
        new = {"budget": budget, "quantum": quantum, "key": secrets.token_hex(32), **facts}
        try:
            with self.writing():
                for name in new.keys() - self.facts().keys():
                    self.note(name, new[name])
            stored = self.facts()
            if abs(stored["budget"] - budget) > BUDGET_SPREAD * budget or stored["quantum"] != quantum:
                raise ValueError(
                    f"budget={budget!r} differs from {stored['budget']!r}, with which {path} was made; a budget "
                    "can't change under a stream that has begun"
                )
            for name, value in facts.items():
                if stored[name] != value:
                    raise PrivateStoreError(
                        f"{self._folder} holds the budgets of {name} {stored[name]}, and this is {name} {value}; "
                        f"go back to that, or {_NEW_STREAM}"
                    )
            self._load()
        except BaseException:
            self.close()
            raise
        self.key = RecordKey(bytes.fromhex(stored["key"]))

    def _load(self) -> None:
        rows = np.fromiter(self.read("SELECT id, allowed, spent FROM budgets ORDER BY id"), _ROW)
        self.numbers = rows["id"].copy()
        self.left = (rows["allowed"] - rows["spent"]).astype(np.float64)
        self._written = self.left.copy()

    @property
    def calls(self) -> int:
        """Number of batches of answers charged to these budgets."""
        return int(self.read("SELECT COALESCE(MAX(number), 0) FROM calls").fetchone()[0])

    @property
    def begun(self) -> bool:
        """Whether any query was answered, by the budgets of this shard or of another one."""
        return self.begun_elsewhere or self.calls > 0

    # ------------------------------------------------------------------ who is who

    def recognise(
        self,
        ids: Ids | None,
        digests: Tensor | None,
        table: tuple[Tensor, Tensor],
        is_shard: bool = False,
        unit: Unit = "record",
    ) -> Ids:
        """Assign its budget to each record of a table; fixed once a query was answered.

        Before the first answer the stream may still be about other records.

        Args:
            ids: the owner's numbers, or None.
            digests: uint8, shape ``(n, 16)``; of the records as the data module gives them, or None.
            table: features ``(n, d)`` and labels, which identify the records where neither is given.
            is_shard: refuse other records than those with which the stream began. Shards don't know each other's
                records: one that moved would get a second budget where it comes.
            unit: whose numbers ``ids`` are.

        Returns:
            The numbers under which the records have their budgets, int64 ``(n,)``. **Private**.

        Raises:
            ValueError: where it is not certain that every record keeps its own. It shows nothing of them.
        """
        begun, kind = self.begun, "digests" if ids is None else f"numbers of {unit}s"
        if begun and self.fact("identities") != kind:
            said = self.fact("identities") + (" of records" if self.fact("identities") == "digests" else "")
            raise ValueError(
                f"ids: the budgets belong to {said}, and now come {kind}; go back to the former, or {_NEW_STREAM}"
            )
        self.unit = unit
        noted: dict[int, bytes] | None = None
        if ids is None:
            ids, following = self.key.numbers(self.key.digests(*table) if digests is None else digests)
            if begun:
                _check_digests(ids, following, self.numbers)
        elif digests is not None:
            noted = dict(zip(ids.tolist(), as_bytes(digests), strict=True))
        if begun:
            before = {} if noted is None else dict(self.read("SELECT id, digest FROM budgets"))
            is_same = np.array_equal(np.sort(ids), self.numbers) and (noted is None or noted == before)
            if is_shard and not is_same:
                raise ValueError(
                    f"private records: shard {self.fact('shard')} must hold those with which the stream began, all "
                    f"of them and no others; go back to those, or {_NEW_STREAM}"
                )
            if noted is not None and changed_numbers(before, noted):
                raise ValueError(
                    "ids: some private records come under another number than before, and would get another budget; "
                    "give the numbers in the data module's order, and every record its own"
                )
        with self.writing() as db:
            if not begun:
                db.execute("DELETE FROM budgets")
                self.note("identities", kind)
            self.admit(ids, None if noted is None else list(noted.values()))
        return ids

    def admit(self, ids: Ids, digests: Sequence[bytes] | None = None) -> None:
        """Add budgets for record numbers without one, and update the given digests."""
        allowed = [math.floor(self.fact("budget") / self.quantum)] * len(ids)
        known = [None] * len(ids) if digests is None else digests
        with self.writing() as db:
            db.executemany(
                "INSERT INTO budgets (id, allowed, digest) VALUES (?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET digest = COALESCE(excluded.digest, digest)",
                zip(ids.tolist(), allowed, known, strict=True),
            )
            self._load()

    def places(self, ids: Ids) -> NDArray[np.intp]:
        """Positions in :attr:`left` of record numbers that have a budget.

        Raises:
            PrivateStoreError: if some have none.
        """
        found = np.searchsorted(self.numbers, ids)
        if not np.array_equal(self.numbers.take(found, mode="clip") if len(self.numbers) else [], ids):
            raise PrivateStoreError("budgets: a record that is to pay has none")
        return found

    # ------------------------------------------------------------------ payments

    def next_mark(self) -> str:
        """Mark of the next batch of answers: its number and a random part; public."""
        return f"{self.calls + 1}:{secrets.token_hex(8)}"

    def spend(self, mark: str) -> None:
        """Write the budgets that a batch of answers has spent; on disk when the transaction ends.

        Args:
            mark: of the batch; one of the same number belongs to a batch whose answers were never returned.

        Raises:
            PrivateStoreError: if a record would have spent more than it may, or it could not be written: let nothing
                out.
        """
        quanta = self._written - self.left
        paying = np.flatnonzero(quanta)
        paid = zip(quanta[paying].astype(np.int64).tolist(), self.numbers[paying].tolist(), strict=True)
        with self.writing() as db:
            db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?)", (int(mark.split(":")[0]), mark))
            db.executemany("UPDATE budgets SET spent = spent + ? WHERE id = ?", paid)
        self._written = self.left.copy()

    def pay_for(self, total: Mechanism, ledger: ChargesLedger | None, source: NoiseSource) -> NoiseSource:
        """Charge the whole stream to a ledger, unless its run has done so, and return the noise source of a batch.

        Args:
            total: what the stream costs where neighbours differ by one record more or less.
            ledger: receives the charge; None for a call without a ledger.
            source: of the noise.

        Returns:
            the noise of the next batch; of a seeded source a stream of this row's and this batch's own.

        Raises:
            BudgetExceeded: as the ledger says; nothing was drawn.
            PrivateStoreError: if the budgets are not, or are no more, those of the answers that the run has returned.
            ValueError: if earlier answers were drawn from a source of another kind.
        """
        self.check(total, ledger)
        is_paid = True
        if ledger is not None:
            paid = ledger.charged(total)
            if self._charged_before(ledger) is None:
                with self.writing() as db:
                    db.execute("INSERT INTO runs VALUES (?, ?)", (_run(ledger), paid))
            is_paid = paid > self._charged_before(ledger)
        kind = "the operating system's generator" if source.cryptographic else "a seed"
        held = self.fact("noise", kind)
        if held != kind and (is_paid or self.begun):
            raise InputError(
                f"noise_source: the noise of this stream came from {held}, as the ledger says of all its answers, "
                f"and would now come from {kind}; continue as it began, or {_NEW_STREAM}"
            )
        self.note("noise", kind)
        if ledger is not None and not is_paid:
            stated: Any = {"noise": source, "adjacencies": ("add_remove",), "unit": self.unit}
            self.note("row", ledger.charge(total, 1, **stated))
        return source.stream("ind_knn", self.fact("row", -1), self.calls)

    def check(self, total: Mechanism, ledger: ChargesLedger | None) -> None:
        """Check that earlier answers of the ledger's run were paid from these budgets and that these are the latest.

        Args:
            total: what the stream costs.
            ledger: the run's.

        Raises:
            PrivateStoreError: if not.
        """
        if ledger is None:
            return
        self.check_mark(self.noted(ledger), f"run {ledger.run_id!r}")
        if self.path is not None and self._charged_before(ledger) is None:
            check_unpaid(self.path.parent, total, ledger)

    def check_mark(self, noted: str | None, who: str) -> None:
        """Raise ``PrivateStoreError`` unless these budgets paid for the batch of answers that a ledger has noted."""
        if noted is None:
            return
        number = noted.split(":")[0]
        if self.read("SELECT mark FROM calls WHERE number = ?", (number,)).fetchone() != (noted,):
            raise PrivateStoreError(
                f"{self._folder} holds an older copy of the budgets than the answers of {who} were paid from; put "
                "back the latest one, or start a new run in a new folder, which charges a new stream"
            )

    def noted(self, ledger: ChargesLedger | None) -> str | None:
        """The mark of the last batch of answers that a ledger knows of."""
        return None if ledger is None else ledger.noted(self.topic)

    def vouch(self, ledger: ChargesLedger | None, mark: str) -> None:
        """Note the stream's last mark in the ledger before its last answers are returned."""
        if ledger is not None and self.path is not None:
            ledger.note(self.topic, mark)

    @property
    def topic(self) -> str:
        """Topic of the ledger's notes."""
        return f"ind_knn {self.name}"

    @property
    def _folder(self) -> str:
        return "the labeler's memory" if self.path is None else str(self.path.parent)

    def _charged_before(self, ledger: ChargesLedger) -> Any:
        found = self.read("SELECT charged FROM runs WHERE run = ?", (_run(ledger),)).fetchone()
        return None if found is None else found[0]


def check_unpaid(folder: Path, total: Mechanism, ledger: ChargesLedger | None) -> None:
    """Check that a run has charged no stream before a folder without its state is used.

    Args:
        folder: where the budgets would be.
        total: what the stream costs.
        ledger: the run's.

    Raises:
        PrivateStoreError: if it has, and so has answered from other budgets.
    """
    if ledger is not None and ledger.charged(total):
        raise PrivateStoreError(
            f"{folder} does not hold the budgets from which run {ledger.run_id!r} has answered; put that folder "
            "back, or start a new run in a new folder, which charges a new stream"
        )


def _run(ledger: ChargesLedger) -> str:
    return f"{ledger.origin} {ledger.run_id}"  # ledgers may have runs of the same name


def _check_digests(numbers: Ids, following: Ids, known: Ids) -> None:
    if not np.isin(numbers, known).all():
        raise ValueError(
            "private records: some are not those that the budgets belong to (other records, or the same in other "
            "features, sizes or preprocessing); go back to those, or start a new run or state_dir, which charges "
            "a new stream, and give every record a lasting number with ids if this is to change again"
        )
    if np.isin(following, known).any():
        raise ValueError(
            "private records: of some that are equal not all are present, and it is not known which; put "
            f"them back, give every record a lasting number with ids from the start, or {_NEW_STREAM}"
        )
