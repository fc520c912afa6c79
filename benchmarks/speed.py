"""Speed as ratios of processor seconds in one run: labelling, HOG, a student's epoch, the exact ε, the import.

Both sides of a ratio take turns, after one turn each that does not count, and the median of the pairs is stored.
Other programs on the same cores change such ratios too, if less than seconds on the clock: ``load`` says how many
wanted a core meanwhile. A command's seconds are those of a whole process, with all that it imports.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.record import ROOT, Measured
from benchmarks.scale import CLASSES, TEACHERS
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.cli import keep_freed_memory
from pl_privknn.features import HOG, TimmFeatures
from pl_privknn.labelers.base import ShardedLabeler
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.neighbors.processes import ProcessGroup, Shard
from pl_privknn.privacy.mechanisms import Gaussian, NoisyScreening
from pl_privknn.privacy.noise import SystemNoise
from pl_privknn.students import Student, SupervisedStudent, VATStudent
from pl_privknn.testing import FreeLedger

_RECORDS, _DIMENSIONS, _QUERIES, _K, _RATE = 60_000, 1296, 1000, 300, 0.15
_IMAGES, _ONE_BY_ONE = 2048, 64
_IMAGES_OF_AN_EPOCH, _BATCH = 8192, 64
_SCREENING = {"k": 300, "threshold": 210, "sigma": 85.0, "num_classes": 10, "sampling_rate": 0.2}
_ANSWERS = {"sigma": 20.0, "l2_sensitivity": math.sqrt(2), "sampling_rate": 0.2}


class Row(NamedTuple):
    """Pairs of measurements, their aims, and their settings."""

    what: str
    beside: str
    aim: str
    measure: Callable[[argparse.Namespace], dict[str, Any]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--device", default="cpu", help="where labelling searches, for instance cuda")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part a row, each with the threads that it names or one."""
    for name in options.only:
        torch.set_num_threads(1)
        found = ROWS[name].measure(options)
        load = round(os.getloadavg()[0], 1)
        settings = {"repeat": options.repeat, "device": options.device}
        yield Measured({**found, "load": load}, [0], name, settings)


def _turns(ours: Callable[[], Any], bare: Callable[[], Any], repeat: int) -> list[tuple[Any, Any]]:
    """Measure both in turns; the first turn of each does not count."""
    return [(ours(), bare()) for _ in range(repeat + 1)][1:]


def _summary(ratios: list[float], suffix: str = "") -> dict[str, Any]:
    return {
        f"ratio{suffix}": round(statistics.median(ratios), 4),
        f"ratio{suffix}_min": round(min(ratios), 4),
        f"ratio{suffix}_max": round(max(ratios), 4),
    }


def _spent(work: Callable[[], Any], whose: int = resource.RUSAGE_SELF) -> float:
    """Processor seconds of all threads, or of the processes that were waited for."""
    before = resource.getrusage(whose)
    work()
    after = resource.getrusage(whose)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _in_turns(
    ours: Callable[[], Any], bare: Callable[[], Any], repeat: int, whose: int = resource.RUSAGE_SELF
) -> dict[str, Any]:
    """Ratio of processor seconds, ours over bare."""
    pairs = _turns(lambda: _spent(ours, whose), lambda: _spent(bare, whose), repeat)
    return {
        **_summary([one / other for one, other in pairs]),
        "seconds": round(statistics.median(one for one, _ in pairs), 4),
        "bare_seconds": round(statistics.median(other for _, other in pairs), 4),
    }


