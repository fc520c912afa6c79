"""Append-only rows in SQLite, each sealed by a hash over itself and the row before."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

_FORMAT = 1
_SCHEMA = f"""
CREATE TABLE rows (
    position INTEGER PRIMARY KEY,
    body     TEXT NOT NULL,
    hash     TEXT NOT NULL
);
CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), position INTEGER NOT NULL, hash TEXT NOT NULL);
CREATE TRIGGER rows_are_final BEFORE UPDATE ON rows
    BEGIN SELECT RAISE(ABORT, 'rows of a ledger are never changed'); END;
CREATE TRIGGER rows_stay BEFORE DELETE ON rows
    BEGIN SELECT RAISE(ABORT, 'rows of a ledger are never deleted'); END;
PRAGMA user_version = {_FORMAT};
"""
_GENESIS = "0" * 64
_BUSY_SECONDS = 600.0
SQLITE_MAGIC = b"SQLite format 3\x00"


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

    A change, deletion or reordering of rows breaks the chain; a cut of the last rows alone disagrees with
    the head that the file keeps apart. Somebody who rewrites rows, all later hashes and the head can't be
    found out from the file alone: note the head hash elsewhere and compare.

    Args:
        path: the file.
        readonly: open for reading only; the folder may be read-only too.

    Raises:
        LedgerCorrupt: if the file is not a ledger of this format.
        FileNotFoundError: if ``readonly`` and there is no file.
    """

    def __init__(self, path: str | Path, readonly: bool = False) -> None:
        self.path = Path(path)
        self.readonly = readonly
        if readonly and not self.path.is_file():
            raise FileNotFoundError(f"there is no ledger at {self.path}")
        if not readonly:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(str(self.path) + ".lock")
        mode = "ro" if readonly else "rwc"
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        self._db = sqlite3.connect(
            uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False
        )
        try:
            if not readonly:
                # A rollback journal, so that readers need no write access; EXTRA also syncs the folder.
                self._db.execute("PRAGMA synchronous=EXTRA")
                with self._lock:
                    self._create()
            self._check_format()
        except sqlite3.DatabaseError as error:
            raise LedgerCorrupt(f"{self.path} can't be read as a ledger: {error}") from error

    def _create(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and tables == 0:
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO head VALUES (1, 0, '{_GENESIS}'); COMMIT;"
            )

    def _check_format(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        names = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version != _FORMAT or not {"rows", "head"} <= names:
            raise LedgerCorrupt(f"{self.path} is not a ledger of format {_FORMAT}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file lock and one transaction, so that a check and the append after it are one step."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def append(self, body: dict[str, Any]) -> int:
        """Add a row within :meth:`writing`; it is durable when that block ends. Returns its position."""
        position, previous = self.head()
        text = canonical(body)
        sealed = seal(previous, text)
        self._db.execute("INSERT INTO rows VALUES (?, ?, ?)", (position + 1, text, sealed))
        self._db.execute("UPDATE head SET position = ?, hash = ? WHERE only = 1", (position + 1, sealed))
        return position + 1

    def head(self) -> tuple[int, str]:
        """Position and hash of the last row."""
        try:
            row = self._db.execute("SELECT position, hash FROM head WHERE only = 1").fetchone()
        except sqlite3.DatabaseError as error:
            raise LedgerCorrupt(f"{self.path} can't be read as a ledger: {error}") from error
        if row is None:
            raise LedgerCorrupt(f"{self.path}: its head is missing")
        return int(row[0]), str(row[1])

    def read_after(self, position: int, previous: str | None) -> tuple[list[dict[str, Any]], int, str]:
        """Verified rows after ``position``, whose hash is ``previous``.

        Returns:
            the rows' bodies, each with its ``position`` and ``hash``, then the position and hash of the last.

        Raises:
            LedgerCorrupt: at the first row that does not fit, or if the head disagrees with the rows.
        """
        sealed = _GENESIS if previous is None else previous
        bodies: list[dict[str, Any]] = []
        try:
            # One statement sees one state of the file, even while another process appends.
            found = self._db.execute(
                "SELECT rows.position, body, rows.hash, head.position, head.hash FROM head "
                "LEFT JOIN rows ON rows.position > ? ORDER BY rows.position",
                (position,),
            ).fetchall()
        except sqlite3.DatabaseError as error:
            raise LedgerCorrupt(f"{self.path} can't be read as a ledger: {error}") from error
        if not found:
            raise LedgerCorrupt(f"{self.path}: its head is missing")
        head = (int(found[0][3]), str(found[0][4]))
        for place, text, stored, *_ in found:
            if place is None:
                continue
            if place != position + 1:
                raise LedgerCorrupt(f"{self.path}: row {position + 1} is missing")
            sealed = seal(sealed, str(text))
            if sealed != stored:
                raise LedgerCorrupt(f"{self.path}: row {place} was changed, or a row before it taken out")
            position = place
            bodies.append({**json.loads(text), "position": place, "hash": sealed})
        if head != (position, sealed):
            raise LedgerCorrupt(
                f"{self.path}: its head is row {head[0]}, the rows end at {position}: cut off, or added later"
            )
        return bodies, position, sealed

    def close(self) -> None:
        """Close the file."""
        self._db.close()
