"""One column of a Parquet file, read row group by row group."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn.datamodules.formats.array_files import read_array
from pl_privknn.datamodules.formats.images import ImageStore, TensorImages

# Row groups that were read last stay in memory, up to so many bytes: small tables are read once.
_KEPT_BYTES = 1 << 28


def is_parquet(source: Any) -> bool:
    """Whether ``source`` names a Parquet file, or a column of one."""
    return isinstance(source, str | Path) and ".parquet" in Path(str(source)).name


class ParquetColumn:
    """A column of numbers, or of lists of numbers, in a file.

    Args:
        name: of the argument, for messages, and of the column unless ``source`` names one.
        source: ``file.parquet`` or ``file.parquet:column``.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: without pyarrow.
        ValueError: if the file is damaged, or has no such column.
    """

    def __init__(self, name: str, source: str) -> None:
        file, _, column = source.rpartition(".parquet")
        self.path, self.column = Path(f"{file}.parquet"), column.removeprefix(":") or name
        self.name, self.named = name, f"{name}={source!r}"
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.named}: there is no such file, seen from {Path.cwd()}")
        known = self._opened().schema_arrow.names
        if self.column not in known:
            raise ValueError(
                f"{self.named}: it holds {', '.join(known)} and no column {self.column!r}; name one as in "
                "data.parquet:embedding"
            )

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each row group."""
        metadata = self._opened().metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    @property
    def dimension(self) -> int:
        """Length of the first list; nothing else is read."""
        first = self._read(lambda file: next(file.iter_batches(1, columns=[self.column]), None))
        if first is None:
            raise ValueError(f"{self.named}: it is empty")
        return self._table(first.column(0)).shape[1]

    def rows(self) -> ParquetRows:
        """The lists as rows, which stay in the file."""
        return ParquetRows(self)

    def numbers(self) -> Tensor:
        """The numbers, ``(n,)``, in memory."""
        values = self._read(lambda file: file.read([self.column]))[self.column].combine_chunks()
        if values.null_count or hasattr(values.type, "value_type"):
            raise ValueError(f"{self.named}: want a number in each row of {self.column!r}")
        return read_array(self.name, values.to_numpy(zero_copy_only=False))

    def group(self, number: int) -> Tensor:
        """The lists of one row group, float ``(m, d)``.

        Raises:
            ValueError: if they are no floats, or differ in length.
        """
        return self._table(self._read(lambda file: file.read_row_group(number, [self.column]))[self.column])

    def _table(self, values: Any) -> Tensor:
        values = values.combine_chunks() if hasattr(values, "combine_chunks") else values
        if values.null_count:
            raise ValueError(f"{self.named}: some rows of {self.column!r} are empty; leave those records out")
        if not hasattr(values.type, "value_type"):
            raise ValueError(f"{self.named}: {self.column!r} holds {values.type}; want lists of floats")
        fixed = getattr(values.type, "list_size", None)
        lengths = values.value_lengths().unique().to_pylist() if fixed is None else [fixed]
        if len(lengths) != 1 or not lengths[0]:
            raise ValueError(f"{self.named}: the lists of {self.column!r} differ in length; want one length")
        table = read_array(self.name, values.flatten().to_numpy(zero_copy_only=False))
        if not table.is_floating_point():
            raise ValueError(f"{self.named}: {self.column!r} holds {table.dtype}; want lists of floats")
        return table.view(len(values), -1)

    def _opened(self) -> Any:
        return self._read(lambda file: file)

    def _read(self, read: Any) -> Any:
        """What ``read`` takes from the file, which is opened anew: worker processes share no handle."""
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ImportError(
                f"{self.named}: Parquet files need pyarrow; pip install 'pl-privknn[parquet]', or write a .npy file"
            ) from None
        try:
            return read(parquet.ParquetFile(self.path, memory_map=True))
        except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own are among them
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{self.named} can't be read ({type(error).__name__}: {reason}); write it anew"
            ) from None


class ParquetRows(ImageStore):
    """Lists of a Parquet column, each an image of one pixel; row groups are read as they are looked at.

    Rows in their order are read once. Rows at random, of a file larger than the 256 MB that are kept, make each
    batch read most of it: write such a table as ``.npy``.

    Args:
        column: of lists.
    """

    def __init__(self, column: ParquetColumn) -> None:
        self._column = column
        self.shape = (column.dimension, 1, 1)
        self._ends = torch.tensor(column.group_sizes, dtype=torch.int64).cumsum(0)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Tensor) -> Tensor:
        """See :meth:`ImageStore.read`."""
        rows = torch.empty(len(indices), self.shape[0])
        owner = torch.searchsorted(self._ends, indices, right=True)
        for number in owner.unique().tolist():
            places = torch.nonzero(owner == number).flatten()
            group = self._group(number)
            rows[places] = group[indices[places] - (int(self._ends[number]) - len(group))]
        return rows[:, :, None, None]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Number and float32 rows of each row group, ``(m, d)``."""
        for number in range(len(self._ends)):
            yield number, self._group(number)

    def digests(self) -> list[bytes]:
        """See :meth:`ImageStore.digests`."""
        return [
            digest for _, group in self.blocks() for digest in TensorImages(group[:, :, None, None]).digests()
        ]

    def preload(self) -> None:
        """See :meth:`ImageStore.preload`; worker processes read for themselves."""

    def _group(self, number: int) -> Tensor:
        if number not in self._kept:
            group = self._column.group(number).to(torch.float32)
            if group.shape[1] != self.shape[0]:
                raise ValueError(
                    f"{self._column.named}: the lists of {self._column.column!r} differ in length; want one length"
                )
            while (
                self._kept and sum(kept.nbytes for kept in self._kept.values()) + group.nbytes > _KEPT_BYTES
            ):
                self._kept.popitem(last=False)
            self._kept[number] = group
        self._kept.move_to_end(number)
        return self._kept[number]
