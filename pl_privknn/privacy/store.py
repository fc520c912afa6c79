"""Rows of a ledger on disk, and their running totals."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pl_privknn.privacy.accounting.accountant import RenyiFilter
from pl_privknn.privacy.mechanisms.base import (
    SEEDED_NOISE,
    UNSTATED_NOISE,
    Charge,
    Guarantee,
    Mechanism,
    merged,
)
from pl_privknn.privacy.settings import Budget
from pl_privknn.privacy.sqlite_file import FACTS, SQLiteFile, replacing

_FORMAT = 1
_VERSION = f"PRAGMA user_version = {_FORMAT};"
_LEDGER = """
CREATE TABLE rows (
    position INTEGER PRIMARY KEY,
    body     TEXT NOT NULL,
    hash     TEXT NOT NULL
);
CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), position INTEGER NOT NULL, hash TEXT NOT NULL);
"""
_RUN = f"""
{FACTS}
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY,
    assignment TEXT,           -- of each public example the position of the query whose answer it takes, a JSON list
    spread BLOB,
    ask_means INTEGER NOT NULL,
    deviation REAL             -- of the noise on the scores
);
CREATE TABLE queries (
    round INTEGER NOT NULL,
    position INTEGER NOT NULL,
    example INTEGER NOT NULL,
    asked_at INTEGER,          -- number of the run's charges when the batch was sent, NULL before
    released INTEGER NOT NULL DEFAULT 0,
    label INTEGER NOT NULL DEFAULT -1,
    soft TEXT,
    score TEXT,                -- the released noisy counts, a JSON list
    PRIMARY KEY (round, position)
) WITHOUT ROWID;
"""
_LEDGER_PARTS = {("table", "rows"), ("table", "head")}
_RUN_PARTS = {("table", "facts"), ("table", "rounds"), ("table", "queries")}
_BUSY_SECONDS = 600.0
_POLL_SECONDS = 0.002
_KILLED_WRITER = (
    "If there is a -journal file next to it, a writer was killed: copy both into a folder where you may write, and "
    "read the copy"
)
#: Name of the fact that keeps the hash of the last row that a run appended.
LAST_ROW = "head"
#: Hash "before" the first row.
GENESIS = "0" * 64
_WAL_BYTE = 18  # of an SQLite file's header: 2 where the file is written ahead


class LedgerCorrupt(RuntimeError):
    """Raised where a file is no ledger, or its rows do not match their hashes. It is never repaired silently."""


class LedgerUnavailableError(OSError):
    """Raised where the disk or the system refuses to read or write a ledger; nothing was charged."""


def seal(previous: str, body: str) -> str:
    """SHA-256 of a row: of the hash before it and its own canonical JSON."""
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def canonical(body: dict[str, Any]) -> str:
    """JSON with sorted keys and without white space; NaN and infinity are refused."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


