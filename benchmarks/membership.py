"""Membership inference by shadow runs (LiRA: Carlini et al. 2022) on students, and on a network that saw the records.

Each shadow run has its own half of the 1,000 private digits. Three networks of the same kind, one hidden layer on the
pixels, see of it: labels of 100 public images by reverse kNN at ε; labels by the same votes without noise; the
private images with their labels. The attack knows the private labels, the coins of all other runs, and each
network's probabilities: how sure a model is of a record's label is compared with all other models, those that saw it
and those that did not. One part a network; what is stored is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.record import Measured, entries, markdown
from pl_privknn.comparison.table import SEEDED, stated
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import HOG
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]
PARTS = {
    "private": "student of a private teacher",
    "without noise": "the same without noise",
    "direct": "network trained on the private records",
}
RATES = (0.001, 0.01)
_QUERIES, _HIDDEN, _STEPS = 100, 64, 150


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--epsilon", type=float, default=1.0)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Measurements of each kind of network."""
    stored = entries("membership")
    data = DigitsDataModule()
    data.setup("fit")
    private, labels = next(data.private_batches(len(data.private)))
    public = data.public.images(torch.arange(_QUERIES))
    test, truth = data.test.images(slice(None)), data.test.labels
    members = np.random.default_rng(0).random((options.runs, len(private))) < 0.5
    tables, extract = torch.from_numpy(members), HOG()
    features, queries = extract(private).float(), extract(public).float()
    settings = {"runs": options.runs, "epsilon": options.epsilon, "queries": _QUERIES, "hidden": _HIDDEN}
    for part in (part for part in PARTS if part not in stored):
        seen, told = public, torch.empty(0)
        if part == "direct":
            seen, told = private, torch.where(tables, labels, -1)
        else:
            answers = []
            for run, row in enumerate(tables):
                teacher = ReverseKNN(budget=Budget(epsilon=options.epsilon), noise_source=SeededNoise(run))
                teacher.fit(PrivateRecords.of(features[row], labels[row], 10))
                if part == "private":
                    answers.append(teacher.label(queries, FreeLedger()).labels)
                else:
                    answers.append(teacher.counts(queries).argmax(dim=1))
            told = torch.stack(answers)
        networks = train_networks(seen.flatten(1), told, 10, hidden=_HIDDEN, steps=_STEPS, rate=0.01)
        own = networks(private.flatten(1))[:, torch.arange(len(labels)), labels]
        scores = likelihood_ratios(confidences(own.numpy()), members)
        right, grid = networks(test.flatten(1)).argmax(dim=2) == truth, np.geomspace(1e-3, 1.0, 61)
        rates = true_positive_rates(scores, members, RATES).tolist()
        figures = {
            **({"epsilon": options.epsilon, **stated(SEEDED)} if part == "private" else {"epsilon": None}),
            "accuracy": float(right.double().mean()),
            "tpr_at_fpr": dict(zip(map(str, RATES), rates, strict=True)),
            "fpr": grid.tolist(),
            "tpr": true_positive_rates(scores, members, grid).tolist(),
        }
        yield Measured(figures, seeds=[0], part=part, settings=settings)


def confidences(log_probabilities: ArrayLike) -> Floats:
    """Logits log p − log(1 − p) from log-probabilities; their distribution is close to Gaussian."""
    logs = np.minimum(np.asarray(log_probabilities, dtype=np.float64), -1e-12)
    return np.asarray(logs - np.log(-np.expm1(logs)))


