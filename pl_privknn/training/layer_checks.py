"""Layers with which no gradient belongs to one example: refused, or replaced where asked."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def check_network(network: nn.Module, replace: str) -> None:
    """Raise ``ValueError`` for layers that mix examples, or keep statistics of them, and say what to do.

    Args:
        network: what is trained.
        replace: the setting by which batch normalisation is replaced.
    """
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"network: layer {name!r} is {type(module).__name__}, which mixes the examples of a batch and "
                "keeps statistics of private ones, so no gradient belongs to one example. Set "
                f"{replace} to have it replaced, or use a network with GroupNorm or no normalisation"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise ValueError(
                f"network: layer {name!r} is {type(module).__name__} with running statistics of private "
                "examples; build it with track_running_stats=False"
            )
    from opacus.validators import ModuleValidator

    was_training = network.training
    network.train()
    errors = ModuleValidator.validate(network)
    network.train(was_training)
    if errors:
        raise ValueError(
            f"network: Opacus can't train it privately: {errors[0]} Replace that layer, for instance by "
            "opacus.validators.ModuleValidator.fix(network)"
        )


def with_group_norm(network: nn.Module) -> nn.Module:
    """A copy of the network in which group normalisation stands for batch normalisation (Opacus' fixer)."""
    from opacus.validators import ModuleValidator

    fixed: nn.Module = ModuleValidator.fix(network)
    return fixed


def replace_batch_norms(module: nn.Module) -> None:
    """Put group normalisation in the place of batch normalisation, in the module itself (Opacus' fixer of layers)."""
    from opacus.validators.batch_norm import fix

    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                made = fix(layer).train(layer.training)
                for parameter in layer.parameters():
                    made.to(parameter.device)
                setattr(parent, name, made)
