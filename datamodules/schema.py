"""Columns of numbers and categories: their kinds, bounds and values, and rows as numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
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
from pl_privknn.datamodules.cells import (
    CELLS,
    EPOCH,
    FLAGS,
    STATED,
    cell_of,
    days_of,
    kind_of_counts,
    number_of,
)
from pl_privknn.datamodules.columns import Columns, word_of
from pl_privknn.features.text import WordLlamaFeatures
from pl_privknn.privacy.public_rows import Bounds, scaled

#: Kinds of columns: numbers, days (of dates), truth values, categories, and texts, of which each coordinate of their
#: vectors is a column of the schema.
KINDS = ("number", "date", "flag", "category", "text")
_TEXT_WIDTH = 64  # coordinates of a text's unit vector, which lie between these bounds but for a few
_TEXT_BOUNDS = (-0.5, 0.5)
_MOST_VALUES, _BUCKETS = 50, 16  # values of a public column; hash buckets of a column without stated values
_LEAST_BUCKETS = 4  # beside released values, so that a column has as many coordinates whatever they are
_STRETCH = 0.1  # of a range of public numbers, at both ends
_LARGEST = 1e300  # public numbers, whose range must be a number
_MOST_COORDINATES = 2000  # second moments have half of its square
_IDENTIFIER = re.compile(r"(?i:(.*[_\s.-])?(id|uuid|guid|rownames?|index))|\w*[a-z](Id|ID)|Unnamed: 0|")


@dataclasses.dataclass(frozen=True)
class ColumnSchema:
    """Public description of a column, by which a cell is read without any other cell.

    Attributes:
        name: of the column.
        kind: one of :data:`KINDS`.
        bounds: lowest and highest number; None where they are not stated.
        values: categories that are told apart; others share one coordinate. None: categories by a public hash.
        buckets: number of coordinates that other categories share by a public hash, instead of one.
        comma: whether numbers have a decimal comma; None where neither public rows nor kinds tell.
        month_first: whether months of dates come before days; None where cells that may be either are no dates.
        part: of texts the coordinate of their vectors; None of other columns.
    """

    name: str
    kind: str
    bounds: Bounds | None = None
    values: tuple[str, ...] | None = None
    comma: bool | None = False
    month_first: bool | None = None
    part: int | None = None
    buckets: int = 0

    @property
    def size(self) -> int:
        """Number of categories, the last one for missing and unknown values; 0 for a column of numbers."""
        if self.kind != "category":
            return 0
        return (_BUCKETS if self.values is None else len(self.values) + self.buckets) + 1

    def read(self, table: Columns) -> NDArray[np.float64]:
        """Numbers, or numbers of categories, ``(n,)``; NaN where a cell is empty or no number."""
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
            found = np.array([days_of(word, self.month_first) for word in words])
        else:
            found = np.array([FLAGS.get(word.strip().lower(), number_of(word, self.comma)) for word in words])
        return np.append(found, math.nan)[places]

    def stated(self) -> tuple[str, str]:
        """The column as a value in YAML, and a comment that says what may take its place."""
        if self.kind == "text":
            return "text", ""
        if self.kind == "category":
            values = json.dumps(self.values, ensure_ascii=False) if self.values else "category"
            return values, "" if self.values else 'or ["first", "second"]: other values share one category'
        word = "flag" if self.kind == "flag" else self.kind
        if self.kind == "date" and self.month_first is not None:
            word = "month first" if self.month_first else "day first"
        if self.comma:
            word = "decimal comma"
        if self.kind == "flag" or self.bounds is None:
            example = {"number": "[0, 100]", "date": "[2000-01-01, 2030-01-01]"}.get(self.kind, "")
            return (
                word,
                example
                and f"or {example[:-1]}{', ' + word if word not in KINDS else ''}], lowest and highest",
            )
        ends = [self.shown(end) for end in self.bounds]
        return f"[{', '.join(ends)}{', ' + word if word not in KINDS else ''}]", ""

    def shown(self, number: float) -> str:
        """Cell text of a value of :meth:`read`, for a file."""
        if self.kind == "category":
            place = int(number)
            buckets = _BUCKETS if self.values is None else self.buckets
            known = [*(self.values or ()), *(f"bucket {bucket}" for bucket in range(buckets))]
            return known[place] if place < len(known) else ""
        if math.isnan(number):
            return ""
        if self.kind == "date":
            # Bounds that a run pays for may lie outside the calendar.
            day = min(max(EPOCH.toordinal() + math.floor(number), 1), datetime.date.max.toordinal())
            return datetime.date.fromordinal(day).isoformat()
        return ("true" if number >= 0.5 else "false") if self.kind == "flag" else f"{number:.6g}"

    def _category(self, word: str) -> int:
        values = self.values or ()
        if word in values:
            return values.index(word)
        if (buckets := _BUCKETS if self.values is None else self.buckets) == 0:
            return self.size - 1
        digest = hashlib.blake2b(word.encode(), digest_size=8, key=self.name.encode()[:64]).digest()
        return len(values) + int.from_bytes(digest, "little") % buckets


@dataclasses.dataclass(frozen=True)
class Schema:
    """Public description of the columns of a table that are features.

    Attributes:
        columns: in the order of the coordinates.
    """

    columns: tuple[ColumnSchema, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of categories of each column; 0 for a column of numbers."""
        return [column.size for column in self.columns]

    @property
    def coordinates(self) -> list[int]:
        """:attr:`sizes`, with −1 for coordinates of texts, for :class:`~pl_privknn.features.TableFeatures`."""
        return [-1 if column.part is not None else column.size for column in self.columns]

    @property
    def names(self) -> list[str]:
        """Names of the table's columns, each once."""
        return list(dict.fromkeys(column.name for column in self.columns))

    @property
    def titles(self) -> list[str]:
        """Names of the coordinates of rows; a text has several."""
        return [
            column.name if column.part is None else f"{column.name} {column.part}" for column in self.columns
        ]

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
        """Rows of a table, float64 ``(n, d)``: numbers and categories, NaN where there is none.

        Args:
            table: has the columns, in any order, and perhaps others.
            how: how to name another column, for messages.
        """
        for name in self.names:
            table.check(name, how)
        vectors = {column.name: _vectors(table, column.name) for column in self.columns if column.part == 0}
        read = [
            column.read(table) if column.part is None else vectors[column.name][:, column.part]
            for column in self.columns
        ]
        return torch.from_numpy(np.stack(read, axis=1))

    def filled(self, rows: Tensor) -> Tensor:
        """Rows of :meth:`read` with the last category where a column of categories has none."""
        last = torch.tensor([size - 1.0 if size else math.nan for size in self.sizes], dtype=rows.dtype)
        return torch.where(rows.isnan(), last, rows)

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows of :meth:`read` with numbers in [0, 1] between their bounds, −1 where they are missing, float32."""
        found = [
            values
            if column.size
            else scaled(values, column.bounds)
            if column.bounds
            else values.nan_to_num(-1.0)
            for column, values in zip(self.columns, self.filled(rows).unbind(1), strict=True)
        ]
        return torch.stack(found, dim=1).clamp(-3e38, 3e38).float()

    def words(self, rows: Tensor) -> list[list[str]]:
        """Cell texts of :meth:`scaled` rows, for a file."""
        found = []
        for column, values in zip(self.columns, rows.double().unbind(1), strict=True):
            if not column.size and column.bounds is not None:
                low, high = column.bounds
                values = torch.where(values < 0, torch.nan, low + values * (high - low))
            found.append([column.shown(value) for value in values.tolist()])
        return [list(row) for row in zip(*found, strict=True)]

    def to_yaml(self, left_out: Sequence[str] = ()) -> str:
        """The columns as YAML that ``--bounds`` takes, with comments for their owner.

        Args:
            left_out: identifiers.
        """
        lines = [
            "# Columns, for --bounds. What stands here is taken as known beforehand, and becomes public:",
            "# fill in what is known without looking at the records, or leave the kind alone.",
        ]
        for column in self.columns:
            if not column.part:
                value, comment = column.stated()
                lines.append(f"{_quoted(column.name)}: {value}{comment and '  # ' + comment}")
        lines += [f"# {_quoted(name)}: left out as an identifier" for name in left_out]
        return "\n".join(lines) + "\n"

    def to_list(self) -> list[dict[str, Any]]:
        """Columns in plain types."""
        return [dataclasses.asdict(column) for column in self.columns]

    @classmethod
    def of(cls, columns: Sequence[Mapping[str, Any]]) -> Schema:
        """Schema from the result of :meth:`to_list`."""

        def tupled(value: Any) -> Any:
            return tuple(value) if isinstance(value, list) else value

        return cls(
            tuple(ColumnSchema(**{name: tupled(value) for name, value in each.items()}) for each in columns)
        )


def _quoted(name: str) -> str:
    """Name as a key of YAML."""
    plain = re.fullmatch(r"[A-Za-z_]\w*", name) and name.lower() not in {
        *FLAGS,
        "on",
        "off",
        "null",
        "y",
        "n",
    }
    return name if plain else json.dumps(name, ensure_ascii=False)


def schema_of(
    table: Columns,
    names: Sequence[str],
    numeric: Mapping[str, Any],
    categorical: Mapping[str, Any],
    public: bool,
    text: Sequence[str] = (),
    paid: Sequence[str] = (),
) -> Schema:
    """Schema from stated columns and, for the others, from the cells of a table.

    Args:
        table: public rows, or else the private ones, of which no more than the kinds of columns are used.
        names: of the columns.
        numeric: bounds of columns of numbers or dates, None where they are not stated; a word of :data:`STATED` in
            their place, or behind them.
        categorical: values of categories, None where they are not stated.
        public: whether the rows are public.
        text: names of columns of texts.
        paid: names of columns whose stated values a run has released, so that others have buckets.

    Raises:
        ValueError: for columns that hold something else, or too many coordinates.
    """
    columns = list[ColumnSchema]()
    for name in names:
        table.check(name, "by columns= (--columns)")
        values, month_first = categorical.get(name), None
        comma: bool | None = False
        word, dates, bounds = _stated(name, numeric.get(name))
        if name in text:
            check_texts(table, name, public)
            parts = range(_TEXT_WIDTH)
            columns += [ColumnSchema(name, "text", _TEXT_BOUNDS, part=part) for part in parts]
            continue
        if name in categorical:
            kind = "category"
        elif word or (name in numeric and not public):  # without a private cell, which would be a condition
            kind, comma, month_first = STATED[word or ("date" if dates else "number")]
        else:
            kind, comma, month_first = _kind_of(table, name)
            if name in numeric and kind == "category":
                kind = "number"
        values = None if values is None else tuple(map(word_of, values))
        column = ColumnSchema(name, kind, bounds, values, comma, month_first)
        if name in paid and values is not None:
            values = values[: _BUCKETS - _LEAST_BUCKETS]
            column = dataclasses.replace(column, values=values, buckets=_BUCKETS - len(values))
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


def words_of(table: Columns, name: str) -> list[str]:
    """Cell of each row as text, empty where there is none."""
    words, places = _different(table.read(name))
    return [*map([*words, ""].__getitem__, places.tolist())]


def cell_numbers(table: Columns, name: str) -> tuple[Tensor, int]:
    """Number of each row's cell among :data:`CELLS`, int64 ``(n,)``, and how many there are; the last is empty."""
    if table.is_vectors(name):
        raise InputError(
            f"{table.named}: the column {name!r} holds lists; leave it out by columns= (--columns)"
        )
    words, places = _different(table.read(name))
    found = np.array([*map(cell_of, words), len(CELLS)], dtype=np.int64)[places]
    return torch.from_numpy(found), len(CELLS) + 1


