"""Screening without sampling: which tables it takes, and that every count lies in the accounted family."""

import functools
import itertools

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PrivateKNN, Screening
from pl_privknn.privacy import Gaussian
from pl_privknn.privacy.mechanisms import NoisyScreening
from tests.setup.scripted_noise import Quiet

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


def test_private_knn_wants_more_than_k_records_for_screening_without_sampling():
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
