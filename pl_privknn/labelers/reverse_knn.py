"""Reverse kNN: each private record votes for its nearest queries, at a cost independent of their number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_int, check_non_negative, check_switch
from pl_privknn.labelers.attributes import (
    Attributes,
    FixedThresholds,
    attributes_of,
    clip_attributes,
    denoised,
    single_vote_norms,
)
from pl_privknn.labelers.base import (
    Capabilities,
    PayingRun,
    PrivateRecords,
    Release,
    SpendsBudget,
    nonnegative_shares,
    sum_noise,
)
from pl_privknn.neighbors import assign
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms.base import ADJACENCIES, AdditiveNoise, Charge, Mechanism
from pl_privknn.privacy.mechanisms.noisy_votes import Laplace
from pl_privknn.privacy.noise import NoiseSource


@dataclasses.dataclass(frozen=True)
class CountTable:
    """Sizes of a table of counts, and of the votes of each record.

    Attributes:
        queries: s.
        classes: c.
        k: queries that a record votes for.
        labels: r, labels of a record.
    """

    queries: int
    classes: int
    k: int = 1
    labels: int = 1

    @property
    def cells(self) -> int:
        """Number of cells, s·c."""
        return self.queries * self.classes

    @property
    def ones(self) -> int:
        """Number of cells that a record votes for, k·r."""
        return self.k * self.labels

    def cells_of(self, nearest: Tensor, labels: Tensor) -> Tensor:
        """Cell numbers ``query·c + class``, int64 ``(n, k·r)``, of queries ``(n, k)`` and labels ``(n, r)``."""
        return (nearest[:, :, None] * self.classes + labels[:, None, :]).flatten(1)


def true_counts(table: CountTable, nearest: Tensor, labels: Tensor) -> Tensor:
    """Exact counts, int64 ``(s·c,)``: **private**."""
    return torch.bincount(table.cells_of(nearest, labels).flatten(), minlength=table.cells)


def check_counts(counts: Tensor) -> None:
    """Raise ``ValueError`` unless ``counts`` is a table of counts; the message holds its shape alone."""
    if counts.ndim != 2 or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise ValueError(
            f"counts: shape {tuple(counts.shape)}, {counts.dtype}; expected int64 (s, c), none below 0"
        )


def decide(
    noisy: Tensor, deviation: float, abstain: float, soft: bool, max_answers: int | None = None
) -> Release:
    """Turn noisy counts into labels, from released counts and public constants alone.

    Args:
        noisy: float64, shape ``(s, c)``.
        deviation: standard deviation of the noise on one count.
        abstain: refuse below this many standard deviations between the two largest counts.
        soft: give class probabilities too.
        max_answers: answer at most this many, the first ones.

    Returns:
        The labels, and the counts as they are, for what is to be made of them later.
    """
    released = noisy.float()
    top = noisy.topk(2, dim=1).values
    labels = noisy.argmax(dim=1)
    labels[top[:, 0] - top[:, 1] < abstain * deviation * math.sqrt(2.0)] = -1
    if max_answers is not None:
        labels[torch.nonzero(labels >= 0).flatten()[max_answers:]] = -1
    if not soft:
        return Release(labels, scores=released, score_deviation=deviation)
    return Release(labels, nonnegative_shares(noisy).float(), released, deviation)


class RecordVotes(SpendsBudget):
    """Base class of labelers whose records vote for their nearest queries.

    Args:
        k: number of nearest queries that a record votes for.
        soft: release class probabilities too: the non-negative part of the noisy counts, normalised.
        abstain: refuse a query where the two largest noisy counts differ by less than this many standard
            deviations of that difference's noise; 0 answers every query. Post-processing, free of cost.
        budget: sets the noise; see :class:`~pl_privknn.labelers.base.SpendsBudget`.
        noise: other noise that is given, or None.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
    """

    attributes: Attributes | None = None
    _drawn: Tensor | None = None

    def __init__(
        self,
        k: int,
        soft: bool,
        abstain: float,
        budget: Budget | None,
        noise: Mechanism | None,
        noise_source: NoiseSource | None,
    ) -> None:
        super().__init__(budget, noise, noise_source)
        self.k = check_int("k", k)
        self.soft = check_switch("soft", soft)
        self.abstain = check_non_negative("abstain", abstain)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: one release per round; persons, each voting with one record drawn by a private coin."""
        return Capabilities(in_batches=False, persons=True)

    def learn(self, records: PrivateRecords) -> None:
        """Draw a record of each person; records are read block by block, once a round."""
        self._drawn = None
        if records.owners is not None:
            self._drawn = torch.zeros(len(records), dtype=torch.bool)
            self._drawn[self.drawn_records()] = True

    def counts(self, queries: Tensor) -> Tensor:
        """**Private.** Exact counts, for the data owner and for tests only.

        Args:
            queries: float32 features, shape ``(s, d)``.

        Returns:
            int64, shape ``(s, num_classes)``.
        """
        table = CountTable(len(queries), self.records.num_classes, self.k)
        counts = torch.zeros(table.cells, dtype=torch.int64)
        for nearest, labels in self._choices(queries.cpu()):
            counts += true_counts(table, nearest, labels)
        return self.records.processes.sum(counts.view(table.queries, table.classes))

    def votes(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Each record's queries, int64 ``(n, k)``, and its label ``(n, 1)``: **private**, for the data owner."""
        nearest, labels = zip(*self._choices(queries), strict=True)
        return torch.cat(nearest), torch.cat(labels)

    def _choices(self, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Block by block: each record's queries, int64 ``(b, k)``, and its label ``(b, 1)``."""
        if len(queries) < self.k:
            raise InputError(
                f"queries: there are {len(queries)}, fewer than k={self.k}; ask about more or lower k"
            )
        done = 0
        for features, labels in self.records.blocks():
            if self._drawn is not None:
                rows, done = self._drawn[done : done + len(labels)], done + len(labels)
                features, labels = features[rows], labels[rows]
            yield assign(features, queries, self.k, device=self.records.device), labels[:, None]


class ReverseKNN(RecordVotes):
    """Teacher whose records vote for their nearest queries: reverse kNN, one noisy table of counts a round.

    Each private record gives its label to its ``k`` nearest queries; the table of counts, one row a query
    and one column a class, is noised and released **once a round**. A record touches at most ``k`` counts,
    so ε depends on ``k`` and on the number of rounds, and not on the number of queries. The queries must
    not depend on private data; ``selection=ClusterSelection()`` of
    :class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler` asks about the centres of clusters of
    public images, and every image of a cluster takes its centre's label.

    A curator holds the records and adds noise to the counts. Without one see
    :class:`~pl_privknn.labelers.local.LocalReverseKNN` and
    :class:`~pl_privknn.labelers.local.ShuffledReverseKNN`.

    **Persons.** Where the unit of privacy is a person, one record of each, drawn by a private coin, votes in a round.

    **Attributes.** A record gives its attribute vector, clipped to an L1 norm of at most τ (the r of the paper: it
    spreads r votes over all of its attributes), to its ``k`` nearest queries, and one further vote that says "here
    is a record": without that count an attribute that few records have would look like a query that few
    records are near to. A record so adds to k rows a clipped vector of norms (ℓ₁, ℓ₂)
    (:func:`~pl_privknn.labelers.attributes.single_vote_norms`) and a one: k(ℓ₁ + 1) in L1 and √(k(ℓ₂² + 1)) in L2. A
    replaced record takes that away and adds as much: twice the L1 norm, and at most √2 times the L2 norm because
    entries are not negative.

    Args:
        k: number of nearest queries that a record votes for.
        noise: the mechanism with its noise scale, ``Laplace`` or ``Gaussian``;
            sensitivities are filled in.
        budget: sets Laplace noise of scale ``k · rounds / ε`` (twice that under ``replace_one``), so that all rounds
            together are ε-differentially private with δ = 0; by default the budget of the run.
        soft: release class probabilities too: the non-negative part of the noisy counts, normalised.
        abstain: refuse a query where the two largest noisy counts differ by less than this many standard
            deviations of that difference's noise (of attributes: whose noisy number of records is below this many
            deviations of the noise); 0 answers every query. Post-processing, free of cost.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        task: ``"multiclass"``, or ``"multilabel"``: labels are attributes; with ``Laplace`` or ``Gaussian`` noise.
            The rule is :class:`~pl_privknn.labelers.attributes.FixedThresholds`, whose threshold is a share of the
            released number of records near the query; by default it denoises the whole table together.
        attributes: settings of ``task="multilabel"``.

    Raises:
        ValueError: for values out of range, or both a budget's ε and ``noise``.

    Example:
        >>> from pl_privknn.labelers import ReverseKNN
        >>> from pl_privknn.privacy import Budget, epsilon_for_delta
        >>> teacher = ReverseKNN(k=1, budget=Budget(epsilon=0.5))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.5
    """

    free_parameters = ("noise",)

    def __init__(
        self,
        k: int = 1,
        noise: Mechanism | None = None,
        budget: Budget | None = None,
        soft: bool = True,
        abstain: float = 0.0,
        noise_source: NoiseSource | None = None,
        task: str = "multiclass",
        attributes: Attributes | None = None,
    ) -> None:
        attributes = attributes_of(task, attributes)
        super().__init__(k, soft, abstain, budget, noise, noise_source)
        self.attributes, self.noise = attributes, noise
        self._epsilon: float | None = None  # of one round, where a budget sets the noise
        if attributes is not None:
            self.tasks = ("multilabel",)
            if attributes.rule is not None and not isinstance(attributes.rule, FixedThresholds):
                raise ValueError(
                    f"attributes.rule={attributes.rule!r}: the number of votes differs between queries; use "
                    "FixedThresholds"
                )
        self._begin()

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set Laplace noise of pure ε, the budget's over ``rounds``, for each round; see the base."""
        self.adjacencies = (budget.adjacency,)
        if not self._own_noise:
            assert budget.epsilon is not None
            self._epsilon = budget.epsilon / rounds
        self.mechanism(2)  # refuses what can't be added to counts at once

    def mechanism(self, num_classes: int) -> AdditiveNoise:
        """Mechanism that draws the noise of one round and is charged for it.

        Raises:
            ValueError: before the noise is set.
        """
        l1 = squared_l2 = 1.0  # norms of what a record gives to one query
        if self.attributes is not None:
            of_vote = single_vote_norms(self.attributes.tau, num_classes)
            l1, squared_l2 = of_vote[0] + 1, of_vote[1] ** 2 + 1
        rows = self.k * (2 if self.adjacencies == ("replace_one",) else 1)
        noise = self.noise
        if noise is None:
            noise = Laplace(scale=rows * l1 / self.set_by_budget(self._epsilon))
        return sum_noise(noise, rows * l1, math.sqrt(rows * squared_l2))

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One release a round; see :meth:`Labeler.plan`."""
        return [Charge(self.mechanism(num_classes), rounds)]

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Count votes, add noise and decide for all queries of a round; see :meth:`Labeler.answer`.

        Raises:
            ValueError: for fewer queries than ``k``.
        """
        return self.release(self.counts(queries), run, max_answers)

    def release(self, counts: Tensor, run: PayingRun, max_answers: int | None = None) -> Release:
        """Charge one round, add noise to its counts and decide: the server's part.

        Counts add up, so records may be held by many clients: each computes its :meth:`counts`, and the server
        releases the sum. How records are spread over clients changes nothing, the guarantee of each record included.

        Args:
            counts: int64, shape ``(s, c)``; sum over clients in which each record takes part once. **Private**.
            run: see :meth:`~pl_privknn.labelers.base.Labeler.paying`.
            max_answers: as for :meth:`label`.

        Raises:
            ValueError: for something that is no table of counts.
        """
        if self.attributes is not None:
            return self._release_sums(self.attributes, counts, run, max_answers)
        check_counts(counts)
        mechanism = self.mechanism(counts.shape[1])
        noise = run.pay(mechanism, 1, "counts")
        noisy = run.processes.from_first(lambda: mechanism.add_noise(counts, noise).double())
        return decide(noisy, mechanism.deviation, self.abstain, self.soft, max_answers)

    def _release_sums(
        self, attributes: Attributes, sums: Tensor, run: PayingRun, max_answers: int | None
    ) -> Release:
        mechanism = self.mechanism(sums.shape[1] - 1)
        noise = run.pay(mechanism, 1, "sums")
        noisy, deviation = mechanism.add_noise(sums, noise), mechanism.deviation
        refused = noisy[:, -1] < self.abstain * deviation
        rule = FixedThresholds(denoise=True) if attributes.rule is None else attributes.rule
        assert isinstance(rule, FixedThresholds)
        if rule.denoise:
            noisy = denoised(noisy, deviation)[0]
        rule = dataclasses.replace(rule, denoise=False)
        probabilities = rule(noisy[:, :-1], noisy[:, -1].clamp(min=0), attributes.tau, deviation)
        labels = (probabilities > 0.5).long()
        labels[refused] = -1
        if max_answers is not None:
            labels[torch.nonzero(~refused).flatten()[max_answers:]] = -1
        return Release(labels, probabilities.float() if self.soft else None)

    def counts(self, queries: Tensor) -> Tensor:
        """See :meth:`RecordVotes.counts`; of attributes float64 ``(s, a + 1)``, the last column of records."""
        if self.attributes is not None:
            return self._own_sums(queries.cpu(), self.attributes)
        return super().counts(queries)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the base, and shards of records with classes, whose counts add up."""
        return dataclasses.replace(super().capabilities, shards=() if self.attributes else ADJACENCIES)

    def _own_sums(self, queries: Tensor, attributes: Attributes) -> Tensor:
        sums = torch.zeros(len(queries), self.records.num_classes + 1, dtype=torch.float64)
        for nearest, labels in self._choices(queries):
            votes = clip_attributes(labels[:, 0], attributes.tau)
            given = torch.cat([votes, torch.ones(len(votes), 1, dtype=torch.float64)], dim=1)
            for rank in range(self.k):
                sums.index_add_(0, nearest[:, rank].long(), given)
        return sums
