"""Head, student and their mean on Fashion-MNIST, of configs/fashion_mnist_statistics.yaml at several values of ε.

One part a run: a split, an ε and a seed. Noise is the operating system's, so that no run can be had again; the seed
is that of the student. Features depend on public images alone. They are kept in ``--cache`` with the answers of each
run, so that a run that stops goes on where it was. ``--heads`` leaves the students for a later call, which adds them.
"""

from __future__ import annotations

import argparse
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.record import ROOT, Measured, entries
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.comparison.results import stated
from pl_privknn.config import get, instantiate, put, read_document
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.mechanisms.base import weakest
from pl_privknn.students import SupervisedStudent
from pl_privknn.testing import FreeLedger

CONFIG = "configs/fashion_mnist_statistics.yaml"
#: Of each ε: components of the teacher's kernel, and releases.
SETTINGS = {0.1: (200, 5), 0.5: (600, 6), 1.0: (600, 8), 2.0: (600, 8)}
_TEACHERS, _STUDENTS = (
    "labeling.features.0.init_args.extractor",
    "model.init_args.extractor.init_args.extractor",
)
_LEARNED = f"{_TEACHERS}.init_args.components"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/statistics"), help="for features and answers"
    )
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--epsilons", type=float, nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--own", action="store_true", help="features without the network's ImageNet weights")
    parser.add_argument("--heads", action="store_true", help="no students")
    parser.add_argument("--threads", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Run what is missing, seed by seed."""
    torch.set_num_threads(options.threads)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    options.cache.mkdir(parents=True, exist_ok=True)
    for split in options.splits:
        tables: dict[str, Tensor] = {}
        for seed in options.seeds:
            for epsilon in options.epsilons:
                part = part_of(split, epsilon, seed, options.own)
                stored = entries("statistics").get(part, {}).get("results", {})
                if "student" in stored or (stored and options.heads):
                    continue
                sections = sections_at(epsilon, split, options.root, options.own)
                tables = tables or features_of(sections, options.cache / features_file(split, options.own))
                answers = answers_of(sections, tables, options.cache / f"{part}.pt")
                truth = tables["test_labels"]
                results: dict[str, Any] = {
                    "epsilon": epsilon,
                    "delta": sections["labeling"]["labeler"]["init_args"]["delta"],
                    "adjacency": "add_remove",
                    **answers["guarantee"],
                    "label_accuracy": accuracy(answers["soft"], tables["public_labels"]),
                    "head": accuracy(answers["test"], truth),
                }
                if not options.heads:
                    student = student_of(sections, answers, seed)
                    results["student"] = accuracy(student, truth)
                    results["mean"] = accuracy((student + answers["test"]) / 2, truth)
                components, releases = SETTINGS[epsilon]
                settings = {
                    "config": Path(CONFIG).name,
                    "imagenet_weights": not options.own,
                    "split_seed": split,
                    "components": components,
                    "releases": releases,
                    "student": "on features",
                }
                yield Measured(results, [seed], part, settings)


def part_of(split: int, epsilon: float, seed: int, own: bool) -> str:
    """Name of a run."""
    part = f"student on features, split {split}, ε {epsilon:g}, seed {seed}"
    return part if own else f"ImageNet weights, {part}"


def features_file(split: int, own: bool) -> str:
    """Name of the file in the cache that holds the features of a split."""
    return f"features_{split}.pt" if own else f"imagenet_features_{split}.pt"


def sections_at(epsilon: float, split: int, root: str, own: bool) -> dict[str, Any]:
    """The configuration at an ε, on a split; ``own`` leaves out what was learned from other images."""
    components, releases = SETTINGS[epsilon]
    document: dict[str, Any] = read_document(ROOT / CONFIG)
    if own:
        for features in (_TEACHERS, _STUDENTS):
            joined = f"{features}.init_args.extractor.init_args"
            extractors = get(document, joined)["extractors"][:3]
            put(document, joined, {"weights": [0.3, 0.2, 0.5], "extractors": extractors})
    put(document, "data.init_args.root", root)
    put(document, "data.init_args.split_seed", split)
    put(document, "labeling.labeler.init_args.epsilon", epsilon)
    put(document, "labeling.labeler.init_args.releases", releases)
    put(document, _LEARNED, components)
    return document


def _labeling(sections: dict[str, Any]) -> PrivateLabeler:
    made: PrivateLabeler = instantiate(
        {"labeling": sections["labeling"]}, {"labeling": PrivateLabeler}
    ).labeling
    return made


def _data(sections: dict[str, Any]) -> FashionMNISTDataModule:
    data = FashionMNISTDataModule(**sections["data"]["init_args"])
    data.setup("fit")
    return data


def features_of(sections: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """Features and labels of all images, with as many components as any ε takes.

    Fewer components are the first ones: the teacher scales what it takes to unit length.
    """
    if not path.is_file():
        data = _data(sections)
        document = {**sections, "labeling": dict(sections["labeling"])}
        put(document, _LEARNED, max(components for components, _ in SETTINGS.values()))
        started = time.process_time()
        found = tables_of(data, _labeling(document).features[0])
        saved({**found, "seconds": torch.tensor(time.process_time() - started)}, path)
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
    return loaded


def tables_of(data: PrivatePublicDataModule, extractor: Any) -> dict[str, Tensor]:
    """Features of all images, by an extractor that first learns from public ones, and their labels."""
    extractor.fit_public(data.public.images())
    assert data.public.truth is not None
    return {
        "public": torch.cat([extractor(part) for part in data.public.images().split(1024)]),
        "test": torch.cat([extractor(part) for part in data.test.images().split(1024)]),
        "private": torch.cat([extractor(images) for images, _ in data.private_batches()]),
        "public_labels": data.public.truth,
        "test_labels": data.test.labels,
        "private_labels": data.private.labels,
    }


def answers_of(sections: dict[str, Any], tables: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Predictions of one release of the teacher for public and test images, drawn once."""
    if not path.is_file():
        teacher: Any = _labeling(sections).labeler
        components = get(sections, _LEARNED)
        public, test, private = (tables[name][:, :components] for name in ("public", "test", "private"))
        ledger = FreeLedger()
        teacher.fit_public(public)
        teacher.fit(private, tables["private_labels"], 10)
        release = teacher.label(public, ledger)
        head = teacher.head(teacher.head_state())
        guarantee = stated(weakest(charge.guarantee for charge in ledger.rows))
        saved({"soft": release.soft, "test": head(test).float(), "guarantee": guarantee}, path)
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def student_of(sections: dict[str, Any], answers: dict[str, Any], seed: int) -> Tensor:
    """Class probabilities of the test images, by a student of the answers."""
    data, soft = _data(sections), answers["soft"]
    data.public.set_labels(slice(None), soft.argmax(dim=1), soft)
    pl.seed_everything(seed, verbose=False)
    student = instantiate({"model": sections["model"]["init_args"]}, {"model": SupervisedStudent}).model
    trainer = pl.Trainer(
        max_epochs=sections["trainer"]["max_epochs"],
        precision=sections["trainer"]["precision"],
        accelerator="cpu",
        **TRAINS_ALONE,
    )
    trainer.fit(student, data)
    student.eval()
    with torch.no_grad():
        return torch.cat([student(part).float().softmax(dim=1) for part in data.test.images().split(500)])


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    return round(float((probabilities.argmax(dim=1) == labels).double().mean()), 6)


def saved(content: dict[str, Any], path: Path) -> None:
    """Whole, or not at all."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_durably(path, buffer.getvalue())
