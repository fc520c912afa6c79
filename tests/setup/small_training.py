"""A private training of ten steps on synthetic images, to be attacked."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.faulty import PlainClassifier, network
from pl_privknn.auditing.attack import TrainingTarget
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.privacy import Budget
from pl_privknn.training import NoisySGD, PrivateTraining

DELTA = 1e-5
_IMAGES, _PUBLIC, _SIDE, _BATCH = 90, 40, 8, 9


def dealt(images: Tensor, labels: Tensor, private: int, public: int, **settings: Any) -> ArraysDataModule:
    """Data module of images split in order into private, public and test examples."""
    sizes = [private, public, len(images) - private - public]
    parts = zip(("private", "public", "test"), images.split(sizes), labels.split(sizes), strict=True)
    for name, pictures, known in parts:
        settings |= {f"{name}_images": pictures, f"{name}_{'truth' if name == 'public' else 'labels'}": known}
    return ArraysDataModule(**settings)


def small_training(
    method: str, epsilon: float, delta: float = DELTA, records_of_a_person: int = 0
) -> TrainingTarget:
    """Training of ten steps on synthetic images; with persons as the unit where they own several."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_IMAGES + _PUBLIC + 20, 1, _SIDE, _SIDE, generator=generator)
    labels = (images.mean(dim=(1, 2, 3)) > 0.5).long()
    groups = torch.arange(_IMAGES) // records_of_a_person if records_of_a_person else None
    data = dealt(images, labels, _IMAGES, _PUBLIC, num_classes=2, private_groups=groups)
    pixels, hidden = _SIDE * _SIDE, 96
    budget = Budget(epsilon, delta, unit="person" if records_of_a_person else "record")
    drawn: dict[str, Any] = {"budget": budget, "expected_batch_size": _BATCH, "private_records": _IMAGES}
    if records_of_a_person:
        drawn["options"] = {"records_per_person": 2}

    def make() -> tuple[pl.LightningModule, PrivateTraining]:
        torch.manual_seed(0)
        if method == "NoisySGD":
            net = network(pixels, 2, hidden)
            module = NoisySGD(net, num_classes=2, image_size=_SIDE, **drawn)
            return module, module.private_training
        training = PrivateTraining(**drawn)
        return PlainClassifier(pixels, 2, hidden), training

    return TrainingTarget(make, data, {"max_epochs": 1, "accelerator": "cpu"}, method)
