"""Normalisation of images by public constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn._checks import check_finite, check_positive
from pl_privknn.argument_groups import ArgumentGroup


@dataclasses.dataclass(frozen=True)
class Normalization(ArgumentGroup):
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
