"""One record's step in a world of its own: what it reads is a copy, and what it writes is thrown away.

A private training is sound when a record meets no other record before its gradient is clipped. No check of a module's
values shows that, so each record's step runs on copies: of the module, the data module, the collate function and of
the module-level names, class attributes, default arguments and closures that their code refers to. Afterwards every
original is where it was. Tensors are copied on write, so a copy of a frozen backbone costs nothing.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import functools
import io
import logging
import os
import random
import secrets
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

#: Libraries whose own module-level state is not shadowed: it holds nothing of a batch.
_LIBRARIES = frozenset(
    {
        *(
            "torch",
            "torchvision",
            "torchaudio",
            "torchmetrics",
            "pytorch_lightning",
            "lightning",
            "lightning_fabric",
        ),
        *(
            "lightning_utilities",
            "numpy",
            "scipy",
            "pandas",
            "PIL",
            "timm",
            "transformers",
            "tokenizers",
            "peft",
        ),
        *("einops", "opacus", "kornia", "skimage", "sklearn", "cv2", "tqdm", "wandb", "pl_privknn", "numba"),
        *("huggingface_hub", "safetensors", "datasets", "matplotlib"),
    }
)
_ATOMS: tuple[Any, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    types.ModuleType,
    types.CodeType,
)
_ATOMS += (
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    np.dtype,
    np.generic,
)
_PLAIN = {str, int, float, bool, type(None), bytes}
_SINK_NAMES = frozenset({"SummaryWriter", "FileWriter", "RecordWriter", "Run", "RunDisabled", "Experiment"})
# Larger arrays of numpy are lent out read-only; larger containers are lent out as they are.
_ARRAY_BYTES = 1 << 20
_CONTAINER = 10_000
_STDLIB = sysconfig.get_paths()["stdlib"]


class Nobody:
    """A place that takes everything and keeps nothing: loggers, files and callbacks, as a private step sees them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False


class UnreachableError(RuntimeError):
    """A private step asked for something that holds, or may hold, other records."""


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
    """What a private step sees as ``self.trainer``: public facts of the training, and nobody to tell anything to.

    Args:
        trainer: the real one, or None outside a fit.
        device: of the module.
    """

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.training, self.sanity_checking, self.validating, self.testing = True, False, False, False
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.logger = self.profiler = self.progress_bar_callback = Nobody()
        self.global_rank, self.local_rank, self.world_size, self.num_devices = 0, 0, 1, 1
        self.is_global_zero, self.fast_dev_run, self.log_every_n_steps = True, False, 50
        self.current_epoch = self.global_step = 0
        self.max_epochs: int | None = 1
        self.max_steps = -1
        self.accumulate_grad_batches, self.gradient_clip_val = 1, None
        self.datamodule = self.train_dataloader = Unreachable("trainer.datamodule")
        self.val_dataloaders = self.test_dataloaders = Unreachable("a data loader of the trainer")
        strategy = types.SimpleNamespace(root_device=device, global_rank=0, world_size=1)
        strategy.batch_to_device = lambda batch, device=device, dataloader_idx=0: moved(batch, device)
        self.strategy: Any = strategy
        for name in (
            "current_epoch",
            "global_step",
            "max_epochs",
            "max_steps",
            "log_every_n_steps",
            "precision",
        ):
            if trainer is not None:
                setattr(self, name, getattr(trainer, name))
        self.num_training_batches: Any = float("inf")
        self.estimated_stepping_batches: Any = float("inf")
        if trainer is not None:
            self.num_training_batches = trainer.num_training_batches
            self.estimated_stepping_batches = self.max_steps
            if self.max_epochs is not None and self.max_epochs >= 0 and self.max_steps < 0:
                self.estimated_stepping_batches = self.max_epochs * self.num_training_batches


