"""The person as the unit of a private training: coins, mean gradients, sums that one person moves, and the ledger."""

import pytest
import torch
from torch.nn import functional as F

from pl_privknn.labelers.noisy_sgd import clipped_softmax_gradients
from pl_privknn.privacy.mechanisms.steps import poisson_persons
from pl_privknn.privacy.noise import SeededNoise
from tests.training.noisy_sgd_setup import PRIVATE, make, make_data, with_private
from tests.training.training_setup import Lit, Silent, clipped_gradient, fit, training, weights

# One person has 40 records, others one to five.
OWNERS = torch.cat([torch.full((40,), 7), torch.arange(PRIVATE - 40) // 5 * 3, torch.tensor([])]).long()
OWNERS = OWNERS[torch.randperm(PRIVATE, generator=torch.Generator().manual_seed(1))]
EVERYBODY = {"expected_batch_size": 11, "private_records": 11, "noise_source": Silent(0), "unit": "person"}
NORM = 0.05


def data_of(owners=OWNERS, without=None):
    data = make_data()
    if without is not None:
        stays = torch.nonzero(owners != without).flatten()
        data = with_private(data, stays)
        owners = owners[stays]
    data.private_groups = owners
    return data


def moved(module):
    """What a step of plain SGD subtracted from the weights of :class:`Lit`, times what sums are divided by."""
    return (weights(Lit()) - weights(module)).double() * 11 / module.lr


def literal(data, most, norm):
    """Each person's mean gradient over all records, clipped by itself, and how far each is."""
    module, total = Lit(), 0
    data.setup("fit")
    for person in OWNERS.unique():
        rows = torch.nonzero(person == OWNERS).flatten()
        assert len(rows) <= most
        total = total + clipped_gradient(module, data.private.images(rows), data.private.labels[rows], norm)
    return total


def test_a_step_sums_the_clipped_mean_gradients_of_persons(tmp_path):
    module, norm = Lit(), 0.72  # half of the mean gradients are shorter
    callback = training(max_grad_norm=norm, records_per_person=40, **EVERYBODY)
    fit(module, tmp_path, callback, epochs=1, data=data_of())
    torch.testing.assert_close(moved(module), literal(make_data(), 40, norm), rtol=1e-4, atol=1e-5)
    assert callback.privacy_summary()["unit"] == "person"
    assert callback.ledger.budget.unit == "person"


@pytest.mark.parametrize("gone", [7, 0])
def test_a_person_moves_the_sum_by_the_norm_at_most(tmp_path, gone):
    sums = []
    for place, without in enumerate((None, gone)):
        module = Lit()
        callback = training(max_grad_norm=NORM, records_per_person=40, **EVERYBODY)
        fit(module, tmp_path / str(place), callback, epochs=1, data=data_of(without=without))
        sums.append(moved(module))
    # Weights are in single precision.
    assert 0.5 * NORM < float((sums[0] - sums[1]).norm()) <= NORM * (1 + 1e-4)


@pytest.mark.parametrize("most", [1, 3])
def test_coins_are_of_persons_and_records_of_a_drawn_person_are_drawn_evenly(most):
    counts, persons = torch.zeros(PRIVATE), []
    for seed in range(2000):
        rows = poisson_persons(OWNERS, 0.3, most, SeededNoise(seed))
        numbers, sizes = OWNERS[rows].unique_consecutive(return_counts=True)
        assert len(numbers.unique()) == len(numbers)
        owned = torch.tensor([int((one == OWNERS).sum()) for one in numbers])
        assert torch.equal(sizes, owned.clamp(max=most))
        counts[rows] += 1
        persons.append(len(numbers))
    # 3.3 persons expected; five standard errors, a false alarm in 1.7 million.
    everybody = len(OWNERS.unique())
    assert abs(sum(persons) / 2000 - 0.3 * everybody) < 5 * (0.21 * everybody / 2000) ** 0.5
    large = counts[OWNERS == 7]
    mean = 2000 * 0.3 * most / 40
    assert float((large - mean).abs().max()) < 5 * mean**0.5


def test_the_teachers_sum_is_that_of_literal_mean_gradients():
    generator = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(PRIVATE, 6, generator=generator), torch.arange(PRIVATE) % 3
    weights = torch.randn(3, 7, generator=generator)
    order = OWNERS.argsort(stable=True)
    inputs = F.pad(vectors, (0, 1), value=1.0)
    found = clipped_softmax_gradients(weights, inputs[order], labels[order], 0.1, OWNERS[order]).view(3, 7)
    total = torch.zeros(3, 7, dtype=torch.float64)
    for person in OWNERS.unique():
        mine, own = person == OWNERS, weights.clone().requires_grad_()
        logits = F.pad(vectors[mine], (0, 1), value=1.0) @ own.T
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels[mine]), own)
        total += gradient.double() * min(1.0, 0.1 / float(gradient.norm()))
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)


def test_a_network_trains_by_persons_with_the_layers_of_its_fast_path(tmp_path):
    rates = {
        "unit": "person", "expected_batch_size": 4, "private_records": 11, "epsilon": 2.0, "delta": 1e-3,
    }  # fmt: skip
    module = make(extractor=False, **rates)
    fit(module, tmp_path, module.private_training, epochs=1, data=data_of())
    assert module.private_training.privacy_summary()["unit"] == "person"
    assert 0 < module.epsilon <= 2.0


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        (None, "private records have no owners"),
        (OWNERS - 1, "have no owner"),
        (OWNERS[:-1], "expected int64, one number"),
    ],
)
def test_what_has_no_owner_is_refused_before_anything_is_drawn(tmp_path, owners, said):
    with pytest.raises(ValueError, match=said):
        fit(Lit(), tmp_path, training(**EVERYBODY), epochs=1, data=data_of(owners))
    assert not (tmp_path / "run.sqlite").exists()
