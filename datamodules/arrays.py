"""Data that is already in memory, or in NumPy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.images import TensorImages

#: A tensor, an array, or the path of a ``.npy`` file, or ``file.npz:name``.
Table = Tensor | np.ndarray[Any, Any] | str | Path


class ArraysDataModule(PrivatePublicDataModule):
    """Images and labels given as tensors, arrays or NumPy files (so that YAML can name them).

    Images are uint8 (0 … 255) or float (0 … 1) of shape ``(n, h, w)``, ``(n, c, h, w)`` or, with
    ``channels_last=True``, ``(n, h, w, c)``. Labels are whole numbers in ``[0, num_classes)``.

    Args:
        private_images: images of the private records; for labelers and baselines alone.
        private_labels: their classes.
        public_images: unlabelled public images.
        test_images: images to test on; none by default.
        test_labels: their classes.
        public_truth: classes of the public images where they are known, -1 elsewhere; evaluation only.
        num_classes: number of classes, a public constant: it is never inferred from private labels.
        channels_last: whether the last of four dimensions is the channel.
        **kwargs: see :class:`PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a path leads nowhere.
        ValueError: on shapes, dtypes or values that do not fit; messages show no private value.
    """

    def __init__(
        self,
        private_images: Table,
        private_labels: Table,
        public_images: Table,
        num_classes: int,
        test_images: Table | None = None,
        test_labels: Table | None = None,
        public_truth: Table | None = None,
        channels_last: bool = False,
        **kwargs: Any,
    ) -> None:
        if (test_images is None) != (test_labels is None):
            raise ValueError("test_images, test_labels: give both or neither")
        self._images = {
            "private_images": _images("private_images", private_images, channels_last),
            "public_images": _images("public_images", public_images, channels_last),
        }
        shape = tuple(self._images["public_images"].shape[1:])
        if test_images is None:
            self._images["test_images"] = torch.empty(0, *shape)
        else:
            self._images["test_images"] = _images("test_images", test_images, channels_last)
        for name, images in self._images.items():
            if tuple(images.shape[1:]) != shape:
                raise ValueError(
                    f"{name}: images of shape {tuple(images.shape[1:])}, but public images have {shape}; "
                    "resize them to one shape (channels, height, width)"
                )
        self._private_labels = _labels("private_labels", private_labels)
        self._test_labels = _labels("test_labels", test_labels if test_labels is not None else torch.empty(0))
        self._truth = None if public_truth is None else _labels("public_truth", public_truth)
        super().__init__(num_classes=num_classes, image_shape=shape, **kwargs)
        # Wrong labels are found now, before a run has begun.
        self._parts = (
            LabeledImages(
                TensorImages(self._images["private_images"]),
                self._private_labels,
                num_classes,
                "private_labels",
            ),
            PublicDataset(TensorImages(self._images["public_images"]), num_classes, self._truth),
            LabeledImages(
                TensorImages(self._images["test_images"]), self._test_labels, num_classes, "test_labels"
            ),
        )

    def load_private(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        return self._parts[0]

    def load_public(self) -> PublicDataset:
        """See :class:`PrivatePublicDataModule`."""
        return self._parts[1]

    def load_test(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        return self._parts[2]


def _read(name: str, table: Table) -> Tensor:
    if isinstance(table, Tensor):
        return table
    if isinstance(table, str | Path):
        file, _, key = str(table).partition(".npz:")
        path = Path(f"{file}.npz") if key else Path(table)
        if not path.is_file():
            raise FileNotFoundError(
                f"{name}: there is no file {path}; give an array or the path of a NumPy file"
            )
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            if key not in loaded:
                raise ValueError(
                    f"{name}={str(table)!r}: write {path.name}:NAME with one of {', '.join(loaded.files)}"
                )
            loaded = loaded[key]
        return torch.from_numpy(loaded)
    return torch.as_tensor(np.asarray(table))


def _images(name: str, table: Table, channels_last: bool) -> Tensor:
    images = _read(name, table)
    if channels_last and images.ndim == 4:
        images = images.permute(0, 3, 1, 2)
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"{name}: shape {tuple(images.shape)}; want (n, h, w), (n, c, h, w) with 1 or 3 channels, or "
            "(n, h, w, c) with channels_last=True"
        )
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise ValueError(f"{name}: {images.dtype}; want uint8 in 0 … 255 or float in 0 … 1")
    if len(images) and not bool(((images >= 0) & (images <= 1)).all()):
        raise ValueError(f"{name}: float values must lie in 0 … 1 and be finite; scale them, or use uint8")
    return images


def _labels(name: str, table: Table) -> Tensor:
    labels = _read(name, table)
    return labels.to(torch.int64) if labels.numel() == 0 else labels
