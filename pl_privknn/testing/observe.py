"""Observed runs of a labeler: charges, draws, and the distance between their inputs on two tables."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import FreeLedger
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, observing
from pl_privknn.privacy.mechanisms.local import NegativeBinomial, RandomizedResponse, ShuffleAmplification
from pl_privknn.privacy.mechanisms.noisy_votes import ExponentialArgmax, Gaussian
from pl_privknn.privacy.mechanisms.screening import NoisyScreening
from pl_privknn.privacy.mechanisms.stated import Conditional, GaussianDPStream, PureDP
from pl_privknn.privacy.noise import NoiseSource, SeededNoise, Shape


class LabelerCheckError(AssertionError):
    """Raised where a labeler fails a check; the message names the check, the tables and the amounts in one line."""


#: Rounding: relative to the sensitivity, and to the size of the values (sums of float32).
_RELATIVE, _OF_VALUES = 1e-6, 1e-6


@dataclasses.dataclass(frozen=True)
class Move:
    """Distance by which the input of one release moved.

    Attributes:
        what: mechanism and norm.
        amount: how far.
        allowed: how far it may.
        rounding: what sums of rounded numbers may add to that.
        condition: the condition of a conditional charge; empty otherwise.
    """

    what: str
    amount: float
    allowed: float
    rounding: float = 0.0
    condition: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether the distance exceeds the sensitivity, beyond rounding."""
        return not self.amount <= self.allowed * (1 + _RELATIVE) + self.rounding


@functools.singledispatch
def distance(mechanism: Mechanism, first: Tensor, second: Tensor) -> tuple[float, float, str]:
    """Distance between the inputs of a mechanism on two neighbouring tables.

    Register a function for a mechanism of your own that states neither ``l1_sensitivity`` nor ``l2_sensitivity``::

        @distance.register
        def _(mechanism: Staircase, first, second):
            return float((first - second).abs().max()), mechanism.largest, "largest change"

    Args:
        mechanism: draws the noise.
        first: what enters on one table, a row a release (or a client's message), float64.
        second: what enters on the other table, of the same shape.

    Returns:
        The distance, the largest one that the mechanism's cost covers, and its name.

    Raises:
        LabelerCheckError: for a mechanism of which no distance is known.
    """
    for order in (1, 2):
        stated = getattr(mechanism, f"l{order}_sensitivity", None)
        if stated is not None:
            moved = first - second
            rows = moved.flatten(1) if moved.ndim > 1 else moved[:, None]
            return max((norm(row, order) for row in rows), default=0.0), float(stated), f"L{order}"
    raise LabelerCheckError(
        f"can't look inside {mechanism!r}: it states neither l1_sensitivity nor l2_sensitivity, so how far two "
        "tables may be apart is not known. Register pl_privknn.testing.distance for it"
    )


@distance.register
def _(mechanism: NoisyScreening, first: Tensor, second: Tensor) -> tuple[float, float, str]:
    top = max(float(first.max()), float(second.max()))
    if top > mechanism.k:
        return top, float(mechanism.k), "largest count, above the k that is accounted for"
    return norm(first - second, math.inf), 1.0, "largest count"


@distance.register
def _(mechanism: ExponentialArgmax, first: Tensor, second: Tensor) -> tuple[float, float, str]:
    moved = first - second
    spread = float((moved.amax(dim=-1) - moved.amin(dim=-1)).max())
    return spread, 1.0 if mechanism.votes == "add" else 2.0, "range of the votes' moves"


@distance.register
def _(mechanism: NegativeBinomial, first: Tensor, second: Tensor) -> tuple[float, float, str]:
    moved = first - second
    if norm(moved, math.inf) > 1:
        return norm(moved, math.inf), 1.0, "count of a cell"
    return max(float((moved * way).clamp(min=0).sum()) for way in (1, -1)), float(mechanism.moved), "counts"


