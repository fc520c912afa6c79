"""Every broken labeler is caught, by the check that is meant for it."""

import dataclasses

import broken_labelers as broken
import pytest
import torch

from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LinearTeachers,
    NoisySGDTeacher,
    PrivateKNN,
    Screening,
)
from pl_privknn.labelers.ind_knn import algorithm
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy import Budget, clipped_sums
from pl_privknn.privacy.mechanisms import Gaussian, steps
from pl_privknn.testing import LabelerCheckError, check_labeler
from tests.setup.grouped import grouped

#: The fault, and the message; a string is a class of broken_labelers that needs no arguments.
FAULTS = {
    "DrawsFirst": "payments: draws with Gaussian.*which was not charged before",
    "ChargesOneForAll": r"sensitivity under add_remove.* of \d+ records with and without record .*moves gaussian",
    "DrawsOneByOne": "draws more than it charged: 2 releases of gaussian drawn, 1 charged so far",
    "DrawsTwice": "draws more than it charged: 2 releases of gaussian drawn, 1 charged so far",
    "PlansTooLittle": r"charges 12 releases .* but plan\(12, 12, 5, rounds=1\) has 6",
    "ChargesNothing": "label charged nothing",
    "ChargesAnother": "payments: draws with Gaussian.*which was not charged before",
    "HoldsUnderNoAdjacency": "plan: adjacencies names 'replace_one', under which its plan has no cost",
    "PlansByTheTable": "plan is another one after fit",
    "AnswersAfterRefusal": "answers although charge 1 was refused",
    "DrawsAfterRefusal": "continues to draw or charge after a charge was refused",
    "ThinksItPaid": "refused charges: draws with Gaussian.*which was not charged before",
    "ReusesNoise": "repeats the noise of stream",
    "SeededByDefault": "noise source: .* is seeded",
    "NoiseByHand": "label draws noise by itself",
    "AnotherGenerator": r"gaussian draws from SystemNoise\(\) and not",
    "GlobalGenerator": r"sensitivity under add_remove.*moves gaussian",
    "HalvesTheNoise": "sensitivity under add_remove.*labels differ",
    "IgnoresMaxAnswers": "payments: answers 12 queries with max_answers=4",
    "TakesNoneForAll": "payments: answers 12 queries with max_answers=0",
    "RemembersTheFirstTable": r"moves gaussian \(L2\) by .*, and 1.41421 was charged",
    "SensitivityOne": r"moves gaussian \(L2\) by 1.41421, and 1 was charged",
    "NearMajority": r"moves gaussian \(L2\) by .*, and 1.41421 was charged",
    "OneMoreNeighbor": r"moves laplace \(L1\) by 2, and 1 was charged",
    "OnlyTheFirst": r"'classes of 10, 9, 11, 1 records' of 62 records .* moves laplace \(L1\) by 2, and 1 was",
    "OnlyTheFirstThousand": r"of 1500 records .* moves laplace \(L1\) by 2, and 1 was charged",
    "NoRareClasses": r"'classes of 10, 9, 11, 1 records' of 62 .* moves laplace \(L1\) by 10, and 1 was charged",
    "NoRareClassesOfReplaced": r"under replace_one.*moves gaussian \(L2\) by .*, and 1.41421 was charged",
    "NoClassesAtAll": r"sensitivity under add_remove: nothing .*\(L1\) at most 0 of 1.* private_records or tables",
    "AddsUnderReplacement": r"sensitivity under replace_one.*moves laplace \(L1\) by 2, and 1 was charged",
    "UnclippedVotes": r"moves gaussian \(L2\) by .*, and 2 was charged",
    "ScaledByTheTable": r"moves laplace \(L1\) by .*, and 1 was charged",
    "ClassesOfTheTable": "sensitivity under add_remove: tables 'one record decides'",
    "WeightsByNorm": r"moves gaussian \(L2\) by .*, and 1.41421 was charged",
    "ScreensTheSum": r"moves noisy_screening \(largest count\) by 2, and 1 was charged",
    "RawProbabilities": "probabilities differ between private tables",
    "AsksWhatIsSure": "depends on the private table",
    "TellsTheSize": "score_deviation differ between private tables",
    "RaisesOnRareClasses": "sensitivity under add_remove: tables '.*raises ValueError",
    "Memorises": "'queries that are records'.*labels differ",
    "MajorityOfManyRecords": "'many records' of 1500 records.*labels differ",
    "CoinsAtAHigherRate": "tosses coins of probability 0.8, but what it charged has sampling_rate 0.5",
    "OneSampleForAll": "samples: tosses 34 coins .* 12 sampled releases of 34 records",
    "SampleOfFixedSize": "label draws noise by itself",
    "FillsUp": "samples: a record whose coin shows tails has an influence",
    "DividesByTheSample": r"moves gaussian \(L2\)",
}


