"""Private-kNN with every setting of a grid, over ranked lists that are made once."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.ind_knn_features import CLASSES, DELTA, LOG, Tables
from pl_privknn.labelers.private_knn import KNN_VOTES_L2
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.neighbors.poisson import RankedLists
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise

#: Wider than the paper's Table 4 on both sides.
RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
COUNTS = (20, 30, 60, 100, 200, 300, 500)
LONGEST_LIST = 6000
DRAWS = 5


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Records from nearest to farthest for every query of the pool: int32, shape ``(pool, LONGEST_LIST)``."""

    name: str
    queries: Tensor
    table: Tensor
    indices: Tensor

    @classmethod
    def of(cls, tables: dict[str, Tables], similarities: dict[str, NDArray[np.float32]]) -> list[Ranking]:
        """By Euclidean distance of the plain features, and of unit vectors in every view."""
        plain = tables["plain"]
        lengths = torch.linalg.vector_norm(plain.private.features, dim=1).numpy()
        queries = torch.linalg.vector_norm(plain.pool.features, dim=1).numpy()
        found = [
            cls(
                "plain, Euclidean",
                plain.pool.features,
                plain.private.features,
                # −‖x − q‖² + ‖q‖² = 2 cos ‖x‖‖q‖ − ‖x‖²
                _ranked(similarities["plain"], 2 * lengths, queries, lengths**2),
            )
        ]
        for view, table in tables.items():
            unit = table.unit()
            found.append(
                cls(
                    f"{view}, unit length",
                    unit.pool.features,
                    unit.private.features,
                    _ranked(similarities[view]),
                )
            )
        return found


def _ranked(
    similarities: NDArray[np.float32],
    factors: NDArray[np.float32] | None = None,
    query_factors: NDArray[np.float32] | None = None,
    offsets: NDArray[np.float32] | None = None,
) -> Tensor:
    indices = np.empty((len(similarities), LONGEST_LIST), np.int32)
    for row, scores in enumerate(similarities):
        if factors is not None and query_factors is not None and offsets is not None:
            scores = scores * (factors * query_factors[row]) - offsets
        near = np.argpartition(-scores, LONGEST_LIST)[:LONGEST_LIST]
        indices[row] = near[np.argsort(-scores[near], kind="stable")]
    return torch.from_numpy(indices)


@functools.cache
def calibrated(rate: float, epsilon: float, count: int) -> float:
    """The least σ for ``count`` answers, by the smaller of the RDP and PLD totals (add/remove)."""
    start = 100 * rate * math.sqrt(count / 500) / epsilon
    found = calibrate(
        lambda sigma: [Charge(Gaussian(sigma, KNN_VOTES_L2, rate), count)],
        Parameter("sigma", start=start, low=0.1, high=1e4, rising=False),
        epsilon=epsilon,
        delta=DELTA,
        adjacency="add_remove",
        exact=False,
    )
    return found.value


def best_private_knn(
    options: argparse.Namespace, plain: Tables, rankings: list[Ranking], asked: dict[tuple[int, int], Tensor]
) -> list[dict[str, Any]]:
    """The most accurate setting of the grid for each number of queries and ε, chosen on the scored queries."""
    best: dict[tuple[int, float], dict[str, Any]] = {}
    for ranking, rate, k in itertools.product(rankings, RATES, COUNTS):
        neighbors = PoissonNeighbors(ranking.table, plain.private.labels, CLASSES, k, rate)
        if neighbors.list_length > LONGEST_LIST:
            continue
        for queries in options.queries:
            scores = _scores(
                options, plain, ranking, neighbors, [asked[queries, s] for s in range(options.seeds)]
            )
            for epsilon, accuracies in scores.items():
                mean = statistics.mean(accuracies)
                if (queries, epsilon) in best and mean <= best[queries, epsilon]["mean"]:
                    continue
                best[queries, epsilon] = {
                    "queries": queries,
                    "epsilon": epsilon,
                    "method": "private_knn",
                    "accounting": "smaller of rdp and pld",
                    "accuracies": accuracies,
                    "mean": mean,
                    "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
                    "draws": DRAWS,
                    "settings": {
                        "ranking": ranking.name,
                        "k": k,
                        "sampling_rate": rate,
                        "sigma": calibrated(rate, epsilon, queries),
                    },
                }
    for row in best.values():
        LOG.print(row)
    return list(best.values())


def _scores(
    options: argparse.Namespace,
    plain: Tables,
    ranking: Ranking,
    neighbors: PoissonNeighbors,
    sets: list[Tensor],
) -> dict[float, list[float]]:
    """Accuracy of each set of queries at each ε; what ``PrivateKNN.label`` does, with one search for all."""
    scores: dict[float, list[float]] = {epsilon: [] for epsilon in options.epsilons}
    for chosen in sets:
        truth = plain.pool.labels[chosen]
        ranked = RankedLists(ranking.queries[chosen], ranking.indices[chosen, : neighbors.list_length])
        right: dict[float, list[float]] = {epsilon: [] for epsilon in options.epsilons}
        for draw in range(DRAWS):
            noise = SeededNoise(draw)
            votes = neighbors.votes(ranked, noise.bernoulli)  # a fresh sample; each ε adds noise of its own
            for epsilon in options.epsilons:
                sigma = calibrated(neighbors.sampling_rate, epsilon, len(chosen))
                mechanism = Gaussian(sigma, KNN_VOTES_L2, neighbors.sampling_rate)
                released = mechanism.argmax(votes, noise.stream("answers", str(epsilon)))
                right[epsilon].append(float((released == truth).double().mean()))
        for epsilon, runs in right.items():
            scores[epsilon].append(statistics.mean(runs))
    return scores
