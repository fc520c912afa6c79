import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from pl_privknn.baselines import NoisySGD
from pl_privknn.baselines.clipping import ClippedGradients, with_group_norm
from pl_privknn.cli import main
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.datamodules.private_loader import PoissonBatches, PrivateTraining
from pl_privknn.features import Extractor
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.networks import build_network
from pl_privknn.privacy.accountant import account
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import NoiseSource, SeededNoise, SystemNoise
from pl_privknn.privacy.noisy_steps import (
    PaidSteps,
    clip_factors,
    noise_for_steps,
    poisson_sample,
    quiet_lr,
    step_mechanism,
)

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
    return cls(
        private_images=images[:a],
        private_labels=labels[:a],
        public_images=images[a:b],
        public_truth=labels[a:b],
        test_images=images[b:],
        test_labels=labels[b:],
        num_classes=2,
        **kwargs,
    )


def make(extractor=True, **kwargs):
    options = {"num_classes": 2, "image_size": 8, "batch_size": 30, "lr": 1.0, "noise_source": SeededNoise(1)}
    if "noise_multiplier" not in kwargs and "target_epsilon" not in kwargs:
        options["noise_multiplier"] = 1.0
    if extractor:
        options["extractor"] = Flat()
    else:
        options["network"] = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    return NoisySGD(**{**options, **kwargs})


def make_trainer(folder, epochs=2, **kwargs):
    return pl.Trainer(
        **{
            "max_epochs": epochs,
            "accelerator": "cpu",
            "logger": False,
            "default_root_dir": folder,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in kwargs.get("callbacks", [])),
            **kwargs,
        }
    )


def fit(module, folder, epochs=2, data=None, ckpt_path=None, **kwargs):
    trainer = make_trainer(folder, epochs, **kwargs)
    trainer.fit(module, data or make_data(), ckpt_path=ckpt_path)
    return trainer


def charged(folder):
    """(mechanism, count) of every charge row, in order."""
    ledger = Ledger.open_readonly(folder / "ledger.sqlite")
    return [(charge.mechanism, charge.count) for charge in ledger.report().charged]


def losses(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


# ---------------------------------------------------------------------- clipping


def literal_sum(network, x, y, clip_norm):
    total = 0
    for i in range(len(x)):
        network.zero_grad()
        F.cross_entropy(network(x[i : i + 1]), y[i : i + 1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in network.parameters() if p.requires_grad]).double()
        total = total + gradient * min(1.0, clip_norm / float(gradient.norm()))
    network.zero_grad()
    return total


def networks():
    torch.manual_seed(3)
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(400, 16), nn.Tanh(), nn.Linear(16, 5))
    frozen[1].requires_grad_(False)
    return {
        "convolutions": build_network("tanh_cnn", 5, 1, 20),
        "group norm": with_group_norm(build_network("small_cnn", 5, 1, 20)),
        "frozen part": frozen,
    }


@pytest.mark.parametrize("name", ["convolutions", "group norm", "frozen part"])
@pytest.mark.parametrize("method", ["flat", "ghost"])
@pytest.mark.parametrize("clip_norm", [0.05, 1.5, 1000.0])
def test_clipped_sum_equals_a_loop_over_examples(name, method, clip_norm):
    network = networks()[name]
    x, y = torch.rand(7, 1, 20, 20), torch.arange(7) % 5
    expected = literal_sum(network, x, y, clip_norm)
    clipped = ClippedGradients(network, clip_norm, method, physical_batch_size=3)
    clipped.attach()
    # Factors are 1e-5 below the literal ones, so that rounding can't exceed the bound.
    torch.testing.assert_close(clipped.sum(x, y, losses), expected, rtol=1e-4, atol=1e-5)
    clipped.detach()


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_no_example_moves_the_sum_by_more_than_the_clipping_norm(method):
    clipped = ClippedGradients(build_network("tanh_cnn", 5, 1, 20), 0.7, method)
    clipped.attach()
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e3):
        x, y = scale * torch.randn(6, 1, 20, 20, generator=generator), torch.arange(6) % 5
        whole = clipped.sum(x, y, losses)
        for i in range(6):
            others = torch.arange(6) != i
            moved = whole - clipped.sum(x[others], y[others], losses)
            assert float(moved.norm()) <= 0.7 * (1 + 1e-6)
    assert float(whole.norm()) > 0.7  # it does clip


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_a_record_with_a_broken_gradient_contributes_nothing(method):
    clipped = ClippedGradients(build_network("tanh_cnn", 5, 1, 20), 0.7, method)
    clipped.attach()
    x, y = torch.rand(4, 1, 20, 20), torch.arange(4)
    x[2] = math.nan
    good = torch.tensor([0, 1, 3])
    torch.testing.assert_close(clipped.sum(x, y, losses), clipped.sum(x[good], y[good], losses))
    assert not clipped.sum(x[2:3], y[2:3], losses).any()


