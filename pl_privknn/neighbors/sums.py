"""Sums over the k nearest records of a Poisson sample: of attribute vectors, or of any other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.neighbors.poisson import PoissonNeighbors, RankedLists
from pl_privknn.neighbors.votes import Coins, toss


class PoissonSums(PoissonNeighbors):
    """Sums of the rows that the k nearest records of a fresh Poisson sample hold, for many queries.

    As :class:`~pl_privknn.neighbors.poisson.PoissonNeighbors`, with a row of values in the place of a vote
    for a class.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        values: what a record adds, finite floating point, shape ``(n, a)``.
        k: number of neighbours that are summed.
        sampling_rate: γ in (0, 1]. A record takes part in a sample at most once.
        list_length: see :class:`~pl_privknn.neighbors.poisson.PoissonNeighbors`.
        block_size: likewise.
        device: likewise.

    Raises:
        ValueError: for parameters out of range and tables that do not fit; messages hold no private value.
    """

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
        nothing = torch.zeros(len(table), dtype=torch.int64)
        super().__init__(
            table, nothing, 2, k, sampling_rate, list_length, block_size=block_size, device=device
        )
        self._values = values.to("cpu", torch.float64)

    @property
    def width(self) -> int:
        """Number of values a record, a."""
        return self._values.shape[1]

    def sums(self, ranked: RankedLists, coins: Coins | None = None) -> Tensor:
        """Sums over one fresh sample for each query.

        Args:
            ranked: from :meth:`rank`; serves any number of calls, each with coins of its own.
            coins: tosses independent coins, for instance ``noise.bernoulli``; not used at γ = 1.

        Returns:
            float64, shape ``(m, a)``, private; over ``k`` records, or the whole sample where that is smaller.
        """
        return self._fill(torch.zeros(len(ranked), self.width, dtype=torch.float64), ranked, coins)

    def _walk(self, votes: Tensor, taken: Tensor, rows: Tensor, indices: Tensor, coins: Coins | None) -> None:
        # Gathered rows take the most memory: so many lists at a time that they stay near 40 MB.
        width = max(indices.shape[1], self.k * self._values.shape[1])
        step = max(1, (1 << 22) // max(1, width))
        for row, index in zip(rows.split(step), indices.split(step), strict=True):
            need = (self.k - taken[row])[:, None]
            if self.sampling_rate < 1:
                accepted = toss(coins, index.shape, self.sampling_rate)
                voting = accepted & (accepted.cumsum(dim=1, dtype=torch.int32) <= need)
            else:
                voting = torch.arange(index.shape[1]) < need
            positions, ranks = voting.nonzero(as_tuple=True)
            votes.index_add_(0, row[positions], self._values[index[positions, ranks].long()])
            taken[row] += voting.sum(dim=1)
