"""Single releases: their records and RDP curves."""

import collections
import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as dp_rdp
from scipy import integrate, stats

from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import (
    Charge,
    Conditional,
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    Laplace,
    NoisyScreening,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)
from tests.privacy.mechanisms.mechanism_setup import ADD_REMOVE, ALL, ORDERS, argmax_pairs, literal_rdp

# --- records -------------------------------------------------------------------------------------------

FURTHER = [
    RandomizedResponse(0.2, 5, 3),
    PureDP(0.5, 0.3),
    ShuffleAmplification(1.0, 1000),
    GaussianDPStream(0.4),
    Conditional(Gaussian(40.0, math.sqrt(2)), "the partition does not depend on the records"),
]


@pytest.mark.parametrize("mechanism", [*ALL, *FURTHER], ids=repr)
def test_a_record_round_trips(mechanism):
    charge = Charge(mechanism, 7)
    record = charge.to_record()
    assert record["mechanism"] == mechanism.kind
    back = Charge.from_record(json.loads(json.dumps(record)))
    assert back == charge
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.sampling_rate = 0.5
    if mechanism in FURTHER:
        assert epsilon_for_delta([back], 1e-6) == epsilon_for_delta([charge], 1e-6) < math.inf


SCREENING = {"k": 10, "threshold": 5, "sigma": 1, "num_classes": 3}


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        *(("gaussian", {"sigma": sigma}, "sigma") for sigma in (-1, float("nan"), 0, "25")),
        *(("gaussian", {"sigma": 1, "sampling_rate": rate}, "sampling_rate") for rate in (-0.1, 1.5, True)),
        *(("gaussian", {"sigma": 1, "count": count}, "count") for count in (0, 1.5)),
        ("gaussian", {"sigma": 1, "l2_sensitivity": 0}, "l2_sensitivity"),
        (
            "gaussian",
            {"sigma": 1, "l2_sensitivity": None},
            "l2_sensitivity=None must be a value, or left out",
        ),
        ("gaussian", {"sigma": 1, "sensitivity": 1}, "sensitivity"),
        ("gaussian", {}, "sigma"),
        ("laplace", {"scale": float("inf")}, "scale"),
        ("unheard_of", {}, "unheard_of"),
        (["gaussian"], {}, "gaussian"),
        ("exponential_argmax", {"scale": 1, "votes": "both"}, "votes"),
        *(("noisy_screening", {**SCREENING, "threshold": threshold}, "threshold") for threshold in (11, -1)),
        ("noisy_screening", {**SCREENING, "k": 0, "threshold": 0}, "k"),
        ("noisy_screening", {**SCREENING, "num_classes": 1}, "num_classes"),
        *(("randomized_response", {"flip_probability": flip}, "flip_probability") for flip in (0.5, 0)),
        ("pure_dp", {"epsilon": -1}, "epsilon"),
        ("shuffle_amplification", {"local_epsilon": 1, "num_clients": 1}, "num_clients"),
        ("gaussian_dp_stream", {"mu": float("nan")}, "mu"),
        ("conditional", {"inner": {"mechanism": "gaussian", "sigma": 0}, "condition": "x"}, "sigma"),
        ("conditional", {"inner": {"mechanism": "gaussian", "sigma": 1}, "condition": ""}, "condition"),
    ],
)
def test_a_bad_record_is_refused_by_name(kind, fields, named):
    with pytest.raises(ValueError, match=named):
        Charge.from_record({"mechanism": kind, **fields})


def test_what_is_no_record_is_refused():
    for record in ({"sigma": 1}, "gaussian"):
        with pytest.raises(ValueError, match="mechanism"):
            Charge.from_record(record)


def test_a_subclass_without_a_kind_leaves_its_base_chargeable(tmp_path):
    class Doubled(Gaussian):
        pass

    run = Ledger(tmp_path / "ledger.sqlite").run("a")
    run.charge(Gaussian(4.0))
    with pytest.raises(ValueError, match="give Doubled a kind"):
        run.charge(Doubled(4.0))


@pytest.mark.parametrize("mechanism", [m for m in ALL if m.sampling_rate < 1], ids=repr)
def test_sampling_under_replace_one_is_refused(mechanism):
    for cost in (lambda: mechanism.rdp(ORDERS, "replace_one"), lambda: mechanism.pld("replace_one", 1e-3)):
        with pytest.raises(ValueError, match="sampling_rate"):
            cost()


def test_added_votes_are_no_replacement():
    with pytest.raises(ValueError, match="votes='swap'"):
        ExponentialArgmax(scale=1.0, votes="add").rdp(ORDERS, "replace_one")


def test_screening_refuses_a_table_of_k_records():
    plain = NoisyScreening(k=30, threshold=18, sigma=5.0, num_classes=4)
    plain.check_table_size(31)
    with pytest.raises(ValueError, match="k=30"):
        plain.check_table_size(30)
    dataclasses.replace(plain, sampling_rate=0.5).check_table_size(3)


def test_a_fixed_total_is_one_gaussian_release():
    assert epsilon_for_delta([Charge(GaussianDPStream(0.25), 4)], 1e-5) == pytest.approx(
        pld.gaussian_epsilon(0.5, 1e-5), rel=1e-9
    )


