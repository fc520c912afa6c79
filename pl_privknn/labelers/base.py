"""Interface of private teachers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pl_privknn._checks import InputError, shape_text
from pl_privknn._processes import ALONE, ProcessGroup, Shard
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.privacy.ledger import ChargesLedger
from pl_privknn.privacy.mechanisms.base import (
    MOVES_AS_CHARGED,
    Adjacency,
    Charge,
    Guarantee,
    Mechanism,
    Unit,
    noise_guarantee,
)
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.records import is_ours
from pl_privknn.privacy.settings import Budget

_Value = TypeVar("_Value")

__all__ = ["ChargesLedger", "Labeler", "PrivateRecords", "Release", "stated_plan"]


@dataclasses.dataclass(frozen=True)
class Release:
    """Differentially private answers of a labeler.

    Attributes:
        labels: int64, shape ``(m,)``; class of each query, -1 where the query was refused. Of multi-label data
            ``(m, a)``: attributes 0 or 1, whole rows of -1 where refused.
        soft: optional float32, shape ``(m, c)``; rows of answered queries sum to one. Of multi-label data
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
    soft: Tensor | None = None
    scores: Tensor | None = None
    score_deviation: float | None = None

    @property
    def answered(self) -> Tensor:
        """Bool, shape ``(m,)``: which queries were answered."""
        return self.labels >= 0 if self.labels.ndim == 1 else (self.labels >= 0).all(dim=1)


