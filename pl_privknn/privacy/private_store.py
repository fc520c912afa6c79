"""Private state of a run, for the owner of the data alone: one SQLite file with one writer."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from pl_privknn.privacy.files import sync_folder
from pl_privknn.privacy.store import transaction

#: Of the file in a run's private folder.
FILE_NAME = "private.sqlite"
_FORMAT = 1
_FACTS = "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
_PUT_BACK = "put back an undamaged copy that is up to date"


class PrivateStoreError(RuntimeError):
    """The store is damaged, incomplete, an older or second copy, in use, or could not be written."""


class PrivateStore:
    """Tables of private state, and facts about them, for the owner of the data alone.

    *Durable*: what is changed within :meth:`writing` is changed as a whole or not at all, and is on disk when the
    block ends. *Private*: readable by the owner alone; what is deleted is overwritten. *One writer*: a lock file
    beside it is held while the store is open, and goes with the process; a forked child can't write. *One place*: a
    copy is refused while the original is where it was, for state that only counts down.

    Args:
        path: the file, made if missing together with its folders; None keeps everything in memory.
        schema: SQL that makes the tables of a new store.
        wait: seconds to wait for another process that has it open.
        one_place: whether a copy is refused.

    Attributes:
        path: of the file, resolved, or None.
        name: drawn when the store was made, and public; copies share it.

    Raises:
        PrivateStoreError: for a file that is damaged, in use, or a second copy.
    """

    def __init__(
        self, path: str | Path | None, schema: str = "", *, wait: float = 0, one_place: bool = True
    ) -> None:
        self.path = None if path is None else Path(path).resolve()
        self._pid, self._turn = os.getpid(), threading.RLock()
        self._lock: FileLock | None = None
        if self.path is None:
            self._db = _connected(":memory:")
            self._make(self._db, schema)
            self.name: str = self.fact("name")
            return
        _make_private(self.path.parent)
        self._lock = FileLock(f"{self.path}.lock", timeout=wait, thread_local=False, mode=0o600)
        try:
            self._lock.acquire()
        except Timeout:
            raise PrivateStoreError(
                f"{self.path} is in use; close the process or object that has it open"
            ) from None
        try:
            if not self.path.exists():
                with _replacing(self.path) as fresh:
                    self._make(fresh, schema)
            self._open(self.path, one_place)
        except BaseException:
            self.close()
            raise

    def facts(self) -> dict[str, Any]:
        """All that was noted, by name."""
        return {name: json.loads(value) for name, value in self.read("SELECT name, value FROM facts")}

    def fact(self, name: str, otherwise: Any = None) -> Any:
        """Fact that was noted under a name."""
        found = self.read("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return otherwise if found is None else json.loads(found[0])

    def note(self, name: str, value: Any) -> None:
        """Note a JSON value under a name; nothing is written where it stands there already."""
        if self.fact(name) != value:
            with self.writing() as db:
                db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def read(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run a query.

        Raises:
            PrivateStoreError: if the store is closed, or was opened by another process.
        """
        self._check_usable()
        with self._translated():
            return self._db.execute(statement, values)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; within another one, a part of it.

        Raises:
            PrivateStoreError: also if it can't be written; nothing was changed then.
        """
        self._check_usable()
        with self._turn, self._translated():
            if self._db.in_transaction:
                yield self._db
                return
            with transaction(self._db):
                yield self._db

    @contextlib.contextmanager
    def copied_to(self, path: Path) -> Iterator[sqlite3.Connection]:
        """Write a store in memory into a new file, with what the block adds; a crash leaves all of it or nothing."""
        _make_private(path.parent)
        with _replacing(path) as fresh:
            self._db.backup(fresh)
            yield fresh

    def close(self) -> None:
        """Close the file and let others open it; may be called again."""
        if os.getpid() != self._pid:  # a forked child would give back its parent's lock
            return
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            self._lock.release(force=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled: open its path where it is used")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # ------------------------------------------------------------------ inner work

    def _make(self, db: sqlite3.Connection, schema: str) -> None:
        db.executescript(f"BEGIN; {_FACTS} {schema} PRAGMA user_version = {_FORMAT}; COMMIT;")
        db.execute("INSERT INTO facts VALUES ('name', ?)", (json.dumps(secrets.token_hex(8)),))

    def _open(self, path: Path, one_place: bool) -> None:
        with self._translated():
            self._db = _connected(str(path))
            healthy = self._db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
            if not healthy or self._db.execute("PRAGMA user_version").fetchone() != (_FORMAT,):
                raise PrivateStoreError(f"{path} is damaged, or no private store; {_PUT_BACK}")
        self.name = self.fact("name")
        if not one_place:
            return
        place = Path(self.fact("place", str(path)))
        if place != path and place.is_file() and not place.samefile(path) and _name_of(place) == self.name:
            raise PrivateStoreError(
                f"{path.parent} is a copy of {place.parent}, and each would spend the same budgets; go on there, or "
                "delete that folder to go on here"
            )
        self.note("place", str(path))

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise PrivateStoreError(
                "this private store was opened by another process; only that one can use it"
            )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """SQLite's errors with what to do."""
        place = self.path or "the private store in memory"
        try:
            yield
        except sqlite3.ProgrammingError:
            raise PrivateStoreError(f"{place} is closed; open it again") from None
        except sqlite3.OperationalError as error:  # disk, permissions, locks
            raise PrivateStoreError(f"{place} can't be read or written: {error}") from None
        except sqlite3.DatabaseError as error:
            raise PrivateStoreError(f"{place} is refused: {error}; {_PUT_BACK}") from None


def _connected(place: str) -> sqlite3.Connection:
    db = sqlite3.connect(place, isolation_level=None, check_same_thread=False)
    # A rollback journal: between commits everything is in the one file. It is emptied after each, which the folder
    # need not be told; EXTRA syncs file and journal.
    for setting in (
        "journal_mode = TRUNCATE",
        "synchronous = EXTRA",
        "secure_delete = ON",
        "cache_size = -65536",
    ):
        db.execute(f"PRAGMA {setting}")
    return db


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[sqlite3.Connection]:
    """A new file under another name, which takes its own once all of it is on disk."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(_connected(str(fresh))) as db:
            yield db
        Path(f"{fresh}-journal").unlink(missing_ok=True)
        os.replace(fresh, path)
        sync_folder(path.parent)
    except OSError as error:
        raise PrivateStoreError(f"{path} can't be written ({error.strerror}); name another place") from None


def _name_of(path: Path) -> str | None:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            found = db.execute("SELECT value FROM facts WHERE name = 'name'").fetchone()
            return None if found is None else str(json.loads(found[0]))
    except sqlite3.DatabaseError:
        raise PrivateStoreError(
            f"{path} is damaged, and may be the original of a copy; {_PUT_BACK}"
        ) from None


def _make_private(folder: Path) -> None:
    """Make a folder, and those above it, for the owner alone; on disk when this returns."""
    if folder.is_dir():
        return
    _make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PrivateStoreError(
            f"{folder}, where private state is to be kept, can't be made ({error.strerror}); name another place"
        ) from None
    sync_folder(folder.parent)
