"""scikit-learn's bundled handwritten digits: real images that need no download."""

from __future__ import annotations

from typing import Any

import torch

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.images import TensorImages, fixed_shuffle

_TOTAL = 1797


class DigitsDataModule(PrivatePublicDataModule):
    """The 1,797 digits of 8 × 8 pixels that come with scikit-learn (UCI optical recognition, test part).

    After one fixed shuffle the first images are private, the next ones public, the rest is the test set:
    1,000, 497 and 300 by default. A few images occur twice in the original and would be public and test
    images at once; the later one of such a pair is left out of the test set.

    Args:
        image_size: side to which images are enlarged, bilinearly; 16 gives HOG's 4 × 4 cells something to
            look at.
        num_private: private images.
        num_public: public images; what is left is the test set.
        split_seed: of the shuffle, a public constant.
        **kwargs: see :class:`PrivatePublicDataModule`.

    Raises:
        ValueError: if the parts do not fit into 1,797 images.
    """

    def __init__(
        self,
        image_size: int = 16,
        num_private: int = 1000,
        num_public: int = 497,
        split_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        self.image_size = check_int("image_size", image_size, 8)
        self.num_private = check_int("num_private", num_private)
        self.num_public = check_int("num_public", num_public)
        self.split_seed = check_int("split_seed", split_seed, 0)
        if num_private + num_public >= _TOTAL:
            raise ValueError(
                f"num_private={num_private}, num_public={num_public}: the digits are {_TOTAL} images and some "
                "must be left to test on; lower one of the two"
            )
        super().__init__(num_classes=10, image_shape=(1, self.image_size, self.image_size), **kwargs)
        self._split: tuple[LabeledImages, PublicDataset, LabeledImages] | None = None

    def load_private(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        return self._load()[0]

    def load_public(self) -> PublicDataset:
        """See :class:`PrivatePublicDataModule`."""
        return self._load()[1]

    def load_test(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        return self._load()[2]

    def _load(self) -> tuple[LabeledImages, PublicDataset, LabeledImages]:
        if self._split is None:
            from sklearn.datasets import load_digits

            digits = load_digits()
            pixels = torch.from_numpy(digits.images).float()[:, None] / 16.0
            size = (self.image_size, self.image_size)
            images = torch.nn.functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
            labels = torch.from_numpy(digits.target).long()
            order = fixed_shuffle(len(labels), self.split_seed)
            private, public, test = order.tensor_split((self.num_private, self.num_private + self.num_public))
            seen = {image.numpy().tobytes() for image in pixels[public]}
            test = torch.tensor([i for i in test.tolist() if pixels[i].numpy().tobytes() not in seen])
            self._split = (
                LabeledImages(TensorImages(images[private]), labels[private], 10),
                PublicDataset(TensorImages(images[public]), 10, labels[public]),
                LabeledImages(TensorImages(images[test]), labels[test], 10),
            )
        return self._split
