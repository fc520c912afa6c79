"""Isolation of one record's step: it reads copies, and what it writes is thrown away.

A private training is sound when a record meets no other record before its gradient is clipped. No check of a module's
values shows that. Each record's step therefore runs on copies: of the module, the data module, the collate function,
and the module-level names, class attributes, default arguments, closures and context variables that their code refers
to. Afterwards every original is where it was. Tensors are copied on write: copies of frozen backbones cost nothing.
"""

from __future__ import annotations

import _thread
import argparse
import atexit
import builtins
import collections
import contextlib
import contextvars
import copy
import dis
import functools
import gc
import io
import logging
import operator
import os
import random
import secrets
import signal
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from enum import Enum
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_reconstruct: Any = copy._reconstruct  # type: ignore[attr-defined]

Memo = dict[Any, Any]
#: Tells objects apart as ``id`` does, whose calls audit hooks hear of.
identity: Callable[[Any], int] = object.__hash__

#: Libraries whose own module-level state is not copied: it holds nothing of a batch.
_LIBRARIES = frozenset(
    (
        *("torch", "torchvision", "torchaudio", "torchmetrics", "pytorch_lightning", "lightning"),
        *("lightning_fabric", "lightning_utilities", "numpy", "scipy", "pandas", "PIL", "timm"),
        *("transformers", "tokenizers", "peft", "einops", "opacus", "kornia", "skimage", "sklearn", "cv2"),
        *("tqdm", "wandb", "pl_privknn", "numba", "huggingface_hub", "safetensors", "datasets"),
        *("matplotlib", "typing", "omegaconf"),
    )
)  # fmt: skip
#: Tools that run the training: their objects hold the whole session, and no step needs one.
_HOSTS = frozenset(
    (
        *("pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis", "unittest", "doctest", "coverage"),
        *("IPython", "ipykernel", "traitlets", "jupyter_client", "zmq", "bdb", "pdb", "pydevd", "debugpy", "asyncio"),
        *("jsonargparse", "typeshed_client", "docstring_parser"),
    )
)  # fmt: skip
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, types.CodeType, Enum, np.dtype, np.generic),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, types.MemberDescriptorType),
    *(types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, property),
    functools.cached_property,
)  # fmt: skip
_PLAIN = {str, int, float, bool, type(None), bytes}
_SINK_NAMES = frozenset({"SummaryWriter", "FileWriter", "RecordWriter", "Run", "RunDisabled", "Experiment"})
_SINK_ROOMS = frozenset({"_thread", "_socket", "socket", "_sqlite3", "queue", "_io"})
_TRAINERS = frozenset(("pytorch_lightning", "lightning", "lightning_fabric"))
# Of Lightning's objects modules and these are copied; others, such as data modules and strategies, hold records.
_ATTRIBUTES_OF_LIGHTNING = frozenset(("AttributeDict",))
_SINKS = (io.IOBase, logging.Logger, logging.Handler, threading.Thread, threading.Event)
# Larger arrays of numpy are lent out read-only; items of larger containers of a data set are copied as they are read.
_ARRAY_BYTES, _CONTAINER = 1 << 20, 10_000
# Objects that a step may reach, all of which are copied for it.
_MOST = 100_000


class UnreachableError(PermissionError):
    """A private step asked for something that holds, or may hold, other records, or that leads out of it."""


