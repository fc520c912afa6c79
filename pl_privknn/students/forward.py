"""Passes through a network that leave no trace in it, or draw no random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def deterministic(network: nn.Module) -> Iterator[None]:
    """Within: every module but batch normalisation is in evaluation mode (no dropout or stochastic depth).

    Args:
        network: whose modules change mode; they get their own back.
    """
    modes = [(module, module.training) for module in network.modules()]
    try:
        for module, training in modes:
            module.training = training and isinstance(module, _BatchNorm)
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Within: batch normalisation in training mode uses the batch's statistics but keeps its running ones.

    Bitwise: a momentum of 0 would still count batches, and would turn an infinite activation into NaN.

    Args:
        network: whose running statistics stand still.
    """
    norms = [
        module
        for module in network.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]
    try:
        for norm in norms:
            norm.track_running_stats = False
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
