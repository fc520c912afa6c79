"""A noise source that notes what is drawn from it, and can toss the same coins for the records of two tables."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.privacy.mechanisms import Adjacency, Charge, Mechanism
from pl_privknn.privacy.noise import NoiseSource, SeededNoise, Shape
from pl_privknn.testing.shards import PlayedExchange, rows_of

#: ``drawn``: coins fall as they fall. ``heads``: every record is drawn. ``tails``: none is. ``mixed``: as they fall,
#: and the same ones of two neighbouring tables.
Coins = Literal["drawn", "heads", "tails", "mixed"]
Place = Literal["fit", "label"]
#: Drawing methods of a noise source that take a shape (or scores) and one parameter.
KINDS = (
    "integers",
    "bernoulli",
    "normal",
    "rounded_normal",
    "laplace",
    "gumbel",
    "discrete_gaussian",
    "discrete_laplace",
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
        through: whether a drawing method of a mechanism drew it; see :mod:`pl_privknn.testing.drawing_methods`.
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
    row: int
    noise: NoiseSource | None
    adjacencies: tuple[Adjacency, ...] | None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A charge that the ledger refused."""

    mechanism: Mechanism


@dataclasses.dataclass(frozen=True)
class Called:
    """A call of ``label`` begins."""


class Watch:
    """What happens in one run, in order, and how its coins fall.

    Args:
        seed: of all noise.
        coins: see :data:`Coins`; of coins that no drawing method of a mechanism tosses.
        records: number of records of the larger table of a neighbouring pair.
        removed: position in that table of the record that this run's table lacks; None where it lacks none.
        shards: in so many shards the table lies.

    Attributes:
        at_work: says which shard is at work, where there are several.
    """

    def __init__(
        self,
        seed: int = 0,
        coins: Coins = "drawn",
        records: int = 0,
        removed: int | None = None,
        shards: int = 1,
    ) -> None:
        self.events: list[Any] = []
        self.shards, self.at_work = shards, PlayedExchange(shards)
        self.coins, self.records, self.removed = coins, records, removed
        self.place: Place = "fit"
        self.through = False
        self.claimed: set[tuple[int, int]] = set()
        self._streams = 0
        self.noise = WatchedNoise(self, SeededNoise(seed), ())

    def next_stream(self) -> int:
        """A number for a stream's object."""
        self._streams += 1
        return self._streams

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
        """What ``label`` drew without a drawing method, other than coins."""
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
        """What comes out of a draw, coupled between neighbouring tables where it is of records.

        Coins, and what ``fit`` draws for each record, are those of the same records in both tables: the larger
        table's are drawn, and the one of the record that is missing is taken out. The last axis is that of the
        records, by row or by rank; a pair whose coins are looked at has its records in order of distance, so that
        both are the same.
        """
        if self.place == "label" and kind == "bernoulli" and not self.through and self.coins != "drawn":
            if self.coins != "mixed":
                return torch.full(dims, self.coins == "heads")
            return self._of_records(dims, draw)
        records, removed = self._at_hand()
        if self.place == "fit" and dims and dims[-1] == records - (removed is not None):
            return self._of_records(dims, draw)
        return draw(dims)

    def _at_hand(self) -> tuple[int, int | None]:
        """Records of the larger table in the shard at work, and the place among them of the one that is missing."""
        rows = rows_of(self.records, self.at_work.turn, self.shards)
        return len(rows), None if self.removed is None or self.removed not in rows else rows.index(
            self.removed
        )

    def _of_records(self, dims: tuple[int, ...], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        records, removed = self._at_hand()
        if not dims or dims[-1] + (removed is not None) > records:
            return draw(dims)
        of_all = draw((*dims[:-1], records))
        if removed is not None:
            of_all = torch.cat([of_all[..., :removed], of_all[..., removed + 1 :]], dim=-1)
        return of_all[..., : dims[-1]]


class WatchedNoise(NoiseSource):
    """Reproducible noise that tells a :class:`Watch` of every draw. It protects nothing."""

    def __init__(self, watch: Watch, source: SeededNoise, path: tuple[int | str, ...]) -> None:
        self.watch, self._source, self._path = watch, source, path
        self._number = watch.next_stream()
        self._drawing = False

    def random_words(self, count: int) -> NDArray[np.uint64]:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        if not self._drawing:
            self._note("random_words", (count,))
        return self._source.random_words(count)

    def stream(self, *key: int | str) -> WatchedNoise:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        return WatchedNoise(self.watch, self._source.stream(*key), (*self._path, *key))

    def uniform(self, shape: Shape) -> Tensor:
        """See :class:`~pl_privknn.privacy.noise.NoiseSource`."""
        return self.drawn("uniform", shape)

    def drawn(self, kind: str, of: Shape | Tensor, *parameter: float) -> Tensor:
        """What the method ``kind`` of a noise source draws, coupled and noted."""
        original = getattr(NoiseSource, kind)
        if self._drawing:  # one draw is made of another
            values: Tensor = original(self, of, *parameter)
            return values
        chosen = isinstance(of, Tensor)  # scores, of whose last axis exponential_choice chooses
        dims = tuple(of.shape[:-1]) if isinstance(of, Tensor) else _dims(of)
        watch = self.watch
        self._drawing = True
        try:
            values = watch.fallen(
                kind,
                dims,
                lambda shape: original(self, of if chosen else shape, *parameter),
            )
        finally:
            self._drawing = False
        self._note(kind, tuple(values.shape), parameter[0] if parameter else 0.0, values)
        return values

    def _note(
        self, kind: str, dims: tuple[int, ...], parameter: float = 0.0, values: Tensor | None = None
    ) -> None:
        watch = self.watch
        kept = None if values is None or kind != "normal" or watch.through or not dims else values.clone()
        watch.events.append(
            Draw(kind, self._path, self._number, dims, float(parameter), watch.place, watch.through, kept)
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
    """How many coins of probability ``rate`` were tossed by no drawing method."""
    return sum(
        math.prod(event.dims)
        for event in events
        if isinstance(event, Draw)
        and event.kind == "bernoulli"
        and not event.through
        and event.parameter == rate
    )
