"""Which private record is which: numbers from the owner, and whether a record has come under another one."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Ids = NDArray[np.int64]


def changed_numbers(known: Mapping[int, bytes], now: Mapping[int, bytes]) -> bool:
    """Whether a record comes under another number than before.

    That is so where a digest that is known comes under a number that never had it, while a number that had it
    has lost it. Where all have kept it, the newcomer is an equal record.

    Args:
        known: digests of numbers, as they were.
        now: digests of the numbers in the table.
    """
    owners: dict[bytes, set[int]] = {}
    for number, digest in known.items():
        owners.setdefault(digest, set()).add(number)
    return any(
        number not in owners.get(digest, {number})
        and any(now.get(owner) != digest for owner in owners[digest])
        for number, digest in now.items()
    )


def read_ids(ids: Any, count: int) -> _Ids:
    """Numbers that the owner gave, as an array or a ``.npy`` file.

    Args:
        ids: the array, or the file's path.
        count: number of records.

    Raises:
        ValueError: unless there is one whole number for each record, and each once.
        FileNotFoundError: if there is no such file.
    """
    given = _from_file(Path(ids)) if isinstance(ids, str | Path) else np.asarray(ids)
    whole = given.dtype.kind in "iu" and np.can_cast(given.dtype, np.int64)
    if given.shape != (count,) or not whole or len(np.unique(given)) != count:
        raise ValueError(
            f"ids: shape and numbers must be those of the records, one whole number for each ({given.dtype} given), "
            "and no number twice"
        )
    return given.astype(np.int64)


def _from_file(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"ids={str(path)!r}: there is no such file")
    try:
        given = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        given = None
    if not isinstance(given, np.ndarray):
        raise ValueError(
            f"ids={str(path)!r} can't be read as an array; write it with numpy.save, numbers alone"
        )
    return given
