"""Attacks on labelers: honest ones are not accused, and less noise is found.

Seeds are fixed. A verdict accuses an honest labeler in one run of 1,000 at most.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from benchmarks.faulty import LessNoise
from pl_privknn import ExponentialArgmax, Gaussian, Laplace
from pl_privknn.auditing import attack_labeler, small_target
from pl_privknn.auditing.attack import score_labeler, target_of_config
from pl_privknn.auditing.canaries import canaries_of
from pl_privknn.cli import main
from pl_privknn.config import read_document
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LocalReverseKNN,
    PrivateKNN,
    ReverseKNN,
    SufficientStatistics,
)
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.nearest_teachers import NearestTeachers


def attacked(labeler, noise=None, canaries=1000, **settings):
    target = small_target(labeler, **settings)
    return attack_labeler(target, canaries=canaries, noise=noise or SeededNoise(1))


#: A labeler, what its attack sees, and a factor by which less noise is found; None where the bound is too weak.
ATTACKED = {
    "reverse knn": (ReverseKNN(budget=Budget(epsilon=1.0)), "counts", 2),
    "reverse knn, replaced": (
        ReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one")), "counts", 2,
    ),
    "private knn": (PrivateKNN(5, 1.0, None, Gaussian(12.6)), "counts", 4),
    "private knn, winners": (PrivateKNN(1, 1.0, None, ExponentialArgmax(20.0)), "labels", 8),
    "private knn, sampled": (PrivateKNN(1, 0.25, None, Gaussian(4.0)), "counts", 8),
    "pate": (PATE(4, NearestTeachers(), noise=Gaussian(10.0), progress=False), "counts", 4),
    "local reverse knn": (
        LocalReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one")), "counts", None,
    ),
    "statistics": (
        SufficientStatistics(budget=Budget(epsilon=1.0, delta=1e-5), private_records=60), "probabilities", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKED)
def test_honest_labelers_pass_and_less_noise_is_found(name):
    labeler, released, factor = ATTACKED[name]
    canaries = (
        1000 if isinstance(labeler, ReverseKNN) else 250
    )  # a run has a hundred of them, or a single one
    honest = attacked(labeler, canaries=canaries)
    assert honest.released == released
    assert not honest.violated
    assert honest.epsilon_lower_bound <= honest.epsilon
    if factor is not None:
        assert attacked(labeler, LessNoise(factor, SeededNoise(1)), canaries).violated


def test_the_bound_of_reverse_knn_is_close():
    honest = attacked(ReverseKNN(budget=Budget(epsilon=1.0)), canaries=3000)
    assert 0.7 < honest.epsilon_lower_bound < 1.0
    assert (honest.canaries, honest.runs, honest.subject) == (3000, 30, "ReverseKNN")


def test_a_stream_of_queries_is_attacked():
    labeler = IndKNN(0.5, Gaussian(1.0), budget=Budget(epsilon=2.0), num_queries=1000)
    honest = attacked(labeler, canaries=60)
    assert (honest.violated, honest.released) == (False, "counts")
    assert honest.epsilon_lower_bound <= honest.epsilon


class MoreCoins(LessNoise):
    """Coins of four times the rate, under the same charges; fair coins are the attack's own."""

    def bernoulli(self, shape, p):
        return super().bernoulli(shape, p if p == 0.5 else min(1.0, 4 * p))


def test_coins_of_a_higher_rate_are_found():
    labeler, _, _ = ATTACKED["private knn, sampled"]
    assert attacked(labeler, MoreCoins(1.0, SeededNoise(1)), canaries=400).violated


class LessThanCharged(PrivateKNN):
    def answer(self, queries, run, max_answers):
        return super().answer(queries, dataclasses.replace(run, noise=LessNoise(8.0, run.noise)), max_answers)


class PlansMoreNoise(ReverseKNN):
    def plan(self, *given, **named):
        return ReverseKNN(noise=Laplace(1.0)).plan(*given, **named)


class Unclipped(ReverseKNN):
    """Each record votes twice."""

    def answer(self, queries, run, max_answers):
        noise = run.pay(self.noise, 1, "counts")
        released = super().answer(queries, self.paying(FreeLedger()), max_answers)
        return dataclasses.replace(released, scores=self.noise.add_noise(2 * self.counts(queries), noise))


