"""The figures of the PATE papers: data-dependent ε, consensus of teachers, variance of students."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.labelers.pate.aggregators import Aggregator
from pl_privknn.privacy.accounting import rdp
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.data_dependent import answers_rdp, screening_rdp
from pl_privknn.privacy.guarantee import Guarantee, weakest
from pl_privknn.privacy.mechanisms import Adjacency, Charge, DataDependent


class AskedTeachers(Protocol):
    """What a report needs of teachers: :class:`~pl_privknn.labelers.pate.pate.PATE`."""

    aggregator: Aggregator
    num_teachers: int
    adjacencies: tuple[Adjacency, ...]

    def asked_votes(self) -> tuple[Tensor, Tensor]:
        """**Private.** Votes ``(m, c)`` of every query so far, and which of them were answered."""
        ...

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """See :meth:`~pl_privknn.labelers.base.Labeler.plan`."""
        ...

    def stated_plan(
        self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1
    ) -> list[Charge]:
        """See :meth:`~pl_privknn.labelers.base.Labeler.stated_plan`."""
        ...


@dataclasses.dataclass(frozen=True)
class DataDependentReport:
    """Cost of the queries so far for the private table in hand. **Private**: computed from private votes.

    Attributes:
        epsilon: data-dependent RDP in both directions, improved conversion; conditional.
        epsilon_one_direction: as published (one direction), improved conversion.
        epsilon_one_direction_classic: as published, with the conversion of the papers.
        epsilon_independent: what the same screenings and answers cost for any table (the valid figure).
        delta: δ of all of them.
        queries: screenings, or questions where nothing is screened.
        answers: questions that were answered.
        guarantee: ``"conditional"``, or ``"none"`` where the noise came from a seed.
        reason: why; the condition of the partition, where there is one, included.
    """

    epsilon: float
    epsilon_one_direction: float
    epsilon_one_direction_classic: float
    epsilon_independent: float
    delta: float
    queries: int
    answers: int
    guarantee: str = "conditional"
    reason: str = DataDependent.reason

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return dataclasses.asdict(self)


def data_dependent_report(pate: AskedTeachers, delta: float) -> DataDependentReport:
    """**Private.** Data-dependent cost of what ``pate`` was asked; see :class:`DataDependentReport`.

    The number of answers is taken as it came out, as the papers do: for the table in hand it is an outcome,
    which is one more reason why the figure is no guarantee stated beforehand.

    Raises:
        ValueError: for a δ outside (0, 1), or teachers whose noisy counts are released: the bounds are of winners
            alone.
    """
    delta = check_open_unit("delta", delta)
    if pate.aggregator.release_counts:
        raise ValueError(
            "release_counts=True: data-dependent bounds hold where the winner alone is released; set "
            "release_counts=False for this figure, or use the data-independent epsilon"
        )
    votes, answered = pate.asked_votes()
    if not len(votes):
        return DataDependentReport(0.0, 0.0, 0.0, 0.0, delta, 0, 0)
    charges = pate.stated_plan(len(votes), int(answered.sum()), votes.shape[1])
    guarantee = weakest(
        [Guarantee("conditional", (DataDependent.reason,)), *(charge.guarantee for charge in charges)]
    )
    counts = votes.numpy()
    orders = rdp.ORDERS
    curve = np.zeros(len(orders))
    screening = pate.aggregator.screening_mechanism(pate.num_teachers, votes.shape[1])
    if screening is not None:
        curve += screening_rdp(screening, counts.max(axis=1).clip(screening.lowest), orders).sum(axis=0)
    noise, chosen = pate.aggregator.noise, counts[answered.numpy()]
    both = curve + answers_rdp(noise, chosen, orders, "both").sum(axis=0)
    one = curve + answers_rdp(noise, chosen, orders, "one").sum(axis=0)
    independent = account(charges, delta=delta, adjacency=pate.adjacencies[0], exact=False).epsilon
    return DataDependentReport(
        epsilon=min(independent, rdp.epsilon_improved(orders, both, delta)),
        epsilon_one_direction=min(independent, rdp.epsilon_improved(orders, one, delta)),
        epsilon_one_direction_classic=rdp.epsilon_classic(orders, one, delta),
        epsilon_independent=independent,
        delta=delta,
        queries=len(votes),
        answers=len(chosen),
        guarantee=guarantee.level,
        reason=guarantee.reason,
    )


def consensus(votes: Tensor, num_teachers: int) -> Tensor:
    """**Private.** Share of the teachers behind the winner of each query, float64 ``(m,)``.

    Args:
        votes: int64 ``(m, c)``, from :meth:`~pl_privknn.labelers.pate.pate.PATE.votes`.
        num_teachers: all of them, those that abstain included.
    """
    return votes.max(dim=1).values.double() / check_int("num_teachers", num_teachers)


def consensus_histogram(votes: Tensor, num_teachers: int, bins: int = 10) -> tuple[Tensor, Tensor]:
    """**Private.** How many queries have which consensus.

    Returns:
        ``(counts, edges)``: int64 ``(bins,)`` and float64 ``(bins + 1,)`` from 0 to 1; full consensus is in
        the last bin.
    """
    shares = consensus(votes, num_teachers)
    place = (shares * check_int("bins", bins)).long().clamp_(max=bins - 1)
    return torch.bincount(place, minlength=bins), torch.linspace(0, 1, bins + 1, dtype=torch.float64)


def prediction_variance(predictions: Tensor) -> float:
    """Mean over examples and classes of the variance, across students, of their class probabilities.

    The students differ in their seeds and in the answers that they were trained on. (The Guided PATE paper
    prints "variance in the predictions of student model" without a definition; its scale can't be matched.)

    Args:
        predictions: class probabilities of r ≥ 2 students on the same examples, shape ``(r, m, c)``.

    Raises:
        ValueError: for another shape.
    """
    if predictions.ndim != 3 or len(predictions) < 2:
        raise ValueError(
            f"predictions: shape {tuple(predictions.shape)}; want (students, examples, classes), "
            "at least two students"
        )
    return float(predictions.double().var(dim=0, unbiased=True).mean())
