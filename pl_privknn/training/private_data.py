"""The private records of a training, whoever loads them: read one at a time, each as a batch of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from pl_privknn._checks import shown
from pl_privknn.privacy.persons import check_owners, persons_of
from pl_privknn.privacy.redaction import redacted
from pl_privknn.training.isolation import Copier, PrivateRandomness, Surroundings, in_own_context, reading

_READ_TOGETHER = 256
_REMEDY = (
    "; pass a LightningDataModule, a DataLoader over a map-style dataset, or a module with train_dataloader"
)


class PrivateData:
    """Map-style private records with the loader's own ``collate_fn``.

    Each record is read by a fresh copy of the dataset object, so that what one item leaves there no other sees;
    tables that the dataset holds are not copied. Its random numbers come from secret seeds.

    Args:
        source: a :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule` (its private part), a DataLoader, or
            a map-style dataset.
        share: number of this process and of all processes: which process has a record follows from its row alone.

    Attributes:
        images: the private part of one of this package's data modules, else None.

    Raises:
        ValueError: for records that can't be drawn one by one.
    """

    def __init__(self, source: Any, share: tuple[int, int] = (0, 1)) -> None:
        self._collate: Callable[[list[Any]], Any] = default_collate
        self.images: Any = None  # of the room of data modules, which this one does not know
        if hasattr(source, "private_in_shards"):
            source = self.images = source.private
        if isinstance(source, DataLoader):
            if source.batch_size is None and source.batch_sampler is None:
                raise ValueError(
                    "train_dataloader: batch_size=None, so an item may be a batch of several records, which private "
                    "training must tell apart; let the dataset give single records and set a batch_size (any)"
                )
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
        self._dataset: Any = source
        total = redacted(len, source)
        self._rows = torch.arange(total)[share[0] :: share[1]]
        self._all = total
        self._vectors: Tensor | None = None
        self._table = _table_of(source)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def check_same(self, agree: Callable[[bytes], bool]) -> None:
        """Refuse processes that hold different records, where each is to read a share of them.

        Args:
            agree: whether all processes give the same bytes.
        """
        if self.images is not None:
            self.images.check_same(agree)
        elif not agree(self._all.to_bytes(8, "little")):
            raise ValueError(
                "train_dataloader: the processes of this training hold different private records"
            )

    def share_by_person(self, owners: Tensor, share: tuple[int, int]) -> Tensor:
        """Hold all records of this process's share of persons.

        Args:
            owners: person of each private record, int64 ``(n,)``.
            share: number of this process and of all processes.

        Returns:
            The persons of the records that it holds.
        """
        owners = check_owners(owners, self._all)
        self._rows = torch.nonzero(persons_of(owners)[0] % share[1] == share[0]).flatten()
        return owners[self._rows]

    def own(self, values: Tensor) -> Tensor:
        """Those of this process's records, of values ``(n,)`` for all private records.

        Raises:
            ValueError: for more or fewer of them.
        """
        if len(values) != self._all:
            raise ValueError(
                "members: must be one group a private record, in the data's order, and there are more or fewer"
            )
        return values[self._rows]

    def of_all_processes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """**Private.** What tells records apart, in their order and in blocks: two tensors ``(b, …)``."""
        if self.images is None:
            raise ValueError(
                "groups: members are held to images and labels; use one of pl_privknn.datamodules"
            )
        for rows in torch.arange(self._all).split(_READ_TOGETHER):
            yield self.images.store.read(rows), self.images.labels[rows]

    # ------------------------------------------------------------------ rows of tensors

    @property
    def has_rows(self) -> bool:
        """Whether records are rows of tensors, to read which runs nobody's code."""
        return self._collate is default_collate and (self.images is not None or self._table is not None)

    def rows(self, places: Tensor) -> Any:
        """**Private.** Batches of one in some places of this process's records, stacked: tensors ``(b, 1, …)``."""
        rows = self._rows[places]
        if self._table is not None:
            index, tensors = self._table
            return [part[rows if index is None else index[rows]].unsqueeze(1) for part in tensors]
        first = self.images.store.read(rows) if self._vectors is None else self._vectors[places]
        return first.unsqueeze(1), self.images.labels[rows].unsqueeze(1)

    # ------------------------------------------------------------------ single records, on copies

    def reader(self, randomness: PrivateRandomness) -> Callable[[int], Any]:
        """Gives the batch of one that a record makes, by its place among this process's records."""
        if self.has_rows:
            return lambda place: unstacked(self.rows(torch.tensor([place])), 0)
        copier = Copier(lambda: None, randomness.for_copy, opens=True)
        surroundings = Surroundings(copier)

        @in_own_context
        def read(place: int) -> Any:
            randomness.begin()
            with reading(), surroundings.alone({}, self._dataset, self._collate) as (dataset, collate):
                row = int(self._rows[place])
                items = dataset.__getitems__([row]) if hasattr(dataset, "__getitems__") else [dataset[row]]
                return collate(items)

        return read

    def made_up(self, randomness: PrivateRandomness) -> list[Any]:
        """Batches of one with the shapes of the private ones, and nothing of their values; none without records."""
        if self.images is not None and self.has_rows:
            shape = self.images.image_shape if self._vectors is None else self._vectors.shape[1:]
            first, labels = torch.rand(1, *shape), self.images.labels.shape[1:]
            return [(first, torch.full((1, *labels), number)) for number in (1, 0)]
        read, last = self.reader(randomness), None
        for place in range(min(len(self), 10)):
            try:
                batch = read(place)
            except Exception as error:
                last = error
                continue
            return [_made_up(batch, number) for number in (1, 0)]
        if last is not None:
            raise last
        return []

    # ------------------------------------------------------------------ tables of this package

    @property
    def has_vectors(self) -> bool:
        """Whether :meth:`prepare` has made vectors of the images."""
        return self._vectors is not None

    @torch.no_grad()
    def prepare(self, transform: Callable[[Tensor], Tensor]) -> None:
        """Turn each image into a vector, once; vectors are kept in memory alone.

        Args:
            transform: maps images ``(b, channels, height, width)`` to vectors ``(b, d)``, each image by itself.
        """
        parts = torch.arange(len(self)).split(_READ_TOGETHER) if len(self) else ()
        made = [transform(self.rows(part)[0][:, 0]).float().cpu() for part in parts]
        self._vectors = torch.cat(made) if made else torch.zeros(0, 1)


def _made_up(batch: Any, number: int) -> Any:
    """The same structure, with random floats, ``number`` for whole numbers and words that mean nothing."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch,
            **{f.name: _made_up(getattr(batch, f.name), number) for f in dataclasses.fields(batch) if f.init},
        )

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                return torch.rand(value.shape).to(value.dtype)
            return torch.full_like(value, number)
        if isinstance(value, bool | int | float):
            return type(value)(number)
        return "made up" if isinstance(value, str) else value

    leaves, structure = pytree.tree_flatten(batch)
    return pytree.tree_unflatten([leaf(value) for value in leaves], structure)


def signature(batch: Any) -> tuple[Any, ...] | None:
    """Structure, shapes and dtypes that batches must share to be stacked; None where they hold more than tensors."""
    leaves, structure = pytree.tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.layout is torch.strided for leaf in leaves):
        return None
    return structure, *((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)


def stacked(batches: Sequence[Any]) -> Any:
    """Batches of one signature with a dimension before all others: the record's."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), batches[0], *batches[1:])


def unstacked(stack: Any, place: int) -> Any:
    """One batch of a stack of them."""
    return pytree.tree_map(lambda leaf: leaf[place], stack)


def _table_of(dataset: Any) -> tuple[Tensor | None, tuple[Tensor, ...]] | None:
    """The rows that a plain ``TensorDataset``, or a ``Subset`` of one, reads of its tensors; None for others."""
    index = None
    if type(dataset) is Subset:
        index, dataset = torch.as_tensor(list(dataset.indices), dtype=torch.int64), dataset.dataset
    plain = type(dataset) is TensorDataset and all(type(part) is Tensor for part in dataset.tensors)
    return (index, dataset.tensors) if plain else None


class Steps(Dataset[Any]):
    """Empty batches that a trainer iterates over in place of private records.

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
        """One that no trainer puts a sampler into."""
        from torch.utils.data.distributed import DistributedSampler

        whole: DistributedSampler[Any] = DistributedSampler(self, num_replicas=1, rank=0, shuffle=False)
        return DataLoader(self, batch_size=None, sampler=whole, collate_fn=_as_it_is)


def _as_it_is(item: Any) -> Any:
    return item


def views_of(batch: Any, augment: Callable[[Tensor], Tensor], views: int) -> Any:
    """The batch of ``views`` rows that an augmentation makes of a batch of one.

    Args:
        batch: images, labels and whatever else, in a tuple or list.
        augment: maps views ``(views, …)`` of one image to so many.
        views: how many.
    """
    if not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
        raise ValueError(
            "augment: works on batches (images, labels, …), and the data gives others; leave it out"
        )
    images = batch[0]
    made = augment(images.expand(views, *images.shape[1:]).clone())
    if made.shape != (views, *images.shape[1:]):
        raise ValueError(
            f"augment: of {(views, *images.shape[1:])} it makes {tuple(made.shape)}; let it keep the shape of "
            "the views of one image"
        )
    rest = [part.repeat_interleave(views, dim=0) if isinstance(part, Tensor) else part for part in batch[1:]]
    return type(batch)([made, *rest])
