"""Private records of a training, read one at a time, each as a batch of one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from pl_privknn._checks import shown
from pl_privknn.privacy.private_state import check_same_in_processes
from pl_privknn.privacy.records import (
    check_owners,
    foreign_reader,
    has_one_structure,
    has_repeated_rows,
    persons_of,
)
from pl_privknn.privacy.redaction import redacted

_READ_TOGETHER = 256
# Those of all records alike, which Poisson samples replace.
_SAMPLERS = (SequentialSampler, RandomSampler, BatchSampler, DistributedSampler)
_REMEDY = (
    "; pass a LightningDataModule, a DataLoader over a map-style dataset, or a module with train_dataloader"
)


NUMBERS = (bool, int, float)


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "batch") -> Any:
    """Apply a function to all leaves of a nested batch.

    Args:
        value: mappings, lists, tuples and dataclasses, nested; everything else is a leaf.
        change: takes the path of a leaf, such as ``"batch['image']"``, and the leaf.
        path: of ``value``.

    Returns:
        The same structure with other leaves.

    Example:
        >>> mapped({"x": [1, 2], "name": "a"}, lambda path, leaf: path)
        {'x': ["batch['x'][0]", "batch['x'][1]"], 'name': "batch['name']"}
    """
    if isinstance(value, Mapping):
        made = {key: mapped(each, change, f"{path}[{key!r}]") for key, each in value.items()}
        # A new object: a copy would keep its other attributes, which may hold values of the record.
        with contextlib.suppress(Exception):
            return type(value)(made)  # type: ignore[call-arg]
        return made
    if isinstance(value, list | tuple):
        parts = [mapped(each, change, f"{path}[{place}]") for place, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = object.__new__(type(value))
        for field in dataclasses.fields(value):
            part = mapped(getattr(value, field.name), change, f"{path}.{field.name}")
            object.__setattr__(same, field.name, part)
        return same
    return change(path, value)


def tensors_of(batch: Any, device: torch.device) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Tensors of a batch, including its numbers, and the key that batches of one graph share.

    Args:
        batch: of one record.
        device: of the module.

    Returns:
        The tensors, and the paths, shapes and dtypes of all leaves.
    """
    found: list[Tensor] = []
    key: list[Any] = []

    def note(path: str, leaf: Any) -> None:
        if isinstance(leaf, NUMBERS):
            leaf = torch.tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.append(leaf.detach().to(device))
            key.append((path, leaf.shape, leaf.dtype))
        else:
            key.append((path, type(leaf).__qualname__))

    mapped(batch, note)
    return found, tuple(key)


