"""What UDA and FixMatch share: a confident prediction on a weak view teaches a strong view."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_non_negative
from pl_privknn.students.augment import StrongAugmentation
from pl_privknn.students.base import Student
from pl_privknn.students.forward import deterministic, frozen_statistics


class ConsistencyStudent(Student):
    """Trains on labels, and on unlabelled images to predict on strong views what it predicts on weak ones.

    The loss is ``L(labels) + consistency_weight · mean(consistency)``, the mean over all unlabelled images of
    the batch, counting or not. Their number for each labelled one (μ in FixMatch, up to 7) is that of the
    data module's batch sizes. Targets come from a pass without gradient and without dropout. Batch
    normalisation treats the three passes (labels, weak, strong) apart, and running statistics follow the
    first two, which look like the images of evaluation. Where a batch holds no unlabelled images, the
    labelled ones take their place.

    Args:
        consistency_weight: weight of the consistency loss.
        num_ops: see :class:`~pl_privknn.students.augment.StrongAugmentation`.
        magnitude: likewise.
        photometric: likewise.
        cutout: likewise.
        augment: ``"weak"`` or ``"none"``, for labelled images.
        **kwargs: arguments of :class:`~pl_privknn.students.base.Student`; ``augmentation`` holds for both
            views, but for its ``cutout``, which labelled images alone have.

    Raises:
        ValueError: for an argument out of its range.
    """

    def __init__(
        self,
        consistency_weight: float = 1.0,
        num_ops: int = 2,
        magnitude: float = 0.5,
        photometric: bool = False,
        cutout: float = 0.25,
        augment: str = "weak",
        **kwargs: Any,
    ) -> None:
        check_non_negative("consistency_weight", consistency_weight)
        super().__init__(augment=augment, **kwargs)
        self.strong = StrongAugmentation(
            num_ops, magnitude, photometric, cutout, self.weak.shift, self.weak.flip, self.weak.fill
        )
        # What teaches must be seen whole.
        self._whole = dataclasses.replace(self.weak, cutout=0.0)

    @abc.abstractmethod
    def consistency(self, weak_logits: Tensor, strong_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each unlabelled image, ``(n,)``, and which of them count, bool ``(n,)`` (attributes: ``(n, c)``).

        Args:
            weak_logits: ``(n, c)``, without gradient.
            strong_logits: ``(n, c)``.
        """

    def supervised(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss on labels."""
        return self.label_loss(logits, y)

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """Loss on labels and consistency; logs the share of images that count as ``train/confident``."""
        images = x if unlabeled is None else unlabeled
        # First, since autocast caches 16-bit weights: cast in a pass without gradient, they would have none.
        supervised = self.supervised(self.logits(x), y)
        with torch.no_grad(), deterministic(self.network):
            weak_logits = self.logits(self._whole(images))
        with frozen_statistics(self.network):
            strong_logits = self.logits(self.strong(images))
        losses, confident = self.consistency(weak_logits, strong_logits)
        self.log_training({"confident": confident.float().mean()}, len(images))
        return {
            "supervised": supervised,
            "consistency": self.hparams["consistency_weight"] * losses.mean(),
        }