def moved(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are on a device, whatever holds them."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(batch, dtype=Tensor, function=lambda value: value.to(device))


def cloned(tensor: Tensor, lends: bool = False) -> Tensor:
    """A copy of a tensor that takes memory only once somebody writes to it, or to the original.

    Args:
        tensor: to copy.
        lends: give a large one itself where that is not possible, as with memory that other processes share.
    """
    try:
        return torch._lazy_clone(tensor.detach())
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return tensor if lends and tensor.nbytes > _ARRAY_BYTES else tensor.detach().clone()


class Copier:
    """Deep copies of whatever a step can reach, closures and bound methods too.

    Args:
        trainer: makes what stands for the trainer in the copies.
        seed: gives seeds for generators that are copied.
        opens: whether sets of records are copied as well; a module's step must not reach them.

    Attributes:
        types: the classes that were met.
    """

    def __init__(self, trainer: Callable[[], Any], seed: Callable[[], int], opens: bool = False) -> None:
        self._trainer, self._seed, self._opens = trainer, seed, opens
        self.types: set[type] = set()
        self.functions: dict[int, types.FunctionType] = {}

    def copy(self, value: Any, memo: dict[Any, Any] | None = None) -> Any:
        """A copy of ``value``, sharing nothing that can be written to.

        Args:
            value: anything.
            memo: objects by the identity of those that they stand for, such as the trained parameters. What is
                copied is noted in it, so that further calls give the same copies.
        """
        return self._copy(value, {} if memo is None else memo)

    def _copy(self, value: Any, memo: dict[Any, Any]) -> Any:
        if isinstance(value, _ATOMS):
            return value
        found = memo.get(id(value), memo)
        if found is not memo:
            return found
        kind = type(value)
        self.types.add(kind)
        made: Any
        if isinstance(value, Tensor):
            made = self._tensor(value)
        elif isinstance(value, nn.Module):
            made = memo[id(value)] = object.__new__(kind)
            self._fill(made, value.__dict__, memo)
            _quiet(made, lambda: self._public(memo))
        elif kind is dict or isinstance(value, dict):
            return self._mapping(value, memo)
        elif kind in (list, set, collections.deque, frozenset) or (
            isinstance(value, list | set | collections.deque) and not hasattr(value, "__dict__")
        ):
            if len(value) > _CONTAINER:
                return value
            if set(map(type, value)) <= _PLAIN:
                made = copy.copy(value)
            elif kind is list:
                made = memo[id(value)] = []
                made.extend([self._copy(one, memo) for one in value])
            elif isinstance(value, collections.deque):
                made = collections.deque((self._copy(one, memo) for one in value), value.maxlen)
            else:
                made = kind(self._copy(one, memo) for one in value)
        elif isinstance(value, tuple):
            parts = [self._copy(one, memo) for one in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                made = value
            else:
                made = kind(*parts) if hasattr(value, "_fields") else kind(parts)
        else:
            made = self._other(value, memo)
        memo[id(value)] = made
        return made

    def _public(self, memo: dict[Any, Any]) -> Any:
        """One trainer for all that is copied together: what one record writes to it, no other reads."""
        if "trainer" not in memo:
            memo["trainer"] = self._trainer()
        return memo["trainer"]

    def _tensor(self, value: Tensor) -> Tensor:
        made = cloned(value, self._opens)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, requires_grad=value.requires_grad)
        return made.requires_grad_(value.requires_grad) if value.is_leaf else made

    def _mapping(self, value: Any, memo: dict[Any, Any]) -> Any:
        if len(value) > _CONTAINER:
            return value
        if not value or type(value) not in (dict, collections.OrderedDict, collections.defaultdict):
            made = copy.copy(value)
            memo[id(value)] = made
            for key in list(value):
                made[key] = self._copy(value[key], memo)
            return made
        made = memo[id(value)] = type(value)()
        if isinstance(value, collections.defaultdict):
            made.default_factory = self._copy(value.default_factory, memo)
        for key, one in value.items():
            made[self._copy(key, memo) if not isinstance(key, str | int) else key] = self._copy(one, memo)
        return made

    def _fill(self, made: Any, state: dict[str, Any], memo: dict[Any, Any]) -> None:
        target = made.__dict__
        for name, one in state.items():
            target[name] = one if isinstance(one, _ATOMS) else self._copy(one, memo)

    def _other(self, value: Any, memo: dict[Any, Any]) -> Any:
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, memo)
        if kind is types.MethodType:
            owner = self._copy(value.__self__, memo)
            return types.MethodType(self._copy(value.__func__, memo), owner)
        if kind is types.BuiltinFunctionType:
            owner = value.__self__
            if owner is None or isinstance(owner, types.ModuleType | type):
                return value
            return getattr(self._copy(owner, memo), value.__name__)
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(self._copy(value.__wrapped__, memo))
        if isinstance(value, functools.partial):
            arguments = [self._copy(part, memo) for part in (value.func, value.args, value.keywords)]
            return functools.partial(arguments[0], *arguments[1], **arguments[2])
        if kind is types.CellType:
            try:
                return types.CellType(self._copy(value.cell_contents, memo))
            except ValueError:
                return types.CellType()
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, weakref.ref):
            target = value()
            return value if target is None else weakref.ref(self._copy(target, memo))
        if _is_sink(value):
            return Nobody()
        if kind.__name__ == "Trainer" and hasattr(value, "fit_loop"):
            return self._public(memo)
        if isinstance(value, Dataset | DataLoader) and not self._opens:
            return Unreachable(f"a {kind.__name__}")
        if isinstance(value, torch.Generator):
            return torch.Generator(device=value.device).manual_seed(self._seed())
        if isinstance(value, np.random.Generator):
            return np.random.default_rng(self._seed())
        if isinstance(value, np.random.RandomState):
            return np.random.RandomState(self._seed() % 2**32)
        if isinstance(value, random.Random):
            return random.Random(self._seed())
        if isinstance(value, types.GeneratorType | types.CoroutineType):
            return Unreachable("a generator that is under way")
        return self._instance(value, memo)

    def _instance(self, value: Any, memo: dict[Any, Any]) -> Any:
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in _names(base.__dict__.get("__slots__", ()))]
        made: Any = None
        if hasattr(value, "__dict__") or slots:
            for make in (object.__new__, getattr(kind, "__new__")):  # noqa: B009
                with contextlib.suppress(Exception):
                    made = make(kind)
                    break
        if made is None:  # of C code: iterators and such copy themselves; what can't is lent out
            with contextlib.suppress(Exception):
                return (
                    copy.copy(value) if kind.__module__ in ("builtins", "itertools") else copy.deepcopy(value)
                )
            return value
        memo[id(value)] = made
        if isinstance(value, list):
            made.extend(self._copy(one, memo) for one in value)
        if hasattr(value, "__dict__"):
            self._fill(made, value.__dict__, memo)
        for name in slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                object.__setattr__(made, name, self._copy(getattr(value, name), memo))
        return made

    def _function(self, value: types.FunctionType, memo: dict[Any, Any]) -> Any:
        self.functions[id(value)] = value
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__):
            return value
        if _is_library(value.__module__) and not value.__closure__:
            return value
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        memo[id(value)] = made  # before its cells: a function may refer to itself
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty one
                cell.cell_contents = self._copy(old.cell_contents, memo)
        made.__defaults__ = self._copy(value.__defaults__, memo)
        made.__kwdefaults__ = self._copy(value.__kwdefaults__, memo)
        made.__qualname__, made.__module__ = value.__qualname__, value.__module__
        self._fill(made, value.__dict__, memo)
        return made

    def _array(self, value: Any) -> Any:
        if value.nbytes <= _ARRAY_BYTES:
            return value.copy()
        lent = value.view()
        lent.flags.writeable = False
        return lent


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_sink(value: Any) -> bool:
    """Whether something leads out of the process, or serves several threads."""
    kind = type(value)
    if isinstance(value, io.IOBase | logging.Logger | logging.Handler | threading.Thread | threading.Event):
        return True
    if kind.__name__ in _SINK_NAMES or kind.__module__ in (
        "_thread",
        "_socket",
        "socket",
        "_sqlite3",
        "queue",
        "_io",
    ):
        return True
    # Of either of Lightning's packages.
    return any(
        base.__name__ in ("Callback", "Logger") and "lightning" in base.__module__ for base in kind.__mro__
    )


