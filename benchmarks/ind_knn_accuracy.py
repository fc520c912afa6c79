"""Ind-KNN's accuracy on Fashion-MNIST beside Private-kNN's.

The 60,000 training images are private. Of the test file one half is the pool of queries; the other half plays
labelled public data: on it alone Ind-KNN's settings are searched for (kind of features, threshold or number of
neighbours, σ2), thresholds by density are taken, and principal components are learned. Private-kNN gets the best of a
grid **in hindsight**, on the very queries that are scored; so the comparison favours it. Both answer all queries.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from benchmarks.record import Measured, entries
from pl_privknn.comparison.marks import SEEDED, footnotes, guarantee_of, mark, stated
from pl_privknn.comparison.plot import explain
from pl_privknn.datamodules import FashionMNISTDataModule
from pl_privknn.features import HOG, TimmFeatures
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.labelers.ind_knn import IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn.algorithm import PAPER_MIN_COUNT, collect, count_active
from pl_privknn.labelers.ind_knn.engine import unit_rows
from pl_privknn.labelers.private_knn import KNN_VOTES_L2
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest
from pl_privknn.privacy.noise import SeededNoise

DELTA, CLASSES, RECORDS, COMPONENTS = 1e-5, 10, 60_000, 64
FEATURES = {"hog": "HOG", "efficientnet": "EfficientNet-Lite0"}
METHODS = {
    "density": "Ind-KNN, density",
    "fixed": "Ind-KNN, one τ",
    "private_knn": "Private-kNN, in hindsight",
}
VIEWS = ("plain", "components")
SIGMAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6)
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))
NEIGHBORS = (30, 60, 125, 250, 500, 1000, 2000)
#: Of Private-kNN; wider than the paper's Table 4 on both sides.
RATES, COUNTS, DRAWS = (0.01, 0.02, 0.05, 0.1, 0.2), (20, 30, 60, 100, 200, 300, 500), 5
LOG = Console(stderr=True)
Floats = NDArray[np.float64]
Neighborhood = tuple[NDArray[np.intp], Floats]


@dataclasses.dataclass(frozen=True)
class Part:
    """Unit features and true classes of the images of one role: float32 ``(n, d)``, int64 ``(n,)``."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, other: Part) -> NDArray[np.float32]:
        """Cosines with another role's images."""
        return (self.features @ other.features.T).numpy()


@dataclasses.dataclass(frozen=True)
class Tables:
    """The three roles: ``private``, ``pool`` of queries, and labelled ``public`` images."""

    private: Part
    pool: Part
    public: Part


def load(options: argparse.Namespace) -> dict[str, Tables]:
    """Features of all images, plain and as levelled components learned from the public ones alone."""
    data = FashionMNISTDataModule(root=options.root)
    data.setup("fit")
    extractor: Any = HOG()
    if options.features != "hog":
        extractor = TimmFeatures(weights=options.weights, image_size=options.image_size)
    roles = [
        (data.private, data.private.labels),
        (data.public, data.public.truth),
        (data.test, data.test.labels),
    ]
    plain = [
        torch.cat([extractor(images.images(part)) for part in torch.arange(len(images)).split(1024)])
        for images, _ in roles
    ]
    whitening = PublicWhitening(plain[2].shape[1], COMPONENTS).fit(plain[2])
    views = {"plain": plain, "components": [whitening(part) for part in plain]}
    return {
        view: Tables(*(Part(unit_rows(part), role[1]) for part, role in zip(parts, roles, strict=True)))
        for view, parts in views.items()
    }


@dataclasses.dataclass(frozen=True)
class Setting:
    """Of one method: kind of features, threshold, neighbours that density aims at (None: one τ), noise of votes."""

    view: str
    threshold: float
    neighbors: int | None
    sigma2: float

    def parameters(self, epsilon: float, queries: int) -> IndKNNParameters:
        """The stream with this setting."""
        return IndKNNParameters.for_epsilon(
            epsilon,
            DELTA,
            threshold=self.threshold,
            sigma2=self.sigma2,
            num_queries=queries,
            min_count=PAPER_MIN_COUNT if self.neighbors is None else float(self.neighbors),
        )

    def near(
        self, parameters: IndKNNParameters, private: NDArray[np.float32], public: NDArray[np.float32]
    ) -> list[Neighborhood]:
        """Neighbours of each query among the records, whose cosines are given; budgets have no part in them."""
        thresholds = np.full(len(private), self.threshold)
        if self.neighbors is not None:
            thresholds = PublicDensity(self.neighbors, RECORDS).thresholds(parameters, public)
        pairs = zip(private, thresholds, strict=True)
        return [parameters.neighbors(row, float(threshold)) for row, threshold in pairs]


