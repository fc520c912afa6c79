"""Interface of private teachers."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pl_privknn._checks import InputError, shape_text
from pl_privknn._processes import ALONE, ProcessGroup, Shard
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.ledger import ChargesLedger
from pl_privknn.privacy.mechanisms.base import (
    MOVES_AS_CHARGED,
    AdditiveNoise,
    Adjacency,
    Charge,
    Guarantee,
    Mechanism,
    Unit,
    noise_guarantee,
)
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.records import is_ours

_Value = TypeVar("_Value")

__all__ = [
    "Capabilities",
    "ChargesLedger",
    "Labeler",
    "PayingRun",
    "PrivateRecords",
    "Release",
    "stated_plan",
]


@dataclasses.dataclass(frozen=True)
class Release:
    """Differentially private answers of a labeler.

    Attributes:
        labels: int64, shape ``(m,)``; class of each query, -1 where the query was refused. Of multi-label data
            ``(m, a)``: attributes 0 or 1, whole rows of -1 where refused.
        probabilities: optional float32, shape ``(m, c)``; rows of answered queries sum to one. Of multi-label data
            ``(m, a)``: a probability for each attribute.
        scores: optional float, shape ``(m, c)``: the noisy counts as they were released, whatever ``labels`` says;
            rows of NaN for queries whose counts were not.
            What is made of them later, such as a smoothing over neighbouring queries, is free of privacy cost.
        score_deviation: standard deviation of the noise on one score, a public constant.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import Release
        >>> Release(torch.tensor([3, -1, 7])).answered.tolist()
        [True, False, True]
    """

    labels: Tensor
    probabilities: Tensor | None = None
    scores: Tensor | None = None
    score_deviation: float | None = None

    @property
    def answered(self) -> Tensor:
        """Bool, shape ``(m,)``: which queries were answered."""
        return self.labels >= 0 if self.labels.ndim == 1 else (self.labels >= 0).all(dim=1)


@dataclasses.dataclass(frozen=True)
class PayingRun:
    """Run as one labeler or training charges it: the only way to noise.

    Each row of the ledger states the source of its noise and what the charge holds for. Methods are collective: every
    process calls them, global rank 0 alone charges, and all get what it decided.

    Attributes:
        ledger: the run of a ledger; None on processes other than global rank 0.
        noise: source of the noise of all releases.
        adjacencies: neighbouring relations under which charges state their cost.
        unit: unit of privacy of the charges.
        processes: which hold the private records.
    """

    ledger: ChargesLedger | None
    noise: NoiseSource
    adjacencies: tuple[Adjacency, ...]
    unit: Unit = "record"
    processes: ProcessGroup = ALONE

    def pay(self, mechanism: Mechanism, count: int, key: str) -> NoiseSource:
        """Charge releases, and return the source of their noise once the charge is on disk.

        Args:
            mechanism: what is released, with the sensitivity that holds under :attr:`adjacencies`.
            count: number of releases.
            key: identifies the release; a seeded source gives each key, row and process a separate stream.

        Returns:
            The noise source of these releases, for the coins of this process's records too.

        Raises:
            BudgetExceeded: if the charge would pass the budget, in every process; nothing was drawn.
            ValueError: where the ledger counts under another adjacency or unit.
        """
        return self.noise.stream(*self.own_key, key, self.charge(mechanism, count))

    def charge(self, mechanism: Mechanism, count: int) -> int:
        """Charge releases as :meth:`pay` does, and return the position of the row."""
        return self.processes.from_first(functools.partial(self._charge, mechanism, count))

    def charged(self, mechanism: Mechanism) -> int:
        """Number of releases by this mechanism that the run has charged."""
        return self.processes.from_first(lambda: self._of_first.charged(mechanism))

    @property
    def own_key(self) -> tuple[str | int, ...]:
        """Prefix of the keys of this process's random streams, so that seeded coins of shards differ."""
        return ("shard", self.processes.rank) if self.processes.rank else ()

    @property
    def _of_first(self) -> ChargesLedger:
        assert self.ledger is not None
        return self.ledger

    def _charge(self, mechanism: Mechanism, count: int) -> int:
        return self._of_first.charge(
            mechanism, count, noise=self.noise, adjacencies=self.adjacencies, unit=self.unit
        )


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Capabilities of a labeler with its settings, beyond one table of single records.

    Attributes:
        in_batches: whether the queries of a round may be asked in several calls of :meth:`Labeler.label`; False where
            one release answers all of them together.
        persons: whether the guarantee also holds for a person with all of their records, where records have owners:
            sensitivities are those of adding, removing or replacing a *person* then, and coins are persons'.
        shards: neighbouring relations under which :meth:`Labeler.plan` also holds where each process has a shard of
            the records; none where the labeler needs the whole table.
        lasting_shards: whether a release depends on the shard in which a record lies; that must then not depend on
            other records, as the number of a row does.
    """

    in_batches: bool = True
    persons: bool = False
    shards: tuple[Adjacency, ...] = ()
    lasting_shards: bool = False


class Labeler(HasInitArguments, abc.ABC):
    """Base class of private teachers: :meth:`fit` to private records, then :meth:`label` public examples.

    A new labeler is one subclass with :meth:`plan` and :meth:`answer`, and :meth:`learn` where it prepares something.
    It gets its noise from :meth:`PayingRun.pay`, which charges the ledger first, for the very mechanism object that
    draws, and never writes its own ε formula. Optional abilities are in separate classes, from which it derives.

    Private records may lie in shards, one a process, where :attr:`capabilities` says so. Every process calls
    :meth:`label` with the same queries then. What it computes from its records goes through ``processes.sum`` or
    ``processes.gather``, and each release through ``processes.from_first``: global rank 0 draws the noise, and the
    others get the released value.

    Args:
        noise_source: where protective randomness comes from; the operating system's cryptographic generator
            unless given. Seeded sources are for tests.

    Example:
        >>> from pl_privknn.labelers import Labeler, PrivateKNN
        >>> isinstance(PrivateKNN(), Labeler), PrivateKNN().adjacencies
        (True, ('add_remove',))
    """

    noise_source: NoiseSource = default_noise()
    #: Neighbouring relations under which :meth:`plan` is valid.
    adjacencies: tuple[Adjacency, ...] = ("add_remove",)
    #: Kinds of labels that :meth:`fit` takes: ``"multiclass"`` int64 ``(n,)``, ``"multilabel"`` ``(n, a)``.
    tasks: tuple[str, ...] = ("multiclass",)
    #: Arguments that a plan may look for (:mod:`pl_privknn.planning`): the first that a configuration states, else
    #: the first of them. One that takes an object represents the argument that the object's class names.
    free_parameters: ClassVar[tuple[str, ...]] = ()
    _records: PrivateRecords | None = None

    def __init__(self, noise_source: NoiseSource | None = None) -> None:
        if noise_source is not None:
            self.noise_source = noise_source

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the labeler with its settings."""
        return Capabilities()

    @property
    def records(self) -> PrivateRecords:
        """Records of the last :meth:`fit`: **private**.

        Raises:
            RuntimeError: before it.
        """
        if self._records is None:
            raise RuntimeError(f"{type(self).__name__} needs the private table: call fit(records) first")
        return self._records

    def fit(self, records: PrivateRecords) -> None:
        """Take the private records; later calls may give the same records with other features.

        Raises:
            ValueError: for labels of another kind than :attr:`tasks`, or a unit of privacy that is not protected.
        """
        if records.task not in self.tasks:
            raise InputError(
                f"labels: shape {shape_text(records.labels.shape)} are {records.task}, and {type(self).__name__} "
                f"takes {' or '.join(self.tasks)}; give int64 (n,) of classes, or (n, num_classes) of attributes"
            )
        check_protects(self, records.unit)
        self._records = records
        self.learn(records)

    def label(
        self, queries: Tensor, run: ChargesLedger | PayingRun | None, max_answers: int | None = None
    ) -> Release:
        """Answer queries, charging each release before its noise is drawn.

        Args:
            queries: float32 features of public examples, shape ``(m, d)``.
            run: of a ledger, which pays; see :meth:`~pl_privknn.privacy.ledger.Ledger.run`. None on processes other
                than global rank 0.
            max_answers: answer at most this many, refuse the rest; all if None.

        Raises:
            BudgetExceeded: if a charge would pass the budget; nothing was drawn or released by it.
            RuntimeError: before :meth:`fit`.
        """
        records = self.records
        if not isinstance(run, PayingRun):
            run = self.paying(run, records.unit, records.shard)
        return self.answer(queries, run, max_answers)

    def drawn_records(self, most: int = 1) -> Tensor:
        """**Private.** Rows of at most ``most`` records a person; see :meth:`PrivateRecords.drawn`."""
        coins = self.noise_source.stream("records of persons", self.records.processes.rank)
        return self.records.drawn(most, coins)

    def paying(
        self, run: ChargesLedger | None, unit: Unit = "record", shard: Shard | None = None
    ) -> PayingRun:
        """Handle of a run that states this labeler's noise source and adjacencies in each charge.

        Args:
            run: of a ledger; None on processes other than global rank 0.
            unit: unit of privacy of the charges.
            shard: place of this process's records, where they lie in shards.
        """
        adjacencies, processes = self.adjacencies, ALONE
        if shard is not None:
            processes = shard.group
            adjacencies = tuple(known for known in adjacencies if known in self.capabilities.shards)
        return PayingRun(run, self.noise_source, adjacencies, unit, processes)

    # ------------------------------------------------------------------ of subclasses

    @abc.abstractmethod
    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """Worst-case charges of a run.

        Args:
            num_queries: queries of all rounds together.
            max_answers: the most answers of all rounds together.
            num_classes: number of classes, a public constant.
            rounds: number of rounds, for teachers that pay by the round.
        """

    def learn(self, records: PrivateRecords) -> None:
        """Prepare the private records for :meth:`answer`; called by :meth:`fit`.

        Args:
            records: gives a table or blocks of feature vectors, labels, and what else is known of the records; all
                of it **private**. It stays at hand as :attr:`records`.
        """

    @abc.abstractmethod
    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Answer queries by :attr:`records`; called by :meth:`label`.

        Args:
            queries: float32 features of public examples, shape ``(m, d)``.
            run: ``run.pay(mechanism, count, key)`` charges releases and returns their noise: the only way to noise.
            max_answers: answer at most this many, refuse the rest with -1; all if None.
        """


def stated_plan(
    labeler: Labeler, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1
) -> list[Charge]:
    """:meth:`Labeler.plan` with the guarantee level that follows from the labeler's noise source and its author."""
    guarantee = noise_guarantee(labeler.noise_source)
    if not is_ours(labeler):
        guarantee &= Guarantee("conditional", (MOVES_AS_CHARGED.format(type(labeler).__name__),))
    return [
        charge.with_guarantee(guarantee)
        for charge in labeler.plan(num_queries, max_answers, num_classes, rounds=rounds)
    ]