class Sink:
    """A place that takes everything and keeps nothing: loggers, files and callbacks, as a private step sees them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""
        return self

    __getitem__ = __enter__ = __call__

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Unreachable:
    """Stands for what holds other records.

    Args:
        what: it is, for the message.
    """

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnreachableError(
            f"{object.__getattribute__(self, '_what')} can't be reached from a private step"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    __setattr__ = __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = _refuse


class PublicTrainer:
    """Trainer that a private step sees: public facts of the training, and sinks for everything else.

    Args:
        trainer: the real one, or None outside a fit.
        device: of the module.
    """

    training, is_global_zero = True, True
    sanity_checking = validating = testing = fast_dev_run = False
    global_rank = local_rank = current_epoch = global_step = 0
    world_size = num_devices = max_epochs = accumulate_grad_batches = 1
    max_steps, log_every_n_steps, gradient_clip_val, precision = -1, 50, None, "32-true"
    num_training_batches: Any = float("inf")
    estimated_stepping_batches: Any = float("inf")

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.logger = self.profiler = self.progress_bar_callback = Sink()
        self.datamodule = self.train_dataloader = Unreachable("trainer.datamodule")
        self.val_dataloaders = self.test_dataloaders = Unreachable("a data loader of the trainer")
        self.strategy = types.SimpleNamespace(root_device=device, global_rank=0, world_size=1)
        self.optimizers = [_PublicOptimizer(one) for one in getattr(trainer, "optimizers", None) or ()]
        self.strategy._lightning_optimizers = self.optimizers
        planned = getattr(trainer, "lr_scheduler_configs", None) or ()
        self.lr_scheduler_configs = [
            types.SimpleNamespace(scheduler=one) for one, _ in zip(self.optimizers, planned, strict=False)
        ]
        self.strategy.batch_to_device = lambda batch, device=device, dataloader_idx=0: moved(batch, device)
        if trainer is None:
            return
        for name in (
            *("current_epoch", "global_step", "max_epochs", "max_steps", "log_every_n_steps", "precision"),
            "num_training_batches",
        ):
            setattr(self, name, getattr(trainer, name))
        self.estimated_stepping_batches = self.max_steps
        if self.max_epochs is not None and self.max_epochs >= 0 and self.max_steps < 0:
            self.estimated_stepping_batches = self.max_epochs * self.num_training_batches


class _PublicOptimizer(torch.optim.Optimizer):
    """Rates of an optimizer, for a step that looks at them; also as a scheduler of it."""

    def __init__(self, optimizer: Any) -> None:  # without a parameter
        self.optimizer = self
        self.param_groups: list[dict[str, Any]] = [
            {name: value for name, value in group.items() if isinstance(value, int | float | tuple)}
            for group in optimizer.param_groups
        ]

    def get_last_lr(self) -> list[float]:
        """Rates of the groups."""
        return [float(group["lr"]) for group in self.param_groups]


def moved(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are on a device, whatever holds them."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(batch, dtype=Tensor, function=lambda value: value.to(device))


def cloned(tensor: Tensor) -> Tensor:
    """A copy of a tensor that takes memory only once somebody writes to it, or to the original."""
    try:
        return torch._lazy_clone(tensor.detach())
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return tensor.detach().clone()


# ------------------------------------------------------------------ copies


class Copier:
    """Deep copies of whatever a step can reach, bound methods and iterators too.

    Functions stay themselves; :class:`Surroundings` puts copies into what they hold.

    Args:
        trainer: makes what stands for the trainer in the copies.
        seed: gives seeds for generators that are copied.
        opens: whether sets of records are copied as well; a module's step must not reach them.

    Attributes:
        met: classes, functions and modules that were met, whose own state code can write to.
    """

    def __init__(self, trainer: Callable[[], Any], seed: Callable[[], int], opens: bool = False) -> None:
        self._trainer, self._seed, self._opens = trainer, seed, opens
        self.met: dict[int, Any] = {}
        self._ways: dict[type, Callable[[Any, Memo], Any] | None] = {}
        self._roots: dict[type, Callable[[Any, Memo], Any]] = {}
        self._unshared: dict[int, tuple[Tensor, int, Tensor]] = {}

    def copy(self, value: Any, memo: Memo | None = None) -> Any:
        """A copy of ``value``, sharing nothing that can be written to.

        Args:
            value: anything.
            memo: objects by the identity of those that they stand for, such as the trained parameters. What is
                copied is noted in it, so that further calls give the same copies.
        """
        return self._copy(value, {} if memo is None else memo)

    def root(self, value: Any, memo: Memo) -> Any:
        """A copy of an object whose own code runs: of a data module too, which no other object leads to."""
        if isinstance(value, nn.Module) or not hasattr(value, "transfer_batch_to_device"):
            return self._copy(value, memo)
        kind = type(value)
        if kind not in self._roots:
            self._meet(kind, memo)
            self._roots[kind] = self._instances(kind)
        return self._roots[kind](value, memo)

    def _copy(self, value: Any, memo: Memo) -> Any:
        kind = type(value)
        try:
            way = self._ways[kind]
        except KeyError:
            way = self._ways[kind] = self._way_of(kind)
        if way is None:
            return value
        found = memo.get(identity(value))
        if found is None:
            found = memo[identity(value)] = way(value, memo)
        return found

    def _way_of(self, kind: type) -> Callable[[Any, Memo], Any] | None:
        self.met.setdefault(identity(kind), kind)
        room, name = kind.__module__, kind.__name__
        own: dict[type, Callable[[Any, Memo], Any]] = {
            dict: self._dict,
            list: self._list,
            tuple: self._tuple,
            collections.OrderedDict: self._dict,
            set: self._set,
            frozenset: self._set,
        }
        if kind in own:
            return own[kind]
        if issubclass(kind, type | types.ModuleType | types.FunctionType):
            return self._meet
        if issubclass(kind, _ATOMS) or room.split(".")[0] in ("numba", "typing"):
            return None
        if issubclass(kind, argparse.Namespace):  # arguments, which steps do read
            return self._instances(kind)
        if room.split(".")[0] in _HOSTS or issubclass(kind, argparse.ArgumentParser):
            return lambda value, memo: Unreachable(f"a {room}.{name}")
        if issubclass(kind, nn.Module):
            return self._module
        if kind is threading.local:
            return self._local
        if (
            issubclass(kind, _SINKS)
            or name in _SINK_NAMES
            or room in _SINK_ROOMS
            or any(
                b.__name__ in ("Callback", "Logger", "Profiler") and "lightning" in b.__module__
                for b in kind.__mro__
            )
        ):
            return lambda value, memo: Sink()
        lightning = [b.__name__ for b in kind.__mro__ if b.__module__.split(".")[0] in _TRAINERS]
        copied = nn.Module | Dataset | DataLoader  # or each with a rule of its own, below
        if "Trainer" in lightning:
            return lambda value, memo: self._public(memo)
        if lightning and not issubclass(kind, copied) and not _ATTRIBUTES_OF_LIGHTNING & set(lightning):
            return lambda value, memo: Unreachable(f"a {room}.{name}")
        if issubclass(kind, Dataset | DataLoader) and not self._opens:
            return lambda value, memo: Unreachable(f"a {name}")
        if issubclass(kind, types.GeneratorType | types.CoroutineType):
            return lambda value, memo: Unreachable("a generator that is under way")
        ways: list[tuple[Any, Callable[[Any, Memo], Any]]] = [
            (Tensor, self._tensor),
            (tuple, self._tuple),
            (types.MappingProxyType, self._mapping),
            (types.MethodType, self._method),
            (types.BuiltinFunctionType, self._builtin),
            (functools._lru_cache_wrapper, self._cached),
            (functools.partial, self._partial),
            (types.CellType, self._meet),
            (contextvars.ContextVar, self._variable),
            (contextvars.Token, lambda token, memo: token),
            (staticmethod | classmethod, lambda s, memo: type(s)(self._copy(s.__func__, memo))),
            (np.ndarray, self._array),
            (weakref.ref, lambda r, memo: r if r() is None else weakref.ref(self._copy(r(), memo))),
            (torch.Generator, lambda g, memo: torch.Generator(device=g.device).manual_seed(self._seed())),
            (np.random.Generator, lambda g, memo: np.random.default_rng(self._seed())),
            (np.random.RandomState, lambda g, memo: np.random.RandomState(self._seed() % 2**32)),
            (random.SystemRandom, lambda g, memo: g),
            (random.Random, lambda g, memo: random.Random(self._seed())),
        ]  # fmt: skip
        return next((way for base, way in ways if issubclass(kind, base)), None) or self._instances(kind)

    def _meet(self, value: Any, memo: Memo) -> Any:
        self.met.setdefault(identity(value), value)
        return value

    def _public(self, memo: Memo) -> Any:
        """One trainer for all that is copied together: what one record writes to it, no other reads."""
        if "trainer" not in memo:
            memo["trainer"] = self._trainer()
        return memo["trainer"]

    def _tensor(self, value: Tensor, memo: Memo) -> Tensor:
        try:
            made = torch._lazy_clone(value.detach())
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            if value.layout is not torch.strided or value.nbytes <= _ARRAY_BYTES:
                made = value.detach().clone()
            else:  # memory that others share: one clone of it, which is then copied on write
                kept = self._unshared.get(identity(value))
                if kept is None or kept[1] != value._version:
                    kept = self._unshared[identity(value)] = value, value._version, value.detach().clone()
                made = cloned(kept[2])
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, requires_grad=value.requires_grad)
        return made.requires_grad_() if value.requires_grad and value.is_leaf else made

    def _module(self, value: nn.Module, memo: Memo) -> nn.Module:
        made = memo[identity(value)] = object.__new__(type(value))
        self._fill(made.__dict__, value.__dict__, memo)
        state = made.__dict__
        if "_trainer" in state and "_log_hyperparams" in state:  # a LightningModule
            state["_trainer"], state["_fabric"] = self._public(memo), None
            state["log"] = state["log_dict"] = state["print"] = Sink()
            state["all_gather"] = lambda data, *args, **kwargs: data
        return made

    def _fill(self, made: dict[str, Any], state: dict[str, Any], memo: Memo) -> None:
        make, ways = self._copy, self._ways
        for name, one in state.items():
            made[name] = one if ways.get(type(one), make) is None else make(one, memo)

    def _dict(self, value: dict[Any, Any], memo: Memo) -> Any:
        if self._opens and len(value) > _CONTAINER:
            return _LentDict(value, functools.partial(self._copy, memo=memo))
        made = memo[identity(value)] = type(value)()
        for key, one in value.items():
            made[key if type(key) is str else self._copy(key, memo)] = self._copy(one, memo)
        return made

    def _local(self, value: Any, memo: Memo) -> Any:
        made = memo[identity(value)] = threading.local()
        self._fill(made.__dict__, value.__dict__, memo)
        return made

    def _set(self, value: Any, memo: Memo) -> Any:
        return type(value)([self._copy(one, memo) for one in value]) if value else type(value)()

    def _list(self, value: list[Any], memo: Memo) -> Any:
        if self._opens and len(value) > _CONTAINER:
            return _LentList(value, functools.partial(self._copy, memo=memo))
        if set(map(type, value)) <= _PLAIN:
            return value.copy()
        made = memo[identity(value)] = []
        made += [self._copy(one, memo) for one in value]
        return made

    def _tuple(self, value: Any, memo: Memo) -> Any:
        parts = [self._copy(one, memo) for one in value]
        if all(map(operator.is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    def _mapping(self, value: Any, memo: Memo) -> Any:
        return types.MappingProxyType({key: self._copy(one, memo) for key, one in value.items()})

    def _method(self, value: Any, memo: Memo) -> Any:
        return types.MethodType(self._copy(value.__func__, memo), self._copy(value.__self__, memo))

    def _partial(self, value: Any, memo: Memo) -> Any:
        function, args, kwargs = (self._copy(one, memo) for one in (value.func, value.args, value.keywords))
        return functools.partial(function, *args, **kwargs)

    def _builtin(self, value: Any, memo: Memo) -> Any:
        if value in _REPLACED:
            return getattr(*_REPLACED[value])  # what a private step finds in its place, however it is held
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            return value
        return getattr(self._copy(owner, memo), value.__name__) if hasattr(owner, value.__name__) else value

    def _variable(self, value: Any, memo: Memo) -> Any:
        """The variable itself, which holds a copy where its default could be written to."""
        with contextlib.suppress(LookupError):
            held = value.get()
            if value not in contextvars.copy_context() and (made := self._copy(held, memo)) is not held:
                value.set(made)
        return value

    def _cached(self, value: Any, memo: Memo) -> Any:
        return functools.lru_cache(**value.cache_parameters())(self._copy(value.__wrapped__, memo))

    def _array(self, value: Any, memo: Memo) -> Any:
        if value.dtype.hasobject and value.size <= _CONTAINER:
            made = value.copy()
            made.ravel()[...] = [self._copy(one, memo) for one in value.ravel()]
            return made
        if value.nbytes <= _ARRAY_BYTES:
            return value.copy()
        lent = value.view()
        lent.flags.writeable = False
        return lent

    def _instances(self, kind: type) -> Callable[[Any, Memo], Any]:
        """The way to copy instances of a class: its attributes and slots, and what it holds as a container."""
        slots = [
            name
            for base in kind.__mro__
            for name in _names(base.__dict__.get("__slots__", ()))
            if name not in ("__dict__", "__weakref__")
        ]
        # Classes of C code may end the process where they are made without their arguments.
        make, spare = _maker(kind) if kind.__dictoffset__ or slots else (None, [])
        if make is None:
            return self._of_c_code
        container = issubclass(kind, dict | list | set | collections.deque)

        def way(value: Any, memo: Memo) -> Any:
            if len(memo) > _MOST:
                raise UnreachableError(
                    f"more than {_MOST} objects can be reached from a private step, a {kind.__name__} among them: "
                    "let the file that defines the module, or the data set, name no such thing"
                )
            made = memo[identity(value)] = spare.pop() if spare else make(kind)
            if container:
                self._take(made, value, memo)
            if kind.__dictoffset__:
                self._fill(made.__dict__, value.__dict__, memo)
            for name in slots:
                if hasattr(value, name):
                    object.__setattr__(made, name, self._copy(getattr(value, name), memo))
            return made

        return way

    def _take(self, made: Any, value: Any, memo: Memo) -> None:
        if isinstance(value, collections.defaultdict):
            made.default_factory = self._copy(value.default_factory, memo)
        if isinstance(value, dict):
            base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            for key, one in base.items(value):
                base.__setitem__(made, self._copy(key, memo), self._copy(one, memo))
        else:
            add = (
                set.add
                if isinstance(value, set)
                else list.append
                if isinstance(value, list)
                else collections.deque.append
            )
            for one in value:
                add(made, self._copy(one, memo))

    def _of_c_code(self, value: Any, memo: Memo) -> Any:
        """Containers and iterators say how to make them anew; others copy themselves, or can't be reached."""
        kind = type(value)
        with contextlib.suppress(Exception):
            if kind.__module__ not in ("builtins", "collections", "itertools"):
                return copy.deepcopy(value, _Bounded())
            found: Any = value.__reduce_ex__(4)
            return value if isinstance(found, str) else _reconstruct(value, memo, *found, deepcopy=self._copy)
        if kind.__module__.split(".")[0] in _LIBRARIES or kind.__name__.startswith("pybind11_"):
            return value
        return Unreachable(f"a {kind.__module__}.{kind.__qualname__}, which can't be copied,")


