"""Which private record is which: numbers from the owner, or from keyed digests of the records themselves."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Ids = NDArray[np.int64]
_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class RecordKey:
    """Recognises records by what they hold, whatever their place in the table.

    A digest is of one record alone, under a key that never leaves the private state: without the key it tells
    nothing of the record, not even to somebody who guesses it.

    Attributes:
        key: from the operating system's generator, 16 to 64 bytes; **private**.
    """

    key: bytes = dataclasses.field(repr=False)

    def digests(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Digests of records.

        Args:
            rows: images or features, one in each place of the first dimension.
            labels: int64, shape ``(n,)``.

        Returns:
            uint8, shape ``(n, 16)``. **Private**.
        """
        content = rows.detach().cpu().contiguous().numpy()
        kind = f"{content.dtype} {content.shape[1:]}".encode()
        found = bytearray()
        for row, label in zip(content, labels.tolist(), strict=True):
            head = kind + int(label).to_bytes(8, "little", signed=True)
            found += self._hash(head + row.tobytes(), _DIGEST_BYTES)
        return torch.frombuffer(found or bytearray(1), dtype=torch.uint8)[: len(found)].view(
            -1, _DIGEST_BYTES
        )

    def numbers(self, digests: Tensor) -> tuple[_Ids, _Ids]:
        """Numbers of records; equal records are counted, so each copy has one of its own.

        Args:
            digests: uint8, shape ``(n, 16)``.

        Returns:
            The records' numbers, int64, shape ``(n,)``, and those that one copy more of each different record
            would have. Both **private**.
        """
        copies: Counter[bytes] = Counter()
        numbers = []
        for digest in as_bytes(digests):
            numbers.append(self._number(digest, copies[digest]))
            copies[digest] += 1
        following = [self._number(digest, count) for digest, count in copies.items()]
        return np.array(numbers, np.int64), np.array(following, np.int64)

    def _number(self, digest: bytes, copy: int) -> int:
        return int.from_bytes(self._hash(digest + copy.to_bytes(8, "little"), 8), "little", signed=True)

    def _hash(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self.key, digest_size=size).digest()


def as_bytes(digests: Tensor) -> list[bytes]:
    """Each row of a uint8 tensor as bytes."""
    data, width = digests.contiguous().numpy().tobytes(), digests.shape[1]
    return [data[at : at + width] for at in range(0, len(data), width)]


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
