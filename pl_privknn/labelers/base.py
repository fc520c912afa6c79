"""Interface of private teachers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.neighbors.processes import ALONE, ProcessGroup, Shard
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
from pl_privknn.privacy.persons import check_owners, records_drawn
from pl_privknn.privacy.records import is_ours
from pl_privknn.privacy.settings import Budget

_Value = TypeVar("_Value")
# Of a table that is looked through for values that are not finite: 16 MB.
_VALUES_AT_A_TIME = 1 << 22

__all__ = ["ChargesLedger", "Labeler", "Release", "check_table", "stated_plan"]


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
    #: What this process holds, where private records lie in shards; set before each fit. Private.
    shard: Shard | None = None
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
    def adjacencies_in_shards(self) -> tuple[Adjacency, ...]:
        """Neighbouring relations under which :meth:`plan` is valid in shards."""
        return self.adjacencies

    @property
    def processes(self) -> ProcessGroup:
        """Processes that hold shards; a single one where the table is whole."""
        return ALONE if self.shard is None else self.shard.group

    @abc.abstractmethod
    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table. May be called again with other features of the same records.

        Args:
            features: float32, shape ``(n, d)``.
            labels: int64, shape ``(n,)``, values in ``[0, num_classes)``.
            num_classes: number of classes, a public constant.

        Raises:
            ValueError: on shapes, dtypes or label values that do not fit.
        """

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
                unit=unit_of(self),
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


