"""Cost of a labelling round at scale: seconds and bytes of a process with a shard, memory beside a large table.

A round of one process is measured at two sizes of its shard, in processor seconds of one thread; a straight line
through them gives seconds a round and seconds a record, for 10⁹ records. Bytes are counted at the collectives of two
shards. Features are drawn at random: extracting them is not part of it, nor is waiting for the network.

Memory (``--only memory``) is what a round takes of its own, beside files that the system may drop from memory at any
time: the peak of anonymous memory, from before the data module is made to the end of the fit. The private embeddings
lie in a mapped file, teachers with a table have it mapped from a scratch file, and each round has its own process.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.record import Measured
from pl_privknn import Gaussian, PrivateLabeler, SupervisedStudent
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.callbacks.labeling_round import FeatureStore
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    Labeler,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    Screening,
    SufficientStatistics,
)
from pl_privknn.labelers.base import UsesPublicFeatures
from pl_privknn.neighbors import ShardedNeighbors
from pl_privknn.neighbors.processes import Shard
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from pl_privknn.testing.tables import InShards

CLASSES, K, RATE, COMPONENTS, STEPS = 10, 300, 0.15, 200, 200
RECORDS, PROCESSES = 10**9, 1000
#: About 4 records of 1,000 are as near to a query, where features of 1,296 dimensions are drawn at random.
THRESHOLD = 0.075
#: Shards whose candidates are merged, and queries at a time, where merging is measured.
MERGED, AT_ONCE = 200, 10
MEMORY = "memory"
#: From so much on a table is mapped from a file, where memory is measured.
LIMIT_GB = 0.5


class Scaled(NamedTuple):
    """A teacher.

    Attributes:
        make: with few processes, and one or two teachers of PATE in each.
        settings: in words.
        table: numbers of four bytes a record that lie in memory, from dimensions.
    """

    make: Callable[[], Labeler]
    settings: str
    table: Callable[[int], float] = lambda dimensions: dimensions


SUMS: dict[str, Any] = {"noise_multiplier": 1.0}
#: All queries pass the screening here, which is most work.
TEACHERS = {
    "PrivateKNN": Scaled(
        lambda: PrivateKNN(K, RATE, Screening(1, 0.1), Gaussian(25.0)), f"k {K}, γ {RATE}, screening"
    ),
    "ReverseKNN": Scaled(lambda: ReverseKNN(1, 1.0), "k 1", lambda d: 0),
    "SufficientStatistics": Scaled(lambda: SufficientStatistics(**SUMS), "least squares"),
    "PreconditionedGradients": Scaled(lambda: PreconditionedGradients(**SUMS), "6 releases"),
    "IndKNN": Scaled(lambda: IndKNN(THRESHOLD, 0.8, epsilon=1.0), f"τ {THRESHOLD}"),
    "NoisySGDTeacher": Scaled(
        lambda: NoisySGDTeacher(0.1, steps=STEPS, components=COMPONENTS, **SUMS),
        f"{STEPS} steps at rate 0.1, {COMPONENTS} components",
        lambda d: d + COMPONENTS,
    ),
    "PATE": Scaled(
        lambda: PATE(2, LinearTeachers(STEPS), progress=False),
        f"two `LinearTeachers` a process, {STEPS} steps",
    ),
}  # fmt: skip


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One measurement a teacher, one of merging the candidates of Private-kNN's shards, and those of memory."""
    torch.set_num_threads(1)
    features = torch.randn(
        max(options.records), options.dimensions, generator=torch.Generator().manual_seed(0)
    )
    queries = torch.randn(options.queries, options.dimensions, generator=torch.Generator().manual_seed(1))
    settings = {name: getattr(options, name) for name in ("records", "dimensions", "queries", "repeat")}
    for name in options.only:
        if name == MEMORY:
            yield from memory(options)
        else:
            yield Measured(_line(name, features, queries, options), [0], name, settings)
    if "PrivateKNN" in options.only:
        one, many = (_merge(features[:1000], queries[:AT_ONCE], shards) for shards in (1, MERGED))
        merging = {"seconds_a_query_and_shard": (many - one) / (MERGED - 1) / AT_ONCE, "shards": MERGED}
        yield Measured(merging, [0], "merging", settings)


