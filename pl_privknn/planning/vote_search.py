"""The best settings of a teacher that counts votes, found on public records that stand in for private ones.

For each setting the noise follows from the target ε. What it does is tried: neighbours of the stand-in vote, as often
as so many records would, the planned mechanisms answer, and a linear model learns from the answers. Queries are the
means of public clusters, and public examples mix the noisy counts around them. Nothing private is read, so nothing is
charged. How far votes reach is kept: k neighbours among n sampled records reach as far as those among the stand-in's
that are the same share of it.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int
from pl_privknn.callbacks.selection import ClusterSelection, PublicPool, Selection, spread_scores
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import Screening
from pl_privknn.planning.makers import noise
from pl_privknn.planning.options import SEARCHED
from pl_privknn.planning.plan import Plan
from pl_privknn.planning.planner import plan
from pl_privknn.privacy.mechanisms import AdditiveNoise
from pl_privknn.privacy.noise import SeededNoise

# Neighbours, sampling rates, numbers of queries of Private-kNN; clusters of public examples of reverse kNN.
_NEIGHBORS = (20, 50, 100, 200, 400)
_RATES = (0.05, 0.15, 0.4)
_QUERIES = (50, 100, 200, 400)
_CLUSTERS = (20, 40, 80, 160, 320)
_SEEDS = 3
# How the search asks, and the configuration that it writes.
_SELECTION: dict[str, Any] = {"ask": "means", "spread": "kernel", "bandwidth": 0.45}
# How many of the best settings are tried with a screening too, and the answers that it is planned for.
_SCREENED, _ANSWERED = 2, 0.8


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """Public records with known classes: features float ``(n, d)``, classes int64 ``(n,)``."""

    private: Tensor
    private_labels: Tensor
    public: Tensor
    public_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclasses.dataclass(frozen=True)
class Found:
    """A setting and what it did on the stand-in.

    Attributes:
        settings: options of the plan.
        plan: with the noise for the target ε.
        answers: of the queries that were asked.
        labels: share of the public examples' labels that are right.
        student: test accuracy of a linear model that learned from the answers.
    """

    settings: dict[str, Any]
    plan: Plan
    answers: float
    labels: float
    student: float

    @property
    def score(self) -> float:
        """What settings are ranked by: the mean of both shares, each of some hundred examples of a few seeds."""
        return (self.labels + self.student) / 2


def nearest_votes(queries: Tensor, private: Tensor, labels: Tensor) -> Tensor:
    """Votes of the k nearest for each k, int64 ``(queries, k, classes)``."""
    order = torch.cdist(queries, private).argsort(1)
    return torch.nn.functional.one_hot(labels[order], int(labels.max()) + 1).cumsum(1)


@functools.cache
def digits() -> StandIn:
    """scikit-learn's digits with HOG features: the stand-in that is always at hand."""
    data, extract = DigitsDataModule(), HOG()
    parts = []
    for part in (data.load_private(), data.load_public(), data.load_test()):
        images = part.store.read(torch.arange(len(part)))
        parts.append(extract(images.float() / 255 if images.dtype == torch.uint8 else images))
    truth = data.load_public().truth
    assert truth is not None
    return StandIn(parts[0], data.load_private().labels, parts[1], truth, parts[2], data.load_test().labels)


