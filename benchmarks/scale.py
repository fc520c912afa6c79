"""Cost of a labelling round at scale: time and traffic of a process with a shard, and memory with a large table.

A round of one process is measured at two sizes of its shard, in processor seconds of one thread; a straight line
through them gives seconds a round and seconds a record, for 10⁹ records. Bytes a round follow from the sizes; a test
counts them at the collectives of two shards. Features are drawn at random: extracting them is not part of it, nor is
waiting for the network.

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

from benchmarks.record import Measured, entries, listed, markdown, rows_of
from pl_privknn import Gaussian, PrivateLabeler, SupervisedStudent
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn._processes import Shard
from pl_privknn.callbacks import LabelingOptions
from pl_privknn.callbacks.labeling_round import FeatureStore
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.features.private_records import PrivateRecords
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
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

CLASSES, K, RATE, COMPONENTS, STEPS = 10, 300, 0.15, 200, 200
RECORDS, PROCESSES = 10**9, 1000
#: About 4 records of 1,000 are as near to a query, where features of 1,296 dimensions are drawn at random.
THRESHOLD = 0.075
MEMORY = "memory"
#: From so much on a table is mapped from a file, where memory is measured.
LIMIT_GB = 0.5


class Scaled(NamedTuple):
    """A teacher.

    Attributes:
        make: with few processes, and one or two teachers of PATE in each.
        settings: in words.
        sent: bytes that a process sends in a round, from queries and dimensions.
        table: numbers of four bytes a record that lie in memory, from dimensions.
    """

    make: Callable[[], Labeler]
    settings: str
    sent: Callable[[int, int], int]
    table: Callable[[int], float] = lambda dimensions: dimensions


SUMS: dict[str, Any] = {"noise_multiplier": 1.0}
#: All queries pass the screening here, which is most work.
TEACHERS = {
    "PrivateKNN": Scaled(
        lambda: PrivateKNN(K, RATE, Screening(1, Gaussian(0.1)), Gaussian(25.0)),
        f"k {K}, γ {RATE}, screening", lambda m, d: 2 * 16 * K * m + 8,
    ),
    "ReverseKNN": Scaled(
        lambda: ReverseKNN(1, budget=Budget(epsilon=1.0)), "k 1", lambda m, d: 8 * CLASSES * m, lambda d: 0
    ),
    "SufficientStatistics": Scaled(
        lambda: SufficientStatistics(**SUMS), "least squares", lambda m, d: 8 * CLASSES * (d + 1)
    ),
    "PreconditionedGradients": Scaled(
        lambda: PreconditionedGradients(**SUMS), "6 releases", lambda m, d: 6 * 8 * CLASSES * (d + 1)
    ),
    "IndKNN": Scaled(
        lambda: IndKNN(THRESHOLD, Gaussian(0.8), budget=Budget(epsilon=1.0)), f"τ {THRESHOLD}",
        lambda m, d: 8 * (1 + CLASSES) * m + 4,
    ),
    "NoisySGDTeacher": Scaled(
        lambda: NoisySGDTeacher(0.1, steps=STEPS, **SUMS, model={"components": COMPONENTS}),
        f"{STEPS} steps at rate 0.1, {COMPONENTS} components",
        lambda m, d: STEPS * 8 * CLASSES * (min(d, COMPONENTS) + 1), lambda d: d + COMPONENTS,
    ),
    "PATE": Scaled(
        lambda: PATE(2, LinearTeachers(STEPS), progress=False),
        f"two `LinearTeachers` a process, {STEPS} steps", lambda m, d: 8 * CLASSES * m,
    ),
}  # fmt: skip


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each teacher, and of memory."""
    torch.set_num_threads(1)
    features, queries = (
        torch.randn(count, options.dimensions, generator=torch.Generator().manual_seed(seed))
        for seed, count in enumerate((max(options.records), options.queries))
    )
    settings = {name: getattr(options, name) for name in ("records", "dimensions", "queries", "repeat")}
    for name in options.only:
        if name == MEMORY:
            yield from memory(options)
        else:
            yield Measured(_line(name, features, queries, options), [0], name, settings)


