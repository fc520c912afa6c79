"""Sums over the k nearest records of a Poisson sample: of attribute vectors, or of any other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.neighbors.poisson import PoissonTotals, RankedLists
from pl_privknn.neighbors.votes import Coins


class PoissonSums(PoissonTotals):
    """Sums of the rows that the k nearest records of a fresh Poisson sample hold, for many queries.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        values: what a record adds, finite floating point, shape ``(n, a)``.
        k: number of neighbours that are summed.
        sampling_rate: γ in (0, 1]. A record takes part in a sample at most once.
        list_length: see :class:`~pl_privknn.neighbors.poisson.PoissonTotals`.
        block_size: likewise.
        device: likewise.

    Raises:
        ValueError: for parameters out of range and tables that do not fit; messages hold no private value.
    """

    dtype = torch.float64

    def __init__(
        self,
        table: Tensor,
        values: Tensor,
        k: int,
        sampling_rate: float,
        list_length: int | None = None,
        *,
        block_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if values.ndim != 2 or len(values) != len(table) or not values.is_floating_point():
            raise ValueError(
                f"values: shape {shape_text(values.shape)}, {values.dtype}; want float of shape (n, a), "
                "a row for each row of the table"
            )
        if not bool(values.isfinite().all()):
            raise ValueError("values: some are NaN or infinite; a sum of them has no meaning")
        super().__init__(table, k, sampling_rate, values.shape[1], list_length, block_size, device)
        self._values = values.to("cpu", torch.float64)

    def sums(self, ranked: RankedLists, coins: Coins | None = None) -> Tensor:
        """Sums over one fresh sample, float64 ``(m, a)``; see :meth:`PoissonTotals.totals`."""
        return self.totals(ranked, coins)

    def add(self, totals: Tensor, rows: Tensor, places: Tensor, records: Tensor) -> None:
        """The records' rows; see :meth:`PoissonTotals.add`."""
        totals.index_add_(0, rows[places], self._values[records])

    def gathered(self, length: int) -> int:
        """Gathered rows take the most memory."""
        return max(length, self.k * self.width)
