"""A private step's trainer holds public facts, and nothing that leads to records."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from training_setup import Lit, fit

from pl_privknn.testing import clipped_sum


class Tensors(pl.LightningDataModule):
    """Holds its records as plain tensors."""

    def __init__(self):
        super().__init__()
        self.images, self.labels = torch.rand(60, 1, 8, 8), torch.arange(60) % 2

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=30)


class AsksTheTrainer(Lit):
    def training_step(self, batch, batch_idx):
        assert type(self.trainer).__name__ == "PublicTrainer"
        assert self.trainer.current_epoch == self.current_epoch >= 0
        assert self.optimizers().param_groups[0]["lr"] == self.lr
        return super().training_step(batch, batch_idx)


class WantsTheData(Lit):
    def training_step(self, batch, batch_idx):
        others = self.trainer.datamodule.labels
        return super().training_step(batch, batch_idx) * others.float().mean()


class HoldsTheTrainer(Lit):
    def training_step(self, batch, batch_idx):
        others = self.held[0].datamodule.labels
        return super().training_step(batch, batch_idx) * others.float().mean()

    def setup(self, stage):
        self.held = [self.trainer]


class HoldsALoop(HoldsTheTrainer):
    def setup(self, stage):
        self.held = [self.trainer.fit_loop.trainer.strategy.lightning_module.trainer]


class HoldsTheConnector(Lit):
    def training_step(self, batch, batch_idx):
        others = self.held._datahook_selector.datamodule.labels
        return super().training_step(batch, batch_idx) * others.float().mean()

    def setup(self, stage):
        self.held = self.trainer._data_connector


class HoldsTheData(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.held.labels.float().mean()

    def setup(self, stage):
        self.held = self.trainer.datamodule


def test_a_step_sees_public_facts_of_the_trainer_alone(tmp_path):
    callback, _ = fit(AsksTheTrainer(), tmp_path, epochs=1, data=Tensors())
    assert callback.privacy_summary()["steps"] > 0


@pytest.mark.parametrize("make", [WantsTheData, HoldsTheTrainer, HoldsALoop, HoldsTheConnector, HoldsTheData])
def test_a_step_that_wants_the_trainers_data_is_refused(make, tmp_path):
    with pytest.raises(ValueError, match="be reached from a private step"):
        fit(make(), tmp_path, epochs=1, data=Tensors())


class Counts(Tensors):
    """Its hook counts batches, in the object and on the class."""

    seen, number = [], 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen.append(1)
        type(self).number += 1
        self.count = getattr(self, "count", 0) + 1
        return batch[0] * (len(self.seen) + self.number + self.count), batch[1]


def test_hooks_of_a_data_module_leave_nothing_to_the_next_record():
    module, data = Lit(), Counts()
    whole = clipped_sum(module, data, range(12), 1e6)
    alone = sum(clipped_sum(module, data, [place], 1e6) for place in range(12))
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-5)
    assert (Counts.seen, Counts.number) == ([], 0)
