"""Partitions of the private records into disjoint parts, one for each of PATE's teachers."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor, nn

from pl_privknn._checks import (
    InputError,
    check_choice,
    check_int,
    shape_text,
)
from pl_privknn.labelers.teachers import Linear, ModuleTeachers
from pl_privknn.privacy.mechanisms.base import Adjacency
from pl_privknn.privacy.noise import NoiseSource

_ROWS_AT_ONCE = 8192


class Partitioner(abc.ABC):
    """Base class of partitions, which assign each record to one part.

    PATE's argument: if two neighbouring tables can be partitioned so that they differ in **one** part, one
    teacher's vote changes and no other. Where the partition is drawn at random it is enough that the two
    random partitions can be *coupled* so: given such a coupling every draw has the guarantee, and a mixture
    of pairs that have it has it too, because Rényi and hockey-stick divergences are jointly (quasi-)convex.
    Each partitioner states for which neighbours that holds.

    The result is one part number for each record, so parts are disjoint whatever a subclass does; range,
    shape and dtype are checked.

    Attributes:
        adjacencies: neighbouring relations for which the statement is made.
        condition: what else has to hold, in words; empty where the argument holds outright. It goes into
            every record of the ledger.
        takes_groups: whether whole groups of records (all of one person) can be dealt out together; then parts must
            depend on nothing of records but their number.
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "replace_one")
    condition: ClassVar[str] = ""
    takes_groups: ClassVar[bool] = False

    def assign(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        num_parts: int,
        noise: NoiseSource,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Assign each record to a part.

        Args:
            features: float, shape ``(n, d)``.
            labels: int64, shape ``(n,)``.
            num_classes: number of classes.
            num_parts: number of teachers.
            noise: protective randomness; the random choices of the partition belong to the guarantee.
            groups: int64, shape ``(n,)``; records with the same number go to the same part. None: each
                record is a separate group.

        Returns:
            int64, shape ``(n,)``, values in ``[0, num_parts)``. Parts may be empty.

        Raises:
            ValueError: if there are fewer records (or groups) than parts, ``groups`` does not fit, or the
                partitioner can't deal out groups.
        """
        num_parts = check_int("num_parts", num_parts)
        unit = "records" if groups is None else "groups"
        if groups is not None:
            if not self.takes_groups:
                raise InputError(
                    f"groups: {type(self).__name__} deals out single records; use RandomPartition"
                )
            groups = groups.unique(return_inverse=True)[1]
        units = len(labels) if groups is None else int(groups.max()) + 1
        if units < num_parts:
            raise InputError(
                f"the private table holds fewer {unit} than {num_parts} teachers; lower num_teachers to a "
                f"small fraction of the number of {unit}"
            )
        # Where groups are taken, dealing looks at the number of units alone.
        parts = self._deal(features[:units], labels[:units], num_classes, num_parts, noise)
        if groups is not None:
            parts = parts[groups]
        if parts.dtype != torch.int64 or parts.shape != labels.shape:
            raise InputError(
                f"{type(self).__name__}: parts of shape {shape_text(parts.shape)}, {parts.dtype}; expected int64 of "
                "shape (n,), one part for each record"
            )
        if bool(((parts < 0) | (parts >= num_parts)).any()):
            raise InputError(f"{type(self).__name__}: some parts lie outside [0, num_parts={num_parts})")
        return parts

    @abc.abstractmethod
    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        """Parts of single records, int64 ``(n,)``."""


class RandomPartition(Partitioner):
    """Partition that draws each record's part independently of all other records, as PATE's proof requires.

    Coupling: draw the same part for every record that both tables have. Under ``add_remove`` the part of the
    additional record differs by that record; under ``replace_one`` the new record takes the old one's draw.
    So one part differs, for every draw. The draws come from the labeler's noise source (a published seed
    would tie draws to row numbers, which shift when a record is removed). Sizes are multinomial: parts of
    240 records on average have a standard deviation of 15.

    With groups, one draw a group: the same holds for all records of one person together.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import RandomPartition
        >>> from pl_privknn.privacy import SeededNoise
        >>> features, labels = torch.rand(60, 4), torch.arange(60) % 3
        >>> settings = {"num_classes": 3, "num_parts": 5, "noise": SeededNoise(0)}
        >>> parts = RandomPartition().assign(features, labels, **settings)
        >>> parts.shape, sorted(set(parts.tolist()))
        (torch.Size([60]), [0, 1, 2, 3, 4])
    """

    takes_groups: ClassVar[bool] = True

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        return noise.integers(len(labels), num_parts)


class ClassBalancedPartition(Partitioner):
    """Partition of the records of each class into equal shares; the guarantee of PATE is then conditional.

    The dealing of each class starts at a teacher drawn at random, so that classes do not depend on each
    other and small classes do not all go to the first teachers. If a record is replaced by one of the same
    class, it takes the old one's place and one part differs. Otherwise the size of a class changes, and up to
    two parts for each class concerned.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import ClassBalancedPartition
        >>> from pl_privknn.privacy import SeededNoise
        >>> features, labels = torch.rand(60, 4), torch.arange(60) % 3
        >>> settings = {"num_classes": 3, "num_parts": 5, "noise": SeededNoise(0)}
        >>> parts = ClassBalancedPartition().assign(features, labels, **settings)
        >>> parts.shape, sorted(set(parts.tolist()))
        (torch.Size([60]), [0, 1, 2, 3, 4])
    """

    condition: ClassVar[str] = (
        "the class-balanced partition covers the replacement of a record by one of the same class; adding, "
        "removing or relabelling a record can change two teachers for each class concerned, and the cost is "
        "that of one"
    )

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        starts = noise.integers(num_classes, num_parts)
        parts = torch.empty(len(labels), dtype=torch.int64)
        for label in range(num_classes):
            members = torch.nonzero(labels == label).flatten()
            members = members[random_permutation(len(members), noise)]
            parts[members] = (torch.arange(len(members)) + starts[label]) % num_parts
        return parts


def random_permutation(count: int, noise: NoiseSource) -> Tensor:
    """A random order of ``count`` places, int64 ``(count,)``.

    Sorts 62-bit keys: equal keys (for a million places, one chance in ten million) make the order a little
    less than uniform, which costs no privacy, because the order never depends on data.
    """
    return noise.integers(count, 1 << 62).argsort(stable=True)


class GuidedPartition(Partitioner):
    """Partition of clusters of similar records (Arora, "Guided PATE", Algorithm 1).

    A classifier is trained on *all* private records, its hidden layer describes each of them, k-means groups them
    (the paper: k-medoids), and the records of every cluster go to the teachers in turn.

    **Not covered by PATE's argument.** One record changes the classifier and the clusters, so others change
    clusters, and within its cluster it shifts the dealing of all later ones: any number of teachers can
    change. The ε that the noise gives for one teacher holds only if the partition is taken as given.

    Args:
        num_clusters: number of clusters (paper: 100; it saw little change from 50 to 200).
        features: ``"trained"`` for the hidden layer of a classifier trained on everything, ``"given"`` for
            the features as they arrive.
        hidden: units of the classifier's hidden layer.
        steps: optimiser steps of the classifier, at batches of 128.
        seed: for the classifier and the search.

    Raises:
        ValueError: for arguments out of range, or fewer records than clusters.

    Example:
        >>> from pl_privknn.labelers import PATE, GuidedPartition
        >>> from pl_privknn.privacy import Gaussian, epsilon_for_delta
        >>> teacher = PATE(num_teachers=100, partitioner=GuidedPartition(), noise=Gaussian(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    condition: ClassVar[str] = (
        "the guided partition is learned from all records, so one record can move clusters and shift others "
        "between teachers; the cost is that of one changed teacher, for a partition taken as given"
    )

    def __init__(
        self,
        num_clusters: int = 100,
        features: str = "trained",
        hidden: int = 64,
        steps: int = 1000,
        seed: int = 0,
    ) -> None:
        self.num_clusters = check_int("num_clusters", num_clusters, minimum=2)
        self.features = check_choice("features", features, ("trained", "given"))
        self.hidden = check_int("hidden", hidden)
        self.steps = check_int("steps", steps)
        self.seed = check_int("seed", seed, minimum=0)

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        if len(features) < self.num_clusters:
            raise InputError(
                f"the private table holds fewer records than num_clusters={self.num_clusters}; lower it"
            )
        described = self._describe(features, labels, num_classes)
        from sklearn.cluster import KMeans

        found = KMeans(self.num_clusters, n_init=1, random_state=self.seed).fit_predict(described.numpy())
        return deal_clusters(torch.from_numpy(found).long(), num_parts)

    def _describe(self, features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        if self.features == "given":
            return features
        one = torch.zeros(len(features), dtype=torch.int64)

        def build(width: int, classes: int) -> nn.Module:
            return nn.Sequential(Linear(width, self.hidden), nn.ReLU(), Linear(self.hidden, classes))

        maker = ModuleTeachers(build, self.steps, batch_size=128, seed=self.seed)
        trained = maker.train(features, labels, one, num_classes, 1, lambda fraction: None)
        weight, bias = trained.params("0.weight")[0], trained.params("0.bias")[0]
        return torch.cat([torch.relu(rows @ weight.T + bias) for rows in features.split(_ROWS_AT_ONCE)])


def deal_clusters(clusters: Tensor, num_parts: int) -> Tensor:
    """Assign records to parts in turn, cluster by cluster, each in the order of the table.

    A cluster begins where the one before it stopped, for equal sizes. (The paper's algorithm, as printed, begins each
    at the first teacher, which gives the first teachers more records.)

    Args:
        clusters: cluster of each record, int64 ``(n,)``.
        num_parts: number of teachers.

    Returns:
        int64 ``(n,)``: the teacher of each record.
    """
    parts = torch.empty_like(clusters)
    parts[clusters.argsort(stable=True)] = torch.arange(len(clusters)) % num_parts
    return parts
