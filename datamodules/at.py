"""The data module for one's own files, found by what is in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pl_privknn.datamodules.arrays import ArraysDataModule, EmbeddingsDataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.folder import SUFFIXES, ImageFolderDataModule
from pl_privknn.datamodules.tables import Table
from pl_privknn.datamodules.text import TABLES, TextDataModule, files_in
from pl_privknn.features.public import has_pretrained
from pl_privknn.features.text import WordLlamaFeatures

_TABLES = {
    "images": ("private_images", "private_labels", "public_images", "public_truth", "test_images", "test_labels",
               "val_images", "val_labels"),
    "embeddings": ("private_embeddings", "private_labels", "public_embeddings", "public_truth", "test_embeddings",
                   "test_labels", "val_embeddings", "val_labels"),
}  # fmt: skip


def data_at(
    path: str | Path,
    num_classes: int | None = None,
    columns: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> PrivatePublicDataModule:
    """The data module for a folder of images, of tables or of ``.npy`` files, or for an ``.npz`` file.

    Sizes come from public files, the number of classes from the test set (its folders or labels) or the public one
    unless it is given. Of private files only the names are used, and whether they are images.

    Args:
        path: ``private/``, ``public/`` and ``test/`` with images; ``public_images.npy`` or ``public_embeddings.npy``
            and so on; one ``.npz``; or ``private``, ``public`` and ``test`` as tables, see
            :class:`~pl_privknn.datamodules.TextDataModule`.
        num_classes: number of classes, for data without a test set.
        columns: of tables: arguments ``text``, ``label``, ``person`` and ``classes`` of that data module.
        **arguments: of every data module, such as ``batch_size``.

    Raises:
        FileNotFoundError: where nothing of the kind is there.
        ValueError: where the number of classes can't be told.
    """
    path = Path(path)
    if files_in(path):
        arguments = {"root": str(path), **(columns or {}), **arguments}
        made = TextDataModule(**arguments)
        # By name, so that an exported file has it.
        return made if made.holds_vectors else TextDataModule(**arguments, features=WordLlamaFeatures())
    if columns:
        raise ValueError(
            f"--data {path}: there are no tables for --{next(iter(columns))}; want private, public and test, each "
            f"with one of {', '.join(TABLES)}"
        )
    if (path / "public").is_dir():
        return _folder(path, arguments)
    files: dict[str, str] = {}
    names = {name: None for kind in _TABLES.values() for name in kind}
    if path.suffix == ".npz" and path.is_file():
        with np.load(path) as archive:
            files = {name: str(path) for name in names if name in archive.files}
    else:
        files = {name: str(path / f"{name}.npy") for name in names if (path / f"{name}.npy").is_file()}
    kind = "embeddings" if "public_embeddings" in files else "images"
    needed = _TABLES[kind][:3]
    if missing := [name for name in needed if name not in files]:
        raise FileNotFoundError(
            f"--data {path}: there is no {missing[0]}; want private/<class>/, public/ and test/<class>/ with "
            f"images, or {', '.join(needed)} and test_{kind}, test_labels as .npy files or in one .npz"
        )
    if num_classes is None:
        known = [name for name in ("test_labels", "val_labels", "public_truth") if name in files]
        if not known:
            raise ValueError(f"--data {path}: no test_labels tell the number of classes; give --num-classes")
        num_classes = max(int(Table(name, files[name]).numbers().max()) for name in known) + 1
    module = EmbeddingsDataModule if kind == "embeddings" else ArraysDataModule
    chosen: dict[str, Any] = {name: file for name, file in files.items() if name in _TABLES[kind]}
    return module(**chosen, num_classes=num_classes, **arguments)


def _folder(path: Path, arguments: dict[str, Any]) -> ImageFolderDataModule:
    from PIL import Image

    if not (path / "private").is_dir():
        raise FileNotFoundError(f"--data {path}: there is no folder private/<class>/ in it")
    public = sorted(file for file in (path / "public").rglob("*") if file.suffix.lower() in SUFFIXES)
    if not public:
        raise FileNotFoundError(f"--data {path}: there are no images in public/")
    classes = {
        part: {folder.name for folder in (path / part).glob("[!.]*") if folder.is_dir()}
        for part in ("test", "val", "public")
    }
    told = {part: names for part, names in classes.items() if names}
    if not told:
        raise ValueError(f"--data {path}: neither test/<class>/ nor public/<class>/ tells the classes")
    first, names = next(iter(told.items()))
    for part, others in told.items():
        if strange := sorted(names ^ others):
            raise ValueError(
                f"--data {path}: {first}/ and {part}/ differ in their classes ({', '.join(strange[:5])}); give both "
                "the same folders, or leave the public images' classes out"
            )
    if len(names) < 2:
        raise ValueError(f"--data {path}: {first}/ has one class ({', '.join(names)}); want 2 or more")
    private = {folder.name for folder in (path / "private").glob("[!.]*") if folder.is_dir()}
    secret = sorted(file for file in (path / "private").rglob("*") if file.suffix.lower() in SUFFIXES)
    for place, file in enumerate(secret, 1):
        try:
            with Image.open(file) as opened:
                opened.verify()  # before a run begins; no name is shown
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise ValueError(
                f"--data {path}: file number {place}, in the order of their paths, of private/ is not a readable "
                "image; take it away, or convert it"
            ) from None
    if unknown := private - names:  # what they are called, no message says
        raise ValueError(
            f"{path / 'private'} has {len(unknown)} folders that aren't among the classes "
            f"{', '.join(sorted(names))}; rename them"
        )
    sides = []
    for file in public[:50]:
        with contextlib.suppress(OSError), Image.open(file) as image:
            sides.append(min(image.size))
    side = sorted(sides)[len(sides) // 2] if sides else 32
    # A pretrained network sees larger images better; other features are computed at 32 pixels at most.
    most = 224 if has_pretrained() else 64
    size = min(max(8, side), most)
    return ImageFolderDataModule(str(path), image_size=size, **arguments)
