"""CIFAR-10 and CIFAR-100, with the splits of the private-labelling papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_switch
from pl_privknn.datamodules.base import Overlap, PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.images import TensorImages, fixed_shuffle
from pl_privknn.datamodules.formats.published import DamagedFileError, check_md5, find_file, read_array_pickle
from pl_privknn.datamodules.formats.stores import ChosenImages

SPLITS = ("private_knn", "reverse_knn", "train_test", "pretraining")
_PIXELS = 3 * 32 * 32


class CIFAR10DataModule(PrivatePublicDataModule):
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

    **On disk**: ``data_batch_1`` … ``data_batch_5`` and ``test_batch`` in ``root/cifar-10-batches-py`` or in
    ``root``, from https://www.cs.toronto.edu/~kriz/cifar.html (the Python version, 163 MB; or ``download=True``).
    The files are pickles; only arrays are read from them, so they can't run code.

    Args:
        root: folder that holds (or will hold) the data.
        split: see above.
        download: fetch the files by torchvision where they are missing.
        num_private: private records, instead of the split's number.
        num_public: public images, instead of the split's number.
        num_test: test images, instead of the split's number.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        verify: compare files with the published checksums. False for other data in this format.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`; published sets may hold an image
            twice, so it only warns here.
        class_names: names of the classes, if others than the usual ones are wanted.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing.
    """

    #: Name of torchvision's class, which downloads and knows the checksums.
    torchvision_name: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar-10-batches-py"
    train_files: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{number}" for number in range(1, 6))
    test_file: ClassVar[str] = "test_batch"
    label_key: ClassVar[str] = "labels"
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
        download: bool = False,
        num_private: int | None = None,
        num_public: int | None = None,
        num_test: int | None = None,
        split_seed: int = 0,
        verify: bool = True,
        overlap: Overlap = "warn",
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        names = self.default_names if class_names is None else class_names
        super().__init__(
            num_classes=self.classes, image_shape=(3, 32, 32), class_names=names, overlap=overlap, **kwargs
        )
        self.root = Path(root)
        self.split = check_choice("split", self.default_split if split is None else split, SPLITS)
        self.needs_private = self.split != "pretraining"
        self.download = download
        given = {"num_private": num_private, "num_public": num_public, "num_test": num_test}
        self.counts = {
            name: None if count is None else check_int(name, count) for name, count in given.items()
        }
        self.split_seed = check_int("split_seed", split_seed, 0)
        self.verify = check_switch("verify", verify)
        self._all: tuple[TensorImages, Tensor, dict[str, Tensor]] | None = None

    def prepare_data(self) -> None:
        """Download the files if that was asked for and some are missing."""
        if self.download and any(
            not any((folder / name).is_file() for folder in self._folders())
            for name in (*self.train_files, self.test_file)
        ):
            import torchvision

            getattr(torchvision.datasets, self.torchvision_name)(self.root, download=True)

    def load_private(self) -> LabeledImages:
        """The private part of ``split``."""
        return self._labeled("private")

    def load_public(self) -> PublicDataset:
        """The public part of ``split``."""
        images, labels, parts = self._read()
        rows = parts["public"]
        return PublicDataset(ChosenImages(images, rows), self.num_classes, labels[rows])

    def load_test(self) -> LabeledImages:
        """The test part of ``split``."""
        return self._labeled("test")

    def _labeled(self, part: str) -> LabeledImages:
        images, labels, parts = self._read()
        rows = parts[part]
        return LabeledImages(ChosenImages(images, rows), labels[rows], self.num_classes, f"{part} labels")

    def _read(self) -> tuple[TensorImages, Tensor, dict[str, Tensor]]:
        """All images and labels, training files first, and the rows of each part."""
        if self._all is None:
            files = [self._read_file(name) for name in (*self.train_files, self.test_file)]
            pixels = torch.from_numpy(np.concatenate([data for data, _ in files]).reshape(-1, 3, 32, 32))
            labels = torch.from_numpy(np.concatenate([labels for _, labels in files]))
            in_test = len(files[-1][1])
            self._all = TensorImages(pixels), labels, self._parts(len(labels) - in_test, in_test)
        return self._all

    def _parts(self, in_train: int, in_test: int) -> dict[str, Tensor]:
        """Rows of the private, public and test part."""
        nothing = torch.empty(0, dtype=torch.int64)
        train = fixed_shuffle(in_train, self.split_seed)
        test = in_train + fixed_shuffle(in_test, self.split_seed)
        if self.split == "private_knn":
            everything = fixed_shuffle(in_train + in_test, self.split_seed)
            public, rest = self._cut("num_public", 29_000, everything)
            tested, rest = self._cut("num_test", 1_000, rest)
            private, _ = self._cut("num_private", 30_000, rest)
        elif self.split == "reverse_knn":
            public, more = self._cut("num_public", 30_000, train)
            tested, rest = self._cut("num_test", 1_000, test)
            rest = torch.cat([more, rest])
            private, _ = self._cut("num_private", len(rest), rest[fixed_shuffle(len(rest), self.split_seed)])
        elif self.split == "train_test":
            public, rest = self._cut("num_public", 9_000, test)
            tested, _ = self._cut("num_test", 1_000, rest)
            private, _ = self._cut("num_private", in_train, train)
        else:
            public, _ = self._cut("num_public", in_train, train)
            tested, _ = self._cut("num_test", in_test, test)
            private = nothing
        return {"private": private, "public": public, "test": tested}

    def _cut(self, name: str, default: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        count = self.counts[name]
        wanted = default if count is None else count
        if wanted > len(rows):
            raise ValueError(
                f"{name}={count}: split={self.split!r} takes {wanted} images where {len(rows)} are left; "
                "give num_private, num_public and num_test that fit the files"
            )
        return rows[:wanted], rows[wanted:]

    def _folders(self) -> list[Path]:
        return [self.root / self.folder, self.root]

    def _read_file(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Pixels, uint8 ``(n, 3072)``, and labels, int64 ``(n,)``."""
        remedy = (
            f"pass download=True, or unpack the Python version of the data set there (folder {self.folder})"
        )
        try:
            path = find_file(name, self._folders(), remedy)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{type(self).__name__}(root={str(self.root)!r}): {error}") from None
        if self.verify:
            import torchvision

            published: Any = getattr(torchvision.datasets, self.torchvision_name)
            check_md5(path, dict(published.train_list + published.test_list)[name])
        content = read_array_pickle(path)
        pixels, labels = content.get("data"), content.get(self.label_key)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
            raise DamagedFileError(
                f"{path}: its entry 'data' is no uint8 array of shape (n, {_PIXELS}); get the file again"
            )
        if not isinstance(labels, list | np.ndarray) or len(labels) != len(pixels):
            raise DamagedFileError(
                f"{path}: its entry {self.label_key!r} doesn't hold {len(pixels)} labels, one an image; get the "
                "file again"
            )
        numbers = np.asarray(labels)
        if numbers.dtype.kind not in "iu" or (
            len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.classes
        ):
            raise DamagedFileError(
                f"{path}: its entry {self.label_key!r} holds something else than whole numbers in 0 … "
                f"{self.classes - 1}; get the file again"
            )
        return pixels, numbers.astype(np.int64)


class CIFAR100DataModule(CIFAR10DataModule):
    """CIFAR-100 (Krizhevsky 2009): 60,000 colour images of 32×32, 100 classes (the fine labels).

    As :class:`CIFAR10DataModule`, with the files ``train`` and ``test`` in ``root/cifar-100-python``. By default all
    training images are public and labelled, the public data set on which Private-kNN and noisy SGD learn their
    first features for CIFAR-10: fit it with ``train_on_truth: true`` and without a labeler. ``split="train_test"`` is
    that of Guided PATE.

    Args:
        root: folder that holds (or will hold) the data.
        split: see :class:`CIFAR10DataModule`; ``"pretraining"`` by default.
        download: fetch the files by torchvision where they are missing.
        num_private: private records, instead of the split's number.
        num_public: public images, instead of the split's number.
        num_test: test images, instead of the split's number.
        split_seed: of the shuffles, a public constant.
        verify: compare files with the published checksums. False for other data in this format.
        overlap: see :class:`CIFAR10DataModule`.
        class_names: names of the classes; their numbers by default (the file ``meta`` has the names).
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing.
    """

    torchvision_name: ClassVar[str] = "CIFAR100"
    folder: ClassVar[str] = "cifar-100-python"
    train_files: ClassVar[tuple[str, ...]] = ("train",)
    test_file: ClassVar[str] = "test"
    label_key: ClassVar[str] = "fine_labels"
    default_split: ClassVar[str] = "pretraining"
    classes: ClassVar[int] = 100
    default_names: ClassVar[tuple[str, ...] | None] = None
