"""Supervised student, the baseline of all others."""

from __future__ import annotations

from torch import Tensor

from pl_privknn.students.base import Student


class SupervisedStudent(Student):
    """Student that trains on labelled images and ignores unlabelled ones.

    Args:
        **kwargs: arguments of :class:`~pl_privknn.students.base.Student`.

    Example:
        >>> import torch
        >>> from pl_privknn.students import SupervisedStudent
        >>> student = SupervisedStudent(network="small_cnn", num_classes=10, image_size=8)
        >>> student(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    @property
    def trains_on_rows(self) -> bool:
        """Whether labelled images are used without augmentation."""
        return not self.hparams["augment_labeled"]

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """The loss on labels."""
        return {"supervised": self.label_loss(self.logits(x), y)}
