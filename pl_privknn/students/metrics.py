"""Accuracy of a student on classes or attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy


class AttributeAccuracy(Metric):
    """Share of right answers for each attribute; :meth:`compute` gives float32 ``(a,)``, NaN where none is known.

    An answer is right where the logit is above 0 and the attribute is 1, or neither. Attributes of -1 are left
    out. States are summed over processes.

    Args:
        num_attributes: a.
        **kwargs: see :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    right: Tensor
    known: Tensor

    def __init__(self, num_attributes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("right", "known"):
            self.add_state(name, torch.zeros(num_attributes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch.

        Args:
            logits: ``(n, a)``.
            targets: ``(n, a)``, 0 or 1 (or probabilities, cut at ½), -1 where not known.
        """
        known = targets >= 0
        self.right += (((logits > 0) == (targets > 0.5)) & known).sum(dim=0)
        self.known += known.sum(dim=0)

    def compute(self) -> Tensor:
        """Accuracy of each attribute."""
        return self.right.float() / self.known


def accuracy_metric(task: str, num_classes: int) -> MulticlassAccuracy | AttributeAccuracy:
    """Accuracy metric of ``task`` for validation and test; labels of -1 are ignored."""
    if task == "multilabel":
        return AttributeAccuracy(num_classes)
    return MulticlassAccuracy(num_classes, average="micro", ignore_index=-1)


def reliability_counts(probabilities: Tensor, labels: Tensor, bins: int = 10) -> Tensor:
    """Examples by their largest probability: number, sum of these and number of right ones, float64 ``(bins, 3)``.

    Args:
        probabilities: ``(n, c)``.
        labels: int64 ``(n,)``; examples of -1 are left out.
        bins: of equal width in [0, 1].
    """
    largest, predicted = probabilities.double()[labels >= 0].max(dim=1)
    right = (predicted == labels[labels >= 0]).double()
    places = (largest * bins).long().clamp(0, bins - 1)
    columns = torch.stack([torch.ones_like(largest), largest, right], dim=1)
    return torch.zeros(bins, 3, dtype=torch.float64).index_add_(0, places, columns)


def expected_calibration_error(counts: Tensor) -> float:
    """Expected calibration error of :func:`reliability_counts`: Σ |right − Σ p| over the bins, by all examples."""
    return float((counts[:, 2] - counts[:, 1]).abs().sum() / counts[:, 0].sum().clamp(min=1))
