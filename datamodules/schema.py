"""Columns of numbers and categories: their kinds, bounds and values, and rows as numbers."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import InputError
from pl_privknn.datamodules.columns import Columns, word_of
from pl_privknn.privacy.public_rows import Bounds, scaled

#: Kinds of columns: numbers, days (of dates), truth values, and categories.
KINDS = ("number", "date", "flag", "category")
_DECIDED = 0.9  # share of a column's cells that decide its kind
_FLAGS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_MOST_VALUES, _BUCKETS = 50, 16  # values of a public column; hash buckets of a column without stated values
_STRETCH = 0.1  # of a range of public numbers, at both ends
_MOST_COORDINATES = 2000  # second moments have half of its square
_DROPPED = str.maketrans(
    {"\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "'": " ", "\u2019": " "}
    | dict.fromkeys("$€£¥₹%")
)
_FORMATS = ("%d.%m.%Y", "%Y/%m/%d", "%d.%m.%Y %H:%M", "%Y/%m/%d %H:%M")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_IDENTIFIER = re.compile(r"(?i:(.*[_\s.-])?(id|uuid|guid|rownames?|index))|\w*[a-z](Id|ID)|Unnamed: 0|")


def _pattern(group: str, point: str) -> re.Pattern[str]:
    whole = rf"(\d{{1,3}}([{group} ]\d{{3}})+|\d+)"
    return re.compile(rf"[-+]?({whole}({point}\d*)?|{point}\d+)([eE][-+]?\d+)?")


# Digits in groups, and a decimal point or a decimal comma.
_POINT, _COMMA = _pattern(",", r"\."), _pattern(r".", ",")


def number_of(word: str, comma: bool | None = False) -> float:
    """Number that a text writes, NaN for others.

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


def days_of(word: str) -> float:
    """Days from 1970 to a date, perhaps with a time and a zone (UTC where there is none); NaN for other texts."""
    text = word.strip()
    if len(text) < 8 or text.isdecimal():
        return math.nan
    for form in ("", *_FORMATS):
        try:
            found = datetime.datetime.strptime(text, form) if form else datetime.datetime.fromisoformat(text)
        except ValueError:
            continue
        zoned = found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)
        return (zoned - _EPOCH) / datetime.timedelta(days=1)
    return math.nan


@dataclasses.dataclass(frozen=True)
class ColumnSchema:
    """Public description of a column, by which a cell is read without any other cell.

    Attributes:
        name: of the column.
        kind: one of :data:`KINDS`.
        bounds: lowest and highest number; None where they are not stated.
        values: categories that are told apart; others share one coordinate. None: categories by a public hash.
        comma: whether numbers have a decimal comma; None where neither public rows nor kinds tell.
    """

    name: str
    kind: str
    bounds: Bounds | None = None
    values: tuple[str, ...] | None = None
    comma: bool | None = False

    @property
    def size(self) -> int:
        """Number of categories, the last one for missing cells and values that are not among them; 0 of numbers."""
        if self.kind != "category":
            return 0
        return (_BUCKETS if self.values is None else len(self.values)) + 1

    def read(self, table: Columns) -> NDArray[np.float64]:
        """Numbers, NaN where there is none, or numbers of categories, ``(n,)``."""
        import pyarrow

        column = table.read(self.name)
        # A typed column is read as its cells are as texts, which one odd cell of another record makes of them all.
        as_typed = self.kind != "category" and pyarrow.types.is_temporal(column.type) == (self.kind == "date")
        if as_typed and (found := _typed_numbers(column)) is not None:
            return found
        words, places = _different(column)
        if self.kind == "category":
            found = np.array([self._category(word) for word in words], dtype=float)
        elif self.kind == "date":
            found = np.array([days_of(word) for word in words])
        else:
            found = np.array(
                [_FLAGS.get(word.strip().lower(), number_of(word, self.comma)) for word in words]
            )
        otherwise = self.size - 1 if self.size else math.nan
        return np.append(found, otherwise)[places]

    def shown(self, number: float) -> str:
        """Cell of a number of :meth:`read`, for a file."""
        if self.kind == "category":
            place = int(number)
            known = self.values or [f"bucket {bucket}" for bucket in range(_BUCKETS)]
            return known[place] if place < len(known) else ""
        if math.isnan(number):
            return ""
        if self.kind == "date":
            return (_EPOCH + datetime.timedelta(days=number)).strftime("%Y-%m-%d")
        return ("true" if number >= 0.5 else "false") if self.kind == "flag" else f"{number:.6g}"

    def _category(self, word: str) -> int:
        if not word:
            return self.size - 1
        if self.values is None:
            digest = hashlib.blake2b(word.encode(), digest_size=8, key=self.name.encode()[:64]).digest()
            return int.from_bytes(digest, "little") % _BUCKETS
        return self.values.index(word) if word in self.values else self.size - 1


