"""One run of a labeler under observation: a fresh copy, a noting ledger, watched noise and drawing methods."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from pl_privknn.labelers.base import Labeler, RecognisesRecords, Release, UsesPublicFeatures
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Adjacency, Mechanism
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.testing.drawing_methods import DrawingMethod, Passing, WatchedMethods
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.ledger import FreeLedger
from pl_privknn.testing.shards import InShards, in_shards
from pl_privknn.testing.tables import Table
from pl_privknn.testing.watch import Called, Coins, Paid, Refused, Watch


class WatchedLedger(FreeLedger):
    """A free ledger that tells a :class:`~pl_privknn.testing.watch.Watch` of every charge and refusal."""

    def __init__(self, watch: Watch, limit: int | None = None, start: int = 0) -> None:
        super().__init__(limit, start)
        self.watch = watch

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
    ) -> int:
        """See :class:`~pl_privknn.testing.ledger.FreeLedger`."""
        try:
            row = super().charge(mechanism, count, noise=noise, adjacencies=adjacencies)
        except BudgetExceeded:
            self.watch.events.append(Refused(mechanism))
            raise
        stated = None if adjacencies is None else tuple(adjacencies)
        self.watch.events.append(Paid(self.rows[-1], row, noise, stated))
        return row


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is checked, and how runs of it are made.

    Attributes:
        make: a fresh labeler, not fitted.
        methods: see :class:`~pl_privknn.testing.drawing_methods.WatchedMethods`.
        num_classes: classes or attributes.
        public: features of public examples.
        seed: of the noise.
        shards: in so many shards private records lie.
    """

    make: Callable[[], Labeler]
    methods: Sequence[DrawingMethod]
    num_classes: int
    public: Tensor
    seed: int
    shards: int = 1


class Run:
    """One run; see the module.

    Args:
        subject: what is run.
        coins: how coins fall; see :data:`~pl_privknn.testing.watch.Coins`.
        passing: how screenings end; see :data:`~pl_privknn.testing.drawing_methods.Passing`.
        after: the run on the other table of a pair; its outcomes are given again here.
        hold_parts: give its conditional partition again, too.
        records: number of records of the pair's larger table.
        removed: the record that this run's table lacks.
        limit: charges that the ledger takes.
        start: first row of the ledger.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        coins: Coins = "drawn",
        passing: Passing = "drawn",
        after: Run | None = None,
        hold_parts: bool = True,
        records: int = 0,
        removed: int | None = None,
        limit: int | None = None,
        start: int = 0,
    ) -> None:
        self.subject = subject
        self.watch = Watch(subject.seed, coins, records, removed, subject.shards)
        replay = None if after is None else after.methods.outcomes
        self.methods: WatchedMethods = WatchedMethods(self.watch, subject.methods, passing, replay)
        if after is not None and hold_parts:
            self.methods.parts_given = after.methods.parts
        self.ledger = WatchedLedger(self.watch, limit, start)
        self.labeler = in_shards(subject.make, subject.shards, removed)
        if isinstance(self.labeler, InShards):
            self.watch.at_work = self.labeler.exchange
        self.labeler.noise_source = self.watch.noise
        self.releases: list[Release] = []

    @property
    def events(self) -> list[Any]:
        """What happened, in order."""
        return self.watch.events

    def fit(self, table: Table, images: Tensor | None = None) -> Run:
        """Public features, then the private table; as before each round.

        Args:
            table: the private table.
            images: what the labeler recognises records by; the features unless given.
        """
        self.watch.place = "fit"
        images = table.features if images is None else images
        with self.methods.open():
            if isinstance(self.labeler, UsesPublicFeatures):
                self.labeler.fit_public(self.subject.public)
            if isinstance(self.labeler, RecognisesRecords):
                self.labeler.private_digests = self.labeler.record_digests(images, table.labels)
            self.labeler.fit(table.features.clone(), table.labels.clone(), self.subject.num_classes)
        return self

    def label(self, queries: Tensor, max_answers: int | None = None) -> Run:
        """One call of ``label``."""
        self.watch.place = "label"
        self.events.append(Called())
        with self.methods.open():
            self.releases.append(self.labeler.label(queries.clone(), self.ledger, max_answers))
        return self


def copies_of(labeler: Labeler) -> Callable[[], Labeler]:
    """A function that copies a labeler which was not fitted.

    A plan is asked for first, as a run does, so that what it calibrates is copied and not found again in each run.

    Raises:
        LabelerCheckError: for a labeler that can't be copied.
    """
    try:
        planned = copy.deepcopy(labeler)
        with contextlib.suppress(Exception):  # the check of the plan says what is wrong with it
            planned.plan(1, 1, 2)
        copy.deepcopy(planned)
    except Exception as error:
        raise LabelerCheckError(
            f"check_labeler({type(labeler).__name__}): can't be copied ({type(error).__name__}: {error}); give a "
            "labeler that was not fitted, or a function that makes one"
        ) from error
    return lambda: copy.deepcopy(planned)


@contextlib.contextmanager
def named(check: str, subject: object, where: str = "") -> Iterator[None]:
    """Put the name of the check, and of the tables, in front of what a failed check says."""
    try:
        yield
    except LabelerCheckError as error:
        if error.args and str(error).startswith("check_labeler("):
            raise
        place = f", {where}" if where else ""
        raise LabelerCheckError(f"check_labeler({type(subject).__name__}), {check}{place}: {error}") from None
