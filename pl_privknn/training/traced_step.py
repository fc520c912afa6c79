"""A LightningModule's training step as a graph of tensor operations.

The step, with the batch hooks before it, runs once on fake tensors, which have shapes and no values. What it computes
is recorded as a pure function ``(trained, other, tensors) -> loss``, and private records go through that function
alone. No line of the module's Python sees a private value, so nothing that it keeps can carry one record into the
gradient of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pl_privknn._checks import InputError
from pl_privknn._tracing import UntraceableError, mended, outside, recorded
from pl_privknn.privacy.records import shares_memory
from pl_privknn.training.records import mapped, tensors_of
from pl_privknn.training.shadow import StepCopies, StepNumber, is_flag, with_tensors

# Largest constant (values) that a step may hold besides its parameters and buffers.
_LARGEST = 1 << 20
_EPOCH = "trainer.current_epoch"
_VALUES = ("numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "__dlpack__")
_SCALARS = ("__bool__", "item", "__int__", "__float__", "__index__")
# Packages whose functions pass on what a step calls.
_PASS_ON = (__name__.split(".")[0], "torch", "contextlib", "functools")


@dataclasses.dataclass
class TracedStep:
    """Training step as a graph.

    Attributes:
        graph: ``(trained, other, tensors) -> loss``.
        trained: parameters by their names in the graph.
        other: frozen parameters, buffers and constants, which are read and never written.
        constants: shapes of the tensors that the graph holds besides parameters and buffers, by their names.
        changing: what the trace read or drew that is other at every step: the graph holds for one step then.
        reads_epoch: whether it read the number of the epoch.
        logged: names that the step logs.
        outside: operators by which ``vmap`` might mix records: the graph is for one after another then.
    """

    graph: Any
    trained: dict[str, Tensor]
    other: dict[str, Tensor]
    constants: dict[str, tuple[int, ...]]
    changing: tuple[str, ...]
    reads_epoch: bool
    logged: frozenset[str]
    outside: tuple[str, ...]

    def gradient(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gradient of one record's loss, one tensor a parameter.

        Args:
            tensors: of the batch of one.
        """
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.trained.items()}
        return gradient_of(self.graph(leaves, self.other, list(tensors)), list(leaves.values()))

    def rows(self, stack: Sequence[Tensor]) -> list[Tensor]:
        """Gradients ``(b, …)`` of several records at once by ``vmap``, for a graph with nothing :attr:`outside`.

        Args:
            stack: tensors of batches of one, ``(b, 1, …)`` each.
        """
        found = torch.func.vmap(torch.func.grad(self.graph), in_dims=(None, None, 0), randomness="different")(
            {name: tensor.detach() for name, tensor in self.trained.items()}, self.other, list(stack)
        )
        return list(found.values())


