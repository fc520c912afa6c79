"""Folders of runs and their locks, durable writing of files, and the digest of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from numpy.typing import NDArray


from collections.abc import Callable, Mapping
from typing import ClassVar

from filelock import FileLock, Timeout

#: Ledger of a paid evaluation on held-out records, in the folder of its run.
HOLDOUT_LEDGER = "holdout.sqlite"
#: Standard error of a share of held-out records above which it says nothing.
MOST_ERROR = 0.25


@contextlib.contextmanager
def replaced_durably(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically and durably: after a crash either the old or the new content is on disk.

    An exception in the block leaves the old file.

    Args:
        path: the file; its folder must exist.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes | str) -> None:
    """Replace a file by bytes, or by text in UTF-8; see :func:`replaced_durably`."""
    with replaced_durably(path) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by JSON; see :func:`replaced_durably`.

    Of numbers that JSON does not have, NaN is written as null, and infinite ones as the texts ``inf`` and ``-inf``.
    """
    names = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}
    strict = json.loads(json.dumps(content), parse_constant=names.__getitem__)
    write_durably(path, json.dumps(strict, indent=2, ensure_ascii=False) + "\n")


def sync(descriptor: int) -> None:
    """Force a file's content to disk."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync alone leaves the data in the drive's cache there
    else:
        flush: Any = getattr(os, "fdatasync", os.fsync)
        flush(descriptor)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    if os.name != "posix":  # elsewhere folders can't be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def read_numbers(name: str, path: str | Path) -> NDArray[Any]:
    """Map the array of a ``.npy`` file into memory, to be read alone.

    Raises:
        ValueError: for a file that can't be read, by the argument that names it.
        FileNotFoundError: if there is none.
    """
    from numpy.lib import format as numpy_files

    if not Path(path).is_file():
        raise FileNotFoundError(f"{name}={str(path)!r}: there is no such file")
    try:
        return numpy_files.open_memmap(path, mode="r")
    except Exception:  # of a damaged header numpy raises whatever its tokenizer does
        raise ValueError(
            f"{name}={str(path)!r} can't be read as an array; write it with numpy.save, numbers alone"
        ) from None


#: Name of the file in a run's folder that keeps a second run out.
LOCK = "run.lock"


class FolderInUse(RuntimeError):
    """Raised where another run holds the folder."""


class FolderLock:
    """Exclusive lock on a folder until :meth:`release`, or the end of the process, however it ends.

    Args:
        folder: the run's folder, made if missing.
        shared: let one run of this process use the locked folder too; for a command that starts a run.

    Raises:
        FolderInUse: if a run, of this or of another process, has the folder.
    """

    _runs: ClassVar[set[Path]] = set()

    def __init__(self, folder: Path, shared: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self._is_run = not shared
        in_use = FolderInUse(
            f"run_dir={str(folder)!r} is in use by another run; wait for its end, or choose another folder"
        )
        if self._is_run and self._folder in self._runs:
            raise in_use
        # One object for all locks of this process on the folder, which counts.
        self._lock = FileLock(self._folder / LOCK, is_singleton=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise in_use from None
        self._held = True
        if self._is_run:
            self._runs.add(self._folder)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._held:
            self._held = False
            if self._is_run:
                self._runs.discard(self._folder)
            self._lock.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_held", False):
            self.release()


def resumed_folder(
    state: Mapping[str, Any], checkpoint: str | Path | None, run_id_in: Callable[[Path], str | None]
) -> Path:
    """Folder in which a resumed run continues: the one that holds its checkpoint.

    A folder that was copied or moved goes on in itself, not in the one where the run began.

    Args:
        state: ``run_id`` and ``run_dir`` when the checkpoint was written.
        checkpoint: the checkpoint's file.
        run_id_in: id of the run whose folder it is; None where it is no run's.

    Raises:
        FileNotFoundError: if neither exists.
    """
    stored = Path(state["run_dir"])
    around = [] if checkpoint is None else Path(checkpoint).absolute().parents
    for folder in (*around, stored):
        if folder.is_dir() and run_id_in(folder) == state["run_id"]:
            return folder
    raise FileNotFoundError(
        f"the checkpoint's run folder {stored} is missing; without its ledger ε would be wrong. Restore it, or pass "
        "run_dir with its new place"
    )


def new_number(folder: Path) -> Path:
    """Create a subfolder that is named by the first free number."""
    number = 0
    while True:
        new = folder / str(number)
        try:
            new.mkdir(parents=True)
            return new
        except FileExistsError:
            number += 1


def trainers_folder(trainer: Any, place: str | Path, name: str) -> Path:
    """Folder of a new run: the folder of the first logger's run, else a new one, ``NAME/NUMBER``.

    The new one lies in ``runs``, or in the trainer's root folder, for loggers that have no folder for each run, such
    as W&B's, and for a trainer without loggers and root folder: a second run would not be let into the same folder.

    Args:
        trainer: has ``loggers``.
        place: its ``log_dir or default_root_dir``.
        name: of the model.
    """
    first = next(iter(trainer.loggers), None)
    root, here = Path(trainer.default_root_dir), Path.cwd().resolve()
    if getattr(first, "log_dir", None) is not None or (first is None and root.resolve() != here):
        return Path(place)
    return new_number((Path("runs") if root.resolve() == here else root) / name)


def private_folder(run_dir: Path) -> Path:
    """Folder of a run's private state, which survives a crash and is not to be shared: next to the run's folder."""
    place = run_dir.resolve()
    return place.parent / f"{place.name}.private"
