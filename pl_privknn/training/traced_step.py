"""A LightningModule's training step as a graph of tensor operations.

The step, with the batch hooks before it, runs once on fake tensors, which have shapes and no values. What it computes
is recorded as a pure function ``(trained, other, tensors) -> loss``, and private records go through that function
alone. No line of the module's Python sees a private value, so nothing that it keeps can carry one record into the
gradient of another.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from pl_privknn._checks import InputError
from pl_privknn._tracing import recorded
from pl_privknn.privacy.records import shares_memory
from pl_privknn.training.operators import bound_ids, outside
from pl_privknn.training.private_randomness import generator_states
from pl_privknn.training.step_inputs import (
    Absent,
    PublicTrainer,
    Sink,
    StepNumber,
    UntraceableError,
    mapped,
    tensors_of,
    views_of,
    with_tensors,
)

Result = TypeVar("Result")

_ATEN = torch.ops.aten
# Operators with a probability stay whole, so that vmap can draw differently for each record.
_DECOMPOSITIONS = {
    operator: rule
    for operator, rule in core_aten_decompositions().items()
    if not any(word in str(operator) for word in ("dropout", "bernoulli"))
}
# Largest constant (values) that a step may hold besides its parameters and buffers.
_LARGEST = 1 << 20
#: Batch hooks, in the order of their calls.
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
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
        logged: names that the step logs.
        outside: operators by which ``vmap`` might mix records: the graph is for one after another then.
    """

    graph: Any
    trained: dict[str, Tensor]
    other: dict[str, Tensor]
    constants: dict[str, tuple[int, ...]]
    changing: tuple[str, ...]
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