def _line(name: str, features: Tensor, queries: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    few, many = sorted(options.records)
    _round(TEACHERS[name].make(), features[:few], queries)  # what is done once in a process is done then
    seconds: dict[int, list[float]] = {few: [], many: []}
    for _ in range(options.repeat):
        for size, found in seconds.items():
            teacher = TEACHERS[name].make()
            found.append(_spent(functools.partial(_round, teacher, features[:size], queries)))
    slope = max(0.0, (min(seconds[many]) - min(seconds[few])) / (many - few))
    return {
        "seconds_a_record": slope,
        "seconds_a_round": max(0.0, min(seconds[few]) - slope * few),
        "bytes_sent_a_round": TEACHERS[name].sent(len(queries), options.dimensions),
        "processor_seconds": seconds,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    names = [*TEACHERS, MEMORY]
    parser.add_argument("--records", type=int, nargs=2, default=[10_000, 40_000], help="of a process")
    parser.add_argument("--dimensions", type=int, default=1296)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--table-records", type=int, default=1_000_000, help="of the large table, for memory")
    parser.add_argument("--folder", help="on a disk with room for two tables of 5 GB, for memory")


def _spent(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def table() -> str:
    """Table of a round at 10⁹ records in many processes, by extrapolation."""
    stored = entries("scale")
    d, share = next(iter(stored.values()))["settings"]["dimensions"], RECORDS // PROCESSES
    lines = []
    for name, teacher in TEACHERS.items():
        found = stored[name]["results"]
        seconds = found["seconds_a_round"] + share * found["seconds_a_record"]
        sent = found["bytes_sent_a_round"]
        bytes_sent = f"{sent / 1e6:.3g} MB" if sent >= 1e6 else f"{sent / 1e3:.3g} kB"
        gigabytes = f"{4 * share * teacher.table(d) / 1e9:.1f}"
        lines.append([f"`{name}`", teacher.settings, gigabytes, bytes_sent, f"{seconds / 3600:.2g}"])
    header = ["teacher", "settings", "table, GB", "sent a round", "processor hours of a process"]
    return markdown(header, lines)


def _round(teacher: Labeler, features: Tensor, queries: Tensor, shard: Shard | None = None) -> None:
    teacher.noise_source = SeededNoise(0)
    labels = torch.arange(len(features)) % CLASSES
    teacher.fit(PrivateRecords.of(features, labels, CLASSES, shard=shard, public=queries))
    teacher.label(queries, FreeLedger())


# -- memory ------------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> Iterator[Measured]:
    """Memory of each teacher with 1,000,000 records and 200 queries."""
    folder = Path(tempfile.mkdtemp(prefix="privknn-", dir=options.folder))
    sizes = {"records": options.table_records, "dimensions": options.dimensions, "queries": 200}
    teachers: dict[str, Labeler] = {
        "reverse_knn": ReverseKNN(1, budget=Budget(epsilon=1.0)),
        "private_knn": PrivateKNN(300, 0.15),
        # About one record of 100 is so near to a query, of features drawn from [0, 1), 1,296 of them.
        "ind_knn": IndKNN(0.77, Gaussian(0.8), budget=Budget(epsilon=1.0)),
    }
    try:
        write(folder, sizes["records"], sizes["dimensions"])
        for name, teacher in teachers.items():
            with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as process:
                peak = process.submit(peak_of_labelling, folder / name, folder, teacher, 200).result()
            table_mb = round(4 * sizes["records"] * sizes["dimensions"] / 1e6)
            settings = {"limit_gb": LIMIT_GB, **sizes, "threads": 1}
            found = {"peak_mb_of_its_own": round(peak / 1e6), "table_mb": table_mb}
            yield Measured(found, [0], name, settings, "table_memory")
    finally:
        shutil.rmtree(folder)


def write(folder: Path, records: int, dimensions: int, public: int = 400) -> None:
    """Write tables of private and public embeddings, drawn from [0, 1) with a seed."""
    generator = np.random.default_rng(0)
    table = np.lib.format.open_memmap(folder / "private.npy", "w+", np.float32, (records, dimensions))
    for start in range(0, len(table), 10_000):
        part = table[start : start + 10_000]
        part[:] = generator.random(part.shape, np.float32)
    np.save(folder / "public.npy", generator.random((public, dimensions), np.float32))


def peak_of_labelling(run: Path, folder: Path, teacher: Labeler, queries: int) -> int:
    """Peak anonymous memory of a fit with ``private.npy`` and ``public.npy`` in the folder, bytes."""
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
        run_dir=run,
        options=LabelingOptions(memory=FeatureStore(limit_gb=LIMIT_GB, scratch=folder), progress=False),
    )
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(dimensions, CLASSES))
    own: dict[str, Any] = {"default_root_dir": run, "callbacks": [labeling]}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **own, **TRAINS_ALONE)
    trainer.fit(SupervisedStudent(network=network, num_classes=CLASSES), data)
    done.set()
    watcher.join()
    return peak - least


def _anonymous_bytes() -> int:
    """Anonymous memory of this process, on Linux."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def memory_table() -> str:
    """Table of the memory of a labelling round, in addition to the features."""
    columns = {
        "teacher": "`{part}`",
        "private features": "{records:,} × {dimensions:,}",
        "table size": "{table_mb:,} MB",
        "queries": "{queries}",
        "additional peak memory": "{peak_mb_of_its_own:,} MB",
    }
    return listed(columns, rows_of("table_memory"))
