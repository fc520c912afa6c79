"""Files in SQLite's format: base, and the file of sealed ledger rows and of a run's tables."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from pl_privknn.privacy.files import sync_folder

#: How an SQLite file begins.
SQLITE_MAGIC = b"SQLite format 3\x00"
#: SQL of the table of facts.
FACTS = "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;"
_BUSY_SECONDS = 600.0
# A connection must not be used, nor closed, in a process forked from the one that opened it: closing could
# roll back a transaction of the parent. Forked processes park it here and open their own.
_INHERITED: list[sqlite3.Connection] = []


class SQLiteFile:
    """One SQLite file with a rollback journal, so that between commits everything is in the one file.

    A subclass says by :meth:`failure` what SQLite's errors mean for its file, and by :attr:`settings` how a
    connection is set up.

    Args:
        path: the file, which must exist, or None for memory.
        readonly: open for reading only; the folder may be read-only too.

    Attributes:
        path: the file.
        readonly: whether it is open for reading only.
    """

    #: SQLite's settings of a connection that writes; EXTRA syncs file, journal and the journal's folder.
    settings: ClassVar[tuple[str, ...]] = ("synchronous = EXTRA",)

    def __init__(self, path: Path | None, readonly: bool = False) -> None:
        self.path, self.readonly = path, readonly
        self._connect()

    def read(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run a query."""
        self._check_process()
        with self._turn, self._translated():
            try:
                return self._db.execute(statement, values)
            except sqlite3.OperationalError:
                if not self.readonly or not Path(f"{self.path}-journal").exists():
                    raise
                # A killed writer left a journal: SQLite undoes the unfinished transaction, which takes write access.
                self._db.close()
                self._connect("rw")
                return self._db.execute(statement, values)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, durable when the block ends; within another one, a part of it."""
        self._check_process()
        with self._turn, self._translated():
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # some failures have rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def facts(self) -> dict[str, Any]:
        """All noted facts, by name."""
        return {name: json.loads(value) for name, value in self.read("SELECT name, value FROM facts")}

    def fact(self, name: str, otherwise: Any = None) -> Any:
        """Fact that was noted under a name."""
        found = self.read("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return otherwise if found is None else json.loads(found[0])

    def note(self, name: str, value: Any) -> None:
        """Note a JSON value under a name, durably; write nothing where it is noted already."""
        if self.fact(name) != value:
            with self.writing() as db:
                db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def close(self) -> None:
        """Close the file; may be called again."""
        if os.getpid() == self._pid and hasattr(self, "_db"):
            self._db.close()

    def failure(self, error: sqlite3.DatabaseError) -> Exception:
        """Error with a remedy, in place of SQLite's error."""
        raise NotImplementedError

    # ------------------------------------------------------------------ inner work

    def _connect(self, mode: str | None = None) -> None:
        self._pid, self._turn = os.getpid(), threading.RLock()
        with self._translated():
            mode = mode or ("ro" if self.readonly else "rw")
            settings = ("query_only = ON",) if self.readonly else self.settings
            self._db = connected(self.path, settings, mode)

    def _check_process(self) -> None:
        """Open a new connection in a forked process."""
        if self._pid != os.getpid():
            _INHERITED.append(self._db)
            self._connect()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise self.failure(error) from None


def connected(path: Path | None, settings: tuple[str, ...], mode: str) -> sqlite3.Connection:
    """Connection to a file, or to memory, with some of SQLite's settings.

    Args:
        path: the file; None for memory.
        settings: ``NAME = VALUE``.
        mode: SQLite's: ``"ro"``, ``"rw"`` or ``"rwc"``.
    """
    place = ":memory:" if path is None else f"{path.absolute().as_uri()}?mode={mode}"
    db = sqlite3.connect(
        place, uri=path is not None, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False
    )
    try:
        for setting in settings:
            db.execute(f"PRAGMA {setting}")
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def replacing(path: Path, settings: tuple[str, ...], mode: int = 0o666) -> Iterator[sqlite3.Connection]:
    """Context with a new database that replaces ``path`` once all of it is on disk.

    Args:
        path: the file.
        settings: of the connection.
        mode: permissions of the file.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    with contextlib.closing(connected(fresh, settings, "rw")) as db:
        yield db
    Path(f"{fresh}-journal").unlink(missing_ok=True)
    fresh.replace(path)
    sync_folder(path.parent)


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
        """Context without open transactions of other threads, in which rows are read and applied."""
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
        """Error of a ledger with a remedy, in place of SQLite's error."""
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