@distance.register
def _(mechanism: RandomizedResponse, first: Tensor, second: Tensor) -> tuple[float, float, str]:
    return float((first != second).sum()), float(mechanism.differing), "places"


@distance.register(PureDP)
@distance.register(ShuffleAmplification)
def _(mechanism: Mechanism, first: Tensor, second: Tensor) -> tuple[float, float, str]:
    # Any two answers of one client are covered.
    return float((first != second).flatten(1).any(dim=1).sum()), 1.0, "answers"


def norm(values: Tensor, order: float) -> float:
    """Norm of all values together."""
    return float(torch.linalg.vector_norm(values.double(), order)) if values.numel() else 0.0


@dataclasses.dataclass
class Pool:
    """Charges and inputs of one mechanism.

    Attributes:
        mechanism: what was charged.
        charged: releases.
        condition: of the charge.
        entered: what draws, which may be a part of the charged mechanism, and the values, in order.
        rows: each row of what entered is a release; otherwise all of it together is one.
    """

    mechanism: Mechanism
    charged: int = 0
    condition: str = ""
    entered: list[tuple[Mechanism, Tensor]] = dataclasses.field(default_factory=list)
    rows: bool = True
    _by_rows: int = 0

    def take(self, mechanism: Mechanism, values: Tensor) -> None:
        """Count a draw, and keep its input.

        Raises:
            LabelerCheckError: where more was drawn than had been charged.
        """
        single = isinstance(mechanism, NoisyScreening | ExponentialArgmax)  # a number or a choice a release
        self.entered.append((mechanism, values))
        self._by_rows += _rows(mechanism, tuple(values.shape))
        self.rows &= self._by_rows <= self.charged
        if not self.rows and (single or len(self.entered) > self.charged):
            raise LabelerCheckError(
                f"draws more than it charged: {self._by_rows if single else len(self.entered)} releases of "
                f"{self.mechanism.kind} drawn, {self.charged} charged so far. Charge the number of releases before "
                "they are drawn"
            )

    @property
    def shape(self) -> tuple[Any, ...]:
        """Mechanism, number of charges and shapes, which neighbouring tables share where their answers are equal."""
        return self.mechanism.kind, self.charged, [tuple(values.shape) for _, values in self.entered]


def _rows(mechanism: Mechanism, shape: tuple[int, ...]) -> int:
    """Number of releases in an input of a mechanism."""
    if isinstance(mechanism, RandomizedResponse | NegativeBinomial | PureDP | ShuffleAmplification):
        return 1  # messages of all clients
    if isinstance(mechanism, NoisyScreening | ExponentialArgmax):
        return math.prod(shape if isinstance(mechanism, NoisyScreening) else shape[:-1])
    return shape[0] if shape else 1


def moves(first: Iterable[Pool], second: Iterable[Pool]) -> list[Move]:
    """Distance between the releases of two tables at equal answers.

    Raises:
        LabelerCheckError: where the two tables were not asked for the same releases.
    """
    first, second = list(first), list(second)
    shapes = [[pool.shape for pool in side] for side in (first, second)]
    if shapes[0] != shapes[1]:
        raise LabelerCheckError(
            f"what is charged or released depends on the private table: {shapes[0]} on one, {shapes[1]} on the "
            "other, at equal answers"
        )
    found: list[Move] = []
    for one, other in zip(first, second, strict=True):
        pairs = list(zip(one.entered, other.entered, strict=True))
        if isinstance(one.mechanism, GaussianDPStream):
            # Σ(Δ/σ)² of all Gaussian releases of a stream against μ²: what the worst record pays and may pay.
            paid = sum(
                (norm(a - b, 2) / min(_sigma(drawn), _sigma(again))) ** 2 for (drawn, a), (again, b) in pairs
            )
            what = "stream of gaussian releases (sum of squares of move / sigma)"
            found.append(Move(what, paid, one.mechanism.mu**2))
            continue
        for (drawn, a), (_, b) in pairs:
            values = [torch.atleast_1d(side.double()) for side in (a, b)]
            values = values if one.rows else [value[None] for value in values]
            amount, allowed, unit = distance(drawn, *values)
            if not all(bool(side.isfinite().all()) for side in values):
                amount, allowed, unit = math.inf, 0.0, "values that are not finite"
            rounding = _OF_VALUES * norm(a, 2) if a.is_floating_point() else 0.0
            found.append(Move(f"{one.mechanism.kind} ({unit})", amount, allowed, rounding, one.condition))
    return found


