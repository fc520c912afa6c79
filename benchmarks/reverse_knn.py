"""Reverse kNN on Fashion-MNIST: cost of labelling, and what smoothing does to labels.

Two parts:

* ``speed``: one round of labelling (search, counts, noise, decision) of 60,000 records against 500 queries at 1,296
  dimensions over the bare matrix product of the same size, same threads, in turns; the ratio is the median of pairs.
* ``labels``: accuracy of the labels of 5,000 public images at several ε, taken over from the nearest cluster or
  smoothed by a kernel, asking about medoids or means.

Noise is seeded, so that figures can be repeated; a release over private data uses the system's generator.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import Measured
from pl_privknn.callbacks.selection import ClusterSelection, PublicPool, Selection, label_by_spread
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy.mechanisms import Laplace
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

CLASSES = 10
SEEDS = (0, 1, 2)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """The parts that were asked for."""
    torch.set_num_threads(options.threads)
    table, labels, public, truth = _features(options.root)
    settings = {
        "data": "Fashion-MNIST, HOG",
        "records": len(table),
        "dimensions": table.shape[1],
        "public": len(public),
    }
    parts: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(table, labels, public, options),
        "labels": lambda: label_accuracy(table, labels, public, truth),
    }
    for name in options.parts:
        yield Measured(parts[name](), [0] if name == "speed" else list(SEEDS), name, settings)


def speed(table: Tensor, labels: Tensor, public: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Labelling over the bare product, in turns; the first labelling, which compiles, is left out."""
    queries = public[: options.queries].contiguous()
    labeler = ReverseKNN(k=options.k, epsilon=0.1)
    labeler.fit(table, labels, CLASSES)

    def label() -> object:
        return labeler.label(queries, FreeLedger())

    def product() -> object:
        return table @ queries.T

    label(), product()
    pairs = [(_seconds(product), _seconds(label)) for _ in range(options.repeat)]
    ratios = [ours / bare for bare, ours in pairs]
    return {
        "queries": len(queries),
        "k": options.k,
        "threads": options.threads,
        "repeat": options.repeat,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "product_seconds": round(statistics.median(bare for bare, _ in pairs), 4),
        "labelling_seconds": round(statistics.median(ours for _, ours in pairs), 4),
    }


def label_accuracy(table: Tensor, labels: Tensor, public: Tensor, truth: Tensor) -> list[dict[str, Any]]:
    """Accuracy of all public labels after one round, mean and spread of three seeds."""
    found = []
    for epsilon, count in ((0.1, 300), (0.5, 500), (1.0, 500)):
        for ask, spread in (
            ("medoids", "nearest"),
            ("medoids", "kernel"),
            ("means", "nearest"),
            ("means", "kernel"),
        ):
            accuracies = []
            for seed in SEEDS:
                selection = _select(ClusterSelection(ask=ask, spread=spread), public, count, seed)
                counts = _reverse_knn(table, labels).counts(selection.query_features(public))
                accuracies.append(_accuracy(counts, selection, epsilon, seed, truth))
            found.append(
                {
                    "epsilon": epsilon,
                    **stated(SEEDED),
                    "queries": count,
                    "ask": ask,
                    "spread": spread,
                    **_mean(accuracies),
                }
            )
    return found


def _select(select: ClusterSelection, public: Tensor, count: int, seed: int) -> Selection:
    n = len(public)
    pool = PublicPool(torch.full((n,), -1), torch.zeros(n, dtype=torch.bool), lambda: public)
    return select(pool, count, torch.Generator().manual_seed(seed))


def _reverse_knn(table: Tensor, labels: Tensor) -> ReverseKNN:
    labeler = ReverseKNN(k=1, epsilon=1.0)
    labeler.fit(table, labels, CLASSES)
    return labeler


def _accuracy(counts: Tensor, selection: Selection, epsilon: float, seed: int, truth: Tensor) -> float:
    mechanism = Laplace(scale=1.0 / epsilon)
    noisy = mechanism.add_noise(counts, SeededNoise(seed))
    if selection.spread is None:
        assert selection.assignment is not None
        released = noisy.argmax(dim=1)[selection.assignment]
    else:
        released, _ = label_by_spread(selection.spread, noisy, mechanism.deviation)
    return float((released == truth).double().mean())


def _mean(accuracies: list[float]) -> dict[str, float]:
    return {
        "label_accuracy": round(statistics.mean(accuracies), 4),
        "label_accuracy_deviation": round(statistics.stdev(accuracies), 4),
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _features(root: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = FashionMNISTDataModule(root=root)
    data.setup("fit")
    hog = HOG()
    batches = [(hog(images), labels) for images, labels in data.private_batches(4096)]
    public = torch.cat([hog(data.public.images(part)) for part in torch.arange(len(data.public)).split(1024)])
    truth = data.public.truth
    assert truth is not None
    return torch.cat([part for part, _ in batches]), torch.cat([part for _, part in batches]), public, truth


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    names = ["speed", "labels"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="what to measure")
