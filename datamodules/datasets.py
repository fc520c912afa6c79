"""Data sets of images in memory or in files, converted to float32 on reading, and their labels."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from pl_privknn._checks import InputError, check_choice, check_int, shape_text
from pl_privknn.privacy.private_state import check_same_in_processes
from pl_privknn.privacy.records import has_repeated_rows, leaves_of

#: Channels, height and width of an image, or the length of a vector.
ImageShape = tuple[int, ...]
_CHUNK = 1024
#: Pixels of an image above which it is reduced before it is looked at.
LARGE_IMAGE = 1 << 24
_READ_TWICE = 8  # items of which a data set must give the same image again


class ImageStore(abc.ABC):
    """A fixed number of images of one shape, or of vectors of one length, read by index.

    Attributes:
        shape: channels, height and width of every image, or the length of every vector, ``(d,)``.
        in_memory: whether images are kept in memory, and not in a mapped file.
    """

    shape: ImageShape
    in_memory: bool = True

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, indices: Tensor) -> Tensor:
        """Images as float32 ``(n, channels, height, width)`` in [0, 1], or vectors ``(n, d)``.

        Args:
            indices: int64 ``(n,)``, within range.
        """

    def digests(self, indices: Tensor) -> list[bytes]:
        """One digest an image, of its float32 values; equal images have equal digests."""
        parts = (self.read(rows).numpy() for rows in indices.split(_CHUNK))
        return [digest_of(image.tobytes()) for part in parts for image in part]

    def preload(self) -> None:  # noqa: B027
        """Read lazily loaded images now, so that worker processes share them with their parent."""


class TensorImages(ImageStore):
    """Images in one tensor, uint8 (0 … 255) or float (0 … 1), or vectors of floats, which is not copied.

    Args:
        images: shape ``(n, channels, height, width)``, or ``(n, d)``.
        file: the mapped file that holds them, if one does; what was read of it does not stay in the process's memory.
    """

    def __init__(self, images: Tensor, file: mmap.mmap | None = None) -> None:
        if images.ndim not in (2, 4) or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise InputError(
                f"images: shape {shape_text(images.shape)}, {images.dtype}; expected uint8 or float of shape "
                "(n, channels, height, width), or vectors (n, d)"
            )
        self._images, self._file = images, file
        self.in_memory = file is None
        self.shape = tuple(images.shape[1:])

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        found = _as_float(self._images[indices]).contiguous()
        if self._file is not None:
            self._file.madvise(mmap.MADV_DONTNEED)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """State without the mapping, which another process can't take."""
        return {**self.__dict__, "_file": None}


