"""Search in public cells beside the search of the whole table, on HOG features of Fashion-MNIST.

Recall is the share of the k nearest records that a search within cells finds; agreement the share of queries whose
largest class among them is the same. Both searches take turns, and the ratio of times is the median of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.labelling import CLASSES, _fashion_mnist, _timed
from benchmarks.record import Measured
from pl_privknn.neighbors import CellNeighbors, Cells, PoissonNeighbors
from pl_privknn.neighbors.search import nearest


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--root", default="data", help="where Fashion-MNIST is looked for")
    parser.add_argument("--public", type=int, default=5000, help="images that the cells are made of")
    parser.add_argument("--queries", type=int, default=5000, help="the first of them")
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--k", type=int, default=300)
    parser.add_argument("--cells", default="16x2,16x4,16x8,64x8,64x16", help="NUMBERxPROBES, …")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Recall, agreement and the ratio of times for each setting of the cells."""
    torch.set_num_threads(options.threads)
    queries, options.queries = options.queries, options.public
    table, labels, public = _fashion_mnist(options)
    options.queries = queries
    asked = public[:queries]
    exact = nearest(asked, table, options.k)
    for setting in options.cells.split(","):
        number, probes = map(int, setting.split("x"))
        yield _setting(table, labels, public, asked, exact, Cells(number, probes), options)


def _setting(
    table: Tensor,
    labels: Tensor,
    public: Tensor,
    asked: Tensor,
    exact: Tensor,
    cells: Cells,
    options: argparse.Namespace,
) -> Measured:
    whole = PoissonNeighbors(table, labels, CLASSES, options.k, 1.0)
    within = CellNeighbors(
        table,
        cells.centroids(public),
        cells.probes,
        lambda rows: PoissonNeighbors(table, labels, CLASSES, options.k, 1.0, among=rows),
    )
    found = _found(table, within, asked)
    recall = torch.stack(
        [torch.isin(one, other).double().mean() for one, other in zip(exact, found, strict=True)]
    )
    agree = within.votes(within.rank(asked)).argmax(dim=1) == labels[exact.long()].mode(dim=1).values
    whole.rank(asked[:64])
    ratios = []
    for _ in range(options.repeat):
        (bare, _), (ours, _) = _timed(lambda: whole.rank(asked)), _timed(lambda: within.rank(asked))
        ratios.append(bare / ours)
    result = {
        "recall": round(float(recall.mean()), 4),
        "recall_of_the_worst_tenth": round(float(recall.quantile(0.1)), 4),
        "same_class": round(float(agree.double().mean()), 4),
        "times_faster": round(statistics.median(ratios), 2),
    }
    kept = ("records", "queries", "public", "k", "threads", "repeat")
    settings = {name: getattr(options, name) for name in kept}
    part = f"{cells.number} cells, {cells.probes} probes"
    return Measured(result, seeds=[0], part=part, settings={**settings, "dimensions": table.shape[1]})


def _found(table: Tensor, within: CellNeighbors, asked: Tensor) -> list[Tensor]:
    """Positions in the table of what was found for each query."""
    lists: list[Tensor] = [torch.empty(0)] * len(asked)
    for positions, neighbors, ranked in within.rank(asked).parts:
        assert isinstance(neighbors, PoissonNeighbors)
        rows = neighbors.among if neighbors.among is not None else torch.arange(len(table))
        for position, indices in zip(positions.tolist(), ranked.indices, strict=True):
            lists[position] = rows[indices.long()]
    return lists
