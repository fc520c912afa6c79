"""Warnings of Lightning's own workings, on which no user can act."""

from __future__ import annotations

import warnings

#: Their beginnings.
MESSAGES = (
    r".*isinstance\(treespec, LeafSpec\)` is deprecated",
    # Students log once an epoch, whatever the interval of steps is.
    r"The number of training batches .* is smaller than the logging interval",
)


def quiet_lightning() -> None:
    """Drop them from here on."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
