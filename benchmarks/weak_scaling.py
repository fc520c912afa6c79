"""A labelling round of two processes, each with a shard, beside that of one process with one shard: on the clock.

Processes have one thread each. In turns, process 0 answers from its own shard alone, while the other one waits; and
both answer, each from its own. Where shards cost nothing but their own work, both take the same time.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.scale import CLASSES, TEACHERS
from pl_privknn._processes import ProcessGroup, Shard
from pl_privknn.labelers.base import ShardedLabeler, UsesPublicFeatures
from pl_privknn.testing import FreeLedger

PROCESSES = 2


def ratios(name: str, records: int, dimensions: int, queries: int, repeat: int) -> list[float]:
    """Seconds of both over seconds of one, once a repetition; a first one is left out.

    Args:
        name: one of :data:`~benchmarks.scale.TEACHERS`.
        records: of a process.
        dimensions: of features.
        queries: of a round.
        repeat: how often.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, name, records, dimensions, queries, repeat)
        multiprocessing.spawn(_member, given, nprocs=PROCESSES)
        found = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
    return [both / one for both, one in found[1:]]


def _member(
    rank: int, folder: str, name: str, records: int, dimensions: int, queries: int, repeat: int
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    group = ProcessGroup(rank, PROCESSES)
    features = torch.randn(records, dimensions, generator=torch.Generator().manual_seed(rank))
    asked = torch.randn(queries, dimensions, generator=torch.Generator().manual_seed(PROCESSES))
    seconds = []
    for _ in range(repeat + 1):
        together = _timed(lambda: group.shared(lambda: _round(name, features, asked, group)))
        dist.barrier()
        alone = _timed(lambda: _round(name, features, asked)) if rank == 0 else 0.0
        dist.barrier()
        seconds.append((together, alone))
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
    group.close()
    dist.destroy_process_group()


def _round(name: str, features: torch.Tensor, asked: torch.Tensor, group: ProcessGroup | None = None) -> None:
    teacher = TEACHERS[name].make()
    assert isinstance(teacher, ShardedLabeler)
    rank = 0
    if group is not None:
        rank = group.rank
        teacher.shard = Shard(group, rank, group.size, group.size * len(features))
    if rank == 0 and isinstance(teacher, UsesPublicFeatures):
        teacher.fit_public(asked)
    teacher.fit(features, torch.arange(len(features)) % CLASSES, CLASSES)
    if group is None:
        teacher.label(asked, FreeLedger())
    elif rank == 0:
        teacher.label(asked, FreeLedger())
        group.tell()
    else:
        while (order := group.tell()) is not None:
            teacher.serve(order)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
