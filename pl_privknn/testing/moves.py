"""How far two tables' values are apart as they enter noise, beside how far their charges let them be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pl_privknn.privacy.mechanisms import (
    Charge,
    Conditional,
    ExponentialArgmax,
    FixedTotal,
    Gaussian,
    Mechanism,
    NegativeBinomial,
    NoisyScreening,
    RandomizedResponse,
)
from pl_privknn.testing.drawing_methods import Entered
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.watch import Paid

#: Rounding: relative to the sensitivity, and to the size of the values (sums of float32).
_RELATIVE, _OF_VALUES = 1e-6, 1e-6


@dataclasses.dataclass(frozen=True)
class Move:
    """How far what enters one release moved.

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


@dataclasses.dataclass
class Pool:
    """All that was charged for one mechanism, and all that entered it.

    Attributes:
        drawn: the mechanism that draws.
        charged: releases.
        condition: of the charge.
        entered: in order.
        rows: each row of what entered is a release; otherwise all of it together is one.
    """

    drawn: Mechanism
    charged: int = 0
    condition: str = ""
    entered: list[Entered] = dataclasses.field(default_factory=list)
    rows: bool = True
    _by_rows: int = 0
    _late: bool = False

    def take(self, entered: Entered) -> None:
        """One more draw.

        Raises:
            LabelerCheckError: where more was drawn than had been charged.
        """
        self.entered.append(entered)
        self._by_rows += _rows(entered)
        self.rows &= self._by_rows <= self.charged
        if not self.rows and (_single(entered.mechanism) or len(self.entered) > self.charged):
            drawn = self._by_rows if _single(entered.mechanism) else len(self.entered)
            raise LabelerCheckError(
                f"draws more than it charged: {drawn} releases of {self.drawn.kind} drawn, {self.charged} charged "
                "so far. Charge the number of releases before they are drawn"
            )


def pools(events: Sequence[Any]) -> list[Pool]:
    """Match all that entered noise with the charges that came before.

    Raises:
        LabelerCheckError: for a draw that no charge pays for.
    """
    found: dict[Mechanism, Pool] = {}
    for event in events:
        if isinstance(event, Paid):
            _open(found, event.charge)
        elif isinstance(event, Entered):
            _pool_of(found, event.mechanism).take(event)
    return list(found.values())


def inner(mechanism: Mechanism) -> Mechanism:
    """What draws: a conditional mechanism's inner one."""
    return mechanism.inner if isinstance(mechanism, Conditional) else mechanism


def moves(first: Sequence[Pool], second: Sequence[Pool]) -> list[Move]:
    """How far the releases of two tables are apart, at equal answers.

    Raises:
        LabelerCheckError: where the two tables were not asked for the same releases.
    """
    shapes = [
        [(pool.drawn.kind, pool.charged, [tuple(e.values.shape) for e in pool.entered if e.measure is None])
         for pool in side]
        for side in (first, second)
    ]  # fmt: skip
    if shapes[0] != shapes[1]:
        raise LabelerCheckError(
            f"what is charged or released depends on the private table: {shapes[0]} on one, {shapes[1]} on the "
            "other, at equal answers"
        )
    found: list[Move] = []
    for one, other in zip(first, second, strict=True):
        if isinstance(one.drawn, FixedTotal):
            found.append(_total(one, other))
            continue
        for a, b in zip(one.entered, other.entered, strict=True):
            amount, allowed, unit = _apart(a, b, one.rows)
            rounding = _OF_VALUES * _norm(a.values, 2) if a.values.is_floating_point() else 0.0
            found.append(Move(f"{one.drawn.kind} ({unit})", amount, allowed, rounding, one.condition))
    return found


def _open(found: dict[Mechanism, Pool], charge: Charge) -> None:
    drawn = inner(charge.mechanism)
    pool = found.setdefault(drawn, Pool(drawn))
    pool.charged += charge.count
    if isinstance(charge.mechanism, Conditional):
        pool.condition = charge.mechanism.condition


