"""One run of a labeler under observation: its charges, its draws, and what enters them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import logging
import math
import os
import re
import sys
import tempfile
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import Labeler, ProtectsPersons, RecognisesRecords, Release, UsesPublicFeatures
from pl_privknn.labelers.ind_knn import engine
from pl_privknn.labelers.ind_knn.algorithm import Floats, Votes
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.labelers.reverse_knn_local import LocalRandomizer, Shuffled
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Gaussian, Mechanism
from pl_privknn.privacy.mechanisms.base import Unit, check_known
from pl_privknn.privacy.noise import NoiseSource, SeededNoise, Shape
from pl_privknn.privacy.redaction import descriptors_led_to
from pl_privknn.privacy.store import NOISE_MARKS
from pl_privknn.testing.tables import Table


class LabelerCheckError(AssertionError):
    """A labeler breaks a promise; the message names the check, the tables and the amounts, in one line."""


class FreeLedger:
    """Notes every charge in memory and asks for nothing: for tests, and for benchmarks on public data.

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
                math.nan, math.nan, math.nan,
            )  # fmt: skip
        stated = None
        if noise is not None and adjacencies is not None:
            stated = "cryptographic" if noise.cryptographic else "seeded"
        self.rows.append(charge.with_guarantee(NOISE_MARKS[stated]))
        return self.start + len(self.rows) - 1


#: ``drawn``: coins fall as they fall. ``heads``: every record is drawn. ``tails``: none is. ``mixed``: as they fall,
#: and the same ones of two neighbouring tables.
Coins = Literal["drawn", "heads", "tails", "mixed"]
#: Whether queries pass a screening: as drawn, all of them, or every second one.
Passing = Literal["drawn", "all", "half"]
Place = Literal["fit", "label"]
#: Drawing methods of a noise source that take a shape (or scores) and one parameter at most.
KINDS = (
    "uniform",
    "integers",
    "bernoulli",
    "normal",
    "rounded_normal",
    "rounded_laplace",
    "laplace",
    "normal_at_least",
    "exponential_choice",
)


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call of a drawing method of a noise source.

    Attributes:
        kind: the method.
        path: key of the stream, and of the streams that it came from.
        stream: number of the stream's object; each object starts its stream anew.
        dims: shape of what was drawn.
        parameter: probability, scale or range.
        place: in which call of the labeler.
        through: whether a drawing method of a mechanism drew it.
        values: what was drawn, of normal noise that no drawing method drew.
    """

    kind: str
    path: tuple[int | str, ...]
    stream: int
    dims: tuple[int, ...]
    parameter: float
    place: Place
    through: bool
    values: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Paid:
    """One charge, with what its caller stated."""

    charge: Charge
    noise: NoiseSource | None
    adjacencies: tuple[Adjacency, ...] | None


#: Events without more to say: a call of ``label`` begins; the ledger refused a charge.
CALLED, REFUSED = "called", "refused"


class WatchedNoise(NoiseSource):
    """Reproducible noise that tells a :class:`Run` of every draw. It protects nothing."""

    def __init__(self, run: Run, source: SeededNoise, path: tuple[int | str, ...]) -> None:
        self.run, self._source, self._path = run, source, path
        run.streams += 1
        self._number, self._drawing = run.streams, False

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        if not self._drawing:
            self._note("random_words", (count,))
        return self._source.random_words(count)

    def stream(self, *key: int | str) -> WatchedNoise:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        return WatchedNoise(self.run, self._source.stream(*key), (*self._path, *key))

    def drawn(self, kind: str, of: Shape | Tensor, *parameter: float) -> Tensor:
        """Draw of a noise source's method ``kind``, coupled and noted."""
        original = getattr(NoiseSource, kind)
        if self._drawing:  # one draw is made of another
            values: Tensor = original(self, of, *parameter)
            return values
        chosen = isinstance(of, Tensor)  # thresholds, or scores of whose last axis one is chosen
        dims = _dims(of) if not isinstance(of, Tensor) else tuple(of.shape)
        dims = dims[:-1] if kind == "exponential_choice" else dims
        self._drawing = True
        try:
            values = self.run.fallen(
                kind, dims, lambda shape: original(self, of if chosen else shape, *parameter)
            )
        finally:
            self._drawing = False
        self._note(kind, tuple(values.shape), parameter[0] if parameter else 0.0, values)
        return values

    def _note(
        self, kind: str, dims: tuple[int, ...], parameter: float = 0.0, values: Tensor | None = None
    ) -> None:
        run = self.run
        kept = None if values is None or kind != "normal" or run.through or not dims else values.clone()
        run.events.append(
            Draw(kind, self._path, self._number, dims, float(parameter), run.place, run.through, kept)
        )


