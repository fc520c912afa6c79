"""Losses of students: on released labels, consistency between views, for classes and attributes."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from pl_privknn._checks import check_finite, check_non_negative, check_switch


@dataclasses.dataclass(frozen=True)
class LabelLoss:
    """The loss on labels.

    Args:
        label_smoothing: share of each label spread evenly over all classes, in [0, 1).
        label_robustness: ``q`` of the generalised cross-entropy, in [0, 1]; 0 is the cross-entropy.
        confidence_weighting: weight labelled examples by (probability that the student gives to their label)
            to a power that rises from 0 to this value over the schedule, since early on the student knows
            nothing of labels; 0 weights all alike.
        balanced: weight each class inversely to its share of the released labels, so that rare classes count as much
            as large ones. Post-processing of the labels. Where a teacher releases probabilities, ``balanced`` of
            :class:`~pl_privknn.callbacks.LabelingOptions` moves labels and head instead.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> from pl_privknn.students import LabelLoss, SupervisedStudent
        >>> student = SupervisedStudent(image_size=8, loss=LabelLoss(label_smoothing=0.1))
        >>> loss = student.label_loss(torch.zeros(3, 10), torch.tensor([0, 1, 2]))  # log(10) for equal logits
        >>> round(float(loss), 3)
        2.303
    """

    label_smoothing: float = 0.0
    label_robustness: float = 0.0
    confidence_weighting: float = 0.0
    balanced: bool = False

    def __post_init__(self) -> None:
        check_switch("balanced", self.balanced)
        if not 0 <= check_finite("label_smoothing", self.label_smoothing) < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing!r} must lie in [0, 1)")
        if not 0 <= check_finite("label_robustness", self.label_robustness) <= 1:
            raise ValueError(f"label_robustness={self.label_robustness!r} must lie in [0, 1]")
        check_non_negative("confidence_weighting", self.confidence_weighting)


def target_distribution(targets: Tensor, num_classes: int, label_smoothing: float = 0.0) -> Tensor:
    """Targets as rows of probabilities.

    Args:
        targets: int64 ``(n,)`` with -1 for "no label", or float ``(n, num_classes)``, rows summing to one.
        num_classes: number of classes ``c``.
        label_smoothing: ``s`` turns a row ``t`` into ``(1 - s) t + s / c`` (Szegedy et al. 2016).

    Returns:
        float32 ``(n, num_classes)``; rows without a label are zero.

    Raises:
        ValueError: if the shape or dtype of ``targets`` is neither of the two.
    """
    if targets.ndim == 1 and not targets.is_floating_point():
        known = (targets >= 0).unsqueeze(1)
        rows = F.one_hot(targets.clamp(min=0).long(), num_classes).float()
    elif targets.ndim == 2 and targets.shape[1] == num_classes and targets.is_floating_point():
        known = targets.sum(dim=1, keepdim=True) > 0
        rows = targets.float()
    else:
        raise ValueError(
            f"targets: shape {tuple(targets.shape)}, {targets.dtype}; expected int64 (n,) or float "
            f"(n, {num_classes})"
        )
    return torch.where(known, (1 - label_smoothing) * rows + label_smoothing / num_classes, 0.0)


def label_loss(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, robustness: float = 0.0
) -> Tensor:
    """Loss of each example under hard or soft labels, shape ``(n,)``; zero where there is no label.

    With ``robustness`` 0 it is the cross-entropy ``-Σ_c t_c log p_c``. With ``q = robustness`` in (0, 1] it
    is the generalised cross-entropy ``Σ_c t_c (1 - p_c^q) / q`` of Zhang & Sabuncu (2018), which noisy
    labels move less; 1 is the mean absolute error, and the limit at 0 is the cross-entropy.

    Args:
        logits: ``(n, c)``.
        targets: int64 ``(n,)`` with -1 for "no label", or float ``(n, c)``.
        label_smoothing: see :func:`target_distribution`.
        robustness: ``q``, in [0, 1].
    """
    target = target_distribution(targets, logits.shape[1], label_smoothing)
    log_p = logits.float().log_softmax(dim=1)
    # -expm1(q log p) / q is (1 - p^q) / q without cancellation near p = 1.
    cost = -log_p if robustness == 0 else -torch.expm1(robustness * log_p) / robustness
    return (target * cost).sum(dim=1)


def balanced_class_weights(targets: Tensor, num_classes: int) -> Tensor:
    """Weights of classes that give each an equal part of the targets, ``(c,)``; 0 for a class without any.

    Args:
        targets: int64 ``(n,)`` with -1 for "no label", or float ``(n, c)``.
        num_classes: number of classes ``c``.
    """
    counts = target_distribution(targets, num_classes).sum(dim=0)
    return torch.where(counts > 0, counts.sum() / (num_classes * counts.clamp(min=1e-6)), 0.0)


def label_confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """Probability that the model gives to each label, ``Σ_c t_c p_c``, without gradient, shape ``(n,)``.

    Args:
        logits: ``(n, c)``.
        targets: int64 ``(n,)`` with -1 for "no label", or float ``(n, c)``.
    """
    target = target_distribution(targets, logits.shape[1])
    return (target * logits.detach().float().softmax(dim=1)).sum(dim=1)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """``Σ w l / Σ w``, and zero (with a gradient of zero) where all weights are zero.

    Args:
        losses: ``(n,)``.
        weights: ``(n,)``, at least zero.
    """
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(losses.dtype).tiny)


def kl_divergence(target_logits: Tensor, logits: Tensor) -> Tensor:
    """``KL(softmax(target_logits) ‖ softmax(logits))`` of each row, in nats, shape ``(n,)``.

    Args:
        target_logits: ``(n, c)``.
        logits: ``(n, c)``.
    """
    log_target = target_logits.float().log_softmax(dim=1)
    return (log_target.exp() * (log_target - logits.float().log_softmax(dim=1))).sum(dim=1)


def uda_loss(
    weak_logits: Tensor, strong_logits: Tensor, temperature: float = 0.4, threshold: float = 0.8
) -> tuple[Tensor, Tensor]:
    """Consistency loss of UDA (Xie et al. 2020) of each example, and which examples count.

    ``1[max p(weak) > threshold] · KL(softmax(weak / temperature) ‖ softmax(strong))``; no gradient flows
    through the weak view.

    Args:
        weak_logits: ``(n, c)``.
        strong_logits: ``(n, c)``, other views of the same images.
        temperature: sharpening of the target.
        threshold: confidence above which an example counts, before sharpening.

    Returns:
        Losses ``(n,)``, zero where an example doesn't count, and a bool mask ``(n,)``.
    """
    confident = weak_logits.detach().float().softmax(dim=1).amax(dim=1) > threshold
    losses = kl_divergence(weak_logits.detach().float() / temperature, strong_logits)
    return losses * confident, confident


def fixmatch_loss(
    weak_probabilities: Tensor, strong_logits: Tensor, threshold: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Consistency loss of FixMatch (Sohn et al. 2020) of each example, and which examples count.

    ``1[max p ≥ threshold] · CE(arg-max p, softmax(strong))`` for ``p`` the prediction on the weak view.

    Args:
        weak_probabilities: ``(n, c)``; no gradient flows through them.
        strong_logits: ``(n, c)``, other views of the same images.
        threshold: confidence from which on an example counts.

    Returns:
        Losses ``(n,)``, zero where an example doesn't count, and a bool mask ``(n,)``.
    """
    confidence, pseudo_labels = weak_probabilities.detach().max(dim=1)
    confident = confidence >= threshold
    return F.cross_entropy(strong_logits.float(), pseudo_labels, reduction="none") * confident, confident


