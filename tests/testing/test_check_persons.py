"""check_labeler with persons of several records: ours keep the promise, and what protects records alone is found."""

import pytest
from broken_persons import EachRecordAdds, EachRecordCounts, EachRecordIsClipped, EachRecordVotes

from pl_privknn import PrivateKNN
from pl_privknn.labelers import (
    GNMAX,
    PATE,
    Attributes,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateRadius,
    ReverseKNN,
    SufficientStatistics,
)
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.testing import LabelerCheckError, check_labeler

LABELERS = {
    "private knn": lambda: PrivateKNN(5, 1.0),
    "sampled": lambda: PrivateKNN(5, 0.5),
    "attributes": lambda: PrivateKNN(5, 1.0, attributes=Attributes(tau=2)),
    "radius": lambda: PrivateRadius(radius=2.0, public_share=None, sampling_rate=0.5),
    "reverse knn": lambda: ReverseKNN(2, 1.0),
    "replaced": lambda: ReverseKNN(1, noise=Gaussian(5.0), adjacency="replace_one"),
    "reverse attributes": lambda: ReverseKNN(1, 1.0, attributes=Attributes(tau=2)),
    "local": lambda: ReverseKNN(1, 1.0, trust="local"),
    "pate": lambda: PATE(6, LinearTeachers(steps=5), aggregator=GNMAX(2.0), progress=False),
    "class sums": lambda: SufficientStatistics(noise_multiplier=2.0),
    "class sums of three": lambda: SufficientStatistics(noise_multiplier=2.0, records_per_person=3),
    "replaced sums of three": lambda: SufficientStatistics(
        noise_multiplier=2.0, records_per_person=3, adjacency="replace_one"
    ),
    "gradients": lambda: PreconditionedGradients(noise_multiplier=2.0, releases=2),
    "gradients of two": lambda: PreconditionedGradients(
        noise_multiplier=2.0, releases=2, records_per_person=2
    ),
    "noisy sgd": lambda: NoisySGDTeacher(sampling_rate=0.5, steps=3, noise_multiplier=2.0),
    "noisy sgd of two": lambda: NoisySGDTeacher(
        sampling_rate=0.5, steps=3, noise_multiplier=2.0, records_per_person=2
    ),
    "attribute gradients": lambda: PreconditionedGradients(
        noise_multiplier=2.0, releases=2, task="multilabel", records_per_person=2
    ),
}


@pytest.mark.parametrize("name", LABELERS)
def test_ours_protect_persons(name):
    largest = check_labeler(LABELERS[name]()).largest
    persons = {key: seen for key, seen in largest.items() if key.endswith(", persons")}
    assert persons
    for key, seen in persons.items():
        records = largest[key.removesuffix(", persons")]
        assert seen.pairs > 5
        assert seen.moves.keys() == records.moves.keys()
        for kind, move in seen.moves.items():
            # A person moves a release as far as it is paid for, or nearly so: the bound is no empty one.
            assert move.amount > 0.9 * min(move.allowed, records.moves[kind].amount)


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