def _watched(kind: str) -> Callable[..., Tensor]:
    @functools.wraps(getattr(NoiseSource, kind))
    def method(self: WatchedNoise, *given: Any, **named: Any) -> Tensor:
        return self.drawn(kind, *given, *named.values())

    return method


for _kind in KINDS:
    setattr(WatchedNoise, _kind, _watched(_kind))


def _dims(shape: Shape) -> tuple[int, ...]:
    return tuple(int(size) for size in shape) if isinstance(shape, Sequence) else (int(shape),)


def coins_of(events: list[Any], rate: float) -> int:
    """Number of coins of probability ``rate`` that no drawing method tossed."""
    return sum(
        math.prod(event.dims)
        for event in events
        if isinstance(event, Draw)
        and event.kind == "bernoulli"
        and not event.through
        and event.parameter == rate
    )


#: (what enters on one table, what enters on the other) to (how far they differ, how far they may).
Measure = Callable[[Tensor, Tensor], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Entered:
    """Private values on their way into noise.

    Attributes:
        mechanism: draws the noise; what was charged, or the part of it that draws.
        values: what enters.
        measure: how far the values of two tables differ and may differ, for mechanisms whose fields do not say.
    """

    mechanism: Mechanism
    values: Tensor
    measure: Measure | None = None


#: Drawing methods of mechanisms, and what enters by their arguments.
DRAWING: dict[str, Callable[..., Entered]] = {
    **dict.fromkeys(
        ("add_noise", "argmax", "passes", "randomize"),
        lambda mechanism, values, noise: Entered(mechanism, values),
    ),
    "add_noise_to_multiples": lambda mechanism, counts, step, noise: Entered(
        mechanism, counts.double() * step
    ),
}


@dataclasses.dataclass(frozen=True)
class DrawingMethod:
    """A method, or a function of a module, through which private values enter noise.

    For a mechanism of your own whose drawing method has another name, or which states no sensitivity::

        def far(first, second):  # how far two tables' values are apart, and how far they may be
            return float((first - second).abs().max()), 1.0

        DrawingMethod(Staircase, "draw", lambda mechanism, values, noise: Entered(mechanism, values, far))

    Attributes:
        owner: class or module.
        name: of the method or function.
        enters: says what enters, from the arguments of a call (for a method, the object first).
    """

    owner: Any
    name: str
    enters: Callable[..., Entered]

    def view(
        self, run: Run, earlier: Any, original: Callable[..., Any], *given: Any, **named: Any
    ) -> tuple[list[Entered], Any]:
        """Call the method.

        Args:
            run: of the labeler.
            earlier: the outcome on the other table of a pair; None on the first.
            original: the method.
            *given: its arguments.
            **named: likewise.

        Returns:
            What enters, and the outcome.
        """
        entered = self.enters(*given, **named)
        entered = dataclasses.replace(entered, values=entered.values.detach().clone())
        return [entered], original(*given, **named)


def mechanism_methods() -> list[DrawingMethod]:
    """Every drawing method that any known mechanism defines; yours too, once it is imported."""
    return [
        DrawingMethod(cls, name, enters)
        for cls in subclasses(Mechanism)
        for name, enters in DRAWING.items()
        if name in vars(cls) and not getattr(vars(cls)[name], "__isabstractmethod__", False)
    ]


def subclasses(cls: type) -> list[type]:
    """A class and all classes that derive from it."""
    children: list[type] = type.__subclasses__(cls)
    return [cls, *(found for child in children for found in subclasses(child))]


#: So far above any count that the floor under it plays no part, and exact in float64.
_FAR = 2.0**20


def protocol_methods() -> list[DrawingMethod]:
    """Those of local and shuffled reverse kNN, and of Ind-KNN."""
    protocols = [*subclasses(LocalRandomizer), *subclasses(Shuffled)]
    return [
        *(
            DrawingMethod(cls, name, answers)
            for cls in protocols
            for name in ("simulate", "randomize", "messages")
            if name in vars(cls) and not getattr(vars(cls)[name], "__isabstractmethod__", False)
        ),
        StreamMethod(engine, "ask", lambda *given: given[0]),
    ]


def answers(protocol: Any, nearest: Tensor, labels: Tensor, noise: NoiseSource) -> Entered:
    """Input of a protocol in which every client noises its own answer: the answers, a row a client.

    Any two answers are covered, so what counts is how many clients' answers differ: one. An answer names its cells
    once each, as the protocol's randomiser takes for granted.
    """
    named = protocol.table.cells_of(nearest, labels).sort(dim=1).values
    if bool((named.diff(dim=1) == 0).any()):
        raise LabelerCheckError(
            "a record's message names a cell twice; its randomiser covers different cells"
        )
    return Entered(protocol.mechanism, named, _answers_changed)


def _answers_changed(first: Tensor, second: Tensor) -> tuple[float, float]:
    if first.shape != second.shape:
        return float("inf"), 1.0
    return float((first != second).any(dim=1).sum()), 1.0


class StreamMethod(DrawingMethod):
    """One answer of Ind-KNN: the number of neighbours enters, and then their votes at the number released.

    Both are Gaussian releases of the stream that is paid for as a whole. What enters them, and the deviation of the
    noise that meets it, is found from outside, by asking with other noise; the last answer is paid for.
    """

    def view(
        self, run: Run, earlier: Votes | None, original: Callable[..., Votes], *given: Any, **named: Any
    ) -> tuple[list[Entered], Votes]:
        """See the base."""
        parameters, active, votes, public_votes, num_public, draws = given
        source = run.claim(np.asarray(draws))
        if source is None:
            raise LabelerCheckError(
                "a query of Ind-KNN is answered with noise that no other draw was made for: every query needs a row "
                "of its own from the labeler's noise_source"
            )

        def asked(first: float, others: Floats | float) -> Votes:
            given = np.concatenate([[first], np.broadcast_to(others, len(draws) - 1)])
            return original(parameters, active, votes, public_votes, num_public, given)

        high = _FAR / parameters.sigma1
        far = asked(high, 0.0).count
        count_deviation = asked(high + 1, 0.0).count - far
        first = float(draws[0])
        if earlier is not None:  # noise that brings this table's number of neighbours to the one released
            floor = earlier.count <= parameters.min_count
            first = -high if floor else high + (earlier.count - far) / count_deviation
        quiet, loud = (asked(first, others).noisy for others in (0.0, 1.0))
        outcome = asked(first, draws[1:])  # the last one asked for is paid for
        return [
            Entered(Gaussian(count_deviation * source.parameter), torch.tensor([far], dtype=torch.float64)),
            Entered(Gaussian(float((loud - quiet).min()) * source.parameter), torch.from_numpy(quiet)),
        ], outcome


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
        adjacencies = stated.get("adjacencies")
        named = None if adjacencies is None else tuple(adjacencies)
        self._events.append(Paid(self.rows[-1], stated.get("noise"), named))
        return row


@dataclasses.dataclass(frozen=True)
class Subject:
    """Subject of a check, and the way in which its runs are made.

    Attributes:
        make: a fresh labeler, not fitted.
        methods: those through which private values enter noise.
        num_classes: classes or attributes.
        public: features of public examples.
        seed: of the noise.
    """

    make: Callable[[], Labeler]
    methods: Sequence[DrawingMethod]
    num_classes: int
    public: Tensor
    seed: int


class Run:
    """One run; see the module.

    Args:
        subject: what is run.
        coins: how coins fall; see :data:`~pl_privknn.testing.watch.Coins`.
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
        coins: Coins = "drawn",
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
        #: Whether a drawing method of a mechanism is at work.
        self.through = False
        self.streams = 0
        #: Draws of normal noise, by their events and rows, that answers were seen to use.
        self.claimed: set[tuple[int, int]] = set()
        self.outcomes: list[Any] = []
        #: Parts that a conditional partitioner made.
        self.parts: list[Tensor] = []
        self._replay = None if after is None else after.outcomes
        self._parts_given = [] if after is None or not hold_parts else after.parts
        self.noise = WatchedNoise(self, SeededNoise(subject.seed), ())
        self.ledger = _WatchedLedger(self.events, limit, start)
        self.labeler = subject.make()
        self.labeler.noise_source = self.noise
        self.releases: list[Release] = []
        self.told: list[str] = []

    def fit(self, table: Table, images: Tensor | None = None) -> Run:
        """Public features, then the private table; as before each round.

        Args:
            table: the private table.
            images: what the labeler recognises records by; the features unless given.
        """
        self.place = "fit"
        images = table.features if images is None else images
        with self._watching():
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
        """One call of ``label``."""
        self.place = "label"
        self.events.append(CALLED)
        with self._watching():
            self.releases.append(self.labeler.label(queries.clone(), self.ledger, max_answers))
        return self

    def left(self) -> dict[str, Any]:
        """Traces beside the release: messages, attributes of object, class and module, keys of streams."""
        kind = type(self.labeler)
        drawn = [e for e in self.events if isinstance(e, Draw) and e.place == "label" and e.through]
        own = [each for each in kind.__mro__ if each.__module__.split(".")[0] not in _OURS]
        classes = {each.__name__: _shown(dict(vars(each))) for each in own}
        modules = {each.__module__: _shown(vars(sys.modules[each.__module__]), 1) for each in own}
        if kind.__repr__ is not object.__repr__:
            classes["repr"] = re.sub("0x[0-9a-f]+", "", repr(self.labeler))
        return {
            "standard output, logs or warnings": "".join(self.told),
            "public attributes": _shown(vars(self.labeler)),
            "attributes of the class or its module": [classes, modules],
            "environment variables": dict(os.environ),
            "keys": [[part for part in draw.path if isinstance(part, str)] for draw in drawn],
        }

    # ------------------------------------------------------------------ noise

    def claim(self, row: NDArray[np.float64]) -> Draw | None:
        """The draw of normal noise, made by no drawing method, that this row is from; each row serves once."""
        for number, event in enumerate(self.events):
            if isinstance(event, Draw) and event.values is not None and event.dims[-1] == len(row):
                same = (event.values.numpy().reshape(-1, len(row)) == row).all(axis=1)
                for place in np.flatnonzero(same).tolist():
                    if (number, place) not in self.claimed:
                        self.claimed.add((number, place))
                        return event
        return None

    def unclaimed(self) -> list[Draw]:
        """Draws of ``label`` without a drawing method, other than coins."""
        taken = {number for number, _ in self.claimed}
        return [
            event
            for number, event in enumerate(self.events)
            if isinstance(event, Draw)
            and event.place == "label"
            and not event.through
            and event.kind != "bernoulli"
            and number not in taken
        ]

    def fallen(self, kind: str, dims: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Result of a draw, coupled between neighbouring tables where it is of records.

        Coins, and what ``fit`` draws for each record, are those of the same records in both tables: the larger
        table's are drawn, and the one of the record that is missing is taken out. The last axis is that of the
        records, by row or by rank; a pair whose coins are looked at has its records in order of distance, so that
        both are the same.
        """
        if self.place == "label" and kind == "bernoulli" and not self.through and self.coins != "drawn":
            if self.coins != "mixed":
                return torch.full(dims, self.coins == "heads")
            return self._of_records(dims, draw)
        records, removed = self.records, self.removed
        here = records - (removed is not None)
        if self.place == "fit" and dims and dims[-1] == here:
            return self._of_records(dims, draw)
        if self.place == "fit" and dims and dims[-1] == self.each * here:
            return self._of_records((*dims[:-1], self.each, here), draw).flatten(-2)
        return draw(dims)

    def _of_records(self, dims: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        records, removed = self.records, self.removed
        if not dims or dims[-1] + (removed is not None) > records:
            return draw(dims)
        of_all = draw((*dims[:-1], records))
        if removed is not None:
            of_all = torch.cat([of_all[..., :removed], of_all[..., removed + 1 :]], dim=-1)
        return of_all[..., : dims[-1]]

    # ------------------------------------------------------------------ drawing methods

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch, while this lasts; nothing may be written, started, sent or put elsewhere.

        A partition whose guarantee is conditional is taken as given: the second table of a pair gets the parts of
        the first one.
        """
        with contextlib.ExitStack() as stack:
            for method in self.subject.methods:
                original = getattr(method.owner, method.name)
                watched = self._watched(method, original)
                stack.enter_context(mock.patch.object(method.owner, method.name, watched))
            assigning = self._assigning(Partitioner.assign)
            stack.enter_context(mock.patch.object(Partitioner, "assign", assigning))
            stack.enter_context(_noted(self.told))
            refused = stack.enter_context(_nothing_leaves())
            yield
        if refused:
            raise LabelerCheckError(refused[0])

    def _watched(self, method: DrawingMethod, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            if self.through:  # one behind another
                return original(*given, **named)
            self._check_source(method, [*given, *named.values()])
            earlier = self._earlier(method)
            self.through = True
            try:
                entered, outcome = method.view(self, earlier, original, *given, **named)
            finally:
                self.through = False
            if earlier is not None:
                self._check_shape(entered, outcome, earlier)
                outcome = copy.deepcopy(earlier)
            elif method.name == "passes" and self.passing != "drawn":
                outcome = torch.arange(outcome.numel()).view(outcome.shape) % 2 == 0
                outcome = torch.ones_like(outcome) if self.passing == "all" else outcome
            self.events.extend(entered)
            self.outcomes.append(copy.deepcopy(outcome))
            return outcome

        return watched

    def _earlier(self, method: DrawingMethod) -> Any:
        if self._replay is None:
            return None
        if len(self.outcomes) == len(self._replay):
            raise LabelerCheckError(
                f"what is released depends on the private table: at equal answers, {method.name} draws once more on "
                "one table than on the other. What is asked, and how often, must not depend on it"
            )
        return self._replay[len(self.outcomes)]

    def _check_shape(self, entered: Sequence[Entered], outcome: Any, earlier: Any) -> None:
        shapes = [getattr(value, "shape", None) for value in (outcome, earlier)]
        if shapes[0] != shapes[1]:
            raise LabelerCheckError(
                f"what is released depends on the private table: at equal answers, {entered[0].mechanism.kind} "
                f"releases shape {tuple(shapes[0] or ())} on one table and {tuple(shapes[1] or ())} on the other"
            )

    def _check_source(self, method: DrawingMethod, given: Sequence[Any]) -> None:
        for source in given:
            if isinstance(source, NoiseSource) and not (
                isinstance(source, WatchedNoise) and source.run is self
            ):
                raise LabelerCheckError(
                    f"{method.name} draws from {source!r} and not from the labeler's noise_source; get the noise "
                    "from self.charge_and_draw(ledger, mechanism, count, key)"
                )

    def _assigning(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def assign(partitioner: Partitioner, *given: Any, **named: Any) -> Tensor:
            parts = original(partitioner, *given, **named)
            if not partitioner.condition:
                return parts
            if self._parts_given:
                parts, removed = self._parts_given[len(self.parts)], self.removed
                if removed is not None:
                    parts = torch.cat([parts[:removed], parts[removed + 1 :]])
            self.parts.append(parts)
            return parts

        return assign


_OURS = ("pl_privknn", "builtins", "abc", "typing")


def _shown(value: Any, depth: int = 3) -> Any:
    """Plain values, also those in lists, tables and objects, by their public names."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_shown(part, depth) for part in value]
    if isinstance(value, Mapping):
        return {
            name: _shown(part, depth)
            for name, part in value.items()
            if not (isinstance(name, str) and (name.startswith(("_", "private_")) or name == "noise_source"))
        }
    if (
        depth
        and hasattr(value, "__dict__")
        and not isinstance(value, type | types.ModuleType)
        and not callable(value)
    ):
        return _shown(dict(vars(value)), depth - 1)
    return type(value).__name__


@contextlib.contextmanager
def _noted(told: list[str]) -> Iterator[None]:
    """Everything printed, by C code and child processes too, logged or warned of."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    notes, words = Notes(), io.StringIO()
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        logging.root.addHandler(notes)
        try:
            with (
                descriptors_led_to(file),
                contextlib.redirect_stdout(words),
                contextlib.redirect_stderr(words),
            ):
                yield
        finally:
            logging.root.removeHandler(notes)
            file.seek(0)
            written = [words.getvalue(), file.read().decode(errors="replace")]
            told += [*written, *(str(each.message) for each in warned)]


# Events of the interpreter by which something leaves a process, and what they mean.
_LEAVING = {
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"), "starts a program"),
    **dict.fromkeys(("socket.connect", "socket.sendto"), "sends something"),
    **dict.fromkeys(("os.mkdir", "os.rename", "os.symlink", "os.link", "sqlite3.connect"), "writes a file"),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_refused: list[list[str]] = []
# Compiled code, which depends on programs alone.
_CACHES = ("__pycache__", "/dev/", ":memory:", ".nbi", ".nbc", ".pyc", "numba")


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if not _refused or (event != "open" and event not in _LEAVING):
        return
    what = str(given[0]) if given else ""
    if any(part in what for part in _CACHES) or isinstance(given[0] if given else "", int):
        return
    if event == "open" and not (isinstance(given[2], int) and given[2] & _WRITES):
        return
    does = _LEAVING.get(event, "writes a file")
    _refused[-1].append(
        f"{does} ({what[:80]!r}): what knows private records leaves nothing but the release; keep it in memory, or "
        "in the folder of join_run"
    )
    raise LabelerCheckError(_refused[-1][-1])


@functools.cache
def _hooked() -> None:
    sys.addaudithook(_hook)  # for good; it sees nothing where no labeler is checked


@contextlib.contextmanager
def _nothing_leaves() -> Iterator[list[str]]:
    _hooked()
    refused: list[str] = []
    _refused.append(refused)
    try:
        yield refused
    finally:
        _refused.remove(refused)


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