class _Bounded(dict[Any, Any]):
    """The memo of a deep copy of few objects."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) > _MOST:
            raise UnreachableError(f"more than {_MOST} objects")
        super().__setitem__(key, value)


class _Lent:
    """A large container whose items are copied as they are read, and all of them before one is written."""

    def __init__(self, held: Any, made: Callable[[Any], Any]) -> None:
        self._held, self._made = held, made

    def __getitem__(self, key: Any) -> Any:
        return self._made(self._held[key])

    def __len__(self) -> int:
        return len(self._held)

    def _own(self) -> Any:
        if isinstance(self._made, functools.partial):
            pairs = self._held.items() if isinstance(self._held, dict) else enumerate(self._held)
            made = {key: self._made(one) for key, one in pairs}
            self._held = made if isinstance(self._held, dict) else list(made.values())
            self._made = _as_it_is
        return self._held

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]


class _LentList(_Lent, MutableSequence[Any]):
    def insert(self, index: int, value: Any) -> None:
        """See ``list.insert``."""
        self._own().insert(index, value)


class _LentDict(_Lent, MutableMapping[Any, Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)


def _maker(kind: type) -> tuple[Any, list[Any]]:
    """The constructor of an empty instance of a class, or None, and an instance that it made."""
    makers: tuple[Any, ...] = (object.__new__, kind.__new__)
    for make in makers:
        with contextlib.suppress(Exception):
            return make, [make(kind)]
    return None, []


def _as_it_is(value: Any) -> Any:
    return value


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_library(name: str | None) -> bool:
    """Whether a module's own state is left alone: the standard library's and those of known libraries."""
    if not name or name == "__main__":
        return False
    top = name.split(".")[0]
    return top in _LIBRARIES or top in _HOSTS or top in sys.stdlib_module_names


# ------------------------------------------------------------------ what code can write to without holding it

_Undo = Callable[[], None]


class Surroundings:
    """Module-level names, class attributes, closures, defaults and the like: copies in their places for a block.

    Args:
        copier: has met the classes and functions whose code runs.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._seen = 0
        self._known: set[int] = set()
        self._names: dict[int, set[str]] = {}
        self._words: set[str] = set()  # that the code of users refers to
        #: Each puts copies somewhere and gives the way back.
        self._places: list[Callable[[Any, Memo], _Undo]] = [_hide_process]
        self._functions: list[types.FunctionType] = []
        self._imports: set[str] = set()  # modules that the code of users imports, or names in a word
        self._looked = (-1, -1)

    @contextlib.contextmanager
    def alone(self, memo: Memo, *roots: Any) -> Iterator[list[Any]]:
        """Copies of the roots, and of everything beside them that their code can write to, for the time of a block.

        Args:
            memo: copies that exist already, by the identity of the originals.
            *roots: objects whose code runs.
        """
        undo: list[_Undo] = []
        make, place, known = self._copier._copy, 0, 0
        try:
            copies = [self._copier.root(root, memo) for root in roots]
            while self._look() or place < len(self._places) or known < len(self._functions):
                for hide in self._places[place:]:  # copies may meet further classes and functions
                    undo.append(hide(make, memo))
                    place += 1
                for function in self._functions[known:]:
                    if function.__dict__:
                        undo.append(_hide_attributes(function, make, memo))
                    known += 1
            yield copies
        finally:
            for function in self._functions[:known]:
                if function.__dict__:
                    function.__dict__.clear()
            for back in reversed(undo):
                back()

    def _look(self) -> bool:
        """Take up what the copier has met since; whether there is any."""
        if self._looked != (state := (len(self._imports), len(sys.modules))):
            self._looked = state
            for name in self._imports & sys.modules.keys():
                self._visit(sys.modules[name])
        met = self._copier.met
        if len(met) == self._seen:
            return False
        fresh = list(met.values())[self._seen :]
        self._seen = len(met)
        for one in fresh:
            self._visit(one)
        return True

    def _visit(self, value: Any) -> None:
        if identity(value) in self._known:
            return
        if isinstance(value, types.FunctionType):
            self._known.add(identity(value))
            self._functions.append(value)
            for cell in value.__closure__ or ():
                self._visit(cell)
            if value.__defaults__ or value.__kwdefaults__:
                self._places.append(functools.partial(_hide_defaults, value))
            if not _is_library(value.__module__):
                names = _names_in(value.__code__)
                self._words |= names
                self._imports |= _imports_in(value.__code__, value.__globals__.get("__package__"))
                self._places.append(functools.partial(_hide_function, value))
                self._visit_names(value.__globals__, names)
        elif isinstance(value, types.CellType):
            self._known.add(identity(value))
            self._places.append(functools.partial(_hide_cell, value))
        elif isinstance(value, type):
            for base in value.__mro__:
                if identity(base) in self._known or base is object:
                    continue
                self._known.add(identity(base))
                if _is_library(base.__module__):
                    if base.__flags__ & 1 << 9:  # its attributes can be written to
                        self._places.append(_Guard(base, self._words, self._meet))
                    continue
                self._places.append(functools.partial(_hide_class, base))
                for one in list(vars(base).values()):
                    for part in (one, *(getattr(one, name, None) for name in ("fget", "fset", "__func__"))):
                        if isinstance(part, types.FunctionType | type):
                            self._visit(part)
        elif isinstance(value, types.ModuleType):
            if _is_library(value.__name__):
                self._known.add(identity(value))
                self._places.append(_Guard(value, self._words, self._meet))
            else:
                self._visit_names(vars(value), self._words)

    def _meet(self, value: Any) -> None:
        """Take up a library's function, class or module that the code of users names."""
        if isinstance(value, types.FunctionType):
            self._functions.append(value)
        elif isinstance(value, type | types.ModuleType) and not isinstance(value, types.GenericAlias):
            self._visit(value)

    def _visit_names(self, space: dict[str, Any], names: set[str]) -> None:
        known = self._names.get(identity(space))
        if known is None:
            known = self._names[identity(space)] = set()
            self._places.append(functools.partial(_hide_names, space, ()))
        fresh = names - known
        if not fresh:
            return
        known |= fresh
        self._places.append(functools.partial(_hide_names, space, tuple(fresh)))
        for name in fresh & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                self._visit_names(vars(value), names)
            elif isinstance(value, types.FunctionType) and _is_library(value.__module__):
                self._functions.append(value)
            elif isinstance(value, types.FunctionType | type | types.ModuleType):
                self._visit(value)


