"""What the tests of noisy SGD share: small data, modules, trainers and a folder's charges."""

import os
import signal
from pathlib import Path

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.datamodules.datasets import ChosenImages, LabeledImages
from pl_privknn.features import Extractor
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import NoiseSource, SeededNoise
from pl_privknn.training import NoisyOptimization, NoisySGD
from tests.setup.forked import in_child
from tests.setup.grouped import grouped
from tests.setup.small_fit import quiet_trainer

PRIVATE = 90


class Flat(Extractor):
    def __call__(self, images):
        return images.flatten(1)


def make_data(cls=ArraysDataModule, **kwargs):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(PRIVATE + 60, 1, 8, 8, generator=generator)
    labels = (images.mean(dim=(1, 2, 3)) > 0.5).long()
    images[labels == 1] = (images[labels == 1] + 0.5).clamp(max=1)
    a, b = PRIVATE, PRIVATE + 40
    parts = {
        "private_images": images[:a], "private_labels": labels[:a], "public_images": images[a:b],
        "public_truth": labels[a:b], "test_images": images[b:], "test_labels": labels[b:],
    }  # fmt: skip
    return cls(**parts, num_classes=2, **kwargs)


def with_private(data, places):
    """The data module with these of its private records alone, in this order."""
    data.setup("fit")
    data._private = LabeledImages(ChosenImages(data.private.store, places), data.private.labels[places], 2)
    return data


def make(extractor=True, lr=1.0, **kwargs):
    options = {"num_classes": 2, "image_size": 8, "expected_batch_size": 30, "private_records": PRIVATE}
    options |= {"optimization": NoisyOptimization(lr=lr), "noise_source": SeededNoise(1)}
    if "noise_multiplier" not in kwargs and "epsilon" not in kwargs:
        options["noise_multiplier"] = 1.0
    if extractor:
        options["extractor"] = Flat()
    else:
        options["network"] = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    return NoisySGD(**grouped(NoisySGD, **{**options, **kwargs}))


def make_trainer(folder, epochs=2, **given):
    keeps = any(isinstance(one, ModelCheckpoint) for one in given.get("callbacks", []))
    return quiet_trainer(folder, epochs, **{"enable_checkpointing": keeps, **given})


def fit(module, folder, epochs=2, data=None, ckpt_path=None, **kwargs):
    trainer = make_trainer(folder, epochs, **kwargs)
    trainer.fit(module, data or make_data(), ckpt_path=ckpt_path)
    return trainer


def charged(folder):
    """(mechanism, count) of every charge row, in order."""
    ledger = Ledger.open_readonly(folder / "run.sqlite")
    return [(charge.mechanism, charge.count) for charge in ledger.report().charged]


# ---------------------------------------------------------------------- epsilon and the budget


class NoNoise(NoiseSource):
    def random_words(self, count):
        raise AssertionError("something was drawn")

    def stream(self, *key):
        return self


# ---------------------------------------------------------------------- interruption


class DyingNoise(SeededNoise):
    """Notes each step before its noise is drawn, and dies before one of them."""

    folder: Path
    dies = 0

    def stream(self, *key):
        child = SeededNoise.stream(self, *key)
        child.__class__ = DyingNoise
        return child

    def normal(self, shape, scale):
        with (self.folder / "drawn").open("a") as file:
            file.write("x")
            file.flush()
            os.fsync(file.fileno())
        if (self.folder / "drawn").stat().st_size == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().normal(shape, scale)


def in_a_dying_child(folder, dies, train):
    """Train in a child that dies before the noise of a step (0: never), from the last checkpoint; how it ended."""

    def job():
        DyingNoise.folder, DyingNoise.dies = folder, dies
        last = folder / "ckpt" / "last.ckpt"
        train(DyingNoise(0), last if last.exists() else None)

    return in_child(job)


def power_cut_at(step, monkeypatch):
    """Fail once, before the noise of a step is drawn; a list that grows by one for each step."""
    drawn, original = [], Gaussian.add_noise

    def add_noise(self, values, noise):
        drawn.append(self)
        if len(drawn) == step:
            raise OSError("power cut")
        return original(self, values, noise)

    monkeypatch.setattr(Gaussian, "add_noise", add_noise)
    return drawn


def keep_last(folder):
    return ModelCheckpoint(
        dirpath=folder / "ckpt", filename="last", enable_version_counter=False, save_on_train_epoch_end=True
    )
