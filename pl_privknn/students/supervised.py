"""The student that learns from labels alone: the measure for all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_non_negative
from pl_privknn.students.base import Student
from pl_privknn.students.losses import target_distribution


class SupervisedStudent(Student):
    """Trains on labelled images and ignores unlabelled ones.

    Args:
        mixup: α of mixup (Zhang, Cisse, Dauphin & Lopez-Paz 2018, arXiv:1710.09412): each image of a batch, or its
            features where there is an extractor, and its label are mixed with another one's, in shares that are
            drawn from Beta(α, α) once a batch. 0 mixes nothing. Classes alone; attributes are not known for every
            image.
        **kwargs: arguments of :class:`~pl_privknn.students.base.Student`.

    Raises:
        ValueError: for an argument out of its range, or ``mixup`` of attributes.

    Example:
        >>> import torch
        >>> from pl_privknn.students import SupervisedStudent
        >>> student = SupervisedStudent(network="small_cnn", num_classes=10, image_size=8)
        >>> student(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *args: Any, mixup: float = 0.0, **kwargs: Any) -> None:
        check_non_negative("mixup", mixup)
        super().__init__(*args, **kwargs)
        if mixup and self.task != "multiclass":
            raise ValueError(f"mixup={mixup!r} is for classes, and task={self.task!r}; leave it out")

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """The loss on labels."""
        # Vectors where there is an extractor: a mixed image would need it once more.
        inputs = self.normalize(x)
        if self.hparams["mixup"] and self.training:
            inputs, y = mixed(inputs, target_distribution(y, self.num_classes), self.hparams["mixup"])
        return {"supervised": self.label_loss(self.network(inputs), y)}


def mixed(inputs: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Pairs of inputs and of their labels, mixed in the same shares.

    Args:
        inputs: images or vectors, float ``(n, …)``.
        labels: float ``(n, c)``; rows of zeros, which are no labels, are left out with their inputs.
        alpha: the share is drawn from Beta(alpha, alpha).

    Returns:
        As many inputs and labels as have one.
    """
    known = labels.sum(dim=1) > 0
    inputs, labels = inputs[known], labels[known]
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    order = torch.randperm(len(inputs), device=inputs.device)
    return torch.lerp(inputs[order], inputs, share), torch.lerp(labels[order], labels, share)
