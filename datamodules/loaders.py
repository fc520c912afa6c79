"""Training loaders that follow label changes: batches, samplers and a loader that starts late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from pl_privknn.datamodules.datasets import ImageStore, LabelTable


class NoLabeledExamplesError(RuntimeError):
    """Raised at the start of an epoch where no public image has a label."""


class Batches(Dataset[Any]):
    """Data set read in whole batches: images ``x``, or images and targets ``(x, y)``.

    Args:
        store: the images, or a tensor in their place, of one row for each.
        targets: gives targets for indices, looked up when a batch is made: the label table in training, a label
            vector in evaluation. None: images alone.
        rows: which images there are; all by default.
    """

    def __init__(
        self,
        store: ImageStore | Tensor,
        targets: Tensor | LabelTable | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.store, self.targets = store, targets
        self.rows = torch.arange(len(store)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Tensor | tuple[Tensor, Tensor]:
        rows = self.rows[torch.tensor(indices, dtype=torch.int64)]
        images = self.store[rows] if isinstance(self.store, Tensor) else self.store.read(rows)
        return images if self.targets is None else (images, self.targets[rows])


def take_batch(batch: Any) -> Any:
    """Collate function of data sets whose ``__getitems__`` gives whole batches."""
    return batch


class _EpochSampler(DistributedSampler[int]):
    """Base class of samplers with a new order in each epoch, which all ranks share and take parts of.

    It is a ``DistributedSampler`` so that a trainer over several processes leaves it in place and informs it of
    the epoch. Without a trainer every pass counts as the next epoch.
    """

    def __init__(
        self, examples: Dataset[Any], num_samples: int, num_replicas: int, rank: int, seed: int
    ) -> None:
        super().__init__(examples, num_replicas=num_replicas, rank=rank, seed=seed)
        self.num_samples = num_samples
        self.total_size = num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        # The kind of sampler takes part in the seed, or both loaders would walk through the same permutation.
        kind = int.from_bytes(type(self).__name__.encode()[:8], "little")
        entropy = np.random.SeedSequence([self.seed, self.epoch, kind])
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        self.epoch += 1
        order = self._order(generator)[: self.total_size]
        return iter(order[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return self.num_samples

    def _order(self, generator: torch.Generator) -> Tensor:
        """At least ``total_size`` indices for all ranks together."""
        raise NotImplementedError


class UnlabeledSampler(_EpochSampler):
    """One pass over all public images in random order, in whole batches.

    What is left over at the end (fewer than one batch a rank) waits for another epoch's order. Where there
    are fewer images than one batch a rank, the epoch is a single smaller batch, filled up by repetition so
    that all ranks have equally many.

    Args:
        examples: the public images.
        batch_size: images in a batch of one rank.
        num_replicas: number of ranks.
        rank: this rank.
        seed: of the order; a public constant.
    """

    def __init__(
        self, examples: Batches, batch_size: int, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> None:
        self.count = len(examples)
        batches = self.count // (batch_size * num_replicas)
        num_samples = batches * batch_size if batches else math.ceil(self.count / num_replicas)
        super().__init__(examples, num_samples, num_replicas, rank, seed)

    def _order(self, generator: torch.Generator) -> Tensor:
        order = torch.randperm(self.count, generator=generator)
        return order[torch.arange(max(self.count, self.total_size)) % self.count]


class LabeledSampler(_EpochSampler):
    """Sampler of the images that have a label when the epoch begins, in one permutation after another.

    Its length doesn't depend on how many labels there are, so loaders (and schedulers that ask for the
    number of steps) may be made before the first label exists.

    Args:
        table: the released labels.
        num_samples: labelled images in an epoch of one rank.
        num_replicas: number of ranks.
        rank: this rank.
        seed: of the order; a public constant.
    """

    def __init__(
        self, table: LabelTable, num_samples: int, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> None:
        super().__init__(table, num_samples, num_replicas, rank, seed)
        self.table = table

    def _order(self, generator: torch.Generator) -> Tensor:
        labeled = torch.nonzero(self.table.labeled).flatten()
        if len(labeled) == 0:
            raise NoLabeledExamplesError(
                "no public example has a label at the start of this epoch, so there is nothing to train on. If "
                "a private labeler refused every query, lower its threshold or its noise, or ask more "
                "queries; without one, call datamodule.public.set_labels(indices, labels) before the epoch. "
                "lr_find and other tuners run without callbacks, so without labels: call them after a fit"
            )
        passes = math.ceil(self.total_size / len(labeled))
        return torch.cat([labeled[torch.randperm(len(labeled), generator=generator)] for _ in range(passes)])


class LateStartLoader(DataLoader[Any]):
    """Loader whose iterators start (workers, prefetch, sampling) only with their first batch.

    Trainers make the first epoch's iterator together with the loader, which a scheduler may want before any
    label exists; an ordinary loader with workers would prefetch unlabelled examples right then.
    """

    def __iter__(self) -> Any:
        yield from super().__iter__()
