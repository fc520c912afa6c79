"""Append-only rows in one SQLite file, each sealed by a hash over itself and the row before."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pl_privknn._files import sync_folder

_FORMAT = 1
_SCHEMA = f"""
CREATE TABLE rows (
    position INTEGER PRIMARY KEY,
    body     TEXT NOT NULL,
    hash     TEXT NOT NULL
);
CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), position INTEGER NOT NULL, hash TEXT NOT NULL);
PRAGMA user_version = {_FORMAT};
"""
_PARTS = {("table", "rows"), ("table", "head")}
_BUSY_SECONDS = 600.0
_POLL_SECONDS = 0.002
_KILLED_WRITER = (
    "If a -journal file lies beside it, a writer was killed: copy both into a folder where you may write, and "
    "read the copy"
)
#: Hash "before" the first row.
GENESIS = "0" * 64
#: How an SQLite file begins.
SQLITE_MAGIC = b"SQLite format 3\x00"

# A connection must not be used, nor closed, in a process forked from the one that opened it: closing could
# roll back a transaction of the parent. Forked processes park it here and open their own.
_INHERITED: list[sqlite3.Connection] = []


class LedgerCorrupt(RuntimeError):
    """The file is no ledger, or its rows do not fit their hashes. It is never repaired silently."""


def seal(previous: str, body: str) -> str:
    """SHA-256 of a row: of the hash before it and its own canonical JSON."""
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def canonical(body: dict[str, Any]) -> str:
    """JSON with sorted keys and without white space; NaN and infinity are refused."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


