"""CIFAR-10 and CIFAR-100, with the splits of the private-labelling papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn._checks import check_choice
from pl_privknn.datamodules.datasets import ImageStore, JoinedImages, TensorImages
from pl_privknn.datamodules.published import PublishedDataModule

#: Numbers of private, public and test images of each split; None: all that there are.
SPLITS: dict[str, tuple[int | None, int | None, int | None]] = {
    "private_knn": (30_000, 29_000, 1_000),
    "reverse_knn": (None, 30_000, 1_000),
    "train_test": (None, 9_000, 1_000),
    "pretraining": (None, None, None),
}


class CIFAR10DataModule(PublishedDataModule):
    """CIFAR-10 (Krizhevsky 2009): 60,000 colour images of 32×32, 10 classes.

    ``split`` says which images are what; rows are drawn by a fixed shuffle:

    ================== ======================= ================= ================
    split              private                 public            test
    ================== ======================= ================= ================
    ``"private_knn"``  30,000 of all           29,000 of all     1,000 of all
    ``"reverse_knn"``  what the others leave,  30,000 of the     1,000 of the
                       29,000                  training files    test file
    ``"train_test"``   training files, 50,000  9,000 of the      1,000 of the
                                               test file         test file
    ``"pretraining"``  none                    training files,   test file,
                                               50,000            10,000
    ================== ======================= ================= ================

    They are those of Private-kNN (Zhu et al. 2020, section 4.2), of reverse kNN, of Guided PATE (training files
    private, the test file cut 9 : 1), and one for a first stage on public data with ``train_on_truth: true``, whose
    backbone gives features by :class:`~pl_privknn.features.backbone.CheckpointFeatures`.

    **On disk**: the folder ``root/cifar-10-batches-py`` of the Python version, from
    https://www.cs.toronto.edu/~kriz/cifar.html (163 MB; or ``download=True``). The files are pickles, which could run
    code: torchvision compares their checksums with the published ones before it reads them.

    Args:
        root: folder that holds (or will hold) the data.
        split: see above.
        private_records: private records, instead of the split's number.
        public_examples: public images, instead of the split's number.
        test_examples: test images, instead of the split's number.
        class_names: names of the classes, if others than the usual ones are wanted.
        **kwargs: see :class:`~pl_privknn.datamodules.published.PublishedDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing or not the published ones.
    """

    torchvision_name: ClassVar[str] = "CIFAR10"
    remedy: ClassVar[str] = "pass download=True, or unpack the Python version of the data set there"
    default_split: ClassVar[str] = "private_knn"
    classes: ClassVar[int] = 10
    default_names: ClassVar[tuple[str, ...] | None] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip

    def __init__(
        self,
        root: str | Path = "data",
        *,
        split: str | None = None,
        private_records: int | None = None,
        public_examples: int | None = None,
        test_examples: int | None = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.split = check_choice("split", self.default_split if split is None else split, tuple(SPLITS))
        self.needs_private = self.split != "pretraining"
        private, public, test = SPLITS[self.split]
        super().__init__(
            root,
            num_classes=self.classes,
            image_shape=(3, 32, 32),
            class_names=self.default_names if class_names is None else class_names,
            private_records=private if private_records is None else private_records,
            public_examples=public if public_examples is None else public_examples,
            test_examples=test if test_examples is None else test_examples,
            **kwargs,
        )

    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """See :meth:`PublishedDataModule.part`."""
        files = [self.torchvision_files(self.root, train=train) for train in (True, False)]
        images = [TensorImages(torch.from_numpy(file.data).permute(0, 3, 1, 2)) for file in files]
        labels = torch.tensor([label for file in files for label in file.targets])
        return JoinedImages(images), labels, self.rows(*map(len, images))[name]

    def rows(self, in_train: int, in_test: int) -> dict[str, Tensor]:
        """Rows of the private, public and test part of all images, training files first."""
        train, test = self.shuffled(in_train), in_train + self.shuffled(in_test)
        if self.split == "private_knn":
            public, rest = self.cut("public_examples", self.shuffled(in_train + in_test))
            tested, private = self.cut("test_examples", rest)
        elif self.split == "reverse_knn":
            public, more = self.cut("public_examples", train)
            tested, rest = self.cut("test_examples", test)
            private = self.shuffled(torch.cat([more, rest]))
        elif self.split == "train_test":
            (public, rest), private = self.cut("public_examples", test), train
            tested, _ = self.cut("test_examples", rest)
        else:
            (public, _), (tested, _) = self.cut("public_examples", train), self.cut("test_examples", test)
            return {"private": train[:0], "public": public, "test": tested}
        return {"private": self.cut("private_records", private)[0], "public": public, "test": tested}


class CIFAR100DataModule(CIFAR10DataModule):
    """CIFAR-100 (Krizhevsky 2009): 60,000 colour images of 32×32, 100 classes (the fine labels).

    As :class:`CIFAR10DataModule`, with the folder ``root/cifar-100-python``. By default all
    training images are public and labelled, the public data set on which Private-kNN and noisy SGD learn their
    first features for CIFAR-10: fit it with ``train_on_truth: true`` and without a labeler. ``split="train_test"`` is
    that of Guided PATE.

    Args:
        split: see :class:`CIFAR10DataModule`; ``"pretraining"`` by default.
        **kwargs: see :class:`CIFAR10DataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing or not the published ones.
    """

    torchvision_name: ClassVar[str] = "CIFAR100"
    default_split: ClassVar[str] = "pretraining"
    classes: ClassVar[int] = 100
    default_names: ClassVar[tuple[str, ...] | None] = None
