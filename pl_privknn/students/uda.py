"""Unsupervised data augmentation (Xie, Dai, Hovy, Luong & Le, 2020)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pl_privknn._checks import check_choice, check_open_unit, check_positive
from pl_privknn.students.binary_losses import binary_uda_loss
from pl_privknn.students.consistency import ConsistencyStudent
from pl_privknn.students.losses import ANNEALING, annealed_threshold, label_confidence, uda_loss


class UDAStudent(ConsistencyStudent):
    """Learns the sharpened prediction of the weak view, where that is confident, on the strong view.

    Of attributes, each counts by itself where its own probability, or that of its absence, passes the threshold.

    Args:
        temperature: sharpening of targets (0.4 in the paper).
        threshold: confidence above which an image counts (0.8 in the paper).
        annealing: training signal annealing: labels that the student gives more than a threshold to are left
            out, and the threshold rises to 1 over the schedule: ``"none"``, ``"linear"``, ``"log"`` or
            ``"exp"``. Useful where there are very few labels.
        **kwargs: arguments of :class:`~pl_privknn.students.consistency.ConsistencyStudent`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> from pl_privknn.students import UDAStudent
        >>> student = UDAStudent(temperature=0.4, network="small_cnn", num_classes=10, image_size=8)
        >>> student(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, temperature: float = 0.4, threshold: float = 0.8, annealing: str = "none", **kwargs: Any
    ) -> None:
        check_positive("temperature", temperature)
        check_open_unit("threshold", threshold)
        check_choice("annealing", annealing, ANNEALING)
        super().__init__(**kwargs)
        if self.task == "multilabel" and annealing != "none":
            raise ValueError(
                f"annealing={annealing!r} compares the probability of one class with 1/c; with task='multilabel' "
                "use annealing='none'"
            )

    def supervised(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss on labels that annealing leaves in."""
        annealing = self.hparams["annealing"]
        if annealing == "none":
            return self.label_loss(logits, y)
        threshold = annealed_threshold(annealing, self.progress, self.num_classes)
        return self.label_loss(logits, y, keep=label_confidence(logits, y) <= threshold)

    def consistency(self, weak_logits: Tensor, strong_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`~pl_privknn.students.losses.uda_loss`, of attributes ``binary_uda_loss``."""
        loss = binary_uda_loss if self.task == "multilabel" else uda_loss
        return loss(weak_logits, strong_logits, self.hparams["temperature"], self.hparams["threshold"])
