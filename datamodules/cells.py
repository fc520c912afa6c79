"""Single cells of tables: numbers, dates and truth values that texts represent, and the kind that they are of."""

from __future__ import annotations

import contextlib
import datetime
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.public_rows import likeliest_shapes

#: What a cell that is not empty can be; each is one of them. A mark, as NA, may stand for a missing cell.
CELLS = (
    "mark",
    "word", "list", "flag", "code", "number", "decimal point", "decimal comma", "date", "day first", "month first",
    "day or month first",
)  # fmt: skip
#: Words that state the kind of a column of numbers or dates, with whether it has a decimal comma, and whether months
#: come before days.
STATED: dict[str, tuple[str, bool | None, bool | None]] = {
    "number": ("number", None, None),
    "decimal point": ("number", False, None),
    "decimal comma": ("number", True, None),
    "flag": ("flag", False, None),
    "date": ("date", None, None),
    "day first": ("date", None, False),
    "month first": ("date", None, True),
}
_DECIDED = 0.9  # share of a column's cells that decide its kind
_SEEN = 4.0  # standard deviations of their noise from which on cells are missing
_MARKS = {
    *["na", "n/a", "#n/a", "nan", "null", "none", "nil", "?", "-", "--", ".", "–", "missing", "unknown"]
}
#: Truth values.
FLAGS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_DROPPED = str.maketrans(
    {"\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "'": " ", "\u2019": " "}
    | dict.fromkeys("$€£¥₹%")
)
_NAMED_MONTHS = ("%d %b %Y", "%d-%b-%Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")
_DAY = re.compile(r"(\d{1,2})([./-])(\d{1,2})\2(\d{4})|(\d{4})([./-])(\d{1,2})\6(\d{1,2})")
_TIME = re.compile(
    r"(?:[T ,]\s*(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d+))?)?\s*([AP]M)?\s*(Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)?)?",
    re.IGNORECASE,
)
#: Days are counted from here.
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


def _pattern(group: str, point: str) -> re.Pattern[str]:
    whole = rf"(\d{{1,3}}([{group} ]\d{{3}})+|\d+)"
    return re.compile(rf"[-+]?({whole}({point}\d*)?|{point}\d+)([eE][-+]?\d+)?")


# Digits in groups, and a decimal point or a decimal comma.
_POINT, _COMMA = _pattern(",", r"\."), _pattern(r".", ",")


def number_of(word: str, comma: bool | None = False) -> float:
    """Number that a text represents; NaN for other texts.

    Args:
        word: perhaps with groups of digits, a currency or per cent sign, or in brackets where it is negative.
        comma: whether a comma is the decimal point; None takes it for one where the text is no number otherwise.

    Example:
        >>> number_of("$1,234.5"), number_of("1.234,5", comma=True), number_of("(3 %)"), number_of("1,2")
        (1234.5, 1234.5, -3.0, nan)
    """
    text = word.translate(_DROPPED).strip()
    if text[:1] == "(" and text[-1:] == ")":
        text = f"-{text[1:-1].strip()}"
    comma = not _POINT.fullmatch(text) if comma is None else comma
    if not (_COMMA if comma else _POINT).fullmatch(text):
        return math.nan
    text = text.replace(" ", "").replace("." if comma else ",", "")
    return float(text.replace(",", "."))


def days_of(word: str, month_first: bool | None = None) -> float:
    """Days from 1970 to a date, perhaps with a time and a zone (UTC where there is none); NaN for other texts.

    Args:
        word: as 2020-12-31, 2020/12/31, 31.12.2020, 31/12/2020, 12/31/2020 or 31 Dec 2020.
        month_first: whether 03/04/2020 and 03-04-2020 are in March; None: they are no dates.

    Example:
        >>> days_of("02.01.1970"), days_of("01/02/1970 6:00 PM", month_first=True), days_of("01/02/1970")
        (1.0, 1.75, nan)
    """
    text = word.strip()
    if len(text) < 8 or text.isdecimal():
        return math.nan
    found: datetime.datetime | None = None
    with contextlib.suppress(ValueError, OverflowError):
        if (day := _DAY.match(text)) is not None:
            found = _moment(day, text[day.end() :], month_first)
        elif text[:4].isdecimal():
            found = datetime.datetime.fromisoformat(text)
        else:
            for form in _NAMED_MONTHS:
                with contextlib.suppress(ValueError):
                    found = datetime.datetime.strptime(text, form)
    if found is None:
        return math.nan
    zoned = found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)
    return (zoned - EPOCH) / datetime.timedelta(days=1)


