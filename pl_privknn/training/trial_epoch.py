"""A trial epoch before the first charge: all that an epoch runs, on copies, without private records."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from pl_privknn import _lightning as pl
from pl_privknn._checks import InputError
from pl_privknn.training.records import mapped
from pl_privknn.training.shadow import kept_values

# Steps of an epoch, of which the second finds what the first one left, and batches of validation.
_STEPS, _BATCHES = 2, 1
_SHOWS = {"ProgressBar", "ModelSummary"}
_KEEPS_NOTHING = (
    "training_step keeps nothing of a private record, so that its lists stay empty and its metrics are not updated: "
    "compute figures in validation_step, on public data"
)
#: Remedies by what the error is about: a hook, or a word of the message.
_REMEDIES = {
    "on_train_epoch_end": _KEEPS_NOTHING,
    "on_train_batch_end": _KEEPS_NOTHING,
    "on_train_batch_start": "batches of a private training are empty: leave the batch alone",
}
_MONITORS = "monitor a name that validation_step logs, or one of privacy/…"
_OTHERWISE = "mend it, or leave it out"


def try_epoch(trainer: Any, made_up: Callable[[Any], Callable[[], None]]) -> None:
    """Run an epoch of few steps and its validation on copies of a trainer, its module and its callbacks.

    The copies have a folder of their own, no logger and no progress bar. What hooks do outside of these objects is
    done once more than in the training.

    Args:
        trainer: with its optimizers set up, before its first step.
        made_up: puts made-up steps into the copied trainer's module; returns what takes them out.

    Raises:
        ValueError: with the error of a hook and its remedy.
    """
    with tempfile.TemporaryDirectory() as folder, _silence():
        try:
            twin = _copy_of(trainer, folder)
        except Exception as error:
            reason = type(error).__name__
        else:
            reason = ""
            undo = made_up(twin)
            try:
                twin.fit_loop.run()
            except InputError:
                raise
            except Exception as error:
                raise ValueError(_said(trainer.lightning_module, error)) from error
            finally:
                undo()
    if reason:
        pl.rank_zero_info(f"there is no trial epoch, since the trainer can't be copied ({reason})")


def _copy_of(trainer: Any, folder: str) -> Any:
    """Copy of a trainer with module, callbacks and optimizers, for few steps; data sets and loaders are shared."""
    module, twin = trainer.lightning_module, object.__new__(type(trainer))
    memo: dict[int, Any] = {id(trainer): twin}
    sources = [
        loop._data_source.instance for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    ]
    owners = (module, *trainer.callbacks)
    held = [value for owner in owners for _, value in kept_values(owner)]
    shared = [trainer.datamodule, *sources]
    for value in held:
        mapped(value, lambda _, leaf: shared.append(leaf) if isinstance(leaf, Dataset | DataLoader) else None)
    memo |= {id(one): one for one in shared if one is not module}
    memo |= {id(logger): _quiet(trainer, folder) for logger in trainer.loggers}
    memo |= {id(one): None for one in trainer.callbacks if _is_left_out(one)}
    # Optimizers copy neither their attributes nor their hooks; the method ``step`` that a scheduler gave them stays.
    optimizers = {id(one): object.__new__(type(one)) for one in trainer.optimizers}
    kept = memo | optimizers
    try:
        state = copy.deepcopy(vars(trainer), memo := dict(kept))
    except Exception:
        for value in held:
            try:
                copy.deepcopy(value, dict(kept))
            except Exception:
                kept[id(value)] = value
        state = copy.deepcopy(vars(trainer), memo := dict(kept))
    vars(twin).update(state)
    for one in trainer.optimizers:
        attributes = {name: value for name, value in vars(one).items() if name != "step"}
        vars(optimizers[id(one)]).update(copy.deepcopy(attributes, memo))
    twin.strategy.optimizers = [optimizers[id(one)] for one in trainer.optimizers]
    twin.lightning_module.trainer = twin  # which modules do not copy
    twin.callbacks = [one for one in twin.callbacks if one is not None]
    for one in twin.callbacks:
        if hasattr(one, "dirpath"):
            one.dirpath = folder
    twin._default_root_dir = folder
    loop, often = twin.fit_loop, trainer.check_val_every_n_epoch or 1
    loop.max_epochs = often if trainer.max_epochs in (None, -1) else min(often, trainer.max_epochs)
    twin.limit_train_batches = _STEPS
    twin.limit_val_batches = _BATCHES if trainer.limit_val_batches else 0
    twin.val_check_interval, twin.check_val_every_n_epoch, twin._val_check_time_interval = 1.0, often, None
    loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
    loop.on_run_end = lambda: None
    return twin


def _is_left_out(callback: Any) -> bool:
    """Whether a callback only shows something, or is one of this package that writes to the run's folder."""
    own = type(callback).__module__.startswith("pl_privknn.") and not hasattr(callback, "sampling_rate")
    return own or bool(_SHOWS & {kind.__name__ for kind in type(callback).__mro__})


def _quiet(trainer: Any, folder: str) -> Any:
    """Lightning logger that discards everything."""
    loggers = importlib.import_module(type(trainer).__module__.split(".trainer")[0] + ".loggers.logger")
    return type("Quiet", (loggers.DummyLogger,), {"save_dir": folder, "log_dir": folder})()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Context without warnings, messages and prints."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


def _said(module: nn.Module, error: Exception) -> str:
    """One-line message: where the trial epoch failed, the error of the hook itself, and the remedy."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Frames of Lightning that call a hook of the module, or of a callback.
    calls = [frame.f_locals for frame in frames if "hook_name" in frame.f_locals]
    called = calls[-1] if calls else {"hook_name": frames[-1].f_code.co_name}
    where, who = called["hook_name"], type(called.get("callback", module)).__name__
    text = " ".join(str(error).split())[:300]
    remedy = next((said for word, said in _REMEDIES.items() if word in where), _OTHERWISE)
    remedy = _MONITORS if "monitor" in text.lower() or "conditioned on metric" in text else remedy
    return (
        f"{who}.{where}: fails in an epoch on made-up records, before any ε is paid "
        f"({type(error).__name__}: {text}); {remedy}"
    )
