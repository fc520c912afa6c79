"""Labelers that answer queries one by one: screen, charge, draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pl_privknn._checks import check_finite, check_positive
from pl_privknn.labelers.attributes import Attributes
from pl_privknn.labelers.base import HasCanaries, ProtectsPersons, Release
from pl_privknn.labelers.canaries import Canaries, at_one_place, hub
from pl_privknn.privacy.mechanisms import (
    AdditiveNoise,
    Charge,
    Mechanism,
    NoisyScreening,
    VoteNoise,
)
from pl_privknn.privacy.noise import NoiseSource

#: Charges so many releases of a mechanism and returns the noise for the purpose named last.
Pay = Callable[[Mechanism, int, str], NoiseSource]
#: Private votes, shape ``(a, c)``, of the queries at these positions, int64 ``(a,)``; samples toss their coins with
#: the noise of the release.
Votes = Callable[[Tensor, NoiseSource], Tensor]


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


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """Screening and noise of a labeler that answers queries one by one; states the cost and draws.

    Attributes:
        noise: chooses, or noises the counts; its sensitivity and sampling rate are those of the votes.
        screening: decides which queries are answered; None answers every one.
        counts: release the noisy counts and not the winner alone; for :class:`AdditiveNoise`.
        key: what the noise is for; a seeded source gives each key a stream of its own.
    """

    noise: VoteNoise
    screening: NoisyScreening | None = None
    counts: bool = False
    key: str = "aggregation"

    @property
    def additive(self) -> AdditiveNoise:
        """The noise, where counts are released."""
        assert isinstance(self.noise, AdditiveNoise)
        return self.noise

    def plan(self, num_queries: int, max_answers: int) -> list[Charge]:
        """The most that so many queries with so many answers can cost."""
        charges = [] if self.screening is None or not num_queries else [Charge(self.screening, num_queries)]
        answers = min(num_queries, max_answers)
        return [*charges, Charge(self.noise, answers)] if answers else charges

    def ask(
        self, num_queries: int, votes: Votes, pay: Pay, max_answers: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Screen and answer, paying before each draw.

        Args:
            num_queries: m.
            votes: see :data:`Votes`; called after each payment, so that every release has coins of its own.
            pay: see :data:`Pay`.
            max_answers: answer the first so many that pass; all if None.

        Returns:
            Positions of the answered queries, int64 ``(a,)``, and what is released of them: winners, int64
            ``(a,)``, or noisy counts ``(a, c)``; None where none is answered.

        Raises:
            BudgetExceeded: if a charge would pass the budget; nothing was drawn or released by it.
        """
        asked = torch.arange(num_queries)
        if self.screening is not None and num_queries:
            noise = pay(self.screening, num_queries, "screening")
            asked = asked[self.screening.passes(votes(asked, noise).max(dim=1).values, noise)]
        asked = asked[:max_answers]
        if not len(asked):
            return asked, None
        noise = pay(self.noise, len(asked), self.key)
        private = votes(asked, noise)
        if self.counts:
            return asked, self.additive.add_noise(private, noise)
        return asked, self.noise.argmax(private, noise)

    def release(self, num_queries: int, votes: Votes, pay: Pay, max_answers: int | None = None) -> Release:
        """Labels of :meth:`ask`, -1 where refused, with all noisy counts where those are released."""
        answered, released = self.ask(num_queries, votes, pay, max_answers)
        labels = torch.full((num_queries,), -1, dtype=torch.int64)
        if released is None:
            return Release(labels)
        if not self.counts:
            labels[answered] = released
            return Release(labels)
        labels[answered] = released.argmax(dim=1)
        scores = torch.full((num_queries, released.shape[1]), torch.nan, dtype=torch.float64)
        scores[answered] = released.double()
        return Release(labels, scores=scores, score_deviation=self.additive.deviation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributeSums(Aggregation):
    """Noisy sums of clipped votes of every query, one an attribute, and the rule that decides by them.

    Attributes:
        attributes: has the rule.
        num_attributes: a.
        total: public number of votes that make a sum.
    """

    attributes: Attributes
    num_attributes: int
    total: int
    counts: bool = True
    key: str = "attributes"

    def release(self, num_queries: int, votes: Votes, pay: Pay, max_answers: int | None = None) -> Release:
        """Attributes of the first queries, rows of -1 where refused, and their probabilities."""
        labels = torch.full((num_queries, self.num_attributes), -1, dtype=torch.int64)
        probabilities = torch.full(labels.shape, 0.5)
        answered, noisy = self.ask(num_queries, votes, pay, max_answers)
        if noisy is not None:
            decided = self.attributes.decide(noisy, self.total, self.additive.deviation)
            labels[answered] = (decided > 0.5).long()
            probabilities[answered] = decided.float()
        return Release(labels, probabilities)


class VotingLabeler(ProtectsPersons, HasCanaries):
    """A labeler in which one record, or one person, moves one vote about a query."""

    attributes: Attributes | None = None

    def take_attributes(self, attributes: Attributes | None) -> None:
        """Answer with attributes where there are any; a rule that learns wants a whole round in one release."""
        self.attributes = attributes
        if attributes is not None:
            self.tasks = ("multilabel",)
            self.asks_in_batches = not attributes.decision.learns

    def canaries(self, public: Tensor, num_classes: int) -> Canaries:
        """One record, and questions about its place."""
        return (at_one_place if self.attributes is None else hub)(public, num_classes)


def vote_noise(
    noise: Mechanism, l1: float, l2: float, rate: float = 1.0, *, counts: bool = False
) -> VoteNoise:
    """The frozen mechanism that both draws and accounts, from what a user gave and a labeler knows.

    Args:
        noise: a mechanism with its noise scale.
        l1: L1 distance that one record can move the votes.
        l2: L2 distance.
        rate: Poisson rate at which records take part.
        counts: all noisy counts are to be let out.

    Raises:
        ValueError: if the mechanism can't noise such votes, or states another value than the labeler's; for
            ``counts``, if it is paid for the winner alone.
    """
    if not isinstance(noise, VoteNoise):
        raise ValueError(
            f"noise={noise!r} can't be added to votes; use for instance Gaussian, Laplace "
            "or ExponentialArgmax"
        )
    noise = noise.for_votes(l1, l2, rate)
    if counts and not isinstance(noise, AdditiveNoise):
        raise ValueError(
            f"release_counts=True: noise={noise!r} is paid for the winner alone; use Gaussian, Laplace or "
            "release_counts=False"
        )
    return noise
