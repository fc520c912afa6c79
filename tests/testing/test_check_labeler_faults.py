"""Every broken labeler is caught, by the check that is meant for it."""

import dataclasses

import broken_labelers as broken
import pytest
import torch

from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LinearTeachers,
    LocalReverseKNN,
    NoisySGDTeacher,
    PrivateKNN,
    Screening,
    noisy_sgd,
)
from pl_privknn.labelers.ind_knn import engine as ind_knn_engine
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.testing import LabelerCheckError, check_labeler
from tests.setup.grouped import grouped
from tests.setup.nearest_teachers import NearestTeachers
from tests.testing import broken_answers
from tests.testing.broken_persons import (
    EachRecordAdds,
    EachRecordCounts,
    EachRecordIsClipped,
    EachRecordVotes,
)

FAULTS = {
    "DrawsFirst": "payments: draws before it charges",
    "ChargesOneForAll": r"sensitivity under add_remove.* of \d+ records with and without record .*moves gaussian",
    "DrawsOneByOne": "draws more than it charged: 2 releases of gaussian drawn, 1 charged so far",
    "PlansTooLittle": r"charges 12 releases .* but plan\(12, 12, 5, rounds=1\) has 6",
    "PlansNothing": r"plan: plan returns \[\]",
    "ChargesNothing": "label charged nothing",
    "StatesNoAdjacency": r"states adjacencies=\(\) and",
    "StatesAnotherAdjacency": "states adjacencies=.'replace_one',. and .* not the labeler's .'add_remove',.",
    "StatesNoSource": "and noise=None, and not the labeler",
    "HoldsUnderNoAdjacency": "plan: adjacencies names 'replace_one', under which its plan has no cost",
    "AnswersAfterRefusal": "answers although charge 1 was refused",
    "DrawsAfterRefusal": "continues to draw or charge after charge 1 was refused",
    "ThinksItPaid": "refused charges: draws before it charges",
    "ReusesNoise": "fresh noise: .* repeats the noise of stream",
    "NoiseByHand": "label draws noise by itself",
    "AnotherGenerator": r"gaussian draws from SystemNoise\(\) and not",
    "GlobalGenerator": "same again: labels differ",
    "IgnoresMaxAnswers": "max_answers: answers 12 of 12 queries with max_answers=4",
    "TakesNoneForAll": "max_answers: answers 12 of 12 queries with max_answers=0",
    "WrongShape": r"labels: shape \(6, 1\)",
    "WrongDtype": "labels: .*torch.int32",
    "WrongClasses": "labels lie outside",
    "ProbabilitiesOfNothing": "soft: rows .* are not probabilities",
    "RemembersTheFirstTable": "earlier tables: labels differ",
    "SensitivityOne": r"moves gaussian \(L2\) by 1.41421, and 1 was charged",
    "NearMajority": r"moves gaussian \(L2\) by .*, and 1.41421 was charged",
    "OneMoreNeighbor": r"moves laplace \(L1\) by 2, and 1 was charged",
    "OnlyTheFirst": r"'classes of 10, 9, 11, 1 records' of 62 records .* moves laplace \(L1\) by 2, and 1 was",
    "OnlyTheFirstThousand": r"of 1500 records .* moves laplace \(L1\) by 2, and 1 was charged",
    "NoRareClasses": r"'classes of 10, 9, 11, 1 records' of 62 .* moves laplace \(L1\) by 10, and 1 was charged",
    "NoRareClassesOfReplaced": r"under replace_one.*moves gaussian \(L2\) by 9.89949, and 1.41421 was charged",
    "NoClassesAtAll": r"sensitivity under add_remove: nothing .*\(L1\) at most 0 of 1.* private_records or pairs",
    "AddsUnderReplacement": r"sensitivity under replace_one.*moves laplace \(L1\) by 2, and 1 was charged",
    "UnclippedVotes": r"moves gaussian \(L2\) by .*, and 2 was charged",
    "ScreensTheSum": r"moves noisy_screening \(largest count\) by 2, and 1 was charged",
    "RawProbabilities": "noise alone: soft differ",
    "AsksWhatIsSure": "depends on the private table",
    "TellsTheSize": "noise alone: score_deviation differ",
    "CoinsAtAHigherRate": "tosses coins of probability 0.8, but what it charged has sampling_rate 0.5",
    "OneSampleForAll": "samples: tosses 34 coins .* 12 sampled releases of 34 records",
    "SampleOfFixedSize": "label draws noise by itself",
    "FillsUp": "records not drawn.*a record whose coin shows tails moves gaussian",
    "DividesByTheSample": r"moves gaussian \(L2\)",
    "CoinsOfOthers": r"same coins.*moves gaussian \(L2\)",
}


