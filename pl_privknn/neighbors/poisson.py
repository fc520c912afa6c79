"""Votes and sums of the k nearest records of a Poisson sample."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_int, check_rate, shape_text
from pl_privknn._processes import Shard
from pl_privknn.neighbors.search import nearest, pair_distances

#: Tosses coins: (shape, probability) -> bool tensor on the CPU.
Coins = Callable[[tuple[int, ...], float], Tensor]

# Coins and the counts over them take some 10 bytes each: 40 MB at a time.
_COINS_AT_A_TIME = 1 << 22
#: Chance that a query needs a longer list than the one searched for at first.
_SHORTFALL = 1e-6


@dataclasses.dataclass(frozen=True, repr=False)
class RankedLists:
    """Nearest records of some queries. **Private**, except for ``queries``.

    Attributes:
        queries: floating point, shape ``(m, d)``; kept to search for longer lists.
        indices: int32, shape ``(m, K)``; records from nearest to farthest.
    """

    queries: Tensor
    indices: Tensor

    def __getitem__(self, rows: Tensor | slice) -> RankedLists:
        return RankedLists(self.queries[rows], self.indices[rows])

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        """Sizes alone, so that no log or traceback shows private indices."""
        return f"RankedLists(queries={len(self)}, length={self.indices.shape[1]})"


class PoissonTotals(abc.ABC):
    """Sums over the k nearest records of a fresh Poisson sample, for many queries; subclasses define the summands.

    The k nearest of a Poisson sample at rate γ have exactly the distribution of this walk: go through the
    records from nearest to farthest, toss a γ-coin for each, stop at k accepted. A record that is never
    reached would not have been among the k nearest, whatever its coin. So one exact search for the nearest
    K records serves every release about a query, and a release costs K coins. K is chosen so that fewer
    than k are accepted with probability below 1e-6; where it happens, the walk goes on over a longer list
    with coins for the further records only. (Zhu et al., Private-kNN, CVPR 2020, take the sample literally.)

    Where records have ``owners``, neighbours are persons: each enters with the record nearest to the query, and
    tosses one coin.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        k: number of neighbours.
        sampling_rate: γ in (0, 1]. A record takes part in a sample at most once.
        width: columns of the totals.
        list_length: K; chosen from ``k`` and ``sampling_rate`` by default. It changes the time, not the result.
        owners: person of each record, int64 ``(n,)``; None where each record counts by itself.
        device: as in :func:`~pl_privknn.neighbors.search.nearest`.

    Raises:
        ValueError: for parameters out of range and tables that do not fit; messages hold no private value.
    """

    #: Of the totals.
    dtype: torch.dtype

    def __init__(
        self,
        table: Tensor,
        k: int,
        sampling_rate: float,
        width: int,
        list_length: int | None = None,
        *,
        owners: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.k = check_int("k", k)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.width = width
        wanted = _list_length(self.k, self.sampling_rate) if list_length is None else list_length
        self._persons = None if owners is None else compact(owners)
        self.units = len(table) if self._persons is None else int(self._persons.max(initial=-1)) + 1
        self.list_length = min(max(check_int("list_length", wanted), self.k), self.units)
        self._table, self._device = table, device

    @abc.abstractmethod
    def add(self, totals: Tensor, rows: Tensor, places: Tensor, records: Tensor) -> None:
        """Add the records' values to ``totals``.

        Args:
            totals: shape ``(m, width)``.
            rows: int64, shape ``(b,)``; the queries in question.
            places: int64, shape ``(v,)``; for each accepted record, the place of its query in ``rows``.
            records: int64, shape ``(v,)``; the accepted records. **Private**.
        """

    def gathered(self, length: int) -> int:
        """Memory for one query with a list of this length, in numbers."""
        return length

    def rank(self, queries: Tensor) -> RankedLists:
        """Search for the nearest records of each query.

        Args:
            queries: floating point, shape ``(m, d)``.

        Raises:
            ValueError: for queries that do not fit the table or are not finite.
        """
        return RankedLists(queries, self._nearest(queries, max(1, self.list_length)))

    def votes(self, ranked: RankedLists, coins: Coins | None = None) -> Tensor:
        """Totals (numbers of votes, or sums) over one fresh sample for each query.

        Args:
            ranked: from :meth:`rank`; may be used for any number of calls, each with fresh coins.
            coins: tosses independent coins, for instance ``noise.bernoulli``; not used at γ = 1.

        Returns:
            Shape ``(m, width)``, private; over ``k`` records, or the whole sample where that is smaller.
        """
        totals = torch.zeros(len(ranked), self.width, dtype=self.dtype)
        taken = torch.zeros(len(ranked), dtype=torch.int64)
        rows, seen, further = torch.arange(len(ranked)), ranked.indices, ranked.indices
        while True:
            self._walk(totals, taken, rows, further, coins)
            short = taken[rows] < self.k
            rows, seen = rows[short], seen[short]
            if len(rows) == 0 or seen.shape[1] == self.units:
                return totals
            further = self._further(ranked.queries[rows], seen)
            seen = torch.cat([seen, further], dim=1)

    def _walk(
        self, totals: Tensor, taken: Tensor, rows: Tensor, indices: Tensor, coins: Coins | None
    ) -> None:
        """Walk over lists with fresh coins, adding to ``totals[rows]`` and ``taken[rows]``."""
        step = max(1, _COINS_AT_A_TIME // max(1, self.gathered(indices.shape[1])))
        for row, index in zip(rows.split(step), indices.split(step), strict=True):
            need = self.k - taken[row][:, None]
            if self.sampling_rate < 1:
                accepted = self.toss(coins, row, index)
                chosen = accepted & (accepted.cumsum(dim=1, dtype=index.dtype) <= need)
            else:
                chosen = torch.arange(index.shape[1]) < need
            places, ranks = chosen.nonzero(as_tuple=True)
            self.add(totals, row, places, index[places, ranks].long())
            taken[row] += places.bincount(minlength=len(row))

    def toss(self, coins: Coins | None, rows: Tensor, indices: Tensor) -> Tensor:
        """Mask of the records that take part, bool of the shape of ``indices``: a fresh coin for each.

        Args:
            coins: tosses them.
            rows: int64, shape ``(b,)``; the queries in question.
            indices: int32 or int64, shape ``(b, l)``; records from nearest to farthest. **Private**.
        """
        return toss(coins, indices.shape, self.sampling_rate)

    def _further(self, queries: Tensor, seen: Tensor) -> Tensor:
        """Next nearest records after the visited ones: as many again, or all that are left."""
        walked = seen.shape[1]
        longer = self._nearest(queries, min(self.units, 2 * walked))
        further = torch.empty((len(queries), longer.shape[1] - walked), dtype=longer.dtype)
        step = max(1, _COINS_AT_A_TIME // longer.shape[1])
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            # The longer list starts with the shorter one. That no record is walked over twice must not hang on
            # it, so those walked over are sorted out by index.
            walked_over = seen[part].sort(dim=1).values
            place = torch.searchsorted(walked_over, longer[part]).clamp_(max=walked - 1)
            repeated = (walked_over.gather(1, place) == longer[part]).to(torch.uint8)
            fresh = repeated.argsort(dim=1, stable=True)[:, : further.shape[1]]
            further[part] = longer[part].gather(1, fresh)
        return further

    def _nearest(self, queries: Tensor, length: int) -> Tensor:
        """The nearest records, or the nearest record of each of the nearest persons."""
        search = functools.partial(nearest, device=self._device)
        if self._persons is None:
            return search(queries, self._table, length)
        found = torch.empty((len(queries), min(length, self.units)), dtype=torch.int32)
        if not self.units:
            return found
        rows, searched = torch.arange(len(queries)), min(2 * length, len(self._table))
        while len(rows):
            short = []
            for part in rows.split(max(1, _COINS_AT_A_TIME // max(1, searched))):
                records = search(queries[part], self._table, searched)
                first = first_in_row(self._persons[records.numpy()])
                first &= first.cumsum(axis=1) <= found.shape[1]
                enough = torch.from_numpy(first.sum(axis=1) == found.shape[1])
                chosen = records[enough][torch.from_numpy(first)[enough]]
                found[part[enough]] = chosen.view(-1, found.shape[1]).int()
                short.append(part[~enough])
            rows, searched = torch.cat(short), min(2 * searched, len(self._table))
        return found


class PoissonNeighbors(PoissonTotals):
    """Votes of the k nearest records of a fresh Poisson sample, for many queries.

    A vote is the row of a one-hot matrix, so votes are :class:`PoissonSums` of such rows; they are counted without
    writing the rows down.

    Args:
        table: see :class:`PoissonTotals`.
        labels: int64, shape ``(n,)``, values in ``[0, num_classes)``.
        num_classes: number of classes, a public constant.
        k: number of neighbours that vote.
        sampling_rate: see :class:`PoissonTotals`.
        **search: further arguments of :class:`PoissonTotals`.
    """

    dtype = torch.int64

    def __init__(
        self, table: Tensor, labels: Tensor, num_classes: int, k: int, sampling_rate: float, **search: Any
    ) -> None:
        self.num_classes = check_int("num_classes", num_classes, minimum=2)
        super().__init__(table, k, sampling_rate, self.num_classes, **search)
        self._labels = compact_labels(labels, len(table), self.num_classes)

    def add(self, totals: Tensor, rows: Tensor, places: Tensor, records: Tensor) -> None:
        """Add one vote for each record; see :meth:`PoissonTotals.add`."""
        totals[rows] += count_votes(places, self._labels[records], len(rows), self.num_classes)


class PoissonSums(PoissonTotals):
    """Sums of the rows that the k nearest records of a fresh Poisson sample hold, for many queries.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        values: what a record adds, finite floating point, shape ``(n, a)``.
        k: number of neighbours that are summed.
        sampling_rate: see :class:`PoissonTotals`.
        **search: further arguments of :class:`PoissonTotals`.
    """

    dtype = torch.float64

    def __init__(self, table: Tensor, values: Tensor, k: int, sampling_rate: float, **search: Any) -> None:
        if values.ndim != 2 or len(values) != len(table) or not values.is_floating_point():
            raise ValueError(
                f"values: shape {shape_text(values.shape)}, {values.dtype}; expected float of shape (n, a), "
                "a row for each row of the table"
            )
        if not bool(values.isfinite().all()):
            raise ValueError("values: some are NaN or infinite; a sum of them has no meaning")
        super().__init__(table, k, sampling_rate, values.shape[1], **search)
        self._values = values.to("cpu", torch.float64)

    def add(self, totals: Tensor, rows: Tensor, places: Tensor, records: Tensor) -> None:
        """Add the records' rows; see :meth:`PoissonTotals.add`."""
        totals.index_add_(0, rows[places], self._values[records])

    def gathered(self, length: int) -> int:
        """Memory of the gathered rows; see :meth:`PoissonTotals.gathered`."""
        return max(length, self.k * self.width)


