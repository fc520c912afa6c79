"""What private training refuses before anything is paid or drawn; and what passes."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from wandb.integration.torch import wandb_torch

from tests.training.noisy_sgd_setup import NoNoise, keep_last, make_data
from tests.training.training_setup import Lit, fit, training


class Other(Lit):
    """A module whose loss, or whatever else a test gives, is not what it should be."""

    def __init__(self, loss=None, net=None, configure=None):
        super().__init__(net)
        self.own_loss, self.configure = loss, configure

    def training_step(self, batch, batch_idx):
        if self.own_loss is None:
            return super().training_step(batch, batch_idx)
        return self.own_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return super().configure_optimizers() if self.configure is None else self.configure(self)


def two(module):
    return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (module.net[1], module.net[3])]


def plateau(module, monitor="train_loss"):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}


CONVOLUTION = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)
REFUSED = {
    "losses one by one": (
        lambda: Other(lambda o, y: F.cross_entropy(o.repeat(2, 1), y.repeat(2), reduction="none")), "one value",
    ),
    "batch norm": (lambda: Other(net=nn.Sequential(*CONVOLUTION)), r"net\.1: BatchNorm2d .*replace_batch_norm=True"),
    "running statistics": (
        lambda: Other(net=nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), *Lit().net)),
        r"net\.0: InstanceNorm2d",
    ),
    "other batches": (lambda: Other(lambda o, y: F.cross_entropy(o, y["class"])), "fails on a made-up record"),
    "nothing to train": (lambda: Other(net=Lit().net.requires_grad_(False)), "nothing to train"),
    "two optimizers": (lambda: manual(Other(configure=two), False), "2 optimizers|multiple optimizers"),
    "no optimizer": (lambda: Other(configure=lambda m: None), "0 optimizers"),
    "a rate by private loss": (lambda: Other(configure=plateau), "ReduceLROnPlateau: monitor='train_loss'"),
    "its own steps": (lambda: manual(Lit()), "automatic_optimization=False"),
    "a module that wandb watches": (lambda: watched(Lit()), "unwatch"),
}  # fmt: skip


def watched(module):
    wandb_torch.TorchHistory().add_log_parameters_hook(next(module.children()))
    return module


def manual(module, by_hand=True):
    module.automatic_optimization = not by_hand
    return module


def check_refused(tmp_path, module, message, **kwargs):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as caught:
        fit(module, tmp_path, training(noise_source=NoNoise()), data=make_data(), **kwargs)
    assert not list(tmp_path.rglob("*.sqlite"))
    return caught


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_the_guarantee_is_refused_before_anything_is_drawn(tmp_path, name):
    make, message = REFUSED[name]
    caught = check_refused(tmp_path, make(), message)
    if isinstance(caught.value, ValueError):
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [EarlyStopping("train_loss")]}, "EarlyStopping: monitor='train_loss'"),
        ({"callbacks": [EarlyStopping("train_loss_epoch")]}, "EarlyStopping: monitor='train_loss_epoch'"),
        (
            {"callbacks": [ModelCheckpoint(monitor="train_accuracy")]},
            "ModelCheckpoint: monitor='train_accuracy'",
        ),
        ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder: it tries steps"),
        ({"callbacks": [training()]}, "two of them"),
        ({"accumulate_grad_batches": 2}, "set expected_batch_size instead"),
        ({"gradient_clip_val": 1.0}, "set max_grad_norm instead"),
        ({"overfit_batches": 1}, "overfit_batches"),
        ({"epochs": -1}, "max_epochs"),
        ({"profiler": "simple"}, "profiler=SimpleProfiler"),
    ],
)
def test_trainers_that_break_the_accounting_or_wait_for_private_figures_are_refused(
    tmp_path, options, message
):
    check_refused(tmp_path, Lit(), message, **options)


ENTRY, ROWS = (torch.rand(1, 8, 8), 0), TensorDataset(torch.rand(9, 1, 8, 8), torch.arange(9) % 2)


class Endless(IterableDataset):
    def __iter__(self):
        raise AssertionError("a record was read")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Endless()), "Endless is an iterable dataset"),
        (DataLoader(TensorDataset(torch.rand(4, 1, 8, 8)), batch_size=None), "batch_size=None"),
        ({"a": DataLoader(TensorDataset(torch.rand(4, 1, 8, 8)))}, "several loaders"),
        (7, "int holds no records"),
        (DataLoader(ROWS, sampler=SubsetRandomSampler(range(4))), r"SubsetRandomSampler .*Subset\(dataset"),
        (
            DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 9, 9)),
            "WeightedRandomSampler .*weighted loss",
        ),
        (
            DataLoader(ROWS, batch_sampler=BatchSampler(SubsetRandomSampler([1]), 1, False)),
            "SubsetRandomSampler",
        ),
        (DataLoader([ENTRY] * 20 + [(torch.rand(1, 8, 8), 1)]), "list reads some rows several times"),
        (DataLoader(Subset([ENTRY, ENTRY], [0, 1])), "Subset reads some rows several times"),
    ],
)
def test_data_of_no_single_records_is_refused(tmp_path, loader, message):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader

    with pytest.raises(ValueError, match=message):
        fit(Lit(), tmp_path, data=Data())
    assert not list(tmp_path.rglob("*.sqlite"))


class Setting:
    """Something that a checkpoint can't be loaded with."""


