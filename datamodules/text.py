"""Texts, or vectors of a model, in tables with a label and perhaps a person and an id for each record."""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_installed, check_int
from pl_privknn.datamodules.base import CLASSES_ARE_PUBLIC, PrivatePublicDataModule, check_unlike
from pl_privknn.datamodules.datasets import (
    ImageStore,
    LabeledImages,
    PublicDataset,
    TensorImages,
    digest_of,
    first_of_each,
    rows_below,
)
from pl_privknn.datamodules.tables import word_of
from pl_privknn.features.text import TextExtractor, WordLlamaFeatures
from pl_privknn.privacy.redaction import redacted

#: Endings of files that hold a table of texts.
TABLES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".arrow", ".feather")
PARTS = ("private", "public", "test", "val", "predict")
_ROWS_AT_ONCE = 1024
_LONGEST_CELL = 2**31 - 1
_SEPARATORS = ",;\t|"
_MOST_FOUND = 1000  # classes that may be found in a private column
_SHOWN = 400  # characters of a public text on a report


class TextDataModule(PrivatePublicDataModule):
    """Private, public and test texts with their labels, from files in a folder or from tables.

    A folder holds ``private``, ``public`` and ``test`` (and, if wanted, ``val`` and ``predict``), each a
    ``.parquet``, ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` or ``.arrow`` file with a column of texts and one of
    labels. In a ``.csv`` file a header names the columns, which commas, semicolons, tabs or bars separate. The public
    part and ``predict`` may do without labels. A part may also be given by itself: a file, a ``datasets.Dataset``, a
    pyarrow table, a data frame, a mapping of columns, or a list (a torch data set) of mappings or of pairs of a text
    and a label; ``TextDataModule(**splits)`` takes a ``datasets.DatasetDict`` with these splits.

    One labelled table is enough: without a public part (``root`` is a file, or only ``private`` is given) nothing is
    learned from public texts.

    ``features`` turns each text into a vector, once, when its part is loaded. From then on the module is one of
    embeddings: vectors of d numbers take the place of images, ``(d, 1, 1)``. Where the column holds vectors (lists
    of floats, as the toolkits of foundation models write them), these are taken as they are. No log, message, cache
    or checkpoint holds a text. A run's folder holds the first 400 characters of public texts about which a query was
    asked, for its report.

    Labels may be text, truth values or whole numbers of any type (``1.0`` is ``1``); an empty one and NaN mean
    "not known". The classes come from the test and public parts, or from ``classes``; where neither has labels, the
    private part does, and that their names may be known is a condition of the guarantee. Records
    without text, label or person, or with NaN in their vector, are left out (``unusable``), and private rows that are
    equal in all columns named here count once.

    Args:
        root: the folder, or the file of the private part.
        private: the private part, in the place of a file in the folder; likewise the others.
        public: the public part; ``"none"`` for none.
        test: the test part.
        val: a validation part, instead of public records with known labels.
        predict: records to predict, instead of the test part.
        text: the column of texts, or of vectors.
        label: the column of labels; in the public part an empty one means "not known".
        person: the column that says whom a private record belongs to, text or whole numbers:
            :attr:`~pl_privknn.datamodules.base.PrivatePublicDataModule.private_groups`. None: records
            are not assigned to persons.
        id: the column of lasting names of private records, each different: ``private_ids``.
        classes: names of the classes, in the order of their numbers. By default those in the test and public parts,
            sorted.
        features: a :class:`~pl_privknn.features.text.TextExtractor`, or a function from one text to its vector.
            None: :class:`~pl_privknn.features.text.WordLlamaFeatures`.
        longest: characters that a text may have; longer ones are refused.
        encoding: of text files, such as ``"latin-1"`` or ``"cp1252"``. None: UTF-8, or UTF-16 where a file begins so.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Attributes:
        holds_vectors: whether the column holds vectors.

    Raises:
        FileNotFoundError: if a part is missing.
        ImportError: where pyarrow, or what ``features`` needs, is not installed.
        ValueError: if a file can't be read, a column is missing, or values do not fit. Messages hold no text, no
            label and no person of a record.

    Example:
        >>> import pyarrow
        >>> from pl_privknn.datamodules import TextDataModule
        >>> table = pyarrow.table({"text": ["a b", "c d"], "label": ["left", "right"]})
        >>> other = pyarrow.table({"text": ["a", "d"]})
        >>> data = TextDataModule(private=table, public=other, classes=["left", "right"])
        >>> data.setup("fit")
        >>> data.image_shape, data.private.labels.tolist()
        ((256, 1, 1), [0, 1])
    """

    leaves_out: ClassVar[str] = "without a text, a label or a person, or with NaN or infinite values,"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        private: Any = None,
        public: Any = None,
        test: Any = None,
        val: Any = None,
        predict: Any = None,
        text: str = "text",
        label: str = "label",
        person: str | None = None,
        id: str | None = None,
        classes: Sequence[str] | None = None,
        features: TextExtractor | Callable[[str], Any] | None = None,
        longest: int = 100_000,
        encoding: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = dict(zip(PARTS, (private, public, test, val, predict), strict=True))
        found: dict[str, Any] = {} if root is None else files_in(root)
        if root is not None and Path(root).is_file():
            found = {"private": root}
        self._sources = {**found, **{part: source for part, source in given.items() if source is not None}}
        none = isinstance(public, str) and public == "none"
        if none:
            del self._sources["public"]
        for part in PARTS[: 1 if none or root is None or found.get("private") is root else 2]:
            if part not in self._sources:
                raise FileNotFoundError(
                    f"root={None if root is None else str(root)!r}: there is no {part} part; expected {part} with "
                    f"one of {', '.join(TABLES)}, or pass {part}="
                )
        _check_apart(self._sources)
        self._columns = {"text": text, "label": label, "person": person, "id": id}
        self.longest = check_int("longest", longest)
        self._encoding = encoding
        self._opened: dict[str, Columns] = {}
        first = "public" if "public" in self._sources else "private"
        kind = redacted(self._column, first, "text").type
        for column in ("person", "id") if first == "private" else ():
            if self._columns[column] is not None:
                redacted(self._column, first, column)  # a name that is not there is found now
        self.holds_vectors = "list" in str(kind)
        self._embed: Any = None
        if self.holds_vectors:
            if features is not None:
                raise ValueError(
                    f"features: the column {text!r} holds vectors, which are taken as they are; leave it out"
                )
            width = redacted(self._table_of_vectors, first).shape[1]
        else:
            self._embed = WordLlamaFeatures() if features is None else features
            width = self._embedded(["text"]).shape[1]
        known = [part for part in ("test", "public") if self._has_label(part)]
        names = self._classes(known) if classes is None else [word_of(name) for name in classes]
        super().__init__(
            num_classes=len(names),
            image_shape=(width, 1, 1),
            class_names=names,
            public="images" if "public" in self._sources else "none",
            **kwargs,
        )
        if classes is None and not known:
            self.conditions = (CLASSES_ARE_PUBLIC,)

    def setup(self, stage: str | None = None) -> None:
        """See :meth:`PrivatePublicDataModule.setup`; no table stays open."""
        try:
            super().setup(stage)
        finally:
            self._opened.clear()

    def load_private(self) -> LabeledImages:
        """The private texts as vectors, their labels, persons and ids."""
        return redacted(self._labeled, "private")

    def load_public(self) -> PublicDataset:
        """The public texts as vectors, with their labels where there are any."""
        truth = self._labels("public") if self._has_label("public") else None
        store, faults = self._vectors("public")
        return PublicDataset(store, self.num_classes, truth).chosen(self._usable("public", faults))

    def load_test(self) -> LabeledImages:
        """The test texts as vectors and their labels, or an empty set."""
        if "test" not in self._sources:
            return LabeledImages.none(self.image_shape, self.num_classes)
        return self._labeled("test")

    def load_validation(self) -> LabeledImages | None:
        """The validation part, if there is one."""
        return self._labeled("val") if "val" in self._sources else None

    def load_predict(self) -> ImageStore | None:
        """The records to predict, if there are any."""
        if "predict" not in self._sources:
            return None
        store, faults = self._vectors("predict")
        self._usable("predict", faults)
        return store

    def public_texts(self, examples: Tensor) -> list[str] | None:
        """The beginnings of public texts, for a report; None where there are none."""
        if self.holds_vectors or not self.has_public:
            return None
        column, rows = self._column("public", "text"), rows_below(self.public.store, examples)
        return [str(column[row].as_py())[:_SHOWN] for row in rows.tolist()]

    def _labeled(self, part: str) -> LabeledImages:
        store, faults = self._vectors(part)
        labels = self._labels(part)
        faults["no label"] = labels < 0
        numbers: dict[str, Tensor] = {}
        for column in ("person", "id") if part == "private" else ():
            if self._columns[column] is not None:
                words = self._words(part, column)
                faults[f"no {column}"] = torch.tensor([not word for word in words], dtype=torch.bool)
                numbers[column] = torch.tensor([lasting_number(word) for word in words], dtype=torch.int64)
        rows = self._usable(part, faults)
        if part == "private":  # a copy of a record is not another record
            keys = (of[rows].tolist() for of in (labels, *numbers.values()))
            rows = rows[first_of_each(zip(store.digests(rows), *keys, strict=True))]
            self.private_groups, self.private_ids = (
                numbers[column][rows] if column in numbers else None for column in ("person", "id")
            )
            if self.private_ids is not None and len(self.private_ids.unique()) < len(rows):
                raise ValueError("private: some ids occur more than once; give each record its own")
        return LabeledImages(store, labels.clamp(min=0), self.num_classes).chosen(rows)

    # ------------------------------------------------------------------ columns

    def _table(self, part: str) -> Columns:
        if part not in self._opened:
            wanted = [name for name in self._columns.values() if name]
            self._opened[part] = Columns(part, self._sources[part], wanted, self._encoding)
        return self._opened[part]

    def _column(self, part: str, column: str) -> Any:
        """A column of a part, a chunked array of pyarrow."""
        table, name = self._table(part), str(self._columns[column])
        if table.names.count(name) != 1:
            held = "no" if name not in table.names else "more than one"
            # Without a header the first record is in its place.
            known = "" if part == "private" else f"; it has {', '.join(table.names)}"
            raise ValueError(
                f"{table.named} has {held} column {name!r}{known}: name the right one by {column}= "
                f"(--{column}), as in the first line of the file"
            )
        return table.read(name)

    def _has_label(self, part: str) -> bool:
        return part in self._sources and self._columns["label"] in self._table(part).names

    def _words(self, part: str, column: str) -> list[str]:
        """A column of text or numbers as text; missing values are empty."""
        values = self._column(part, column)
        with reading(self._table(part).named):
            return list(map(word_of, values.to_pylist()))

    def _classes(self, known: list[str]) -> list[str]:
        """Labels of test and public parts; those of the private one where these have none."""
        tables = (redacted(self._words, part, "label") for part in known or ["private"])
        found = {word for words in tables for word in words} - {""}
        if not 2 <= len(found) <= (len(found) if known else _MOST_FOUND):
            count = len(found) if known else f"fewer than 2, or more than {_MOST_FOUND},"
            raise ValueError(
                f"classes: the {'test and public parts have' if known else 'private part has'} {count} classes in "
                f"the column {self._columns['label']!r}; name the classes by classes="
            )
        names = sorted(
            found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
        )
        return check_unlike(names, "classes", bool(known))

    def _labels(self, part: str) -> Tensor:
        """Numbers of the classes, -1 where a label is not known."""
        numbers = {"": -1} | {name: number for number, name in enumerate(self.class_names)}
        words = self._words(part, "label")
        if not set(words) <= numbers.keys():
            raise ValueError(
                f"{part}: some labels are none of the classes {', '.join(self.class_names)}; correct them, or name "
                "all classes by classes="
            )
        return torch.tensor([numbers[word] for word in words], dtype=torch.int64)

    # ------------------------------------------------------------------ vectors

    def _vectors(self, part: str) -> tuple[TensorImages, dict[str, Tensor]]:
        """The vectors of a part, and which of its records have what fault."""
        faults: dict[str, Tensor] = {}
        if self.holds_vectors:
            rows = self._table_of_vectors(part)
            store = TensorImages(rows[:, :, None, None])
        else:
            rows, faults["no text"], digests = self._texts_as_vectors(part)
            store = _VectorsOfTexts(rows[:, :, None, None], digests)
        if rows.shape[1:] != self.image_shape[:1]:
            raise ValueError(f"{part}: other vectors than the public ones; embed all parts by the same model")
        faults["NaN or infinite values"] = ~torch.isfinite(rows).all(1)
        return store, faults

    def _table_of_vectors(self, part: str) -> Tensor:
        column = self._column(part, "text").combine_chunks()
        known, lengths = column.drop_null(), set()
        if "list" in str(column.type):
            lengths = set(known.value_lengths().to_numpy(zero_copy_only=False).tolist())
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(
                f"{part}: expected a list of equally many floats in each row of {self._columns['text']!r}"
            )
        flat = np.array(known.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
        rows = torch.full((len(column), lengths.pop()), torch.nan)
        rows[torch.from_numpy(column.is_valid().to_numpy(zero_copy_only=False))] = torch.from_numpy(
            flat
        ).view(len(known), -1)
        return rows

    def _texts_as_vectors(self, part: str) -> tuple[Tensor, Tensor, list[bytes]]:
        """Vectors, which texts are empty, and a digest of each."""
        column, table = self._column(part, "text"), self._table(part)
        if not any(kind in str(column.type) for kind in ("string", "binary")):
            held = "" if part == "private" else f" holds {column.type}"
            raise ValueError(f"{table.named}: the column {self._columns['text']!r}{held}; expected texts")
        with reading(table.named):
            column = column.cast("large_string")
        rows, empty, digests = torch.zeros(len(column), self.image_shape[0]), [], []
        for start in range(0, len(column), _ROWS_AT_ONCE):
            with reading(table.named):
                texts = [text or "" for text in column[start : start + _ROWS_AT_ONCE].to_pylist()]
            if max(map(len, texts)) > self.longest:
                raise ValueError(
                    f"{part}: some texts have more than longest={self.longest} characters; cut them, or raise longest"
                )
            digests += [digest_of(text.encode()) for text in texts]
            empty += [not text or text.isspace() for text in texts]
            full = [place for place, text in enumerate(texts) if text and not text.isspace()]
            if full:
                rows[[start + place for place in full]] = self._embedded([texts[place] for place in full])
        return rows, torch.tensor(empty, dtype=torch.bool), digests

    def _embedded(self, texts: list[str]) -> Tensor:
        """Vectors of texts; a user's function gets one text at a time, so that none can depend on another."""
        if isinstance(self._embed, TextExtractor):
            return self._embed(texts)
        vectors = [torch.as_tensor(np.asarray(self._embed(text)), dtype=torch.float32) for text in texts]
        if len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1:
            raise ValueError(
                "features: expected a function that gives one vector, of the same length, for each text"
            )
        return torch.stack(vectors)


class _VectorsOfTexts(TensorImages):
    """Vectors of texts, compared by the texts: some models give anagrams one vector."""

    def __init__(self, images: Tensor, digests: list[bytes]) -> None:
        super().__init__(images)
        self._digests = digests

    def digests(self, indices: Tensor) -> list[bytes]:
        """See :meth:`ImageStore.digests`; of the texts."""
        return [self._digests[row] for row in indices.tolist()]


def files_in(root: str | Path) -> dict[str, Path]:
    """The file of each part in a folder of tables; empty where there is none.

    Raises:
        ValueError: where a part has two files.
    """
    found: dict[str, Path] = {}
    for path in sorted(Path(root).glob("*")):
        if path.stem in PARTS and path.suffix.lower() in TABLES:
            if path.stem in found:
                raise ValueError(
                    f"root={str(root)!r}: {found[path.stem].name} and {path.name}; keep one of them"
                )
            found[path.stem] = path
    return found


def lasting_number(word: str) -> int:
    """A number from 0 for a name: whole numbers are kept, other names give 63 bits of their digest."""
    with contextlib.suppress(ValueError):
        if str(number := int(word)) == word and 0 <= number < 2**63:
            return number
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") >> 1


def _check_apart(sources: dict[str, Any]) -> None:
    """Refuse a part that is equal to another one."""
    parts = list(sources)
    for place, one in enumerate(parts):
        for other in parts[place + 1 :]:
            first, second = sources[one], sources[other]
            files = all(
                isinstance(source, str | Path) and os.path.exists(source) for source in (first, second)
            )
            if first is second or (files and os.path.samefile(first, second)):
                raise ValueError(f"{one}, {other}: both are the same table; every record belongs to one part")


class Columns:
    """The columns of a file or table, under the name of its part.

    Args:
        part: for messages.
        source: a path, a ``datasets.Dataset``, or an object that gives an Arrow stream.
        wanted: columns that are looked for.
        encoding: of text files; None finds UTF-8 and UTF-16.

    Attributes:
        named: what messages call it.
        names: of its columns.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: without pyarrow.
        ValueError: for anything else, or a damaged file.
    """

    def __init__(self, part: str, source: Any, wanted: Sequence[str], encoding: str | None = None) -> None:
        check_installed(f"{part}, a table of texts,", "text", "pyarrow")
        if not isinstance(source, str | Path):
            self.named = part
            with reading(self.named):
                self._table = _table_of(source, wanted)
        else:
            path, self.named = Path(source), f"{part}={str(source)!r}"
            if not path.is_file():
                raise FileNotFoundError(f"{self.named}: no such file (working directory: {Path.cwd()})")
            if path.suffix.lower() not in TABLES:
                raise ValueError(f"{self.named}: expected a file of one of the kinds {', '.join(TABLES)}")
            with reading(self.named, part != "private"):
                self._table = _READERS[path.suffix.lower()](path, wanted, encoding)
        with reading(self.named):  # names may be no text
            schema = self._table.schema_arrow if self._is_parquet else self._table.schema
            self.names: list[str] = list(schema.names)

    @property
    def _is_parquet(self) -> bool:
        return hasattr(self._table, "schema_arrow")

    def read(self, name: str) -> Any:
        """A column, a chunked array of pyarrow."""
        with reading(self.named):
            column = (self._table.read([name]) if self._is_parquet else self._table).column(name)
            column.validate(full=True)  # offsets of a damaged file lead anywhere in memory
            if self._is_parquet and len(column) != self._table.metadata.num_rows:
                raise EOFError
            return column


class _UnreadableLineError(ValueError):
    """Raised for a line that is not of a table; names the fault and the line number, without content."""


@contextlib.contextmanager
def reading(named: str, public: bool = False) -> Iterator[None]:
    """Convert errors of reading a table into one line, without a library's text about values.

    Args:
        named: what messages call it.
        public: whether numbers of lines may be shown.
    """
    try:
        yield
    except _UnreadableLineError as error:
        what, line = error.args
        where = f"line {line}" if public else "some line"
        raise ValueError(f"{named} can't be read: {where} {what}; correct it") from None
    except Exception as error:  # of pyarrow, json, or the file system; their texts may quote a row
        raise ValueError(
            f"{named} can't be read ({type(error).__name__}); write it again, text in UTF-8, or name another "
            "encoding by encoding="
        ) from None


def _table_of(source: Any, wanted: Sequence[str]) -> Any:
    if hasattr(source, "with_format"):  # datasets.Dataset
        return source.with_format("arrow")[:]
    if hasattr(source, "__arrow_c_stream__"):  # tables of pyarrow, and data frames
        with contextlib.suppress(Exception):  # columns of several types, which are read as text below
            return importlib.import_module("pyarrow").table(source)
    if hasattr(source, "columns") or isinstance(source, Mapping):  # old data frames
        names = list(source if isinstance(source, Mapping) else source.columns)
        return _as_table({name: list(source[name]) for name in names if name in wanted})
    items = [source[place] for place in range(len(source))]
    if not all(isinstance(item, Mapping) for item in items):
        items = [dict(zip(wanted, item, strict=False)) for item in items]
    return _of_rows(items, wanted)


def _of_rows(rows: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> Any:
    names = {name for row in rows for name in row}
    return _as_table({name: [row.get(name) for row in rows] for name in sorted(names & {*wanted} or names)})


def _as_table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Columns of vectors, or of what is taken as text."""
    arrow: Any = importlib.import_module("pyarrow")
    made = []
    for values in columns.values():
        if any(isinstance(value, list | tuple | np.ndarray) for value in values):
            made.append(arrow.array(values))
        else:  # half a surrogate is no text
            words = [word_of(value).encode("utf-8", "replace").decode() for value in values]
            made.append(arrow.array(words, arrow.large_string()))
    return arrow.Table.from_arrays(made, names=list(columns))


def _parquet(path: Path, wanted: Sequence[str], encoding: str | None) -> Any:
    return importlib.import_module("pyarrow.parquet").ParquetFile(path, memory_map=True)


def _arrow(path: Path, wanted: Sequence[str], encoding: str | None) -> Any:
    """A file, or a stream, as ``datasets`` writes it."""
    arrow: Any = importlib.import_module("pyarrow")
    file = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_file(file).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()


def _encoding(path: Path) -> str:
    """Encoding by the first bytes: UTF-16 or UTF-8, with or without a mark."""
    with path.open("rb") as file:
        first = file.read(3)
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    return {b"\0": "utf-16-be", b"": "utf-8"}.get(first[:1]) or (
        "utf-16-le" if first[1:2] == b"\0" else "utf-8-sig"
    )


def _csv(path: Path, wanted: Sequence[str], encoding: str | None) -> Any:
    """Cells as text, with the separator that gives the most wanted columns in the header, else the most columns."""
    arrow: Any = importlib.import_module("pyarrow")
    csv.field_size_limit(_LONGEST_CELL)

    def lines(file: Any, separator: str) -> Any:
        return csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)

    found: dict[str, list[str]] = {}
    for separator in _SEPARATORS:
        with (
            contextlib.suppress(csv.Error),
            path.open(newline="", encoding=encoding or _encoding(path)) as file,
        ):
            found[separator] = [name.strip() for name in next(filter(None, lines(file, separator)))]
    separator = max(found, key=lambda one: (len({*found[one]} & {*wanted}), len(found[one])))
    names = found[separator]
    places = [place for place, name in enumerate(names) if name in wanted] or range(len(names))
    columns: list[list[str]] = [[] for _ in places]
    with path.open(newline="", encoding=encoding or _encoding(path)) as file:
        rows = lines(file, separator)
        full = filter(None, rows)
        next(full)
        try:
            for row in full:
                if len(row) < len(names) or any(row[len(names) :]):
                    raise _UnreadableLineError("has more or fewer cells than the header", rows.line_num)
                for column, place in zip(columns, places, strict=True):
                    column.append(row[place])
        except csv.Error:
            raise _UnreadableLineError(
                "has a quote that does not end or is not doubled", rows.line_num
            ) from None
    made = [arrow.array(column, arrow.large_string()) for column in columns]
    return arrow.Table.from_arrays(made, names=[names[place] for place in places])


def _json(path: Path, wanted: Sequence[str], encoding: str | None) -> Any:
    """An object in each line, or one list of them."""
    text = path.read_text(encoding=encoding or _encoding(path))
    if text.lstrip()[:1] == "[":
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            with contextlib.suppress(ValueError):
                if line and not line.isspace():
                    rows.append(json.loads(line))
                continue
            raise _UnreadableLineError("is no JSON", number)
    if not rows:
        raise EOFError
    if not all(isinstance(row, dict) for row in rows):
        raise TypeError
    return _of_rows(rows, wanted)


_READERS: dict[str, Callable[[Path, Sequence[str], str | None], Any]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
}
