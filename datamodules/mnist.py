"""MNIST and Fashion-MNIST from their IDX files."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.images import TensorImages, fixed_shuffle

_FILES = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}


class MNISTDataModule(PrivatePublicDataModule):
    """MNIST, split as in the papers: training set private, half of the test set public, the other half test.

    Files are looked for in ``root/MNIST/raw`` (where torchvision puts them) and in ``root`` itself, plain or
    compressed (``.gz``).

    Args:
        root: folder of the data.
        num_private: use only the first so many training images after a fixed shuffle; all by default.
        num_public: public images, the first ones of a fixed shuffle of the test set; half of it by default.
        split_seed: of the shuffles, a public constant.
        download: fetch missing files with torchvision. Off by default.
        **kwargs: see :class:`PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: at ``setup``, if files are missing; it lists the places and says what to do.
        ValueError: for counts out of range, and at ``setup`` for damaged files.
    """

    dataset: ClassVar[str] = "MNIST"
    system_folders: ClassVar[tuple[Path, ...]] = ()
    names: ClassVar[tuple[str, ...]] = tuple(str(digit) for digit in range(10))

    def __init__(
        self,
        root: str | Path = "data",
        num_private: int | None = None,
        num_public: int | None = None,
        split_seed: int = 0,
        download: bool = False,
        **kwargs: Any,
    ) -> None:
        self.root = Path(root)
        self.num_private = None if num_private is None else check_int("num_private", num_private)
        self.num_public = None if num_public is None else check_int("num_public", num_public)
        self.split_seed = check_int("split_seed", split_seed, 0)
        self.download = download
        kwargs.setdefault("class_names", self.names)
        super().__init__(num_classes=10, image_shape=(1, 28, 28), **kwargs)
        self._held_out: tuple[Tensor, Tensor] | None = None

    def prepare_data(self) -> None:
        """Fetch missing files, if ``download`` asks for it."""
        if self.download and self._folder() is None:
            import torchvision.datasets

            getattr(torchvision.datasets, self.dataset)(str(self.root), download=True)

    def load_private(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        images, labels = self._read("train")
        if self.num_private is not None:
            if self.num_private > len(labels):
                raise ValueError(
                    f"num_private={self.num_private}: the training set has {len(labels)} images; lower it"
                )
            chosen = fixed_shuffle(len(labels), self.split_seed)[: self.num_private]
            images, labels = images[chosen], labels[chosen]
        return LabeledImages(TensorImages(images), labels, 10)

    def load_public(self) -> PublicDataset:
        """See :class:`PrivatePublicDataModule`."""
        images, labels, public, _ = self._test_split()
        return PublicDataset(TensorImages(images[public]), 10, labels[public])

    def load_test(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        images, labels, _, test = self._test_split()
        return LabeledImages(TensorImages(images[test]), labels[test], 10)

    def _test_split(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._held_out is None:
            self._held_out = self._read("test")
        images, labels = self._held_out
        public = len(labels) // 2 if self.num_public is None else self.num_public
        if public >= len(labels):
            raise ValueError(
                f"num_public={public}: the test set has {len(labels)} images and some must be left to test "
                "on; lower it"
            )
        order = fixed_shuffle(len(labels), self.split_seed)
        return images, labels, order[:public], order[public:]

    def _folder(self) -> Path | None:
        """The first place that holds all four files."""
        for folder in self._places():
            if all(_find(folder, name) is not None for name in _FILES.values()):
                return folder
        return None

    def _places(self) -> list[Path]:
        return [self.root / self.dataset / "raw", self.root, *self.system_folders]

    def _read(self, part: str) -> tuple[Tensor, Tensor]:
        folder = self._folder()
        if folder is None:
            raise FileNotFoundError(
                f"{self.dataset}: the files {', '.join(_FILES.values())} (or .gz) are in none of "
                f"{', '.join(map(str, self._places()))}. Put them there, point root at them, or pass "
                "download=True"
            )
        images = read_idx(_find(folder, _FILES[f"{part} images"]), 3)
        labels = read_idx(_find(folder, _FILES[f"{part} labels"]), 1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise ValueError(
                f"{self.dataset} {part} files in {folder}: {tuple(images.shape)} images and {len(labels)} "
                "labels; want (n, 28, 28) and n. Fetch the files again"
            )
        return images[:, None], labels.long()


class FashionMNISTDataModule(MNISTDataModule):
    """Fashion-MNIST, split like :class:`MNISTDataModule`.

    Files are also found where Debian's package ``dataset-fashion-mnist`` puts them.
    """

    dataset: ClassVar[str] = "FashionMNIST"
    system_folders: ClassVar[tuple[Path, ...]] = (Path("/usr/share/datasets/fashion-mnist"),)
    names: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )


def read_idx(path: Path | None, dimensions: int) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or compressed.

    Args:
        path: the file.
        dimensions: how many the file must have.

    Returns:
        uint8 tensor.

    Raises:
        ValueError: if the file is cut off, too long, or no IDX file of bytes.
    """
    if path is None:
        raise FileNotFoundError("an IDX file is missing; fetch the data set again")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"{path} is not an IDX file of bytes in {dimensions} dimensions; fetch it again")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    wanted = int(np.prod(shape, dtype=np.int64))
    if len(data) - header != wanted:
        raise ValueError(
            f"{path} holds {len(data) - header} bytes where its header promises {wanted}; fetch it again"
        )
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).reshape(shape)


def _find(folder: Path, name: str) -> Path | None:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    return None
