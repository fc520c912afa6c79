"""Neighbours in a table that lies in shards, one a process: each searches its own, and little travels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn.neighbors.poisson import Coins, PoissonTotals, RankedLists, compact_labels, count_votes
from pl_privknn.neighbors.processes import Shard
from pl_privknn.neighbors.search import pair_distances

# A candidate travels as its float64 squared distance and an int64 that holds its global index above its label.
_LABEL_BITS = 16
_NOBODY = torch.iinfo(torch.int64).max


@dataclasses.dataclass(frozen=True)
class ShardedLists:
    """Queries whose neighbours each process knows in its own shard.

    Attributes:
        number: of the search.
        rows: int64, shape ``(m,)``; positions of the queries in it.
    """

    number: int
    rows: Tensor

    def __getitem__(self, rows: Tensor) -> ShardedLists:
        return ShardedLists(self.number, self.rows[rows])


class ShardedNeighbors:
    """Votes of the k nearest records of a Poisson sample of all shards, with the methods of ``PoissonNeighbors``.

    Each process tosses coins for the records of its own shard and finds the k nearest accepted ones. Those of all
    shards are merged by their float64 distance, ties by global index. The k nearest of the whole sample are among
    them, so the votes are those of one process that holds the whole table and tosses the same coins: a record is
    accepted by a coin of its own, wherever it lies. What travels are the queries, and 16 bytes for each of the k
    candidates of a shard, to process 0 alone.

    Process 0 calls :meth:`rank` and :meth:`votes`; the others carry out its commands (:meth:`run_command`).

    Args:
        table: features of this shard's records, floating point, shape ``(n, d)``; there may be none.
        labels: int64, shape ``(n,)``.
        num_classes: number of classes, at most 65,536.
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1].
        shard: which records these are.
        own_coins: gives the coins of this shard for the release with a number; not called on process 0.
        device: as in :func:`~pl_privknn.neighbors.search.top_k`.

    Attributes:
        release: number of the last release, counted up by each; coins of shards are a function of it.
    """

    def __init__(
        self,
        table: Tensor,
        labels: Tensor,
        num_classes: int,
        k: int,
        sampling_rate: float,
        shard: Shard,
        own_coins: Callable[[int], Coins],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if num_classes > 1 << _LABEL_BITS:
            raise ValueError(
                f"num_classes={num_classes} is more than the {1 << _LABEL_BITS} that shards can name"
            )
        self.num_classes, self.shard = num_classes, shard
        self._nearest = _NearestAccepted(table, k, sampling_rate, k, device=device)
        # One label more, for candidates that are nobody: number -1.
        self._labels = functional.pad(compact_labels(labels, len(table), num_classes), (0, 1))
        self._own_coins = own_coins
        self._lists: RankedLists | None = None
        self._searches = self.release = 0

    def rank(self, queries: Tensor) -> ShardedLists:
        """Search in every shard; only the queries of the last search can vote."""
        self.run_command(self.shard.group.broadcast(("rank", queries.cpu())))
        return ShardedLists(self._searches, torch.arange(len(queries)))

    def votes(self, ranked: ShardedLists, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query, int64 ``(m, num_classes)``; see ``PoissonNeighbors.votes``.

        Args:
            ranked: from the last :meth:`rank`.
            coins: of this process's own shard.
        """
        if ranked.number != self._searches:
            raise ValueError(
                "ranked: these lists are of an earlier search; shards keep those of the last one"
            )
        self.release += 1
        _, rows, _ = self.shard.group.broadcast(("votes", ranked.rows, self.release))
        squared, packed = self._gathered(rows, coins)
        query, place = self._nearest_of_all(squared, packed).nonzero(as_tuple=True)
        labels = packed[query, place] & ((1 << _LABEL_BITS) - 1)
        return count_votes(query, labels, len(rows), self.num_classes)

    def _nearest_of_all(self, squared: Tensor, packed: Tensor) -> Tensor:
        """Which candidates of all shards are the k nearest, bool ``(m, shards · k)``."""
        k = self._nearest.k
        farthest = torch.from_numpy(np.partition(squared.numpy(), k - 1, axis=1)[:, k - 1 : k])
        chosen = (squared <= farthest) & (squared < torch.inf)
        # Ties at the k-th place go by global index, which stands in the upper bits.
        for query in (chosen.sum(dim=1) > k).nonzero()[:, 0].tolist():
            order = np.lexsort((packed[query].numpy(), squared[query].numpy()))
            chosen[query] = False
            chosen[query, torch.from_numpy(order[:k])] = True
        return chosen

    def run_command(self, command: Any) -> None:
        """Carry out a command of process 0 on this process's shard."""
        kind, *given = command
        if kind == "rank":
            self._lists = self._nearest.rank(given[0])
            self._searches += 1
            return
        rows, number = given
        self._gathered(rows, self._own_coins(number))

    def _gathered(self, rows: Tensor, coins: Coins | None) -> tuple[Tensor, Tensor]:
        """Candidates of all shards on process 0, ``(m, shards · k)``; empty elsewhere."""
        assert self._lists is not None
        squared, records = self._nearest.accepted(self._lists[rows], coins)
        index = self.shard.first + self.shard.stride * records
        packed = (index << _LABEL_BITS) | self._labels[records].long()
        packed.masked_fill_(records < 0, _NOBODY)
        sent = torch.stack([squared.view(torch.int64), packed])
        parts = self.shard.group.gather(sent)
        if not parts:
            return squared[:, :0], packed[:, :0]
        together = torch.cat(parts, dim=2)
        return together[0].contiguous().view(torch.float64), together[1]


class _NearestAccepted(PoissonTotals):
    """The k nearest records of a fresh Poisson sample themselves: their numbers plus one, 0 where there is none."""

    dtype = torch.int64

    def add(self, totals: Tensor, rows: Tensor, places: Tensor, records: Tensor) -> None:
        """Append the accepted records of each query; see :meth:`PoissonTotals.add`."""
        counts = places.bincount(minlength=len(rows))
        before = (totals[rows] > 0).sum(dim=1) - (counts.cumsum(0) - counts)
        totals[rows[places], torch.arange(len(places)) + before[places]] = records + 1

    def accepted(self, ranked: RankedLists, coins: Coins | None) -> tuple[Tensor, Tensor]:
        """Squared distances, float64 ``(m, k)``, ascending, and records, int64 ``(m, k)``; infinity and -1: none."""
        records = self.totals(ranked, coins) - 1
        rows, places = (records >= 0).nonzero(as_tuple=True)
        squared = torch.full(records.shape, torch.inf, dtype=torch.float64)
        # The numbers by which single distances are compared in a search, too.
        queries, table = (
            part.detach().to("cpu", torch.float32).contiguous() for part in (ranked.queries, self._table)
        )
        exact = pair_distances(queries.numpy(), table.numpy(), rows.numpy(), records[rows, places].numpy())
        squared[rows, places] = torch.from_numpy(exact)
        return squared, records
