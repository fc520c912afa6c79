"""The best settings of a teacher that counts votes, found on public records that stand in for private ones.

For each setting the noise follows from the target ε. What it does is tried: neighbours of the stand-in vote, as often
as so many records would, the planned mechanisms answer, and a linear model learns from the answers. Nothing private
is read, so nothing is charged. How far votes reach is kept: k neighbours among n sampled records reach as far as
those among the stand-in's that are the same share of it.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import Screening
from pl_privknn.planning.makers import noise
from pl_privknn.planning.options import SEARCHED
from pl_privknn.planning.plan import Plan
from pl_privknn.planning.planner import plan
from pl_privknn.privacy.mechanisms import VoteNoise
from pl_privknn.privacy.noise import SeededNoise

# Neighbours, sampling rates, numbers of queries of Private-kNN; clusters of public examples of reverse kNN.
_NEIGHBORS = (20, 50, 100, 200, 400)
_RATES = (0.05, 0.15, 0.4)
_QUERIES = (50, 100, 200, 400)
_CLUSTERS = (20, 40, 80, 160, 320)
_SEEDS = 3
# How many of the best settings are tried with a screening too, and the answers that it is planned for.
_SCREENED, _ANSWERED = 2, 0.8


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Public records with known classes: features float ``(n, d)``, classes int64 ``(n,)``."""

    private: Tensor
    private_labels: Tensor
    public: Tensor
    public_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @functools.cached_property
    def votes(self) -> Tensor:
        """Votes of the k nearest for each k, int64 ``(public, k, classes)``."""
        order = torch.cdist(self.public, self.private).argsort(1)
        classes = int(self.private_labels.max()) + 1
        return torch.nn.functional.one_hot(self.private_labels[order], classes).cumsum(1)


@dataclasses.dataclass(frozen=True)
class Found:
    """A setting and what it did on the stand-in.

    Attributes:
        settings: options of the plan.
        plan: with the noise for the target ε.
        answers: of the queries that were asked.
        labels: share of the answers that are right.
        student: test accuracy of a linear model that learned from the answers.
    """

    settings: dict[str, Any]
    plan: Plan
    answers: float
    labels: float
    student: float


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
            Found({"clusters": count, "k": 1}, found, *_try_clusters(data, found, count, public, records))
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
                tried.append((options, base, _try_votes(data, base, k, rate, queries, records, None)))
    tried.sort(key=lambda item: -item[2][2])
    for best_so_far, _, _ in tried[:_SCREENED]:
        more = {**best_so_far, "screening": True, "answer_share": _ANSWERED}
        del more["noise_scale"]
        base = plan("private-knn", **more, **target)
        screening = Screening(base.parameters["threshold"], base.parameters["screening_sigma"])
        done = _try_votes(data, base, more["k"], more["sampling_rate"], more["queries"], records, screening)
        tried.append((more, base, done))
    best, *rest = _best_first([Found(options, base, *done) for options, base, done in tried])
    settings = {name: value for name, value in best.settings.items() if name != "noise_scale"}
    return [dataclasses.replace(best, plan=plan("private-knn", **settings, **target)), *rest]


def _try_votes(
    data: StandIn, found: Plan, k: int, rate: float, queries: int, records: int, screening: Screening | None
) -> tuple[float, float, float]:
    """Answers, share of right ones and accuracy, means over seeds."""
    reach = max(1, min(round(k / (rate * records) * len(data.private)), len(data.private) - 1))
    shares = data.votes[:, reach - 1].double() / reach
    drawing, results = _noise_of(found), []
    for seed in range(_SEEDS):
        generator, source = torch.Generator().manual_seed(seed), SeededNoise(seed)
        asked = torch.randperm(len(shares), generator=generator)[:queries]
        cast = torch.multinomial(shares[asked], k, replacement=True, generator=generator)
        votes = torch.nn.functional.one_hot(cast, shares.shape[1]).sum(1)
        answered = torch.ones(len(asked), dtype=torch.bool)
        if screening is not None:
            most = votes.max(1).values.double()
            answered = most + source.normal(tuple(most.shape), screening.sigma) >= screening.threshold
        labels = drawing.argmax(votes, source)
        results.append(_learned(data, asked[answered], labels[answered]))
    return _mean(results)


def _try_clusters(
    data: StandIn, found: Plan, clusters: int, public: int, records: int
) -> tuple[float, float, float]:
    # As many public examples a cluster as there will be; of records, as many votes.
    groups = max(2, min(round(clusters * len(data.public) / public), len(data.public) // 2))
    drawing, results = _noise_of(found), []
    classes = data.votes.shape[2]
    for seed in range(_SEEDS):
        own, places = _grouped(data, groups, seed)
        counts = torch.zeros(groups, classes, dtype=torch.float64)
        counts.index_put_(
            (own, data.private_labels), torch.ones(len(own), dtype=torch.float64), accumulate=True
        )
        votes = (counts * (records / len(own)) * (groups / clusters)).round()
        labels = drawing.argmax(votes, SeededNoise(seed))[places]
        results.append(_learned(data, torch.arange(len(labels)), labels))
    answers, right, student = _mean(results)
    return answers / len(data.public) * clusters, right, student


@functools.lru_cache(maxsize=64)
def _grouped(data: StandIn, groups: int, seed: int) -> tuple[Tensor, Tensor]:
    """Clusters of the stand-in's private and public examples."""
    from sklearn.cluster import KMeans

    means = KMeans(groups, n_init=1, random_state=seed).fit(data.public.numpy())
    own = torch.from_numpy(means.predict(data.private.numpy())).long()
    return own, torch.from_numpy(means.labels_).long()


def _learned(data: StandIn, asked: Tensor, labels: Tensor) -> tuple[float, float, float]:
    from sklearn.linear_model import RidgeClassifier

    if len(labels.unique()) < 2:
        return float(len(labels)), 0.0, 0.0
    right = (data.public_labels[asked] == labels).double().mean().item()
    model = RidgeClassifier().fit(data.public[asked].numpy(), labels.numpy())
    return float(len(labels)), right, float(model.score(data.test.numpy(), data.test_labels.numpy()))


def _noise_of(found: Plan) -> VoteNoise:
    made: VoteNoise = noise(SimpleNamespace(**found.parameters)).make()
    return made


def _mean(results: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    answers, right, student = (sum(column) / len(results) for column in zip(*results, strict=True))
    return answers, right, student


def _best_first(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda item: -item.student)
