"""Discrete, local and shuffled mechanisms against enumeration and other accountants."""

import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from mechanism_setup import ADD_REMOVE, deltas_of, literal_rdp
from mechanism_setup import FEW_ORDERS as ORDERS
from scipy import stats

from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.mechanisms import (
    Charge,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialArgmax,
    Laplace,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)
from pl_privknn.privacy.noise import SeededNoise

EPS = np.linspace(0, 2, 21)


def hockey_stick(p, q, eps=EPS):
    return np.maximum(p.ravel() - np.exp(eps)[:, None] * q.ravel(), 0).sum(1)


def deltas(mechanism, step=2.0**-13):
    made = mechanism.pld(ADD_REMOVE, step)
    return deltas_of(made._pmf_remove, EPS), deltas_of(made._pmf_add, EPS)


def discrete_gaussian_pmf(x, sigma):
    weights = np.exp(-(np.arange(-60, 61) ** 2) / (2 * sigma**2))
    return np.exp(-(x**2) / (2 * sigma**2)) / weights.sum()


# --- discrete noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "shift", "rate"), [(2.0, 1, 1.0), (3.0, 4, 1.0), (1.5, 2, 0.3)])
def test_discrete_laplace_equals_dp_accounting_and_enumeration(scale, shift, rate):
    mechanism, step = DiscreteLaplace(scale, shift, rate), 2.0**-10
    theirs = dp_pld.from_discrete_laplace_mechanism(
        1 / scale, shift, value_discretization_interval=step, sampling_prob=rate, use_connect_dots=True
    )
    for ours, other in zip(deltas(mechanism, step), (theirs._pmf_remove, theirs._pmf_add), strict=True):
        np.testing.assert_allclose(ours, deltas_of(other, EPS), atol=1e-10)
    x = np.arange(-150, 151)
    q, p = stats.dlaplace.pmf(x, 1 / scale), stats.dlaplace.pmf(x - shift, 1 / scale)
    np.testing.assert_allclose(
        mechanism.rdp(ORDERS, ADD_REMOVE), literal_rdp((1 - rate) * q + rate * p, q, ORDERS), rtol=1e-7
    )


def test_discrete_laplace_in_one_coordinate_dominates_a_split_shift():
    x = np.arange(-100, 101)
    q, p = stats.dlaplace.pmf(x, 1 / 3.0), stats.dlaplace.pmf(x - 1, 1 / 3.0)
    split = hockey_stick(np.outer(p, p), np.outer(q, q))
    assert np.all(deltas(DiscreteLaplace(3.0, 2))[0] >= split - 1e-12)
    assert split[0] > 0.1


@pytest.mark.parametrize("rate", [1.0, 0.2])
@pytest.mark.parametrize(
    ("square", "shift"), [(1, (1,)), (2, (1, 1)), (4, (2,)), (4, (1, 1, 1, 1)), (5, (2, 1)), (3, (1, 1))]
)
def test_discrete_gaussian_dominates_every_shift_closely(square, shift, rate):
    sigma = 3.4
    mechanism = DiscreteGaussian(sigma, math.sqrt(square), rate)
    # Distribution of Y = v·x by plain convolution; the loss depends on Y alone.
    y_q = np.ones(1)
    for part in shift:
        single = np.zeros(2 * 40 * part + 1)
        single[::part] = discrete_gaussian_pmf(np.arange(-40, 41), sigma)
        y_q = np.convolve(y_q, single)
    half, norm = len(y_q) // 2, sum(part * part for part in shift)
    y = np.arange(-half, half + 1)
    y_p = y_q * np.exp((2 * y - norm) / (2 * sigma**2))
    used = y_q > 1e-80
    p, q = ((1 - rate) * y_q + rate * y_p)[used], y_q[used]
    for ours, (upper, lower) in zip(deltas(mechanism), ((p, q), (q, p)), strict=True):
        member = hockey_stick(upper, lower)
        assert np.all(ours >= member - 1e-13)
        if norm == square:
            assert np.all(ours <= member * 1.1 + 1e-9)  # the envelope over coarser and finer lattices
    curve = mechanism.rdp(ORDERS[:3], ADD_REMOVE)
    literal = literal_rdp(p, q, ORDERS[:3])
    assert np.all(curve >= literal * (1 - 1e-9))
    if norm == square:
        np.testing.assert_allclose(curve, literal, rtol=1e-6)