def stream(
    parameters: IndKNNParameters,
    near: list[Neighborhood],
    labels: NDArray[np.int64],
    counting: Floats,
    copies: int = 1,
) -> tuple[Floats, Floats]:
    """One stream by Algorithm 3, up to the noise of the votes, on which budgets don't depend.

    Args:
        parameters: public constants.
        near: neighbours of each query.
        labels: of all records.
        counting: standard normal numbers for the counts, shape ``(T,)``.
        copies: how often each record counts, where few public ones stand for many.

    Returns:
        Votes, shape ``(T, c)``, and the deviation of their noise, shape ``(T,)``.
    """
    left = np.full(len(labels), float(parameters.quanta(np.array(parameters.budget))))
    votes, deviations = np.empty((len(near), CLASSES)), np.empty(len(near))
    for query, (rows, kappa) in enumerate(near):
        noisy = copies * count_active(parameters, rows, left) + parameters.sigma1 * counting[query]
        count = max(noisy, parameters.min_count)
        votes[query] = copies * collect(parameters, rows, kappa, labels, left, count, CLASSES)
        deviations[query] = parameters.sigma2 * math.sqrt(count)
    return votes, deviations


def share_right(found: tuple[Floats, Floats], truth: Tensor, normals: Tensor) -> float:
    """Accuracy of a stream over draws of the votes' noise: standard normal ``(draws, T, c)``."""
    votes, deviations = map(torch.from_numpy, found)
    return float(((votes + deviations[:, None] * normals).argmax(dim=2) == truth).double().mean())


def search(tables: dict[str, Tables], method: str, queries: int, epsilon: float, splits: int) -> Setting:
    """The best setting on the public images: mean over splits of them into queries and records."""
    scores: dict[Setting, list[float]] = {}
    for view, split in itertools.product(VIEWS, range(splits)):
        public = tables[view].public
        order = torch.randperm(len(public), generator=torch.Generator().manual_seed(split))
        asked, records = order[:queries], order[queries:]
        cosines = (public.features[asked] @ public.features.T).numpy()
        draws = SeededNoise(split).normal((queries, 1 + CLASSES), 1.0)
        levels: Any = [(min(THRESHOLDS), count) for count in NEIGHBORS]
        if method == "fixed":
            levels = [(threshold, None) for threshold in THRESHOLDS]
        for threshold, neighbors in levels:
            for sigma2 in SIGMAS:
                setting = Setting(view, threshold, neighbors, sigma2)
                parameters = setting.parameters(epsilon, queries)
                near = setting.near(parameters, cosines[:, records.numpy()], cosines)
                found = stream(
                    parameters,
                    near,
                    public.labels[records].numpy(),
                    draws[:, 0].numpy(),
                    RECORDS // len(records),
                )
                right = share_right(found, public.labels[asked], draws[None, :, 1:])
                scores.setdefault(setting, []).append(right)
    best = max(scores, key=lambda setting: statistics.mean(scores[setting]))
    LOG.print(f"{queries} queries, ε={epsilon}: {best}")
    return best


def ind_knn_row(
    options: argparse.Namespace, tables: dict[str, Tables], method: str, queries: int, epsilon: float
) -> dict[str, Any]:
    """Accuracy of the setting that the search finds, a mean over streams and draws for each set of queries."""
    setting = search(tables, method, queries, epsilon, options.splits)
    parameters, table = setting.parameters(epsilon, queries), tables[setting.view]
    means = []
    for seed in range(options.seeds):
        asked = _asked(len(table.pool), queries, seed)
        chosen = Part(table.pool.features[asked], table.pool.labels[asked])
        near = setting.near(parameters, chosen.to(table.private), chosen.to(table.public))
        runs = []
        for number in range(options.streams):
            noise = SeededNoise(seed * options.streams + number)
            counting = noise.normal((queries,), 1.0).numpy()
            found = stream(parameters, near, table.private.labels.numpy(), counting)
            normals = noise.normal((options.draws, queries, CLASSES), 1.0)
            runs.append(share_right(found, chosen.labels, normals))
        means.append(statistics.mean(runs))
    return _row(queries, epsilon, method, "gdp", means, dataclasses.asdict(setting))


@functools.cache
def calibrated(rate: float, epsilon: float, count: int) -> float:
    """The least σ for ``count`` answers, by the smaller of the RDP and PLD totals (add/remove)."""
    start = 100 * rate * math.sqrt(count / 500) / epsilon
    return calibrate(
        lambda sigma: [Charge(Gaussian(sigma, KNN_VOTES_L2, rate), count)],
        Parameter("sigma", start=start, low=0.1, high=1e4, rising=False),
        epsilon=epsilon,
        delta=DELTA,
        exact=False,
    ).value


def private_knn_row(
    options: argparse.Namespace, tables: dict[str, Tables], queries: int, epsilon: float
) -> dict[str, Any]:
    """The most accurate setting of Private-kNN's grid, chosen on the scored queries."""
    best: dict[str, Any] = {"mean": 0.0}
    for view, rate, k in itertools.product(VIEWS, RATES, COUNTS):
        table, sigma = tables[view], calibrated(rate, epsilon, queries)
        neighbors = PoissonNeighbors(table.private.features, table.private.labels, CLASSES, k, rate)
        means = []
        for seed in range(options.seeds):
            asked = _asked(len(table.pool), queries, seed)
            ranked = neighbors.rank(table.pool.features[asked])
            right = []
            for draw in range(DRAWS):
                noise = SeededNoise(draw)
                released = Gaussian(sigma, KNN_VOTES_L2, rate).argmax(
                    neighbors.votes(ranked, noise.bernoulli), noise.stream("answers")
                )
                right.append(float((released == table.pool.labels[asked]).double().mean()))
            means.append(statistics.mean(right))
        if statistics.mean(means) > best["mean"]:
            settings = {"view": view, "k": k, "sampling_rate": rate, "sigma": sigma}
            best = _row(queries, epsilon, "private_knn", "smaller of rdp and pld", means, settings)
    return best