def _labelling(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """All between features and answers over the product: search, order, coins and votes twice, and noise."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand((CLASSES, _DIMENSIONS), generator=generator) * 0.2
    labels = torch.randint(CLASSES, (_RECORDS + _QUERIES,), generator=generator)
    features = torch.randn((len(labels), _DIMENSIONS), generator=generator).mul_(0.1).add_(centres[labels])
    table, queries = features.clamp_(min=0).split([_RECORDS, _QUERIES])
    neighbors = PoissonNeighbors(table, labels[:_RECORDS], CLASSES, _K, _RATE, device=options.device)
    screening = NoisyScreening(_K, 0.6 * _K, 0.25 * _K, CLASSES, sampling_rate=_RATE)
    mechanism = Gaussian(sigma=_K / 12, l2_sensitivity=2**0.5, sampling_rate=_RATE)
    source = SystemNoise()
    left, right = queries.to(options.device), table.to(options.device).T

    def label() -> None:
        ranked = neighbors.rank(queries)
        passed = screening.passes(neighbors.votes(ranked, source.bernoulli).max(dim=1).values, source)
        # Votes are counted for all queries again, as if every one had passed.
        answers = mechanism.add_noise(neighbors.votes(ranked, source.bernoulli), source).argmax(dim=1)
        torch.where(passed, answers, -1)

    def product() -> None:
        made = left @ right
        if made.is_cuda:
            torch.cuda.synchronize(made.device)

    def taken(work: Callable[[], None]) -> tuple[float, float]:
        started = time.perf_counter()
        return _spent(work), time.perf_counter() - started

    pairs = _turns(lambda: taken(label), lambda: taken(product), options.repeat)
    clock = _summary([one[1] / other[1] for one, other in pairs], "_on_the_clock")
    return {"ratio": round(statistics.median(one[0] / other[0] for one, other in pairs), 4), **clock}


def _hog(options: argparse.Namespace, channels: int, side: int) -> dict[str, Any]:
    from skimage.feature import hog

    images = torch.rand(_IMAGES, channels, side, side, generator=torch.Generator().manual_seed(0))
    few = images[:_ONE_BY_ONE].squeeze(1).numpy()
    shape: dict[str, Any] = {"orientations": 9, "pixels_per_cell": (4, 4), "cells_per_block": (2, 2)}
    if channels > 1:
        shape["channel_axis"] = 0

    def one_by_one() -> None:
        for image in few:
            hog(image, **shape)

    ours, times = _in_turns(lambda: HOG()(images), one_by_one, options.repeat), len(images) / len(few)
    kept = {"images_per_second": round(len(images) / ours["seconds"])}
    # How many times as many images we do: the other way about.
    for name, other in (("ratio", "ratio"), ("ratio_min", "ratio_max"), ("ratio_max", "ratio_min")):
        kept[name] = round(times / ours[other], 2)
    return kept


def _extraction(options: argparse.Namespace, name: str, side: int) -> dict[str, Any]:
    """Vectors of a frozen network with random weights, by our extractor and by its module in torch."""
    import timm

    images = torch.rand(64, 3, side, side, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        torch.save(timm.create_model(name).state_dict(), weights)
        extractor = TimmFeatures(name, weights=weights, image_size=side)
        network = timm.create_model(name, num_classes=0).eval()

        @torch.inference_mode()
        def bare() -> None:
            network(images)

        found = _in_turns(bare, lambda: extractor(images), options.repeat)
    return {"images_per_second": round(len(images) / found["bare_seconds"]), **_ratios(found)}


def _extracting(name: str, side: int) -> Callable[[argparse.Namespace], dict[str, Any]]:
    return lambda options: _extraction(options, name, side)


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    return {name: round(found[name], 2) for name in ("ratio", "ratio_min", "ratio_max")}


class _Epoch(pl.Callback):
    """Processor seconds of the last epoch of a fit."""

    seconds = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.process_time() - self._started


class _Plain(pl.LightningModule):
    """A student's objective and optimizer, and nothing else of it."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _loss(self.student, *batch)

    def configure_optimizers(self) -> Any:
        return self.student.optimization.over(list(self.student.network.parameters()))


def _loss(student: Student, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack(list(student.objective(student.weak(x), y).values())).sum()


def _epoch(
    options: argparse.Namespace, beside: str, kind: type[Student] = SupervisedStudent
) -> dict[str, Any]:
    keep_freed_memory()  # as the command does; both sides do without page faults, whose number is chance
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_IMAGES_OF_AN_EPOCH, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    loader = DataLoader(TensorDataset(images, labels), _BATCH)
    student = kind(network="small_cnn", num_classes=10, **({} if kind is VATStudent else {"augment": "weak"}))

    def fit(module: pl.LightningModule) -> tuple[float, torch.optim.Optimizer]:
        # The first epoch sets up what the second one is measured with.
        epoch = _Epoch()
        trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[epoch], **TRAINS_ALONE)
        trainer.fit(module, loader)
        return epoch.seconds, trainer.optimizers[0]

    def loop(optimizer: torch.optim.Optimizer) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            _loss(student, x, y).backward()
            optimizer.step()

    ratios = []
    for _ in range(options.repeat):
        seconds, optimizer = fit(student)
        student.train()
        other = fit(_Plain(student))[0] if beside == "module" else _spent(lambda: loop(optimizer))  # noqa: B023
        ratios.append(other / seconds)
    return _summary(ratios)


def _python(options: argparse.Namespace, *words: str) -> dict[str, Any]:
    """A program beside ``import torch``. Compiled files are kept, as on a user's machine."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run(*words: str) -> None:
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True)

    bare = functools.partial(run, "-c", "import torch")
    return _in_turns(lambda: run(*words), bare, options.repeat, resource.RUSAGE_CHILDREN)


def _exact(options: argparse.Namespace) -> dict[str, Any]:
    records = [
        {"mechanism": "noisy_screening", **_SCREENING, "count": 18_000},
        {"mechanism": "gaussian", **_ANSWERS, "count": 3_877},
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        path.write_text(json.dumps(records), encoding="utf-8")
        return _python(options, "-m", "pl_privknn.cli", "epsilon", str(path), "--delta", "1e-5")


def _weak_scaling(options: argparse.Namespace, teacher: str) -> dict[str, Any]:
    """A round of two processes with a shard each over a round of one of them alone, in turns, on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_member, (folder, teacher, options.repeat), nprocs=2)
        return _summary(json.loads((Path(folder) / "ratios.json").read_text(encoding="utf-8")))


