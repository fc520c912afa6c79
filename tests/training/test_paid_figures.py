"""What private training releases beside gradients: the clipping norm's counts, and an accuracy; both are paid for."""

import math

import pytest
import pytorch_lightning as pl
import torch
from forked import in_group
from ledger_setup import needs_fork
from noisy_sgd_setup import PRIVATE, NoNoise, charged, keep_last, make_data
from torch.nn import functional as F
from training_setup import Lit, Silent, fit, training

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, DiscreteGaussian, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.training import AdaptiveClipping, PaidAccuracy
from pl_privknn.training.adaptive_clipping import MovingNorm


def adaptive(**kwargs):
    options = {"expected_batch_size": PRIVATE, "noise_source": Silent(0), "max_grad_norm": 0.05}
    return training(**{**options, **kwargs}, adaptive_clipping=AdaptiveClipping(0.4, 0.5, 0.1))


def literal(module, data, steps, norm):
    """Gradient descent on all records by a loop, the norm moved by the true share; all norms, and the weights."""
    data.setup("fit")
    norms = []
    for _ in range(steps):
        total, below = 0, 0
        for x, y in data.private:
            module.zero_grad()
            F.cross_entropy(module(x[None]), torch.tensor([y])).backward()
            gradient = torch.cat([p.grad.flatten() for p in module.parameters()]).double()
            total = total + gradient * min(1.0, norm / float(gradient.norm()))
            below += float(gradient.norm()) <= norm
        norms.append(norm)
        norm *= math.exp(-0.5 * (below / PRIVATE - 0.4))
        with torch.no_grad():
            flat = torch.nn.utils.parameters_to_vector(module.parameters())
            flat = flat - module.lr * total / PRIVATE
            torch.nn.utils.vector_to_parameters(flat.float(), module.parameters())
    return [*norms[1:], norm], flat


