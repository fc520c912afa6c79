"""Ind-KNN's accuracy on Fashion-MNIST beside Private-kNN's.

Similarities of queries and records are computed once for each kind of features and serve every method, setting,
draw of noise and ε. Ind-KNN's settings, plain features or public principal components among them, are searched for
on the labelled public images alone. Private-kNN gets the best of a grid **in hindsight**, on the very queries that
are scored; so the comparison favours it (ind_knn_rival.py). Both answer all queries.

The three conversions from ε to a budget are compared on the same queries and the same standard normal draws; each
takes, again in hindsight, the best of a few multiples of the σ2 that was searched for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.ind_knn_features import CLASSES, DELTA, LOG, RECORDS, Tables, add_feature_options, load
from benchmarks.ind_knn_rival import Ranking, best_private_knn
from benchmarks.ind_knn_search import search_ind_knn
from benchmarks.record import Measured
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.labelers.ind_knn.algorithm import PAPER_MIN_COUNT, IndKNNParameters, PublicDensity, ask
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.record_budgets import CONVERSIONS, Conversion

METHODS = ("density", "fixed")
VIEWS = ("plain", "components")
SIGMAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6)
#: Multiples of the σ2 that was found, for the comparison of conversions.
MULTIPLES = (0.5, 0.7, 0.85, 1.0, 1.25)
Neighborhood = tuple[NDArray[np.intp], NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class Similarities:
    """Cosines, once for all: float32, ``private`` of shape ``(pool, n)``, ``public`` of shape ``(pool, r)``."""

    private: NDArray[np.float32]
    public: NDArray[np.float32]

    @classmethod
    def of(cls, tables: Tables) -> Similarities:
        """Two matrix products of unit vectors."""
        unit = tables.unit()
        return cls(
            *((unit.pool.features @ part.features.T).numpy() for part in (unit.private, unit.public)),
        )


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the search found for one method, number of queries and ε."""

    method: str
    view: str
    threshold: float
    neighbors: int | None
    sigma2: float
    public_accuracy: float

    def parameters(
        self, epsilon: float, queries: int, conversion: Conversion, multiple: float = 1.0
    ) -> IndKNNParameters:
        """The stream with this setting; σ2 is such that a vote costs the same share of every budget."""
        min_count = PAPER_MIN_COUNT if self.neighbors is None else float(self.neighbors)

        def made(conversion: Conversion, sigma2: float) -> IndKNNParameters:
            return IndKNNParameters.for_epsilon(
                epsilon,
                DELTA,
                threshold=self.threshold,
                sigma2=sigma2,
                num_queries=queries,
                conversion=conversion,
                min_count=min_count,
            )

        share = made("gdp", 1.0).budget / made(conversion, 1.0).budget
        return made(conversion, self.sigma2 * multiple * math.sqrt(share))


def search(tables: dict[str, Tables], method: str, queries: int, epsilon: float, repeats: int) -> Setting:
    """The best setting on the public images: mean over splits of them into queries and records."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for view, split in itertools.product(VIEWS, range(repeats)):
        for trial in search_ind_knn(
            tables[view].public.features,
            tables[view].public.labels,
            CLASSES,
            epsilon=epsilon,
            delta=DELTA,
            num_queries=queries,
            num_records=RECORDS,
            by_density=method == "density",
            sigmas=SIGMAS,
            window=0.3,
            window_step=0.05,
            seed=split,
        ):
            given = trial.settings
            neighbors = given.get("switches", {}).get("density", {}).get("neighbors")
            found[view, given["threshold"], neighbors, given["sigma2"]].append(trial.accuracy)
    # Splits may look around different thresholds; what only some of them tried is left out.
    means = {key: statistics.mean(runs) for key, runs in found.items() if len(runs) == repeats}
    best = max(means, key=lambda key: means[key])
    setting = Setting(method, *best, means[best])
    LOG.print(f"{queries} queries, ε={epsilon}: {setting}")
    return setting


def neighborhoods(
    setting: Setting, known: Similarities, asked: Tensor, parameters: IndKNNParameters
) -> list[Neighborhood]:
    """Private neighbours of each query; neither budgets nor noise have a part in them."""
    thresholds = np.full(len(asked), setting.threshold)
    if setting.neighbors is not None:
        density = PublicDensity(setting.neighbors, RECORDS)
        thresholds = density.thresholds(parameters, known.public[asked.numpy()])
    return [
        parameters.neighbors(known.private[row], float(threshold))
        for row, threshold in zip(asked.tolist(), thresholds, strict=True)
    ]


def stream(
    parameters: IndKNNParameters,
    near: list[Neighborhood],
    labels: NDArray[np.int64],
    counting: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One stream by Algorithm 3, up to the noise of the votes, on which budgets don't depend.

    Args:
        parameters: public constants.
        near: private neighbours of each query.
        labels: of all private records.
        counting: standard normal numbers for the counts, shape ``(T,)``.

    Returns:
        Votes, shape ``(T, c)``, and the deviation of their noise, shape ``(T,)``.
    """
    left = np.full(len(labels), float(parameters.quanta(np.array(parameters.budget))))
    votes, deviations, nothing = np.empty((len(near), CLASSES)), np.empty(len(near)), np.zeros(CLASSES)
    draws = np.zeros((len(near), 1 + CLASSES))
    draws[:, 0] = counting
    for query, (rows, kappa) in enumerate(near):
        released = ask(parameters, rows, kappa, labels, left, nothing, 0, draws[query])
        votes[query], deviations[query] = released.noisy, parameters.sigma2 * math.sqrt(released.count)
    return votes, deviations