@pytest.mark.parametrize("name", ["Honest", "Sampled"])
def test_what_the_faults_are_put_into_is_honest(name):
    report = check_labeler(getattr(broken, name)())
    move = report.largest["multiclass, add_remove"].moves["gaussian (L2)"]
    assert (move.amount, move.allowed) == pytest.approx((2**0.5, 2**0.5))


def test_every_broken_labeler_has_its_check():
    own = {
        name
        for module in (broken, broken_answers)
        for name, cls in vars(module).items()
        if getattr(cls, "__module__", "") == module.__name__
    }
    assert own == {*FAULTS, "Honest", "Sampled"}


def made(name):
    return getattr(broken_answers, name, None) or getattr(broken, name)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    with pytest.raises(LabelerCheckError, match=FAULTS[name]) as caught:
        check_labeler(made(name)())
    message = str(caught.value)
    assert message.startswith(f"check_labeler({name}), ")
    assert "\n" not in message


# ---------------------------------------------------------------------------- faults put into the project's own


class ByRow(Partitioner):
    """A record's part is its position: without one record, all later ones move."""

    def _deal(self, features, labels, num_classes, num_parts, noise):
        return torch.arange(len(labels)) % num_parts


class OnTwoParts(LinearTeachers):
    """Every teacher trains on the next one's part as well."""

    def train(self, features, labels, parts, num_classes, num_teachers, progress):
        both = torch.cat([parts, (parts + 1) % num_teachers])
        return super().train(
            features.repeat(2, 1), labels.repeat(2), both, num_classes, num_teachers, progress
        )


class LabelsOfOthers(LocalReverseKNN):
    """A client sends the label that most clients have."""

    def votes(self, queries):
        nearest, labels = super().votes(queries)
        return nearest, labels.mode(dim=0).values.expand_as(labels)


class NamesOneCellTwice(LocalReverseKNN):
    def votes(self, queries):
        nearest, labels = super().votes(queries)
        return nearest[:, :1].expand(-1, self.k), labels


class EachRecordIsDealt(PATE):
    """It deals out records, and persons have several."""

    def _train(self, features, labels, num_classes, owners):
        return super()._train(features, labels, num_classes, None)


class StatesRecords(PrivateKNN):
    """It charges for records where persons are protected."""

    def label(self, queries, ledger, max_answers=None):
        self.private_owners = None
        return super().label(queries, ledger, max_answers)


def pate(teachers=None, partitioner=None, cls=PATE):
    teachers = teachers if teachers is not None else LinearTeachers(steps=3, batch_size=8)
    return cls(6, teachers, partitioner, noise=Gaussian(2.0), progress=False)


def local(cls):
    return cls(k=2, budget=Budget(epsilon=1.0, adjacency="replace_one"))


