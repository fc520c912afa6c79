"""Speed as ratios of processor seconds in one run: labelling, features, an epoch, `fit --data`, ε, the import.

Both sides of a ratio take turns, after one turn each that does not count, and the median of the pairs is stored.
Other programs on the same cores change such ratios too, if less than seconds on the clock: ``load`` says how many
wanted a core meanwhile. A command's seconds are those of a whole process, with all that it imports. A run of
``fit --data`` and its limit are two such processes of one thread each, one after the other; peak memory is the most
that the process of the run had resident, pages of mapped files among it.

With ``--device cuda`` the rows that a device can take are measured there, baselines among them, by seconds on the
clock with the device's work finished, and are stored beside those of the processor. A row that fails is named at the
end, after all others.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.record import ROOT, Measured, entries, markdown
from benchmarks.scale import CLASSES
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.features import HOG, TimmFeatures
from pl_privknn.features.pretrained import _exported
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy.mechanisms import Gaussian, NoisyScreening
from pl_privknn.privacy.noise import SystemNoise
from pl_privknn.students import Student, SupervisedStudent, VATStudent

_RECORDS, _DIMENSIONS, _QUERIES, _K, _RATE = 60_000, 1296, 1000, 300, 0.15
_IMAGES, _ONE_BY_ONE = 2048, 64
_IMAGES_OF_AN_EPOCH, _BATCH = 8192, 64
_CPU = torch.device("cpu")
_SCREENINGS = {
    "mechanism": "noisy_screening", "k": 300, "threshold": 210, "sigma": 85.0, "num_classes": 10,
    "sampling_rate": 0.2, "count": 18_000,
}  # fmt: skip
_ANSWERS = {
    "mechanism": "gaussian", "sigma": 20.0, "l2_sensitivity": 2**0.5, "sampling_rate": 0.2, "count": 3_877,
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--device", type=torch.device, default=_CPU, help="cuda: rows of a device (cpu)")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each row, with its number of threads or one."""
    place, failed = options.device, []
    for name in options.only:
        _, _, _, work, *settled = ROWS[name]
        if place.type != "cpu" and work not in _OF_DEVICES:
            continue
        torch.set_num_threads(1)
        try:
            found = work(options.repeat, *([place] if work in _OF_DEVICES else []), *settled)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        load = round(os.getloadavg()[0], 1)
        settings = {"repeat": options.repeat}
        if place.type == "cuda":
            settings["device"] = torch.cuda.get_device_name(place)
        part = name if place.type == "cpu" else f"{name}, {place.type}"
        yield Measured({**found, "load": load}, [0], part, settings)
    if failed:
        raise RuntimeError("; ".join(failed))


def _turns(ours: Callable[[], Any], bare: Callable[[], Any], repeat: int, *clock: Any) -> list[Any]:
    """Seconds of both, alternately; the first turn of each does not count."""
    return [(_taken(ours, *clock), _taken(bare, *clock)) for _ in range(repeat + 1)][1:]


def _summary(ratios: list[float], suffix: str = "") -> dict[str, Any]:
    return {
        f"ratio{suffix}": round(statistics.median(ratios), 4),
        f"ratio{suffix}_min": round(min(ratios), 4),
        f"ratio{suffix}_max": round(max(ratios), 4),
    }


