"""Texts, or vectors of a model, in tables with a label and perhaps a person and an id for each record."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_int
from pl_privknn.datamodules.base import CLASSES_ARE_PUBLIC, OwnDataModule, check_unlike
from pl_privknn.datamodules.columns import TABLES, Columns, word_of
from pl_privknn.datamodules.datasets import ImageStore, LabeledImages, TensorImages, digest_of, rows_below
from pl_privknn.features.text import TextExtractor, WordLlamaFeatures
from pl_privknn.privacy.redaction import redacted

PARTS = ("private", "public", "test", "val", "predict")
_MOST_FOUND = 1000  # classes that may be found in a private column
_SHOWN = 400  # characters of a public text on a report


class TextDataModule(OwnDataModule):
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
        ImportError: where what ``features`` needs is not installed.
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

    copies_are_one: ClassVar[bool] = True
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
        alone = root is not None and Path(root).is_file()
        found: dict[str, Any] = {"private": root} if alone else {} if root is None else files_in(root)
        given = dict(zip(PARTS, (private, public, test, val, predict), strict=True))
        self._sources = {**found, **{part: source for part, source in given.items() if source is not None}}
        none = isinstance(public, str) and public == "none"
        if none:
            del self._sources["public"]
        for part in PARTS[: 1 if none or root is None or alone else 2]:
            if part not in self._sources:
                raise FileNotFoundError(
                    f"root={None if root is None else str(root)!r}: there is no {part} part; expected {part} with "
                    f"one of {', '.join(TABLES)}, or pass {part}="
                )
        _check_apart(self._sources)
        self._text = text
        self._columns = {"text": text, "label": label, "person": person, "id": id}
        self.longest = check_int("longest", longest)
        self._encoding, self._tables = encoding, dict[str, Columns]()
        first = "public" if self._has("public") else "private"
        table = redacted(self._table, first, "text")
        for column in ("person", "id") if first == "private" else ():
            if self._columns[column] is not None:
                self._table(first, column)  # a name that is not there is found now
        self.holds_vectors = table.is_vectors(text)
        self._embed: Any = None
        if self.holds_vectors:
            if features is not None:
                raise InputError(
                    f"features: the column {text!r} holds vectors, which are taken as they are; leave it out"
                )
            width = redacted(table.width, text)
        else:
            self._embed = WordLlamaFeatures() if features is None else features
            width = self._embedded(["text"]).shape[1]
        known = [part for part in ("test", "public") if self._has_label(part)]
        names = self._classes(known) if classes is None else [word_of(name) for name in classes]
        super().__init__(
            num_classes=len(names),
            image_shape=(width, 1, 1),
            class_names=names,
            public="images" if self._has("public") else "none",
            **kwargs,
        )
        if classes is None and not known:
            self.conditions = (CLASSES_ARE_PUBLIC,)

    def setup(self, stage: str | None = None) -> None:
        """See :meth:`PrivatePublicDataModule.setup`; no table stays open."""
        try:
            super().setup(stage)
        finally:
            self._tables.clear()

    def public_texts(self, examples: Tensor) -> list[str] | None:
        """The beginnings of public texts, for a report; None where there are none."""
        if self.holds_vectors or not self.has_public:
            return None
        column = self._table("public", "text").read(self._text)
        return [str(column[row].as_py())[:_SHOWN] for row in rows_below(self.public.store, examples).tolist()]

    def _has(self, part: str) -> bool:
        return part in self._sources

    def _records(self, part: str) -> tuple[ImageStore, Tensor | None, dict[str, Tensor]]:
        table, faults = self._table(part, "text"), dict[str, Tensor]()
        if self.holds_vectors:
            rows = table.vectors(self._text)
            store = TensorImages(rows[:, :, None, None])
        else:
            rows, faults["no text"], digests = self._embedded_texts(part, table)
            store = _VectorsOfTexts(rows[:, :, None, None], digests)
        if rows.shape[1:] != self.image_shape[:1]:
            raise InputError(f"{part}: other vectors than the public ones; embed all parts by the same model")
        faults["NaN or infinite values"] = ~torch.isfinite(rows).all(1)
        unlabeled = part == "predict" or (part == "public" and not self._has_label(part))
        return store, None if unlabeled else self._labels(part), faults

    def _numbers(self, faults: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for column, name in (("person", "private_groups"), ("id", "private_ids")):
            if self._columns[column] is not None:
                words = self._words("private", column)
                faults[f"no {column}"] = torch.tensor([not word for word in words], dtype=torch.bool)
                found[name] = torch.tensor([lasting_number(word) for word in words], dtype=torch.int64)
        return found

    def load_private(self) -> LabeledImages:
        """The private texts as vectors, their labels, persons and ids."""
        found = super().load_private()
        if self.private_ids is not None and len(self.private_ids.unique()) < len(found):
            raise InputError("private: some ids occur more than once; give each record its own")
        return found

    # ------------------------------------------------------------------ columns

    def _table(self, part: str, column: str = "") -> Columns:
        """The table of a part, which is refused unless it has the column that an argument names."""
        if part not in self._tables:
            wanted = [name for name in self._columns.values() if name]
            self._tables[part] = Columns(part, self._sources[part], wanted, self._encoding)
        if column:
            how = f"by {column}= (--{column}), as in the first line of the file"
            self._tables[part].check(str(self._columns[column]), how)
        return self._tables[part]

    def _has_label(self, part: str) -> bool:
        return self._has(part) and self._columns["label"] in self._table(part).names

    def _words(self, part: str, column: str) -> list[str]:
        """A column of text or numbers as text; missing values are empty."""
        return self._table(part, column).words(str(self._columns[column]))

    def _classes(self, known: list[str]) -> list[str]:
        """Labels of test and public parts; those of the private one where these have none."""
        tables = (redacted(self._words, part, "label") for part in known or ["private"])
        found = {word for words in tables for word in words} - {""}
        if not 2 <= len(found) <= (len(found) if known else _MOST_FOUND):
            count = len(found) if known else f"fewer than 2, or more than {_MOST_FOUND},"
            raise InputError(
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
            raise InputError(
                f"{part}: some labels are none of the classes {', '.join(self.class_names)}; correct them, or name "
                "all classes by classes="
            )
        return torch.tensor([numbers[word] for word in words], dtype=torch.int64)

    # ------------------------------------------------------------------ texts

    def _embedded_texts(self, part: str, table: Columns) -> tuple[Tensor, Tensor, list[bytes]]:
        """Vectors of texts, which texts are empty, and a digest of each."""
        rows, empty, digests = [torch.zeros(0, self.image_shape[0])], [], []
        for texts in table.texts(self._text):
            if max(map(len, texts)) > self.longest:
                raise InputError(
                    f"{part}: some texts have more than longest={self.longest} characters; cut them, or raise longest"
                )
            digests += [digest_of(text.encode()) for text in texts]
            full = [place for place, text in enumerate(texts) if text and not text.isspace()]
            rows.append(torch.zeros(len(texts), self.image_shape[0]))
            if full:
                rows[-1][full] = self._embedded([texts[place] for place in full])
            empty += [not text or text.isspace() for text in texts]
        return torch.cat(rows), torch.tensor(empty, dtype=torch.bool), digests

    def _embedded(self, texts: list[str]) -> Tensor:
        """Vectors of texts; a user's function gets one text at a time, so that none can depend on another."""
        if isinstance(self._embed, TextExtractor):
            return self._embed(texts)
        vectors = [torch.as_tensor(np.asarray(self._embed(text)), dtype=torch.float32) for text in texts]
        if len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1:
            raise InputError(
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
                raise InputError(
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
    """Refuse a part that is another one too."""
    found: dict[Any, str] = {}
    for part, source in sources.items():
        place = Path(source).resolve() if isinstance(source, str | Path) else id(source)
        if (other := found.setdefault(place, part)) != part:
            raise InputError(f"{other}, {part}: both are the same table; every record belongs to one part")