class RecordStep:
    """The batch hooks and ``training_step`` of a module, for batches of one record.

    Args:
        module: a LightningModule.
        datamodule: whose batch hooks run before the module's, or None.
        trainer: of the fit, or None.
        dataset: the private records, which a step does not reach.
        augment: makes views of the image, after the hooks; see
            :class:`~pl_privknn.training.private_training.PrivateTraining`.
        views: number of views.
    """

    def __init__(
        self,
        module: Any,
        datamodule: Any = None,
        trainer: Any = None,
        dataset: Any = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        views: int = 1,
    ) -> None:
        self.module, self._trainer, self._dataset = module, trainer, dataset
        self._augment, self._views, self._datamodule = augment, views, datamodule
        self._hooks = {name: hook_owner(name, module, datamodule) for name in TRANSFERS}

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
        step = self._copy({}, changing.append, logged)
        step.predicts = predicts
        names = [f"module.{name}" for name, p in self.module.named_parameters() if p.requires_grad]
        every = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        trained = {name: every.pop(name) for name in names if name in every}
        # Flags and counters stay as they are, so that Python may branch on them.
        every = {name: t for name, t in every.items() if not _is_flag(t)}
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
        with self._context():
            try:
                graph = recorded(pure, trained, every, given, decomposition_table=_DECOMPOSITIONS)
            except Exception as error:
                raise UntraceableError(_reason(error)) from None
        if generator_states()[1:] != before:
            changing.append("numbers drawn by Python or numpy")
        parts = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        constants = {
            name.removeprefix("module."): tensor for name, tensor in every.items() if id(tensor) not in parts
        }
        for place, tensor in enumerate(dict(_mended(graph).named_buffers()).values()):
            constants[f"constant {place}"] = tensor
        bound_ids(graph)
        graph.recompile()
        self._check_constants({**every, **trained, **constants}, constants)
        return TracedStep(
            graph,
            trained,
            every,
            {name: tuple(tensor.shape) for name, tensor in constants.items() if tensor.numel() > 1},
            tuple(dict.fromkeys(changing)),
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
        return self.on_copy(lambda step, leaves: gradient_of(step(batch, batch_idx), leaves))

    def on_copy(self, work: Callable[[Any, list[nn.Parameter]], Result]) -> Result:
        """Call a function of a fresh copy of hooks and step, and of its trained parameters."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        leaves = [nn.Parameter(p.detach().clone()) for p in trained]
        memo: dict[int, Any] = {id(p): leaf for p, leaf in zip(trained, leaves, strict=True)}
        with self._context():
            return work(self._copy(memo), leaves)

    def predicted(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Outputs of a fresh copy of the module in evaluation mode for a batch of one, and its class."""
        batch = self._on_device(batch)
        with torch.no_grad():
            return self.on_copy(lambda step, _: step.outputs(batch))

    def _on_device(self, batch: Any) -> Any:
        device = self.module.device
        return mapped(batch, lambda _, leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    @property
    def has_hooks(self) -> bool:
        """Whether a hook changes a batch before the module's step."""
        return self._augment is not None or any(owner is not None for owner in self._hooks.values())

    # ------------------------------------------------------------------ copies

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Context in which the trainer runs steps, without compilers and checkpoints of activations."""
        plugin = getattr(self._trainer, "precision_plugin", None)
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            enter(torch.enable_grad())
            enter(torch.compiler.set_stance("force_eager")) if hasattr(torch.compiler, "set_stance") else None
            enter(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
            enter(mock.patch.object(checkpoint.CheckpointFunction, "apply", _without_checkpoint))
            if plugin is not None:
                enter(plugin.train_step_context())
            yield

    def _copy(
        self, memo: dict[int, Any], note: Callable[[str], Any] = str, logged: set[str] | None = None
    ) -> _Step:
        """Copy of module and hooks that shares the tensors in ``memo``; for a trace, all tensors.

        What holds records, and what can't be copied, raises where it is used.
        """
        traced = logged is not None
        facts = PublicTrainer(self._trainer, note)
        if self._trainer is not None:
            memo[id(self._trainer)] = facts
        if self._dataset is not None:
            memo[id(self._dataset)] = Absent("reads the data set")
        if self._datamodule is not None and not any(one is self._datamodule for one in self._hooks.values()):
            memo[id(self._datamodule)] = Absent("reads the data module, which holds records")
        owners = {id(one): one for one in (self.module, *self._hooks.values()) if one is not None}
        for owner in owners.values():
            for part, name, value in _attributes(owner):
                self._note(memo, f"{part}.{name}", value, traced)
            if traced and isinstance(owner, nn.Module):
                memo.update({id(t): t for t in (*owner.parameters(), *owner.buffers()) if not _is_flag(t)})
        kept = dict(memo)
        try:
            copies = {place: copy.deepcopy(owner, memo) for place, owner in owners.items()}
        except Exception:
            for owner in owners.values():
                for part, name, value in _attributes(owner):
                    mapped(value, functools.partial(_note_uncopied, kept, f"{part}.{name}"))
            memo = kept
            copies = {place: copy.deepcopy(owner, memo) for place, owner in owners.items()}
        shadow = copies[id(self.module)]
        for part in shadow.modules():  # functions are not copied, what they close over is
            for name in ("training_step", *TRANSFERS):
                _restore(vars(part), name)
            for held in (
                vars(part),
                *(value for name, value in vars(part).items() if name.endswith("_hooks")),
            ):
                held.update(
                    {n: _rebound(f, memo) for n, f in held.items() if isinstance(f, types.FunctionType)}
                )
        if (
            traced
        ):  # tensors that are plain attributes are inputs of the graph, since a step may write to them
            for part in shadow.modules():
                for name in [
                    n for n, value in vars(part).items() if type(value) is Tensor and not _is_flag(value)
                ]:
                    part.register_buffer(name, part.__dict__.pop(name), persistent=False)
        own = logged if logged is not None else set()
        vars(shadow).update(
            _trainer=facts,
            log=lambda name, *args, **kwargs: own.add(name),
            log_dict=lambda names, *args, **kwargs: own.update(names),
            print=lambda *args, **kwargs: None,
            optimizers=lambda *args, **kwargs: next(iter(facts.optimizers), None),
            lr_schedulers=lambda: types.SimpleNamespace(
                get_last_lr=lambda: [group["lr"] for group in facts.optimizers[0].param_groups]
            ),
        )
        for name, owner in self._hooks.items():
            if owner is not None:
                _restore(vars(copies[id(owner)]), name)
        hooks = {name: copies[id(owner)] for name, owner in self._hooks.items() if owner is not None}
        return _Step(shadow, hooks, self._trainer, self._augment, self._views)

    def _note(self, memo: dict[int, Any], name: str, value: Any, traced: bool) -> None:
        """Register the replacements of metrics and records in copies; a trace shares tensors."""
        leaves: list[Any] = []
        if not isinstance(value, nn.Module):
            mapped(value, lambda _, leaf: leaves.append(leaf))
        elif isinstance(value, Metric | MetricCollection):
            leaves = [value]
        for leaf in leaves:
            if isinstance(leaf, Metric | MetricCollection):
                memo.update(
                    {id(leaf): Sink(map(str, leaf) if isinstance(leaf, MetricCollection) else ())}
                    if traced
                    else {}
                )
            elif isinstance(leaf, Dataset | DataLoader) or (
                hasattr(leaf, "train_dataloader") and not isinstance(leaf, nn.Module)
            ):
                memo.setdefault(id(leaf), Absent(f"reads {name}, which holds records"))
            elif isinstance(leaf, Tensor) and traced and not _is_flag(leaf):
                memo[id(leaf)] = leaf

    def _check_constants(self, tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        """Refuse tensors that share memory with the records, and constants that may hold a table of them."""
        for name, tensor in tensors.items():
            if shares_memory(self._dataset, tensor):
                raise InputError(
                    f"training_step: {name} {tuple(tensor.shape)} shares memory with the private records, and every "
                    "record's gradient would depend on them; compute it from public data, or leave it out"
                )
        for name, tensor in constants.items():
            if tensor.numel() > _LARGEST:
                raise InputError(
                    f"training_step: {name} {tuple(tensor.shape)} has more than {_LARGEST} values and is no "
                    "parameter or buffer; if it is public, register it by register_buffer, else leave it out"
                )


class _Step(nn.Module):
    """Hooks and step as one function of a batch."""

    def __init__(self, module: Any, hooks: dict[str, Any], trainer: Any, augment: Any, views: int) -> None:
        super().__init__()
        self.module = module
        self.predicts = False
        # In a tuple, since data modules of Lightning are no layers of this one.
        self._given = hooks, getattr(trainer, "precision_plugin", None), augment, views

    def prepared(self, batch: Any) -> Any:
        """Batch after the hooks."""
        hooks, plugin, _, _ = self._given
        if plugin is not None:
            batch = plugin.convert_input(batch)
        for name, owner in hooks.items():
            further = (self.module.device, 0) if name == "transfer_batch_to_device" else (0,)
            batch = getattr(owner, name)(batch, *further)
        return batch

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Outputs of the module for a batch ``(x, y)``, and ``y``."""
        x, y = self.prepared(batch)[:2]
        return self.module.eval()(x).reshape(-1), y.reshape(())

    def forward(self, batch: Any, batch_idx: int) -> Any:
        if self.predicts:
            return self.outputs(batch)
        *_, augment, views = self._given
        batch = self.prepared(batch)
        if augment is not None:
            batch = views_of(batch, augment, views)
        return loss_of(self.module, batch, batch_idx)


class _Recorded(TorchFunctionMode):
    """Recorder of blocks without gradients during a trace; values of tensors can't be read."""

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
        # Generators of the user's are public: draws come from the secret one that all graphs share.
        result = func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "generator"})
        if torch.is_grad_enabled() and func != Tensor.data.__get__:  # type: ignore[attr-defined]
            return result
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), result)


