"""Choice of the data module for a user's files by their content."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pl_privknn._checks import shown
from pl_privknn.config import read_document
from pl_privknn.datamodules.array_files import labels_of
from pl_privknn.datamodules.arrays import ArraysDataModule, EmbeddingsDataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.cells import STATED, days_of
from pl_privknn.datamodules.columns import TABLES, Columns, entries
from pl_privknn.datamodules.folder import ImageFolderDataModule, images_under
from pl_privknn.datamodules.tables import TableDataModule, files_in
from pl_privknn.datamodules.text import TextDataModule
from pl_privknn.features.public import has_pretrained
from pl_privknn.features.text import WordLlamaFeatures
from pl_privknn.privacy.redaction import redacted

_ARGUMENTS = {
    f"{part}_{kind}" for part in ("private", "public", "test", "val") for kind in ("images", "embeddings")
}
_ARGUMENTS |= {"private_labels", "private_groups", "public_truth", "test_labels", "val_labels"}
#: Names of arrays without a part.
_ALONE = {"images": "private_images", "embeddings": "private_embeddings", "labels": "private_labels"}


def data_at(
    path: str | Path,
    num_classes: int | None = None,
    columns: Mapping[str, Any] | None = None,
    public: str | None = None,
    test: str | None = None,
    **arguments: Any,
) -> PrivatePublicDataModule:
    """Data module for a table, a folder of images, tables or ``.npy`` files, or an ``.npz`` file.

    Sizes come from public files, classes from the test and public parts unless their number is given. Of private
    files only the names are used, here; a run reads them.

    Args:
        path: one table, a folder of class folders, or ``images`` (``embeddings``) and ``labels`` as ``.npy`` files or
            in one ``.npz``, all of it private; or ``private``, ``public`` and ``test`` as tables (see
            :class:`~pl_privknn.datamodules.TextDataModule`), as folders of images, or as ``public_images.npy`` (or
            ``.npz`` member) and so on.
        num_classes: number of classes, for data without a test set.
        columns: of tables: arguments ``text``, ``label``, ``person`` and ``classes`` of that data module, and
            ``columns`` and ``bounds`` (see :func:`read_bounds`) of tables of numbers and categories, which are those
            without a column of texts; with one of these two, ``text`` is a column of texts beside others.
        public: public data of the same form elsewhere, without labels; ``"none"`` for none.
        test: test data of the same form elsewhere.
        **arguments: of every data module, such as ``batch_size``.

    Raises:
        FileNotFoundError: where nothing of the kind is there.
        ValueError: where the number of classes is not known.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"--data {path}: no such file or folder (working directory: {Path.cwd()})")
    if path.suffix.lower() in TABLES or (parts := files_in(path)):
        first = path if path.is_file() else parts.get("private", path)
        return _table(path, first, dict(columns or {}), {"public": public, "test": test, **arguments})
    if columns:
        raise ValueError(
            f"--data {path}: there are no tables for --{next(iter(columns))}; expected one table, or a folder with "
            f"private, public and test, each with one of {', '.join(TABLES)}"
        )
    files: dict[str, Any] = dict(_arrays(path))
    if not files and path.is_dir():
        return _folder(path, public, test, arguments)
    for name, place in (("public", public), ("test", test)):
        if place is not None and place != "none":
            files |= {file.replace("private", name): found for file, found in _arrays(Path(place)).items()}
    if "private_labels" not in files or len(files) < 2:
        raise FileNotFoundError(
            f"--data {path}: there is no table, no folder of images by class and no array in it; expected a "
            f"{'/'.join(TABLES)} file, <class>/*.png, private/<class>/, public/ and test/<class>/ with images, or "
            "images (or embeddings) and labels, or private_images, private_labels, public_images and so on as .npy "
            "files or in one .npz"
        )
    arguments.pop("names", None)
    arguments["task"] = _task(files, num_classes)
    module = EmbeddingsDataModule if "private_embeddings" in files else ArraysDataModule
    kind = "embeddings" if "private_embeddings" in files else "images"
    if f"public_{kind}" not in files:
        arguments["public"] = "none"
    return module(**files, num_classes=num_classes, **arguments)


