"""Distances between the inputs of mechanisms on two tables, compared with their charges."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pl_privknn.privacy.mechanisms import (
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    Mechanism,
    NegativeBinomial,
    NoisyScreening,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)


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
        """One more draw.

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
    """Releases in what entered, if each row is one."""
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
