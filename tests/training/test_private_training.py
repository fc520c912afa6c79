"""PrivateTraining on a module that nobody shaped for it: its update, its ε, what it logs and leaves."""

import contextlib
import json
import math

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BackboneFinetuning, EMAWeightAveraging
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from pl_privknn.callbacks.loggers import run_settings
from pl_privknn.cli import main
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.refusals import refusals
from tests.training.noisy_sgd_setup import PRIVATE, NoNoise, charged, make, make_data, make_trainer
from tests.training.training_setup import Lit, Silent, fit, literal_update, training, weights


@pytest.mark.parametrize(("clip_norm", "physical"), [(0.1, 7), (0.1, 500), (100.0, 7)])
def test_a_noiseless_update_is_that_of_each_example_clipped(tmp_path, clip_norm, physical):
    # A rate of 1 draws all 90 records; the sum is divided by the expected 60, whatever there are.
    callback = training(
        max_grad_norm=clip_norm, expected_batch_size=60, private_records=60, physical_batch_size=physical,
        noise_source=Silent(0),
    )  # fmt: skip
    expected = literal_update(Lit(), make_data(), clip_norm, 60)
    module = Lit()
    fit(module, tmp_path, callback, epochs=1)
    torch.testing.assert_close(weights(module).double(), expected, rtol=1e-4, atol=1e-6)


def test_a_condition_is_in_the_summary_the_ledger_and_what_loggers_hear(tmp_path):
    class Branches(Lit):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss > 1 else 2 * loss

    callback, trainer = fit(Branches(), tmp_path, training(noise_source=None), epochs=1)
    summary = callback.privacy_summary()
    assert (summary["guarantee"], callback.guarantee) == ("conditional", "conditional")
    assert "can't be traced" in summary["reason"]
    (row,) = callback.ledger.report().guaranteed
    assert row.guarantee.level == "conditional"
    told = run_settings(trainer, trainer.lightning_module)  # what loggers hear
    assert told["noise"]["gaussian"]["count"] == 3
    assert told["epsilon"] == callback.epsilon > 0


def test_views_of_an_example_are_one_clipped_gradient(tmp_path):
    def turned(views):
        return torch.stack([torch.rot90(view, turn, (1, 2)) for turn, view in enumerate(views)])

    expected = literal_update(Lit(), make_data(), 0.1, 60, lambda x: turned(x.expand(3, *x.shape)))
    callback = training(
        max_grad_norm=0.1, expected_batch_size=60, private_records=60, physical_batch_size=7,
        noise_source=Silent(0), augment=turned, views=3,
    )  # fmt: skip
    module = Lit()
    fit(module, tmp_path, callback, epochs=1)
    torch.testing.assert_close(weights(module).double(), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"augment: of .* it makes"):
        fit(Lit(), tmp_path / "other", training(augment=lambda views: views[:1], views=3))


def test_every_step_draws_a_sample_of_its_own_that_was_paid_for(tmp_path, monkeypatch):
    coins, paid, honest = [], [], SeededNoise.bernoulli

    def toss(self, shape, p):
        paid.append(sum(count for _, count in charged(tmp_path)))
        coins.append(honest(self, shape, p))
        return coins[-1]

    monkeypatch.setattr(SeededNoise, "bernoulli", toss)
    _, trainer = fit(Lit(), tmp_path, training(steps_per_charge=1))
    assert paid == list(range(1, trainer.global_step + 1))
    assert len({tuple(step.tolist()) for step in coins}) == len(coins) > 2


def test_the_least_noise_spends_epsilon_on_the_steps_of_all_epochs(tmp_path):
    callback, trainer = fit(Lit(), tmp_path, training(epsilon=2.0), epochs=3)
    ((mechanism, count),) = charged(tmp_path)
    assert count == trainer.global_step == callback.planned_steps == 9
    assert mechanism.sampling_rate == 30 / PRIVATE
    assert 1.98 < callback.epsilon <= 2.0
    assert callback.epsilon_spent == pytest.approx(callback.epsilon)


def test_training_ends_before_the_step_that_would_pass_epsilon(tmp_path):
    callback, trainer = fit(Lit(), tmp_path, training(epsilon=3.0, noise_multiplier=3.0), epochs=50)
    mechanism, steps = Gaussian(3.0, 1.0, 30 / PRIVATE), trainer.global_step
    assert 0 < steps == sum(count for _, count in charged(tmp_path)) < 150
    assert account([Charge(mechanism, steps)], delta=1e-5).epsilon <= 3.0
    assert account([Charge(mechanism, steps + 1)], delta=1e-5).epsilon > 3.0
    assert callback.epsilon == callback.epsilon_spent <= 3.0