def _names_in(code: types.CodeType) -> set[str]:
    """Names that code can refer to, as names or as words."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return found


def _imports_in(code: types.CodeType, package: str | None) -> set[str]:
    """Modules that code imports, or whose names it has as words."""
    found, room = set(), ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            room = step.argval
            found |= {room, f"{package}.{room}".strip(".")}
        elif step.opname == "IMPORT_FROM":
            found |= {f"{room}.{step.argval}", f"{package}.{room}.{step.argval}".replace("..", ".")}
        elif isinstance(step.argval, str):
            found.add(step.argval)
        elif isinstance(step.argval, types.CodeType):
            found |= _imports_in(step.argval, package)
    return found


def _hide_names(space: dict[str, Any], names: tuple[str, ...], make: Any, memo: Memo) -> _Undo:
    """Copies in the place of a module's names; without ``names``, what else changes in it goes back."""
    if not names:
        kept = space.copy()

        def back() -> None:
            if len(space) > len(kept):
                for name in space.keys() - kept.keys():
                    del space[name]
            space.update(kept)

        return back
    changed = {}
    for name in names:
        if name in space:
            value = space[name]
            made = make(value, memo)
            if made is not value:
                changed[name], space[name] = value, made
    return functools.partial(space.update, changed)


_OF_CLASSES = frozenset(("__dict__", "__weakref__", "__abstractmethods__"))


