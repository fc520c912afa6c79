"""What the tests of data modules share: numbered images, a model that notes what it sees, a trainer."""

import pytorch_lightning as pl
import torch
from torch import nn

from pl_privknn.datamodules import ArraysDataModule
from tests.setup.small_fit import quiet_trainer

CLASSES = 3
PRIVATE, PUBLIC, TEST = 30, 40, 12


def numbered(start, count):
    """Images whose two pixels spell their number, so that every batch tells which images it holds."""
    numbers = torch.arange(start, start + count)
    return torch.stack([numbers // 256, numbers % 256], 1).to(torch.uint8).reshape(count, 1, 1, 2)


def number_of(images):
    pixels = (images.reshape(-1, 2) * 255).round().long()
    return pixels[:, 0] * 256 + pixels[:, 1]


def make_data(truth=True, **kwargs):
    settings = {
        "private_images": numbered(1000, PRIVATE), "private_labels": torch.arange(PRIVATE) % CLASSES,
        "public_images": numbered(0, PUBLIC),
        "public_truth": (torch.arange(PUBLIC) * 7 + 1) % CLASSES if truth else None,
        "test_images": numbered(2000, TEST), "test_labels": torch.arange(TEST) % CLASSES,
        "num_classes": CLASSES, "batch_size": 4, "unlabeled_batch_size": 8,
    }  # fmt: skip
    return ArraysDataModule(**{**settings, **kwargs})


class Recorder(pl.LightningModule):
    """Notes what each training batch holds; ``scheduled`` asks for the number of steps before any epoch."""

    def __init__(self, scheduled=False):
        super().__init__()
        self.layer, self.scheduled = nn.Linear(2, CLASSES), scheduled
        self.labeled, self.unlabeled, self.evaluated = {}, {}, {"val": [], "test": []}

    def forward(self, x):
        return self.layer(x.flatten(1))

    def training_step(self, batch, batch_idx):
        (x, y), unlabeled = batch["labeled"], batch["unlabeled"]
        self.labeled.setdefault(self.current_epoch, []).append((number_of(x), y.clone()))
        self.unlabeled.setdefault(self.current_epoch, []).append(number_of(unlabeled))
        return nn.functional.cross_entropy(self(x), y) + 0 * self(unlabeled).sum()

    def validation_step(self, batch, batch_idx):
        self.evaluated["val"].append((number_of(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.evaluated["test"].append((number_of(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return number_of(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]

    def seen(self, epoch):
        """Public image -> its label, as trained on in ``epoch``; fails if one image had two labels."""
        pairs = {}
        for numbers, labels in self.labeled[epoch]:
            for number, label in zip(numbers.tolist(), labels.tolist(), strict=True):
                assert pairs.setdefault(number, label) == label
        return pairs


def trainer(tmp_path, epochs=3, callbacks=(), **kwargs):
    return quiet_trainer(tmp_path, epochs, callbacks=list(callbacks), **kwargs)


def loaded():
    module = make_data()
    module.setup("fit")
    return module