class RowStore(SQLiteFile):
    """Sealed rows of a ledger in an SQLite file, and beside them the tables of a run.

    A run's file holds its facts, rounds, queries and answers. It holds the ledger too, or is attached to a ledger
    that several runs share: one transaction writes to both then, and SQLite commits it in both or in neither. Each
    row that is appended writes its hash into the facts of the run in its own transaction.

    **Durability.** A row is committed and synced when :meth:`writing` ends. The file uses a rollback journal,
    so that between commits everything is in the one file and readers need no write access; the journal's
    folder is synced too. A process killed within a commit leaves a journal with which the next opening
    undoes the unfinished row. Writers exclude each other by a lock file next to the ledger.

    **What can be found out.** A change, deletion, insertion or reordering of rows breaks the chain; a cut of
    the last rows disagrees with the head that the file keeps apart. The file holds no secret, so somebody who
    rewrites rows, all later hashes and the head, or puts an older copy back, can't be found out from the file
    alone: note the head hash elsewhere (:meth:`contains` finds it again in every honest continuation).

    Args:
        path: the file of the ledger.
        readonly: open for reading only; the folder may be read-only too.
        run_file: the file of the run that writes, which may be ``path`` itself; None where a ledger alone is open.

    Raises:
        LedgerCorrupt: if the file is not a ledger of this format.
        FileNotFoundError: if there is no file.
    """

    path: Path

    def __init__(self, path: str | Path, readonly: bool = False, run_file: Path | None = None) -> None:
        path = Path(path)
        self.run_file = run_file
        if not path.is_file():
            raise FileNotFoundError(f"there is no ledger at {path}")
        super().__init__(path, readonly)
        self._check_format()

    @classmethod
    def create(cls, path: str | Path, first: dict[str, Any], run_file: Path | None = None) -> RowStore:
        """Open the files for writing; make them, the ledger with its first row, where there are none.

        Each is made under another name and then renamed, so a ledger is never seen without its first row, and
        an empty file at ``path`` is not mistaken for a new ledger.
        """
        path = Path(path)
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(
                f"the ledger {path} is a link to {os.readlink(path)}, where there is no file; mount what it leads "
                "to, or, for a new ledger, remove the link or give another path"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(FileLock(f"{path}.lock"), path):
            if not path.exists():
                text = canonical(first)
                sealed = seal(GENESIS, text)
                schema = _LEDGER + _RUN if run_file == path else _LEDGER
                with replacing(path, cls.settings) as db:
                    db.executescript(f"BEGIN IMMEDIATE; {schema} {_VERSION} COMMIT;")
                    db.execute("BEGIN IMMEDIATE")
                    db.execute("INSERT INTO rows VALUES (1, ?, ?)", (text, sealed))
                    db.execute("INSERT INTO head VALUES (1, 1, ?)", (sealed,))
                    db.execute("COMMIT")
        if run_file is not None and not run_file.exists():
            with replacing(run_file, cls.settings) as db:
                db.executescript(f"BEGIN IMMEDIATE; {_RUN} {_VERSION} COMMIT;")
        return cls(path, run_file=run_file)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Hold the file lock and one transaction, so that a check and the following append are atomic.

        Raises:
            LedgerCorrupt: if the file was moved or replaced since it was opened.
            OSError: if the disk refuses; nothing was written then.
            TimeoutError: if another process holds the ledger for minutes.
        """
        if self.readonly:
            raise PermissionError(f"{self.path} was opened for reading only; open it with Ledger(path, …)")
        self._check_process()
        with self._turn, _locked(self._lock, self.path):
            if _identity(self.path) != self._file:
                raise LedgerCorrupt(
                    f"{self.path} was moved, deleted or replaced while it was open; put it back and open it again"
                )
            refuse_wal(self.path)
            with super().writing() as db:
                yield db

    def append(self, body: dict[str, Any]) -> int:
        """Add a row within :meth:`writing`; it is durable when that block ends. Returns its position."""
        position, previous = self._rows("SELECT position, hash FROM head WHERE only = 1")[0]
        text = canonical(body)
        sealed = seal(previous, text)
        written = self._db.execute("INSERT INTO rows VALUES (?, ?, ?)", (position + 1, text, sealed)).rowcount
        moved = self._db.execute(
            "UPDATE head SET position = ?, hash = ? WHERE only = 1", (position + 1, sealed)
        ).rowcount
        if (written, moved) != (1, 1):
            raise LedgerCorrupt(f"{self.path} lost rows that were written to it; the file was modified")
        if self.run_file is not None:
            self.note(LAST_ROW, sealed)
        return int(position) + 1

    def reading(self) -> threading.RLock:
        """Lock under which no other thread's transaction is open, to read and apply rows."""
        self._check_process()
        return self._turn

    def read_after(self, position: int, previous: str) -> list[dict[str, Any]]:
        """Verified rows after ``position``, whose hash is ``previous``.

        Args:
            position: of the last row that is known; 0 for none.
            previous: its hash; :data:`GENESIS` for none.

        Returns:
            the rows' bodies, each with its ``position`` and ``hash``.

        Raises:
            LedgerCorrupt: at the first row that does not fit, or if the head disagrees with the rows.
        """
        # One statement sees one state of the file, even while another process appends.
        found = self._rows(
            "SELECT rows.position, body, rows.hash, head.position, head.hash FROM head "
            "LEFT JOIN rows ON rows.position > ? OR rows.position < 1 ORDER BY rows.position",
            (position,),
        )
        if not found:
            raise LedgerCorrupt(f"{self.path}: its head is missing")
        head, sealed = (found[0][3], found[0][4]), previous
        bodies: list[dict[str, Any]] = []
        for place, text, stored, *_ in found:
            if place is None:  # no row after the known one
                continue
            if place != position + 1:
                raise LedgerCorrupt(f"{self.path}: row {position + 1} is missing")
            sealed = seal(sealed, str(text))
            if sealed != stored:
                raise LedgerCorrupt(f"{self.path}: row {place} was changed, or a row before it taken out")
            position = place
            try:
                bodies.append({**json.loads(text), "position": place, "hash": sealed})
            except (TypeError, ValueError) as error:
                raise LedgerCorrupt(f"{self.path}: row {place} is not a JSON object") from error
        if head != (position, sealed):
            raise LedgerCorrupt(
                f"{self.path}: its head is row {head[0]}, the rows end at {position}; rows were cut off or added"
            )
        return bodies

    def position_of(self, sealed: str) -> int | None:
        """Position of the row that carries this hash; None where no row does."""
        found = self._rows("SELECT position FROM rows WHERE hash = ?", (sealed,))
        return int(found[0][0]) if found else None

    def failure(self, error: sqlite3.DatabaseError) -> Exception:
        """Error of a ledger that replaces SQLite's."""
        if isinstance(error, sqlite3.OperationalError):  # disk, permissions, locks
            hint = "What is not in it was not charged, and nothing was drawn for it."
            doing, hint = ("read", _KILLED_WRITER) if self.readonly else ("written", hint)
            return LedgerUnavailableError(f"{self.path} can't be {doing}: {error}. {hint}")
        return LedgerCorrupt(f"{self.path} can't be read as a ledger: {error}")

    # ------------------------------------------------------------------ inner work

    def _connect(self, mode: str | None = None) -> None:
        self._lock = FileLock(f"{self.path}.lock")
        self._file = _identity(self.path)
        refuse_wal(self.path)
        super()._connect(mode)
        if self.run_file not in (None, self.path):
            refuse_wal(self.run_file)
            with self._translated():
                self._db.execute("ATTACH ? AS run", (f"{self.run_file.absolute().as_uri()}?mode=rw",))
                for setting in self.settings:
                    self._db.execute(f"PRAGMA run.{setting}")

    def _rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._turn, self._translated():
            return self.read(statement, values).fetchall()

    def _check_format(self) -> None:
        if self.path.stat().st_size == 0:
            raise LedgerCorrupt(
                f"{self.path} is empty, so not a ledger; restore it, or delete it if it never was one"
            )
        version = self._rows("PRAGMA user_version")[0][0]
        parts = set(self._rows("SELECT type, name FROM sqlite_master"))
        if version == _FORMAT and parts == _RUN_PARTS:
            raise LedgerCorrupt(
                f"{self.path} is the file of a run that charges a ledger elsewhere; give that ledger (ledger_path)"
            )
        if version != _FORMAT or _LEDGER_PARTS - parts:
            raise LedgerCorrupt(f"{self.path} is not a ledger of format {_FORMAT}")
        if foreign := sorted(parts - _LEDGER_PARTS - _RUN_PARTS):  # a trigger could swallow what is charged
            raise LedgerCorrupt(
                f"{self.path} holds the {foreign[0][0]} {foreign[0][1]!r}, which no ledger has: "
                "the file was modified"
            )


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a file in their order, verified, each with its ``position`` and ``hash``.

    Raises:
        LedgerCorrupt: if they do not fit, or the file is no ledger.
        FileNotFoundError: if there is no file.
    """
    store = RowStore(path, readonly=True)
    try:
        return store.read_after(0, GENESIS)
    finally:
        store.close()


def refuse_wal(path: Path) -> None:
    """Refuse a file in write-ahead mode, whose newest rows may be in another file that a copy would miss.

    Raises:
        LedgerCorrupt: where another program turned it to write-ahead logging, or there is a log next to it.
    """
    with path.open("rb") as file:
        version = file.read(_WAL_BYTE + 1)[_WAL_BYTE:]
    if version == b"\x02" or Path(f"{path}-wal").exists():
        raise LedgerCorrupt(
            f"{path} was turned to write-ahead logging by another program, and its newest rows may lie in "
            f"{path.name}-wal; where that file is still next to it, run: sqlite3 {path.name} 'PRAGMA "
            "journal_mode=DELETE'. A copy that was made without it is not to be used"
        )


@contextmanager
def _locked(lock: FileLock, path: Path) -> Iterator[None]:
    try:
        lock.acquire(timeout=_BUSY_SECONDS, poll_interval=_POLL_SECONDS)
    except Timeout as error:
        raise TimeoutError(
            f"another process has held the ledger {path} for {_BUSY_SECONDS:g} s; see which one, and end it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


Releases = dict[Mechanism, Charge]

#: What a charge row says of the noise that was drawn for it, and how far its guarantee then holds. A row
#: that says nothing is not trusted to have had noise of the system's.
NOISE_MARKS: dict[str | None, Guarantee] = {
    "cryptographic": Guarantee(),
    "seeded": Guarantee("none", (SEEDED_NOISE,)),
    None: Guarantee("conditional", (UNSTATED_NOISE,)),
}


class RunBalance:
    """Totals of one run.

    Attributes:
        planned: the most that it stated, for each mechanism.
        charged: what it paid for.
        charge_rows: positions of its charges.
        late: positions of its rows that raised the guarantee after the ledger's first charge, of whichever run.
    """

    def __init__(self) -> None:
        self.planned: Releases = {}
        self.charged: Releases = {}
        self.charge_rows: list[int] = []
        self.late: list[int] = []

    @property
    def num_charges(self) -> int:
        """Number of charges."""
        return len(self.charge_rows)

    def guaranteed(self) -> Releases:
        """For each mechanism the larger of planned and charged."""
        return larger(self.planned, self.charged)

    def after(self, charge: Charge) -> Charge | None:
        """All charges of a mechanism with this one, where they exceed the guarantee so far; else None."""
        total = merged([*self.charged.values(), charge])[charge.mechanism]
        return total if total.count > count_of(self.guaranteed(), charge.mechanism) else None


class Balance:
    """Running totals over a ledger's rows, in their order.

    Attributes:
        opened: whether the opening row was seen.
        origin: its hash, which identifies this ledger.
        budget: the budget in force.
        order: Rényi order of the filter.
        runs: the runs in order of appearance.
        num_charges: number of charges of all runs.
        notes: the last note on each topic.
        position: of the last row taken in.
        head: its hash.
    """

    def __init__(self) -> None:
        self.opened = False
        self.origin = GENESIS
        self.budget = Budget()
        self.order = 2.0
        self.runs: dict[str, RunBalance] = {}
        self.num_charges = 0
        self.notes: dict[str, str] = {}
        self.position = 0
        self.head = GENESIS

    @property
    def late(self) -> list[int]:
        """Positions of plans and charges that increased the guarantee after the ledger's first charge.

        Their authors may have seen answers.
        """
        return sorted(position for run in self.runs.values() for position in run.late)

    @property
    def filter(self) -> RenyiFilter:
        """Rényi filter of the budget in force."""
        return RenyiFilter(self.order, self.budget.delta, self.budget.adjacency)

    def apply(self, body: Mapping[str, Any]) -> None:
        """Apply one verified row.

        Raises:
            LedgerCorrupt: for a row that no ledger writes.
            ValueError: for a mechanism that is not known here; import what defines it.
        """
        try:
            kind, position = body["kind"], body["position"]
            if (kind == "open") == self.opened:
                raise ValueError("a ledger has one opening row, its first")
            if kind == "open":
                self.opened, self.origin = True, body["hash"]
                self.budget = Budget(body["epsilon"], body["delta"], body["adjacency"], body["unit"])
                self.order = float(body["filter_order"])
            elif kind == "plan":
                self._apply_plan(position, body["run"], merged(map(_charge, body["plan"])))
            elif kind == "charge":
                self._apply_charge(
                    position, body["run"], _charge(body["charge"]).with_guarantee(_noise_mark(body))
                )
            elif kind == "note":
                self.notes[body["topic"]] = body["text"]
            else:
                raise ValueError(f"kind={kind!r} is unknown")
            self.position, self.head = position, body["hash"]
        except _UnknownMechanism as error:
            raise ValueError(
                f"row {body.get('position')}: {error}; if a package of your own defines it, import that first"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerCorrupt(
                f"row {body.get('position')} is not one that a ledger writes: {error}"
            ) from error

    def run(self, run_id: str) -> RunBalance:
        """Totals of a run; empty ones if it is not known."""
        return self.runs.get(run_id, RunBalance())

    def guarantee(self, changes: Mapping[str, Releases] | None = None) -> list[Charge]:
        """For each run and mechanism the larger of planned and charged, added over runs.

        Args:
            changes: what some runs would guarantee instead, to try a plan or charge on.
        """
        parts = {name: run.guaranteed() for name, run in self.runs.items()} | dict(changes or {})
        return in_total(parts.values())

    def spent(self) -> list[Charge]:
        """Charges, added over runs."""
        return in_total(run.charged for run in self.runs.values())

    def _apply_plan(self, position: int, run_id: str, plan: Releases) -> None:
        run = self.runs.setdefault(run_id, RunBalance())
        if beyond(plan, run.guaranteed()):
            self._note_if_late(position, run)
        run.planned = larger(run.planned, plan)

    def _apply_charge(self, position: int, run_id: str, charge: Charge) -> None:
        run = self.runs.setdefault(run_id, RunBalance())
        if run.after(charge) is not None:
            self._note_if_late(position, run)
        run.charged = merged([*run.charged.values(), charge])
        run.charge_rows.append(position)
        self.num_charges += 1

    def _note_if_late(self, position: int, run: RunBalance) -> None:
        if self.num_charges:
            run.late.append(position)


def count_of(releases: Releases, mechanism: Mechanism) -> int:
    """Number of releases of a mechanism."""
    return releases[mechanism].count if mechanism in releases else 0


def larger(first: Releases, second: Releases) -> Releases:
    """For each mechanism the larger count of the two, with the caveats of both."""
    found = dict(first)
    for mechanism, charge in second.items():
        if mechanism in found:
            known = found[mechanism]
            charge = dataclasses.replace(
                known.with_guarantee(charge.caveat), count=max(known.count, charge.count)
            )
        found[mechanism] = charge
    return found


def beyond(wanted: Releases, granted: Releases) -> list[Charge]:
    """Those of ``wanted`` whose count is above the one in ``granted``."""
    return [charge for mechanism, charge in wanted.items() if charge.count > count_of(granted, mechanism)]


def in_total(parts: Iterable[Releases]) -> list[Charge]:
    """The sum of some releases."""
    return list(merged(charge for part in parts for charge in part.values()).values())


def _noise_mark(body: Mapping[str, Any]) -> Guarantee:
    noise = body.get("noise")
    if noise not in NOISE_MARKS:
        raise ValueError(f"noise={noise!r} is unknown")
    return NOISE_MARKS[noise]


class _UnknownMechanism(Exception):
    """Record of a mechanism that is not registered."""


def _charge(record: dict[str, Any]) -> Charge:
    return _read(json.dumps(record, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Charge:
    record = json.loads(text)
    try:
        return Charge.from_record(record)
    except ValueError as error:
        if isinstance(record, dict) and "is unknown" in str(error):
            raise _UnknownMechanism(str(error)) from error
        raise
