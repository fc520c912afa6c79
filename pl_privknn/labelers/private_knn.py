"""Private-kNN: noisy votes of the nearest private records in a Poisson sample."""

from __future__ import annotations

import dataclasses
import functools
import math

from torch import Tensor

from pl_privknn._checks import check_finite, check_int, check_positive, check_rate, check_switch
from pl_privknn.labelers.aggregation import Aggregation, vote_noise
from pl_privknn.labelers.base import ChargesLedger, Labeler, Release, check_table
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Mechanism, NoisyScreening
from pl_privknn.privacy.noise import NoiseSource

#: A record that enters the k nearest pushes another one out: a vote leaves one class and joins another.
KNN_VOTES_L2 = math.sqrt(2.0)
KNN_VOTES_L1 = 2.0


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


class PrivateKNN(Labeler):
    """Private-kNN (Zhu, Yu, Chandraker and Wang, CVPR 2020).

    For each query the k nearest records of a fresh Poisson sample vote. Screening on one sample decides
    whether the query is answered at all; aggregation on another sample releases the arg-max of the noisy
    votes. The noise is scaled to an L2 sensitivity of √2, not 1: a record that enters the neighbourhood
    pushes another one out, so two counts change.

    Args:
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`Screening`, or None to answer every query.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
            ``Gaussian(sigma)`` as in the paper; ``DiscreteGaussian``, ``Laplace`` or ``ExponentialArgmax``
            (arg-max released by Gumbel noise) where they suit better.
        release_counts: let out all noisy counts of an answered query, at the price of the winner alone, so that
            answers can be smoothed over neighbouring queries. For noise that is added to every count.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        secure: draw all noise exactly, in integers (:func:`~pl_privknn.labelers.aggregation.secure_noise`), so that
            attacks on floating-point noise (Mironov 2012) find nothing.

    Raises:
        ValueError: for parameters out of range, or a threshold that k votes can't reach.

    Example:
        >>> from pl_privknn.labelers import PrivateKNN
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn import Gaussian
        >>> teacher = PrivateKNN(k=300, sampling_rate=1.0, noise=Gaussian(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    def __init__(
        self,
        k: int = 300,
        sampling_rate: float = 0.15,
        screening: Screening | None = None,
        noise: Mechanism | None = None,
        noise_source: NoiseSource | None = None,
        secure: bool = False,
        release_counts: bool = False,
    ) -> None:
        super().__init__(noise_source)
        self.k = check_int("k", k)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        if screening is not None and screening.threshold > self.k:
            raise ValueError(
                f"screening.threshold={screening.threshold} can't be reached by k={self.k} votes; "
                "use a threshold of at most k, about 0.6 k"
            )
        self.screening = screening
        self.secure = check_switch("secure", secure)
        self.release_counts = check_switch("release_counts", release_counts)
        self.noise = vote_noise(
            noise if noise is not None else Gaussian(sigma=25.0),
            KNN_VOTES_L1,
            KNN_VOTES_L2,
            self.sampling_rate,
            secure=secure,
            counts=release_counts,
        )
        self._neighbors: PoissonNeighbors | None = None
        self._aggregation: Aggregation | None = None

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`.

        Raises:
            ValueError: also, without sampling, for a table of fewer than ``k`` records, or of ``k`` where there is
                a screening: its guarantee is for exactly k votes, with and without any one record.
        """
        check_table(features, labels, num_classes)
        aggregation = self._bind(num_classes)
        if aggregation.screening is not None:
            aggregation.screening.check_table_size(len(features))
        if len(features) < self.k and self.sampling_rate == 1.0:
            raise ValueError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )
        self._aggregation = aggregation
        self._neighbors = PoissonNeighbors(features, labels, num_classes, self.k, self.sampling_rate)

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
            raise RuntimeError("PrivateKNN.label needs the private table: call fit(features, labels) first")
        ranked = neighbors.rank(queries)
        return aggregation.release(
            len(queries),
            lambda asked, noise: neighbors.votes(ranked[asked], noise.bernoulli),
            functools.partial(self.paid, ledger),
            max_answers,
        )

    def _bind(self, num_classes: int) -> Aggregation:
        screening = None
        if self.screening is not None:
            screening = NoisyScreening(
                k=self.k,
                threshold=self.screening.threshold,
                sigma=self.screening.sigma,
                num_classes=num_classes,
                sampling_rate=self.sampling_rate,
                secure=self.secure,
            )
        return Aggregation(self.noise, screening, self.release_counts)
