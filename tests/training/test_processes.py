"""Private training in several processes: the update, the noise and the ledger are those of one."""

import json
import os

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.datamodules.datasets import LabeledImages, TensorImages
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.training import PrivateTraining
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_child, in_group
from tests.training.noisy_sgd_setup import PRIVATE, NoNoise, charged, keep_last, make, make_data, make_trainer
from tests.training.training_setup import Lit, fit, training, weights

DDP = {"strategy": "ddp"}


class ByRecord(SeededNoise):
    """Coins that depend on the step and the record alone, whichever process tosses them; notes how many records."""

    count, rank, left, tossed = 1, 0, 0, 0
    drawn: list

    def stream(self, *key):
        child = super().stream(*key)
        child.__class__ = type(self)
        if key[0] == "batches":
            child.left, child.drawn = key[2], self.drawn
            child.rank = key[4] if len(key) > 3 else 0
        return child

    def bernoulli(self, shape, p):
        self.tossed += 1
        whole = SeededNoise(5).stream(self.left, self.tossed).bernoulli((PRIVATE,), p)
        coins = whole[self.rank :: self.count]
        assert coins.shape == tuple(shape)
        self.drawn.append(int(coins.sum()))
        return coins


def source(count):
    made = ByRecord(1)
    made.drawn = []
    ByRecord.count = count
    return made


def train(who, folder, count, epochs=3, **kwargs):
    """The trained weights, what was drawn in each step, and the ε that this process states."""
    noise = source(count)
    torch.manual_seed(0)
    if count > 1:
        kwargs.update(DDP, devices=count)
    if who == "callback":
        module, who = Lit(), training(noise_source=noise, steps_per_charge=2)
        fit(module, folder, who, epochs, **kwargs)
    else:
        module = make(extractor=who == "head", noise_source=noise, physical_batch_size=7, steps_per_charge=2)
        who = module.private_training
        make_trainer(folder, epochs, **kwargs).fit(module, make_data())
    stated = {"epsilon": who.epsilon, "spent": who.epsilon_spent}
    return {"weights": weights(module).tolist(), "drawn": noise.drawn, **stated}


def train_together(who, folder, count):
    folder.mkdir()

    def one(rank):
        torch.set_num_threads(1)
        found = train(who, folder, count)
        (folder / f"{rank}.json").write_text(json.dumps(found))

    assert ([in_child(lambda: one(0))] if count == 1 else in_group(count, one)) == [0] * count
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@needs_fork
@pytest.mark.parametrize(("who", "count"), [("network", 2), ("head", 2), ("callback", 3)])
def test_several_processes_train_as_one_and_pay_as_one(tmp_path, who, count):
    (alone,) = train_together(who, tmp_path / "alone", 1)
    together = train_together(who, tmp_path / "together", count)
    for one in together:
        found, wanted = torch.tensor(one["weights"]), torch.tensor(alone["weights"])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        assert (one["epsilon"], one["spent"]) == (alone["epsilon"], alone["spent"])
    drawn = torch.tensor([one["drawn"] for one in together])
    assert drawn.sum(dim=0).tolist() == alone["drawn"]
    assert (drawn[0] != drawn[1]).any()  # each has a sample of its own size
    assert charged(tmp_path / "together") == charged(tmp_path / "alone")
    report = Ledger.open_readonly(tmp_path / "together" / "run.sqlite").report()
    assert report.epsilon == alone["epsilon"]


@needs_fork
def test_a_process_that_dies_ends_the_training_and_a_resume_costs_what_was_planned(tmp_path):
    class Dies(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_rank == 1 and trainer.global_step == 4:
                os._exit(9)

    class Noted(SeededNoise):
        def stream(self, *key):
            if key[0] == "step":
                with (tmp_path / "drawn").open("a") as file:
                    file.write("x")
            return super().stream(*key)

    def one(resumed):
        torch.set_num_threads(1)
        last = tmp_path / "ckpt" / "last.ckpt"
        callback = training(steps_per_charge=2, noise_source=Noted(1))
        callbacks = [keep_last(tmp_path)] if resumed else [keep_last(tmp_path), Dies()]
        resume = {"callbacks": callbacks, "ckpt_path": last if resumed else None}
        fit(Lit(), tmp_path, callback, 3, devices=2, **resume, **DDP)
        plan = account([Charge(Gaussian(1.0, 1.0, 30 / PRIVATE), 9)], delta=1e-5).epsilon
        assert callback.epsilon == callback.epsilon_spent == pytest.approx(plan)

    assert in_group(2, lambda rank: one(False)) == [1, 9]
    assert len((tmp_path / "drawn").read_text()) == 4
    # Rows of 1, 2 and 2 steps.
    assert sum(count for _, count in charged(tmp_path)) == 5
    assert in_group(2, lambda rank: one(True)) == [0, 0]
    assert len((tmp_path / "drawn").read_text()) <= 9 == sum(count for _, count in charged(tmp_path))


@needs_fork
def test_what_stops_the_first_process_stops_all_before_noise(tmp_path):
    def one(rank):
        with pytest.raises((RuntimeError, OSError), match="disk full"):
            fit(Lit(), tmp_path, training(noise_source=Full(1)), devices=2, **DDP)

    class Full(SeededNoise):
        def stream(self, *key):
            if key[0] == "step":
                raise OSError("disk full")
            return super().stream(*key)

    assert in_group(2, one) == [0, 0]


class Shuffled(ArraysDataModule):
    def load_private(self):
        private = super().load_private()
        coins = torch.Generator().manual_seed(self.trainer.global_rank)
        order = torch.randperm(len(private), generator=coins)
        return LabeledImages(TensorImages(private.images(order)), private.labels[order], 2)


@needs_fork
def test_processes_of_different_records_are_refused_before_a_charge(tmp_path):
    """Shares of different orders overlap: a record would be in several processes, and be paid for once."""

    def one(rank):
        private = training(noise_source=NoNoise())
        with pytest.raises(ValueError, match="private set: the processes of this training hold different"):
            fit(Lit(), tmp_path, private, devices=2, data=make_data(Shuffled), **DDP)

    assert in_group(2, one) == [0, 0]
    assert not list(tmp_path.rglob("*.sqlite"))


class OwnFile(ArraysDataModule):
    private_in_shards = True


@needs_fork
def test_a_process_draws_from_its_whole_file(tmp_path):
    class Count(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            callback = next(one for one in trainer.callbacks if isinstance(one, PrivateTraining))
            assert len(callback.private) == PRIVATE

    def one(rank):
        fit(Lit(), tmp_path, training(), devices=2, data=make_data(OwnFile), callbacks=[Count()], **DDP)

    assert in_group(2, one) == [0, 0]


def test_a_strategy_that_splits_the_network_is_refused(tmp_path):
    said = r'strategy=FSDPStrategy.*use strategy="ddp"|accelerator'
    with pytest.raises((ValueError, RuntimeError), match=said):
        fit(Lit(), tmp_path, strategy="fsdp", devices=2)
