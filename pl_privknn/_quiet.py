"""Lightning without words: its warnings on which no user can act, and a trainer that says nothing."""

from __future__ import annotations

import warnings
from typing import Any

#: Their beginnings.
MESSAGES = (
    r".*isinstance\(treespec, LeafSpec\)` is deprecated",
    # Students log once an epoch, whatever the interval of steps is.
    r"The number of training batches .* is smaller than the logging interval",
)

#: Options of a trainer that trains and leaves nothing: no log, checkpoint, output or evaluation.
TRAINS_ALONE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


def quiet_lightning() -> None:
    """Drop its warnings from here on."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
