"""Published data sets: their base class, CIFAR-10, CIFAR-100 and SVHN."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_installed, check_int, check_switch
from pl_privknn.datamodules.base import Overlap, PrivatePublicDataModule
from pl_privknn.datamodules.datasets import (
    ChosenImages,
    ImageStore,
    JoinedImages,
    LabeledImages,
    PublicDataset,
    TensorImages,
    fixed_shuffle,
)


class DamagedFileError(ValueError):
    """Raised for a damaged file; the message names the file, the fault and the remedy."""


def check_attributes(attributes: Sequence[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """Names of attributes, all of them by default; ``ValueError`` for one that isn't known."""
    names = tuple(known if attributes is None else attributes)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"attributes: {unknown[0]!r} is not one of {', '.join(known)}; choose among these")
    return names


#: Arguments with the sizes of parts.
SIZES = {"private": "private_records", "public": "public_examples", "test": "test_examples"}


class PublishedDataModule(PrivatePublicDataModule):
    """A published data set, split by fixed shuffles; a subclass defines :meth:`part`.

    Args:
        root: folder that holds (or will hold) the data.
        download: fetch the files by torchvision where they are missing.
        private_records: a fixed random choice of this many private records.
        public_examples: public images.
        test_examples: test images.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`; published sets may hold an image
            twice, so it only warns here.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing.
    """

    #: Name of torchvision's class, which downloads, knows the checksums and reads.
    torchvision_name: ClassVar[str] = ""
    #: What to do where files are missing.
    remedy: ClassVar[str] = "pass download=True"

    def __init__(
        self,
        root: str | Path = "data",
        *,
        download: bool = False,
        private_records: int | None = None,
        public_examples: int | None = None,
        test_examples: int | None = None,
        split_seed: int = 0,
        overlap: Overlap = "warn",
        **kwargs: Any,
    ) -> None:
        super().__init__(overlap=overlap, **kwargs)
        self.root = Path(root)
        self.download = download
        given = {
            "private_records": private_records,
            "public_examples": public_examples,
            "test_examples": test_examples,
        }
        self.counts = {name: None if n is None else check_int(name, n) for name, n in given.items()}
        self.split_seed = check_int("split_seed", split_seed, 0)
        self._files: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Download the files by torchvision if that was asked for and they are missing."""
        if self.download:
            self.torchvision_files(self.root, download=True)

    @abc.abstractmethod
    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """Images and labels of the file that a part comes from, and the part's rows, int64.

        Args:
            name: ``"private"``, ``"public"`` or ``"test"``.
        """

    def load_private(self) -> LabeledImages:
        """Load the private part; see the class."""
        return self._labeled("private")

    def load_public(self) -> PublicDataset:
        """Load the public part; see the class."""
        store, labels, rows = self.part("public")
        return PublicDataset(ChosenImages(store, rows), self.num_classes, labels[rows], self.task)

    def load_test(self) -> LabeledImages:
        """Load the test part; see the class."""
        return self._labeled("test")

    def _labeled(self, name: str) -> LabeledImages:
        store, labels, rows = self.part(name)
        of = f"labels of the {name} part"
        return LabeledImages(ChosenImages(store, rows), labels[rows], self.num_classes, of, self.task)

    def shuffled(self, rows: Tensor | int, seed: int | None = None) -> Tensor:
        """Rows (or ``0 … rows - 1``) in the fixed order of ``split_seed``."""
        rows = torch.arange(rows) if isinstance(rows, int) else rows
        return rows[fixed_shuffle(len(rows), self.split_seed if seed is None else seed)]

    def cut(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows into the first ones, as many as an argument says (all for None), and the others.

        Raises:
            ValueError: if there are fewer.
        """
        wanted = self.counts[name]
        if wanted is not None and wanted > len(rows):
            raise ValueError(
                f"{name}={wanted}: there are {len(rows)} such images; ask for fewer, or leave {name} out"
            )
        return rows[:wanted], rows[len(rows) if wanted is None else wanted :]

    def chosen_private(self, rows: Tensor | int) -> Tensor:
        """All rows in their order, or a fixed random choice of ``private_records`` of them."""
        if self.counts["private_records"] is None:
            return torch.arange(rows) if isinstance(rows, int) else rows
        return self.cut("private_records", self.shuffled(rows))[0].sort().values

    def rows_of(self, name: str, count: int) -> Tensor:
        """Rows of a part in its file of ``count`` records: a file of the private part, or of both others."""
        if name == "private":
            return self.chosen_private(count)
        public, rest = self.cut("public_examples", self.shuffled(count))
        return public if name == "public" else self.cut("test_examples", rest)[0]

    def torchvision_files(self, root: Path, **options: Any) -> Any:
        """Torchvision data set of these files, with checked checksums; cached for other parts.

        Raises:
            FileNotFoundError: where they are missing or not the published ones.
            ImportError: where torchvision is not installed.
        """
        key = str(options)
        if key not in self._files:
            check_installed(type(self).__name__, "papers", "torchvision")
            import torchvision

            with self.reading(root):
                read = getattr(torchvision.datasets, self.torchvision_name)(root, **options)
            if "download" in options:  # in a separate process, or without need of what was read
                return read
            self._files[key] = read
        return self._files[key]

    @contextlib.contextmanager
    def reading(self, where: Path) -> Iterator[None]:
        """Convert any reader's exception into one that names the folder or file.

        Raises:
            FileNotFoundError: where files are missing or have another checksum.
            DamagedFileError: for any other exception.
        """
        try:
            yield
        except (FileNotFoundError, RuntimeError):  # torchvision's error for both
            raise FileNotFoundError(
                f"{type(self).__name__}(root={str(self.root)!r}): files are missing in {where}, cut off or altered; "
                f"{self.remedy}"
            ) from None
        # Damage shows itself as nearly any exception: OSError, IndexError, zlib.error and more.
        except Exception as error:
            raise DamagedFileError(
                f"{where}: no sound file of {type(self).__name__} ({type(error).__name__}: {error}); {self.remedy}"
            ) from None


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


