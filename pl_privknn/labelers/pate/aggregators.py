"""How teachers' votes become answers: which noise is drawn, and what each release is charged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pl_privknn._checks import check_positive, check_switch
from pl_privknn.labelers.aggregation import Aggregation, Pay, vote_noise
from pl_privknn.labelers.base import Release
from pl_privknn.labelers.private_knn import Screening
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace, Mechanism, NoisyScreening

#: One record is in one teacher, whose vote leaves one class and joins another.
PATE_VOTES_L2 = math.sqrt(2.0)
PATE_VOTES_L1 = 2.0

#: Turns the mechanism that draws into the one that is written into the ledger.
Bill = Callable[[Mechanism], Mechanism]


class Aggregator:
    """Releases the arg-max of noisy votes, for queries that pass a noisy screening where there is one.

    One changed vote moves the histogram by √2 in L2 and 2 in L1, and the largest count by at most 1. An
    abstention is one more choice of a teacher and moves less; the screening takes a largest count that
    abstentions leave below ⌈k/c⌉ for ⌈k/c⌉ (:class:`~pl_privknn.privacy.mechanisms.NoisyScreening`).

    Args:
        noise: ``Gaussian``, ``DiscreteGaussian``, ``Laplace`` or ``ExponentialArgmax`` with its noise scale;
            the sensitivity is filled in.
        screening: threshold and noise of the screening, or None to answer every query.
        secure: draw all noise exactly, in integers; see :func:`~pl_privknn.labelers.aggregation.secure_noise`.
        release_counts: let out all noisy counts of an answered query, at the price of the winner alone, so that
            answers can be smoothed over neighbouring queries. Data-dependent figures, which are of the winner
            alone, are then not to be had.

    Raises:
        ValueError: if ``noise`` can't be added to votes, or states another sensitivity.
    """

    def __init__(
        self,
        noise: Mechanism,
        screening: Screening | None = None,
        secure: bool = False,
        release_counts: bool = False,
    ) -> None:
        self.secure = check_switch("secure", secure)
        self.screening = screening
        self.release_counts = check_switch("release_counts", release_counts)
        self.noise = vote_noise(noise, PATE_VOTES_L1, PATE_VOTES_L2, secure=secure, counts=release_counts)

    def screening_mechanism(self, num_teachers: int, num_classes: int) -> NoisyScreening | None:
        """What screens ``num_teachers`` votes for ``num_classes`` classes.

        Raises:
            ValueError: for a threshold that so many votes can't reach.
        """
        if self.screening is None:
            return None
        return NoisyScreening(
            k=num_teachers,
            threshold=self.screening.threshold,
            sigma=self.screening.sigma,
            num_classes=num_classes,
            secure=self.secure,
        )

    def plan(
        self, num_queries: int, max_answers: int, num_teachers: int, num_classes: int, bill: Bill
    ) -> list[Charge]:
        """The most that so many queries with so many answers can cost."""
        planned = self._bind(num_teachers, num_classes).plan(num_queries, max_answers)
        return [Charge(bill(charge.mechanism), charge.count) for charge in planned]

    def release(
        self,
        votes: Tensor,
        num_teachers: int,
        pay: Pay,
        max_answers: int | None,
    ) -> Release:
        """Screen and answer, paying before each draw.

        Args:
            votes: int64 histograms, shape ``(m, c)``.
            num_teachers: number of teachers, those that abstain included.
            pay: see :data:`~pl_privknn.labelers.aggregation.Pay`.
            max_answers: answer at most so many; all if None.

        Returns:
            Labels, -1 where refused, and counts where they are released.
        """
        aggregation = self._bind(num_teachers, votes.shape[1])
        return aggregation.release(len(votes), lambda asked, _: votes[asked], pay, max_answers)

    def _bind(self, num_teachers: int, num_classes: int) -> Aggregation:
        screening = self.screening_mechanism(num_teachers, num_classes)
        return Aggregation(self.noise, screening, self.release_counts)


class LNMAX(Aggregator):
    """Laplace noise on every count (Papernot et al. 2017): pure 2/b differential privacy an answer.

    Args:
        scale: b of the noise's density exp(−|x|/b)/2b. The papers' γ is 1/b: "noise 0.1" is scale 10.
        **kwargs: see :class:`Aggregator`.

    Example:
        >>> from pl_privknn.labelers import LNMAX, PATE
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PATE(num_teachers=250, aggregator=LNMAX(scale=100.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.483
    """

    def __init__(self, scale: float, **kwargs: Any) -> None:
        super().__init__(Laplace(scale=check_positive("scale", scale)), None, **kwargs)


class GNMAX(Aggregator):
    """Gaussian noise on every count (Papernot et al. 2018): RDP α/σ² an answer.

    Args:
        sigma: standard deviation of the noise, in votes.
        **kwargs: see :class:`Aggregator`.

    Example:
        >>> from pl_privknn.labelers import GNMAX, PATE
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PATE(num_teachers=250, aggregator=GNMAX(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    def __init__(self, sigma: float, **kwargs: Any) -> None:
        super().__init__(Gaussian(sigma=check_positive("sigma", sigma)), None, **kwargs)


class ConfidentGNMAX(Aggregator):
    """Noisy screening, then GNMAX for the queries that pass (Papernot et al. 2018, Algorithm 1).

    Args:
        threshold: votes that the largest count has to reach with its noise; 0.6 to 0.8 of the teachers.
        screening_sigma: σ1, standard deviation of the screening's noise.
        sigma: σ2, standard deviation of the noise on the counts.
        **kwargs: see :class:`Aggregator`.

    Example:
        >>> from pl_privknn.labelers import PATE, ConfidentGNMAX
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> aggregator = ConfidentGNMAX(threshold=200.0, screening_sigma=150.0, sigma=40.0)
        >>> teacher = PATE(num_teachers=250, aggregator=aggregator)
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.96
    """

    def __init__(self, threshold: float, screening_sigma: float, sigma: float, **kwargs: Any) -> None:
        screening = Screening(threshold, check_positive("screening_sigma", screening_sigma))
        super().__init__(Gaussian(sigma=check_positive("sigma", sigma)), screening, **kwargs)