def _hide_class(owner: type, make: Any, memo: Memo) -> _Undo:
    kept = {n: v for n, v in vars(owner).items() if n not in _OF_CLASSES}
    for name, value in kept.items():
        if name.startswith("__") and name != "__annotations__":
            continue
        if not isinstance(value, types.FunctionType) and not name.startswith("_abc_"):
            made = make(value, memo)
            if made is not value and not (
                isinstance(value, staticmethod | classmethod) and made.__func__ is value.__func__
            ):
                type.__setattr__(owner, name, made)
    members = [_put_back(one) for one in owner] if issubclass(owner, Enum) else []

    def back() -> None:
        now = vars(owner)
        for name in [one for one in now if one not in kept and one not in _OF_CLASSES]:
            type.__delattr__(owner, name)
        for name, value in kept.items():
            if now.get(name) is not value:
                type.__setattr__(owner, name, value)
        for member in members:
            member()

    return back


class _Guard:
    """A library's module or class: what a step adds to it goes again, and what users' code names in it goes back."""

    def __init__(self, owner: Any, words: set[str], meet: Callable[[Any], None]) -> None:
        self._owner, self._words, self._meet, self._state = owner, words, meet, (-1, -1)
        self._shared: tuple[str, ...] = ()
        self._held: list[Any] = []

    def __call__(self, make: Any, memo: Memo) -> _Undo:
        now = vars(self._owner)
        if self._state != (state := (len(self._words), len(now))):
            self._state, self._shared = state, tuple(self._words & now.keys())
            self._held = []
            for name in self._shared:
                value = now[name]
                self._meet(value)
                self._hold(value)
                if isinstance(value, types.FunctionType):
                    for other in _names_in(value.__code__) & value.__globals__.keys():
                        self._hold(value.__globals__[other])
        backs = [_put_back(one) for one in self._held]
        return functools.partial(self._back, len(now), [(name, now[name]) for name in self._shared], backs)

    def _hold(self, value: Any) -> None:
        plain = isinstance(value, dict | list | set | collections.deque)
        if (plain and len(value) <= _CONTAINER and value is not sys.modules) or (
            not isinstance(value, type | types.ModuleType | types.FunctionType | nn.Module)
            and isinstance(getattr(value, "__dict__", None), dict)
        ):
            self._held.append(value)

    def _back(self, before: int, kept: list[tuple[str, Any]], backs: list[_Undo]) -> None:
        now = vars(self._owner)
        for name, value in kept:
            if now.get(name) is not value:
                setattr(self._owner, name, value)
        for back in backs:
            back()
        if len(now) > before:
            for name in list(now)[before:]:  # the newest come last; what a library has imported since stays
                value = now[name]
                if not isinstance(value, types.ModuleType) and not _is_library(
                    getattr(value, "__module__", None)
                ):
                    delattr(self._owner, name)


