"""Reverse kNN labelling: every private record votes once or a few times, however many queries there are."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_non_negative, check_positive
from pl_privknn.labelers.base import ChargesLedger, Labeler, Release, check_table
from pl_privknn.labelers.voting import complete_noise
from pl_privknn.neighbors import top_k
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Laplace, Mechanism
from pl_privknn.privacy.mechanisms.base import check_adjacency
from pl_privknn.privacy.noise import NoiseSource


class ReverseKNN(Labeler):
    """Reverse kNN labelling with a trusted curator (record-level private knowledge distillation).

    Each private record gives its label to its ``k`` nearest queries; the table of counts, one row a query
    and one column a class, is noised and released **once a round**. A record touches at most ``k`` counts,
    so ε depends on ``k`` and on the number of rounds, and not on the number of queries. The queries must
    not depend on private data; ``selection="clusters"`` of
    :class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler` asks about the centres of clusters of
    public images, and every image of a cluster takes its centre's label.

    Args:
        k: number of nearest queries that a record votes for.
        epsilon: ε of one round under pure differential privacy; sets Laplace noise of scale ``k/ε``
            (``2k/ε`` under ``replace_one``). Give this or ``noise``.
        noise: the mechanism with its noise scale, ``Laplace``, ``DiscreteLaplace``, ``Gaussian`` or
            ``DiscreteGaussian``; sensitivities are filled in.
        soft: release class probabilities too: the non-negative part of the noisy counts, normalised.
        abstain: refuse a query where the two largest noisy counts differ by less than this many standard
            deviations of that difference's noise; 0 answers every query. Post-processing, free of cost.
        adjacency: neighbouring relation; a replaced record moves twice as much as one that is added.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: unless exactly one of ``epsilon`` and ``noise`` is given, or for values out of range.
    """

    asks_in_batches = False

    def __init__(
        self,
        k: int = 1,
        epsilon: float | None = None,
        noise: Mechanism | None = None,
        soft: bool = True,
        abstain: float = 0.0,
        adjacency: Adjacency = "add_remove",
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.k = check_int("k", k)
        self.soft = soft
        self.abstain = check_non_negative("abstain", abstain)
        self.adjacency = check_adjacency(check_choice("adjacency", adjacency, ("add_remove", "replace_one")))
        self.adjacencies = (self.adjacency,)
        moved = self.k * (2 if self.adjacency == "replace_one" else 1)
        if (epsilon is None) == (noise is None):
            raise ValueError(f"epsilon={epsilon!r}, noise={noise!r}: give exactly one of them")
        if noise is None:
            noise = Laplace(scale=moved / check_positive("epsilon", epsilon))
        self.noise = complete_noise(noise, l1_sensitivity=moved, l2_sensitivity=math.sqrt(moved))
        self._features: Tensor | None = None
        self._labels: Tensor | None = None
        self._num_classes = 0

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Take the private table; see :meth:`Labeler.fit`."""
        check_table(features, labels, num_classes)
        self._features, self._labels, self._num_classes = features, labels, num_classes

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One release a round; see :meth:`Labeler.plan`."""
        return [Charge(self.noise, rounds)]

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Count, noise and decide, for all queries of a round together; see :meth:`Labeler.label`.

        Raises:
            RuntimeError: before :meth:`fit`.
            ValueError: for fewer queries than ``k``.
        """
        counts = self.counts(queries)
        row = ledger.charge(self.noise, 1)
        noise = self.noise_source.stream("counts", row)
        noisy: Tensor = self.noise.add_noise(counts, noise)  # type: ignore[attr-defined]
        return decide(noisy.double(), noise_deviation(self.noise), self.abstain, self.soft, max_answers)

    def counts(self, queries: Tensor) -> Tensor:
        """The exact counts: **private**, for the data owner and for tests only.

        Args:
            queries: float32 features, shape ``(s, d)``.

        Returns:
            int64, shape ``(s, num_classes)``.
        """
        if self._features is None or self._labels is None:
            raise RuntimeError("ReverseKNN needs the private table: call fit(features, labels) first")
        if len(queries) < self.k:
            raise ValueError(
                f"queries: there are {len(queries)}, fewer than k={self.k}; ask about more or lower k"
            )
        _, nearest = top_k(self._features, queries, self.k)
        cell = nearest.long() * self._num_classes + self._labels[:, None]
        counts = torch.bincount(cell.flatten(), minlength=len(queries) * self._num_classes)
        return counts.reshape(len(queries), self._num_classes)


def decide(
    noisy: Tensor, deviation: float, abstain: float, soft: bool, max_answers: int | None = None
) -> Release:
    """Turn noisy counts into labels; uses nothing but the released counts and public constants.

    Args:
        noisy: float64, shape ``(s, c)``.
        deviation: standard deviation of the noise on one count.
        abstain: refuse below this many standard deviations between the two largest counts.
        soft: give class probabilities too.
        max_answers: answer at most this many, the first ones.
    """
    top = noisy.topk(2, dim=1).values
    labels = noisy.argmax(dim=1)
    labels[top[:, 0] - top[:, 1] < abstain * deviation * math.sqrt(2.0)] = -1
    if max_answers is not None:
        labels[torch.nonzero(labels >= 0).flatten()[max_answers:]] = -1
    if not soft:
        return Release(labels)
    positive = noisy.clamp(min=0)
    total = positive.sum(dim=1, keepdim=True)
    uniform = torch.full_like(positive, 1.0 / positive.shape[1])
    return Release(labels, torch.where(total > 0, positive / total.clamp(min=1e-12), uniform).float())


def noise_deviation(mechanism: Mechanism) -> float:
    """Standard deviation of a mechanism's additive noise.

    Raises:
        ValueError: for a mechanism that has neither ``scale`` nor ``sigma``.
    """
    names = {field.name for field in dataclasses.fields(mechanism)}  # type: ignore[arg-type]
    if "sigma" in names:
        return float(mechanism.sigma)  # type: ignore[attr-defined]
    if "scale" in names:
        return math.sqrt(2.0) * float(mechanism.scale)  # type: ignore[attr-defined]
    raise ValueError(f"noise={mechanism!r} has neither a scale nor a sigma; use for instance Laplace")
