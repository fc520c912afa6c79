"""Keyed digests of private records: the same record is found again, and without the key nothing is told of it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter

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
            labels: int64, shape ``(n,)``, or ``(n, l)`` for several whole numbers a record.

        Returns:
            uint8, shape ``(n, 16)``. **Private**.
        """
        content = rows.detach().cpu().contiguous().numpy()
        kind = f"{content.dtype} {content.shape[1:]}".encode()
        found = bytearray()
        numbers = labels.cpu().numpy().astype("<i8")
        for row, label in zip(content, numbers, strict=True):
            found += self._hash(kind + label.tobytes() + row.tobytes(), _DIGEST_BYTES)
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
