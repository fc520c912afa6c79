"""Files of private records, one a process: which of them is this process's own, and whether they can be right."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

_LOOKED_AT = 1 << 20  # bytes at each end of a file


def in_shards(source: Any) -> bool:
    """Whether ``source`` names a file for each process, as ``shards/features-{rank:05d}.npy``."""
    return isinstance(source, str | Path) and "{rank" in str(source)


def shard_file(name: str, source: str | Path, rank: int = 0) -> str:
    """The file of the process ``rank``.

    Args:
        name: of the argument, for messages.
        source: names files with ``{rank}``, or ``{rank:05d}`` for five digits.
        rank: global rank.

    Raises:
        ValueError: for a name that holds other things in braces.
    """
    try:
        return str(source).format(rank=rank)
    except (LookupError, ValueError):
        raise ValueError(
            f"{name}={str(source)!r}: want {{rank}} or {{rank:05d}} for the number of a process, and no other braces"
        ) from None


def own_shard(name: str, source: str | Path, rank: int, size: int, unlike: bool = True) -> str:
    """This process's file, once those of all processes that can be seen from here were looked at.

    Args:
        name: of the argument, for messages.
        source: see :func:`shard_file`.
        rank: global rank of this process.
        size: number of processes.
        unlike: whether no two files can be equal by right; labels may.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if there are more files than processes, or another process's file is the same.
    """
    own = _file(shard_file(name, source, rank))
    if not own.is_file():
        raise FileNotFoundError(f"{name}={str(own)!r}: there is no such shard, seen from {Path.cwd()}")
    if _file(further := shard_file(name, source, size)).exists():
        raise ValueError(
            f"{name}={further!r}: nobody would read this shard; start as many processes as there are shards"
        )
    for other in map(_file, (shard_file(name, source, number) for number in range(size) if number != rank)):
        if unlike and other.is_file() and (os.path.samefile(own, other) or _ends(own) == _ends(other)):
            raise ValueError(
                f"{name}={str(own)!r} is the same as {str(other)!r}; records must lie in one shard alone"
            )
    return shard_file(name, source, rank)


def _file(source: str) -> Path:
    """The file, without the member or column that is named in it."""
    for kind in (".parquet", ".npz"):
        file, colon, _ = source.rpartition(f"{kind}:")
        if colon:
            return Path(f"{file}{kind}")
    return Path(source)


def _ends(path: Path) -> tuple[int, bytes]:
    """Size of a file, and a digest of its first and last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_LOOKED_AT))
        file.seek(max(0, size - _LOOKED_AT))
        digest.update(file.read(_LOOKED_AT))
    return size, digest.digest()
