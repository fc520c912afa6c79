"""Exact float64 comparison of nearly equal distances, compiled.

The matrix product that finds candidates rounds, and how it rounds depends on where a record lies in the table. A
ranking taken from it could change for *other* records when one record is removed, and the votes would then depend
on that record by more than its own one. So whatever is closer together than the product's error is compared again
by a distance that is a function of its query and its record alone; equal ones go by index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pl_privknn.neighbors.selection import compiled, in_threads, unpack

Floats = NDArray[np.float32]

_ROWS_AT_A_TIME = 32
_PAIRS_AT_A_TIME = 4096


@compiled(fastmath={"reassoc", "contract"})
def _squared_distance(query, record):  # type: ignore[no-untyped-def]
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
def _order_rows(queries, table, keys, indices, tolerance, k, complete):  # type: ignore[no-untyped-def]
    length = keys.shape[1]
    exact = np.empty(length, dtype=np.float64)
    for row in range(len(keys)):
        first = 0
        while first < k:
            last = first + 1
            while last < length and keys[row, last] - keys[row, last - 1] <= 2 * tolerance[row]:
                last += 1
            if last - first > 1:
                for i in range(first, last):
                    exact[i] = _squared_distance(queries[row], table[indices[row, i]])
                _sort_group(exact, indices[row], first, last)
            # A group cut off by the list's end may lack members that lie nearer than those it has.
            complete[row] = last < length
            first = last


@compiled()
def _pairs(queries, table, rows, columns, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = _squared_distance(queries[rows[i]], table[columns[i]])


def order_candidates(
    queries: Floats, table: Floats, packed: NDArray[np.int64], tolerance: Floats, k: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Put the leading candidates of each query into their exact order.

    Args:
        queries: shape ``(m, d)``.
        table: shape ``(n, d)``.
        packed: ascending candidates, shape ``(m, length)``, see :mod:`~pl_privknn.neighbors.selection`; a key
            is a squared distance plus a constant of its query.
        tolerance: shape ``(m,)``; no key of a query is further than this from its exact value.
        k: how many leading candidates matter, at most ``length``.

    Returns:
        ``(indices, complete)`` of shapes ``(m, k)`` and ``(m,)``. Where ``complete`` is False the list ends too
        early to say which records are the first ``k`` (unless it holds the whole table: then it is right).
    """
    chosen = np.empty((len(packed), k), dtype=np.int32)
    complete = np.empty(len(packed), dtype=np.bool_)

    def work(start: int, stop: int) -> None:
        keys, indices = unpack(packed[start:stop])
        rows = slice(start, stop)
        _order_rows(queries[rows], table, keys, indices, tolerance[rows], k, complete[rows])
        chosen[rows] = indices[:, :k]

    in_threads(work, len(packed), _ROWS_AT_A_TIME)
    return chosen, complete


def pair_distances(
    queries: Floats, table: Floats, rows: NDArray[np.int64], columns: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Squared distances of the pairs ``(queries[rows[i]], table[columns[i]])``; shape ``(len(rows),)``."""
    out = np.empty(len(rows), dtype=np.float64)

    def work(start: int, stop: int) -> None:
        _pairs(queries, table, rows[start:stop], columns[start:stop], out[start:stop])

    in_threads(work, len(rows), _PAIRS_AT_A_TIME)
    return out
