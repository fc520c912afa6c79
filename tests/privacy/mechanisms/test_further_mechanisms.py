"""Records of the further mechanisms, fixed totals and conditional costs."""

import json
import math

import numpy as np
import pytest
import torch
from mechanism_setup import ADD_REMOVE
from mechanism_setup import FEW_ORDERS as ORDERS

from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import account, delta_for_epsilon, epsilon_for_delta
from pl_privknn.privacy.mechanisms import (
    Charge,
    Conditional,
    DataDependent,
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    Laplace,
    NoisyScreening,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)
from pl_privknn.privacy.mechanisms.data_dependent import SUMMARY_ORDERS
from pl_privknn.privacy.noise import SeededNoise

AGREED = np.array([[230, 15, 5], [240, 5, 5], [250, 0, 0]])


@pytest.mark.parametrize(
    "mechanism",
    [
        RandomizedResponse(0.2, 5, 3),
        PureDP(0.5, 0.3),
        ShuffleAmplification(1.0, 1000),
        GaussianDPStream(0.4),
        DataDependent.answers(Gaussian(40.0, math.sqrt(2)), AGREED),
        Conditional(Gaussian(40.0, math.sqrt(2)), "the partition does not depend on the records"),
    ],
    ids=lambda mechanism: mechanism.kind,
)
def test_a_record_survives_json_and_costs_the_same(mechanism):
    charge = Charge(mechanism, 3)
    back = Charge.from_record(json.loads(json.dumps(charge.to_record())))
    assert back == charge
    assert epsilon_for_delta([back], 1e-6) == epsilon_for_delta([charge], 1e-6) < math.inf


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"mechanism": "randomized_response", "flip_probability": 0.5}, "flip_probability"),
        ({"mechanism": "randomized_response", "flip_probability": 0}, "flip_probability"),
        ({"mechanism": "pure_dp", "epsilon": -1}, "epsilon"),
        ({"mechanism": "shuffle_amplification", "local_epsilon": 1, "num_clients": 1}, "num_clients"),
        ({"mechanism": "gaussian_dp_stream", "mu": float("nan")}, "mu"),
        (
            {"mechanism": "conditional", "inner": {"mechanism": "gaussian", "sigma": 0}, "condition": "x"},
            "sigma",
        ),
        (
            {"mechanism": "conditional", "inner": {"mechanism": "gaussian", "sigma": 1}, "condition": ""},
            "condition",
        ),
        (
            {
                "mechanism": "data_dependent",
                "release": "gnmax",
                "releases": 1,
                "orders": [2, 1.5],
                "curve": [1, 1],
            },
            "orders",
        ),
        (
            {"mechanism": "data_dependent", "release": "gnmax", "releases": 1, "orders": [2], "curve": [-1]},
            "curve",
        ),
        (
            {"mechanism": "data_dependent", "release": "x", "releases": 1, "orders": [2], "curve": [1]},
            "release",
        ),
    ],
)
def test_a_bad_record_is_refused_by_name(record, named):
    with pytest.raises(ValueError, match=named):
        Charge.from_record(record)


# --- totals and conditions -------------------------------------------------------------------------------


def test_a_fixed_total_is_one_gaussian_release():
    assert epsilon_for_delta([Charge(GaussianDPStream(0.25), 4)], 1e-5) == pytest.approx(
        pld.gaussian_epsilon(0.5, 1e-5), rel=1e-9
    )
    # The budget of a stream per record: B = 0.03593 at (1, 1e-5).
    assert epsilon_for_delta([Charge(GaussianDPStream(math.sqrt(2 * 0.03593)))], 1e-5) == pytest.approx(
        1.0, abs=2e-4
    )


def test_a_conditional_part_makes_the_total_conditional_and_is_named():
    gaussian = Gaussian(40.0, math.sqrt(2))
    plain = [Charge(Gaussian(9.0), 2), Charge(gaussian, 286)]
    marked = [plain[0], Charge(Conditional(gaussian, "the partition is fixed beforehand"), 286)]
    report, reference = (account(charges, delta=1e-5, exact=False) for charges in (marked, plain))
    assert report.epsilon == pytest.approx(reference.epsilon, rel=1e-12)
    assert (reference.guarantee, reference.reason) == ("unconditional", "")
    assert report.guarantee == "conditional"
    assert report.conditional == ("gaussian",)
    assert report.reason == "gaussian: the partition is fixed beforehand"


