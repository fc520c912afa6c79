"""Files of published data sets: found, compared with what was published, and never trusted further than needed."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class DamagedFileError(ValueError):
    """A file is not what it should be; the message names the file, what is wrong with it and the remedy."""


def find_file(name: str, folders: Sequence[Path], remedy: str) -> Path:
    """The first of ``folders`` that has the file ``name``.

    Args:
        name: of the file.
        folders: where to look, in this order.
        remedy: the end of the message if it is nowhere.

    Raises:
        FileNotFoundError: with all places that were looked at.
    """
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name} not found in {', '.join(map(str, folders))}; {remedy}")


def check_md5(path: Path, expected: str) -> None:
    """Compare a file with the published one.

    Args:
        path: the file.
        expected: MD5 of the published file, hexadecimal.

    Raises:
        DamagedFileError: if they differ.
    """
    from torchvision.datasets.utils import check_integrity

    if not check_integrity(path, expected):
        raise DamagedFileError(
            f"{path}: {path.stat().st_size} bytes whose MD5 isn't that of the published file ({expected}), so it is "
            "cut off, damaged or altered; delete it and get it again (download=True), or pass verify=False for data "
            "of your own in this format"
        )


def read_mat(path: Path, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """Variables of a MATLAB file (version 5, not 7.3).

    Args:
        path: the file.
        names: of the variables, all of which must be there.
        **options: for ``scipy.io.loadmat``.

    Raises:
        DamagedFileError: if the file can't be read or lacks a variable.
    """
    from scipy.io import loadmat

    try:
        variables: dict[str, Any] = loadmat(path, variable_names=list(names), **options)
    # Damage shows itself as nearly any exception there: OSError, ValueError, IndexError, zlib.error and more.
    except Exception as error:
        raise DamagedFileError(
            f"{path}: no sound MATLAB file ({type(error).__name__}: {error}), {path.stat().st_size} bytes "
            "long; get it again, it may have been cut off"
        ) from None
    if missing := [name for name in names if name not in variables]:
        raise DamagedFileError(
            f"{path}: it has no variable {', '.join(map(repr, missing))}; it is another file, get the right one"
        )
    return variables


def read_array_pickle(path: Path) -> dict[str, Any]:
    """A dictionary of arrays, lists, numbers and strings from a pickle of Python 2 or 3.

    A pickle may name any function to be called on loading; here everything is refused but what rebuilds
    numpy's arrays, so a file can't run code.

    Args:
        path: the file.

    Raises:
        DamagedFileError: if it isn't such a pickle.
    """
    try:
        with path.open("rb") as file:
            # latin1: strings and raw array data that Python 2 wrote.
            content = _ArraysOnly(file, encoding="latin1").load()
    # A damaged pickle raises nearly anything, for instance AttributeError or MemoryError.
    except Exception as error:
        raise DamagedFileError(
            f"{path}: no sound pickle of arrays ({type(error).__name__}: {error}), {path.stat().st_size} "
            "bytes long; get it again, it may have been cut off"
        ) from None
    if not isinstance(content, dict):
        raise DamagedFileError(
            f"{path}: it holds a {type(content).__name__} instead of a dictionary; get it again"
        )
    return content


class _ArraysOnly(pickle.Unpickler):
    """Knows what rebuilds an array, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # its module's name depends on numpy's version
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of arrays")
