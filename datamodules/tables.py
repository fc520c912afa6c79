"""Arrays, files of numbers and folders of files, mapped from disk where their format allows it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import mmap
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.datamodules.datasets import ImageStore, JoinedImages, TensorImages

#: An array, or the path of a file of numbers, with ``:member`` or ``:column`` behind it.
ArrayOrPath = str | Path | np.ndarray | Tensor

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_KINDS = (".npy", ".npz", ".parquet", ".faiss")
# Row groups that were read last stay in memory, up to so many bytes: small tables are read once.
_KEPT_BYTES = 1 << 28
# Looked through for values that are not finite: 16 MB at a time.
_VALUES_AT_A_TIME = 1 << 22
_LOOKED_AT = 1 << 20  # bytes at each end of a shard


class NoMemberError(ValueError):
    """Raised where a file does not hold the named member."""


class Table:
    """An array, or a file of one, under the name of its argument.

    Of an ``.npz`` file the member with the argument's name is taken, or its only one, or the one named as in
    ``data.npz:x``; of a ``.parquet`` file the column with that name, or the one named as in ``data.parquet:x``.
    A ``.faiss`` file holds a flat index, whose vectors are taken in its order.

    Args:
        name: of the argument.
        source: the array or its path.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file of another kind.
    """

    def __init__(self, name: str, source: ArrayOrPath | Sequence[int]) -> None:
        self.named, self.member, self._array = name, name, source
        self.path: Path | None = None
        #: The mapping of a file whose :meth:`values` were asked for, where its pages can be given back.
        self.mapping: mmap.mmap | None = None
        if not isinstance(source, str | Path):
            return
        self.named = f"{name}={str(source)!r}"
        file, member = split_member(source)
        self.path, self.member = Path(file), member or name
        if self.path.suffix.lower() not in _KINDS:
            raise ValueError(f"{self.named}: expected a .npy, .npz, .parquet or .faiss file")
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.named}: no such file (working directory: {Path.cwd()})")
        if self._is_parquet and self.member not in (known := self.parquet(lambda f: f.schema_arrow.names)):
            raise ValueError(
                f"{self.named}: it holds {', '.join(known)} and no column {self.member!r}; name one as in "
                "data.parquet:embedding"
            )

    @property
    def _is_parquet(self) -> bool:
        return self.path is not None and self.path.suffix.lower() == ".parquet"

    def shape(self) -> tuple[int, ...]:
        """Shape of the array; of a file no more is read than that takes.

        Raises:
            ValueError: if the file is damaged or lacks the member.
        """
        if self.path is None:
            return tuple(np.shape(self._array))  # type: ignore[arg-type]
        if self._is_parquet:
            first = self.parquet(lambda file: next(file.iter_batches(1, columns=[self.member]), None))
            if first is None:
                raise ValueError(f"{self.named}: it is empty")
            rows = self.parquet(lambda file: file.metadata.num_rows)
            return (rows, self._lists(first.column(0)).shape[1])
        if self.path.suffix.lower() == ".faiss":
            return tuple(self.numbers().shape)
        with self._reading():
            if self.path.suffix.lower() == ".npy":
                return tuple(np.load(self.path, mmap_mode="r", allow_pickle=False).shape)
            with zipfile.ZipFile(self.path) as archive:
                member = self._chosen([name.removesuffix(".npy") for name in archive.namelist()])
                with archive.open(f"{member}.npy") as file:
                    old = np.lib.format.read_magic(file) == (1, 0)
                    header = (
                        np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
                    )
                    return tuple(header(file)[0])

    def numbers(self) -> Tensor:
        """The numbers; ``.npy`` files stay on disk and are paged in when they are looked at.

        Raises:
            ValueError: if the file is damaged or lacks the member, or for anything but numbers.
        """
        return self._tensor(self.values())

    def values(self) -> Any:
        """An array or tensor as it is stored: numbers, texts (labels may be), or anything else.

        Raises:
            ValueError: if the file is damaged or lacks the member.
        """
        if self.path is None:
            return self._array
        if self._is_parquet:
            values = self.parquet(lambda file: file.read([self.member]))[self.member].combine_chunks()
            if hasattr(values.type, "value_type") and not hasattr(values, "dictionary"):
                raise ValueError(f"{self.named}: expected one value in each row of {self.member!r}")
            return values.to_numpy(zero_copy_only=False)  # null is NaN, or None among texts
        if self.path.suffix.lower() == ".faiss":
            return self._flat_index()
        with self._reading():
            # "c": copy on write. The file is never changed, and torch gets memory that it may write to.
            mode = "c" if self.path.suffix.lower() == ".npy" else None
            array: Any = np.load(self.path, mmap_mode=mode, allow_pickle=False)  # type: ignore[arg-type]
            if self.path.suffix.lower() == ".npz":
                with array as members:
                    array = members[self._chosen(members.files)]
            elif hasattr(mmap, "MADV_DONTNEED"):
                self.mapping = array.base
        return array

    def _flat_index(self) -> Any:
        import faiss

        try:
            index = faiss.read_index(str(self.path))
        except RuntimeError:
            raise ValueError(f"{self.named} can't be read as a FAISS index; use faiss.write_index") from None
        if not isinstance(index, faiss.IndexFlat):
            raise ValueError(
                f"{self.named}: {type(index).__name__} does not hold the vectors as they are; expected a flat index"
            )
        return index.reconstruct_n(0, index.ntotal)

    def vectors(self) -> Tensor:
        """Rows of floats, ``(n, d)``; of a Parquet file the lists of its column.

        Raises:
            ValueError: for anything else.
        """
        if self._is_parquet:
            return self._lists(self.parquet(lambda file: file.read([self.member]))[self.member])
        table = self.numbers()
        if table.ndim != 2 or not table.is_floating_point():
            raise ValueError(
                f"{self.named}: shape {shape_text(table.shape)}, {table.dtype}; expected float of shape (n, d)"
            )
        return table

    def rows(self) -> tuple[ImageStore, Tensor]:
        """Rows of floats, each an image of d channels and one pixel, and bool ``(n,)``: whether all are finite.

        Raises:
            ValueError: for anything else.
        """
        if self._is_parquet:
            store: ImageStore = ParquetRows(self)
        else:
            store = TensorImages(self.vectors()[:, :, None, None], self.mapping)
        return store, torch.cat([block.isfinite().all(1) for block in blocks(store)])

    def group(self, number: int) -> Tensor:
        """The lists of one row group of a Parquet column, float ``(m, d)``."""
        return self._lists(self.parquet(lambda file: file.read_row_group(number, [self.member]))[self.member])

    def parquet(self, read: Callable[[Any], Any]) -> Any:
        """Read rows of the Parquet file, which is opened anew: worker processes share no handle."""
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ImportError(
                f"{self.named}: Parquet files need pyarrow; pip install 'pl-privknn[parquet]', or write a .npy file"
            ) from None
        with self._reading():
            return read(parquet.ParquetFile(self.path, memory_map=True))

    def _lists(self, values: Any) -> Tensor:
        values = values.combine_chunks() if hasattr(values, "combine_chunks") else values
        if values.null_count:
            raise ValueError(f"{self.named}: some rows of {self.member!r} are empty; leave those records out")
        if not hasattr(values.type, "value_type"):
            raise ValueError(f"{self.named}: {self.member!r} holds {values.type}; expected lists of floats")
        lengths = {getattr(values.type, "list_size", None)} - {None} or set(
            values.value_lengths().to_pylist()
        )
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(
                f"{self.named}: the lists of {self.member!r} differ in length; expected one length"
            )
        table = self._tensor(values.flatten().to_numpy(zero_copy_only=False))
        if not table.is_floating_point():
            raise ValueError(f"{self.named}: {self.member!r} holds {table.dtype}; expected lists of floats")
        return table.view(len(values), -1)

    def _tensor(self, values: Any) -> Tensor:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            return values.to(torch.int64) if values.dtype in _UNSIGNED else values
        array = np.asarray(values)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise ValueError(f"{self.named}: dtype {array.dtype}; expected numbers of at most 64 bits")
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch computes little with them
            return torch.from_numpy(array.astype(np.int64))
        if not array.dtype.isnative or not array.flags.writeable or any(step < 0 for step in array.strides):
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array)

    def _chosen(self, members: list[str]) -> str:
        if self.member not in members and len(members) != 1:
            raise NoMemberError(
                f"it holds {', '.join(members) or 'nothing'} and no array called {self.member!r}"
            )
        return self.member if self.member in members else members[0]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a damaged header numpy raises whatever its tokenizer does
            # The texts of others may quote what is in the file.
            reason = f": {error}" if isinstance(error, NoMemberError) else ""
            raise ValueError(
                f"{self.named} can't be read ({type(error).__name__}{reason}); write it again, plain numbers only"
            ) from None


class ParquetRows(JoinedImages):
    """Lists of a Parquet column, each an image of one pixel; row groups are read as they are looked at.

    Rows in their order are read once. Rows at random, of a file larger than the 256 MB that are kept, make each
    batch read most of it: write such a table as ``.npy``.

    Args:
        table: the column.
    """

    def __init__(self, table: Table) -> None:
        self._table, self.stores = table, []
        self.shape = (table.shape()[1], 1, 1)
        metadata = table.parquet(lambda file: file.metadata)
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def _read_part(self, number: int, rows: Tensor) -> Tensor:
        return self._group(number)[rows][:, :, None, None]

    def _group(self, number: int) -> Tensor:
        if number not in self._kept:
            group = self._table.group(number).to(torch.float32)
            if group.shape[1] != self.shape[0]:
                raise ValueError(
                    f"{self._table.named}: the lists of {self._table.member!r} differ in length; expected one length"
                )
            while self._kept and sum(g.nbytes for g in self._kept.values()) + group.nbytes > _KEPT_BYTES:
                self._kept.popitem(last=False)
            self._kept[number] = group
        self._kept.move_to_end(number)
        return self._kept[number]


def blocks(store: ImageStore) -> Iterator[Tensor]:
    """All images of a store in their order, some at a time, float32 ``(b, d)``."""
    for rows in torch.arange(len(store)).split(max(1, _VALUES_AT_A_TIME // math.prod(store.shape))):
        yield store.read(rows).flatten(1)


def split_member(source: str | Path) -> tuple[str, str]:
    """Split a path from the member or column that is named after it (empty where there is none)."""
    file, colon, member = str(source).rpartition(":")
    known = (
        colon and not Path(source).is_dir() and (Path(file).suffix.lower() in _KINDS or Path(file).is_dir())
    )
    return (file, member) if known else (str(source), "")


def tables_of(name: str, source: Any) -> list[Table]:
    """The files of a folder, by their names, or one table.

    Args:
        name: of the argument.
        source: see :class:`Table`; or a folder of ``.npy`` or of ``.parquet`` files, with ``:column`` behind it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a folder without such files, or of both kinds.
    """
    if not isinstance(source, str | Path) or not os.path.isdir(split_member(source)[0]):
        return [Table(name, source)]
    folder, column = split_member(source)
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in (".npy", ".parquet"))
    kinds = {path.suffix.lower() for path in files}
    if len(kinds) != 1:
        raise ValueError(
            f"{name}={str(source)!r}: expected a folder of .npy files, or one of .parquet files; it holds "
            f"{'both' if kinds else 'none'}"
        )
    return [Table(name, f"{path}:{column}" if column and kinds == {".parquet"} else path) for path in files]


def dimension_of(name: str, source: Any) -> int:
    """Length of a row, see :func:`tables_of`; ``ValueError`` where lengths differ."""
    lengths = set()
    for table in tables_of(name, source):
        shape = table.shape()
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(f"{table.named}: shape {shape_text(shape)}; expected (n, d), one row a record")
        lengths.add(shape[1])
    if len(lengths) > 1:
        raise ValueError(
            f"{name}={str(source)!r}: its files have rows of {', '.join(map(str, sorted(lengths)))} numbers; "
            "expected one length"
        )
    return lengths.pop()


def rows_of(name: str, source: Any) -> tuple[ImageStore, Tensor]:
    """Rows of floats and which of them are finite, see :meth:`Table.rows` and :func:`tables_of`."""
    stores, finite = zip(*(table.rows() for table in tables_of(name, source)), strict=True)
    return stores[0] if len(stores) == 1 else JoinedImages(stores), torch.cat(finite)


def numbers_of(name: str, source: Any) -> Tensor:
    """A number for each row, such as a person, or a row of them, in memory, see :func:`tables_of`."""
    return _joined(name, source, [table.numbers() for table in tables_of(name, source)])


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
        values if isinstance(values := table.values(), Tensor) else np.asarray(values) for table in tables
    ]
    if all(isinstance(values, np.ndarray) and values.dtype.kind in "USO" for values in found):
        return [word_of(value) for values in found for value in values.reshape(len(values)).tolist()]
    labels = _joined(
        name, source, [table._tensor(values) for table, values in zip(tables, found, strict=True)]
    )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.is_floating_point():
        missing = labels.isnan()
        if bool((labels[~missing] != labels[~missing].floor()).any() | labels.isinf().any()):
            raise ValueError(f"{name}: shape {shape_text(labels.shape)}, fractions; expected whole numbers")
        labels = labels.nan_to_num(nan=-1.0)
    labels = labels.to(torch.int64)
    if (
        width is None
        and labels.ndim == 2
        and bool(((labels >= 0) & (labels <= 1)).all() & (labels.sum(1) <= 1).all())
    ):
        return torch.where(labels.any(1), labels.argmax(1), -1)
    return labels


def word_of(value: Any) -> str:
    """A label or name as text, the same for the types that files give it; empty where it is not known."""
    if value is None or value != value:
        return ""
    word = value.decode() if isinstance(value, bytes) else str(value)
    if (whole := re.fullmatch(r"(-?\d+)\.0+", word)) is not None:
        return whole[1]
    return "" if word.isspace() or word in ("nan", "NaN") else word


def _joined(name: str, source: Any, parts: list[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"{name}={str(source)!r}: expected files of one number a row, or of as many in each")
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_shards(source: Any) -> bool:
    """Whether ``source`` names a file for each process, as ``shards/features-{rank:05d}.npy``."""
    return isinstance(source, str | Path) and "{rank" in str(source)


def shard_file(name: str, source: str | Path, rank: int = 0) -> str:
    """The file of the process ``rank``; ``ValueError`` for a name that holds other things in braces."""
    try:
        return str(source).format(rank=rank)
    except (LookupError, ValueError):
        raise ValueError(
            f"{name}={str(source)!r}: expected {{rank}} or {{rank:05d}} for the number of a process, and no other "
            "braces"
        ) from None


def own_shard(name: str, source: str | Path, rank: int, size: int, unlike: bool = True) -> str:
    """This process's file, after a check of the visible files of all processes.

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
        raise FileNotFoundError(f"{name}={str(own)!r}: no such shard (working directory: {Path.cwd()})")
    if further.exists():
        raise ValueError(
            f"{name}={str(further)!r}: no process would read this shard; start as many processes as there are shards"
        )
    for other in files[:rank] + files[rank + 1 :] if unlike else ():
        if other.is_file() and (os.path.samefile(own, other) or _ends(own) == _ends(other)):
            raise ValueError(
                f"{name}={str(own)!r} is the same as {str(other)!r}; records must lie in one shard alone"
            )
    return shard_file(name, source, rank)


def _ends(path: Path) -> tuple[int, bytes]:
    """Size of a file, and a digest of its first and last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_LOOKED_AT))
        file.seek(max(0, size - _LOOKED_AT))
        digest.update(file.read(_LOOKED_AT))
    return size, digest.digest()
