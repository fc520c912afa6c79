"""Functions recorded as graphs of tensor operations, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree


def recorded(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Graph of the operations of a function.

    Args:
        function: of tensors.
        *arguments: tensors, nested as the function takes them; their shapes and types are used, and no values.
        **settings: of ``make_fx``.
    """
    # Fake tensors pretend that there are GPUs; autograd, started after that, would have threads for them.
    with torch.enable_grad():
        start = torch.ones(1, requires_grad=True)
        torch.autograd.grad(start.sum(), start)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_scalar_outputs=True))
    with mode, sdpa_kernel(SDPBackend.MATH):
        fake = pytree.tree_map_only(
            Tensor, lambda tensor: mode.from_tensor(tensor.detach(), static_shapes=True), arguments
        )
        return make_fx(function, tracing_mode="real", **settings)(*fake)
