"""Graphs of tensor operations, recorded without values, and the operators by which ``vmap`` keeps records apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

_ATEN = torch.ops.aten
# Place of the ids among an operator's arguments, and whether they may count from the end; the table is argument 0 and
# its dimension argument 1, or the first.
_IDS = {
    **dict.fromkeys(("embedding", "_embedding_bag"), (1, False)),
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"), (2, False)),
    **dict.fromkeys(("index_add", "index_copy", "index_reduce"), (2, False)),
    "index_fill": (2, True),
}
_LISTS = ("index", "_unsafe_index", "index_put", "_unsafe_index_put")
_FLAT = ("take", "put")
_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _embedding_bag _fft_c2r _fft_r2c _linalg_slogdet
_log_softmax _softmax _to_copy _trilinear abs acos acosh adaptive_max_pool2d add addmm alias amax amin any
arange argmax argmin asin asinh atan atan2 atanh avg_pool2d avg_pool3d bernoulli bitwise_and bitwise_not
bitwise_or bmm bucketize cat ceil clamp clamp_min constant_pad_nd convolution copysign cos cosh cummax cumprod
cumsum detach diagonal digamma div elu embedding empty empty_permuted eq erf erfc erfinv exp exp2 expand expm1
exponential eye flip floor fmod fractional_max_pool2d full full_like gather ge gelu getitem grid_sampler_2d gt
hardtanh hypot index index_put index_reduce index_select isinf isnan kthvalue le leaky_relu lgamma log log10
log1p log2 logcumsumexp logical_and logical_not logical_or logical_xor lt masked_scatter max
max_pool2d_with_indices max_pool3d_with_indices maximum mean median min minimum mm mode mul multinomial
native_batch_norm native_group_norm native_layer_norm ne neg permute pow prod put rand rand_like randint randn
randn_like randperm reciprocal relu remainder repeat reshape round rsqrt scalar_tensor scatter scatter_add
scatter_reduce searchsorted select sigmoid sign sin sinh slice slice_scatter sort split split_with_sizes sqrt
squeeze sub sum tan tanh topk transpose trunc unbind unfold unsqueeze upsample_bicubic2d upsample_bilinear2d
upsample_trilinear3d var where
"""
#: Operators by which ``vmap`` keeps records apart, forward and backward, as tests/training/test_operators.py shows.
APART = frozenset(_NAMES.split())


class UntraceableError(ValueError):
    """Raised where a step is no graph of tensor operations; the text gives the reason."""


def recorded(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """Graph of the operations of a function.

    Args:
        function: of tensors.
        *arguments: tensors, nested as the function takes them; their shapes and types are used, and no values.
    """
    from torch._decomp import core_aten_decompositions  # these take a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # Operators with a probability stay whole, so that vmap can draw differently for each record; eye has a type
    # without an arange on the CPU.
    table = {
        operator: rule
        for operator, rule in core_aten_decompositions().items()
        if not any(word in str(operator) for word in ("dropout", "bernoulli", "eye"))
    }

    # Fake tensors pretend that there are GPUs; autograd, started after that, would have threads for them.
    with torch.enable_grad():
        start = torch.ones(1, requires_grad=True)
        torch.autograd.grad(start.sum(), start)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_scalar_outputs=True))
    with mode, sdpa_kernel(SDPBackend.MATH):
        fake = pytree.tree_map_only(
            Tensor, lambda tensor: mode.from_tensor(tensor.detach(), static_shapes=True), arguments
        )
        return make_fx(function, decomposition_table=table, tracing_mode="real")(*fake)


def mended(graph: fx.GraphModule) -> fx.GraphModule:
    """Change a functional graph for :func:`torch.func.vmap` and ``grad``: no copies, no writes, ids in range.

    Args:
        graph: of a function without mutations, changed in place.

    Raises:
        UntraceableError: for a graph that writes to tensors that it keeps.
    """
    nodes = graph.graph
    order = {node: place for place, node in enumerate(nodes.nodes)}
    for node in list(nodes.nodes):
        packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
        if node.op != "call_function" or not str(node.target).startswith("aten."):
            continue
        if packet in ("view", "view_copy"):
            node.target = _ATEN.reshape.default
        elif packet.endswith("_copy") and packet != "_to_copy" and hasattr(_ATEN, packet[: -len("_copy")]):
            node.target = getattr(getattr(_ATEN, packet[: -len("_copy")]), overload)
        elif packet == "_embedding_bag_forward_only":  # has no gradient
            node.target = _ATEN._embedding_bag.default
        elif packet == "copy":  # has no derivative
            node.target = _copied
        elif packet == "clone":  # nothing is written to
            node.replace_all_uses_with(node.args[0])
            nodes.erase_node(node)
        elif packet in ("_assert_scalar", "_assert_async", "sym_constrain_range_for_size"):
            nodes.erase_node(node)
        elif packet.endswith("_") and (made := _out_of_place(packet, overload)) is not None:
            source = node.args[0]
            with nodes.inserting_before(node):
                changed = nodes.call_function(made, node.args, node.kwargs)
            node.replace_all_uses_with(changed)
            for user in list(source.users):
                if user not in (changed, node) and order.get(user, 0) > order[node]:
                    user.replace_input_with(source, changed)
            nodes.erase_node(node)
    nodes.eliminate_dead_code()
    for node in nodes.nodes:  # or a record could leave something in a buffer
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise UntraceableError(f"its graph writes in place ({node.target})")
    bound_ids(graph)
    return graph