def _member(rank: int, folder: str, teacher: str, repeat: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    group = ProcessGroup(rank, 2)
    features = torch.randn(_RECORDS, _DIMENSIONS, generator=torch.Generator().manual_seed(rank))
    asked = torch.randn(_QUERIES, _DIMENSIONS, generator=torch.Generator().manual_seed(2))

    def seconds(work: Callable[[], object]) -> float:
        dist.barrier()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def one_round(shared: bool) -> None:
        made = TEACHERS[teacher].make()
        assert isinstance(made, ShardedLabeler)
        if shared:
            made.shard = Shard(group, rank, group.size, group.size * len(features))
        made.fit(features, torch.arange(len(features)) % CLASSES, CLASSES)
        if rank == 0:
            made.label(asked, FreeLedger())
        if shared and rank == 0:
            group.broadcast()
        while shared and rank and (order := group.broadcast()) is not None:
            made.run_command(order)

    pairs = _turns(
        lambda: seconds(lambda: group.shared(lambda: one_round(True))),
        lambda: seconds(lambda: one_round(False) if rank == 0 else None),
        repeat,
    )
    if rank == 0:
        ratios = [both / one for both, one in pairs]
        (Path(folder) / "ratios.json").write_text(json.dumps(ratios), encoding="utf-8")
    group.close()
    dist.destroy_process_group()


_PRODUCT, _ALONE = "the bare product", "one process with its 60,000"
ROWS = {
    "labelling, one thread": Row(
        "Private-kNN labelling, 1,000 queries of 60,000 x 1,296, one thread",
        _PRODUCT,
        "≤ 1.25",
        lambda options: _labelling(options, 1),
    ),
    "labelling, two threads": Row(
        "the same, two threads", _PRODUCT, "≤ 1.25", lambda options: _labelling(options, 2)
    ),
    "HOG, 28 x 28": Row(
        "HOG of 28 x 28 images, images a second", "scikit-image", "≥ 25", lambda options: _hog(options, 1, 28)
    ),
    "HOG, 32 x 32 x 3": Row(
        "HOG of 32 x 32 x 3 images, images a second",
        "scikit-image",
        "≥ 25",
        lambda options: _hog(options, 3, 32),
    ),
    **{
        f"extraction, {name}": Row(
            f"vectors of `{name}`, images of {side} x {side} a second",
            "torch, 64 at once",
            aim,
            _extracting(name, side),
        )
        for name, side, aim in (
            ("tf_efficientnet_lite0", 224, "≥ 5"),
            ("mobilenetv3_small_100", 224, "≥ 1"),
            ("resnet50", 224, "≥ 1"),
            ("vit_tiny_patch16_224", 224, "≥ 1"),
        )
    },
    "epoch": Row(
        "epochs a second of a student (`small_cnn`)",
        "a loop with the same objective",
        "≥ 0.97",
        lambda options: _epoch(options, "loop"),
    ),
    "epoch, beside a plain module": Row(
        "the same",
        "a LightningModule with the same objective and optimizer alone",
        "≥ 0.97",
        lambda options: _epoch(options, "module"),
    ),
    "epoch, VAT": Row(
        "the same of `VATStudent`",
        "a loop with the same objective",
        "≥ 0.97",
        lambda options: _epoch(options, "loop", VATStudent),
    ),
    "exact ε": Row(
        "`privknn epsilon` of 18,000 screenings and 3,877 answers", "`import torch`", "1.5 s", _exact
    ),
    "weak scaling, Private-kNN": Row(
        "a round of Private-kNN, 60,000 x 1,296 a process, two processes, on the clock",
        _ALONE,
        "≤ 1.15",
        lambda options: _weak_scaling(options, "PrivateKNN"),
    ),
    "weak scaling, reverse kNN": Row(
        "the same of reverse kNN", _ALONE, "≤ 1.15", lambda options: _weak_scaling(options, "ReverseKNN")
    ),
    "import": Row(
        "`from pl_privknn import PrivateKNN`",
        "`import torch`",
        "≤ 1.3",
        lambda options: _python(options, "-c", "from pl_privknn import PrivateKNN"),
    ),
    "help": Row(
        "`privknn fit --help`",
        "`import torch`",
        "0.5 s",
        lambda options: _python(options, "-m", "pl_privknn.cli", "fit", "--help"),
    ),
}