class PrivateData:
    """Map-style private records with the loader's own ``collate_fn``.

    A record is one index of the data set: ``dataset[index]``, by itself through ``collate_fn``. What reading it
    returns is the record, so reading one must not use another.

    Args:
        source: a :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule` (its private part), a DataLoader, or
            a map-style dataset.
        share: number of this process and of all processes: which process has a record follows from its row alone.
        example: a public or invented record, as the data set gives them.

    Attributes:
        images: the private part of one of this package's data modules, else None.
        dataset: the records.

    Raises:
        ValueError: for records that can't be drawn one by one.
    """

    def __init__(self, source: Any, share: tuple[int, int] = (0, 1), example: Any = None) -> None:
        self._collate: Callable[[list[Any]], Any] = default_collate
        self.images: Any = None  # of the room of data modules, which this one does not know
        if hasattr(source, "private_in_shards"):
            source = self.images = source.private
        if isinstance(source, DataLoader):
            if source.batch_size is None and source.batch_sampler is None:
                raise ValueError(
                    "train_dataloader: batch_size=None, so an item may be a batch of several records, which private "
                    "training must distinguish; let the dataset give single records and set a batch_size (any)"
                )
            if not isinstance(source.dataset, IterableDataset):  # which has no sampler, and is refused below
                _check_sampler(source)
            self._collate, source = source.collate_fn, source.dataset
        elif isinstance(source, dict | list | tuple) or type(source).__name__ == "CombinedLoader":
            raise ValueError(
                f"train_dataloader: {shown(type(source).__name__)} of several loaders, and records are drawn from "
                "one table; return one DataLoader"
            )
        if isinstance(source, IterableDataset):
            raise ValueError(
                f"train_dataloader: {type(source).__name__} is an iterable dataset, of which no single record can be "
                "drawn with a known probability; use a map-style dataset (with __getitem__ and __len__)"
            )
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise ValueError(f"train_dataloader: {type(source).__name__} holds no records{_REMEDY}")
        self.dataset: Any = source
        self._example = example
        total = redacted(len, source)
        self._rows = torch.arange(total)[share[0] :: share[1]]
        self._all = total
        self._held = torch.zeros(0, dtype=torch.int64)
        self._vectors: Tensor | None = None
        self._table = _table_of(source)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def hold_out(self, held: Tensor) -> None:
        """Exclude some records from everything but :meth:`held_batches`.

        Args:
            held: bool ``(n,)``, for all private records.
        """
        self._held = torch.nonzero(held).flatten()
        stays = ~held[self._rows]
        self._rows = self._rows[stays]
        if self._vectors is not None:
            self._vectors = self._vectors[stays]

    def all_rows(self) -> Iterator[Sequence[Tensor]]:
        """**Private.** All records of :attr:`has_rows`, in their order and in blocks of tensors."""
        for rows in torch.arange(self._all).split(_READ_TOGETHER):
            if self._table is None:
                yield self.images.store.read(rows), self.images.labels[rows]
            else:
                index, tensors = self._table
                yield [part[rows if index is None else index[rows]] for part in tensors]

    def held_batches(self) -> Iterator[tuple[int, Any]]:
        """**Private.** Index and batch of one of each held-out record; None where reading fails."""
        rows, vectors = self._rows, self._vectors
        self._rows, self._vectors = self._held, None
        try:
            for place, row in enumerate(self._held.tolist()):
                batch = None
                with contextlib.suppress(Exception):
                    batch = self.batch(place)
                yield row, batch
        finally:
            self._rows, self._vectors = rows, vectors

    @property
    def reader(self) -> str | None:
        """Name of the foreign class or function that reads records; None where only this package does."""
        if self._collate is not default_collate:
            return getattr(self._collate, "__name__", type(self._collate).__name__)
        return foreign_reader(self.dataset)

    @property
    def structure_is_public(self) -> bool:
        """Whether shapes and types of made-up records follow from an example, or from tables of one structure."""
        ours = self._collate is default_collate and has_one_structure(self.dataset)
        return self.images is not None or self._example is not None or ours

    def check_rows(self) -> None:
        """Raise ``ValueError`` where one record has several rows."""
        if has_repeated_rows(self.dataset):
            raise ValueError(
                f"train_dataloader: its {type(self.dataset).__name__} reads some rows several times, and one record "
                "would move the sum as often; leave the oversampling out and weight the loss, or set unit='person' "
                "with private_groups that give the rows of a record one number"
            )

    def check_same(self, agree: Callable[[bytes], bool]) -> None:
        """Refuse processes that hold different records, where each is to read a share.

        Args:
            agree: whether all processes give the same bytes.
        """
        if self.images is not None:
            self.images.check_same(agree)
        else:  # reading records of others would take code of theirs
            check_same_in_processes(agree, [torch.tensor([self._all])])

    def share_by_person(self, owners: Tensor | None, share: tuple[int, int]) -> Tensor:
        """Restrict the records to this process's share of persons.

        Args:
            owners: person of each private record, int64 ``(n,)``; None is refused.
            share: number of this process and of all processes.

        Returns:
            The persons of the records that it holds.
        """
        owners = check_owners(owners, self._all)
        self._rows = torch.nonzero(persons_of(owners)[0] % share[1] == share[0]).flatten()
        return owners[self._rows]

    # ------------------------------------------------------------------ rows of tensors

    @property
    def has_rows(self) -> bool:
        """Whether records are rows of tensors, so that reading them runs no code of the user's."""
        return self._collate is default_collate and (self.images is not None or self._table is not None)

    def rows(self, places: Tensor) -> Any:
        """**Private.** Batches of one of some of this process's records, stacked: tensors ``(b, 1, …)``."""
        rows = self._rows[places]
        if self._table is not None:
            index, tensors = self._table
            return [part[rows if index is None else index[rows]].unsqueeze(1) for part in tensors]
        first = self.images.store.read(rows) if self._vectors is None else self._vectors[places]
        return first.unsqueeze(1), self.images.labels[rows].unsqueeze(1)

    # ------------------------------------------------------------------ single records

    def batch(self, place: int) -> Any:
        """**Private.** Batch of one record, by its place among this process's records."""
        if self.has_rows:
            return [part[0] for part in self.rows(torch.tensor([place]))]
        row, read = int(self._rows[place]), getattr(self.dataset, "__getitems__", None)
        return self._collate(read([row]) if read is not None else [self.dataset[row]])

    def made_up(self) -> list[Any]:
        """Batches of one with the shapes of the private ones and made-up values; none without records.

        The example comes first, where there is one, and no record is read.

        Raises:
            Exception: what reading raises, where none of the first records can be read.
        """
        if self.images is not None and self.has_rows:
            shape = self.images.image_shape if self._vectors is None else self._vectors.shape[1:]
            first, labels = torch.rand(1, *shape), self.images.labels.shape[1:]
            return [[first, torch.full((1, *labels), number)] for number in (1, 0)]
        if self._example is not None:
            batch = self._collate([self._example])
            return [batch, *(mapped(batch, functools.partial(_made_up, number)) for number in (1, 0))]
        last = None
        for place in range(min(len(self), 10)):
            try:
                batch = self.batch(place)
            except Exception as error:
                last = error
                continue
            return [mapped(batch, functools.partial(_made_up, number)) for number in (1, 0)]
        if last is not None:
            raise last
        return []

    # ------------------------------------------------------------------ tables of this package

    @property
    def has_vectors(self) -> bool:
        """Whether :meth:`prepare` has extracted the images' features."""
        return self._vectors is not None

    @torch.no_grad()
    def prepare(self, transform: Callable[[Tensor], Tensor]) -> None:
        """Extract features of each image once; they are kept in memory alone.

        Args:
            transform: maps images ``(b, channels, height, width)`` to vectors ``(b, d)``, each image by itself.
        """
        parts = torch.arange(len(self)).split(_READ_TOGETHER) if len(self) else ()
        made = [transform(self.rows(part)[0][:, 0]).float().cpu() for part in parts]
        self._vectors = torch.cat(made) if made else torch.zeros(0, 1)


