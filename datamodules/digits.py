"""scikit-learn's bundled digits, available without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset, TensorImages, fixed_shuffle

_TOTAL = 1797
_SOURCE_SIDE = 8
_SOURCE_MAXIMUM = 16


class DigitsDataModule(PrivatePublicDataModule):
    """1,797 handwritten digits: 1,000 private, 500 public, 297 test; 10 classes.

    The data (Alpaydin & Kaynak 1998, the test part of UCI's optical digits) comes with scikit-learn. One
    fixed shuffle cuts it, without regard to classes: a stratified cut would make it depend on the labels
    whether a record is private.

    Images are 8×8 with 17 grey levels and are enlarged by bilinear interpolation, because histograms of
    gradients with cells of 4×4 pixels see next to nothing at 8×8: the share of public images whose nearest
    private neighbour by such features has the right class is 0.81 at 8×8, 0.988 at 16×16 and 0.994 at 20×20
    (mean of five shuffles), and no better beyond.

    Args:
        image_size: side of the enlarged images; 8 leaves them as they are.
        private_records: private images.
        public_examples: public images; what is left is the test set.
        split_seed: of the shuffle, a public constant. Figures of different values don't compare.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range, or if nothing is left for the test set.

    Example:
        >>> from pl_privknn import DigitsDataModule
        >>> data = DigitsDataModule(public_examples=700)
        >>> len(data.load_private()), len(data.load_public()), len(data.load_test())
        (1000, 700, 97)
    """

    def __init__(
        self,
        image_size: int = 20,
        *,
        private_records: int = 1000,
        public_examples: int = 500,
        split_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        side = check_int("image_size", image_size, _SOURCE_SIDE)
        super().__init__(num_classes=10, image_shape=(1, side, side), **kwargs)
        self.private_records = check_int("private_records", private_records)
        self.public_examples = check_int("public_examples", public_examples)
        if private_records + public_examples >= _TOTAL:
            raise ValueError(
                f"private_records={private_records} and public_examples={public_examples} leave none "
                f"of {_TOTAL} images for the test set; make one of them smaller"
            )
        self.split_seed = check_int("split_seed", split_seed, 0)
        self._all: tuple[Tensor, Tensor] | None = None

    def load_private(self) -> LabeledImages:
        """The first ``private_records`` of the shuffled images."""
        return self._labeled(0, self.private_records)

    def load_public(self) -> PublicDataset:
        """The next ``public_examples`` of the shuffled images."""
        part = self._labeled(self.private_records, self.private_records + self.public_examples)
        return PublicDataset(part.store, self.num_classes, part.labels)

    def load_test(self) -> LabeledImages:
        """The remaining shuffled images."""
        return self._labeled(self.private_records + self.public_examples, _TOTAL)

    def _labeled(self, start: int, stop: int) -> LabeledImages:
        if self._all is None:
            from sklearn.datasets import load_digits

            digits = load_digits()
            images = torch.from_numpy(digits.images).to(torch.float32)[:, None] / _SOURCE_MAXIMUM
            if self.image_shape[1] != _SOURCE_SIDE:
                images = torch.nn.functional.interpolate(
                    images, size=self.image_shape[1:], mode="bilinear", align_corners=False
                )
            self._all = (images * 255).round().to(torch.uint8), torch.from_numpy(digits.target)
        images, labels = self._all
        chosen = fixed_shuffle(_TOTAL, self.split_seed)[start:stop]
        return LabeledImages(TensorImages(images[chosen]), labels[chosen], self.num_classes)