def identifiers(table: Columns, names: Sequence[str], public: bool) -> list[str]:
    """Columns that identify records: by their names, or public ones of which no two cells are equal."""
    found = []
    for name in names:
        if _IDENTIFIER.fullmatch(name):
            found.append(name)
        elif public and _is_text(table, name):
            words, places = _different(table.read(name))
            if len(words) == len(places) > 20 and _decided(table, name)[0] == "category":
                found.append(name)
    return found


def check_texts(table: Columns, name: str, public: bool) -> None:
    """Refuse a column of numbers, dates, truth values or lists where texts are wanted.

    Args:
        table: has the column.
        name: of the column.
        public: whether the rows are public; the cells of private ones are not looked at, since a refusal would depend
            on them.

    Raises:
        ValueError: by the type of the column, or by nine of ten public cells.
    """
    if not public and _is_text(table, name) and not table.is_vectors(name):
        return
    kind = "list" if table.is_vectors(name) else _decided(table, name)[0]
    if kind == "list":
        raise InputError(
            f"text={name!r}: the column holds lists of numbers; write vectors as lists of floats to Parquet or JSON "
            "lines (--text takes them by themselves), or each of their numbers to a column"
        )
    if kind != "category":
        raise InputError(
            f"text={name!r}: the column holds numbers, dates or truth values; leave --text out, which takes all "
            "columns of the table, or name a column of texts"
        )