def gradient_of(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradient of a loss; zero for leaves that it does not depend on."""
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


class RecordStep(StepCopies):
    """Batch hooks and ``training_step`` of a module for batches of one record; arguments as in the base class."""

    def trace(self, batch: Any, batch_idx: int = 0, predicts: bool = False) -> TracedStep:
        """Trace the step for batches of the given shapes; values of the batch are not used.

        Args:
            batch: of one record, or a made-up one.
            batch_idx: number of the step.
            predicts: trace the module's outputs in evaluation mode, and the class, in place of the loss.

        Raises:
            UntraceableError: for a step that is no graph of tensor operations.
            ValueError: for a graph that holds private records.
        """
        changing: list[str] = []
        logged: set[str] = set()
        step = self.for_trace(changing.append, logged)
        step.predicts = predicts
        names = [f"module.{name}" for name, p in self.module.named_parameters() if p.requires_grad]
        every = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        trained = {name: every.pop(name) for name in names if name in every}
        # Flags and counters stay as they are, so that Python may branch on them.
        every = {name: tensor for name, tensor in every.items() if not is_flag(tensor)}
        number = StepNumber(batch_idx)
        number.note = lambda: changing.append("batch_idx")
        given, _ = tensors_of(batch, self.module.device)

        def loss(trained: Any, other: Any, tensors: Any) -> Tensor:
            full = with_tensors(batch, iter([tensor.clone() for tensor in tensors]))
            written = {name: tensor.clone() for name, tensor in {**trained, **other}.items()}
            with _Recorded():
                return torch.func.functional_call(step, written, (full, number))

        before = generator_states()[1:]
        pure = torch.func.functionalize(loss, remove="mutations_and_views")
        with self.context():
            try:
                graph = mended(recorded(pure, trained, every, given))
            except Exception as error:
                raise UntraceableError(_reason(error)) from None
        if generator_states()[1:] != before:
            changing.append("numbers drawn by Python or numpy")
        parts = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        constants = {
            name.removeprefix("module."): tensor for name, tensor in every.items() if id(tensor) not in parts
        }
        constants |= {f"constant {place}": tensor for place, tensor in enumerate(graph.buffers())}
        self._check_constants({**every, **trained, **constants}, constants)
        return TracedStep(
            graph,
            trained,
            every,
            {name: tuple(tensor.shape) for name, tensor in constants.items() if tensor.numel() > 1},
            tuple(dict.fromkeys(name for name in changing if name != _EPOCH)),
            _EPOCH in changing,
            frozenset(logged),
            outside(graph),
        )

    def run(self, batch: Any, batch_idx: int = 0) -> list[Tensor]:
        """Gradient of a batch of one by the module's own Python, on a fresh copy of the module.

        Args:
            batch: of one record.
            batch_idx: number of the step.
        """
        batch = self._on_device(batch)
        return self.of_values(lambda step, leaves: gradient_of(step(batch, batch_idx), leaves))

    def predicted(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Outputs of a fresh copy of the module in evaluation mode for a batch of one, and its class."""
        batch = self._on_device(batch)
        with torch.no_grad():
            return self.of_values(lambda step, _: step.outputs(batch))

    def _on_device(self, batch: Any) -> Any:
        device = self.module.device
        return mapped(batch, lambda _, leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    def _check_constants(self, tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        """Refuse tensors that share memory with the records, and constants that may hold a table of them."""
        check_apart(tensors, self.dataset)
        for name, tensor in constants.items():
            if tensor.numel() > _LARGEST:
                raise InputError(
                    f"training_step: {name} {tuple(tensor.shape)} has more than {_LARGEST} values and is no "
                    "parameter or buffer; if it is public, register it by register_buffer, else leave it out"
                )


def check_apart(tensors: Mapping[str, Tensor], dataset: Any) -> None:
    """Refuse tensors of a step that share memory with the private records.

    Args:
        tensors: by their names.
        dataset: the private records.
    """
    for name, tensor in tensors.items():
        if shares_memory(dataset, tensor):
            raise InputError(
                f"training_step: {name} {tuple(tensor.shape)} shares memory with the private records, and every "
                "record's gradient would depend on them; compute it from public data, or leave it out"
            )


class _Recorded(TorchFunctionMode):
    """Mode of a trace that detaches tensors in ``no_grad`` blocks and raises where values of tensors are read."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _VALUES:
            raise UntraceableError(f"looks at values of tensors (Tensor.{name})")
        if (
            name in _SCALARS
            and not isinstance(args[0], FakeTensor)
            and not torch._is_functional_tensor(args[0])
        ):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        # Without the user's generators, which are public: all graphs draw from the secret generator.
        result = func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "generator"})
        if torch.is_grad_enabled() and func != Tensor.data.__get__:  # type: ignore[attr-defined]
            return result
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), result)


def _reason(error: Exception) -> str:
    """Reason why a step can't be traced: the type of the error and the function that it comes from.

    The step ran on tensors without values, so an error's text holds no private value.
    """
    if isinstance(error, UntraceableError):
        return str(error)
    places = [
        f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    own = [place for place in places if place.split(".")[0] not in _PASS_ON]
    return f"{type(error).__name__} in {own[-1] if own else places[-1]}"


class PrivateRandomness:
    """Context with secretly seeded global generators of torch, numpy and Python, restored afterwards.

    What a record draws must not depend on which others are there, and must not be known.

    Args:
        seed: gives 63-bit seeds; the operating system's generator by default.
        device: whose generator steps draw from, besides the CPU's.

    Attributes:
        drew: whether something was drawn since it was set to False; None where nothing looks.
    """

    def __init__(self, seed: Callable[[], int] | None = None, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        self.seed = seed if seed is not None else lambda: secrets.randbits(63)
        self.drew: bool | None = None
        self._mark: Any = None

    def begin(self, seed: int | None = None) -> None:
        """Seed the generators anew."""
        if self.drew is not None and self._mark is not None:
            self.drew |= self.drawn()
        seed = self.seed() if seed is None else seed
        torch.default_generator.manual_seed(seed)
        if self._gpu is not None:
            with torch.cuda.device(self._gpu):
                torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._mark = None if self.drew is None else generator_states(self._gpu)

    def drawn(self) -> bool:
        """Whether a random number was drawn since the last seeding."""
        return self._mark != generator_states(self._gpu)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the generators are seeded secretly."""
        devices = [] if self._gpu is None else [self._gpu]
        numbers, theirs = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices):
            try:
                self._mark = None
                self.begin()
                yield
            finally:
                if self.drew is not None:
                    self.drew |= self.drawn()
                np.random.set_state(numbers)
                random.setstate(theirs)


def generator_states(gpu: torch.device | None = None) -> tuple[Any, ...]:
    """States of the global generators: torch's (with that of a GPU), numpy's and Python's."""
    words: Any = np.random.get_state()
    states = [torch.random.get_rng_state(), *([] if gpu is None else [torch.cuda.get_rng_state(gpu)])]
    return (
        [state.numpy().tobytes() for state in states],
        words[1].tobytes(),
        words[2:],
        random.getstate(),
    )
