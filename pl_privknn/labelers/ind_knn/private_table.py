"""The private table of Ind-KNN: unit vectors, labels, numbers and remaining budgets, in buffers that grow."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Ids = NDArray[np.int64]
_ROWS_AT_ONCE = 1024


def unit_rows(rows: Tensor, *, overwrite: bool = False) -> Tensor:
    """Each row by itself scaled to length 1, float32; a row of zeros stays as it is.

    No row's result depends on another row: no mean is taken out and no column is scaled. With ``overwrite`` the
    result takes the place of ``rows`` where it can.
    """
    in_place = overwrite and rows.dtype == torch.float32 and rows.is_cpu and rows.is_contiguous()
    result = rows.detach() if in_place else torch.empty(rows.shape, dtype=torch.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE].detach().cpu().double()
        norms = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        result[start : start + len(part)] = part / torch.where(norms > 0, norms, 1.0)
    return result


class RecordTable:
    """Rows of private records; a removed record's row is overwritten, so nothing of it stays in memory.

    Args:
        dimension: of the vectors.

    Attributes:
        left: what each row's record has left, in quanta, float64, shape ``(capacity,)``. Private, as is
            everything here.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._count = 0
        self._vectors = torch.empty(0, dimension)
        self._labels = np.empty(0, np.int64)
        self._ids = np.empty(0, np.int64)
        self.left = np.empty(0, np.float64)
        self._row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"RecordTable(dimension={self.dimension})"

    @property
    def vectors(self) -> Tensor:
        """Float32 unit vectors, shape ``(n, dimension)``; a view."""
        return self._vectors[: self._count]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Int64, shape ``(n,)``; a view."""
        return self._labels[: self._count]

    @property
    def ids(self) -> _Ids:
        """The owner's numbers, int64, shape ``(n,)``; a view."""
        return self._ids[: self._count]

    def __contains__(self, record: int) -> bool:
        return record in self._row_of

    def rows(self, ids: _Ids) -> NDArray[np.intp]:
        """Rows of records that are in the table."""
        return np.array([self._row_of[record] for record in ids.tolist()], np.intp)

    def append(
        self, ids: _Ids, vectors: Tensor, labels: NDArray[np.int64], left: NDArray[np.float64]
    ) -> NDArray[np.intp]:
        """Add records that are not in the table; returns their rows. The first ``vectors`` are kept, not copied."""
        start, stop = self._count, self._count + len(ids)
        if stop > len(self._ids):
            # The first records are their buffer, so a table that never grows takes no more than it needs.
            capacity = max(stop, 2 * len(self._ids))
            self._vectors = _grown(self._vectors, start, capacity) if len(self._ids) else vectors
            self._labels, self._ids, self.left = (
                np.concatenate([array[:start], np.zeros(capacity - start, array.dtype)])
                for array in (self._labels, self._ids, self.left)
            )
        if self._vectors is not vectors:
            self._vectors[start:stop] = vectors
        self._labels[start:stop], self._ids[start:stop], self.left[start:stop] = labels, ids, left
        self._count = stop
        rows = np.arange(start, stop)
        self._row_of.update(zip(ids.tolist(), rows.tolist(), strict=True))
        return rows

    def delete(self, ids: _Ids) -> NDArray[np.intp]:
        """Take records out and wipe their rows; the last rows move into the holes.

        Returns:
            The rows that now hold another record.
        """
        gone = self.rows(ids)
        count = self._count - len(gone)
        kept = np.ones(self._count, bool)
        kept[gone] = False
        holes = np.flatnonzero(~kept[:count])
        movers = count + np.flatnonzero(kept[count:])
        self._vectors[holes] = self._vectors[movers]
        for array in (self._labels, self._ids, self.left):
            array[holes] = array[movers]
            array[count : self._count] = 0
        self._vectors[count : self._count] = 0
        for record in ids.tolist():
            del self._row_of[record]
        self._row_of.update(zip(self._ids[holes].tolist(), holes.tolist(), strict=True))
        self._count = count
        return holes


class PublicAnswers:
    """Earlier queries with their released answers; public, so they take part without a budget.

    Args:
        dimension: of the vectors.
    """

    def __init__(self, dimension: int) -> None:
        self._vectors = torch.empty(0, dimension)
        self._labels = np.empty(0, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def vectors(self) -> Tensor:
        """Float32 unit vectors, shape ``(r, dimension)``; a view."""
        return self._vectors[: self._count]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Int64, shape ``(r,)``; a view."""
        return self._labels[: self._count]

    def append(self, vectors: Tensor, labels: NDArray[np.int64]) -> None:
        """Add answered queries."""
        start, stop = self._count, self._count + len(labels)
        if stop > len(self._labels):
            capacity = max(stop, 2 * len(self._labels))
            self._vectors = _grown(self._vectors, start, capacity)
            self._labels = np.concatenate([self._labels[:start], np.zeros(capacity - start, np.int64)])
        self._vectors[start:stop] = vectors
        self._labels[start:stop] = labels
        self._count = stop

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count``."""
        self._count = min(self._count, count)


def _grown(vectors: Tensor, count: int, capacity: int) -> Tensor:
    larger = torch.zeros(capacity, vectors.shape[1])
    larger[:count] = vectors[:count]
    return larger