def _quiet(module: nn.Module, trainer: Callable[[], Any]) -> None:
    """Let a copied LightningModule see public facts, and log to nobody."""
    if "_trainer" not in module.__dict__ or "_log_hyperparams" not in module.__dict__:
        return
    state = module.__dict__
    state["_trainer"], state["_fabric"] = trainer(), None
    nobody = Nobody()
    for name in ("log", "log_dict", "print"):
        state[name] = nobody
    state["all_gather"] = lambda data, *args, **kwargs: data


def _is_library(name: str | None) -> bool:
    """Whether a module's own state is left alone: the standard library's and those of known libraries."""
    if not name or name == "__main__":
        return False
    top = name.split(".")[0]
    return top in _LIBRARIES or top in sys.stdlib_module_names


class OutsideState:
    """What code can write to without holding it: module-level names, class attributes, closures and defaults.

    Args:
        copier: has met the classes and functions whose code runs.
        roots: further functions and classes.
    """

    def __init__(self, copier: Copier, roots: tuple[Any, ...] = ()) -> None:
        self._copier = copier
        self._spaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._classes: dict[type, None] = {}
        self._functions: dict[int, types.FunctionType] = {}
        for one in (*copier.types, *list(copier.functions.values()), *roots):
            self._visit(one)

    def _visit(self, value: Any) -> None:
        value = getattr(value, "__wrapped__", value)
        value = getattr(value, "__func__", value)
        if isinstance(value, functools.partial):
            self._visit(value.func)
        elif isinstance(value, types.FunctionType):
            if id(value) in self._functions or _is_library(value.__module__):
                return
            self._functions[id(value)] = value
            self._visit_names(value.__globals__, _names_in(value.__code__))
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):
                    self._visit(cell.cell_contents)
        elif isinstance(value, type):
            for base in value.__mro__:
                if base in self._classes or _is_library(base.__module__):
                    continue
                self._classes[base] = None
                for one in list(vars(base).values()):
                    for part in (one, getattr(one, "fget", None), getattr(one, "fset", None)):
                        self._visit(part)
        elif value is not None and not isinstance(value, _ATOMS) and not _is_library(type(value).__module__):
            self._visit(type(value))

    def _visit_names(self, space: dict[str, Any], names: set[str]) -> None:
        known = self._spaces.setdefault(id(space), (space, set()))[1]
        fresh = names - known
        known |= fresh
        for name in fresh:
            if name not in space:
                continue
            value = space[name]
            if isinstance(value, types.ModuleType):
                if not _is_library(value.__name__):
                    self._visit_names(vars(value), names)
            else:
                self._visit(value)

    @contextlib.contextmanager
    def replaced(self, memo: dict[Any, Any]) -> Iterator[None]:
        """Copies in the place of all of it, and the originals again afterwards.

        Args:
            memo: copies that exist already, by the identity of the originals.
        """
        undo: list[Callable[[], None]] = []
        make = self._copier._copy
        try:
            for space, names in self._spaces.values():
                undo.append(
                    functools.partial(_restore, space, {n: space[n] for n in names if n in space}, names)
                )
                for name in names & space.keys():
                    value = space[name]
                    if not isinstance(value, _ATOMS) and not isinstance(value, types.FunctionType):
                        space[name] = make(value, memo)
            for owner in self._classes:
                kept = {
                    n: v for n, v in vars(owner).items() if n not in ("__dict__", "__weakref__", "__doc__")
                }
                undo.append(functools.partial(_restore_class, owner, kept))
                for name, value in kept.items():
                    if _is_state(name, value):
                        setattr(owner, name, make(value, memo))
            for function in self._functions.values():
                undo.append(_hidden(function, make, memo))
            undo.append(functools.partial(_restore_environment, dict(vars(os.environ)["_data"])))
            yield
        finally:
            for back in reversed(undo):
                back()


