"""Requirements of private training on a module, its optimizer and the trainer, checked before anything is paid."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from pl_privknn.training.shadow import arguments_of

# By name, since there are two packages of Lightning.
# What a module carries that was trained privately: the run's id and its ledger.
_MARK = "private_training_run"
_TRIALS = ("BatchSizeFinder", "GradientAccumulationScheduler", "LearningRateFinder")


def check_module(module: Any) -> None:
    """Raise ``ValueError`` for a module with manual optimization.

    Args:
        module: what is trained.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}: automatic_optimization=False, and steps that it takes by itself would have no noise; leave the "
            "step to the trainer and return the loss from training_step"
        )
    if "dataloader_iter" in arguments_of(module.training_step):
        raise ValueError(
            f"{name}: training_step(dataloader_iter) draws batches by itself; let it take (batch, batch_idx)"
        )


def check_optimizers(trainer: Any) -> None:
    """Raise ``ValueError`` for optimizers that do not take exactly one step per gradient.

    Args:
        trainer: with its optimizers set up.
    """
    optimizers = [one for one in trainer.optimizers if type(one).__name__ != "_MockOptimizer"]
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers: {len(optimizers)} optimizers, and ε is stated for one noisy "
            "gradient a step; return one optimizer, with parameter groups where rates differ"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ValueError("configure_optimizers: LBFGS looks at a batch several times a step; use SGD or Adam")


def check_resumable(trainer: Any) -> None:
    """Raise ``ValueError`` for hyper-parameters with which no checkpoint of the fit could be resumed.

    Args:
        trainer: of the training.
    """
    if not trainer.checkpoint_callbacks or "weights_only" not in inspect.signature(trainer.fit).parameters:
        return  # an older Lightning loads any object
    for owner in filter(None, (trainer.lightning_module, trainer.datamodule)):
        for name, value in dict(getattr(owner, "hparams_initial", {})).items():
            file = io.BytesIO()
            try:
                torch.save(value, file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception:
                raise ValueError(
                    f"save_hyperparameters: {name}, a {type(value).__name__}, is in checkpoints that can't be loaded "
                    f"again, so an interrupted training could not be resumed; add ignore=[{name!r}]"
                ) from None


def check_first_run(module: Any, ledger_path: str | Path | None, resumed: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` for weights that another ledger's training has made: their ε would not compose.

    Args:
        module: what is trained.
        ledger_path: the ledger that the training shares with others, or None.
        resumed: what a checkpoint that is being resumed says of its run, or None.
    """
    known = getattr(module, _MARK, None)
    if known is None or (resumed or {}).get("run_id") == known[0]:
        return
    if ledger_path is None or str(Path(ledger_path).resolve()) != known[1]:
        raise ValueError(
            f"{type(module).__name__}: was trained privately before, and ε of both trainings must compose; pass "
            f"options=TrainingOptions(ledger_path={known[1]!r}), or train a new module"
        )


def mark_first_run(module: Any, run: Any) -> None:
    """Store in a module the run that trains it; see :func:`check_first_run`."""
    ledger = None if run.ledger is None else str(run.ledger.path.resolve())
    setattr(module, _MARK, (getattr(run, "run_id", ""), ledger))


def check_readers(trainer: Any, logged: Set[str]) -> None:
    """Raise ``ValueError`` for callbacks and schedulers that monitor a private figure, which is never logged.

    Args:
        trainer: with its optimizers set up.
        logged: names that ``training_step`` logs.
    """
    waiting = [(type(one).__name__, getattr(one, "monitor", None)) for one in trainer.callbacks]
    waiting += [(type(c.scheduler).__name__, c.monitor) for c in trainer.strategy.lr_scheduler_configs]
    private = logged | {f"{name}_{axis}" for name in logged for axis in ("step", "epoch")}
    for who, monitor in waiting:
        if monitor in private:
            raise ValueError(
                f"{who}: monitor={monitor!r} is a figure of private records, which training_step may not log; "
                "monitor one of validation"
            )


def check_trainer(trainer: Any, training: Any) -> None:
    """Raise ``ValueError`` for trainer settings that break the accounting of noisy SGD.

    Args:
        trainer: of the training.
        training: the callback.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} would add up several Poisson batches, "
            "which is not what ε is stated for; set expected_batch_size instead (physical_batch_size bounds memory)"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val} has no part in noisy SGD, which clips each record's "
            "gradient; set max_grad_norm instead"
        )
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches=0: no step would be left to train; leave it out")
    if training.evaluate is not None and trainer.world_size > 1:
        raise ValueError("evaluate: one process evaluates; use devices=1, or evaluate=None")
    if trainer.overfit_batches:
        raise ValueError(
            f"overfit_batches={trainer.overfit_batches} replaces the Poisson sampler; use limit_train_batches"
        )
    if trainer.world_size > 1 and type(trainer.strategy).__name__ != "DDPStrategy":
        raise ValueError(
            f"strategy={type(trainer.strategy).__name__}: gradients of the whole network are clipped in each "
            'process; use strategy="ddp", or devices=1'
        )
    if trainer.strategy.root_device.type == "mps":
        raise ValueError(
            "accelerator='mps': has no float64, in which gradients are summed up; use accelerator='cpu'"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision={trainer.precision!r} scales the loss, and clipping would see scaled gradients; use "
            '"32-true" or "bf16-mixed"'
        )
    if type(trainer.profiler).__name__ != "PassThroughProfiler":
        raise ValueError(
            f"profiler={type(trainer.profiler).__name__}: times of single steps reveal how many records were drawn, "
            "which is private; leave the profiler out"
        )
    if any(hasattr(part, "_wandb_hook_names") for part in trainer.lightning_module.modules()):
        raise ValueError(
            "wandb.watch: its hooks run at every pass of the network, and their number reveals how many records "
            "were drawn, which is private; call unwatch() before the training"
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if name in _TRIALS:
            raise ValueError(f"{name}: it tries steps, or adds them up, and each costs privacy; leave it out")
        if hasattr(callback, "expected_batch_size") and callback is not training:
            raise ValueError(f"{name}: there are two of them; one training has one ε; leave one out")
        if getattr(callback, "labeler", None) is not None:
            raise ValueError(
                f"labeler: {type(training).__name__} learns from the private records themselves and asks no teacher; "
                "leave the labeler out, or train a student with it"
            )


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that need a gradient.

    Raises:
        ValueError: if there are none.
    """
    found = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not found:
        raise ValueError(
            f"{type(module).__name__}: no parameter requires a gradient, so there is nothing to train; set "
            "requires_grad=True for those that are to be trained"
        )
    return found


def check_layers(module: nn.Module, remedy: str) -> None:
    """Raise ``ValueError`` for layers that keep statistics of private records.

    Args:
        module: what is trained.
        remedy: the setting by which batch normalisation is replaced.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm | _InstanceNorm) or not layer.training:
            continue
        if isinstance(layer, _BatchNorm) or layer.track_running_stats:
            raise ValueError(
                f"{name}: {type(layer).__name__} in training mode mixes the records of a batch, or keeps statistics "
                f"of private ones; set {remedy} to have group normalisation in its place, or freeze it by "
                f"{name}.eval() in the module's train()"
            )


def replace_batch_norms(module: nn.Module) -> None:
    """Replace batch by group normalisation in a module, in place (by Opacus' ``ModuleValidator.fix``)."""
    from opacus.validators.batch_norm import fix

    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                made = fix(layer).train(layer.training)
                for parameter in layer.parameters():
                    made.to(parameter.device)
                setattr(parent, name, made)
