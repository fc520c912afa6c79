"""Where the table of private features is held: in memory, or in a file that nobody else can open."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_path, check_positive
from pl_privknn.argument_groups import ArgumentGroup

_BYTES = 4  # of a float32


@dataclasses.dataclass(frozen=True)
class TableMemory(ArgumentGroup):
    """How large a table of private features may get in memory; a larger one is mapped from a file.

    The file lies in a folder of its own that its owner alone can enter (mode 0700), and has no name any more from the
    moment it is open, nor has the folder: when the process ends, in whatever way, the system takes its space back.
    What was written may stay on the disk's free blocks, as with every deleted file; where that matters, use an
    encrypted disk.

    Teachers that read records block by block (``ReverseKNN``) hold no table, whatever is set here.

    Args:
        limit_gb: gigabytes (10⁹ bytes) up to which a table is held in memory. None: always in memory.
        scratch: the folder in which the private folder is made; on a disk, not on a file system in memory. None:
            where the run keeps what is private, beside the run's own folder.

    Raises:
        ValueError: for a limit that is not above 0.

    Example:
        >>> from pl_privknn.callbacks.table_memory import TableMemory
        >>> TableMemory(limit_gb=4.0).limit_gb
        4.0
    """

    limit_gb: float | None = None
    scratch: str | Path | None = None

    def __post_init__(self) -> None:
        if self.limit_gb is not None:
            check_positive("limit_gb", self.limit_gb)
            if os.name != "posix":
                raise ValueError(
                    f"limit_gb={self.limit_gb!r} needs a system where an open file can lose its name (Linux, macOS); "
                    "leave it out"
                )
        if self.scratch is not None:  # checkpoints hold plain types alone
            object.__setattr__(self, "scratch", check_path("scratch", self.scratch))

    def table(self, rows: int, columns: int, folder: Path) -> Tensor:
        """Room for a table, float32 ``(rows, columns)``.

        Args:
            rows: number of records. **Private**.
            columns: number of features.
            folder: for :attr:`scratch` of None.

        Raises:
            OSError: where the folder can't be written to, or its disk has too little room.
        """
        size = rows * columns * _BYTES
        if self.limit_gb is None or size <= self.limit_gb * 1e9:
            return torch.empty(rows, columns, dtype=torch.float32)
        place = folder if self.scratch is None else Path(self.scratch)
        made = _missing(place)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(place).free < size:
            raise OSError(
                f"memory.scratch={str(place)!r}: its disk has too little room for the table of private features; "
                "name a folder on a larger disk, or raise memory.limit_gb"
            )
        private = tempfile.mkdtemp(prefix="privknn-", dir=place)  # mode 0700
        try:
            return torch.from_numpy(_mapped(Path(private) / "table", (rows, columns)))
        finally:
            os.rmdir(private)
            with contextlib.suppress(OSError):  # not empty: others were faster
                for parent in made:
                    parent.rmdir()


def _missing(folder: Path) -> list[Path]:
    """Folders that are to be made for this one, the innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


def _mapped(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """A writable array in a file that only its owner could read, and that has no name any more."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
        try:
            if hasattr(os, "posix_fallocate"):  # room is taken now: a full disk later would end the process
                os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1] * _BYTES)
            array = np.memmap(file, dtype=np.float32, mode="r+", shape=shape)
        finally:
            path.unlink()
    return array