def nonnegative_shares(noisy: Tensor) -> Tensor:
    """Non-negative part of noisy counts, each row scaled to sum 1; uniform where a row has none.

    Args:
        noisy: float, shape ``(m, c)``.

    Returns:
        float64, shape ``(m, c)``.
    """
    positive = noisy.double().clamp(min=0)
    total = positive.sum(dim=1, keepdim=True)
    uniform = torch.full_like(positive, 1.0 / positive.shape[1])
    return torch.where(total > 0, positive / total.clamp(min=torch.finfo(torch.float64).tiny), uniform)


def sum_noise(
    noise: Mechanism, l1: float, l2: float, rate: float = 1.0, what: str = "counts"
) -> AdditiveNoise:
    """Complete the noise that a user gives by how far one record moves the sums that it is added to.

    Args:
        noise: a mechanism with its noise scale.
        l1: L1 distance that one record can move the sums.
        l2: L2 distance.
        rate: Poisson rate at which records take part.
        what: the sums, for the message.

    Returns:
        The mechanism that both draws and accounts.

    Raises:
        ValueError: for noise of another kind, or that states another value than the labeler's.
    """
    if not isinstance(noise, AdditiveNoise):
        raise ValueError(
            f"noise={noise!r} can't be added to {what}; use for instance Gaussian(sigma) or Laplace(scale)"
        )
    return noise.for_votes(l1, l2, rate)