def made_up_records(data: Any) -> Any:
    """Made-up records with the shapes of the private ones, which are read only for foreign data modules."""
    if not hasattr(data, "private_in_shards"):
        return data
    labels = (2, data.num_classes) if data.task == "multilabel" else (2,)
    return TensorDataset(torch.rand(2, *data.image_shape), torch.zeros(labels, dtype=torch.int64))


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Raise ``ValueError`` for a loader that does not read all records alike: each is drawn at one rate here."""
    for one in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        if one is not None and type(one) not in _SAMPLERS:
            raise ValueError(
                f"train_dataloader: sampler {type(one).__name__} is not used, since each record is drawn at the same "
                "rate; leave it out: Subset(dataset, indices) leaves records out, and a weighted loss stresses some"
            )


def _made_up(number: int, path: str, leaf: Any) -> Any:
    """Made-up leaf: a random float, ``number`` for whole numbers, or a placeholder word."""
    if isinstance(leaf, Tensor):
        floats = leaf.is_floating_point() or leaf.is_complex()
        return torch.rand(leaf.shape).to(leaf.dtype) if floats else torch.full_like(leaf, number)
    if isinstance(leaf, bool | int | float):
        return type(leaf)(number)
    return "made up" if isinstance(leaf, str) else leaf


def _table_of(dataset: Any) -> tuple[Tensor | None, tuple[Tensor, ...]] | None:
    """The rows that a plain ``TensorDataset``, or a ``Subset`` of one, reads of its tensors; None for others."""
    index = None
    if type(dataset) is Subset:
        index, dataset = torch.as_tensor(list(dataset.indices), dtype=torch.int64), dataset.dataset
    plain = type(dataset) is TensorDataset and all(type(part) is Tensor for part in dataset.tensors)
    return (index, dataset.tensors) if plain else None


class Steps(Dataset[Any]):
    """Data set of empty batches over which a trainer iterates instead of private records.

    Args:
        count: steps of an epoch.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> list[Any]:
        if index >= self._count:
            raise IndexError(index)
        return []

    def loader(self) -> DataLoader[Any]:
        """Loader in which a trainer replaces no sampler."""
        whole: DistributedSampler[Any] = DistributedSampler(self, num_replicas=1, rank=0, shuffle=False)
        return DataLoader(self, batch_size=None, sampler=whole, collate_fn=_as_it_is)


def _as_it_is(item: Any) -> Any:
    return item
