"""Sign random projections: candidates for the neighbours of a query without a search of all records."""

from __future__ import annotations

import dataclasses

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
    """Index of rows that share a bucket with a query in some table; rows can be appended and removed.

    The sorted tables are of the rows of some time ago, where few have changed since: of these, the ones that went
    are passed over and the ones that came are compared one by one.

    Args:
        options: tables and bits.
        dimension: of the vectors.
    """

    def __init__(self, options: SignProjections, dimension: int) -> None:
        self.options = options
        self._planes = options.hyperplanes(dimension)
        self._weights = torch.tensor([1 << bit for bit in range(options.num_bits)])
        self._codes: NDArray[np.int32] = np.empty((0, options.num_tables), np.int32)
        self._sorted_rows = 0
        self._build()

    def __len__(self) -> int:
        return len(self._codes)

    def codes(self, vectors: Tensor) -> NDArray[np.int32]:
        """Buckets of float32 vectors ``(n, dimension)``: int32, shape ``(n, num_tables)``."""
        options = self.options
        found = np.empty((len(vectors), options.num_tables), np.int32)
        for start in range(0, len(vectors), 8192):
            part = vectors[start : start + 8192]
            bits = (part @ self._planes >= 0).view(len(part), options.num_tables, options.num_bits)
            found[start : start + len(part)] = (bits * self._weights).sum(dim=2).numpy()
        return found

    def append(self, vectors: Tensor) -> None:
        """Add rows, float32 ``(k, dimension)``."""
        self._codes = np.concatenate([self._codes, self.codes(vectors)])

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop the rows where ``kept``, of shape ``(n,)``, is False; their codes are overwritten."""
        codes, now, there = self._codes, np.cumsum(kept) - 1, self._rows >= 0
        self._codes = codes[kept]
        codes[:] = 0
        old = self._rows[there]
        self._rows[there] = np.where(kept[old], now[old], -1)
        self._sorted_rows = int(kept[: self._sorted_rows].sum())

    def candidates(self, queries: Tensor) -> list[NDArray[np.intp]]:
        """Rows in the same bucket as each query in any table, ascending, each once.

        Args:
            queries: float32, shape ``(m, dimension)``.
        """
        changed = len(self._codes) + len(self._rows) - 2 * self._sorted_rows
        if changed > max(_MANY_CHANGES, len(self._codes) // 8):
            self._build()
            changed = 0
        wanted, new = self.codes(queries), self._codes[self._sorted_rows :]
        spans = np.empty((2, *wanted.shape), np.intp)
        for table, codes in enumerate(self._sorted):
            spans[0, :, table] = np.searchsorted(codes, wanted[:, table], "left")
            spans[1, :, table] = np.searchsorted(codes, wanted[:, table], "right")
        flags, found = np.zeros(len(self._rows), bool), []
        for query in range(len(wanted)):
            for order, start, stop in zip(self._order, *spans[:, query].tolist(), strict=True):
                flags[order[start:stop]] = True
            rows = np.flatnonzero(flags)
            flags[:] = False
            if changed:
                now = self._rows[rows]
                tail = self._sorted_rows + np.flatnonzero((new == wanted[query]).any(axis=1))
                rows = np.concatenate([now[now >= 0], tail])
            found.append(rows)
        return found

    def _build(self) -> None:
        codes = self._codes.T
        order = np.argsort(codes, axis=1, kind="stable")
        self._sorted = np.take_along_axis(codes, order, axis=1)
        self._order = order.astype(np.int32 if len(self) < 2**31 else np.int64)
        #: The present row of each row that was sorted, -1 of those that went; the other rows come after all of these.
        self._rows, self._sorted_rows = np.arange(len(self)), len(self)


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
