"""Ind-KNN over one private table that may change: searching, answering, and paying."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_non_negative
from pl_privknn.labelers.ind_knn.algorithm import (
    NO_SHARDS,
    Floats,
    IndKNNParameters,
    NoShards,
    PublicDensity,
    ask,
)
from pl_privknn.labelers.ind_knn.retrieval import Retrieved
from pl_privknn.neighbors.hashing import HashIndex, SignProjections, chosen_products
from pl_privknn.neighbors.search import reaching
from pl_privknn.privacy.ledger import ChargesLedger
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.record_budgets import BudgetTable, Ids

Rows = NDArray[np.intp]
#: Similarities of one block of queries, at 4 bytes each (128 MiB).
_BLOCK_ENTRIES = 32 * 1024 * 1024
_MOST_QUERIES_AT_ONCE = 512
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
    """Rows of records, in buffers that grow; one that is taken out is overwritten, so nothing of it stays in memory.

    Args:
        dimension: of the vectors.

    Attributes:
        left: what each row's record has left, in quanta, float64, shape ``(capacity,)``. Private, as is
            everything here (but where the table is one of earlier queries and their answers).
    """

    def __init__(self, dimension: int) -> None:
        self._count, self._vectors = 0, torch.empty(0, dimension)
        self._labels, self._ids, self.left = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)

    def __len__(self) -> int:
        return self._count

    @property
    def dimension(self) -> int:
        """Of the vectors."""
        return self._vectors.shape[1]

    @property
    def vectors(self) -> Tensor:
        """Float32 unit vectors, shape ``(n, dimension)``; a view."""
        return self._vectors[: self._count]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Int64, shape ``(n,)``; a view."""
        return self._labels[: self._count]

    @property
    def ids(self) -> Ids:
        """The owner's numbers, int64, shape ``(n,)``; a view."""
        return self._ids[: self._count]

    def append(
        self, vectors: Tensor, labels: NDArray[np.int64], ids: Ids | int = 0, left: Floats | float = 0.0
    ) -> Rows:
        """Add records; returns their rows. The first ``vectors`` are kept, not copied."""
        start, stop = self._count, self._count + len(labels)
        if stop > len(self._ids):
            # The first records are their buffer, so a table that never grows takes no more than it needs.
            more = max(stop, 2 * len(self._ids)) - start
            grown = torch.cat([self.vectors, torch.zeros(more, self.dimension)]) if start else vectors
            self._vectors = grown
            self._labels, self._ids, self.left = (
                np.concatenate([array[:start], np.zeros(more, array.dtype)])
                for array in (self._labels, self._ids, self.left)
            )
        if self._vectors is not vectors:
            self._vectors[start:stop] = vectors
        self._labels[start:stop], self._ids[start:stop], self.left[start:stop] = labels, ids, left
        self._count = stop
        return np.arange(start, stop)

    def delete(self, gone: Rows) -> Rows:
        """Take rows out and wipe them; the last ones move into the holes, whose rows are returned."""
        count = self._count - len(gone)
        kept = np.ones(self._count, bool)
        kept[gone] = False
        holes = np.flatnonzero(~kept[:count])
        movers = count + np.flatnonzero(kept[count:])
        self._vectors[holes] = self._vectors[movers]
        self._vectors[count : self._count] = 0
        for array in (self._labels, self._ids, self.left):
            array[holes] = array[movers]
            array[count : self._count] = 0
        self._count = count
        return holes


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a batch of queries lets out; all of it is differentially private and paid for.

    Attributes:
        labels: int64, shape ``(m,)``; the winning class, -1 where the answer was held back as unsure.
        noisy: float64, shape ``(m, c)``; noisy votes.
        counts: float64, shape ``(m,)``; noisy numbers of neighbours, at least the floor.
    """

    labels: NDArray[np.int64]
    noisy: Floats
    counts: Floats


@dataclasses.dataclass(frozen=True)
class IndKNNSwitches:
    """What may be added to Algorithm 3; none of it changes what the stream costs.

    Args:
        density: :class:`~pl_privknn.labelers.ind_knn.algorithm.PublicDensity` for a threshold of its own for each
            query; None for the paper's fixed one.
        reuse: let earlier answers take part as public records, while the features stay the same.
        hashing: :class:`~pl_privknn.neighbors.hashing.SignProjections` to look only at records in the same
            bucket; None for all.
        abstain: hold back an answer where the two largest noisy votes differ by less than this many standard
            deviations of that difference's noise; 0 answers every query. Post-processing, free of cost.

    Raises:
        ValueError: if ``abstain`` is negative.
    """

    density: PublicDensity | None = None
    reuse: bool = False
    hashing: SignProjections | None = None
    abstain: float = 0.0

    def __post_init__(self) -> None:
        check_non_negative("abstain", self.abstain)


class IndKNNEngine:
    """Ind-KNN over one table, whose budgets it alone charges.

    Args:
        parameters: public constants.
        switches: what is added to Algorithm 3.
        num_classes: number of classes.
        dimension: of the features.
        budgets: of the records, in quanta of ``parameters``.

    Attributes:
        table: private records.
        answered: earlier queries and answers; public, so they take part without a budget.
        reference: unit vectors of public examples, for thresholds by density.
        others: private records in other processes; none at first.
        device: where neighbours are searched for; on the CPU if None.
    """

    def __init__(
        self,
        parameters: IndKNNParameters,
        switches: IndKNNSwitches,
        num_classes: int,
        dimension: int,
        budgets: BudgetTable,
    ) -> None:
        self.parameters, self.switches = parameters, switches
        self.num_classes, self.budgets = num_classes, budgets
        self.table, self.answered = RecordTable(dimension), RecordTable(dimension)
        self.index = None if switches.hashing is None else HashIndex(switches.hashing, dimension)
        self.reference = torch.empty(0, dimension)
        self.others: NoShards = NO_SHARDS
        self.device: torch.device | None = None

    def add(self, ids: Ids, vectors: Tensor, labels: NDArray[np.int64]) -> None:
        """Let records take part that have a budget, with what they have left of it.

        Args:
            ids: their numbers, ``(n,)``; none is in the table.
            vectors: of :func:`unit_rows`, ``(n, dimension)``; the first ones are kept, not copied.
            labels: ``(n,)``.
        """
        self._index(self.table.append(vectors, labels, ids, self.budgets.left(ids)))

    def remove(self, ids: Ids) -> None:
        """Take records out; what they spent stays on record in the budgets."""
        moved = self.table.delete(np.flatnonzero(np.isin(self.table.ids, ids)))
        if self.index is not None:
            self.index.truncate(len(self.table))
        self._index(moved)

    def remaining(self) -> Floats:
        """What each row's record has left. **Private**."""
        return self.table.left[: len(self.table)] * self.parameters.quantum

    def _index(self, rows: Rows) -> None:
        if self.index is None or not len(rows):
            return
        ascending = rows[-1] - rows[0] + 1 == len(rows)  # a run of rows, which is not copied
        chosen = slice(rows[0], rows[-1] + 1) if ascending else torch.from_numpy(rows)
        self.index.set_rows(rows, self.table.vectors[chosen])

    # ------------------------------------------------------------------ answering

    def answer(self, queries: Tensor, source: NoiseSource, ledger: ChargesLedger | None) -> Answers:
        """Answer queries one after another, by Algorithm 3; what they cost is on disk when this returns.

        Args:
            queries: float features, shape ``(m, dimension)``.
            source: of protective randomness; row t of ``normal((m, 1 + c), 1)`` serves query t.
            ledger: pays for the whole stream, unless it has; None where nobody keeps books.

        Raises:
            BudgetExceeded: as the ledger says; nothing was drawn.
            PrivateStoreError: if the budgets are not the latest of this run, or could not be written; nothing is let
                out.
        """
        noise = self.budgets.pay_for(self.parameters.total, ledger, source)
        vectors = unit_rows(queries)
        thresholds = self._thresholds(vectors)
        self.others.begin(vectors, thresholds)
        draws = noise.normal((len(vectors), 1 + self.num_classes), 1.0).numpy()
        answers = Answers(
            np.full(len(vectors), -1, np.int64),
            np.empty((len(vectors), self.num_classes)),
            np.empty(len(vectors)),
        )
        before, known = self.table.left[: len(self.table)].copy(), len(self.answered)
        try:
            for block in self._blocks(len(vectors)):
                self._answer_block(vectors[block], thresholds[block], draws[block], answers, block)
            mark = self.pay(before)
            self.others.pay(mark)
            self.budgets.vouch(ledger, mark)
        except BaseException:
            # Answers that were not paid for must not take part later, where they would come out.
            self.answered.delete(np.arange(known, len(self.answered)))
            raise
        return answers

    def retrieve(
        self, queries: Tensor, sigma: float, source: NoiseSource, ledger: ChargesLedger | None
    ) -> list[Retrieved]:
        """Find the neighbours of queries that can pay for a vote; what they pay is on disk when this returns.

        Args:
            queries: float features, shape ``(m, dimension)``.
            sigma: deviation of the vote's noise.
            source: of protective randomness.
            ledger: as in :meth:`answer`.

        Raises:
            BudgetExceeded: as the ledger says; nothing was found.
            PrivateStoreError: as in :meth:`answer`.
        """
        noise = self.budgets.pay_for(self.parameters.total, ledger, source)
        vectors, table = unit_rows(queries), self.table
        before, found = table.left[: len(table)].copy(), []
        cost = float(self.parameters.costs(1 / sigma**2))
        neighborhoods = self.neighborhoods(vectors, self._thresholds(vectors))
        for query, (near, kappa) in enumerate(neighborhoods):
            order = np.lexsort((table.ids[near], -kappa))
            near, kappa = near[order], kappa[order]
            able = table.left[near] >= cost
            near, kappa = near[able], kappa[able]
            table.left[near] -= cost
            own, ids = noise.stream("retrieval", query), table.ids[near]
            found.append(Retrieved(ids, table.labels[near], kappa, ids.copy(), sigma, self.num_classes, own))
        self.budgets.vouch(ledger, self.pay(before))
        return found

    def _answer_block(
        self, vectors: Tensor, thresholds: Floats, draws: Floats, answers: Answers, block: slice
    ) -> None:
        labels, noisy, counts = answers.labels[block], answers.noisy[block], answers.counts[block]
        earlier = (vectors @ self.answered.vectors.T).numpy()
        # An answer of this block takes part in those after it: their similarities are known beforehand.
        mutual = (vectors @ vectors.T).numpy() if self.switches.reuse else earlier[:, :0]
        for query, (near, kappa) in enumerate(self._private_neighbors(vectors, thresholds)):
            known = np.flatnonzero(labels[: query if self.switches.reuse else 0] >= 0)
            public, public_kappa = self.parameters.neighbors(
                np.concatenate([earlier[query], mutual[query, known]]), float(thresholds[query])
            )
            public_labels = np.concatenate([self.answered.labels, labels[known]])[public]
            public_votes = np.bincount(public_labels, public_kappa, self.num_classes).astype(np.float64)
            self.others.turn()
            released = ask(
                self.parameters,
                near,
                kappa,
                self.table.labels,
                self.table.left,
                public_votes,
                len(public),
                draws[query],
                others=self.others,
            )
            noisy[query], counts[query] = released.noisy, released.count
            labels[query] = self._decide(released.noisy, released.count)
        if self.switches.reuse:
            kept = labels >= 0
            self.answered.append(vectors[torch.from_numpy(kept)], labels[kept])

    def pay(self, before: Floats, mark: str | None = None) -> str:
        """Charge the budgets what records have spent; on disk when the transaction ends.

        Args:
            before: what they had left, in quanta, ``(n,)``.
            mark: of the batch, where another shard has drawn it.

        Returns:
            the batch's mark.

        Raises:
            PrivateStoreError: if the budgets could not be written.
        """
        spent = before - self.table.left[: len(before)]
        paying = np.flatnonzero(spent)
        return self.budgets.spend(self.table.ids[paying], spent[paying], mark)

    def _decide(self, noisy: Floats, count: float) -> int:
        """The class with the most noisy votes, or -1; uses released values and public constants only."""
        winner = int(noisy.argmax())
        if self.switches.abstain:
            margin = noisy[winner] - np.delete(noisy, winner).max()
            if margin < self.switches.abstain * self.parameters.sigma2 * np.sqrt(2 * count):
                return -1
        return winner

    def _thresholds(self, vectors: Tensor) -> Floats:
        if self.switches.density is None:
            return np.full(len(vectors), self.parameters.threshold)
        step = max(1, _BLOCK_ENTRIES // max(1, len(self.reference)))
        parts = [
            self.switches.density.thresholds(self.parameters, (part @ self.reference.T).numpy())
            for part in vectors.split(step)
        ]
        return np.concatenate(parts) if parts else np.empty(0)

    def neighborhoods(self, vectors: Tensor, thresholds: Floats) -> Iterator[tuple[Rows, Floats]]:
        """Private neighbours of each query and their κ, whatever they have left, block by block of queries."""
        for block in self._blocks(len(vectors)):
            yield from self._private_neighbors(vectors[block], thresholds[block])

    def _blocks(self, num_queries: int) -> list[slice]:
        """Queries whose similarities are held at a time."""
        step = min(_MOST_QUERIES_AT_ONCE, max(1, _BLOCK_ENTRIES // max(1, len(self.table))))
        return [slice(start, min(start + step, num_queries)) for start in range(0, num_queries, step)]

    def _private_neighbors(self, vectors: Tensor, thresholds: Floats) -> Iterator[tuple[Rows, Floats]]:
        """Private neighbours of each query, whatever they have left; one matrix product for all queries."""
        table = self.table.vectors
        elsewhere = None if self.device is None or self.device.type == "cpu" else self.device
        if self.index is None and elsewhere is None:
            for similarities, threshold in zip((vectors @ table.T).numpy(), thresholds, strict=True):
                yield self.parameters.neighbors(similarities, float(threshold))
            return
        if self.index is not None:
            found = self.index.candidates(vectors)
        else:
            least = np.array([self.parameters.similarity(float(threshold)) for threshold in thresholds])
            found = reaching(vectors, table, least, elsewhere or torch.device("cpu"))
        for vector, threshold, candidates in zip(vectors, thresholds, found, strict=True):
            similarities = chosen_products(table.numpy(), candidates, vector.numpy())
            near, kappa = self.parameters.neighbors(similarities, float(threshold))
            yield candidates[near], kappa


def check_queries(queries: Tensor, dimension: int) -> None:
    """Raise ``ValueError`` unless ``queries`` are finite vectors of the table's dimension."""
    if queries.ndim != 2 or queries.shape[1] != dimension or not queries.is_floating_point():
        raise ValueError(
            f"queries: shape {tuple(queries.shape)}, {queries.dtype}; want float of shape (m, {dimension}), "
            "from the same extractor as the private features"
        )
    if not bool(torch.isfinite(queries).all()):
        raise ValueError("queries: some are NaN or infinite; leave those examples out")


def probabilities(noisy: Floats) -> Tensor:
    """The non-negative part of noisy votes, normalised; uniform where there is none. Float32 ``(m, c)``."""
    positive = np.maximum(noisy, 0.0)
    total = positive.sum(axis=1, keepdims=True)
    uniform = np.full_like(positive, 1 / positive.shape[1])
    return torch.from_numpy(np.where(total > 0, positive / np.maximum(total, 1e-300), uniform)).float()