def test_clip_factors():
    norms = torch.tensor([0.0, 0.5, 2.0, math.inf, math.nan])
    factors = clip_factors(norms, 1.0)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0]), rtol=2e-5, atol=0)
    assert float(factors[2]) * 2.0 <= 1.0


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_networks_that_mix_examples_are_refused(method):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 2)

        def forward(self, x):  # two rows an example
            return self.layer(x.reshape(-1, 32)).reshape(-1, 2, 2).sum(dim=1)

    clipped = ClippedGradients(Doubled(), 1.0, method)
    clipped.attach()
    with pytest.raises(ValueError, match="first dimension"):
        clipped.sum(torch.rand(3, 64), torch.tensor([0, 1, 0]), losses)


def test_batch_norm_is_refused_with_a_remedy_also_where_it_is_frozen(tmp_path):
    with pytest.raises(ValueError, match="group_norm"):
        NoisySGD("small_cnn", noise_multiplier=1.0)
    frozen = build_network("small_cnn", 2, 1, 8)
    for module in frozen.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    with pytest.raises(ValueError, match="BatchNorm2d"):
        NoisySGD(frozen, num_classes=2, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="track_running_stats"):
        NoisySGD(nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True)), noise_multiplier=1.0)
    module = make(extractor=False, network="small_cnn", batch_norm="group_norm")
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    fit(module, tmp_path, epochs=1, limit_train_batches=1)
    assert module.planned_steps == 1


# ---------------------------------------------------------------------- sampling, noise, steps


def test_poisson_samples_have_the_stated_rate_and_random_sizes():
    count, rate, steps = 400, 0.07, 3000
    batches = list(PoissonBatches(count, rate, steps, lambda: SeededNoise(5)))
    assert len(batches) == steps
    assert all(len(set(batch)) == len(batch) for batch in batches)  # a record once at most
    hits = torch.zeros(count)
    together = 0
    for batch in batches:
        hits[batch] += 1
        together += 3 in batch and 4 in batch
    # Binomial(3000, 0.07): deviation 14. The largest of 400 passes 5 deviations once in 4,000 seeds.
    assert float((hits - steps * rate).abs().max()) < 5 * math.sqrt(steps * rate * (1 - rate))
    assert abs(together - steps * rate**2) < 5 * math.sqrt(steps * rate**2)
    sizes = torch.tensor([float(len(batch)) for batch in batches])
    # The variance of 3,000 sizes has a relative deviation of √(2/3000) = 0.026; a fixed size would have 0.
    assert float(sizes.var()) == pytest.approx(count * rate * (1 - rate), rel=0.13)


def test_a_rate_of_one_takes_everybody_and_a_tiny_one_nobody():
    assert poisson_sample(5, 1.0, SeededNoise(0)).tolist() == [0, 1, 2, 3, 4]
    assert poisson_sample(5, 1e-12, SeededNoise(0)).tolist() == []


@pytest.mark.parametrize(("rate", "steps"), [(1 / 93, 93), (1 / 3, 3), (0.3, 4), (1.0, 1), (1 / 49, 49)])
def test_steps_of_an_epoch_are_not_truncated(rate, steps):
    make_data().setup("fit")
    data = make_data()
    data.setup("fit")
    assert PrivateTraining(data.private, rate, lambda: SeededNoise(0)).steps_per_epoch == steps