def test_hyper_parameters_with_which_no_checkpoint_is_resumed_are_refused(tmp_path):
    class Saves(Lit):
        def __init__(self, setting):
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(ValueError, match=r"setting, a Setting, .* add ignore=\['setting'\]"):
        fit(Saves(Setting()), tmp_path, training(noise_source=NoNoise()), callbacks=[keep_last(tmp_path)])
    assert fit(Saves({"lr": 0.1}), tmp_path / "a", callbacks=[keep_last(tmp_path)])[0].planned_steps
    assert fit(Saves(Setting()), tmp_path / "b")[0].planned_steps


class Tests(Lit):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


def table():
    return TensorDataset(torch.rand(90, 1, 8, 8), torch.arange(90) % 2)


@pytest.mark.parametrize(
    "records", [table, lambda: [(x, int(y)) for x, y in zip(*table().tensors, strict=True)]]
)
def test_private_records_are_neither_validated_nor_tested_on(tmp_path, records):
    own, other = records(), table()

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(own, batch_size=30, shuffle=True)

    module = Tests()
    _, trainer = fit(module, tmp_path, epochs=1, data=Data())
    parts = [own, Subset(own, range(60, 70)), own[70:80] if isinstance(own, list) else Subset(own, [3])]
    for part in parts:
        for work in (trainer.validate, trainer.test):
            with pytest.raises(ValueError, match=r"not covered by ε; .*PaidEvaluation\(\)"):
                work(module, DataLoader(part, 10), verbose=False)
    assert trainer.validate(module, DataLoader(other, 30), verbose=False)[0]["val_loss"] > 0
    Data.val_dataloader = lambda self: DataLoader(Subset(own, range(5)))
    with pytest.raises(ValueError, match="val_dataloader: reads the data set of the private records"):
        fit(Tests(), tmp_path / "a", epochs=1, data=Data())


def test_private_records_of_a_data_module_of_this_package_are_not_validated_on(tmp_path):
    module, data = Tests(), make_data()
    _, trainer = fit(module, tmp_path, epochs=1, data=data)
    for work in (trainer.validate, trainer.test):
        with pytest.raises(ValueError, match="PaidEvaluation"):
            work(module, DataLoader(data.private, 10), verbose=False)
    assert trainer.validate(module, data, verbose=False)


def test_frozen_layers_and_a_learning_rate_by_validation_pass(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 2))
    module = Other(net=net, configure=lambda m: plateau(m, "val_loss"))
    callback, _ = fit(module, tmp_path, epochs=1)
    assert callback.planned_steps == 3


class OfPairs(Lit):
    """Its loss compares records of a batch with each other, so that one alone has none."""

    def training_step(self, batch, batch_idx):
        rows = F.normalize(self(batch[0]), dim=1)
        return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


@pytest.mark.parametrize("module", [OfPairs(), Other(loss=lambda logits, y: None)])
def test_a_loss_without_a_gradient_for_one_record_is_refused_before_it_is_paid_for(tmp_path, module):
    with pytest.raises(ValueError, match=r"training_step: the loss of one record alone does not depend"):
        fit(module, tmp_path)
    assert not list(tmp_path.rglob("run.sqlite"))
