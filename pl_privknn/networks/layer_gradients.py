"""Per-record gradients from layer inputs: Opacus' grad samplers, and norms of linear layers without gradients.

Records share one forward pass here, and stay apart since the network is :func:`separable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from pl_privknn.networks.base import APART, FeatureNetwork, is_as_built


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each record, ``(b,)``, in float32 at least."""
    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, targets, reduction="none")


def separable(network: nn.Module) -> bool:
    """Whether a network's output for a record depends on that record alone, by its structure.

    Args:
        network: of layers of a short list, without hooks or other forward passes of their own.
    """
    return all(
        (type(layer) in APART or type(layer) is FeatureNetwork)
        and is_as_built(layer)
        and (not isinstance(layer, nn.Conv2d) or layer.padding_mode == "zeros")
        for layer in network.modules()
    )


class LayerGradients:
    """Clipped gradients of all records of a batch, from the inputs of its layers and the gradients of their outputs.

    Args:
        network: a :func:`separable` one.
        parameters: the trained ones, in the order of the sum; all of them the network's.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._network = network
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}

    def _seen(self, inputs: Tensor, targets: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
        """Layers of a forward pass, their inputs ``(b, …)`` and the gradients of their outputs."""
        calls: list[tuple[Any, Tensor, Any]] = []

        def watch(layer: Any, inputs: Any, output: Any) -> None:
            calls.append((layer, inputs[0].detach(), get_gradient_edge(output)))

        handles = [
            layer.register_forward_hook(watch)
            for layer in self._network.modules()
            if any(id(parameter) in self._places for parameter in layer.parameters(recurse=False))
        ]
        try:
            logits = self._network(inputs)
            known = (targets >= 0) & (targets < logits.shape[1])
            losses = losses_of(logits, targets.clamp(0, logits.shape[1] - 1))
            # A record with a class out of range has no finite gradient, which counts as zero.
            loss = (losses * torch.where(known, 1.0, torch.nan)).sum()
        finally:
            for handle in handles:
                handle.remove()
        found = torch.autograd.grad(loss, [edge for *_, edge in calls], allow_unused=True)
        return [(c[0], c[1], g) for c, g in zip(calls, found, strict=True) if g is not None]

    def add(self, total: Any, inputs: Tensor, targets: Tensor, persons: Tensor | None = None) -> None:
        """Clip and add the gradients of the records of a batch, or the mean gradient of each person.

        Args:
            total: a :class:`~pl_privknn.privacy.clipped_sums.ClippedSum` of the same parameters.
            inputs: of the network, ``(b, …)``.
            targets: int64 ``(b,)``.
            persons: person of each record, int64 ``(b,)``, person by person; None where each record is clipped.
        """
        calls = self._seen(inputs, targets)
        uses: dict[int, int] = {}
        for layer, *_ in calls:
            for parameter in layer.parameters(recurse=False):
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        rows: dict[int, Tensor] = {}
        products: list[tuple[Any, Tensor, Tensor]] = []
        for layer, seen, gradients in calls:
            once = all(uses[id(parameter)] == 1 for parameter in layer.parameters(recurse=False))
            if type(layer) is nn.Linear and seen.ndim == 2 and once and persons is None:
                products.append((layer, seen.double(), gradients.double()))
                continue
            for place, part in self._sampled(layer, seen, gradients):
                rows[place] = part if place not in rows else rows[place] + part
        kept = [rows[place].reshape(len(rows[place]), -1) for place in rows]
        if persons is not None:
            kept = [_means(part, persons) for part in kept]
        count = len(kept[0]) if kept else len(targets)
        squares = torch.zeros(count, dtype=torch.float64, device=total.device)
        for layer, a, g in products:
            # An outer product's norm is the product of the norms: nothing cancels in it.
            ones = float(layer.bias is not None and layer.bias.requires_grad)
            of_weight = a.square().sum(1) if layer.weight.requires_grad else 0.0
            squares += g.square().sum(1) * (of_weight + ones)
        if kept:
            squares += total.norms(kept).square()
        factors = total.factors(squares.sqrt())
        pieces = list(total.total.split(total.sizes))
        for place, part in zip(rows, kept, strict=True):
            total.add_rows(pieces[place], part, factors)
        usable = (factors != 0)[:, None]
        # Without a look at the factors of another device, for which the host would wait.
        finite = usable.device.type == "cpu" and bool(usable.all())
        for layer, a, g in products:
            seen, gradients = (part if finite else torch.where(usable, part, 0) for part in (a, g))
            weighted = gradients * factors[:, None]
            if (at := self._places.get(id(layer.weight))) is not None:
                pieces[at] += (weighted.T @ seen).flatten()
            if layer.bias is not None and (at := self._places.get(id(layer.bias))) is not None:
                pieces[at] += weighted.sum(0)

    def _sampled(self, layer: Any, inputs: Tensor, gradients: Tensor) -> Iterator[tuple[int, Tensor]]:
        from opacus.grad_sample import GradSampleModule

        # Opacus 1.6.0 gives wrong gradients of convolutions on permuted memory.
        given = [inputs.contiguous()], gradients.contiguous()
        sampler: Any = GradSampleModule.GRAD_SAMPLERS[type(layer)]
        for parameter, part in sampler(layer, *given).items():
            if (place := self._places.get(id(parameter))) is not None:
                yield place, part.detach()


def _means(rows: Tensor, persons: Tensor) -> Tensor:
    """Mean row of each person, ``(p, size)``, of rows ``(b, size)`` person by person."""
    _, numbers, counts = persons.unique_consecutive(return_inverse=True, return_counts=True)
    sums = rows.new_zeros(len(counts), rows.shape[1]).index_add_(0, numbers.to(rows.device), rows)
    return sums / counts[:, None].to(rows)