def _moment(day: re.Match[str], rest: str, month_first: bool | None) -> datetime.datetime | None:
    """Date and time of a text; None where the order of day and month is unknown, or the rest is no time."""
    if (time := _TIME.fullmatch(rest.strip() and rest)) is None:
        return None
    if day[4] is None:
        year, month, number = day[5], day[7], day[8]
    else:
        order = _order_of(day)
        if order is None and month_first is None:
            return None
        year, number, month = day[4], day[1], day[3]
        if order if order is not None else month_first:
            number, month = month, number
    hour, zone = int(time[1] or 0), (time[6] or "").upper()
    if time[5]:
        hour = hour % 12 + 12 * (time[5].upper() == "PM")
    seconds = f"{hour:02}:{time[2] or '00'}:{time[3] or '00'}.{(time[4] or '0')[:6]:0<6}"
    zone = "" if zone in ("Z", "UTC", "GMT") else zone
    return datetime.datetime.fromisoformat(f"{year}-{int(month):02}-{int(number):02}T{seconds}{zone}")


def _order_of(day: re.Match[str]) -> bool | None:
    """Whether a date with the year at its end has its month first; None where both may be."""
    first, second = int(day[1]), int(day[3])
    if day[2] == "." or first > 12:
        return False
    return True if second > 12 else None


def cell_of(word: str) -> int:
    """Index in :data:`CELLS` of the type of a non-empty cell, from the cell alone."""
    if word.strip().lower() in _MARKS:
        return CELLS.index("mark")
    if word.strip().lower() in FLAGS:
        return CELLS.index("flag")
    if _is_list(word.strip()):
        return CELLS.index("list")
    if re.fullmatch(r"0\d+", word.translate(_DROPPED).strip()):
        return CELLS.index("code")
    point, comma = (not math.isnan(number_of(word, sign)) for sign in (False, True))
    if point or comma:
        return CELLS.index("number" if point and comma else "decimal point" if point else "decimal comma")
    if math.isnan(days_of(word, True)):
        return CELLS.index("word")
    if (day := _DAY.match(word.strip())) is None or day[4] is None or day[2] == ".":
        return CELLS.index("date")
    order = _order_of(day)
    return CELLS.index("day or month first" if order is None else "month first" if order else "day first")


def _is_list(text: str) -> bool:
    """Whether a text represents a list of numbers, such as ``[1.0, 2.0]``, ``[1. 2.]`` or ``(1.0, 2.0)``."""
    if (text[:1], text[-1:]) not in (("[", "]"), ("(", ")")):
        return False
    parts = re.split(r"[,;\s]+", text[1:-1].strip())
    return (text[0] == "[" or len(parts) > 1) and all(map(_POINT.fullmatch, parts))


def kind_of_counts(counts: Sequence[float] | NDArray[Any]) -> tuple[str, bool, bool | None]:
    """Kind of a column, whether its numbers have a decimal comma, and whether its dates have their months first.

    Args:
        counts: cells of each of :data:`CELLS`.

    Returns:
        The kind, or ``"list"``; the order of dates is None where no cell tells it.
    """
    of = dict(zip(CELLS, map(float, counts), strict=True))
    total = max(1.0, sum(of.values()) - of["mark"])
    numbers = of["code"] + of["number"] + max(of["decimal point"], of["decimal comma"])
    ordered = of["day first"], of["month first"]
    month_first = None if ordered[0] == ordered[1] else ordered[1] > ordered[0]
    if of["list"] >= _DECIDED * total:
        return "list", False, None
    if of["flag"] >= _DECIDED * total:
        return "flag", False, None
    if numbers >= _DECIDED * total and of["code"] < (1 - _DECIDED) * total:
        return "number", of["decimal comma"] > of["decimal point"], None
    if of["date"] + sum(ordered) + of["day or month first"] >= _DECIDED * total:
        return "date", False, month_first
    return "category", False, None


def kinds_of_noisy_counts(
    counts: Sequence[Sequence[float]], sigma: float
) -> list[tuple[str, bool, bool | None]]:
    """Kind of each column by noisy counts, as of :func:`kind_of_counts`.

    The likeliest of these: the cells of a column are one of :data:`CELLS`, or, where noise is small, two of them in
    parts of 4:1 or 1:1. The other columns tell how frequent each is.

    Args:
        counts: of each column the cells of each of :data:`CELLS`, and the empty ones.
        sigma: standard deviation of the noise of each count.
    """
    of = np.array(counts, dtype=float)
    rows, missing = max(1.0, float(of.sum(axis=1).mean())), of[:, 0] + of[:, -1]
    records = (rows - np.where(missing > _SEEN * sigma, missing, 0.0)).clip(1.0, rows)
    shapes = one = np.eye(len(CELLS) - 1)
    if 0.2 * rows > _SEEN * sigma:  # a fifth of the records stands out of the noise
        mixed = [part * a + (1 - part) * b for part in (0.8, 0.5) for a in one for b in one if a is not b]
        shapes = np.concatenate([one, np.stack(mixed)])
    found = shapes[likeliest_shapes(of[:, 1:-1], records, shapes, sigma)]
    return [kind_of_counts([0.0, *shares * 100]) for shares in found]