PERSONS = r"sensitivity under \w+, persons"
PLANTED = {
    "parts by row number": (lambda: pate(partitioner=ByRow()), r"under add_remove.*moves gaussian \(L2\)"),
    "a teacher on two parts": (
        lambda: pate(OnTwoParts(steps=3, batch_size=8)),
        r"moves gaussian \(L2\) by .* and 1.41421 was charged",
    ),
    "labels of others": (
        lambda: local(LabelsOfOthers),
        r"moves pure_dp \(answers\) by \d+, and 1 was charged",
    ),
    "one cell twice": (lambda: local(NamesOneCellTwice), "names a cell twice"),
    "each record votes": (lambda: EachRecordVotes(5, 1.0), PERSONS),
    "each record counts": (lambda: EachRecordCounts(1, budget=Budget(epsilon=1.0)), PERSONS),
    "each record adds": (lambda: EachRecordAdds(noise_multiplier=2.0), PERSONS),
    "each record is clipped": (
        lambda: EachRecordIsClipped(noise_multiplier=2.0, releases=2, records_per_person=3),
        PERSONS,
    ),
    "each record is dealt": (lambda: pate(NearestTeachers(), cls=EachRecordIsDealt), PERSONS),
    "states records": (lambda: StatesRecords(5, 1.0), "persons"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_caught(name):
    make, message = PLANTED[name]
    with pytest.raises(LabelerCheckError, match=message) as caught:
        check_labeler(make())
    assert "\n" not in str(caught.value)


def stream(**settings):
    return IndKNN(
        0.5,
        Gaussian(1.0),
        **grouped(IndKNN, **settings, record_budgets={"rho": 0.08, "count_noise": Gaussian(4.0)}),
    )


@pytest.mark.parametrize(
    "quiet",
    [{}, {"sigma2": 0.5}, {"sigma1": 2.0}],
    ids=["spent budgets vote on", "quiet votes", "quiet count"],
)
def test_stream_with_a_fault_is_caught(monkeypatch, quiet):
    original = ind_knn_engine.ask

    def ask(parameters, *given):
        return original(dataclasses.replace(parameters, **quiet), *given)

    if not quiet:
        monkeypatch.setattr(ind_knn_engine.IndKNNEngine, "_settle", lambda self: None)
    monkeypatch.setattr(ind_knn_engine, "ask", ask)
    with pytest.raises(LabelerCheckError, match="moves stream of gaussian releases"):
        check_labeler(stream(), num_classes=3)


def test_stream_whose_queries_share_noise_is_caught(monkeypatch):
    original = ind_knn_engine.ask
    monkeypatch.setattr(
        ind_knn_engine, "ask", lambda *given: original(*given[:-2], given[-2].stream("all"), given[-1])
    )
    with pytest.raises(LabelerCheckError, match="fresh noise: a later draw repeats the noise of stream"):
        check_labeler(stream())


def sgd():
    return NoisySGDTeacher(0.3, 10, steps=4, noise_multiplier=1.0, model={"components": 4, "soft": True})


def test_a_step_by_the_true_batch_size_is_caught(monkeypatch):
    sizes, original = [1], noisy_sgd.poisson_sample

    def noted(count, rate, noise):
        drawn = original(count, rate, noise)
        sizes.append(max(1, len(drawn)))
        return drawn

    monkeypatch.setattr(noisy_sgd, "poisson_sample", noted)
    batch_size = property(lambda self: sizes[-1], lambda self, value: None)
    monkeypatch.setattr(NoisySGDTeacher, "expected_batch_size", batch_size, raising=False)
    with pytest.raises(LabelerCheckError, match=r"noise alone: soft differ"):
        check_labeler(sgd())


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        (
            "clip_factors",
            lambda norms, clip_norm: torch.ones_like(norms),
            r"moves gaussian \(L2\) by .*, and 0.25 was charged",
        ),
        (
            "poisson_sample",  # a batch of fixed size
            lambda count, rate, noise: torch.arange(count // 3),
            r"samples: tosses 0 coins of probability 0.3",
        ),
    ],
)
def test_noisy_sgd_with_a_fault_is_caught(monkeypatch, name, fault, told):
    monkeypatch.setattr(noisy_sgd, name, fault)
    with pytest.raises(LabelerCheckError, match=told):
        check_labeler(sgd())


def test_one_sample_for_screening_and_answer_is_caught(monkeypatch):
    original = PoissonNeighbors.votes

    def votes(self, ranked, coins=None):
        self.first = getattr(self, "first", None)
        if self.first is None:
            self.first = original(self, ranked, coins)
            return self.first
        again, self.first = self.first[: len(ranked)], None
        return again

    monkeypatch.setattr(PoissonNeighbors, "votes", votes)
    with pytest.raises(
        LabelerCheckError, match=r"samples: tosses 408 coins .* 24 sampled releases of 34 records"
    ):
        check_labeler(PrivateKNN(5, 0.5, Screening(3, Gaussian(1.0)), Gaussian(3.0)))
