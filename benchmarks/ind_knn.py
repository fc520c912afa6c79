"""Ind-KNN: accuracy on Fashion-MNIST against Private-kNN, and speed against the bare matrix product.

    python benchmarks/ind_knn.py accuracy --features hog --data DIR [--cache DIR]
    python benchmarks/ind_knn.py accuracy --features pretrained --data DIR [--weights FILE] [--cache DIR]
    python benchmarks/ind_knn.py speed [--records 50000] [--threads 2]
    python benchmarks/ind_knn.py report

The 60,000 training images are private. Of the test file one half is the pool of queries, the other half plays
labelled public data: Ind-KNN's settings are searched for there alone, and it is the reference for thresholds from
public density. Private-kNN gets the best setting of a grid **in hindsight**, on the very queries that are scored,
with its noise calibrated by the smaller of the RDP and PLD totals; so the comparison favours it. Both answer all
queries. ``report`` writes the tables and the plot of docs/ind_knn.md from the JSON files in benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from pl_privknn import __version__
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG, TimmFeatures
from pl_privknn.labelers.ind_knn import IndKNN
from pl_privknn.labelers.ind_knn_core import PAPER_MIN_COUNT, IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn_search import Simulation, search_ind_knn
from pl_privknn.labelers.ind_knn_table import unit_rows
from pl_privknn.labelers.private_knn import KNN_VOTES_L2
from pl_privknn.labelers.voting import noisy_argmax
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
DELTA, CLASSES, RECORDS = 1e-5, 10, 60_000
CONVERSIONS = ("gdp", "rdp", "rdp_classic")
#: γ and k of Private-kNN's grid, as in the paper's Table 4, with smaller k for few queries.
GRID = [(rate, k) for rate in (0.02, 0.05, 0.1, 0.2) for k in (30, 60, 100, 200, 300, 500)]
LONGEST_LIST = 6000
NAMES = {
    "density": "Ind-KNN, thresholds from public density",
    "fixed": "Ind-KNN, one fixed threshold",
    "private_knn": "Private-kNN, best of the grid in hindsight",
}
_LOG = Console(stderr=True)


class Free:
    """A ledger for simulations: every labeler's cost is stated beforehand."""

    def charge(self, mechanism: Any, count: int = 1) -> int:
        """Nothing to pay."""
        return 0


# ---------------------------------------------------------------- accuracy