def test_only_epsilon_and_validation_are_logged_and_epsilon_at_every_step(tmp_path):
    names = set()

    class Names(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            names.update(trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics)
            assert outputs == {"loss": 0.0}
            assert batch == []

    module = Lit()
    _, trainer = fit(
        module, tmp_path, training(steps_per_charge=2), 2, callbacks=[Names()],
        logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1,
    )  # fmt: skip
    privacy = {"privacy/epsilon", "privacy/epsilon_spent", "privacy/delta", "privacy/guarantee"}
    assert names | set(trainer.callback_metrics) == {*privacy, "val_loss"}
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    place = {name: number for number, name in enumerate(header.split(","))}
    assert set(place) == {*privacy, "val_loss", "step", "epoch"}
    cells = [row.split(",") for row in rows]
    spent = [
        float(row[place["privacy/epsilon_spent"]]) for row in cells if row[place["privacy/epsilon_spent"]]
    ]
    expected = [
        account([Charge(Gaussian(1.0, 1.0, 1 / 3), n)], delta=1e-5).epsilon for n in (1, 3, 3, 5, 5, 6)
    ]
    assert spent == pytest.approx(expected, rel=1e-6)
    assert module.accuracy.update_count == 0
    assert not module.accuracy.tp.any()


def test_the_module_gets_its_methods_back_and_can_be_trained_again(tmp_path):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:  # after those of the trial epoch
                raise OSError("stop")

    module, data = Lit(), make_data()
    before, keys = set(vars(module)), set(module.state_dict())
    for place, callbacks in enumerate(([], [Stop()], [])):
        callback = training()
        with contextlib.suppress(OSError):
            fit(module, tmp_path / str(place), callback, 1, data, callbacks=callbacks)
        assert set(vars(module)) - before <= {"private_training_run", "_hparams"}
        module.__dict__.pop("private_training_run")
        assert set(module.state_dict()) == keys
    data.public.set_labels(slice(None), data.public.truth)
    assert set(next(iter(data.train_dataloader()))[0]) == {"labeled", "unlabeled"}


@pytest.mark.parametrize("own", [True, False])
def test_fast_dev_run_touches_no_private_record(tmp_path, own):
    class Sealed(ArraysDataModule):
        @property
        def private(self):
            raise AssertionError("a private record was read")

    if own:
        fit(Lit(), tmp_path, training(noise_source=NoNoise()), data=make_data(Sealed), fast_dev_run=True)
    else:
        module = make(noise_source=NoNoise())
        make_trainer(tmp_path, fast_dev_run=True).fit(module, make_data(Sealed))
    assert not list(tmp_path.rglob("*.sqlite"))


def test_schedulers_optimizers_and_transfer_hooks_of_the_module_work(tmp_path):
    class Scheduled(Lit):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]

        def training_step(self, batch, batch_idx):
            assert self.optimizers().param_groups[0]["lr"] == self.lr_schedulers().get_last_lr()[0] <= 0.1
            return super().training_step(batch, batch_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            images, labels = batch
            assert images.shape[1:] == (1, 8, 8)
            return 0 * images, labels

    module = Scheduled()
    before = module.net[1].weight.clone()
    _, trainer = fit(module, tmp_path, training(noise_source=Silent(0)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)
    assert torch.equal(module.net[1].weight, before)  # black images have no gradient there


def test_an_optimizer_that_looks_twice_at_a_batch_is_stopped(tmp_path):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    class Module(Lit):
        def configure_optimizers(self):
            return Twice(self.parameters(), lr=0.1)

    callback = training()
    with pytest.raises(ValueError, match="Twice: asks for the gradient several times a step"):
        fit(Module(), tmp_path, callback)
    assert callback.epsilon_spent == 0


def test_layers_that_a_callback_thaws_are_trained_from_then_on_at_the_same_epsilon(tmp_path):
    class Backbone(Lit):
        def __init__(self):
            super().__init__()
            self.backbone, self.head, self.net = self.net[:3], self.net[3], nn.Identity()

        def forward(self, x):
            return self.head(self.backbone(x))

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    module, seen = Backbone(), []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(module.backbone[1].weight.clone())

    start = module.backbone[1].weight.clone()
    thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    callback, _ = fit(module, tmp_path / "a", callbacks=[thaw, Watch()])
    _, *seen = seen  # the first one is of the trial epoch
    assert torch.equal(seen[0], start)
    assert not torch.equal(seen[1], start)
    assert callback.epsilon == fit(Lit(), tmp_path / "b")[0].epsilon


def test_an_infinite_epsilon_trains_without_noise_and_guarantees_nothing(tmp_path, capsys):
    expected = literal_update(Lit(), make_data(), 0.1, 60)
    module = Lit()
    callback = training(
        epsilon=None,
        noise_multiplier=0.0,
        noise_source=None,
        max_grad_norm=0.1,
        expected_batch_size=60,
        private_records=60,
    )
    fit(module, tmp_path, callback, epochs=1)
    torch.testing.assert_close(weights(module).double(), expected, rtol=1e-4, atol=1e-6)
    assert (callback.epsilon, callback.epsilon_spent, callback.guarantee) == (math.inf, math.inf, "none")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["guarantee"], summary["epsilon"]) == ("none", "inf")
    assert "no noise was added" in summary["reason"]
    (row,) = Ledger.open_readonly(tmp_path / "run.sqlite").report().charged
    assert row.guarantee.level == "none"
    assert main(["audit", str(tmp_path / "run.sqlite")]) == 0
    assert "none" in capsys.readouterr().out


def test_sixteen_bits_train(tmp_path):
    module = Lit()
    fit(module, tmp_path, epochs=1, precision="bf16-mixed")
    assert all(math.isfinite(value) for value in weights(module))


def test_a_module_trained_twice_composes_or_is_refused(tmp_path):
    module, ledger = Lit(), tmp_path / "run.sqlite"
    first, _ = fit(module, tmp_path / "a", training(ledger_path=ledger), epochs=1)
    with pytest.raises(ValueError, match="trained privately before, and ε of both"):
        fit(module, tmp_path / "b", epochs=1)
    second, _ = fit(module, tmp_path / "b", training(ledger_path=ledger), epochs=1)
    assert (
        second.epsilon > account([Charge(Gaussian(1.0, 1.0, 1 / 3), first.planned_steps)], delta=1e-5).epsilon
    )


class Dicts(pl.LightningDataModule):
    """A data module of somebody else: its own loader, batches of dicts."""

    def train_dataloader(self):
        data = make_data()
        data.setup("fit")
        rows = [{"image": x, "label": y, "name": str(place)} for place, (x, y) in enumerate(data.private)]
        return DataLoader(rows, batch_size=16, shuffle=True)


def test_a_foreign_data_module_with_dict_batches_trains_at_the_same_epsilon(tmp_path):
    class OfDicts(Lit):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["image"], batch["label"]), batch_idx)

    module, plain = OfDicts(), Lit()
    foreign = {"data": Dicts(), "limit_val_batches": 0}
    callback, _ = fit(module, tmp_path / "a", training(epsilon=2.0, noise_source=Silent(0)), **foreign)
    other, _ = fit(plain, tmp_path / "b", training(epsilon=2.0, noise_source=Silent(0)))
    assert callback.epsilon == other.epsilon > 1.9
    torch.testing.assert_close(weights(module), weights(plain))


