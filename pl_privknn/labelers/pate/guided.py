"""Guided PATE's partition: similar records are spread over all teachers. Its guarantee is conditional."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pl_privknn._checks import check_choice, check_int
from pl_privknn.labelers.pate.networks import Linear, ModuleTeachers
from pl_privknn.labelers.pate.partition import Partitioner, random_permutation
from pl_privknn.privacy.noise import NoiseSource

_ROWS_AT_ONCE = 8192


class GuidedPartition(Partitioner):
    """Clusters of similar records, dealt out cluster by cluster (Arora, "Guided PATE", Algorithm 1).

    A classifier is trained on *all* private records, its hidden layer describes each of them, k-medoids
    groups them, and the records of every cluster go to the teachers in turn.

    **Not covered by PATE's argument.** One record changes the classifier and the medoids, so others change
    clusters, and within its cluster it shifts the dealing of all later ones: any number of teachers can
    change. The ε that the noise gives for one teacher holds only if the partition is taken as given.

    The paper clusters everything; here medoids come from at most ``sample`` records drawn at random and the
    rest goes to the nearest one, because all distances among 60,000 records would need 14 GB.

    Args:
        num_clusters: number of medoids (paper: 100; it saw little change from 50 to 200).
        features: ``"trained"`` for the hidden layer of a classifier trained on everything, ``"given"`` for
            the features as they arrive.
        restart: begin every cluster at the first teacher, as the paper's algorithm is printed, which gives
            the first teachers more records; False goes on where the last cluster stopped.
        sample: records among which medoids are sought.
        hidden: units of the classifier's hidden layer.
        steps: optimiser steps of the classifier, at batches of 128.
        seed: for the classifier and the search.

    Raises:
        ValueError: for arguments out of range, or fewer records than clusters.

    Example:
        >>> from pl_privknn.labelers import GNMAX, PATE, GuidedPartition
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PATE(num_teachers=100, partitioner=GuidedPartition(), aggregator=GNMAX(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    condition: ClassVar[str] = (
        "the guided partition is learned from all records, so one record can move medoids and shift others "
        "between teachers; the cost is that of one changed teacher, for a partition taken as given"
    )

    def __init__(
        self,
        num_clusters: int = 100,
        features: str = "trained",
        restart: bool = False,
        sample: int = 4000,
        hidden: int = 64,
        steps: int = 1000,
        seed: int = 0,
    ) -> None:
        self.num_clusters = check_int("num_clusters", num_clusters, minimum=2)
        self.features = check_choice("features", features, ("trained", "given"))
        self.restart = restart
        self.sample = check_int("sample", sample, minimum=self.num_clusters)
        self.hidden = check_int("hidden", hidden)
        self.steps = check_int("steps", steps)
        self.seed = check_int("seed", seed, minimum=0)

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        if len(features) < self.num_clusters:
            raise ValueError(
                f"the private table holds fewer records than num_clusters={self.num_clusters}; lower it"
            )
        described = self._describe(features, labels, num_classes)
        chosen = described[random_permutation(len(described), noise)[: self.sample]]
        distances = torch.cdist(chosen.double(), chosen.double()).numpy()
        medoids = chosen[torch.from_numpy(k_medoids(distances, self.num_clusters, seed=self.seed))]
        clusters = torch.cat(
            [torch.cdist(rows, medoids).argmin(dim=1) for rows in described.split(_ROWS_AT_ONCE)]
        )
        return deal_clusters(clusters, num_parts, restart=self.restart)

    def _describe(self, features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        if self.features == "given":
            return features
        one = torch.zeros(len(features), dtype=torch.int64)

        def build(width: int, classes: int) -> nn.Module:
            return nn.Sequential(Linear(width, self.hidden), nn.ReLU(), Linear(self.hidden, classes))

        maker = ModuleTeachers(build, self.steps, batch_size=128, seed=self.seed)
        state = maker.train(features, labels, one, num_classes, 1, lambda fraction: None).state()
        assert state is not None
        weight, bias = state["params/0.weight"][0], state["params/0.bias"][0]
        return torch.cat([torch.relu(rows @ weight.T + bias) for rows in features.split(_ROWS_AT_ONCE)])


def deal_clusters(clusters: Tensor, num_parts: int, restart: bool = False) -> Tensor:
    """Deal records out in turn, cluster by cluster, each in the order of the table.

    Args:
        clusters: cluster of each record, int64 ``(n,)``.
        num_parts: number of teachers.
        restart: begin each cluster at teacher 0.

    Returns:
        int64 ``(n,)``: the teacher of each record.
    """
    order = clusters.argsort(stable=True)
    turn = torch.arange(len(clusters))
    if restart:
        sizes = torch.bincount(clusters)
        turn -= (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    parts = torch.empty_like(clusters)
    parts[order] = turn % num_parts
    return parts


def k_medoids(
    distances: NDArray[np.float64], k: int, seed: int = 0, max_passes: int = 50
) -> NDArray[np.int64]:
    """Medoids that no single swap improves (FasterPAM: Schubert and Rousseeuw 2021, Algorithm 3).

    Each candidate's gain against all k medoids together costs one pass over its distances; the best swap
    is made as soon as it helps.

    (Our own, because the library of the algorithm's authors is under the GPL, which would bind this project too.)

    Args:
        distances: between n points, shape ``(n, n)``, symmetric, zero on the diagonal.
        k: number of medoids, from 2 to n.
        seed: of the medoids to start from.
        max_passes: gives up being optimal after so many passes over all candidates.

    Returns:
        k row numbers, int64.

    Raises:
        ValueError: for k out of range.
    """
    count = len(distances)
    if not 2 <= k <= count:
        raise ValueError(f"k={k!r} must lie between 2 and the number of points")
    medoids = np.random.default_rng(seed).permutation(count)[:k]
    nearest, first, second = _two_nearest(distances, medoids)
    unchanged = 0
    for candidate in list(range(count)) * max_passes:
        if unchanged == count:
            break
        unchanged += 1
        if first[candidate] == 0 and candidate in medoids:
            continue
        to_candidate = distances[:, candidate]
        closer = to_candidate < first
        # Change of the total distance: for points that the candidate wins whatever is removed, and then
        # for each medoid's own points, which go to the candidate or to their second choice.
        shared = float((to_candidate - first)[closer].sum())
        own = np.where(closer, 0.0, np.minimum(to_candidate, second) - first)
        change = np.bincount(nearest, weights=own, minlength=k)
        swap = int(change.argmin())
        if shared + change[swap] < -1e-9 * max(1.0, float(first.sum())):
            medoids[swap] = candidate
            nearest, first, second = _two_nearest(distances, medoids)
            unchanged = 0
    return medoids


def _two_nearest(
    distances: NDArray[np.float64], medoids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """For each point: place of its nearest medoid, and the distances to the nearest and the next."""
    to_medoids = distances[:, medoids]
    two = np.argpartition(to_medoids, 1, axis=1)[:, :2]
    values = np.take_along_axis(to_medoids, two, axis=1)
    return two[:, 0], values[:, 0], values[:, 1]