class Counter:
    def __init__(self):
        self.rows = []

    def charge(self, mechanism, count=1):
        self.rows.append((mechanism, count))
        return len(self.rows)


def test_noise_has_the_charged_deviation_and_does_not_stack():
    mechanism = step_mechanism(1.7, 0.5, 0.1)
    assert (mechanism.sigma, mechanism.l2_sensitivity, mechanism.sampling_rate) == (1.7 * 0.5, 0.5, 0.1)
    counter, values = Counter(), torch.zeros(20000)
    steps = PaidSteps(counter, mechanism, steps=5, steps_per_charge=2)
    drawn = [steps.release(values, SeededNoise(2)) for _ in range(5)]
    assert not values.any()
    for noise in drawn:  # relative deviation of the sample deviation: 0.005
        assert float(noise.std()) == pytest.approx(0.85, rel=0.025)
        assert abs(float(noise.mean())) < 5 * 0.85 / math.sqrt(20000)
    correlations = torch.corrcoef(torch.stack(drawn)) - torch.eye(5)
    assert float(correlations.abs().max()) < 5 / math.sqrt(20000)
    assert counter.rows == [(mechanism, 2), (mechanism, 2), (mechanism, 1)]
    with pytest.raises(RuntimeError, match="exceed the plan"):
        steps.release(values, SeededNoise(2))
    assert len(counter.rows) == 3