def pate(teachers=None, partitioner=None):
    teachers = teachers or LinearTeachers(steps=3, batch_size=8)
    return PATE(6, teachers, partitioner, noise=Gaussian(2.0), progress=False)


def local(cls):
    return cls(k=2, budget=Budget(epsilon=1.0, adjacency="replace_one"))


WITH_ARGUMENTS = {
    "parts by row number": (
        lambda: pate(partitioner=broken.PartsByRow()), r"under add_remove.*moves gaussian \(L2\)",
    ),
    "a teacher on two parts": (
        lambda: pate(broken.TeachersOnTwoParts(steps=3, batch_size=8)), r"moves gaussian \(L2\) by .* and 1.41421",
    ),
    "labels of others": (
        lambda: local(broken.LabelsOfOthers), r"moves pure_dp \(answers\) by \d+, and 1 was charged",
    ),
    "one cell twice": (lambda: local(broken.NamesOneCellTwice), "names a cell twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["Honest", "Sampled"])
def test_what_the_faults_are_put_into_is_honest(name):
    report = check_labeler(getattr(broken, name)())
    move = report.largest["multiclass, add_remove"].moves["gaussian (L2)"]
    assert (move.amount, move.allowed) == pytest.approx((2**0.5, 2**0.5))


@pytest.mark.parametrize("name", [*FAULTS, *WITH_ARGUMENTS])
def test_fault_is_caught(name):
    make, message = WITH_ARGUMENTS.get(name) or (getattr(broken, name), FAULTS[name])
    with pytest.raises(LabelerCheckError, match=message) as caught:
        check_labeler(make())
    told = str(caught.value)
    assert told.startswith(f"check_labeler({type(make()).__name__}), ")
    assert "\n" not in told


# ---------------------------------------------------------------------------- faults put into functions


def stream():
    budgets = {"rho": 0.08, "count_noise": Gaussian(4.0)}
    return IndKNN(0.5, Gaussian(1.0), **grouped(IndKNN, record_budgets=budgets))


@pytest.mark.parametrize(
    "quiet",
    [{}, {"vote_sigma": 0.5}, {"count_sigma": 2.0}],
    ids=["spent budgets vote on", "quiet votes", "quiet count"],
)
def test_stream_with_a_fault_is_caught(monkeypatch, quiet):
    original = algorithm.ask

    def ask(parameters, *given):
        return original(dataclasses.replace(parameters, **quiet), *given)

    if not quiet:
        monkeypatch.setattr(algorithm.IndKNNEngine, "_settle", lambda self: None)
    monkeypatch.setattr(algorithm, "ask", ask)
    with pytest.raises(LabelerCheckError, match="moves stream of gaussian releases"):
        check_labeler(stream(), num_classes=3)


def test_stream_whose_queries_share_noise_is_caught(monkeypatch):
    original = algorithm.ask
    monkeypatch.setattr(
        algorithm, "ask", lambda *given: original(*given[:-2], given[-2].stream("all"), given[-1])
    )
    with pytest.raises(LabelerCheckError, match="a later draw repeats the noise of stream"):
        check_labeler(stream())


def sgd():
    return NoisySGDTeacher(0.3, 10, steps=4, noise_multiplier=1.0, model={"components": 4, "soft": True})


def test_a_step_by_the_true_batch_size_is_caught(monkeypatch):
    sizes, original = [1], steps.poisson_sample

    def noted(count, rate, noise):
        drawn = original(count, rate, noise)
        sizes.append(max(1, len(drawn)))
        return drawn

    monkeypatch.setattr(steps, "poisson_sample", noted)
    batch_size = property(lambda self: sizes[-1], lambda self, value: None)
    monkeypatch.setattr(NoisySGDTeacher, "expected_batch_size", batch_size, raising=False)
    with pytest.raises(LabelerCheckError, match=r"sensitivity under add_remove.*moves gaussian"):
        check_labeler(sgd())


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (clipped_sums, "clip_factors", lambda norms, *bounds: torch.ones_like(norms)),
        (steps, "poisson_sample", lambda count, rate, noise: torch.arange(count // 3)),
    ],
)
def test_noisy_sgd_with_a_fault_is_caught(monkeypatch, place, name, fault):
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(LabelerCheckError, match=r"moves gaussian .*, and 0.25"):
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
