"""Computation of clipped gradients of records: by layers, by the traced step, or by copies of the module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pl_privknn._lightning import rank_zero_warn
from pl_privknn._tracing import UntraceableError
from pl_privknn.networks.layer_gradients import LayerGradients
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.privacy.redaction import shows_private_errors
from pl_privknn.training.records import tensors_of
from pl_privknn.training.traced_step import RecordStep, TracedStep


class LayerWay:
    """Gradients from one forward pass of many records, through a network whose layers keep records apart.

    Args:
        network: a :func:`~pl_privknn.networks.layer_gradients.separable` one.
        inputs: makes its inputs of what the data set gives.
        parameters: the trained ones.
        chunk: records at once.
    """

    name = "layers"

    def __init__(
        self,
        network: nn.Module,
        inputs: Callable[[Tensor], Tensor],
        parameters: list[nn.Parameter],
        chunk: int,
    ) -> None:
        self._inputs, self._chunk = inputs, chunk
        self._layers = LayerGradients(network, parameters)

    def add(self, total: ClippedSum, batch: Any, stack: list[Tensor]) -> None:
        """Clip and add the gradients of records, given as tensors ``(b, 1, …)`` of inputs and classes."""
        given, targets = (part.squeeze(1).contiguous() for part in stack)
        if missing := self._chunk - len(given):  # records of class -1 count zero
            given, targets = _filled(given, self._chunk), F.pad(targets, (0, missing), value=-1)
        self._layers.add(total, self._inputs(given), targets)


class GraphWay:
    """Gradients by the traced step, a graph for each structure of batches: by ``vmap``, or one record after another.

    Args:
        step: is traced for each new key of a batch.
        device: of the module.

    Attributes:
        by_vmap: whether a chunk goes through ``vmap``.
        chunk: records at once, to which the last ones are filled up: kernels differ by the number of rows.
        number: of the present step.
    """

    def __init__(self, step: RecordStep, device: torch.device) -> None:
        self._step, self._device = step, device
        self._graphs: dict[Any, TracedStep | None] = {}
        self.by_vmap, self.number, self.chunk = False, 0, 1

    @property
    def name(self) -> str:
        """``"vmap"`` or ``"loop"``."""
        return "vmap" if self.by_vmap else "loop"

    def forget(self) -> None:
        """Drop all graphs, since their constants have changed."""
        self._graphs.clear()

    def trace(self, batch: Any) -> TracedStep:
        """Trace the step for batches of this structure (shapes and dtypes)."""
        graph = self._graphs[tensors_of(batch, self._device)[1]] = self._step.trace(batch, self.number)
        return graph

    def gradient(self, batch: Any) -> list[Tensor]:
        """Gradient of a batch of one."""
        return self._graph(batch).gradient(tensors_of(batch, self._device)[0])

    def add(self, total: ClippedSum, batch: Any, stack: list[Tensor]) -> None:
        """Clip and add the gradients of records of one structure, given as tensors ``(b, 1, …)``."""
        graph = rows = None
        with silently():
            graph = self._graph(batch)
        if graph is None:
            return
        count = len(stack[0])
        if self.by_vmap and not graph.outside:
            try:
                rows = [part[:count] for part in graph.rows([_filled(part, self.chunk) for part in stack])]
            except torch.OutOfMemoryError:  # by its size, which is public
                self.by_vmap = False
                rank_zero_warn(f"no memory for {self.chunk} records at once: set physical_batch_size")
            except Exception:
                rows = None
        if rows is not None:
            total.add(rows)
            return
        for place in range(count):
            add_one(total, functools.partial(graph.gradient, [part[place] for part in stack]))

    def _graph(self, batch: Any) -> TracedStep:
        """Graph for the batch's structure; raises where the step can't be traced, and the records count as zero."""
        key = tensors_of(batch, self._device)[1]
        if key not in self._graphs:
            self._graphs[key] = None
            with contextlib.suppress(Exception):
                self.trace(batch)
        graph = self._graphs[key]
        if graph is None:
            raise UntraceableError("this shape")
        return graph


class CopyWay:
    """Gradients by the module's own code, on a fresh copy for each record, where the step can't be traced.

    Args:
        step: of the module.
    """

    name = "copies"

    def __init__(self, step: RecordStep) -> None:
        self._step = step
        self.number = 0

    def gradient(self, batch: Any) -> list[Tensor]:
        """Gradient of a batch of one."""
        return self._step.run(batch, self.number)


def add_one(total: ClippedSum, gradient: Callable[[], list[Tensor]]) -> None:
    """Clip and add a gradient, zero where computing it fails; errors of the shared addition are raised."""
    found = None
    with silently():
        found = gradient()
    if found is not None:
        total.add_one(found)


def _filled(part: Tensor, count: int) -> Tensor:
    """Rows of a chunk, padded to ``count`` rows by copies of the first row."""
    return (
        torch.cat([part, part[:1].expand(count - len(part), *part.shape[1:])]) if len(part) < count else part
    )


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """Context that suppresses a record's error, which would reveal that it was drawn; the record counts as zero."""
    try:
        yield
    except (Exception, SystemExit):
        if shows_private_errors():
            raise