def _seconds(place: torch.device = _CPU, whose: int = resource.RUSAGE_SELF) -> float:
    """Processor seconds of all threads, or of the processes that were waited for; of a device those on the clock."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        return time.perf_counter()
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _taken(work: Callable[[], Any], *clock: Any) -> tuple[float, float]:
    """Seconds of :func:`_seconds`, and those on the clock."""
    started, before = time.perf_counter(), _seconds(*clock)
    work()
    return _seconds(*clock) - before, time.perf_counter() - started


def _in_turns(ours: Callable[[], Any], bare: Callable[[], Any], repeat: int, *clock: Any) -> dict[str, Any]:
    """Ratio of seconds, this package over the baseline."""
    pairs = [(one, other) for (one, _), (other, _) in _turns(ours, bare, repeat, *clock)]
    return {
        **_summary([one / other for one, other in pairs]),
        "seconds": round(statistics.median(one for one, _ in pairs), 4),
        "bare_seconds": round(statistics.median(other for _, other in pairs), 4),
    }


def _labelling(repeat: int, place: torch.device, threads: int) -> dict[str, Any]:
    """Time from features to answers, relative to the matrix product: search, order, coins, votes and noise."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand((CLASSES, _DIMENSIONS), generator=generator) * 0.2
    labels = torch.randint(CLASSES, (_RECORDS + _QUERIES,), generator=generator)
    features = torch.randn((len(labels), _DIMENSIONS), generator=generator).mul_(0.1).add_(centres[labels])
    table, queries = features.clamp_(min=0).split([_RECORDS, _QUERIES])
    neighbors = PoissonNeighbors(table, labels[:_RECORDS], CLASSES, _K, _RATE, device=place)
    screening = NoisyScreening(_K, 0.6 * _K, 0.25 * _K, CLASSES, sampling_rate=_RATE)
    mechanism = Gaussian(sigma=_K / 12, l2_sensitivity=2**0.5, sampling_rate=_RATE)
    source = SystemNoise()

    def label() -> None:
        ranked = neighbors.rank(queries)
        passed = screening.passes(neighbors.votes(ranked, source.bernoulli).max(dim=1).values, source)
        # Votes are counted for all queries again, as if every one had passed.
        answers = mechanism.add_noise(neighbors.votes(ranked, source.bernoulli), source).argmax(dim=1)
        torch.where(passed, answers, -1)

    pairs = _turns(label, lambda: queries.to(place) @ table.to(place).T, repeat, place)
    spent, clock = ([one[side] / other[side] for one, other in pairs] for side in (0, 1))
    return {"ratio": round(statistics.median(spent), 4), **_summary(clock, "_on_the_clock")}


def _hog(repeat: int, channels: int, side: int) -> dict[str, Any]:
    from skimage.feature import hog

    images = torch.rand(_IMAGES, channels, side, side, generator=torch.Generator().manual_seed(0))
    few = images[:_ONE_BY_ONE].squeeze(1).numpy()
    shape: dict[str, Any] = {"orientations": 9, "pixels_per_cell": (4, 4), "cells_per_block": (2, 2)}
    if channels > 1:
        shape["channel_axis"] = 0

    def one_by_one() -> None:
        for image in few:
            hog(image, **shape)

    ours, times = _in_turns(lambda: HOG()(images), one_by_one, repeat), len(images) / len(few)
    kept = {"images_per_second": round(len(images) / ours["seconds"])}
    # How many times as many images we do: the other way about.
    for name, other in (("ratio", "ratio"), ("ratio_min", "ratio_max"), ("ratio_max", "ratio_min")):
        kept[name] = round(times / ours[other], 2)
    return kept