def check_features(features: Tensor) -> None:
    """Raise ``ValueError`` unless ``features`` are finite floats of shape ``(n, d)``, without showing one of them."""
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(
            f"features: shape {shape_text(features.shape)}, {features.dtype}; expected float of shape (n, d)"
        )
    rows = max(1, _VALUES_AT_A_TIME // max(1, features.shape[1]))
    if not all(bool(torch.isfinite(part).all()) for part in features.split(rows)):
        raise ValueError("features: some are NaN or infinite; a distance to them has no meaning")


def check_table(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Raise ``ValueError`` unless ``features`` and ``labels`` make a table of ``num_classes`` classes.

    Messages give shapes, dtypes and bounds, never a private value.
    """
    check_features(features)
    if labels.shape != features.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; expected int64 of shape (n,), one for each "
            "row of features"
        )
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes} must be at least 2")
    if len(labels) and bool(((labels < 0) | (labels >= num_classes)).any()):
        raise ValueError(f"labels: some lie outside [0, num_classes={num_classes}); remap them to 0 … c-1")


def check_attribute_table(features: Tensor, labels: Tensor, num_attributes: int) -> None:
    """Raise ``ValueError`` unless ``features`` and ``labels`` make a table of 0/1 attributes.

    Messages give shapes, dtypes and bounds, never a private value.

    Args:
        features: float, shape ``(n, d)``.
        labels: int64, shape ``(n, num_attributes)``, 0 or 1.
        num_attributes: number of attributes, a public constant.
    """
    check_features(features)
    if labels.shape != (len(features), num_attributes) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; expected int64 of shape "
            f"(n, {num_attributes}), a row of attributes for each row of features. Data with one class a record goes "
            "to PrivateKNN, PATE or ReverseKNN"
        )
    if bool(((labels < 0) | (labels > 1)).any()):
        raise ValueError("labels: some attributes are neither 0 nor 1; fill in what isn't known")


def check_records(features: Tensor, labels: Tensor, num_targets: int, task: str) -> None:
    """Raise ``ValueError`` unless these make a table of classes, or of attributes where ``task`` says so."""
    (check_table if task == "multiclass" else check_attribute_table)(features, labels, num_targets)


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


#: Gives the private records anew at each call, block by block: features, float32 ``(b, d)``, and labels.
RecordBlocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]


class UsesPublicFeatures(Labeler):
    """Mixin of labelers that read the features of all public examples before each round."""

    @property
    def uses_public_features(self) -> bool:
        """Whether public features are used with these settings."""
        return True

    @abc.abstractmethod
    def fit_public(self, features: Tensor) -> None:
        """Take this round's features of all public examples, float32 ``(n, d)``.

        Called before :meth:`Labeler.fit` in each round that asks something.
        """


class StreamsRecords(Labeler):
    """Mixin of labelers that read records block by block, without a table in memory."""

    @property
    def streams(self) -> bool:
        """Whether :meth:`fit_blocks` replaces :meth:`fit`; false in a subclass that overrides :meth:`fit`."""
        owner = next(kind for kind in type(self).__mro__ if {"fit", "fit_blocks"} & vars(kind).keys())
        return "fit_blocks" in vars(owner) and "fit" not in vars(self)

    @abc.abstractmethod
    def fit_blocks(self, blocks: RecordBlocks, num_classes: int) -> None:
        """Take the private records block by block, instead of :meth:`Labeler.fit`.

        Args:
            blocks: gives all records anew whenever it is called; a block may be made only as it is looked at.
            num_classes: number of classes, a public constant.
        """


class ProtectsPersons(Labeler):
    """Mixin of labelers whose guarantee can hold for a person with all of their records.

    Such a labeler looks at :attr:`private_owners` in each :meth:`Labeler.fit`. Where they are set, its sensitivities
    are those of adding, removing or replacing a *person*, its coins are persons', and its charges state so; a ledger
    of the other unit refuses them. Labelers that don't derive from this class are refused where the unit is a person.
    """

    #: The person of each private record, int64 ``(n,)``, numbers from 0; None where the unit is a record. Set before
    #: :meth:`Labeler.fit`. Private.
    private_owners: Tensor | None = None

    @property
    def protects_persons(self) -> bool:
        """Whether persons can be protected with these settings."""
        return True

    def checked_owners(self, num_records: int) -> Tensor | None:
        """**Private.** :attr:`private_owners`, checked against the number of records."""
        return None if self.private_owners is None else check_owners(self.private_owners, num_records)

    def drawn_records(self, num_records: int, most: int = 1) -> Tensor:
        """**Private.** Rows that take part: at most ``most`` per person, drawn by private coins; all without persons.

        What holds of these rows whatever the coins, holds of the table: a person has no more than ``most`` of them.
        """
        owners = self.checked_owners(num_records)
        if owners is None:
            return torch.arange(num_records)
        coins = self.noise_source.stream("records of persons", self.processes.rank)
        return records_drawn(owners, most, coins)


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


def unit_of(labeler: Labeler) -> Unit:
    """Unit of privacy of a labeler with its present settings."""
    protects = isinstance(labeler, ProtectsPersons) and labeler.private_owners is not None
    return "person" if protects else "record"


def check_protects(labeler: Labeler, unit: Unit) -> None:
    """Raise ``ValueError`` where a labeler can't protect this unit."""
    if unit == "person" and not (isinstance(labeler, ProtectsPersons) and labeler.protects_persons):
        raise ValueError(
            f"unit='person': {type(labeler).__name__} with these settings protects single records alone; use "
            "unit='record', or a teacher that protects persons, as PrivateKNN"
        )


class RecognisesRecords(Labeler):
    """Mixin of labelers that keep state per record and recognise records when their features change."""

    #: Lasting numbers of the private records, int64 ``(n,)``, where the data module has them; set before each fit.
    #: Private.
    private_ids: Tensor | None = None
    #: What :meth:`record_digests` gave for the records, in the table's order; set before each fit. Private.
    private_digests: Tensor | None = None
    #: Whether the table of a fit has no other reader, so that it may be overwritten; set around it.
    owns_table: bool = False

    @abc.abstractmethod
    def record_digests(self, images: Tensor, labels: Tensor) -> Tensor | None:
        """**Private.** Digests that identify records, one row each, or None.

        Args:
            images: a batch of private images as the data module gives them, shape ``(b, channels, height, width)``.
            labels: int64, shape ``(b,)``.
        """


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
