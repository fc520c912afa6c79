"""How weights are updated: the arguments that students and private trainings share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from pl_privknn._checks import check_choice, check_finite, check_non_negative, check_positive
from pl_privknn.argument_groups import ArgumentGroup

SCHEDULERS = ("none", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class Optimization(ArgumentGroup):
    """Optimizer and learning-rate schedule, by name.

    Args:
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty (decoupled for ``"adamw"``).
        scheduler: ``"none"``, ``"cosine"`` or ``"linear"``.

    Raises:
        ValueError: for an argument out of its range.
    """

    #: Optimizers to choose from.
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adam", "adamw")
    #: Schedules to choose from.
    schedulers: ClassVar[tuple[str, ...]] = SCHEDULERS
    #: Whether SGD's momentum is Nesterov's.
    nesterov: ClassVar[bool] = True

    optimizer: str = "adam"
    lr: float = 0.003
    momentum: float = 0.9
    weight_decay: float = 0.0
    scheduler: str = "cosine"

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, self.optimizers)
        check_positive("lr", self.lr)
        if not 0 <= check_finite("momentum", self.momentum) < 1:
            raise ValueError(f"momentum={self.momentum!r} must lie in [0, 1)")
        check_non_negative("weight_decay", self.weight_decay)
        check_choice("scheduler", self.scheduler, self.schedulers)

    def over(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of these parameters, or groups of parameters."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            nesterov = self.nesterov and self.momentum > 0
            return torch.optim.SGD(parameters, momentum=self.momentum, nesterov=nesterov, **options)
        adam = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return adam(parameters, betas=(self.momentum, 0.999), **options)
