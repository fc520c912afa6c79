"""Shared set-up of runs: three easy classes of images, a quiet trainer, and a short fit."""

import pytorch_lightning as pl
import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.students import SupervisedStudent
from tests.setup.grouped import grouped

_QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False,
}  # fmt: skip


def quiet_trainer(folder, epochs=1, **given):
    return pl.Trainer(**{"max_epochs": epochs, "default_root_dir": folder, **_QUIET, **given})


def easy_images(*counts, classes=3, side=8, noise=0.1):
    """Images and labels of parts of so many records each, one after another: noisy copies of an image a class."""
    generator = torch.Generator().manual_seed(0)
    centres, parts = torch.rand(classes, 1, side, side, generator=generator), []
    for count in counts:
        labels = torch.arange(count) % classes
        drawn = torch.randn(count, 1, side, side, generator=generator)
        parts += [(centres[labels] + noise * drawn).clamp(0, 1), labels]
    return parts


def small_student(classes=3, side=8, **given):
    return SupervisedStudent("small_cnn", num_classes=classes, in_channels=1, image_size=side, **given)


def fit_student(folder, teacher, noise, private=300, public=60, owners=None, **labeling):
    """Fit a student for an epoch on a teacher's answers about noisy copies of three images.

    Returns:
        The callback and the data module.
    """

    class Owned(ArraysDataModule):
        def setup(self, stage=None):
            super().setup(stage)
            self.private_groups = owners

    data = Owned(*easy_images(private, public, 30, noise=noise), num_classes=3, batch_size=16)
    given = {
        "epochs_per_round": 1,
        "features": torch.nn.Flatten(),
        "progress": False,
        "run_dir": folder / "run",
    }
    callback = PrivateLabeler(teacher, **grouped(PrivateLabeler, **{**given, **labeling}))
    quiet_trainer(folder, callbacks=[callback]).fit(small_student(), data)
    return callback, data
