"""A private linear model as a teacher: its gradients, its training, what it pays and when."""

import dataclasses
import math

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch.nn import functional as F

from pl_privknn.callbacks import FullSelection
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import NoisySGDTeacher
from pl_privknn.labelers.noisy_sgd import clipped_softmax_gradients
from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.refusals import refusals
from tests.setup.scripted_noise import Quiet
from tests.setup.small_fit import fit_student


def table(n=300, d=6, classes=3, seed=0, apart=2.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return torch.randn(n, d, generator=generator) + apart * F.one_hot(labels, d), labels


def literal_sum(weights, vectors, labels, clip_norm, constant=1.0):
    total = torch.zeros_like(weights)
    for x, y in zip(vectors, labels, strict=True):
        w = weights.clone().requires_grad_()
        F.cross_entropy((w @ torch.cat([x, torch.full((1,), constant)]))[None], y[None]).backward()
        total += w.grad * min(1.0, clip_norm / float(w.grad.norm()))
    return total


@pytest.mark.parametrize("clip_norm", [0.05, 0.8])
def test_one_record_of_60_000_moves_the_sum_by_the_bound_at_most(clip_norm):
    # Gradients of one direction, whose sum is so large that float32 would round it by thousandths of the bound.
    vectors = 1 + 0.01 * torch.randn(60_000, 30, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(len(vectors), dtype=torch.int64)
    weights = 0.1 * torch.randn(10, 31, generator=torch.Generator().manual_seed(1))
    vectors = F.pad(vectors, (0, 1), value=1.0)
    whole = clipped_softmax_gradients(weights, vectors, labels, clip_norm)
    for row in (0, 8_191, 40_000):
        others = torch.arange(len(vectors)) != row
        rest = clipped_softmax_gradients(weights, vectors[others], labels[others], clip_norm)
        assert clip_norm * 0.999 < float((whole - rest).norm()) <= clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("clip_norm", [0.05, 0.8, 100.0])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_gradients_equal_a_loop_over_examples(clip_norm, count):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(4, 8, generator=generator)
    vectors, labels = torch.randn(count, 7, generator=generator), torch.arange(count) % 4
    literal = literal_sum(weights, vectors, labels, clip_norm)
    found = clipped_softmax_gradients(weights, F.pad(vectors, (0, 1), value=1.0), labels, clip_norm)
    torch.testing.assert_close(found.view(4, 8), torch.as_tensor(literal).double(), rtol=1e-3, atol=1e-5)


def test_a_record_that_is_not_finite_contributes_nothing():
    weights = torch.ones(2, 4)
    vectors, labels = torch.ones(3, 4), torch.tensor([0, 1, 0])
    broken = vectors.clone()
    broken[1] = 3e38  # finite, but its norm is not
    sound = clipped_softmax_gradients(weights, vectors[[0, 2]], labels[[0, 2]], 1.0)
    assert torch.equal(clipped_softmax_gradients(weights, broken, labels, 1.0), sound)


@pytest.mark.parametrize(("bias", "scheduler"), [(True, "cosine"), (False, "none")])
def test_without_noise_it_is_plain_gradient_descent(bias, scheduler):
    features, labels = table()
    queries, _ = table(40, seed=1)
    teacher = NoisySGDTeacher(
        sampling_rate=1.0,
        expected_batch_size=300,
        steps=12,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        noise_source=Quiet(),
        optimization={"lr": 3.0, "momentum": 0.8, "noise_limit": None, "scheduler": scheduler},
        model={"components": None, "soft": True, "bias": bias},
    )
    teacher.fit(PrivateRecords.of(features, labels, 3))
    assert teacher.head_state() is None
    release = teacher.label(queries, FreeLedger())

    # Centred by the queries and scaled to unit length, in the words of PublicWhitening's docstring.
    def change(x):
        x = x - queries.mean(dim=0)
        return x / x.norm(dim=1, keepdim=True)

    weights, velocity = torch.zeros(3, 7), torch.zeros(3, 7)
    for step in range(12):
        velocity = 0.8 * velocity + literal_sum(weights, change(features), labels, 0.5, float(bias)) / 300
        fall = 0.5 * (1 + math.cos(math.pi * step / 12)) if scheduler == "cosine" else 1.0
        weights = weights - 3.0 * fall * velocity
    scores = torch.cat([change(queries), torch.full((40, 1), float(bias))], dim=1) @ weights.T
    assert torch.allclose(release.probabilities, scores.softmax(dim=1), atol=1e-4)
    assert torch.equal(release.labels, scores.argmax(dim=1))
    # The head is the same model, in a teacher that has no table.
    head = NoisySGDTeacher(noise_multiplier=1.0, model={"components": None, "bias": bias}).head(
        teacher.head_state()
    )
    torch.testing.assert_close(head(queries).float(), release.probabilities)


def test_every_step_is_paid_before_its_noise_and_draws_from_its_own_stream():
    drawn, ledger = [], FreeLedger()

    class Watched(SeededNoise):
        def stream(self, *words):
            drawn.append((words, sum(row.count for row in ledger.rows)))
            return super().stream(*words)

    settings = {
        "steps": 23, "noise_multiplier": 2.0, "optimization": {"steps_per_charge": 10}, "model": {"components": None},
    }  # fmt: skip
    teacher = NoisySGDTeacher(**settings, noise_source=Watched(0))
    teacher.fit(PrivateRecords.of(*table(), 3))
    teacher.label(table(30, seed=1)[0], ledger)
    # Coins too; rows of 1, 2, 4, 8 and 8 steps.
    for kind in ("batches", "step"):
        assert [total for words, total in drawn if words[0] == kind] == [
            1,
            3,
            3,
            *[7] * 4,
            *[15] * 8,
            *[23] * 8,
        ]
    assert len({words for words, _ in drawn}) == len(drawn)
    assert [Charge(ledger.rows[0].mechanism, 23)] == teacher.plan(30, 30, 3)


@pytest.mark.long("0.5-0.02-40-2")
@pytest.mark.parametrize(("epsilon", "rate", "steps", "rounds"), [(1.0, 0.1, 50, 1), (0.5, 0.02, 40, 2)])
def test_target_is_met_and_agrees_with_opacus(epsilon, rate, steps, rounds):
    teacher = NoisySGDTeacher(sampling_rate=rate, steps=steps)
    teacher.take_budget(Budget(epsilon=epsilon), rounds)
    charges = teacher.plan(10, 10, 3, rounds=rounds)
    report = account(charges, delta=1e-5)
    assert 0.99 * epsilon < report.epsilon <= epsilon
    multiplier = teacher.mechanism.sigma / teacher.mechanism.l2_sensitivity
    opacus = RDPAccountant()
    opacus.history = [(multiplier, rate, steps * rounds)]
    assert report.epsilon_rdp == pytest.approx(opacus.get_epsilon(1e-5), rel=0.01)
    weaker = dataclasses.replace(teacher.mechanism, sigma=0.97 * teacher.mechanism.sigma)
    assert account([Charge(weaker, steps * rounds)], delta=1e-5).epsilon > epsilon


def test_a_round_trains_once_however_the_queries_are_batched(tmp_path):
    teacher = NoisySGDTeacher(
        budget=Budget(epsilon=2.0),
        sampling_rate=0.2,
        expected_batch_size=60,
        steps=30,
        noise_source=SeededNoise(0),
        optimization={"lr": 4.0},
        model={"components": 8},
    )
    callback, data = fit_student(
        tmp_path, teacher, 0.1, queries_per_round=60, query_batch_size=7, selection=FullSelection()
    )
    charged = Ledger.open_readonly(tmp_path / "run" / "run.sqlite").report().charged
    assert sum(charge.count for charge in charged) == 30
    assert callback.epsilon == callback.epsilon_spent <= 2.0
    assert bool((data.public.labels >= 0).all())
    assert callback.metrics["labels/accuracy"] > 0.9


def made(**given):
    return lambda: NoisySGDTeacher(**{"noise_multiplier": 1.0, **given})


test_bad_arguments_are_named = refusals(
    {
        "noise_multiplier=0": made(noise_multiplier=0.0),
        "sampling_rate=1.5": made(sampling_rate=1.5),
        "max_grad_norm=-1": made(max_grad_norm=-1.0),
        "momentum=1": made(optimization={"momentum": 1.0}),
        "steps=0": made(steps=0),
        "fit": lambda: made()().label(torch.zeros(2, 3), FreeLedger()),
    }
)
