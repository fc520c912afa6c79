"""Reader of arrays: numbers, labels and rows of files and objects in memory."""

from __future__ import annotations

import filecmp
import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import InputError, shape_text
from pl_privknn.datamodules.columns import (
    Columns,
    FaultError,
    MissingFileError,
    check_file,
    entries,
    reading_table,
    word_of,
)
from pl_privknn.datamodules.datasets import ImageStore, JoinedImages, TensorImages

#: An array, or the path of a file of numbers, with ``:member`` or ``:column`` behind it.
ArrayOrPath = str | Path | np.ndarray | Tensor
#: Endings of files of one array, or with a column that is taken as one.
ARRAYS = (".npy", ".npz", ".parquet")

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_NUMBERS_ALONE = "plain numbers only"
# Row groups that were read last stay in memory, up to so many bytes: small tables are read once.
_KEPT_BYTES = 1 << 28
# Looked through for values that are not finite: 16 MB at a time.
_VALUES_AT_A_TIME = 1 << 22


class Array:
    """Array in memory or in a file, with the name of its argument for messages.

    Of an ``.npz`` file the member with the argument's name is taken, or its only one, or the one named as in
    ``data.npz:x``; of a ``.parquet`` file the column with that name, or the one named as in ``data.parquet:x``.

    Args:
        name: of the argument.
        source: the array or its path.

    Attributes:
        named: what messages call it.
        mapping: of a ``.npy`` file whose :meth:`values` were asked for, where its pages can be given back.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file of another kind.
    """

    def __init__(self, name: str, source: ArrayOrPath | Sequence[int]) -> None:
        self.named, self._member, self._array = name, name, source
        self._path: Path | None = None
        self._columns: Columns | None = None
        self.mapping: mmap.mmap | None = None
        # Matrices of SciPy, and tensors of another layout.
        if hasattr(source, "tocsr") or getattr(source, "layout", torch.strided) != torch.strided:
            raise InputError(
                f"{name}: a sparse {type(source).__name__}; make it dense by .toarray(), of tensors .to_dense()"
            )
        if isinstance(source, str | Path):
            file, member = split_member(source)
            self.named, self._path, self._member = f"{name}={str(source)!r}", Path(file), member or name
            check_file(self.named, self._path, ARRAYS)
            if self._path.suffix.lower() == ".parquet":
                self._columns = Columns(name, self._path)
                self._columns.check(self._member, "as in data.parquet:embedding")

    def shape(self) -> tuple[int, ...]:
        """Shape of the array; of a file only the header is read where possible.

        Raises:
            ValueError: if the file is damaged or lacks the member.
        """
        if self._path is None:
            return tuple(np.shape(self._array))  # type: ignore[arg-type]
        if self._columns is not None:
            return (sum(self._columns.groups), self._columns.width(self._member))
        with reading_table(self.named, _NUMBERS_ALONE):
            if self._path.suffix.lower() == ".npy":
                return tuple(np.load(self._path, mmap_mode="r").shape)
            with (
                np.load(self._path) as archive,
                archive.zip.open(f"{self._chosen(archive.files)}.npy") as file,
            ):
                old = np.lib.format.read_magic(file) == (1, 0)
                header = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                return tuple(header(file)[0])

    def values(self) -> Any:
        """Array or tensor as it is stored: numbers, texts (for labels), or anything else.

        ``.npy`` files stay on disk and are paged in when they are looked at.

        Raises:
            ValueError: if the file is damaged or lacks the member.
        """
        if self._path is None:
            return self._array
        if self._columns is not None:
            if self._columns.is_vectors(self._member):
                raise InputError(f"{self.named}: expected one value in each row of {self._member!r}")
            return self._columns.read(self._member).to_numpy(zero_copy_only=False)  # null is NaN, or None
        with reading_table(self.named, _NUMBERS_ALONE):
            if self._path.suffix.lower() == ".npz":
                with np.load(self._path) as members:
                    return members[self._chosen(members.files)]
            # "c": copy on write. The file is never changed, and torch gets memory that it may write to.
            array = np.load(self._path, mmap_mode="c")
            self.mapping = array.base if hasattr(mmap, "MADV_DONTNEED") else None
            return array

    def numbers(self) -> Tensor:
        """Values as a tensor of numbers.

        Raises:
            ValueError: as :meth:`values`, or for anything but numbers.
        """
        return self.as_numbers(self.values())

    def vectors(self) -> Tensor:
        """Rows of floats, ``(n, d)``.

        Raises:
            ValueError: as :meth:`numbers`, or for anything else.
        """
        table = self.numbers()
        if table.ndim != 2 or not table.is_floating_point():
            raise InputError(
                f"{self.named}: shape {shape_text(table.shape)}, {table.dtype}; expected float of shape (n, d)"
            )
        return table

    def rows(self) -> tuple[ImageStore, Tensor]:
        """Rows of floats, and bool ``(n,)``: whether all values of a row are finite.

        Raises:
            ValueError: as :meth:`vectors`.
        """
        if self._columns is not None:
            store: ImageStore = ParquetRows(self._columns, self._member)
        else:
            store = TensorImages(self.vectors(), self.mapping)
        return store, torch.cat([block.isfinite().all(1) for block in blocks(store)])

    def as_numbers(self, values: Any) -> Tensor:
        """Convert the result of :meth:`values` to a tensor; ``ValueError`` unless it holds numbers."""
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            return values.to(torch.int64) if values.dtype in _UNSIGNED else values
        if isinstance(values, np.ma.MaskedArray) and values.mask.any():  # masked numbers are not known
            values = np.where(values.mask, np.nan, values.data)
        array = np.asarray(values)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise InputError(f"{self.named}: dtype {array.dtype}; expected numbers of at most 64 bits")
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch computes little with them
            return torch.from_numpy(array.astype(np.int64))
        if not array.dtype.isnative or not array.flags.writeable or any(step < 0 for step in array.strides):
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array)

    def _chosen(self, members: list[str]) -> str:
        if self._member not in members and len(members) != 1:
            raise FaultError(
                f"it holds {', '.join(members) or 'nothing'} and no array called {self._member!r}"
            )
        return self._member if self._member in members else members[0]


