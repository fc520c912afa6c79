"""Data module of tables of numbers and categories, and the base of all modules of tables with a label column."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn._checks import InputError
from pl_privknn.config import as_group
from pl_privknn.datamodules.base import CLASSES_ARE_PUBLIC, UNKNOWN, OwnDataModule, check_unlike
from pl_privknn.datamodules.cells import kinds_of_noisy_counts
from pl_privknn.datamodules.columns import TABLES, Columns, entries, word_of
from pl_privknn.datamodules.datasets import (
    ImageStore,
    LabeledImages,
    PublicDataset,
    TensorImages,
    rows_below,
)
from pl_privknn.datamodules.schema import (
    Schema,
    cell_numbers,
    identifiers,
    schema_of,
    words_of,
)
from pl_privknn.features.base import forget_features
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.partitions import PaidNames, UnnamedRecords
from pl_privknn.privacy.public_rows import DrawnRows, PublicRows, Release
from pl_privknn.privacy.redaction import redacted

PARTS = ("private", "public", "test", "val", "predict")
#: The condition of a run whose column kinds neither public rows nor an argument tell.
KINDS_ARE_PUBLIC = (
    "the kinds of the columns (numbers, dates, truth values, categories), which were read from private rows, may "
    "become public; state them by numeric= and categorical= (--bounds) to avoid it"
)
#: The condition of a run whose columns are the keys of private records.
KEYS_ARE_PUBLIC = (
    "the names of the columns, which are the keys of the private records, may become public; write the records as "
    "CSV or Parquet to avoid it"
)
#: File of a run's folder: drawn public rows, as a table.
PUBLIC_ROWS = "public_rows.csv"
_MOST_FOUND = 1000  # classes that may be found in a private column


class LabeledTables(OwnDataModule):
    """Base class of data modules of tables with a column of labels, and perhaps of persons and ids.

    A subclass calls :meth:`_take` and :meth:`_name_classes` before this class's constructor.
    """

    keeps_others: ClassVar[bool] = False  # whether columns are read that no argument names

    def _take(
        self,
        root: str | Path | None,
        parts: Sequence[Any],
        columns: Mapping[str, str | None],
        encoding: str | None,
    ) -> None:
        """Find the parts, in the order of :data:`PARTS`, and refuse a file or table that two parts share."""
        alone = root is not None and Path(root).is_file()
        found: dict[str, Any] = {"private": root} if alone else {} if root is None else files_in(root)
        given = dict(zip(PARTS, parts, strict=True))
        self._sources = {**found, **{part: source for part, source in given.items() if source is not None}}
        none = isinstance(given["public"], str) and given["public"] == "none"
        if none:
            del self._sources["public"]
        for part in PARTS[: 1 if none or root is None or alone or self.keeps_others else 2]:
            if part not in self._sources:
                raise FileNotFoundError(
                    f"root={None if root is None else str(root)!r}: there is no {part} part; expected {part} with "
                    f"one of {', '.join(TABLES)}, or pass {part}="
                )
        _check_apart(self._sources)
        self._columns, self._encoding, self._tables = dict(columns), encoding, dict[str, Columns]()
        first = "public" if self._has("public") else "private"
        if redacted(self._table, first).from_keys and first == "private":
            self.conditions = (*self.conditions, KEYS_ARE_PUBLIC)
        for column in ("person", "id") if first == "private" else ():
            if self._columns[column] is not None:
                self._table(first, column)  # a name that is not there is found now

    def _name_classes(self, classes: Sequence[str] | None) -> list[str]:
        """Names of the classes: as given, or from the test and public parts, or from the private part."""
        known = [part for part in ("test", "public") if self._has_label(part)]
        if classes is None and not known and self.names is not None and not self._has("public"):
            self.names, self.owes_names = dataclasses.replace(self.names, classes=True), True
            return list(UNKNOWN)
        if classes is None and not known:
            self.conditions = (*self.conditions, CLASSES_ARE_PUBLIC)
        return self._classes(known) if classes is None else [word_of(name) for name in classes]

    def setup(self, stage: str | None = None) -> None:
        """See :meth:`PrivatePublicDataModule.setup`; no table stays open."""
        try:
            super().setup(stage)
        finally:
            self._tables.clear()

    def _has(self, part: str) -> bool:
        return part in self._sources

    def _known_labels(self, part: str) -> Tensor | None:
        """Labels of a part; None where a part needs no labels and has none."""
        unlabeled = part == "predict" or (part == "public" and not self._has_label(part))
        return None if unlabeled else self._labels(part)

    def _numbers(self, faults: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for column, name in (("person", "private_groups"), ("id", "private_ids")):
            if self._columns[column] is not None:
                words = self._words("private", column)
                faults[f"no {column}"] = torch.tensor([not word for word in words], dtype=torch.bool)
                found[name] = torch.tensor([lasting_number(word) for word in words], dtype=torch.int64)
        return found

    def load_private(self) -> LabeledImages:
        """The private records, their labels, persons and ids."""
        found = super().load_private()
        if self.private_ids is not None and len(self.private_ids.unique()) < len(found):
            raise InputError("private: some ids occur more than once; give each record its own")
        return found

    def unnamed_records(self, unit: str) -> UnnamedRecords:
        """See :meth:`PrivatePublicDataModule.unnamed_records`."""
        assert self.names is not None
        classes, table = self._words("private", "label"), self._table("private")
        cells = [cell_numbers(table, name) for name in self.names.columns]
        values = [words_of(table, name) for name in self.names.categories]
        if unit != "person":
            return UnnamedRecords(classes, cells, values)
        persons = self._words("private", "person")
        known = torch.tensor([bool(word) for word in persons], dtype=torch.bool)
        owners = torch.tensor([lasting_number(word) for word in persons if word], dtype=torch.int64)
        kept = [
            [word for word, person in zip(words, persons, strict=True) if person]
            for words in (classes, *values)
        ]
        return UnnamedRecords(kept[0], [(column[known], size) for column, size in cells], kept[1:], owners)

    def arguments_of(self, released: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
        """See :meth:`PrivatePublicDataModule.arguments_of`."""
        found: dict[str, Any] = {"names": self.names}
        if "classes" in released:
            found["classes"] = in_order(released["classes"])
        return found

    def _table(self, part: str, column: str = "") -> Columns:
        """Columns of a part; raises unless they include the column that an argument names."""
        if part not in self._tables:
            wanted = [name for name in self._columns.values() if name]
            self._tables[part] = Columns(part, self._sources[part], wanted, self._encoding, self.keeps_others)
        if column:
            how = f"by {column}= (--{column}), as in the first line of the file"
            self._tables[part].check(str(self._columns[column]), how)
        return self._tables[part]

    def _has_label(self, part: str) -> bool:
        return self._has(part) and self._columns["label"] in self._table(part).names

    def _words(self, part: str, column: str) -> list[str]:
        """Column of text or numbers as text; missing values are empty."""
        return self._table(part, column).words(str(self._columns[column]))

    def _classes(self, known: list[str]) -> list[str]:
        """Labels of test and public parts; where these have none, labels of the private part."""
        tables = (redacted(self._words, part, "label") for part in known or ["private"])
        found = {word for words in tables for word in words} - {""}
        if not 2 <= len(found) <= (len(found) if known else _MOST_FOUND):
            count = len(found) if known else f"fewer than 2, or more than {_MOST_FOUND},"
            raise InputError(
                f"classes: the {'test and public parts have' if known else 'private part has'} {count} classes in "
                f"the column {self._columns['label']!r}; name the classes by classes="
            )
        return check_unlike(in_order(found), "classes", bool(known))

    def _labels(self, part: str) -> Tensor:
        """Class indices of labels; -1 where a label is not known."""
        numbers = {"": -1} | {name: number for number, name in enumerate(self.class_names)}
        words = self._words(part, "label")
        if part == "private" and self.names is not None and self.names.classes:
            return torch.tensor([numbers.get(word, -1) for word in words], dtype=torch.int64)
        if not set(words) <= numbers.keys():
            raise InputError(
                f"{part}: some labels are none of the classes {', '.join(self.class_names)}; correct them, or name "
                "all classes by classes="
            )
        return torch.tensor([numbers[word] for word in words], dtype=torch.int64)


class TableDataModule(LabeledTables):
    """Private, public and test rows of numbers and categories, from files in a folder or from tables.

    Files, folders and objects are those of :class:`~pl_privknn.datamodules.TextDataModule`. Every column is a
    feature but those of labels, persons and ids, and identifiers: columns with a name like ``id``, and public columns
    of texts of which no two are equal.

    **Schema.** Kinds, bounds and values of columns come from ``numeric`` and ``categorical``, else from public rows.
    Without public rows the kinds alone are read from private ones, which is a condition of the guarantee; bounds that
    nobody states are paid for by the run, and categories that nobody states go to 16 buckets of a public hash. A
    number outside its bounds is clipped, a missing one has a coordinate of its own, and values that are not among a
    column's categories share one. No row is lost for an empty cell.

    Numbers may be written with groups of digits, a decimal comma, a currency or per cent sign; dates (ISO, or as in
    31.12.2020, 31/12/2020 or 12/31/2020, as the public rows show) become days. Texts that begin with 0, as codes do,
    are categories.

    **Public rows.** Without a public part the run pays for :class:`~pl_privknn.privacy.public_rows.PublicRows`, from
    which public rows are drawn before the first query: features are learned from them, and they are in the run's
    folder as ``public_rows.csv``.

    A row is a vector of one number a column, in the place of an image: numbers in [0, 1] between their
    bounds or −1, categories as numbers of values; :class:`~pl_privknn.features.TableFeatures` makes features of it. A
    text has 64, the coordinates of its unit vector by :class:`~pl_privknn.features.WordLlamaFeatures`.

    Args:
        root: the folder, or the file of the private part.
        private: the private part, in the place of a file in the folder; likewise the others.
        public: the public part; ``"none"`` for none.
        test: the test part.
        val: a validation part, instead of public records with known labels.
        predict: records to predict, instead of the test part.
        label: the column of labels.
        columns: the columns that are features; None: all others.
        numeric: bounds of columns of numbers or dates, as in ``{"age": (0, 120)}``; None where only the kind is
            stated, or a word in their place or behind them: "number", "decimal comma", "decimal point", "flag",
            "date", "day first" or "month first", as in ``{"since": ("2000-01-01", "2030-01-01", "month first")}``.
        categorical: values of columns of categories, as in ``{"region": ["north", "south"]}``; likewise.
        text: columns of texts.
        person: the column that says whom a private record belongs to.
        id: the column of lasting names of private records, each different.
        classes: names of the classes, in the order of their numbers; by default those in the test and public parts.
        public_rows: how public rows are drawn where there are none.
        names: pay for classes, and without public rows for kinds of columns, that nobody states, instead of reading
            them from private rows; see :meth:`~pl_privknn.recommendation.recommend.Recommendation.with_names`.
        encoding: of text files; None: UTF-8, or UTF-16 where a file begins so.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a part is missing.
        ValueError: if a file can't be read, a column is missing, or values do not fit. Messages hold no private cell.

    Example:
        >>> import pyarrow
        >>> table = pyarrow.table({"age": [30, 60, None], "region": ["north", "south", "south"], "label": [0, 1, 1]})
        >>> data = TableDataModule(
        ...     private=table, public=table.drop(["label"]), classes=["0", "1"], numeric={"age": (0, 120)}
        ... )
        >>> data.setup("fit")
        >>> data.private.images().tolist()
        [[0.25, 1.0], [0.5, 0.0], [-1.0, 0.0]]
    """

    leaves_out: ClassVar[str] = "without any cell, without a label or a person"
    keeps_others: ClassVar[bool] = True

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        private: Any = None,
        public: Any = None,
        test: Any = None,
        val: Any = None,
        predict: Any = None,
        label: str = "label",
        columns: Sequence[str] | None = None,
        numeric: Mapping[str, Any] | None = None,
        categorical: Mapping[str, Any] | None = None,
        text: str | Sequence[str] = (),
        person: str | None = None,
        id: str | None = None,
        classes: Sequence[str] | None = None,
        public_rows: PublicRows = PublicRows(),
        names: PaidNames | None = None,
        encoding: str | None = None,
        **kwargs: Any,
    ) -> None:
        named = {"label": label, "person": person, "id": id}
        self._take(root, (private, public, test, val, predict), named, encoding)
        self.public_rows = as_group("public_rows", public_rows, PublicRows())
        numeric, categorical = numeric or {}, categorical or {}
        self.numeric, self.categorical = dict(numeric), dict(categorical)
        texts = [text] if isinstance(text, str) else list(text)
        stated = {*numeric, *categorical, *texts}
        first = "public" if self._has("public") else "private"
        features, self.left_out = redacted(self._features, first, columns, stated)
        table, features = self._table(first), list(dict.fromkeys([*features, *texts]))
        unstated = [name for name in features if name not in stated] if first == "private" else []
        self.names = None if names is None else as_group("names", names, PaidNames())
        open_values = (
            [name for name in features if categorical.get(name, ()) is None] if first == "private" else []
        )
        if (unstated or open_values) and self.names is not None:
            self.names = dataclasses.replace(
                self.names, columns=tuple(unstated), categories=(*unstated, *open_values)
            )
            self.owes_names = True
            numeric = {**numeric, **dict.fromkeys(unstated)}
        paid_values = () if self.names is None or self.owes_names else self.names.categories
        self._known = _Known(
            redacted(schema_of, table, features, numeric, categorical, first == "public", texts, paid_values)
        )
        self._stated = self.schema  # what a run pays for follows from it, also where an earlier one has paid
        if unstated and self.names is None:
            self.conditions = (*self.conditions, KINDS_ARE_PUBLIC)
        classes = self._name_classes(classes)
        super().__init__(
            num_classes=len(classes), image_shape=(len(self.schema.columns),), class_names=classes, **kwargs
        )
        self._drawn: Tensor | None = None
        self._is_drawn = False
        if self.left_out:
            pl.rank_zero_info(
                f"columns: left out as identifiers: {', '.join(self.left_out)}; columns= (--columns) takes them"
            )

    @property
    def schema(self) -> Schema:
        """Schema of the feature columns; bounds that a run pays for are known after their release."""
        return self._known.schema

    @property
    def pays_for_public(self) -> bool:
        """Whether the run pays for public rows, because there is no public part."""
        return not self._has("public")

    @property
    def unbounded(self) -> int:
        """Number of columns whose bounds the plan pays for: those of unknown kind may all be numbers."""
        paid = () if self.names is None else self.names.columns
        others = (column for column in self._stated.columns if column.name not in paid)
        return len(paid) + Schema(tuple(others)).unbounded

    def arguments_of(self, released: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
        """See :meth:`PrivatePublicDataModule.arguments_of`."""
        found = super().arguments_of(released, budget)
        if "values" not in released:
            return found
        assert self.names is not None
        values = {
            name: sorted(counts, key=lambda value: (-counts[value], value))
            for name, counts in released["values"].items()
        }
        numeric = dict[str, Any]()
        categorical = {name: values[name] for name in values.keys() & self.categorical.keys()}
        cells = released.get("kinds", {})
        sigma = self.names.mechanisms(budget)["kinds"].sigma if cells else 1.0
        kinds = kinds_of_noisy_counts([*cells.values()], sigma) if cells else []
        for name, (kind, comma, month_first) in zip(cells, kinds, strict=True):
            if kind in ("category", "list"):
                categorical[name] = values[name]
            elif kind == "date":
                numeric[name] = "month first" if month_first else "day first"
            else:
                numeric[name] = "decimal comma" if comma else kind
        stated = self.numeric, self.categorical
        return {**found, "numeric": {**stated[0], **numeric}, "categorical": {**stated[1], **categorical}}

    def columns(self) -> list[dict[str, Any]]:
        """See :meth:`PrivatePublicDataModule.columns`."""
        return self.schema.to_list()

    def take_columns(self, columns: list[dict[str, Any]]) -> None:
        """See :meth:`PrivatePublicDataModule.take_columns`."""
        self._known.schema = Schema.of(columns)

    @property
    def public_is_blank(self) -> bool:
        """See :attr:`PrivatePublicDataModule.public_is_blank`."""
        return self.pays_for_public and not self._is_drawn

    def private_as_read(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Unscaled rows and their labels; see :meth:`PrivatePublicDataModule.private_as_read`."""
        yield _rows_in(self.private.store).nan_to_num(), self.private.labels

    def _features(
        self, part: str, columns: Sequence[str] | None, stated: set[str]
    ) -> tuple[list[str], list[str]]:
        """Columns that are features, and identifiers that are left out."""
        table, own = self._table(part), {*self._columns.values()}
        if columns is not None:
            return list(columns), []
        others = [name for name in table.names if name not in own]
        for name in {*others} if len({*others}) < len(others) else ():
            table.check(name, "by renaming one of them")
        if unknown := sorted(stated - {*others}):
            raise InputError(
                f"numeric, categorical, text: {table.named} has no column {unknown[0]!r} besides label, person and "
                "id; name columns as in the first line of the file"
            )
        left_out = [name for name in identifiers(table, others, part == "public") if name not in stated]
        return [name for name in others if name not in left_out], left_out

    def _records(self, part: str) -> tuple[ImageStore, Tensor | None, dict[str, Tensor]]:
        rows = self.schema.read(self._table(part), "by columns= (--columns)")
        faults = {"no cell": rows.isnan().all(dim=1)}
        return _Rows(rows, self._known, part), self._known_labels(part), faults

    def load_public(self) -> PublicDataset:
        """The public rows; rows of zeros, until the run has paid for others, where there are none."""
        if not self.pays_for_public:
            return super().load_public()
        self._drawn = torch.zeros(self.public_rows.rows, *self.image_shape)
        return PublicDataset(TensorImages(self._drawn), self.num_classes)

    # ------------------------------------------------------------------ public rows that a run pays for

    def public_plan(self, budget: Budget) -> list[Charge]:
        """See :meth:`PrivatePublicDataModule.public_plan`."""
        before = self.names_plan(budget)
        if not self.pays_for_public:
            return before
        left = super().budget_left(budget)
        return [*before, *self.public_rows.plan(left, len(self._stated.columns), self.unbounded)]

    def budget_left(self, budget: Budget) -> Budget:
        """See :meth:`PrivatePublicDataModule.budget_left`."""
        left = super().budget_left(budget)
        if not self.pays_for_public or left.epsilon is None:
            return left
        return self.public_rows.left(left, self.unbounded)

    def draw_public(self, budget: Budget, release: Release) -> DrawnRows:
        """See :meth:`PrivatePublicDataModule.draw_public`."""
        rows = self._stated.filled(_rows_in(self.private.store))
        owners = self.private_groups if budget.unit == "person" else None
        sizes, bounds, left = self._stated.sizes, self._stated.bounds, super().budget_left(budget)
        return self.public_rows.released(rows, owners, sizes, bounds, left, release, self.unbounded)

    def take_public(self, drawn: DrawnRows, folder: Path | None = None) -> None:
        """See :meth:`PrivatePublicDataModule.take_public`."""
        assert self._drawn is not None
        self._known.schema = self.schema.with_bounds(drawn.bounds)
        self._drawn.copy_(drawn.rows)
        self._is_drawn = True
        forget_features(self.public)
        if folder is not None:
            text = io.StringIO()
            csv.writer(text).writerows([self.schema.titles, *self.schema.words(drawn.rows)])
            write_durably(folder / PUBLIC_ROWS, text.getvalue())


