"""Speed as ratios of processor seconds in one run: labelling, HOG, a student's epoch, the exact ε, the import.

Both sides of a ratio take turns, after one turn each that does not count, and the median of the pairs is stored.
Other programs on the same cores change such ratios too, if less than seconds on the clock: ``load`` says how many
wanted a core meanwhile. Seconds are processor seconds; a command's are those of a whole process, with all that it
imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import accounting, labelling, weak_scaling
from benchmarks.record import ROOT, Measured
from pl_privknn._allocator import keep_freed_memory
from pl_privknn._quiet import TRAINS_ALONE
from pl_privknn.features import HOG
from pl_privknn.students import SupervisedStudent

_IMAGES, _ONE_BY_ONE = 2048, 64
_IMAGES_OF_AN_EPOCH = 8192
_BATCH = 64


class Row(NamedTuple):
    """What is compared with what, what is aimed at, and how it is measured."""

    what: str
    beside: str
    aim: str
    measure: Callable[[argparse.Namespace], dict[str, Any]]


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part a row, each with the threads that it names or one."""
    for name in options.only:
        torch.set_num_threads(1)
        found = ROWS[name].measure(options)
        load = round(os.getloadavg()[0], 1)
        yield Measured({**found, "load": load}, [0], name, {"repeat": options.repeat})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))


def in_turns(
    ours: Callable[[], Any], bare: Callable[[], Any], repeat: int, whose: int = resource.RUSAGE_SELF
) -> dict[str, Any]:
    """Ratio of processor seconds, ours over bare."""

    def taken(work: Callable[[], Any]) -> float:
        before = _spent(whose)
        work()
        return _spent(whose) - before

    ours(), bare()
    pairs = [(taken(ours), taken(bare)) for _ in range(repeat)]
    return {
        **_summary([one / other for one, other in pairs]),
        "seconds": round(statistics.median(one for one, _ in pairs), 4),
        "bare_seconds": round(statistics.median(other for _, other in pairs), 4),
    }


