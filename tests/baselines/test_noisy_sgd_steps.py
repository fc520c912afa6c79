"""Steps of noisy SGD: Poisson samples, the noise that is drawn, and what is written before it."""

import math

import pytest
import pytorch_lightning as pl
import torch
from noisy_sgd_setup import PRIVATE, charged, fit, make, make_data

from pl_privknn.baselines import NoisySGD
from pl_privknn.datamodules.formats.poisson_loader import PoissonBatches, PoissonTraining
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.privacy.noisy_steps import PaidSteps, poisson_sample, step_mechanism
from pl_privknn.testing import FreeLedger


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
    assert PoissonTraining(data.private, rate, lambda: SeededNoise(0)).steps_per_epoch == steps


def test_noise_has_the_charged_deviation_and_does_not_stack():
    mechanism = step_mechanism(1.7, 0.5, 0.1)
    assert (mechanism.sigma, mechanism.l2_sensitivity, mechanism.sampling_rate) == (1.7 * 0.5, 0.5, 0.1)
    counter, values = FreeLedger(start=1), torch.zeros(20000)
    steps = PaidSteps(counter, mechanism, steps=5, steps_per_charge=2)
    drawn = [steps.release(values, SeededNoise(2)) for _ in range(5)]
    assert not values.any()
    for noise in drawn:  # relative deviation of the sample deviation: 0.005
        assert float(noise.std()) == pytest.approx(0.85, rel=0.025)
        assert abs(float(noise.mean())) < 5 * 0.85 / math.sqrt(20000)
    correlations = torch.corrcoef(torch.stack(drawn)) - torch.eye(5)
    assert float(correlations.abs().max()) < 5 / math.sqrt(20000)
    assert [(row.mechanism, row.count) for row in counter.rows] == [
        (mechanism, 2),
        (mechanism, 2),
        (mechanism, 1),
    ]
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
            rates.append(trainer.train_dataloader.sampler.sampling_rate)

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
    assert NoisySGD(
        "tanh_cnn", budget={"noise_multiplier": 1.0}, batches={"sampling_rate": 0.1}
    ).noise_source.cryptographic
    assert isinstance(
        NoisySGD("tanh_cnn", budget={"noise_multiplier": 1.0}, batches={"sampling_rate": 0.1}).noise_source,
        SystemNoise,
    )