def likelihood_ratios(sure: Floats, members: Coins) -> Floats:
    """Log-likelihood ratios of all records in all runs, each from the other runs alone.

    What models say of a record that they saw, and of one that they did not, is taken to be Gaussian, with means of
    the record's own and two variances that all records share (which is better than their own for few runs).

    Args:
        sure: confidences in the records' labels, ``(runs, records)``.
        members: whether the record was in the run's table, ``(runs, records)``.

    Returns:
        ``(runs, records)``; larger speaks for membership.

    Raises:
        ValueError: for a record of which fewer than two runs have, or lack, it.
    """
    sure, members = np.asarray(sure, dtype=np.float64), np.asarray(members, dtype=bool)
    found = np.zeros_like(sure)
    for side, sign in ((members, 1.0), (~members, -1.0)):
        counts = side.sum(axis=0)
        if sure.shape != side.shape or np.any(counts < 2):
            raise ValueError(
                f"members: shape {side.shape}; expected two runs with and two without each record"
            )
        totals = np.where(side, sure, 0.0).sum(axis=0)
        means = totals / counts
        variance = (np.where(side, sure - means, 0.0) ** 2).sum() / (counts - 1).sum()
        # The run itself is left out of its mean.
        others = (totals - np.where(side, sure, 0.0)) / (counts - side)
        found += sign * (-((sure - others) ** 2) / (2 * variance) - 0.5 * np.log(variance))
    return found


def true_positive_rates(scores: ArrayLike, members: ArrayLike, rates: ArrayLike) -> Floats:
    """True-positive rates at each false-positive rate.

    Args:
        scores: larger speaks for membership; any shape.
        members: bool, of the same shape.
        rates: false-positive rates in [0, 1].
    """
    values, there = np.ravel(scores), np.ravel(members).astype(bool)
    away, here = np.sort(values[~there])[::-1], np.sort(values[there])
    most = np.floor(np.asarray(rates, dtype=np.float64) * len(away)).astype(int)
    limits = np.append(away, -np.inf)[most]
    return np.asarray((len(here) - np.searchsorted(here, limits, side="right")) / len(here))


def table() -> str:
    """Table with one row per network."""
    lines = []
    for part, one in entries("membership").items():
        found = one["results"]
        name = PARTS[part] + (f", ε = {found['epsilon']:g}" if found["epsilon"] else "")
        rates = [f"{100 * found['tpr_at_fpr'][str(rate)]:.2f} %" for rate in RATES]
        lines.append([name, f"{found['accuracy']:.3f}", *rates])
    return markdown(["attacked", "test accuracy", "TPR at FPR 0.1 %", "TPR at FPR 1 %"], lines)


def figure() -> Figure:
    """Figure of the curves of all parts, on white for both themes."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.5, 4), layout="constrained", facecolor="white")
    axes = drawn.add_subplot()
    for part, one in entries("membership").items():
        axes.plot(one["results"]["fpr"], one["results"]["tpr"], label=PARTS[part])
    axes.plot([1e-3, 1], [1e-3, 1], "--", color="gray", label="guessing")
    axes.set(xscale="log", yscale="log", xlabel="false-positive rate", ylabel="true-positive rate")
    axes.legend()
    return drawn


def train_networks(
    vectors: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    hidden: int = 32,
    steps: int = 60,
    rate: float = 0.03,
) -> Callable[[Tensor], Tensor]:
    """Train networks with one hidden layer on the same vectors, each on its own row of labels.

    Args:
        vectors: float32 ``(q, d)``.
        labels: int64 ``(r, q)``; -1 where a network does not see the vector.
        num_classes: number of classes.
        hidden: width of the hidden layer.
        steps: of Adam, each on all vectors.
        rate: learning rate.

    Returns:
        Function from vectors ``(n, d)`` to log-probabilities ``(r, n, c)``.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = [(vectors.shape[1], hidden), (hidden, num_classes)]
    start = [torch.randn(*size, generator=generator) / size[0] ** 0.5 for size in sizes]
    # All start alike: what differs between networks are their labels.
    parameters = [weights.repeat(len(labels), 1, 1).requires_grad_() for weights in start]
    optimizer = torch.optim.Adam(parameters, lr=rate)

    def told(rows: Tensor) -> Tensor:
        return (rows @ parameters[0]).relu() @ parameters[1]

    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            given = told(vectors).flatten(0, 1), labels.flatten()
            (functional.cross_entropy(*given, ignore_index=-1, reduction="sum") / len(vectors)).backward()
            optimizer.step()
    return lambda rows: told(rows).detach().log_softmax(dim=2)
