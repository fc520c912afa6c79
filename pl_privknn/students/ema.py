"""A moving average of a network's weights, for evaluation."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_open_unit


class EMA(nn.Module):
    """Exponential moving average of a network, kept beside it and saved with it.

    After update ``t`` (counted from 0) the average moves by ``1 - min(decay, (1 + t) / (10 + t))`` towards
    the network: the warm-up keeps a short training from being evaluated near its random start. Floating-point
    buffers (batch-norm statistics) are averaged as weights are, since they belong to the averaged weights;
    integer buffers are copied. Tarvainen & Valpola (2017) show the use in semi-supervised learning.

    Args:
        network: the network to follow; the average starts as a copy of it.
        decay: how much of the average stays at each update, in (0, 1).

    Attributes:
        network: the averaged network, without gradients; to be used in evaluation mode.
        updates: int64 scalar, number of updates so far.

    Raises:
        ValueError: if ``decay`` is not in (0, 1).
    """

    updates: Tensor

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = check_open_unit("ema_decay", decay)
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Move the average towards ``network``, which has the structure of the one at construction."""
        # A tensor, not a number: reading the counter would make an accelerator wait at every step.
        step = 1 - ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        for averages, values in (
            (self.network.parameters(), network.parameters()),
            (self.network.buffers(), network.buffers()),
        ):
            for average, value in zip(averages, values, strict=True):
                if average.is_floating_point():
                    average.lerp_(value, step.to(average.dtype))
                else:
                    average.copy_(value)
        self.updates += 1

    @torch.no_grad()
    def reset(self, network: nn.Module) -> None:
        """Start again as a copy of ``network``."""
        self.network.load_state_dict(network.state_dict())
        self.updates.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the averaged network."""
        return self.network(images)
