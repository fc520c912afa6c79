"""Reader of tables: columns of texts, words, vectors and numbers, from files and objects in memory.

No message quotes what a file holds: :func:`reading_table` converts errors of numpy, pyarrow and json into one line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import InputError

#: Endings of files with columns.
TABLES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".arrow", ".feather")

_SEPARATORS = ",;\t|"
_PARSED_AT_ONCE = 2**31 - 1  # bytes of a CSV file, and so of its longest cell
_END = "\x1e"  # cells of a row behind the last one, which an open quote swallows
_FIRST_ROWS = 1024
_WITH_NAMES = ("with_format", "__arrow_c_stream__", "columns")  # attributes of tables that name their columns
_DAYS = (-719_161, 2_932_895)  # from 1970 to the second day of year 1 and to the last but one of 9999
_TEXTS_AT_A_TIME = 1024


# What operating systems, file servers, office programs and archives leave in folders, besides names that begin with a
# dot or with ~$.
_SYSTEM = {"__macosx", "@eadir", "desktop.ini", "thumbs.db", "$recycle.bin", "system volume information"}


def is_shown(name: str) -> bool:
    """Whether an entry of a folder is a user's file, and not a hidden or system one, by its name."""
    return not name.startswith((".", "~$")) and name.lower() not in _SYSTEM


def entries(folder: str | Path) -> list[Path]:
    """Entries of a folder that are shown, in the order of their names; none where there is no folder."""
    return sorted(path for path in Path(folder).glob("*") if is_shown(path.name))


class MissingFileError(FileNotFoundError, InputError):
    """Raised where a file of records is missing."""


class FaultError(ValueError):
    """Raised for a faulty file; the message holds no content of the file."""


@contextlib.contextmanager
def reading_table(
    named: str, remedy: str = "text in UTF-8, or name another encoding by encoding="
) -> Iterator[None]:
    """Convert errors of reading a file or an object into one line, without a library's text.

    Args:
        named: what messages call it.
        remedy: how to write it again.
    """
    try:
        yield
    except FaultError as error:
        raise InputError(f"{named} can't be read: {error}") from None
    # Of a damaged header numpy raises whatever its tokenizer does; texts of pyarrow and json quote a row.
    except Exception as error:
        raise InputError(
            f"{named} can't be read ({type(error).__name__}); write it again, {remedy}"
        ) from None


def check_file(named: str, path: Path, endings: Sequence[str]) -> None:
    """Raise ``ValueError`` for a file with another ending, ``FileNotFoundError`` where there is none."""
    if path.suffix.lower() not in endings:
        raise InputError(f"{named}: expected a {', '.join(endings[:-1])} or {endings[-1]} file")
    if not path.is_file():
        raise MissingFileError(f"{named}: no such file (working directory: {Path.cwd()})")


# ---------------------------------------------------------------------------- columns


