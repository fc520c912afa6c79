"""Poisson batches of private records, for private training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

from pl_privknn._checks import check_int, check_rate
from pl_privknn.datamodules.datasets import LabeledImages
from pl_privknn.datamodules.loaders import LateStartLoader
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import poisson_sample, steps_per_epoch
from pl_privknn.privacy.record_groups import poisson_sample_by_group
from pl_privknn.privacy.redaction import redacted

_IMAGES_AT_ONCE = 1024


class Sample(list[int]):
    """Places of a Poisson sample.

    Args:
        places: ascending.
        step: the step that it was drawn for; None where it may be any one.
    """

    def __init__(self, places: Iterable[int] = (), step: int | None = None) -> None:
        super().__init__(places)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Turns:
    """Each step draws from one of some subsets of the records alone, one after the other.

    Attributes:
        subsets: that of each record, int64 ``(n,)``.
        count: how many there are.
        sampling_rate: at which a step draws from its subset.
        next_step: number of the step to come, of all that were paid for.
    """

    subsets: Tensor
    count: int
    sampling_rate: float
    next_step: Callable[[], int]

    def samples(self, steps: int, coins: NoiseSource) -> Iterator[Sample]:
        """Samples for the next ``steps`` steps."""
        first = self.next_step()
        for step in range(first, first + steps):
            rows = torch.nonzero(self.subsets == step % self.count).flatten()
            yield Sample(rows[poisson_sample(len(rows), self.sampling_rate, coins)].tolist(), step)


class PoissonBatches(DistributedSampler[list[int]]):
    """A fixed number of Poisson samples an epoch; samples may be empty.

    It is a ``DistributedSampler`` so that a trainer over several processes leaves it in place, where it would put a
    sampler of its own, which shuffles.

    Args:
        count: number of records.
        sampling_rate: probability with which a record is in a sample, independently of all else.
        steps: samples in an epoch.
        coins: gives the source of an epoch's coins.
    """

    def __init__(
        self, count: int, sampling_rate: float, steps: int, coins: Callable[[], NoiseSource]
    ) -> None:
        super().__init__(range(count), num_replicas=1, rank=0)  # type: ignore[arg-type]
        self.count = count
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.steps = check_int("steps", steps)
        self.coins = coins
        #: Group of each record, and the rate of each group, where they differ.
        self.groups: tuple[Tensor, Sequence[float]] | None = None
        self.turns: Turns | None = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        coins = self.coins()
        if self.turns is not None:
            yield from self.turns.samples(self.steps, coins)
            return
        if self.groups is not None:
            for _ in range(self.steps):
                yield poisson_sample_by_group(*self.groups, coins).tolist()
            return
        for _ in range(self.steps):
            yield poisson_sample(self.count, self.sampling_rate, coins).tolist()


class PrivateRecords(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of one process's private records: their images, or vectors that :meth:`prepare` made of them.

    Vectors are kept in memory alone and belong to this object, so no checkpoint of a module holds them. Which process
    has a record depends on the record's row and the number of processes alone.

    Args:
        private: the private images and labels.
        share: number of the process and of all processes.
    """

    def __init__(self, private: LabeledImages, share: tuple[int, int] = (0, 1)) -> None:
        self._private = private
        self._rows = torch.arange(len(private))[share[0] :: share[1]]
        self._vectors: Tensor | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def own(self, values: Tensor) -> Tensor:
        """Those of this process's records, of values ``(n,)`` for all private records.

        Raises:
            ValueError: for more or fewer of them.
        """
        if len(values) != len(self._private):
            raise ValueError(
                "members: must be one group a private record, in the data module's order, and there are more or fewer"
            )
        return values[self._rows]

    def of_all_processes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """**Private.** Images and labels of all records in their order, block by block."""
        for rows in torch.arange(len(self._private)).split(_IMAGES_AT_ONCE):
            yield self._private.store.read(rows), self._private.labels[rows]

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return redacted(self._read, indices)

    def images(self, places: Tensor) -> Tensor:
        """**Private.** Images or vectors in some places of this process's records."""
        return (
            self._private.store.read(self._rows[places]) if self._vectors is None else self._vectors[places]
        )

    def labels(self, places: Tensor) -> Tensor:
        """**Private.** Their labels."""
        return self._private.labels[self._rows[places]]

    def _read(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        places = torch.tensor(indices, dtype=torch.int64)
        return self.images(places), self.labels(places)

    @torch.no_grad()
    def prepare(self, transform: Callable[[Tensor], Tensor]) -> None:
        """Turn each image into a vector, once.

        Args:
            transform: maps images ``(b, channels, height, width)`` to vectors ``(b, d)``, each image by itself.
        """
        vectors: Tensor | None = None
        for start in range(0, len(self), _IMAGES_AT_ONCE):
            stop = min(start + _IMAGES_AT_ONCE, len(self))
            part = transform(self._private.store.read(self._rows[start:stop])).cpu()
            if vectors is None:
                vectors = torch.empty((len(self), part.shape[1]), dtype=torch.float32)
            vectors[start:stop] = part
        self._vectors = vectors


class BatchRows:
    """Images or vectors of a Poisson sample, read part by part as they are sliced.

    Args:
        records: of this process.
        places: int64 ``(b,)``.
    """

    def __init__(self, records: PrivateRecords, places: Tensor) -> None:
        self._records, self._places = records, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, chosen: slice) -> Tensor:
        return redacted(self._records.images, self._places[chosen])


