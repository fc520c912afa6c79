"""Students by consistency of two views of an unlabelled image: UDA and FixMatch."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_non_negative, check_open_unit, check_positive
from pl_privknn.students.augment import StrongAugmentation
from pl_privknn.students.base import Student, deterministic, frozen_statistics
from pl_privknn.students.losses import (
    fixmatch_loss,
    uda_loss,
)


class ConsistencyStudent(Student):
    """Base class of students trained on labels and on consistency of strong with weak views.

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
        cutout: likewise.
        augment_labeled: augment labelled images too.
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
        cutout: float = 0.25,
        augment_labeled: bool = True,
        **kwargs: Any,
    ) -> None:
        check_non_negative("consistency_weight", consistency_weight)
        super().__init__(augment_labeled=augment_labeled, **kwargs)
        if kwargs.get("image_size") == 1:
            raise ValueError(
                f"image_size=1: {type(self).__name__} moves pixels of images; for vectors take SupervisedStudent or "
                "VATStudent"
            )
        self.strong = StrongAugmentation(
            num_ops, magnitude, cutout, self.weak.shift, self.weak.flip, self.weak.fill
        )
        # What teaches must be seen whole.
        self._whole = dataclasses.replace(self.weak, cutout=0.0)

    @abc.abstractmethod
    def consistency(self, weak_logits: Tensor, strong_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each unlabelled image, ``(n,)``, and which of them count, bool ``(n,)``.

        Args:
            weak_logits: ``(n, c)``, without gradient; of attributes a row each, see
                :meth:`~pl_privknn.students.losses.Outputs.rows`.
            strong_logits: likewise.
        """

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """Loss on labels and consistency; logs the share of images that count as ``train/confident``."""
        images = x if unlabeled is None else unlabeled
        # First, since autocast caches 16-bit weights: cast in a pass without gradient, they would have none.
        supervised = self.label_loss(self.logits(x), y)
        with torch.no_grad(), deterministic(self.network):
            weak_logits = self.logits(self._whole(images))
        with frozen_statistics(self.network):
            strong_logits = self.logits(self.strong(images))
        rows = self.outputs.rows
        losses, confident = self.consistency(rows(weak_logits), rows(strong_logits))
        self.log_training({"confident": confident.float().mean()}, len(images))
        return {
            "supervised": supervised,
            "consistency": self.hparams["consistency_weight"] * losses.mean(),
        }


class UDAStudent(ConsistencyStudent):
    """UDA: the strong view's target is the sharpened prediction of the weak view, where that is confident.

    Of attributes, each counts by itself where its own probability, or that of its absence, passes the threshold.

    Args:
        temperature: sharpening of targets (0.4 in the paper).
        threshold: confidence above which an image counts (0.8 in the paper).
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

    def __init__(self, temperature: float = 0.4, threshold: float = 0.8, **kwargs: Any) -> None:
        check_positive("temperature", temperature)
        check_open_unit("threshold", threshold)
        super().__init__(**kwargs)

    def consistency(self, weak_logits: Tensor, strong_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`~pl_privknn.students.losses.uda_loss`."""
        return uda_loss(weak_logits, strong_logits, self.hparams["temperature"], self.hparams["threshold"])


class FixMatchStudent(ConsistencyStudent):
    """FixMatch: the strong view's hard label is the class of a confident prediction on the weak view.

    Of attributes, each counts by itself where its own probability, or that of its absence, passes the threshold.

    Args:
        threshold: confidence from which on an image counts (0.95 in the paper).
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

    def __init__(self, threshold: float = 0.95, **kwargs: Any) -> None:
        check_open_unit("threshold", threshold)
        super().__init__(**kwargs)

    def consistency(self, weak_logits: Tensor, strong_logits: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`~pl_privknn.students.losses.fixmatch_loss`."""
        return fixmatch_loss(weak_logits.float().softmax(dim=1), strong_logits, self.hparams["threshold"])
