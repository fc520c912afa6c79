"""Operators of traced steps: ids within their tables, and those by which ``vmap`` keeps records apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

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
exponential flip floor fmod fractional_max_pool2d full full_like gather ge gelu getitem grid_sampler_2d gt
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


def outside(graph: fx.GraphModule) -> tuple[str, ...]:
    """Names of a graph's operators that are not in :data:`APART`."""
    named = {
        packet_of(node)
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


def _ids_of(node: fx.Node) -> tuple[int, int | None, bool] | None:
    """Place of the ids among a node's arguments, their dimension (None: all values), and whether they wrap."""
    packet = packet_of(node) if node.op == "call_function" else ""
    if packet in _IDS:
        place, wraps = _IDS[packet]
        return place, 0 if place == 1 else node.args[1], wraps  # type: ignore[return-value]
    return (1, None if packet in _FLAT else 0, True) if packet in (*_FLAT, *_LISTS) else None


def _bounded(ids: Any, table: Tensor, dim: int | None, wraps: bool) -> list[tuple[Tensor, int, int]]:
    """Tensors of ids with their least and largest values; none of a list with a mask."""
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