def _summary(ratios: list[float]) -> dict[str, Any]:
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def _spent(whose: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _labelling(threads: int) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def found(options: argparse.Namespace) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        labelling.add_options(parser)
        words = ["--threads", str(threads), "--repeat", str(options.repeat)]
        results = next(labelling.measure(parser.parse_args(words))).results
        return {
            "ratio": results["ratio_of_processor_seconds"],
            "ratio_on_the_clock": results["ratio"],
            "ratio_on_the_clock_min": results["ratio_min"],
            "ratio_on_the_clock_max": results["ratio_max"],
        }

    return found


def _hog(channels: int, side: int) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def found(options: argparse.Namespace) -> dict[str, Any]:
        from skimage.feature import hog

        images = torch.rand(_IMAGES, channels, side, side, generator=torch.Generator().manual_seed(0))
        few = images[:_ONE_BY_ONE].squeeze(1).numpy()
        shape = {"orientations": 9, "pixels_per_cell": (4, 4), "cells_per_block": (2, 2)}

        def one_by_one() -> None:
            for image in few:
                if channels == 1:
                    hog(image, **shape)
                else:
                    hog(image, channel_axis=0, **shape)

        ours = in_turns(lambda: HOG()(images), one_by_one, options.repeat)
        times = len(images) / len(few)
        kept = {"images_per_second": round(len(images) / ours["seconds"])}
        # How many times as many images we do: the other way about.
        for name, other in (("ratio", "ratio"), ("ratio_min", "ratio_max"), ("ratio_max", "ratio_min")):
            kept[name] = round(times / ours[other], 2)
        return kept

    return found


class _Epoch(pl.Callback):
    """Processor seconds of the last epoch of a fit."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = _spent()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = _spent() - self._started


class _Plain(pl.LightningModule):
    """A student's objective and optimizer, and nothing else of it."""

    def __init__(self, student: SupervisedStudent) -> None:
        super().__init__()
        self.student = student

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _loss(self.student, *batch)

    def configure_optimizers(self) -> Any:
        return self.student.optimization.over(list(self.student.network.parameters()))


def _loss(student: SupervisedStudent, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack(list(student.objective(student.weak(x), y).values())).sum()


def _epoch(beside: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def found(options: argparse.Namespace) -> dict[str, Any]:
        keep_freed_memory()  # as the command does; both sides do without page faults, whose number is chance
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(_IMAGES_OF_AN_EPOCH, 1, 28, 28, generator=generator)
        labels = torch.randint(10, (len(images),), generator=generator)
        loader = DataLoader(TensorDataset(images, labels), _BATCH)
        student = SupervisedStudent(network="small_cnn", num_classes=10, augment="weak")

        def fit(module: pl.LightningModule) -> tuple[float, torch.optim.Optimizer]:
            # The first epoch sets up what the second one is measured with.
            epoch = _Epoch()
            trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[epoch], **TRAINS_ALONE)
            trainer.fit(module, loader)
            return epoch.seconds, trainer.optimizers[0]

        ratios = []
        for _ in range(options.repeat):
            seconds, optimizer = fit(student)
            student.train()
            if beside == "module":
                other, _ = fit(_Plain(student))
            else:
                started = _spent()
                for x, y in loader:
                    optimizer.zero_grad()
                    _loss(student, x, y).backward()
                    optimizer.step()
                other = _spent() - started
            ratios.append(other / seconds)
        return _summary(ratios)

    return found


def _python(*words: str) -> Callable[[], None]:
    def run() -> None:
        # Compiled files are kept, as on a user's machine.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True)

    return run


def _import(options: argparse.Namespace) -> dict[str, Any]:
    ours, bare = _python("-c", "from pl_privknn import PrivateKNN"), _python("-c", "import torch")
    return in_turns(ours, bare, options.repeat, resource.RUSAGE_CHILDREN)


def _exact(options: argparse.Namespace) -> dict[str, Any]:
    screenings, answers = accounting.LISTS["18,000 screenings + 3,877 answers"]
    records = [
        {"mechanism": "noisy_screening", **accounting.SCREENING, "count": screenings},
        {"mechanism": "gaussian", **accounting.ANSWERS, "count": answers},
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        path.write_text(json.dumps(records), encoding="utf-8")
        command = ("-m", "pl_privknn.cli", "epsilon", str(path), "--delta", str(accounting.DELTA))
        return in_turns(
            _python(*command), _python("-c", "import torch"), options.repeat, resource.RUSAGE_CHILDREN
        )


def _weak_scaling(teacher: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    return lambda options: _summary(weak_scaling.ratios(teacher, 60_000, 1296, 1000, options.repeat))


ROWS = {
    "labelling, one thread": Row(
        "Private-kNN labelling, 1,000 queries of 60,000 x 1,296, one thread",
        "the bare product",
        "≤ 1.25",
        _labelling(1),
    ),
    "labelling, two threads": Row("the same, two threads", "the bare product", "≤ 1.25", _labelling(2)),
    "HOG, 28 x 28": Row("HOG of 28 x 28 images, images a second", "scikit-image", "≥ 25", _hog(1, 28)),
    "HOG, 32 x 32 x 3": Row(
        "HOG of 32 x 32 x 3 images, images a second", "scikit-image", "≥ 25", _hog(3, 32)
    ),
    "epoch": Row(
        "epochs a second of a student (`small_cnn`)",
        "a loop with the same objective",
        "≥ 0.97",
        _epoch("loop"),
    ),
    "epoch, beside a plain module": Row(
        "the same",
        "a LightningModule with the same objective and optimizer alone",
        "≥ 0.97",
        _epoch("module"),
    ),
    "exact ε": Row(
        "`privknn epsilon` of 18,000 screenings and 3,877 answers", "`import torch`", "1.5 s", _exact
    ),
    "weak scaling, Private-kNN": Row(
        "a round of Private-kNN, 60,000 x 1,296 a process, two processes, on the clock",
        "one process with its 60,000",
        "≤ 1.15",
        _weak_scaling("PrivateKNN"),
    ),
    "weak scaling, reverse kNN": Row(
        "the same of reverse kNN", "one process with its 60,000", "≤ 1.15", _weak_scaling("ReverseKNN")
    ),
    "import": Row("`from pl_privknn import PrivateKNN`", "`import torch`", "≤ 1.3", _import),
}