def search_settings(
    teacher: str,
    *,
    epsilon: float,
    delta: float,
    records: int,
    public: int,
    num_classes: int = 10,
    stand_in: StandIn | None = None,
) -> list[Found]:
    """Try settings of a teacher at a target ε, best first.

    Args:
        teacher: one of :data:`~pl_privknn.planning.options.SEARCHED`.
        epsilon: target ε.
        delta: target δ.
        records: number of private records, as it may be told to anybody.
        public: number of public examples.
        num_classes: number of classes.
        stand_in: public records of a similar kind; :func:`digits` by default.

    Raises:
        ValueError: for arguments out of range.
    """
    check_choice("teacher", teacher, SEARCHED)
    records, public = check_int("records", records, 10), check_int("public", public, 10)
    data = digits() if stand_in is None else stand_in
    target: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "exact": False}
    if teacher == "reverse-knn":
        found = plan(teacher, rounds=1, k=1, **target)
        counts = [count for count in _CLUSTERS if count <= public // 2] or [max(2, public // 2)]
        tables = [
            Found(
                {"clusters": count, "k": 1},
                _of_clusters(found, count),
                *_try_clusters(data, found, count, public, records),
            )
            for count in counts
        ]
        return _best_first(tables)
    tried: list[tuple[dict[str, Any], Plan, tuple[float, float, float]]] = []
    for rate in _RATES:
        reach = [k for k in _NEIGHBORS if k * num_classes <= 2 * rate * records] or [_NEIGHBORS[0]]
        for queries in [count for count in _QUERIES if count <= public] or [public]:
            common: dict[str, Any] = {"sampling_rate": rate, "queries": queries, "num_classes": num_classes}
            base = plan("private-knn", k=reach[0], screening=False, **common, **target)
            for k in reach:  # without a screening the noise is the same for every k
                options = {
                    "k": k,
                    "screening": False,
                    "noise_scale": base.parameters["noise_scale"],
                    **common,
                }
                tried.append((options, base, _try_votes(data, base, k, rate, queries, public, records, None)))
    tried.sort(key=lambda item: -(item[2][1] + item[2][2]))
    for best_so_far, _, _ in tried[:_SCREENED]:
        more = {**best_so_far, "screening": True, "answer_share": _ANSWERED}
        del more["noise_scale"]
        base = plan("private-knn", **more, **target)
        screening = Screening(base.parameters["threshold"], base.parameters["screening_sigma"])
        done = _try_votes(
            data, base, more["k"], more["sampling_rate"], more["queries"], public, records, screening
        )
        tried.append((more, base, done))
    best, *rest = _best_first([Found(options, base, *done) for options, base, done in tried])
    settings = {name: value for name, value in best.settings.items() if name != "noise_scale"}
    best_plan = _of_clusters(plan("private-knn", **settings, **target), settings["queries"])
    return [dataclasses.replace(best, plan=best_plan), *rest]


def _of_clusters(found: Plan, clusters: int) -> Plan:
    """The plan with a configuration that asks about means of public clusters, as the search did.

    Noisy counts are released, whose price is that of the winner: a second round of no queries smooths them anew.
    """
    section = dict(found.fragment["labeling"])
    if "queries_per_round" in section:
        labeler = section["labeler"]
        section["labeler"] = {**labeler, "init_args": {**labeler["init_args"], "release_counts": True}}
    section |= {
        "rounds": 2,
        "queries_per_round": [clusters, 0],
        "selection": {
            "class_path": "pl_privknn.callbacks.selection.ClusterSelection",
            "init_args": _SELECTION,
        },
        "features": [{"class_path": "HOG"}, [{"class_path": "HOG"}, "student"]],
    }
    return dataclasses.replace(found, fragment={"labeling": section})


@functools.lru_cache(maxsize=64)
def _asked(data: StandIn, clusters: int, public: int, seed: int) -> tuple[Selection, Tensor]:
    """A round's queries and their features, with as many public examples a cluster as there will be."""
    groups = max(2, min(round(clusters * len(data.public) / public), len(data.public) // 2))
    nothing = torch.full((len(data.public),), -1)
    pool = PublicPool(nothing, nothing >= 0, lambda: data.public)
    selection = ClusterSelection(**_SELECTION)(pool, groups, torch.Generator().manual_seed(seed))
    return selection, selection.query_features(data.public)


@functools.lru_cache(maxsize=64)
def _votes_around(data: StandIn, clusters: int, public: int, seed: int) -> Tensor:
    return nearest_votes(_asked(data, clusters, public, seed)[1], data.private, data.private_labels)


def _try_votes(
    data: StandIn,
    found: Plan,
    k: int,
    rate: float,
    clusters: int,
    public: int,
    records: int,
    screening: Screening | None,
) -> tuple[float, float, float]:
    """Answers, share of right labels and accuracy, means over seeds."""
    reach = max(1, min(round(k / (rate * records) * len(data.private)), len(data.private) - 1))
    noise, results = _noise_of(found), []
    for seed in range(_SEEDS):
        generator, source = torch.Generator().manual_seed(seed), SeededNoise(seed)
        shares = _votes_around(data, clusters, public, seed)[:, reach - 1].double() / reach
        cast = torch.multinomial(shares, k, replacement=True, generator=generator)
        votes = torch.nn.functional.one_hot(cast, shares.shape[1]).sum(1).double()
        noisy = noise.add_noise(votes, source)
        if screening is not None:
            most = votes.max(1).values
            passed = most + source.normal(tuple(most.shape), screening.sigma) >= screening.threshold
            noisy[~passed] = torch.nan
        results.append(_learned(data, _asked(data, clusters, public, seed)[0], noisy, noise, clusters))
    return _mean(results)


def _try_clusters(
    data: StandIn, found: Plan, clusters: int, public: int, records: int
) -> tuple[float, float, float]:
    noise, results = _noise_of(found), []
    for seed in range(_SEEDS):
        selection, queries = _asked(data, clusters, public, seed)
        counts = torch.zeros(len(queries), int(data.private_labels.max()) + 1, dtype=torch.float64)
        own = torch.cdist(data.private, queries).argmin(1)
        counts.index_put_(
            (own, data.private_labels), torch.ones(len(own), dtype=torch.float64), accumulate=True
        )
        votes = (counts * (records / len(own)) * (len(queries) / clusters)).round()
        noisy = noise.add_noise(votes, SeededNoise(seed))
        results.append(_learned(data, selection, noisy, noise, clusters))
    return _mean(results)


def _learned(
    data: StandIn, selection: Selection, noisy: Tensor, noise: AdditiveNoise, clusters: int
) -> tuple[float, float, float]:
    """Public examples mix the noisy counts around them, and a linear model learns from their labels."""
    from sklearn.linear_model import RidgeClassifier

    assert selection.spread is not None
    answers = clusters * float(torch.isfinite(noisy[:, 0]).double().mean())
    sums, left = spread_scores(selection.spread, noisy, noise.deviation)
    known, labels = left > 0, sums.argmax(1)
    if len(labels[known].unique()) < 2:
        return answers, 0.0, 0.0
    right = (data.public_labels == labels)[known].double().mean().item()
    model = RidgeClassifier().fit(data.public[known].numpy(), labels[known].numpy())
    return answers, right, float(model.score(data.test.numpy(), data.test_labels.numpy()))


def _noise_of(found: Plan) -> AdditiveNoise:
    made: AdditiveNoise = noise(SimpleNamespace(**found.parameters)).make()
    return made


def _mean(results: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    answers, right, student = (sum(column) / len(results) for column in zip(*results, strict=True))
    return answers, right, student


def _best_first(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda item: -item.score)