def test_physical_batches_change_nothing(tmp_path):
    weights = []
    for size, method in ((1, "flat"), (7, "flat"), (64, "flat"), (7, "ghost")):
        torch.manual_seed(0)
        module = make(extractor=False, physical_batch_size=size, clipping=method)
        fit(module, tmp_path / f"{size}{method}")
        weights.append(torch.cat([p.detach().flatten() for p in module.network.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)


def test_empty_batches_are_noise_only_steps(tmp_path):
    module = make(sampling_rate=1e-9, noise_multiplier=2.0, clip_norm=0.5, momentum=0.0, scheduler="none")
    fit(module, tmp_path, epochs=1, limit_train_batches=1)
    moved = torch.cat([p.detach().flatten() for p in module.network.parameters()])  # from 0, lr 1
    noise = SeededNoise(1).stream("step", 4, 0).normal((130,), 1.0)  # rows: open, plan, and then this charge
    assert module.planned_steps == 1
    assert float(moved.norm()) > 0
    scale = float((moved.double() @ noise) / (noise @ noise))
    if not torch.allclose(
        moved.double(), scale * noise, atol=1e-6
    ):  # the row's number is the ledger's own affair
        assert float(moved.std()) == pytest.approx(2.0 * 0.5 / 30, rel=0.35)  # 130 draws: 5 deviations
    else:
        assert scale == pytest.approx(-2.0 * 0.5 / 30, rel=1e-3)


def test_one_object_draws_and_accounts_and_rows_add_up_to_the_steps(tmp_path, monkeypatch):
    drawn, original = [], Gaussian.add_noise
    monkeypatch.setattr(
        Gaussian, "add_noise", lambda self, values, noise: drawn.append(self) or original(self, values, noise)
    )
    data = make_data()
    module = make(steps_per_charge=4)
    rates = []

    class Rate(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            rates.append(trainer.train_dataloader.batch_sampler.sampling_rate)

    trainer = fit(module, tmp_path, epochs=3, data=data, callbacks=[Rate()])
    (mechanism, count) = charged(tmp_path)[0]
    assert module.planned_steps == count == len(drawn) == trainer.global_step == 9
    assert set(drawn) == {mechanism}
    assert rates == [mechanism.sampling_rate] == [30 / PRIVATE]
    expected = account([Charge(mechanism, 9)], delta=1e-5)
    assert module.epsilon == pytest.approx(expected.epsilon)
    assert module.epsilon_spent == pytest.approx(expected.epsilon)
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(expected.epsilon, rel=1e-6)


def test_every_step_is_on_disk_before_its_noise(tmp_path):
    class Watching(SeededNoise):
        drawn = 0

        def stream(self, *key):
            child = SeededNoise.stream(self, *key)
            child.__class__ = Watching
            return child

        def normal(self, shape, scale):
            Watching.drawn += 1
            assert sum(count for _, count in charged(tmp_path)) >= Watching.drawn
            return super().normal(shape, scale)

    fit(make(steps_per_charge=1, noise_source=Watching(0)), tmp_path)
    assert Watching.drawn == 6


def test_default_noise_is_cryptographic():
    assert NoisySGD("tanh_cnn", noise_multiplier=1.0).noise_source.cryptographic
    assert isinstance(NoisySGD("tanh_cnn", noise_multiplier=1.0).noise_source, SystemNoise)


# ---------------------------------------------------------------------- epsilon and the budget


@pytest.mark.parametrize(
    ("multiplier", "rate", "steps"), [(1.1, 0.02, 500), (5.43, 0.1, 200), (0.8, 0.005, 1000)]
)
def test_epsilon_agrees_with_opacus(multiplier, rate, steps):
    from opacus.accountants import PRVAccountant, RDPAccountant

    ours = account([Charge(step_mechanism(multiplier, 0.3, rate), steps)], delta=1e-5)
    by_rdp, by_prv = RDPAccountant(), PRVAccountant()
    by_rdp.history = by_prv.history = [(multiplier, rate, steps)]
    # Opacus tries fewer orders, so its RDP figure may be a little above ours and never below by more than rounding.
    rdp = by_rdp.get_epsilon(1e-5)
    # The two look at different orders: ours lie 3 % apart, Opacus has whole ones and some between.
    assert ours.epsilon_rdp <= rdp * (1 + 2e-3)
    assert ours.epsilon_rdp == pytest.approx(rdp, rel=0.01)
    # PRV's figure is an upper bound with an error of at most eps_error.
    prv = by_prv.get_epsilon(1e-5, eps_error=0.01)
    assert prv - 0.02 <= ours.epsilon <= prv + 0.005


def test_noise_is_found_for_a_target(tmp_path):
    module = make(target_epsilon=2.0)
    fit(module, tmp_path)
    assert 1.98 < module.epsilon <= 2.0
    summary = module.privacy_summary()
    assert summary["noise_multiplier"] == noise_for_steps(2.0, 1e-5, 30 / PRIVATE, 6)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["steps"], summary["steps_planned"], summary["adjacency"]) == (6, 6, "add_remove")


class NoNoise(NoiseSource):
    def random_words(self, count):
        raise AssertionError("something was drawn")

    def stream(self, *key):
        return self


def test_budget_is_checked_before_anything_is_drawn(tmp_path):
    with pytest.raises(BudgetExceeded):
        fit(make(max_epsilon=0.5, noise_source=NoNoise()), tmp_path)
    assert charged(tmp_path) == []
    # With other parameters the same folder serves.
    fit(make(max_epsilon=0.5, target_epsilon=0.5), tmp_path)


def test_training_stops_cleanly_where_the_budget_ends(tmp_path):
    probe = step_mechanism(1.0, 1.0, 30 / PRIVATE)
    budget = account([Charge(probe, 5)], delta=1e-5).epsilon * 1.001
    module = make(max_epsilon=budget, on_budget="stop")
    trainer = fit(module, tmp_path, epochs=4)
    assert module.planned_steps == trainer.global_step == sum(count for _, count in charged(tmp_path)) == 5
    assert module.epsilon <= budget < account([Charge(probe, 6)], delta=1e-5).epsilon
    with pytest.raises(BudgetExceeded):  # not even one step fits
        fit(make(max_epsilon=1e-3, on_budget="stop", noise_source=NoNoise()), tmp_path / "other")


def test_two_trainings_share_one_ledger(tmp_path):
    ledger = tmp_path / "shared.sqlite"
    first = make(ledger_path=ledger)
    fit(first, tmp_path / "a")
    alone = first.epsilon
    second = make(ledger_path=ledger)
    fit(second, tmp_path / "b")
    both = account([Charge(step_mechanism(1.0, 1.0, 30 / PRIVATE), 12)], delta=1e-5).epsilon
    assert alone < second.epsilon == pytest.approx(both)


def test_learning_rate_is_lowered_by_public_noise_alone(tmp_path):
    assert quiet_lr(8.0, None, 1e9, 100, 1) == 8.0
    assert quiet_lr(8.0, 0.1, 0.5, 100, 1000) == 8.0
    assert quiet_lr(8.0, 0.1, 20.0, 100, 1000) == pytest.approx(4.0)
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(make(lr=2.0, noise_limit=0.01, scheduler="linear"), tmp_path, callbacks=[Rates()])
    peak = 2.0 * 0.01 / (1.0 * math.sqrt(6) / 30)
    assert rates == pytest.approx([peak * left / 6 for left in range(6, 0, -1)])


# ---------------------------------------------------------------------- interruption


def keep_last(folder):
    return ModelCheckpoint(
        dirpath=folder / "ckpt", filename="last", enable_version_counter=False, save_on_train_epoch_end=True
    )


def test_resume_keeps_epsilon_exact_and_never_spends_less_than_was_drawn(tmp_path, monkeypatch):
    drawn, original = [], Gaussian.add_noise

    def add_noise(self, values, noise):
        drawn.append(self)
        if len(drawn) == 8:  # in the third of five epochs, of three steps each
            raise OSError("power cut")
        return original(self, values, noise)

    monkeypatch.setattr(Gaussian, "add_noise", add_noise)
    with pytest.raises(OSError, match="power cut"):
        fit(make(steps_per_charge=2), tmp_path, 5, callbacks=[keep_last(tmp_path)])
    assert sum(count for _, count in charged(tmp_path)) == 8
    module = make(steps_per_charge=2)
    trainer = fit(
        module, tmp_path, 5, callbacks=[keep_last(tmp_path)], ckpt_path=tmp_path / "ckpt" / "last.ckpt"
    )
    plan = account([Charge(step_mechanism(1.0, 1.0, 30 / PRIVATE), 15)], delta=1e-5).epsilon
    assert module.epsilon == pytest.approx(plan)
    # Two steps were lost with the third epoch: six are in the checkpoint, eight were paid, seven are left.
    assert len(drawn) == 8 + 7
    assert sum(count for _, count in charged(tmp_path)) == 15
    assert trainer.global_step == 6 + 7
    assert module.epsilon_spent == pytest.approx(plan)
    # A further start finds nothing left and draws nothing.
    fit(make(steps_per_charge=2), tmp_path, 5, ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert len(drawn) == 15
    with pytest.raises(ValueError, match="no checkpoint continues it"):
        fit(make(steps_per_charge=2), tmp_path, 5)
    assert len(drawn) == 15


def test_killed_process_forgets_nothing(tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import test_noisy_sgd as t
        folder = Path(sys.argv[1])
        class Dying(t.SeededNoise):
            def stream(self, *key):
                child = t.SeededNoise.stream(self, *key)
                child.__class__ = Dying
                return child
            def normal(self, shape, scale):
                with open(folder / "drawn", "a") as file:
                    file.write("x")
                    file.flush()
                    os.fsync(file.fileno())
                if sys.argv[3] == "die" and (folder / "drawn").stat().st_size == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().normal(shape, scale)
        last = folder / "ckpt" / "last.ckpt"
        module = t.make(steps_per_charge=2, noise_source=Dying(0))
        t.fit(module, folder, 3, callbacks=[t.keep_last(folder)], ckpt_path=last if last.exists() else None)
    """
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), here]
    assert subprocess.run([*command, "die"], capture_output=True, check=False).returncode == -signal.SIGKILL
    assert sum(count for _, count in charged(tmp_path)) == 6  # the fifth step is the first of the third pair
    ended = subprocess.run([*command, "go on"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    ((mechanism, count),) = charged(tmp_path)
    assert count == 9 >= (tmp_path / "drawn").stat().st_size == 5 + 3
    report = Ledger.open_readonly(tmp_path / "ledger.sqlite").report()
    assert report.epsilon == pytest.approx(account([Charge(mechanism, 9)], delta=1e-5).epsilon)


@pytest.mark.parametrize(
    "changed",
    [{"noise_multiplier": 2.0}, {"batch_size": 20}, {"clip_norm": 2.0}, {"delta": 1e-6}, {"epochs": 4}],
)
def test_other_privacy_parameters_on_resume_are_refused(tmp_path, changed):
    fit(make(), tmp_path, 2, callbacks=[keep_last(tmp_path)])
    epochs = changed.pop("epochs", 3)
    with pytest.raises(ValueError, match="other parameters"):
        fit(make(**changed), tmp_path, epochs, ckpt_path=tmp_path / "ckpt" / "last.ckpt")


def test_a_missing_or_older_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    copies = []

    class Copy(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            copies.append(path.read_bytes())

    fit(make(), tmp_path, callbacks=[keep_last(tmp_path), Copy()])
    resume = {"ckpt_path": tmp_path / "ckpt" / "last.ckpt"}
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="ledger"):
        fit(make(), tmp_path, **resume)
    path.write_bytes(copies[0])
    with pytest.raises(ValueError, match="older copy"):
        fit(make(), tmp_path, **resume)


# ---------------------------------------------------------------------- trainer, data, privacy of the rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"gradient_clip_val": 1.0}, "clip_norm"),
        ({"overfit_batches": 1}, "overfit_batches"),
        ({"max_epochs": -1}, "max_epochs"),
    ],
)
def test_trainers_that_break_the_accounting_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        fit(make(noise_source=NoNoise()), tmp_path, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": None}, "exactly one"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "exactly one"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"clipping": "per_layer"}, "clipping"),
        ({"on_budget": "ignore"}, "on_budget"),
        ({"components": 65}, "components"),
        ({"head": "deep"}, "head"),
        ({"mean": [0.5]}, "std"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_batches_larger_than_the_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size=91"):
        fit(make(batch_size=91), tmp_path)


def test_module_can_be_fitted_twice_and_leaves_the_data_module_public(tmp_path):
    module, data = make(extractor=False), make_data()
    fit(module, tmp_path / "a", data=data)
    keys = set(module.state_dict())
    fit(module, tmp_path / "b", data=data)  # hooks twice would be an error
    assert set(module.state_dict()) == keys
    assert not any("grad_sample" in vars(p) for p in module.parameters())
    data.public.set_labels(slice(None), data.public.truth)
    batch = next(iter(data.train_dataloader()))[0]
    assert set(batch) == {"labeled", "unlabeled"}

    class Stop(pl.Callback):
        def on_train_batch_end(self, *_):
            raise OSError("stop")

    with pytest.raises(OSError, match="stop"):  # hooks left behind by an error are no obstacle either
        fit(module, tmp_path / "c", data=data, callbacks=[Stop()])
    fit(module, tmp_path / "d", data=data)


def test_fast_dev_run_touches_no_private_record(tmp_path):
    class Sealed(ArraysDataModule):
        @property
        def private(self):
            raise AssertionError("a private record was read")

    for extractor in (True, False):
        fit(
            make(extractor=extractor, noise_source=NoNoise()),
            tmp_path,
            data=make_data(Sealed),
            fast_dev_run=True,
        )
    assert not list(tmp_path.glob("*.sqlite"))


@pytest.mark.parametrize("extractor", [True, False])
def test_checkpoints_and_logs_hold_nothing_private(tmp_path, extractor):
    data = make_data()
    callback = keep_last(tmp_path)
    names = set()

    class Names(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            names.update(trainer.callback_metrics)

        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            names.update(trainer.callback_metrics)

    module = make(extractor=extractor)
    trainer = fit(module, tmp_path, data=data, callbacks=[callback, Names()])
    assert names | set(trainer.callback_metrics) == {
        "val/accuracy", "val/loss", "privacy/epsilon", "privacy/epsilon_spent", "privacy/delta",
    }  # fmt: skip
    saved = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=False)
    everything = []

    def walk(value):
        if isinstance(value, torch.Tensor):
            everything.append(value)
        elif isinstance(value, dict):
            for item in [*value.keys(), *value.values()]:
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        else:
            assert value is None or isinstance(value, str | int | float | bool), type(value)

    walk(saved)
    assert all(PRIVATE not in tensor.shape for tensor in everything)
    raw = (tmp_path / "ckpt" / "last.ckpt").read_bytes()
    data.setup("fit")
    with torch.no_grad():
        vectors = module.inputs(data.private.images())
    for rows in (data.private.images().flatten(1), vectors.flatten(1)):
        assert not any(row.numpy().tobytes()[:32] in raw for row in rows)
    assert "noisy_sgd" in saved


def test_module_loads_from_its_checkpoint(tmp_path):
    module, data = make(components=5, head="mlp", hidden_size=8), make_data()
    fit(module, tmp_path, data=data, callbacks=[keep_last(tmp_path)])
    loaded = NoisySGD.load_from_checkpoint(tmp_path / "ckpt" / "last.ckpt", extractor=Flat())
    module.eval(), loaded.eval()
    torch.testing.assert_close(loaded(data.test.images()), module(data.test.images()))


def test_whitening_is_learned_from_public_features_and_works_row_by_row():
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(300, 6, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.1]) + 4
    change = PublicWhitening(6, 3, power=1.0).fit(public)
    centred = (public - public.mean(dim=0)).double()
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    projected = centred @ directions[:3].T / (values[:3] / math.sqrt(300))
    cosine = F.cosine_similarity(change(public).double().abs(), projected.abs(), dim=1)
    assert float(cosine.min()) > 1 - 1e-5
    others = torch.randn(5, 6, generator=generator)
    torch.testing.assert_close(change(others)[2:3], change(others[2:3]))
    torch.testing.assert_close(change(others).norm(dim=1), torch.ones(5))
    with pytest.raises(ValueError, match="components=3"):
        PublicWhitening(6, 3).fit(public[:2])
    with pytest.raises(RuntimeError, match="fit"):
        PublicWhitening(6)(public)


def test_features_are_normalised_by_public_images_only(tmp_path):
    means = []
    for shift in (0.0, 0.3):
        data = make_data()
        data.setup("fit")
        data._private.store._images.add_(shift)
        module = make(components=4)
        fit(module, tmp_path / str(shift), epochs=1, data=data, limit_train_batches=1)
        means.append(module.whitening.mean.clone())
    torch.testing.assert_close(means[0], means[1], rtol=0, atol=0)


def test_it_learns(tmp_path):
    module, data = make(target_epsilon=8.0, batch_size=45, clip_norm=0.5, lr=4.0, components=4), make_data()
    trainer = fit(module, tmp_path, epochs=20, data=data)
    assert (
        trainer.test(module, data, verbose=False)[0]["test/accuracy"] >= 0.9
    )  # with seeded noise; 0.5 is chance


def test_command_line_and_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "--model", "NoisySGD", "--model.network", "tanh_cnn", "--model.batch_size", "250",
        "--model.target_epsilon", "2", "--model.delta", "1e-4", "--data", "DigitsDataModule", "--run_dir", "run",
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "2",
        "--trainer.enable_model_summary", "false",
    ]  # fmt: skip
    assert main(["fit", *words]) == 0
    assert "noisy steps" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1.98 < summary["epsilon"] <= 2
    assert (summary["delta"], summary["adjacency"], summary["guarantee"]) == (
        1e-4,
        "add_remove",
        "unconditional",
    )
    assert summary["steps"] == 8
    assert 0 <= summary["test_accuracy"] <= 1
    assert main(["audit", "run/ledger.sqlite", "--delta", "1e-4", "--json"]) == 0
    audited = json.loads(capsys.readouterr().out)
    assert audited["head"] == summary["ledger_head"]
    assert audited["epsilon"] == pytest.approx(summary["epsilon"])
    # A finished run costs nothing more, and other parameters are an error, not a silent change.
    assert main(["fit", "--resume", "run"]) == 0
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["ledger_head"] == summary["ledger_head"]
    )
    with pytest.raises(ValueError, match=r"target_epsilon=2\.0 then, 3\.0 now"):
        main(["fit", "--resume", "run", "--model.target_epsilon", "3"])
