"""The smallest entries of long rows, compiled: little beside the matrix product before it.

Candidates travel as whole numbers that hold a float32 key in their upper and a record's index in their lower half
and sort like ``(key, index)``. One array is then sorted, merged and cut without looking anything up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from pl_privknn._compiled import compiled

# Above every packed candidate.
_LAST = np.iinfo(np.int64).max
_ROWS_AT_A_TIME = 64


class Smallest:
    """The ``count`` smallest entries of each of many rows, whose columns come block by block.

    Entries are collected, and cut to the smallest ones whenever there are twice as many; from then on the largest of
    these is a bound that further ones must beat. So a block is looked at once, while it is in the processor's cache.

    Args:
        rows: how many.
        count: how many entries of each; at most as many as there will be columns.
        width: columns that are looked at between two cuts.
    """

    def __init__(self, rows: int, count: int, width: int) -> None:
        self._count, self._width = count, width
        self._packed = np.full((rows, 2 * count + width), _LAST, dtype=np.int64)
        self._filled = np.zeros(rows, dtype=np.int64)
        self._bounds = np.full(rows, np.inf, dtype=np.float32)

    def add(self, keys: NDArray[np.float32], first: int = 0) -> None:
        """Look at further columns.

        Args:
            keys: shape ``(rows, n)``, finite; not changed.
            first: index of the first column, above those that were looked at.
        """
        for start in range(0, keys.shape[1], self._width):
            self._add(keys[:, start : start + self._width], first + start)

    def _add(self, keys: NDArray[np.float32], first: int) -> None:
        def work(start: int, stop: int) -> None:
            packed, filled = self._packed[start:stop], self._filled[start:stop]
            _let_through(keys[start:stop], self._bounds[start:stop], first, packed, filled)
            full = np.flatnonzero(filled > 2 * self._count)
            if len(full):
                cut = packed[full, : filled.max()]
                cut.partition(self._count - 1, axis=1)
                self._bounds[start + full] = unpack(cut[:, self._count - 1])[0]
                cut[:, self._count :] = _LAST
                packed[full, : cut.shape[1]] = cut
                filled[full] = self._count

        in_threads(work, len(keys), _ROWS_AT_A_TIME)

    def packed(self) -> NDArray[np.int64]:
        """The smallest entries, ascending, ties by column; shape ``(rows, count)``, see :func:`unpack`."""
        chosen = np.empty((len(self._packed), self._count), dtype=np.int64)

        def work(start: int, stop: int) -> None:
            part = self._packed[start:stop, : self._filled[start:stop].max()]
            part.sort(axis=1)
            chosen[start:stop] = part[:, : self._count]

        in_threads(work, len(chosen), _ROWS_AT_A_TIME)
        return chosen


def merge(left: NDArray[np.int64], right: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The ``count`` smallest of two sets of packed candidates, ascending; fewer if there are no more."""
    both = np.concatenate([left, right], axis=1)
    in_threads(lambda start, stop: both[start:stop].sort(axis=1), len(both), _ROWS_AT_A_TIME)
    return np.ascontiguousarray(both[:, :count])


def pack(keys: NDArray[np.float32], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack keys with indices below 2**31, element by element."""
    bits = np.ascontiguousarray(keys).view(np.int32)
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    return (ordered.astype(np.int64) << 32) | indices


def unpack(packed: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Keys and indices of packed candidates."""
    ordered = (packed >> 32).astype(np.int32)
    bits = ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))
    return bits.view(np.float32), (packed & 0x7FFFFFFF).astype(np.int32)


@compiled()
def _let_through(keys, bounds, first, packed, filled):  # type: ignore[no-untyped-def]
    """Append the entries below each row's bound: of equal ones, those with the lower columns came earlier."""
    columns = keys.shape[1]
    bits = keys.view(np.int32)
    found = np.empty(columns + 1, dtype=np.int32)
    for row in range(keys.shape[0]):
        bound, total = bounds[row], 0
        for column in range(columns):  # without a branch: which entries pass can't be predicted
            found[total] = column
            total += keys[row, column] < bound
        place = filled[row]
        for i in range(total):
            value = bits[row, found[i]]
            ordered = value ^ ((value >> 31) & np.int32(0x7FFFFFFF))
            packed[row, place + i] = (np.int64(ordered) << 32) | (found[i] + first)
        filled[row] = place + total


def in_threads(work: Callable[[int, int], None], total: int, step: int) -> None:
    """Run ``work(start, stop)`` over ``range(total)`` on as many threads as torch uses.

    Threads of our own: torch's parallel regions wait for every thread at their ends.
    """
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    threads = min(torch.get_num_threads(), len(spans))
    if threads <= 1:
        for start, stop in spans:
            work(start, stop)
        return
    left = iter(spans)

    def pull() -> None:
        for start, stop in left:
            work(start, stop)

    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(pull) for _ in range(threads - 1)]
        pull()
        for other in others:
            other.result()