class SpendsBudget(Labeler):
    """Mixin of labelers whose noise can be set from a budget.

    Args:
        budget: from which the noise is set: the least with which a run stays within ε at δ. None where other
            arguments set the noise, or where the budget of the run sets it (:class:`~pl_privknn.PrivateLabeler`).
        noise: other noise that is given, or None.
        noise_source: see :class:`Labeler`.
    """

    def __init__(self, budget: Budget | None, noise: Any, noise_source: NoiseSource | None = None) -> None:
        super().__init__(noise_source)
        self.budget = None if budget is None else as_group("budget", budget, Budget())
        self._own_noise = noise is not None
        if self.budget is not None and (self.budget.epsilon is None) != self._own_noise:
            raise ValueError(
                f"budget.epsilon={self.budget.epsilon!r}: {type(self).__name__} takes its noise from it, or from "
                "another argument; give exactly one of them"
            )

    def take_budget(self, budget: Budget, rounds: int = 1) -> None:
        """Set noise and adjacency from a run's budget, before :meth:`Labeler.plan`.

        A budget or noise among the labeler's own arguments has precedence.

        Args:
            budget: of the run.
            rounds: number of rounds that ask something.

        Raises:
            ValueError: where neither sets the noise, the labeler's budget is of another unit than the run's, or its
                adjacency is none of the labeler's.
        """
        if self.budget is not None:
            if self.budget.unit != budget.unit:
                raise ValueError(
                    f"budget.unit={self.budget.unit!r} of {type(self).__name__}, but the run's is {budget.unit!r}; "
                    "give the labeler the run's budget, or none"
                )
            budget = self.budget
        if budget.epsilon is None and not self._own_noise:
            raise ValueError(
                f"budget.epsilon=None: {type(self).__name__} has no noise of its own; give "
                "budget=Budget(epsilon=…) to it or to the run, or state its noise"
            )
        self.set_noise(budget, rounds)
        if self.budget is not None and self.budget.adjacency not in self.adjacencies:
            raise ValueError(
                f"budget.adjacency={self.budget.adjacency!r} is not among those of {type(self).__name__}: "
                f"{', '.join(self.adjacencies)}"
            )

    @abc.abstractmethod
    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set adjacency, and noise where no argument does; ``budget.epsilon`` is given then.

        Args:
            budget: of the run, or the labeler's own.
            rounds: number of rounds that ask something.
        """

    @property
    def adjacency(self) -> Adjacency:
        """Neighbouring relation of the charges."""
        return self.adjacencies[0]

    def set_by_budget(self, value: _Value | None) -> _Value:
        """Return a value that is set from a budget.

        Raises:
            ValueError: where it is still None.
        """
        if value is None:
            raise ValueError(
                f"{type(self).__name__}: no noise is set; give budget=Budget(epsilon=…), or pass it to PrivateLabeler"
            )
        return value

    def _begin(self) -> None:
        """Set noise and adjacency as far as the constructor's arguments do."""
        if self._own_noise or self.budget is not None:
            self.take_budget(self.budget or Budget())


