"""Optimizers and learning-rate schedules that a student is configured with, by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from pl_privknn._checks import check_int, check_switch
from pl_privknn.optimization import SCHEDULERS, Optimization

# Of a one-cycle schedule: the share of it in which the rate rises, and the first rate over the peak.
_RISING, _FIRST = 0.3, 1 / 25


@dataclasses.dataclass(frozen=True)
class StudentOptimization(Optimization):
    """Optimizer and learning-rate schedule of a student.

    Args:
        optimizer: ``"sgd"`` (with Nesterov momentum), ``"adam"`` or ``"adamw"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty (decoupled for ``"adamw"``).
        scheduler: ``"none"``, ``"cosine"``, ``"linear"`` or ``"one_cycle"``, per optimizer step.
        warmup_steps: optimizer steps over which the learning rate rises.
        schedule_epochs: length of the schedule in epochs; the rest of the training if None. The schedule
            starts again at :meth:`~pl_privknn.students.base.Student.reinitialize`.
        decay_vectors: whether weight decay takes in biases, and the scales and shifts of normalisations.

    Raises:
        ValueError: for an argument out of its range, or ``warmup_steps`` of ``"one_cycle"``, which has its own rise.

    Example:
        >>> from pl_privknn.students import StudentOptimization, VATStudent
        >>> student = VATStudent(image_size=8, optimization=StudentOptimization("sgd", lr=0.1))
        >>> student.optimization.lr, student.optimization.scheduler
        (0.1, 'cosine')
    """

    schedulers: ClassVar[tuple[str, ...]] = (*SCHEDULERS, "one_cycle")

    warmup_steps: int = 0
    schedule_epochs: int | None = None
    decay_vectors: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("warmup_steps", self.warmup_steps, 0)
        if self.schedule_epochs is not None:
            check_int("schedule_epochs", self.schedule_epochs)
        check_switch("decay_vectors", self.decay_vectors)
        if self.scheduler == "one_cycle" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}: scheduler='one_cycle' has a rise of its own; leave it out"
            )

    def over(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of these parameters; see :meth:`Optimization.over`."""
        if self.decay_vectors or not self.weight_decay:
            return super().over(parameters)
        every: list[Any] = list(parameters)
        groups: list[dict[str, Any]] = [
            {"params": [each for each in every if each.ndim > 1]},
            {"params": [each for each in every if each.ndim <= 1], "weight_decay": 0.0},
        ]
        return super().over(groups)


def lr_factor(scheduler: str, step: int, total: float, warmup_steps: int) -> float:
    """Factor on the learning rate at ``step`` of a schedule of ``total`` steps.

    Rises linearly over ``warmup_steps``, then stays (``"none"``) or falls to zero along half a cosine or a
    straight line. ``"one_cycle"`` (Smith, Topin 2019) rises from a 25th over the first 30 % of the schedule and
    falls to zero over the rest, both along half a cosine. Past the end it stays at zero.

    Args:
        scheduler: one of :attr:`StudentOptimization.schedulers`.
        step: optimizer steps since the schedule began.
        total: length of the schedule in optimizer steps, warm-up included.
        warmup_steps: steps until the peak.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if scheduler == "none":
        return 1.0
    rise: float = warmup_steps
    if scheduler == "one_cycle":
        rise = _RISING * total
        if step < rise:
            return 1 - (1 - _FIRST) * _half_cosine(step / rise)
    progress = min(1.0, (step - rise) / max(1.0, total - rise))
    return 1 - progress if scheduler == "linear" else _half_cosine(progress)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
