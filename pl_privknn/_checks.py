"""One-line validators whose errors name the argument, the value and the remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any


def check_positive(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it is a finite number above zero."""
    return _number(name, value, low=0.0, low_open=True, what="a finite number above 0")


def check_non_negative(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it is a finite number of at least zero."""
    return _number(name, value, low=0.0, low_open=False, what="a finite number of at least 0")


def check_finite(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it is a finite number."""
    return _number(name, value, low=-math.inf, low_open=False, what="a finite number")


def check_rate(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it lies in (0, 1]."""
    rate = _number(name, value, low=0.0, low_open=True, what="a rate in (0, 1]")
    if rate > 1:
        raise ValueError(f"{name}={value!r} must be a rate in (0, 1]")
    return rate


def check_open_unit(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it lies in (0, 1), as every δ must."""
    rate = _number(name, value, low=0.0, low_open=True, what="a number in (0, 1)")
    if rate >= 1:
        raise ValueError(f"{name}={value!r} must be a number in (0, 1)")
    return rate


def check_int(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` as int, or raise ``ValueError`` unless it is a whole number from ``minimum`` on."""
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < minimum:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {minimum}")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return ``value``, or raise ``ValueError`` unless it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    return str(value)


def shape_text(shape: Sequence[int]) -> str:
    """A shape for messages, its first size as n: how many records there are may be private."""
    return f"({', '.join(['n', *map(str, shape[1:])])}{',' if len(shape) == 1 else ''})" if shape else "()"


def _number(name: str, value: Any, *, low: float, low_open: bool, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be {what}")
    number = float(value)
    if not math.isfinite(number) or number < low or (low_open and number == low):
        raise ValueError(f"{name}={value!r} must be {what}")
    return number


def check_switch(name: str, value: bool) -> bool:
    """Return ``value`` where it is a plain true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value