def share_right(
    votes: NDArray[np.float64], deviations: NDArray[np.float64], truth: NDArray[np.int64], normals: Tensor
) -> float:
    """Accuracy over draws of the votes' noise: standard normal ``normals`` of shape ``(draws, T, c)``."""
    noisy = torch.from_numpy(votes) + torch.from_numpy(deviations)[:, None] * normals
    return float((noisy.argmax(dim=2) == torch.from_numpy(truth)).double().mean())


def ind_knn_rows(
    options: argparse.Namespace,
    tables: dict[str, Tables],
    known: dict[str, Similarities],
    asked: dict[tuple[int, int], Tensor],
) -> Iterator[dict[str, Any]]:
    """One row for each method, number of queries, ε and conversion."""
    labels = tables["plain"].private.labels.numpy()
    truths = tables["plain"].pool.labels
    for queries, method, epsilon in itertools.product(options.queries, METHODS, options.epsilons):
        started = time.perf_counter()
        setting = search(tables, method, queries, epsilon, options.splits)
        # Fewer queries, more streams: either way as many noisy answers.
        streams = max(1, round(options.streams * max(options.queries) / queries))
        runs: dict[tuple[Conversion, float], NDArray[np.float64]] = {
            key: np.empty((options.seeds, streams)) for key in itertools.product(CONVERSIONS, MULTIPLES)
        }
        for seed in range(options.seeds):
            chosen = asked[queries, seed]
            truth = truths[chosen].numpy()
            near = neighborhoods(
                setting, known[setting.view], chosen, setting.parameters(epsilon, queries, "gdp")
            )
            for number in range(streams):
                noise = SeededNoise(seed * streams + number)
                counting = noise.normal((queries,), 1.0).numpy()
                normals = noise.normal((options.draws, queries, CLASSES), 1.0)
                for (conversion, multiple), scores in runs.items():
                    parameters = setting.parameters(epsilon, queries, conversion, multiple)
                    found = stream(parameters, near, labels, counting)
                    scores[seed, number] = share_right(*found, truth, normals)
        yield from _conversions(setting, runs, {"queries": queries, "epsilon": epsilon})
        LOG.print(f"{time.perf_counter() - started:.0f} s")


def _conversions(
    setting: Setting, runs: dict[tuple[Conversion, float], NDArray[np.float64]], case: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    best = {
        conversion: max(MULTIPLES, key=lambda multiple, c=conversion: runs[c, multiple].mean())
        for conversion in CONVERSIONS
    }
    for conversion in CONVERSIONS:
        scores, tuned = runs[conversion, 1.0], runs[conversion, best[conversion]]
        # At the other conversion's best multiple: its own could only make Gaussian DP's gain larger.
        gains = runs["gdp", best[conversion]] - tuned
        yield {
            **case,
            "method": setting.method,
            "accounting": conversion,
            **summary(scores),
            "settings": dataclasses.asdict(setting),
            "in_hindsight": {
                "multiple": best[conversion],
                **summary(tuned),
                # Same queries, same noise: the gain's own scatter over streams, not that over queries.
                "gdp_gain": float(gains.mean()),
                "gdp_gain_error": float(gains.std(ddof=1) / math.sqrt(gains.size)),
            },
        }


def summary(scores: NDArray[np.float64]) -> dict[str, Any]:
    """Means of the seeds, over streams, and their mean and deviation. Scores: ``(seeds, streams)``."""
    means = scores.mean(axis=1).tolist()
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    return {
        "accuracies": means,
        "mean": statistics.mean(means),
        "spread": spread,
        "streams": int(scores.shape[1]),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    add_feature_options(parser)
    parser.add_argument("--queries", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3, help="sets of queries")
    parser.add_argument("--streams", type=int, default=8, help="for the most queries; more for fewer")
    parser.add_argument("--draws", type=int, default=100, help="of the votes' noise in each stream")
    parser.add_argument("--splits", type=int, default=3, help="of the public images, in the search")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One kind of features, a part of its own."""
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    plain = load(options)
    tables = {view: plain.seen_as(view) for view in VIEWS}
    known = {view: Similarities.of(table) for view, table in tables.items()}
    LOG.print(f"similarities: {time.perf_counter() - started:.0f} s")
    asked = {
        (queries, seed): torch.randperm(len(plain.pool), generator=torch.Generator().manual_seed(seed))[
            :queries
        ]
        for queries, seed in itertools.product(options.queries, range(options.seeds))
    }
    rows = list(ind_knn_rows(options, tables, known, asked))
    rankings = Ranking.of(tables, {view: sim.private for view, sim in known.items()})
    rows += best_private_knn(options, plain, rankings, asked)
    for row in rows:
        row["features"] = options.features
    seconds = time.perf_counter() - started
    found = {"delta": DELTA, "adjacency": "add_remove", **stated(SEEDED), "rows": rows, "seconds": seconds}
    yield Measured(found, seeds=list(range(options.seeds)), part=options.features)
