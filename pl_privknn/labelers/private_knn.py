"""Private-kNN: noisy votes of the nearest private records in a Poisson sample, of classes and attributes."""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_rate, check_switch
from pl_privknn.labelers.attributes import Attributes, clip_attributes, sum_noise
from pl_privknn.labelers.base import ChargesLedger, Release, ShardedLabeler, check_records
from pl_privknn.labelers.voting import Aggregation, AttributeSums, Screening, VotingLabeler, vote_noise
from pl_privknn.neighbors import Coins, PoissonNeighbors, PoissonSums, ShardedNeighbors
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Mechanism, NoisyScreening, VoteNoise
from pl_privknn.privacy.noise import NoiseSource

__all__ = ["PrivateKNN", "Screening"]

#: A record that enters the k nearest pushes another one out: a vote leaves one class and joins another.
KNN_VOTES_L2 = math.sqrt(2.0)
KNN_VOTES_L1 = 2.0


class Neighbors(Protocol):
    """A private table in which the neighbours of a query are found, and vote."""

    def rank(self, queries: Tensor) -> Any:
        """Find the neighbours of queries, float32 ``(m, d)``; the result is indexed by rows of queries."""

    def votes(self, ranked: Any, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query, int64 ``(m, c)``; of attributes float64 ``(m, a)``."""


class PrivateKNN(ShardedLabeler, VotingLabeler):
    """Private-kNN (Zhu, Yu, Chandraker and Wang, CVPR 2020).

    For each query the k nearest records of a fresh Poisson sample vote. Screening on one sample decides
    whether the query is answered at all; aggregation on another sample releases the arg-max of the noisy
    votes. The noise is scaled to an L2 sensitivity of √2, not 1: a record that enters the neighbourhood
    pushes another one out, so two counts change.

    Where the unit of privacy is a person, neighbours are persons: each enters with the record nearest to the query,
    has one coin, and moves votes as one record does.

    Args:
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`Screening`, or None to answer every query.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
            ``Gaussian(sigma)`` as in the paper; ``Laplace`` or ``ExponentialArgmax``
            (arg-max released by Gumbel noise) where they suit better.
        release_counts: let out all noisy counts of an answered query, at the price of the winner alone, so that
            answers can be smoothed over neighbouring queries. For noise that is added to every count.
        attributes: labels are attributes and not classes: each neighbour adds its clipped attribute vector, every
            query is answered, and one record moves the sums as in
            :func:`~pl_privknn.labelers.attributes.swapped_vote_norms`. The default noise is then σ = 50.
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

    free_parameters = ("noise",)

    def __init__(
        self,
        k: int = 300,
        sampling_rate: float = 0.15,
        screening: Screening | None = None,
        noise: Mechanism | None = None,
        noise_source: NoiseSource | None = None,
        release_counts: bool = False,
        attributes: Attributes | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.k = check_int("k", k)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        if screening is not None and screening.threshold > k:
            raise ValueError(
                f"screening.threshold={screening.threshold} can't be reached by k={k} votes; use a threshold of at "
                "most k, about 0.6 of it"
            )
        self.screening = screening
        self.release_counts = check_switch("release_counts", release_counts)
        self.take_attributes(attributes)
        if attributes is None:
            noise = noise if noise is not None else Gaussian(sigma=25.0)
            self.noise: Mechanism = vote_noise(
                noise, KNN_VOTES_L1, KNN_VOTES_L2, self.sampling_rate, counts=release_counts
            )
        else:
            if screening is not None or release_counts:
                raise ValueError(
                    f"attributes with screening={screening!r}, release_counts={release_counts!r}: "
                    "sums of clipped votes are answered as they are; leave these out"
                )
            self.noise = noise if noise is not None else Gaussian(sigma=50.0)
            sum_noise(self.noise, 1.0, 1.0)  # refuses what can't be added to sums at once
        self._owners: Tensor | None = None
        self._neighbors: Neighbors | None = None
        self._aggregation: Aggregation | None = None

    @property
    def takes_shards(self) -> bool:
        """Whether classes are voted for: each process searches its own records."""
        return self.attributes is None

    def run_command(self, command: Any) -> None:
        """See :meth:`ShardedLabeler.run_command`."""
        if not isinstance(self._neighbors, ShardedNeighbors):
            raise RuntimeError("PrivateKNN.run_command needs a shard: call fit(features, labels) first")
        self._neighbors.run_command(command)

    def note_row(self, row: int) -> None:
        """Shards learn of the row, so that none tosses the coins of another release; see the base."""
        if isinstance(self._neighbors, ShardedNeighbors):
            self._neighbors.release = row

    def _own_coins(self, release: int) -> Coins:
        # The system's generator is each process's own; seeded streams must differ between shards.
        assert self.shard is not None
        return self.noise_source.stream("shard", self.shard.group.rank, release).bernoulli

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`. Attributes are ``(n, num_classes)``, 0 or 1."""
        check_records(features, labels, num_classes, self.tasks[0])
        aggregation = self._bind(num_classes)
        self._owners = self.checked_owners(len(features))
        own = len(features) if self._owners is None else len(self._owners.unique())
        self._check_size(self._units(own), aggregation)
        self._aggregation = aggregation
        self._neighbors = self._find(features, labels, num_classes)

    def _units(self, own: int) -> int:
        """Number of records, or of persons, of all processes."""
        if self.shard is None:
            return own
        return self.shard.total if self._owners is None else int(self.shard.group.sum(torch.tensor([own]))[0])

    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        # The guarantee is for exactly k votes, with and without any one record.
        if aggregation.screening is not None:
            aggregation.screening.check_table_size(num_records)
        if num_records < self.k and self.sampling_rate == 1.0:
            raise ValueError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )

    def _find(self, features: Tensor, labels: Tensor, num_classes: int) -> Neighbors:
        if self.attributes is not None:
            values = clip_attributes(labels, self.attributes.tau)
            return PoissonSums(
                features, values, self.k, self.sampling_rate, owners=self._owners, device=self.device
            )
        table = (features, labels, num_classes, self.k, self.sampling_rate)
        if self.shard is not None:
            return ShardedNeighbors(
                *table, self.shard, self._own_coins, owners=self._owners, device=self.device
            )
        return PoissonNeighbors(*table, owners=self._owners, device=self.device)

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One screening a query and one aggregation an answer; see :meth:`Labeler.plan`."""
        return self._bind(num_classes).plan(num_queries, max_answers)

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Screen and answer; see :meth:`Labeler.label`.

        Without screening the first ``max_answers`` queries are answered, with it the first that pass.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        return self.label_repeatedly(queries, 1, ledger, max_answers)

    def label_repeatedly(
        self, queries: Tensor, times: int, ledger: ChargesLedger, max_answers: int | None = None
    ) -> Release:
        """:meth:`label` of the queries, ``times`` times one after another; their neighbours are ranked once."""
        neighbors, aggregation = self._neighbors, self._aggregation
        if neighbors is None or aggregation is None:
            raise RuntimeError(
                f"{type(self).__name__}.label needs the private table: call fit(features, labels) first"
            )
        ranked = neighbors.rank(queries)
        rows = torch.arange(len(queries)).repeat(times)
        pay = functools.partial(self.charge_and_draw, ledger)

        def votes(asked: Tensor, noise: NoiseSource) -> Tensor:
            return neighbors.votes(ranked[rows[asked]], noise.bernoulli)

        return aggregation.release(len(rows), votes, pay, max_answers)

    def exact_votes(self, queries: Tensor) -> Tensor | None:
        """Votes where every record is in the sample, of classes; see :meth:`HasCanaries.exact_votes`."""
        if self.attributes is not None:
            return None
        return self._votes_of(queries, 1, lambda shape, rate: torch.ones(shape, dtype=torch.bool))

    def mean_votes(self, queries: Tensor, samples: int, noise: NoiseSource) -> Tensor | None:
        """**Private.** The mean of the votes over so many samples of the records, float64 ``(m, c)``.

        For audits. A record moves it otherwise than the votes of all records, since the neighbour whose place it
        takes is farther away where some are not drawn.
        """
        if self.sampling_rate == 1:
            return self.exact_votes(queries)
        votes = self._votes_of(queries, samples, noise.bernoulli)
        return votes.view(samples, len(queries), -1).double().mean(dim=0)

    def _votes_of(self, queries: Tensor, times: int, coins: Coins) -> Tensor:
        if self._neighbors is None or self.shard is not None:
            raise RuntimeError(
                f"{type(self).__name__} needs the whole private table: call fit(features, labels) first"
            )
        rows = torch.arange(len(queries)).repeat(times)
        return self._neighbors.votes(self._neighbors.rank(queries)[rows], coins)

    def _bind(self, num_classes: int) -> Aggregation:
        if self.attributes is not None:
            noise = self.attributes.swapped(self.noise, num_classes, self.sampling_rate)
            return AttributeSums(noise, attributes=self.attributes, num_attributes=num_classes, total=self.k)
        assert isinstance(self.noise, VoteNoise)
        screening = None
        if self.screening is not None:
            screening = NoisyScreening(
                k=self.k,
                threshold=self.screening.threshold,
                sigma=self.screening.sigma,
                num_classes=num_classes,
                sampling_rate=self.sampling_rate,
            )
        return Aggregation(self.noise, screening, self.release_counts)
