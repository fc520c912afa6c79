"""Private records in shards: which of them a process of a labelling reads."""

from __future__ import annotations

import torch

from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.labelers.base import Labeler, ShardedLabeler
from pl_privknn.neighbors.processes import ProcessGroup, Shard
from pl_privknn.privacy.mechanisms import Adjacency
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.persons import check_owners

#: Teachers that take shards, in words.
SHARDED = (
    "PrivateKNN, ReverseKNN with trust='central', IndKNN, NoisySGDTeacher, PATE with RandomPartition, "
    "or one of sums"
)


def shard_of(
    labeler: Labeler,
    data: PrivatePublicDataModule,
    group: ProcessGroup,
    sharded: bool,
    adjacency: Adjacency = "add_remove",
    unit: Unit = "record",
) -> Shard | None:
    """Private records that this process reads; None where global rank 0 reads all. Each process calls it.

    Args:
        labeler: the teacher that is to look at them.
        data: has each process's own records, or all of them in every process.
        group: the processes.
        sharded: whether a process reads every so many-th record, where all are in every process.
        adjacency: neighbouring relation of the ledger.
        unit: unit of privacy; a person lies in one shard.

    Raises:
        ValueError: for shards that the labeler can't look at, processes that hold different records, or a person
            whose records lie in several.
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
        if unit == "person":
            owners = check_owners(data.private_groups, len(data.private))
            rows = (owners % group.size == group.rank).nonzero().flatten()
            return Shard(group, 0, 1, len(data.private), rows)
        return Shard(group, group.rank, group.size, len(data.private))
    if unit == "person":
        check_whole_persons(check_owners(data.private_groups, len(data.private)), group)
    counts = torch.zeros(group.size, dtype=torch.int64)
    counts[group.rank] = len(data.private)
    counts = group.sum(counts)
    return Shard(group, int(counts[: group.rank].sum()), 1, int(counts.sum()))


def check_whole_persons(owners: torch.Tensor, group: ProcessGroup) -> None:
    """Refuse shards that share a person; each process calls it.

    Args:
        owners: person of each of this process's records, int64 ``(n,)``. **Private**.
        group: the processes.

    Raises:
        ValueError: where a person has records in two of them, in every process.
    """
    own = owners.unique()
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(own)
    padded = torch.full((int(group.sum(sizes).max()),), -1, dtype=torch.int64)
    padded[: len(own)] = own
    persons = torch.cat([*group.gather(padded), owners[:0]])
    persons = persons[persons >= 0]
    if int(group.sum(torch.tensor([len(persons) - len(persons.unique())]))[0]):
        raise ValueError(
            "private_groups: a person has records in several shards, where each would count by itself; put all "
            "records of a person into one process's file"
        )


def same_buffers(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Give a network's buffers global rank 0's values everywhere, so that all shards' features are of one network.

    Its parameters are the same already: the training takes the same steps in every process. Batch-norm statistics are
    of each process's own last batch.
    """
    values = group.broadcast({name: buffer.cpu() for name, buffer in module.named_buffers()})
    for name, buffer in module.named_buffers():
        buffer.copy_(values[name])
