"""Noise that is too small, and an ordinary module, for attacks."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from pl_privknn.privacy.noise import NoiseSource


def _smaller(name: str) -> Any:
    """Draw with a smaller scale."""
    return lambda self, given, scale: getattr(NoiseSource, name)(self, given, scale / self.factor)


class LessNoise(NoiseSource):
    """Noise source whose normal and Laplace noise is too small by a factor."""

    cryptographic = False

    def __init__(self, factor: float, source: NoiseSource) -> None:
        self.factor, self.source = factor, source

    def random_words(self, count: int) -> Any:
        """Those of the source."""
        return self.source.random_words(count)

    def stream(self, *key: Any) -> NoiseSource:
        """A stream of the source, with the same fault."""
        return type(self)(self.factor, self.source.stream(*key))

    normal = _smaller("normal")
    rounded_normal = _smaller("rounded_normal")
    laplace = _smaller("laplace")
    rounded_laplace = _smaller("rounded_laplace")
    normal_at_least = _smaller("normal_at_least")
    exponential_choice = _smaller("exponential_choice")


class PlainClassifier(pl.LightningModule):
    """Plain classifier without any code for privacy.

    Args:
        pixels: of an image.
        num_classes: number of classes.
        hidden: width of the hidden layer.
    """

    def __init__(self, pixels: int = 400, num_classes: int = 10, hidden: int = 64) -> None:
        super().__init__()
        self.net = network(pixels, num_classes, hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def network(pixels: int, num_classes: int, hidden: int) -> nn.Sequential:
    """Network with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))
