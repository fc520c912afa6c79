"""What noisy SGD does with a noisy gradient: its optimizer and the learning rate over its plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from pl_privknn._checks import check_choice, check_finite, check_non_negative, check_positive

OPTIMIZERS = ("sgd", "adam")
SCHEDULERS = ("none", "cosine", "linear")


def check_updates(
    optimizer: str, lr: float, momentum: float, weight_decay: float, scheduler: str, noise_limit: float | None
) -> None:
    """Raise ``ValueError`` for an argument out of its range."""
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_choice("scheduler", scheduler, SCHEDULERS)
    check_positive("lr", lr)
    if noise_limit is not None:
        check_positive("noise_limit", noise_limit)
    if not 0 <= check_finite("momentum", momentum) < 1:
        raise ValueError(f"momentum={momentum!r} must lie in [0, 1)")
    check_non_negative("weight_decay", weight_decay)


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam whose first β is the momentum."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return torch.optim.Adam(parameters, lr=lr, betas=(momentum, 0.999), weight_decay=weight_decay)


def scheduled(peak: float, scheduler: str, left: float) -> float:
    """Learning rate where this share of the plan is left.

    By what is left of the plan, and not by the steps that this process made: after a crash the schedule still ends
    where the training does.
    """
    if scheduler == "none":
        return peak
    return peak * (left if scheduler == "linear" else 0.5 * (1 - math.cos(math.pi * left)))
