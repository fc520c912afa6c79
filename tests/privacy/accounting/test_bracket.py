"""Bounds from below, and brackets of whole runs (some two seconds each)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from error_bounds import exact_bracket

from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.accounting.exact import exact_epsilon
from pl_privknn.privacy.accounting.lower_bound import coarsened_gaussian, epsilon_lower
from pl_privknn.privacy.mechanisms import (
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
    ShuffleAmplification,
)

DELTA = 1e-5


@pytest.mark.parametrize(("mu", "rate"), [(0.3, 1.0), (0.3, 0.2), (0.6, 0.1)])
def test_coarsened_gaussian_is_dominated(mu, rate):
    """Against the Gaussian pair's profile by numerical integration."""
    losses = coarsened_gaussian(mu, rate, 2.0**-9)
    x = np.linspace(-14, 14 + mu, 400_001)
    base = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    mixed = base * (1 - rate + rate * np.exp(mu * x - mu * mu / 2))
    for epsilon in (0.0, 0.01, 0.1, 0.2):
        for upper, lower, part in ((mixed, base, losses), (base, mixed, losses.reversed())):
            truth = float(np.maximum(upper - math.exp(epsilon) * lower, 0).sum())
            above = part.losses > epsilon
            found = float((part.upper[above] * -np.expm1(epsilon - part.losses[above])).sum())
            assert found <= truth + 1e-9
            assert found >= 0.95 * truth - 1e-4


@pytest.mark.parametrize(("sigma", "rate", "count"), [(20.0, 1.0, 500), (20.0, 0.2, 3000), (5.0, 0.1, 40)])
def test_gaussian_releases_against_the_lower_bound(sigma, rate, count):
    charges = [Charge(Gaussian(sigma=sigma, l2_sensitivity=math.sqrt(2), sampling_rate=rate), count)]
    truth = epsilon_for_delta(charges, DELTA, method="pld")
    assert 0.998 * truth <= epsilon_lower(charges, delta=DELTA) <= truth
    # Another release beside them, and one without a lower bound of its own, which counts as nothing.
    beside = [*charges, Charge(Laplace(1.0))]
    assert truth < epsilon_lower(beside, delta=DELTA) <= epsilon_for_delta(beside, DELTA, method="pld")
    counted = [*charges, Charge(ShuffleAmplification(1.0, 1000))]
    assert epsilon_lower(counted, delta=DELTA) == epsilon_lower(charges, delta=DELTA)


@pytest.mark.long("add")
@pytest.mark.parametrize("votes", ["add", "swap"])
def test_argmax_family(votes):
    charges = [Charge(ExponentialArgmax(scale=19.4924, votes=votes, sampling_rate=0.15), 300)]
    bracket = exact_bracket(charges, delta=DELTA)
    assert bracket.lower <= bracket.upper <= bracket.coarse <= 1.004 * bracket.lower


def test_a_million_screenings():
    charges = [Charge(NoisyScreening(300, 210, 85, 10, 0.2), 1_000_000)]
    bracket = exact_bracket(charges, delta=DELTA, work=1e9)
    assert bracket.lower <= bracket.upper < bracket.coarse <= 1.01 * bracket.lower


def test_two_families_have_the_width_that_the_docs_state():
    charges = [
        Charge(NoisyScreening(300, 180, 75, 10, 0.15), 2000),
        Charge(ExponentialArgmax(scale=19.4924, votes="swap", sampling_rate=0.15), 735),
    ]
    assert epsilon_lower(charges, delta=DELTA) == pytest.approx(0.8086, abs=5e-5)
    assert exact_epsilon(charges, delta=DELTA) == pytest.approx(0.8359, abs=5e-5)