def test_discrete_gaussian_with_little_noise_falls_back_to_its_rdp_bound():
    mechanism = DiscreteGaussian(1.0)
    y = np.arange(-30, 31)
    q, p = discrete_gaussian_pmf(y, 1.0), discrete_gaussian_pmf(y - 1, 1.0)
    assert np.all(deltas(mechanism)[0] >= hockey_stick(p, q))


@pytest.mark.parametrize("mechanism", [DiscreteGaussian(4.0), DiscreteLaplace(4.0)])
def test_discrete_noise_is_whole_and_leaves_the_values_alone(mechanism):
    values = torch.full((20_000,), 7)
    noisy = mechanism.add_noise(values, SeededNoise(1))
    assert noisy.dtype == torch.int64
    assert bool((values == 7).all())
    x = np.arange(-10, 11)
    pmf = (
        discrete_gaussian_pmf(x, 4.0)
        if mechanism.kind == "discrete_gaussian"
        else stats.dlaplace.pmf(x, 0.25)
    )
    counts = np.array([(noisy - 7 == value).sum().item() for value in x])
    rest = 20_000 - counts.sum()
    # Chi-square; p < 1e-4 would come up by chance once in 10,000 seeds.
    expected = 20_000 * np.append(pmf, 1 - pmf.sum())
    assert stats.chisquare(np.append(counts, rest), expected).pvalue > 1e-4
    with pytest.raises(ValueError, match="whole numbers"):
        mechanism.add_noise(values.float(), SeededNoise(1))


# --- local and shuffled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [2, 3, 10])
def test_randomized_response_equals_enumeration_and_dp_accounting(values):
    mechanism = RandomizedResponse(0.3, values)
    p = np.full(values, 0.3 / (values - 1))
    q = p.copy()
    p[0], q[1] = 0.7, 0.7
    np.testing.assert_allclose(deltas(mechanism)[0], hockey_stick(p, q), atol=2e-4)
    np.testing.assert_allclose(mechanism.rdp(ORDERS, ADD_REMOVE), literal_rdp(p, q, ORDERS), rtol=1e-9)
    # dp-accounting's parameter is the chance of a fresh uniform draw.
    theirs = dp_pld.from_randomized_response(
        0.3 * values / (values - 1), values, value_discretization_interval=1e-5
    )
    np.testing.assert_allclose(deltas(mechanism)[0], deltas_of(theirs, EPS), atol=2e-4)


def test_randomized_bits_add_up():
    mechanism = RandomizedResponse.for_epsilon(1.2, differing=3)
    assert mechanism.flip_probability == pytest.approx(1 / (math.exp(0.4) + 1))
    assert mechanism.pure_epsilon(ADD_REMOVE) == pytest.approx(1.2)
    flip = mechanism.flip_probability
    one_p, one_q = np.array([1 - flip, flip]), np.array([flip, 1 - flip])
    p, q = one_p, one_q
    for _ in range(2):
        p, q = np.outer(p, one_p).ravel(), np.outer(q, one_q).ravel()
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
    for other in (Laplace(1 / eps), DiscreteLaplace(1 / eps), ExponentialArgmax(1 / eps, "add")):
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


@pytest.mark.parametrize(("local", "clients"), [(1.0, 10_000), (4.0, 1_000_000)])
def test_shuffling_beats_its_closed_form(local, clients):
    mechanism, delta = ShuffleAmplification(local, clients), 1e-6
    closed = mechanism.closed_form_epsilon(delta)
    inner = 8 * math.sqrt(math.exp(local) * math.log(4 / delta) / clients) + 8 * math.exp(local) / clients
    ratio = (math.exp(local) - 1) / (math.exp(local) + 1)
    assert closed == pytest.approx(math.log(1 + ratio * inner))
    assert 0.1 * closed < epsilon_for_delta([Charge(mechanism)], delta) < closed < local
    assert ShuffleAmplification(local, 20).closed_form_epsilon(delta) == local
