"""Memory of a labelling round with a large table.

It is what a round takes of its own, beside files that the system may drop from memory at any time: the peak of
anonymous memory, from before the data module is made to the end of the fit. The private embeddings lie in a mapped
file, teachers with a table have it mapped from a scratch file, and each round has its own process.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from benchmarks.record import Measured, listed, rows_of
from pl_privknn import Gaussian, PrivateLabeler, SupervisedStudent
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.callbacks import LabelingOptions
from pl_privknn.callbacks.labeling_round import FeatureStore
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.labelers import IndKNN, Labeler, PrivateKNN, ReverseKNN
from pl_privknn.privacy import Budget

CLASSES = 10
#: From so much on a table is mapped from a file.
LIMIT_GB = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--records", type=int, default=1_000_000, help="of the large table")
    parser.add_argument("--dimensions", type=int, default=1296)
    parser.add_argument("--folder", help="on a disk with room for two tables of 5 GB")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Memory of each teacher with 200 queries."""
    folder = Path(tempfile.mkdtemp(prefix="privknn-", dir=options.folder))
    sizes = {"records": options.records, "dimensions": options.dimensions, "queries": 200}
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


def table() -> str:
    """Table of the memory of a labelling round, in addition to the features."""
    columns = {
        "teacher": "`{part}`",
        "private features": "{records:,} × {dimensions:,}",
        "table size": "{table_mb:,} MB",
        "queries": "{queries}",
        "additional peak memory": "{peak_mb_of_its_own:,} MB",
    }
    return listed(columns, rows_of("table_memory"))