_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)


def _put_back(value: Any) -> _Undo:
    """Note a container's items, or an object's attributes; returns the function that restores them.

    By the methods of the container's base: a library's own may make something else of what they are given.
    """
    base: Any = next((one for one in _CONTAINERS if isinstance(value, one)), dict)
    held = value if isinstance(value, base) else value.__dict__
    if issubclass(base, dict):
        pairs = dict(base.items(held))

        def dict_back() -> None:
            if len(held) != len(pairs) or any(base.get(held, key, held) is not pairs[key] for key in pairs):
                base.clear(held)
                for key, one in pairs.items():
                    base.__setitem__(held, key, one)

        return dict_back
    kept = list(base.__iter__(held))

    def back() -> None:
        if len(held) != len(kept) or not all(map(operator.is_, base.__iter__(held), kept)):
            base.clear(held)
            (base.update if base is set else base.extend)(held, kept)

    return back


def _hide_cell(cell: Any, make: Any, memo: Memo) -> _Undo:
    try:
        value = cell.cell_contents
    except ValueError:  # an empty one

        def empty() -> None:
            with contextlib.suppress(ValueError):
                del cell.cell_contents

        return empty
    cell.cell_contents = make(value, memo)
    return functools.partial(setattr, cell, "cell_contents", value)


def _hide_defaults(function: Any, make: Any, memo: Memo) -> _Undo:
    defaults, named = function.__defaults__, function.__kwdefaults__
    function.__defaults__, function.__kwdefaults__ = make(defaults, memo), make(named, memo)

    def back() -> None:
        function.__defaults__, function.__kwdefaults__ = defaults, named

    return back


