"""A private training of seconds, by the baseline and by the callback."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from pl_privknn.auditing.training import TrainingTarget
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.training import NoisySGD, PrivateTraining

_RECORDS, _PUBLIC, _SIDE, _BATCH = 90, 40, 8, 9


class PlainClassifier(pl.LightningModule):
    """A module as anyone would write it: nothing of it knows of privacy.

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
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))


def small_training(method: str, epsilon: float, delta: float) -> TrainingTarget:
    """A training of ten steps on made-up images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_RECORDS + _PUBLIC + 20, 1, _SIDE, _SIDE, generator=generator)
    labels = (images.mean(dim=(1, 2, 3)) > 0.5).long()
    private, public = slice(0, _RECORDS), slice(_RECORDS, _RECORDS + _PUBLIC)
    rest = slice(_RECORDS + _PUBLIC, None)
    data = ArraysDataModule(
        private_images=images[private],
        private_labels=labels[private],
        public_images=images[public],
        public_truth=labels[public],
        test_images=images[rest],
        test_labels=labels[rest],
        num_classes=2,
    )
    pixels, hidden = _SIDE * _SIDE, 96
    drawn = {"expected_batch_size": _BATCH, "expected_records": _RECORDS}

    def make() -> tuple[pl.LightningModule, PrivateTraining]:
        torch.manual_seed(0)
        if method == "NoisySGD":
            net = network(pixels, 2, hidden)
            module = NoisySGD(net, num_classes=2, image_size=_SIDE, epsilon=epsilon, delta=delta, **drawn)
            return module, module.private_training
        training = PrivateTraining(epsilon, delta, **drawn)
        return PlainClassifier(pixels, 2, hidden), training

    return TrainingTarget(make, data, {"max_epochs": 1, "accelerator": "cpu"}, method)
