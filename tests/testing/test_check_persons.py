"""check_labeler with persons of several records: ours keep the promise, and what protects records alone is found."""

import pytest
from broken_persons import EachRecordAdds, EachRecordCounts, EachRecordIsClipped, EachRecordVotes
from checked_persons import check_persons_move

from pl_privknn import PrivateKNN
from pl_privknn.labelers import (
    GNMAX,
    PATE,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    SufficientStatistics,
)
from pl_privknn.testing import LabelerCheckError, check_labeler

#: Those of one record a person are among the honest of test_check_labeler.py.
OF_SEVERAL = {
    "class sums of three": SufficientStatistics(noise_multiplier=2.0, records_per_person=3),
    "replaced sums of three": SufficientStatistics(
        noise_multiplier=2.0, records_per_person=3, adjacency="replace_one"
    ),
    "gradients of two": PreconditionedGradients(noise_multiplier=2.0, releases=2, records_per_person=2),
    "noisy sgd of two": NoisySGDTeacher(
        sampling_rate=0.5, steps=3, noise_multiplier=2.0, records_per_person=2
    ),
    "attribute gradients": PreconditionedGradients(
        noise_multiplier=2.0, releases=2, task="multilabel", records_per_person=2
    ),
}


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_ours_protect_persons(name):
    report = check_labeler(OF_SEVERAL[name])
    assert any(key.endswith(", persons") for key in report.largest)
    check_persons_move(report)


class EachRecordIsDealt(PATE):
    """It deals out records."""

    def _train(self, features, labels, num_classes, owners):
        return super()._train(features, labels, num_classes, None)


FAULTS = {
    "private knn": lambda: EachRecordVotes(5, 1.0),
    "reverse knn": lambda: EachRecordCounts(1, 1.0),
    "class sums": lambda: EachRecordAdds(noise_multiplier=2.0),
    "gradients": lambda: EachRecordIsClipped(noise_multiplier=2.0, releases=2, records_per_person=3),
    "pate": lambda: EachRecordIsDealt(6, LinearTeachers(steps=5), aggregator=GNMAX(2.0), progress=False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_protects_records_alone_is_found(name):
    with pytest.raises(LabelerCheckError, match=r"sensitivity under \w+, persons") as found:
        check_labeler(FAULTS[name]())
    assert "\n" not in str(found.value)


def test_a_charge_that_states_records_is_found():
    class StatesRecords(PrivateKNN):
        def label(self, queries, ledger, max_answers=None):
            self.private_owners = None
            return super().label(queries, ledger, max_answers)

    with pytest.raises(LabelerCheckError, match=r"persons"):
        check_labeler(StatesRecords(5, 1.0))
