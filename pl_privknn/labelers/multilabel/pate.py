"""PATE for attributes: teachers on disjoint parts vote with clipped attribute vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_positive, check_switch
from pl_privknn.labelers.base import ChargesLedger, Release
from pl_privknn.labelers.multilabel.rules import DecisionRule, LearnedThresholds
from pl_privknn.labelers.multilabel.votes import (
    attribute_answers,
    check_attribute_table,
    clip_attributes,
    release_attributes,
    sum_noise,
    swapped_vote_norms,
)
from pl_privknn.labelers.pate.ensemble import TeacherEnsemble, resolve_groups
from pl_privknn.labelers.pate.networks import LinearTeachers
from pl_privknn.labelers.pate.partition import Partitioner
from pl_privknn.labelers.pate.stacked import StackedEnsemble, StackedTeachers
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace, Mechanism
from pl_privknn.privacy.private_side import silenced


class AttributeTeachers(StackedTeachers):
    """Stacked teachers with one logistic output an attribute, trained with binary cross-entropy."""

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """See :meth:`StackedTeachers.loss`; ``labels`` are int64 ``(t, b, a)``."""
        return nn.functional.binary_cross_entropy_with_logits(
            scores, labels.to(scores.dtype), reduction="sum"
        )

    def known(self, labels: Tensor, parts: Tensor, num_classes: int, num_teachers: int) -> Tensor:
        """Rows of True for parts that hold a record: a teacher may say yes and no to every attribute."""
        return (torch.bincount(parts, minlength=num_teachers) > 0)[:, None].expand(-1, num_classes).clone()

    def ensemble(self, num_features: int, known: Tensor) -> StackedEnsemble:
        """See :meth:`StackedTeachers.ensemble`."""
        return AttributeEnsemble(self, num_features, known)


class AttributeEnsemble(StackedEnsemble):
    """Teachers that answer with a row of attributes each."""

    def predict(self, queries: Tensor) -> Tensor:
        """Attributes from each teacher, int8 ``(m, t, a)``, 0 or 1; rows of -1 where a teacher abstains."""
        answers = torch.full((len(queries), *self.known.shape), -1, dtype=torch.int8)
        for start, scores in self.scores(queries):
            said = (scores > 0).to(torch.int8)
            said[~scores.isfinite().all(dim=2)] = -1
            answers[start : start + scores.shape[1]] = said.transpose(0, 1)
        answers[:, self.empty | self.failed] = -1
        return answers


class LinearAttributeTeachers(AttributeTeachers, LinearTeachers):
    """Logistic regression for each attribute; see :class:`AttributeTeachers`. Weights start at zero.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import MultiLabelPATE, LinearAttributeTeachers
        >>> teachers = LinearAttributeTeachers(steps=20)
        >>> teacher = MultiLabelPATE(num_teachers=4, teachers=teachers, progress=False)
        >>> teacher.fit(torch.rand(40, 4), torch.randint(2, (40, 3)), 3)
        >>> teacher.votes(torch.rand(5, 4)).shape
        torch.Size([5, 3])
    """


class MultiLabelPATE(TeacherEnsemble):
    """PATE with τ (the multi-label rival of Private-kNN in Zhu et al., CVPR 2020, section 4.3, "GNMAX").

    The records are dealt out to disjoint parts and one teacher is trained on each, as in
    :class:`~pl_privknn.labelers.pate.pate.PATE`. A teacher's vote is the attribute vector f that it gives to a query,
    scaled by min(τ/|f|₁, 1); sums, one an attribute, get noise, and a rule decides. A record is in one part,
    so one vote changes at will, which moves the sums by at most √(2τ) in L2 and 2τ in L1
    (:func:`~pl_privknn.labelers.multilabel.votes.swapped_vote_norms`), under both neighbouring relations. An
    abstention is a vote of zeros, which that covers.

    Teachers are private: kept in memory, left out of copies and pickles, and written nowhere.

    Args:
        num_teachers: number of parts and teachers.
        teachers: how they are made; :class:`LinearAttributeTeachers` by default.
        partitioner: :class:`~pl_privknn.labelers.pate.partition.RandomPartition` (the default); those that look
            at classes don't suit attributes.
        tau: τ, the most that a teacher adds to all attributes together; None: no clipping.
        noise: ``Gaussian(sigma)`` or ``Laplace(scale)``; the sensitivity is filled in. By default Gaussian with
            σ = 0.2 times the number of teachers.
        rule: how sums become attributes;
            :class:`~pl_privknn.labelers.multilabel.rules.LearnedThresholds` by default.
        soft: release probabilities of the attributes too; post-processing, free of cost.
        **kwargs: see :class:`~pl_privknn.labelers.pate.ensemble.TeacherEnsemble`.

    Raises:
        ValueError: for arguments out of range, or a partitioner that needs classes.

    Example:
        >>> from pl_privknn.labelers import MultiLabelPATE
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn import Gaussian
        >>> teacher = MultiLabelPATE(num_teachers=250, tau=3.0, noise=Gaussian(sigma=60.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 40), 1e-5), 3)
        1.085
    """

    tasks = ("multilabel",)

    def __init__(
        self,
        num_teachers: int = 250,
        teachers: AttributeTeachers | None = None,
        partitioner: Partitioner | None = None,
        tau: float | None = 3.0,
        noise: Mechanism | None = None,
        rule: DecisionRule | None = None,
        soft: bool = True,
        **kwargs: Any,
    ) -> None:
        made = teachers if teachers is not None else LinearAttributeTeachers()
        if not isinstance(made, AttributeTeachers):
            raise ValueError(
                f"teachers: {type(made).__name__} answer with one class; use LinearAttributeTeachers"
            )
        if partitioner is not None and not partitioner.takes_groups:
            raise ValueError(
                f"partitioner: {type(partitioner).__name__} looks at classes; use RandomPartition"
            )
        super().__init__(num_teachers, made, partitioner, **kwargs)
        self.tau = None if tau is None else check_positive("tau", tau)
        self.noise = noise if noise is not None else Gaussian(sigma=0.2 * self.num_teachers)
        sum_noise(self.noise, 1.0, 1.0)  # refuses what can't be added to sums at once
        self.rule = rule if rule is not None else LearnedThresholds()
        self.soft = check_switch("soft", soft)
        self.asks_in_batches = not self.rule.learns

    def mechanism(self, num_attributes: int) -> Gaussian | Laplace:
        """The frozen mechanism that draws, and is charged for, one answer about so many attributes."""
        return sum_noise(self.noise, *swapped_vote_norms(self.tau, num_attributes))

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Deal out the private table, labels ``(n, num_classes)``, and train the teachers; see :meth:`Labeler.fit`.

        Raises:
            ValueError: on shapes, dtypes or values that do not fit, or fewer records (or groups) than teachers.
            RuntimeError: if all teachers break, or one does and ``on_failure`` is ``"raise"``.
        """
        check_attribute_table(features, labels, num_classes)
        groups = resolve_groups(self.groups, self.private_groups)
        self._keep(self._train(features, labels, num_classes, groups), num_classes)

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One noisy sum an answer; see :meth:`Labeler.plan`."""
        planned = attribute_answers(self.mechanism(num_classes)).plan(num_queries, max_answers)
        return [Charge(self.partitioner.billed(charge.mechanism), charge.count) for charge in planned]

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Answer the first ``max_answers`` queries; see :meth:`Labeler.label`.

        Returns:
            ``labels`` int64 ``(m, a)`` (rows of -1 where refused) and, with ``soft``, probabilities ``(m, a)``.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        votes = self.votes(queries)
        return release_attributes(
            self.mechanism(self._num_classes),
            len(queries),
            self._num_classes,
            lambda asked, _: votes[asked],
            lambda noisy, deviation: self.rule(noisy, self.num_teachers, self.tau, deviation),
            self.pay(ledger),
            self.soft,
            max_answers,
        )

    def votes(self, queries: Tensor) -> Tensor:
        """**Private.** Sums of the teachers' clipped votes, float64 ``(m, a)``.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        trained = self.trained
        with silenced():
            blocks = [
                clip_attributes(trained.predict(part).clamp(min=0), self.tau).sum(dim=1)
                for part in queries.split(256)
            ]
        return torch.cat([torch.zeros(0, self._num_classes, dtype=torch.float64), *blocks])
