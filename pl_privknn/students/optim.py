"""Optimizers and learning-rate schedules that a student is configured with, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULERS = ("none", "cosine", "linear")


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer called ``name`` over ``parameters``.

    Args:
        name: one of :data:`OPTIMIZERS`.
        parameters: what to train.
        lr: peak learning rate.
        momentum: SGD's (Nesterov) momentum, or Adam's first β.
        weight_decay: L2 penalty (decoupled for ``"adamw"``).
    """
    if name == "sgd":
        return torch.optim.SGD(
            parameters, lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0
        )
    options: dict[str, Any] = {"lr": lr, "betas": (momentum, 0.999), "weight_decay": weight_decay}
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(parameters, **options)


def lr_factor(scheduler: str, step: int, total: float, warmup_steps: int) -> float:
    """Factor on the learning rate at ``step`` of a schedule of ``total`` steps.

    Rises linearly over ``warmup_steps``, then stays (``"none"``) or falls to zero along half a cosine or a
    straight line. Past the end it stays at zero.

    Args:
        scheduler: one of :data:`SCHEDULERS`.
        step: optimizer steps since the schedule began.
        total: length of the schedule in optimizer steps, warm-up included.
        warmup_steps: steps until the peak.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if scheduler == "none":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, total - warmup_steps))
    return 0.5 * (1 + math.cos(math.pi * progress)) if scheduler == "cosine" else 1 - progress
