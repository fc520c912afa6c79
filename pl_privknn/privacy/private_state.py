"""Private state of a run, for the owner of the data alone, and recognition of the table that a run began with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from pl_privknn.privacy.files import sync_folder
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.sqlite_file import FACTS, SQLiteFile, connected, replacing

#: Of the file in a run's private folder.
FILE_NAME = "private.sqlite"
_FORMAT = 1
_PUT_BACK = "put back an undamaged copy that is up to date"


class PrivateStoreError(RuntimeError):
    """Raised where the store is damaged, incomplete, an older or second copy, in use, or could not be written."""


class PrivateStore(SQLiteFile):
    """Tables of private state, and facts about them, for the owner of the data alone.

    *Durable*: what is changed within :meth:`writing` is changed as a whole or not at all, and is on disk when the
    block ends. *Private*: readable by the owner alone; what is deleted is overwritten. *One writer*: a lock file
    next to it is held while the store is open, and goes with the process; a forked child can't write. *One place*: a
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

    # The journal is emptied after each commit, which needs no sync of the folder.
    settings = ("journal_mode = TRUNCATE", "synchronous = EXTRA", "secure_delete = ON", "cache_size = -65536")

    def __init__(
        self, path: str | Path | None, schema: str = "", *, wait: float = 0, one_place: bool = True
    ) -> None:
        self._lock: FileLock | None = None
        if path is None:
            super().__init__(None)
            self._make(self._db, schema)
            self.name: str = self.fact("name")
            return
        path = Path(path).resolve()
        _make_private(path.parent)
        self._pid, self._lock = (
            os.getpid(),
            FileLock(f"{path}.lock", timeout=wait, thread_local=False, mode=0o600),
        )
        try:
            self._lock.acquire()
        except Timeout:
            raise PrivateStoreError(
                f"{path} is in use; close the process or object that has it open"
            ) from None
        try:
            if not path.exists():
                with _replacing(path) as fresh:
                    self._make(fresh, schema)
            super().__init__(path)
            self._check(path, one_place)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def copied_to(self, path: Path) -> Iterator[sqlite3.Connection]:
        """Context that writes an in-memory store, with the rows that the block adds, to a new file atomically."""
        _make_private(path.parent)
        with _replacing(path) as fresh:
            self._db.backup(fresh)
            yield fresh

    def close(self) -> None:
        """Close the file and let others open it; may be called again."""
        super().close()
        if os.getpid() == self._pid and self._lock is not None:  # a forked child would give back its parent's
            self._lock.release(force=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled: open its path where it is used")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # ------------------------------------------------------------------ inner work

    def _make(self, db: sqlite3.Connection, schema: str) -> None:
        db.executescript(f"BEGIN; {FACTS} {schema} PRAGMA user_version = {_FORMAT}; COMMIT;")
        db.execute("INSERT INTO facts VALUES ('name', ?)", (json.dumps(secrets.token_hex(8)),))

    def _check(self, path: Path, one_place: bool) -> None:
        healthy = self.read("PRAGMA quick_check(1)").fetchone() == ("ok",)
        if not healthy or self.read("PRAGMA user_version").fetchone() != (_FORMAT,):
            raise PrivateStoreError(f"{path} is damaged, or no private store; {_PUT_BACK}")
        self.name = self.fact("name")
        if not one_place:
            return
        place = Path(self.fact("place", str(path)))
        if place != path and place.is_file() and not place.samefile(path) and _name_of(place) == self.name:
            raise PrivateStoreError(
                f"{path.parent} is a copy of {place.parent}, and each would spend the same budgets; continue there, "
                "or delete that folder to continue here"
            )
        self.note("place", str(path))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PrivateStoreError(
                "this private store was opened by another process; only that one can use it"
            )

    def failure(self, error: sqlite3.DatabaseError) -> Exception:
        """Error with a remedy, in place of SQLite's error."""
        place = self.path or "the private store in memory"
        if isinstance(error, sqlite3.ProgrammingError):
            return PrivateStoreError(f"{place} is closed; open it again")
        if isinstance(error, sqlite3.OperationalError):  # disk, permissions, locks
            return PrivateStoreError(f"{place} can't be read or written: {error}")
        return PrivateStoreError(f"{place} is refused: {error}; {_PUT_BACK}")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with replacing(path, PrivateStore.settings, 0o600) as db:
            yield db
    except OSError as error:
        raise PrivateStoreError(f"{path} can't be written ({error.strerror}); name another place") from None


def _name_of(path: Path) -> str | None:
    try:
        with contextlib.closing(connected(path, (), "ro")) as db:
            found = db.execute("SELECT value FROM facts WHERE name = 'name'").fetchone()
            return None if found is None else str(json.loads(found[0]))
    except sqlite3.DatabaseError:
        raise PrivateStoreError(
            f"{path} is damaged, and may be the original of a copy; {_PUT_BACK}"
        ) from None


def _make_private(folder: Path) -> None:
    """Create a folder and its parents, readable by the owner alone; on disk when this returns."""
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


_KEY_BYTES = 32


def table_digest(blocks: Iterable[Tensor], key: bytes = b"") -> str:
    """Digest of the values of a table in their order, independent of the division into blocks.

    Args:
        blocks: tensors of any shape and dtype.
        key: a secret without which the digest reveals nothing of the table, not even to somebody who guesses it;
            up to 64 bytes. Left out for public tables.
    """
    found = hashlib.blake2b(key=key, digest_size=32)
    for block in blocks:
        found.update(block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def same_table(store: SQLiteFile, name: str, blocks: Iterable[Tensor], begun: bool) -> bool:
    """Store a digest of the table before the first charge; afterwards compare the table with the digest.

    Args:
        store: private state of the run, which keeps a digest under a random key.
        name: of the table among the facts of the store.
        blocks: the table; see :func:`table_digest`. **Private**.
        begun: whether something was paid for the noted table, so that it can't change any more.

    Returns:
        False where the run began with another table, or with none.
    """
    noted = store.fact(name)
    if begun:
        return noted is not None and secrets.compare_digest(
            noted["digest"], table_digest(blocks, bytes.fromhex(noted["key"]))
        )
    key = secrets.token_bytes(_KEY_BYTES)
    store.note(name, {"key": key.hex(), "digest": table_digest(blocks, key)})
    return True


def check_same_in_processes(agree: Callable[[bytes], bool], blocks: Iterable[Tensor]) -> None:
    """Refuse processes of one training that hold different tables, where each is to read a share of one.

    Args:
        agree: whether all processes give the same bytes; here a digest, as private as the table.
        blocks: the table, or what identifies it.

    Raises:
        ValueError: where they differ, in every process.
    """
    if not agree(bytes.fromhex(redacted(table_digest, blocks))):
        raise ValueError(
            "private set: the processes of this training hold different records, or in another order, so that some "
            "would be read by several; seed what splits or shuffles them, or give each process its own file"
        )
