"""A user's own data, given as folders of image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import ImageShape, ImageStore, LabeledImages, PublicDataset, digest_of

#: Endings of the files that are read as images.
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_LAYOUT = "want private/<class>/*.png, public/*.png (or public/<class>/*.png) and test/<class>/*.png"


class FileImages(ImageStore):
    """Image files, decoded and resized when they are first read, then kept as uint8 in memory.

    Args:
        paths: the files.
        shape: channels (1: grey, 3: RGB), height and width to bring them to.
        folder: what to name in error messages instead of a file; None names the file. Names of private
            files may tell as much as their contents.
        cache: keep decoded images in memory; nothing is ever written to disk.
    """

    def __init__(
        self, paths: Sequence[Path], shape: ImageShape, folder: Path | None = None, cache: bool = True
    ) -> None:
        self.shape = shape
        self._paths, self._folder = list(paths), folder
        self._cached = torch.zeros(len(self._paths), dtype=torch.bool)
        self._cache = torch.empty((len(self._paths), *shape), dtype=torch.uint8) if cache else None

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`.

        Raises:
            ValueError: if a file can't be decoded.
        """
        if self._cache is None:
            pixels = torch.empty(len(indices), *self.shape, dtype=torch.uint8)
            for row, index in enumerate(indices.tolist()):
                pixels[row] = self._decode(index)
            return pixels.to(torch.float32).div_(255)
        for index in indices[~self._cached[indices]].unique().tolist():
            self._cache[index] = self._decode(index)
            self._cached[index] = True
        return self._cache[indices].to(torch.float32).div_(255)

    def digests(self, indices: Tensor) -> list[bytes]:
        """See :meth:`ImageStore.digests`; equal files count as equal images."""
        return [digest_of(self._paths[index].read_bytes()) for index in indices.tolist()]

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        if self._cache is not None:
            for rows in torch.arange(len(self)).split(1):
                self.read(rows)

    def _decode(self, index: int) -> Tensor:
        from PIL import Image, ImageOps

        channels, height, width = self.shape
        try:
            with Image.open(self._paths[index]) as file:
                if file.mode[0] in "IF":
                    raise ValueError("16 or 32 bits a pixel")
                upright = ImageOps.exif_transpose(file).convert("L" if channels == 1 else "RGB")
                resized = upright.resize((width, height), Image.Resampling.BILINEAR)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            hidden = f"file number {index + 1}, in the order of their paths, of {self._folder}"
            # "from None": Pillow's own message has the path in it.
            raise ValueError(
                f"{self._paths[index] if self._folder is None else hidden} is not a readable image with 8 bits a "
                "channel; take it away, or convert it"
            ) from None
        pixels = torch.from_numpy(np.array(resized, dtype=np.uint8))
        return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def image_shape_of(image_size: int | tuple[int, int], channels: int = 3) -> ImageShape:
    """Channels, height and width of images of ``image_size``: the side of a square, or height and width."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return (channels, check_int("image_size", height), check_int("image_size", width))


class ImageFolderDataModule(PrivatePublicDataModule):
    """Private, public and test images in folders of files.

    Under ``root``: ``private/<class>/`` holds the sensitive images by class, ``public/`` public ones (files
    lying in ``public/<class>/`` have a known truth, which is used for evaluation only), ``test/<class>/``
    the test images; optional are ``test/`` itself, ``val/<class>/`` (a validation set) and ``predict/``
    (images to predict). Sub-folders of a class folder are searched too. Files are ordered by path; what isn't an
    image (by its suffix) or is hidden is passed over. Images are turned upright (EXIF), made grey or RGB,
    and stretched to ``image_size`` by bilinear interpolation when they are first read.

    Args:
        root: the folder.
        image_size: side of square images, or (height, width).
        grayscale: one channel instead of three.
        class_names: names of the class folders, in the order of their indices. By default the sub-folders
            of ``test/``, ``val/`` and ``public/`` in alphabetical order; only where there are none, those of
            ``private/``, so name the classes here if it is sensitive which of them occur.
        cache: keep decoded images in memory, as uint8.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Raises:
        FileNotFoundError: if ``root``, ``private/`` or ``public/`` is missing.
        ValueError: if a folder isn't one of the classes, or, when it is read, for a file that is no image.
            Messages never name a private file.
    """

    def __init__(
        self,
        root: str | Path,
        image_size: int | tuple[int, int] = 32,
        *,
        grayscale: bool = False,
        class_names: Sequence[str] | None = None,
        cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.root = Path(root)
        self.cache = cache
        names = self._class_folders() if class_names is None else class_names
        shape = image_shape_of(image_size, 1 if grayscale else 3)
        super().__init__(num_classes=len(names), image_shape=shape, class_names=names, **kwargs)

    def load_private(self) -> LabeledImages:
        """``private/<class>/``."""
        return self._labeled("private")

    def load_public(self) -> PublicDataset:
        """``public/`` with and without class folders."""
        paths, labels = self._files("public")
        truth = labels if bool((labels >= 0).any()) else None
        return PublicDataset(self._store(paths), self.num_classes, truth)

    def load_test(self) -> LabeledImages:
        """``test/<class>/``, empty where there is no such folder."""
        if not (self.root / "test").is_dir():
            return LabeledImages.none(self.image_shape, self.num_classes)
        return self._labeled("test")

    def load_validation(self) -> LabeledImages | None:
        """``val/<class>/``, if there is such a folder."""
        return self._labeled("val") if (self.root / "val").is_dir() else None

    def load_predict(self) -> ImageStore | None:
        """``predict/``, if there is such a folder."""
        folder = self.root / "predict"
        return self._store(_images_under(folder)) if folder.is_dir() else None

    def _class_folders(self) -> list[str]:
        private = [folder.name for folder in self._folders("private")]
        known = [part for part in ("public", "test", "val") if (self.root / part).is_dir()]
        names = sorted({folder.name for part in known for folder in self._folders(part)} or private)
        if len(names) < 2:
            raise ValueError(f"{self.root} has {len(names)} class folders, want 2 or more; {_LAYOUT}")
        return names

    def _labeled(self, part: str) -> LabeledImages:
        paths, labels = self._files(part)
        if bool((labels < 0).any()):
            raise ValueError(f"{self.root / part} holds images outside the class folders; {_LAYOUT}")
        hidden = self.root / part if part == "private" else None
        return LabeledImages(self._store(paths, hidden), labels, self.num_classes)

    def _store(self, paths: Sequence[Path], folder: Path | None = None) -> FileImages:
        return FileImages(paths, self.image_shape, folder, self.cache)

    def _files(self, part: str) -> tuple[list[Path], Tensor]:
        """Paths in order and class indices, -1 for files outside class folders."""
        folders = self._folders(part)
        if strange := [folder.name for folder in folders if folder.name not in self.class_names]:
            names = "" if part == "private" else f" ({', '.join(strange)})"
            raise ValueError(
                f"{self.root / part} has {len(strange)} folders{names} that aren't among the classes "
                f"{', '.join(self.class_names)}; rename them, or pass class_names"
            )
        found = [(path, -1) for path in (self.root / part).iterdir() if _is_image(path)]
        for folder in folders:
            found += [(path, self.class_names.index(folder.name)) for path in _images_under(folder)]
        found.sort()
        return [path for path, _ in found], torch.tensor([label for _, label in found], dtype=torch.int64)

    def _folders(self, part: str) -> list[Path]:
        folder = self.root / part
        if not folder.is_dir():
            raise FileNotFoundError(
                f"ImageFolderDataModule(root={str(self.root)!r}): no folder {part!r} there; {_LAYOUT}"
            )
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")


def _images_under(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if _is_image(path))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
