"""Label accuracy of reverse kNN under local and shuffle privacy, and its plot.

Fashion-MNIST, 60,000 records, s = 10 and 40 clusters of HOG features of the public images, k = 1, as in Figure 5 of
the paper: share of the 5,000 public images whose cluster got their true label, mean over seeds of the noise. The
clusters and the votes are computed once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import DOCS, Measured, results
from pl_privknn.callbacks.selection import ClusterSelection, PublicPool
from pl_privknn.comparison.marks import SEEDED, footnotes, guarantee_of, mark, stated
from pl_privknn.comparison.plot import explain
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers.reverse_knn_local import (
    MultiMessage,
    SingleMessage,
    Table,
    amplified_epsilon,
    calibrated_shares,
    make_randomizer,
    true_counts,
)
from pl_privknn.neighbors import top_k
from pl_privknn.privacy.noise import SeededNoise

EPSILONS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_SLOW_SEEDS = 10
METHODS = ("randomized_response", "collision", "separation", "concatenation")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--seeds", type=int, default=400)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """All methods at all ε; see the module."""
    seeds = options.seeds
    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    hog, truth = HOG(), data.public.truth
    assert truth is not None
    public = hog(data.public.images(torch.arange(len(data.public))))
    private = torch.cat([hog(images) for images, _ in data.private_batches()])
    result: dict[str, Any] = {**stated(SEEDED), "curves": {}}
    for queries in (10, 40):
        asked = torch.zeros(len(public), dtype=torch.bool)
        pool = PublicPool(torch.full((len(public),), -1), asked, lambda: public)
        selection = ClusterSelection()(pool, queries, torch.Generator().manual_seed(0))
        centres = public[selection.examples]
        _, nearest = top_k(private, centres, 1)
        cluster = top_k(public, centres, 1)[1][:, 0].long()
        table = Table(len(centres), 10)
        votes = nearest.long(), data.private.labels[:, None]

        exact = true_counts(table, *votes).view(table.queries, 10)
        curves: dict[str, Any] = {"without noise": _accuracy(exact, cluster, truth)}
        for epsilon in EPSILONS:
            protocols: dict[str, Any] = {name: make_randomizer(name, epsilon, table) for name in METHODS}
            local = amplified_epsilon(epsilon, 1e-5, len(private))
            protocols["shuffle, one message"] = SingleMessage("collision", local, table, len(private))
            shares = calibrated_shares(epsilon, 1e-5, 1)
            protocols["shuffle, shares"] = MultiMessage(shares, table, len(private))
            for name, protocol in protocols.items():
                # Shuffled single messages take long, and hardly differ from seed to seed.
                draws = min(seeds, _SLOW_SEEDS) if isinstance(protocol, SingleMessage) else seeds
                found = [
                    _accuracy(protocol.simulate(*votes, SeededNoise(seed)), cluster, truth)
                    for seed in range(draws)
                ]
                point = {"mean": statistics.mean(found), "std": statistics.stdev(found), "seeds": draws}
                point["deviation"] = protocol.deviation(len(private))
                curves.setdefault(name, {})[str(epsilon)] = point
        result["curves"][f"s = {queries}"] = curves
    yield Measured(result, seeds=list(range(seeds)), settings={"records": len(private)})


def _accuracy(counts: torch.Tensor, cluster: torch.Tensor, truth: torch.Tensor) -> float:
    return float((counts.argmax(dim=1)[cluster] == truth).float().mean())


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy against ε, a panel for each number of clusters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    whole = guarantee_of(result)
    explain(figure, footnotes([("", whole)]))
    for axes, (title, curves) in zip(figure.subplots(1, 2), result["curves"].items(), strict=True):
        for name, points in curves.items():
            if isinstance(points, float):
                axes.axhline(points, color="gray", linestyle="--", label=name)
                continue
            x = [float(epsilon) for epsilon in points]
            axes.plot(x, [point["mean"] for point in points.values()], marker=".", label=name)
        axes.set(xlabel=f"ε{mark(whole)}", ylabel="label accuracy", title=f"{title}, k = 1")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def draw() -> None:
    """The stored figures, into the page's plot."""
    plot(results("reverse_knn_local"), DOCS / "methods" / "reverse_knn_local.png")