class Outputs:
    """Losses and probabilities of classes: outputs are the logits of a softmax, ``(n, c)``."""

    def rows(self, logits: Tensor) -> Tensor:
        """Logits of multi-class problems, one problem a row."""
        return logits

    def targets(self, y: Tensor, num_outputs: int) -> Tensor:
        """Labels of :meth:`rows` as probabilities, zero where there is none."""
        return target_distribution(y, num_outputs)

    def losses(self, logits: Tensor, y: Tensor, smoothing: float = 0.0, robustness: float = 0.0) -> Tensor:
        """:func:`label_loss`, ``(n,)`` of classes, ``(n, c)`` of attributes; zero where there is no label."""
        losses = label_loss(self.rows(logits), self.targets(y, logits.shape[1]), smoothing, robustness)
        return self._shaped(losses, logits)

    def known(self, logits: Tensor, y: Tensor) -> Tensor:
        """1 where there is a label, else 0, in the shape of :meth:`losses`."""
        return self._shaped(self.targets(y, logits.shape[1]).sum(dim=1).sign(), logits)

    def confidence(self, logits: Tensor, y: Tensor) -> Tensor:
        """:func:`label_confidence`, in the shape of :meth:`losses`."""
        return self._shaped(label_confidence(self.rows(logits), self.targets(y, logits.shape[1])), logits)

    def divergence(self, target_logits: Tensor, logits: Tensor) -> Tensor:
        """:func:`kl_divergence` of each example, ``(n,)``; of attributes the mean over them."""
        return kl_divergence(self.rows(target_logits), self.rows(logits)).view(len(logits), -1).mean(dim=1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities, float32 ``(n, c)``."""
        return logits.float().softmax(dim=1)

    def hits(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Whether each example is predicted correctly, bool ``(n,)``."""
        return probabilities.argmax(dim=1) == labels

    def decisions(self, probabilities: Tensor) -> Tensor:
        """Labels that probabilities stand for, as :meth:`hits` takes them."""
        return probabilities.argmax(dim=1)

    def _shaped(self, values: Tensor, logits: Tensor) -> Tensor:
        return values


class AttributeOutputs(Outputs):
    """Losses and probabilities of attributes, each a problem of two classes: absent, with logit 0, and present."""

    def rows(self, logits: Tensor) -> Tensor:
        """Logits ``(n · a, 2)``, attribute by attribute of each example."""
        present = logits.float().flatten()
        return torch.stack([torch.zeros_like(present), present], dim=1)

    def targets(self, y: Tensor, num_outputs: int) -> Tensor:
        """Targets of two classes for each attribute, given as 0, 1 or a probability; zero where it is -1 (unknown).

        Raises:
            ValueError: if the shape of ``y`` is not ``(n, num_outputs)``.
        """
        if y.ndim != 2 or y.shape[1] != num_outputs:
            raise ValueError(
                f"targets: shape {tuple(y.shape)}, {y.dtype}; expected attributes of shape (n, {num_outputs})"
            )
        present = y.float().flatten()
        return torch.stack([1 - present, present], dim=1) * (present >= 0).unsqueeze(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """See :meth:`Outputs.probabilities`."""
        return logits.float().sigmoid()

    def hits(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Share of each example's attributes that are predicted correctly, float64 ``(n,)``."""
        return ((probabilities > 0.5) == labels).double().mean(dim=1)

    def decisions(self, probabilities: Tensor) -> Tensor:
        """See :meth:`Outputs.decisions`."""
        return probabilities > 0.5

    def _shaped(self, values: Tensor, logits: Tensor) -> Tensor:
        return values.view(logits.shape)


TASKS: dict[str, Outputs] = {"multiclass": Outputs(), "multilabel": AttributeOutputs()}
