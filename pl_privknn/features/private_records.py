"""Private records: the holder of private examples that labelers learn from, and the gate of foreign code to them."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pl_privknn._checks import InputError, check_int, shape_text
from pl_privknn._processes import ALONE, ProcessGroup, Shard
from pl_privknn._tracing import bound_ids, outside, recorded
from pl_privknn.features.backbone import (
    BackboneFeatures,
    CheckpointFeatures,
    check_running_statistics,
    undisturbed,
)
from pl_privknn.features.base import Extractor, at_once, extract_on
from pl_privknn.features.public import Resized
from pl_privknn.networks.base import APART, is_as_built
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.records import check_owners, records_drawn

Extract = Callable[[Tensor], Tensor]

# With layers that hold others, and those that process examples independently in evaluation mode alone.
_APART_IN_EVALUATION = APART | {nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.BatchNorm1d, nn.BatchNorm2d}
_OWN = "pl_privknn."
_AT_ONCE = 128
#: Public images among which one is compared with the same image alone.
COMPARED = 32
# Vectors of one image may differ by the order of sums, and no more: a part of their length.
_SAME = 1e-3


def is_foreign(extractor: Extract) -> bool:
    """Whether an extractor, or a part of it, is defined outside of this package."""
    if type(extractor) is BackboneFeatures:
        return not keeps_apart(extractor.module)
    if isinstance(extractor, nn.Module):
        return not keeps_apart(extractor)
    if not type(extractor).__module__.startswith(_OWN):
        return True
    return any(is_foreign(part) for parts in _parts(extractor).values() for part in parts)


def kept_apart(
    extractor: Extract, images: Tensor, device: torch.device | None = None
) -> tuple[Extract, tuple[str, ...]]:
    """Wrap an extractor so that the vector of an example depends on that example alone.

    Those of this package do so already and are returned as they are. One of others is traced on a tensor without
    values: what was recorded has no Python left, and examples go through it by ``vmap`` or one by one. Where that
    fails a fresh copy is called for each example, so that it can keep nothing of one for the next, and what this
    rests on is a condition.

    Args:
        extractor: has learned what it learns. Modules run in evaluation mode.
        images: public ones to try it on, ``(n, channels, height, width)``.
        device: of images, for extractors without parameters; the CPU by default.

    Returns:
        The extractor, and its conditions in words.

    Raises:
        ValueError: for one that mixes the images of a batch, changes its own tensors, or returns no vectors.
    """
    if not is_foreign(extractor):
        return extractor, ()
    images = images.to(device or "cpu")
    if type(extractor) is BackboneFeatures:
        module: Any = extractor.module
        check_running_statistics(module)
        alone = _Alone(module.features, module, images, extractor.device, extractor.batch_size)
        if not extractor.normalize:
            return alone, alone.conditions
        return lambda images: nn.functional.normalize(alone(images), dim=1), alone.conditions
    if not (inner := _parts(extractor)):
        alone = _Alone(extractor, extractor, images)
        return alone, alone.conditions
    twin: Any = object.__new__(type(extractor))  # what was learned is shared
    vars(twin).update(vars(extractor))
    conditions: list[str] = []
    images = extractor.resized(images) if isinstance(extractor, Resized) else images
    for name, parts in inner.items():
        made = [kept_apart(part, images, device) for part in parts]
        conditions += [condition for _, found in made for condition in found]
        setattr(twin, name, [part for part, _ in made] if name == "extractors" else made[0][0])
    return twin, tuple(dict.fromkeys(conditions))


def _parts(extractor: Any) -> dict[str, list[Extract]]:
    """Inner extractors of one of this package, by the names of its attributes."""
    if isinstance(extractor, nn.Module) or not type(extractor).__module__.startswith(_OWN):
        return {}
    if isinstance(extractor, CheckpointFeatures):
        extractor.read()
    parts = {name: [value] for name, value in vars(extractor).items() if isinstance(value, Extractor)}
    return parts | ({"extractors": extractor.extractors} if hasattr(extractor, "extractors") else {})


def keeps_apart(module: nn.Module) -> bool:
    """Whether a network of this package processes examples independently by its structure."""
    own = type(module).__module__.startswith(_OWN) and all(map(_is_plain, module.modules()))
    own = own and not any(getattr(layer, "calls_others", False) for layer in module.modules())
    inner = [getattr(layer, "extractor", None) for layer in module.modules()]  # of students and heads, frozen
    return own and not any(is_foreign(extractor) for extractor in inner if extractor is not None)


def _is_plain(layer: nn.Module) -> bool:
    own = type(layer).__module__.startswith((_OWN, "timm.", "torchmetrics."))
    return is_as_built(layer) and (own or type(layer) in _APART_IN_EVALUATION)


class _Alone:
    """Wrapper of a foreign extractor that computes each vector from one example.

    Args:
        function: maps images to vectors.
        owner: what it belongs to: itself, or the module that it is a method of.
        images: public ones to try it on.
        device: where images are sent; where the owner's parameters are by default.
        at_once: examples at once.

    Attributes:
        conditions: what else has to hold; empty for one that could be traced.
    """

    def __init__(
        self,
        function: Extract,
        owner: Any,
        images: Tensor,
        device: torch.device | None = None,
        at_once: int = _AT_ONCE,
    ) -> None:
        self._name = getattr(owner, "__name__", type(owner).__name__)
        self._module = owner if isinstance(owner, nn.Module) else nn.Module()
        if function is owner:
            self._refuse_training_mode()
        parameter = next(self._module.parameters(), None)
        self._device = device or (None if parameter is None else parameter.device)
        self._function, self._owner, self._at_once = function, owner, at_once
        images = images.to(self._device or images.device)
        self.conditions: tuple[str, ...] = ()
        try:
            # A trace leaves tensors without values in what a module keeps. A copy has no need of the trainer.
            copied = self._copy()
        except Exception:  # locks, sessions, open files: not traced then
            copied = None
        with undisturbed(self._module, images.device), torch.no_grad():
            alone = self._first_alone(images)
            try:
                self._graph = _recorded(copied, images[0])
                self._by_vmap = self._try(images, alone)
            except _ChangesItselfError:
                raise InputError(
                    f"features: {self._name} changes its own tensors while it computes vectors, as batch statistics "
                    "in training mode do; call .eval() on its modules, and let it keep nothing of an image"
                ) from None
            except Exception:  # tracers raise whatever they like
                self.conditions = (f"{self._name} computes a vector from one example alone",)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Vectors ``(n, d)`` of images."""
        images = images.to(self._device or images.device)
        if not len(images):
            return self(images.new_zeros(1, *images.shape[1:]))[:0]
        if self.conditions:
            with undisturbed(self._module, images.device):
                return torch.cat([self._fresh()(image) for image in images.split(1)])
        if self._by_vmap:
            mapped = torch.func.vmap(self._graph, randomness="different")
            return torch.cat([mapped(part) for part in images.split(self._at_once)])
        return torch.stack([self._graph(image) for image in images])

    def _copy(self) -> Extract:
        """A copy of the function and its owner, with the owner's tensors and without its trainer."""
        trainer = getattr(self._owner, "_trainer", None)
        memo: dict[int, Any] = {} if trainer is None else {id(trainer): None}
        return copy.deepcopy(self._function, memo)

    def _fresh(self) -> Extract:
        """Fresh copy of the function for one example; the function itself where it can't be copied."""
        try:
            return self._copy()
        except Exception:
            return self._function

    def _refuse_training_mode(self) -> None:
        for name, layer in self._module.named_modules():
            if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
                raise InputError(
                    f"features: layer {name!r} ({type(layer).__name__}) of {self._name} would mix the images of a "
                    "batch; call .eval() on the module, whose layers must have running statistics"
                )

    def _first_alone(self, images: Tensor) -> Tensor | None:
        """The first image's vector, or None where the function draws; refuses a function that mixes images."""
        found, again = self._function(images), self._function(images)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"features: {self._name} returned {shape} for {len(images)} images; expected (n, d): flatten or pool"
            )
        alone = self._function(images[:1])
        if not torch.equal(found, again):
            return None
        if not _close(alone, found[:1]):
            raise InputError(
                f"features: {self._name} gives a public image another vector alone than among others, and "
                "would mix private records; take statistics of public images, and put modules into evaluation mode "
                "(.eval())"
            )
        return alone

    def _try(self, images: Tensor, alone: Tensor | None) -> bool:
        """Compare the graph's vectors with the function's; returns whether ``vmap`` can run the graph."""
        kept = [*self._graph.parameters(), *self._graph.buffers()]
        before = [tensor._version for tensor in kept]
        found = self._graph(images[0])
        if before != [tensor._version for tensor in kept]:
            raise _ChangesItselfError
        if alone is not None and not _close(found[None], alone):
            raise ValueError("the graph gives another vector: values went into it")
        with contextlib.suppress(Exception):
            torch.func.vmap(self._graph, randomness="different")(images[:2])
            return not outside(self._graph)
        return False


