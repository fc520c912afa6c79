"""The k nearest records of a Poisson sample, without ever drawing the sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_rate
from pl_privknn.neighbors.search import smallest, squared_norms, top_k

#: Tosses coins: (shape, probability) -> bool tensor.
Coins = Callable[[tuple[int, ...], float], Tensor]

#: Chance that a query needs a longer list than the one searched for at first.
_SHORTFALL = 1e-6


@dataclasses.dataclass(frozen=True)
class RankedLists:
    """Nearest records of some queries. **Private**: it holds record indices and labels.

    Attributes:
        queries: float32, shape ``(m, d)``; kept to search for longer lists.
        indices: int64, shape ``(m, K)``; records from nearest to farthest.
        labels: int64, shape ``(m, K)``; their labels.
    """

    queries: Tensor
    indices: Tensor
    labels: Tensor

    def __getitem__(self, rows: Tensor) -> RankedLists:
        return RankedLists(self.queries[rows], self.indices[rows], self.labels[rows])

    def __len__(self) -> int:
        return len(self.queries)


class PoissonNeighbors:
    """Votes of the k nearest records of a fresh Poisson sample, for many queries.

    The k nearest of a Poisson sample at rate γ have exactly the distribution of this walk: go through the
    records from nearest to farthest, toss a γ-coin for each, stop at k accepted. A record that is never
    reached would not have been among the k nearest, whatever its coin. So one exact search for the nearest
    K records serves every release about a query, and a release costs K coins. K is chosen so that fewer
    than k are accepted with probability below 1e-6; where it happens, the walk goes on over a longer list
    with coins for the further records only.

    Args:
        table: float32 features of the private records, shape ``(n, d)``.
        labels: int64, shape ``(n,)``.
        num_classes: number of classes.
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1]. A record takes part in a sample at most once.
        list_length: K; chosen from ``k`` and ``sampling_rate`` by default.

    Raises:
        ValueError: for parameters out of range.
    """

    def __init__(
        self,
        table: Tensor,
        labels: Tensor,
        num_classes: int,
        k: int,
        sampling_rate: float,
        list_length: int | None = None,
    ) -> None:
        self.k = check_int("k", k)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.num_classes = check_int("num_classes", num_classes, minimum=2)
        self.table, self.labels = table, labels
        wanted = _list_length(self.k, self.sampling_rate) if list_length is None else list_length
        self.list_length = min(max(wanted, self.k), len(table))

    def rank(self, queries: Tensor) -> RankedLists:
        """Search for the nearest records of each query.

        Args:
            queries: float32, shape ``(m, d)``.
        """
        _, indices = top_k(queries, self.table, max(1, self.list_length))
        return RankedLists(queries, indices, self.labels[indices])

    def votes(self, ranked: RankedLists, coins: Coins) -> Tensor:
        """Votes of one fresh sample for each query.

        Args:
            ranked: from :meth:`rank`; serves any number of calls.
            coins: tosses independent coins, for instance ``noise.bernoulli``; not used at γ = 1.

        Returns:
            int64, shape ``(m, num_classes)``; a row sums to ``k``, or to the size of its sample where that
            is smaller.
        """
        votes = torch.zeros(len(ranked), self.num_classes, dtype=torch.int64)
        accepted = torch.zeros(len(ranked), dtype=torch.int64)
        rows, seen, further = torch.arange(len(ranked)), ranked.indices, ranked.labels
        while True:
            accepted[rows] = self._walk(votes, rows, further, accepted[rows], coins)
            short = accepted[rows] < self.k
            rows, seen = rows[short], seen[short]
            if len(rows) == 0 or seen.shape[1] == len(self.table):
                break
            more = self._further(ranked.queries[rows], seen)
            seen, further = torch.cat([seen, more], dim=1), self.labels[more]
        return votes

    def _walk(self, votes: Tensor, rows: Tensor, labels: Tensor, accepted: Tensor, coins: Coins) -> Tensor:
        """Walk over ``labels`` with fresh coins and add to ``votes[rows]``; returns how many are accepted."""
        if self.sampling_rate < 1:
            heads = coins(tuple(labels.shape), self.sampling_rate)
        else:
            heads = torch.ones(labels.shape, dtype=torch.bool)
        heads = heads & (heads.cumsum(dim=1).add_(accepted[:, None]) <= self.k)
        added = torch.zeros(len(rows), self.num_classes, dtype=torch.int64)
        votes[rows] += added.scatter_add_(1, labels, heads.long())
        return accepted + heads.sum(dim=1)

    def _further(self, queries: Tensor, seen: Tensor) -> Tensor:
        """The next nearest records after those already walked over: as many again, or all that are left."""
        count = min(max(seen.shape[1], self.k), len(self.table) - seen.shape[1])
        distances = torch.addmm(squared_norms(self.table), queries, self.table.T, alpha=-2.0)
        # Not searched for again: rounding could order them differently, and a record be walked over twice.
        distances.scatter_(1, seen, torch.inf)
        return smallest(distances, count)[1]


def _list_length(k: int, sampling_rate: float) -> int:
    if sampling_rate == 1.0:
        return k
    from scipy.stats import nbinom

    return k + int(nbinom.isf(_SHORTFALL, k, sampling_rate))