def _table(
    path: Path, first: Path, columns: dict[str, Any], arguments: dict[str, Any]
) -> PrivatePublicDataModule:
    """Data module of texts or vectors where a column of them is named, or is there; of all columns otherwise."""
    of_rows: dict[str, Any] = {name: columns.pop(name) for name in ("columns", "bounds") if name in columns}
    text, encoding = columns.get("text", "text"), columns.get("encoding")
    if of_rows and "text" in columns:
        of_rows["text"] = [columns.pop("text")]
    if "bounds" in of_rows:
        numeric, categorical, texts = read_bounds(of_rows.pop("bounds"))
        of_rows |= {
            "numeric": numeric, "categorical": categorical, "text": [*of_rows.get("text", []), *texts]
        }  # fmt: skip
    given = {"root": str(path), **columns, **arguments}
    table = Columns("private", first, [text], encoding) if first.is_file() else None
    if "text" not in columns and (of_rows or (table is not None and text not in table.names)):
        return TableDataModule(**given, **of_rows)
    if table is not None and text in table.names and table.is_vectors(text):
        return TextDataModule(**given)
    return TextDataModule(**given, features=WordLlamaFeatures())  # by name, so that an exported file has it


def read_bounds(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Bounds of columns of numbers and dates, values of categories, and columns of texts, from YAML.

    Each entry is a column's name with ``[low, high]``, with the list of its categories, or with a word where the kind
    alone is stated: one of :data:`~pl_privknn.datamodules.cells.STATED`, which may also follow bounds, ``category``
    or ``text``.

    Raises:
        ValueError: for other entries.
    """
    numeric: dict[str, Any] = {}
    categorical: dict[str, Any] = {}
    texts = list[str]()
    stated = read_document(path)
    for name, value in (stated if isinstance(stated, dict) else {"": None}).items():
        parts = value if isinstance(value, list) else []
        listed = [str(part) if isinstance(part, datetime.date) else part for part in parts]
        pair = listed[:-1] if listed and listed[-1] in STATED else listed
        numbers = [not isinstance(part, bool | str) or not math.isnan(days_of(str(part))) for part in pair]
        if value == "text":
            texts.append(str(name))
        elif isinstance(value, str) and value in STATED:
            numeric[str(name)] = value
        elif len(pair) == 2 and all(numbers):
            numeric[str(name)] = listed
        elif value == "category" or listed:
            categorical[str(name)] = [str(part) for part in listed] or None
        else:
            raise ValueError(
                f"--bounds {path}: {str(name)!r} has {shown(value)}; expected [low, high], a list of categories, "
                f"or one of {', '.join(STATED)}, category and text for each column"
            )
    return numeric, categorical, texts


def _task(files: Mapping[str, str], num_classes: int | None) -> str:
    """Task of a table of labels: one-hot rows are classes, other rows attributes.

    Private labels are looked at where no others are known and they tell the number of classes too, which is a
    condition of the guarantee.
    """
    known = [name for name in ("test_labels", "val_labels", "public_truth") if name in files]
    if not known and num_classes is None:
        known = ["private_labels"]
    tables = [redacted(labels_of, name, files[name]) for name in known]
    rows = any(isinstance(table, Tensor) and table.ndim == 2 for table in tables)
    return "multilabel" if rows else "multiclass"


def _arrays(path: Path) -> dict[str, str]:
    """Arguments of a data module of arrays, from the names in a folder of .npy files or in an .npz file."""
    if path.suffix.lower() == ".npz" and path.is_file():
        try:
            with np.load(path) as archive:
                found = {name: f"{path}:{name}" for name in archive.files}
        except Exception as error:  # of a damaged header numpy raises whatever its tokenizer does
            raise ValueError(
                f"--data {path} can't be read ({type(error).__name__}); write it again"
            ) from None
    else:
        files = [file for file in entries(path) if file.suffix.lower() == ".npy"]
        found = {file.stem: str(file) for file in files}
        if both := [file.name for file in files if str(file) != found[file.stem]]:
            raise ValueError(
                f"--data {path}: {both[0]} is there twice, with suffixes that differ in case; remove one"
            )
    return {
        _ALONE.get(name, name): file for name, file in found.items() if _ALONE.get(name, name) in _ARGUMENTS
    }


def _folder(
    path: Path, public: str | None, test: str | None, arguments: dict[str, Any]
) -> ImageFolderDataModule:
    from PIL import Image

    if public is None and (path / "private").is_dir() and not (path / "public").is_dir():
        public = "none"
    made = ImageFolderDataModule(str(path), public=public, test=test, **arguments)
    images = [] if "public" not in made.places else images_under(made.places["public"])
    if made.has_public and not images:
        raise FileNotFoundError(f"--data {path}: there are no images in public/")
    sides = []
    for file in images[:50]:
        with contextlib.suppress(Exception), Image.open(file) as image:
            sides.append(min(image.size))
    # A pretrained network sees larger images better; other features are computed at 32 pixels at most.
    usual, most = (64, 224) if has_pretrained() else (32, 64)
    size = min(max(8, sorted(sides)[len(sides) // 2]), most) if sides else usual
    return ImageFolderDataModule(str(path), size, public=public, test=test, **arguments)