def _line(name: str, features: Tensor, queries: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    shared = InShards([TEACHERS[name].make() for _ in range(2)])
    few, many = sorted(options.records)
    _round(shared, features[: min(few, 2000)], queries)  # what is done once in a process is done then
    seconds: dict[int, list[float]] = {few: [], many: []}
    for _ in range(options.repeat):
        for size, found in seconds.items():
            teacher = TEACHERS[name].make()
            found.append(_spent(functools.partial(_round, teacher, features[:size], queries)))
    slope = max(0.0, (min(seconds[many]) - min(seconds[few])) / (many - few))
    return {
        "seconds_a_record": slope,
        "seconds_a_round": max(0.0, min(seconds[few]) - slope * few),
        "bytes_sent_a_round": max(
            member.shard.group.sent for member in shared._members if member.shard is not None
        ),
        "processor_seconds": seconds,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    names = [*TEACHERS, MEMORY]
    parser.add_argument("--records", type=int, nargs=2, default=[10_000, 40_000], help="of a process")
    parser.add_argument("--dimensions", type=int, default=1296)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--folder", help="on a disk with room for two tables of 5 GB, for memory")


def _spent(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _round(teacher: Labeler, features: Tensor, queries: Tensor) -> None:
    teacher.noise_source = SeededNoise(0)
    if isinstance(teacher, UsesPublicFeatures):
        teacher.fit_public(queries)
    teacher.fit(features, torch.arange(len(features)) % CLASSES, CLASSES)
    teacher.label(queries, FreeLedger())


class _Alike:
    """As if all shards had sent what the first one has."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def broadcast(self, order: Any = None) -> Any:
        return order

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part] * self.size

    def sum(self, part: Tensor) -> Tensor:
        return self.size * part


def _merge(features: Tensor, queries: Tensor, shards: int) -> float:
    """Processor seconds of one release about all queries, after the search; the least of three."""
    shard = Shard(_Alike(shards), 0, 1, shards * len(features))
    labels = torch.arange(len(features)) % CLASSES
    found = ShardedNeighbors(
        features, labels, CLASSES, K, 1.0, shard, lambda number: SeededNoise(0).bernoulli
    )
    ranked = found.rank(queries)
    return min(_spent(functools.partial(found.votes, ranked)) for _ in range(3))


# -- memory ------------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> Iterator[Measured]:
    """One measurement a teacher, of 1,000,000 records and 200 queries."""
    folder = Path(tempfile.mkdtemp(prefix="privknn-", dir=options.folder))
    records, queries = 1_000_000, 200
    teachers: dict[str, Labeler] = {
        "reverse_knn": ReverseKNN(1, 1.0),
        "private_knn": PrivateKNN(300, 0.15),
        # About one record of 100 is so near to a query, of features drawn from [0, 1), 1,296 of them.
        "ind_knn": IndKNN(0.77, 0.8, epsilon=1.0),
    }
    settings = {
        "limit_gb": LIMIT_GB,
        "records": records,
        "dimensions": options.dimensions,
        "queries": queries,
    }
    try:
        write(folder, records, options.dimensions)
        for name, teacher in teachers.items():
            with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as process:
                job = process.submit(peak_of_labelling, folder / name, folder, teacher, queries)
                peak = job.result()[0]
            table = 4 * records * options.dimensions
            result = {"peak_mb_of_its_own": round(peak / 1e6), "table_mb": round(table / 1e6)}
            yield Measured(result, [0], name, {**settings, "threads": 1}, "table_memory")
    finally:
        shutil.rmtree(folder)


def write(folder: Path, records: int, dimensions: int, public: int = 400) -> None:
    """Write tables of private and public embeddings, drawn from [0, 1) with a seed."""
    generator = np.random.default_rng(0)
    shape = (records, dimensions)
    table = np.lib.format.open_memmap(folder / "private.npy", "w+", np.float32, shape)
    for start in range(0, len(table), 10_000):
        part = table[start : start + 10_000]
        part[:] = generator.random(part.shape, np.float32)
    np.save(folder / "public.npy", generator.random((public, dimensions), np.float32))


def peak_of_labelling(
    run: Path, folder: Path, teacher: Labeler, queries: int, limit_gb: float | None = LIMIT_GB
) -> tuple[int, list[int]]:
    """Fit a student with labels of the teacher, of ``private.npy`` and ``public.npy`` in the folder.

    Returns:
        Bytes of its own that it took at its peak, and the labels of the public examples, -1 where there is none.
    """
    least = peak = _anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    records, dimensions = np.load(folder / "private.npy", mmap_mode="r").shape
    data = EmbeddingsDataModule(
        folder / "private.npy", torch.arange(records) % CLASSES, folder / "public.npy", num_classes=CLASSES
    )
    labeling = PrivateLabeler(
        teacher,
        epochs_per_round=1,
        queries_per_round=queries,
        features=torch.nn.Flatten(),
        files={"run_dir": run},
        memory=FeatureStore(limit_gb=limit_gb, scratch=folder),
        progress=False,
    )
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(dimensions, CLASSES))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=run, callbacks=[labeling], **TRAINS_ALONE
    )
    trainer.fit(SupervisedStudent(network=network, num_classes=CLASSES), data)
    done.set()
    watcher.join()
    return peak - least, data.public.labels.tolist()


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs; Linux tells."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])
