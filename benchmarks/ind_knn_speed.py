"""Ind-KNN's speed beside the bare matrix product.

Records lie in groups around random centres, so that a query has some hundred neighbours among them. The product of
the unit queries and the table, the exact search and hashing take turns within one run; a ratio is the median of the
turns' ratios, so that a machine that slows down favours none. Everything counts that ``IndKNN.label`` does:
unit length, thresholds, budgets, noise. Queries come in batches, and one by one, where the product reads the
whole table for each.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ind_knn_accuracy import CLASSES, DELTA, LOG
from benchmarks.record import Measured, results
from pl_privknn.labelers.ind_knn import RecordBudgets
from pl_privknn.labelers.ind_knn.engine import IndKNNSwitches
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.testing import FreeLedger

#: A record of the query's own group has a cosine of about 0.8 with it, one of another group about 0.
THRESHOLD = 0.7
#: Queries that are timed where they come in small batches.
ONE_BY_ONE = 64


def measure_size(options: argparse.Namespace, records: int) -> list[dict[str, Any]]:
    """Milliseconds a query of the product and of both searches, for one size of the table and each batch size."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(max(1, records // options.neighbors), options.dimension, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        group = torch.randint(len(centres), (count,), generator=generator)
        vectors = torch.randn(count, options.dimension, generator=generator)
        return vectors.mul_(0.5).add_(centres[group]), group % CLASSES

    table, labels = draw(records)
    queries, _ = draw(max(options.batches))
    # Budgets large enough that nobody drops out, which would only make it faster.
    labelers = {
        name: IndKNN(
            THRESHOLD,
            0.5,
            budgets=RecordBudgets(budget=1e6, sigma1=50.0),
            switches=IndKNNSwitches(hashing=hashing),
        )
        for name, hashing in [("exact", None), ("hashing", SignProjections(options.tables, options.bits))]
    }
    fitting: dict[str, float] = {}
    for name, labeler in labelers.items():
        started = time.perf_counter()
        labeler.fit(table, labels, CLASSES)
        fitting[name] = time.perf_counter() - started
        labeler.label(queries[:8], FreeLedger())  # compiles
    del table
    found = _recall(labelers, queries[:100])
    rows = []
    for batch in options.batches:
        asked = queries[: max(batch, ONE_BY_ONE)].split(batch)
        times = _turns(labelers, asked, options.repeat)
        row: dict[str, Any] = {"records": records, "dimension": options.dimension, "batch": batch}
        for name, values in times.items():
            row[f"{name}_ms"] = 1000 * statistics.median(values) / sum(map(len, asked))
            if name != "product":
                ratios = [ours / bare for ours, bare in zip(values, times["product"], strict=True)]
                row[f"{name}_ratio"] = statistics.median(ratios)
                row[f"{name}_ratios"] = [round(ratio, 3) for ratio in ratios]
        rows.append({**row, **found, "fit_s": fitting, "load_average": os.getloadavg()[0]})
        LOG.print(rows[-1])
    return rows


def _turns(labelers: dict[str, IndKNN], asked: Sequence[Tensor], repeat: int) -> dict[str, list[float]]:
    """Seconds of the product and of each labeler, taking turns."""
    engine = labelers["exact"]._engine
    assert engine is not None
    table = engine.table.vectors
    unit = [torch.nn.functional.normalize(batch, dim=1) for batch in asked]
    times: dict[str, list[float]] = {"product": [], **{name: [] for name in labelers}}

    def product() -> None:
        for batch in unit:
            batch @ table.T

    def answer(labeler: IndKNN) -> None:
        for batch in asked:
            labeler.label(batch, FreeLedger())

    for _ in range(repeat):
        times["product"].append(_timed(product))
        for name, labeler in labelers.items():
            times[name].append(_timed(functools.partial(answer, labeler)))
    return times


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _recall(labelers: dict[str, IndKNN], queries: Tensor) -> dict[str, float]:
    """Share of neighbours that hashing finds, and how many records it looks at."""
    engine = labelers["hashing"]._engine
    assert engine is not None
    assert engine.index is not None
    unit = torch.nn.functional.normalize(queries, dim=1)
    near = [np.flatnonzero(row >= THRESHOLD) for row in (unit @ engine.table.vectors.T).numpy()]
    found = engine.index.candidates(unit)
    shares = [len(np.intersect1d(a, b)) / max(1, len(a)) for a, b in zip(near, found, strict=True)]
    return {
        "neighbors": statistics.mean(map(len, near)),
        "candidates": statistics.mean(map(len, found)),
        "recall": statistics.mean(shares),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--records", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--neighbors", type=int, default=500, help="records of each group")
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 1], help="queries at once")
    parser.add_argument("--tables", type=int, default=30, help="hash tables")
    parser.add_argument("--bits", type=int, default=12, help="bits of each")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """All sizes."""
    torch.set_num_threads(options.threads)
    rows = [row for records in options.records for row in measure_size(options, records)]
    yield Measured({"delta": DELTA, "adjacency": "add_remove", "rows": rows}, seeds=[0])


def table() -> str:
    """Milliseconds a query beside the bare product."""
    lines = [
        "| records × dimensions | queries at once | product | Ind-KNN | ratio | with hashing | candidates | recall |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results("ind_knn_speed")["rows"]:
        lines.append(
            f"| {row['records']:,} × {row['dimension']} | {row['batch']:,} | {row['product_ms']:.2f} ms "
            f"| {row['exact_ms']:.2f} ms | {row['exact_ratio']:.2f} | {row['hashing_ms']:.2f} ms "
            f"| {row['candidates']:,.0f} | {row['recall']:.2f} |"
        )
    return "\n".join(lines)