class _Known:
    """The schema of all parts of a data module, whose bounds may become known later."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema


class _Rows(ImageStore):
    """Rows of a table as numbers, scaled by the bounds that are known when they are read."""

    def __init__(self, rows: Tensor, known: _Known, part: str) -> None:
        self.rows, self._known, self._part, self.shape = rows, known, part, (rows.shape[1],)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`.

        Raises:
            ValueError: before a run has paid for all bounds.
        """
        if self._known.schema.unbounded:
            raise InputError(
                f"{self._part}: the bounds of some columns are known once a run has paid for them; state them by "
                "numeric= (--bounds), or take those in columns.json of a run's folder by take_columns()"
            )
        return self._known.schema.scaled(self.rows[indices])


def _rows_in(store: Any) -> Tensor:
    """Unscaled rows of a store of :class:`_Rows`, perhaps of some of them."""
    places = rows_below(store, torch.arange(len(store)))
    while not isinstance(store, _Rows):
        store = store.store
    return store.rows[places]


def files_in(root: str | Path) -> dict[str, Path]:
    """The file of each part in a folder of tables; empty where there is none.

    Raises:
        ValueError: where a part has two files.
    """
    found: dict[str, Path] = {}
    for path in entries(root):
        if path.stem in PARTS and path.suffix.lower() in TABLES:
            if path.stem in found:
                raise InputError(
                    f"root={str(root)!r}: {found[path.stem].name} and {path.name}; keep one of them"
                )
            found[path.stem] = path
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """Names of classes: whole numbers first, by their size."""
    return sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


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
