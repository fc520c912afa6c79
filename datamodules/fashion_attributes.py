"""Fashion-MNIST as a multi-label data set: attributes that follow from the ten classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.images import fixed_shuffle
from pl_privknn.datamodules.mnist import FashionMNISTDataModule

#: Attributes of Fashion-MNIST's classes, in the order of the class numbers 0 … 9: T-shirt/top, trouser, pullover,
#: dress, coat, sandal, shirt, sneaker, bag, ankle boot.
FASHION_ATTRIBUTES: dict[str, str] = {
    "upper_body":    "1011101000",
    "legs":          "0101000000",
    "footwear":      "0000010101",
    "bag":           "0000000010",
    "sleeves":       "1010101000",
    "long_sleeves":  "0010101000",
    "closed_front":  "1011000000",
    "button_front":  "0000101000",
    "closed_shoe":   "0000000101",
    "cold_weather":  "0010100001",
}  # fmt: skip


class FashionMNISTAttributesDataModule(PrivatePublicDataModule):
    """Fashion-MNIST (Xiao et al. 2017) with attributes instead of classes: 60,000 private, 5,000 public, 5,000 test.

    For multi-label labelling on real pixels without a download. Attributes are those of an image's class, by
    this table (a convention, not an annotation of single images: some dresses have sleeves, some tops have
    buttons), so every image of a class has the same ones:

    ============== ==================================================== ==================
    attribute      classes that have it                                 share of the images
    ============== ==================================================== ==================
    upper_body     T-shirt/top, pullover, dress, coat, shirt            0.5
    legs           trouser, dress                                       0.2
    footwear       sandal, sneaker, ankle boot                          0.3
    bag            bag                                                  0.1
    sleeves        T-shirt/top, pullover, coat, shirt                   0.4
    long_sleeves   pullover, coat, shirt                                0.3
    closed_front   T-shirt/top, pullover, dress                         0.3
    button_front   coat, shirt                                          0.2
    closed_shoe    sneaker, ankle boot                                  0.2
    cold_weather   pullover, coat, ankle boot                           0.3
    ============== ==================================================== ==================

    The ten classes have ten different rows of one (sandal, bag) to five attributes (pullover, coat), 2.8 on
    average, so clipping at τ = 3 shortens some rows and not others. Answering "no" everywhere has a mean
    attribute accuracy of 0.72.

    The parts are those of :class:`~pl_privknn.datamodules.mnist.FashionMNISTDataModule` with the same
    ``split_seed``.

    Args:
        root: folder that holds (or will hold) the data; Debian's package is found without it.
        download: fetch the files by torchvision where they are missing.
        attributes: names of the attributes to use, in this order; all ten by default.
        num_private: a fixed random choice of this many private records; all by default.
        num_public: a fixed random choice of this many images of the public half; all by default.
        split_seed: of the shuffles, a public constant.
        records_per_group: gather the private records into groups of so many, at random, as if each person
            owned that many: :attr:`private_groups`. None: no groups.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for unknown attributes or arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing.
    """

    def __init__(
        self,
        root: str | Path = "data",
        *,
        download: bool = False,
        attributes: Sequence[str] | None = None,
        num_private: int | None = None,
        num_public: int | None = None,
        split_seed: int = 0,
        records_per_group: int | None = None,
        **kwargs: Any,
    ) -> None:
        names = tuple(FASHION_ATTRIBUTES) if attributes is None else tuple(attributes)
        if unknown := [name for name in names if name not in FASHION_ATTRIBUTES]:
            raise ValueError(
                f"attributes: {unknown[0]!r} is not one of {', '.join(FASHION_ATTRIBUTES)}; choose among these"
            )
        super().__init__(
            num_classes=len(names),
            image_shape=(1, 28, 28),
            class_names=names,
            task="multilabel",
            **kwargs,
        )
        self.records_per_group = (
            None if records_per_group is None else check_int("records_per_group", records_per_group)
        )
        self._classes = FashionMNISTDataModule(
            root, download=download, num_private=num_private, num_public=num_public, split_seed=split_seed
        )

    @property
    def table(self) -> Tensor:
        """Attributes of the ten classes, int64 ``(10, num_classes)``; public."""
        return torch.tensor([[int(bit) for bit in FASHION_ATTRIBUTES[name]] for name in self.class_names]).T

    def prepare_data(self) -> None:
        """Download the files if that was asked for and they are nowhere to be found."""
        self._classes.prepare_data()

    def load_private(self) -> LabeledImages:
        """The training file, or ``num_private`` records of it."""
        part = self._with_attributes(self._classes.load_private())
        if self.records_per_group is not None:
            # Whole groups of shuffled records; the last one may be smaller.
            order = fixed_shuffle(len(part), self._classes.split_seed + 1)
            self.private_groups = torch.empty(len(part), dtype=torch.int64)
            self.private_groups[order] = torch.arange(len(part)) // self.records_per_group
        return part

    def load_public(self) -> PublicDataset:
        """The first half of the shuffled test file, or ``num_public`` images of it."""
        part = self._classes.load_public()
        assert part.truth is not None
        return PublicDataset(part.store, self.num_classes, self.table[part.truth], self.task)

    def load_test(self) -> LabeledImages:
        """The second half of the shuffled test file."""
        return self._with_attributes(self._classes.load_test())

    def _with_attributes(self, part: LabeledImages) -> LabeledImages:
        return LabeledImages(part.store, self.table[part.labels], self.num_classes, task=self.task)
