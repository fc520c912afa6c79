"""FixMatch (Sohn et al., 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_open_unit
from pl_privknn.students.binary_losses import binary_fixmatch_loss
from pl_privknn.students.consistency import ConsistencyStudent
from pl_privknn.students.losses import align, fixmatch_loss, target_distribution


class FixMatchStudent(ConsistencyStudent):
    """Learns the class of a confident prediction on the weak view, as a hard label, on the strong view.

    Of attributes, each counts by itself where its own probability, or that of its absence, passes the threshold.

    Args:
        threshold: confidence from which on an image counts (0.95 in the paper).
        alignment: scale predictions on weak views so that their mean over time follows that of the labels.
        **kwargs: arguments of :class:`~pl_privknn.students.consistency.ConsistencyStudent`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> from pl_privknn.students import FixMatchStudent
        >>> student = FixMatchStudent(threshold=0.95, network="small_cnn", num_classes=10, image_size=8)
        >>> student(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    prediction_mean: Tensor
    label_mean: Tensor

    def __init__(self, threshold: float = 0.95, alignment: bool = False, **kwargs: Any) -> None:
        check_open_unit("threshold", threshold)
        super().__init__(**kwargs)
        if self.task == "multilabel" and alignment:
            raise ValueError(
                "alignment=True scales the probabilities of classes that exclude each other; with "
                "task='multilabel' leave it out"
            )
        if alignment:
            uniform = torch.full((self.num_classes,), 1 / self.num_classes)
            self.register_buffer("prediction_mean", uniform)
            self.register_buffer("label_mean", uniform.clone())

    def supervised(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss on labels; their mean is kept for alignment."""
        if self.hparams["alignment"]:
            labels = target_distribution(y, self.num_classes)
            count = labels.sum()
            if count > 0:
                self.label_mean.lerp_(labels.sum(dim=0) / count, 0.01)
        return self.label_loss(logits, y)

    def consistency(self, weak_logits: Tensor, strong_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`~pl_privknn.students.losses.fixmatch_loss`, and ``align`` and ``binary_fixmatch_loss``."""
        if self.task == "multilabel":
            return binary_fixmatch_loss(weak_logits, strong_logits, self.hparams["threshold"])
        probabilities = weak_logits.float().softmax(dim=1)
        if self.hparams["alignment"]:
            self.prediction_mean.lerp_(probabilities.mean(dim=0), 0.01)
            probabilities = align(probabilities, self.prediction_mean, self.label_mean)
        return fixmatch_loss(probabilities, strong_logits, self.hparams["threshold"])

    def reinitialize(self) -> None:
        """Draw fresh weights (see the base class) and start the means of alignment again."""
        super().reinitialize()
        if self.hparams["alignment"]:
            self.prediction_mean.fill_(1 / self.num_classes)
            self.label_mean.fill_(1 / self.num_classes)