class ItemImages(ImageStore):
    """Images of a map-style data set whose items are ``x``, ``(x, y)`` or mappings, read item by item.

    Args:
        items: each time an item is read it must be the same. ``x`` is a Pillow image, or an array or tensor, uint8 or
            float, of shape ``(channels, height, width)``, ``(height, width)`` or, a vector, ``(d,)``.
        shape: of every ``x``, or None as long as it is not known.
        name: of the part, for messages.
        fields: of ``x`` and ``y`` in mappings.

    Raises:
        ValueError: for what is no map-style data set.
    """

    def __init__(
        self, items: Any, shape: ImageShape | None, name: str, fields: tuple[str, str] = ("image", "label")
    ) -> None:
        mapped = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        if not mapped or isinstance(items, IterableDataset | Mapping | str):
            raise InputError(
                f"the {name} set is a {type(items).__name__}; want a map-style data set whose items are (x, y)"
            )
        self._items, self._name, self._fields, self.shape = items, name, fields, shape  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._items)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`.

        Raises:
            ValueError: if an item does not fit, see :meth:`pair`.
        """
        images = torch.empty(len(indices), *self.shape)
        for row, index in enumerate(indices.tolist()):
            images[row] = self.pair(self._items[index])[0]
        return images

    def pair(self, item: Any) -> tuple[Tensor, Any]:
        """Image of an item, float32, and its label; None for an item without a label.

        Raises:
            ValueError: for an ``x`` of another shape or type, for images with values outside [0, 1], and for vectors
                with values that are not finite.
        """
        pair, shape = item if isinstance(item, tuple | list) else (item,), self.shape
        x: Any
        x, y = map(item.get, self._fields) if isinstance(item, Mapping) else (*pair, None)[:2]
        if hasattr(x, "getbands"):
            image = pixels_of(x, shape[0] if shape else 1 if x.mode[0] in "1LIF" else 3)
        else:
            array = np.asarray(x)
            image = torch.as_tensor(array if array.dtype.kind in "buif" else np.empty((0, 0, 0, 0)))
            image = image[None] if image.ndim == 2 else image
        image = _as_float(image)
        fits = image.isfinite() if image.ndim == 1 else (image >= 0) & (image <= 1)
        if image.ndim not in (1, 3) or (shape and image.shape != shape) or not bool(fits.all()):
            raise InputError(
                f"the {self._name} set: an item's x ({self._fields[0]!r} of mappings) is no image of shape "
                f"{shape or '(channels, height, width)'}, uint8 or float in [0, 1], and no vector of finite floats; "
                "convert x in the data set, and give image_shape= where it is another"
            )
        return image, y


def pixels_of(image: Any, channels: int, size: tuple[int, int] | None = None) -> Tensor:
    """Pixels of a Pillow image as viewers show it, uint8 ``(channels, height, width)``.

    Args:
        image: the image.
        channels: 1 makes it grey, 3 RGB.
        size: width and height to stretch it to; one of more than 16 megapixels is reduced by a whole factor first, to
            no less than four times these.
    """
    from PIL import Image

    image = image if size is None else _reduced(image, 4 * max(size))
    seen = _as_seen(image).convert("L" if channels == 1 else "RGB")
    seen = seen if size is None else seen.resize(size, Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(seen, dtype=np.uint8))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def _reduced(image: Any, side: int) -> Any:
    """A large image with fewer pixels, of at least ``side`` each way; JPEG is decoded so."""
    if image.width * image.height <= LARGE_IMAGE:
        return image
    image.draft(None, (side, side))
    image.load()  # turns some kinds upright
    exif = b""
    with contextlib.suppress(Exception):  # EXIF that cannot be read is ignored
        exif = image.getexif().tobytes()
    if image.mode in ("1", "P"):  # whose values are no colours that can be averaged
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    factor = min(image.size) // side
    if factor > 1 and not image.mode.startswith("I;"):
        image = image.reduce(factor)
    image.info["exif"] = exif  # how to turn it upright
    return image


def _as_seen(image: Any) -> Any:
    """An image as viewers show it: upright, 8 bits per channel, on white where it is transparent."""
    from PIL import Image, ImageOps

    with contextlib.suppress(Exception):  # EXIF that cannot be read is ignored
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        values = np.asarray(image)
        if values.dtype.kind == "f" or values.min() < 0 or values.max() >= 1 << 16:
            raise InputError("values without a known range")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


class ChosenImages(ImageStore):
    """Store of selected images of another store, in any order and possibly repeated.

    Args:
        store: where the images are.
        rows: int64 ``(n,)``, which of them; within range.
    """

    def __init__(self, store: ImageStore, rows: Tensor) -> None:
        self.store, self.rows, self.shape, self.in_memory = store, rows, store.shape, store.in_memory

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        return self.store.read(self.rows[indices])

    def digests(self, indices: Tensor) -> list[bytes]:
        """See :meth:`ImageStore.digests`."""
        return self.store.digests(self.rows[indices])

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        self.store.preload()


class JoinedImages(ImageStore):
    """Store of the images of several stores, one after another.

    Args:
        stores: at least one; their images have one shape.

    Raises:
        ValueError: if there is none, or shapes differ.
    """

    def __init__(self, stores: Sequence[ImageStore]) -> None:
        shapes = {store.shape for store in stores}
        if len(shapes) != 1:
            raise InputError(
                f"stores: images of shapes {sorted(shapes)}; expected one or more stores of one shape"
            )
        self.stores, (self.shape,) = list(stores), shapes
        self._ends = torch.tensor([len(store) for store in stores]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        images = torch.empty(len(indices), *self.shape)
        owner = torch.searchsorted(self._ends, indices, right=True)
        for number in owner.unique().tolist():
            places = torch.nonzero(owner == number).flatten()
            start = int(self._ends[number - 1]) if number else 0
            images[places] = self._read_part(number, indices[places] - start)
        return images

    def _read_part(self, number: int, rows: Tensor) -> Tensor:
        return self.stores[number].read(rows)

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        for store in self.stores:
            store.preload()


def as_indices(indices: Tensor | Sequence[int] | slice | None, count: int) -> Tensor:
    """Positions of images, int64 ``(n,)``, from a tensor of positions, a mask, a list or a slice; None selects all.

    Raises:
        IndexError: for what names no image; the message does not reveal the number of images.
    """
    named = slice(None) if indices is None else indices
    with contextlib.suppress(IndexError):
        rows = torch.arange(count)[named if isinstance(named, slice) else torch.as_tensor(named).cpu()]
        if rows.ndim == 1:
            return rows
    raise IndexError(
        "indices: some are not positions of examples; expected whole numbers of shape (n,) below the number of "
        "examples, or a mask with one value per example"
    )


def same_images(first: Any, second: Any) -> bool:
    """Whether two stores, or data sets, read an image from the same place."""
    rows: dict[int, set[int]] = {}
    for place, chosen in _places(first):
        rows.setdefault(place, set()).update(chosen.tolist())
    return any(not rows.get(place, set()).isdisjoint(chosen.tolist()) for place, chosen in _places(second))


def _places(store: Any, rows: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
    """Tables that a store reads, by number, and their rows."""
    rows = torch.arange(len(store)) if rows is None else rows
    if isinstance(store, ChosenImages):
        yield from _places(store.store, store.rows[rows])
    elif type(store) is JoinedImages:
        for part, end in zip(store.stores, store._ends.tolist(), strict=True):
            start = end - len(part)
            yield from _places(part, rows[(rows >= start) & (rows < end)] - start)
    elif isinstance(store, TensorImages):
        yield store._images.data_ptr(), rows
    else:
        items = store._items if isinstance(store, ItemImages) else store
        yield from ((id(leaf), chosen) for leaf, chosen in leaves_of(items, rows))


def common_images(first: ImageStore, second: ImageStore) -> list[tuple[int, int]]:
    """Positions of the images of the first store that the second contains too, and their positions there."""
    of_first, of_second = (store.digests(torch.arange(len(store))) for store in (first, second))
    places = {digest: position for position, digest in enumerate(of_second)}
    return [(position, places[digest]) for position, digest in enumerate(of_first) if digest in places]


def rows_below(store: ImageStore, rows: Tensor) -> Tensor:
    """Positions, in the innermost store, of images that :class:`ChosenImages` took from it."""
    while isinstance(store, ChosenImages):
        rows, store = store.rows[rows], store.store
    return rows


def first_of_each(keys: Iterable[Any]) -> Tensor:
    """Positions of the keys that no earlier key equals, int64, in order."""
    found: dict[Any, int] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, position)
    return torch.tensor(list(found.values()), dtype=torch.int64)


def fixed_shuffle(count: int, seed: int) -> Tensor:
    """Permutation of ``0 … count - 1``, reproducible on every machine and with every library version.

    Splits are public constants of a benchmark, so they hang on SHA-256 and not on a random generator.
    """
    keys = [hashlib.sha256(f"{seed}:{position}".encode()).digest() for position in range(count)]
    return torch.tensor(sorted(range(count), key=keys.__getitem__), dtype=torch.int64)


def digest_of(data: bytes) -> bytes:
    """Digest of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _as_float(images: Tensor) -> Tensor:
    scaled = images.to(torch.float32)
    return scaled.div_(255) if images.dtype == torch.uint8 else scaled


Task = Literal["multiclass", "multilabel"]
TASKS: tuple[Task, ...] = ("multiclass", "multilabel")
_COMPARED = 256  # images of which processes compare a digest


def check_targets(
    name: str, labels: Tensor, count: int, num_classes: int, task: str, *, unknown_allowed: bool = False
) -> Tensor:
    """Return labels as int64; errors do not quote a label.

    Args:
        name: of the argument, for messages.
        labels: classes, whole numbers in ``[0, num_classes)`` of shape ``(count,)``; under ``"multilabel"``
            attributes, 0 or 1, of shape ``(count, num_classes)``.
        count: how many images there are.
        num_classes: number of classes, or of attributes.
        task: ``"multiclass"`` or ``"multilabel"``.
        unknown_allowed: -1 means "not known".

    Raises:
        ValueError: on a wrong shape, dtype or range.
    """
    multilabel = task == "multilabel"
    whole = not (
        labels.is_floating_point() or labels.is_complex() or (labels.dtype == torch.bool and not multilabel)
    )
    if not whole or labels.shape[1:] != ((num_classes,) if multilabel else ()) or not labels.ndim:
        wanted = (
            f"(n, {num_classes}), a row of attributes (0 or 1)" if multilabel else "(n,), one class index"
        )
        raise InputError(
            f"{name}: shape {shape_text(labels.shape)}, {labels.dtype}; expected whole numbers of shape {wanted} "
            "an image"
        )
    if len(labels) != count:
        raise InputError(f"{name}: not as many labels as examples; expected one label per example")
    labels = labels.to(torch.int64)
    if bool(
        ((labels < (-1 if unknown_allowed else 0)) | (labels >= (2 if multilabel else num_classes))).any()
    ):
        wrong = "attributes are neither 0 nor 1" if multilabel else f"labels lie outside [0, {num_classes=})"
        unknown = " (or -1 where it isn't known)" if unknown_allowed else ""
        raise InputError(f"{name}: some {wrong}{unknown}; remap them, or correct num_classes")
    return labels


def known_rows(labels: Tensor) -> Tensor:
    """Mask, bool ``(n,)``, of rows of int64 labels, ``(n,)`` or ``(n, a)``, with a known label (-1: not known)."""
    return labels >= 0 if labels.ndim == 1 else (labels >= 0).any(dim=1)


def _check_soft(soft: Tensor, known: Tensor, num_classes: int, task: str) -> Tensor:
    """Return probabilities as float32 on the CPU; ``ValueError`` for another shape, or known rows that are none."""
    if soft.shape != (len(known), num_classes) or not soft.is_floating_point():
        raise InputError(
            f"soft: shape {shape_text(soft.shape)}, {soft.dtype}; expected float of shape (n, {num_classes}), "
            "one row per example"
        )
    soft = soft.detach().to("cpu", torch.float32)
    answered = soft[known]
    if not bool(((answered >= 0) & (answered <= (1 if task == "multilabel" else torch.inf))).all()):
        raise InputError(
            "soft: rows of labelled examples must be probabilities (finite, at least 0); normalise them"
        )
    # Three decimals: probabilities may come from half precision.
    if task == "multiclass" and not bool(((answered.sum(1) - 1).abs() < 1e-3).all()):
        raise InputError("soft: rows of labelled examples must be probabilities of sum 1; normalise them")
    return soft


class _ImageSet(Dataset[Any]):
    def __init__(self, store: ImageStore, num_classes: int, task: str) -> None:
        self.store = store
        self.num_classes = check_int("num_classes", num_classes, 2)
        self.task = check_choice("task", task, TASKS)

    def __len__(self) -> int:
        return len(self.store)

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width of every image, or the length of every vector."""
        return self.store.shape

    def images(self, indices: Tensor | Sequence[int] | slice | None = None) -> Tensor:
        """Images as float32 ``(n, channels, height, width)`` in [0, 1], or vectors ``(n, d)``; all by default."""
        return self.store.read(as_indices(indices, len(self)))


class LabeledImages(_ImageSet):
    """Images with their labels; an item is ``(image, label)``.

    Args:
        store: the images.
        labels: class indices, shape ``(n,)``, in ``[0, num_classes)``; under ``"multilabel"`` attributes 0 or
            1, shape ``(n, num_classes)``.
        num_classes: number of classes, or of attributes.
        name: what the labels are called in error messages.
        task: ``"multiclass"`` or ``"multilabel"``.

    Attributes:
        labels: int64, shape ``(n,)``, or ``(n, num_classes)`` under ``"multilabel"``.
        task: as given.

    Raises:
        ValueError: if the labels don't fit the images; it shows no label.
    """

    def __init__(
        self,
        store: ImageStore,
        labels: Tensor,
        num_classes: int,
        name: str = "labels",
        task: str = "multiclass",
    ) -> None:
        super().__init__(store, num_classes, task)
        self.labels = check_targets(name, labels, len(store), self.num_classes, task)

    @classmethod
    def none(cls, image_shape: ImageShape, num_classes: int, task: str = "multiclass") -> LabeledImages:
        """Empty set, for a part that is not given."""
        labels = torch.empty((0, num_classes) if task == "multilabel" else 0, dtype=torch.int64)
        return cls(TensorImages(torch.empty(0, *image_shape)), labels, num_classes, task=task)

    def chosen(self, rows: Tensor) -> LabeledImages:
        """Subset of the images at these positions, int64 ``(k,)``."""
        if torch.equal(rows, torch.arange(len(self))):
            return self
        return LabeledImages(
            ChosenImages(self.store, rows), self.labels[rows], self.num_classes, task=self.task
        )

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        label = self.labels[index]
        return self.images([index])[0], label if self.task == "multilabel" else int(label)

    def check_same(self, agree: Callable[[bytes], bool]) -> None:
        """Refuse processes of one training that hold different images, where each is to read a share of them.

        Args:
            agree: whether all processes give the same bytes; here a digest of all labels and of some images spread
                over them, as private as these.

        Raises:
            ValueError: where they differ, in every process.
        """

        def compared() -> Iterator[Tensor]:
            yield self.labels
            if count := min(len(self), _COMPARED):
                yield self.images(torch.arange(count) * len(self) // count)

        check_same_in_processes(agree, compared())


class LabelTable(Dataset[Tensor]):
    """Released labels of public images, in shared memory, so that running loader workers see changes.

    ``table[indices]`` gives training targets.

    Args:
        count: number of public images; it never changes.
        num_classes: number of classes, or of attributes.
        task: ``"multiclass"`` or ``"multilabel"``.

    Attributes:
        labels: int64, shape ``(count,)``, or ``(count, num_classes)`` under ``"multilabel"``; -1 where there is
            no label.
        soft: float32, shape ``(count, num_classes)``, or None before the first soft label.
        soft_rows: bool, shape ``(count,)``; which examples have a soft label.
    """

    def __init__(self, count: int, num_classes: int, task: str = "multiclass") -> None:
        self.num_classes = num_classes
        self.task = check_choice("task", task, TASKS)
        shape = (count, num_classes) if task == "multilabel" else (count,)
        self.labels = torch.full(shape, -1, dtype=torch.int64)
        self.soft: Tensor | None = None
        self.soft_rows = torch.zeros(count, dtype=torch.bool)

    @property
    def labeled(self) -> Tensor:
        """Bool ``(count,)``: which examples have a label now (of an attribute at least)."""
        return known_rows(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Training targets of labelled examples.

        Returns:
            int64 ``(n,)``; or, as soon as any example has a soft label, float32 ``(n, num_classes)``, where
            examples with a hard label only have it as a one-hot row. Under ``"multilabel"`` ``(n, num_classes)``,
            int64 or (soft) float32, with -1 for attributes that are not known.

        Raises:
            RuntimeError: if one of the examples has no label.
        """
        labels = self.labels[indices]
        if not bool(known_rows(labels).all()):
            raise RuntimeError(
                "a labelled batch was requested for public examples without a label; leave the samplers of "
                "train_dataloader() as they are (Trainer(overfit_batches=…) replaces them: use "
                "limit_train_batches instead) and change labels between epochs only"
            )
        if self.soft is None or not bool(self.soft_rows.any()):
            return labels
        if self.task == "multilabel":
            hard = labels.to(torch.float32)
        else:
            hard = torch.nn.functional.one_hot(labels, self.num_classes).to(torch.float32)
        return torch.where(self.soft_rows[indices, None], self.soft[indices], hard)


class PublicDataset(_ImageSet):
    """Public images, their released labels and, separately, their true labels.

    An item is an image alone. Labels start as -1 and change by :meth:`set_labels`; the data module's
    training loader follows at its next epoch. For training without privacy (upper bounds, baselines),
    ``public.set_labels(indices, public.truth[indices])`` is all that is needed.

    Args:
        store: the images.
        num_classes: number of classes, or of attributes.
        truth: true classes, shape ``(m,)``, -1 where not known; for evaluation only. Training batches are
            made from the store and the label table, neither of which holds it. Under ``"multilabel"`` true
            attributes, shape ``(m, num_classes)``.
        task: ``"multiclass"`` or ``"multilabel"``.

    Attributes:
        task: as given.

    Raises:
        ValueError: if the truth doesn't fit the images.
    """

    def __init__(
        self, store: ImageStore, num_classes: int, truth: Tensor | None = None, task: str = "multiclass"
    ) -> None:
        super().__init__(store, num_classes, task)
        if truth is not None:
            truth = check_targets("public_truth", truth, len(store), num_classes, task, unknown_allowed=True)
        self._truth = truth
        self.table = LabelTable(len(store), num_classes, task)

    def chosen(self, rows: Tensor) -> PublicDataset:
        """Subset of the images at these positions, int64 ``(k,)``, with their hard labels."""
        if torch.equal(rows, torch.arange(len(self))):
            return self
        truth = None if self._truth is None else self._truth[rows]
        made = PublicDataset(ChosenImages(self.store, rows), self.num_classes, truth, self.task)
        made.table.labels.copy_(self.labels[rows])
        return made

    def __getitem__(self, index: int) -> Tensor:
        return self.images([index])[0]

    @property
    def truth(self) -> Tensor | None:
        """True classes, int64 ``(m,)`` (attributes ``(m, a)``), -1 where not known, or None; for evaluation only."""
        return self._truth

    @property
    def labels(self) -> Tensor:
        """Released labels, int64 ``(m,)`` or ``(m, a)`` in shared memory, -1 where there is none."""
        return self.table.labels

    @property
    def soft_labels(self) -> Tensor | None:
        """Released soft labels, float32 ``(m, num_classes)``, or None where none was ever released.

        Rows that :attr:`soft_mask` doesn't mark have no meaning.
        """
        return self.table.soft if bool(self.soft_mask.any()) else None

    @property
    def soft_mask(self) -> Tensor:
        """Bool ``(m,)``: which images have a soft label."""
        return self.table.soft_rows

    def set_labels(
        self,
        indices: Tensor | Sequence[int] | slice,
        labels: Tensor | Sequence[int],
        soft: Tensor | None = None,
    ) -> None:
        """Set labels of some images; call it between epochs.

        Args:
            indices: which images: whole numbers, a bool mask or a slice. Where one occurs twice its last label stays.
            labels: their classes, int64 ``(n,)``; -1 takes a label away, so a release with refused queries
                can be passed as it is. Under ``"multilabel"`` attributes, int64 ``(n, num_classes)``.
            soft: class probabilities, float ``(n, num_classes)``; rows of labelled images sum to one (under
                ``"multilabel"`` each entry is a separate probability). An image that had a soft label and
                now gets none keeps no soft label.

        Raises:
            IndexError: if an index is out of range.
            ValueError: if shapes, dtypes or values don't fit; nothing was changed then.
        """
        rows = as_indices(indices, len(self))
        values = torch.as_tensor(labels)
        if values.numel() == 0:
            values = values.to(torch.int64).reshape(0, *self.table.labels.shape[1:])
        values = check_targets(
            "labels", values.cpu(), len(rows), self.num_classes, self.task, unknown_allowed=True
        )
        known = known_rows(values)
        if soft is not None:
            soft = _check_soft(soft, known, self.num_classes, self.task)
        # Repeated indices: numpy promises that the last one wins, torch doesn't. The views share memory.
        where = rows.numpy()
        self.table.labels.numpy()[where] = values.numpy()
        self.table.soft_rows.numpy()[where] = False
        if soft is not None:
            if self.table.soft is None:
                self.table.soft = torch.zeros(len(self), self.num_classes)
            self.table.soft.numpy()[where] = soft.numpy()
            self.table.soft_rows.numpy()[where] = known.numpy()

    def clear_labels(self) -> None:
        """Remove all labels, hard and soft."""
        self.table.labels.fill_(-1)
        self.table.soft_rows.fill_(False)


def as_part(part: Any, name: str, public: bool, image_shape: ImageShape, num_classes: int, task: str) -> Any:
    """Convert a map-style data set to a part of a data module; return a part unchanged.

    Args:
        part: :class:`LabeledImages`, :class:`PublicDataset`, or a map-style data set (a list, too, or
            :class:`ItemImages`) of ``(x, y)`` or mappings; of a public part also of ``x`` alone, and ``y`` is its
            truth.
        name: of the part, for messages.
        public: whether a :class:`PublicDataset` is wanted.
        image_shape: of every ``x``.
        num_classes: number of classes, or of attributes.
        task: ``"multiclass"`` or ``"multilabel"``.

    Raises:
        ValueError: for anything else, for items that don't fit or differ when they are read again, for labels that
            don't fit, and for private records that are read several times.
    """
    if isinstance(part, PublicDataset if public else LabeledImages):
        return part
    store = part if isinstance(part, ItemImages) else ItemImages(part, image_shape, name)
    if name == "private" and has_repeated_rows(store._items):
        raise InputError(
            "the private set reads some rows several times; name each row once, or ε would not hold"
        )
    found = []
    for row in range(len(part)):
        image, label = store.pair(store._items[row])  # the image is read again when it is looked at
        if row < _READ_TWICE and not torch.equal(image, store.pair(store._items[row])[0]):
            raise InputError(
                f"the {name} set: an item differs when read again; leave random augmentation out"
            )
        found += [label] if (label := np.asarray(label)).dtype.kind in "buif" else []
    if len({label.shape for label in found}) > 1 or (len(found) != len(part) and (found or not public)):
        raise InputError(
            f"the {name} set has items that are no (x, y); expected a label y, a number or a row of attributes, with "
            f"each image x ({store._fields[1]!r} of mappings)"
        )
    labels = torch.from_numpy(np.stack(found)) if found else None
    if public:
        return PublicDataset(store, num_classes, labels, task)
    if labels is None:
        return LabeledImages.none(image_shape, num_classes, task)
    return LabeledImages(store, labels, num_classes, f"labels of the {name} set", task)