def check_protects(labeler: Labeler, unit: Unit) -> None:
    """Raise ``ValueError`` where a labeler can't protect this unit."""
    if unit == "person" and not labeler.capabilities.persons:
        raise ValueError(
            f"unit='person': {type(labeler).__name__} with these settings protects single records alone; use "
            "unit='record', or a teacher that protects persons, as PrivateKNN"
        )


class JoinsRuns(Labeler):
    """Mixin of labelers that keep private state through a run and across a crash."""

    @abc.abstractmethod
    def join_run(self, folder: Path, run: PayingRun) -> None:
        """Join a run, before each fit; a teacher that can't continue the run raises an error.

        Args:
            folder: private to this labeler and this run; made by the labeler if it needs it, readable by its owner
                only. It is next to the run's folder, not in it.
            run: what :meth:`Labeler.label` will charge.
        """

    @abc.abstractmethod
    def leave_run(self) -> None:
        """Close the files of :meth:`join_run`; called when a run has ended, by an error too."""


class MakesModel(Labeler):
    """Mixin of labelers whose releases give a model: post-processing, which may be saved and published."""

    #: Whether releases are made once, about one kind of features, and answer the queries of all rounds.
    releases_once: bool = False

    @abc.abstractmethod
    def head_state(self) -> dict[str, Tensor] | None:
        """The model as tensors; None where nothing is released yet."""

    @abc.abstractmethod
    def head(self, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Class probabilities ``(n, c)`` of features ``(n, d)``, by the model of :meth:`head_state`."""

    def remark(self, state: dict[str, Tensor]) -> str:
        """Sentence about findings in the releases, such as a shift of the features; empty without any."""
        return ""