def test_data_dependent_costs_are_lower_where_votes_agree_and_always_conditional():
    gaussian = Gaussian(40.0, math.sqrt(2))
    agreed = DataDependent.answers(gaussian, np.repeat(AGREED, 100, axis=0))
    torn = DataDependent.answers(gaussian, np.full((300, 3), 83))
    independent = Charge(gaussian, 300)
    assert agreed.releases == 300
    totals = [account([c], delta=1e-5, exact=False) for c in (Charge(agreed), Charge(torn), independent)]
    assert totals[0].epsilon < 0.5 * totals[1].epsilon
    assert totals[1].epsilon_rdp == pytest.approx(totals[2].epsilon_rdp, rel=0.01)
    assert [total.guarantee for total in totals] == ["conditional", "conditional", "unconditional"]
    assert "private votes" in totals[0].reason
    laplace = DataDependent.answers(Laplace(20.0, 2.0), AGREED)
    assert np.all(
        laplace.rdp(ORDERS, ADD_REMOVE) <= 3 * Laplace(20.0, 2.0).rdp(ORDERS, ADD_REMOVE) * (1 + 1e-3)
    )


def test_data_dependent_screening_lies_below_the_worst_count_and_is_largest_near_the_threshold():
    screening = NoisyScreening(k=250, threshold=150, sigma=10.0, num_classes=3)
    orders = np.array([2.0, 8.0])
    worst = screening.rdp(orders, ADD_REMOVE)
    at, far = (DataDependent.screening(screening, np.array([t])).rdp(orders, ADD_REMOVE) for t in (150, 240))
    assert np.all(at <= worst * (1 + 1e-2))
    assert at[0] > 100 * far[0]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: DataDependent.answers(Gaussian(40.0, math.sqrt(2), 0.1), AGREED),
        lambda: DataDependent.screening(NoisyScreening(250, 150, 10.0, 3, 0.1), AGREED.max(1)),
    ],
)
def test_a_data_dependent_bound_is_never_amplified(attempt):
    with pytest.raises(ValueError, match=r"sampling_rate=0\.1"):
        attempt()


@pytest.mark.parametrize(
    "votes",
    [np.array([1, 0, 2]), np.array([[0.5, 0.5]]), np.array([[3, -1]]), np.empty((0, 3), dtype=int), [[5]]],
)
def test_labels_or_scores_are_no_histograms(votes):
    # Labels taken for counts, or classes counted from the votes, would give an analysis of nothing.
    with pytest.raises(ValueError, match="votes"):
        DataDependent.answers(Gaussian(40.0, math.sqrt(2)), votes)


def test_a_summary_bounds_the_curve_between_its_orders():
    exact = DataDependent.summarize("gnmax", Gaussian(3.0).rdp(SUMMARY_ORDERS, ADD_REMOVE)[None])
    orders = np.array([1.001, 1.5, 3.3, 77.7])
    assert np.all(exact.rdp(orders, ADD_REMOVE) >= orders / 18 * (1 - 1e-12))
    assert exact.rdp(np.array([1e9]), ADD_REMOVE)[0] == math.inf


def test_costs_of_rounds_add_up():
    # ε is composed over rounds, never taken from the last one alone.
    one = delta_for_epsilon([Charge(Gaussian(20.0), 10)], 0.5)
    two = delta_for_epsilon([Charge(Gaussian(20.0), 10), Charge(PureDP(0.1), 3)], 0.5)
    assert two > 2 * one


def test_not_a_number_never_wins_an_argmax():
    votes = torch.tensor([[3.0, float("nan"), 1.0]])
    with pytest.raises(ValueError, match="votes"):
        ExponentialArgmax(2.0, "add").argmax(votes, SeededNoise(0))
