"""Which public examples to ask about, and which others take over an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_non_negative, check_positive
from pl_privknn.callbacks.spreading import Spread, kernel_spread
from pl_privknn.init_arguments import HasInitArguments


@dataclasses.dataclass(frozen=True)
class PublicPool:
    """What a selector may know of the public set; all of it is public, so a choice costs no privacy.

    Attributes:
        labels: int64, shape ``(n,)``; label of each public example so far, -1 where there is none.
        asked: bool, shape ``(n,)``; examples that an earlier round asked about.
        features: computes this round's features of all public images, float32, shape ``(n, d)``.
        earlier: what earlier rounds asked about, first to last.
        probabilities: computes the student's class probabilities of all public images, float, shape ``(n, c)``;
            None before it has been trained.
    """

    labels: Tensor
    asked: Tensor
    features: Callable[[], Tensor]
    earlier: tuple[Selection, ...] = ()
    probabilities: Callable[[], Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class Selection:
    """A round's queries.

    Attributes:
        examples: int64 indices of public examples without repetition, in the order of asking.
        assignment: int64, shape ``(n,)``; position in ``examples`` of the query whose answer each public
            example takes over, -1 for none. None: every query keeps its answer to itself.
        spread: weights with which public examples listen to the noisy counts of all queries so far: those of
            earlier rounds, in order, and then this round's. Goes before ``assignment``, and needs a teacher that
            releases its counts (:attr:`Release.scores`).
        ask_means: ask about the mean features of the examples that ``assignment`` gives to a query, instead of
            the features of its own example; which example of a cluster stands for it then matters little.
    """

    examples: Tensor
    assignment: Tensor | None = None
    spread: Spread | None = None
    ask_means: bool = False

    def query_features(self, features: Tensor) -> Tensor:
        """What the queries are in terms of features of all public examples, ``(n, d)``: float ``(s, d)``."""
        if self.ask_means and self.assignment is not None:
            return mean_features(features, self.assignment, self.examples)
        return features[self.examples]


def mean_features(features: Tensor, assignment: Tensor, examples: Tensor) -> Tensor:
    """Mean features of each query's examples, float32 ``(s, d)``; of its own example where it has no others.

    Args:
        features: float32 features of all public examples, shape ``(n, d)``.
        assignment: int64, shape ``(n,)``; see :class:`Selection`.
        examples: int64, shape ``(s,)``; each query's own example.
    """
    taken = assignment >= 0
    sums = torch.zeros(len(examples), features.shape[1], dtype=torch.float64)
    sums.index_add_(0, assignment[taken], features[taken].double())
    sizes = torch.bincount(assignment[taken], minlength=len(examples))[:, None]
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), features[examples].double()).float()


class Selector(Protocol):
    """Chooses a round's queries from public information only."""

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Choose at most ``count`` queries; ``generator`` is seeded by a public constant."""
        ...


def select_random(pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
    """Examples never asked about, at random; fewer than ``count`` where fewer are left."""
    candidates = torch.nonzero(~pool.asked).flatten()
    order = torch.randperm(len(candidates), generator=generator)
    return Selection(candidates[order[:count]])


def select_all(pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
    """Every example without an answer, those refused in an earlier round included, in random order."""
    candidates = torch.nonzero(pool.labels < 0).flatten()
    order = torch.randperm(len(candidates), generator=generator)
    return Selection(candidates[order[:count]])


def select_uncertain(pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
    """Examples never asked about whose class the student is least sure of (entropy); at random before it exists."""
    if pool.probabilities is None:
        return select_random(pool, count, generator)
    unsure = _entropy(pool.probabilities())
    unsure[pool.asked] = -1.0
    order = unsure.argsort(descending=True)[: int((~pool.asked).sum())]
    return Selection(order[:count])


class ClusterSelection(HasInitArguments):
    """One query for each cluster of public features; the public examples take over, or mix, the answers.

    k-means with k-means++ seeding (Arthur and Vassilvitskii 2007) on the features' leading principal
    components, both learned on public images only. Suits teachers whose cost does not depend on the number
    of queries, or depends on it little, such as reverse kNN.

    With ``spread="nearest"`` every example takes over the answer of its own cluster. With ``spread="kernel"``
    it takes a weighted sum of the noisy counts of the clusters around it, from which its label and class
    probabilities follow (see :mod:`pl_privknn.callbacks.spreading`). This smoothing costs no privacy: on
    Fashion-MNIST at ε = 0.1 it makes 83 % of all labels right instead of 79 %. Later rounds smooth the counts of
    all rounds anew, with this round's features: a round of no queries at all, whose features include the
    student's, improves the labels for nothing.

    Args:
        components: principal components to cluster in; features with fewer dimensions are taken as they are.
        max_iter: iterations of k-means; 0 keeps the k-means++ seeds.
        ask: ``"medoids"`` asks about the example nearest to each centre, ``"means"`` about the mean features of
            the cluster, which lie more in the middle.
        spread: ``"nearest"`` or ``"kernel"``; the latter needs a teacher that releases its noisy counts.
        bandwidth: width of the kernel, see :func:`~pl_privknn.callbacks.spreading.kernel_spread`.
        neighbors: clusters that an example listens to at most under ``spread="kernel"``.
        min_confidence: under ``spread="kernel"``, leave an example unlabelled where its most probable class has
            less than this probability.
        uncertainty: in later rounds examples weigh (entropy of the student's prediction) to this power in
            k-means, so that there are more queries where the student is unsure; 0 weighs all alike.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self,
        components: int = 64,
        max_iter: int = 50,
        ask: str = "medoids",
        spread: str = "nearest",
        bandwidth: float = 0.45,
        neighbors: int = 64,
        min_confidence: float = 0.0,
        uncertainty: float = 0.0,
    ) -> None:
        self.components = check_int("components", components)
        self.max_iter = check_int("max_iter", max_iter, minimum=0)
        self.ask = check_choice("ask", ask, ("medoids", "means"))
        self.spread = check_choice("spread", spread, ("nearest", "kernel"))
        self.bandwidth = check_positive("bandwidth", bandwidth)
        self.neighbors = check_int("neighbors", neighbors)
        self.min_confidence = check_non_negative("min_confidence", min_confidence)
        if self.min_confidence > 1:
            raise ValueError(f"min_confidence={min_confidence!r} must lie in [0, 1]")
        self.uncertainty = check_non_negative("uncertainty", uncertainty)

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Cluster all public examples and choose a query for each cluster."""
        table, seed = self._components(pool.features(), generator)
        selection = self._queries(table, pool, min(count, len(table)), seed)
        if self.spread == "nearest":
            return selection
        # Principal components are linear, so means of components are the components of the means asked about.
        rounds = [asked for asked in (*pool.earlier, selection) if len(asked.examples)]
        spreads = [
            kernel_spread(
                table, asked.query_features(table), self.bandwidth, self.neighbors, self.min_confidence
            )
            for asked in rounds
        ]
        spread = Spread.joined(spreads, [len(asked.examples) for asked in rounds]) if spreads else None
        return dataclasses.replace(selection, spread=spread)

    def _components(self, features: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
        from sklearn.decomposition import PCA

        values = features.double().numpy()
        seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
        if values.shape[1] > self.components and len(values) > self.components:
            values = PCA(self.components, random_state=seed).fit_transform(values)
        return torch.from_numpy(values), seed

    def _queries(self, table: Tensor, pool: PublicPool, count: int, seed: int) -> Selection:
        import faiss
        from sklearn.cluster import kmeans_plusplus

        ask_means = self.ask == "means"
        if not count:
            return Selection(torch.empty(0, dtype=torch.int64), ask_means=ask_means)
        weights = None
        if self.uncertainty and pool.probabilities is not None:
            # No example weighs nothing: k-means needs some weight everywhere.
            weights = _entropy(pool.probabilities()).clamp(min=1e-3).pow(self.uncertainty).numpy()
        values = table.numpy()
        centres, _ = kmeans_plusplus(values, count, random_state=seed, sample_weight=weights)
        if self.max_iter and count < len(values):
            kmeans = faiss.Kmeans(
                values.shape[1],
                count,
                niter=self.max_iter,
                seed=seed,
                min_points_per_centroid=1,
                max_points_per_centroid=len(values),
            )
            weights = None if weights is None else weights.astype("float32")
            kmeans.train(values.astype("float32"), weights, init_centroids=centres.astype("float32"))
            assert kmeans.centroids is not None
            centres = kmeans.centroids.astype(values.dtype)
        distances = torch.cdist(table, torch.from_numpy(centres))
        # Two centres may share their nearest example: one query serves both clusters.
        medoids, position = torch.unique(distances.argmin(dim=0), return_inverse=True)
        return Selection(medoids, position[distances.argmin(dim=1)], ask_means=ask_means)


def _entropy(probabilities: Tensor) -> Tensor:
    """Of each row, in nats; float64 ``(n,)``."""
    return torch.special.entr(probabilities.double()).sum(dim=1)


SELECTORS: dict[str, Selector] = {
    "random": select_random,
    "all": select_all,
    "uncertain": select_uncertain,
    "clusters": ClusterSelection(),
    "smooth_clusters": ClusterSelection(ask="means", spread="kernel"),
}
