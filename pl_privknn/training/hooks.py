"""Opacus' hooks for per-example gradients, on tensors in the place of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.functorch import prepare_layer
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


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
        self._calls: list[tuple[nn.Module, GradientEdge]] = []
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
        self._calls.append((module, get_gradient_edge(output)))  # before anything changes the output in place

    def backward(self: Any, total: Tensor, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Call the hooks with the gradients of the layers' outputs; those of the weights are not computed.

        Args:
            total: loss of a forward pass.
            named: the trained parameters.

        Raises:
            ValueError: where a parameter is used by other code than its layer's.
        """
        calls, self._calls = self._calls, []
        of_layers = {id(parameter) for layer, _ in calls for parameter in layer.parameters(recurse=False)}
        others = [(name, parameter) for name, parameter in named if id(parameter) not in of_layers]
        wanted = [*(edge for _, edge in calls), *(parameter for _, parameter in others)]
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        for (name, _), gradient in zip(others, found[len(calls) :], strict=True):
            if gradient is not None:
                raise ValueError(
                    f"network: Opacus gave no per-example gradients for {name!r}; freeze it (requires_grad=False) "
                    "or use layers that Opacus supports"
                )


class FlatHooks(_OnTensors, GradSampleHooks):
    """Writes the gradient of each example to ``grad_sample`` of the parameters."""


class GhostHooks(_OnTensors, GradSampleHooksFastGradientClipping):
    """Writes the norm of each example's gradient to ``_norm_sample`` of the parameters.

    What a layer saw is kept until :meth:`weighted` asks for the sum (book-keeping: Bu et al. 2023).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kept: list[tuple[nn.Module, list[Tensor], Tensor]] = []
        super().__init__(*args, **kwargs)

    def backward(self, total: Tensor, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """See the base; what a pass that failed has left does not get into the next sum."""
        self._kept = []
        super().backward(total, named)

    def capture_backprops_hook(
        self, module: Any, _forward_input: Any, forward_output: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        """See :class:`opacus.grad_sample.GradSampleHooks`."""
        if self.hooks_enabled:
            self._kept.append((module, module.activations[-1], forward_output[0].detach()))
        super().capture_backprops_hook(module, _forward_input, forward_output, loss_reduction, batch_first)

    def weighted(self, factors: Tensor, usable: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Sums of the examples' gradients, each with a factor: of every call of a layer, by the layer run anew.

        Args:
            factors: shape ``(b,)``.
            usable: which examples take part, shape ``(b,)``.
        """
        kept, self._kept = self._kept, []
        chosen = ... if bool(usable.all()) else usable  # a factor of 0 would still bring NaN into the sum
        for layer, inputs, gradients in kept:
            weights = factors[chosen].view(-1, *[1] * (gradients.ndim - 1)).to(gradients.dtype)
            yield from _of_weights(layer, [given[chosen] for given in inputs], gradients[chosen] * weights)


def _of_weights(layer: Any, inputs: list[Tensor], gradients: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Gradients of a layer's parameters by those of its outputs; a layer that is no convolution runs once more."""
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    found: Sequence[Tensor | None]
    if _is_plain(layer, *inputs, gradients):
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradients,
            *inputs,
            layer.weight.detach(),
            [layer.out_channels],
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            layer.output_padding,
            layer.groups,
            [False, True, True],
        )
        found = [of_bias if parameter is layer.bias else of_weight for parameter in parameters]
    else:
        made = layer.forward(*inputs)
        output = made if isinstance(made, Tensor) else made[0]
        found = torch.autograd.grad(output, parameters, gradients, allow_unused=True)
    return ((p, piece) for p, piece in zip(parameters, found, strict=True) if piece is not None)


def _is_plain(layer: Any, *tensors: Tensor) -> bool:
    """Whether a layer is a convolution whose forward pass is that of its arguments alone."""
    return (
        type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and all(tensor.dtype == layer.weight.dtype for tensor in tensors)
    )