def _sigma(mechanism: Mechanism) -> float:
    assert isinstance(mechanism, Gaussian)
    return mechanism.sigma


@dataclasses.dataclass(frozen=True)
class Table:
    """A private table, the queries that are asked about it, and the records in which neighbours differ.

    Attributes:
        name: what is special about it.
        features: float32 ``(n, d)``.
        labels: int64 ``(n,)``; of multi-label data ``(n, num_classes)``.
        queries: float32 ``(m, d)``; public.
        records: positions of the records that a neighbour lacks, or has another record in place of.
    """

    name: str
    features: Tensor
    labels: Tensor
    queries: Tensor
    records: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def without(self, record: int) -> Table:
        """The neighbour that lacks a record."""
        kept = torch.arange(len(self)) != record
        return dataclasses.replace(self, features=self.features[kept], labels=self.labels[kept])

    def with_other(self, record: int, features: Tensor, label: Tensor) -> Table:
        """The neighbour that has another record in place of one."""
        changed, labels = self.features.clone(), self.labels.clone()
        changed[record], labels[record] = features, label
        return dataclasses.replace(self, features=changed, labels=labels)


def neighbors_of(table: Table, adjacency: Adjacency) -> Iterator[tuple[str, Table, int | None]]:
    """Neighbours of a table in each of its ``records``.

    Yields:
        How it differs, the neighbour, and the position of the record that it lacks; None where one was exchanged.
    """
    for record in table.records:
        if adjacency == "add_remove":
            yield f"with and without record {record}", table.without(record), record
            continue
        features, label = table.features[record], table.labels[record]
        other = 1 - label if label.ndim else (label + 1) % (int(table.labels.max()) + 1)
        yield f"with another label of record {record}", table.with_other(record, features, other), None
        yield f"with other features of record {record}", table.with_other(record, -3 * features, label), None


#: What is said of noise that is drawn again.
REPEATS = (
    "repeats the noise of stream {}: it can be subtracted by anyone who sees both answers. Get the noise of each "
    "release from run.pay(mechanism, count, key), whose stream belongs to the row that was charged"
)