class Columns:
    """Columns of a file, or of an object in memory, with the name of its argument for messages.

    Args:
        name: of the argument; where it begins with ``private``, messages name no row and no other column.
        source: a path, a ``datasets.Dataset``, an object that gives an Arrow stream, a mapping of columns, an older
            data frame, or a list (a torch data set) of mappings, or of tuples of the wanted columns.
        wanted: columns that are looked for: a CSV file's separator is found by them, others may be passed over.
        encoding: of text files; None finds UTF-8 and UTF-16.
        every: whether other columns are wanted too.

    Attributes:
        named: what messages call it.
        names: of its columns.
        from_keys: whether the names are the keys of all rows, instead of those of a header.
        groups: numbers of rows in the row groups of a Parquet file, which is read by column and row group.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for anything else, or a damaged file.
    """

    def __init__(
        self,
        name: str,
        source: Any,
        wanted: Sequence[str] = (),
        encoding: str | None = None,
        every: bool = False,
    ) -> None:
        self.named, self._public, self._wanted = name, not name.startswith("private"), wanted
        self._every = every
        self.from_keys = False
        self.groups: list[int] = []
        self._parquet: Path | None = None
        if isinstance(source, str | Path):
            self.named = f"{name}={str(source)!r}"
            check_file(self.named, Path(source), TABLES)
        with reading_table(self.named):
            self._table = self._opened(source, encoding)
            self.names: list[str] = list(self._table.schema.names)  # which may be no text

    def _opened(self, source: Any, encoding: str | None) -> Any:
        """Table of a file; of a Parquet file the schema alone."""
        if not isinstance(source, str | Path):
            has_names = any(hasattr(source, name) for name in _WITH_NAMES) or isinstance(source, Mapping)
            self.from_keys = not has_names and len(source) > 0 and isinstance(source[0], Mapping)
            return _table_of(source, self._wanted, self._every)
        path = Path(source)
        match path.suffix.lower():
            case ".parquet":
                self._parquet = path
                file = self._file()
                self.groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                return file.schema_arrow.empty_table()
            case ".arrow" | ".feather":
                return _arrow(path)
            case ".csv" | ".tsv":
                return self._csv(_decoded(path, encoding))
            case _:
                self.from_keys = True
                return self._json(_decoded(path, encoding))

    def _file(self) -> Any:
        """The Parquet file, opened anew: worker processes share no handle."""
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self._parquet, memory_map=True)

    def check(self, name: str, how: str) -> None:
        """Raise ``ValueError`` unless the column occurs exactly once; ``how`` tells the user how to name another."""
        if self.names.count(name) != 1:
            held = "more than one" if name in self.names else "no"
            # Without a header the first record is in its place.
            known = f"; it has {', '.join(self.names)}" if self._public else ""
            raise InputError(f"{self.named} has {held} column {name!r}{known}: name the right one {how}")

    def kind(self, name: str) -> str:
        """Type of a column in Arrow's words, such as ``"large_string"`` or ``"list<item: float>"``."""
        return str(self._table.schema.field(name).type)

    def is_vectors(self, name: str) -> bool:
        """Whether a column holds lists."""
        return self.kind(name).partition("<")[0].endswith("list")

    def read(self, name: str, group: int | None = None) -> Any:
        """A column, a chunked array of pyarrow; of a Parquet file perhaps one row group."""
        with reading_table(self.named):
            if self._parquet is None:
                column = self._table.column(name)
            else:
                groups = [*range(len(self.groups))] if group is None else [group]
                column = self._file().read_row_groups(groups, [name]).column(name)
                if len(column) != sum(self.groups[number] for number in groups):
                    raise EOFError
            column.validate(full=True)  # offsets of a damaged file lead anywhere in memory
            return _representable(column)

    def words(self, name: str) -> list[str]:
        """Labels, names or categories as text, see :func:`word_of`."""
        column = self.read(name)
        with reading_table(self.named):
            return list(map(word_of, column.to_pylist()))

    def texts(self, name: str) -> Iterator[list[str]]:
        """Yield texts in blocks; a missing text is empty."""
        if not any(kind in self.kind(name) for kind in ("string", "binary")):
            raise self.misfit(name, "texts")
        column = self.read(name)
        with reading_table(self.named):
            column = column.cast("large_string")
        for start in range(0, len(column), _TEXTS_AT_A_TIME):
            yield [text or "" for text in column[start : start + _TEXTS_AT_A_TIME].to_pylist()]

    def width(self, name: str) -> int:
        """Length of the first list of a column."""
        with reading_table(self.named):
            if self._parquet is None:
                first = self._table.column(name)
            else:
                first = next(self._file().iter_batches(_FIRST_ROWS, columns=[name]), self._table).column(name)
            first = first.drop_null()[:1]
        if not len(first):
            raise InputError(f"{self.named}: it is empty, or there is nothing in the first rows of {name!r}")
        return self._lists(name, first).shape[1]

    def vectors(self, name: str, group: int | None = None) -> Tensor:
        """Lists of floats, float32 ``(n, d)``, NaN where there is none; perhaps of one row group."""
        return self._lists(name, self.read(name, group))

    def _lists(self, name: str, column: Any) -> Tensor:
        import pyarrow.compute

        lengths = set[int]()
        if self.is_vectors(name) and pyarrow.types.is_floating(column.type.value_type):
            lengths = {*pyarrow.compute.list_value_length(column).unique().to_pylist()} - {None}
        if len(lengths) != 1 or lengths == {0}:
            raise self.misfit(name, "a list of equally many floats in each row")
        rows, start = np.full((len(column), lengths.pop()), np.nan, dtype=np.float32), 0
        for chunk in getattr(column, "chunks", [column]):
            known = chunk.is_valid().to_numpy(zero_copy_only=False)
            flat = chunk.drop_null().flatten().to_numpy(zero_copy_only=False)
            rows[start : start + len(chunk)][known] = flat.reshape(-1, rows.shape[1])
            start += len(chunk)
        return torch.from_numpy(rows)

    def misfit(self, name: str, wanted: str) -> ValueError:
        """Error of a column that holds something else."""
        held = f" holds {self.kind(name)}" if self._public else ""
        return InputError(f"{self.named}: the column {name!r}{held}; expected {wanted}")

    def _csv(self, text: str) -> Any:
        """Table of a CSV file with cells as text, by the separator that finds most wanted columns, else most."""
        import pyarrow.compute
        import pyarrow.csv

        if not text.strip():
            raise FaultError("it is empty; a header and rows are wanted")
        text = re.sub(r"\A[\r\n]*sep=.\r?\n", "", text)  # Excel's
        line = re.match(r"[\r\n]*([^\r\n]*)", text)[1]  # type: ignore[index]
        headers = {
            one: [name.strip() for name in next(csv.reader([line], delimiter=one, skipinitialspace=True))]
            for one in _SEPARATORS
        }
        wanted = {*self._wanted}
        separator = max(headers, key=lambda one: (len(wanted & {*headers[one]}), len(headers[one])))
        names = headers[separator]
        places = [str(place) for place in range(len(names))]
        if spaced := f"{separator} " in line:  # quotes behind spaces would be taken as they are
            text = re.sub(rf'{re.escape(separator)} +"(?!")', f'{separator}"', text)
        data = f"{text}\n{separator.join([_END] * len(names))}\n".encode()
        del text  # as long as the file
        faults: list[int] = []

        def note(row: Any) -> str:
            faults.append(row.number)
            return "skip"

        block = min(len(data), _PARSED_AT_ONCE)
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(data),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=block, column_names=places),
            pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=note),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(places, pyarrow.large_string())),
        )
        if table[-1][-1].as_py() != _END:
            faults.append(len(table))
        if faults:
            raise self._fault(
                "row", faults[0], "has more or fewer cells than the header, or a quote without end"
            )
        cells = table[1:-1].columns
        if spaced:
            cells = [pyarrow.compute.utf8_ltrim(column, " ") for column in cells]
        return pyarrow.table(cells, names)

    def _json(self, text: str) -> Any:
        """Table of a JSON file: one object per line, or a list of objects."""
        rows = json.loads(text) if text.lstrip()[:1] == "[" else []
        for number, line in enumerate(text.split("\n") if not rows else [], 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError:
                raise self._fault("line", number, "is no JSON") from None
        if not rows:
            raise EOFError
        if not all(isinstance(row, dict) for row in rows):
            raise TypeError
        return _of_rows(rows, () if self._every else self._wanted)

    def _fault(self, what: str, number: int, fault: str) -> FaultError:
        where = f"{what} {number}" if self._public else f"some {what}"
        return FaultError(f"{where} {fault}; correct it")


def _representable(column: Any) -> Any:
    """Column whose timestamps and days have values in Python: microseconds, from year 1 to 9999.

    Each cell is cut by itself: an error would reveal that a private record has such a cell.
    """
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_timestamp(kind):
        of_day = 86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        whole, found = pyarrow.int64(), pyarrow.timestamp("us", kind.tz)
    elif pyarrow.types.is_date32(kind):
        of_day, whole, found = 1, pyarrow.int32(), kind
    else:
        return column
    numbers = column.cast(whole)
    if of_day < 10**13:  # 64 bits of nanoseconds are within these years
        for bound, of in zip(_DAYS, ("max_element_wise", "min_element_wise"), strict=True):
            limit = pyarrow.scalar(bound * of_day, whole)
            numbers = getattr(pyarrow.compute, of)(numbers, limit, skip_nulls=False)
    return numbers.cast(kind).cast(found, safe=False)


def _table_of(source: Any, wanted: Sequence[str], every: bool) -> Any:
    """Arrow table of an object in memory."""
    if hasattr(source, "with_format"):  # datasets.Dataset
        return source.with_format("arrow")[:]
    if hasattr(source, "__arrow_c_stream__"):  # tables of pyarrow, and data frames
        import pyarrow

        with contextlib.suppress(Exception):  # columns of several types, which are read as text below
            return pyarrow.table(source)
    if hasattr(source, "columns") or isinstance(source, Mapping):  # old data frames
        names = list(source if isinstance(source, Mapping) else source.columns)
        return _as_table({name: list(source[name]) for name in names if every or name in wanted})
    items = [source[place] for place in range(len(source))]
    if not all(isinstance(item, Mapping) for item in items):
        items = [dict(zip(wanted, item, strict=False)) for item in items]
    return _of_rows(items, () if every else wanted)


def _of_rows(rows: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> Any:
    names = {name for row in rows for name in row}
    return _as_table({name: [row.get(name) for row in rows] for name in sorted(names & {*wanted} or names)})


def _as_table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Arrow table of columns of vectors, or of values that are read as text."""
    import pyarrow

    made = []
    for values in columns.values():
        if any(isinstance(value, list | tuple | np.ndarray) for value in values):
            made.append(pyarrow.array(values, pyarrow.list_(pyarrow.float32())))
        else:  # half a surrogate is no text
            words = [word_of(value).encode("utf-8", "replace").decode() for value in values]
            made.append(pyarrow.array(words, pyarrow.large_string()))
    return pyarrow.table(made, names=list(columns))


def _arrow(path: Path) -> Any:
    """Arrow table of a file or stream in the format of ``datasets``."""
    import pyarrow

    try:
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


def _decoded(path: Path, encoding: str | None) -> str:
    """Text of a file, by its first bytes UTF-16 or UTF-8, with or without a mark."""
    data = path.read_bytes()
    found = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}.get(data[:2])
    found = found or {b"\0": "utf-16-be"}.get(data[:1]) or {b"\0": "utf-16-le"}.get(data[1:2])
    return str(data, encoding or found or "utf-8-sig")


def word_of(value: Any) -> str:
    """Label or name as text, independent of its type in a file; empty where it is not known."""
    if value is None or value is np.ma.masked or value != value:
        return ""
    word = value.decode() if isinstance(value, bytes) else str(value)
    if (whole := re.fullmatch(r"(-?\d+)\.0+", word)) is not None:
        return whole[1]
    return "" if word.isspace() or word in ("nan", "NaN") else word
