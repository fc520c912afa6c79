"""Private-kNN: noisy votes of the nearest private records in a Poisson sample."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.aggregation import Aggregation, Neighbors, NeighborVoting, Screening
from pl_privknn.neighbors import Coins, PoissonNeighbors, ShardedNeighbors
from pl_privknn.privacy.mechanisms import Gaussian, Mechanism
from pl_privknn.privacy.noise import NoiseSource

__all__ = ["PrivateKNN", "Screening"]

#: A record that enters the k nearest pushes another one out: a vote leaves one class and joins another.
KNN_VOTES_L2 = math.sqrt(2.0)
KNN_VOTES_L1 = 2.0


class PrivateKNN(NeighborVoting):
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
        secure: bool = False,
        release_counts: bool = False,
    ) -> None:
        self.k = check_int("k", k)
        super().__init__(
            self.k,
            KNN_VOTES_L1,
            KNN_VOTES_L2,
            sampling_rate,
            screening,
            noise if noise is not None else Gaussian(sigma=25.0),
            noise_source,
            secure,
            release_counts,
        )

    @property
    def takes_shards(self) -> bool:
        """True: each process searches its own records."""
        return True

    def serve(self, order: Any) -> None:
        """See :meth:`Labeler.serve`."""
        if not isinstance(self._neighbors, ShardedNeighbors):
            raise RuntimeError("PrivateKNN.serve needs a shard: call fit(features, labels) first")
        self._neighbors.serve(order)

    def tell_row(self, row: int) -> None:
        """Shards learn of the row, so that none tosses the coins of another release; see :meth:`Labeler.tell_row`."""
        if isinstance(self._neighbors, ShardedNeighbors):
            self._neighbors.release = row

    def _own_coins(self, release: int) -> Coins:
        # The system's generator is each process's own; seeded streams must differ between shards.
        assert self.shard is not None
        return self.noise_source.stream("shard", self.shard.exchange.rank, release).bernoulli

    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        # Its guarantee is for exactly k votes, with and without any one record.
        if aggregation.screening is not None:
            aggregation.screening.check_table_size(num_records)
        if num_records < self.k and self.sampling_rate == 1.0:
            raise ValueError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )

    def _find(self, features: Tensor, labels: Tensor, num_classes: int) -> Neighbors:
        table = (features, labels, num_classes, self.k, self.sampling_rate)
        if self.shard is not None:
            return ShardedNeighbors(*table, self.shard, self._own_coins, device=self.device)
        return PoissonNeighbors(*table, device=self.device)
