"""Texts, or vectors of a model, in tables with a label and perhaps a person and an id for each record."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import ImageStore, LabeledImages, PublicDataset, TensorImages
from pl_privknn.features.text import TextExtractor, WordLlamaFeatures
from pl_privknn.privacy.redaction import redacted

#: Endings of files that hold a table of texts.
TABLES = (".parquet", ".csv", ".jsonl", ".arrow", ".feather")
PARTS = ("private", "public", "test", "val", "predict")
_ROWS_AT_ONCE = 1024
_LARGEST_BLOCK = 2**31 - 1  # of a CSV file: a record lies in one block
_SHOWN = 400  # characters of a public text on a report


class TextDataModule(PrivatePublicDataModule):
    """Private, public and test texts with their labels, from files in a folder or from tables.

    A folder holds ``private``, ``public`` and ``test`` (and, if wanted, ``val`` and ``predict``), each a
    ``.parquet``, ``.csv``, ``.jsonl`` or ``.arrow`` file with a column of texts and one of labels. The public part
    and ``predict`` may do without labels. A part may also be given by itself: a file, a ``datasets.Dataset``, a
    pyarrow table or a data frame; ``TextDataModule(**splits)`` takes a ``datasets.DatasetDict`` with these splits.

    ``features`` turns each text into a vector, once, when its part is loaded. From then on the module is one of
    embeddings: vectors of d numbers stand where images would be, ``(d, 1, 1)``. Where the column holds vectors (lists
    of floats, as the toolkits of foundation models write them), these are taken as they are. No log, message, cache
    or checkpoint holds a text. A run's folder holds the first 400 characters of public texts about which a query was
    asked, for its report.

    Labels may be text or numbers. The test and public parts tell the classes, or ``classes`` does, never the private
    part: nobody is told of a class that no private record has.

    Args:
        root: the folder.
        private: the private part, in the place of a file in the folder; likewise the others.
        public: the public part.
        test: the test part.
        val: a validation part, instead of public records with known labels.
        predict: records to predict, instead of the test part.
        text: the column of texts, or of vectors.
        label: the column of labels; in the public part an empty one stands for "not known".
        person: the column that says whom a private record belongs to, text or whole numbers:
            :attr:`~pl_privknn.datamodules.base.PrivatePublicDataModule.private_groups`. None: nobody's records are
            told apart.
        id: the column of lasting names of private records, each different: ``private_ids``.
        classes: names of the classes, in the order of their numbers. By default those in the test and public parts,
            sorted.
        features: a :class:`~pl_privknn.features.text.TextExtractor`, or a function from one text to its vector.
            None: :class:`~pl_privknn.features.text.WordLlamaFeatures`.
        longest: characters that a text may have; longer ones are refused.
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
        **kwargs: Any,
    ) -> None:
        given = dict(zip(PARTS, (private, public, test, val, predict), strict=True))
        found = {} if root is None else files_in(root)
        self._sources = {**found, **{part: source for part, source in given.items() if source is not None}}
        for part in PARTS[:2]:
            if part not in self._sources:
                raise FileNotFoundError(
                    f"root={None if root is None else str(root)!r}: there is no {part} part; want {part} with one of "
                    f"{', '.join(TABLES)}, or pass {part}="
                )
        _check_apart(self._sources)
        self._columns = {"text": text, "label": label, "person": person, "id": id}
        self.longest = check_int("longest", longest)
        self._opened: dict[str, Columns] = {}
        kind = self._column("public", "text").type
        self.holds_vectors = "list" in str(kind)
        self._embed: Any = None
        if self.holds_vectors:
            if features is not None:
                raise ValueError(
                    f"features: the column {text!r} holds vectors, which are taken as they are; leave it out"
                )
            width = self._table_of_vectors("public", slice(0, 1)).shape[1]
        else:
            self._embed = WordLlamaFeatures() if features is None else features
            width = self._embedded(["text"]).shape[1]
        names = self._classes() if classes is None else [str(name) for name in classes]
        super().__init__(num_classes=len(names), image_shape=(width, 1, 1), class_names=names, **kwargs)

    def setup(self, stage: str | None = None) -> None:
        """See :meth:`PrivatePublicDataModule.setup`; no table stays open."""
        try:
            super().setup(stage)
        finally:
            self._opened.clear()

    def load_private(self) -> LabeledImages:
        """The private texts as vectors, their labels, persons and ids."""
        found = redacted(self._labeled, "private")
        for column, place in (("person", "private_groups"), ("id", "private_ids")):
            if self._columns[column] is not None:
                setattr(self, place, redacted(self._numbers, column))
        return found

    def load_public(self) -> PublicDataset:
        """The public texts as vectors, with their labels where there are any."""
        truth = self._labels("public") if self._has_label("public") else None
        return PublicDataset(self._store("public"), self.num_classes, truth)

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
        return self._store("predict") if "predict" in self._sources else None

    def public_texts(self, examples: Tensor) -> list[str] | None:
        """The beginnings of public texts, for a report; None where the public part holds vectors."""
        if self.holds_vectors:
            return None
        column = self._column("public", "text")
        return [str(column[row].as_py())[:_SHOWN] for row in examples.tolist()]

    def _labeled(self, part: str) -> LabeledImages:
        return LabeledImages(self._store(part), self._labels(part), self.num_classes)

    # ------------------------------------------------------------------ columns

    def _table(self, part: str) -> Columns:
        if part not in self._opened:
            self._opened[part] = Columns(
                part, self._sources[part], [name for name in self._columns.values() if name]
            )
        return self._opened[part]

    def _column(self, part: str, column: str) -> Any:
        """A column of a part, a chunked array of pyarrow."""
        table, name = self._table(part), self._columns[column]
        if name not in table.names:
            raise ValueError(
                f"{table.named} has no column {name!r}; it has {', '.join(table.names)}: name the right one by "
                f"{column}="
            )
        return table.read(name)

    def _has_label(self, part: str) -> bool:
        return part in self._sources and self._columns["label"] in self._table(part).names

    def _words(self, part: str, column: str) -> list[str]:
        """A column of text or numbers as text; empty where nothing stands."""
        values = self._column(part, column)
        with reading(self._table(part).named):
            return [word or "" for word in values.cast("string").to_pylist()]

    def _classes(self) -> list[str]:
        found: set[str] = set()
        for part in ("test", "public"):
            if self._has_label(part):
                found |= set(self._words(part, "label")) - {""}
        if len(found) < 2:
            raise ValueError(
                f"classes: the test and public parts tell {len(found)} classes in the column "
                f"{self._columns['label']!r}; name the classes by classes="
            )
        return sorted(
            found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
        )

    def _labels(self, part: str) -> Tensor:
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if part == "public":
            numbers[""] = -1
        words = self._words(part, "label")
        if not set(words) <= numbers.keys():
            raise ValueError(
                f"{part}: some labels are empty or none of the classes {', '.join(self.class_names)}; label or leave "
                "out those records, or name all classes by classes="
            )
        return torch.tensor([numbers[word] for word in words], dtype=torch.int64)

    def _numbers(self, column: str) -> Tensor:
        """A number for each person, or record, of the private part, that is always the same."""
        words = self._words("private", column)
        if "" in words:
            raise ValueError(f"private: some records have no {column}; give it to them, or leave them out")
        if column == "id" and len(set(words)) < len(words):
            raise ValueError("private: some ids occur more than once; give each record its own")
        return torch.tensor([lasting_number(word) for word in words], dtype=torch.int64)

    # ------------------------------------------------------------------ vectors

    def _store(self, part: str) -> TensorImages:
        rows = self._table_of_vectors(part) if self.holds_vectors else self._texts_as_vectors(part)
        if rows.shape[1:] != self.image_shape[:1]:
            raise ValueError(f"{part}: other vectors than the public ones; embed all parts by the same model")
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"{part}: some vectors hold NaN or infinite values; leave those records out")
        return TensorImages(rows[:, :, None, None])

    def _table_of_vectors(self, part: str, rows: slice = slice(None)) -> Tensor:
        column, lengths = self._column(part, "text")[rows].combine_chunks(), set()
        if "list" in str(column.type) and not column.null_count:
            lengths = set(column.value_lengths().to_numpy(zero_copy_only=False).tolist())
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(
                f"{part}: want a list of equally many floats in each row of {self._columns['text']!r}"
            )
        flat = np.array(column.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
        return torch.from_numpy(flat).view(len(column), -1)

    def _texts_as_vectors(self, part: str) -> Tensor:
        column, named = self._column(part, "text"), self._table(part).named
        if not any(kind in str(column.type) for kind in ("string", "binary")):
            raise ValueError(f"{named}: the column {self._columns['text']!r} holds {column.type}; want texts")
        with reading(named):
            column = column.cast("large_string")
        parts = [torch.empty(0, self.image_shape[0])]
        for start in range(0, len(column), _ROWS_AT_ONCE):
            with reading(named):
                texts = column[start : start + _ROWS_AT_ONCE].to_pylist()
            if not all(text and not text.isspace() for text in texts):
                raise ValueError(f"{part}: some texts are empty; leave those records out")
            if max(map(len, texts)) > self.longest:
                raise ValueError(
                    f"{part}: some texts have more than longest={self.longest} characters; cut them, or raise longest"
                )
            parts.append(self._embedded(texts))
        return torch.cat(parts)

    def _embedded(self, texts: list[str]) -> Tensor:
        """Vectors of texts; a user's own function sees one text at a time, so that none can depend on another."""
        if isinstance(self._embed, TextExtractor):
            return self._embed(texts)
        vectors = [torch.as_tensor(np.asarray(self._embed(text)), dtype=torch.float32) for text in texts]
        if len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1:
            raise ValueError(
                "features: want a function that gives one vector, of the same length, for each text"
            )
        return torch.stack(vectors)


def files_in(root: str | Path) -> dict[str, Path]:
    """The file of each part in a folder of tables; empty where there is none.

    Raises:
        ValueError: where a part has two files.
    """
    found: dict[str, Path] = {}
    for path in sorted(Path(root).glob("*")):
        if path.stem in PARTS and path.suffix in TABLES:
            if path.stem in found:
                raise ValueError(
                    f"root={str(root)!r}: {found[path.stem].name} and {path.name}; keep one of them"
                )
            found[path.stem] = path
    return found


def lasting_number(word: str) -> int:
    """A number from 0 for a name: whole numbers stand for themselves, other names for 63 bits of their digest."""
    with contextlib.suppress(ValueError):
        if str(number := int(word)) == word and 0 <= number < 2**63:
            return number
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") >> 1


def _check_apart(sources: dict[str, Any]) -> None:
    """Refuse a part that is another one."""
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
        wanted: columns that are text in a CSV file, whatever stands there.

    Attributes:
        named: what messages call it.
        names: of its columns.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: without pyarrow.
        ValueError: for anything else, or a damaged file.
    """

    def __init__(self, part: str, source: Any, wanted: Sequence[str]) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise ImportError(f"{part}: tables of texts need pyarrow; pip install 'pl-privknn[text]'")
        if not isinstance(source, str | Path):
            self.named = part
            with reading(self.named):
                self._table = _table_of(source)
        else:
            path, self.named = Path(source), f"{part}={str(source)!r}"
            if not path.is_file():
                raise FileNotFoundError(f"{self.named}: there is no such file, seen from {Path.cwd()}")
            if path.suffix not in TABLES:
                raise ValueError(f"{self.named}: want a file of one of the kinds {', '.join(TABLES)}")
            with reading(self.named):
                self._table = _READERS[path.suffix](path, wanted)
        self.names: list[str] = list(
            self._table.schema_arrow.names if self._is_parquet else self._table.column_names
        )

    @property
    def _is_parquet(self) -> bool:
        return hasattr(self._table, "schema_arrow")

    def read(self, name: str) -> Any:
        """A column, a chunked array of pyarrow."""
        with reading(self.named):
            column = (self._table.read([name]) if self._is_parquet else self._table).column(name)
            column.validate(full=True)  # offsets of a damaged file lead anywhere in memory
            return column


@contextlib.contextmanager
def reading(named: str) -> Iterator[None]:
    """Errors of reading a table in one line, without what a library says of its values."""
    try:
        yield
    except Exception as error:  # of pyarrow, json, or the file system; their texts may quote a row
        raise ValueError(
            f"{named} can't be read ({type(error).__name__}); write it anew, text in UTF-8"
        ) from None


def _table_of(source: Any) -> Any:
    if hasattr(source, "with_format"):  # datasets.Dataset
        return source.with_format("arrow")[:]
    if hasattr(source, "__arrow_c_stream__"):  # tables of pyarrow, and data frames
        return importlib.import_module("pyarrow").table(source)
    raise TypeError


def _parquet(path: Path, wanted: Sequence[str]) -> Any:
    return importlib.import_module("pyarrow.parquet").ParquetFile(path, memory_map=True)


def _arrow(path: Path, wanted: Sequence[str]) -> Any:
    """A file, or a stream, as ``datasets`` writes it."""
    arrow: Any = importlib.import_module("pyarrow")
    file = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_file(file).read_all()
    except arrow.ArrowInvalid:
        return arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()


def _csv(path: Path, wanted: Sequence[str]) -> Any:
    csv: Any = importlib.import_module("pyarrow.csv")
    return csv.read_csv(
        path,
        csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), _LARGEST_BLOCK)),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(column_types=dict.fromkeys(wanted, importlib.import_module("pyarrow").string())),
    )


def _jsonl(path: Path, wanted: Sequence[str]) -> Any:
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if not line.isspace()]
    if not rows:
        raise EOFError
    names = {name for row in rows for name in row}
    return importlib.import_module("pyarrow").table(
        {name: [row.get(name) for row in rows] for name in sorted(names & {*wanted}) or sorted(names)}
    )


_READERS: dict[str, Callable[[Path, Sequence[str]], Any]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".csv": _csv,
    ".jsonl": _jsonl,
}
