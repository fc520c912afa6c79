"""The smallest entries of long rows and their exact order, compiled: little beside the matrix product before it.

Candidates travel as whole numbers that hold a float32 key in their upper and a record's index in their lower half
and sort like ``(key, index)``. One array is then sorted, merged and cut without looking anything up.

The matrix product that finds candidates rounds, and how it rounds depends on where a record lies in the table. A
ranking taken from it could change for *other* records when one record is removed, and the votes would then depend
on that record by more than its own one. So whatever is closer together than the product's error is compared again
in float64, by a distance that is a function of its query and its record alone; equal ones go by index.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pl_privknn._compiled import compiled

Floats = NDArray[np.float32]

# Above every packed candidate.
_LAST = np.iinfo(np.int64).max
_ROWS_AT_A_TIME = 64
_PAIRS_AT_A_TIME = 4096
# What is known of each candidate takes some 30 bytes while they are put in order.
_CANDIDATES_AT_A_TIME = 1 << 20
# Pairs are compared by so many stretches of the table: in tables of fewer records, by the record.
_STRETCHES = 1 << 16


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

    def add(self, keys: Floats, first: int = 0) -> None:
        """Look at further columns.

        Args:
            keys: shape ``(rows, n)``, finite; not changed.
            first: index of the first column, above those that were looked at.
        """
        for start in range(0, keys.shape[1], self._width):
            self._add(keys[:, start : start + self._width], first + start)

    def _add(self, keys: Floats, first: int) -> None:
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


def pack(keys: Floats, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack keys with indices below 2**31, element by element."""
    bits = np.ascontiguousarray(keys).view(np.int32)
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    return (ordered.astype(np.int64) << 32) | indices


def unpack(packed: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int32]]:
    """Keys and indices of packed candidates."""
    ordered = (packed >> 32).astype(np.int32)
    bits = ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))
    return bits.view(np.float32), (packed & 0x7FFFFFFF).astype(np.int32)


def order_candidates(
    queries: Floats, table: Floats, packed: NDArray[np.int64], tolerance: Floats, k: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Put the leading candidates of each query into their exact order.

    Args:
        queries: shape ``(m, d)``.
        table: shape ``(n, d)``.
        packed: ascending candidates, shape ``(m, length)``; a key is a squared distance plus a constant of its query.
        tolerance: shape ``(m,)``; no key of a query is further than this from its exact value.
        k: how many leading candidates matter, at most ``length``.

    Returns:
        ``(indices, complete)`` of shapes ``(m, k)`` and ``(m,)``. Where ``complete`` is False the list ends too
        early to say which records are the first ``k`` (unless it holds the whole table: then it is right).
    """
    chosen = np.empty((len(packed), k), dtype=np.int32)
    complete = np.empty(len(packed), dtype=np.bool_)
    step = max(1, _CANDIDATES_AT_A_TIME // packed.shape[1])
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        keys, indices = unpack(packed[rows])
        _order_rows(queries[rows], table, keys, indices, tolerance[rows], k, complete[rows])
        chosen[rows] = indices[:, :k]
    return chosen, complete


def _order_rows(
    queries: Floats,
    table: Floats,
    keys: Floats,
    indices: NDArray[np.int32],
    tolerance: Floats,
    k: int,
    complete: NDArray[np.bool_],
) -> None:
    """Put ``indices`` in order, and say of each row whether it is complete."""
    ends = np.zeros(keys.shape, dtype=np.int32)

    def find(start: int, stop: int) -> None:
        _find_groups(keys[start:stop], tolerance[start:stop], k, ends[start:stop], complete[start:stop])

    in_threads(find, len(keys), _ROWS_AT_A_TIME)
    exact = np.empty(keys.shape, dtype=np.float64)
    places = np.flatnonzero(ends)
    exact.reshape(-1)[places] = pair_distances(
        queries, table, places // keys.shape[1], indices.reshape(-1)[places]
    )
    in_threads(
        lambda start, stop: _sort_groups(exact[start:stop], indices[start:stop], ends[start:stop], k),
        len(keys),
        _ROWS_AT_A_TIME,
    )


def pair_distances(
    queries: Floats, table: Floats, rows: NDArray[np.int64], columns: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Squared distances of the pairs ``(queries[rows[i]], table[columns[i]])``; shape ``(len(rows),)``."""
    # Many queries ask about the same records: each is read from memory once for all of them.
    order = _by_stretch(columns, max(0, (len(table) - 1).bit_length() - _STRETCHES.bit_length() + 1))
    rows, columns = rows[order], columns[order].astype(np.int64, copy=False)  # compiled once
    ordered = np.empty(len(rows), dtype=np.float64)

    def work(start: int, stop: int) -> None:
        _pairs(queries, table, rows[start:stop], columns[start:stop], ordered[start:stop])

    in_threads(work, len(rows), _PAIRS_AT_A_TIME)
    out = np.empty_like(ordered)
    out[order] = ordered
    return out


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


@compiled(fastmath={"reassoc", "contract"})
def squared_distance(query, record):  # type: ignore[no-untyped-def]
    """Of two rows of one length, float64; a function of the two rows alone."""
    # "reassoc" lets the compiler sum in vector lanes; the order still depends on the length alone.
    total = 0.0
    for i in range(query.shape[0]):
        difference = np.float64(query[i]) - np.float64(record[i])
        total += difference * difference
    return total


@compiled()
def _sort_group(exact, indices, first, last):  # type: ignore[no-untyped-def]
    """Shell sort of ``[first, last)`` by ``(exact, index)``; most groups have two or three members."""
    gap = 1
    while gap < (last - first) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(first + gap, last):
            value, index = exact[i], indices[i]
            j = i - gap
            while j >= first and (exact[j] > value or (exact[j] == value and indices[j] > index)):
                exact[j + gap], indices[j + gap] = exact[j], indices[j]
                j -= gap
            exact[j + gap], indices[j + gap] = value, index
        gap //= 3


@compiled()
def _find_groups(keys, tolerance, k, ends, complete):  # type: ignore[no-untyped-def]
    """Write to each place of a group, whose keys are too close to tell, the place after the group's last one."""
    length = keys.shape[1]
    for row in range(len(keys)):
        first = 0
        while first < k:
            last = first + 1
            while last < length and keys[row, last] - keys[row, last - 1] <= 2 * tolerance[row]:
                last += 1
            if last - first > 1:
                ends[row, first:last] = last
            # A group cut off by the list's end may lack members that lie nearer than those it has.
            complete[row] = last < length
            first = last


@compiled()
def _by_stretch(columns, shift):  # type: ignore[no-untyped-def]
    """Positions in the order of the stretches of 2**shift records that ``columns`` fall into."""
    starts = np.zeros(_STRETCHES + 1, dtype=np.int64)
    for column in columns:
        starts[(column >> shift) + 1] += 1
    for i in range(_STRETCHES):
        starts[i + 1] += starts[i]
    order = np.empty(len(columns), dtype=np.int64)
    for i in range(len(columns)):
        stretch = columns[i] >> shift
        order[starts[stretch]] = i
        starts[stretch] += 1
    return order


@compiled()
def _sort_groups(exact, indices, ends, k):  # type: ignore[no-untyped-def]
    for row in range(len(ends)):
        first = 0
        while first < k:
            last = max(ends[row, first], first + 1)
            if last - first > 1:
                _sort_group(exact[row], indices[row], first, last)
            first = last


@compiled()
def _pairs(queries, table, rows, columns, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = squared_distance(queries[rows[i]], table[columns[i]])


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
