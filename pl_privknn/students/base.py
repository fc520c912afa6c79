"""The student that learns from labels: its batches, losses and accuracies."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn._checks import check_choice
from pl_privknn.argument_groups import as_group, plain_groups
from pl_privknn.students.losses import TASKS, AttributeAccuracy, LabelLoss, accuracy_metric, weighted_mean
from pl_privknn.students.module import StudentModule


def split_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Labelled images, their labels and unlabelled images (or None) of a training batch.

    Raises:
        ValueError: if the batch is neither ``{"labeled": (x, y), "unlabeled": x}`` nor ``(x, y)``.
    """
    unlabeled = None
    labeled = batch
    if isinstance(batch, Mapping):
        if "labeled" not in batch:
            raise ValueError(f"batch with keys {sorted(batch)}: want 'labeled': (x, y) and 'unlabeled': x")
        labeled, unlabeled = batch["labeled"], batch.get("unlabeled")
    if not isinstance(labeled, Sequence) or len(labeled) != 2:
        raise ValueError(f"labelled batch of type {type(labeled).__name__}: want a pair (images, labels)")
    if unlabeled is not None and not isinstance(unlabeled, Tensor):
        unlabeled = unlabeled[0]
    return labeled[0], labeled[1], unlabeled


@contextlib.contextmanager
def deterministic(network: nn.Module) -> Iterator[None]:
    """Within: every module but batch normalisation is in evaluation mode (no dropout or stochastic depth).

    Args:
        network: whose modules change mode; they get their own back.
    """
    modes = [(module, module.training) for module in network.modules()]
    try:
        for module, training in modes:
            module.training = training and isinstance(module, _BatchNorm)
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Within: batch normalisation in training mode uses the batch's statistics but keeps its running ones.

    Bitwise: a momentum of 0 would still count batches, and would turn an infinite activation into NaN.

    Args:
        network: whose running statistics stand still.
    """
    norms = [
        module
        for module in network.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]
    try:
        for norm in norms:
            norm.track_running_stats = False
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


AUGMENT = ("none", "weak")


class Student(StudentModule, abc.ABC):
    """A classifier trained on public images and released labels; subclasses say by what objective.

    A training batch is ``{"labeled": (x, y), "unlabeled": x}``, or without ``"unlabeled"``, or a plain
    ``(x, y)``. ``x`` is float32 ``(n, channels, height, width)`` in [0, 1]; ``y`` is int64 ``(n,)`` with -1
    for "no label", or float ``(n, num_classes)`` with rows that sum to one. Validation and test batches are
    ``(x, y)``, prediction batches ``x`` or ``(x, …)``.

    Under ``task="multilabel"`` each output is an attribute with a probability of its own: ``y`` is
    ``(n, num_classes)``, int64 0 or 1 or float probabilities, -1 where not known; losses are binary, means over
    attributes; ``val/accuracy`` and ``test/accuracy`` are mean attribute accuracies, and each attribute's own is
    logged beside them as ``val/accuracy_<name>``, by the names that the data module gives.

    Args:
        *args: arguments of :class:`~pl_privknn.students.module.StudentModule`, in its order.
        loss: the loss on labels.
        augment: ``"weak"`` moves (and mirrors) labelled images in training, each by a draw of its own.
        task: ``"multiclass"`` or ``"multilabel"``.
        **kwargs: arguments of :class:`~pl_privknn.students.module.StudentModule`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.students import Student, VATStudent
        >>> student = VATStudent(image_size=8)
        >>> isinstance(student, Student), sorted(student.objective.__annotations__)
        (True, ['return', 'unlabeled', 'x', 'y'])
    """

    def __init__(
        self,
        *args: Any,
        loss: LabelLoss = LabelLoss(),
        augment: str = "none",
        task: str = "multiclass",
        **kwargs: Any,
    ) -> None:
        check_choice("task", task, tuple(TASKS))
        check_choice("augment", augment, AUGMENT)
        super().__init__(*args, **kwargs)
        self.task, self.outputs = task, TASKS[task]
        self.loss = as_group("loss", loss, LabelLoss())
        self.save_hyperparameters(plain_groups(loss=self.loss))
        self.val_accuracy = accuracy_metric(task, self.num_classes)
        self.test_accuracy = accuracy_metric(task, self.num_classes)

    @abc.abstractmethod
    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None) -> dict[str, Tensor]:
        """Weighted parts of the training loss, which is their sum; each is logged as ``train/<name>``.

        Args:
            x: labelled images, ``(n, channels, height, width)``.
            y: their labels, int64 ``(n,)`` or float ``(n, num_classes)``.
            unlabeled: images without labels, or None where the batch holds none.
        """

    def label_loss(self, logits: Tensor, y: Tensor, keep: Tensor | None = None) -> Tensor:
        """Mean loss on labels, with the smoothing, robustness and weighting that the student was given.

        Args:
            logits: ``(n, c)``.
            y: labels, int64 ``(n,)`` or float ``(n, c)``; attributes ``(n, c)``.
            keep: bool ``(n,)``, which examples of classes count; all that have a label if None.
        """
        loss = self.loss
        losses = self.outputs.losses(logits, y, loss.label_smoothing, loss.label_robustness)
        weights = self.outputs.known(logits, y)
        if keep is not None:
            weights = weights * keep
        if loss.confidence_weighting:
            confidence = self.outputs.confidence(logits, y)
            weights = weights * confidence ** (loss.confidence_weighting * self.progress)
        return weighted_mean(losses, weights)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Sum of the objective's parts; logs ``train/loss`` and each part."""
        x, y, unlabeled = split_batch(batch)
        if self.hparams["augment"] == "weak":
            x = self.weak(x)
        parts = self.objective(x, y, unlabeled)
        loss = torch.stack(list(parts.values())).sum()
        self.log_training({"loss": loss, **parts}, len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val/accuracy`` and ``val/loss``."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test/accuracy`` and ``test/loss``."""
        self._evaluate(batch, "test", self.test_accuracy)

    def on_validation_epoch_end(self) -> None:
        """Log the accuracy of each attribute, where there are attributes."""
        self._log_attributes("val", self.val_accuracy)

    def on_test_epoch_end(self) -> None:
        """Log the accuracy of each attribute, where there are attributes."""
        self._log_attributes("test", self.test_accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probabilities of classes, or of attributes, float32 ``(n, num_classes)``."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.outputs.probabilities(self(images))

    def _log_attributes(self, stage: str, accuracy: MulticlassAccuracy | AttributeAccuracy) -> None:
        if not isinstance(accuracy, AttributeAccuracy):
            return
        each = accuracy.compute()
        accuracy.reset()
        names = getattr(getattr(self.trainer, "datamodule", None), "attribute_names", ())
        if len(names) != len(each):
            names = tuple(map(str, range(len(each))))
        self.log(f"{stage}/accuracy", each.nanmean(), prog_bar=True)
        for name, value in zip(names, each, strict=True):
            if bool(value.isfinite()):
                self.log(f"{stage}/accuracy_{name}", value)

    def _evaluate(self, batch: Any, stage: str, accuracy: MulticlassAccuracy | AttributeAccuracy) -> None:
        x, y = batch[0], batch[1]
        logits = self(x)
        if isinstance(accuracy, MulticlassAccuracy) and y.ndim == 2:
            y = y.argmax(dim=1)
        accuracy.update(logits, y)
        loss = weighted_mean(self.outputs.losses(logits, y), self.outputs.known(logits, y))
        if isinstance(accuracy, MulticlassAccuracy):  # of attributes, see _log_attributes
            self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(x))
        self.log(f"{stage}/loss", loss, batch_size=len(x), sync_dist=True)
