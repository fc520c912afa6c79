"""Observed run of a labeler: charges, draws and the private values that enter them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import Labeler, ProtectsPersons, RecognisesRecords, Release, UsesPublicFeatures
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Mechanism, NoisyScreening
from pl_privknn.privacy.mechanisms.base import Unit, check_known, observing
from pl_privknn.privacy.noise import NoiseSource, SeededNoise, Shape
from pl_privknn.privacy.settings import Budget
from pl_privknn.privacy.store import NOISE_MARKS
from pl_privknn.testing.tables import Table


class LabelerCheckError(AssertionError):
    """Raised where a labeler fails a check; the message names the check, the tables and the amounts in one line."""


class FreeLedger:
    """Ledger in memory without a budget, for tests and for benchmarks on public data.

    Never for a release: what it notes is gone with the process, and no budget stops it.

    Args:
        limit: refuse after so many charges, as a budget that is spent does; None never refuses.
        start: position of the first row. Seeded noise is a function of the row, so a ledger that goes on where
            another one stopped starts at that one's number of rows.

    Attributes:
        rows: the charges in order, marked as a real ledger marks them: no guarantee where their noise is
            seeded, a conditional one where the charge did not state its noise and adjacencies.

    Example:
        >>> from pl_privknn import Gaussian
        >>> ledger = FreeLedger(limit=1)
        >>> ledger.charge(Gaussian(5.0), 3)
        0
        >>> ledger.rows[0].count, ledger.rows[0].guarantee.level
        (3, 'conditional')
    """

    def __init__(self, limit: int | None = None, start: int = 0) -> None:
        self.limit = None if limit is None else check_int("limit", limit, minimum=0)
        self.start = check_int("start", start, minimum=0)
        self.unit: Unit | None = None  # that charges have to state
        self.rows: list[Charge] = []

    def charge(
        self,
        mechanism: Mechanism,
        count: int = 1,
        *,
        noise: NoiseSource | None = None,
        adjacencies: Sequence[Adjacency] | None = None,
        unit: Unit = "record",
    ) -> int:
        """Note ``count`` releases; see :class:`~pl_privknn.privacy.ledger.ChargesLedger`.

        Raises:
            BudgetExceeded: beyond ``limit`` charges; nothing was noted.
            ValueError: for a count or a mechanism that a real ledger refuses.
        """
        charge = Charge(mechanism, count)
        check_known(charge)
        if self.unit not in (None, unit):
            raise ValueError(f"unit={unit!r}: this ledger counts by {self.unit}")
        if self.limit is not None and len(self.rows) >= self.limit:
            raise BudgetExceeded(
                f"limit={self.limit}: this ledger takes no more charges; nothing was charged and nothing was drawn",
                math.nan, Budget(),
            )  # fmt: skip
        stated = None
        if noise is not None and adjacencies is not None:
            stated = "cryptographic" if noise.cryptographic else "seeded"
        self.rows.append(charge.with_guarantee(NOISE_MARKS[stated]))
        return self.start + len(self.rows) - 1


#: ``drawn``: coins fall as they fall. ``heads``: every record is drawn. ``tails``: none is. ``mixed``: as they fall,
#: and the same ones of two neighbouring tables.
Falling = Literal["drawn", "heads", "tails", "mixed"]
#: Whether queries pass a screening: as drawn, all of them, or every second one.
Passing = Literal["drawn", "all", "half"]
Place = Literal["fit", "label"]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random words drawn in ``label``.

    Attributes:
        path: key of the stream, and of the streams that it came from.
        stream: number of the stream's object; each object starts its stream anew.
        through: whether a mechanism drew them, or a coin.
    """

    path: tuple[int | str, ...]
    stream: int
    through: bool


@dataclasses.dataclass(frozen=True)
class Coins:
    """Coins of one probability that ``label`` tossed, not a mechanism."""

    rate: float
    count: int


@dataclasses.dataclass(frozen=True)
class Paid:
    """One charge, with what its caller stated."""

    charge: Charge
    noise: NoiseSource | None
    adjacencies: tuple[Adjacency, ...]


#: Events without more to say: a call of ``label`` begins; the ledger refused a charge.
CALLED, REFUSED = "called", "refused"


