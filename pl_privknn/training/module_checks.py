"""Modules and callbacks with which private training would go wrong are refused."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from pytorch_lightning.core.optimizer import _MockOptimizer
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

_TRIALS = (BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder)


def check_module(trainer: pl.Trainer, module: pl.LightningModule, training: pl.Callback) -> None:
    """Raise ``ValueError`` for a module that takes its steps itself, and for callbacks that would take others.

    Args:
        trainer: of the training.
        module: what is trained.
        training: the callback that trains it.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}: automatic_optimization=False, and steps that it takes by itself would have no "
            "noise; leave the step to the trainer and return the mean loss from training_step"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{type(module).__name__}: training_step(dataloader_iter) draws batches by itself; let it take "
            "(batch, batch_idx)"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _TRIALS):
            raise ValueError(
                f"{type(callback).__name__}: it tries steps, or adds them up, and each costs privacy; leave it out"
            )
        if isinstance(callback, type(training)) and callback is not training:
            raise ValueError(f"{type(training).__name__}: there are two of them; one training has one ε")


def check_readers(trainer: pl.Trainer, logged: set[str]) -> None:
    """Raise ``ValueError`` for optimizers that step otherwise, and for whatever waits for private figures.

    Args:
        trainer: with its optimizers set up.
        logged: names that ``training_step`` logs, which never come to be.
    """
    options: Any = trainer
    optimizers = [one for one in options.optimizers if not isinstance(one, _MockOptimizer)]
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers: {len(optimizers)} optimizers, and ε is stated for one noisy "
            "gradient a step; return one optimizer, with parameter groups where rates differ"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ValueError("configure_optimizers: LBFGS looks at a batch several times a step; use SGD or Adam")
    waiting = [
        (type(callback).__name__, getattr(callback, "monitor", None)) for callback in options.callbacks
    ]
    waiting += [
        (type(config.scheduler).__name__, config.monitor) for config in options.strategy.lr_scheduler_configs
    ]
    private = logged | {f"{name}_{axis}" for name in logged for axis in ("step", "epoch")}
    for who, monitor in waiting:
        if monitor in private:
            raise ValueError(
                f"{who}: monitor={monitor!r} is a figure of private records, which training_step may not log; "
                "monitor one of validation"
            )