_OF_FUNCTIONS = ("__code__", "__doc__", "__name__", "__qualname__", "__module__")
_kept_of = operator.attrgetter(*_OF_FUNCTIONS)


def _hide_function(function: Any, make: Any, memo: Memo) -> _Undo:
    kept, annotations = _kept_of(function), dict(function.__annotations__)

    def back() -> None:
        if _kept_of(function) != kept:
            for name, value in zip(_OF_FUNCTIONS, kept, strict=True):
                setattr(function, name, value)
        if function.__annotations__ != annotations:
            function.__annotations__ = annotations

    return back


def _hide_attributes(function: Any, make: Any, memo: Memo) -> _Undo:
    own = function.__dict__.copy()
    function.__dict__.update({name: make(value, memo) for name, value in own.items()})
    return functools.partial(function.__dict__.update, own)


def _hide_process(make: Any, memo: Memo) -> _Undo:
    """The environment, context variables (of a context that ends with the step), and how torch computes."""
    environment = vars(os.environ)["_data"]
    kept, switches, modules = environment.copy(), [get() for get, _ in _SWITCHES], len(sys.modules)
    hooks = [getattr(nn.modules.module, f"_global_{name}", {}) for name in _HOOKS]
    figures = sys.modules.get("matplotlib._pylab_helpers")
    if figures is not None:
        hooks.append(figures.Gcf.figs)
    backs = [_put_back(one) for one in (*hooks, threading.current_thread(), sys.stdout, sys.stderr)]
    for variable, value in contextvars.copy_context().items():
        made = make(value, memo)
        if made is not value:
            variable.set(made)

    def back() -> None:
        while torch._C._len_torch_function_stack() > switches[0]:
            torch._C._pop_torch_function_stack()
        for (get, put), before in zip(_SWITCHES[1:], switches[1:], strict=True):
            if get() != before:
                put(before)
        if environment != kept:
            environment.clear()
            environment.update(kept)
        for one in backs:
            one()
        if len(sys.modules) > modules and _inside is not None:
            for name in list(sys.modules)[modules:]:
                if not _is_library(name):
                    del sys.modules[name]

    return back


def _flag(place: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return functools.partial(getattr, place, name), functools.partial(setattr, place, name)


_PRINTED: Any = torch._tensor_str.PRINT_OPTS
#: What turns how code computes, as getters and setters; the first is put back otherwise.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._len_torch_function_stack, lambda length: None),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: dict(vars(_PRINTED)), lambda kept: vars(_PRINTED).update(kept)),
    *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    _flag(torch.backends.mkldnn, "enabled"),
    _flag(torch.backends.cuda.matmul, "allow_tf32"),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (lambda: warnings.filters[:], lambda kept: setattr(warnings, "filters", kept)),
)


def in_own_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run in a copy of the context, so that context variables are as before afterwards."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return contextvars.copy_context().run(function, *args, **kwargs)

    return run


# ------------------------------------------------------------------ randomness


