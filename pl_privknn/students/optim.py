"""Optimizers and learning-rate schedules that a student is configured with, by name."""

from __future__ import annotations

import dataclasses
import math

from pl_privknn._checks import check_int
from pl_privknn.optimization import Optimization


@dataclasses.dataclass(frozen=True)
class StudentOptimization(Optimization):
    """Optimizer and learning-rate schedule of a student.

    Args:
        optimizer: ``"sgd"`` (with Nesterov momentum), ``"adam"`` or ``"adamw"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty (decoupled for ``"adamw"``).
        scheduler: ``"none"``, ``"cosine"`` or ``"linear"``, per optimizer step.
        warmup_steps: optimizer steps over which the learning rate rises.
        schedule_epochs: length of the schedule in epochs; the rest of the training if None. The schedule
            starts again at :meth:`~pl_privknn.students.base.Student.reinitialize`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.students import StudentOptimization, VATStudent
        >>> student = VATStudent(image_size=8, optimization=StudentOptimization("sgd", lr=0.1))
        >>> student.optimization.lr, student.optimization.scheduler
        (0.1, 'cosine')
    """

    warmup_steps: int = 0
    schedule_epochs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("warmup_steps", self.warmup_steps, 0)
        if self.schedule_epochs is not None:
            check_int("schedule_epochs", self.schedule_epochs)


def lr_factor(scheduler: str, step: int, total: float, warmup_steps: int) -> float:
    """Factor on the learning rate at ``step`` of a schedule of ``total`` steps.

    Rises linearly over ``warmup_steps``, then stays (``"none"``) or falls to zero along half a cosine or a
    straight line. Past the end it stays at zero.

    Args:
        scheduler: one of :data:`~pl_privknn.optimization.SCHEDULERS`.
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