class WatchedNoise(NoiseSource):
    """Reproducible noise that reports every draw to a :class:`Run`. It protects nothing."""

    def __init__(self, run: Run, source: SeededNoise, path: tuple[int | str, ...]) -> None:
        self.run, self._source, self._path = run, source, path
        run.streams += 1
        self._number = run.streams

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        if self.run.place == "label":
            self.run.events.append(Draw(self._path, self._number, self.run.through))
        return self._source.random_words(count)

    def stream(self, *key: int | str) -> WatchedNoise:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        return WatchedNoise(self.run, self._source.stream(*key), (*self._path, *key))

    def uniform(self, shape: Shape) -> Tensor:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`; coupled, as the next two."""
        return self.run.coupled(shape, super().uniform)

    def integers(self, shape: Shape, below: int) -> Tensor:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        draw = super().integers
        return self.run.coupled(shape, lambda dims: draw(dims, below))

    def bernoulli(self, shape: Shape, p: float) -> Tensor:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        draw = super().bernoulli
        return self.run.tossed(shape, p, lambda dims: draw(dims, p))


@dataclasses.dataclass(frozen=True)
class Entered:
    """Private values on their way into noise.

    Attributes:
        mechanism: draws the noise; what was charged, or the part of it that draws.
        values: what enters.
    """

    mechanism: Mechanism
    values: Tensor


class _WatchedLedger(FreeLedger):
    """A free ledger that notes every charge and refusal among the events of a run."""

    def __init__(self, events: list[Any], limit: int | None, start: int) -> None:
        super().__init__(limit, start)
        self._events = events

    def charge(self, mechanism: Mechanism, count: int = 1, **stated: Any) -> int:
        """See :class:`~pl_privknn.testing.watch.FreeLedger`."""
        try:
            row = super().charge(mechanism, count, **stated)
        except BudgetExceeded:
            self._events.append(REFUSED)
            raise
        self._events.append(Paid(self.rows[-1], stated.get("noise"), tuple(stated.get("adjacencies") or ())))
        return row


@dataclasses.dataclass(frozen=True)
class Subject:
    """Subject of a check, and the way in which its runs are made.

    Attributes:
        make: a fresh labeler, not fitted.
        num_classes: classes or attributes.
        public: features of public examples.
        seed: of the noise.
    """

    make: Callable[[], Labeler]
    num_classes: int
    public: Tensor
    seed: int


class Run:
    """One run; see the module.

    Args:
        subject: what is run.
        coins: how coins fall; see :data:`~pl_privknn.testing.watch.Falling`.
        passing: how screenings end; see :data:`~pl_privknn.testing.watch.Passing`.
        after: the run on the other table of a pair; its outcomes are given again here.
        hold_parts: give its conditional partition again, too.
        records: number of records, or persons, of the pair's larger table.
        removed: position in that table of the one that this run's table lacks; None where it lacks none.
        each: number of records of a person, where they are persons.
        limit: charges that the ledger takes.
        start: first row of the ledger.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        coins: Falling = "drawn",
        passing: Passing = "drawn",
        after: Run | None = None,
        hold_parts: bool = True,
        records: int = 0,
        removed: int | None = None,
        each: int = 1,
        limit: int | None = None,
        start: int = 0,
    ) -> None:
        self.subject, self.coins, self.passing = subject, coins, passing
        self.records, self.removed, self.each = records, removed, each
        self.events: list[Any] = []
        self.place: Place = "fit"
        #: Whether a mechanism draws at present, or a coin is tossed.
        self.through = False
        self.streams = 0
        self.outcomes: list[Tensor] = []
        #: Parts that a conditional partitioner made.
        self.parts: list[Tensor] = []
        self._replay = None if after is None else after.outcomes
        self._parts_given = [] if after is None or not hold_parts else after.parts
        self.ledger = _WatchedLedger(self.events, limit, start)
        self.labeler = subject.make()
        self._hold_parts()
        self.labeler.noise_source = WatchedNoise(self, SeededNoise(subject.seed), ())
        self.releases: list[Release] = []

    def fit(self, table: Table, images: Tensor | None = None) -> Run:
        """Fit public features, then the private table, as before each round.

        Args:
            table: the private table.
            images: what the labeler recognises records by; the features unless given.
        """
        self.place = "fit"
        images = table.features if images is None else images
        with observing(self._observed):
            if isinstance(self.labeler, UsesPublicFeatures):
                self.labeler.fit_public(self.subject.public)
            if isinstance(self.labeler, RecognisesRecords):
                self.labeler.private_digests = self.labeler.record_digests(images, table.labels)
            if isinstance(self.labeler, ProtectsPersons):
                self.labeler.private_owners = None if table.owners is None else table.owners.clone()
            self.ledger.unit = "record" if table.owners is None else "person"
            self.labeler.fit(table.features.clone(), table.labels.clone(), self.subject.num_classes)
        return self

    def label(self, queries: Tensor, max_answers: int | None = None) -> Run:
        """Call ``label`` once."""
        self.place = "label"
        self.events.append(CALLED)
        with observing(self._observed):
            self.releases.append(self.labeler.label(queries.clone(), self.ledger, max_answers))
        return self

    def left(self) -> dict[str, Any]:
        """Public state besides the release: attributes of the labeler, and keys of the streams of its draws."""
        shown = {
            name: value.tolist() if isinstance(value, Tensor | np.ndarray) else value
            for name, value in vars(self.labeler).items()
            if isinstance(value, Tensor | np.ndarray | int | float | str)
            and not name.startswith(("_", "private_"))
        }
        keys = [e.path for e in self.events if isinstance(e, Draw) and e.through]
        return {
            "public attributes": shown,
            "keys": [[part for part in key if isinstance(part, str)] for key in keys],
        }

    # ------------------------------------------------------------------ noise

    def tossed(self, shape: Shape, rate: float, draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Coins: of a sample of records where ``label`` tosses them."""
        if self.place == "fit" or self.through:
            return self.coupled(shape, draw)
        dims = _dims(shape)
        self.events.append(Coins(rate, math.prod(dims)))
        if self.coins in ("heads", "tails"):
            return torch.full(dims, self.coins == "heads")
        self.through = True
        try:
            return self._of_records(dims, draw) if self.coins == "mixed" else draw(dims)
        finally:
            self.through = False

    def coupled(self, shape: Shape, draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Result of a draw, coupled between neighbouring tables where ``fit`` makes it for each record.

        As with coins, the draws are those of the same records in both tables: the larger table's are drawn, and the
        one of the record that is missing is taken out. The last axis is that of the records, by row or by rank; a
        pair whose coins are looked at has its records in order of distance, so that both are the same.
        """
        dims, here = _dims(shape), self.records - (self.removed is not None)
        if self.place == "fit" and dims and dims[-1] == here:
            return self._of_records(dims, draw)
        if self.place == "fit" and dims and dims[-1] == self.each * here:
            return self._of_records((*dims[:-1], self.each, here), draw).flatten(-2)
        return draw(dims)

    def _of_records(self, dims: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        removed = self.removed
        if not dims or dims[-1] + (removed is not None) > self.records:
            return draw(dims)
        of_all = draw((*dims[:-1], self.records))
        if removed is not None:
            of_all = torch.cat([of_all[..., :removed], of_all[..., removed + 1 :]], dim=-1)
        return of_all[..., : dims[-1]]

    # ------------------------------------------------------------------ draws of mechanisms

    def _observed(
        self, mechanism: Mechanism, values: Tensor, noise: NoiseSource, draw: Callable[[], Tensor]
    ) -> Tensor:
        """One draw; see :data:`~pl_privknn.privacy.mechanisms.base.Observer`."""
        if self.through:  # one behind another
            return draw()
        if not isinstance(noise, WatchedNoise) or noise.run is not self:
            raise LabelerCheckError(
                f"{mechanism.kind} draws from {noise!r} and not from the labeler's noise_source; get the noise from "
                "self.charge_and_draw(ledger, mechanism, count, key)"
            )
        if self._replay is not None and len(self.outcomes) == len(self._replay):
            raise LabelerCheckError(
                f"what is released depends on the private table: at equal answers, {mechanism.kind} draws once more "
                "on one table than on the other. What is asked, and how often, must not depend on it"
            )
        entered = Entered(mechanism, values.detach().clone())
        self.through = True
        try:
            outcome = draw()
        finally:
            self.through = False
        if self._replay is not None:
            earlier = self._replay[len(self.outcomes)]
            if outcome.shape != earlier.shape:
                raise LabelerCheckError(
                    f"what is released depends on the private table: at equal answers, {mechanism.kind} releases "
                    f"shape {tuple(outcome.shape)} on one table and {tuple(earlier.shape)} on the other"
                )
            outcome = earlier.clone()
        elif isinstance(mechanism, NoisyScreening) and self.passing != "drawn":
            outcome = torch.arange(outcome.numel()).view(outcome.shape) % 2 == 0
            outcome = torch.ones_like(outcome) if self.passing == "all" else outcome
        self.events.append(entered)
        self.outcomes.append(outcome.clone())
        return outcome

    def _hold_parts(self) -> None:
        """Take a partition whose guarantee is conditional as given: that of the first table of a pair, for both."""
        for name, partitioner in vars(self.labeler).items():
            if isinstance(partitioner, Partitioner) and partitioner.condition:
                held = copy.copy(partitioner)
                object.__setattr__(held, "assign", functools.partial(self._assign, partitioner))
                setattr(self.labeler, name, held)

    def _assign(self, partitioner: Partitioner, *given: Any, **named: Any) -> Tensor:
        parts = partitioner.assign(*given, **named)
        if self._parts_given:
            parts, removed = self._parts_given[len(self.parts)], self.removed
            if removed is not None:
                parts = torch.cat([parts[:removed], parts[removed + 1 :]])
        self.parts.append(parts)
        return parts


def _dims(shape: Shape) -> tuple[int, ...]:
    return tuple(np.atleast_1d(shape).tolist())


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
    """Prefix the message of a failed check with the names of the check and the tables."""
    try:
        yield
    except LabelerCheckError as error:
        if error.args and str(error).startswith("check_labeler("):
            raise
        place = f", {where}" if where else ""
        raise LabelerCheckError(f"check_labeler({type(subject).__name__}), {check}{place}: {error}") from None
