"""Single releases: RDP curves, privacy loss distributions, records, and the noise that is really drawn."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from dp_accounting.rdp import rdp_privacy_accountant as dp_rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from pl_privknn.privacy import pld, rdp
from pl_privknn.privacy.mechanisms import (
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
)
from pl_privknn.privacy.noise import SeededNoise

ADD_REMOVE = "add_remove"
ORDERS = np.array([1.1, 1.5, 2.0, 2.7, 5.0, 16.0, 33.3, 128.0])

ALL = [
    Gaussian(sigma=3.0, l2_sensitivity=math.sqrt(2), sampling_rate=0.2),
    Gaussian(sigma=3.0),
    Laplace(scale=4.0, l1_sensitivity=2.0),
    Laplace(scale=4.0, sampling_rate=0.3),
    NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4),
    NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4, sampling_rate=0.2),
    ExponentialArgmax(scale=3.0, votes="add", sampling_rate=0.2),
    ExponentialArgmax(scale=3.0, votes="swap"),
]


def literal_rdp(p, q, orders):
    """Larger Rényi divergence of both directions, straight from the definition."""
    log_p, log_q = np.log(p), np.log(q)
    moments = [
        special.logsumexp(orders[:, None] * upper + (1 - orders[:, None]) * lower, axis=1)
        for upper, lower in ((log_p, log_q), (log_q, log_p))
    ]
    return np.maximum(*moments) / (orders - 1)


def hockey_stick(p, q, eps):
    return np.maximum(p[..., None, :] - np.exp(eps)[:, None] * q[..., None, :], 0).sum(-1)


# --- records -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_a_record_round_trips(mechanism):
    charge = Charge(mechanism, 7)
    record = charge.to_record()
    assert record["mechanism"] == mechanism.kind
    assert Charge.from_record(record) == charge


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"mechanism": "gaussian", "sigma": -1}, "sigma"),
        ({"mechanism": "gaussian", "sigma": float("nan")}, "sigma"),
        ({"mechanism": "gaussian", "sigma": 0}, "sigma"),
        ({"mechanism": "gaussian", "sigma": "25"}, "sigma"),
        ({"mechanism": "gaussian", "sigma": 1, "l2_sensitivity": 0}, "l2_sensitivity"),
        ({"mechanism": "gaussian", "sigma": 1, "sampling_rate": 0}, "sampling_rate"),
        ({"mechanism": "gaussian", "sigma": 1, "sampling_rate": 1.5}, "sampling_rate"),
        ({"mechanism": "gaussian", "sigma": 1, "sampling_rate": True}, "sampling_rate"),
        ({"mechanism": "gaussian", "sigma": 1, "count": 0}, "count"),
        ({"mechanism": "gaussian", "sigma": 1, "count": 1.5}, "count"),
        ({"mechanism": "gaussian", "sigma": 1, "sensitivity": 1}, "sensitivity"),
        ({"mechanism": "gaussian"}, "sigma"),
        ({"mechanism": "laplace", "scale": float("inf")}, "scale"),
        ({"mechanism": "unheard_of"}, "unheard_of"),
        ({"mechanism": ["gaussian"]}, "gaussian"),
        ({"sigma": 1}, "mechanism"),
        ("gaussian", "mechanism"),
        ({"mechanism": "exponential_argmax", "scale": 1, "votes": "both"}, "votes"),
        (
            {"mechanism": "noisy_screening", "k": 10, "threshold": 11, "sigma": 1, "num_classes": 3},
            "threshold",
        ),
        (
            {"mechanism": "noisy_screening", "k": 10, "threshold": -1, "sigma": 1, "num_classes": 3},
            "threshold",
        ),
        ({"mechanism": "noisy_screening", "k": 0, "threshold": 0, "sigma": 1, "num_classes": 3}, "k"),
        (
            {"mechanism": "noisy_screening", "k": 10, "threshold": 5, "sigma": 1, "num_classes": 1},
            "num_classes",
        ),
    ],
)
def test_a_bad_record_is_refused_by_name(record, named):
    with pytest.raises(ValueError, match=named):
        Charge.from_record(record)


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_mechanisms_are_frozen(mechanism):
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.sampling_rate = 0.5


@pytest.mark.parametrize("mechanism", [m for m in ALL if m.sampling_rate < 1], ids=repr)
def test_sampling_under_replace_one_is_refused(mechanism):
    with pytest.raises(ValueError, match="sampling_rate"):
        mechanism.rdp(ORDERS, "replace_one")
    with pytest.raises(ValueError, match="sampling_rate"):
        mechanism.pld("replace_one", 1e-3)


def test_added_votes_are_no_replacement():
    with pytest.raises(ValueError, match="votes='swap'"):
        ExponentialArgmax(scale=1.0, votes="add").rdp(ORDERS, "replace_one")


def test_screening_refuses_a_table_with_fewer_than_k_records():
    plain = NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4)
    plain.check_table_size(30)
    with pytest.raises(ValueError, match="k=30"):
        plain.check_table_size(29)
    dataclasses.replace(plain, sampling_rate=0.5).check_table_size(3)


# --- RDP -----------------------------------------------------------------------------------------------


def test_gaussian_rdp_is_the_closed_form():
    np.testing.assert_allclose(Gaussian(3.0, 2.0).rdp(ORDERS, ADD_REMOVE), ORDERS * 4 / 9 / 2)


@pytest.mark.parametrize(("sigma", "rate"), [(17.7, 0.2), (1.1, 0.0043), (0.5, 0.01), (0.2, 0.3), (50, 0.05)])
def test_sampled_gaussian_rdp_equals_dp_accounting_at_whole_orders(sigma, rate):
    # Its fractional orders drop the signs of the binomial series, so only whole ones are exact there.
    orders = np.array([2.0, 3.0, 5.0, 17.0, 60.0, 512.0])
    theirs = dp_rdp._compute_rdp_poisson_subsampled_gaussian(rate, sigma, orders)
    np.testing.assert_allclose(Gaussian(sigma, sampling_rate=rate).rdp(orders, ADD_REMOVE), theirs, rtol=1e-9)


@pytest.mark.parametrize("order", [1.3, 2.5, 7.7])
@pytest.mark.parametrize(("sigma", "rate"), [(1.5, 0.1), (0.7, 0.5)])
def test_sampled_gaussian_rdp_equals_quadrature_at_real_orders(sigma, rate, order):
    def integrand(x):
        return stats.norm.pdf(x) * (1 - rate + rate * math.exp(x / sigma - 0.5 / sigma**2)) ** order

    moment = integrate.quad(integrand, -12, 12 + order / sigma, epsabs=0, epsrel=1e-11, limit=500)[0]
    ours = Gaussian(sigma, sampling_rate=rate).rdp(np.array([order]), ADD_REMOVE)[0]
    assert ours == pytest.approx(math.log(moment) / (order - 1), rel=1e-7)


def test_sampled_gaussian_rdp_equals_opacus():
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = np.array([2.0, 8.0, 12.0, 32.0])
    theirs = compute_rdp(q=256 / 60000, noise_multiplier=1.1, steps=2343, orders=orders)
    ours = 2343 * Gaussian(1.1, sampling_rate=256 / 60000).rdp(orders, ADD_REMOVE)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_sampled_gaussian_rdp_keeps_its_digits_when_tiny():
    # For μ → 0 and fixed α the divergence is αγ²(e^{μ²}−1)/2 to first order.
    mechanism = Gaussian(sigma=1e3, sampling_rate=1e-5)
    curve = mechanism.rdp(np.array([1.5, 3.0]), ADD_REMOVE)
    np.testing.assert_allclose(curve, np.array([1.5, 3.0]) * 1e-10 * math.expm1(1e-6) / 2, rtol=1e-7)


@pytest.mark.parametrize("eps", [0.05, 1.0, 8.0])
def test_laplace_rdp_equals_dp_accounting(eps):
    ours = Laplace(scale=1 / eps).rdp(ORDERS, ADD_REMOVE)
    np.testing.assert_allclose(ours, [dp_rdp._laplace_rdp(eps, order) for order in ORDERS], rtol=1e-8)


@pytest.mark.parametrize("order", [1.3, 2.5, 40.0])
def test_sampled_laplace_rdp_equals_quadrature_in_both_directions(order):
    rate, scale = 0.3, 0.8

    def densities(x):
        q = stats.laplace.pdf(x, scale=scale)
        return (1 - rate) * q + rate * stats.laplace.pdf(x, loc=1, scale=scale), q

    def moment(upper, lower):
        def integrand(x):
            pair = densities(x)
            return pair[lower] * (pair[upper] / pair[lower]) ** order

        return integrate.quad(integrand, -40, 41, points=[0, 1], epsrel=1e-10, limit=500)[0]

    expected = math.log(max(moment(0, 1), moment(1, 0))) / (order - 1)
    ours = Laplace(scale, sampling_rate=rate).rdp(np.array([order]), ADD_REMOVE)[0]
    assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rate", [1.0, 0.25])
@pytest.mark.parametrize("k", [1, 2, 30])
def test_screening_rdp_is_the_maximum_over_all_pairs(k, rate):
    mechanism = NoisyScreening(k=k, threshold=0.7 * k, sigma=4.0, num_classes=3, sampling_rate=rate)
    lowest = math.ceil(k / 3) if rate == 1 else 0
    worst = np.zeros(len(ORDERS))
    for t in range(lowest, k + 1):
        for other in (t - 1, t + 1):
            if not lowest <= other <= k:
                continue
            p, q = (
                np.array([stats.norm.sf(0.7 * k, c, 4.0), stats.norm.cdf(0.7 * k, c, 4.0)])
                for c in (t, other)
            )
            p = (1 - rate) * q + rate * p
            worst = np.maximum(worst, literal_rdp(p, q, ORDERS))
    np.testing.assert_allclose(mechanism.rdp(ORDERS, ADD_REMOVE), worst, rtol=1e-9, atol=1e-13)


def test_screening_rdp_survives_underflow():
    # From t = 0 to 1 the pass probability is far below the smallest float, yet it rules the largest orders.
    mechanism = NoisyScreening(k=300, threshold=180, sigma=1.0, num_classes=10, sampling_rate=0.5)
    order = 400.0
    log_p, log_q = stats.norm.logsf(180, [1, 0])
    expected = (order * (log_p + math.log(0.5)) + (1 - order) * log_q) / (order - 1)
    assert log_q < -16_000
    assert mechanism.rdp(np.array([order]), ADD_REMOVE)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("votes", ["add", "swap"])
@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("scale", [0.7, 20.0])
def test_argmax_rdp_bounds_every_vote_vector_closely(votes, rate, scale):
    mechanism = ExponentialArgmax(scale, votes, rate)
    rng = np.random.default_rng(0)
    members = np.zeros(len(ORDERS))
    for _ in range(3000):
        base = rng.uniform(0, 6 * scale, size=rng.integers(2, 6))
        moved = base.copy()
        moved[0] += 1
        if votes == "swap":
            moved[1] -= 1
        q, p = (np.exp(v / scale) / np.exp(v / scale).sum() for v in (base, moved))
        p = (1 - rate) * q + rate * p
        members = np.maximum(members, literal_rdp(p, q, ORDERS))
    curve = mechanism.rdp(ORDERS, ADD_REMOVE)
    assert np.all(curve >= members * (1 - 1e-9))
    assert np.all(curve <= members * 1.03)  # the cells' rounding and the members that were not drawn


# --- PLD -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Gaussian(2.0), lambda h: dp_pld.from_gaussian_mechanism(2.0, value_discretization_interval=h)),
        (
            Gaussian(1.1, 1.5, 0.1),
            lambda h: dp_pld.from_gaussian_mechanism(
                1.1, 1.5, value_discretization_interval=h, sampling_prob=0.1
            ),
        ),
        (Laplace(2.0), lambda h: dp_pld.from_laplace_mechanism(2.0, value_discretization_interval=h)),
        (
            Laplace(0.9, 1.3, 0.2),
            lambda h: dp_pld.from_laplace_mechanism(
                0.9, 1.3, value_discretization_interval=h, sampling_prob=0.2
            ),
        ),
    ],
)
def test_plds_equal_dp_accountings(ours, theirs):
    step = 2.0**-9
    mine, other = ours.pld(ADD_REMOVE, step), theirs(step)
    eps = np.linspace(0, 4, 100)
    for mine_pmf, other_pmf in ((mine._pmf_remove, other._pmf_remove), (mine._pmf_add, other._pmf_add)):
        np.testing.assert_allclose(
            mine_pmf.get_delta_for_epsilon(eps), other_pmf.get_delta_for_epsilon(eps), atol=1e-12
        )


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_a_pld_sums_to_one_and_dominates_at_any_grid(mechanism):
    eps = np.linspace(0, 1.5, 40)
    fine = mechanism.pld(ADD_REMOVE, 2.0**-14).get_delta_for_epsilon(eps)
    for step in (2.0**-6, 2.0**-10):
        coarse = mechanism.pld(ADD_REMOVE, step)
        assert np.all(coarse.get_delta_for_epsilon(eps) >= fine - 1e-13)
        for pmf in (coarse._pmf_remove, coarse._pmf_add):
            assert pmf._probs.sum() + pmf._infinity_mass == pytest.approx(1, abs=1e-12)
            assert (pmf._probs >= 0).all()


@pytest.mark.parametrize("mechanism", [m for m in ALL if m.outcome_pairs(ADD_REMOVE) is not None], ids=repr)
def test_the_envelope_is_the_maximum_of_the_hockey_sticks(mechanism):
    p, q = mechanism.outcome_pairs(ADD_REMOVE)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(q.sum(1), 1, rtol=1e-12)
    loss = np.abs(np.log(p / q)).max()
    eps = np.linspace(0, loss, 33)
    step = 2.0**-16
    ours = mechanism.pld(ADD_REMOVE, step)
    for pmf, upper, lower in ((ours._pmf_remove, p, q), (ours._pmf_add, q, p)):
        envelope = hockey_stick(upper, lower, eps).max(0)
        # The arg-max family is cut into cells that dominate it, so its own curve lies a little lower.
        slack = 1e-12 if isinstance(mechanism, NoisyScreening) else 1e-2 * envelope[0]
        deltas = pmf.get_delta_for_epsilon(eps)
        assert np.all(deltas >= envelope - slack)
        assert np.all(deltas <= envelope + step)


@pytest.mark.parametrize("votes", ["add", "swap"])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_argmax_pld_and_pairs_dominate_every_member(votes, rate):
    scale = 2.0
    mechanism = ExponentialArgmax(scale, votes, rate)
    eps = np.linspace(0, 1.0, 21)
    dominating = mechanism.pld(ADD_REMOVE, 2.0**-12)
    p_rows, q_rows = mechanism.outcome_pairs(ADD_REMOVE)
    rows = hockey_stick(p_rows, q_rows, eps).max(0), hockey_stick(q_rows, p_rows, eps).max(0)
    rng = np.random.default_rng(1)
    for _ in range(60):
        base = rng.uniform(0, 8, size=rng.integers(2, 5))
        moved = base.copy()
        moved[0] += 1
        if votes == "swap":
            moved[1] -= 1
        q, p = (np.exp(v / scale) / np.exp(v / scale).sum() for v in (base, moved))
        p = (1 - rate) * q + rate * p
        for pmf, row, member in (
            (dominating._pmf_remove, rows[0], hockey_stick(p, q, eps)),
            (dominating._pmf_add, rows[1], hockey_stick(q, p, eps)),
        ):
            assert np.all(pmf.get_delta_for_epsilon(eps) >= member - 1e-12)
            assert np.all(row >= member - 1e-12)


def test_swapped_votes_cost_as_added_ones_with_half_the_scale():
    swap, add = ExponentialArgmax(8.0, "swap", 0.2), ExponentialArgmax(4.0, "add", 0.2)
    np.testing.assert_allclose(swap.rdp(ORDERS, ADD_REMOVE), add.rdp(ORDERS, ADD_REMOVE))


@pytest.mark.parametrize("shifts", [(0.5, 0.5), (0.9, 0.1), (0.4, 0.3, 0.3)])
def test_laplace_in_one_coordinate_dominates_a_shift_over_several(shifts):
    # The claim that lets an L1 sensitivity stand for a vector's pair.
    one = Laplace(1.0).pld(ADD_REMOVE, 2.0**-10)
    several = Laplace(1.0, shifts[0]).pld(ADD_REMOVE, 2.0**-10)
    for shift in shifts[1:]:
        several = several.compose(Laplace(1.0, shift).pld(ADD_REMOVE, 2.0**-10))
    eps = np.linspace(0, 0.98, 50)
    assert np.all(one.get_delta_for_epsilon(eps) >= several.get_delta_for_epsilon(eps) - 1e-5)


def test_the_pair_made_from_an_rdp_curve_dominates_and_has_that_conversion():
    gauss = Gaussian(1.5)
    curve = gauss.rdp(rdp.ORDERS, ADD_REMOVE)
    made = pld.from_rdp(rdp.ORDERS, curve, 2.0**-9)
    eps = np.linspace(0, 6, 25)
    assert np.all(made.get_delta_for_epsilon(eps) >= [pld.gaussian_delta(1 / 1.5, e) for e in eps])
    assert made._pmf_remove._probs.sum() + made._pmf_remove._infinity_mass == pytest.approx(1, abs=1e-9)
    assert made.get_epsilon_for_delta(1e-5) <= rdp.epsilon_improved(rdp.ORDERS, curve, 1e-5) + 2.0**-8


# --- monotone in every parameter -----------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    sigma=st.floats(0.5, 50),
    rate=st.floats(0.01, 0.9),
    more=st.floats(1.05, 1.1),
    kind=st.sampled_from(["gaussian", "laplace", "screening", "argmax"]),
)
def test_more_noise_or_less_sampling_never_costs_more(sigma, rate, more, kind):
    def build(noise, sampling):
        if kind == "gaussian":
            return Gaussian(noise, 1.0, sampling)
        if kind == "laplace":
            return Laplace(noise, 1.0, sampling)
        if kind == "argmax":
            return ExponentialArgmax(noise, "swap", sampling)
        return NoisyScreening(30, 18, noise, 4, sampling)

    curve = build(sigma, rate).rdp(ORDERS, ADD_REMOVE)
    tolerance = 1 + 1e-9
    assert np.all(build(sigma, rate * more).rdp(ORDERS, ADD_REMOVE) * tolerance >= curve)
    assert np.all(build(sigma * more, rate).rdp(ORDERS, ADD_REMOVE) <= curve * tolerance)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Gaussian(3, 1.0, 0.2), Gaussian(3, 1.4, 0.2)),
        (Laplace(3, 1.0, 0.2), Laplace(3, 2.0, 0.2)),
        (ExponentialArgmax(3, "add", 0.2), ExponentialArgmax(3, "swap", 0.2)),
        (NoisyScreening(30, 18, 5, 4, 0.2), NoisyScreening(40, 18, 5, 4, 0.2)),
        (NoisyScreening(30, 18, 5, 2), NoisyScreening(30, 18, 5, 10)),
    ],
)
def test_more_sensitivity_never_costs_less(less, more):
    assert np.all(less.rdp(ORDERS, ADD_REMOVE) <= more.rdp(ORDERS, ADD_REMOVE) * (1 + 1e-12))


# --- the noise that is drawn is the noise that is accounted ----------------------------------------------


def test_drawn_noise_has_the_accounted_scale_and_leaves_the_values_alone():
    # Kolmogorov-Smirnov at 20,000 draws; p < 1e-4 would come up by chance once in 10,000 seeds.
    values = torch.zeros(20_000, dtype=torch.float32)
    noisy = Gaussian(25.0).add_noise(values, SeededNoise(1))
    assert noisy.dtype == torch.float64
    assert not values.any()
    assert stats.kstest(noisy.numpy(), stats.norm(scale=25.0).cdf).pvalue > 1e-4
    noisy = Laplace(20.0).add_noise(values, SeededNoise(2))
    assert not values.any()
    assert stats.kstest(noisy.numpy(), stats.laplace(scale=20.0).cdf).pvalue > 1e-4


def test_screening_passes_with_the_accounted_probability():
    mechanism = NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4)
    passed = mechanism.passes(torch.full((40_000,), 20), SeededNoise(3))
    expected = stats.norm.sf(18, 20, 5)
    assert passed.dtype == torch.bool
    assert abs(passed.double().mean().item() - expected) < 4.5 * math.sqrt(expected * (1 - expected) / 40_000)


def test_argmax_draws_the_softmax():
    votes = torch.tensor([5.0, 3.0, 0.0])
    mechanism = ExponentialArgmax(scale=2.0, votes="add")
    drawn = mechanism.argmax(votes.expand(30_000, 3), SeededNoise(4))
    counts = torch.bincount(drawn, minlength=3).numpy()
    expected = torch.softmax(votes.double() / 2.0, 0).numpy() * 30_000
    assert stats.chisquare(counts, expected).pvalue > 1e-4
