"""Data module of folders of image files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import stat
import threading
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.config import as_group
from pl_privknn.datamodules.base import CLASSES_ARE_PUBLIC, UNKNOWN, OwnDataModule, check_unlike
from pl_privknn.datamodules.columns import is_shown
from pl_privknn.datamodules.datasets import (
    LARGE_IMAGE,
    ImageShape,
    ImageStore,
    digest_of,
    pixels_of,
)
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.partitions import PaidNames, UnnamedRecords

_PARTS = ("private", "public", "test", "val", "predict")
_LAYOUT = (
    "expected <class>/*.png or private/<class>/*.png, public/*.png (or public/<class>/*.png) and "
    "test/<class>/*.png"
)
_THREADS = 4  # decode images at once
_ONE_LARGE = threading.Lock()  # large images are decoded one at a time
_MOST_PIXELS = 1 << 28  # of an image, which takes a gigabyte
# Pillow identifies these without decoding them, or calls another program.
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}


@functools.cache
def suffixes() -> frozenset[str]:
    """Endings, in lower case, of the files that the installed Pillow decodes."""
    from PIL import Image

    Image.init()
    kinds = Image.registered_extensions().items()
    return frozenset(ending for ending, kind in kinds if kind in Image.OPEN and kind not in _NOT_DECODED)


def files_under(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders in the order of their paths, without hidden and system entries.

    Links are followed; a file or folder to which several names lead is there once.

    Raises:
        ValueError: if a subfolder cannot be listed; its name is not in the message.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def is_new(path: str) -> bool:
        try:
            status = os.stat(path)
        except OSError:
            return True  # a link to nothing: a file that cannot be read
        known = (key := (status.st_dev, status.st_ino)) in seen
        seen.add(key)
        return not known and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"{folder}: a folder in it cannot be listed; change its permissions, or remove it"
        ) from None

    is_new(str(folder))
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        shown = {name for name in (*folders, *files) if is_shown(name)}
        folders[:] = [name for name in sorted(shown & {*folders}) if is_new(f"{place}/{name}")]
        found += [Path(place, name) for name in sorted(shown & {*files}) if is_new(f"{place}/{name}")]
    return sorted(found)


def images_under(folder: Path) -> list[Path]:
    """Image files under a folder that Pillow can decode; see :func:`files_under`."""
    return [path for path in files_under(folder) if path.suffix.lower() in suffixes()]


class FileImages(ImageStore):
    """Image files, decoded and resized when they are first read, then kept as uint8 in memory.

    Args:
        paths: the files.
        shape: channels (1: grey, 3: RGB), height and width to bring them to.
        folder: what to name in error messages instead of a file; None names the file. Names of private
            files may reveal as much as their contents.
        cache: keep decoded images in memory; nothing is ever written to disk.
    """

    def __init__(
        self, paths: Sequence[Path], shape: ImageShape, folder: Path | None = None, cache: bool = True
    ) -> None:
        self.shape = shape
        self.paths, self._folder = list(paths), folder
        self._cached = torch.zeros(len(self.paths), dtype=torch.bool)
        self._cache = torch.empty((len(self.paths), *shape), dtype=torch.uint8) if cache else None
        self._digests: dict[int, bytes] = {}  # of files that were read

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`.

        Raises:
            ValueError: if a file can't be decoded.
        """
        if self._cache is None:
            pixels = torch.empty(len(indices), *self.shape, dtype=torch.uint8)
            for row, image in enumerate(_by_threads(self._decode, indices)):
                pixels[row] = image
        else:
            list(_by_threads(self._decode, indices[~self._cached[indices]].unique()))
            pixels = self._cache[indices]
        return pixels.to(torch.float32).div_(255)

    def digests(self, indices: Tensor) -> list[bytes]:
        """See :meth:`ImageStore.digests`; equal files count as equal images."""
        for index in indices.tolist():
            if index not in self._digests:
                self._content(index)
        return [self._digests[index] for index in indices.tolist()]

    def _content(self, index: int) -> bytes:
        """Read a file, and keep the digest of its content."""
        content = self.paths[index].read_bytes()
        self._digests[index] = digest_of(content)
        return content

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`."""
        if self._cache is not None:
            list(_by_threads(self._decode, torch.arange(len(self))))

    def readable(self) -> Tensor:
        """Bool ``(n,)``: which files can be decoded; decoded images stay in memory where they are cached."""
        return torch.tensor([*_by_threads(self._is_readable, torch.arange(len(self)))], dtype=torch.bool)

    def _is_readable(self, index: int) -> bool:
        with contextlib.suppress(ValueError):
            return self._decode(index) is not None
        return False

    def _decode(self, index: int) -> Tensor:
        """Decode an image to uint8, and keep it where images are cached."""
        from PIL import Image

        if self._cache is not None and self._cached[index]:
            return self._cache[index]

        channels, height, width = self.shape
        try:
            with Image.open(io.BytesIO(self._content(index))) as file:
                size = file.width * file.height
                if size > _MOST_PIXELS:
                    raise ValueError("too large")
                with _ONE_LARGE if size > LARGE_IMAGE else contextlib.nullcontext():
                    pixels = pixels_of(file, channels, (width, height))
        except Exception:  # decoders of damaged files raise whatever they meet
            hidden = f"a file of {self._folder}"
            # "from None": Pillow's own message has the path in it.
            raise ValueError(
                f"{self.paths[index] if self._folder is None else hidden} is not a readable image; remove it, or "
                "convert it"
            ) from None
        if self._cache is not None:
            self._cache[index] = pixels
            self._cached[index] = True
        return pixels


def _by_threads(work: Callable[[int], Any], indices: Tensor) -> Iterator[Any]:
    """Yield results in order, computed by threads: Pillow releases the GIL while it decodes and resizes."""
    from PIL import Image

    suffixes()  # Pillow's plugins are loaded by one thread
    # Pillow's own limit would refuse images that are decoded reduced, and warn of sizes of private ones.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            yield from pool.map(work, indices.tolist())
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def image_shape_of(image_size: int | tuple[int, int], channels: int = 3) -> ImageShape:
    """Channels, height and width of images of ``image_size``: the side of a square, or height and width."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return (channels, check_int("image_size", height), check_int("image_size", width))


class ImageFolderDataModule(OwnDataModule):
    """Private, public and test images in folders of files.

    Under ``root``: ``private/<class>/`` holds the sensitive images by class, ``public/`` public ones (files
    lying in ``public/<class>/`` have a known truth, which is used for evaluation only), ``test/<class>/``
    the test images; optional are ``test/`` itself, ``val/<class>/`` (a validation set) and ``predict/``
    (images to predict). Sub-folders of a class folder are searched too, and links are followed. Files are ordered by
    path; hidden and system files are passed over, and so is what the installed Pillow doesn't decode, by its suffix.
    Private files that are equal and of one class count once.

    A ``root`` without these parts holds the private class folders themselves; ``public`` and ``test`` may then be
    folders elsewhere, and where there is no public one, nothing is learned from public images.

    Images are turned upright (EXIF), laid on white where they are transparent, cut to 8 bits a channel, made grey or
    RGB, and stretched to ``image_size`` by bilinear interpolation, those of more than 16 megapixels after they are
    reduced by a whole factor. All of a part are decoded when it is loaded: files that can't be, those of more than
    268 megapixels and those outside class folders are left out (``unusable``).

    Args:
        root: the folder.
        image_size: side of square images, or (height, width).
        grayscale: one channel instead of three.
        class_names: names of the class folders, in the order of their indices. By default the sub-folders
            of ``test/``, ``val/`` and ``public/`` together in alphabetical order; only where there are none, those of
            ``private/``: a condition of the guarantee, so name the classes here if it is sensitive which of them
            occur. No part needs them all.
        public: a folder of public images, in the place of ``public/``; ``"none"`` for none.
        test: a folder of test images by class, in the place of ``test/``.
        cache: keep decoded images in memory, as uint8.
        names: release class names that are not stated, at a cost in ε, instead of reading private folders; see
            :meth:`~pl_privknn.recommendation.recommend.Recommendation.with_names`.
        **kwargs: see :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`.

    Attributes:
        places: the folder of each part that there is.

    Raises:
        FileNotFoundError: if ``root``, ``private/`` or ``public/`` is missing.
        ValueError: if a folder isn't one of the classes, two differ in case or spaces alone, or a link of another
            part leads to private files. Messages never name a private file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from pl_privknn import ImageFolderDataModule
        >>> root = Path(tempfile.mkdtemp())
        >>> for name in ("private/cat/a", "private/dog/b", "public/c", "test/cat/d", "test/dog/e"):
        ...     (root / name).parent.mkdir(parents=True, exist_ok=True)
        ...     Image.new("RGB", (40, 30)).save(root / f"{name}.png")
        ...
        >>> data = ImageFolderDataModule(root, image_size=32)
        >>> data.class_names, data.image_shape, len(data.load_public())
        (('cat', 'dog'), (3, 32, 32), 1)
    """

    unlabeled: ClassVar[str] = "no class folder"
    copies_are_one: ClassVar[bool] = True
    leaves_out: ClassVar[str] = "in files that cannot be decoded, or outside class folders,"

    def __init__(
        self,
        root: str | Path,
        image_size: int | tuple[int, int] = 32,
        *,
        grayscale: bool = False,
        class_names: Sequence[str] | None = None,
        cache: bool = True,
        public: str | Path | None = None,
        test: str | Path | None = None,
        names: PaidNames | None = None,
        **kwargs: Any,
    ) -> None:
        self.root, self.cache = Path(root), cache
        own = {part: self.root / part for part in _PARTS if (self.root / part).is_dir()}
        own = own or {"private": self.root}
        given = {"test": test, "public": None if public in ("none", "images") else public}
        self.places = {**own, **{part: Path(place) for part, place in given.items() if place is not None}}
        if public == "none":
            self.places.pop("public", None)
        needed = {
            "private",
            *self.places,
            *([] if public == "none" or self.root in own.values() else ["public"]),
        }
        for part in sorted(needed):
            if not self.places.get(part, self.root / part).is_dir():
                raise FileNotFoundError(
                    f"ImageFolderDataModule(root={str(root)!r}): no folder {part!r} there; {_LAYOUT}"
                )
        self.names = None if names is None else as_group("names", names, PaidNames())
        classes = self._class_folders() if class_names is None else [_form(name) for name in class_names]
        shape = image_shape_of(image_size, 1 if grayscale else 3)
        has_public = "images" if "public" in self.places else "none"
        super().__init__(
            num_classes=len(classes), image_shape=shape, class_names=classes, public=has_public, **kwargs
        )
        paid = self.names is not None and self.names.classes
        if class_names is None and not self._known_folders() and not paid:
            self.conditions = (CLASSES_ARE_PUBLIC,)
        for part in self.places.keys() - ({"predict", "private"} if paid else {"predict"}):
            if strange := sorted(self._folders(part) - {*classes}):
                known = "" if part == "private" else f" ({', '.join(strange)})"
                raise ValueError(
                    f"{self.places[part]} has folders{known} that aren't among the classes {', '.join(classes)}; "
                    "rename them, or pass class_names"
                )

    def unnamed_records(self, unit: str) -> UnnamedRecords:
        """See :meth:`PrivatePublicDataModule.unnamed_records`; equal files of one folder count once."""
        store, _ = self._files("private")
        folder, keys = self.places["private"], store.digests(torch.arange(len(store)))
        tops = [path.relative_to(folder).parts[:-1] for path in store.paths]
        found = {(_form(top[0]), key) for top, key in zip(tops, keys, strict=True) if top}
        return UnnamedRecords([name for name, _ in found])

    def arguments_of(self, released: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
        """See :meth:`PrivatePublicDataModule.arguments_of`."""
        return {"names": self.names, "class_names": sorted(released["classes"])}

    def _has(self, part: str) -> bool:
        return part in self.places

    def _records(self, part: str) -> tuple[ImageStore, Tensor | None, dict[str, Tensor]]:
        store, labels = self._files(part)
        known = labels if part != "public" or bool((labels >= 0).any()) else None
        return store, known, {"an unreadable file": ~store.readable()}

    def _known_folders(self) -> set[str]:
        """Class folders of the parts that are not private."""
        return {name for part in self.places.keys() - {"private", "predict"} for name in self._folders(part)}

    def _class_folders(self) -> list[str]:
        known = self._known_folders()
        if not known and self.names is not None and "public" not in self.places:
            self.names, self.owes_names = dataclasses.replace(self.names, classes=True), True
            return list(UNKNOWN)
        names = sorted(known or self._folders("private"))
        if len(names) < 2:
            raise ValueError(f"{self.root} has {len(names)} class folders, expected 2 or more; {_LAYOUT}")
        return check_unlike(names, "class_names", bool(known))

    def _files(self, part: str) -> tuple[FileImages, Tensor]:
        """The images of a part and their class indices, -1 for files outside class folders."""
        folder, private = self.places[part], self.places["private"].resolve()
        files = files_under(folder)
        paths = [path for path in files if path.suffix.lower() in suffixes()]
        if part != "private":
            passed = Counter(path.suffix.lower() or "without suffix" for path in files)
            if others := [f"{count} {name}" for name, count in passed.items() if name not in suffixes()]:
                warnings.warn(
                    f"{folder}: skipped files that are not images: {', '.join(others)}", stacklevel=4
                )
            places = {path.parent for path in paths} | {path for path in paths if path.is_symlink()}
            if any(private in (place.resolve(), *place.resolve().parents) for place in places):
                raise ValueError(
                    f"{folder}: it, or a link in it, leads to private files; keep the parts apart"
                )
        numbers = {name: number for number, name in enumerate(self.class_names)}
        tops = [path.relative_to(folder).parts[:-1] for path in paths]
        labels = [numbers.get(_form(top[0]), -1) if top and part != "predict" else -1 for top in tops]
        hidden = folder if part == "private" else None
        store = FileImages(paths, self.image_shape, hidden, self.cache)
        return store, torch.tensor(labels, dtype=torch.int64)

    def _folders(self, part: str) -> set[str]:
        """Names of the class folders of a part."""
        return {
            _form(entry.name)
            for entry in self.places[part].iterdir()
            if entry.is_dir() and is_shown(entry.name)
        }


def _form(name: str) -> str:
    """Unicode-normalised name: systems encode accented letters differently."""
    return unicodedata.normalize("NFC", str(name))
