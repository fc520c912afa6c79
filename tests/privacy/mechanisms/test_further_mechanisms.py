"""Records of the further mechanisms, fixed totals and conditional costs."""

import json
import math

import pytest
import torch

from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import account, epsilon_for_delta
from pl_privknn.privacy.mechanisms import (
    Charge,
    Conditional,
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)
from pl_privknn.privacy.noise import SeededNoise


@pytest.mark.parametrize(
    "mechanism",
    [
        RandomizedResponse(0.2, 5, 3),
        PureDP(0.5, 0.3),
        ShuffleAmplification(1.0, 1000),
        GaussianDPStream(0.4),
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


def test_not_a_number_never_wins_an_argmax():
    votes = torch.tensor([[3.0, float("nan"), 1.0]])
    with pytest.raises(ValueError, match="votes"):
        ExponentialArgmax(2.0, "add").argmax(votes, SeededNoise(0))
