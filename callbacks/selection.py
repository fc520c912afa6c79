"""Selection of public examples to ask about, and the spread of answers to others."""

from __future__ import annotations

import abc
import dataclasses
import io
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.config import HasInitArguments
from pl_privknn.labelers.base import nonnegative_shares

_EM_STEPS = 30
# Shares of a query's records that a class may have: zero, and 60 steps from a thousandth to all of them.
_SHARES = torch.cat([torch.zeros(1), torch.logspace(-3, 0, 60)]).double()
# The prior is learned from at most this many rows: more change it by nothing that matters.
_ROWS_FOR_PRIOR = 5000
_ROWS_AT_A_TIME = 4096


def class_posterior(scores: Tensor, deviation: Tensor | float) -> Tensor:
    """Expected share of each class among a query's records, given its noisy counts.

    The count of class ``c`` at a query is modelled as ``t · p_c + noise`` with Gaussian noise (which that
    of sums over several queries resembles, whatever each is), ``t`` the query's
    number of records (its noisy total, drawn to the mean of all) and ``p_c`` drawn from a prior over shares in
    [0, 1]. The prior is learned from the noisy counts of all queries together by expectation maximisation on a
    grid (empirical Bayes; Laird 1978), so it knows for instance that most classes are absent from most queries.
    Classes are treated one by one, and their expected shares scaled to sum to one. Uses released values and public
    constants only.

    Args:
        scores: noisy counts, or weighted sums of them, float, shape ``(m, c)``.
        deviation: standard deviation of the noise on each score, a number or float of shape ``(m,)``, above zero.

    Returns:
        float64, shape ``(m, c)``; rows sum to one.

    Raises:
        ValueError: for shapes or values that do not fit.
    """
    if scores.ndim != 2 or not scores.is_floating_point() or not bool(torch.isfinite(scores).all()):
        raise ValueError(
            f"scores: shape {tuple(scores.shape)}, {scores.dtype}; expected finite floats of shape (m, c)"
        )
    spread = torch.as_tensor(deviation, dtype=torch.float64).expand(len(scores))
    if not bool(((spread > 0) & torch.isfinite(spread)).all()):
        raise ValueError("deviation: must be finite and above 0; counts without noise need no posterior")
    values = scores.double()
    totals = _totals(values, spread)
    chosen = slice(None, None, max(1, -(-len(values) // _ROWS_FOR_PRIOR)))
    log_prior = _learn_prior(_log_likelihood(values[chosen], totals[chosen], spread[chosen]))
    parts = []
    for start in range(0, len(values), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        likelihood = _log_likelihood(values[rows], totals[rows], spread[rows])
        parts.append(((likelihood + log_prior).softmax(dim=-1) * _SHARES).sum(dim=-1))
    shares = torch.cat(parts) if parts else values
    return nonnegative_shares(shares)


def _totals(values: Tensor, spread: Tensor) -> Tensor:
    """Estimated number of records of each query: its noisy total, shrunk towards the mean total.

    The linear empirical-Bayes estimate: ``mean + (total - mean) · between / (between + noise)`` for the variances
    between queries and of the noise.
    """
    totals, variance = values.sum(dim=1), values.shape[1] * spread.square()
    if len(totals) > 1:
        mean = totals.mean()
        between = (totals.var() - variance.mean()).clamp(min=0)
        totals = mean + (totals - mean) * between / (between + variance)
    # Shares are of something: no total may be lost in the noise of one count.
    return torch.maximum(totals, spread)


def _log_likelihood(values: Tensor, totals: Tensor, spread: Tensor) -> Tensor:
    """Log-likelihood of each share on the grid, up to a constant per score: float64 ``(m, c, shares)``."""
    z = (values[:, :, None] - totals[:, None, None] * _SHARES) / spread[:, None, None]
    return -0.5 * z * z


def _learn_prior(log_likelihood: Tensor) -> Tensor:
    """Log of the grid's prior by expectation maximisation, from a uniform start; shape ``(shares,)``."""
    log_prior = torch.full((len(_SHARES),), -math.log(len(_SHARES)), dtype=torch.float64)
    if log_likelihood.shape[0] == 0:
        return log_prior
    for _ in range(_EM_STEPS):
        log_prior = (log_likelihood + log_prior).softmax(dim=-1).mean(dim=(0, 1)).clamp(min=1e-12).log()
    return log_prior


@dataclasses.dataclass(frozen=True)
class Spread:
    """Weights of queries in each public example's label; a function of public features alone.

    An example's counts are the weighted sum of its queries' noisy counts. The queries' noise averages out, and a
    query that few private records are near to borrows from its neighbours. As post-processing of a release it costs
    no privacy.

    Attributes:
        queries: int64, shape ``(n, m)``; positions of the queries that each public example listens to.
        weights: float32, shape ``(n, m)``, at least zero.
    """

    queries: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if self.queries.ndim != 2 or self.queries.shape != self.weights.shape:
            raise ValueError(
                f"queries of shape {tuple(self.queries.shape)} and weights of shape {tuple(self.weights.shape)} "
                "must both have shape (n, m)"
            )
        if not bool(torch.isfinite(self.weights).all()) or bool((self.weights < 0).any()):
            raise ValueError("weights: some are negative or not finite; expected numbers of at least 0")

    def to_bytes(self) -> bytes:
        """The spread as a small file; see :meth:`from_bytes`."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            queries=self.queries.numpy().astype(np.int32),
            weights=self.weights.float().numpy(),
        )
        return buffer.getvalue()

    @classmethod
    def joined(cls, parts: Sequence[Spread], queries: Sequence[int]) -> Spread:
        """Concatenate the spreads of several rounds into one over the queries of all rounds.

        Args:
            parts: a spread for each round, of the same public examples.
            queries: number of queries of each round.
        """
        starts = [sum(queries[:index]) for index in range(len(queries))]
        return cls(
            torch.cat([part.queries + start for part, start in zip(parts, starts, strict=True)], dim=1),
            torch.cat([part.weights for part in parts], dim=1),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Spread:
        """Read the bytes of :meth:`to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return cls(
                torch.from_numpy(arrays["queries"].astype(np.int64)),
                torch.from_numpy(arrays["weights"]),
            )


def kernel_spread(
    examples: Tensor,
    centres: Tensor,
    bandwidth: float,
    neighbors: int = 64,
) -> Spread:
    """Weights ``exp(-(d² - d₁²) / 2h²)`` for the queries nearest to each example, ``d₁`` the nearest's distance.

    The kernel's width is ``h = bandwidth`` times the mean distance between an example and its nearest query, both
    of them public, so one value of ``bandwidth`` serves any number of queries and any scale of features. An
    example far from every query follows the nearest ones instead of none.

    Args:
        examples: float features of all public examples, shape ``(n, d)``.
        centres: float features of the queries, shape ``(s, d)``.
        bandwidth: width of the kernel in mean distances to the nearest query; near 0 every example takes over
            the counts of its nearest query.
        neighbors: queries that an example listens to at most.

    Raises:
        ValueError: for a bandwidth that is not positive or features that do not fit.
    """
    check_positive("bandwidth", bandwidth)
    neighbors = min(check_int("neighbors", neighbors), len(centres))
    if examples.ndim != 2 or centres.ndim != 2 or examples.shape[1] != centres.shape[1] or not len(centres):
        raise ValueError(
            f"examples of shape {tuple(examples.shape)} and centres of shape {tuple(centres.shape)}; expected (n, d) "
            "and (s, d) with the same d and at least one centre"
        )
    nearest = [
        torch.cdist(part.double(), centres.double()).topk(neighbors, dim=1, largest=False)
        for part in examples.split(_ROWS_AT_A_TIME)
    ]
    distances, queries = torch.cat([part[0] for part in nearest]), torch.cat([part[1] for part in nearest])
    # Examples that are a query themselves say nothing about the distances between the two.
    off_centre = distances[:, 0][distances[:, 0] > 0]
    width = bandwidth * (float(off_centre.mean()) if len(off_centre) else 1.0)
    excess = distances**2 - distances[:, :1] ** 2
    return Spread(queries, torch.exp(-excess / (2 * width**2)).float())


def spread_scores(spread: Spread, scores: Tensor, deviation: Tensor | float) -> tuple[Tensor, Tensor]:
    """Weighted noisy counts of every public example, and the deviation of their noise.

    Counts of rounds with different noise count by its inverse variance, relative to the least noisy ones.

    Args:
        spread: the weights.
        scores: released noisy counts of the queries, float, shape ``(s, c)``; rows of NaN for queries without a
            release, whose weight is then ignored.
        deviation: standard deviation of the independent noise on one of them, a number or float of shape ``(s,)``.

    Returns:
        Sums, float64 ``(n, c)``, and deviations, float64 ``(n,)``; zero for examples without any weight.
    """
    present = torch.isfinite(scores).all(dim=1)
    values = torch.where(present[:, None], scores.double(), 0.0)
    sums = torch.zeros(len(spread.queries), scores.shape[1], dtype=torch.float64)
    noise = torch.as_tensor(deviation, dtype=torch.float64).expand(len(scores))
    least = noise[present].min() if bool(present.any()) else torch.ones(())
    precision = torch.where(noise > 0, (least / noise.clamp(min=1e-300)) ** 2, 1.0) * present
    weights = spread.weights.double() * precision[spread.queries]
    for start in range(0, len(sums), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        sums[rows] = torch.einsum("nm,nmc->nc", weights[rows], values[spread.queries[rows]])
    return sums, (weights * noise[spread.queries]).square().sum(dim=1).sqrt()


def label_by_spread(spread: Spread, scores: Tensor, deviation: Tensor | float) -> tuple[Tensor, Tensor]:
    """Labels and class probabilities of every public example from the queries' noisy counts.

    Args:
        spread: the weights.
        scores: as for :func:`spread_scores`.
        deviation: likewise; 0 for counts without noise (then all of them).

    Returns:
        Labels, int64 ``(n,)``, -1 where there is no weight, and probabilities, float32
        ``(n, c)``: the posterior under the known noise
        (:func:`~pl_privknn.callbacks.selection.class_posterior`).
    """
    sums, noise = spread_scores(spread, scores, deviation)
    heard = (spread.weights * torch.isfinite(scores).all(dim=1)[spread.queries]).sum(dim=1) > 0
    soft = torch.full_like(sums, 1.0 / sums.shape[1])
    soft[heard] = (
        class_posterior(sums[heard], noise[heard])
        if bool((noise[heard] > 0).all())
        else nonnegative_shares(sums[heard])
    )
    labels = sums.argmax(dim=1)
    labels[~heard] = -1
    return labels, soft.float()


@dataclasses.dataclass(frozen=True)
class PublicPool:
    """Public facts for a selector; a choice from them costs no privacy.

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
            the features of its own example; which example of a cluster represents it then matters little.
    """

    examples: Tensor
    assignment: Tensor | None = None
    spread: Spread | None = None
    ask_means: bool = False

    def query_features(self, features: Tensor) -> Tensor:
        """Weights of the queries over features of all public examples, ``(n, d)``: float ``(s, d)``."""
        if self.ask_means and self.assignment is not None:
            return mean_features(features, self.assignment, self.examples)
        return features[self.examples]


def mean_features(features: Tensor, assignment: Tensor, examples: Tensor) -> Tensor:
    """Mean features of each query's examples, float32 ``(s, d)``; of the query's example where it has no others.

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


class Selector(HasInitArguments, abc.ABC):
    """Base class of choices of a round's queries, from public information only."""

    @abc.abstractmethod
    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Choose at most ``count`` queries, with a generator that is seeded by a public constant."""


class RandomSelection(Selector):
    """Selector of examples never asked about, at random; fewer than ``count`` where fewer are left.

    Example:
        >>> import torch
        >>> from pl_privknn.callbacks.selection import PublicPool, RandomSelection
        >>> asked = torch.tensor([True, False, True, False])
        >>> pool = PublicPool(torch.full((4,), -1), asked, features=lambda: torch.rand(4, 2))
        >>> sorted(RandomSelection()(pool, 3, torch.Generator()).examples.tolist())
        [1, 3]
    """

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Draw queries from the examples never asked about."""
        candidates = torch.nonzero(~pool.asked).flatten()
        order = torch.randperm(len(candidates), generator=generator)
        return Selection(candidates[order[:count]])


class FullSelection(Selector):
    """Selector of every example without an answer, refused ones included, in random order."""

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Shuffle the examples without an answer."""
        candidates = torch.nonzero(pool.labels < 0).flatten()
        order = torch.randperm(len(candidates), generator=generator)
        return Selection(candidates[order[:count]])


class UncertainSelection(Selector):
    """Selector of examples never asked about with the student's most uncertain predictions, by entropy.

    Random before there is a student.
    """

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Choose the examples with the largest entropy of the student's prediction."""
        if pool.probabilities is None:
            return RandomSelection()(pool, count, generator)
        unsure = torch.special.entr(pool.probabilities().double()).sum(dim=1)
        unsure[pool.asked] = -1.0
        order = unsure.argsort(descending=True)[: int((~pool.asked).sum())]
        return Selection(order[:count])


class ClusterSelection(Selector):
    """Selector of one query per cluster of public features; other public examples take over, or mix, the answers.

    k-means with k-means++ seeding (Arthur and Vassilvitskii 2007) on the features' leading principal
    components, both learned on public images only. Suits teachers whose cost does not depend on the number
    of queries, or depends on it little, such as reverse kNN.

    With ``spread="nearest"`` every example takes over the answer of its cluster. With ``spread="kernel"``
    it takes a weighted sum of the noisy counts of the clusters around it, from which its label and class
    probabilities follow (see :func:`kernel_spread`). This smoothing costs no privacy: on
    Fashion-MNIST at ε = 0.1 it makes 83 % of all labels right instead of 79 %. Later rounds smooth the counts of
    all rounds anew, with this round's features: a round of no queries at all, whose features include the
    student's, improves the labels for nothing.

    Args:
        components: principal components to cluster in; features with fewer dimensions are taken as they are.
        max_iter: iterations of k-means; 0 keeps the k-means++ seeds.
        ask: ``"medoids"`` asks about the example nearest to each centre, ``"means"`` about the mean features of
            the cluster, which lie more in the middle.
        spread: ``"nearest"`` or ``"kernel"``; the latter needs a teacher that releases its noisy counts.
        bandwidth: width of the kernel, see :func:`~pl_privknn.callbacks.selection.kernel_spread`.
        neighbors: clusters that an example listens to at most under ``spread="kernel"``.

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
    ) -> None:
        self.components = check_int("components", components)
        self.max_iter = check_int("max_iter", max_iter, minimum=0)
        self.ask = check_choice("ask", ask, ("medoids", "means"))
        self.spread = check_choice("spread", spread, ("nearest", "kernel"))
        self.bandwidth = check_positive("bandwidth", bandwidth)
        self.neighbors = check_int("neighbors", neighbors)

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Cluster all public examples and choose a query for each cluster."""
        table, seed = self._components(pool.features(), generator)
        selection = self._queries(table, min(count, len(table)), seed)
        if self.spread == "nearest":
            return selection
        # Principal components are linear, so means of components are the components of the means asked about.
        rounds = [asked for asked in (*pool.earlier, selection) if len(asked.examples)]
        spreads = [
            kernel_spread(table, asked.query_features(table), self.bandwidth, self.neighbors)
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

    def _queries(self, table: Tensor, count: int, seed: int) -> Selection:
        import faiss
        from sklearn.cluster import kmeans_plusplus

        ask_means = self.ask == "means"
        if not count:
            return Selection(torch.empty(0, dtype=torch.int64), ask_means=ask_means)
        values = table.numpy()
        centres, _ = kmeans_plusplus(values, count, random_state=seed)
        if self.max_iter and count < len(values):
            kmeans = faiss.Kmeans(
                values.shape[1],
                count,
                niter=self.max_iter,
                seed=seed,
                min_points_per_centroid=1,
                max_points_per_centroid=len(values),
            )
            kmeans.train(values.astype("float32"), init_centroids=centres.astype("float32"))
            assert kmeans.centroids is not None
            centres = kmeans.centroids.astype(values.dtype)
        distances = torch.cdist(table, torch.from_numpy(centres))
        # Two centres may share their nearest example: one query serves both clusters.
        medoids, position = torch.unique(distances.argmin(dim=0), return_inverse=True)
        return Selection(medoids, position[distances.argmin(dim=1)], ask_means=ask_means)