def _asked(pool: int, queries: int, seed: int) -> Tensor:
    return torch.randperm(pool, generator=torch.Generator().manual_seed(seed))[:queries]


def _row(
    queries: int, epsilon: float, method: str, accounting: str, means: list[float], settings: dict[str, Any]
) -> dict[str, Any]:
    return {
        "queries": queries,
        "epsilon": epsilon,
        "method": method,
        "accounting": accounting,
        "accuracies": means,
        "mean": statistics.mean(means),
        "spread": statistics.stdev(means) if len(means) > 1 else 0.0,
        "settings": settings,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--features", choices=tuple(FEATURES), default="hog")
    parser.add_argument("--root", default="data", help="folder of Fashion-MNIST's four files")
    parser.add_argument("--weights", default=None, help="file of EfficientNet-Lite0's weights")
    parser.add_argument("--image-size", type=int, default=160, help="side to which images are resized for it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--queries", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3, help="sets of queries")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--draws", type=int, default=100, help="of the votes' noise in each stream")
    parser.add_argument("--splits", type=int, default=3, help="of the public images, in the search")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One kind of features, a part of its own."""
    torch.set_num_threads(options.threads)
    tables, rows = load(options), []
    for queries, epsilon in itertools.product(options.queries, options.epsilons):
        rows += [ind_knn_row(options, tables, method, queries, epsilon) for method in ("density", "fixed")]
        rows.append(private_knn_row(options, tables, queries, epsilon))
    found = {"delta": DELTA, "adjacency": "add_remove", **stated(SEEDED), "rows": rows}
    yield Measured(found, seeds=list(range(options.seeds)), part=options.features)


# ---------------------------------------------------------------------- the page


def stored_rows() -> dict[tuple[str, int, float], dict[str, dict[str, Any]]]:
    """Stored rows by features, queries and ε, in the order of the table, and of each by method."""
    found: dict[tuple[str, int, float], dict[str, dict[str, Any]]] = {}
    for features in FEATURES:
        for row in entries("ind_knn_accuracy")[features]["results"]["rows"]:
            if row["accounting"] in ("gdp", "smaller of rdp and pld"):
                found.setdefault((features, row["queries"], row["epsilon"]), {})[row["method"]] = row
    return {case: found[case] for case in sorted(found, key=lambda case: (*FEATURES,).index(case[0]))}


def guarantee() -> Guarantee:
    """How far the ε of the accuracies holds."""
    return weakest(guarantee_of(entry["results"]) for entry in entries("ind_knn_accuracy").values())


def accuracy_table() -> str:
    """Accuracy of the three methods."""
    lines = [
        f"| features | queries | ε | {' | '.join(METHODS.values())} |",
        "|---" * (3 + len(METHODS)) + "|",
    ]
    for (features, queries, epsilon), rows in stored_rows().items():
        cells = [f"{rows[method]['mean']:.3f} ± {rows[method]['spread']:.3f}" for method in METHODS]
        lines.append(
            f"| {FEATURES[features]} | {queries:,} | {epsilon:g}{mark(guarantee())} | {' | '.join(cells)} |"
        )
    return "\n".join([*lines, *(line for note in footnotes([("", guarantee())]) for line in ("", note))])


def figure() -> Any:
    """Accuracy against ε, one panel for each features and number of queries."""
    from matplotlib import pyplot

    rows = stored_rows()
    panels = list(dict.fromkeys(case[:2] for case in rows))
    drawn, axes = pyplot.subplots(
        2, len(panels) // 2, figsize=(8, 6.5), sharex=True, sharey=True, layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels, strict=True):
        for (method, name), marker in zip(METHODS.items(), "os^", strict=True):
            own = {case[2]: row[method] for case, row in rows.items() if case[:2] == panel}
            means, spreads = ([row[value] for row in own.values()] for value in ("mean", "spread"))
            axis.errorbar(list(own), means, spreads, marker=marker, label=name, capsize=3)
        axis.set_title(f"{FEATURES[panel[0]]}, {panel[1]:,} queries", fontsize=10)
        axis.set_xscale("log")
        axis.set_xticks(list(own), [f"{epsilon:g}" for epsilon in own])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel(f"ε{mark(guarantee())} at δ = 1e-5 (add/remove)")
    for row in axes:
        row[0].set_ylabel("accuracy of the answers")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
    explain(drawn, footnotes([("", guarantee())]))
    return drawn
