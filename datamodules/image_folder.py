"""A user's own image files in folders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.images import ImageStore

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class FileImages(ImageStore):
    """Image files, read and resized when they are first looked at, then kept as bytes.

    Args:
        files: the images.
        shape: channels (1 or 3), height and width to which all are brought.
        private: leave file names out of error messages.
    """

    def __init__(self, files: Sequence[Path], shape: tuple[int, int, int], private: bool = False) -> None:
        self.files, self.shape, self.private = list(files), shape, private
        self._pixels = torch.empty(len(self.files), *shape, dtype=torch.uint8)
        self._loaded = torch.zeros(len(self.files), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`.

        Raises:
            ValueError: for a file that is no image.
        """
        for index in indices[~self._loaded[indices]].unique().tolist():
            self._pixels[index] = self._decode(self.files[index])
            self._loaded[index] = True
        return self._pixels[indices].float().div_(255)

    def digests(self) -> list[bytes]:
        """See :meth:`ImageStore.digests`; digests of the files' bytes."""
        return [hashlib.blake2b(path.read_bytes(), digest_size=16).digest() for path in self.files]

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        for rows in torch.arange(len(self)).split(1024):
            self.read(rows)

    def _decode(self, path: Path) -> Tensor:
        from PIL import Image, UnidentifiedImageError

        channels, height, width = self.shape
        try:
            with Image.open(path) as image:
                converted = image.convert("L" if channels == 1 else "RGB")
                pixels = np.asarray(converted.resize((width, height), Image.Resampling.BILINEAR))
        except (UnidentifiedImageError, OSError) as error:
            name = "a private file" if self.private else str(path)
            reason = "" if self.private else f" ({error})"
            raise ValueError(f"{name} can't be read as an image{reason}; mend it or take it out") from error
        # np.array copies: Pillow's memory is read-only.
        return torch.from_numpy(np.array(pixels)).reshape(height, width, channels).permute(2, 0, 1)


class ImageFolderDataModule(PrivatePublicDataModule):
    """Images in ``root/private/<class>/``, ``root/public/`` and ``root/test/<class>/``.

    Public images lie flat in ``public/`` or, where their truth is known for evaluation, in
    ``public/<class>/``. Classes are the subfolders of ``test``, or of ``private`` where there is no test
    folder, unless ``class_names`` names them. Hidden files and files that are no images are passed over.

    Args:
        root: folder of the data.
        image_size: side to which images are resized.
        channels: 1 for grey, 3 for colour.
        class_names: classes in their order; folder names, sorted, by default.
        **kwargs: see :class:`PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if a folder is missing or holds no image.
        ValueError: for class folders that are not among the classes, or files that are no images.
    """

    def __init__(
        self,
        root: str | Path,
        image_size: int = 32,
        channels: int = 3,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.root = Path(root)
        size = check_int("image_size", image_size)
        if channels not in (1, 3):
            raise ValueError(f"channels={channels!r} must be 1 (grey) or 3 (colour)")
        for part in ("private", "public"):
            if not (self.root / part).is_dir():
                raise FileNotFoundError(
                    f"{self.root / part} is missing; put images into {self.root}/private/<class>/, "
                    f"{self.root}/public/ and {self.root}/test/<class>/"
                )
        if class_names is None:
            labelled = self.root / "test"
            class_names = _subfolders(labelled if labelled.is_dir() else self.root / "private")
        super().__init__(
            num_classes=len(class_names),
            image_shape=(channels, size, size),
            class_names=class_names,
            **kwargs,
        )

    def load_private(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`."""
        return self._labeled("private")

    def load_public(self) -> PublicDataset:
        """See :class:`PrivatePublicDataModule`."""
        folder = self.root / "public"
        if not _subfolders(folder):
            return PublicDataset(FileImages(_images(folder), self.image_shape), self.num_classes)
        files, labels = self._walk("public")
        return PublicDataset(FileImages(files, self.image_shape), self.num_classes, labels)

    def load_test(self) -> LabeledImages:
        """See :class:`PrivatePublicDataModule`; no test folder is an empty test set."""
        if not (self.root / "test").is_dir():
            return LabeledImages(
                FileImages([], self.image_shape), torch.empty(0, dtype=torch.int64), self.num_classes
            )
        return self._labeled("test")

    def _labeled(self, part: str) -> LabeledImages:
        files, labels = self._walk(part)
        store = FileImages(files, self.image_shape, private=part == "private")
        return LabeledImages(store, labels, self.num_classes)

    def _walk(self, part: str) -> tuple[list[Path], Tensor]:
        folder = self.root / part
        number = {name: index for index, name in enumerate(self.class_names)}
        if unknown := [name for name in _subfolders(folder) if name not in number]:
            which = f"{len(unknown)} folders" if part == "private" else f"folder {unknown[0]!r}"
            raise ValueError(
                f"{folder}: {which} not among the classes {', '.join(self.class_names)}; rename, or pass class_names"
            )
        files: list[Path] = []
        labels: list[int] = []
        for name in _subfolders(folder):
            found = _images(folder / name)
            files += found
            labels += [number[name]] * len(found)
        if not files:
            raise FileNotFoundError(
                f"{folder}: no image in any class folder; put them into {folder}/<class>/"
            )
        return files, torch.tensor(labels, dtype=torch.int64)


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    )
