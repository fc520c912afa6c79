"""LiRA against the closed form: Gaussian confidences, whose best test is known."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from benchmarks.membership import confidences, likelihood_ratios, train_networks, true_positive_rates

RATES = np.array([0.001, 0.01, 0.1, 0.5])


def gaussian_runs(shift, runs=64, records=2000, seed=0):
    """Each record has a difficulty of its own, by far the larger part of what its confidences differ by."""
    rng = np.random.default_rng(seed)
    members = rng.random((runs, records)) < 0.5
    return 5 * rng.standard_normal(records) + shift * members + rng.standard_normal(members.shape), members


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_gaussian_confidences_give_the_best_tests_rates(shift):
    """128,000 scores: at 0.1 % some 64 others lie above the threshold, so 4.5 deviations are at most 56 %."""
    sure, members = gaussian_runs(shift)
    found = true_positive_rates(likelihood_ratios(sure, members), members, RATES)
    best = norm.cdf(norm.ppf(RATES) + shift)
    spread = 4.5 / np.sqrt(64_000 * RATES)
    # Means that are estimated from 32 runs cost a little.
    assert (found <= best * (1 + spread)).all()
    assert (found >= 0.85 * best * (1 - spread)).all()


def test_a_run_is_left_out_of_what_it_is_compared_with():
    """Without any difference members score as others do; with its own value in its mean, each would look at home."""
    sure, members = gaussian_runs(0.0, runs=32, records=4000)
    scores = likelihood_ratios(sure, members)
    gap = scores[members].mean() - scores[~members].mean()
    assert abs(gap) < 4.5 * scores.std() / np.sqrt(members.size / 4)


def test_logits_and_rates_literally():
    told = np.log([0.2, 0.5, 0.9])
    np.testing.assert_allclose(confidences(told), np.log([0.2 / 0.8, 1.0, 9.0]))
    assert np.isfinite(confidences([0.0])).all()
    scores, members = np.array([4.0, 3.0, 2.0, 1.0]), np.array([True, False, True, False])
    np.testing.assert_array_equal(true_positive_rates(scores, members, [0.0, 0.5, 1.0]), [0.5, 1.0, 1.0])
    with pytest.raises(ValueError, match="two runs"):
        likelihood_ratios(np.zeros((3, 1)), np.array([[True], [False], [False]]))


def test_networks_learn_their_own_labels_alone():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(40, 20, generator=generator)
    labels = torch.randint(0, 3, (2, 40), generator=generator)
    labels[1, :20] = -1
    told = train_networks(vectors, labels, 3, steps=200)(vectors)
    assert (told[0].argmax(dim=1) == labels[0]).all()
    assert (told[1, 20:].argmax(dim=1) == labels[1, 20:]).all()
    alone = train_networks(vectors, labels[1:], 3, steps=200)(vectors)
    torch.testing.assert_close(told[1], alone[0], rtol=1e-3, atol=1e-3)