test_bad_arguments_are_named = refusals(
    {
        "epsilon=None, noise_multiplier=None": lambda: training(epsilon=None, noise_multiplier=None),
        "epsilon=0.0": lambda: training(epsilon=0.0),
        "noise_multiplier=-1": lambda: training(noise_multiplier=-1.0),
        "delta=1.0": lambda: training(delta=1.0),
        "max_grad_norm=-1.0": lambda: training(max_grad_norm=-1.0),
        "expected_batch_size=0": lambda: training(expected_batch_size=0),
        "expected_batch_size=30 is more than private_records=29": lambda: training(private_records=29),
        "physical_batch_size=0": lambda: training(physical_batch_size=0),
        "views=0": lambda: training(views=0),
        "views=2: without augment": lambda: training(views=2),
        "steps_per_charge=0": lambda: training(steps_per_charge=0),
        "step=": lambda: training(step="eager"),
        "noise_multiplier=0: trains without noise": lambda: training(epsilon=1.0, noise_multiplier=0.0),
        "budget.epsilon=None, noise_multiplier=None": lambda: training(epsilon=None),
        "budget.adjacency='replace_one'": lambda: training(adjacency="replace_one"),
    }
)


def test_averaged_weights_are_made_of_released_ones_and_cost_nothing(tmp_path):
    plain, averaged = Lit(), Lit()
    callback, _ = fit(plain, tmp_path / "plain", epochs=1)
    other, _ = fit(averaged, tmp_path / "averaged", epochs=1, callbacks=[EMAWeightAveraging(decay=0.5)])
    assert other.epsilon == callback.epsilon
    assert torch.isfinite(weights(averaged)).all()
    assert not torch.equal(weights(plain), weights(averaged))
