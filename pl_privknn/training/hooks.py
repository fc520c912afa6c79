"""Opacus' hooks for per-example gradients, on tensors in the place of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.functorch import prepare_layer
from torch import Tensor, nn


class _OnTensors:
    """Takes the gradient of a layer's output from the output itself.

    A module's own backward hook makes its output a view, which the additions and activations in place of common
    networks (torchvision's ResNet) may not change. A tensor's hook sees the gradient of its value before that change.
    """

    def add_hooks(
        self: Any, *, loss_reduction: str = "mean", batch_first: bool = True, force_functorch: bool = False
    ) -> None:
        """See :class:`opacus.grad_sample.GradSampleHooks`."""
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise ValueError("the network has hooks already; take them off first")
        self.autograd_grad_sample_hooks = self._module.autograd_grad_sample_hooks = []
        for layer in self.iterate_submodules(self._module):
            if force_functorch or type(layer) not in self.GRAD_SAMPLERS:
                prepare_layer(layer, batch_first=batch_first)
            self.autograd_grad_sample_hooks.append(layer.register_forward_hook(self.capture_activations_hook))
        self.enable_hooks()

    def capture_activations_hook(
        self: Any, module: nn.Module, forward_input: Any, forward_output: Any
    ) -> None:
        """Keep the layer's inputs, and wait for the gradient of its output."""
        kept = len(getattr(module, "activations", ()))
        super().capture_activations_hook(module, forward_input, forward_output)  # type: ignore[misc]
        if len(getattr(module, "activations", ())) == kept:
            return
        output: Tensor = forward_output if isinstance(forward_output, Tensor) else forward_output[0]

        def taken(gradient: Tensor) -> None:
            self.capture_backprops_hook(
                module, None, (gradient,), loss_reduction=self.loss_reduction, batch_first=self.batch_first
            )

        output.register_hook(taken)


class FlatHooks(_OnTensors, GradSampleHooks):
    """Writes the gradient of each example to ``grad_sample`` of the parameters."""


class GhostHooks(_OnTensors, GradSampleHooksFastGradientClipping):
    """Writes the norm of each example's gradient to ``_norm_sample`` of the parameters.

    What a layer saw is kept until :meth:`weighted` asks for the sum (book-keeping: Bu et al. 2023).
    """

    def __init__(self, *args: Any, keeps: bool, **kwargs: Any) -> None:
        self.keeps = keeps
        self._kept: list[tuple[nn.Module, list[Tensor], Tensor]] = []
        super().__init__(*args, **kwargs)

    def capture_backprops_hook(
        self, module: Any, _forward_input: Any, forward_output: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        """See :class:`opacus.grad_sample.GradSampleHooks`."""
        if self.keeps and self.hooks_enabled:
            self._kept.append((module, module.activations[-1], forward_output[0].detach()))
        super().capture_backprops_hook(module, _forward_input, forward_output, loss_reduction, batch_first)

    def weighted(self, factors: Tensor, usable: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Sums of the examples' gradients, each with a factor: of every call of a layer, by the layer run anew.

        Args:
            factors: shape ``(b,)``.
            usable: which examples take part, shape ``(b,)``.
        """
        kept, self._kept = self._kept, []
        for layer, inputs, gradients in kept:
            parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            made = layer.forward(*(given[usable] for given in inputs))
            weights = factors[usable].view(-1, *[1] * (gradients.ndim - 1)).to(gradients.dtype)
            output = made if isinstance(made, Tensor) else made[0]
            pieces = torch.autograd.grad(output, parameters, gradients[usable] * weights, allow_unused=True)
            yield from ((p, piece) for p, piece in zip(parameters, pieces, strict=True) if piece is not None)
