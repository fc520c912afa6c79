"""Extractors of others, made to compute each example's vector from that example alone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from pl_privknn.features.backbone import BackboneFeatures, CheckpointFeatures, check_layers, undisturbed
from pl_privknn.features.base import Extractor
from pl_privknn.features.public import Resized

Extract = Callable[[Tensor], Tensor]

# Layers that keep the examples of a batch apart in evaluation mode, in whatever order they stand.
_APART = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Dropout, nn.Linear, nn.Conv2d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.MaxPool2d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool2d, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Sigmoid, nn.LeakyReLU),
)
_OWN = "pl_privknn."
_AT_ONCE = 128
#: Public images among which one is compared with the same image alone.
COMPARED = 32
# Vectors of one image may differ by the order of sums, and no more: a part of their length.
_SAME = 1e-3


def is_foreign(extractor: Extract) -> bool:
    """Whether an extractor, or a part of it, is of others; this package's own compute a vector from one example."""
    if type(extractor) is BackboneFeatures:
        return not _is_own(extractor.module)
    if isinstance(extractor, nn.Module) or not type(extractor).__module__.startswith(_OWN):
        return True
    return any(is_foreign(part) for parts in _parts(extractor).values() for part in parts)


def kept_apart(
    extractor: Extract, images: Tensor, device: torch.device | None = None
) -> tuple[Extract, tuple[str, ...]]:
    """An extractor whose vector of an example depends on that example alone.

    Those of this package do so already and are returned as they are. One of others is traced on a tensor without
    values: what was recorded has no Python left, and examples go through it by ``vmap`` or one by one. Where that
    fails it is called with one example at a time, and what this rests on is a condition.

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
        check_layers(module)
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
    """Extractors that one of this package is made of, by the names of its attributes."""
    if isinstance(extractor, nn.Module) or not type(extractor).__module__.startswith(_OWN):
        return {}
    if isinstance(extractor, CheckpointFeatures):
        extractor.read()
    parts = {name: [value] for name, value in vars(extractor).items() if isinstance(value, Extractor)}
    return parts | ({"extractors": extractor.extractors} if hasattr(extractor, "extractors") else {})


def _is_own(module: nn.Module) -> bool:
    """Whether a network of this package keeps examples apart by its structure."""
    inner: Any = getattr(module, "extractor", None)  # of a student, frozen
    own = type(module).__module__.startswith(_OWN) and all(map(_is_plain, module.modules()))
    return own and (inner is None or not is_foreign(inner))


def _is_plain(layer: nn.Module) -> bool:
    if {"forward", "features"} & vars(layer).keys() or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) in _APART or type(layer).__module__.startswith((_OWN, "timm.", "torchmetrics."))


class _Alone:
    """An extractor of others; its vector of an example is a function of that example.

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
        self.name = getattr(owner, "__name__", type(owner).__name__)
        self._module = owner if isinstance(owner, nn.Module) else nn.Module()
        if function is owner and (mixing := _trained_batch_norm(self._module)):
            raise ValueError(
                f"features: layer {mixing} of {self.name} is in training mode and would mix the images of a batch; "
                "call .eval() on the module first"
            )
        parameter = next(self._module.parameters(), None)
        self._device = device or (None if parameter is None else parameter.device)
        self._function, self._at_once, self.conditions = function, at_once, tuple[str, ...]()
        self._graphs: dict[Any, Any] = {}
        self._by_vmap = False
        images = images.to(self._device or images.device)
        # A trace leaves tensors without values in what the module keeps. A copy has no need of the trainer.
        trainer = getattr(owner, "_trainer", None)
        self._traced: Any = None
        with contextlib.suppress(Exception):  # what can't be copied can't be traced either
            self._traced = copy.deepcopy(function, {} if trainer is None else {id(trainer): None})
        with undisturbed(self._module, images.device), torch.no_grad():
            alone = self._check(images)
        try:
            self._by_vmap = self._try(images, alone)
        except _ChangesItselfError:
            raise ValueError(
                f"features: {self.name} changes its own tensors while it computes vectors, as batch statistics in "
                "training mode do; call .eval() on its modules, and let it keep nothing of an image"
            ) from None
        except Exception:  # tracers raise whatever they like
            self.conditions = (f"{self.name} computes a vector from one example alone",)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Vectors ``(n, d)`` of images."""
        images = images.to(self._device or images.device)
        if not len(images):
            return self(images.new_zeros(1, *images.shape[1:]))[:0]
        if self.conditions:
            with undisturbed(self._module, images.device):
                return torch.cat([self._function(image) for image in images.split(1)])
        graph = self._graph(images)
        if self._by_vmap:
            mapped = torch.func.vmap(graph, randomness="different")
            return torch.cat([mapped(part) for part in images.split(self._at_once)])
        return torch.stack([graph(image) for image in images])

    def _check(self, images: Tensor) -> Tensor | None:
        """Refuse a function that mixes images; the first one's vector, or None where the function draws."""
        found, again = self._function(images), self._function(images)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"features: {self.name} returned {shape} for {len(images)} images; want (n, d): flatten or pool"
            )
        alone = self._function(images[:1])
        if not torch.equal(found, again):
            return None
        if not _close(alone, found[:1]):
            raise ValueError(
                f"features: {self.name} gives a public image another vector alone than among others, and would mix "
                "private records; take statistics of public images, and put modules into evaluation mode (.eval())"
            )
        return alone

    def _try(self, images: Tensor, alone: Tensor | None) -> bool:
        """Trace, compare with the function itself; whether ``vmap`` takes what was recorded."""
        graph = self._graph(images)
        kept = [*graph.parameters(), *graph.buffers()]
        before = [tensor._version for tensor in kept]
        with torch.no_grad():
            found = graph(images[0])
        if before != [tensor._version for tensor in kept]:
            raise _ChangesItselfError
        if alone is not None and not _close(found[None], alone):
            raise ValueError(
                "the graph gives another vector"
            )  # it read values in a way that a trace doesn't see
        try:
            with torch.no_grad():
                torch.func.vmap(graph, randomness="different")(images[:2])
        except Exception:
            return False
        return True

    def _graph(self, images: Tensor) -> Any:
        key = images.shape[1:], images.dtype, images.device
        if key not in self._graphs:
            # Fake tensors pretend that there are GPUs; autograd, started after that, would have threads for them.
            start = torch.ones(1, requires_grad=True)
            torch.autograd.grad(start.sum(), start)
            module = getattr(self._traced, "__self__", self._traced)
            if isinstance(module, nn.Module):
                module.eval()
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                self._graphs[key] = make_fx(
                    lambda image: self._traced(image.clone()[None])[0],
                    tracing_mode="fake",
                    _allow_non_fake_inputs=True,
                )(torch.zeros_like(images[0]))
        return self._graphs[key]


class _ChangesItselfError(Exception):
    """A graph that writes into tensors that it keeps."""


def _trained_batch_norm(module: nn.Module) -> str:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            return f"{name!r} ({type(layer).__name__})"
    return ""


def _close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).norm() <= _SAME * wanted.norm())
