"""Copies of a module's batch hooks and step: without trainer and records, with stand-ins in their place."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils.data import DataLoader, Dataset

from pl_privknn._tracing import UntraceableError
from pl_privknn.training.records import NUMBERS, mapped

Result = TypeVar("Result")

#: Batch hooks, in the order of their calls.
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class _Step(nn.Module):
    """Batch hooks and training step as one function of a batch."""

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


class StepCopies:
    """Copies of the batch hooks and ``training_step`` of a module, without trainer and records.

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
        self.module, self.dataset = module, dataset
        self._trainer, self._datamodule = trainer, datamodule
        self._augment, self._views = augment, views
        self.epoch: int | None = None  # that steps see; the trainer's if None
        self._hooks = {
            name: owner for name in TRANSFERS if (owner := hook_owner(name, module, datamodule)) is not None
        }

    @property
    def has_hooks(self) -> bool:
        """Whether a hook changes a batch before the module's step."""
        return self._augment is not None or bool(self._hooks)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
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

    def _share_frozen(self, memo: dict[int, Any]) -> None:
        """Register in ``memo`` frozen parameters and buffers as copy-on-write."""
        if not hasattr(torch, "_lazy_clone"):  # internal to torch; without it a deep copy takes all of them
            return
        storages: dict[int, Any] = {}
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.requires_grad:
                continue
            with contextlib.suppress(RuntimeError):  # memory of numpy or of a file
                shared = torch._lazy_clone(tensor)
                storages[tensor.untyped_storage()._cdata] = shared.untyped_storage()
                if isinstance(tensor, nn.Parameter):
                    memo[id(tensor)] = nn.Parameter(shared, requires_grad=False)
        memo["torch"] = storages  # type: ignore[index]

    def of_values(self, work: Callable[[Any, list[nn.Parameter]], Result]) -> Result:
        """Call a function of a fresh copy of hooks and step, and of its trained parameters."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        leaves = [nn.Parameter(p.detach().clone()) for p in trained]
        with self.context():
            return work(self._copy({id(p): leaf for p, leaf in zip(trained, leaves, strict=True)}), leaves)

    def for_trace(self, note: Callable[[str], Any], logged: set[str]) -> Any:
        """Copy for a trace, which shares all tensors; plain tensor attributes become buffers.

        Args:
            note: called with the name of a fact of the trainer that changes.
            logged: receives the names that the step logs.
        """
        step = self._copy({}, note, logged)
        for part in step.module.modules():  # inputs of the graph, since a step may write to them
            for name in [
                n for n, value in vars(part).items() if type(value) is Tensor and not is_flag(value)
            ]:
                part.register_buffer(name, part.__dict__.pop(name), persistent=False)
        return step

    def _copy(
        self, memo: dict[int, Any], note: Callable[[str], Any] = str, logged: set[str] | None = None
    ) -> Any:
        """Copy of module and hooks that shares the tensors in ``memo``; for a trace, all tensors.

        What holds records, and what can't be copied, raises where it is used.
        """
        traced = logged is not None
        facts = PublicTrainer(self._trainer, note)
        if self.epoch is not None:
            facts.__dict__["current_epoch"] = self.epoch
        if self._trainer is not None:
            memo[id(self._trainer)] = facts
        if self.dataset is not None:
            memo[id(self.dataset)] = Absent("reads the data set")
        if self._datamodule is not None and not any(one is self._datamodule for one in self._hooks.values()):
            memo[id(self._datamodule)] = Absent("reads the data module, which holds records")
        owners = {id(one): one for one in (self.module, *self._hooks.values())}
        parts = [found for owner in owners.values() for found in kept_values(owner)]
        for name, value in parts:
            _replace_held(memo, name, value, traced)
        if not traced:
            self._share_frozen(memo)
        if traced:
            for owner in owners.values():
                if isinstance(owner, nn.Module):
                    tensors = (*owner.parameters(), *owner.buffers())
                    memo.update({id(tensor): tensor for tensor in tensors if not is_flag(tensor)})
        kept = dict(memo)
        try:
            copies = {place: copy.deepcopy(owner, memo) for place, owner in owners.items()}
        except Exception:
            for name, value in parts:
                mapped(value, functools.partial(_note_uncopied, kept, name))
            memo = kept
            copies = {place: copy.deepcopy(owner, memo) for place, owner in owners.items()}
        shadow = copies[id(self.module)]
        for part in shadow.modules():  # functions are not copied, what they close over is
            for name in ("training_step", *TRANSFERS):
                _restore(vars(part), name)
            hooks = [value for name, value in vars(part).items() if name.endswith("_hooks")]
            for held in (vars(part), *hooks):
                own = {n: f for n, f in held.items() if isinstance(f, types.FunctionType)}
                held.update({n: _rebound(f, memo) for n, f in own.items()})
        names = logged if logged is not None else set()
        vars(shadow).update(
            _trainer=facts,
            log=lambda name, *args, **kwargs: names.add(name),
            log_dict=lambda some, *args, **kwargs: names.update(some),
            print=lambda *args, **kwargs: None,
            optimizers=lambda *args, **kwargs: next(iter(facts.optimizers), None),
            lr_schedulers=lambda: types.SimpleNamespace(
                get_last_lr=lambda: [group["lr"] for group in facts.optimizers[0].param_groups]
            ),
        )
        for name, owner in self._hooks.items():
            _restore(vars(copies[id(owner)]), name)
        made = {name: copies[id(owner)] for name, owner in self._hooks.items()}
        return _Step(shadow, made, self._trainer, self._augment, self._views)


def _replace_held(memo: dict[int, Any], name: str, value: Any, traced: bool) -> None:
    """Register in ``memo`` the stand-ins for metrics and records; a trace shares tensors."""
    from torchmetrics import Metric, MetricCollection

    leaves: list[Any] = []
    if not isinstance(value, nn.Module):
        mapped(value, lambda _, leaf: leaves.append(leaf))
    elif isinstance(value, Metric | MetricCollection):
        leaves = [value]
    for leaf in leaves:
        if isinstance(leaf, Metric | MetricCollection):
            if traced:
                memo[id(leaf)] = Sink(map(str, leaf) if isinstance(leaf, MetricCollection) else ())
        elif isinstance(leaf, Dataset | DataLoader) or (
            hasattr(leaf, "train_dataloader") and not isinstance(leaf, nn.Module)
        ):
            memo.setdefault(id(leaf), Absent(f"reads {name}, which holds records"))
        elif isinstance(leaf, Tensor) and traced and not is_flag(leaf):
            memo[id(leaf)] = leaf


def is_flag(tensor: Tensor) -> bool:
    """Whether a tensor is one whole number or bool, on which Python may branch."""
    return tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def kept_values(owner: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object and, of a module, its layers, by the names of class and attribute."""
    for part in owner.modules() if isinstance(owner, nn.Module) else (owner,):
        for name, value in (*vars(part).items(), *getattr(part, "_modules", {}).items()):
            if name not in ("_modules", "_parameters", "_buffers", "_trainer"):
                yield f"{type(part).__name__}.{name}", value


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


