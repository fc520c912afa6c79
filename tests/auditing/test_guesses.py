"""Bounds on ε from correct guesses: their error rates, references, and scores that tell nothing; seeds are fixed."""

import json
import math

import numpy as np
import pytest
from scipy.stats import binom

from pl_privknn.auditing.bounds import (
    SHARES,
    VERDICT,
    Guesses,
    Scores,
    audit_scores,
    epsilon_of_guesses,
    gaussian_inverse,
    rarity,
    refutes_epsilon,
    refutes_trade_off,
)
from pl_privknn.privacy import Charge
from pl_privknn.privacy.mechanisms import Gaussian, Laplace
from tests.auditing.opake_one_run import STORED

CANARIES = 400


def randomised_response(rng, epsilon):
    """Every canary's coin told with ε-randomised response: the worst that ε-DP allows."""
    present = rng.random(CANARIES) < 0.5
    told = present ^ (rng.random(CANARIES) < 1 / (1 + math.exp(epsilon)))
    return Guesses.of(told + 0.001 * rng.random(CANARIES), present)


def gaussian(rng, mu, canaries=200):
    """Every canary's coin told with noise of its own: the worst that μ-Gaussian-DP allows."""
    present = rng.random(canaries) < 0.5
    return Guesses.of(mu * present + rng.standard_normal(canaries), present)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_true_epsilon_is_refuted_in_the_stated_share_of_repetitions(epsilon):
    """1,000 repetitions at 90 %: more than 100 + 4.5 deviations has a probability below 1e-5."""
    rng = np.random.default_rng(0)
    wrong = sum(refutes_epsilon(randomised_response(rng, epsilon), epsilon, 0.0, 0.9) for _ in range(1000))
    assert 5 <= wrong <= 100 + 4.5 * math.sqrt(90)


def test_a_true_trade_off_is_refuted_in_the_stated_share_of_repetitions():
    rng = np.random.default_rng(1)
    wrong = sum(refutes_trade_off(gaussian(rng, 1.0), gaussian_inverse(1.0), 0.9) for _ in range(200))
    assert wrong <= 20 + 4.5 * math.sqrt(18)


def test_bounds_come_near_with_many_canaries():
    rng = np.random.default_rng(2)
    told = [randomised_response(rng, 1.0) for _ in range(10)]
    pooled = Guesses(
        10 * CANARIES,
        tuple(sum(g.made[i] for g in told) for i in range(len(SHARES))),
        tuple(sum(g.right[i] for g in told) for i in range(len(SHARES))),
    )
    assert 0.8 < epsilon_of_guesses(pooled, delta=0.0, confidence=0.95) < 1.0
    louder = gaussian(rng, 3.0, canaries=4000)
    assert refutes_trade_off(louder, gaussian_inverse(1.0), VERDICT)
    assert not refutes_trade_off(louder, gaussian_inverse(3.0), VERDICT)


@pytest.mark.parametrize("right", [0, 5, 30, 38])
def test_delta_term_is_the_papers(right):
    """P[guesses ≥ v] ≤ P[B ≥ v] + 2mδ·max_i P[v > B ≥ v − i]/i, literally."""
    epsilon, delta, canaries, made = 1.0, 1e-3, 60, 40
    likely = math.exp(epsilon) / (1 + math.exp(epsilon))
    at = [binom.pmf(k, made, likely) for k in range(made + 1)]
    largest = max((sum(at[right - i : right]) / i for i in range(1, right + 1)), default=0.0)
    literal = sum(at[right:]) + 2 * canaries * delta * largest
    assert rarity(canaries, made, right, epsilon, delta) == pytest.approx(literal, rel=1e-9)


def test_guesses_are_those_of_the_largest_and_smallest_scores():
    present = np.array([True] * 20 + [False] * 20)
    scores = np.concatenate([np.arange(20) + 100.0, np.arange(20)])
    assert Guesses.of(scores, present).right == Guesses.of(scores, present).made == (40, 20, 8, 4, 2)
    assert Guesses.of(-scores, present).right == (0,) * 5
    assert epsilon_of_guesses(Guesses.of(-scores, present), delta=0.0, confidence=0.95) == 0.0
    # All guesses right certify as much as their number allows, and no more.
    sure = epsilon_of_guesses(Guesses(1000, (1000,), (1000,)), delta=0.0, confidence=0.95)
    assert 5.5 < sure < 6.0


@pytest.mark.parametrize("run", json.loads(STORED.read_text(encoding="utf-8"))["runs"], ids=str)
def test_bounds_of_the_same_guesses_are_those_of_opake(run):
    """Opake searches to 1e-4 and we to 1e-3, both from below."""
    guesses = Guesses(run["guesses"], (run["guesses"],), (run["right"],))
    found = epsilon_of_guesses(guesses, delta=0.0, confidence=run["confidence"])
    assert found == pytest.approx(run["epsilon_lower_bound"], abs=1.1e-3)
    assert found < run["epsilon"]


SCORES = {
    "inverted": lambda present: -1.0 * present,
    "equal": np.zeros_like,
    "empty": lambda present: np.zeros(0),
    "of one canary": lambda present: np.ones(1),
}


@pytest.mark.parametrize("mechanism", [Gaussian(2.0), Laplace(1.0)], ids=["gaussian", "laplace"])
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("name", SCORES)
def test_scores_that_tell_nothing_bound_nothing(name, order, mechanism):
    """In whatever order canaries come that were there and that were not."""
    present = np.arange(1000) < 500 if order else np.arange(1000) >= 500
    scores = SCORES[name](present.astype(float))
    there = present[: len(scores)] if len(scores) != 1 else np.ones(1, dtype=bool)
    found = audit_scores("nothing", Scores("nothing", there, scores), [Charge(mechanism)], delta=1e-5)
    assert found.epsilon_lower_bound == 0.0
    assert (found.violated, found.verdict) == (False, "OK")


def test_equal_scores_are_guessed_about_by_chance():
    present = np.arange(10_000) < 5000
    right = Guesses.of(np.zeros(10_000), present).right[0]
    assert abs(right - 5000) < 4 * 50
