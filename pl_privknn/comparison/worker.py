"""One run in its folder, started or continued."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pl_privknn.privacy.store import FolderInUse, FolderLock

#: What is asked for; written before the run's first start.
CONFIG = "run.yaml"
#: Exit status of a worker whose run another process is working at.
BUSY = 3
#: Exit status of a command that was stopped by Ctrl-C, as shells count it.
INTERRUPTED = 130

#: Does what ``privknn`` does for these words, and returns its exit status.
Command = Callable[[list[str]], int]


def work(folder: Path, command: Command) -> int:
    """Run ``privknn fit`` in ``folder``, or continue what was begun there.

    Returns:
        The exit status; :data:`BUSY` where another process is at it.
    """
    try:
        with FolderLock(folder, shared=True):
            return command(words(folder))
    except FolderInUse:
        print(f"{folder}: another process is at this run; wait for its end, then start the comparison again")
        return BUSY


def words(folder: Path) -> list[str]:
    """What ``privknn`` is told: ``--resume`` for a run that may have paid for something, else a first start."""
    begun = any((folder / name).exists() for name in ("labels.sqlite", "ledger.sqlite", "checkpoints"))
    if begun and (folder / "config.yaml").is_file():
        return ["fit", "--resume", str(folder)]
    return ["fit", "--config", str(folder / CONFIG), "--run_dir", str(folder)]
