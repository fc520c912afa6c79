"""Attacks on whole labelers: honest ones are not accused, and faults put in end to end are found.

Seeds are fixed. A verdict accuses an honest labeler in one run of 1,000 at most.
"""

import dataclasses
import functools
import json

import pytest
import torch

from pl_privknn import Gaussian
from pl_privknn.attacks import many_runs
from pl_privknn.attacks.attack import attack_labeler
from pl_privknn.attacks.guessing import Guesses, refutes_epsilon
from pl_privknn.attacks.many_runs import GivenParts
from pl_privknn.attacks.one_run import score_canaries
from pl_privknn.attacks.target import Target, ledger
from pl_privknn.cli.main import main
from pl_privknn.labelers import (
    GNMAX,
    PATE,
    ClassSums,
    IndKNN,
    NoisySGDTeacher,
    PrivateKNN,
    PublicCurvature,
    ReverseKNN,
    SklearnTeachers,
)
from pl_privknn.labelers.canaries import Evidence
from pl_privknn.labelers.reverse_knn import reverse_knn
from pl_privknn.privacy.noise import NoiseSource, SeededNoise

QUERIES, CLASSES, DELTA = 20, 5, 1e-5


class HalfNoise(NoiseSource):
    """Laplace and Gaussian noise of the half scale, under the same charges."""

    cryptographic = False

    def __init__(self, source):
        self.source = source

    def random_words(self, count):
        return self.source.random_words(count)

    def stream(self, *key):
        return HalfNoise(self.source.stream(*key))

    def normal(self, shape, scale):
        return super().normal(shape, scale / 2)

    def laplace(self, shape, scale):
        return super().laplace(shape, scale / 2)


class LessNoise(HalfNoise):
    """Continuous noise that is so many times too small."""

    def __init__(self, factor, source):
        super().__init__(source)
        self.factor = factor

    def stream(self, *key):
        return LessNoise(self.factor, self.source.stream(*key))

    def normal(self, shape, scale):
        return NoiseSource.normal(self, shape, scale / self.factor)


class SharedNoise(HalfNoise):
    """All rows of a release have the noise of the first."""

    def stream(self, *key):
        return SharedNoise(self.source.stream(*key))

    def normal(self, shape, scale):
        return NoiseSource.normal(self, shape, scale)[:1].expand(shape).clone()

    def laplace(self, shape, scale):
        return NoiseSource.laplace(self, shape, scale)[:1].expand(shape).clone()


def target(labeler, queries=QUERIES, rounds=1, records=60):
    generator = torch.Generator().manual_seed(3)
    public = torch.eye(queries) + 0.01 * torch.randn(queries, queries, generator=generator)
    features = torch.randn(records, queries, generator=generator)
    labels = torch.randint(0, CLASSES, (records,), generator=generator)
    plan = labeler.plan(queries, queries, CLASSES, rounds=rounds)
    adjacency = labeler.adjacencies[0]
    return Target(labeler, features, labels, public, public, CLASSES, rounds, None, plan, DELTA, adjacency)


def attacked(subject, noise=SeededNoise, seed=1, **settings):
    source = SeededNoise(seed) if noise is SeededNoise else noise(SeededNoise(seed))
    return attack_labeler(subject, noise=source, **settings)


@pytest.mark.parametrize("epsilon", [1.0, 2.0])
def test_reverse_knn_in_one_run(epsilon):
    subject = target(ReverseKNN(epsilon=epsilon))
    honest = attacked(subject)
    assert not honest.violated
    assert 0.7 * epsilon < honest.epsilon_lower < epsilon + 0.05
    assert (honest.form, honest.released, honest.canaries, honest.runs) == ("one_run", "counts", 3000, 30)
    assert 1 < honest.smallest_breach < 2
    assert attacked(subject, HalfNoise).violated


def test_an_unpaid_second_round_is_found():
    subject = target(ReverseKNN(epsilon=1.0))
    assert attacked(dataclasses.replace(subject, rounds=2)).violated


def test_a_record_that_votes_twice_is_found(monkeypatch):
    subject = target(ReverseKNN(epsilon=1.0))
    literal = reverse_knn.true_counts
    monkeypatch.setattr(reverse_knn, "true_counts", lambda *given: 2 * literal(*given))
    assert attacked(subject).violated


def test_messages_of_clients():
    honest = attacked(target(ReverseKNN(epsilon=2.0, trust="local")), canaries=1000)
    assert honest.released == "messages"
    assert not honest.violated
    assert 0.6 * 2 < honest.epsilon_lower <= 2.0
    louder = target(ReverseKNN(epsilon=4.0, trust="local"))
    stated = dataclasses.replace(louder, plan=target(ReverseKNN(epsilon=2.0, trust="local")).plan)
    assert attacked(stated, canaries=1000).violated


def test_an_honest_labeler_is_accused_in_the_stated_share_of_repetitions():
    """200 repetitions at 90 %, 100 canaries each: more than 20 + 4.5 deviations has a probability below 1e-4."""
    subject = target(ReverseKNN(epsilon=1.0))
    accused = 0
    for seed in range(200):
        scored = score_canaries(subject, subject.canaries(), 1, SeededNoise(seed))
        accused += refutes_epsilon(Guesses.of(scored.scores, scored.present), 1.0, 0.0, 0.9)
    assert accused <= 20 + 4.5 * 18**0.5


