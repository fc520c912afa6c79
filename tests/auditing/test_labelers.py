"""Attacks on whole labelers: honest ones are not accused, and faults put in end to end are found.

Seeds are fixed. A verdict accuses an honest labeler in one run of 1,000 at most.
"""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from benchmarks.faulty import LessNoise
from pl_privknn import Gaussian
from pl_privknn.auditing import attack_labeler
from pl_privknn.auditing import small_target as table
from pl_privknn.auditing.canaries import Evidence, canaries_of
from pl_privknn.auditing.labelers import score_labeler, target_of_config
from pl_privknn.cli.main import main
from pl_privknn.config import read_document
from pl_privknn.labelers import (
    IndKNN,
    LocalReverseKNN,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    SufficientStatistics,
)
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.shared_noise import SharedNoise
from tests.testing.broken_persons import (
    EachRecordAdds,
    EachRecordCounts,
    EachRecordIsClipped,
    EachRecordVotes,
)

DELTA, QUERIES = 1e-5, 20
HalfNoise = functools.partial(LessNoise, 2.0)


def attacked(subject, noise=SeededNoise, seed=1, **settings):
    source = SeededNoise(seed) if noise is SeededNoise else noise(SeededNoise(seed))
    return attack_labeler(subject, noise=source, **settings)


def test_reverse_knn_in_one_run():
    epsilon = 1.0
    subject = table(ReverseKNN(budget=Budget(epsilon=epsilon)))
    honest = attacked(subject)
    assert not honest.violated
    assert 0.7 * epsilon < honest.epsilon_lower < epsilon + 0.05
    assert (honest.released, honest.canaries, honest.runs) == ("counts", 3000, 30)
    assert attacked(subject, HalfNoise).violated


def test_messages_of_clients():
    honest = attacked(
        table(LocalReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one"))), canaries=1000
    )
    assert honest.released == "messages"
    assert not honest.violated
    assert 0.6 * 2 < honest.epsilon_lower <= 2.0
    louder = table(LocalReverseKNN(budget=Budget(epsilon=4.0, adjacency="replace_one")))
    stated = dataclasses.replace(
        louder, plan=table(LocalReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one"))).plan
    )
    assert attacked(stated, canaries=1000).violated


def test_released_statistics_in_one_run():
    subject = table(SufficientStatistics(budget=Budget(epsilon=1.0, delta=DELTA), private_records=60))
    honest = attacked(subject)
    assert honest.released == "weights"
    assert not honest.violated
    assert 0.2 < honest.epsilon_lower <= honest.epsilon
    assert honest.epsilon_lower <= honest.epsilon_estimate <= honest.epsilon
    assert attacked(subject, functools.partial(LessNoise, 4.0)).violated


def test_what_other_records_add_to_a_release_is_taken_out():
    """The attacker knows them: whoever they are, the same noise and the same coins tell the same of the canaries."""
    subject = table(SufficientStatistics(budget=Budget(epsilon=1.0, delta=DELTA), private_records=60))
    others = dataclasses.replace(
        subject, features=-3 * subject.features.roll(1, dims=1), labels=subject.labels.flip(0)
    )
    (one, _), (other, _) = (score_labeler(each, 1, SeededNoise(0)) for each in (subject, others))
    np.testing.assert_array_equal(one.present, other.present)
    np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=1e-9)
    assert np.abs(one.scores).max() > 0.01


def test_noise_that_queries_share_is_found():
    """One noise for all queries: each alone is as noisy as stated, their differences are not."""
    one_by_one = IndKNN(0.5, Gaussian(1.0), budget=Budget(epsilon=1.0), num_queries=1000)
    voting = PrivateKNN(k=5, sampling_rate=1.0, noise=Gaussian(12.0))
    for labeler in (ReverseKNN(budget=Budget(epsilon=1.0)), voting, one_by_one):
        shared = functools.partial(SharedNoise, 1.0)
        assert attacked(table(labeler), shared, canaries=1000).violated


def test_evidence_is_that_of_least_squares():
    generator = torch.Generator().manual_seed(0)
    each, coins = torch.randn(4, 30, generator=generator).double(), torch.tensor([1.0, 0.0, 1.0, 0.0])
    rest = coins.double() @ each + 9.0 * torch.randn(30, generator=generator).double()
    spread = float((rest - each.sum(dim=0) / 2).square().mean().sqrt())
    evidence = Evidence(4)
    evidence.add(rest, each, 0.01)
    # Literally: minimise |rest − pᵀ·each|²/spread² + 4·|p − ½|².
    stacked = torch.cat([each.T / spread, 2 * torch.eye(4).double()])
    wanted = torch.linalg.lstsq(stacked, torch.cat([rest / spread, torch.ones(4).double()]))[0] - 0.5
    torch.testing.assert_close(evidence.scores(), wanted, rtol=1e-6, atol=1e-8)


def test_the_command_on_the_digits(capsys):
    words = ["--attack", "configs/digits_reverse_knn.yaml", "--canaries", "300", "--seed", "0"]
    assert main(["audit", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["epsilon"] == pytest.approx(1.0, abs=1e-3)
    assert 0 < told["epsilon_lower"] <= 1.0
    assert (told["canaries"], told["confidence"], told["verdict"]) == (300, 0.95, "OK")
    assert main(["audit", "ledger.sqlite", *words]) == 2
    assert "--attack" in capsys.readouterr().err


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
        records={"state_dir": tmp_path / "budgets", "ids": list(range(60))},
    )
    subject = table(labeler)
    placed = canaries_of(labeler, subject.queries, subject.num_classes)
    attacked_copy = subject.fitted(
        SeededNoise(0),
        torch.cat([subject.features, placed.features]),
        torch.cat([subject.labels, placed.labels]),
    )
    attacked_copy.label(placed.queries, FreeLedger())
    attacked_copy.close()
    assert not (tmp_path / "budgets").exists()
    assert labeler.state_dir == tmp_path / "budgets"


OF_PERSONS = {
    "reverse knn": (ReverseKNN, EachRecordCounts, {"budget": Budget(epsilon=1.0)}),
    "class sums": (
        SufficientStatistics,
        EachRecordAdds,
        {"budget": Budget(epsilon=1.0), "private_records": 100},
    ),
    "gradients": (
        PreconditionedGradients,
        EachRecordIsClipped,
        {"budget": Budget(epsilon=1.0), "private_records": 100, "records_per_person": 3, "releases": 2},
    ),
    "private knn": (PrivateKNN, EachRecordVotes, {"k": 5, "sampling_rate": 1.0, "noise": Gaussian(4.0)}),
}


# Verdicts at 99.9 %, seeds are fixed.
@pytest.mark.long("gradients")  # check_labeler finds that fault by the sums themselves
@pytest.mark.parametrize("name", OF_PERSONS)
def test_persons_are_attacked(name):
    ours, broken, settings = OF_PERSONS[name]
    for kind in (ours, broken):
        target = table(kind(**settings), unit="person")
        found = attack_labeler(target, canaries=1000, noise=SeededNoise(1))
        assert found.violated == (kind is broken), kind.__name__