def _is_state(name: str, value: Any) -> bool:
    if name.startswith("__") or isinstance(value, _ATOMS) or callable(value):
        return False
    return not hasattr(type(value), "__get__") and not name.startswith("_abc_")


def _names_in(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return found


def _restore(space: dict[str, Any], kept: dict[str, Any], names: set[str]) -> None:
    for name in names:
        if name in kept:
            space[name] = kept[name]
        else:
            space.pop(name, None)


def _restore_environment(kept: dict[Any, Any]) -> None:
    now = vars(os.environ)["_data"]
    if now != kept:
        now.clear()
        now.update(kept)


def _restore_class(owner: type, kept: dict[str, Any]) -> None:
    now = vars(owner)
    for name in [one for one in now if one not in kept and one not in ("__dict__", "__weakref__", "__doc__")]:
        delattr(owner, name)
    for name, value in kept.items():
        if now.get(name) is not value:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(owner, name, value)


def _hidden(function: types.FunctionType, make: Any, memo: dict[Any, Any]) -> Callable[[], None]:
    """Put copies into a function's cells, defaults and attributes; the way back."""
    cells: list[tuple[Any, Any]] = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        cells.append((cell, value))
        if not isinstance(value, _ATOMS) and not isinstance(value, types.FunctionType):
            cell.cell_contents = make(value, memo)
    defaults, named, own = function.__defaults__, function.__kwdefaults__, dict(function.__dict__)
    if defaults:
        function.__defaults__ = make(defaults, memo)
    if named:
        function.__kwdefaults__ = make(named, memo)
    for name, value in own.items():
        if not callable(value):
            function.__dict__[name] = make(value, memo)

    def back() -> None:
        for cell, value in cells:
            cell.cell_contents = value
        if defaults:
            function.__defaults__ = defaults
        if named:
            function.__kwdefaults__ = named
        function.__dict__.clear()
        function.__dict__.update(own)

    return back


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


def _state() -> tuple[Any, ...]:
    """Where the global generators are."""
    words: Any = np.random.get_state()
    return torch.random.get_rng_state().numpy().tobytes(), words[1].tobytes(), words[2:], random.getstate()


def _refuse_collective(*args: Any, **kwargs: Any) -> Any:
    raise UnreachableError("torch.distributed can't be reached from a private step")


def _opened(original: Any) -> Any:
    @functools.wraps(original)
    def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return io.BytesIO() if "b" in mode else io.StringIO()
        return original(file, mode, *args, **kwargs)

    return opened


@contextlib.contextmanager
def writing_nowhere() -> Iterator[None]:
    """Let nothing that runs inside write a file, log to a service, or speak to other processes."""
    with contextlib.ExitStack() as stack:
        patch = lambda target, name, new: stack.enter_context(mock.patch.object(target, name, new))  # noqa: E731
        for target in (builtins, io):
            patch(target, "open", _opened(target.open))
        patch(torch, "save", Nobody())
        if torch.distributed.is_available():
            patch(torch.distributed, "is_initialized", lambda: False)
            for name in (
                "all_reduce",
                "all_gather",
                "all_gather_into_tensor",
                "broadcast",
                "reduce",
                "gather",
            ):
                patch(torch.distributed, name, _refuse_collective)
        for name in ("wandb", "mlflow", "comet_ml", "neptune"):
            if (library := sys.modules.get(name)) is not None:
                for one in ("run", "log", "save", "summary", "log_metric", "log_metrics", "log_artifact"):
                    if hasattr(library, one):
                        patch(library, one, Nobody())
        hooks = nn.modules.module
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
            patch(hooks, name, collections.OrderedDict())
        yield
