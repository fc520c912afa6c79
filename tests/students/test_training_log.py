"""What a student logs of a training: means over the epoch, weighted by the size of the batches."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from pl_privknn._lightning import TRAINS_ALONE
from pl_privknn.students import SupervisedStudent


class Noted(SupervisedStudent):
    """Notes each loss, and logs a value of its own at its odd batches alone."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.__dict__.setdefault("noted", []).append((len(batch[0]), loss.item()))
        if batch_idx % 2:
            self.log_training({"odd": torch.tensor(float(batch_idx))}, len(batch[0]))
        return loss


class Seen(pl.Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(records, **options):
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(records, 1, 8, 8), torch.arange(records) % 3)
    student = Noted(network="small_cnn", num_classes=3, image_size=8)
    seen = Seen()
    trainer = pl.Trainer(accelerator="cpu", callbacks=[seen], **{**TRAINS_ALONE, **options})
    trainer.fit(student, DataLoader(data, 8))
    return student.noted, seen.epochs, trainer.callback_metrics


def mean(noted):
    return sum(size * loss for size, loss in noted) / sum(size for size, _ in noted)


def test_callbacks_see_the_means_of_each_epoch():
    noted, epochs, _ = fit(29, max_epochs=2)
    assert [size for size, _ in noted] == [8, 8, 8, 5] * 2
    for epoch, part in zip(epochs, (noted[:4], noted[4:]), strict=True):
        assert epoch["train/loss"] == pytest.approx(mean(part), rel=1e-6)
        assert epoch["train/odd"] == pytest.approx((8 * 1 + 5 * 3) / 13)


def test_what_the_last_batch_lacks_is_logged():
    _, _, metrics = fit(24, max_epochs=1)
    assert float(metrics["train/odd"]) == 1


def test_an_epoch_that_max_steps_ends_is_logged():
    noted, _, metrics = fit(80, max_epochs=-1, max_steps=13)
    assert len(noted) == 13
    assert float(metrics["train/loss"]) == pytest.approx(mean(noted[10:]), rel=1e-6)