class _ChangesItselfError(Exception):
    """Raised for a graph that writes to tensors that it keeps."""


def _recorded(function: Any, image: Tensor) -> Any:
    """Graph of a function's operations on a batch of one image, of which only the shape is used."""
    module = getattr(function, "__self__", function)
    if isinstance(module, nn.Module):
        module.eval()
    graph = recorded(lambda one: function(one.clone()[None])[0], image)
    bound_ids(graph)
    return graph


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).norm() <= _SAME * wanted.norm())


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
    """Private records of this process with the features of one extractor: the argument of :meth:`Labeler.fit`.

    A labeler pulls what it needs: a table of all feature vectors, or blocks of them, labels, owners, lasting numbers.
    Each vector is a function of its own record, so that a labeler's sensitivity is that of its rows. Everything here
    is **private** but :attr:`num_classes`, :attr:`unit`, :attr:`processes` and :attr:`public`.

    Args:
        examples: the records, of all processes or of this one alone (see ``shard``).
        extract: maps examples ``(b, channels, height, width)`` to vectors ``(b, d)``, each from its own example;
            see :func:`~pl_privknn.features.private_records.kept_apart`.
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
        """Make private records from existing feature vectors, as in tests and notebooks.

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
        """Apply a function from outside this package to each record alone; see :func:`kept_apart`.

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
    """Number of records in a batch, a function of their shape alone."""
    return at_once(shape) if math.prod(shape[1:]) == 1 else min(_IMAGES_AT_ONCE, at_once(shape))


def in_full_batches(function: Extract, images: Tensor) -> Tensor:
    """Vectors of private examples from batches of one size, the last of which is filled up with zeros.

    Libraries choose kernels by the size of a batch, and these round differently. The size must not hang on the number
    of records, or one record would move the vectors of others a little, and with them the order of neighbours.
    """
    size = _batch_size(images.shape[1:])
    if missing := -len(images) % size:
        filled = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
        return in_full_batches(function, filled)[: len(images)]
    return torch.cat([function(part) for part in images.split(size)])


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
