"""MNIST and Fashion-MNIST, split as in the private-labelling papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.idx import IDXError, read_idx
from pl_privknn.datamodules.formats.images import TensorImages, fixed_shuffle

_SIDE = 28
_FILES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("t10k", "images"): "t10k-images-idx3-ubyte",
    ("t10k", "labels"): "t10k-labels-idx1-ubyte",
}


class MNISTDataModule(PrivatePublicDataModule):
    """MNIST (LeCun et al. 1998): 60,000 private, 5,000 public and 5,000 test images of 28×28, 10 classes.

    The training file is private; a fixed shuffle cuts the test file into a public half and a test half (the
    public one gets the odd image). The four files are looked for in torchvision's folder
    ``root/MNIST/raw`` and then in ``root`` itself, compressed with gzip or not.

    Args:
        root: folder that holds (or will hold) the data.
        download: fetch the files by torchvision where they are missing.
        num_private: a fixed random choice of this many private records; all by default.
        num_public: a fixed random choice of this many images of the public half; all by default. The test
            half stays as it is.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        class_names: names of the classes, if others than the usual ones are wanted.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing.
    """

    #: Name of torchvision's class, which is also the name of its folder.
    torchvision_name: ClassVar[str] = "MNIST"
    #: Folders outside ``root`` where a system package puts the files.
    default_names: ClassVar[tuple[str, ...] | None] = None
    system_folders: ClassVar[tuple[Path, ...]] = ()
    hint: ClassVar[str] = "pass download=True, or put the four files there"

    def __init__(
        self,
        root: str | Path = "data",
        *,
        download: bool = False,
        num_private: int | None = None,
        num_public: int | None = None,
        split_seed: int = 0,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        names = self.default_names if class_names is None else class_names
        super().__init__(num_classes=10, image_shape=(1, _SIDE, _SIDE), class_names=names, **kwargs)
        self.root = Path(root)
        self.download = download
        self.num_private = None if num_private is None else check_int("num_private", num_private)
        self.num_public = None if num_public is None else check_int("num_public", num_public)
        self.split_seed = check_int("split_seed", split_seed, 0)
        self._held_out: tuple[Tensor, Tensor] | None = None

    def prepare_data(self) -> None:
        """Download the files if that was asked for and they are nowhere to be found."""
        if self.download and any(self._find(file) is None for file in _FILES.values()):
            import torchvision

            # torchvision extracts all four files when it downloads, whatever ``train`` is.
            getattr(torchvision.datasets, self.torchvision_name)(self.root, download=True)

    def load_private(self) -> LabeledImages:
        """The training file, or ``num_private`` records of it."""
        images, labels = self._read("train")
        if self.num_private is not None:
            if self.num_private > len(images):
                raise ValueError(
                    f"num_private={self.num_private}: the training file has {len(images)} records; "
                    "ask for fewer, or leave num_private out"
                )
            chosen = fixed_shuffle(len(images), self.split_seed)[: self.num_private].sort().values
            images, labels = images[chosen], labels[chosen]
        return LabeledImages(TensorImages(images), labels, self.num_classes, "labels of the training file")

    def load_public(self) -> PublicDataset:
        """The first half of the shuffled test file, or ``num_public`` images of it."""
        images, labels = self._half(public=True)
        if self.num_public is not None and self.num_public > len(images):
            raise ValueError(
                f"num_public={self.num_public}: the public half of the test file has {len(images)} images; "
                "ask for fewer, or leave num_public out"
            )
        # The half is shuffled already, so its beginning is a random choice.
        chosen = slice(self.num_public)
        return PublicDataset(TensorImages(images[chosen]), self.num_classes, labels[chosen])

    def load_test(self) -> LabeledImages:
        """The second half of the shuffled test file."""
        images, labels = self._half(public=False)
        return LabeledImages(TensorImages(images), labels, self.num_classes, "labels of the test file")

    def _half(self, public: bool) -> tuple[Tensor, Tensor]:
        if self._held_out is None:
            self._held_out = self._read("t10k")
        images, labels = self._held_out
        order = fixed_shuffle(len(images), self.split_seed)
        middle = (len(images) + 1) // 2
        chosen = order[:middle] if public else order[middle:]
        return images[chosen], labels[chosen]

    def _read(self, part: str) -> tuple[Tensor, Tensor]:
        """Images, uint8 ``(n, 1, 28, 28)``, and labels of the training or the test file."""
        paths = {kind: self._find(_FILES[part, kind]) for kind in ("images", "labels")}
        missing = [_FILES[part, kind] for kind, path in paths.items() if path is None]
        if missing or paths["images"] is None or paths["labels"] is None:
            raise FileNotFoundError(
                f"{type(self).__name__}(root={str(self.root)!r}): {' and '.join(missing)} (plain or .gz) not "
                f"found in {', '.join(map(str, self._folders()))}; {self.hint}"
            )
        images, labels = read_idx(paths["images"], 3), read_idx(paths["labels"], 1)
        if images.shape[1:] != (_SIDE, _SIDE):
            raise IDXError(
                f"{paths['images']}: images of {images.shape[1]}×{images.shape[2]}, want {_SIDE}×{_SIDE}; "
                "use ArraysDataModule for images of another size"
            )
        if len(images) != len(labels) or len(images) < 2:
            raise IDXError(
                f"{paths['images']} has {len(images)} images and {paths['labels'].name} {len(labels)} labels; "
                "want as many of each, and at least 2. Get both files again, from one source"
            )
        return images[:, None], labels

    def _folders(self) -> list[Path]:
        """Where to look: the first folder that has any of the files is the one that is used."""
        return [self.root / self.torchvision_name / "raw", self.root, *self.system_folders]

    def _find(self, name: str) -> Path | None:
        # One folder for all files: images of one source must not meet the labels of another.
        for folder in self._folders():
            present = [
                path
                for file in _FILES.values()
                for path in (folder / file, folder / f"{file}.gz")
                if path.is_file()
            ]
            if present:
                return next((path for path in present if path.name in (name, f"{name}.gz")), None)
        return None


class FashionMNISTDataModule(MNISTDataModule):
    """Fashion-MNIST (Xiao et al. 2017): 60,000 private, 5,000 public and 5,000 test images, 10 classes.

    As :class:`MNISTDataModule`, with the folder ``root/FashionMNIST/raw``. Where ``root`` holds none of the
    files, those of Debian's package ``dataset-fashion-mnist`` are used.
    """

    torchvision_name: ClassVar[str] = "FashionMNIST"
    system_folders: ClassVar[tuple[Path, ...]] = (Path("/usr/share/datasets/fashion-mnist"),)
    hint: ClassVar[str] = (
        "pass download=True, put the four files there, or install Debian's package dataset-fashion-mnist"
    )
    default_names: ClassVar[tuple[str, ...] | None] = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
