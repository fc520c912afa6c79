"""A run's folder: one run at a time, found again after a copy, with the head of its ledger noted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from filelock import FileLock, Timeout

from pl_privknn._files import write_durably


class FolderInUse(RuntimeError):
    """Another run has the folder."""


class FolderLock:
    """Keeps other runs out of a folder until :meth:`release`, or the end of the process, however it comes.

    Args:
        folder: the run's folder, made if missing.
        shared: let one run of this process use the folder beside this lock: what a command takes before the
            run that it starts.

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
        self._lock = FileLock(self._folder / "run.lock", is_singleton=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise in_use from None
        self._held = True
        if self._is_run:
            self._runs.add(self._folder)

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._held:
            self._held = False
            if self._is_run:
                self._runs.discard(self._folder)
            self._lock.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_held", False):
            self.release()


class HeadFile:
    """Notes the head hash of a ledger in a file of its own, after every row.

    What it proves: as long as this file is not put back together with the ledger, an older copy of the ledger,
    a new one and one whose rows were rewritten are found out, since none of them holds the noted head. So keep
    it in another place than the ledger. One line, the hash; ``privknn audit LEDGER --head HASH`` checks the same.

    Args:
        path: the file, made with the first row.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def head(self) -> str | None:
        """The noted hash; None before the first."""
        return self.path.read_text(encoding="ascii").strip() if self.path.exists() else None

    def note(self, head: str) -> None:
        """Note a hash, durably."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, f"{head}\n".encode("ascii"))


def resumed_folder(stored: Path, checkpoint: str | Path | None, belongs: Callable[[Path], bool]) -> Path:
    """The folder in which a resumed run goes on: the one that its checkpoint lies in.

    A folder that was copied or moved goes on in itself, not in the one where the run began.

    Args:
        stored: the run's folder when the checkpoint was written.
        checkpoint: the checkpoint's file.
        belongs: whether a folder is one of this run.

    Raises:
        FileNotFoundError: if neither exists.
    """
    around = [] if checkpoint is None else Path(checkpoint).absolute().parents
    for folder in (*around, stored):
        if folder.is_dir() and belongs(folder):
            return folder
    raise FileNotFoundError(
        f"the checkpoint's run folder {stored} is missing; without its ledger ε would be wrong. Restore it, or pass "
        "run_dir with its new place"
    )


def private_folder(run_dir: Path) -> Path:
    """Where a run keeps what must survive a crash and must not be shared: beside the run's folder, not in it."""
    place = run_dir.resolve()
    return place.parent / f"{place.name}.private"
