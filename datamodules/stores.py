"""Image stores: pixels compact in memory or in files, float32 only while they are looked at."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import shape_text

ImageShape = tuple[int, int, int]
_CHUNK = 1024


class ImageStore(abc.ABC):
    """A fixed number of images of one shape, read by index.

    Attributes:
        shape: channels, height and width of every image.
    """

    shape: ImageShape

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, indices: Tensor) -> Tensor:
        """Images as float32 ``(n, channels, height, width)`` in [0, 1].

        Args:
            indices: int64 ``(n,)``, within range.
        """

    def digests(self, indices: Tensor) -> list[bytes]:
        """One digest an image, of its float32 values; equal images have equal digests."""
        parts = (self.read(rows).numpy() for rows in indices.split(_CHUNK))
        return [digest_of(image.tobytes()) for part in parts for image in part]

    def preload(self) -> None:  # noqa: B027
        """Read now what would be read lazily: worker processes then share it with their parent."""


class TensorImages(ImageStore):
    """Images in one tensor, uint8 (0 … 255) or float (0 … 1), which is kept as it is and not copied.

    Args:
        images: shape ``(n, channels, height, width)``.
    """

    def __init__(self, images: Tensor) -> None:
        if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise ValueError(
                f"images: shape {shape_text(images.shape)}, {images.dtype}; want uint8 or float of shape "
                "(n, channels, height, width)"
            )
        self._images = images
        channels, height, width = images.shape[1:]
        self.shape = (channels, height, width)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        return _as_float(self._images[indices]).contiguous()


class ItemImages(ImageStore):
    """Images of a map-style data set whose items are ``x`` or ``(x, …)``, read item by item.

    Args:
        items: each time an item is read it must be the same; ``x`` is a tensor or array, uint8 or float.
        shape: channels, height and width of every ``x``.
    """

    def __init__(self, items: Any, shape: ImageShape) -> None:
        self._items, self.shape = items, shape

    def __len__(self) -> int:
        return len(self._items)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`.

        Raises:
            ValueError: if an item has another shape.
        """
        images = torch.empty(len(indices), *self.shape)
        for row, index in enumerate(indices.tolist()):
            item = self._items[index]
            image = torch.as_tensor(np.asarray(item[0] if isinstance(item, tuple | list) else item))
            if image.shape != self.shape:
                raise ValueError(
                    f"an item's x has another shape than image_shape={self.shape}; convert x to "
                    "(channels, height, width) in the data set"
                )
            images[row] = _as_float(image)
        return images


class ChosenImages(ImageStore):
    """Some images of another store, in an order of their own; some may be there several times.

    Args:
        store: where the images are.
        rows: int64 ``(n,)``, which of them; within range.
    """

    def __init__(self, store: ImageStore, rows: Tensor) -> None:
        self.store, self.rows, self.shape = store, rows, store.shape

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
    """The images of several stores, one store after another.

    Args:
        stores: at least one; their images have one shape.

    Raises:
        ValueError: if there is none, or shapes differ.
    """

    def __init__(self, stores: Sequence[ImageStore]) -> None:
        shapes = {store.shape for store in stores}
        if len(shapes) != 1:
            raise ValueError(
                f"stores: images of shapes {sorted(shapes)}; want one or more stores of one shape"
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
            places, store = torch.nonzero(owner == number).flatten(), self.stores[number]
            images[places] = store.read(indices[places] - (int(self._ends[number]) - len(store)))
        return images

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        for store in self.stores:
            store.preload()


def as_indices(indices: Tensor | Sequence[int] | slice | None, count: int) -> Tensor:
    """Turn any way of naming images into int64 ``(n,)`` on the CPU.

    Args:
        indices: whole numbers in ``[0, count)``, a bool mask of length ``count``, a slice, or None for all.
        count: how many images there are.

    Raises:
        IndexError: if an index is negative or too large, or the mask has another length.
        ValueError: if the indices are not one-dimensional whole numbers.
    """
    if indices is None or isinstance(indices, slice):
        return torch.arange(count)[indices if indices is not None else slice(None)]
    rows = torch.as_tensor(indices).detach().cpu()
    if rows.numel() == 0 and rows.ndim == 1:
        return torch.empty(0, dtype=torch.int64)
    if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
        raise ValueError(
            f"indices: shape {tuple(rows.shape)}, {rows.dtype}; want whole numbers of shape (n,)"
        )
    if rows.dtype == torch.bool:
        if len(rows) != count:
            raise IndexError("indices: a mask of another length than the images")
        return torch.nonzero(rows).flatten()
    rows = rows.to(torch.int64)
    if int(rows.min()) < 0 or int(rows.max()) >= count:
        raise IndexError(
            "indices: some are no positions of images; want whole numbers from 0 to the number of images less 1"
        )
    return rows


def common_images(first: ImageStore, second: ImageStore) -> list[tuple[int, int]]:
    """Positions of images that are in both stores, in the order of the second."""
    of_first, of_second = (store.digests(torch.arange(len(store))) for store in (first, second))
    places = {digest: position for position, digest in enumerate(of_first)}
    return [(places[digest], position) for position, digest in enumerate(of_second) if digest in places]


def fixed_shuffle(count: int, seed: int) -> Tensor:
    """A permutation of ``0 … count - 1`` that is the same on every machine and with every library version.

    Splits are public constants of a benchmark, so they hang on SHA-256 and not on a random generator.
    """
    keys = [hashlib.sha256(f"{seed}:{position}".encode()).digest() for position in range(count)]
    return torch.tensor(sorted(range(count), key=keys.__getitem__), dtype=torch.int64)


def digest_of(data: bytes) -> bytes:
    """A digest of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _as_float(images: Tensor) -> Tensor:
    scaled = images.to(torch.float32)
    return scaled.div_(255) if images.dtype == torch.uint8 else scaled
