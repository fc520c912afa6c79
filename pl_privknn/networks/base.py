"""Base of networks: features before the classifier, normalised inputs, and updates of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_choice, check_finite, check_int, check_non_negative, check_positive

#: Layers whose output for an example depends on that example alone.
APART = frozenset(
    {
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm),
        *(nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Sigmoid, nn.LeakyReLU),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    }
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass(frozen=True)
class Normalization:
    """``(image - mean) / std``, channel by channel; images stay as they are where there is neither.

    Args:
        mean: public constants, one a channel, subtracted from images.
        std: public constants, one a channel, divided by.

    Raises:
        ValueError: unless both are given or neither, with as many values, those of ``std`` above 0.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.mean is None and self.std is None:
            return
        if self.mean is None or self.std is None or len(self.mean) != len(self.std):
            raise ValueError(
                f"mean={self.mean!r}, std={self.std!r}: give both, one value a channel, or neither"
            )
        object.__setattr__(self, "mean", [check_finite("mean", value) for value in self.mean])
        object.__setattr__(self, "std", [check_positive("std", value) for value in self.std])

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """``mean`` and ``std``, float32 ``(channels, 1, 1)``."""
        mean, std = (
            None if values is None else torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return mean, std


class FeatureNetwork(nn.Module):
    """An encoder and a linear classifier on the encoder's output.

    Args:
        encoder: maps images ``(n, channels, height, width)``, or vectors ``(n, d)``, to ``(n, feature_size)``.
        feature_size: width of the penultimate layer.
        num_classes: number of classes.

    Attributes:
        feature_size: width ``d`` of what :meth:`features` returns.
        classifier: ``nn.Linear(feature_size, num_classes)``.
    """

    def __init__(self, encoder: nn.Module, feature_size: int, num_classes: int) -> None:
        super().__init__()
        self.feature_size = check_int("feature_size", feature_size)
        self.encoder = encoder
        self.classifier = nn.Linear(self.feature_size, check_int("num_classes", num_classes, 2))

    def features(self, images: Tensor) -> Tensor:
        """Penultimate activations ``(n, feature_size)`` of images ``(n, channels, height, width)``."""
        return self.encoder(images)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(n, num_classes)`` of images ``(n, channels, height, width)``."""
        return self.classifier(self.features(images))


def network_arguments(shape: Sequence[int]) -> dict[str, Any]:
    """``in_channels`` and ``image_size`` of a network for images of a shape, or for vectors ``(d,)``."""
    channels, *sides = shape
    if not sides:
        return {"in_channels": channels, "image_size": 1}
    height, width = sides
    return {"in_channels": channels, "image_size": height if height == width else [height, width]}


def image_shape(in_channels: int, image_size: int | tuple[int, int]) -> tuple[int, int, int]:
    """``(channels, height, width)`` from the arguments that every builder takes.

    Args:
        in_channels: number of colour channels.
        image_size: side of square images, or (height, width).

    Raises:
        ValueError: unless all three are whole numbers of at least 1.
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2:
        raise ValueError(f"image_size={image_size!r} must be one side or (height, width)")
    height, width = (check_int("image_size", side) for side in sides)
    return check_int("in_channels", in_channels), height, width


def output_size(encoder: nn.Module, shape: tuple[int, int, int], name: str) -> int:
    """Width of ``encoder``'s output for one image of ``shape``, found by passing a blank image through.

    Raises:
        ValueError: if images of that size are too small for the layers of the network called ``name``.
    """
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            return int(encoder(torch.zeros(1, *shape)).shape[1])
    except RuntimeError as error:
        raise ValueError(
            f"image_size={shape[1:]} does not fit network={name!r}: {error}; use larger images or small_cnn"
        ) from error
    finally:
        encoder.train(was_training)


SCHEDULERS = ("none", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Optimizer and learning-rate schedule, by name.

    Args:
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty (decoupled for ``"adamw"``).
        scheduler: ``"none"``, ``"cosine"`` or ``"linear"``.

    Raises:
        ValueError: for an argument out of its range.
    """

    #: Optimizers to choose from.
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adam", "adamw")
    #: Schedules to choose from.
    schedulers: ClassVar[tuple[str, ...]] = SCHEDULERS
    #: Whether SGD's momentum is Nesterov's.
    nesterov: ClassVar[bool] = True

    optimizer: str = "adam"
    lr: float = 0.003
    momentum: float = 0.9
    weight_decay: float = 0.0
    scheduler: str = "cosine"

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, self.optimizers)
        check_positive("lr", self.lr)
        if not 0 <= check_finite("momentum", self.momentum) < 1:
            raise ValueError(f"momentum={self.momentum!r} must lie in [0, 1)")
        check_non_negative("weight_decay", self.weight_decay)
        check_choice("scheduler", self.scheduler, self.schedulers)

    def over(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer over parameters, or over groups of parameters."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            nesterov = self.nesterov and self.momentum > 0
            return torch.optim.SGD(parameters, momentum=self.momentum, nesterov=nesterov, **options)
        adam = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return adam(parameters, betas=(self.momentum, 0.999), **options)


def is_as_built(layer: nn.Module) -> bool:
    """Whether a layer runs the code of its class alone, without hooks, and flattens each example by itself."""
    if {"forward", "features"} & vars(layer).keys() or any(getattr(layer, name) for name in _HOOKS):
        return False
    return type(layer) is not nn.Flatten or (layer.start_dim, layer.end_dim) == (1, -1)
