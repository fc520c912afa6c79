"""Base of files in SQLite's format: connection, transactions, facts, fork guard and errors."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

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
        """All that was noted, by name."""
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
        """Error of this file that replaces SQLite's."""
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
    """A new file under another name, which takes its own once all of it is on disk.

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