def test_code_of_ones_own_is_attacked():
    broken = (
        (LessThanCharged(1, 1.0, None, ExponentialArgmax(20.0)), 250),
        (PlansMoreNoise(noise=Laplace(0.3)), 250),
        (Unclipped(noise=Laplace(1.0)), 1000),
    )
    for labeler, canaries in broken:
        assert attacked(labeler, canaries=canaries).violated, type(labeler).__name__


def test_what_other_records_add_to_a_release_is_taken_out():
    """The attacker knows them: whoever they are, the same noise and the same coins tell the same of the canaries."""
    target = small_target(ReverseKNN(budget=Budget(epsilon=1.0)))
    others = dataclasses.replace(
        target, features=target.features.roll(1, dims=1), labels=target.labels.flip(0)
    )
    (one, _), (other, _) = (score_labeler(each, 1, SeededNoise(0)) for each in (target, others))
    np.testing.assert_array_equal(one.present, other.present)
    np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=1e-6)
    assert one.scores.std() > 0.1


def test_the_command_on_the_digits(capsys):
    words = ["--attack", "configs/digits_reverse_knn.yaml", "--canaries", "300", "--seed", "0"]
    assert main(["audit", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["epsilon"] == pytest.approx(1.0, abs=1e-3)
    assert 0 < told["epsilon_lower_bound"] <= 1.0
    assert (told["canaries"], told["confidence"], told["verdict"]) == (300, 0.95, "OK")
    for wrong in (["audit", "run.sqlite", *words], ["audit"]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"), [({"canaries": 1}, "canaries=1"), ({"confidence": 1.0}, "confidence")]
)
def test_bad_arguments_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        attack_labeler(small_target(ReverseKNN(budget=Budget(epsilon=1.0))), **arguments)


def test_an_extractor_that_mixes_a_batch_is_refused(tmp_path, monkeypatch):
    """As by a run: a private example's vector must depend on that example alone."""
    (tmp_path / "mixing.py").write_text(
        "from pl_privknn.features.base import Extractor\n\n\n"
        "class Standardizing(Extractor):\n"
        "    def __call__(self, images):\n"
        "        flat = images.flatten(1)\n"
        "        return (flat - flat.mean(0)) / (flat.std(0) + 1e-3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    document = read_document("configs/digits_reverse_knn.yaml")
    document["labeling"]["features"] = {"class_path": "mixing.Standardizing"}
    with pytest.raises(ValueError, match="Standardizing"):
        target_of_config(document, "config.yaml")


def test_an_attack_leaves_the_budgets_of_the_real_records_alone(tmp_path):
    labeler = IndKNN(
        0.5,
        Gaussian(4.0),
        budget=Budget(epsilon=1.0),
        identities={"state_dir": tmp_path / "budgets", "ids": list(range(60))},
    )
    target = small_target(labeler)
    placed = canaries_of(labeler, target.queries, target.num_classes)
    attacked_copy = target.with_canaries(SeededNoise(0), placed, torch.tensor([True]))
    attacked_copy.label(placed.queries, FreeLedger())
    attacked_copy.close()
    assert not (tmp_path / "budgets").exists()
    assert labeler.state_dir == tmp_path / "budgets"


class EachRecordCounts(ReverseKNN):
    """It protects records, and persons have several."""

    def drawn_records(self, most=1):
        return torch.arange(len(self.records))


class EachRecordVotes(PrivateKNN):
    """It protects records, and persons have several."""

    def _find(self, records):
        return super()._find(PrivateRecords.of(records.table(), records.labels, records.num_classes))


@pytest.mark.parametrize(
    ("ours", "broken", "settings"),
    [
        (ReverseKNN, EachRecordCounts, {"budget": Budget(epsilon=1.0)}),
        (PrivateKNN, EachRecordVotes, {"k": 5, "sampling_rate": 1.0, "noise": Gaussian(12.6)}),
    ],
)
def test_persons_are_attacked(ours, broken, settings):
    for kind in (ours, broken):
        assert attacked(kind(**settings), canaries=250, unit="person").violated == (kind is broken)
