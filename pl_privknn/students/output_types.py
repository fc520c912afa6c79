"""What a student's outputs mean: one class of several, or attributes that hold or don't, each by itself."""

from __future__ import annotations

import abc

from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.students.binary_losses import (
    binary_confidence,
    binary_entropy,
    binary_kl,
    binary_loss,
    binary_targets,
)
from pl_privknn.students.losses import (
    entropy,
    kl_divergence,
    label_confidence,
    label_loss,
    target_distribution,
)
from pl_privknn.students.metrics import AttributeAccuracy


class Outputs(abc.ABC):
    """Losses, probabilities and accuracy of one kind of outputs; ``c`` is the number of outputs."""

    @abc.abstractmethod
    def losses(self, logits: Tensor, y: Tensor, smoothing: float = 0.0, robustness: float = 0.0) -> Tensor:
        """Losses on labels: ``(n,)`` of classes, ``(n, c)`` of attributes."""

    @abc.abstractmethod
    def known(self, logits: Tensor, y: Tensor) -> Tensor:
        """1 where there is a label, else 0, in the shape of :meth:`losses`."""

    @abc.abstractmethod
    def confidence(self, logits: Tensor, y: Tensor) -> Tensor:
        """Probability that the model gives to each label, without gradient, in the shape of :meth:`losses`."""

    @abc.abstractmethod
    def divergence(self, target_logits: Tensor, logits: Tensor) -> Tensor:
        """``KL(p(target_logits) ‖ p(logits))`` of each example, ``(n,)``; of attributes the mean over them."""

    @abc.abstractmethod
    def entropy(self, logits: Tensor) -> Tensor:
        """Entropy of each prediction, ``(n,)``; of attributes the mean over them."""

    @abc.abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Float32 ``(n, c)``."""


class ClassOutputs(Outputs):
    """One class an image; outputs are the logits of a softmax."""

    def losses(self, logits: Tensor, y: Tensor, smoothing: float = 0.0, robustness: float = 0.0) -> Tensor:
        """See :func:`~pl_privknn.students.losses.label_loss`."""
        return label_loss(logits, y, smoothing, robustness)

    def known(self, logits: Tensor, y: Tensor) -> Tensor:
        """See :meth:`Outputs.known`."""
        return target_distribution(y, logits.shape[1]).sum(dim=1).sign()

    def confidence(self, logits: Tensor, y: Tensor) -> Tensor:
        """See :func:`~pl_privknn.students.losses.label_confidence`."""
        return label_confidence(logits, y)

    def divergence(self, target_logits: Tensor, logits: Tensor) -> Tensor:
        """See :func:`~pl_privknn.students.losses.kl_divergence`."""
        return kl_divergence(target_logits, logits)

    def entropy(self, logits: Tensor) -> Tensor:
        """See :func:`~pl_privknn.students.losses.entropy`."""
        return entropy(logits)

    def probabilities(self, logits: Tensor) -> Tensor:
        """See :meth:`Outputs.probabilities`."""
        return logits.float().softmax(dim=1)


class AttributeOutputs(Outputs):
    """Attributes; each output is the logit of a Bernoulli variable of its own."""

    def losses(self, logits: Tensor, y: Tensor, smoothing: float = 0.0, robustness: float = 0.0) -> Tensor:
        """See :func:`~pl_privknn.students.binary_losses.binary_loss`."""
        return binary_loss(logits, y, smoothing, robustness)

    def known(self, logits: Tensor, y: Tensor) -> Tensor:
        """See :meth:`Outputs.known`."""
        return binary_targets(y, logits.shape[1])[1].float()

    def confidence(self, logits: Tensor, y: Tensor) -> Tensor:
        """See :func:`~pl_privknn.students.binary_losses.binary_confidence`."""
        return binary_confidence(logits, y)

    def divergence(self, target_logits: Tensor, logits: Tensor) -> Tensor:
        """See :func:`~pl_privknn.students.binary_losses.binary_kl`."""
        return binary_kl(target_logits, logits)

    def entropy(self, logits: Tensor) -> Tensor:
        """See :func:`~pl_privknn.students.binary_losses.binary_entropy`."""
        return binary_entropy(logits)

    def probabilities(self, logits: Tensor) -> Tensor:
        """See :meth:`Outputs.probabilities`."""
        return logits.float().sigmoid()


TASKS: dict[str, Outputs] = {"multiclass": ClassOutputs(), "multilabel": AttributeOutputs()}


def accuracy_metric(task: str, num_classes: int) -> MulticlassAccuracy | AttributeAccuracy:
    """The metric that validation and test of ``task`` count with; -1 is left out."""
    if task == "multilabel":
        return AttributeAccuracy(num_classes)
    return MulticlassAccuracy(num_classes, average="micro", ignore_index=-1)
