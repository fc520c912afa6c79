"""Support of both Lightning packages: ``pytorch_lightning``, and ``lightning.pytorch`` where it is installed.

The two packages hold the same code as two class hierarchies, and a Trainer rejects or misinterprets a module, data
module or callback of the other one. Every file of this package takes Lightning's classes from here, as ``from
pl_privknn import _lightning as pl``. They derive from the classes of both packages, so that objects of this package
are instances of both, regardless of which package is imported, when, and whose Trainer is used.

Deriving is not enough: Trainers recognise an overridden hook by comparing its code with that of their own class,
and 20 methods of LightningModule differ there in 2.6.6 (83 between 2.6.6 and 2.5.0), ``configure_sharded_model`` and
the loaders among them. A method that both packages define therefore runs as the package of the attached Trainer
defines it, which also keeps the versions of Trainer and method together.

Alternatives fail: the other package may be imported later; a class that changes when a Trainer attaches is rejected
before that; an entry of ``sys.modules`` changes the user's own imports.
The second package takes about half a second to import. Messages stay with the package that the user imported.

The packages take seconds to import, so they are imported when a class is first asked for. A command that trains
nothing calls :func:`defer` first: classes then derive from empty ones, which get their bases when something does need
Lightning (:func:`load`). Objects made before that must not be given to a Trainer.

This module also lists warnings that users cannot act on, and options of a trainer without output.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.utilities import CombinedLoader

_NAMES = ("lightning.pytorch", "pytorch_lightning")
#: Bases of classes of this package, and names from which both packages' classes are joined too.
_BASES = ("Callback", "LightningDataModule", "LightningModule")
_OTHERS = {"TorchCheckpointIO": "plugins.io.TorchCheckpointIO", "CombinedLoader": "utilities.CombinedLoader"}
#: Classes without their bases, by name; None where classes get them at once.
_waiting: dict[str, type] | None = None


def defer() -> None:
    """Defer the bases of classes to :func:`load`, unless a Lightning package is imported already."""
    global _waiting
    if _waiting is None and not (
        _packages.cache_info().currsize or any(name in sys.modules for name in _NAMES)
    ):
        _waiting = {}


def load() -> None:
    """Import the Lightning packages, and set the bases of deferred classes."""
    global _waiting
    waiting, _waiting = _waiting or {}, None
    for name, made in waiting.items():
        parents = both(name)
        made.__bases__ = parents
        for member, value in _methods(parents).items():
            setattr(made, member, value)


def waits() -> bool:
    """Whether classes wait for their bases, so that objects made now are not for a Trainer."""
    return _waiting is not None


def accepted(name: str) -> tuple[type, ...]:
    """Classes of this name in both Lightning packages, for ``isinstance``; the deferred class before :func:`load`."""
    if _waiting is None or any(package in sys.modules for package in _NAMES):
        return both(name)
    return (globals().get(name) or __getattr__(name),)


@functools.cache
def _packages() -> tuple[Any, ...]:
    """Importable Lightning packages; ``pytorch_lightning``, a dependency, is first."""
    imported = any(name in sys.modules for name in _NAMES)
    # Each package overwrites these when it is imported.
    before = {name: getattr(rank_zero, name) for name in ("log", "rank_zero_deprecation_category")}
    found = []
    with contextlib.suppress(Exception):  # absent, or one that cannot be used with this torch
        found.append(importlib.import_module(_NAMES[0]))
    found.append(importlib.import_module(_NAMES[1]))
    if imported:
        vars(rank_zero).update(before)
    return tuple(reversed(found))


def both(path: str) -> tuple[Any, ...]:
    """Classes at a path in both packages, such as ``"strategies.DDPStrategy"``, for ``isinstance``."""
    load()
    return tuple(pkgutil.resolve_name(f"{package.__name__}.{path}") for package in _packages())


def package_of(*parts: Any) -> Any:
    """Lightning package of objects (a Trainer, modules, data modules, callbacks, loggers).

    Objects of this package belong to both, and other objects to none: ``pytorch_lightning`` in case of doubt.
    """
    paths = ("Trainer", "LightningModule", "LightningDataModule", "Callback", "loggers.Logger")
    known = tuple(map(both, paths))
    deciding = [part for part in parts if isinstance(part, known)]
    for package, *kinds in zip(_packages(), *known, strict=True):
        if all(isinstance(part, tuple(kinds)) for part in deciding):
            return package
    return _packages()[0]


@functools.cache
def _method_class() -> type:
    import torch

    class Method:
        """Descriptor of a method that runs as defined by the package of the attached Trainer."""

        def __init__(self, first: types.FunctionType, second: types.FunctionType) -> None:
            self.first, self.second = first, second

        @torch.compiler.disable  # its guards look up methods, which would be compiled in turn, without end
        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self.first
            trainer = vars(instance).get("_trainer") or vars(instance).get("trainer")
            second = isinstance(trainer, _packages()[1].Trainer)
            return types.MethodType(self.second if second else self.first, instance)

    return Method


def _methods(parents: tuple[Any, ...]) -> dict[str, Any]:
    """Methods that the two parents define differently, as descriptors by name."""
    found = {}
    for name in dir(parents[0]) if len(parents) > 1 else []:
        both_of = [inspect.getattr_static(parent, name, None) for parent in parents]
        functions = all(isinstance(one, types.FunctionType) for one in both_of)
        if functions and both_of[0] is not both_of[1] and not name.startswith("__"):
            found[name] = _method_class()(*both_of)
    return found


class _Empty:
    """Base of deferred classes, with the attributes that Lightning's objects have before a training."""

    trainer = None

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no checkpoint is written."""


def __getattr__(name: str) -> Any:
    """Return a class that derives from the class of this name in both packages."""
    made: Any
    if name == "Trainer":
        load()
        made = _packages()[0].Trainer
    elif name in _BASES and _waiting is not None:
        parents: tuple[type, ...] = (_Empty,)
        if name == "LightningModule":
            import torch

            parents = (_Empty, torch.nn.Module)
        made = _waiting[name] = type(name, parents, {"__module__": __name__})
    elif name in _BASES or name in _OTHERS:
        bases = both(_OTHERS.get(name, name))
        members = {"__module__": __name__, "__doc__": bases[0].__doc__, **_methods(bases)}
        made = bases[0]
        if len(bases) > 1:
            made = types.new_class(name, bases, exec_body=lambda body: body.update(members))
    else:
        raise AttributeError(name)
    globals()[name] = made
    return made


#: Patterns of warnings that users cannot act on.
MESSAGES = (
    r".*isinstance\(treespec, LeafSpec\)` is deprecated",
    # Students log once an epoch, whatever the interval of steps is.
    r"The number of training batches .* is smaller than the logging interval",
    ".*does not have many workers",  # examples are in memory
    "Total length of `list` across ranks is zero",  # unlabelled public examples can't validate
    "Checkpoint directory .* exists and is not empty",  # a resumed run's
)

#: Options of a trainer without logs, checkpoints, output or evaluation.
TRAINS_ALONE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


def quiet_lightning() -> None:
    """Ignore warnings that match :data:`MESSAGES`."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
