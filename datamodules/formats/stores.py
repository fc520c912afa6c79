"""Image stores made of other stores: a choice of rows, or several one after another. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn.datamodules.formats.images import ImageStore, TensorImages

_CHUNK = 1024


class ChosenImages(ImageStore):
    """Some images of another store, in an order of their own; some may be there several times.

    Args:
        store: where the images are.
        rows: int64 ``(n,)``, which of them; within range.
    """

    def __init__(self, store: ImageStore, rows: Tensor) -> None:
        self.store, self.rows = store, rows
        self.shape = store.shape

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        return self.store.read(self.rows[indices])

    def digests(self) -> list[bytes]:
        """See :meth:`ImageStore.digests`; the same as the store's for these images."""
        parts = (TensorImages(self.store.read(rows)) for rows in self.rows.split(_CHUNK))
        return [digest for part in parts for digest in part.digests()]

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
        if len({store.shape for store in stores}) != 1:
            raise ValueError(
                f"stores: images of shapes {[store.shape for store in stores]}; want one or more stores of one "
                "shape"
            )
        self.stores = list(stores)
        self.shape = stores[0].shape
        self._ends = torch.tensor([len(store) for store in stores]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        images = torch.empty(len(indices), *self.shape)
        owner = torch.searchsorted(self._ends, indices, right=True)
        for number, store in enumerate(self.stores):
            places = torch.nonzero(owner == number).flatten()
            if len(places):
                start = int(self._ends[number]) - len(store)
                images[places] = store.read(indices[places] - start)
        return images

    def digests(self) -> list[bytes]:
        """See :meth:`ImageStore.digests`."""
        return [digest for store in self.stores for digest in store.digests()]

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        for store in self.stores:
            store.preload()