class Labeler(HasInitArguments, abc.ABC):
    """Base class of private teachers: answers queries about public examples from a private table.

    A new labeler is one subclass: :meth:`fit`, :meth:`plan` and :meth:`label`. It gets its noise from
    :meth:`charge_and_draw`, which charges the ledger first, for the very mechanism object that draws, and never
    writes its own ε formula. Optional abilities (streams, models, …) are in separate classes, from
    which it derives.

    Private records may lie in shards, one a process, where :attr:`takes_shards` says so. Every process calls
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

    #: Neighbouring relations under which :meth:`plan` is valid.
    adjacencies: tuple[Adjacency, ...] = ("add_remove",)
    #: Kinds of labels that :meth:`fit` takes: ``"multiclass"`` int64 ``(n,)``, ``"multilabel"`` ``(n, a)``.
    tasks: tuple[str, ...] = ("multiclass",)
    #: Where searches and assignments multiply; where their tensors lie if None. Set before :meth:`fit`. It changes
    #: the time, not an answer: what comes out is exact on every device (Ind-KNN's κ up to a last float32 digit).
    device: torch.device | None = None
    #: Whether a round's queries may be asked in several calls of :meth:`label`; False where one release
    #: answers all of them together.
    asks_in_batches: bool = True
    #: Whether :func:`~pl_privknn.testing.check_labeler` found no fault; runs of labelers of others note it.
    checked: bool = False
    #: Arguments that a plan may look for (:mod:`pl_privknn.planning`): the first that a configuration states, else
    #: the first of them. One that takes an object represents the argument that the object's class names.
    free_parameters: ClassVar[tuple[str, ...]] = ()
    #: Place of this process's records, where they lie in shards. **Private**; of the records of the last :meth:`fit`.
    shard: Shard | None = None
    #: Unit of privacy of the charges; likewise.
    unit: Unit = "record"
    #: Whether a release depends on the shard in which a record lies; that must then not depend on other records, as
    #: the number of a row does.
    lasting_shards: bool = False

    def __init__(self, noise_source: NoiseSource | None = None) -> None:
        self.noise_source = noise_source if noise_source is not None else default_noise()

    @property
    def takes_shards(self) -> bool:
        """Whether records may be in shards with these settings."""
        return False

    @property
    def protects_persons(self) -> bool:
        """Whether the guarantee holds for a person with all of their records, where the records have owners.

        The sensitivities are those of adding, removing or replacing a *person* then, and the coins are persons'.
        """
        return False

    def drawn_records(self, records: PrivateRecords, most: int = 1) -> Tensor:
        """**Private.** Rows of at most ``most`` records a person; see :meth:`PrivateRecords.drawn`."""
        return records.drawn(most, self.noise_source.stream("records of persons", self.processes.rank))

    @property
    def adjacencies_in_shards(self) -> tuple[Adjacency, ...]:
        """Neighbouring relations under which :meth:`plan` is valid in shards."""
        return self.adjacencies

    @property
    def processes(self) -> ProcessGroup:
        """Processes that hold shards; a single one where the table is whole."""
        return ALONE if self.shard is None else self.shard.group

    @abc.abstractmethod
    def fit(self, records: PrivateRecords) -> None:
        """Take the private records. May be called again with other features of the same records.

        A subclass calls this method of the base class, which takes the unit of privacy and the place among the
        processes from the records.

        Args:
            records: gives a table or blocks of feature vectors, labels, and what else is known of the records; all
                of it **private**.

        Raises:
            ValueError: for labels of another kind than :attr:`tasks`.
        """
        if records.task not in self.tasks:
            raise InputError(
                f"labels: shape {shape_text(records.labels.shape)} are {records.task}, and {type(self).__name__} "
                f"takes {' or '.join(self.tasks)}; give int64 (n,) of classes, or (n, num_classes) of attributes"
            )
        check_protects(self, records.unit)
        self.shard, self.unit = records.shard, records.unit

    @abc.abstractmethod
    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """Worst-case charges of a run.

        Args:
            num_queries: queries of all rounds together.
            max_answers: the most answers of all rounds together.
            num_classes: number of classes, a public constant.
            rounds: number of rounds, for teachers that pay by the round.
        """

    def charge_and_draw(
        self, ledger: ChargesLedger, mechanism: Mechanism, count: int, key: str
    ) -> NoiseSource:
        """Charge ``count`` releases of ``mechanism`` and return their noise source: the only way to draw.

        The charge states this labeler's :attr:`adjacencies` (in shards :attr:`adjacencies_in_shards`), its unit of
        privacy, and whether its noise is cryptographic. In shards global rank 0 charges; each process gets a stream
        that no other has, for the coins of its records.

        Args:
            ledger: pays.
            mechanism: what is released, with the sensitivity that holds under these adjacencies.
            count: number of releases.
            key: identifies the release; a seeded source gives each key and row a separate stream.

        Returns:
            the noise, after the charge is on disk.

        Raises:
            BudgetExceeded: if the charge would pass the budget, in every process; nothing was drawn.
            ValueError: where the ledger counts under another adjacency or unit.
        """
        row = self.processes.from_first(
            lambda: ledger.charge(
                mechanism,
                count,
                noise=self.noise_source,
                adjacencies=self.adjacencies if self.shard is None else self.adjacencies_in_shards,
                unit=self.unit,
            )
        )
        return self.noise_source.stream(*self.shard_key(), key, row)

    def shard_key(self) -> tuple[str | int, ...]:
        """First parts of the keys of this process's streams: seeded coins of shards must differ."""
        return ("shard", self.processes.rank) if self.processes.rank else ()

    @abc.abstractmethod
    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Answer queries, charging each release before its noise is drawn.

        Args:
            queries: float32 features of public examples, shape ``(m, d)``.
            ledger: pays; see :class:`ChargesLedger`.
            max_answers: answer at most this many, refuse the rest; all if None.

        Raises:
            BudgetExceeded: if a charge would pass the budget; nothing was drawn or released by it.
        """


class FollowerLedger:
    """Ledger of the processes other than global rank 0, which alone charges."""

    def charge(self, mechanism: Mechanism, count: int = 1, **stated: Any) -> int:
        """Refuse: a labeler that charges here would draw more than once.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("ledger: global rank 0 alone charges; pay through Labeler.charge_and_draw")


def stated_plan(
    labeler: Labeler, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1
) -> list[Charge]:
    """:meth:`Labeler.plan` with the guarantee level that follows from the labeler's noise source and its author."""
    guarantee = noise_guarantee(labeler.noise_source)
    if not is_ours(labeler):
        checked = " (check_labeler found no fault)" if labeler.checked else ""
        guarantee &= Guarantee("conditional", (MOVES_AS_CHARGED.format(type(labeler).__name__) + checked,))
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
        """Return a value that a budget sets.

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
    if unit == "person" and not labeler.protects_persons:
        raise ValueError(
            f"unit='person': {type(labeler).__name__} with these settings protects single records alone; use "
            "unit='record', or a teacher that protects persons, as PrivateKNN"
        )


class JoinsRuns(Labeler):
    """Mixin of labelers that keep private state through a run and across a crash."""

    @abc.abstractmethod
    def join_run(self, folder: Path, ledger: ChargesLedger) -> None:
        """Join a run, before each fit; a teacher that can't continue the run raises an error.

        Args:
            folder: private to this labeler and this run; made by the labeler if it needs it, readable by its owner
                only. It is next to the run's folder, not in it.
            ledger: what :meth:`Labeler.label` will charge.
        """

    @abc.abstractmethod
    def leave_run(self) -> None:
        """Close what :meth:`join_run` opened; called when a run has ended, by an error too."""


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
