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

This module also lists warnings that users cannot act on, and options of a trainer without output.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.loggers import Logger
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.utilities import CombinedLoader

_NAMES = ("lightning.pytorch", "pytorch_lightning")


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


_PACKAGES = _packages()


def both(path: str) -> tuple[Any, ...]:
    """Classes at a path in both packages, such as ``"strategies.DDPStrategy"``, for ``isinstance``."""
    return tuple(pkgutil.resolve_name(f"{package.__name__}.{path}") for package in _PACKAGES)


_KINDS = tuple(map(both, ("Trainer", "LightningModule", "LightningDataModule", "Callback", "loggers.Logger")))


def package_of(*parts: Any) -> Any:
    """Lightning package of objects (a Trainer, modules, data modules, callbacks, loggers).

    Objects of this package belong to both, and other objects to none: ``pytorch_lightning`` in case of doubt.
    """
    deciding = [part for part in parts if isinstance(part, _KINDS)]
    for package, *kinds in zip(_PACKAGES, *_KINDS, strict=True):
        if all(isinstance(part, tuple(kinds)) for part in deciding):
            return package
    return _PACKAGES[0]


class _Method:
    """Descriptor of a method that runs as defined by the package of the attached Trainer."""

    def __init__(self, first: types.FunctionType, second: types.FunctionType) -> None:
        self.first, self.second = first, second

    @torch.compiler.disable  # its guards look up methods, which would be compiled in turn, without end
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.first
        trainer = vars(instance).get("_trainer") or vars(instance).get("trainer")
        second = isinstance(trainer, _PACKAGES[1].Trainer)
        return types.MethodType(self.second if second else self.first, instance)


def _joined(path: str) -> Any:
    """Class that derives from the classes at a path in both packages."""
    parents = both(path)
    if len(parents) == 1:
        return parents[0]
    members: dict[str, Any] = {"__module__": __name__, "__doc__": parents[0].__doc__}
    for name in dir(parents[0]):
        found = [inspect.getattr_static(parent, name, None) for parent in parents]
        functions = all(isinstance(one, types.FunctionType) for one in found)
        if functions and found[0] is not found[1] and not name.startswith("__"):
            members[name] = _Method(*found)
    return types.new_class(path.rpartition(".")[2], parents, exec_body=lambda body: body.update(members))


if not TYPE_CHECKING:
    Trainer = _PACKAGES[0].Trainer
    Callback, LightningModule, LightningDataModule = map(
        _joined, ("Callback", "LightningModule", "LightningDataModule")
    )
    Logger, TorchCheckpointIO = _joined("loggers.Logger"), _joined("plugins.io.TorchCheckpointIO")
    CombinedLoader = _joined("utilities.CombinedLoader")


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