def compact(owners: Tensor) -> NDArray[np.int32]:
    """Number of each record's person, from 0, int32 ``(n,)``."""
    return owners.unique(return_inverse=True)[1].int().numpy()


def first_in_row(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask of the first occurrence of each number in its row, bool of the shape ``(m, l)``."""
    order = numbers.argsort(axis=1, kind="stable")
    sorted_numbers = np.take_along_axis(numbers, order, axis=1)
    new = np.ones_like(sorted_numbers, dtype=bool)
    new[:, 1:] = sorted_numbers[:, 1:] != sorted_numbers[:, :-1]
    first = np.empty_like(new)
    np.put_along_axis(first, order, new, axis=1)
    return first


def toss(coins: Coins | None, shape: tuple[int, ...], rate: float) -> Tensor:
    """Toss coins of a shape at a rate, and check the result.

    Raises:
        ValueError: if there is no source of coins, or it gives another shape or dtype.
    """
    if coins is None:
        raise ValueError(f"coins=None, but sampling_rate={rate} needs a source such as noise.bernoulli")
    drawn = coins(tuple(shape), rate)
    if drawn.dtype != torch.bool or drawn.shape != torch.Size(shape):
        raise ValueError(
            f"coins gave {drawn.dtype} of shape {tuple(drawn.shape)}; expected bool of {tuple(shape)}"
        )
    return drawn


def compact_labels(labels: Tensor, records: int, num_classes: int) -> Tensor:
    """Labels of ``records`` records, checked, on the CPU and in the smallest type that holds them.

    Gathering them by the million then works out of the processor's cache.
    """
    if labels.shape != (records,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; expected int64 of shape (n,), one for each "
            "row of the table"
        )
    if records and bool(((labels < 0) | (labels >= num_classes)).any()):
        raise ValueError(f"labels: some lie outside [0, num_classes={num_classes}); remap them to 0 … c-1")
    return labels.to("cpu", torch.uint8 if num_classes <= 256 else torch.int64)


def count_votes(rows: Tensor, labels: Tensor, queries: int, num_classes: int) -> Tensor:
    """Counts of each label in each row, int64 ``(queries, num_classes)``."""
    cells = rows * num_classes + labels
    return cells.bincount(minlength=queries * num_classes).view(queries, num_classes)


@functools.lru_cache(maxsize=64)
def _list_length(k: int, sampling_rate: float) -> int:
    if sampling_rate == 1.0:
        return k
    from scipy.stats import nbinom

    return k + int(nbinom.isf(_SHORTFALL, k, sampling_rate))


# A candidate travels as its float64 squared distance and an int64 that holds its global index above its label.
_LABEL_BITS = 16
_NOBODY = torch.iinfo(torch.int64).max


class ShardedNeighbors:
    """Votes of the k nearest records of a Poisson sample of all shards, with the methods of ``PoissonNeighbors``.

    Each process tosses coins for the records of its shard and finds the k nearest accepted ones. Those of all
    shards are merged by their float64 distance, ties by global index. The k nearest of the whole sample are among
    them, so the votes are those of one process that holds the whole table and tosses the same coins: a record is
    accepted by an independent coin, in any shard. What travels are 16 bytes for each of the k candidates of a
    shard, to process 0 alone. Every process calls :meth:`rank` and :meth:`votes` alike.

    Args:
        table: features of this shard's records, floating point, shape ``(n, d)``; there may be none.
        labels: int64, shape ``(n,)``.
        num_classes: number of classes, at most 65,536.
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1].
        shard: which records these are.
        owners: see :class:`PoissonTotals`; no person lies in two shards.
        device: as in :func:`~pl_privknn.neighbors.search.nearest`.
    """

    def __init__(
        self,
        table: Tensor,
        labels: Tensor,
        num_classes: int,
        k: int,
        sampling_rate: float,
        shard: Shard,
        *,
        owners: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if num_classes > 1 << _LABEL_BITS:
            raise ValueError(
                f"num_classes={num_classes} is more than the {1 << _LABEL_BITS} that shards can name"
            )
        self.num_classes, self.shard = num_classes, shard
        self._nearest = _NearestAccepted(table, k, sampling_rate, k, owners=owners, device=device)
        # One label more, for missing candidates: number -1.
        self._labels = functional.pad(compact_labels(labels, len(table), num_classes), (0, 1))

    def rank(self, queries: Tensor) -> RankedLists:
        """Search in this process's shard; each process does so for the same queries."""
        return self._nearest.rank(queries.cpu())

    def votes(self, ranked: RankedLists, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query, int64 ``(m, num_classes)``; see ``PoissonNeighbors.votes``.

        Args:
            ranked: of this process's shard.
            coins: likewise.

        Returns:
            the votes of all shards on global rank 0, zeros elsewhere.
        """
        squared, packed = self._gathered(ranked, coins)
        if self.shard.group.rank:
            return torch.zeros(len(squared), self.num_classes, dtype=torch.int64)
        query, place = self._nearest_of_all(squared, packed).nonzero(as_tuple=True)
        labels = packed[query, place] & ((1 << _LABEL_BITS) - 1)
        return count_votes(query, labels, len(squared), self.num_classes)

    def _nearest_of_all(self, squared: Tensor, packed: Tensor) -> Tensor:
        """Mask of the candidates of all shards that are the k nearest, bool ``(m, shards · k)``."""
        k = self._nearest.k
        farthest = torch.from_numpy(np.partition(squared.numpy(), k - 1, axis=1)[:, k - 1 : k])
        chosen = (squared <= farthest) & (squared < torch.inf)
        # Ties at the k-th place go by global index, which is in the upper bits.
        for query in (chosen.sum(dim=1) > k).nonzero()[:, 0].tolist():
            order = np.lexsort((packed[query].numpy(), squared[query].numpy()))
            chosen[query] = False
            chosen[query, torch.from_numpy(order[:k])] = True
        return chosen

    def _gathered(self, ranked: RankedLists, coins: Coins | None) -> tuple[Tensor, Tensor]:
        """Candidates of all shards on process 0, ``(m, shards · k)``; empty elsewhere."""
        squared, records = self._nearest.accepted(ranked, coins)
        packed = (self.shard.index(records) << _LABEL_BITS) | self._labels[records].long()
        packed.masked_fill_(records < 0, _NOBODY)
        sent = torch.stack([squared.view(torch.int64), packed])
        parts = self.shard.group.gather(sent)
        if not parts:
            return squared[:, :0], packed[:, :0]
        together = torch.cat(parts, dim=2)
        return together[0].contiguous().view(torch.float64), together[1]


class _NearestAccepted(PoissonTotals):
    """Numbers plus one of the k nearest records of a fresh Poisson sample; 0 where there is none."""

    dtype = torch.int64

    def add(self, totals: Tensor, rows: Tensor, places: Tensor, records: Tensor) -> None:
        """Append the accepted records of each query; see :meth:`PoissonTotals.add`."""
        counts = places.bincount(minlength=len(rows))
        before = (totals[rows] > 0).sum(dim=1) - (counts.cumsum(0) - counts)
        totals[rows[places], torch.arange(len(places)) + before[places]] = records + 1

    def accepted(self, ranked: RankedLists, coins: Coins | None) -> tuple[Tensor, Tensor]:
        """Squared distances, float64 ``(m, k)``, ascending, and records, int64 ``(m, k)``; infinity and -1: none."""
        records = self.votes(ranked, coins) - 1
        rows, places = (records >= 0).nonzero(as_tuple=True)
        squared = torch.full(records.shape, torch.inf, dtype=torch.float64)
        pairs = rows.numpy(), records[rows, places].numpy()
        squared[rows, places] = torch.from_numpy(_squared(ranked.queries, self._table, *pairs))
        return squared, records


def _squared(
    queries: Tensor, table: Tensor, rows: NDArray[np.int64], records: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Squared distances of pairs, by the function that a search compares records with."""
    here, there = (part.detach().to("cpu", torch.float32).contiguous().numpy() for part in (queries, table))
    return pair_distances(here, there, rows, records)