def _pool_of(found: dict[Mechanism, Pool], mechanism: Mechanism) -> Pool:
    if mechanism in found:
        return found[mechanism]
    streams = [pool for pool in found.values() if isinstance(pool.drawn, FixedTotal)]
    if streams and isinstance(mechanism, Gaussian):
        streams[0].charged += 1  # a stream that is paid for as a whole may have any number of releases
        return streams[0]
    charged = ", ".join(repr(known) for known in found) or "nothing"
    raise LabelerCheckError(
        f"draws with {mechanism!r}, which was not charged (charged: {charged}). Draw with the very object that is "
        "charged, after its charge"
    )


def _total(one: Pool, other: Pool) -> Move:
    """Σ(Δ/σ)² of all Gaussian releases of a stream against μ²: what the worst record pays and may pay."""
    assert isinstance(one.drawn, FixedTotal)
    paid = 0.0
    for a, b in zip(one.entered, other.entered, strict=True):
        assert isinstance(a.mechanism, Gaussian)
        assert isinstance(b.mechanism, Gaussian)
        paid += _norm(a.values - b.values, 2) ** 2 / min(a.mechanism.sigma, b.mechanism.sigma) ** 2
    return Move("stream of gaussian releases (sum of squares of move / sigma)", paid, one.drawn.mu**2)


def _apart(a: Entered, b: Entered, rows: bool) -> tuple[float, float, str]:
    if a.measure is not None:
        return (*a.measure(a.values, b.values), "answers")
    mechanism, first, second = a.mechanism, a.values.double(), b.values.double()
    moved = first - second
    if not bool(moved.isfinite().all()):
        return math.inf, 0.0, "values that are not finite"
    if isinstance(mechanism, NoisyScreening):
        top = max(float(first.max()), float(second.max()))
        if top > mechanism.k:
            return top, float(mechanism.k), "largest count, above the k that is accounted for"
        return _norm(moved, math.inf), 1.0, "largest count"
    if isinstance(mechanism, ExponentialArgmax):
        spread = moved.amax(dim=-1) - moved.amin(dim=-1)
        return float(spread.max()), 1.0 if mechanism.votes == "add" else 2.0, "range of the votes' moves"
    if isinstance(mechanism, NegativeBinomial):
        ways = max(float(moved.clamp(min=0).sum()), float((-moved).clamp(min=0).sum()))
        return ways, float(mechanism.moved), "counts moved one way"
    if isinstance(mechanism, RandomizedResponse):
        return float((moved != 0).sum()), float(mechanism.differing), "places"
    parts = (
        moved.flatten(1)
        if rows and moved.ndim > 1
        else moved.reshape(-1, 1)
        if rows
        else moved.reshape(1, -1)
    )
    order, allowed = _norm_of(mechanism)
    largest = max((_norm(part, order) for part in parts), default=0.0)
    return largest, allowed, f"L{order}"


def _norm_of(mechanism: Mechanism) -> tuple[int, float]:
    for order in (1, 2):
        stated = getattr(mechanism, f"l{order}_sensitivity", None)
        if stated is not None:
            return order, float(stated)
    raise LabelerCheckError(
        f"can't look inside {mechanism!r}: it states neither l1_sensitivity nor l2_sensitivity, so how far two "
        "tables may be apart is not known. Give check_labeler a DrawingMethod for it, with a measure"
    )


def exceeds(move: Move) -> bool:
    """Whether a move is more than is allowed, beyond rounding."""
    return not move.amount <= move.allowed * (1 + _RELATIVE) + move.rounding


def _norm(values: Tensor, order: float) -> float:
    return float(torch.linalg.vector_norm(values.double(), order)) if values.numel() else 0.0


def _single(mechanism: Mechanism) -> bool:
    """Whether a release is one number or one choice, so that a table of them is many releases."""
    return isinstance(mechanism, NoisyScreening | ExponentialArgmax)


def _rows(entered: Entered) -> int:
    """Releases in what entered, if each row is one."""
    shape = tuple(entered.values.shape)
    if entered.measure is not None or isinstance(entered.mechanism, RandomizedResponse | NegativeBinomial):
        return 1
    if isinstance(entered.mechanism, NoisyScreening):
        return math.prod(shape)
    if isinstance(entered.mechanism, ExponentialArgmax):
        return math.prod(shape[:-1])
    return shape[0] if shape else 1
