"""Loss functions of the students for attributes: every output is a Bernoulli variable of its own.

The counterparts of :mod:`pl_privknn.students.losses`: pure functions of logits and targets, in float32. Losses of
examples are means over attributes, so their scale does not depend on how many there are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def binary_targets(
    targets: Tensor, num_attributes: int, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Targets as probabilities, and which of them are known.

    Args:
        targets: ``(n, a)``, 0 or 1 or float probabilities; -1 where not known.
        num_attributes: ``a``.
        label_smoothing: ``s`` turns ``t`` into ``(1 - s) t + s / 2``.

    Returns:
        float32 ``(n, a)``, zero where not known, and bool ``(n, a)``.

    Raises:
        ValueError: if the shape of ``targets`` is another.
    """
    if targets.ndim != 2 or targets.shape[1] != num_attributes:
        raise ValueError(
            f"targets: shape {tuple(targets.shape)}, {targets.dtype}; want attributes of shape (n, {num_attributes})"
        )
    known = targets >= 0
    smoothed = (1 - label_smoothing) * targets.float() + label_smoothing / 2
    return torch.where(known, smoothed, 0.0), known


def binary_loss(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, robustness: float = 0.0
) -> Tensor:
    """Loss of each attribute of each example, ``(n, a)``; zero where the attribute is not known.

    ``-t log p - (1 - t) log(1 - p)``, or with ``q = robustness`` in (0, 1] the generalised cross-entropy
    ``t (1 - p^q) / q + (1 - t)(1 - (1 - p)^q) / q`` (Zhang & Sabuncu 2018).

    Args:
        logits: ``(n, a)``.
        targets: see :func:`binary_targets`.
        label_smoothing: likewise.
        robustness: ``q``, in [0, 1].
    """
    target, known = binary_targets(targets, logits.shape[1], label_smoothing)
    log_yes, log_no = F.logsigmoid(logits.float()), F.logsigmoid(-logits.float())
    if robustness == 0:
        cost_yes, cost_no = -log_yes, -log_no
    else:
        # -expm1(q log p) / q is (1 - p^q) / q without cancellation near p = 1.
        cost_yes = -torch.expm1(robustness * log_yes) / robustness
        cost_no = -torch.expm1(robustness * log_no) / robustness
    return torch.where(known, target * cost_yes + (1 - target) * cost_no, 0.0)


def binary_confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """Probability ``t p + (1 - t)(1 - p)`` that the model gives to each label, no gradient, ``(n, a)``.

    Args:
        logits: ``(n, a)``.
        targets: see :func:`binary_targets`.
    """
    target, _ = binary_targets(targets, logits.shape[1])
    p = logits.detach().float().sigmoid()
    return target * p + (1 - target) * (1 - p)


def binary_kl(target_logits: Tensor, logits: Tensor) -> Tensor:
    """``KL(Bernoulli(σ(target_logits)) ‖ Bernoulli(σ(logits)))``, in nats, mean over attributes, ``(n,)``.

    Args:
        target_logits: ``(n, a)``.
        logits: ``(n, a)``.
    """
    return _elementwise_kl(target_logits, logits).mean(dim=1)


def binary_entropy(logits: Tensor) -> Tensor:
    """Entropy of each attribute's prediction, in nats, mean over attributes, ``(n,)``.

    Args:
        logits: ``(n, a)``.
    """
    logits = logits.float()
    p = logits.sigmoid()
    return -(p * F.logsigmoid(logits) + (1 - p) * F.logsigmoid(-logits)).mean(dim=1)


def binary_uda_loss(
    weak_logits: Tensor, strong_logits: Tensor, temperature: float = 0.4, threshold: float = 0.8
) -> tuple[Tensor, Tensor]:
    """UDA's consistency loss for attributes, each of which counts by itself.

    Args:
        weak_logits: ``(n, a)``; no gradient flows through them.
        strong_logits: ``(n, a)``, other views of the same images.
        temperature: sharpening: the target is ``σ(weak / temperature)``.
        threshold: confidence ``max(p, 1 - p)`` above which an attribute counts, before sharpening.

    Returns:
        Losses ``(n,)``, means over all attributes with zeros for those that don't count, and which of them
        count, bool ``(n, a)``.
    """
    target = weak_logits.detach().float()
    confident = target.abs().sigmoid() > threshold
    return (_elementwise_kl(target / temperature, strong_logits) * confident).mean(dim=1), confident


def binary_fixmatch_loss(
    weak_logits: Tensor, strong_logits: Tensor, threshold: float = 0.95
) -> tuple[Tensor, Tensor]:
    """FixMatch's consistency loss for attributes, each of which counts by itself.

    Args:
        weak_logits: ``(n, a)``; no gradient flows through them.
        strong_logits: ``(n, a)``, other views of the same images.
        threshold: confidence ``max(p, 1 - p)`` from which on an attribute counts.

    Returns:
        As :func:`binary_uda_loss`.
    """
    weak = weak_logits.detach().float()
    confident = weak.abs().sigmoid() >= threshold
    losses = F.binary_cross_entropy_with_logits(strong_logits.float(), (weak > 0).float(), reduction="none")
    return (losses * confident).mean(dim=1), confident


def _elementwise_kl(target_logits: Tensor, logits: Tensor) -> Tensor:
    target_logits, logits = target_logits.float(), logits.float()
    p = target_logits.sigmoid()
    yes = F.logsigmoid(target_logits) - F.logsigmoid(logits)
    no = F.logsigmoid(-target_logits) - F.logsigmoid(-logits)
    return p * yes + (1 - p) * no
