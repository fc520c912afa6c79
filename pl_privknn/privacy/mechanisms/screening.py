"""Noisy screening of queries: a test whether the largest vote count reaches a threshold."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import InputError, check_finite, check_int, check_positive, check_rate
from pl_privknn.privacy.mechanisms.base import (
    MAX_LISTED,
    Adjacency,
    OutcomeMechanism,
    require_unsampled,
    sample_pairs,
)

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
    - not sampled: t from ⌈k/c⌉ to k. By the pigeon-hole principle k votes can't stay below :attr:`lowest`;
      where fewer are cast (a table of fewer than k records, teachers that abstain), :meth:`passes` compares
      max(t, ⌈k/c⌉), which one record also moves by at most 1. So every pair of tables lies in the family.

    Attributes:
        k: number of neighbours that vote, at least 1.
        threshold: T, in votes, from 0 to k.
        sigma: standard deviation of the noise, in votes.
        num_classes: number of classes c, public, at least 2.
        sampling_rate: Poisson rate in (0, 1] at which records enter the sample that votes.

    Example:
        >>> from pl_privknn.privacy import Charge, NoisyScreening, epsilon_for_delta
        >>> release = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10)
        >>> round(epsilon_for_delta([Charge(release, 20)], delta=1e-5), 3)
        1.937
    """

    kind: ClassVar[str] = "noisy_screening"

    k: int
    threshold: float
    sigma: float
    num_classes: int
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_int("k", self.k, maximum=MAX_LISTED))
        threshold = check_finite("threshold", self.threshold)
        if not 0 <= threshold <= self.k:
            raise ValueError(
                f"threshold={self.threshold!r} must lie within reach of the votes, 0 to k={self.k}; "
                "about 0.6 k is usual"
            )
        object.__setattr__(self, "threshold", threshold)
        object.__setattr__(self, "sigma", check_positive("sigma", self.sigma))
        object.__setattr__(self, "num_classes", check_int("num_classes", self.num_classes, minimum=2))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    @property
    def lowest(self) -> int:
        """The smallest count that is accounted for; :meth:`passes` takes smaller ones for it."""
        return 0 if self.sampling_rate < 1 else -(-self.k // self.num_classes)

    def passes(self, max_votes: Tensor, noise: NoiseSource) -> Tensor:
        """Draw noise, and return whether each query passes the threshold.

        The decision is an exact coin of probability p(t), so no floating-point arithmetic touches the votes.

        Args:
            max_votes: largest vote count of each query, any shape. Counts below :attr:`lowest` are raised to it.
            noise: where the noise comes from.

        Returns:
            Bool tensor of the same shape: which queries may be answered.
        """
        return self.draw(max_votes, noise)

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        return noise.normal_at_least(self.threshold - values.clamp_min(self.lowest).double(), self.sigma)

    def check_table_size(self, num_records: int) -> None:
        """Raise ``ValueError`` for a table of at most k records, without sampling.

        With one record less, fewer than k would vote, and ⌈k/c⌉ would replace a count that cannot occur. That
        a table holds more than k records counts as public knowledge.
        """
        if self.sampling_rate == 1.0 and num_records <= self.k:
            raise InputError(
                f"k={self.k}: screening without sampling needs more than k private records, so that k vote also "
                "where one is taken away; use a smaller k, a sampling_rate below 1, or no screening"
            )

    def log_dominating_pairs(self, adjacency: Adjacency) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log-probabilities of (pass, fail) for counts t, t+1 and t+1, t; see the class."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        counts = np.arange(self.lowest, self.k + 1, dtype=np.int64)
        log_p = self.log_outcomes(counts)
        if len(counts) == 1:  # k = 1 without sampling: the count is always 1 and carries no information
            return log_p, log_p
        with_record = np.concatenate([log_p[:-1], log_p[1:]])
        without = np.concatenate([log_p[1:], log_p[:-1]])
        return sample_pairs(with_record, without, self.sampling_rate)

    def log_outcomes(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Log-probabilities of (pass, fail), shape ``(n, 2)``, at largest counts from -1 to k + 1, shape ``(n,)``."""
        from scipy.special import log_ndtr

        margin = (counts - self.threshold) / self.sigma
        return np.stack([log_ndtr(margin), log_ndtr(-margin)], axis=1)