def _out_of_place(packet: str, overload: str) -> Any:
    known = {
        "bernoulli_.float": _ATEN.bernoulli.p,
        "transpose_.default": _ATEN.transpose.int,
        "copy_.default": _copied,
    }
    found = known.get(f"{packet}.{overload}")
    return found or getattr(getattr(_ATEN, packet[:-1], None), overload, None)


def _copied(place: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    return values.to(place).expand(place.shape)


def outside(graph: fx.GraphModule) -> tuple[str, ...]:
    """Names of a graph's operators outside :data:`APART`, which lists in-place versions by their operator."""
    named = {
        packet_of(node).removesuffix("_")
        for node in graph.graph.nodes
        if node.op in ("call_function", "call_module", "call_method")
    }
    return tuple(sorted(named - APART - {"_inside", "_clamped", "_finite_inside", "_copied"}))


def packet_of(node: fx.Node) -> str:
    """Name of a node's operator without its library ``aten`` and its overload; others keep their library."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket).removeprefix("aten.")
    return getattr(target, "__name__", str(target))


def bound_ids(graph: fx.GraphModule) -> None:
    """Clamp the ids of a graph to their tables, and multiply its output by NaN where one was outside.

    Otherwise an id out of range stops the process on CUDA, and ``vmap`` may read another record by it. A record with
    such an id has no finite gradient, which counts as zero.

    Args:
        graph: of a step, changed in place.
    """
    nodes = graph.graph
    inside: list[fx.Node] = []
    varies: set[fx.Node] = set()
    for node in list(nodes.nodes):
        if node.op == "placeholder" or varies.intersection(node.all_input_nodes):
            varies.add(node)
        if node not in varies or (found := _ids_of(node)) is None:
            continue
        place, *how = found
        ids: Any = node.args[place]
        if not varies.intersection([ids] if isinstance(ids, fx.Node) else ids):
            continue
        with nodes.inserting_before(node):
            inside.append(nodes.call_function(_inside, (ids, node.args[0], *how)))
            safe = nodes.call_function(_clamped, (ids, node.args[0], *how))
        node.update_arg(place, safe)
    if inside:
        (output,) = (node for node in nodes.nodes if node.op == "output")
        with nodes.inserting_before(output):
            output.args = fx.map_arg(
                output.args, lambda one: nodes.call_function(_finite_inside, (one, *inside))
            )
    graph.recompile()


def _ids_of(node: fx.Node) -> tuple[int, int | None, bool] | None:
    """Place of the ids among a node's arguments, their dimension (None: all values), and whether they wrap."""
    packet = packet_of(node) if node.op == "call_function" else ""
    if packet in _IDS:
        place, wraps = _IDS[packet]
        return place, 0 if place == 1 else node.args[1], wraps  # type: ignore[return-value]
    return (1, None if packet in _FLAT else 0, True) if packet in (*_FLAT, *_LISTS) else None


def _bounded(ids: Any, table: Tensor, dim: int | None, wraps: bool) -> list[tuple[Tensor, int, int]]:
    """Tensors of ids, each with the smallest and largest valid id; empty for a list that holds a mask."""
    given = (
        [(dim, ids)]
        if isinstance(ids, Tensor)
        else [(n, one) for n, one in enumerate(ids) if one is not None]
    )
    if any(one.dtype in (torch.bool, torch.uint8) for _, one in given):
        return []
    sizes = table.shape if table.ndim else (1,)
    counts = [table.numel() if n is None else sizes[n] for n, _ in given]
    return [(one, -count if wraps else 0, count - 1) for (_, one), count in zip(given, counts, strict=True)]


def _inside(ids: Any, table: Tensor, dim: int | None, wraps: bool) -> Tensor:
    inside = torch.ones((), dtype=torch.bool, device=table.device)
    for one, low, high in _bounded(ids, table, dim, wraps):
        inside = inside & ((one >= low) & (one <= high)).all().to(table.device)
    return inside


def _clamped(ids: Any, table: Tensor, dim: int | None, wraps: bool) -> Any:
    found = _bounded(ids, table, dim, wraps)
    if not found or isinstance(ids, Tensor):
        return found[0][0].clamp(*found[0][1:]) if found else ids
    safe = iter([one.clamp(low, high) for one, low, high in found])
    return [one if one is None else next(safe) for one in ids]


def _finite_inside(value: Any, *inside: Tensor) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    every = torch.stack([each.to(value.device) for each in inside]).all()
    return value * torch.where(every, value.new_ones(()), value.new_full((), torch.nan))
