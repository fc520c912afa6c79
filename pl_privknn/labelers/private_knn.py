"""Private-kNN: noisy votes of the nearest private records in a Poisson sample, of classes or attributes."""

from __future__ import annotations

import torch

from pl_privknn._checks import InputError, check_int
from pl_privknn.labelers.attributes import Attributes, attributes_of, clip_attributes
from pl_privknn.labelers.base import PrivateRecords
from pl_privknn.labelers.voting import (
    Aggregation,
    Neighbors,
    NeighborVoting,
    Screening,
)
from pl_privknn.neighbors import PoissonNeighbors, PoissonSums, ShardedNeighbors
from pl_privknn.privacy.mechanisms import Gaussian, Mechanism
from pl_privknn.privacy.noise import NoiseSource

__all__ = ["PrivateKNN", "Screening"]


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
    def takes_shards(self) -> bool:
        """Whether classes are voted for: each process searches its own records."""
        return self.attributes is None

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
                features, values, self.k, self.sampling_rate, owners=owners, device=self.device
            )
        table = (features, labels, records.num_classes, self.k, self.sampling_rate)
        if records.shard is not None:
            return ShardedNeighbors(*table, records.shard, owners=owners, device=self.device)
        return PoissonNeighbors(*table, owners=owners, device=self.device)
