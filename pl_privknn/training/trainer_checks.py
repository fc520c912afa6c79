"""Trainers and data with which private training would go wrong are refused."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from pl_privknn.training.processes import check_strategy


def check_trainer(trainer: pl.Trainer, kind: str, batch_size: str, clip_norm: str) -> None:
    """Raise ``ValueError`` for settings that break the accounting of noisy SGD, and say what to do.

    Args:
        trainer: of the training.
        kind: what trains: a class's name.
        batch_size: what its argument for the expected size of a batch is called.
        clip_norm: what that of the clipping norm is called.
    """
    options: Any = trainer
    if options.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={options.accumulate_grad_batches} would add up several Poisson batches, "
            f"which is not what ε is stated for; set {batch_size} of {kind} instead; its "
            "physical_batch_size bounds the memory"
        )
    if options.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={options.gradient_clip_val} has no part in noisy SGD, which clips each record's "
            f"gradient; set {clip_norm} of {kind} instead"
        )
    if options.overfit_batches:
        raise ValueError(
            f"overfit_batches={options.overfit_batches} replaces the Poisson sampler; use limit_train_batches"
        )
    check_strategy(trainer, kind)
    if getattr(options.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision={options.precision!r} scales the loss, and clipping would see scaled gradients; use "
            '"32-true" or "bf16-mixed"'
        )


def check_precision(trainer: pl.Trainer, clipping: str) -> None:
    """Raise ``ValueError`` for ghost clipping in 16 bits: Opacus' norms are then rounded, and may be too small."""
    options: Any = trainer
    if clipping == "ghost" and "16" in str(options.precision):
        raise ValueError(
            f'clipping="ghost": norms are made in 16 bits under precision={options.precision!r}, and rounding would '
            'let gradients pass the bound; use clipping="flat", or precision="32-true"'
        )


def check_data(trainer: pl.Trainer, kind: str) -> Any:
    """The trainer's data module, if it has private records and is not used by a labeler at the same time.

    Args:
        trainer: of the training.
        kind: what trains: a class's name.

    Raises:
        TypeError: for another kind of data.
        ValueError: where it can't serve.
    """
    options: Any = trainer
    data = options.datamodule
    if not callable(getattr(data, "train_privately", None)):
        raise TypeError(
            f"{kind} needs a PrivatePublicDataModule, got {type(data).__name__}; pass "
            "datamodule=ArraysDataModule(…) or another one of pl_privknn.datamodules to trainer.fit"
        )
    if any(getattr(callback, "labeler", None) is not None for callback in options.callbacks):
        raise ValueError(
            f"labeler: {kind} learns from the private records themselves and asks no teacher; leave the labeler "
            "out, or train a student with it"
        )
    return data