class Norms(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(float(trainer.callback_metrics["privacy/max_grad_norm"]))


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_the_norm_moves_as_the_paper_says_and_the_update_is_clipped_to_it(tmp_path, method):
    norms, weights = literal(Lit(), make_data(), 6, 0.05)
    assert norms[-1] > 0.055  # it does move
    module, seen = Lit(), Norms()
    fit(module, tmp_path, adaptive(clipping=method, physical_batch_size=7), 6, callbacks=[seen])
    assert seen.seen == pytest.approx(norms, rel=1e-5)
    made = torch.nn.utils.parameters_to_vector(module.parameters())
    torch.testing.assert_close(made.double(), weights, rtol=1e-3, atol=1e-5)


def test_sum_and_count_of_one_record_are_no_longer_than_what_is_charged():
    generator = torch.Generator().manual_seed(0)
    for share in (0.01, 0.1, 0.9):
        for value in (0.01, 1.0, 30.0):
            norm = MovingNorm(AdaptiveClipping(count_share=share), value, 0.3, 1.0, 100)
            for length in (0.2 * value, value, 5 * value):
                gradient = torch.randn(20, generator=generator, dtype=torch.float64)
                gradient *= length / gradient.norm()
                clipped = gradient * min(1.0, value / length)
                moved = norm.joined(clipped, torch.tensor([length])) - norm.joined(
                    0 * clipped, torch.zeros(0)
                )
                assert float(moved.norm()) <= 0.3 * (1 + 1e-12)
            assert float(moved.norm()) == pytest.approx(0.3)  # the charge is not for more than there is


def test_gradients_and_count_have_the_noise_that_the_charge_pays_for():
    norm = MovingNorm(AdaptiveClipping(0.5, 1.0, count_share=0.2), 0.1, 1.0, 2.0, 50)
    mechanism, source = Gaussian(2.0, 1.0, 0.5), SeededNoise(3)
    gradients, moves = [], []
    for _ in range(400):
        before = norm.value
        noisy = (
            mechanism.add_noise(norm.joined(torch.zeros(50, dtype=torch.float64), torch.zeros(0)), source)
            / 50
        )
        gradients.append(norm.parted(noisy) * 50 / before)
        moves.append(-math.log(norm.value / before))
        norm.value = 0.1
    # Deviations of 20,000 and of 400 normal draws: 5 standard errors are 2.5% and 18%.
    assert float(torch.cat(gradients).std()) == pytest.approx(2.0 / 0.8**0.5, rel=0.025)
    assert float(torch.tensor(moves).std()) == pytest.approx(2.0 / (2 * 0.2**0.5) / 50, rel=0.18)


def test_adaptive_clipping_costs_one_release_a_step_and_a_resume_keeps_the_norm(tmp_path, monkeypatch):
    original, drawn = Gaussian.add_noise, []

    def add_noise(self, values, noise):
        drawn.append(self)
        if len(drawn) == 5:
            raise OSError("power cut")
        return original(self, values, noise)

    monkeypatch.setattr(Gaussian, "add_noise", add_noise)
    options = {"expected_batch_size": 30, "noise_source": SeededNoise(0), "steps_per_charge": 1}
    with pytest.raises(OSError, match="power cut"):
        fit(Lit(), tmp_path, adaptive(**options), 3, callbacks=[keep_last(tmp_path)])
    last = tmp_path / "ckpt" / "last.ckpt"
    reached = torch.load(last, weights_only=True)["private_training_norm"]
    first = []

    class First(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            first.append(callback._norm.value)

    callback = adaptive(**options)
    fit(Lit(), tmp_path, callback, 3, callbacks=[First()], ckpt_path=last)
    assert first == [reached] != [0.05]
    ((mechanism, count),) = charged(tmp_path)
    assert (mechanism, count) == (Gaussian(0.05, 0.05, 30 / PRIVATE), 9)
    assert callback.epsilon == account([Charge(mechanism, 9)], delta=1e-5).epsilon


class Counts(pl.Callback):
    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, *_):
        if "private/accuracy" in trainer.callback_metrics:
            self.seen[trainer.global_step] = float(trainer.callback_metrics["private/accuracy"])


class Quiet(Silent):
    def stream(self, *key):
        child = super().stream(*key)
        child.__class__ = Quiet
        return child

    def discrete_gaussian(self, shape, sigma):
        return torch.zeros(shape, dtype=torch.int64)


def test_an_accuracy_is_that_of_the_records_at_its_step_and_has_its_own_charge(tmp_path):
    chosen, seen = PaidAccuracy(every_n_steps=4, noise=3.0), Counts()
    module = Lit()
    callback, _ = fit(module, tmp_path, training(noise_source=Quiet(0), accuracy=chosen), 4, callbacks=[seen])
    assert min(seen.seen) == 4
    data = make_data()
    data.setup("fit")
    images, labels = next(data.private_batches())
    module.eval()
    right = float((module(images).argmax(dim=1) == labels).float().mean())
    assert seen.seen[12] == pytest.approx(right)  # of twelve steps, of which each third is followed by one
    assert module.accuracy.update_count == 0
    expected = {Gaussian(1.0, 1.0, 1 / 3): 12, DiscreteGaussian(3.0, 1.0, 1.0): 3}
    found = {}
    for mechanism, count in charged(tmp_path):
        found[mechanism] = found.get(mechanism, 0) + count
    assert found == expected
    whole = account([Charge(mechanism, count) for mechanism, count in expected.items()], delta=1e-5).epsilon
    assert callback.epsilon == callback.epsilon_spent == whole
    assert whole > account([Charge(Gaussian(1.0, 1.0, 1 / 3), 12)], delta=1e-5).epsilon


def test_epsilon_is_for_steps_and_accuracies_together(tmp_path):
    chosen = PaidAccuracy(every_n_steps=3, noise=8.0, sampling_rate=0.5)
    callback, _ = fit(Lit(), tmp_path, training(epsilon=2.0, accuracy=chosen), 3)
    assert 1.98 < callback.epsilon <= 2.0
    (steps, _), (counts, _) = sorted(charged(tmp_path), key=lambda pair: -pair[1])
    assert counts == chosen.mechanism
    assert callback.noise_for(9) == pytest.approx(steps.sigma)
    assert steps.sigma > training(epsilon=2.0).noise_for(9)
    with pytest.raises(BudgetExceeded):
        fit(Lit(), tmp_path / "small", training(epsilon=0.05, noise_multiplier=20.0, accuracy=chosen), 3)
    assert not list((tmp_path / "small").rglob("private_training.json"))


@needs_fork
def test_two_processes_count_each_record_once(tmp_path):
    def one(rank):
        torch.set_num_threads(1)
        seen = Counts()
        callback = adaptive(noise_source=Quiet(0))
        callback.session.accuracy = PaidAccuracy(every_n_steps=2, noise=3.0)
        module = Lit()
        fit(module, tmp_path, callback, 4, callbacks=[seen], devices=2, strategy="ddp")
        data = make_data()
        data.setup("fit")
        images, labels = next(data.private_batches())
        right = float((module(images).argmax(dim=1) == labels).float().mean())
        assert seen.seen[4] == pytest.approx(right)
        assert callback._norm.value == pytest.approx(literal(Lit(), data, 4, 0.05)[0][-1], rel=1e-5)
        assert callback.epsilon_spent == callback.epsilon > 0

    assert in_group(2, one) == [0, 0]
    assert charged(tmp_path)[-1] == (DiscreteGaussian(3.0, 1.0, 1.0), 2)


class Mixing(Lit):
    def forward(self, x):
        logits = super().forward(x)
        return logits if self.training else logits - logits.mean(dim=0)


class Halved(Lit):
    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x)[:, :1]


@pytest.mark.parametrize(
    ("module", "message"),
    [(Mixing, "in evaluation mixes the examples"), (Halved, "gives no logits of shape")],
)
def test_predictions_that_are_no_record_s_own_are_refused_before_a_charge(tmp_path, module, message):
    with pytest.raises(ValueError, match=message):
        fit(module(), tmp_path, training(accuracy=PaidAccuracy(), noise_source=NoNoise()))
    assert not list(tmp_path.rglob("*.sqlite"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: AdaptiveClipping(quantile=1.0), r"quantile=1\.0"),
        (lambda: AdaptiveClipping(learning_rate=0.0), r"learning_rate=0\.0"),
        (lambda: AdaptiveClipping(count_share=1.0), r"count_share=1\.0"),
        (lambda: PaidAccuracy(every_n_steps=0), "every_n_steps=0"),
        (lambda: PaidAccuracy(noise=0.0), r"noise=0\.0"),
        (lambda: PaidAccuracy(sampling_rate=2.0), r"sampling_rate=2\.0"),
        (
            lambda: training(clipping="per_layer", adaptive_clipping=AdaptiveClipping()),
            "adaptive_clipping: it moves",
        ),
    ],
)
def test_bad_arguments_are_named(made, message):
    with pytest.raises(ValueError, match=message):
        made()
