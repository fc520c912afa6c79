"""SVHN, split as in the private-labelling papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn._checks import check_switch
from pl_privknn.datamodules.datasets import ImageStore, JoinedImages, TensorImages
from pl_privknn.datamodules.published import PublishedDataModule


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
