"""Attacks on classes of labelers at settings at which one record shows: honest ones pass, and faults are found.

Seeds are fixed. An attack calls a true claim violated for one seed in 1,000 at most.
"""

import pytest

from benchmarks.faulty import LessNoise
from pl_privknn import ExponentialArgmax, Gaussian, Laplace
from pl_privknn.auditing import attack_labeler, small_target
from pl_privknn.labelers import PATE, IndKNN, PrivateKNN, ReverseKNN, Screening
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.nearest_teachers import NearestTeachers

TEACHERS = {"num_teachers": 4, "teachers": NearestTeachers(), "progress": False}
# The other release of screened answers tells next to nothing.
SCREENED = {"screening": Screening(1.5, Gaussian(2.0)), "noise": Gaussian(1e3)}
SETTINGS = {
    "private knn, counts": (PrivateKNN, {"k": 1, "sampling_rate": 0.25, "noise": Gaussian(2.0)}),
    "private knn, winners": (PrivateKNN, {"k": 1, "sampling_rate": 1.0, "noise": ExponentialArgmax(2.0)}),
    "private knn, screening": (PrivateKNN, {"k": 3, "sampling_rate": 1.0, **SCREENED}),
    "pate, counts": (PATE, {**TEACHERS, "noise": Gaussian(10.0)}),
    "pate, screening": (
        PATE,
        {**TEACHERS, "screening": Screening(3.0, Gaussian(4.0)), "noise": Gaussian(1e3)},
    ),
    "reverse knn": (ReverseKNN, {"noise": Laplace(1.0)}),
    "ind knn": (
        IndKNN,
        {"threshold": 0.5, "noise": Gaussian(1.0), "budget": Budget(epsilon=2.0), "num_queries": 1000},
    ),
}


def violated(kind, settings, noise):
    return attack_labeler(small_target(kind(**settings)), canaries=1000, noise=noise).violated


class MoreCoins(LessNoise):
    """Coins of four times the rate, under the same charges; streams keep the class and the factor.

    Fair coins are the attack's own.
    """

    def bernoulli(self, shape, p):
        return super().bernoulli(shape, p if p == 0.5 else min(1.0, 4 * p))


@pytest.mark.long(*(name for name in SETTINGS if name != "pate, counts" and name != "reverse knn"))
@pytest.mark.parametrize("name", SETTINGS)
def test_honest_labelers_pass_and_less_noise_is_found(name):
    assert not violated(*SETTINGS[name], SeededNoise(1))
    assert violated(*SETTINGS[name], LessNoise(4.0, SeededNoise(1)))


def test_coins_of_a_higher_rate_are_found():
    assert violated(*SETTINGS["private knn, counts"], MoreCoins(1.0, SeededNoise(1)))


def test_a_class_of_ones_own_is_run_with_its_own_code():
    class Charges(PrivateKNN):
        def charge_and_draw(self, ledger, mechanism, count, key):
            return LessNoise(4.0, super().charge_and_draw(ledger, mechanism, count, key))

    class Own(ReverseKNN):
        def __init__(self):
            super().__init__(noise=Laplace(0.3))

        def plan(self, *given, **named):
            return ReverseKNN(noise=Laplace(1.0)).plan(*given, **named)

    for kind, settings in ((Charges, SETTINGS["private knn, winners"][1]), (Own, {})):
        assert violated(kind, settings, SeededNoise(1))
