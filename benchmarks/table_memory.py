"""Memory that a labelling round takes of its own, beside files that the system may drop from memory at any time.

The private embeddings lie in a mapped file; the peak is that of anonymous memory, from before the data module is made
to the end of the fit, a student of a few numbers included. Teachers with a table have it mapped from a scratch file.
Each round has a process of its own, so that none finds memory that another one has left.
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

import numpy as np
import pytorch_lightning as pl
import torch

from benchmarks.record import Measured
from pl_privknn import IndKNN, PrivateKNN, PrivateLabeler, ReverseKNN, SupervisedStudent
from pl_privknn.callbacks.labeling_round import TableMemory
from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.labelers import Labeler

CLASSES = 10
_ROWS = 10_000
_LIMIT_GB = 0.5
# About one record of 100 is so near to a query, of features drawn from [0, 1), 1,296 of them.
_THRESHOLD = 0.77


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One measurement a teacher."""
    folder = Path(tempfile.mkdtemp(prefix="privknn-", dir=options.folder))
    try:
        write(folder, options.records, options.dimensions)
        teachers: dict[str, Labeler] = {
            "reverse_knn": ReverseKNN(1, 1.0),
            "private_knn": PrivateKNN(300, 0.15),
            "ind_knn": IndKNN(_THRESHOLD, 0.8, epsilon=1.0),
        }
        for name, teacher in teachers.items():
            with ProcessPoolExecutor(
                1, get_context("spawn"), torch.set_num_threads, (options.threads,)
            ) as process:
                peak, _ = process.submit(
                    peak_of_labelling, folder / name, folder, teacher, options.queries
                ).result()
            table = 4 * options.records * options.dimensions
            result = {"peak_mb_of_its_own": round(peak / 1e6), "table_mb": round(table / 1e6)}
            kept = ("records", "dimensions", "queries", "threads")
            settings = {option: getattr(options, option) for option in kept}
            yield Measured(result, [0], name, {"limit_gb": _LIMIT_GB, **settings})
    finally:
        shutil.rmtree(folder)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--dimensions", type=int, default=1296)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=None, help="on a disk with room for two tables")


def write(folder: Path, records: int, dimensions: int, public: int = 400) -> None:
    """Write tables of private and public embeddings, drawn from [0, 1) with a seed."""
    generator = np.random.default_rng(0)
    shape = (records, dimensions)
    table = np.lib.format.open_memmap(folder / "private.npy", "w+", np.float32, shape)
    for start in range(0, len(table), _ROWS):
        part = table[start : start + _ROWS]
        part[:] = generator.random(part.shape, np.float32)
    np.save(folder / "public.npy", generator.random((public, dimensions), np.float32))


def peak_of_labelling(
    run: Path, folder: Path, teacher: Labeler, queries: int, limit_gb: float | None = _LIMIT_GB
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
        folder / "private.npy",
        torch.arange(records) % CLASSES,
        folder / "public.npy",
        num_classes=CLASSES,
    )
    labeling = PrivateLabeler(
        teacher,
        epochs_per_round=1,
        queries_per_round=queries,
        features=torch.nn.Flatten(),
        files={"run_dir": run},
        memory=TableMemory(limit_gb=limit_gb, scratch=folder),
        progress=False,
    )
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(dimensions, CLASSES))
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        default_root_dir=run,
        callbacks=[labeling],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(SupervisedStudent(network=network, num_classes=CLASSES), data)
    done.set()
    watcher.join()
    return peak - least, data.public.labels.tolist()


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs; Linux tells."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])