class ParquetRows(JoinedImages):
    """Lists of a Parquet column, each a vector; row groups are read as they are looked at.

    Rows in their order are read once. Rows at random, of a file larger than the 256 MB that are kept, make each
    batch read most of it: write such a table as ``.npy``.

    Args:
        table: the file.
        name: of the column.
    """

    def __init__(self, table: Columns, name: str) -> None:
        self._table, self._name, self.stores = table, name, []
        self.shape = (table.width(name),)
        self._ends = torch.tensor(table.groups, dtype=torch.int64).cumsum(0)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def _read_part(self, number: int, rows: Tensor) -> Tensor:
        return self._group(number)[rows]

    def _group(self, number: int) -> Tensor:
        if number not in self._kept:
            group = self._table.vectors(self._name, number)
            if group.shape[1] != self.shape[0]:
                raise self._table.misfit(self._name, "a list of equally many floats in each row")
            while self._kept and sum(g.nbytes for g in self._kept.values()) + group.nbytes > _KEPT_BYTES:
                self._kept.popitem(last=False)
            self._kept[number] = group
        self._kept.move_to_end(number)
        return self._kept[number]


def blocks(store: ImageStore) -> Iterator[Tensor]:
    """Yield all images of a store in their order, in blocks of float32 ``(b, d)``."""
    for rows in torch.arange(len(store)).split(max(1, _VALUES_AT_A_TIME // math.prod(store.shape))):
        yield store.read(rows).flatten(1)


def split_member(source: str | Path) -> tuple[str, str]:
    """Split a path from the member or column that is named after it (empty where there is none)."""
    file, colon, member = str(source).rpartition(":")
    known = Path(file).suffix.lower() in ARRAYS or Path(file).is_dir()
    return (file, member) if colon and known and not Path(source).is_dir() else (str(source), "")


def tables_of(name: str, source: Any) -> list[Array]:
    """Tables of the files in a folder, ordered by name, or a single table.

    Args:
        name: of the argument.
        source: see :class:`Array`; or a folder of ``.npy`` or of ``.parquet`` files, with ``:column`` behind it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a folder without such files, or of both kinds.
    """
    if not isinstance(source, str | Path) or not os.path.isdir(split_member(source)[0]):
        return [Array(name, source)]
    folder, column = split_member(source)
    files = [path for path in entries(folder) if path.suffix.lower() in (".npy", ".parquet")]
    kinds = {path.suffix.lower() for path in files}
    if len(kinds) != 1:
        raise InputError(
            f"{name}={str(source)!r}: expected a folder of .npy files, or one of .parquet files; it holds "
            f"{'both' if kinds else 'none'}"
        )
    return [Array(name, f"{path}:{column}" if column and kinds == {".parquet"} else path) for path in files]


def dimension_of(name: str, source: Any) -> int:
    """Length of a row, see :func:`tables_of`; ``ValueError`` where lengths differ."""
    tables = tables_of(name, source)
    shapes = [table.shape() for table in tables]
    if len(shapes[0]) != 2 or shapes[0][1] < 1 or len({shape[1:] for shape in shapes}) != 1:
        raise InputError(
            f"{tables[0].named}: shape {shape_text(shapes[0])}; expected (n, d), one row a record, with one d in all "
            "files"
        )
    return shapes[0][1]


def rows_of(name: str, source: Any) -> tuple[ImageStore, Tensor]:
    """Rows of floats and which of them are finite, see :meth:`Array.rows` and :func:`tables_of`."""
    stores, finite = zip(*(table.rows() for table in tables_of(name, source)), strict=True)
    return stores[0] if len(stores) == 1 else JoinedImages(stores), torch.cat(finite)


def owners_of(source: Any) -> Tensor:
    """``private_groups``: the person of each row, as int64 unless they are fractions, see :func:`tables_of`."""
    tables = tables_of("private_groups", source)
    numbers = _joined("private_groups", source, [table.numbers() for table in tables])
    return numbers if numbers.is_floating_point() else numbers.long()


def labels_of(name: str, source: Any, width: int | None = None) -> Tensor | list[str]:
    """Labels as int64 ``(n,)``, -1 where a float is NaN, or as text, empty where there is none.

    Args:
        name: of the argument.
        source: see :func:`tables_of`; whole numbers of any type, truth values, texts, or one-hot rows of them.
        width: of rows that are attributes and no one-hot rows.

    Raises:
        ValueError: for fractions, or values of another kind.
    """
    tables = tables_of(name, source)
    found = [
        values if isinstance(values := table.values(), Tensor) else np.asanyarray(values) for table in tables
    ]
    if all(isinstance(values, np.ndarray) and values.dtype.kind in "USO" for values in found):
        return [word_of(value) for values in found for value in values.reshape(len(values)).tolist()]
    labels = _joined(
        name, source, [table.as_numbers(values) for table, values in zip(tables, found, strict=True)]
    )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.is_floating_point():
        missing = labels.isnan()
        if bool((labels[~missing] != labels[~missing].floor()).any() | labels.isinf().any()):
            raise InputError(f"{name}: shape {shape_text(labels.shape)}, fractions; expected whole numbers")
        labels = labels.nan_to_num(nan=-1.0)
    labels = labels.to(torch.int64)
    if (
        width is None
        and labels.ndim == 2
        and bool(((labels >= 0) & (labels <= 1)).all() & (labels.sum(1) <= 1).all())
    ):
        return torch.where(labels.any(1), labels.argmax(1), -1)
    return labels


def _joined(name: str, source: Any, parts: list[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        raise InputError(f"{name}={str(source)!r}: expected files of one number a row, or of as many in each")
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_shards(source: Any) -> bool:
    """Whether ``source`` names one file per process, such as ``shards/features-{rank:05d}.npy``."""
    return isinstance(source, str | Path) and "{rank" in str(source)


def shard_file(name: str, source: str | Path, rank: int = 0) -> str:
    """File of the process ``rank``; ``ValueError`` for a name with other text in braces."""
    try:
        return str(source).format(rank=rank)
    except (LookupError, ValueError):
        raise InputError(
            f"{name}={str(source)!r}: expected {{rank}} or {{rank:05d}} for the number of a process, and no other "
            "braces"
        ) from None


def own_shard(name: str, source: str | Path, rank: int, size: int, unlike: bool = True) -> str:
    """File of this process, after checks of the files that all processes see.

    Args:
        name: of the argument, for messages.
        source: see :func:`in_shards`.
        rank: global rank of this process.
        size: number of processes.
        unlike: whether no two files can be equal by right; labels may.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if there are more files than processes, or another process's file is the same.
    """
    files = [Path(split_member(shard_file(name, source, number))[0]) for number in range(size + 1)]
    own, further = files[rank], files.pop()
    if not own.is_file():
        raise MissingFileError(f"{name}={str(own)!r}: no such shard (working directory: {Path.cwd()})")
    if further.exists():
        raise InputError(
            f"{name}={str(further)!r}: no process would read this shard; start as many processes as there are shards"
        )
    for other in files[:rank] + files[rank + 1 :] if unlike else ():
        if other.is_file() and filecmp.cmp(own, other, shallow=False):
            raise InputError(
                f"{name}={str(own)!r} is the same as {str(other)!r}; records must lie in one shard alone"
            )
    return shard_file(name, source, rank)
