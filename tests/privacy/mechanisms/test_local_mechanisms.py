"""Local and shuffled mechanisms, against enumeration and other accountants."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.mechanisms import (
    Charge,
    ExponentialArgmax,
    Laplace,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)
from pl_privknn.privacy.noise import SeededNoise
from tests.privacy.mechanisms.mechanism_setup import ADD_REMOVE, deltas_of, literal_rdp
from tests.privacy.mechanisms.mechanism_setup import FEW_ORDERS as ORDERS

EPS = np.linspace(0, 2, 21)


def hockey_stick(p, q, eps=EPS):
    return np.maximum(p.ravel() - np.exp(eps)[:, None] * q.ravel(), 0).sum(1)


def deltas(mechanism, step=2.0**-13):
    made = mechanism.pld(ADD_REMOVE, step)
    return deltas_of(made._pmf_remove, EPS), deltas_of(made._pmf_add, EPS)


@pytest.mark.parametrize("values", [2, 10])
def test_randomized_response_equals_enumeration(values):
    mechanism = RandomizedResponse(0.3, values)
    p = np.full(values, 0.3 / (values - 1))
    q = p.copy()
    p[0], q[1] = 0.7, 0.7
    np.testing.assert_allclose(deltas(mechanism)[0], hockey_stick(p, q), atol=2e-4)
    np.testing.assert_allclose(mechanism.rdp(ORDERS, ADD_REMOVE), literal_rdp(p, q, ORDERS), rtol=1e-9)


def test_randomized_bits_add_up():
    mechanism = RandomizedResponse.for_epsilon(1.2, differing=3)
    assert mechanism.flip_probability == pytest.approx(1 / (math.exp(0.4) + 1))
    assert mechanism.pure_epsilon(ADD_REMOVE) == pytest.approx(1.2)
    one = np.array([1 - mechanism.flip_probability, mechanism.flip_probability])
    p, q = (np.einsum("i,j,k->ijk", *[coin] * 3).ravel() for coin in (one, one[::-1]))
    np.testing.assert_allclose(mechanism.rdp(ORDERS, ADD_REMOVE), literal_rdp(p, q, ORDERS), rtol=1e-9)
    np.testing.assert_allclose(deltas(mechanism)[0], hockey_stick(p, q), atol=2e-4)


@pytest.mark.parametrize("values", [2, 4])
def test_randomized_values_have_the_accounted_frequencies(values):
    mechanism = RandomizedResponse(0.3, values)
    sent = torch.ones(20_000, dtype=torch.uint8)
    seen = mechanism.randomize(sent, SeededNoise(5))
    assert seen.dtype == torch.uint8
    assert bool((sent == 1).all())
    counts = torch.bincount(seen.long(), minlength=values).numpy()
    expected = np.full(values, 0.3 / (values - 1))
    expected[1] = 0.7
    assert stats.chisquare(counts, 20_000 * expected).pvalue > 1e-4


def test_pure_dp_dominates_other_releases_of_that_epsilon():
    eps = 0.8
    pure = deltas(PureDP(eps))[0]
    np.testing.assert_allclose(
        pure, np.maximum(math.exp(eps) - np.exp(EPS), 0) / (1 + math.exp(eps)), atol=2e-4
    )
    for other in (Laplace(1 / eps), ExponentialArgmax(1 / eps, "add")):
        assert np.all(deltas(other)[0] <= pure + 1e-4)
    sampled = PureDP(eps, 0.25)
    assert sampled.pure_epsilon(ADD_REMOVE) == pytest.approx(math.log1p(0.25 * math.expm1(eps)))


def test_shuffling_equals_enumeration_of_the_clones():
    local, clients = 1.3, 12
    clone, true_bit = math.exp(-local), 1 / (1 + math.exp(-local))
    p, q = np.zeros((clients + 1, clients + 1)), np.zeros((clients + 1, clients + 1))
    for c in range(clients):
        for a in range(c + 1):
            mass = stats.binom.pmf(c, clients - 1, clone) * stats.binom.pmf(a, c, 0.5)
            p[a + 1, c - a] += mass * true_bit
            p[a, c - a + 1] += mass * (1 - true_bit)
            q[a, c - a + 1] += mass * true_bit
            q[a + 1, c - a] += mass * (1 - true_bit)
    exact = hockey_stick(p, q)
    ours = deltas(ShuffleAmplification(local, clients))[0]
    assert np.all(ours >= exact - 1e-12)
    np.testing.assert_allclose(ours, exact, atol=1e-4)
    used = p > 0
    np.testing.assert_allclose(
        ShuffleAmplification(local, clients).rdp(ORDERS, ADD_REMOVE),
        literal_rdp(p[used], q[used], ORDERS),
        rtol=1e-3,
    )


def test_shuffled_randomized_response_costs_no_more_than_accounted():
    # n clients, binary randomised response: the shuffled messages are a count. The others all hold 0.
    local, clients = 1.0, 60
    flip = 1 / (math.exp(local) + 1)
    others = stats.binom.pmf(np.arange(clients + 1), clients - 1, flip)
    moved = np.append(0, others[:-1])
    p, q = (1 - flip) * moved + flip * others, flip * moved + (1 - flip) * others
    ours = deltas(ShuffleAmplification(local, clients))[0]
    for upper, lower in ((p, q), (q, p)):
        assert np.all(ours >= hockey_stick(upper, lower) - 1e-12)


def test_shuffling_among_many_beats_its_closed_form():
    local, clients, delta = 4.0, 1_000_000, 1e-6
    inner = 8 * math.sqrt(math.exp(local) * math.log(4 / delta) / clients) + 8 * math.exp(local) / clients
    closed = math.log(1 + math.tanh(local / 2) * inner)  # Feldman, McMillan, Talwar 2021, Theorem 3.1
    found = epsilon_for_delta([Charge(ShuffleAmplification(local, clients))], delta)
    assert 0.1 * closed < found < closed < local
