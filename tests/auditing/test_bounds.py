"""Tests of bounds by independent scores, and of attacks that see nothing; seeds are fixed."""

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.auditing.bounds import (
    Guesses,
    Scores,
    audit_scores,
    epsilon_of_guesses,
    gaussian_mu_of_pairs,
    lower_probability,
    refutes_pairs,
    upper_probability,
)
from pl_privknn.auditing.canaries import StepEvidence
from pl_privknn.privacy import Charge, trade_off
from pl_privknn.privacy.mechanisms import Gaussian, Laplace


def gaussian(mu):
    return trade_off([Charge(Gaussian(sigma=1 / mu))])


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (3, 50), (50, 50), (4000, 10_000)])
def test_clopper_pearson_is_scipys(hits, trials):
    interval = stats.binomtest(hits, trials).proportion_ci(0.98, method="exact")
    assert lower_probability(hits, trials, 0.01) == pytest.approx(interval.low, abs=1e-12)
    assert upper_probability(hits, trials, 0.01) == pytest.approx(interval.high, abs=1e-12)


def test_a_true_mu_is_passed_no_more_often_than_stated():
    rng, mu, repeats = np.random.default_rng(0), 1.0, 400
    above = sum(
        gaussian_mu_of_pairs(rng.normal(mu, 1, 400), rng.normal(0, 1, 400), confidence=0.8) > mu
        for _ in range(repeats)
    )
    # At most 0.2 of them may lie above; a count this large has probability below 1e-3 even at 0.2.
    assert 0 < above <= stats.binom.isf(1e-3, repeats, 0.2)


def test_a_true_claim_is_refuted_seldom_and_half_the_noise_nearly_always():
    rng = np.random.default_rng(1)

    def refuted(mu, confidence):
        return refutes_pairs(
            mu + rng.standard_normal(2000), rng.standard_normal(2000), gaussian(0.5), confidence=confidence
        )

    assert sum(refuted(0.5, 0.8) for _ in range(400)) <= stats.binom.isf(1e-3, 400, 0.2)
    assert sum(refuted(1.0, 0.999) for _ in range(20)) >= 18


SCORES = {
    "inverted": lambda present: -1.0 * present,
    "equal": np.zeros_like,
    "empty": lambda present: np.zeros(0),
    "of one canary": lambda present: np.ones(1),
}


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("mechanism", [Gaussian(2.0), Laplace(1.0)], ids=["gaussian", "laplace"])
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("name", SCORES)
def test_scores_that_say_nothing_bound_nothing(name, order, mechanism, independent):
    """In whatever order canaries come that were there and that were not."""
    present = np.arange(1000) < 500 if order else np.arange(1000) >= 500
    scores = SCORES[name](present.astype(float))
    there = present[: len(scores)] if len(scores) != 1 else np.ones(1, dtype=bool)
    seen = Scores("nothing", there, scores, labels=scores, independent=independent)
    found = audit_scores("nothing", seen, [Charge(mechanism)], delta=1e-5)
    assert (found.epsilon_lower, found.epsilon_lower_labels) == (0.0, 0.0)
    assert found.epsilon_estimate in (None, 0.0)
    assert not found.violated


def test_equal_scores_are_guessed_about_by_chance():
    present = np.arange(10_000) < 5000
    right = Guesses.of(np.zeros(10_000), present).right[0]
    assert abs(right - 5000) < 4 * 50
    assert epsilon_of_guesses(Guesses.of(np.zeros(10_000), present), delta=0.0, confidence=0.95) == 0.0


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_scores_of_steps_are_log_likelihood_ratios(rate):
    """Literally, by the densities of the noise."""
    random = np.random.default_rng(3)
    x, lengths, sigma = random.normal(size=(4, 5)), random.uniform(0, 1, (4, 5)), 0.8
    evidence = StepEvidence(5, Gaussian(sigma=sigma, sampling_rate=rate))
    for along, length in zip(x, lengths, strict=True):
        evidence.add(torch.tensor(along), torch.tensor(length))
    there, away = (np.exp(-((x - at) ** 2) / (2 * sigma**2)) for at in (lengths, 0.0))
    wanted = np.log((rate * there + (1 - rate) * away) / away).sum(axis=0)
    np.testing.assert_allclose(evidence.scores.numpy(), wanted, rtol=1e-9)
    np.testing.assert_allclose(evidence.contrast().numpy(), 4 * x.var(axis=0), rtol=1e-9)
