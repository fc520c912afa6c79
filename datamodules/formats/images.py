"""Where the pixels are kept: compact in memory, float32 only while they are looked at."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn._checks import shape_text

_CHUNK = 1024


class ImageStore(abc.ABC):
    """A fixed number of images of one shape, read by index.

    Attributes:
        shape: channels, height and width of every image.
    """

    shape: tuple[int, int, int]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, indices: Tensor) -> Tensor:
        """Images as float32 ``(n, channels, height, width)`` in [0, 1].

        Args:
            indices: int64 ``(n,)``, within range.
        """

    @abc.abstractmethod
    def digests(self) -> list[bytes]:
        """One digest an image; equal images have equal digests."""

    @abc.abstractmethod
    def preload(self) -> None:
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
        images = self._images[indices]
        scaled = images.to(torch.float32)
        return (scaled.div_(255) if images.dtype == torch.uint8 else scaled).contiguous()

    def digests(self) -> list[bytes]:
        """See :meth:`ImageStore.digests`; digests of the float32 values, whatever the storage."""
        found = []
        for rows in torch.arange(len(self)).split(_CHUNK):
            found += [_digest(image.tobytes()) for image in self.read(rows).numpy()]
        return found

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`; there is nothing left to read."""


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
    places = {digest: position for position, digest in enumerate(first.digests())}
    return [
        (places[digest], position) for position, digest in enumerate(second.digests()) if digest in places
    ]


def fixed_shuffle(count: int, seed: int) -> Tensor:
    """A permutation of ``0 … count - 1`` that is the same on every machine and with every library version.

    Splits are public constants of a benchmark, so they hang on SHA-256 and not on a random generator.
    """
    keys = [hashlib.sha256(f"{seed}:{position}".encode()).digest() for position in range(count)]
    return torch.tensor(sorted(range(count), key=keys.__getitem__), dtype=torch.int64)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
