"""Private-kNN: the literal algorithm, and counts of screened tables in the accounted family."""

import functools
import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.voting import PrivateKNN, Screening
from pl_privknn.privacy.mechanisms import Gaussian, NoisyScreening
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.refusals import refusals
from tests.setup.scripted_noise import Quiet


def literal_private_knn(features, labels, query, *, k, rate, threshold, sigma1, sigma2, c, rng):
    """One query exactly as the paper words it: sample, search, vote, add noise."""

    def votes():
        sample = rng.random(len(features)) < rate
        distance = ((features[sample] - query) ** 2).sum(1)
        return np.bincount(labels[sample][np.argsort(distance, kind="stable")[:k]], minlength=c)

    if votes().max() + rng.normal(0, sigma1) < threshold:
        return -1
    return int(np.argmax(votes() + rng.normal(0, sigma2, c)))


def test_same_distribution_as_the_literal_algorithm():
    rng = np.random.default_rng(0)
    n, c, k, rate = 40, 3, 7, 0.4
    features, query = rng.normal(size=(n, 2)), np.array([0.3, -0.2])
    # Mostly class 0 near the query, so that the noise has something to spoil.
    labels = np.where(((features - query) ** 2).sum(1) < 0.9, 0, rng.integers(1, c, n))
    settings = {"threshold": 4.0, "sigma1": 1.5, "sigma2": 4.0}
    draws = 6000
    literal = [
        literal_private_knn(features, labels, query, k=k, rate=rate, c=c, rng=rng, **settings)
        for _ in range(draws)
    ]
    labeler = PrivateKNN(
        k, rate, Screening(4.0, Gaussian(1.5)), Gaussian(sigma=4.0), noise_source=SeededNoise(1)
    )
    labeler.fit(PrivateRecords.of(torch.tensor(features, dtype=torch.float32), torch.tensor(labels), c))
    queries = torch.tensor(query, dtype=torch.float32).repeat(draws, 1)
    ours = labeler.label(queries, FreeLedger()).labels.numpy()
    table = [[np.sum(np.asarray(who) == outcome) for outcome in range(-1, c)] for who in (literal, ours)]
    # Two-sample chi-square at a fixed seed: a correct labeler fails for one seed in a thousand.
    assert stats.chi2_contingency(table).pvalue > 1e-3
    # The test has power: half the aggregation noise is told apart.
    broken = PrivateKNN(
        k, rate, Screening(4.0, Gaussian(1.5)), Gaussian(sigma=2.0), noise_source=SeededNoise(1)
    )
    broken.fit(PrivateRecords.of(torch.tensor(features, dtype=torch.float32), torch.tensor(labels), c))
    other = broken.label(queries, FreeLedger()).labels.numpy()
    table[1] = [np.sum(other == outcome) for outcome in range(-1, c)]
    assert stats.chi2_contingency(table).pvalue < 1e-3


def _fitted(labeler, n=60, c=3):
    generator = torch.Generator().manual_seed(0)
    labeler.fit(PrivateRecords.of(torch.randn(n, 4, generator=generator), torch.arange(n) % c, c))
    return labeler


# ------------------------------------------------------------------- tables of screening without sampling

K, CLASSES = 7, 3


@functools.cache
def compared(largest, rate):
    """The count that the screening compares, found from the thresholds that it passes without noise."""
    most = torch.tensor([largest])
    passed = [
        bool(NoisyScreening(K, threshold, 1.0, CLASSES, rate).passes(most, Quiet()))
        for threshold in range(1, K + 1)
    ]
    assert passed == sorted(passed, reverse=True)
    return sum(passed)


def test_counts_of_all_neighbouring_tables_lie_in_the_family():
    # Votes of tables of any size: at most k records vote; a further one comes, or takes another one's place.
    everything = [v for v in itertools.product(range(K + 1), repeat=CLASSES) if sum(v) <= K]
    lowest = -(-K // CLASSES)
    for votes in everything:
        here = compared(max(votes), 1.0)
        assert lowest <= here <= K
        for entering, leaving in itertools.product(range(CLASSES), [None, *range(CLASSES)]):
            there = list(votes)
            there[entering] += 1
            if leaving is not None:
                there[leaving] -= 1
            if min(there) >= 0 and sum(there) <= K:
                assert abs(compared(max(there), 1.0) - here) <= 1


def test_a_sample_may_hold_fewer_records_and_its_counts_stay():
    assert [compared(count, 0.5) for count in range(K + 1)] == list(range(K + 1))


def test_more_than_k_records_are_wanted_for_screening_without_sampling():
    def fit(records, screening, rate=1.0):
        labels = torch.arange(records) % CLASSES
        PrivateKNN(K, rate, screening).fit(PrivateRecords.of(torch.randn(records, 2), labels, CLASSES))

    screening = Screening(4, Gaussian(1.0))
    for records in (K - 1, K):
        with pytest.raises(ValueError, match="more than k private records"):
            fit(records, screening)
    fit(K + 1, screening)
    fit(K, None)
    fit(K - 1, screening, rate=0.5)


test_bad_arguments_are_named = refusals(
    {
        r"sampling_rate=1\.5": lambda: PrivateKNN(10, 1.5),
        r"screening\.threshold=11": lambda: PrivateKNN(10, 0.5, Screening(11, Gaussian(1.0))),
        r"l2_sensitivity=0\.5": lambda: PrivateKNN(10, 0.5, noise=Gaussian(1.0, l2_sensitivity=0.5)),
        "be added to votes": lambda: PrivateKNN(10, 0.5, noise=NoisyScreening(10, 5, 1.0, 3)),
        "fewer than k=100": lambda: _fitted(PrivateKNN(100, 1.0, noise=Gaussian(sigma=1.0))),
        "fit": lambda: PrivateKNN(10).label(torch.zeros(1, 4), FreeLedger()),
    }
)
