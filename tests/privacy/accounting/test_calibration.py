"""The free parameter of a list of releases: limits, and the exact search (found plans: ``tests/planning``)."""

import math

import pytest

from pl_privknn.labelers import PrivateKNN, Screening
from pl_privknn.privacy.accounting.calibration import CalibrationError, Parameter, calibrate
from pl_privknn.privacy.mechanisms import Charge, Gaussian

NOISE = Parameter("sigma", start=1.0, low=0.05, high=1e6, rising=False)


COUNT = Parameter("count", start=100, low=1, high=10_000_000, rising=True, whole=True)
RATE = Parameter("sampling_rate", start=0.1, low=1e-6, high=1.0, rising=True)


def test_a_limit_that_meets_the_target_is_the_answer():
    found = calibrate(lambda r: [Charge(Gaussian(50.0, 1.0, r), 2)], RATE, epsilon=5.0, delta=1e-5)
    assert found.value == 1.0


@pytest.mark.parametrize(
    ("charges", "parameter", "epsilon", "told"),
    [
        (
            lambda x: [Charge(Gaussian(1.0 + 3.0 * abs(math.log(x / 6.0))))],
            NOISE,
            0.5,
            r"ε does not fall with sigma",
        ),
        (
            lambda n: [Charge(Gaussian(1.0), int(n))],
            COUNT,
            0.1,
            r"epsilon=0\.1 can't be met: count=1, the smallest",
        ),
    ],
)
def test_targets_that_can_not_be_met_say_so(charges, parameter, epsilon, told):
    with pytest.raises(CalibrationError, match=told):
        calibrate(charges, parameter, epsilon=epsilon, delta=1e-5)


def test_the_exact_search_needs_less_noise_for_the_same_epsilon():
    def charges(sigma):
        screened = PrivateKNN(30, 1.0, Screening(18.0, Gaussian(3 * sigma)), Gaussian(sigma))
        return screened.plan(200, 1, 5)

    fast = calibrate(charges, NOISE, epsilon=2.0, delta=1e-5, exact=False)
    exact = calibrate(charges, NOISE, epsilon=2.0, delta=1e-5)
    assert exact.value < 0.99 * fast.value
    assert 0.999 * 2.0 <= exact.report.epsilon_exact <= 2.0
    assert exact.report.epsilon_pld > 2.0
