"""Empirical audits of mechanisms, and faults in them that must be found.

Seeds are fixed; every audit calls a true claim violated for one seed in 1,000 at most.
"""

import math

import pytest
import torch

from pl_privknn.auditing import audit
from pl_privknn.auditing.mechanisms import experiment_of
from pl_privknn.privacy.mechanisms import (
    Charge,
    Conditional,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
    RandomizedResponse,
)
from pl_privknn.privacy.noise import SeededNoise

ROOT2 = math.sqrt(2.0)


# --- the project's mechanisms


MECHANISMS = [
    Charge(Gaussian(3.7)),
    Charge(Gaussian(10.0, ROOT2, 0.3), 20),
    Charge(Laplace(1.0)),
    Charge(Laplace(4.0, 2.0, 0.5), 8),
    Charge(NoisyScreening(30, 18, 4.0, 10, 0.3), 20),
    Charge(NoisyScreening(30, 18, 4.0, 10), 10),
    Charge(ExponentialArgmax(5.0, "swap"), 10),
    Charge(ExponentialArgmax(5.0, "add", 0.3), 20),
    Charge(RandomizedResponse(0.2, 3, 2)),
    Charge(Conditional(Gaussian(5.0), "a condition"), 2),
]


@pytest.mark.parametrize("charge", MECHANISMS, ids=lambda c: f"{c.mechanism.label}-{c.count}")
def test_every_mechanism_stays_under_its_claim(charge):
    result = audit([charge], experiment_of([charge]), trials=20_000, noise=SeededNoise(1))
    assert result.verdict == "OK"
    assert result.epsilon_lower <= result.epsilon


def test_the_bound_comes_close_for_one_gaussian_release():
    charges = [Charge(Gaussian(3.73))]
    result = audit(charges, experiment_of(charges), trials=200_000, noise=SeededNoise(2))
    assert 0.9 < result.epsilon < 2.1
    assert result.gaussian
    assert 0.8 * result.epsilon < result.epsilon_estimate <= result.epsilon


def test_the_bound_comes_close_for_pure_dp():
    charges = [Charge(RandomizedResponse.for_epsilon(1.0))]
    result = audit(charges, experiment_of(charges), trials=50_000, noise=SeededNoise(3))
    assert 0.9 < result.epsilon_lower <= result.epsilon == pytest.approx(1.0, abs=1e-4)


# --- faults that must be found


@pytest.mark.parametrize(
    ("claimed", "drawn", "count"),
    [
        # Half the noise.
        (Gaussian(3.7), Gaussian(1.85), 1),
        (Gaussian(10.0, ROOT2, 0.3), Gaussian(5.0, ROOT2, 0.3), 40),
        (Laplace(2.0), Laplace(1.0), 2),
        (NoisyScreening(30, 18, 8.0, 10), NoisyScreening(30, 18, 4.0, 10), 20),
        (ExponentialArgmax(8.0, "swap"), ExponentialArgmax(4.0, "swap"), 20),
        # Published code drew σ 5 and accounted σ 25.
        (Gaussian(25.0, ROOT2), Gaussian(5.0, ROOT2), 8),
        # λ is the inverse of a scale.
        (Laplace(4.0), Laplace(1 / 4.0), 8),
        # Votes of the k nearest: a record that enters pushes another one out.
        (Gaussian(4.0, 1.0), Gaussian(4.0, ROOT2), 8),
        (ExponentialArgmax(6.0, "add"), ExponentialArgmax(6.0, "swap"), 8),
        (Laplace(6.0, 1.0), Laplace(6.0, 2.0), 8),
    ],
    ids=repr,
)
def test_other_noise_or_sensitivity_than_was_claimed_is_found(claimed, drawn, count):
    experiment = experiment_of([Charge(drawn, count)])
    result = audit([Charge(claimed, count)], experiment, trials=20_000, noise=SeededNoise(4))
    assert result.verdict == "VIOLATED"


def test_coins_at_another_rate_than_the_accounted_one_are_found():
    claimed = [Charge(Gaussian(2.0, 1.0, 0.25), 10)]
    broken = audit(claimed, experiment_of(claimed, coin_rate=0.5), trials=20_000, noise=SeededNoise(6))
    assert broken.verdict == "VIOLATED"
    kept = audit(claimed, experiment_of(claimed, coin_rate=0.25), trials=20_000, noise=SeededNoise(6))
    assert kept.verdict == "OK"


def test_low_bits_of_floating_point_noise_give_more_away_than_is_accounted():
    """Mironov (2012), as an audit sees it; whole-number noise has no such bits."""
    claimed = [Charge(Laplace(1.0))]
    to_the_last_bit = audit(claimed, experiment_of(claimed, digits=None), noise=SeededNoise(9))
    assert to_the_last_bit.epsilon_lower > 1.2 * to_the_last_bit.epsilon

    def on_whole_numbers(present, runs, noise):
        released = Laplace(1.0).add_noise(torch.full((runs,), int(present)), noise).numpy()
        return abs(released) - abs(released - 1)

    assert audit(claimed, on_whole_numbers, noise=SeededNoise(9)).verdict == "OK"
