"""Sign random projections: candidates for the neighbours of a query without looking at every record."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int, compiled

#: The sorted tables are built anew when more rows than this, and an eighth of all, have changed since.
_MANY_CHANGES = 1024


@dataclasses.dataclass(frozen=True)
class SignProjections:
    """L hash tables of b bits each; a bit is the side of a random hyperplane (Charikar 2002).

    Two vectors at angle θ share a bucket of one table with probability (1 − θ/π)^b, and are candidates for
    each other if they share one in any table: more tables find more of the neighbours, more bits keep more
    of the others away.

    **Hashing changes no privacy statement.** The hyperplanes are drawn from a public seed, so whether a
    record is a candidate for a query depends on that record and the query alone, exactly as whether its
    kernel value reaches the threshold. A record that isn't a candidate contributes nothing, pays nothing,
    and can't change who else is one; the sensitivity and cost of one that is are what they were.

    Attributes:
        num_tables: L.
        num_bits: b, at most 31.
        seed: of the hyperplanes; a public constant.

    Raises:
        ValueError: for values out of range.
    """

    num_tables: int = 30
    num_bits: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("num_tables", self.num_tables)
        if check_int("num_bits", self.num_bits) > 31:
            raise ValueError(f"num_bits={self.num_bits!r} must be at most 31; more bits find nothing")
        check_int("seed", self.seed, minimum=0)

    def hyperplanes(self, dimension: int) -> Tensor:
        """Normal vectors, float32, shape ``(dimension, num_tables * num_bits)``."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(dimension, self.num_tables * self.num_bits, generator=generator)


class HashIndex:
    """Which rows share a bucket with a query in at least one table; rows can be set and dropped at any time.

    Args:
        options: tables and bits.
        dimension: of the vectors.
    """

    def __init__(self, options: SignProjections, dimension: int) -> None:
        self.options = options
        self._planes = options.hyperplanes(dimension)
        self._weights = torch.tensor([1 << bit for bit in range(options.num_bits)])
        self._codes = np.empty((0, options.num_tables), np.int32)
        self._changed = np.empty(0, bool)
        self._flags = np.empty(0, bool)
        self._count = 0
        self._build()

    def __len__(self) -> int:
        return self._count

    def codes(self, vectors: Tensor) -> NDArray[np.int32]:
        """Buckets of float32 vectors ``(n, dimension)``: int32, shape ``(n, num_tables)``."""
        options = self.options
        found = np.empty((len(vectors), options.num_tables), np.int32)
        for start in range(0, len(vectors), 8192):
            part = vectors[start : start + 8192]
            bits = (part @ self._planes >= 0).view(len(part), options.num_tables, options.num_bits)
            found[start : start + len(part)] = (bits * self._weights).sum(dim=2).numpy()
        return found

    def set_rows(self, rows: NDArray[np.intp], vectors: Tensor) -> None:
        """Put vectors into rows; rows up to one past the last may be named, in any order.

        Args:
            rows: which rows, shape ``(k,)``; new ones extend the index without a gap.
            vectors: float32, shape ``(k, dimension)``.
        """
        if not len(rows):
            return
        self._count = max(self._count, int(rows.max()) + 1)
        if self._count > len(self._codes):
            capacity = max(self._count, 2 * len(self._codes))
            self._codes = _grown(self._codes, capacity)
            self._changed = _grown(self._changed, capacity)
            self._flags = np.zeros(capacity, bool)
        self._codes[rows] = self.codes(vectors)
        self._changed[rows] = True
        if np.count_nonzero(self._changed[: self._count]) > max(_MANY_CHANGES, self._count // 8):
            self._build()

    def truncate(self, count: int) -> None:
        """Drop all rows from ``count`` on; their codes are wiped."""
        self._codes[count:] = 0
        self._changed[count:] = True
        self._count = min(self._count, count)

    def candidates(self, queries: Tensor) -> list[NDArray[np.intp]]:
        """Rows in the same bucket as each query in any table, ascending, each once.

        Args:
            queries: float32, shape ``(m, dimension)``.
        """
        wanted = self.codes(queries)
        spans = np.empty((2, *wanted.shape), np.intp)
        for table, codes in enumerate(self._sorted):
            spans[0, :, table] = np.searchsorted(codes, wanted[:, table], "left")
            spans[1, :, table] = np.searchsorted(codes, wanted[:, table], "right")
        changed = np.flatnonzero(self._changed[: self._count])
        changed_codes = self._codes[changed]
        flags = self._flags
        found = []
        for query in range(len(wanted)):
            starts, stops = spans[:, query]
            for table in range(len(self._order)):
                flags[self._order[table, starts[table] : stops[table]]] = True
            # The sorted tables are out of date where rows have changed: those are compared one by one.
            flags[changed] = (changed_codes == wanted[query]).any(axis=1)
            rows = np.flatnonzero(flags[: self._count])
            flags[: len(self._order[0])] = False
            flags[changed] = False
            found.append(rows)
        return found

    def _build(self) -> None:
        codes = self._codes[: self._count].T
        self._order = np.argsort(codes, axis=1, kind="stable")
        self._order = self._order.astype(np.int32 if self._count < 2**31 else np.int64)
        self._sorted = np.take_along_axis(codes, self._order, axis=1)
        self._changed[: self._count] = False


@compiled(fastmath={"reassoc", "contract"})
def chosen_products(
    table: NDArray[np.float32], rows: NDArray[np.intp], vector: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Scalar products of some rows with a vector, shape ``(len(rows),)``, without copying the rows.

    Each sum runs over its own row in one fixed order, so it doesn't depend on which other rows there are.

    Args:
        table: shape ``(n, d)``, contiguous.
        rows: which rows.
        vector: shape ``(d,)``.
    """
    products = np.empty(len(rows), np.float32)
    for place in range(len(rows)):
        row, total = rows[place], np.float32(0)
        for column in range(table.shape[1]):
            total += table[row, column] * vector[column]
        products[place] = total
    return products


def _grown(values: NDArray[Any], capacity: int) -> NDArray[Any]:
    larger = np.zeros((capacity, *values.shape[1:]), values.dtype)
    larger[: len(values)] = values
    return larger
