"""Totals over lists of charges, against reference values, closed forms and other accountants."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from scipy import stats

from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import (
    account,
    delta_for_epsilon,
    epsilon_for_delta,
    merge_charges,
    read_records,
)
from pl_privknn.privacy.mechanisms import (
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
    PureDP,
    RandomizedResponse,
)
from tests.setup.refusals import refusals

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "reference_epsilons.json").read_text())
SCREENING = NoisyScreening(k=300, threshold=210, sigma=85, num_classes=10, sampling_rate=0.2)
SIGMA_1 = {"mechanism": "gaussian", "sigma": 1}


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["id"])
def test_reference_values(case):
    report = account(read_records(case["records"]), delta=case["delta"], exact=False)
    assert case["epsilon_floor"] <= report.epsilon <= 1.005 * case["epsilon"]
    assert case["epsilon_floor"] <= report.epsilon_pld <= 1.005 * case["epsilon_pld"]
    if "epsilon_rdp" in case:
        assert case["epsilon_floor"] <= report.epsilon_rdp <= 1.005 * case["epsilon_rdp"]
    if "epsilon_rdp_classic" in case:
        assert report.epsilon_rdp_classic == pytest.approx(case["epsilon_rdp_classic"], rel=0.005)
    assert report.epsilon == min(report.epsilon_rdp, report.epsilon_pld)
    assert report.epsilon_exact is None


def test_no_charges_cost_nothing():
    report = account([], delta=1e-5)
    assert report.epsilon == report.epsilon_rdp == report.epsilon_rdp_classic == report.epsilon_pld == 0
    assert report.guarantee == "unconditional"
    assert epsilon_for_delta([], 1e-5) == delta_for_epsilon([], 1.0) == 0


def by(method, charges, delta):
    report = account(charges, delta=delta, exact=False)
    return report.epsilon if method == "best" else getattr(report, f"epsilon_{method}")


def accounted(delta=1e-5, adjacency="add_remove"):
    return lambda: account([Charge(SCREENING)], delta=delta, adjacency=adjacency)


test_bad_arguments_are_refused_by_name = refusals(
    {
        "delta=0": accounted(0.0),
        "delta=1": accounted(1.0),
        "delta=nan": accounted(math.nan),
        "adjacency": accounted(adjacency="swap"),
        "sampling_rate": accounted(adjacency="replace_one"),
        "record 1: gaussian: sigma=-2": lambda: read_records([SIGMA_1, {**SIGMA_1, "sigma": -2}]),
        "list": lambda: read_records(SIGMA_1),
    }
)


# --- composition -----------------------------------------------------------------------------------------


def test_equal_charges_are_merged():
    charges = [Charge(Gaussian(5), 2), Charge(SCREENING, 1), Charge(Gaussian(5.0, 1.0), 3)]
    assert merge_charges(charges) == [Charge(Gaussian(5.0), 5), Charge(SCREENING, 1)]
    together = account(merge_charges(charges), delta=1e-5, exact=False)
    assert account(charges, delta=1e-5, exact=False) == together


@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-20])
@pytest.mark.parametrize(("sigma", "count"), [(50.0, 5000), (5000.0, 1_000_000), (0.8, 1)])
def test_pld_composition_equals_analytic_gaussian(sigma, count, delta):
    # Composed on the grid on purpose; the accountant itself uses the closed form for Gaussians.
    mu = math.sqrt(count) / sigma
    step = pld.choose_discretization(mu * mu, count)
    total = pld.compose([(Gaussian(sigma).pld("add_remove", step), count)], delta)
    exact = pld.gaussian_epsilon(mu, delta)
    assert exact <= total.epsilon(delta) * (1 + 1e-9) + 1e-12
    assert total.epsilon(delta) <= exact * (1 + 2e-4) + 1e-12
    # And that closed form is Balle and Wang's.
    if exact > 0:
        first, second = stats.norm.cdf(mu / 2 - exact / mu), stats.norm.cdf(-mu / 2 - exact / mu)
        assert first - math.exp(exact) * second == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("delta", [1e-10, 1e-2])
def test_every_total_of_a_gaussian_is_valid_from_tiny_to_huge(delta):
    for mu in np.geomspace(1e-8, 30, 20):
        report = account([Charge(Gaussian(1 / mu))], delta=delta, exact=False)
        for epsilon in (report.epsilon_rdp, report.epsilon_rdp_classic, report.epsilon_pld):
            # Balle and Wang's closed form of what is left at the stated ε; 1e-15 is the rounding of its difference.
            left = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(
                epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
            )
            assert left <= delta * (1 + 1e-6) + 1e-15, mu


def test_gaussians_of_different_scale_compose_exactly():
    charges = [Charge(Gaussian(3.0), 2), Charge(Gaussian(7.0, 2.0), 5)]
    mu = math.sqrt(2 / 9 + 5 * 4 / 49)
    report = account(charges, delta=1e-6, exact=False)
    assert report.epsilon == pytest.approx(pld.gaussian_epsilon(mu, 1e-6), rel=1e-9)


@pytest.mark.parametrize("count", [1, 5])
def test_laplace_reaches_its_pure_epsilon_as_delta_vanishes(count):
    report = account([Charge(Laplace(20.0), count)], delta=1e-15, exact=False)
    assert report.epsilon <= count / 20 * (1 + 1e-9)
    assert report.epsilon == pytest.approx(count / 20, rel=2e-3)
    # One release in closed form: δ(ε) = 1 − e^{(ε − ε₀)/2}.
    one = delta_for_epsilon([Charge(Laplace(2.0))], 0.3, method="pld")
    assert one == pytest.approx(-math.expm1(-0.1), abs=1e-5)


def test_very_heavy_tails_stay_tight_and_small():
    # Rarely sampled, hardly noised: a loss of 13 occurs, the root mean square one is 1e-3.
    theirs = dp_pld.from_gaussian_mechanism(0.5, sampling_prob=1e-4, value_discretization_interval=1e-3)
    expected = theirs.self_compose(100_000).get_epsilon_for_delta(1e-5)
    ours = by("pld", [Charge(Gaussian(0.5, sampling_rate=1e-4), 100_000)], 1e-5)
    assert 0.97 * expected <= ours <= expected


def test_compositions_of_screening_bound_every_sequence_of_pairs():
    # All 3-step sequences of pairs of a small family, composed by enumeration of all 8 outcomes.
    mechanism = NoisyScreening(k=6, threshold=4, sigma=1.5, num_classes=3, sampling_rate=0.3)
    p, q = mechanism.dominating_pairs("add_remove")
    eps = np.array([0.0, 0.2, 0.5, 1.0])
    worst = np.zeros(len(eps))
    for rows in itertools.product(range(len(p)), repeat=3):
        joint_p, joint_q = np.ones(1), np.ones(1)
        for row in rows:
            joint_p, joint_q = np.outer(joint_p, p[row]).ravel(), np.outer(joint_q, q[row]).ravel()
        for upper, lower in ((joint_p, joint_q), (joint_q, joint_p)):
            worst = np.maximum(worst, np.maximum(upper - np.exp(eps)[:, None] * lower, 0).sum(1))
    charges = [Charge(mechanism, 3)]
    for e, floor in zip(eps, worst, strict=True):
        for method in ("rdp", "pld"):
            assert delta_for_epsilon(charges, e, method=method) >= floor
    assert delta_for_epsilon(charges, 0.2, method="pld") <= 1.6 * worst[1]


# --- curves and inverses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rdp", "pld", "best"])
def test_delta_and_epsilon_are_inverse(method):
    sampled = [Charge(SCREENING, 5000), Charge(Gaussian(20, math.sqrt(2), 0.2), 700)]
    mixed = [Charge(ExponentialArgmax(19.5, "swap", 0.15), 735), Charge(Gaussian(10.0), 2)]
    for charges, delta in ((sampled, 1e-3), ([Charge(Gaussian(2.0), 3)], 1e-6), (mixed, 1e-6)):
        eps = by(method, charges, delta)
        # ε comes from a finite list of orders or grid points, so the way back may only be a little lower.
        assert delta_for_epsilon(charges, eps, method=method) == pytest.approx(delta, rel=2e-2)


@pytest.mark.parametrize("method", ["rdp", "pld", "best"])
@pytest.mark.parametrize(
    ("mechanism", "count", "delta"), [(Laplace(6.0), 9, 1e-9), (RandomizedResponse(0.0523), 8, 6.9e-8)]
)
def test_pure_releases_leave_no_delta_from_their_pure_epsilon_on(mechanism, count, delta, method):
    charges = [Charge(mechanism, count)]
    pure = count / 6 if isinstance(mechanism, Laplace) else count * math.log((1 - 0.0523) / 0.0523)
    for epsilon in (by(method, charges, delta), pure * (1 + 1e-9), 2 * pure):
        assert delta_for_epsilon(charges, epsilon, method=method) <= delta * (1 + 1e-6)
    assert delta_for_epsilon(charges, pure * (1 + 1e-9), method=method) == 0
    assert delta_for_epsilon(charges, 0.9 * pure, method=method) > 0


@pytest.mark.parametrize(("count", "flip"), [(1, 0.1), (3, 0.3), (8, 0.1)])
def test_lumpy_losses_are_never_under_reported(count, flip):
    """Randomised response puts all mass on single losses; its composition is enumerated here by convolution."""
    bits, one = 2, np.array([flip, 1 - flip])
    mass = np.array([1.0])
    for _ in range(bits * count):
        mass = np.convolve(mass, one)
    losses = (2 * np.arange(len(mass)) - bits * count) * math.log((1 - flip) / flip)
    charges = [Charge(RandomizedResponse(flip, differing=bits), count)]
    for epsilon in (0.0, 0.3, 1.0, 0.7 * losses[-1]):
        exact = float((mass * np.clip(1 - np.exp(epsilon - losses), 0, None)).sum())
        ours = delta_for_epsilon(charges, epsilon, method="pld")
        # From above, and tight to the grid.
        assert exact * (1 - 1e-9) - 1e-13 <= ours <= exact * 1.01 + 1e-9
        if exact > 1e-8:
            assert by("pld", charges, exact) >= epsilon - 1e-6


@pytest.mark.parametrize(
    "mechanism", [Laplace(0.001), PureDP(1000.0), Gaussian(0.01), Gaussian(0.01, 1.0, 0.1)], ids=repr
)
def test_releases_with_hardly_any_noise_cost_what_they_cost(mechanism):
    report = account([Charge(mechanism)], delta=1e-5, exact=False)
    # Pure ones lose 1,000 nats; the Gaussian's loss is 5,000 on average, less log(1/0.1) where sampled at 0.1.
    assert report.epsilon > 990
    assert math.isfinite(report.epsilon)