def _without_checkpoint(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


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


def with_tensors(batch: Any, tensors: Iterator[Any]) -> Any:
    """Batch with other tensors; leaves of other kinds raise where they are used."""

    def replace(path: str, leaf: Any) -> Any:
        if isinstance(leaf, NUMBERS) or (isinstance(leaf, Tensor) and leaf.layout is torch.strided):
            return next(tensors)
        kind = type(leaf).__name__
        said = f"uses {path}, of type {kind}: make it a tensor in the data set, or leave it out there"
        return leaf if leaf is None else Absent(said)

    return mapped(batch, replace)


def views_of(batch: Any, augment: Callable[[Tensor], Tensor], views: int) -> Any:
    """Augmented batch of ``views`` rows, made of a batch of one.

    Args:
        batch: images, labels and whatever else, in a tuple or list.
        augment: maps views ``(views, …)`` of one image to so many.
        views: how many.

    Raises:
        ValueError: for other batches, and views of another shape.
    """
    if not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
        raise ValueError(
            "augment: works on batches (images, labels, …), and the data gives others; leave it out"
        )
    images = batch[0]
    made = augment(images.expand(views, *images.shape[1:]).clone())
    if made.shape != (views, *images.shape[1:]):
        raise ValueError(
            f"augment: of {(views, *images.shape[1:])} it makes {tuple(made.shape)}; let it keep the shape of "
            "the views of one image"
        )
    rest = [part.repeat_interleave(views, dim=0) if isinstance(part, Tensor) else part for part in batch[1:]]
    return type(batch)([made, *rest])


class _NoFactError(UntraceableError, AttributeError):
    """Raised for an attribute that a step may not read; ``hasattr`` and ``getattr`` with a default handle it."""


class Absent:
    """Placeholder that raises :class:`UntraceableError` on any use.

    Args:
        said: the text.
    """

    def __init__(self, said: str) -> None:
        self._said = said

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UntraceableError(self._said)

    # Python itself refuses other operators.
    __getitem__ = __iter__ = __len__ = __call__ = __bool__ = __eq__ = __repr__ = _refuse


class Sink(nn.Module):
    """Replacement of metrics and loggers in a step: every call returns the object itself.

    Args:
        names: of the metrics of a collection.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__()
        self.__dict__["names"] = tuple(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""
        return self

    def __deepcopy__(self, memo: Any) -> Sink:
        return self

    __getitem__ = __enter__ = __call__

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""


class StepNumber(int):
    """``batch_idx`` that records whether a computation used it."""

    note: Callable[[], Any]


def _noting(name: str) -> Callable[..., Any]:
    def computed(self: Any, *other: Any) -> Any:
        self.note()
        return getattr(int, name)(self, *other)

    return computed


for _name in (
    "mod", "add", "mul", "sub", "floordiv", "truediv", "eq", "ne", "lt", "le", "gt", "ge", "bool", "int",
):  # fmt: skip
    setattr(StepNumber, f"__{_name}__", _noting(f"__{_name}__"))
StepNumber.__hash__ = int.__hash__  # type: ignore[method-assign]


class PublicTrainer:
    """Public facts of a trainer that a step may read; other attributes raise a one-line error.

    Args:
        trainer: of the fit, or None outside of one.
        note: called with the name of a fact that changes.
    """

    training = is_global_zero = True
    sanity_checking = validating = testing = predicting = fast_dev_run = False
    global_rank = local_rank = node_rank = 0
    world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    gradient_clip_val = None

    def __init__(self, trainer: Any, note: Callable[[str], Any]) -> None:
        self.__dict__.update(_trainer=trainer, _note=note, logger=Sink(), loggers=[], callbacks=[])
        self.__dict__.update(callback_metrics={}, logged_metrics={}, progress_bar_metrics={})

    def __deepcopy__(self, memo: Any) -> PublicTrainer:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in _FACTS:
            if name.startswith("__"):
                raise AttributeError(name)
            raise _NoFactError(
                f"reads trainer.{name}, which a private step does not have; it has {', '.join(_FACTS)}"
            )
        if name in ("global_step", "current_epoch"):
            self._note(f"trainer.{name}")
        return _FACTS[name] if self._trainer is None else getattr(self._trainer, name)

    @property
    def optimizers(self) -> list[Any]:
        """Learning rates and other plain settings of the optimizers."""
        self._note("rates of the optimizer")
        return [
            types.SimpleNamespace(
                param_groups=[
                    {name: value for name, value in group.items() if isinstance(value, int | float | tuple)}
                    for group in optimizer.param_groups
                ]
            )
            for optimizer in getattr(self._trainer, "optimizers", None) or ()
        ]


#: Facts that are read from the trainer, and their values outside of a fit.
_FACTS: dict[str, Any] = {
    "current_epoch": 0,
    "global_step": 0,
    "max_epochs": 1,
    "max_steps": -1,
    "num_training_batches": float("inf"),
    "estimated_stepping_batches": float("inf"),
    "precision": "32-true",
    "log_every_n_steps": 50,
}
