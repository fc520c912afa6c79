"""Labelers that answer queries one by one (screen, charge, draw), and Private-kNN."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_finite, check_int, check_rate, check_switch
from pl_privknn.labelers.attributes import Attributes, attributes_of, clip_attributes
from pl_privknn.labelers.base import Capabilities, Labeler, PayingRun, PrivateRecords, Release, sum_noise
from pl_privknn.neighbors import Coins, PoissonNeighbors, PoissonSums, ShardedNeighbors
from pl_privknn.privacy.mechanisms.base import AdditiveNoise, Charge, Mechanism, VoteNoise
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.screening import NoisyScreening
from pl_privknn.privacy.mechanisms.stated import Conditional
from pl_privknn.privacy.noise import NoiseSource

#: Private votes, shape ``(a, c)``, of the queries at these positions, int64 ``(a,)``; samples toss their coins with
#: the noise of the release.
Votes = Callable[[Tensor, NoiseSource], Tensor]

#: L1 and L2 distance that votes move where one leaves a class and joins another.
SWAPPED_L1, SWAPPED_L2 = 2.0, math.sqrt(2.0)


@dataclasses.dataclass(frozen=True)
class Screening:
    """Noisy screening: a query passes where its largest vote count plus N(0, σ²) reaches the threshold.

    Args:
        threshold: votes; about 0.6 k is usual.
        noise: ``Gaussian`` with its standard deviation, in votes.

    Raises:
        ValueError: for a threshold that is not finite, or other noise.

    Example:
        >>> from pl_privknn import Gaussian, PrivateKNN, Screening
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> screening = Screening(threshold=180, noise=Gaussian(sigma=85.0))
        >>> teacher = PrivateKNN(k=300, sampling_rate=1.0, screening=screening)
        >>> charges = teacher.plan(num_queries=100, max_answers=0, num_classes=10)
        >>> round(epsilon_for_delta(charges, delta=1e-5), 3)
        0.351
    """

    threshold: float
    noise: Gaussian

    def __post_init__(self) -> None:
        check_finite("threshold", self.threshold)
        if not isinstance(self.noise, Gaussian):
            raise ValueError(f"screening.noise={self.noise!r} must be Gaussian(sigma)")


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """Screening and noise of a labeler that answers queries one by one: cost and draws.

    Attributes:
        noise: chooses, or noises the counts; its sensitivity and sampling rate are those of the votes.
        screening: decides which queries are answered; None answers every one.
        counts: release the noisy counts and not the winner alone; for :class:`AdditiveNoise`.
        key: identifies the release; a seeded source gives each key a separate stream.
        condition: under which a record changes no more than one vote; empty where it always does.
    """

    noise: VoteNoise
    screening: NoisyScreening | None = None
    counts: bool = False
    key: str = "aggregation"
    condition: str = ""

    @property
    def additive(self) -> AdditiveNoise:
        """Noise of released counts, as an additive mechanism."""
        assert isinstance(self.noise, AdditiveNoise)
        return self.noise

    def plan(self, num_queries: int, max_answers: int) -> list[Charge]:
        """Worst-case charges of this number of queries and answers."""
        planned = [(self.screening, num_queries), (self.noise, min(num_queries, max_answers))]
        return [Charge(self._billed(part), count) for part, count in planned if part is not None and count]

    def _billed(self, mechanism: Mechanism) -> Mechanism:
        return Conditional(mechanism, self.condition) if self.condition else mechanism

    def ask(
        self, num_queries: int, votes: Votes, run: PayingRun, max_answers: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Screen and answer queries, charging before each draw.

        Args:
            num_queries: m.
            votes: see :data:`Votes`; called after each payment, so that every release has fresh coins.
            run: pays; global rank 0, which gets the votes of all processes, draws.
            max_answers: answer the first so many that pass; all if None.

        Returns:
            Positions of the answered queries, int64 ``(a,)``, and what is released of them: winners, int64
            ``(a,)``, or noisy counts ``(a, c)``; None where none is answered.

        Raises:
            BudgetExceeded: if a charge would pass the budget; nothing was drawn or released by it.
        """
        asked = torch.arange(num_queries)
        if self.screening is not None and num_queries:
            noise = run.pay(self._billed(self.screening), num_queries, "screening")
            largest = votes(asked, noise).max(dim=1).values
            asked = asked[run.processes.from_first(functools.partial(self.screening.passes, largest, noise))]
        asked = asked[:max_answers]
        if not len(asked):
            return asked, None
        noise = run.pay(self._billed(self.noise), len(asked), self.key)
        private = votes(asked, noise)
        draw = self.additive.add_noise if self.counts else self.noise.argmax
        return asked, run.processes.from_first(functools.partial(draw, private, noise))

    def release(
        self, num_queries: int, votes: Votes, run: PayingRun, max_answers: int | None = None
    ) -> Release:
        """Labels of :meth:`ask`, -1 where refused, with the noisy counts where counts are released."""
        answered, released = self.ask(num_queries, votes, run, max_answers)
        labels = torch.full((num_queries,), -1, dtype=torch.int64)
        if released is None:
            return Release(labels)
        if not self.counts:
            labels[answered] = released
            return Release(labels)
        labels[answered] = released.argmax(dim=1)
        scores = torch.full((num_queries, released.shape[1]), torch.nan, dtype=torch.float64)
        scores[answered] = released.double()
        return Release(labels, scores=scores, score_deviation=self.additive.deviation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributeSums(Aggregation):
    """Noisy sums of clipped votes per query and attribute, with the decision rule.

    Attributes:
        attributes: has the rule.
        num_attributes: a.
        total: public number of votes that make a sum.
    """

    attributes: Attributes
    num_attributes: int
    total: int
    counts: bool = True
    key: str = "attributes"

    def release(
        self, num_queries: int, votes: Votes, run: PayingRun, max_answers: int | None = None
    ) -> Release:
        """Attributes of the first queries, rows of -1 where refused, and their probabilities."""
        labels = torch.full((num_queries, self.num_attributes), -1, dtype=torch.int64)
        probabilities = torch.full(labels.shape, 0.5)
        answered, noisy = self.ask(num_queries, votes, run, max_answers)
        if noisy is not None:
            decided = self.attributes.decide(noisy, self.total, self.additive.deviation)
            labels[answered] = (decided > 0.5).long()
            probabilities[answered] = decided.float()
        return Release(labels, probabilities)


class Neighbors(Protocol):
    """Protocol of a private table whose records nearest to a query vote."""

    def rank(self, queries: Tensor) -> Any:
        """Find the neighbours of queries, float32 ``(m, d)``; the result is indexed by rows of queries."""

    def votes(self, ranked: Any, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query, int64 ``(m, c)``; of attributes float64 ``(m, a)``."""


class VotingLabeler(Labeler):
    """Base class of labelers in which one record, or one person, changes one vote per query.

    Args:
        most_votes: number of votes about a query, the largest count that :class:`Screening` sees.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`Screening`, or None to answer every query.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        release_counts: release all noisy counts of an answered query.
        attributes: labels are attributes; every query is answered, by sums of clipped votes.

    Raises:
        ValueError: for parameters out of range, or a threshold that the votes can't reach.
    """

    #: Name of the user's argument that sets ``most_votes``, for messages.
    most_votes_name = "most_votes"
    free_parameters = ("noise",)

    def __init__(
        self,
        most_votes: int,
        sampling_rate: float,
        screening: Screening | None,
        noise: Mechanism,
        noise_source: NoiseSource | None,
        release_counts: bool,
        attributes: Attributes | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.most_votes = most_votes
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        if screening is not None and not isinstance(screening, Screening):
            raise ValueError(f"screening={screening!r} must be Screening(threshold, noise), or None")
        if screening is not None and not 0 <= screening.threshold <= most_votes:
            raise ValueError(
                f"screening.threshold={screening.threshold} can't be reached by {self.most_votes_name}={most_votes} "
                f"votes; use a threshold from 0 to {self.most_votes_name}, about 0.6 of it"
            )
        self.screening = screening
        self.release_counts = check_switch("release_counts", release_counts)
        self.attributes = attributes
        if attributes is None:
            moved = (SWAPPED_L1, SWAPPED_L2, self.sampling_rate)
            if release_counts or not isinstance(noise, VoteNoise):
                self.noise: Mechanism = sum_noise(
                    noise, *moved, what="counts (release_counts=True)" if release_counts else "votes"
                )
            else:
                self.noise = noise.for_votes(*moved)
        else:
            self.tasks = ("multilabel",)
            if screening is not None or release_counts:
                raise ValueError(
                    f"attributes with screening={screening!r}, release_counts={release_counts!r}: "
                    "sums of clipped votes are answered as they are; leave these out"
                )
            self.noise = noise
            attributes.swapped(noise, 2)  # refuses what can't be added to sums at once

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: persons; all queries of a round at once where the decision rule learns from the answers."""
        attributes = self.attributes
        return Capabilities(in_batches=attributes is None or not attributes.decision.learns, persons=True)

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """Plan of one screening per query and one aggregation per answer; see :meth:`Labeler.plan`."""
        return self.aggregation(num_classes).plan(num_queries, max_answers)

    def aggregation(self, num_classes: int) -> Aggregation:
        """Mechanism of answers for this number of classes, or attributes."""
        if self.attributes is not None:
            noise = self.attributes.swapped(self.noise, num_classes, self.sampling_rate)
            return AttributeSums(
                noise, attributes=self.attributes, num_attributes=num_classes, total=self.most_votes
            )
        assert isinstance(self.noise, VoteNoise)
        screening = None
        if self.screening is not None:
            screening = NoisyScreening(
                k=self.most_votes,
                threshold=self.screening.threshold,
                sigma=self.screening.noise.sigma,
                num_classes=num_classes,
                sampling_rate=self.sampling_rate,
            )
        return Aggregation(self.noise, screening, self.release_counts)


class NeighborVoting(VotingLabeler):
    """Base class of labelers by neighbours: screening on one sample, aggregation on another.

    Where the unit of privacy is a person, neighbours are persons: each enters with the record nearest to the query,
    has one coin, and moves votes as one record does. See :class:`VotingLabeler` for the arguments.
    """

    _neighbors: Neighbors
    _aggregation: Aggregation

    def learn(self, records: PrivateRecords) -> None:
        """Index the private records; see :meth:`Labeler.learn`."""
        aggregation = self.aggregation(records.num_classes)
        self._check_size(self._units(records), aggregation)
        self._aggregation, self._neighbors = aggregation, self._find(records)

    def _units(self, records: PrivateRecords) -> int:
        """Number of records, or of persons, of all processes."""
        return len(records) if records.owners is None else len(records.owners.unique())

    @abc.abstractmethod
    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        """Refuse a table that is too small."""

    @abc.abstractmethod
    def _find(self, records: PrivateRecords) -> Neighbors:
        """Return the neighbours among private records."""

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Screen and answer; see :meth:`Labeler.answer`.

        Without screening the first ``max_answers`` queries are answered, with it the first that pass.
        """
        neighbors = self._neighbors
        ranked = neighbors.rank(queries)

        def votes(asked: Tensor, noise: NoiseSource) -> Tensor:
            return neighbors.votes(ranked[asked], noise.bernoulli)

        return self._aggregation.release(len(queries), votes, run, max_answers)

    def votes(self, queries: Tensor, coins: Coins) -> Tensor:
        """**Private.** Votes about each query by one fresh sample of the records, ``(m, c)``; for audits.

        Raises:
            RuntimeError: without the whole private table.
        """
        if self.records.shard is not None:
            raise RuntimeError(f"{type(self).__name__} needs the whole private table, and this is a shard")
        return self._neighbors.votes(self._neighbors.rank(queries), coins)


class PrivateKNN(NeighborVoting):
    """Teacher by noisy votes of the nearest private records (Private-kNN: Zhu et al., CVPR 2020).

    For each query the k nearest records of a fresh Poisson sample vote. Screening on one sample decides
    whether the query is answered at all; aggregation on another sample releases the arg-max of the noisy
    votes. The noise is scaled to an L2 sensitivity of √2, not 1: a record that enters the neighbourhood
    pushes another one out, so two counts change.

    Args:
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`Screening`, or None to answer every query.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
            ``Gaussian(sigma)`` as in the paper; ``Laplace`` or ``ExponentialArgmax``
            (arg-max released by Gumbel noise) where they suit better.
        release_counts: release all noisy counts of an answered query, at the price of the winner alone, so that
            answers can be smoothed over neighbouring queries. For noise that is added to every count.
        task: ``"multiclass"``, or ``"multilabel"``: labels are attributes, each neighbour adds its clipped attribute
            vector, every query is answered, and one record moves the sums as in
            :func:`~pl_privknn.labelers.attributes.swapped_vote_norms`. The default noise is then σ = 50.
        attributes: settings of ``task="multilabel"``.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for parameters out of range, or a threshold that k votes can't reach; at :meth:`fit`, without
            sampling, for a table of fewer than ``k`` records, or of ``k`` where there is a screening.

    Example:
        >>> from pl_privknn.labelers import PrivateKNN
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn import Gaussian
        >>> teacher = PrivateKNN(k=300, sampling_rate=1.0, noise=Gaussian(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    most_votes_name = "k"

    def __init__(
        self,
        k: int = 300,
        sampling_rate: float = 0.15,
        screening: Screening | None = None,
        noise: Mechanism | None = None,
        noise_source: NoiseSource | None = None,
        release_counts: bool = False,
        task: str = "multiclass",
        attributes: Attributes | None = None,
    ) -> None:
        attributes = attributes_of(task, attributes)
        self.k = check_int("k", k)
        super().__init__(
            self.k,
            sampling_rate,
            screening,
            noise if noise is not None else Gaussian(sigma=25.0 if attributes is None else 50.0),
            noise_source,
            release_counts,
            attributes,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the base, and shards of records with classes: each process searches its own shard."""
        shards = self.adjacencies if self.attributes is None else ()
        return dataclasses.replace(super().capabilities, shards=shards)

    def _units(self, records: PrivateRecords) -> int:
        return int(records.processes.sum(torch.tensor([super()._units(records)]))[0])

    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        # Its guarantee is for exactly k votes, with and without any one record.
        if aggregation.screening is not None:
            aggregation.screening.check_table_size(num_records)
        if num_records < self.k and self.sampling_rate == 1.0:
            raise InputError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )

    def _find(self, records: PrivateRecords) -> Neighbors:
        features, labels, owners = records.table(), records.labels, records.owners
        if self.attributes is not None:
            values = clip_attributes(labels, self.attributes.tau)
            return PoissonSums(
                features, values, self.k, self.sampling_rate, owners=owners, device=records.device
            )
        table = (features, labels, records.num_classes, self.k, self.sampling_rate)
        if records.shard is not None:
            return ShardedNeighbors(*table, records.shard, owners=owners, device=records.device)
        return PoissonNeighbors(*table, owners=owners, device=records.device)
