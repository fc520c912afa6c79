"""Labelers whose private neighbours of a query vote: screening, noise and payment, whoever the neighbours are."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, Protocol

from torch import Tensor

from pl_privknn._checks import check_finite, check_positive, check_rate, check_switch
from pl_privknn.labelers.aggregation import Aggregation, vote_noise
from pl_privknn.labelers.base import ChargesLedger, Labeler, Release, check_table
from pl_privknn.neighbors import Coins
from pl_privknn.privacy.mechanisms import Charge, Mechanism, NoisyScreening
from pl_privknn.privacy.noise import NoiseSource


@dataclasses.dataclass(frozen=True)
class Screening:
    """Noisy screening: a query passes where its largest vote count plus N(0, σ²) reaches the threshold.

    Args:
        threshold: votes; about 0.6 k is usual.
        sigma: standard deviation of the noise, in votes.

    Raises:
        ValueError: for a threshold that is not finite, or a ``sigma`` that is not above 0.

    Example:
        >>> from pl_privknn.labelers import PrivateKNN, Screening
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> screening = Screening(threshold=180, sigma=85.0)
        >>> teacher = PrivateKNN(k=300, sampling_rate=1.0, screening=screening)
        >>> charges = teacher.plan(num_queries=100, max_answers=0, num_classes=10)
        >>> round(epsilon_for_delta(charges, delta=1e-5), 3)
        0.351
    """

    threshold: float
    sigma: float

    def __post_init__(self) -> None:
        check_finite("threshold", self.threshold)
        check_positive("sigma", self.sigma)


class Neighbors(Protocol):
    """A private table in which the neighbours of a query are found, and vote."""

    def rank(self, queries: Tensor) -> Any:
        """Find the neighbours of queries, float32 ``(m, d)``; the result is indexed by rows of queries."""

    def votes(self, ranked: Any, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query, int64 ``(m, c)``."""


class NeighborVoting(Labeler):
    """Screening on one sample of the neighbours, aggregation on another.

    Args:
        most_votes: the largest count that :class:`Screening` sees; None where there is no screening.
        l1: L1 distance that one record can move the votes.
        l2: L2 distance.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`Screening`, or None to answer every query.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        secure: see :func:`~pl_privknn.labelers.aggregation.secure_noise`.
        release_counts: let out all noisy counts of an answered query.

    Raises:
        ValueError: for parameters out of range, or a threshold that the votes can't reach.
    """

    #: What ``most_votes`` is called where users set it.
    most_votes_name = "max_votes"

    def __init__(
        self,
        most_votes: int | None,
        l1: float,
        l2: float,
        sampling_rate: float,
        screening: Screening | None,
        noise: Mechanism,
        noise_source: NoiseSource | None,
        secure: bool,
        release_counts: bool,
    ) -> None:
        super().__init__(noise_source)
        self.most_votes = most_votes
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        if screening is not None and (most_votes is None or screening.threshold > most_votes):
            raise ValueError(
                f"screening.threshold={screening.threshold} can't be reached by {self.most_votes_name}={most_votes} "
                f"votes; use a threshold of at most {self.most_votes_name}, about 0.6 of it"
            )
        self.screening = screening
        self.secure = check_switch("secure", secure)
        self.release_counts = check_switch("release_counts", release_counts)
        self.noise = vote_noise(noise, l1, l2, self.sampling_rate, secure=secure, counts=release_counts)
        self._neighbors: Neighbors | None = None
        self._aggregation: Aggregation | None = None

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`."""
        check_table(features, labels, num_classes)
        aggregation = self._bind(num_classes)
        self._check_size(len(features), aggregation)
        self._aggregation = aggregation
        self._neighbors = self._find(features, labels, num_classes)

    @abc.abstractmethod
    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        """Refuse a table that is too small."""

    @abc.abstractmethod
    def _find(self, features: Tensor, labels: Tensor, num_classes: int) -> Neighbors:
        """The neighbours of a private table."""

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One screening a query and one aggregation an answer; see :meth:`Labeler.plan`."""
        return self._bind(num_classes).plan(num_queries, max_answers)

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Screen and answer; see :meth:`Labeler.label`.

        Without screening the first ``max_answers`` queries are answered, with it the first that pass.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        neighbors, aggregation = self._neighbors, self._aggregation
        if neighbors is None or aggregation is None:
            raise RuntimeError(
                f"{type(self).__name__}.label needs the private table: call fit(features, labels) first"
            )
        ranked = neighbors.rank(queries)
        return aggregation.release(
            len(queries),
            lambda asked, noise: neighbors.votes(ranked[asked], noise.bernoulli),
            functools.partial(self.paid, ledger),
            max_answers,
        )

    def _bind(self, num_classes: int) -> Aggregation:
        screening = None
        if self.screening is not None and self.most_votes is not None:
            screening = NoisyScreening(
                k=self.most_votes,
                threshold=self.screening.threshold,
                sigma=self.screening.sigma,
                num_classes=num_classes,
                sampling_rate=self.sampling_rate,
                secure=self.secure,
            )
        return Aggregation(self.noise, screening, self.release_counts)