def _is_text(table: Columns, name: str) -> bool:
    return any(kind in table.kind(name) for kind in ("string", "binary"))


def _kind_of(table: Columns, name: str) -> tuple[str, bool, bool | None]:
    """Kind of a column, whether it has a decimal comma, and the order of its dates; see :func:`kind_of_counts`.

    Raises:
        ValueError: for lists, and for dates whose order no cell tells.
    """
    kind, comma, month_first = _decided(table, name)
    if kind == "list":
        raise InputError(
            f"{table.named}: the column {name!r} holds lists; leave it out by columns= (--columns), or name a column "
            "of vectors alone by text= (--text)"
        )
    if kind == "date" and month_first is None and _is_text(table, name):
        words, _ = _different(table.read(name))
        if any(cell_of(word) == CELLS.index("day or month first") for word in words):
            raise InputError(
                f"{table.named}: dates of the column {name!r} may have the day or the month first; say which by "
                f"numeric={{{name!r}: 'day first'}} or 'month first' (--bounds), or write them as 2020-12-31"
            )
    return kind, comma, month_first


def _decided(table: Columns, name: str) -> tuple[str, bool, bool | None]:
    """Result of :func:`kind_of_counts`, from the type of a column or from its cells."""
    kind = table.kind(name)
    if table.is_vectors(name) or kind.startswith(("struct", "map")):
        return "list", False, None
    if kind.startswith(("timestamp", "date")):
        return "date", False, None
    if kind == "bool":
        return "flag", False, None
    if not _is_text(table, name):
        return ("category" if kind == "null" else "number"), False, None
    words, places = _different(table.read(name))
    counts = np.bincount(places[places >= 0], minlength=len(words))
    found = np.bincount([cell_of(word) for word in words], counts, len(CELLS)) if words else [0] * len(CELLS)
    return kind_of_counts(found)