@dataclasses.dataclass(frozen=True)
class Schema:
    """Public description of the columns of a table that are features.

    Attributes:
        columns: in the order of the coordinates.
    """

    columns: tuple[ColumnSchema, ...]

    @property
    def sizes(self) -> list[int]:
        """Of each column the number of its categories, or 0 for numbers."""
        return [column.size for column in self.columns]

    @property
    def bounds(self) -> list[Bounds | None]:
        """Bounds of each column; None for categories and for bounds that are not stated."""
        return [column.bounds for column in self.columns]

    @property
    def unbounded(self) -> int:
        """Number of numeric columns without stated bounds."""
        return sum(not column.size and column.bounds is None for column in self.columns)

    def with_bounds(self, bounds: Sequence[Bounds | None]) -> Schema:
        """Copy of the schema with other bounds."""
        pairs = zip(self.columns, bounds, strict=True)
        return Schema(tuple(dataclasses.replace(column, bounds=found) for column, found in pairs))

    def read(self, table: Columns, how: str) -> Tensor:
        """Rows of a table, float64 ``(n, d)``: numbers, NaN where there is none, and categories.

        Args:
            table: has the columns, in any order, and perhaps others.
            how: how to name another column, for messages.
        """
        for column in self.columns:
            table.check(column.name, how)
        return torch.from_numpy(np.stack([column.read(table) for column in self.columns], axis=1))

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows of :meth:`read` with numbers in [0, 1] between their bounds, −1 where they are missing, float32."""
        found = [
            values
            if column.size
            else scaled(values, column.bounds)
            if column.bounds
            else values.nan_to_num(-1.0)
            for column, values in zip(self.columns, rows.unbind(1), strict=True)
        ]
        return torch.stack(found, dim=1).clamp(-3e38, 3e38).float()

    def words(self, rows: Tensor) -> list[list[str]]:
        """Cells of :meth:`scaled` rows, for a file."""
        found = []
        for column, values in zip(self.columns, rows.double().unbind(1), strict=True):
            if not column.size and column.bounds is not None:
                low, high = column.bounds
                values = torch.where(values < 0, torch.nan, low + values * (high - low))
            found.append([column.shown(value) for value in values.tolist()])
        return [list(row) for row in zip(*found, strict=True)]

    def to_list(self) -> list[dict[str, Any]]:
        """The columns in plain types."""
        return [dataclasses.asdict(column) for column in self.columns]

    @classmethod
    def of(cls, columns: Sequence[Mapping[str, Any]]) -> Schema:
        """Schema of :meth:`to_list`."""

        def tupled(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        return cls(
            tuple(ColumnSchema(**{name: tupled(value) for name, value in each.items()}) for each in columns)
        )


def schema_of(
    table: Columns,
    names: Sequence[str],
    numeric: Mapping[str, Any],
    categorical: Mapping[str, Any],
    public: bool,
) -> Schema:
    """Schema from what is stated and from what cells of a table look like.

    Args:
        table: public rows, or else the private ones, of which no more than the kinds of columns are used.
        names: of the columns.
        numeric: bounds of columns of numbers or dates, None where they are not stated.
        categorical: values of categories, None where they are not stated.
        public: whether the rows are public.

    Raises:
        ValueError: for columns that hold something else, or too many coordinates.
    """
    columns = []
    for name in names:
        table.check(name, "by columns= (--columns)")
        if name in categorical:
            kind, comma = "category", False
        elif name in numeric and not public:  # from what is stated alone: private cells would be conditions
            stated = numeric[name] or [0.0]
            kind, comma = ("date" if isinstance(stated[0], str | datetime.date) else "number"), None
        else:
            kind, comma = _kind_of(table, name)
            if name in numeric and kind == "category":
                kind = "number"
        bounds = _stated_bounds(name, numeric.get(name))
        values = categorical.get(name)
        column = ColumnSchema(
            name, kind, bounds, None if values is None else tuple(map(word_of, values)), comma
        )
        if kind == "flag" and bounds is None:
            column = dataclasses.replace(column, bounds=(0.0, 1.0))
        elif public and kind == "category" and values is None:
            column = dataclasses.replace(column, values=_common_values(table, name))
        elif public and kind != "category" and bounds is None:
            column = dataclasses.replace(column, bounds=_range(column.read(table)))
        columns.append(column)
    found = Schema(tuple(columns))
    if not columns or (width := sum(size or 1 for size in found.sizes)) > _MOST_COORDINATES:
        many = f"{width} coordinates, {_MOST_COORDINATES} at most" if columns else "no column is left"
        raise InputError(f"{table.named}: {many}; name the columns to use by columns= (--columns)")
    return found


def identifiers(table: Columns, names: Sequence[str], public: bool) -> list[str]:
    """Columns that identify records: by their names, or public ones of which no two cells are equal."""
    found = []
    for name in names:
        if _IDENTIFIER.fullmatch(name):
            found.append(name)
        elif public and _is_text(table, name):
            words, places = _different(table.read(name))
            if len(words) == len(places) > 20 and _kind_of(table, name)[0] == "category":
                found.append(name)
    return found


def looks_numeric(table: Columns, name: str) -> bool:
    """Whether a column holds numbers, truth values or dates, or texts that write them."""
    return not table.is_vectors(name) and _kind_of(table, name)[0] != "category"


def _is_text(table: Columns, name: str) -> bool:
    return any(kind in table.kind(name) for kind in ("string", "binary"))


def _kind_of(table: Columns, name: str) -> tuple[str, bool]:
    """Kind of a column by its type or by nine of ten of its cells, and whether its numbers have a decimal comma."""
    kind = table.kind(name)
    if table.is_vectors(name) or kind.startswith(("struct", "map")):
        raise InputError(
            f"{table.named}: the column {name!r} holds lists; leave it out by columns= (--columns), or name a column "
            "of vectors alone by text= (--text)"
        )
    if kind.startswith(("timestamp", "date")):
        return "date", False
    if kind == "bool":
        return "flag", False
    if not _is_text(table, name):
        return ("category" if kind == "null" else "number"), False
    words, places = _different(table.read(name))
    counts = np.bincount(places[places >= 0], minlength=len(words))
    total = max(1, int(counts.sum()))

    def share(holds: Sequence[bool]) -> float:
        return float(counts @ np.array(holds, dtype=float)) / total if len(words) else 0.0

    if share([word.strip().lower() in _FLAGS for word in words]) >= _DECIDED:
        return "flag", False
    plain = [word.translate(_DROPPED).strip() for word in words]
    by_point, by_comma = (
        [not math.isnan(number_of(word, comma)) for word in words] for comma in (False, True)
    )
    coded = share([bool(re.fullmatch(r"0\d+", word)) for word in plain])
    comma = share(by_comma) > share(by_point)
    if share(by_comma if comma else by_point) >= _DECIDED and coded < 1 - _DECIDED:
        return "number", comma
    return (
        "date" if share([days_of(word) == days_of(word) for word in words]) >= _DECIDED else "category"
    ), False


def _typed_numbers(column: Any) -> NDArray[np.float64] | None:
    """Numbers of a column that is not text, dates as days; None for texts."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_temporal(kind):
        if pyarrow.types.is_date32(kind):
            column, per_day = column.cast(pyarrow.int32()), 1.0
        else:
            column, per_day = column.cast(pyarrow.timestamp("us")).cast(pyarrow.int64()), 86_400e6
        return (
            column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False).astype(float) / per_day
        )
    if not (pyarrow.types.is_primitive(kind) or pyarrow.types.is_decimal(kind)):
        return None
    if pyarrow.types.is_boolean(kind):
        column = column.cast(pyarrow.int8())
    return column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False).astype(float)


