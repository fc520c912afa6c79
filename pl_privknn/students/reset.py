"""Fresh weights in place of trained ones."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def fresh_weights(network: nn.Module, fresh: nn.Module | None = None) -> None:
    """Overwrite parameters and buffers of ``network`` in place.

    Args:
        network: what to overwrite; its tensors stay the same objects.
        fresh: a new network of the same structure to copy from. If None, every module's
            ``reset_parameters`` draws.

    Raises:
        ValueError: if there is no ``fresh`` and a parameter belongs to a module without ``reset_parameters``.
    """
    if fresh is not None:
        network.load_state_dict(fresh.state_dict())
        return
    modules = dict(network.named_modules())
    resets = {name for name, module in modules.items() if callable(getattr(module, "reset_parameters", None))}
    for name, _ in network.named_parameters():
        owners = name.split(".")[:-1]
        if not any(".".join(owners[:depth]) in resets for depth in range(len(owners) + 1)):
            raise ValueError(
                f"network: no reset_parameters() draws parameter {name!r}; add that method to its module, or "
                "use a network by name"
            )
    for name, module in modules.items():
        if name in resets:
            module.reset_parameters()
