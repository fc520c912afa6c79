"""Private-kNN for attributes: noisy sums of the neighbours' clipped attribute vectors."""

from __future__ import annotations

import functools

from torch import Tensor

from pl_privknn._checks import check_int, check_positive, check_rate, check_switch
from pl_privknn.labelers.base import ChargesLedger, Labeler, Release
from pl_privknn.labelers.multilabel.rules import DecisionRule, LearnedThresholds
from pl_privknn.labelers.multilabel.votes import (
    attribute_answers,
    check_attribute_table,
    clip_attributes,
    release_attributes,
    sum_noise,
    swapped_vote_norms,
)
from pl_privknn.neighbors import PoissonSums
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace, Mechanism
from pl_privknn.privacy.noise import NoiseSource


class MultiLabelKNN(Labeler):
    """Private-kNN for multi-label data (Zhu, Yu, Chandraker and Wang, CVPR 2020, section 4.3 and Theorem 5).

    For each query the k nearest records of a Poisson sample are found, each neighbour's attribute vector f is
    scaled by min(τ/|f|₁, 1), and the sums, one an attribute, get Gaussian noise. There is no screening: every
    query is answered. A :class:`~pl_privknn.labelers.multilabel.rules.DecisionRule` turns noisy sums into
    attributes.

    A record that enters the k nearest pushes another one out, so two clipped vectors change: at most √(2τ) in
    L2 and 2τ in L1, and less where few attributes leave no room for two vectors side by side;
    :func:`~pl_privknn.labelers.multilabel.votes.swapped_vote_norms` has the proof and the exact value, which is the
    one that is charged.

    Args:
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        tau: τ, the most that one record adds to all attributes together. None: no clipping; the sensitivity
            is then √a for a attributes.
        noise: ``Gaussian(sigma)`` or ``Laplace(scale)``; sensitivity and sampling rate are filled in.
        rule: how sums become attributes;
            :class:`~pl_privknn.labelers.multilabel.rules.LearnedThresholds` by default.
        soft: release probabilities of the attributes too; post-processing, free of cost.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for parameters out of range.

    Example:
        >>> from pl_privknn.labelers import MultiLabelKNN
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn import Gaussian
        >>> teacher = MultiLabelKNN(k=300, sampling_rate=1.0, tau=3.0, noise=Gaussian(sigma=60.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 40), 1e-5), 3)
        1.085
    """

    tasks = ("multilabel",)

    def __init__(
        self,
        k: int = 300,
        sampling_rate: float = 0.15,
        tau: float | None = 3.0,
        noise: Mechanism | None = None,
        rule: DecisionRule | None = None,
        soft: bool = True,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.k = check_int("k", k)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.tau = None if tau is None else check_positive("tau", tau)
        self.noise = noise if noise is not None else Gaussian(sigma=50.0)
        sum_noise(self.noise, 1.0, 1.0)  # refuses what can't be added to sums at once
        self.rule = rule if rule is not None else LearnedThresholds()
        self.soft = check_switch("soft", soft)
        # Rules that learn want all answers of a round in one release.
        self.asks_in_batches = not self.rule.learns
        self._neighbors: PoissonSums | None = None

    def mechanism(self, num_attributes: int) -> Gaussian | Laplace:
        """The frozen mechanism that draws, and is charged for, one answer about so many attributes."""
        l1, l2 = swapped_vote_norms(self.tau, num_attributes)
        return sum_noise(self.noise, l1, l2, self.sampling_rate)

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`. Labels are ``(n, num_classes)``, 0 or 1.

        Raises:
            ValueError: on shapes, dtypes or values that do not fit; also for a table of fewer than ``k`` records
                without sampling.
        """
        check_attribute_table(features, labels, num_classes)
        if len(features) < self.k and self.sampling_rate == 1.0:
            raise ValueError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )
        self.mechanism(num_classes)  # refuses noise that states another sensitivity
        votes = clip_attributes(labels, self.tau)
        self._neighbors = PoissonSums(features, votes, self.k, self.sampling_rate, device=self.device)

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One noisy sum an answer; see :meth:`Labeler.plan`."""
        return attribute_answers(self.mechanism(num_classes)).plan(num_queries, max_answers)

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Answer the first ``max_answers`` queries; see :meth:`Labeler.label`.

        Returns:
            ``labels`` int64 ``(m, a)`` (rows of -1 where refused) and, with ``soft``, probabilities ``(m, a)``.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        neighbors = self._neighbors
        if neighbors is None:
            raise RuntimeError(
                "MultiLabelKNN.label needs the private table: call fit(features, labels) first"
            )
        ranked = neighbors.rank(queries[:max_answers])
        return release_attributes(
            self.mechanism(neighbors.width),
            len(queries),
            neighbors.width,
            lambda asked, noise: neighbors.sums(ranked[asked], noise.bernoulli),
            lambda noisy, deviation: self.rule(noisy, self.k, self.tau, deviation),
            functools.partial(self.paid, ledger),
            self.soft,
            max_answers,
        )
