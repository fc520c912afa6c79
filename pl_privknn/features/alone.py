"""Foreign extractors, wrapped so that each example's vector is computed from that example alone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pl_privknn._checks import InputError
from pl_privknn._tracing import bound_ids, outside, recorded
from pl_privknn.features.backbone import (
    BackboneFeatures,
    CheckpointFeatures,
    check_running_statistics,
    undisturbed,
)
from pl_privknn.features.base import Extractor
from pl_privknn.features.public import Resized
from pl_privknn.networks.base import APART, is_as_built

Extract = Callable[[Tensor], Tensor]

# With layers that hold others, and those that process examples independently in evaluation mode alone.
_APART_IN_EVALUATION = APART | {nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.BatchNorm1d, nn.BatchNorm2d}
_OWN = "pl_privknn."
_AT_ONCE = 128
#: Public images among which one is compared with the same image alone.
COMPARED = 32
# Vectors of one image may differ by the order of sums, and no more: a part of their length.
_SAME = 1e-3


def is_foreign(extractor: Extract) -> bool:
    """Whether an extractor, or a part of it, is defined outside of this package."""
    if type(extractor) is BackboneFeatures:
        return not keeps_apart(extractor.module)
    if isinstance(extractor, nn.Module):
        return not keeps_apart(extractor)
    if not type(extractor).__module__.startswith(_OWN):
        return True
    return any(is_foreign(part) for parts in _parts(extractor).values() for part in parts)


def kept_apart(
    extractor: Extract, images: Tensor, device: torch.device | None = None
) -> tuple[Extract, tuple[str, ...]]:
    """Wrap an extractor so that the vector of an example depends on that example alone.

    Those of this package do so already and are returned as they are. One of others is traced on a tensor without
    values: what was recorded has no Python left, and examples go through it by ``vmap`` or one by one. Where that
    fails a fresh copy is called for each example, so that it can keep nothing of one for the next, and what this
    rests on is a condition.

    Args:
        extractor: has learned what it learns. Modules run in evaluation mode.
        images: public ones to try it on, ``(n, channels, height, width)``.
        device: of images, for extractors without parameters; the CPU by default.

    Returns:
        The extractor, and its conditions in words.

    Raises:
        ValueError: for one that mixes the images of a batch, changes its own tensors, or returns no vectors.
    """
    if not is_foreign(extractor):
        return extractor, ()
    images = images.to(device or "cpu")
    if type(extractor) is BackboneFeatures:
        module: Any = extractor.module
        check_running_statistics(module)
        alone = _Alone(module.features, module, images, extractor.device, extractor.batch_size)
        if not extractor.normalize:
            return alone, alone.conditions
        return lambda images: nn.functional.normalize(alone(images), dim=1), alone.conditions
    if not (inner := _parts(extractor)):
        alone = _Alone(extractor, extractor, images)
        return alone, alone.conditions
    twin: Any = object.__new__(type(extractor))  # what was learned is shared
    vars(twin).update(vars(extractor))
    conditions: list[str] = []
    images = extractor.resized(images) if isinstance(extractor, Resized) else images
    for name, parts in inner.items():
        made = [kept_apart(part, images, device) for part in parts]
        conditions += [condition for _, found in made for condition in found]
        setattr(twin, name, [part for part, _ in made] if name == "extractors" else made[0][0])
    return twin, tuple(dict.fromkeys(conditions))


def _parts(extractor: Any) -> dict[str, list[Extract]]:
    """Inner extractors of one of this package, by the names of its attributes."""
    if isinstance(extractor, nn.Module) or not type(extractor).__module__.startswith(_OWN):
        return {}
    if isinstance(extractor, CheckpointFeatures):
        extractor.read()
    parts = {name: [value] for name, value in vars(extractor).items() if isinstance(value, Extractor)}
    return parts | ({"extractors": extractor.extractors} if hasattr(extractor, "extractors") else {})


def keeps_apart(module: nn.Module) -> bool:
    """Whether a network of this package processes examples independently by its structure."""
    own = type(module).__module__.startswith(_OWN) and all(map(_is_plain, module.modules()))
    own = own and not any(getattr(layer, "calls_others", False) for layer in module.modules())
    inner = [getattr(layer, "extractor", None) for layer in module.modules()]  # of students and heads, frozen
    return own and not any(is_foreign(extractor) for extractor in inner if extractor is not None)


def _is_plain(layer: nn.Module) -> bool:
    own = type(layer).__module__.startswith((_OWN, "timm.", "torchmetrics."))
    return is_as_built(layer) and (own or type(layer) in _APART_IN_EVALUATION)


class _Alone:
    """Wrapper of a foreign extractor that computes each vector from one example.

    Args:
        function: maps images to vectors.
        owner: what it belongs to: itself, or the module that it is a method of.
        images: public ones to try it on.
        device: where images are sent; where the owner's parameters are by default.
        at_once: examples at once.

    Attributes:
        conditions: what else has to hold; empty for one that could be traced.
    """

    def __init__(
        self,
        function: Extract,
        owner: Any,
        images: Tensor,
        device: torch.device | None = None,
        at_once: int = _AT_ONCE,
    ) -> None:
        self._name = getattr(owner, "__name__", type(owner).__name__)
        self._module = owner if isinstance(owner, nn.Module) else nn.Module()
        if function is owner:
            self._refuse_training_mode()
        parameter = next(self._module.parameters(), None)
        self._device = device or (None if parameter is None else parameter.device)
        self._function, self._owner, self._at_once = function, owner, at_once
        images = images.to(self._device or images.device)
        self.conditions: tuple[str, ...] = ()
        try:
            # A trace leaves tensors without values in what a module keeps. A copy has no need of the trainer.
            copied = self._copy()
        except Exception:  # locks, sessions, open files: not traced then
            copied = None
        with undisturbed(self._module, images.device), torch.no_grad():
            alone = self._first_alone(images)
            try:
                self._graph = _recorded(copied, images[0])
                self._by_vmap = self._try(images, alone)
            except _ChangesItselfError:
                raise InputError(
                    f"features: {self._name} changes its own tensors while it computes vectors, as batch statistics "
                    "in training mode do; call .eval() on its modules, and let it keep nothing of an image"
                ) from None
            except Exception:  # tracers raise whatever they like
                self.conditions = (f"{self._name} computes a vector from one example alone",)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Vectors ``(n, d)`` of images."""
        images = images.to(self._device or images.device)
        if not len(images):
            return self(images.new_zeros(1, *images.shape[1:]))[:0]
        if self.conditions:
            with undisturbed(self._module, images.device):
                return torch.cat([self._fresh()(image) for image in images.split(1)])
        if self._by_vmap:
            mapped = torch.func.vmap(self._graph, randomness="different")
            return torch.cat([mapped(part) for part in images.split(self._at_once)])
        return torch.stack([self._graph(image) for image in images])

    def _copy(self) -> Extract:
        """A copy of the function and its owner, with the owner's tensors and without its trainer."""
        trainer = getattr(self._owner, "_trainer", None)
        memo: dict[int, Any] = {} if trainer is None else {id(trainer): None}
        return copy.deepcopy(self._function, memo)

    def _fresh(self) -> Extract:
        """A copy for one example; the function itself where it can't be copied."""
        try:
            return self._copy()
        except Exception:
            return self._function

    def _refuse_training_mode(self) -> None:
        for name, layer in self._module.named_modules():
            if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
                raise InputError(
                    f"features: layer {name!r} ({type(layer).__name__}) of {self._name} would mix the images of a "
                    "batch; call .eval() on the module, whose layers must have running statistics"
                )

    def _first_alone(self, images: Tensor) -> Tensor | None:
        """The first image's vector, or None where the function draws; refuses a function that mixes images."""
        found, again = self._function(images), self._function(images)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"features: {self._name} returned {shape} for {len(images)} images; expected (n, d): flatten or pool"
            )
        alone = self._function(images[:1])
        if not torch.equal(found, again):
            return None
        if not _close(alone, found[:1]):
            raise InputError(
                f"features: {self._name} gives a public image another vector alone than among others, and "
                "would mix private records; take statistics of public images, and put modules into evaluation mode "
                "(.eval())"
            )
        return alone

    def _try(self, images: Tensor, alone: Tensor | None) -> bool:
        """Compare the graph with the function; whether ``vmap`` takes it."""
        kept = [*self._graph.parameters(), *self._graph.buffers()]
        before = [tensor._version for tensor in kept]
        found = self._graph(images[0])
        if before != [tensor._version for tensor in kept]:
            raise _ChangesItselfError
        if alone is not None and not _close(found[None], alone):
            raise ValueError("the graph gives another vector: values went into it")
        with contextlib.suppress(Exception):
            torch.func.vmap(self._graph, randomness="different")(images[:2])
            return not outside(self._graph)
        return False


class _ChangesItselfError(Exception):
    """Raised for a graph that writes to tensors that it keeps."""


def _recorded(function: Any, image: Tensor) -> Any:
    """Graph of a function's operations on a batch of one image, of which only the shape is used."""
    module = getattr(function, "__self__", function)
    if isinstance(module, nn.Module):
        module.eval()
    graph = recorded(lambda one: function(one.clone()[None])[0], image)
    bound_ids(graph)
    return graph


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).norm() <= _SAME * wanted.norm())