class PrivateRandomness:
    """Global generators of torch, numpy and Python, seeded secretly inside and put back afterwards.

    What a record draws must not depend on which others are there, and nobody may know it: inside, every record's step
    starts from a seed of its own.

    Args:
        seed: gives 63-bit seeds; the operating system's generator by default.
    """

    def __init__(self, seed: Callable[[], int] | None = None) -> None:
        self.seed = seed if seed is not None else lambda: secrets.randbits(63)
        self._mark: tuple[Any, ...] | None = None
        self._drew = False

    def begin(self) -> None:
        """Seed the generators anew."""
        self._look()
        seed = self.seed()
        # torch.manual_seed leaves a stack trace for each device that is not in use.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        if self._mark is not None:
            self._mark = _state()

    def for_copy(self) -> int:
        """A seed for a generator that is copied, which counts as drawn from."""
        self._drew = True
        return self.seed()

    def watch(self) -> None:
        """Begin to see whether something is drawn; what that costs each record is left out otherwise."""
        self._mark, self._drew = _state(), False

    def drew(self) -> bool:
        """Whether something was drawn since :meth:`watch`, which ends."""
        self._look()
        self._mark = None
        return self._drew

    def _look(self) -> None:
        if self._mark is not None:
            self._drew |= self._mark != _state()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """For the time of a block."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        kept, theirs = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices):
            try:
                yield
            finally:
                np.random.set_state(kept)
                random.setstate(theirs)

    @contextlib.contextmanager
    def of_the_system(self) -> Iterator[None]:
        """Let what Python draws from the operating system follow from the seeds too, which a test can repeat."""

        def drawn(count: int) -> bytes:
            self._drew = True
            return random.randbytes(count)

        with mock.patch.object(random, "_urandom", drawn), mock.patch.object(os, "urandom", drawn):
            yield


def _state() -> tuple[Any, ...]:
    """Where the global generators are."""
    words: Any = np.random.get_state()
    return torch.random.get_rng_state().numpy().tobytes(), words[1].tobytes(), words[2:], random.getstate()


# ------------------------------------------------------------------ ways out

_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
_ENDINGS = (
    (signal, "signal"), (signal, "raise_signal"), (_thread, "interrupt_main"), (os, "_exit"), (os, "abort"),
)  # fmt: skip
_REPLACED = {
    getattr(owner, name): (owner, name) for owner, name in (*_ENDINGS, *((time, clock) for clock in _CLOCKS))
}
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce"),
    *("gather", "scatter", "send", "isend", "recv", "broadcast_object_list", "barrier"),
)
_OUT = ("os.", "subprocess.", "shutil.", "sys.settrace", "sys.setprofile", "gc.get_")
_OUT_OF_STEPS = ("socket.", "sqlite3.", "urllib.", "ftplib.")  # from where a data set may read
_HARMLESS = frozenset(f"os.{name}" for name in ("listdir", "scandir", "walk", "fwalk", "putenv", "unsetenv"))
_reads = False  # whether a data set is being read
_inside: int | None = None  # the thread of the private step that is under way
_listens = False
_interrupted = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what leads out of a private step: files, processes, threads, connections."""
    if _inside is None or not _is_private():
        return
    flags = arguments[2] if event == "open" else 0
    if (
        (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        or (event.startswith(_OUT) and event not in _HARMLESS)
        or (event.startswith(_OUT_OF_STEPS) and not _reads)
    ):
        raise UnreachableError(f"{event} can't be reached from a private step")


def _is_private() -> bool:
    """Whether this thread is that of the private step, or one that torch has begun for it."""
    thread = threading.get_ident()
    return thread == _inside or (_inside is not None and thread not in threading._active)  # type: ignore[attr-defined]


def _only_elsewhere(original: Any, inside: Any) -> Any:
    """A function that other threads call as it was."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (inside if _is_private() else original)(*args, **kwargs)

    return call


def _opened(original: Any) -> Any:
    def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return io.BytesIO() if "b" in mode else io.StringIO()
        return original(file, mode, *args, **kwargs)

    return _only_elsewhere(original, opened)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Let a data set ask a service, or a database, for a record."""
    global _reads
    _reads = True
    try:
        yield
    finally:
        _reads = False


def _refuse(what: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnreachableError(f"{what} can't be reached from a private step")

    return refuse


@contextlib.contextmanager
def noticing_interrupts() -> Iterator[None]:
    """Tell a user's Ctrl-C, which :func:`was_interrupted` knows of, from an error of its kind that a step raises."""
    global _interrupted
    _interrupted, before = False, signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # nobody's Ctrl-C is heard here
        return

    def notice(number: int, frame: Any) -> Any:
        global _interrupted
        _interrupted = True
        return before(number, frame)

    signal.signal(signal.SIGINT, notice)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed since :func:`noticing_interrupts` began."""
    return _interrupted


@contextlib.contextmanager
def telling_nobody() -> Iterator[None]:
    """Let trackers of experiments, and hooks on all modules, hear nothing of what runs inside."""
    with contextlib.ExitStack() as stack:
        patch = lambda target, name, new: stack.enter_context(mock.patch.object(target, name, new))  # noqa: E731
        for name in ("wandb", "mlflow", "comet_ml", "neptune"):
            if (library := sys.modules.get(name)) is not None:
                for one in ("run", "log", "save", "summary", "log_metric", "log_metrics", "log_artifact"):
                    if hasattr(library, one):
                        patch(library, one, Sink())
        for name in _HOOKS:
            if hasattr(nn.modules.module, f"_global_{name}"):
                patch(nn.modules.module, f"_global_{name}", collections.OrderedDict())
        yield


@contextlib.contextmanager
def writing_nowhere() -> Iterator[None]:
    """Let nothing that runs inside write a file, log to a service, start a thread or speak to other processes.

    Clocks stand still, since the time tells how many records came before. Other threads go on as before.
    """
    global _inside, _listens
    if not _listens:
        sys.addaudithook(_hear)
        _listens = True
    with contextlib.ExitStack() as stack:
        patch = lambda target, name, new: stack.enter_context(mock.patch.object(target, name, new))  # noqa: E731
        for target in (builtins, io):
            patch(target, "open", _opened(target.open))
        patch(logging, "root", Sink())
        patch(logging.Manager, "getLogger", _only_elsewhere(logging.Manager.getLogger, Sink()))
        for owner, name in _ENDINGS:
            patch(owner, name, _only_elsewhere(getattr(owner, name), _refuse(name)))
        patch(torch, "save", _only_elsewhere(torch.save, Sink()))
        for begins, name in ((threading.Thread, "start"), (_thread, "start_new_thread")):
            patch(begins, name, _only_elsewhere(getattr(begins, name), _refuse("a new thread")))
        patch(atexit, "register", _only_elsewhere(atexit.register, Sink()))
        for name in _CLOCKS:
            clock = getattr(time, name)
            patch(time, name, _only_elsewhere(clock, functools.partial(_as_it_is, clock())))
        if torch.distributed.is_available():
            patch(torch.distributed, "is_initialized", lambda: False)
            for name in _COLLECTIVES:
                patch(torch.distributed, name, _refuse("torch.distributed"))
        stack.enter_context(telling_nobody())
        before, _inside = _inside, threading.get_ident()
        try:
            yield
        finally:
            _inside = before
