"""Texts, or vectors of a model, in tables with a label and perhaps a person and an id for each record."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_int
from pl_privknn.config import as_group
from pl_privknn.datamodules.columns import Columns
from pl_privknn.datamodules.datasets import ImageStore, TensorImages, digest_of, rows_below
from pl_privknn.datamodules.schema import check_texts
from pl_privknn.datamodules.tables import LabeledTables
from pl_privknn.features.text import TextExtractor, WordLlamaFeatures
from pl_privknn.privacy.partitions import PaidNames
from pl_privknn.privacy.records import is_ours
from pl_privknn.privacy.redaction import redacted

_SHOWN = 240  # characters of a public text on a report


class TextDataModule(LabeledTables):
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
    embeddings: vectors of d numbers take the place of images. Where the column holds vectors (lists
    of floats, as the toolkits of foundation models write them), these are taken as they are. No log, message, cache
    or checkpoint holds a text. A run's folder holds the first 400 characters of public texts about which a query was
    asked, for its report.

    Labels may be text, truth values or whole numbers of any type (``1.0`` is ``1``); an empty one and NaN mean
    "not known". The classes come from the test and public parts, or from ``classes``; where neither has labels, the
    private part does, and that their names may be known is a condition of the guarantee. Records
    without text, label or person, or with NaN in their vector, are left out (``unusable``).

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
        features: a :class:`~pl_privknn.features.text.TextExtractor`, or a function from one text to its vector. One
            of others is copied for each text, so that it keeps nothing of it for the next one, and that it computes a
            vector from one text alone is a condition of the guarantee.
            None: :class:`~pl_privknn.features.text.WordLlamaFeatures`.
        names: release class names that are not stated, at a cost in ε, instead of reading private records; see
            :meth:`~pl_privknn.recommendation.recommend.Recommendation.with_names`.
        longest: characters of a text that are read; what follows is cut off.
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
        ((256,), [0, 1])
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
        names: PaidNames | None = None,
        longest: int = 100_000,
        encoding: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._text = text
        self.longest = check_int("longest", longest)
        columns = {"text": text, "label": label, "person": person, "id": id}
        self._take(root, (private, public, test, val, predict), columns, encoding)
        table = redacted(self._table, "public" if self._has("public") else "private", "text")
        self.holds_vectors = table.is_vectors(text)
        self._embed: Any = None
        if self.holds_vectors:
            if features is not None:
                raise InputError(
                    f"features: the column {text!r} holds vectors, which are taken as they are; leave it out"
                )
            width = redacted(table.width, text)
        else:
            redacted(check_texts, table, text, self._has("public"))
            self._embed = WordLlamaFeatures() if features is None else features
            if not self._embeds_apart:
                name = getattr(features, "__name__", type(features).__name__)
                self.conditions = (*self.conditions, f"{name} computes a vector from one text alone")
            width = self._embedded(["text"]).shape[1]
        self.names = None if names is None else as_group("names", names, PaidNames())
        classes = self._name_classes(classes)
        super().__init__(
            num_classes=len(classes),
            image_shape=(width,),
            class_names=classes,
            public="images" if self._has("public") else "none",
            **kwargs,
        )

    def shown_texts(self, part: str, examples: Tensor) -> list[str] | None:
        """See :meth:`PrivatePublicDataModule.shown_texts`; None where the column holds vectors."""
        if self.holds_vectors or not len(examples):
            return None
        column = self._table(part, "text").read(self._text)
        rows = rows_below(getattr(self, part).store, examples)
        return [str(column[row].as_py())[:_SHOWN] for row in rows.tolist()]

    def _records(self, part: str) -> tuple[ImageStore, Tensor | None, dict[str, Tensor]]:
        table, faults = self._table(part, "text"), dict[str, Tensor]()
        if self.holds_vectors:
            rows = table.vectors(self._text)
            store = TensorImages(rows)
        else:
            rows, faults["no text"], digests = self._embedded_texts(part, table)
            store = _VectorsOfTexts(rows, digests)
        if rows.shape[1:] != self.image_shape:
            raise InputError(f"{part}: other vectors than the public ones; embed all parts by the same model")
        faults["NaN or infinite values"] = ~torch.isfinite(rows).all(1)
        return store, self._known_labels(part), faults

    def _embedded_texts(self, part: str, table: Columns) -> tuple[Tensor, Tensor, list[bytes]]:
        """Vectors of texts, which texts are empty, and a digest of each."""
        rows, empty, digests = [torch.zeros(0, self.image_shape[0])], [], []
        for texts in table.texts(self._text):
            texts = [text[: self.longest] for text in texts]
            digests += [digest_of(text.encode()) for text in texts]
            full = [place for place, text in enumerate(texts) if text and not text.isspace()]
            rows.append(torch.zeros(len(texts), self.image_shape[0]))
            if full:
                rows[-1][full] = self._embedded([texts[place] for place in full])
            empty += [not text or text.isspace() for text in texts]
        return torch.cat(rows), torch.tensor(empty, dtype=torch.bool), digests

    def _embedded(self, texts: list[str]) -> Tensor:
        """Vectors of texts; a user's function gets one text at a time, each time as a fresh copy of itself."""
        if self._embeds_apart:
            return self._embed(texts)
        vectors = [self._vector(text) for text in texts]
        if len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1:
            raise InputError(
                "features: expected a function that gives one vector, of the same length, for each text"
            )
        return torch.stack(vectors)

    @property
    def _embeds_apart(self) -> bool:
        """Whether the extractor is of this package, and so computes each vector from its own text."""
        return isinstance(self._embed, TextExtractor) and is_ours(self._embed)

    def _vector(self, text: str) -> Tensor:
        """Vector of a text by a function of others, or by a text extractor of others."""
        function = self._embed
        with contextlib.suppress(Exception):  # locks, sessions and open files can't be copied
            function = copy.deepcopy(function)
        found = function([text])[0] if isinstance(function, TextExtractor) else function(text)
        return torch.as_tensor(np.asarray(found), dtype=torch.float32)


class _VectorsOfTexts(TensorImages):
    """Vectors of texts, compared by the texts: some models give anagrams one vector."""

    def __init__(self, images: Tensor, digests: list[bytes]) -> None:
        super().__init__(images)
        self._digests = digests

    def digests(self, indices: Tensor) -> list[bytes]:
        """See :meth:`ImageStore.digests`; of the texts."""
        return [self._digests[row] for row in indices.tolist()]
