"""Search for Ind-KNN's threshold and noise on labelled public data; the private records have no part in it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import check_table
from pl_privknn.labelers.ind_knn.algorithm import (
    PAPER_BANDWIDTH,
    PAPER_MIN_COUNT,
    Floats,
    IndKNNParameters,
    Kernel,
    PublicDensity,
    collect,
    count_active,
)
from pl_privknn.labelers.ind_knn.engine import unit_rows
from pl_privknn.privacy.noise import NoiseSource, SeededNoise
from pl_privknn.privacy.record_budgets import Conversion

#: The paper's grids (its appendix C); higher noise on top, which pays where queries are many and ε is small.
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))
SIGMAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.6)
NEIGHBORS = (30, 60, 125, 250, 500, 1000, 2000)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting and how well it did on the stand-in data.

    Attributes:
        settings: arguments for :class:`~pl_privknn.labelers.ind_knn.labeler.IndKNN`, beside ``epsilon`` and
            ``delta``.
        accuracy: share of right answers; noise-free in the first pass, mean over repetitions in the second.
        private: whether noise was added and budgets were kept.
    """

    settings: dict[str, Any]
    accuracy: float
    private: bool


def search_ind_knn(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    epsilon: float,
    delta: float,
    num_queries: int,
    num_records: int,
    kernel: Kernel = "cosine",
    bandwidth: float = PAPER_BANDWIDTH,
    conversion: Conversion = "gdp",
    by_density: bool = False,
    thresholds: Sequence[float] = THRESHOLDS,
    sigmas: Sequence[float] = SIGMAS,
    neighbors: Sequence[int] = NEIGHBORS,
    window: float = 0.05,
    window_step: float = 0.01,
    repeats: int = 1,
    seed: int = 0,
) -> list[Trial]:
    """Try settings on labelled **public** data, as the paper's appendix C does, but not on private records.

    The public examples are split into ``num_queries`` queries and a stand-in for the private table, of which
    each record counts as often as it takes to reach ``num_records``. First τ is swept without noise; then σ2
    and τ around the best one are swept with noise and budgets. With ``by_density`` the number of neighbours
    of :class:`~pl_privknn.labelers.ind_knn.algorithm.PublicDensity` takes the place of τ, and is swept with σ2 at
    once, since without noise fewer always look better.

    Args:
        features: public examples from the extractor that will be used, float, shape ``(p, d)``.
        labels: int64, shape ``(p,)``.
        num_classes: number of classes.
        epsilon: ε of the stream to come.
        delta: its δ.
        num_queries: how many queries it should last for; also how many examples play queries.
        num_records: about how many private records there are; a public constant.
        kernel: kernel.
        bandwidth: ν of the RBF kernel.
        conversion: how ε becomes a budget.
        by_density: search for density thresholds instead of a fixed one.
        thresholds: τ of the first pass.
        sigmas: σ2 of the second pass.
        neighbors: numbers of neighbours, with ``by_density``.
        window: how far from the best τ the second pass looks.
        window_step: in steps of this.
        repeats: runs of each setting with fresh noise.
        seed: of the split and of the trial noise, which protects nothing and need not.

    Returns:
        All trials of the last pass, best first.

    Raises:
        ValueError: unless there are more examples than queries, or for shapes and values that don't fit.
    """
    check_table(features, labels, num_classes)
    if len(labels) <= check_int("num_queries", num_queries):
        raise ValueError(
            f"features: {len(labels)} public examples for num_queries={num_queries} and a stand-in table; give "
            "more, or search for fewer queries"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    asked, table = order[:num_queries], order[num_queries:]
    unit = unit_rows(features)
    bench = Simulation(
        (unit[asked] @ unit[table].T).numpy(),
        labels[asked].numpy(),
        labels[table].numpy(),
        num_classes,
        max(1, round(check_int("num_records", num_records) / len(table))),
    )
    among = (unit[asked] @ unit.T).numpy() if by_density else np.empty((0, 0), np.float32)

    def trial(sigma2: float, threshold: float, density: PublicDensity | None) -> Trial:
        parameters = IndKNNParameters.for_epsilon(
            epsilon,
            delta,
            threshold=threshold,
            sigma2=sigma2,
            num_queries=num_queries,
            conversion=conversion,
            kernel=kernel,
            bandwidth=bandwidth,
            min_count=PAPER_MIN_COUNT if density is None else float(density.neighbors),
        )
        chosen = np.full(num_queries, threshold)
        settings: dict[str, Any] = {"threshold": threshold, "sigma2": sigma2, "num_queries": num_queries}
        settings["similarity"] = {"kernel": kernel, "bandwidth": bandwidth}
        settings["budgets"] = {"conversion": conversion}
        if density is not None:
            chosen = density.thresholds(parameters, among)
            settings["switches"] = {"density": dataclasses.asdict(density)}
        runs = [bench.private(parameters, chosen, SeededNoise(seed + run)) for run in range(repeats)]
        return Trial(settings, float(np.mean(runs)), private=True)

    if by_density:
        least = min(thresholds)
        trials = [
            trial(sigma2, least, PublicDensity(count, num_records))
            for count, sigma2 in itertools.product(neighbors, sigmas)
            if count <= num_records
        ]
    else:
        plain = IndKNNParameters(0.5, 1.0, 1.0, 1.0, kernel, bandwidth)
        best = max(thresholds, key=lambda threshold: bench.noise_free(plain, threshold))
        steps = np.arange(-round(window / window_step), round(window / window_step) + 1)
        around = np.round(best + window_step * steps, 6)
        trials = [
            trial(sigma2, float(threshold), None)
            for threshold, sigma2 in itertools.product(around[(around > 0) & (around < 1)], sigmas)
        ]
    return sorted(trials, key=lambda trial: -trial.accuracy)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Streams of answers for which all similarities are known beforehand; for trials, not for releases.

    Attributes:
        similarities: float32 cosines of queries and records, shape ``(T, n)``.
        truth: int64 classes of the queries, shape ``(T,)``.
        labels: int64 classes of the records, shape ``(n,)``.
        num_classes: number of classes.
        copies: how often each record counts.
    """

    similarities: NDArray[np.float32]
    truth: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_classes: int
    copies: int = 1

    def noise_free(self, parameters: IndKNNParameters, threshold: float) -> float:
        """Accuracy of the kernel votes; a query with no neighbours, or with a tie, is a guess."""
        right = 0.0
        for similarities, truth in zip(self.similarities, self.truth, strict=True):
            near, kappa = parameters.neighbors(similarities, threshold)
            votes = np.bincount(self.labels[near], kappa, self.num_classes)
            winners = votes >= votes.max()
            right += float(winners[truth]) / float(winners.sum())
        return right / len(self.truth)

    def private(self, parameters: IndKNNParameters, thresholds: Floats, noise: NoiseSource) -> float:
        """Accuracy of one stream with noise and budgets."""
        draws: Floats = noise.normal((len(self.truth), 1 + self.num_classes), 1.0).numpy()
        left = np.full(len(self.labels), float(parameters.quanta(np.array(parameters.budget))))
        right = 0
        for query, similarities in enumerate(self.similarities):
            near, kappa = parameters.neighbors(similarities, float(thresholds[query]))
            counted = self.copies * count_active(parameters, near, left) + parameters.sigma1 * draws[query, 0]
            count = max(counted, parameters.min_count)
            votes = self.copies * collect(parameters, near, kappa, self.labels, left, count, self.num_classes)
            noisy = votes + parameters.sigma2 * np.sqrt(count) * draws[query, 1:]
            right += int(noisy.argmax()) == int(self.truth[query])
        return right / len(self.truth)
