"""Noisy screening: may this query be answered at all?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_finite, check_int, check_positive, check_rate
from pl_privknn.privacy.mechanisms.base import Adjacency, require_unsampled
from pl_privknn.privacy.mechanisms.outcomes import OutcomeMechanism, sample_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource


@dataclasses.dataclass(frozen=True)
class NoisyScreening(OutcomeMechanism):
    """Pass a query if its largest vote count plus Gaussian noise reaches a threshold.

    With t the largest count, the query passes with probability p(t) = P[N(t, σ²) ≥ T]. One record changes t
    by at most 1, under either adjacency, so the family of pairs is (p(t), p(t±1)) over the counts that can
    occur (Zhu, Yu, Chandraker, Wang 2020, Theorem 7):

    - sampled (``sampling_rate`` < 1): t from 0 to k, since a sample may hold fewer than k records;
    - not sampled: t from ⌈k/c⌉ to k, by the pigeon-hole principle. **This assumes at least k records in both
      neighbouring tables**, so that exactly k votes are cast; whoever draws must call
      :meth:`check_table_size` once (:class:`~pl_privknn.labelers.PrivateKNN` does).

    Attributes:
        k: number of neighbours that vote, at least 1.
        threshold: T, in votes, from 0 to k.
        sigma: standard deviation of the noise, in votes.
        num_classes: number of classes c, public, at least 2.
        sampling_rate: Poisson rate in (0, 1] at which records enter the sample that votes.
    """

    kind: ClassVar[str] = "noisy_screening"

    k: int
    threshold: float
    sigma: float
    num_classes: int
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_int("k", self.k))
        threshold = check_finite("threshold", self.threshold)
        if not 0 <= threshold <= self.k:
            raise ValueError(
                f"threshold={self.threshold!r} must lie within reach of the votes, 0 to k={self.k}; "
                "about 0.6 k is usual"
            )
        object.__setattr__(self, "threshold", threshold)
        object.__setattr__(self, "sigma", check_positive("sigma", self.sigma))
        object.__setattr__(self, "num_classes", check_int("num_classes", self.num_classes, minimum=2))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate))

    def passes(self, max_votes: Tensor, noise: NoiseSource) -> Tensor:
        """Draw the noise and compare.

        Args:
            max_votes: largest vote count of each query, any shape.
            noise: where the noise comes from.

        Returns:
            Bool tensor of the same shape: which queries may be answered.
        """
        drawn = noise.normal(tuple(max_votes.shape), self.sigma).to(max_votes.device)
        return max_votes.double() + drawn >= self.threshold

    def check_table_size(self, num_records: int) -> None:
        """Raise ``ValueError`` where the family of pairs would not cover a table of this size.

        That a table holds at least k records counts as public knowledge.
        """
        if self.sampling_rate == 1.0 and num_records < self.k:
            raise ValueError(
                f"k={self.k} exceeds the number of private records, so without sampling fewer than k "
                "vote and the accounting of the screening does not hold; use a smaller k or a "
                "sampling_rate below 1"
            )

    def log_outcome_pairs(self, adjacency: Adjacency) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log-probabilities of (pass, fail) for counts t, t+1 and t+1, t; see the class."""
        from scipy.special import log_ndtr

        require_unsampled(self.kind, self.sampling_rate, adjacency)
        lowest = 0 if self.sampling_rate < 1 else -(-self.k // self.num_classes)
        counts = np.arange(lowest, self.k + 1, dtype=np.float64)
        margin = (counts - self.threshold) / self.sigma
        log_p = np.stack([log_ndtr(margin), log_ndtr(-margin)], axis=1)
        if len(counts) == 1:  # k = 1 without sampling: the count is always 1 and tells nothing
            return log_p, log_p
        with_record = np.concatenate([log_p[:-1], log_p[1:]])
        without = np.concatenate([log_p[1:], log_p[:-1]])
        return sample_pairs(with_record, without, self.sampling_rate)
