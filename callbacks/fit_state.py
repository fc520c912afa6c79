"""What a labelling callback asks of a trainer and of its data."""

from __future__ import annotations

import pytorch_lightning as pl
import torch

from pl_privknn._processes import ProcessGroup, Shard
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.labelers.base import Labeler
from pl_privknn.labelers.protocols import ShardedLabeler
from pl_privknn.privacy.mechanisms import Adjacency

#: Teachers that take shards, in words.
SHARDED = (
    "PrivateKNN, ReverseKNN with trust='central', IndKNN, NoisySGDTeacher, PATE with RandomPartition "
    "and no groups, or one of sums"
)


def placeholders(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Labels for a run that asks nothing, in the shape of ``labels``."""
    numbers = torch.arange(len(labels))
    return numbers % num_classes if labels.ndim == 1 else (numbers % 2)[:, None].expand_as(labels)


def data_module(trainer: pl.Trainer) -> PrivatePublicDataModule:
    """The trainer's data module.

    Raises:
        TypeError: where it is of another kind.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, PrivatePublicDataModule):
        raise TypeError(
            f"PrivateLabeler needs a PrivatePublicDataModule, got {type(data).__name__}; pass "
            "datamodule=ArraysDataModule(...) or another one of pl_privknn.datamodules to trainer.fit"
        )
    return data


def is_last_epoch(trainer: pl.Trainer) -> bool:
    """Whether no epoch comes after the present one."""
    if trainer.should_stop:
        return True
    if trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs:
        return True
    return trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps


def shard_of(
    labeler: Labeler,
    data: PrivatePublicDataModule,
    group: ProcessGroup,
    sharded: bool,
    adjacency: Adjacency = "add_remove",
) -> Shard | None:
    """Which private records this process reads; None where global rank 0 reads all. Each process calls it.

    Args:
        labeler: the teacher that is to look at them.
        data: has each process's own records, or all of them in every process.
        group: the processes.
        sharded: whether a process reads every so many-th record, where all are in every process.
        adjacency: neighbouring relation of the ledger.

    Raises:
        ValueError: for shards that the labeler can't look at, or processes that hold different records.
    """
    if group.size == 1 or not (sharded or data.private_in_shards):
        return None
    if not isinstance(labeler, ShardedLabeler) or not labeler.takes_shards:
        raise ValueError(
            f"labeler: {type(labeler).__name__} with these settings looks at private records in one process; use a "
            f"teacher that takes shards ({SHARDED}), or sharded=False and one file"
        )
    if adjacency not in labeler.adjacencies_in_shards:
        raise ValueError(
            f"adjacency={adjacency!r} is not among those of {type(labeler).__name__} in shards: "
            f"{', '.join(labeler.adjacencies_in_shards)}; use one of these, or one process"
        )
    if not data.private_in_shards and labeler.lasting_shards:
        raise ValueError(
            f"sharded=True: {type(labeler).__name__} needs shards in which records stay, and where one is removed "
            "the rows of others move; give each process a file of its own (private_embeddings: x-{rank:05d}.npy)"
        )
    if not data.private_in_shards:
        data.private.check_same(group.agree)
        return Shard(group, group.rank, group.size, len(data.private))
    counts = torch.zeros(group.size, dtype=torch.int64)
    counts[group.rank] = len(data.private)
    counts = group.sum(counts)
    return Shard(group, int(counts[: group.rank].sum()), 1, int(counts.sum()))


def same_buffers(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Give a network's buffers global rank 0's values everywhere, so that all shards' features are of one network.

    Its parameters are the same already: the training takes the same steps in every process. Batch-norm statistics are
    of each process's own last batch.
    """
    values = group.tell({name: buffer.cpu() for name, buffer in module.named_buffers()})
    for name, buffer in module.named_buffers():
        buffer.copy_(values[name])
