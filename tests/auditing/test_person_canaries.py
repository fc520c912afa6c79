"""Attacks whose canaries are persons with several records: ours keep their claims, what protects records does not."""

import pytest
from broken_persons import EachRecordAdds, EachRecordCounts, EachRecordIsClipped, EachRecordVotes

from pl_privknn.auditing.releases import attack_labeler, small_target
from pl_privknn.labelers import PreconditionedGradients, PrivateKNN, ReverseKNN, SufficientStatistics
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise

CASES = {
    "reverse knn": (ReverseKNN, EachRecordCounts, {"epsilon": 1.0}),
    "class sums": (SufficientStatistics, EachRecordAdds, {"epsilon": 1.0, "expected_records": 100}),
    "gradients": (
        PreconditionedGradients,
        EachRecordIsClipped,
        {"epsilon": 1.0, "expected_records": 100, "records_per_person": 3, "releases": 2},
    ),
    "private knn": (PrivateKNN, EachRecordVotes, {"k": 5, "sampling_rate": 1.0, "noise": Gaussian(4.0)}),
}


# Verdicts at 99.9 %, seeds are fixed.
@pytest.mark.long("gradients")  # check_labeler finds that fault by the sums themselves
@pytest.mark.parametrize("name", CASES)
def test_persons_are_attacked(name):
    ours, broken, settings = CASES[name]
    for kind in (ours, broken):
        target = small_target(kind(**settings), unit="person")
        found = attack_labeler(target, canaries=2000, runs=2000, noise=SeededNoise(1), breach=False)
        assert found.violated == (kind is broken), kind.__name__
