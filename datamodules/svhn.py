"""SVHN, split as in the private-labelling papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_switch
from pl_privknn.datamodules.base import Overlap, PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.images import TensorImages, fixed_shuffle
from pl_privknn.datamodules.formats.published import DamagedFileError, check_md5, find_file, read_mat
from pl_privknn.datamodules.formats.stores import ChosenImages, JoinedImages

_CHUNK = 4096
_REMEDY = (
    "pass download=True, or put train_32x32.mat (182 MB), extra_32x32.mat (1.3 GB) and test_32x32.mat (64 MB) of "
    "SVHN's format 2 there"
)


class SVHNDataModule(PrivatePublicDataModule):
    """Street View House Numbers (Netzer et al. 2011), cropped digits of 32×32 in colour, 10 classes.

    The training and the extra file are private (73,257 + 531,131 images). A fixed shuffle of the test file
    gives 25,000 public images, then 1,000 test images, as in Private-kNN (Zhu et al. 2020, section 4.1);
    32 images are left over.

    **On disk**: ``train_32x32.mat``, ``extra_32x32.mat`` and ``test_32x32.mat`` in ``root/SVHN`` or in
    ``root``, from http://ufldl.stanford.edu/housenumbers (or ``download=True``, which puts them into
    ``root/SVHN``). For non-commercial use only. Pixels stay in memory as they are in the files, one byte a value:
    1.9 GB for all private images.

    Args:
        root: folder that holds (or will hold) the data.
        download: fetch missing files by torchvision.
        extra: take the extra file too.
        num_private: a fixed random choice of this many private records; all by default.
        num_public: public images.
        num_test: test images; None: all that the public ones leave.
        split_seed: of the shuffles, a public constant. Figures of different values don't compare.
        verify: compare files with the published checksums. False for other data in this format.
        overlap: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`; published sets may hold an image
            twice, so it only warns here.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        ValueError: for arguments out of range; at ``setup`` for damaged files (the message names the file).
        FileNotFoundError: at ``setup``, if files are missing.
    """

    def __init__(
        self,
        root: str | Path = "data",
        *,
        download: bool = False,
        extra: bool = True,
        num_private: int | None = None,
        num_public: int = 25_000,
        num_test: int | None = 1_000,
        split_seed: int = 0,
        verify: bool = True,
        overlap: Overlap = "warn",
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_classes=10, image_shape=(3, 32, 32), class_names=class_names, overlap=overlap, **kwargs
        )
        self.root = Path(root)
        self.download = download
        self.extra = check_switch("extra", extra)
        self.num_private = None if num_private is None else check_int("num_private", num_private)
        self.num_public = check_int("num_public", num_public)
        self.num_test = None if num_test is None else check_int("num_test", num_test)
        self.split_seed = check_int("split_seed", split_seed, 0)
        self.verify = check_switch("verify", verify)
        self._held_out: tuple[TensorImages, Tensor] | None = None

    def prepare_data(self) -> None:
        """Download the missing files, if that was asked for."""
        if not self.download:
            return
        from torchvision.datasets import SVHN

        for part in (*self._private_parts(), "test"):
            if not any((folder / f"{part}_32x32.mat").is_file() for folder in self._folders()):
                (self.root / "SVHN").mkdir(parents=True, exist_ok=True)
                SVHN(self.root / "SVHN", split=part, download=True)

    def load_private(self) -> LabeledImages:
        """The training file and the extra one, or ``num_private`` records of them."""
        files = [self._read(part) for part in self._private_parts()]
        joined = JoinedImages([images for images, _ in files])
        labels = torch.cat([labels for _, labels in files])
        if self.num_private is None:
            return LabeledImages(joined, labels, self.num_classes, "labels of the private files")
        if self.num_private > len(joined):
            raise ValueError(
                f"num_private={self.num_private}: there are {len(joined)} private records; ask for fewer, or leave "
                "num_private out"
            )
        rows = fixed_shuffle(len(joined), self.split_seed)[: self.num_private].sort().values
        # A copy, or memory would keep all of them.
        chosen = [(joined.read(some) * 255).round_().to(torch.uint8) for some in rows.split(_CHUNK)]
        part = TensorImages(torch.cat(chosen))
        return LabeledImages(part, labels[rows], self.num_classes, "labels of the private files")

    def load_public(self) -> PublicDataset:
        """The first ``num_public`` images of the shuffled test file."""
        images, labels, rows = self._shuffled()
        rows = rows[: self.num_public]
        return PublicDataset(ChosenImages(images, rows), self.num_classes, labels[rows])

    def load_test(self) -> LabeledImages:
        """The next ``num_test``."""
        images, labels, rows = self._shuffled()
        stop = None if self.num_test is None else self.num_public + self.num_test
        rows = rows[self.num_public : stop]
        return LabeledImages(
            ChosenImages(images, rows), labels[rows], self.num_classes, "labels of the test file"
        )

    def _shuffled(self) -> tuple[TensorImages, Tensor, Tensor]:
        if self._held_out is None:
            self._held_out = self._read("test")
        images, labels = self._held_out
        wanted = self.num_public + (self.num_test or 0)
        if wanted > len(images):
            raise ValueError(
                f"num_public={self.num_public}, num_test={self.num_test}: the test file has {len(images)} images; "
                "ask for fewer"
            )
        return images, labels, fixed_shuffle(len(images), self.split_seed)

    def _private_parts(self) -> list[str]:
        return ["train", "extra"] if self.extra else ["train"]

    def _folders(self) -> list[Path]:
        return [self.root / "SVHN", self.root]

    def _read(self, part: str) -> tuple[TensorImages, Tensor]:
        """Images, uint8 ``(n, 3, 32, 32)``, and labels of one file."""
        try:
            path = find_file(f"{part}_32x32.mat", self._folders(), _REMEDY)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"SVHNDataModule(root={str(self.root)!r}): {error}") from None
        if self.verify:
            from torchvision.datasets import SVHN

            check_md5(path, SVHN.split_list[part][2])
        variables = read_mat(path, ("X", "y"))
        pixels, labels = variables["X"], np.asarray(variables["y"]).reshape(-1)
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
            raise DamagedFileError(
                f"{path}: X has shape {pixels.shape}, {pixels.dtype}; want uint8 of shape (32, 32, 3, n), SVHN's "
                "format 2 (cropped digits)"
            )
        # The digit 0 is written as class 10.
        if len(labels) != pixels.shape[3] or not np.isin(labels, np.arange(1, 11)).all():
            raise DamagedFileError(
                f"{path}: y has {len(labels)} entries for {pixels.shape[3]} images; want one of 1 … 10 an "
                "image, get the file again"
            )
        # MATLAB's order has the images outermost, so this is a view in which each image lies together.
        images = torch.from_numpy(pixels.transpose(3, 2, 0, 1))
        return TensorImages(images), torch.from_numpy(labels.astype(np.int64) % 10)
