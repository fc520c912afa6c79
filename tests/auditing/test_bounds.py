"""Tests of runs, or canaries, that share nothing: what they refute, at stated error rates and fixed seeds."""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from pl_privknn.auditing.bounds import IndependentCanaries, refutes_at_midpoint, refutes_event
from pl_privknn.labelers.canaries import SampledEvidence
from pl_privknn.privacy import Charge, trade_off
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noisy_steps import noise_for_steps, step_mechanism

DELTA, RATE, STEPS = 1e-5, 0.1, 10


def gaussian(mu):
    return trade_off([Charge(Gaussian(sigma=1 / mu))])


def test_a_true_claim_is_refuted_seldom_at_every_false_positive_rate():
    """All outcomes of the best attack, literally: their probability is below the error, and not far below."""
    present, absent, claim, error = 60, 40, gaussian(1.5), 0.05
    refuted = np.array(
        [
            [
                refutes_event(there, present, away, absent, claim, confidence=1 - error)
                for away in range(absent + 1)
            ]
            for there in range(present + 1)
        ]
    )
    # More of one and fewer of the other never make it less sure.
    assert np.all(np.diff(refuted.astype(int), axis=0) >= 0)
    worst = 0.0
    for rate in np.linspace(0.0, 1.0, 101):
        best = float(claim.true_positive_rate([rate])[0])
        likely = binom.pmf(np.arange(present + 1), present, best)[:, None]
        worst = max(worst, float((likely * binom.pmf(np.arange(absent + 1), absent, rate) * refuted).sum()))
    assert 0.4 * error < worst <= error


def test_too_little_noise_is_found_at_the_middle():
    """μ = 0.5 is claimed and 1 is true."""
    random = np.random.default_rng(0)
    found = sum(
        refutes_at_midpoint(
            random.standard_normal(1000) + 1.0, random.standard_normal(1000), gaussian(0.5), confidence=0.999
        )
        for _ in range(20)
    )
    assert found >= 18


def claim_of(epsilon, rate=RATE, steps=STEPS):
    mechanism = step_mechanism(noise_for_steps(epsilon, DELTA, rate, steps), 1.0, rate)
    plan = [Charge(mechanism, steps)]
    stated = account(plan, delta=DELTA, exact=False).epsilon
    return (
        IndependentCanaries(mechanism, torch.ones(steps, 3000), np.zeros(3000), np.zeros(3000)),
        stated,
        trade_off(plan),
    )


@pytest.mark.long("1.0")
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_an_honest_training_is_accused_in_the_stated_share_of_repetitions(epsilon):
    """200 repetitions at 90 %, 300 canaries: more than 20 + 4.5 deviations has a probability below 1e-4."""
    ideal, stated, claim = claim_of(epsilon)
    few = IndependentCanaries(
        ideal.mechanism, ideal.lengths[:, :300], ideal.scores[:300], ideal.suspected[:300]
    )
    random, accused = np.random.default_rng(1), 0
    for _ in range(200):
        again, present = few.again(1.0, random)
        accused += again.refutes(present, stated, claim, confidence=0.9)
    assert accused <= 20 + 4.5 * 18**0.5


def test_half_the_noise_is_found():
    """By 3,000 canaries of ten steps, at 99.9 %."""
    ideal, stated, claim = claim_of(1.0)
    random = np.random.default_rng(2)
    attacks = [ideal.again(2.0, random) for _ in range(20)]
    assert sum(each.refutes(there, stated, claim, confidence=0.999) for each, there in attacks) >= 18


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_scores_are_log_likelihood_ratios_of_the_mixture(rate):
    """Literally, by the densities of the noise."""
    random = np.random.default_rng(3)
    x, lengths = random.normal(size=(4, 5)), random.uniform(0, 1, (4, 5))
    evidence = SampledEvidence(5, Gaussian(sigma=0.8, sampling_rate=rate))
    for along, length in zip(x, lengths, strict=True):
        evidence.add_step(torch.tensor(along), torch.tensor(length))
    for sigma, scores in ((0.8, evidence.scores()), (0.4, evidence.suspected())):
        with_record = rate * np.exp(-((x - lengths) ** 2) / (2 * sigma**2)) + (1 - rate) * np.exp(
            -(x**2) / (2 * sigma**2)
        )
        wanted = np.log(with_record / np.exp(-(x**2) / (2 * sigma**2))).sum(axis=0)
        np.testing.assert_allclose(scores.numpy(), wanted, rtol=1e-9)
    np.testing.assert_allclose(evidence.contrast().numpy(), 4 * x.var(axis=0), rtol=1e-9)
