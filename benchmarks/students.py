"""Students on Fashion-MNIST: what unlabelled images add to 1,000 labels, and what helps against wrong labels.

* ``unlabeled``: 1,000 public images (drawn by the seed) have their true labels, the other 4,000 none. All students
  have the same network, optimizer, schedule, moving average, batches of labels and views of labelled images; the
  supervised one is the measure.
* ``noise``: all 5,000 public images have the labels of one reverse-kNN release at ε = 0.1, about one in six of them
  wrong, and more of them in some classes than in others; the supervised student with each way to deal with that.

Test accuracy of the last epoch on 5,000 images, kept seed by seed; a student that is stored with
these seeds is not trained again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.record import Measured, entries
from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.callbacks.selection import ClusterSelection, PublicPool, label_by_spread
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import (
    FixMatchStudent,
    LabelLoss,
    Student,
    SupervisedStudent,
    UDAStudent,
    VATStudent,
    WeakAugmentation,
)
from pl_privknn.testing import FreeLedger

LABELS = 1000
SHARED: dict[str, Any] = {
    "network": "small_cnn",
    "ema_decay": 0.99,
    "augment": "weak",
    "augmentation": WeakAugmentation(flip=True),
}
UNLABELED: dict[str, tuple[type[Student], dict[str, Any]]] = {
    "supervised": (SupervisedStudent, {}),
    "VAT": (VATStudent, {}),
    "UDA": (UDAStudent, {}),
    "FixMatch": (FixMatchStudent, {}),
}
NOISE: dict[str, dict[str, Any]] = {
    "hard labels": {},
    "soft labels": {},
    "hard, label smoothing 0.2": {"loss": LabelLoss(label_smoothing=0.2)},
    "hard, generalised cross-entropy, q 0.7": {"loss": LabelLoss(label_robustness=0.7)},
    "hard, confidence weighting 1": {"loss": LabelLoss(confidence_weighting=1.0)},
    "soft, confidence weighting 1": {"loss": LabelLoss(confidence_weighting=1.0)},
}


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Run what is missing, one student after another."""
    torch.set_num_threads(options.threads)
    for kind in options.parts:
        for name in UNLABELED if kind == "unlabeled" else NOISE:
            part = f"{kind}: {name}"
            if entries("students").get(part, {}).get("seeds") == options.seeds:
                continue
            run = unlabeled if kind == "unlabeled" else noise
            found = {str(seed): round(run(name, seed, options), 4) for seed in options.seeds}
            accuracies = list(found.values())
            row = {"accuracies": found, **(stated(SEEDED) if kind == "noise" else {})}
            row["accuracy"] = round(statistics.mean(accuracies), 4)
            row["deviation"] = round(statistics.stdev(accuracies), 4) if len(accuracies) > 1 else None
            yield Measured(row, options.seeds, part)


def unlabeled(name: str, seed: int, options: argparse.Namespace) -> float:
    """Test accuracy with 1,000 true labels, and unlabelled images for those who can use them."""
    data = _data(options, batch_size=32, unlabeled_batch_size=64)
    chosen = torch.randperm(len(data.public), generator=torch.Generator().manual_seed(seed))[:LABELS]
    assert data.public.truth is not None
    data.public.set_labels(chosen, data.public.truth[chosen])
    kind, settings = UNLABELED[name]
    return _train(kind(**SHARED, **settings), data, seed, options.epochs)


def noise(name: str, seed: int, options: argparse.Namespace) -> float:
    """Test accuracy on labels of a private teacher."""
    data = _data(options, batch_size=64, unlabeled_batch_size=64)
    labels, soft = _released(data, seed, options)
    everything = torch.arange(len(data.public))
    data.public.set_labels(everything, labels, soft if name.startswith("soft") else None)
    return _train(SupervisedStudent(**SHARED, **NOISE[name]), data, seed, options.epochs)


def _released(data: FashionMNISTDataModule, seed: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    hog = HOG()
    everything = torch.arange(len(data.public))
    public = torch.cat([hog(data.public.images(part)) for part in everything.split(1024)])
    batches = [(hog(images), labels) for images, labels in data.private_batches(4096)]
    pool = PublicPool(
        torch.full_like(everything, -1), torch.zeros(len(public), dtype=torch.bool), lambda: public
    )
    selection = ClusterSelection(ask="means", spread="kernel")(pool, 300, torch.Generator().manual_seed(seed))
    teacher = ReverseKNN(k=1, epsilon=0.1, noise_source=SeededNoise(seed))
    teacher.fit(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]), 10)
    release = teacher.label(selection.query_features(public), FreeLedger())
    assert selection.spread is not None
    assert release.scores is not None
    assert release.score_deviation is not None
    return label_by_spread(selection.spread, release.scores, release.score_deviation)


def _data(options: argparse.Namespace, **sizes: int) -> FashionMNISTDataModule:
    data = FashionMNISTDataModule(root=options.root, **sizes)
    data.setup("fit")
    return data


def _train(student: Student, data: FashionMNISTDataModule, seed: int, epochs: int) -> float:
    # The weights were drawn when the student was made; draw them again by the seed.
    pl.seed_everything(seed, verbose=False)
    student.reinitialize()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        **TRAINS_ALONE,
    )
    trainer.fit(student, data)
    return float(trainer.test(student, data, verbose=False)[0]["test/accuracy"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--parts", nargs="+", choices=["unlabeled", "noise"], default=["unlabeled", "noise"])
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