def _different(column: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Different non-empty cells as text, and of each row the place of its cell, −1 where it is empty."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    coded = column.combine_chunks().dictionary_encode()
    cells, places = coded.dictionary.to_pylist(), coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    words, numbers = list[str](), dict[str, int]()
    renamed = np.full(len(cells) + 1, -1, dtype=np.int64)
    for place, cell in enumerate(cells):
        if word := word_of(cell):
            renamed[place] = numbers.setdefault(word, len(words))
            if renamed[place] == len(words):
                words.append(word)
    return words, renamed[places]


def _stated_bounds(name: str, stated: Any) -> Bounds | None:
    if stated is None:
        return None
    parts = [
        days_of(str(value)) if isinstance(value, str | datetime.date) else float(value) for value in stated
    ]
    if len(parts) != 2 or not all(map(math.isfinite, parts)) or parts[0] >= parts[1]:
        raise InputError(
            f"numeric: {name!r} has the bounds {list(stated)!r}; expected [low, high], numbers or dates"
        )
    return parts[0], parts[1]


def _common_values(table: Columns, name: str) -> tuple[str, ...]:
    """The most frequent values of a public column; those that occur once share the last category."""
    words, places = _different(table.read(name))
    counts = Counter(places[places >= 0].tolist())
    kept = [words[place] for place, count in counts.most_common(_MOST_VALUES) if count > 1]
    return tuple(sorted(kept))


def _range(numbers: NDArray[np.float64]) -> Bounds:
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    stretch = _STRETCH * (high - low) or 0.5 * max(1.0, abs(low))
    return low - stretch, high + stretch
