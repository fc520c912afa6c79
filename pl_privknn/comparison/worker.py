"""One run in its folder, started or continued: ``python -m pl_privknn.comparison.worker FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from pl_privknn.privacy.run_folder import FolderInUse, FolderLock

#: What is asked for; written before the run's first start.
CONFIG = "run.yaml"
#: Exit status of a worker whose run another process is working at.
BUSY = 3


def work(folder: Path) -> int:
    """Run ``privknn fit`` in ``folder``, or continue what was begun there.

    Returns:
        The exit status; :data:`BUSY` where another process is at it.
    """
    try:
        with FolderLock(folder, shared=True):
            from pl_privknn.training_cli import run_training

            return run_training(words(folder))
    except FolderInUse:
        print(f"{folder}: another process is at this run; wait for its end, then start the comparison again")
        return BUSY


def words(folder: Path) -> list[str]:
    """What ``privknn`` is told: ``--resume`` for a run that may have paid for something, else a first start."""
    begun = any((folder / name).exists() for name in ("labels.sqlite", "ledger.sqlite", "checkpoints"))
    if begun and (folder / "config.yaml").is_file():
        return ["fit", "--resume", str(folder)]
    return ["fit", "--config", str(folder / CONFIG), "--run_dir", str(folder)]


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