def test_the_curve_of_a_family_is_the_dearest_pair_in_the_dearer_direction():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(3, 0.7), 6), rng.dirichlet(np.full(3, 0.7), 6)
    for rows in (slice(0, 6), slice(0, 1), slice(3, 4)):
        expected = literal_rdp(p[rows], q[rows]).max(axis=0)
        for upper, lower in ((p, q), (q, p)):
            found = rdp.pairs_rdp(np.log(upper[rows]), np.log(lower[rows]), ORDERS)
            np.testing.assert_allclose(found, expected, rtol=1e-9)


# --- RDP -----------------------------------------------------------------------------------------------


def test_gaussian_rdp_is_the_closed_form():
    np.testing.assert_allclose(Gaussian(3.0, 2.0).rdp(ORDERS, ADD_REMOVE), ORDERS * 4 / 9 / 2)


@pytest.mark.parametrize(("sigma", "rate"), [(17.7, 0.2), (1.1, 0.0043), (0.2, 0.3)])
def test_sampled_gaussian_rdp_equals_dp_accounting_at_whole_orders(sigma, rate):
    # Its fractional orders drop the signs of the binomial series, so only whole ones are exact there.
    orders = np.array([2.0, 3.0, 5.0, 17.0, 60.0, 512.0])
    theirs = dp_rdp._compute_rdp_poisson_subsampled_gaussian(rate, sigma, orders)
    np.testing.assert_allclose(Gaussian(sigma, sampling_rate=rate).rdp(orders, ADD_REMOVE), theirs, rtol=1e-9)


@pytest.mark.parametrize(("sigma", "rate", "order"), [(1.5, 0.1, 1.3), (0.7, 0.5, 2.5), (0.7, 0.5, 7.7)])
def test_sampled_gaussian_rdp_equals_quadrature_at_real_orders(sigma, rate, order):
    def integrand(x):
        return stats.norm.pdf(x) * (1 - rate + rate * math.exp(x / sigma - 0.5 / sigma**2)) ** order

    moment = integrate.quad(integrand, -12, 12 + order / sigma, epsabs=0, epsrel=1e-11, limit=500)[0]
    ours = Gaussian(sigma, sampling_rate=rate).rdp(np.array([order]), ADD_REMOVE)[0]
    assert ours == pytest.approx(math.log(moment) / (order - 1), rel=1e-7)


def test_sampled_gaussian_rdp_keeps_its_digits_when_tiny():
    # For μ → 0 and fixed α the divergence is αγ²(e^{μ²}−1)/2 to first order.
    mechanism = Gaussian(sigma=1e3, sampling_rate=1e-5)
    curve = mechanism.rdp(np.array([1.5, 3.0]), ADD_REMOVE)
    np.testing.assert_allclose(curve, np.array([1.5, 3.0]) * 1e-10 * math.expm1(1e-6) / 2, rtol=1e-7)


@pytest.mark.parametrize("eps", [0.05, 1.0, 8.0])
def test_laplace_rdp_equals_dp_accounting(eps):
    ours = Laplace(scale=1 / eps).rdp(ORDERS, ADD_REMOVE)
    np.testing.assert_allclose(ours, [dp_rdp._laplace_rdp(eps, order) for order in ORDERS], rtol=1e-8)


def test_pure_epsilon_of_sampled_releases_and_of_hardly_any_noise():
    mechanism = Laplace(5.0, 2.0, 0.3)
    assert mechanism.pure_epsilon(ADD_REMOVE) == pytest.approx(math.log1p(0.3 * math.expm1(0.4)))
    for sampled in (mechanism, ExponentialArgmax(3.0, "swap", 0.3)):
        with pytest.raises(ValueError, match="sampling_rate"):
            sampled.pure_epsilon("replace_one")
    # Where quadrature would overflow the curve is the largest loss, ln(γe^{10⁶}).
    np.testing.assert_allclose(Laplace(1e-6, 1.0, 0.3).rdp(ORDERS, ADD_REMOVE), 1e6 + math.log(0.3))
    # No order costs more than the pure ε, here of an arg-max whose likelihood ratio is e^{50}.
    hardly = ExponentialArgmax(0.02, "add")
    assert np.all(hardly.rdp(ORDERS, ADD_REMOVE) <= hardly.pure_epsilon(ADD_REMOVE) * (1 + 1e-12))


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
@pytest.mark.parametrize("k", [1, 30])
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
            worst = np.maximum(worst, literal_rdp(p, q))
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
    drawn = collections.defaultdict(list)  # pairs by their number of classes
    for pair in argmax_pairs(np.random.default_rng(0), scale, votes, rate, 1000):
        drawn[len(pair[0])].append(pair)
    members = np.max([literal_rdp(*np.stack(pairs, 1)).max(0) for pairs in drawn.values()], axis=0)
    curve = mechanism.rdp(ORDERS, ADD_REMOVE)
    assert np.all(curve >= members * (1 - 1e-9))
    assert np.all(curve <= members * 1.03)  # the cells' rounding and the members that were not drawn


@pytest.mark.parametrize("kind", ["noisy_screening", "randomized_response", "pure_dp", "laplace"])
def test_a_process_that_only_reads_a_ledger_knows_every_mechanism(kind):
    read = f"from pl_privknn.privacy.mechanisms.base import Charge; Charge.from_record({{'mechanism': {kind!r}}})"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert "is unknown" not in done.stderr
    assert f"{kind}: field" in done.stderr