class SVHNDataModule(PublishedDataModule):
    """Street View House Numbers (Netzer et al. 2011), cropped digits of 32×32 in colour, 10 classes.

    The training and the extra file are private (73,257 + 531,131 images). A fixed shuffle of the test file
    gives 25,000 public images, then 1,000 test images, as in Private-kNN (Zhu et al. 2020, section 4.1);
    32 images are left over.

    **On disk**: ``train_32x32.mat``, ``extra_32x32.mat`` and ``test_32x32.mat`` in ``root/SVHN``, from
    http://ufldl.stanford.edu/housenumbers (or ``download=True``). For non-commercial use only. torchvision compares
    their checksums and reads them; pixels stay in memory as they are in the files, one byte a value: 1.9 GB for all
    private images.

    Args:
        root: folder that holds (or will hold) the data.
        extra: take the extra file too.
        public_examples: public images.
        test_examples: test images; None: all that the public ones leave.
        **kwargs: see :class:`~pl_privknn.datamodules.published.PublishedDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing or not the published ones.
    """

    torchvision_name: ClassVar[str] = "SVHN"
    remedy: ClassVar[str] = (
        "pass download=True, or put train_32x32.mat (182 MB), extra_32x32.mat (1.3 GB) and test_32x32.mat (64 MB) of "
        "SVHN's format 2 there"
    )

    def __init__(
        self,
        root: str | Path = "data",
        *,
        extra: bool = True,
        public_examples: int | None = 25_000,
        test_examples: int | None = 1_000,
        **kwargs: Any,
    ) -> None:
        self.private_files = ("train", "extra") if check_switch("extra", extra) else ("train",)
        super().__init__(
            root,
            num_classes=10,
            image_shape=(3, 32, 32),
            public_examples=public_examples,
            test_examples=test_examples,
            **kwargs,
        )

    def prepare_data(self) -> None:
        """Download the missing files, if that was asked for."""
        for split in (*self.private_files, "test") if self.download else ():
            self.torchvision_files(self.root / "SVHN", split=split, download=True)

    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """See :meth:`PublishedDataModule.part`."""
        splits = self.private_files if name == "private" else ("test",)
        files = [self.torchvision_files(self.root / "SVHN", split=split) for split in splits]
        store = JoinedImages([TensorImages(torch.from_numpy(file.data)) for file in files])
        labels = torch.cat([torch.from_numpy(file.labels) for file in files])
        return store, labels, self.rows_of(name, len(store))
