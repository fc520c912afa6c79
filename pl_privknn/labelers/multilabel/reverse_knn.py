"""Reverse kNN for attributes: every private record gives its attributes to its nearest queries, once a round."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_non_negative, check_positive, check_switch
from pl_privknn.labelers.base import ChargesLedger, Labeler, Release
from pl_privknn.labelers.multilabel.rules import FixedThresholds, denoised
from pl_privknn.labelers.multilabel.votes import (
    check_attribute_table,
    clip_attributes,
    single_vote_norms,
    sum_noise,
)
from pl_privknn.neighbors import assign
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Gaussian, Laplace, Mechanism
from pl_privknn.privacy.mechanisms.base import check_adjacency
from pl_privknn.privacy.noise import NoiseSource


class MultiLabelReverseKNN(Labeler):
    """Reverse kNN labelling with r labels a record, under a trusted curator.

    Each private record gives its attribute vector, scaled to an L1 norm of at most ``tau`` (the r of the paper:
    a record with more attributes spreads r votes over all of them), to its ``k`` nearest queries, and beside
    it one vote that says "here is a record": without that count nobody could tell an attribute that few
    records have from a query that few records are near to. The table of sums, one row a query and a + 1
    columns, is noised and released **once a round**.

    A record adds to k rows a clipped vector of norms (ℓ₁, ℓ₂)
    (:func:`~pl_privknn.labelers.multilabel.votes.single_vote_norms`) and a one: k(ℓ₁ + 1) in L1 and
    √(k(ℓ₂² + 1)) in L2, which is k(r + 1) and √(k(r + 1)) for whole r. A replaced record takes that away and adds
    as much: twice
    the L1 norm, and at most √2 times the L2 norm because entries are not negative.

    Args:
        k: number of nearest queries that a record gives its attributes to.
        tau: r, the most that a record adds to the attributes of one query; None: no clipping.
        epsilon: ε of one round under pure differential privacy; sets Laplace noise. Give this or ``noise``.
        noise: ``Laplace(scale)`` or ``Gaussian(sigma)``; sensitivities are filled in.
        rule: how sums become attributes; its threshold is a share of the released number of records near the
            query. With ``denoise`` the whole table, that number included, is denoised together.
        abstain: refuse a query whose noisy number of records is below this many standard deviations of the
            noise; 0 answers every query. Post-processing, free of cost.
        soft: release probabilities of the attributes too; free as well.
        adjacency: neighbouring relation.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: unless exactly one of ``epsilon`` and ``noise`` is given, or for values out of range.

    Example:
        >>> from pl_privknn.labelers import MultiLabelReverseKNN
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = MultiLabelReverseKNN(k=1, tau=3.0, epsilon=0.5)
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 40), 1e-5), 3)
        0.5
    """

    tasks = ("multilabel",)
    asks_in_batches = False

    def __init__(
        self,
        k: int = 1,
        tau: float | None = 3.0,
        epsilon: float | None = None,
        noise: Mechanism | None = None,
        rule: FixedThresholds | None = None,
        abstain: float = 0.0,
        soft: bool = True,
        adjacency: Adjacency = "add_remove",
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.k = check_int("k", k)
        self.tau = None if tau is None else check_positive("tau", tau)
        if (epsilon is None) == (noise is None):
            raise ValueError(f"epsilon={epsilon!r}, noise={noise!r}: give exactly one of them")
        self.epsilon = None if epsilon is None else check_positive("epsilon", epsilon)
        self.noise = noise
        if noise is not None:
            sum_noise(noise, 1.0, 1.0)  # refuses what can't be added to sums at once
        self.rule = rule if rule is not None else FixedThresholds(denoise=True)
        self.abstain = check_non_negative("abstain", abstain)
        self.soft = check_switch("soft", soft)
        self.adjacency = check_adjacency(check_choice("adjacency", adjacency, ("add_remove", "replace_one")))
        self.adjacencies = (self.adjacency,)
        self._features: Tensor | None = None
        self._votes: Tensor | None = None

    def mechanism(self, num_attributes: int) -> Gaussian | Laplace:
        """The frozen mechanism that draws, and is charged for, one round."""
        l1, l2 = single_vote_norms(self.tau, num_attributes)
        moved = 2 if self.adjacency == "replace_one" else 1
        l1_moved, l2_moved = moved * self.k * (l1 + 1), math.sqrt(moved * self.k * (l2**2 + 1))
        noise = self.noise if self.epsilon is None else Laplace(scale=l1_moved / self.epsilon)
        assert noise is not None
        return sum_noise(noise, l1_moved, l2_moved)

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`. Labels are ``(n, num_classes)``, 0 or 1.

        Raises:
            ValueError: on shapes, dtypes or values that do not fit.
        """
        check_attribute_table(features, labels, num_classes)
        self._features, self._votes = features, clip_attributes(labels, self.tau)

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One release a round; see :meth:`Labeler.plan`."""
        return [Charge(self.mechanism(num_classes), rounds)]

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Sum, noise and decide, for all queries of a round together; see :meth:`Labeler.label`.

        Returns:
            ``labels`` int64 ``(m, a)`` (rows of -1 where refused) and, with ``soft``, probabilities ``(m, a)``.

        Raises:
            RuntimeError: before :meth:`fit`.
            ValueError: for fewer queries than ``k``.
        """
        sums = self.sums(queries)
        mechanism = self.mechanism(sums.shape[1] - 1)
        noise = self.paid(ledger, mechanism, 1, "sums")
        noisy, deviation = mechanism.add_noise(sums, noise), mechanism.deviation
        refused = noisy[:, -1] < self.abstain * deviation
        if self.rule.denoise:
            noisy = denoised(noisy, deviation)[0]
        rule = dataclasses.replace(self.rule, denoise=False)
        probabilities = rule(noisy[:, :-1], noisy[:, -1].clamp(min=0), self.tau, deviation)
        labels = (probabilities > 0.5).long()
        labels[refused] = -1
        if max_answers is not None:
            labels[torch.nonzero(~refused).flatten()[max_answers:]] = -1
        return Release(labels, probabilities.float() if self.soft else None)

    def sums(self, queries: Tensor) -> Tensor:
        """**Private.** The exact sums, float64 ``(s, a + 1)``; the last column counts records.

        Args:
            queries: float32 features, shape ``(s, d)``.
        """
        if self._features is None or self._votes is None:
            raise RuntimeError(
                "MultiLabelReverseKNN needs the private table: call fit(features, labels) first"
            )
        if len(queries) < self.k:
            raise ValueError(
                f"queries: there are {len(queries)}, fewer than k={self.k}; ask about more or lower k"
            )
        nearest = assign(self._features, queries, self.k, device=self.device)
        given = torch.cat([self._votes, torch.ones(len(self._votes), 1, dtype=torch.float64)], dim=1)
        sums = torch.zeros(len(queries), given.shape[1], dtype=torch.float64)
        for rank in range(self.k):
            sums.index_add_(0, nearest[:, rank].long(), given)
        return sums