class WatchedNoise(NoiseSource):
    """Reproducible noise that reports every draw to an :class:`ObservedRun`. It protects nothing."""

    def __init__(self, run: ObservedRun, source: SeededNoise, path: tuple[int | str, ...]) -> None:
        self.run, self._source, self._path = run, source, path

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        if self.run.labels:
            self.run.drawn(self, self._path)
        return self._source.random_words(count)

    def stream(self, *key: int | str) -> WatchedNoise:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        return WatchedNoise(self.run, self._source.stream(*key), (*self._path, *key))

    def integers(self, shape: Shape, below: int) -> Tensor:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`; in ``fit`` both tables of a pair share them."""
        draw = super().integers
        return self.run.shared(shape, lambda dims: draw(dims, below))

    def bernoulli(self, shape: Shape, p: float) -> Tensor:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`; in ``label`` all coins of samples fall alike."""
        if not self.run.labels or self.run.through:
            return super().bernoulli(shape, p)
        return self.run.tossed(_dims(shape), p)


class _WatchedLedger(FreeLedger):
    """A free ledger that reports every charge and refusal to a run."""

    def __init__(self, run: ObservedRun, limit: int | None, start: int) -> None:
        super().__init__(limit, start)
        self._run = run

    def charge(self, mechanism: Mechanism, count: int = 1, **stated: Any) -> int:
        """See :class:`~pl_privknn.privacy.ledger.FreeLedger`."""
        self._run.check_not_refused()
        try:
            row = super().charge(mechanism, count, **stated)
        except BudgetExceeded:
            self._run.refused = True
            raise
        self._run.paid(mechanism, count)
        return row


class ObservedRun:
    """Run of a labeler that raises at once where a charge or a draw breaks a promise; every screening passes.

    Args:
        make: makes the labeler, not fitted.
        num_classes: classes or attributes.
        public: features of public examples.
        seed: of the noise.
        coins: how coins of samples fall: with ``"heads"`` every record is drawn, with ``"tails"`` none is.
        after: the run on the other table of a pair, whose outcomes of all mechanisms are given again here.
        removed: position in the other table of the record that this run's table lacks; None where it lacks none.
        limit: charges that the ledger takes.
        start: first row of the ledger.

    Attributes:
        pools: charges of each mechanism, and what entered it.
        tossed_coins: number of coins of each probability that ``label`` tossed.
        streams: for each key of noise drawn in ``label``, the stream that drew it.
    """

    def __init__(
        self,
        make: Callable[[], Labeler],
        num_classes: int,
        public: Tensor,
        seed: int,
        *,
        coins: Literal["heads", "tails"] = "heads",
        after: ObservedRun | None = None,
        removed: int | None = None,
        limit: int | None = None,
        start: int = 0,
    ) -> None:
        self.num_classes, self._public, self.coins, self._removed = num_classes, public, coins, removed
        #: Whether ``label`` runs, a mechanism draws, or a charge was refused in this call of ``label``.
        self.labels = self.through = self.refused = False
        self.pools: dict[Mechanism, Pool] = {}
        self.tossed_coins: collections.Counter[float] = collections.Counter()
        self.streams: dict[tuple[int | str, ...], NoiseSource] = {}
        self.outcomes: list[Tensor] = []
        self._replay, self._records = [] if after is None else after.outcomes, 0
        self.ledger = _WatchedLedger(self, limit, start)
        self.labeler = make()
        self.labeler.noise_source = WatchedNoise(self, SeededNoise(seed), ())
        self.releases: list[Release] = []

    def fit(self, table: Table, owners: Tensor | None = None) -> ObservedRun:
        """Fit the labeler to a table, as before each round; ``owners`` are the persons of its records, if any."""
        self.labels, self._records = False, len(table)
        with observing(self._observed):
            records = PrivateRecords.of(
                table.features.clone(),
                table.labels.clone(),
                self.num_classes,
                owners=owners,
                public=self._public,
                examples=table.features,
            )
            self.labeler.fit(records)
        return self

    def label(self, queries: Tensor, max_answers: int | None = None) -> ObservedRun:
        """Call ``label`` once."""
        self.labels, self.refused = True, False
        with observing(self._observed):
            self.releases.append(self.labeler.label(queries.clone(), self.ledger, max_answers))
        return self

    def shared(self, shape: Shape, draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Draw that both tables of a pair share, without that of a missing record where each has one in ``fit``."""
        dims, removed = _dims(shape), self._removed
        if self.labels or removed is None or dims != (self._records,):
            return draw(dims)
        of_all = draw((self._records + 1,))
        return torch.cat([of_all[:removed], of_all[removed + 1 :]])

    # ------------------------------------------------------------------ promises

    def check_not_refused(self) -> None:
        """Raise after a refused charge."""
        if self.refused:
            raise LabelerCheckError("continues to draw or charge after a charge was refused")

    def paid(self, mechanism: Mechanism, count: int) -> None:
        """Record a charge of the run."""
        pool = self.pools.setdefault(mechanism.bare, Pool(mechanism.bare))
        pool.charged += count
        pool.condition = mechanism.condition if isinstance(mechanism, Conditional) else pool.condition

    def drawn(self, source: NoiseSource, path: tuple[int | str, ...]) -> None:
        """Note random words that a mechanism draws from a stream of its own."""
        if not self.through:
            raise LabelerCheckError(
                "label draws noise by itself, so the check can't look inside: draw by the charged mechanism "
                "(add_noise, argmax, passes, randomize, draw). Coins of a sample are those of "
                "noise.bernoulli(shape, sampling_rate)"
            )
        if self.streams.setdefault(path, source) is not source:
            raise LabelerCheckError(f"a later draw {REPEATS.format(path)}")

    def tossed(self, dims: tuple[int, ...], rate: float) -> Tensor:
        """Toss the coins of a sample of records, at a rate that was charged."""
        self.check_not_refused()
        rates = sorted({sampling_rate(charge) for charge in self.ledger.rows})
        if rate not in rates:
            raise LabelerCheckError(
                f"tosses coins of probability {rate:g}, but what it charged has sampling_rate "
                f"{', '.join(f'{rate:g}' for rate in rates)}; sample at the rate that is charged"
            )
        self.tossed_coins[rate] += math.prod(dims)
        return torch.full(dims, self.coins == "heads")

    def _observed(
        self, mechanism: Mechanism, values: Tensor, noise: NoiseSource, draw: Callable[[], Tensor]
    ) -> Tensor:
        """Observe one draw; see :data:`~pl_privknn.privacy.mechanisms.base.Observer`."""
        if self.through:  # one behind another
            return draw()
        self.check_not_refused()
        if not isinstance(noise, WatchedNoise) or noise.run is not self:
            raise LabelerCheckError(
                f"{mechanism.kind} draws from {noise!r} and not from the labeler's noise_source; get the noise from "
                "run.pay(mechanism, count, key)"
            )
        self._pool_of(mechanism).take(mechanism, values.detach().clone())
        self.through = True
        try:
            outcome = draw()
        finally:
            self.through = False
        if isinstance(mechanism, NoisyScreening):
            outcome = torch.ones_like(outcome)
        earlier = self._replay[len(self.outcomes) : len(self.outcomes) + 1]
        if earlier and earlier[0].shape == outcome.shape:  # otherwise the comparison of both runs says so
            outcome = earlier[0].clone()
        self.outcomes.append(outcome.clone())
        return outcome

    def _pool_of(self, mechanism: Mechanism) -> Pool:
        if mechanism in self.pools:
            return self.pools[mechanism]
        streams = [pool for pool in self.pools.values() if isinstance(pool.mechanism, GaussianDPStream)]
        if streams and isinstance(mechanism, Gaussian):
            streams[0].charged += 1  # a stream that is paid for as a whole may have any number of releases
            return streams[0]
        charged = ", ".join(repr(known) for known in self.pools) or "nothing"
        raise LabelerCheckError(
            f"draws with {mechanism!r}, which was not charged before (charged: {charged}). Get the noise from "
            "run.pay(mechanism, count, key), and draw with the very object that is charged"
        )


def sampling_rate(charge: Charge) -> float:
    """Poisson rate of a charge; 1 where it has none."""
    return float(getattr(charge.mechanism.bare, "sampling_rate", 1.0))


def _dims(shape: Shape) -> tuple[int, ...]:
    return tuple(np.atleast_1d(shape).tolist())


def copies_of(labeler: Labeler) -> Callable[[], Labeler]:
    """A function that copies a labeler which was not fitted.

    Raises:
        LabelerCheckError: for a labeler that can't be copied.
    """
    try:
        copy.deepcopy(labeler)
    except Exception as error:
        raise LabelerCheckError(
            f"check_labeler({type(labeler).__name__}): can't be copied ({type(error).__name__}: {error}); give a "
            "labeler that was not fitted, or a function that makes one"
        ) from error
    return lambda: copy.deepcopy(labeler)
