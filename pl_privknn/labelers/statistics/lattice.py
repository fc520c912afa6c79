"""Sums in whole numbers: what each record adds is a multiple of a public step, and no longer than it is charged for.

Coordinates are cut off towards zero, so a vector gets no longer, and the sensitivity stays what it is for real
numbers. Whether rounding had made it longer before is checked in whole numbers, which float64 holds exactly. Such
sums are the same in any order and any number of shards.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

#: Binary digits of a record's coordinates, counted from its greatest length.
BITS = 24
#: Of the two sides of an outer product, whose steps are products of theirs.
LEFT_BITS, RIGHT_BITS = 14, 18
# Squares of whole numbers are exact in float64 below this, and wrong by less than so much of them above.
_EXACT, _ROUNDING = 2**53, 2.0**-40


def step_for(length: float, bits: int = BITS) -> float:
    """The largest power of two that is at most ``length`` · 2**−bits."""
    return math.ldexp(0.5, math.frexp(length)[1] - bits)


def whole_steps(rows: Tensor, step: float) -> Tensor:
    """Multiples of ``step`` (a power of two) next to ``rows``, towards zero: whole numbers, float64."""
    return (rows.double() / step).trunc()


def not_too_long(squares: Tensor, length: float, step: float) -> Tensor:
    """Whether vectors of these squared lengths, in steps, are at most as long as ``length``; bool."""
    bound = math.floor((Fraction(length) / Fraction(step)) ** 2)
    return squares <= (bound if bound < _EXACT else bound * (1 - _ROUNDING))


def within(rows: Tensor, length: float, step: float) -> Tensor:
    """:func:`whole_steps` of rows that are no longer than ``length``, float64 ``(n, p)``.

    A row that is longer, which an error alone could make, counts as none.

    Args:
        rows: shape ``(n, p)``.
        length: public bound.
        step: power of two.
    """
    steps = whole_steps(rows, step)
    kept = not_too_long(steps.square().sum(dim=1, keepdim=True), length, step)
    return torch.where(kept, steps, 0.0)