@pytest.mark.parametrize("sigma", [12.0, 7.0])  # ε 2.2 and 4.2 for 20 queries
def test_private_knn_in_many_runs(sigma):
    subject = target(PrivateKNN(k=5, sampling_rate=1.0, noise=Gaussian(sigma)))
    honest = attacked(subject, runs=6000)
    assert (honest.form, honest.released, honest.gaussian) == ("many_runs", "counts", True)
    assert not honest.violated
    assert honest.epsilon_lower <= honest.epsilon_estimate <= honest.epsilon
    assert honest.epsilon_estimate > 0.2 * honest.epsilon
    assert attacked(subject, HalfNoise, runs=6000).violated


def test_runs_of_one_seed_have_noise_of_their_own(monkeypatch):
    """Several calls share one seed; a run that came twice would count for two."""
    monkeypatch.setattr(many_runs, "_AT_ONCE", 100 * QUERIES)
    subject = target(PrivateKNN(k=5, sampling_rate=1.0, noise=Gaussian(12.0)))
    sides = many_runs.score_runs(subject, subject.canaries(), 300, SeededNoise(0))
    assert len({*sides.present.tolist(), *sides.absent.tolist()}) == 600


def test_coins_of_twice_the_rate_are_found():
    subject = target(PrivateKNN(k=1, sampling_rate=0.25, noise=Gaussian(4.0)))
    assert not attacked(subject, runs=4000).violated
    louder = target(PrivateKNN(k=1, sampling_rate=0.5, noise=Gaussian(4.0)))
    assert attacked(dataclasses.replace(louder, plan=subject.plan), runs=4000).violated


def test_pate_with_the_other_parts_held():
    teachers = SklearnTeachers("sklearn.neighbors.KNeighborsClassifier", {"n_neighbors": 1})
    subject = target(PATE(num_teachers=4, teachers=teachers, aggregator=GNMAX(12.0), progress=False))
    honest = attacked(subject)
    assert not honest.violated
    assert honest.released == "counts"
    assert attacked(subject, HalfNoise).violated
    # A record that reaches every teacher, under the plan for one teacher.
    both = _EveryTeacher(num_teachers=4, teachers=teachers, aggregator=GNMAX(12.0), progress=False)
    assert attacked(target(both)).violated


class _EveryTeacher(PATE):
    """All records of the first part go to all teachers."""

    def _train(self, features, labels, num_classes, groups):
        parts = self.partitioner.parts if isinstance(self.partitioner, GivenParts) else None
        assert parts is not None
        everywhere = torch.nn.functional.pad(parts, (0, len(labels) - len(parts))) == 0
        copies = [torch.nonzero(everywhere).flatten()] * 3
        rows = torch.cat([torch.arange(len(labels)), *copies])
        dealt = torch.nn.functional.pad(parts, (0, len(labels) - len(parts)))
        more = torch.cat([torch.full_like(part, teacher) for teacher, part in enumerate(copies, start=1)])
        return self.teachers.train(
            features[rows],
            labels[rows],
            torch.cat([dealt, more]),
            num_classes,
            self.num_teachers,
            lambda share: None,
        )


def test_released_statistics_in_one_run():
    subject = target(ClassSums(epsilon=1.0, delta=DELTA, expected_records=60))
    honest = attacked(subject)
    assert (honest.form, honest.released) == ("one_run", "weights")
    assert not honest.violated
    assert 0.2 < honest.epsilon_lower <= honest.epsilon
    assert honest.epsilon_lower <= honest.epsilon_estimate <= honest.epsilon
    # Not found at half the noise; what the audit says would be found is found.
    assert honest.smallest_breach <= 6
    assert attacked(subject, functools.partial(LessNoise, honest.smallest_breach)).violated


@pytest.mark.parametrize("labeler", ["statistics", "sgd"])
def test_gradients_that_are_not_clipped_are_found(labeler, monkeypatch):
    if labeler == "statistics":
        subject = target(PublicCurvature(epsilon=1.0, delta=DELTA, expected_records=60, releases=2))
        module = "pl_privknn.labelers.statistics.curvature"
    else:
        subject = target(NoisySGDTeacher(sampling_rate=0.5, steps=5, epsilon=1.0, delta=DELTA, clip_norm=0.1))
        module = "pl_privknn.labelers.noisy_sgd"
    honest = attacked(subject, canaries=1000)
    assert not honest.violated
    assert honest.released == "weights"
    monkeypatch.setattr(f"{module}.clip_factors", lambda norms, bound: torch.full_like(norms, 10.0))
    assert attacked(subject, canaries=1000).violated


def test_noise_that_queries_share_is_found():
    """One noise for all queries: each alone is as noisy as stated, their differences are not."""
    for labeler in (ReverseKNN(epsilon=1.0), PrivateKNN(k=5, sampling_rate=1.0, noise=Gaussian(12.0))):
        subject = target(labeler)
        assert attacked(subject, SharedNoise, runs=1000).violated


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


def test_an_attack_leaves_the_budgets_of_the_real_records_alone(tmp_path):
    labeler = IndKNN(
        0.5, 4.0, epsilon=1.0, records={"state_dir": tmp_path / "budgets", "ids": list(range(60))}
    )
    subject = target(labeler)
    placed = subject.canaries()
    attacked_copy = subject.fitted(
        SeededNoise(0),
        torch.cat([subject.features, placed.features]),
        torch.cat([subject.labels, placed.labels]),
    )
    attacked_copy.label(placed.queries, ledger())
    attacked_copy.close()
    assert not (tmp_path / "budgets").exists()
    assert labeler.state_dir == tmp_path / "budgets"