class _Samples(Dataset[Any]):
    """Whole Poisson samples, as a worker reads them ahead; in the process that trains none lies in memory at once."""

    def __init__(self, records: PrivateRecords) -> None:
        self._records = records

    def __getitem__(self, indices: list[int]) -> tuple[Tensor | BatchRows, Tensor, int | None]:
        step = getattr(indices, "step", None)
        if get_worker_info() is not None:
            return *self._records[indices], step
        places = torch.tensor(indices, dtype=torch.int64)
        return BatchRows(self._records, places), redacted(self._records.labels, places), step


class PrivateBatch:
    """A Poisson sample. A trainer moves and inspects tensors; this it leaves alone, on the CPU.

    Args:
        records: images or vectors, float32 ``(b, …)``, or what gives slices of them; ``b`` may be 0 and is private
            like all of it.
        labels: int64 ``(b,)``.
        step: the step that it was drawn for, see :class:`Sample`.
    """

    def __init__(self, records: Tensor | BatchRows, labels: Tensor, step: int | None = None) -> None:
        self.records, self.labels, self.step = records, labels, step
        self._is_taken = False

    def taken(self) -> tuple[Tensor | BatchRows, Tensor]:
        """Records and labels, once: a second release of the same sample is not what ε is stated for.

        Raises:
            RuntimeError: at a second call.
        """
        if self._is_taken:
            raise RuntimeError(
                "a Poisson batch was asked for twice: the optimizer evaluates its closure several times a step, and "
                "ε is stated for one; use an optimizer that does so once"
            )
        records, labels = self.records, self.labels
        self._is_taken, self.records, self.labels = True, records[:0].clone(), labels[:0].clone()
        return records, labels


def _as_private_batch(batch: tuple[Tensor | BatchRows, Tensor, int | None]) -> PrivateBatch:
    return PrivateBatch(*batch)


class PoissonTraining:
    """What :meth:`PrivatePublicDataModule.train_privately` hands out: the private training loader.

    Args:
        private: the private images and labels.
        sampling_rate: Poisson rate of a step.
        coins: gives the source of the coins at the start of each epoch.
        share: number of this process and of all processes, see :class:`PrivateRecords`.

    Attributes:
        records: what the samples are of.
        steps_per_epoch: ⌈1 / sampling_rate⌉, which depends on the rate alone and not on the private data.
    """

    def __init__(
        self,
        private: LabeledImages,
        sampling_rate: float,
        coins: Callable[[], NoiseSource],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.records = PrivateRecords(private, share)
        self.steps_per_epoch = steps_per_epoch(sampling_rate)
        self.batches = PoissonBatches(len(self.records), sampling_rate, self.steps_per_epoch, coins)

    def draw_by_group(self, members: Tensor, rates: Sequence[float]) -> None:
        """Draw each record with the rate of its group from now on.

        Args:
            members: group of each private record, of all processes, int64 ``(n,)``.
            rates: one a group.

        Raises:
            ValueError: unless each private record has a group.
        """
        self.batches.groups = self.records.own(members), rates

    def draw_in_turns(
        self, subsets: Tensor, count: int, sampling_rate: float, next_step: Callable[[], int]
    ) -> None:
        """Draw each step's sample from one subset of the records from now on, see :class:`Turns`; in one process."""
        self.batches.turns = Turns(subsets, count, sampling_rate, next_step)

    def loader(self, **options: Any) -> LateStartLoader:
        """A :class:`PrivateBatch` a step.

        Args:
            **options: for the loader, for instance ``num_workers``.
        """
        return LateStartLoader(
            _Samples(self.records),
            sampler=self.batches,
            batch_size=None,
            **{**options, "collate_fn": _as_private_batch},
        )
