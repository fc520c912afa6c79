"""Private records: the holder of private examples that labelers learn from, and the gate to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_int, shape_text
from pl_privknn._processes import ALONE, ProcessGroup, Shard
from pl_privknn.features.alone import COMPARED, Extract, kept_apart
from pl_privknn.features.base import at_once, extract_on
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.records import check_owners, records_drawn

# Of a table that is looked through for values that are not finite: 16 MB.
_VALUES_AT_A_TIME = 1 << 22
# Images of a batch, at most; the last one is filled up, which should take little time.
_IMAGES_AT_ONCE = 128
#: Allocates a float32 table of so many rows and columns; the rows are private.
Allocate = Callable[[int, int], Tensor]


class Examples(Protocol):
    """Protocol of private examples with their labels, as data modules hold them."""

    labels: Tensor
    num_classes: int

    @property
    def image_shape(self) -> Sequence[int]:
        """Shape of every example."""

    def __len__(self) -> int: ...

    def images(self, indices: Tensor) -> Tensor:
        """Examples at these positions, float32 ``(b, channels, height, width)``."""


class PrivateRecords:
    """Private records of this process as one extractor shows them: what :meth:`Labeler.fit` gets.

    A labeler pulls what it needs: a table of all feature vectors, or blocks of them, labels, owners, lasting numbers.
    Each vector is a function of its own record, so that a labeler's sensitivity is that of its rows. Everything here
    is **private** but :attr:`num_classes`, :attr:`unit`, :attr:`processes` and :attr:`public`.

    Args:
        examples: the records, of all processes or of this one alone (see ``shard``).
        extract: maps examples ``(b, channels, height, width)`` to vectors ``(b, d)``, each from its own example;
            see :func:`~pl_privknn.features.alone.kept_apart`.
        owners: person of each example, int64 ``(n,)``, where the unit of privacy is a person.
        ids: lasting numbers of the examples, int64 ``(n,)``, or None.
        rows: positions of the examples that this process holds; all if None.
        shard: place of this process's records among those of all processes; None where there is one process.
        public: gives the features of all public examples, float32 ``(m, d)``, on global rank 0.
        one_by_one: whether ``extract`` takes examples one after another, so that batches need not be of one size.
        allocate: see :data:`Allocate`; in memory by default.
        device: where labelers search; where their tensors lie if None. It changes the time, not an answer: what comes
            out is exact on every device (Ind-KNN's κ up to a last float32 digit).

    Attributes:
        num_classes: number of classes, or of attributes; a public constant.
        unit: unit of privacy, ``"person"`` where owners are given.
        shard: as given, like ``device``.
        labels: int64, shape ``(n,)``, values in ``[0, num_classes)``; of attributes ``(n, num_classes)``, 0 or 1.
        owners: of this process's records, or None.
        ids: of this process's records, or None.

    Example:
        >>> import torch
        >>> from pl_privknn import PrivateKNN, PrivateRecords
        >>> records = PrivateRecords.of(torch.rand(40, 4), torch.arange(40) % 2, num_classes=2)
        >>> PrivateKNN(k=5, sampling_rate=0.5).fit(records)
    """

    def __init__(
        self,
        examples: Examples,
        extract: Extract,
        *,
        owners: Tensor | None = None,
        ids: Tensor | None = None,
        rows: Tensor | None = None,
        shard: Shard | None = None,
        public: Callable[[], Tensor] | None = None,
        one_by_one: bool = False,
        allocate: Allocate | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.num_classes = examples.num_classes
        self.shard, self.device = shard, device
        self._examples: Examples | None = examples
        self._rows = torch.arange(len(examples)) if rows is None else rows
        if owners is not None:
            owners = check_owners(owners, len(examples))
        self.labels = examples.labels if rows is None else examples.labels[rows]
        self.owners = owners if owners is None or rows is None else owners[rows]
        self.ids = ids if ids is None or rows is None else ids[rows]
        self._extract = extract if one_by_one else functools.partial(in_full_batches, extract)
        self._public, self._allocate = public, allocate or _in_memory
        self._table: Tensor | None = None

    @classmethod
    def of(
        cls,
        features: Tensor,
        labels: Tensor,
        num_classes: int,
        *,
        owners: Tensor | None = None,
        ids: Tensor | None = None,
        shard: Shard | None = None,
        public: Tensor | None = None,
        examples: Tensor | None = None,
        device: torch.device | None = None,
    ) -> PrivateRecords:
        """Make records of feature vectors that exist already, as in tests and notebooks.

        Args:
            features: float, shape ``(n, d)``, finite.
            labels: int64, shape ``(n,)`` in ``[0, num_classes)``; of attributes ``(n, num_classes)``, 0 or 1.
            num_classes: number of classes, or of attributes; a public constant.
            owners: person of each record, int64 ``(n,)``, where the unit of privacy is a person.
            ids: lasting numbers of the records, int64 ``(n,)``.
            shard: place of these records among those of all processes.
            public: features of all public examples, float ``(m, d)``.
            examples: what the features were computed from, shape ``(n, …)``, by which records are recognised.
            device: see the class.

        Raises:
            ValueError: for shapes, dtypes or labels that do not fit; the message shows no value of a record.
        """
        check_table(features, labels, num_classes)
        records: PrivateRecords = cls.__new__(cls)
        records.num_classes, records.shard, records.labels, records.ids = num_classes, shard, labels, ids
        records.device = device
        records.owners = None if owners is None else check_owners(owners, len(labels))
        records._rows = torch.arange(len(labels))
        records._table, records._allocate = features, _in_memory
        records._public = None if public is None else lambda: public
        records._examples = None if examples is None else _Tensors(examples, labels, num_classes)
        return records

    def __len__(self) -> int:
        """Number of records of this process: **private**."""
        return len(self.labels)

    @property
    def unit(self) -> Unit:
        """Unit of privacy."""
        return "record" if self.owners is None else "person"

    @property
    def task(self) -> str:
        """Kind of labels: ``"multiclass"``, or ``"multilabel"`` for attributes."""
        return "multiclass" if self.labels.ndim == 1 else "multilabel"

    @property
    def processes(self) -> ProcessGroup:
        """Processes that hold shards; a single one where the table is whole."""
        return ALONE if self.shard is None else self.shard.group

    @property
    def public(self) -> Tensor | None:
        """Features of all public examples, float32 ``(m, d)``; None where there are none. Collective."""
        return None if self._public is None else self.processes.from_first(self._public)

    def table(self, fresh: bool = False) -> Tensor:
        """Feature vectors of all records of this process, float32 ``(n, d)``.

        Args:
            fresh: return a table of its own, which the caller may overwrite.
        """
        if self._table is not None:
            return self._table.clone() if fresh else self._table
        table, done = None, 0
        for features, _ in self.blocks():
            if table is None:
                table = self._allocate(len(self), features.shape[1])
            table[done : done + len(features)] = features
            done += len(features)
        if table is None:  # a shard without records: as wide as those of the others
            assert self._examples is not None
            return self._extract(torch.zeros(1, *self._examples.image_shape))[:0]
        return table

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Feature vectors, float32 ``(b, d)``, and labels of the records in their order, made block by block.

        A record without finite features counts as a vector of zeros, since an error would reveal it.
        """
        if self._table is not None:
            yield self._table, self.labels
            return
        for images, labels in self._batches():
            features = self._extract(images)
            yield torch.where(features.isfinite().all(dim=1, keepdim=True), features, 0.0), labels

    def digests(self, digest: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        """Digests of the records as the data set gives them, uint8 ``(n, w)``; None where only features are known.

        Args:
            digest: of a batch of examples and their labels.
        """
        if self._examples is None:
            return None
        found = [digest(images, labels) for images, labels in self._batches()]
        return torch.cat(found) if found else None

    @torch.no_grad()
    def map(self, function: Extract) -> tuple[Tensor, tuple[str, ...]]:
        """Apply a function of others to each record alone; see :func:`~pl_privknn.features.alone.kept_apart`.

        Args:
            function: maps examples ``(b, …)`` to vectors ``(b, d)``, as an extractor or a network; tried on made-up
                examples first.

        Returns:
            The vectors, ``(n, d)``, and in words the conditions that their separation rests on.
        """
        assert self._examples is not None
        tried = made_up(self._examples.image_shape)
        alone, conditions = kept_apart(function, tried)
        apply = functools.partial(extract_on, alone, device=self.device or torch.device("cpu"))
        if not conditions:
            apply = functools.partial(in_full_batches, apply)
        found = [apply(images) for images, _ in self._batches()]
        return torch.cat(found) if found else apply(tried)[:0], conditions

    def drawn(self, most: int, coins: NoiseSource) -> Tensor:
        """Rows that take part, int64: at most ``most`` of each person, drawn by private coins; all without persons.

        What holds of these rows whatever the coins, holds of the table: a person has no more than ``most`` of them.
        """
        return torch.arange(len(self)) if self.owners is None else records_drawn(self.owners, most, coins)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Examples and labels of the records, some at a time."""
        assert self._examples is not None
        for rows in self._rows.split(_batch_size(self._examples.image_shape)):
            if len(rows):
                yield self._examples.images(rows), self._examples.labels[rows]


def _batch_size(shape: Sequence[int]) -> int:
    """Records of a batch, which depends on their shape alone."""
    return at_once(shape) if math.prod(shape[1:]) == 1 else min(_IMAGES_AT_ONCE, at_once(shape))


def in_full_batches(function: Extract, images: Tensor) -> Tensor:
    """Vectors of private examples from batches of one size, the last of which is filled up with zeros.

    Libraries choose kernels by the size of a batch, and these round differently. The size must not hang on the number
    of records, or one record would move the vectors of others a little, and with them the order of neighbours.
    """
    size = _batch_size(images.shape[1:])
    filling = images.new_zeros(-len(images) % size, *images.shape[1:])
    parts = [function(part) for part in torch.cat([images, filling]).split(size)]
    return torch.cat(parts)[: len(images)]


def made_up(shape: Sequence[int], count: int = COMPARED) -> Tensor:
    """Made-up examples of a shape, uniform in [0, 1], to try functions on where there are no public ones."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


class _Tensors:
    """Examples that are tensors."""

    def __init__(self, examples: Tensor, labels: Tensor, num_classes: int) -> None:
        self._examples, self.labels, self.num_classes = examples, labels, num_classes
        self.image_shape = tuple(examples.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: Tensor) -> Tensor:
        return self._examples[indices]


def _in_memory(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float32)


def check_features(features: Tensor) -> None:
    """Raise ``ValueError`` unless ``features`` are finite floats of shape ``(n, d)``, without showing one of them."""
    if features.ndim != 2 or not features.is_floating_point():
        raise InputError(
            f"features: shape {shape_text(features.shape)}, {features.dtype}; expected float of shape (n, d)"
        )
    rows = max(1, _VALUES_AT_A_TIME // max(1, features.shape[1]))
    if not all(bool(torch.isfinite(part).all()) for part in features.split(rows)):
        raise InputError("features: some are NaN or infinite; a distance to them has no meaning")


def check_table(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Raise ``ValueError`` unless ``features`` and ``labels`` make a table of classes, or of attributes.

    Messages give shapes, dtypes and bounds, never a private value.

    Args:
        features: float, shape ``(n, d)``.
        labels: int64, shape ``(n,)`` in ``[0, num_classes)``; of attributes ``(n, num_classes)``, 0 or 1.
        num_classes: number of classes, or of attributes; a public constant.
    """
    check_features(features)
    is_table = labels.ndim == 2
    wanted = (len(features), num_classes) if is_table else (len(features),)
    if tuple(labels.shape) != wanted or labels.dtype != torch.int64:
        raise InputError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; expected int64 of shape (n,), one for each "
            "row of features, or (n, num_classes) of attributes"
        )
    check_int("num_classes", num_classes, 1 if is_table else 2)
    if len(labels) and bool(((labels < 0) | (labels >= (2 if is_table else num_classes))).any()):
        if is_table:
            raise InputError("labels: some attributes are neither 0 nor 1; fill in what isn't known")
        raise InputError(f"labels: some lie outside [0, num_classes={num_classes}); remap them to 0 … c-1")