def _mended(graph: Any) -> Any:
    """Replace copies by views and make random draws different for each record under vmap."""
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
    graph.recompile()
    return graph


def _is_flag(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _attributes(owner: Any) -> Iterator[tuple[str, str, Any]]:
    """Attributes of an object and, of a module, its layers: name of the class, of the attribute, and its value."""
    for part in owner.modules() if isinstance(owner, nn.Module) else (owner,):
        for name, value in (*vars(part).items(), *getattr(part, "_modules", {}).items()):
            if name not in ("_modules", "_parameters", "_buffers", "_trainer"):
                yield type(part).__name__, name, value


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Function with copies in its closure."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(Exception):  # an empty one, or something that can't be copied
            cell = types.CellType(copy.deepcopy(cell.cell_contents, memo))
        cells.append(cell)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _note_uncopied(memo: dict[int, Any], name: str, path: str, leaf: Any) -> None:
    if id(leaf) in memo or isinstance(leaf, nn.Module):
        return
    try:
        copy.deepcopy(leaf, dict(memo))
    except Exception as error:
        memo[id(leaf)] = Absent(f"uses {name}, which can't be copied ({type(error).__name__})")


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


def _without_checkpoint(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


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


def loss_of(module: Any, batch: Any, batch_idx: int) -> Tensor:
    """The loss that ``training_step`` returns for a batch; 0 where it skips the batch.

    Raises:
        ValueError: for anything but one value.
    """
    given = (batch, batch_idx) if len(arguments_of(module.training_step)) > 1 else (batch,)
    output = module.training_step(*given)
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        return torch.stack([p.sum() for p in module.parameters() if p.is_floating_point()]).sum() * 0.0
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            "training_step must return the loss, a tensor with one value, or a dict with it as 'loss'"
        )
    return loss.reshape(())


def arguments_of(step: Callable[..., Any]) -> list[str]:
    """Names of the arguments of a module's step."""
    return list(inspect.signature(step).parameters)


def hook_owner(name: str, module: Any, datamodule: Any) -> Any:
    """Owner of a batch hook, as Lightning selects it: the data module before the module; None without one.

    Args:
        name: of the hook.
        module: a LightningModule.
        datamodule: or None.
    """
    for owner in (datamodule, module):
        if owner is None:
            continue
        room = getattr(getattr(type(owner), name, None), "__module__", "") or ""
        if name in vars(owner) or not room.startswith(("pytorch_lightning.core", "lightning.pytorch.core")):
            return owner
    return None


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; copies of the object for a step keep the original method.

    Returns:
        What puts the method back.
    """
    function.replaces = vars(owner).get(name)  # type: ignore[attr-defined]
    owner.__dict__[name] = function
    return functools.partial(_restore, owner.__dict__, name)


def _restore(attributes: dict[str, Any], name: str) -> None:
    if hasattr(attributes.get(name), "replaces") and (before := attributes.pop(name).replaces) is not None:
        attributes[name] = before