def accuracy(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    tables = _features(options)
    cases = [(queries, epsilon) for queries in options.queries for epsilon in options.epsilons]
    settings = {
        (method, *case): _search(tables, method, *case) for case in cases for method in ("density", "fixed")
    }
    scores: dict[tuple[Any, ...], list[float]] = {}
    for queries in options.queries:
        for seed in range(options.seeds):
            generator = torch.Generator().manual_seed(seed)
            asked = torch.randperm(len(tables["pool"]), generator=generator)[:queries]
            for (method, accounting, epsilon, setting), score in itertools.chain(
                _ind_knn_scores(options, tables, asked, settings), _rival_scores(options, tables, asked)
            ):
                scores.setdefault((queries, epsilon, method, accounting, setting), []).append(score)
        rows = [_row(options, *key, found) for key, found in scores.items()]
        _write(f"ind_knn_accuracy_{options.features}", options, {"rows": _best_of_grid(rows)})


def _search(tables: dict[str, Tensor], method: str, queries: int, epsilon: float) -> dict[str, Any]:
    """The best setting on labelled public data."""
    found = search_ind_knn(
        tables["tuning"],
        tables["tuning_labels"],
        CLASSES,
        epsilon=epsilon,
        delta=DELTA,
        num_queries=queries,
        num_records=RECORDS,
        by_density=method == "density",
        window=0.15,
        window_step=0.05,
        repeats=3,
    )[0]
    _LOG.print(f"{queries} queries, ε={epsilon}, {method}: {found}")
    return found.settings


def _ind_knn_scores(
    options: argparse.Namespace, tables: dict[str, Tensor], asked: Tensor, settings: dict[Any, dict[str, Any]]
) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Mean over draws of noise; the conversions share settings and noise, and differ in the budget alone."""
    unit = unit_rows(tables["pool"][asked])
    simulation = Simulation(
        (unit @ unit_rows(tables["private"]).T).numpy(),
        tables["pool_labels"][asked].numpy(),
        tables["private_labels"].numpy(),
        CLASSES,
    )
    public = (unit @ unit_rows(tables["tuning"]).T).numpy()
    for (method, queries, epsilon), given in settings.items():
        if queries != len(asked):
            continue
        density = PublicDensity(**given["density"]) if "density" in given else None
        for conversion in CONVERSIONS:
            parameters = IndKNNParameters.for_epsilon(
                epsilon,
                DELTA,
                threshold=given["threshold"],
                sigma2=given["sigma2"],
                num_queries=queries,
                conversion=conversion,
                min_count=PAPER_MIN_COUNT if density is None else float(density.neighbors),
            )
            thresholds = np.full(queries, given["threshold"])
            if density is not None:
                thresholds = density.thresholds(parameters, public)
            runs = [
                simulation.private(parameters, thresholds, SeededNoise(draw)) for draw in range(options.draws)
            ]
            key = (method, conversion, epsilon, json.dumps({**given, "conversion": conversion}))
            yield key, statistics.mean(runs)


def _rival_scores(
    options: argparse.Namespace, tables: dict[str, Tensor], asked: Tensor
) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Private-kNN with every setting of the grid: what ``PrivateKNN.label`` does, searching once for all ε."""
    truth = tables["pool_labels"][asked]
    for rate, k in GRID:
        if k / rate > LONGEST_LIST:
            continue
        neighbors = PoissonNeighbors(tables["private"], tables["private_labels"], CLASSES, k, rate)
        ranked = neighbors.rank(tables["pool"][asked])
        for epsilon in options.epsilons:
            mechanism = Gaussian(_calibrated(rate, epsilon, len(asked)), KNN_VOTES_L2, rate)
            runs = []
            for draw in range(options.draws):
                noise = SeededNoise(draw)
                released = noisy_argmax(mechanism, neighbors.votes(ranked, noise.bernoulli), noise)
                runs.append(float((released == truth).double().mean()))
            setting = json.dumps({"k": k, "sampling_rate": rate, "sigma": mechanism.sigma})
            yield ("private_knn", "smaller of rdp and pld", epsilon, setting), statistics.mean(runs)


@functools.cache
def _calibrated(rate: float, epsilon: float, count: int) -> float:
    """The least σ for ``count`` answers of Private-kNN."""
    sigma = Parameter(
        "sigma", start=100 * rate * math.sqrt(count / 500) / epsilon, low=0.1, high=1e4, rising=False
    )
    found = calibrate(
        lambda value: [Charge(Gaussian(value, KNN_VOTES_L2, rate), count)],
        sigma,
        epsilon=epsilon,
        delta=DELTA,
        exact=False,
    )
    return found.value


def _row(
    options: argparse.Namespace,
    queries: int,
    epsilon: float,
    method: str,
    accounting: str,
    setting: str,
    scores: list[float],
) -> dict[str, Any]:
    row = {"features": options.features, "queries": queries, "epsilon": epsilon, "method": method}
    row |= {"accounting": accounting, "accuracies": scores, "mean": statistics.mean(scores)}
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return {**row, "spread": spread, "settings": json.loads(setting)}


def _best_of_grid(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of Private-kNN's settings only the most accurate one of each case."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["queries"], row["epsilon"], row["method"], row["accounting"])
        if key not in kept or row["mean"] > kept[key]["mean"]:
            kept[key] = row
    for row in kept.values():
        _LOG.print({key: value for key, value in row.items() if key not in ("accuracies", "features")})
    return list(kept.values())


def _features(options: argparse.Namespace) -> dict[str, Tensor]:
    data = FashionMNISTDataModule(root=options.data)
    data.setup("fit")
    if options.features == "hog":
        extractor: Any = HOG()
    else:
        extractor = TimmFeatures(weights=options.weights, image_size=options.image_size, batch_size=256)
    tables = {
        "private_labels": data.private.labels,
        "pool_labels": data.public.truth,
        "tuning_labels": data.test.labels,
    }
    parts = {"private": data.private, "pool": data.public, "tuning": data.test}
    for name, part in parts.items():
        cache = options.cache / f"{options.features}_{name}.npy" if options.cache else None
        if cache is not None and cache.exists():
            tables[name] = torch.from_numpy(np.load(cache))
            continue
        started = time.perf_counter()
        batches = [extractor(part.images(slice(start, start + 1024))) for start in range(0, len(part), 1024)]
        tables[name] = torch.cat(batches)
        _LOG.print(f"{options.features} features, {name}: {time.perf_counter() - started:.0f} s")
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            np.save(cache, tables[name].numpy())
    return tables


# ---------------------------------------------------------------- speed


def speed(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for records in options.records:
        groups = max(1, records // options.neighbors)
        centres = torch.randn(groups, options.dimension, generator=generator)

        def draw(count: int, centres: Tensor = centres) -> tuple[Tensor, Tensor]:
            group = torch.randint(len(centres), (count,), generator=generator)
            vectors = torch.randn(count, options.dimension, generator=generator)
            return vectors.mul_(0.5).add_(centres[group]), group % CLASSES

        table, labels = draw(records)
        queries, _ = draw(options.num_queries)
        # Budgets large enough that nobody drops out, which would only make it faster.
        labelers = {
            name: IndKNN(0.7, 0.5, budget=1e6, sigma1=50.0, hashing=hashing)
            for name, hashing in [("exact", None), ("hashing", SignProjections(30, options.bits))]
        }
        seconds: dict[str, float] = {}
        for name, labeler in labelers.items():
            started = time.perf_counter()
            labeler.fit(table, labels, CLASSES)
            seconds[f"fit_{name}"] = time.perf_counter() - started
            labeler.label(queries[:8], Free())  # compiles
        del table
        times = _compare(labelers, queries, options.repeat)
        row: dict[str, Any] = {"records": records, "dimension": options.dimension, "bits": options.bits}
        for name, values in times.items():
            row[f"{name}_ms"] = 1000 * min(values) / options.num_queries
        row["ratio"] = statistics.median(a / b for a, b in zip(times["exact"], times["product"], strict=True))
        row["hashing_ratio"] = statistics.median(
            a / b for a, b in zip(times["hashing"], times["product"], strict=True)
        )
        row |= _recall(labelers, queries[:100])
        rows.append({**row, "fit_s": seconds})
        _LOG.print(rows[-1])
        del labelers
    _write("ind_knn_speed", options, {"rows": rows})


def _compare(labelers: dict[str, IndKNN], queries: Tensor, repeat: int) -> dict[str, list[float]]:
    """Seconds of the product and of each labeler, taking turns so that a drifting machine favours none."""
    engine = labelers["exact"]._engine
    assert engine is not None
    table, unit = engine.table.vectors, torch.nn.functional.normalize(queries, dim=1)
    times: dict[str, list[float]] = {"product": [], **{name: [] for name in labelers}}
    for _ in range(repeat):
        times["product"].append(_timed(lambda: unit @ table.T))
        for name, labeler in labelers.items():
            times[name].append(_timed(functools.partial(labeler.label, queries, Free())))
    return times


def _recall(labelers: dict[str, IndKNN], queries: Tensor) -> dict[str, float]:
    """Share of neighbours that hashing finds, and how many records it looks at."""
    engine = labelers["hashing"]._engine
    assert engine is not None
    assert engine.index is not None
    unit = torch.nn.functional.normalize(queries, dim=1)
    near = [np.flatnonzero(row >= 0.7) for row in (unit @ engine.table.vectors.T).numpy()]
    found = engine.index.candidates(unit)
    shares = [len(np.intersect1d(a, b)) / max(1, len(a)) for a, b in zip(near, found, strict=True)]
    return {
        "neighbors": statistics.mean(map(len, near)),
        "candidates": statistics.mean(map(len, found)),
        "recall": statistics.mean(shares),
    }


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---------------------------------------------------------------- report


def report(options: argparse.Namespace) -> None:
    """Tables between the markers of docs/ind_knn.md, and the plot beside it."""
    page = DOCS / "ind_knn.md"
    text = page.read_text()
    for name, lines in (
        ("accuracy", _accuracy_table()),
        ("conversions", _conversion_table()),
        ("speed", _speed_table()),
    ):
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    page.write_text(text)
    _plot()


def _rows(features: str) -> list[dict[str, Any]]:
    path = RESULTS / f"ind_knn_accuracy_{features}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def _cells(features: str) -> Iterator[tuple[int, float]]:
    yield from sorted({(row["queries"], row["epsilon"]) for row in _rows(features)})


def _find(features: str, queries: int, epsilon: float, method: str, accounting: str | None) -> dict[str, Any]:
    for row in _rows(features):
        if (row["queries"], row["epsilon"], row["method"]) == (queries, epsilon, method) and (
            accounting in (None, row["accounting"])
        ):
            return row
    raise KeyError(f"no result for {features}, {queries} queries, ε={epsilon}, {method}")


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['mean']:.1f} ± {100 * row['spread']:.1f}"


def _accuracy_table() -> list[str]:
    lines = [
        "| features | queries | ε | Ind-KNN, public density | Ind-KNN, fixed τ | Private-kNN, in hindsight |",
        "|---|---|---|---|---|---|",
    ]
    for features in ("hog", "pretrained"):
        for queries, epsilon in _cells(features):
            cells = [
                _percent(_find(features, queries, epsilon, method, accounting))
                for method, accounting in (("density", "gdp"), ("fixed", "gdp"), ("private_knn", None))
            ]
            lines.append(f"| {features} | {queries:,} | {epsilon:g} | " + " | ".join(cells) + " |")
    return lines


def _conversion_table() -> list[str]:
    lines = [
        "| features | thresholds | queries | ε | Gaussian DP | RDP, improved | RDP, classic |",
        "|---|---|---|---|---|---|---|",
    ]
    for features in ("hog", "pretrained"):
        for method in ("density", "fixed"):
            for queries, epsilon in _cells(features):
                cells = [_percent(_find(features, queries, epsilon, method, c)) for c in CONVERSIONS]
                lines.append(
                    f"| {features} | {method} | {queries:,} | {epsilon:g} | " + " | ".join(cells) + " |"
                )
    return lines


def _speed_table() -> list[str]:
    stored = json.loads((RESULTS / "ind_knn_speed.json").read_text())
    lines = [
        "| records × dimensions | bare product | Ind-KNN | ratio | with hashing | candidates | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in stored["rows"]:
        lines.append(
            f"| {row['records']:,} × {row['dimension']} | {row['product_ms']:.2f} ms | {row['exact_ms']:.2f} ms "
            f"| {row['ratio']:.2f} | {row['hashing_ms']:.2f} ms | {row['candidates']:,.0f} | {row['recall']:.2f} |"
        )
    return lines


def _plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({queries for features in ("hog", "pretrained") for queries, _ in _cells(features)})
    figure, axes = pyplot.subplots(2, len(counts), figsize=(9, 7), sharex=True, sharey="row", squeeze=False)
    for line, features in enumerate(("hog", "pretrained")):
        for column, queries in enumerate(counts):
            axis = axes[line][column]
            for method, accounting, style in (
                ("density", "gdp", "o-"),
                ("density", "rdp_classic", "o:"),
                ("fixed", "gdp", "s-"),
                ("fixed", "rdp_classic", "s:"),
                ("private_knn", None, "^-"),
            ):
                cells = [epsilon for count, epsilon in _cells(features) if count == queries]
                found = [_find(features, queries, epsilon, method, accounting) for epsilon in cells]
                suffix = {"gdp": ", Gaussian DP", "rdp_classic": ", classic RDP"}.get(accounting or "", "")
                axis.errorbar(
                    cells,
                    [100 * row["mean"] for row in found],
                    [100 * row["spread"] for row in found],
                    fmt=style,
                    color={"density": "C0", "fixed": "C1", "private_knn": "C2"}[method],
                    label=NAMES[method] + suffix,
                    capsize=3,
                )
            axis.set_title(f"{features} features, {queries:,} queries")
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("ε at δ = 1e-5")
    for row in axes:
        row[0].set_ylabel("accuracy of answers, %")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(DOCS / "ind_knn_accuracy.png", dpi=110)


# ---------------------------------------------------------------- command line


def _write(name: str, options: argparse.Namespace, content: dict[str, Any]) -> None:
    arguments = {
        key: value
        for key, value in vars(options).items()
        if key not in ("run", "data", "cache", "weights", "output")
    }
    stored = {
        "benchmark": name,
        "arguments": arguments,
        "delta": DELTA,
        "adjacency": "add_remove",
        "versions": {
            "pl_privknn": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        **content,
    }
    path = options.output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("accuracy", help="against Private-kNN on Fashion-MNIST")
    one.add_argument("--features", choices=("hog", "pretrained"), default="hog")
    one.add_argument("--data", default="data", help="folder of Fashion-MNIST's four files")
    one.add_argument("--weights", default=None, help="file of EfficientNet-Lite0's weights")
    one.add_argument("--image-size", type=int, default=96, help="side to which images are resized for it")
    one.add_argument("--cache", type=Path, default=None, help="folder for features, private")
    one.add_argument("--queries", type=int, nargs="+", default=[500, 2000])
    one.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    one.add_argument("--seeds", type=int, default=3, help="sets of queries")
    one.add_argument("--draws", type=int, default=5, help="draws of noise for each, averaged")
    one.set_defaults(run=accuracy)
    two = commands.add_parser("speed", help="against the bare matrix product")
    two.add_argument("--records", type=int, nargs="+", default=[50_000, 500_000])
    two.add_argument("--dimension", type=int, default=768)
    two.add_argument("--neighbors", type=int, default=500, help="records of each group")
    two.add_argument("--num-queries", type=int, default=512)
    two.add_argument("--bits", type=int, default=12)
    two.add_argument("--repeat", type=int, default=7)
    two.set_defaults(run=speed)
    for command in (one, two):
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--output", type=Path, default=None)
    commands.add_parser("report", help="write tables and plot into docs").set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
