"""Data modules of a user's arrays, files of arrays or data sets of PyTorch: images or embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pl_privknn._checks import InputError, shape_text
from pl_privknn.datamodules.array_files import (
    Array,
    ArrayOrPath,
    blocks,
    dimension_of,
    in_shards,
    labels_of,
    own_shard,
    owners_of,
    rows_of,
    shard_file,
)
from pl_privknn.datamodules.base import (
    CLASSES_ARE_PUBLIC,
    OwnDataModule,
    PrivatePublicDataModule,
    check_unlike,
)
from pl_privknn.datamodules.datasets import (
    ImageShape,
    ImageStore,
    ItemImages,
    LabeledImages,
    TensorImages,
    same_images,
)
from pl_privknn.privacy.redaction import redacted

_PARTS = ("private", "public", "test", "val")
_COLOURS = (1, 3)
_MOST_FOUND = 1000  # classes that may be found in private labels
# Without a parameter: jsonargparse makes no subclass of Dataset[Any].
Records = Dataset | Sequence[Any]


class _TablesDataModule(OwnDataModule):
    """Base class of data modules of a user's tables: check and loading of the parts."""

    kind: ClassVar[str]
    leaves_out: ClassVar[str] = "without a label, or with NaN or infinite values,"

    def __init__(
        self, sources: dict[str, Any], image_shape: ImageShape, num_classes: int | None, **kwargs: Any
    ) -> None:
        self._sources = sources
        if kwargs.get("class_names") is None:
            width = 0 if kwargs.get("task") == "multilabel" else None
            num_classes, kwargs["class_names"] = self._classes(num_classes, width)
        count = len(kwargs["class_names"]) if num_classes is None else num_classes
        super().__init__(image_shape=image_shape, num_classes=count, **kwargs)

    def _has(self, part: str) -> bool:
        return f"{part}_{self.kind}" in self._sources

    def _records(self, part: str) -> tuple[ImageStore, Tensor | None, dict[str, Tensor]]:
        store, finite = self._store(f"{part}_{self.kind}")
        labels = "public_truth" if part == "public" else f"{part}_labels"
        found = self._labels(labels) if labels in self._sources else None
        return store, found, {"NaN or infinite values": ~finite}

    def _numbers(self, faults: dict[str, Tensor]) -> dict[str, Tensor]:
        if "private_groups" not in self._sources:
            return {}
        return {"private_groups": owners_of(self._sources["private_groups"])}

    def _labels(self, name: str) -> Tensor:
        labels = labels_of(name, self._sources[name], self.num_classes if self.task == "multilabel" else None)
        if isinstance(labels, Tensor):
            return labels
        numbers = {"": -1} | {word: number for number, word in enumerate(self.class_names)}
        return torch.tensor([numbers.get(word, self.num_classes) for word in labels], dtype=torch.int64)

    def _store(self, name: str) -> tuple[ImageStore, Tensor]:
        """Records of a part, and bool ``(n,)``: whether their values are finite."""
        raise NotImplementedError

    def _classes(self, count: int | None, width: int | None) -> tuple[int, list[str] | None]:
        """Number of classes, and names of text labels; from private labels only where no others are known."""
        known = [name for name in ("test_labels", "val_labels", "public_truth") if name in self._sources]
        if not known and count is None and not in_shards(self._sources["private_labels"]):
            self.conditions = (CLASSES_ARE_PUBLIC,)
        words, most = set[str](), 0
        for name in (*known, *(["private_labels"] if self.conditions else [])):
            labels = redacted(labels_of, name, self._sources[name], width)
            if not isinstance(labels, Tensor):
                words |= {*labels} - {""}
            elif labels.numel():
                most = max(most, labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1)
        names = check_unlike(sorted(words), "class_names", bool(known)) if words else None
        found = len(words) or most
        if count is None and not 2 <= found <= (_MOST_FOUND if self.conditions else found):
            raise ValueError(
                "num_classes: the labels give no number of classes; give num_classes= (--num-classes)"
            )
        return found if count is None else count, names

    @classmethod
    def _sources_among(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Tables among a constructor's arguments, checked to be complete."""
        if arguments["kwargs"].get("public_labels") is not None:
            raise TypeError(
                "public_labels: labels of public records are public_truth=, for evaluation only; with "
                "train_on_truth=True a student trains on them"
            )
        sources = {
            name: value
            for name, value in arguments.items()
            if name.partition("_")[0] in _PARTS and value is not None
        }
        if (f"public_{cls.kind}" in sources) == (arguments["kwargs"].get("public") == "none"):
            raise ValueError(
                f'public_{cls.kind}, public="none": expected one of the two; pass public records, '
                'or public="none" where there are none'
            )
        for part in ("test", "val"):
            if (f"{part}_{cls.kind}" in sources) != (f"{part}_labels" in sources):
                raise ValueError(f"{part}_{cls.kind} and {part}_labels go together; pass both or neither")
        return sources


class ArraysDataModule(_TablesDataModule):
    """Private, public and test images from numpy arrays, tensors, or ``.npy`` / ``.npz`` files.

    Every argument that takes an array takes a path as well, so that the module works from YAML. A ``.npy``
    file stays on disk and is paged in as it is used. Of an ``.npz`` file the member with the argument's name
    is taken, or its only member, or the one named as in ``data.npz:x_train``: one file written by
    ``numpy.savez(path, private_images=…, private_labels=…, …)`` may serve for all of them.

    Images are uint8 (0 … 255) or float (0 … 1), of shape ``(n, h, w)``, ``(n, c, h, w)`` or ``(n, h, w, c)``, or
    rows of square grey images, ``(n, h * h)``.
    Arrays are kept as they are and not copied: don't change them afterwards. Labels are whole numbers of any type of
    shape ``(n,)`` in ``[0, num_classes)``, one-hot rows, or texts, which ``class_names`` or the test labels put in
    order; with ``task="multilabel"`` rows of 0 and 1, ``(n, num_classes)``. Records without a label (-1, NaN or an
    empty text) or with values that are not finite are left out (``unusable``).

    Args:
        private_images: images of the sensitive records.
        private_labels: their classes.
        public_images: images that are public; none with ``public="none"``.
        public_truth: their classes where known, else -1; for evaluation only, never for training.
        test_images: images for the final accuracy; none by default.
        test_labels: their classes.
        num_classes: number of classes, a public constant; None: from the test labels and public truth, or,
            without these, from the private labels, which makes the guarantee conditional.
        val_images: a validation set, instead of public images with known truth.
        val_labels: their classes.
        private_groups: the person who owns each private record, whole numbers, shape ``(n,)``.
        channels_last: whether four-dimensional arrays are ``(n, h, w, c)``. None: the dimension that is 1 or
            3 holds the colours, and an error asks where both or neither of them are.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if shapes, dtypes or values don't fit. Shapes are checked at once, values at ``setup``.
    """

    kind: ClassVar[str] = "images"

    def __init__(
        self,
        private_images: ArrayOrPath,
        private_labels: ArrayOrPath | Sequence[int],
        public_images: ArrayOrPath | None = None,
        public_truth: ArrayOrPath | Sequence[int] | None = None,
        test_images: ArrayOrPath | None = None,
        test_labels: ArrayOrPath | Sequence[int] | None = None,
        *,
        num_classes: int | None = None,
        val_images: ArrayOrPath | None = None,
        val_labels: ArrayOrPath | Sequence[int] | None = None,
        private_groups: ArrayOrPath | Sequence[int] | None = None,
        channels_last: bool | None = None,
        **kwargs: Any,
    ) -> None:
        sources = self._sources_among(locals())
        self.channels_last = channels_last
        shapes = {
            name: shape_of_images(name, Array(name, source).shape(), channels_last)
            for name, source in sources.items()
            if name.endswith("images")
        }
        shape = _one_shape(shapes, "images of shape {} (channels, height, width)", "bring all to one size")
        super().__init__(sources, shape, num_classes=num_classes, **kwargs)

    def _store(self, name: str) -> tuple[ImageStore, Tensor]:
        array = (table := Array(name, self._sources[name])).numbers()
        if array.dtype != torch.uint8 and not array.is_floating_point():
            raise InputError(
                f"{name}: dtype {array.dtype}; expected uint8 with values 0 … 255 (.astype('uint8')) or float "
                "with values 0 … 1"
            )
        store = TensorImages(images_in(name, array, self.channels_last), table.mapping)
        if array.dtype == torch.uint8:
            return store, torch.ones(len(array), dtype=torch.bool)
        finite = []
        for block in blocks(store):
            finite.append(block.isfinite().all(1))
            if bool(((block < 0) | (block > 1))[finite[-1]].any()):
                raise InputError(
                    f"{name}: float values outside [0, 1]; divide 0 … 255 data by 255, or pass it as uint8"
                )
        return store, torch.cat(finite)


class EmbeddingsDataModule(_TablesDataModule):
    """Private, public and test embeddings from arrays, from files, or from folders of them.

    Batches hold vectors, float32 ``(b, d)``, in the place of images: a student needs a network of dense layers, such
    as ``mlp``. The numbers may be any finite floats.

    Files are ``.npy``, ``.npz`` or ``.parquet``; a folder holds ``.npy`` or ``.parquet`` files, one after another by
    their names. Of an ``.npz`` file the member with the argument's name is taken, or its only one, or the one named
    as in ``data.npz:x``. Of ``.parquet`` files the column with the argument's name is taken, or the one named as in
    ``data.parquet:embedding`` or ``folder:embedding``; embeddings are a column of lists of equal length.

    Embeddings are not loaded: ``.npy`` files are mapped, and what was read of them does not stay in memory; Parquet
    is read row group by row group, of which 256 MB are kept. Values are looked through once, at ``setup``. Labels are
    held in memory.

    A training of several processes may have one file of private records for each: ``shards/features-{rank:05d}.npy``
    and ``shards/labels-{rank:05d}.npy`` are then each process's own, by its global rank. A file that is missing,
    empty, the same as another, or left over is refused by name.

    Embeddings must have been made by a model of public data, one record at a time: what is centred or scaled
    by private records carries them along.

    Args:
        private_embeddings: of the sensitive records, float, shape ``(n, d)``.
        private_labels: their classes, whole numbers, shape ``(n,)``; with ``task="multilabel"`` rows of 0 and 1,
            ``(n, num_classes)``, from ``.npy`` or ``.npz`` files.
        public_embeddings: of public records; none with ``public="none"``.
        public_truth: their classes where known, else -1; for evaluation only, never for training.
        test_embeddings: for the final accuracy; none by default.
        test_labels: their classes.
        num_classes: number of classes, a public constant; None: from the test labels and public truth, or,
            without these, from the private labels, which makes the guarantee conditional.
        val_embeddings: a validation set, instead of public records with known truth.
        val_labels: their classes.
        private_groups: the person who owns each private record, whole numbers, shape ``(n,)``; a column of a table as
            in ``data.parquet:person``. No person may have records in two processes' files.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if shapes, dtypes or values don't fit. Shapes are checked at once, values at ``setup``.
    """

    kind: ClassVar[str] = "embeddings"

    def __init__(
        self,
        private_embeddings: ArrayOrPath,
        private_labels: ArrayOrPath | Sequence[int],
        public_embeddings: ArrayOrPath | None = None,
        public_truth: ArrayOrPath | Sequence[int] | None = None,
        test_embeddings: ArrayOrPath | None = None,
        test_labels: ArrayOrPath | Sequence[int] | None = None,
        *,
        num_classes: int | None = None,
        val_embeddings: ArrayOrPath | None = None,
        val_labels: ArrayOrPath | Sequence[int] | None = None,
        private_groups: ArrayOrPath | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        sources = self._sources_among(locals())
        self.private_in_shards = in_shards(private_embeddings)
        for name in ("private_labels", "private_groups"):
            if name in sources and in_shards(sources[name]) != self.private_in_shards:
                raise ValueError(
                    "private_embeddings, private_labels and private_groups go together; name all with {rank}, or none"
                )
        dimensions = {
            name: dimension_of(name, shard_file(name, source) if in_shards(source) else source)
            for name, source in sources.items()
            if name.endswith("embeddings")
        }
        dimension = _one_shape(dimensions, "{} numbers a record", "embed all parts by the same model")
        super().__init__(sources, (dimension,), num_classes=num_classes, **kwargs)

    def load_private(self) -> LabeledImages:
        """``private_embeddings`` and ``private_labels``; this process's own files where there is one for each."""
        if not self.private_in_shards:
            return super().load_private()
        rank, size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        for name in [name for name in self._sources if name.startswith("private")]:
            unlike = name == "private_embeddings"
            self._sources[name] = own_shard(name, self._sources[name], rank, size, unlike)
        found = super().load_private()
        if not len(found):
            raise ValueError(
                f"private_embeddings={self._sources['private_embeddings']!r}: the shard is empty; start fewer "
                "processes, or redistribute the records"
            )
        return found

    def _store(self, name: str) -> tuple[ImageStore, Tensor]:
        return rows_of(name, self._sources[name])


class DatasetsDataModule(PrivatePublicDataModule):
    """Private, public and test parts from map-style data sets, such as torchvision's, torchgeo's or ``datasets``'.

    Items are ``(x, y)``, or mappings with fields of x and y; of the public part also x alone. ``x`` is a Pillow
    image, or a tensor or array: uint8 (0 … 255) or float (0 … 1) of shape ``(channels, height, width)`` or
    ``(height, width)``, or a vector ``(d,)`` of any finite floats. ``y`` is a class index, or a row of attributes; a
    public one is the truth, for evaluation only. Items are looked through once at ``setup`` and read again when they
    are used, so they must stay the same: no random augmentation. One that does not fit is refused.

    Reading a record must use that record alone. That is known of ``TensorDataset``, lists, and ``Subset`` and
    ``ConcatDataset`` of them; of others it is a condition of the guarantee, unless ``reads_alone`` states it.

    A configuration names a data set by ``class_path`` and ``init_args``.

    Args:
        private: the sensitive records. None may be there twice, or in another part.
        public: records that may be seen by anybody; ``"none"``, or None, where there are none.
        test: records for the final accuracy; none by default.
        num_classes: number of classes, or of attributes, a public constant.
        image_shape: channels, height and width of every x, ``(d,)`` of vectors; by default those of the first public
            record, or else of the first test record.
        validation: a validation set, instead of public records with known truth.
        predict: records to predict, with or without labels; those of the test set by default.
        private_groups: the person who owns each private record, whole numbers, shape ``(n,)``, or a file of them.
        image: the field of x in items that are mappings.
        label: the field of y.
        reads_alone: state that reading a private record uses that record alone: no mean over other records, no
            mixing of two, no memory of earlier ones.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: if a part is no map-style data set or shares records with the private one, or no shape is known;
            at ``setup`` for items that don't fit.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset, random_split
        >>> whole = TensorDataset(torch.rand(90, 3, 8, 8), torch.arange(90) % 2)
        >>> private, public, test = random_split(whole, [50, 30, 10])
        >>> DatasetsDataModule(private, public, test, num_classes=2).image_shape
        (3, 8, 8)
    """

    def __init__(
        self,
        private: Records,
        public: Records | Literal["none"] | None,
        test: Records | None = None,
        *,
        num_classes: int,
        image_shape: ImageShape | None = None,
        validation: Records | None = None,
        predict: Records | None = None,
        private_groups: ArrayOrPath | Sequence[int] | None = None,
        image: str = "image",
        label: str = "label",
        reads_alone: bool = False,
        **kwargs: Any,
    ) -> None:
        shared = None if isinstance(public, str) and public == "none" else public
        parts = {
            "public": shared,
            "test": test,
            "validation": validation,
            "predict": predict,
            "private": private,
        }
        given = [(name, part) for name, part in parts.items() if part is not None]
        self._stores = {name: ItemImages(part, image_shape, name, (image, label)) for name, part in given}
        for name, store in self._stores.items():
            if name not in ("private", "predict") and redacted(same_images, self._stores["private"], store):
                raise ValueError(f"{name}: shares records with the private set; keep the parts apart")
            if image_shape is None and name in ("public", "test") and len(store):
                image_shape = tuple(store.pair(store._items[0])[0].shape)
        if image_shape is None:
            raise ValueError("image_shape=None, and there is no public or test record that shows it; give it")
        kwargs["public"] = "none" if shared is None else "images"
        super().__init__(num_classes=num_classes, image_shape=image_shape, **kwargs)
        self.reads_alone, self._groups = reads_alone, private_groups
        for store in self._stores.values():
            store.shape = self.image_shape

    def load_private(self) -> Any:
        """The private records, their labels and their persons."""
        if self._groups is not None:
            self.private_groups = redacted(owners_of, self._groups)
        return self._stores["private"]

    def load_public(self) -> Any:
        """The public records, with their truth where items have a label."""
        return self._stores["public"]

    def load_test(self) -> Any:
        """The test records and their labels, or an empty set."""
        return self._stores.get("test", [])

    def load_validation(self) -> Any:
        """The validation records, if given."""
        return self._stores.get("validation")

    def load_predict(self) -> Any:
        """The records to predict, if given."""
        return self._stores.get("predict")


def _one_shape(shapes: dict[str, Any], what: str, remedy: str) -> Any:
    """The shape of the records of all parts, by the names of their arguments."""
    first = min(shapes, key=lambda name: not name.startswith("public"))
    for name, shape in shapes.items():
        if shape != shapes[first]:
            raise ValueError(f"{name}: {what.format(shape)}, {first} have {shapes[first]}; {remedy}")
    return shapes[first]


def shape_of_images(name: str, shape: tuple[int, ...], channels_last: bool | None) -> ImageShape:
    """Channels, height and width of images in an array of ``shape``.

    Args:
        name: of the argument, for messages.
        shape: ``(n, h, w)``, ``(n, c, h, w)`` or ``(n, h, w, c)``, or ``(n, h * h)``.
        channels_last: where the colours are in four dimensions. None: in the dimension that is 1 or 3.

    Raises:
        ValueError: for another number of dimensions, or where the rule of None finds no single answer.
    """
    if len(shape) == 3:
        return (1, shape[1], shape[2])
    if len(shape) == 2 and math.isqrt(shape[1]) ** 2 == shape[1] > 1:
        return (1, math.isqrt(shape[1]), math.isqrt(shape[1]))
    if _colours_are_last(name, shape, channels_last):
        return (shape[3], shape[1], shape[2])
    return (shape[1], shape[2], shape[3])


def images_in(name: str, array: Tensor, channels_last: bool | None = None) -> Tensor:
    """An array of images as ``(n, channels, height, width)``, see :func:`shape_of_images`."""
    if array.ndim == 4 and _colours_are_last(name, tuple(array.shape), channels_last):
        return array.permute(0, 3, 1, 2)
    return array.reshape(len(array), *shape_of_images(name, tuple(array.shape), channels_last))


def _colours_are_last(name: str, shape: tuple[int, ...], channels_last: bool | None) -> bool:
    if len(shape) != 4:
        table = (
            ": reshape rows of pixels, or take EmbeddingsDataModule for tables (n, d)"
            if len(shape) == 2
            else ""
        )
        raise InputError(
            f"{name}: shape {shape_text(shape)}; expected (n, h, w), (n, c, h, w) or (n, h, w, c){table}"
        )
    if channels_last is not None:
        return channels_last
    first, last = shape[1] in _COLOURS, shape[3] in _COLOURS
    if first == last:
        raise InputError(
            f"{name}: shape {shape_text(shape)} doesn't show where the colours are; pass channels_last=True for "
            "(n, h, w, c) or channels_last=False for (n, c, h, w)"
        )
    return last
