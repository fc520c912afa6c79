"""Who was in the private table? Attacks by likelihood ratios (LiRA) on students, and on a network that saw it.

Each shadow run has its own half of the 1,000 private digits. Three networks of the same kind, one hidden layer on the
pixels, see of it: labels of 100 public images by reverse kNN at ε; labels by the same votes without noise; the
private images with their labels. The attack knows the private labels, the coins of all other runs, and each
network's probabilities. One part a network; what is stored is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.lira import confidences, likelihood_ratios, true_positive_rates
from benchmarks.record import Measured, entries
from pl_privknn.attacks.student import train_networks
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing.ledger import FreeLedger

PARTS = {
    "private": "student of a private teacher",
    "without noise": "the same without noise",
    "direct": "network trained on the private records",
}
RATES = (0.001, 0.01)
_QUERIES, _HIDDEN, _STEPS = 100, 64, 150


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part for each kind of network."""
    stored = {} if options.again else entries("membership")
    data = DigitsDataModule()
    data.setup("fit")
    private, labels = next(data.private_batches(len(data.private)))
    public = data.public.images(torch.arange(_QUERIES))
    test, truth = data.test.images(slice(None)), data.test.labels
    members = np.random.default_rng(0).random((options.runs, len(private))) < 0.5
    extract = HOG()
    features, queries = extract(private).float(), extract(public).float()
    for part in PARTS:
        if part in stored:
            continue
        seen, told = public, torch.empty(0)
        if part == "direct":
            seen, told = private, torch.where(torch.from_numpy(members), labels, -1)
        else:
            tables = [torch.from_numpy(row) for row in members]
            told = torch.stack(
                [
                    _labels(features[row], labels[row], queries, options.epsilon, part == "private", run)
                    for run, row in enumerate(tables)
                ]
            )
        networks = train_networks(
            seen.flatten(1), told, data.num_classes, hidden=_HIDDEN, steps=_STEPS, rate=0.01
        )
        own = networks(private.flatten(1))[:, torch.arange(len(labels)), labels]
        scores = likelihood_ratios(confidences(own.numpy()), members)
        grid = np.geomspace(1e-3, 1.0, 61)
        right = (networks(test.flatten(1)).argmax(dim=2) == truth).double().mean(dim=1)
        rates = dict(zip(map(str, RATES), true_positive_rates(scores, members, RATES).tolist(), strict=True))
        figures = {
            **({"epsilon": options.epsilon, **stated(SEEDED)} if part == "private" else {"epsilon": None}),
            "accuracy": float(right.mean()),
            "tpr_at_fpr": rates,
            "fpr": grid.tolist(),
            "tpr": true_positive_rates(scores, members, grid).tolist(),
        }
        settings = {"runs": options.runs, "epsilon": options.epsilon, "queries": _QUERIES, "hidden": _HIDDEN}
        yield Measured(figures, seeds=[0], part=part, settings=settings)


def _labels(
    features: Tensor, labels: Tensor, queries: Tensor, epsilon: float, noisy: bool, run: int
) -> Tensor:
    teacher = ReverseKNN(epsilon=epsilon, noise_source=SeededNoise(run))
    teacher.fit(features, labels, 10)
    return teacher.label(queries, FreeLedger()).labels if noisy else teacher.counts(queries).argmax(dim=1)
