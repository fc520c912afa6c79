"""MNIST and Fashion-MNIST, split as in the private-labelling papers; Fashion-MNIST with attributes, too."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn.datamodules.base import Overlap
from pl_privknn.datamodules.datasets import ImageStore, TensorImages, check_targets
from pl_privknn.datamodules.published import SIZES, PublishedDataModule, check_attributes

_SIDE = 28
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


class IDXDataModule(PublishedDataModule):
    """Base of MNIST and its relatives: four IDX files, the test file halved by a fixed shuffle."""

    torchvision_name: ClassVar[str] = "MNIST"
    remedy: ClassVar[str] = "pass download=True, or put sound copies of the four files there"
    #: Folders outside ``root`` where a system package puts the files.
    system_folders: ClassVar[tuple[Path, ...]] = ()

    def prepare_data(self) -> None:
        """Download the files if requested and not found."""
        if self.download and self._folder() is None:
            self.torchvision_files(self.root, download=True)

    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """See :meth:`PublishedDataModule.part`."""
        images, labels = self._read("train" if name == "private" else "t10k")
        if name == "private":
            return TensorImages(images), labels, self.chosen_private(len(images))
        order, middle = self.shuffled(len(images)), (len(images) + 1) // 2
        half = order[:middle] if name == "public" else order[middle:]
        return TensorImages(images), labels, self.cut(SIZES[name], half)[0]

    def _read(self, file: str) -> tuple[Tensor, Tensor]:
        """Images, uint8 ``(n, 1, 28, 28)``, and labels of the training or the test file."""
        if file not in self._files:
            folder = self._folder()
            images, labels = (
                self._read_idx(folder, f"{file}-{kind}-ubyte", dimensions)
                for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1))
            )
            if images.shape[1:] != (_SIDE, _SIDE) or len(images) != len(labels) or len(images) < 2:
                raise ValueError(
                    f"{folder}: the {file} files have {len(images)} images of {tuple(images.shape[1:])} and "
                    f"{len(labels)} labels; expected 2 or more of {(_SIDE, _SIDE)} and as many labels. Get both "
                    "files from one source, or use ArraysDataModule"
                )
            self._files[file] = images[:, None], labels
        return self._files[file]

    def _read_idx(self, folder: Path | None, name: str, dimensions: int) -> Tensor:
        """Unsigned bytes of an IDX file, plain or gzip, which torchvision doesn't read."""
        places = self._folders() if folder is None else [folder]
        paths = [path for place in places for path in (place / name, place / f"{name}.gz") if path.is_file()]
        if not paths:
            raise FileNotFoundError(
                f"{type(self).__name__}(root={str(self.root)!r}): {name} (plain or .gz) not found in "
                f"{', '.join(map(str, places))}; {self.remedy}"
            )
        with self.reading(paths[0]):
            data = paths[0].read_bytes()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            if data[:4] != bytes([0, 0, 8, dimensions]):
                raise ValueError(f"it is not an IDX file of {dimensions} dimensions")
            shape = np.frombuffer(data, ">i4", dimensions, offset=4)
            values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
            return torch.from_numpy(values.copy())  # torch wants memory that may be written to

    def _folder(self) -> Path | None:
        """First folder with any of the files; all are read there, so that images and labels have one source."""
        found = (folder for folder in self._folders() if any(folder.glob("*-idx?-ubyte*")))
        return next(found, None)

    def _folders(self) -> list[Path]:
        return [self.root / self.torchvision_name / "raw", self.root, *self.system_folders]


class MNISTDataModule(IDXDataModule):
    """MNIST (LeCun et al. 1998): 60,000 private, 5,000 public and 5,000 test images of 28×28, 10 classes.

    The training file is private; a fixed shuffle cuts the test file into a public half and a test half (the
    public one gets the odd image). The four files are looked for in torchvision's folder
    ``root/MNIST/raw`` and then in ``root`` itself, compressed with gzip or not.

    Args:
        root: folder that holds (or will hold) the data.
        class_names: names of the classes, if others than the usual ones are wanted.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.
        **kwargs: see :class:`~pl_privknn.datamodules.published.PublishedDataModule`; ``public_examples`` and
            ``test_examples`` choose from the halves.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing.
    """

    default_names: ClassVar[tuple[str, ...] | None] = None

    def __init__(
        self,
        root: str | Path = "data",
        *,
        class_names: Sequence[str] | None = None,
        overlap: Overlap = "error",
        **kwargs: Any,
    ) -> None:
        names = self.default_names if class_names is None else class_names
        shape = (1, _SIDE, _SIDE)
        super().__init__(
            root, num_classes=10, image_shape=shape, class_names=names, overlap=overlap, **kwargs
        )


class FashionMNISTDataModule(MNISTDataModule):
    """Fashion-MNIST (Xiao et al. 2017): 60,000 private, 5,000 public and 5,000 test images, 10 classes.

    As :class:`MNISTDataModule`, with the folder ``root/FashionMNIST/raw``. Where ``root`` holds none of the
    files, those of Debian's package ``dataset-fashion-mnist`` are used.
    """

    torchvision_name: ClassVar[str] = "FashionMNIST"
    system_folders: ClassVar[tuple[Path, ...]] = (Path("/usr/share/datasets/fashion-mnist"),)
    remedy: ClassVar[str] = (
        "pass download=True, put sound copies of the four files there, or install Debian's package "
        "dataset-fashion-mnist"
    )
    default_names: ClassVar[tuple[str, ...] | None] = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip


class FashionMNISTAttributesDataModule(IDXDataModule):
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

    The parts are those of :class:`FashionMNISTDataModule` with the same ``split_seed``.

    Args:
        root: folder that holds (or will hold) the data; Debian's package is found without it.
        attributes: names of the attributes to use, in this order; all ten by default.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.
        **kwargs: see :class:`MNISTDataModule`.

    Raises:
        ValueError: for unknown attributes or arguments out of range; at ``setup`` for damaged files.
        FileNotFoundError: at ``setup``, if files are missing.
    """

    torchvision_name: ClassVar[str] = FashionMNISTDataModule.torchvision_name
    system_folders: ClassVar[tuple[Path, ...]] = FashionMNISTDataModule.system_folders
    remedy: ClassVar[str] = FashionMNISTDataModule.remedy

    def __init__(
        self,
        root: str | Path = "data",
        *,
        attributes: Sequence[str] | None = None,
        overlap: Overlap = "error",
        **kwargs: Any,
    ) -> None:
        names = check_attributes(attributes, FASHION_ATTRIBUTES)
        super().__init__(
            root,
            num_classes=len(names),
            image_shape=(1, _SIDE, _SIDE),
            class_names=names,
            task="multilabel",
            overlap=overlap,
            **kwargs,
        )

    @property
    def table(self) -> Tensor:
        """Attributes of the ten classes, int64 ``(10, num_classes)``; public."""
        return torch.tensor([[int(bit) for bit in FASHION_ATTRIBUTES[name]] for name in self.class_names]).T

    def part(self, name: str) -> tuple[ImageStore, Tensor, Tensor]:
        """See :meth:`PublishedDataModule.part`."""
        images, classes, rows = super().part(name)
        classes = check_targets(f"labels of the {name} file", classes, len(images), 10, "multiclass")
        return images, self.table[classes], rows
