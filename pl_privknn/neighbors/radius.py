"""Votes of the records within a public radius of a query."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive, check_rate
from pl_privknn.neighbors.poisson import Coins, compact_labels, count_votes, toss
from pl_privknn.neighbors.search import within_radius

_MEMBERS_AT_A_TIME = 1 << 22


class RadiusNeighbors:
    """Votes of all sampled records within a public radius, with the methods of ``PoissonNeighbors``.

    Beyond the Private-kNN paper: a record more or less changes one count by one and pushes no other record out,
    so the L2 sensitivity of the votes is 1 where that of the k nearest is √2. The radius must be chosen from
    public data alone, and a query may have any number of votes.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        labels: int64, shape ``(n,)``, values in ``[0, num_classes)``.
        num_classes: number of classes, a public constant.
        radius: Euclidean distance up to which records vote.
        sampling_rate: γ in (0, 1]. A record takes part in a sample at most once.
        most_votes: a count above this is cut to it; a record still moves one of them by one at most.
        block_size: as in :func:`~pl_privknn.neighbors.search.top_k`.
        device: as in :func:`~pl_privknn.neighbors.search.top_k`.

    Raises:
        ValueError: for parameters out of range and tables that do not fit; messages hold no private value.
    """

    def __init__(
        self,
        table: Tensor,
        labels: Tensor,
        num_classes: int,
        radius: float,
        sampling_rate: float = 1.0,
        *,
        most_votes: int | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.radius = check_positive("radius", radius)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.num_classes = check_int("num_classes", num_classes, minimum=2)
        self._table, self._labels = table, compact_labels(labels, len(table), self.num_classes)
        self.most_votes, self._block_size, self._device = most_votes, block_size, device

    def rank(self, queries: Tensor) -> Tensor:
        """Bool, shape ``(m, n)``, private: which records lie within the radius of each query."""
        return within_radius(
            queries, self._table, self.radius, block_size=self._block_size, device=self._device
        )

    def votes(self, ranked: Tensor, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query: int64, shape ``(m, num_classes)``, private."""
        votes = torch.zeros(len(ranked), self.num_classes, dtype=torch.int64)
        step = max(1, _MEMBERS_AT_A_TIME // max(1, ranked.shape[1]))
        for start in range(0, len(ranked), step):
            part = ranked[start : start + step]
            if self.sampling_rate < 1:
                part = part & toss(coins, tuple(part.shape), self.sampling_rate)
            rows, records = part.nonzero(as_tuple=True)
            counted = count_votes(rows, self._labels[records], len(part), self.num_classes)
            votes[start : start + step] = counted
        return votes if self.most_votes is None else votes.clamp_(max=self.most_votes)
