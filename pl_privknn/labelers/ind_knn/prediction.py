"""What both faces of Ind-KNN share: a private table, its budgets, and the answering of queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_non_negative
from pl_privknn.labelers.ind_knn.algorithm import Floats, IndKNNParameters, PublicDensity, ask
from pl_privknn.labelers.ind_knn.others import ALONE, Alone
from pl_privknn.labelers.ind_knn.private_table import PublicAnswers, RecordTable, unit_rows
from pl_privknn.neighbors.hashing import HashIndex, SignProjections, chosen_products
from pl_privknn.neighbors.search import reaching
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.per_record.filter import IndividualFilter

#: Similarities of one block of queries, at 4 bytes each (128 MiB).
_BLOCK_ENTRIES = 32 * 1024 * 1024
_MOST_QUERIES_AT_ONCE = 512


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
class Predictions:
    """Differentially private answers; nothing in it is private any more.

    Attributes:
        labels: int64, shape ``(m,)``; -1 where the answer was held back as unsure (``abstain``).
        probabilities: float32, shape ``(m, c)``; the non-negative part of the noisy votes, normalised.
        counts: float64, shape ``(m,)``; noisy numbers of neighbours. Where one is at the floor, the answer may
            be nothing but noise.
    """

    labels: Tensor
    probabilities: Tensor
    counts: Tensor


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
    """Ind-KNN over one table, with one :class:`IndividualFilter` that it alone charges.

    Args:
        parameters: public constants.
        switches: what is added to Algorithm 3.
        num_classes: number of classes.
        dimension: of the features.
        budgets: the filter; its budget is that of ``parameters``.

    Attributes:
        others: private records in other processes; none at first.
        device: where neighbours are searched for; on the CPU if None.
    """

    def __init__(
        self,
        parameters: IndKNNParameters,
        switches: IndKNNSwitches,
        num_classes: int,
        dimension: int,
        budgets: IndividualFilter,
    ) -> None:
        self.parameters, self.switches = parameters, switches
        self.num_classes, self.budgets = num_classes, budgets
        self.table = RecordTable(dimension)
        self.answered = PublicAnswers(dimension)
        self.index = HashIndex(switches.hashing, dimension) if switches.hashing is not None else None
        self.reference = torch.empty(0, dimension)
        self.others: Alone = ALONE
        self.device: torch.device | None = None

    def add(
        self,
        ids: NDArray[np.int64],
        features: Tensor,
        labels: NDArray[np.int64],
        limits: Floats | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Admit records that are not in the table, with what their numbers have left.

        Args:
            ids: their numbers, ``(n,)``.
            features: float, ``(n, dimension)``.
            labels: ``(n,)``.
            limits: what each may spend in all, ``(n,)``; None for the whole budget.
            overwrite: let the unit vectors stand in the place of float32 ``features``, wherever those lie.
        """
        self.budgets.add(ids)
        left = self.parameters.quanta(self.budgets.remaining(ids))
        if limits is not None:
            # In quanta, so that what was spent and what may be spent are exact: at most the limit, rounded down.
            whole = self.parameters.quanta(np.array(self.budgets.budget))
            left = np.clip(self.parameters.quanta(limits) - (whole - left), 0.0, left)
        rows = self.table.append(ids, unit_rows(features, overwrite=overwrite), labels, left)
        self._index(rows)

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Take records out; what they spent stays on record in the filter."""
        self.budgets.remove(ids)
        moved = self.table.delete(ids)
        if self.index is not None:
            self.index.truncate(len(self.table))
        self._index(moved)

    def _index(self, rows: NDArray[np.intp]) -> None:
        if self.index is None or not len(rows):
            return
        vectors, first, last = self.table.vectors, rows[0], rows[-1]
        if last - first + 1 == len(rows):  # ascending: a run of rows, which is not copied
            self.index.set_rows(rows, vectors[first : last + 1])
        else:
            self.index.set_rows(rows, vectors[torch.from_numpy(rows)])

    def answer(self, queries: Tensor, noise: NoiseSource) -> Answers:
        """Answer queries one after another, by Algorithm 3; budgets are on disk when this returns.

        Args:
            queries: float features, shape ``(m, dimension)``.
            noise: protective randomness of these queries: row t of ``normal((m, 1 + c), 1)`` serves query t.

        Raises:
            JournalError: if the budgets could not be written; nothing is let out.
        """
        vectors = unit_rows(queries)
        thresholds = self._thresholds(vectors)
        self.others.begin(vectors, thresholds)
        draws = noise.normal((len(vectors), 1 + self.num_classes), 1.0).numpy()
        answers = Answers(
            np.full(len(vectors), -1, np.int64),
            np.empty((len(vectors), self.num_classes)),
            np.empty(len(vectors)),
        )
        before = self.table.left[: len(self.table)].copy()
        known = len(self.answered)
        try:
            for block in self._blocks(len(vectors)):
                self._answer_block(vectors[block], thresholds[block], draws[block], answers, block)
            self.pay(before)
            self.others.pay(self.budgets.mark)
        except BaseException:
            # Answers that were not paid for must not take part later, where they would come out.
            self.answered.truncate(known)
            raise
        return answers

    def _answer_block(
        self, vectors: Tensor, thresholds: Floats, draws: Floats, answers: Answers, block: slice
    ) -> None:
        labels, noisy, counts = answers.labels[block], answers.noisy[block], answers.counts[block]
        earlier = (vectors @ self.answered.vectors.T).numpy()
        # An answer of this block takes part in those after it: their similarities are known beforehand.
        mutual = (
            (vectors @ vectors.T).numpy() if self.switches.reuse else np.empty((len(labels), 0), np.float32)
        )
        for query, (near, kappa) in enumerate(self._private_neighbors(vectors, thresholds)):
            known = np.flatnonzero(labels[: query if self.switches.reuse else 0] >= 0)
            public, public_kappa = self.parameters.neighbors(
                np.concatenate([earlier[query], mutual[query, known]]), float(thresholds[query])
            )
            public_labels = np.concatenate([self.answered.labels, labels[known]])[public]
            public_votes = np.zeros(self.num_classes)
            np.add.at(public_votes, public_labels, public_kappa)
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

    def pay(self, before: Floats) -> None:
        """Charge the budgets what records have spent; on disk when this returns.

        Args:
            before: what they had left, in quanta, ``(n,)``.

        Raises:
            JournalError: if the budgets could not be written.
        """
        spent = before - self.table.left[: len(before)]
        paying = np.flatnonzero(spent)
        # Whole quanta: exact as floats and in the filter's own units. Had the filter less than the table
        # says, it would refuse here, and nothing would be let out.
        costs = spent[paying] * self.parameters.quantum
        self.budgets.charge(self.table.ids[paying], costs, excess="raise", marked=True)

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

    def neighborhoods(self, vectors: Tensor, thresholds: Floats) -> Iterator[tuple[NDArray[np.intp], Floats]]:
        """Private neighbours of each query and their κ, whatever they have left, block by block of queries."""
        for block in self._blocks(len(vectors)):
            yield from self._private_neighbors(vectors[block], thresholds[block])

    def _blocks(self, num_queries: int) -> list[slice]:
        """Queries whose similarities are held at a time."""
        step = min(_MOST_QUERIES_AT_ONCE, max(1, _BLOCK_ENTRIES // max(1, len(self.table))))
        return [slice(start, min(start + step, num_queries)) for start in range(0, num_queries, step)]

    def _private_neighbors(
        self, vectors: Tensor, thresholds: Floats
    ) -> Iterator[tuple[NDArray[np.intp], Floats]]:
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


def probabilities(noisy: NDArray[np.float64]) -> Tensor:
    """The non-negative part of noisy votes, normalised; uniform where there is none. Float32 ``(m, c)``."""
    positive = np.maximum(noisy, 0.0)
    total = positive.sum(axis=1, keepdims=True)
    uniform = np.full_like(positive, 1 / positive.shape[1])
    return torch.from_numpy(np.where(total > 0, positive / np.maximum(total, 1e-300), uniform)).float()