def _vectors(table: Columns, name: str) -> NDArray[np.float64]:
    """Unit vectors of a column of texts, NaN where there is none."""
    embed, found = WordLlamaFeatures(_TEXT_WIDTH), [torch.zeros(0, _TEXT_WIDTH)]
    for texts in table.texts(name):
        vectors = torch.nn.functional.normalize(embed(texts), dim=1)
        empty = torch.tensor([not text or text.isspace() for text in texts])
        found.append(vectors.masked_fill(empty[:, None], torch.nan))
    return torch.cat(found).double().numpy()


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
    """Distinct non-empty cells as text, and the index of each row's cell among them; −1 for an empty cell."""
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


def _stated(name: str, stated: Any) -> tuple[str, bool, Bounds | None]:
    """Parse what ``numeric`` states of a column: word of :data:`STATED` or "", whether bounds are dates, bounds."""
    parts = [stated] if isinstance(stated, str) else list(stated or [])
    word = parts.pop() if parts and parts[-1] in STATED else ""
    if not parts:
        return word, False, None
    dates = [isinstance(part, str | datetime.date) for part in parts]
    with contextlib.suppress(TypeError, ValueError):
        low, high = (
            days_of(str(part)) if is_date else float(part) for part, is_date in zip(parts, dates, strict=True)
        )
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return word, all(dates), (low, high)
    raise InputError(
        f"numeric: {name!r} has {stated!r}; expected [low, high], numbers or dates, perhaps with one of "
        f"{', '.join(STATED)}"
    )


def _common_values(table: Columns, name: str) -> tuple[str, ...]:
    """Most frequent values of a public column; values that occur once share the last category."""
    words, places = _different(table.read(name))
    counts = Counter(places[places >= 0].tolist())
    kept = [words[place] for place, count in counts.most_common(_MOST_VALUES) if count > 1]
    return tuple(sorted(kept))


def _range(numbers: NDArray[np.float64]) -> Bounds:
    finite = numbers[np.isfinite(numbers)].clip(-_LARGEST, _LARGEST)
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    stretch = _STRETCH * (high - low) or 0.5 * max(1.0, abs(low))
    return low - stretch, high + stretch
