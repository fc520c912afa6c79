"""Inputs of a traced step: batches as lists of tensors, and replacements of the trainer, loggers and metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_NUMBERS = (bool, int, float)


class UntraceableError(ValueError):
    """Raised where a step is no graph of tensor operations; the text gives the reason."""


class _NoFactError(UntraceableError, AttributeError):
    """Error that ``hasattr``, and ``getattr`` with a default, handle."""


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "batch") -> Any:
    """Apply a function to all leaves of a batch.

    Args:
        value: mappings, lists, tuples and dataclasses, nested; everything else is a leaf.
        change: takes the path of a leaf, such as ``"batch['image']"``, and the leaf.
        path: of ``value``.

    Returns:
        The same structure with other leaves.

    Example:
        >>> mapped({"x": [1, 2], "name": "a"}, lambda path, leaf: path)
        {'x': ["batch['x'][0]", "batch['x'][1]"], 'name': "batch['name']"}
    """
    if isinstance(value, Mapping):
        made = {key: mapped(each, change, f"{path}[{key!r}]") for key, each in value.items()}
        # A new one: a copy would keep what else the object holds of a record.
        with contextlib.suppress(Exception):
            return type(value)(made)  # type: ignore[call-arg]
        return made
    if isinstance(value, list | tuple):
        parts = [mapped(each, change, f"{path}[{place}]") for place, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = object.__new__(type(value))
        for field in dataclasses.fields(value):
            part = mapped(getattr(value, field.name), change, f"{path}.{field.name}")
            object.__setattr__(same, field.name, part)
        return same
    return change(path, value)


def tensors_of(batch: Any, device: torch.device) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Tensors of a batch, including its numbers, and the key that batches of one graph share.

    Args:
        batch: of one record.
        device: of the module.

    Returns:
        The tensors, and the paths, shapes and dtypes of all leaves.
    """
    found: list[Tensor] = []
    key: list[Any] = []

    def note(path: str, leaf: Any) -> None:
        if isinstance(leaf, _NUMBERS):
            leaf = torch.tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.append(leaf.detach().to(device))
            key.append((path, leaf.shape, leaf.dtype))
        else:
            key.append((path, type(leaf).__qualname__))

    mapped(batch, note)
    return found, tuple(key)


def with_tensors(batch: Any, tensors: Iterator[Any]) -> Any:
    """Batch with other tensors; leaves of other kinds raise where they are used."""

    def replace(path: str, leaf: Any) -> Any:
        if isinstance(leaf, _NUMBERS) or (isinstance(leaf, Tensor) and leaf.layout is torch.strided):
            return next(tensors)
        kind = type(leaf).__name__
        said = f"uses {path}, of type {kind}: make it a tensor in the data set, or leave it out there"
        return leaf if leaf is None else Absent(said)

    return mapped(batch, replace)


def views_of(batch: Any, augment: Callable[[Tensor], Tensor], views: int) -> Any:
    """The batch of ``views`` rows that an augmentation makes of a batch of one.

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
        note: called with the name of a fact that changes within an epoch.
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
        if name == "global_step":
            self._note(f"trainer.{name}")
        return _FACTS[name] if self._trainer is None else getattr(self._trainer, name)

    @property
    def optimizers(self) -> list[Any]:
        """Rates and other plain settings of the optimizers."""
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