class RowStore:
    """One SQLite file of sealed rows.

    **Durability.** A row is committed and synced when :meth:`writing` ends. The file uses a rollback journal,
    so that between commits everything is in the one file and readers need no write access; the journal's
    folder is synced too. A process killed within a commit leaves a journal with which the next opening
    undoes the unfinished row. Writers exclude each other by a lock file beside the ledger.

    **What can be found out.** A change, deletion, insertion or reordering of rows breaks the chain; a cut of
    the last rows disagrees with the head that the file keeps apart. The file holds no secret, so somebody who
    rewrites rows, all later hashes and the head, or puts an older copy back, can't be found out from the file
    alone: note the head hash elsewhere (:meth:`contains` finds it again in every honest continuation).

    Args:
        path: the file.
        readonly: open for reading only; the folder may be read-only too.

    Raises:
        LedgerCorrupt: if the file is not a ledger of this format.
        FileNotFoundError: if there is no file.
    """

    def __init__(self, path: str | Path, readonly: bool = False) -> None:
        self.path = Path(path)
        self.readonly = readonly
        #: Told the hash of the last row after each commit, before anybody may draw.
        self.witnesses: list[Callable[[str], None]] = []
        self._appended: str | None = None
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no ledger at {self.path}")
        self._start()
        self._check_format()

    @classmethod
    def create(cls, path: str | Path, first: dict[str, Any]) -> RowStore:
        """Open the file for writing; make it, with its first row, where there is none.

        It is made under another name and then renamed, so a ledger is never seen without its first row, and
        an empty file at ``path`` is not mistaken for a new ledger.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(FileLock(f"{path}.lock"), path):
            if not path.exists():
                fresh = path.with_name(f".{path.name}.new")
                fresh.unlink(missing_ok=True)
                text = canonical(first)
                sealed = seal(GENESIS, text)
                db = sqlite3.connect(fresh, isolation_level=None)
                db.execute("PRAGMA synchronous=EXTRA")
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT INTO rows VALUES (1, ?, ?)", (text, sealed))
                db.execute("INSERT INTO head VALUES (1, 1, ?)", (sealed,))
                db.execute("COMMIT")
                db.close()
                fresh.replace(path)
                sync_folder(path.parent)
        return cls(path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file lock and one transaction, so that a check and the append after it are one step.

        Raises:
            LedgerCorrupt: if the file was moved or replaced since it was opened.
            OSError: if the disk refuses; nothing was written then.
            TimeoutError: if another process holds the ledger for minutes.
        """
        if self.readonly:
            raise PermissionError(f"{self.path} was opened for reading only; open it with Ledger(path, …)")
        self._start_after_fork()
        with self._thread, _locked(self._lock, self.path):
            if _identity(self.path) != self._file:
                raise LedgerCorrupt(
                    f"{self.path} was moved, deleted or replaced while it was open; put it back and open it again"
                )
            with _translated(self.path, "written", "Nothing was charged."):
                self._db.execute("BEGIN IMMEDIATE")
                self._appended = None
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # some failures have rolled back already
                        self._db.execute("ROLLBACK")
                    raise
            if self._appended is not None:
                for note in self.witnesses:
                    note(self._appended)

    def append(self, body: dict[str, Any]) -> int:
        """Add a row within :meth:`writing`; it is durable when that block ends. Returns its position."""
        position, previous = self._query("SELECT position, hash FROM head WHERE only = 1")[0]
        text = canonical(body)
        sealed = seal(previous, text)
        written = self._db.execute("INSERT INTO rows VALUES (?, ?, ?)", (position + 1, text, sealed)).rowcount
        moved = self._db.execute(
            "UPDATE head SET position = ?, hash = ? WHERE only = 1", (position + 1, sealed)
        ).rowcount
        if (written, moved) != (1, 1):
            raise LedgerCorrupt(f"{self.path} does not keep what is written to it; somebody has changed it")
        self._appended = sealed
        return int(position) + 1

    def reading(self) -> threading.RLock:
        """A lock under which no other thread's transaction is open, to read rows and take them in."""
        self._start_after_fork()
        return self._thread

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
        found = self._query(
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
        found = self._query("SELECT position FROM rows WHERE hash = ?", (sealed,))
        return int(found[0][0]) if found else None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # ------------------------------------------------------------------ inner work

    def _start(self) -> None:
        self._process = os.getpid()
        self._thread = threading.RLock()
        self._lock = FileLock(f"{self.path}.lock")
        self._file = _identity(self.path)
        self._connect("ro" if self.readonly else "rw")

    def _start_after_fork(self) -> None:
        if self._process != os.getpid():
            _INHERITED.append(self._db)
            self._start()

    def _connect(self, mode: str) -> None:
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        with _translated(self.path, "read", _KILLED_WRITER):
            self._db = sqlite3.connect(
                uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False
            )
            self._db.execute("PRAGMA query_only=ON" if self.readonly else "PRAGMA synchronous=EXTRA")

    def _query(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        self._start_after_fork()
        with self._thread, _translated(self.path, "read", _KILLED_WRITER):
            try:
                return self._db.execute(statement, values).fetchall()
            except sqlite3.OperationalError:
                if not self.readonly or not Path(f"{self.path}-journal").exists():
                    raise
                # A killed writer left a journal: SQLite undoes the unfinished row, which takes write access.
                self._db.close()
                self._connect("rw")
                return self._db.execute(statement, values).fetchall()

    def _check_format(self) -> None:
        if self.path.stat().st_size == 0:
            raise LedgerCorrupt(
                f"{self.path} is empty, so not a ledger; restore it, or delete it if it never was one"
            )
        version = self._query("PRAGMA user_version")[0][0]
        parts = set(self._query("SELECT type, name FROM sqlite_master"))
        if version != _FORMAT or _PARTS - parts:
            raise LedgerCorrupt(f"{self.path} is not a ledger of format {_FORMAT}")
        if foreign := sorted(parts - _PARTS):  # a trigger could swallow what is charged
            raise LedgerCorrupt(
                f"{self.path} holds the {foreign[0][0]} {foreign[0][1]!r}, which no ledger has: "
                "somebody has changed it"
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


@contextmanager
def _translated(path: Path, doing: str, hint: str) -> Iterator[None]:
    """SQLite's errors in the words of a ledger."""
    try:
        yield
    except sqlite3.OperationalError as error:  # disk, permissions, locks
        raise OSError(f"{path} can't be {doing}: {error}. {hint}") from error
    except sqlite3.DatabaseError as error:
        raise LedgerCorrupt(f"{path} can't be read as a ledger: {error}") from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
