"""Validators with one-line errors, numeric limits, rounding of bounds, and compilation by numba."""

from __future__ import annotations

import decimal
import functools
import importlib.util
import math
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any

#: Bounds of every number that must be above 0. Beyond them reciprocals and products with reciprocals leave the range
#: of float64, and results would be 0, infinite or NaN.
MIN_POSITIVE = 1e-300
MAX_POSITIVE = 1e300
#: Bounds of the target ε of a run: below, nothing but noise remains; above, there is no protection.
MIN_EPSILON, MAX_EPSILON = 1e-9, 1e6
#: Bound of every integer: the range of int64 tensors and SQLite columns.
MAX_INT = 2**63 - 1
#: Bound of a number of releases. A composition raises Fourier coefficients, which are exact to some 1e-15, to this
#: power: up to here that is far less than the grids round up, and ε is a close bound. Far beyond, it would be wrong.
MAX_COUNT = 10**9

_LONGEST = 80


class InputError(ValueError):
    """Raised for invalid data or settings by code that reads private records; its message holds public facts alone.

    Of other errors that private code raises, type and place alone are shown (see
    :func:`~pl_privknn.privacy.redaction.redacted`).
    """


def at_most(bound: float, digits: int = 4) -> str:
    """Text of an upper bound, such as ε, rounded up.

    Args:
        bound: a non-negative number.
        digits: significant digits; an excess below 1e-12 of the bound counts as rounding error.

    Example:
        >>> at_most(2.71828, 2), at_most(1.0), at_most(float("inf"))
        ('2.8', '1', '∞')
    """
    return _stated(bound * (1 - 1e-12), digits, decimal.ROUND_CEILING)


def at_least(bound: float, digits: int = 4) -> str:
    """Text of a lower bound, rounded down.

    Example:
        >>> at_least(0.88967, 3)
        '0.889'
    """
    return _stated(bound * (1 + 1e-12), digits, decimal.ROUND_FLOOR)


def _stated(bound: float, digits: int, rounding: str) -> str:
    if not math.isfinite(bound):
        return "∞" if bound > 0 else str(bound)
    rounded = decimal.Context(prec=digits, rounding=rounding).create_decimal(bound)
    return f"{float(rounded):.{digits}g}"


def check_installed(what: str, extra: str, *packages: str) -> None:
    """Raise ``ImportError`` unless the packages that ``what`` needs, those of the extra ``extra``, are installed."""
    if lacking := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ImportError(f"{what} needs {' and '.join(lacking)}; pip install 'pl-privknn[{extra}]'")


def counted(number: int, noun: str) -> str:
    """Text of a number with its noun in the singular or plural.

    Example:
        >>> counted(1, "public example"), counted(1000, "record")
        ('1 public example', '1,000 records')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_positive(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it is a finite number above zero.

    The bounds are :data:`MIN_POSITIVE` and :data:`MAX_POSITIVE`.
    """
    number = _number(name, value, "a finite number above 0")
    if number <= 0:
        raise ValueError(f"{name}={shown(value)} must be a finite number above 0")
    if not MIN_POSITIVE <= number <= MAX_POSITIVE:
        raise ValueError(
            f"{name}={shown(value)} is outside the numeric range; it must lie between {MIN_POSITIVE:g} and "
            f"{MAX_POSITIVE:g}"
        )
    return number


def check_epsilon(name: str, value: Any) -> float:
    """Return the target ε of a run as float, or raise ``ValueError`` unless accounting covers it.

    The bounds are :data:`MIN_EPSILON` and :data:`MAX_EPSILON`.
    """
    epsilon = check_positive(name, value)
    if not MIN_EPSILON <= epsilon <= MAX_EPSILON:
        raise ValueError(
            f"{name}={shown(value)} must lie between {MIN_EPSILON:g} and {MAX_EPSILON:g}; usual are 0.1 to 10"
        )
    return epsilon


def check_non_negative(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it is a finite number of at least zero."""
    number = _number(name, value, "a finite number of at least 0")
    if number < 0:
        raise ValueError(f"{name}={shown(value)} must be a finite number of at least 0")
    return number


def check_finite(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it is a finite number."""
    return _number(name, value, "a finite number")


def check_rate(name: str, value: Any, zero: bool = False) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it lies in (0, 1]; see :data:`MIN_POSITIVE`.

    With ``zero`` 0 is allowed too: the rate of a release in which no record takes part.
    """
    rate = _number(name, value, "a rate in (0, 1]")
    if not MIN_POSITIVE <= rate <= 1 and not (zero and rate == 0):
        raise ValueError(f"{name}={shown(value)} must be a rate in (0, 1], at least {MIN_POSITIVE:g}")
    return rate


def check_open_unit(name: str, value: Any) -> float:
    """Return ``value`` as float, or raise ``ValueError`` unless it lies in (0, 1), as every δ must.

    The lower bound is :data:`MIN_POSITIVE`.
    """
    number = _number(name, value, "a number in (0, 1)")
    if not MIN_POSITIVE <= number < 1:
        raise ValueError(f"{name}={shown(value)} must be a number in (0, 1), at least {MIN_POSITIVE:g}")
    return number


def check_int(name: str, value: Any, minimum: int = 1, maximum: int = MAX_INT) -> int:
    """Return ``value`` as int, or raise ``ValueError`` unless it is a whole number between the bounds."""
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < minimum:
        raise ValueError(f"{name}={shown(value)} must be a whole number of at least {minimum}")
    if value > maximum:
        raise ValueError(f"{name}={shown(value)} must be a whole number of at most {maximum}")
    return int(value)


def check_path(name: str, value: Any) -> str:
    """Return a path as text, or raise ``ValueError`` unless ``value`` is a path or text that is not empty."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"{name}={shown(value)} must be the path of a file or folder")
    return str(os.fspath(value))


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return ``value``, or raise ``ValueError`` unless it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={shown(value)} must be one of {', '.join(map(repr, choices))}")
    return value


def shape_text(shape: Sequence[int]) -> str:
    """Text of a shape for messages, with n for the first size, since the number of records may be private."""
    return f"({', '.join(['n', *map(str, shape[1:])])}{',' if len(shape) == 1 else ''})" if shape else "()"


def check_switch(name: str, value: Any) -> bool:
    """Return ``value``, or raise ``ValueError`` unless it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be true or false")
    return value


def shown(value: Any) -> str:
    """``repr`` of a value for a one-line message, shortened if long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        return f"a {type(value).__name__} of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}…{text[-19:]}"


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``numba.njit`` at the first call, without the GIL; caches machine code on disk where possible."""
    return lambda function: functools.wraps(function)(_Compiled(function, options))


class _Compiled:
    """Function that is compiled at its first call, or where another compiled function calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options

    def __call__(self, *args: Any) -> Any:
        return self._machine_code(*args)

    @property
    def _numba_type_(self) -> Any:  # as which numba takes it in other functions
        return self._machine_code._numba_type_

    @functools.cached_property
    def _machine_code(self) -> Any:
        import numba  # takes a third of a second, and most callers compile nothing

        try:
            return numba.njit(nogil=True, cache=True, **self._options)(self._function)
        except RuntimeError:  # no writable cache folder: every process compiles again
            return numba.njit(nogil=True, **self._options)(self._function)


def printable(text: str) -> str:
    """Text from an untrusted file for display, with control characters and text directions escaped."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _number(name: str, value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={shown(value)} must be {what}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={shown(value)} must be {what}")
    return number
