"""What a command leaves unsaid: advertisements, figures that mean nothing here, warnings on which no user can act."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from pl_privknn import _lightning as pl
from pl_privknn._lightning import MESSAGES, rank_zero_info

#: Beginnings of warnings about Lightning's own workings, and about what this package sees to itself.
_WORKINGS = (
    "LightningCLI's args parameter is intended",
    "Experiment logs directory .* exists and is not empty",  # put aside by PrivKNNCLI.before_fit
    "Checkpoint directory .* exists and is not empty",  # a resumed run's
    ".*does not have many workers",  # images are in memory
    "Total length of `list` across ranks is zero",  # public images of unknown truth: nothing to validate on
    *MESSAGES,
)
_SAID = ("litlogger", "litmodels", "TPU available", "HPU available", "passed to Trainer: LeavesFolder")


class ParameterCount(pl.Callback):
    """One line about the student, where Lightning shows a table of its parts with their FLOPs."""

    @classmethod
    def stand_in(cls, trainer: Any) -> None:
        """Replace the trainer's own summary; one that looks deeper stays as it is."""
        tables = (*pl.both("callbacks.ModelSummary"), *pl.both("callbacks.RichModelSummary"))
        for place, callback in enumerate(trainer.callbacks):
            if type(callback) in tables and callback._max_depth == 1:
                trainer.callbacks[place] = cls()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say how large the student is."""
        size = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
        rank_zero_info(f"{type(pl_module).__name__}: {size:,} parameters to train")


@contextlib.contextmanager
def quietly(command: str) -> Iterator[None]:
    """Run a command without what :data:`_WORKINGS` and :data:`_SAID` name; other warnings in one line each."""
    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in names]
    told: set[str] = set()

    def one_line(message: Any, *_: Any, **__: Any) -> str:
        text = " ".join(str(message).split())
        new = text not in told
        told.add(text)
        return f"privknn {command}: {text}\n" if new else ""

    before = warnings.formatwarning
    with warnings.catch_warnings():
        for text in _WORKINGS:
            warnings.filterwarnings("ignore", message=text)
        for logger in loggers:
            logger.addFilter(_is_wanted)
        warnings.formatwarning = one_line
        try:
            yield
        finally:
            warnings.formatwarning = before
            for logger in loggers:
                logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _SAID)
