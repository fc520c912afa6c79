"""A user's own data, given as arrays or as files of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.array_files import (
    ArrayOrPath,
    array_shape,
    as_images,
    image_shape,
    read_array,
)
from pl_privknn.datamodules.formats.images import ImageStore, TensorImages


class ArraysDataModule(PrivatePublicDataModule):
    """Private, public and test images from numpy arrays, tensors, or ``.npy`` / ``.npz`` files.

    Every argument that takes an array takes a path as well, so that the module works from YAML. A ``.npy``
    file stays on disk and is paged in as it is used. Of an ``.npz`` file the member with the argument's name
    is taken, or its only member, or the one named as in ``data.npz:x_train``: one file written by
    ``numpy.savez(path, private_images=…, private_labels=…, …)`` may serve for all of them.

    Images are uint8 (0 … 255) or float (0 … 1), of shape ``(n, h, w)``, ``(n, c, h, w)`` or ``(n, h, w, c)``.
    Arrays are kept as they are and not copied: don't change them afterwards. Labels are whole numbers of
    shape ``(n,)`` in ``[0, num_classes)``; with ``task="multilabel"`` rows of 0 and 1, ``(n, num_classes)``.

    Args:
        private_images: images of the sensitive records.
        private_labels: their classes.
        public_images: images that may be seen by anybody.
        public_truth: their classes where known, else -1; for evaluation only, never for training.
        test_images: images for the final accuracy; none by default.
        test_labels: their classes.
        num_classes: number of classes, a public constant.
        val_images: a validation set, instead of public images with known truth.
        val_labels: their classes.
        predict_images: images to predict, instead of the test images.
        channels_last: whether four-dimensional arrays are ``(n, h, w, c)``. None: the dimension that is 1 or
            3 holds the colours, and an error asks where both or neither of them are.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if shapes, dtypes or values don't fit. Shapes are checked at once, values at ``setup``.
    """

    def __init__(
        self,
        private_images: ArrayOrPath,
        private_labels: ArrayOrPath | Sequence[int],
        public_images: ArrayOrPath,
        public_truth: ArrayOrPath | Sequence[int] | None = None,
        test_images: ArrayOrPath | None = None,
        test_labels: ArrayOrPath | Sequence[int] | None = None,
        *,
        num_classes: int,
        val_images: ArrayOrPath | None = None,
        val_labels: ArrayOrPath | Sequence[int] | None = None,
        predict_images: ArrayOrPath | None = None,
        channels_last: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._sources: dict[str, Any] = {
            "private_images": private_images,
            "private_labels": private_labels,
            "public_images": public_images,
            "public_truth": public_truth,
            "test_images": test_images,
            "test_labels": test_labels,
            "val_images": val_images,
            "val_labels": val_labels,
            "predict_images": predict_images,
        }
        for part in ("test", "val"):
            given = [f"{part}_{kind}" for kind in ("images", "labels") if self._has(f"{part}_{kind}")]
            if len(given) == 1:
                raise ValueError(
                    f"{given[0]}: {part}_images and {part}_labels go together; pass both or neither"
                )
        if public_images is None:
            raise ValueError("public_images=None: a student needs public images; pass an array or its file")
        shapes = {
            name: array_shape(name, source)
            for name, source in self._sources.items()
            if source is not None and name.endswith("_images")
        }
        wanted = image_shape("public_images", shapes["public_images"], channels_last)
        for name, shape in shapes.items():
            if (found := image_shape(name, shape, channels_last)) != wanted:
                raise ValueError(
                    f"{name}: images of shape {found} (channels, height, width), the public ones have "
                    f"{wanted}; bring all parts to one size"
                )
        self.channels_last = channels_last
        super().__init__(num_classes=num_classes, image_shape=wanted, **kwargs)

    def load_private(self) -> LabeledImages:
        """``private_images`` and ``private_labels``."""
        return self._labeled("private")

    def load_public(self) -> PublicDataset:
        """``public_images`` and ``public_truth``."""
        truth = self._vector("public_truth") if self._has("public_truth") else None
        return PublicDataset(self._store("public_images"), self.num_classes, truth, self.task)

    def load_test(self) -> LabeledImages:
        """``test_images`` and ``test_labels``, or an empty set."""
        if self._has("test_images"):
            return self._labeled("test")
        return LabeledImages.none(self.image_shape, self.num_classes, self.task)

    def load_validation(self) -> LabeledImages | None:
        """``val_images`` and ``val_labels``, if given."""
        return self._labeled("val") if self._has("val_images") else None

    def load_predict(self) -> ImageStore | None:
        """``predict_images``, if given."""
        return self._store("predict_images") if self._has("predict_images") else None

    def _has(self, name: str) -> bool:
        return self._sources[name] is not None

    def _labeled(self, part: str) -> LabeledImages:
        labels = self._vector(f"{part}_labels")
        store = self._store(f"{part}_images")
        return LabeledImages(store, labels, self.num_classes, f"{part}_labels", self.task)

    def _store(self, name: str) -> TensorImages:
        array = read_array(name, self._sources[name])
        return TensorImages(as_images(name, array, self.image_shape, self.channels_last))

    def _vector(self, name: str) -> Tensor:
        return read_array(name, self._sources[name])
