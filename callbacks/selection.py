"""Which public examples to ask about, and which others take over an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pl_privknn._checks import check_int


@dataclasses.dataclass(frozen=True)
class PublicPool:
    """What a selector may know of the public set; all of it is public, so a choice costs no privacy.

    Attributes:
        labels: int64, shape ``(n,)``; label of each public example so far, -1 where there is none.
        asked: bool, shape ``(n,)``; examples that an earlier round asked about.
        features: computes this round's features of all public images, float32, shape ``(n, d)``.
    """

    labels: Tensor
    asked: Tensor
    features: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Selection:
    """A round's queries.

    Attributes:
        examples: int64 indices of public examples without repetition, in the order of asking.
        assignment: int64, shape ``(n,)``; position in ``examples`` of the query whose answer each public
            example takes over, -1 for none. None: every query keeps its answer to itself.
    """

    examples: Tensor
    assignment: Tensor | None = None


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


class ClusterSelection:
    """The central example of each cluster of public features; its whole cluster takes its answer.

    k-means with k-means++ seeding (Arthur and Vassilvitskii 2007) on the features' leading principal
    components, both learned on public images only. Suits teachers whose cost does not depend on the number
    of queries, or depends on it little, such as reverse kNN.

    Args:
        components: principal components to cluster in; features with fewer dimensions are taken as they are.
        max_iter: iterations of k-means; 0 keeps the k-means++ seeds.
    """

    def __init__(self, components: int = 64, max_iter: int = 50) -> None:
        self.components = check_int("components", components)
        self.max_iter = check_int("max_iter", max_iter, minimum=0)

    def __call__(self, pool: PublicPool, count: int, generator: torch.Generator) -> Selection:
        """Cluster all public examples and choose the member nearest to each centre."""
        from sklearn.cluster import KMeans, kmeans_plusplus
        from sklearn.decomposition import PCA

        table = pool.features().double().numpy()
        seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
        if table.shape[1] > self.components and len(table) > self.components:
            table = PCA(self.components, random_state=seed).fit_transform(table)
        count = min(count, len(table))
        if self.max_iter:
            centres = (
                KMeans(count, n_init=1, max_iter=self.max_iter, random_state=seed).fit(table).cluster_centers_
            )
        else:
            centres, _ = kmeans_plusplus(table, count, random_state=seed)
        distances = torch.cdist(torch.from_numpy(table), torch.from_numpy(centres))
        # Two centres may share their nearest example: one query serves both clusters.
        medoids, position = torch.unique(distances.argmin(dim=0), return_inverse=True)
        return Selection(medoids, position[distances.argmin(dim=1)])


SELECTORS: dict[str, Selector] = {
    "random": select_random,
    "all": select_all,
    "clusters": ClusterSelection(),
}
