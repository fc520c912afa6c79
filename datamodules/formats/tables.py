"""Tables of numbers from arrays, files and folders of files, which stay on disk where their format lets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.datamodules.formats.array_files import array_shape, read_array
from pl_privknn.datamodules.formats.images import ImageStore, TensorImages
from pl_privknn.datamodules.formats.parquet import ParquetColumn, is_parquet
from pl_privknn.datamodules.formats.stores import JoinedImages

# Looked through for values that are not finite: 16 MB at a time.
_VALUES_AT_A_TIME = 1 << 22


def dimension_of(name: str, source: Any) -> int:
    """How many numbers a row has; of files no more is read than that takes.

    Args:
        name: of the argument, for messages.
        source: see :func:`rows_of`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for files that can't be read, or rows of different lengths.
    """
    lengths = {_dimension(name, part) for part in _parts(name, source)}
    if len(lengths) > 1:
        raise ValueError(
            f"{name}={str(source)!r}: its files have rows of {', '.join(map(str, sorted(lengths)))} numbers; want "
            "one length"
        )
    return lengths.pop()


def rows_of(name: str, source: Any) -> ImageStore:
    """Rows of numbers, each as an image of d channels and one pixel.

    Args:
        name: of the argument, for messages, and for the column or member that is looked for.
        source: an array; a ``.npy``, ``.npz`` or ``.parquet`` file; or a folder of ``.npy`` or of ``.parquet`` files,
            one after another by their names. ``file.npz:member`` and ``file.parquet:column``, or ``folder:column``,
            name a part.

    Raises:
        FileNotFoundError: if a file is missing.
        ImportError: for Parquet without pyarrow.
        ValueError: if a file is damaged, or holds something else than rows of finite floats of one length.
    """
    stores = [_rows(name, part) for part in _parts(name, source)]
    return stores[0] if len(stores) == 1 else JoinedImages(stores)


def numbers_of(name: str, source: Any) -> Tensor:
    """A number for each row, such as labels, or a row of them, in memory; sources as in :func:`rows_of`."""
    parts = []
    for part in _parts(name, source):
        parts.append(ParquetColumn(name, str(part)).numbers() if is_parquet(part) else _array(name, part))
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"{name}={str(source)!r}: want files of one number a row, or of as many in each")
    return torch.cat(parts)


def _parts(name: str, source: Any) -> list[Any]:
    """The files of a folder, each with the column that is named; anything else is one part."""
    if not isinstance(source, str | Path):
        return [source]
    folder, colon, column = str(source).rpartition(":")
    place = Path(source) if Path(source).is_dir() or not colon else Path(folder)
    if not place.is_dir():
        return [source]
    files = sorted(path for path in place.iterdir() if path.suffix in (".npy", ".parquet"))
    kinds = {path.suffix for path in files}
    if len(kinds) != 1:
        raise ValueError(
            f"{name}={str(source)!r}: want a folder of .npy files, or one of .parquet files; it holds "
            f"{'both' if kinds else 'none'}"
        )
    if kinds == {".npy"} or place == Path(source):
        return [str(path) for path in files]
    return [f"{path}:{column}" for path in files]


def _dimension(name: str, source: Any) -> int:
    if is_parquet(source):
        return ParquetColumn(name, str(source)).dimension
    shape = array_shape(name, source)
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"{_named(name, source)}: shape {shape_text(shape)}; want (n, d), one row a record")
    return shape[1]


def _rows(name: str, source: Any) -> ImageStore:
    if is_parquet(source):
        rows = ParquetColumn(name, str(source)).rows()
        for _, block in rows.blocks():
            _check_finite(_named(name, source), block)
        return rows
    table = _array(name, source)
    if table.ndim != 2 or not table.is_floating_point():
        raise ValueError(
            f"{_named(name, source)}: shape {shape_text(table.shape)}, {table.dtype}; want float of shape (n, d)"
        )
    for block in table.split(max(1, _VALUES_AT_A_TIME // table.shape[1])):
        _check_finite(_named(name, source), block)
    return TensorImages(table[:, :, None, None])


def _check_finite(named: str, block: Tensor) -> None:
    if not bool(torch.isfinite(block).all()):
        raise ValueError(f"{named}: some values are NaN or infinite; leave those records out")


def _array(name: str, source: Any) -> Tensor:
    return read_array(name, source if isinstance(source, Tensor | str | Path) else np.asarray(source))


def _named(name: str, source: Any) -> str:
    return f"{name}={str(source)!r}" if isinstance(source, str | Path) else name
