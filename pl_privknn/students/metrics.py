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
