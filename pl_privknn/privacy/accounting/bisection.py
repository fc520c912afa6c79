"""Bisection that ends on the side of the guarantee."""

from __future__ import annotations

from collections.abc import Callable


def bisect(
    holds: Callable[[float], bool], good: float, bad: float, *, absolute: float = 0.0, relative: float = 0.0
) -> float:
    """Number next to the place where a property begins or ends, at which it holds.

    A root finder ends on either side of a root; here every answer was tried itself.

    Args:
        holds: the property.
        good: a number at which it holds.
        bad: a number, above or below, at which it does not.
        absolute: width of the last interval.
        relative: the same as a share of the answer; the larger width counts.
    """
    while abs(bad - good) > max(absolute, relative * abs(good)):
        middle = (good + bad) / 2
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
