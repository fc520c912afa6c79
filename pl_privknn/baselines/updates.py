"""What noisy SGD does with a noisy gradient: its optimizer and the learning rate over its plan."""

from __future__ import annotations

import dataclasses
import math

from pl_privknn._checks import check_positive
from pl_privknn.networks.base import Optimization


@dataclasses.dataclass(frozen=True)
class NoisyOptimization(Optimization):
    """Optimizer and learning-rate schedule of a private training; they work on noisy gradients.

    Args:
        optimizer: ``"sgd"`` (with momentum) or ``"adam"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty.
        scheduler: ``"none"``, ``"cosine"`` or ``"linear"`` over the planned steps.
        noise_limit: lower the rate where there is more noise than this, see
            :func:`~pl_privknn.privacy.noisy_steps.noise_aware_lr`; None never lowers it.

    Raises:
        ValueError: for an argument out of its range.
    """

    optimizers = ("sgd", "adam")
    nesterov = False

    optimizer: str = "sgd"
    lr: float = 0.5
    noise_limit: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_limit is not None:
            check_positive("noise_limit", self.noise_limit)


def scheduled(peak: float, scheduler: str, left: float) -> float:
    """Learning rate where this share of the plan is left.

    By what is left of the plan, and not by the steps that this process made: after a crash the schedule still ends
    where the training does.
    """
    if scheduler == "none":
        return peak
    return peak * (left if scheduler == "linear" else 0.5 * (1 - math.cos(math.pi * left)))
