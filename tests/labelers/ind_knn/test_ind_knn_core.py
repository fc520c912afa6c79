"""One turn of Algorithm 3, compiled, against the same arithmetic over whole arrays, bit for bit."""

import math

import numpy as np
import pytest

from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, ask

RECORDS, CLASSES = 400, 5


def over_arrays(parameters, near, kappa, labels, left, public_votes, num_public, draws, copies):
    """No loop over records: what numpy makes of the steps, one after another."""
    counted = float(parameters.costs(parameters.count_cost))
    active = left[near] >= counted
    near, kappa = near[active], kappa[active]
    count = max(copies * len(near) + num_public + parameters.sigma1 * draws[0], parameters.min_count)
    after = left[near] - counted
    deviation = parameters.sigma2 * math.sqrt(count)
    with np.errstate(over="ignore"):
        full = parameters.costs((kappa / deviation) ** 2 / 2)
    cut = deviation * np.sqrt(2 * parameters.quantum * after) * (1 - 1e-12)
    part = np.where(full <= after, kappa, np.minimum(kappa, cut))
    left[near] = after - np.minimum(full, after)
    votes = copies * np.bincount(labels[near], part, CLASSES) + public_votes
    return count, votes + deviation * draws[1:]


@pytest.mark.parametrize("copies", [1, 13])
# With the smallest σ2 the cost of a whole vote is far beyond what fits into 64 bits of quanta, or is infinite.
@pytest.mark.parametrize("sigma2", [0.5, 1e-3, 1e-12, 1e-200])
def test_equals_whole_arrays(sigma2, copies):
    rng = np.random.default_rng(1)
    parameters = IndKNNParameters.for_epsilon(
        1.0, 1e-5, threshold=0.2, sigma2=sigma2, num_queries=60, min_count=40.0
    )
    labels = rng.integers(0, CLASSES, RECORDS)
    start = np.full(RECORDS, float(parameters.quanta(np.array(parameters.budget))))
    ours, theirs = start.copy(), start.copy()
    spent_out = 0
    for _ in range(300):
        near = np.flatnonzero(rng.random(RECORDS) < 0.2)
        kappa, draws = rng.uniform(0.2, 1.0, len(near)), rng.normal(size=1 + CLASSES)
        public_votes, num_public = rng.uniform(0, 3, CLASSES), int(rng.integers(0, 4))
        given = (near, kappa, labels)
        released = ask(parameters, *given, ours, public_votes, num_public, draws, copies=copies)
        count, noisy = over_arrays(parameters, *given, theirs, public_votes, num_public, draws, copies)
        assert released.count == count
        np.testing.assert_array_equal(released.noisy, noisy)
        np.testing.assert_array_equal(ours, theirs)
        spent_out += int((ours[near] == 0).sum())
    assert (ours >= 0).all()
    assert (ours <= start).all()
    assert np.array_equal(ours, np.floor(ours))  # whole quanta
    assert spent_out > 0 or sigma2 == 0.5


def test_nobody_near_is_noise_alone():
    parameters = IndKNNParameters(0.5, 2.0, 0.5, 1.0)
    nobody = np.empty(0, np.intp)
    left, draws = np.full(3, 1e10), np.arange(1.0, CLASSES + 2)
    released = ask(parameters, nobody, np.empty(0), np.zeros(3, np.int64), left, np.zeros(CLASSES), 0, draws)
    assert released.count == parameters.min_count
    np.testing.assert_allclose(released.noisy, 0.5 * math.sqrt(parameters.min_count) * draws[1:])
    assert (left == 1e10).all()