def _extraction(repeat: int, place: torch.device, name: str, side: int) -> dict[str, Any]:
    """Vectors of a frozen network with random weights, by the extractor and by its module in torch."""
    import timm

    images = torch.rand(64, 3, side, side, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        torch.save(timm.create_model(name).state_dict(), weights)
        extractor = TimmFeatures(name, weights=weights, image_size=side, device=place)
        network = torch.inference_mode()(timm.create_model(name, num_classes=0).eval().to(place))
        found = _in_turns(lambda: network(images.to(place)), lambda: extractor(images), repeat, place)
    ratios = {name: round(found[name], 2) for name in ("ratio", "ratio_min", "ratio_max")}
    return {"images_per_second": round(len(images) / found["bare_seconds"]), **ratios}


def _on_threads(repeat: int, threads: int) -> dict[str, Any]:
    """Images a second of the default network, over those of the fastest of several sessions of ONNX Runtime alone.

    The fastest is found for processor seconds and for the clock by itself: threads that spin take more of the former.
    """
    import onnxruntime

    torch.set_num_threads(threads)
    extractor = TimmFeatures()
    images = torch.rand(64, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    module: Any = extractor.module
    inputs = ((images - module.mean) / module.std).numpy()
    content = _exported(module.network, images[:1])
    sessions = []
    for spinning in ("0", "1"):
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", spinning)
        sessions.append(onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"]))

    def bare(session: Any, size: int) -> None:
        for start in range(0, len(inputs), size):
            session.run(None, {"inputs": inputs[start : start + size]})

    ways = [
        lambda: extractor(images),
        *(functools.partial(bare, *way) for way in itertools.product(sessions, (2, 4, 16))),
    ]
    turns = [[_taken(way) for way in ways] for _ in range(repeat + 1)][1:]

    def over_best(side: int) -> tuple[float, list[float]]:
        """Median time of ours, and the ratios of the fastest way's times to ours."""
        times = [[taken[side] for taken in turn] for turn in turns]
        ours, *others = (statistics.median(column) for column in zip(*times, strict=True))
        best = others.index(min(others)) + 1
        return ours, [turn[best] / turn[0] for turn in times]

    (_, ratios), (ours, on_the_clock) = over_best(0), over_best(1)
    speed = {"images_per_second": round(len(images) / ours)}
    return {**speed, **_summary(ratios), **_summary(on_the_clock, "_on_the_clock")}


class _Epoch(pl.Callback):
    """Seconds of the last epoch of a fit."""

    def __init__(self, place: torch.device) -> None:
        self.place, self.seconds = place, 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = _seconds(self.place)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = _seconds(self.place) - self._started


def _epoch(repeat: int, place: torch.device, kind: type[Student] = SupervisedStudent) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_IMAGES_OF_AN_EPOCH, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    loader = DataLoader(TensorDataset(images, labels), _BATCH)
    augmented = {} if kind is VATStudent else {"augment_labeled": True}
    student = kind(network="small_cnn", num_classes=10, **augmented)

    def loop(optimizer: torch.optim.Optimizer) -> None:
        for x, y in loader:
            x, y = x.to(place), y.to(place)
            optimizer.zero_grad()
            torch.stack(list(student.objective(student.weak(x), y).values())).sum().backward()
            optimizer.step()

    ratios = []
    for _ in range(repeat):
        epoch = _Epoch(place)  # the first one sets up what the second one is measured with
        accelerator = "gpu" if place.type == "cuda" else "cpu"
        trainer = pl.Trainer(max_epochs=2, accelerator=accelerator, callbacks=[epoch], **TRAINS_ALONE)
        trainer.fit(student, loader)
        student.to(place).train()
        # Lightning left the state of its own optimizer on the CPU.
        fresh = student.optimization.over(student.network.parameters())
        spent, _ = _taken(functools.partial(loop, fresh), place)
        ratios.append(spent / epoch.seconds)
    return _summary(ratios)


def _python(repeat: int, *words: str) -> dict[str, Any]:
    """Time of a program relative to ``import torch``, with compiled files kept as on a user's machine."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run(*words: str) -> None:
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, capture_output=True)

    bare = functools.partial(run, "-c", "import torch")
    return _in_turns(lambda: run(*words), bare, repeat, _CPU, resource.RUSAGE_CHILDREN)


def _exact(repeat: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        path.write_text(json.dumps([_SCREENINGS, _ANSWERS]), encoding="utf-8")
        return _python(repeat, "-m", "pl_privknn.cli", "epsilon", str(path), "--delta", "1e-5")


def _fit(repeat: int, write: Callable[[Path], int], limit: str = "") -> dict[str, Any]:
    """``fit --data`` of data that a function writes, beside a program of what can't be left out."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        records = write(data)
        options = {"data": data, "epsilon": 1, "private-records": records, "run_dir": Path(folder) / "run"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        if limit:
            _process("-c", limit, data, 1)  # once before: it writes the network's file
        ours, peak = _process("-m", "pl_privknn.cli", "fit", *words)
        found = {"seconds": round(ours, 1), "peak_gb": round(peak, 2)}
        if limit:
            bare, _ = _process("-c", limit, data, 10**9)
            found |= {"ratio": round(ours / bare, 2), "bare_seconds": round(bare, 1)}
        return found


def _process(*words: Any) -> tuple[float, float]:
    """Processor seconds and peak resident GB of a Python process with one thread for torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(output.read().decode()[-2000:])
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6


_OF_IMAGES = """
import sys, numpy, torch
from pathlib import Path
from pl_privknn.datamodules.folder import FileImages, images_under
from pl_privknn.datamodules.datasets import TensorImages
from pl_privknn.features import TimmFeatures
place, most = Path(sys.argv[1]), int(sys.argv[2])
if (place / "public_images.npy").exists():
    arrays = [numpy.load(place / f"{part}_images.npy")[:, None] for part in ("private", "public", "test")]
    store = TensorImages(torch.from_numpy(numpy.concatenate(arrays)))
else:
    store = FileImages(images_under(place), (3, 224, 224))
network = TimmFeatures()
for rows in torch.arange(min(most, len(store))).split(16):
    network(store.read(rows))
"""
_OF_TEXTS = """
import sys
from pathlib import Path
import pyarrow.csv
import pytorch_lightning  # half of the time: a fit can't do without it
from pl_privknn.features import WordLlamaFeatures
network, most = WordLlamaFeatures(), int(sys.argv[2])
for file in sorted(Path(sys.argv[1]).glob("*.csv")):
    network(pyarrow.csv.read_csv(file)["text"].to_pylist()[:most])
"""


def _photographs(folder: Path) -> int:
    """2,600 JPEG files of 300 x 300 pixels in five classes, 1,300 of them private."""
    from PIL import Image

    generator, down, across = np.random.default_rng(0), *np.mgrid[:300, :300] / 300
    for part, count in (("private", 1300), ("public", 900), ("test", 400)):
        for index in range(count):
            kind = index % 5
            coarse = Image.fromarray(generator.integers(40, 200, (12, 12, 3), dtype=np.uint8))
            image = np.asarray(coarse.resize((300, 300)), dtype=float)
            waves = np.sin(4 * np.pi * (kind + 1) * (across * np.cos(kind) + down * np.sin(kind)))
            image = image + 40 * waves[..., None] + generator.normal(0, 12, image.shape)
            place = folder / part / ("" if part == "public" else f"class{kind}") / f"{index:04d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(place, quality=90)
    return 1300


def _digits(folder: Path, private: int = 5000, public: int = 4000, test: int = 1000) -> int:
    """Digits of scikit-learn, enlarged, moved and with noise, as arrays of 28 x 28 pixels."""
    from sklearn.datasets import load_digits

    folder.mkdir()
    digits, generator = load_digits(), np.random.default_rng(0)
    small = np.kron(digits.images * 15, np.ones((3, 3))).astype(np.uint8)
    for part, count in (("private", private), ("public", public), ("test", test)):
        chosen = generator.integers(len(small), size=count)
        images = generator.integers(0, 16, (count, 28, 28), dtype=np.uint8)
        places = generator.integers(4, size=(count, 2))
        for image, which, (row, column) in zip(images, chosen, places, strict=True):
            image[row : row + 24, column : column + 24] += small[which] - small[which] // 16
        np.save(folder / f"{part}_images.npy", images)
        if part != "public":
            np.save(folder / f"{part}_labels.npy", digits.target[chosen])
    return private


def _texts(folder: Path) -> int:
    """5,000 texts of 60 words, which are drawn from the documentation, some words more often in one class."""
    import pyarrow as pa
    import pyarrow.csv

    folder.mkdir()
    text = " ".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    words = np.array(sorted(set(re.findall(r"[a-z]{4,}", text))))
    generator = np.random.default_rng(0)
    for part, count in (("private", 2500), ("public", 2000), ("test", 500)):
        kinds = np.arange(count) % 5
        drawn = generator.integers(len(words) // 5, size=(count, 60)) * 5
        own, any_kind = generator.random((count, 60)) < 0.3, generator.integers(5, size=(count, 60))
        drawn += np.where(own, kinds[:, None], any_kind)
        columns = {"text": [" ".join(row) for row in words[drawn]]}
        if part != "public":
            columns["label"] = [f"class{kind}" for kind in kinds]
        pa.csv.write_csv(pa.table(columns), folder / f"{part}.csv")
    return 2500


def _embeddings(folder: Path) -> int:
    """A million private embeddings of 384 numbers, 20,000 public ones and 5,000 of a test set, in ten classes."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(CLASSES, 384)).astype(np.float32)
    for part, count in (("private", 10**6), ("public", 20_000), ("test", 5_000)):
        labels = np.arange(count) % CLASSES
        place = folder / f"{part}_embeddings.npy"
        rows = np.lib.format.open_memmap(place, "w+", np.float32, (count, 384))
        for start in range(0, count, 10_000):
            kinds = labels[start : start + 10_000]
            rows[start : start + 10_000] = centres[kinds] + generator.normal(size=(len(kinds), 384)) * 3
        if part != "public":
            np.save(folder / f"{part}_labels.npy", labels)
    return 10**6


def table() -> str:
    """Table of stored figures and their baselines."""
    found = {name: one["results"] for name, one in entries("speed").items()}
    lines = [
        [row[0] + place, row[1], _ratio(found[name + place])]
        for place in ("", ", cuda")
        for name, row in ROWS.items()
        if name + place in found
    ]
    return markdown(["measurement", "baseline", "ratio of processor seconds"], lines)


def _ratio(found: dict[str, Any]) -> str:
    """Text of a ratio with its range, and the seconds and memory of a command."""
    if "ratio" not in found:
        return f"{found['peak_gb']:.2f} GB; {found['seconds']:.0f} s"
    between = f" ({found['ratio_min']:.2f}–{found['ratio_max']:.2f})" if "ratio_min" in found else ""
    clock = f"; {found['ratio_on_the_clock']:.2f} on the clock" if "ratio_on_the_clock" in found else ""
    seconds = f"; {found['seconds']:.2f} s" if "seconds" in found else ""
    memory = f"; {found['peak_gb']:.2f} GB" if "peak_gb" in found else ""
    return f"{found['ratio']:.2f}{between}{clock}{seconds}{memory}"


_OF_DEVICES = (_labelling, _extraction, _epoch)
_PASS = "decoding, resizing and one pass of the network"
_PRODUCT, _LOOP, _TORCH = "the bare product", "a loop with the same objective", "`import torch`"
#: What is measured, what stands beside it, the aim, and how: a function with its arguments.
ROWS: dict[str, tuple[Any, ...]] = {
    "labelling, one thread": (
        "Private-kNN labelling, 1,000 queries of 60,000×1,296, one thread", _PRODUCT, "≤ 1.2", _labelling, 1,
    ),
    "labelling, two threads": ("the same, two threads", _PRODUCT, "≤ 1.2", _labelling, 2),
    "HOG, 28 x 28": ("HOG, images of 28×28 a second", "scikit-image", "≥ 25", _hog, 1, 28),
    "HOG, 32 x 32 x 3": ("HOG, images of 32×32×3 a second", "scikit-image", "≥ 25", _hog, 3, 32),
    **{
        f"extraction, {name}": (
            f"vectors of `{name}`, images of 224×224 a second", "torch, 64 at once", aim, _extraction, name, 224,
        )
        for name, aim in {
            "tf_efficientnet_lite0": "≥ 5", "mobilenetv3_small_100": "≥ 1", "resnet50": "≥ 1",
            "vit_tiny_patch16_224": "≥ 1",
        }.items()
    },
    **{
        f"network, {threads}": (
            f"images of 224×224 a second of the default network, {threads}", "the fastest session of ONNX Runtime",
            "≥ 0.9", _on_threads, count,
        )
        for count, threads in ((1, "one thread"), (2, "two threads"))
    },
    "epoch": ("epochs a second of a student (`small_cnn`)", _LOOP, "≥ 0.97", _epoch),
    "epoch, VAT": ("the same of `VATStudent`", _LOOP, "≥ 0.97", _epoch, VATStudent),
    "fit, photographs": (
        "`privknn fit --data`, 2,600 images of 300×300", _PASS, "≤ 2.0", _fit, _photographs, _OF_IMAGES,
    ),
    "fit, digits": (
        "the same, 10,000 digits of 28×28 as arrays", "one pass of the network", "≤ 2.0", _fit, _digits, _OF_IMAGES,
    ),
    "fit, texts": (
        "the same, 5,000 texts of 60 words", "the import of Lightning, and their embedding", "≤ 2.0", _fit, _texts,
        _OF_TEXTS,
    ),
    "memory, images": (
        "the same, 70,000 images of 28×28, 60,000 of them private: peak memory", "", "4 GB", _fit,
        functools.partial(_digits, private=60_000, public=5_000, test=5_000),
    ),
    "memory, embeddings": (
        "the same, 1,000,000 private embeddings of 384 numbers: peak memory", "", "3 GB", _fit, _embeddings,
    ),
    "exact ε": ("`privknn epsilon` of 18,000 screenings and 3,877 answers", _TORCH, "1.5 s", _exact),
    "import": (
        "`from pl_privknn import PrivateKNN`", _TORCH, "≤ 1.3", _python, "-c", "from pl_privknn import PrivateKNN",
    ),
    "help": ("`privknn fit --help`", _TORCH, "0.5 s", _python, "-m", "pl_privknn.cli", "fit", "--help"),
}  # fmt: skip
