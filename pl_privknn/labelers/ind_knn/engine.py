"""Ind-KNN over one private table that may change: search, answers and spent budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import InputError
from pl_privknn._processes import ALONE, ProcessGroup
from pl_privknn.labelers.ind_knn.algorithm import Floats, IndKNNParameters, IndKNNSwitches, ask, collect
from pl_privknn.neighbors.hashing import HashIndex, chosen_products
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
    """Scale each row to length 1, float32; a row of zeros is unchanged.

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


@dataclasses.dataclass(frozen=True)
class Answers:
    """Releases of a batch of queries; all are differentially private and paid for.

    Attributes:
        labels: int64, shape ``(m,)``; the winning class, -1 where the answer was held back as unsure.
        noisy: float64, shape ``(m, c)``; noisy votes.
        counts: float64, shape ``(m,)``; noisy numbers of neighbours, at least the floor.
    """

    labels: NDArray[np.int64]
    noisy: Floats
    counts: Floats


class IndKNNEngine:
    """Ind-KNN over one table and its budgets.

    Args:
        parameters: public constants.
        switches: what is added to Algorithm 3.
        num_classes: number of classes.
        dimension: of the features.
        budgets: of the records or persons, in quanta of ``parameters``.

    Attributes:
        vectors: of the private records, float32 unit vectors ``(n, dimension)``. **Private**, as the next three.
        labels: int64 ``(n,)``.
        ids: the records' numbers, int64 ``(n,)``.
        owners: the numbers under which they have their budgets, int64 ``(n,)``.
        answered: unit vectors and labels of earlier queries; public, so they take part without a budget.
        reference: unit vectors of public examples, for thresholds by density.
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
        self.vectors = self.reference = torch.empty(0, dimension)
        self.labels, self.ids, self.owners = (np.empty(0, np.int64) for _ in range(3))
        self.answered: tuple[Tensor, NDArray[np.int64]] = (self.vectors, self.labels)
        self.index = None if switches.hashing is None else HashIndex(switches.hashing, dimension)
        self.device: torch.device | None = None
        self._located: tuple[Ids | None, Rows] = (None, np.empty(0, np.intp))

    def add(self, ids: Ids, vectors: Tensor, labels: NDArray[np.int64], owners: Ids) -> None:
        """Add records, with the remaining budgets of their owners.

        Args:
            ids: their numbers, ``(n,)``; none is in the table.
            vectors: of :func:`unit_rows`, ``(n, dimension)``; the first ones are kept, not copied.
            labels: ``(n,)``.
            owners: the numbers under which they have budgets, ``(n,)``.
        """
        self.vectors = torch.cat([self.vectors, vectors]) if len(self.vectors) else vectors
        self.labels = np.concatenate([self.labels, labels])
        self.ids, self.owners = np.concatenate([self.ids, ids]), np.concatenate([self.owners, owners])
        self._located = (None, self._located[1])
        if self.index is not None:
            self.index.append(vectors)

    def remove(self, ids: Ids) -> None:
        """Remove and overwrite records; their spent budgets are kept."""
        kept = ~np.isin(self.ids, ids)
        self._located = (None, self._located[1])
        for name in ("vectors", "labels", "ids", "owners"):
            before = getattr(self, name)
            setattr(self, name, before[kept])
            before[:] = 0
        if self.index is not None:
            self.index.keep(kept)

    @property
    def _places(self) -> Rows:
        """Places of the records' owners in the budgets, which move when budgets are read anew."""
        numbers = self.budgets.numbers
        if self._located[0] is not numbers:
            self._located = (numbers, self.budgets.places(self.owners))
        return self._located[1]

    def remaining(self) -> Floats:
        """Remaining budget of each record, or of its person. **Private**."""
        return self.budgets.left[self._places] * self.parameters.quantum

    # ------------------------------------------------------------------ answering

    def answer(
        self,
        queries: Tensor,
        source: NoiseSource,
        ledger: ChargesLedger | None,
        processes: ProcessGroup = ALONE,
    ) -> Answers:
        """Answer queries one after another, by Algorithm 3; their cost is on disk when this returns.

        Args:
            queries: float features, shape ``(m, dimension)``.
            source: of protective randomness, from which each query draws in turn.
            ledger: receives the charge of the whole stream, unless it has it; None for a call without a ledger.
            processes: each calls this for the same queries, with the engine of its shard.

        Raises:
            BudgetExceeded: as the ledger says; nothing was drawn.
            PrivateStoreError: if the budgets are not the latest of this run, or could not be written; nothing is let
                out.
        """
        vectors, size, known = unit_rows(queries), (len(queries), self.num_classes), self.answered
        noise = source  # of the batch on global rank 0; on others, which draw nothing, it is not used

        def pay() -> Floats:
            nonlocal noise
            noise = self.budgets.pay_for(self.parameters.total, ledger, source)
            return self._thresholds(vectors)

        thresholds = processes.from_first(pay)
        answers = Answers(np.full(size[0], -1, np.int64), np.empty(size), np.empty(size[0]))
        around = torch.cat([known[0], vectors]) if self.switches.reuse else known[0]
        self.begin(vectors, thresholds)

        def asked(count: float) -> Floats:
            return processes.sum(torch.from_numpy(self.votes(count))).numpy()

        for query, vector in enumerate(vectors):
            votes, number = self._public_votes(
                around, known[1], answers.labels[:query], vector, thresholds[query]
            )
            active = int(processes.sum(torch.tensor(self.turn())))
            released = ask(self.parameters, active, asked, votes, number, noise, processes)
            answers.noisy[query], answers.counts[query] = released.noisy, released.count
            answers.labels[query] = self._decide(released.noisy, released.count)
        # Global rank 0 writes first: it knows of any query that another shard has paid for.
        mark = processes.from_first(lambda: self.pay(self.budgets.next_mark()))
        if processes.rank:
            self.pay(mark)
        processes.sum(torch.zeros(1))  # all have written
        if not processes.rank:
            self.budgets.vouch(ledger, mark)
        if self.switches.reuse:
            kept = answers.labels >= 0
            self.answered = (
                torch.cat([known[0], vectors[torch.from_numpy(kept)]]),
                np.concatenate([known[1], answers.labels[kept]]),
            )
        return answers

    def _public_votes(
        self, around: Tensor, known: Ids, answered: Ids, vector: Tensor, threshold: float
    ) -> tuple[Floats, int]:
        """Votes of earlier answers, of former batches and of this one."""
        labels = np.concatenate([known, answered]) if self.switches.reuse else known
        if not len(labels):
            return np.zeros(self.num_classes), 0
        near, kappa = self.parameters.neighbors((around[: len(labels)] @ vector).numpy(), threshold)
        said = labels[near] >= 0
        votes = np.bincount(labels[near][said], kappa[said], self.num_classes).astype(np.float64)
        return votes, int(said.sum())

    # A record's part in a query depends on the query, on that record, on what its owner has left and on the noisy
    # number of neighbours, which is released: on nothing that other records hold. So records may lie in shards, and
    # what travels are sums.

    def begin(self, vectors: Tensor, thresholds: Floats) -> None:
        """Start a batch of queries that are answered one after another."""
        self._coming = self.neighborhoods(vectors, thresholds)
        self._paying = (np.empty(0, np.intp), np.empty(0))

    def turn(self) -> int:
        """**Private.** Number of neighbours of the next query that can pay."""
        self._settle()
        self._near, self._kappa = next(self._coming)
        owners, _ = self._owners_of(self._near)
        return int(
            np.count_nonzero(self.budgets.left[owners] >= self.parameters.costs(self.parameters.count_cost))
        )

    def pay(self, mark: str) -> str:
        """Write the cost of all queries since :meth:`begin`; returns the mark."""
        self._settle()
        self.budgets.spend(mark)
        return mark

    def votes(self, count: float) -> Floats:
        """**Private.** Votes of the present query, ``(c,)``, at a noisy number of neighbours.

        What they cost is put aside until the next query: they may be asked for again.
        """
        paying, owners = self._owners_of(self._near)
        near, kappa, left = self._near, self._kappa, self.budgets.left[paying]
        if len(paying) < len(near):
            order = np.argsort(owners, kind="stable")
            owners, near, kappa = owners[order], near[order], kappa[order]
        parameters = self.parameters
        votes = collect(
            owners,
            kappa,
            self.labels[near],
            left,
            self.num_classes,
            float(parameters.costs(parameters.count_cost)),
            parameters.sigma2 * float(np.sqrt(count)),
            parameters.quantum,
        )
        self._paying = (paying, left)
        return votes

    def _owners_of(self, near: Rows) -> tuple[Rows, Rows]:
        """Places of the owners of some records in the budgets, each once, and which of these owns each record."""
        if self.budgets.unit == "record":
            return self._places[near], np.arange(len(near))
        owners, which = np.unique(self._places[near], return_inverse=True)
        return owners, which

    def _settle(self) -> None:
        paying, left = self._paying
        self.budgets.left[paying] = left

    def _decide(self, noisy: Floats, count: float) -> int:
        """The class with the most noisy votes, or -1; uses released values and public constants only."""
        winner = int(noisy.argmax())
        if self.switches.abstain:
            margin = noisy[winner] - np.delete(noisy, winner).max()
            if margin < self.switches.abstain * self.parameters.sigma2 * np.sqrt(2 * count):
                return -1
        return winner

    # ------------------------------------------------------------------ searching

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
        """Private neighbours of each query and their κ, whatever their budgets; one product per block of queries."""
        step = min(_MOST_QUERIES_AT_ONCE, max(1, _BLOCK_ENTRIES // max(1, len(self.vectors))))
        elsewhere = None if self.device is None or self.device.type == "cpu" else self.device
        for start in range(0, len(vectors), step):
            some, bounds = vectors[start : start + step], thresholds[start : start + step]
            if self.index is None and elsewhere is None:
                for similarities, threshold in zip((some @ self.vectors.T).numpy(), bounds, strict=True):
                    yield self.parameters.neighbors(similarities, float(threshold))
                continue
            if self.index is not None:
                found = self.index.candidates(some)
            else:
                least = np.array([self.parameters.similarity(float(threshold)) for threshold in bounds])
                found = reaching(some, self.vectors, least, elsewhere or torch.device("cpu"))
            for vector, threshold, candidates in zip(some, bounds, found, strict=True):
                similarities = chosen_products(self.vectors.numpy(), candidates, vector.numpy())
                near, kappa = self.parameters.neighbors(similarities, float(threshold))
                yield candidates[near], kappa


def check_queries(queries: Tensor, dimension: int) -> None:
    """Raise ``ValueError`` unless ``queries`` are finite vectors of the table's dimension."""
    if queries.ndim != 2 or queries.shape[1] != dimension or not queries.is_floating_point():
        raise InputError(
            f"queries: shape {tuple(queries.shape)}, {queries.dtype}; expected float of shape (m, {dimension}), "
            "from the same extractor as the private features"
        )
    if not bool(torch.isfinite(queries).all()):
        raise InputError("queries: some are NaN or infinite; leave those examples out")
