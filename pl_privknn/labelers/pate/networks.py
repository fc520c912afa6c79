"""Architectures of stacked teachers: linear, one hidden layer, convolutional, or a user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pl_privknn._checks import check_int
from pl_privknn.labelers.pate.stacked import StackedTeachers


class Linear(nn.Linear):
    """``nn.Linear`` as weight·xᵀ: stacked, products of this shape (and their gradients) are twice as fast."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``(b, num_features)``."""
        return (self.weight @ x.T).T + self.bias


class LinearTeachers(StackedTeachers):
    """Multinomial logistic regression on features; see :class:`StackedTeachers`.

    Weights start at zero, so a teacher has no randomness but its batches.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import PATE, LinearTeachers
        >>> teachers = LinearTeachers(steps=20)
        >>> teacher = PATE(num_teachers=4, teachers=teachers, progress=False)
        >>> teacher.fit(torch.rand(40, 4), torch.arange(40) % 2, 2)
        >>> teacher.votes(torch.rand(5, 4)).shape
        torch.Size([5, 2])
    """

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """See :meth:`StackedTeachers.build`."""
        layer = Linear(num_features, num_classes)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer


class CNNTeachers(StackedTeachers):
    """Two strided convolutions (5×5 and 3×3) and a linear layer, on images that arrive as flat rows.

    Strides instead of pooling: with weights of their own for every teacher the convolutions run grouped, and
    full resolution would cost ten times as much.

    Args:
        image_shape: (channels, height, width) of what a row of features is, flattened.
        channels: of the two convolutions.
        steps: optimiser steps of every teacher.
        learning_rate: of Adam at the start.
        **kwargs: see :class:`StackedTeachers`.

    Raises:
        ValueError: if ``image_shape`` is not three whole numbers, or at training if rows don't fit it.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import PATE, CNNTeachers
        >>> teachers = CNNTeachers(image_shape=(1, 8, 8), steps=5)
        >>> teacher = PATE(num_teachers=4, teachers=teachers, progress=False)
        >>> teacher.fit(torch.rand(40, 64), torch.arange(40) % 2, 2)
        >>> teacher.votes(torch.rand(5, 64)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        channels: tuple[int, int] = (16, 32),
        steps: int = 300,
        *,
        learning_rate: float = 3e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(steps, learning_rate=learning_rate, **kwargs)
        if len(image_shape) != 3:
            raise ValueError(f"image_shape={image_shape!r} must be (channels, height, width)")
        self.image_shape = tuple(check_int("image_shape", size) for size in image_shape)
        self.channels = tuple(check_int("channels", count) for count in channels)

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """See :meth:`StackedTeachers.build`."""
        if num_features != math.prod(self.image_shape):
            raise ValueError(
                f"image_shape={self.image_shape} has {math.prod(self.image_shape)} values, the features have "
                f"{num_features}; give flattened images (not HOG or backbone features) and their own shape"
            )
        first, second = self.channels
        _, height, width = self.image_shape
        cells = math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(width / 2) / 2)
        return nn.Sequential(
            nn.Unflatten(1, self.image_shape),
            nn.Conv2d(self.image_shape[0], first, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            Linear(second * cells, num_classes),
        )


class ModuleTeachers(StackedTeachers):
    """Teachers of a user's own architecture.

    Args:
        factory: called with (num_features, num_classes), returns a fresh ``nn.Module`` that maps
            ``(b, num_features)`` to logits. Any module that :func:`torch.func.vmap` can run; no batch
            normalisation.
        steps: optimiser steps of every teacher.
        learning_rate: of Adam at the start.
        **kwargs: see :class:`StackedTeachers`.
    """

    # The factory can't be told apart from another one by its settings.
    cacheable = False

    def __init__(
        self,
        factory: Callable[[int, int], nn.Module],
        steps: int = 300,
        *,
        learning_rate: float = 3e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(steps, learning_rate=learning_rate, **kwargs)
        self.factory = factory

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        """See :meth:`StackedTeachers.build`."""
        return self.factory(num_features, num_classes)
