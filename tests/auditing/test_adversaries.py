"""Adversaries of less power: what each puts into the table and asks about, and that no honest teacher is accused."""

import pytest
import torch

from benchmarks.faulty import LessNoise
from pl_privknn import Gaussian
from pl_privknn.auditing import attack_labeler, small_target
from pl_privknn.auditing.canaries import ADVERSARIES
from pl_privknn.cli.main import main
from pl_privknn.labelers import PATE, IndKNN, PrivateKNN, ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.nearest_teachers import NearestTeachers

WEAKER = [adversary for adversary in ADVERSARIES if adversary != "worst"]


LABELERS = {
    "Private-kNN": PrivateKNN(k=5, sampling_rate=1.0, noise=Gaussian(12.61)),  # 20 answers at ε 2
    "PATE": PATE(num_teachers=4, teachers=NearestTeachers(), noise=Gaussian(12.61), progress=False),
    "Ind-KNN": IndKNN(0.5, Gaussian(1.0), budget=Budget(epsilon=2.0), num_queries=1000),
}


def attacked(method, adversary, noise, canaries=300):
    target = small_target(LABELERS[method])
    return attack_labeler(target, canaries=canaries, noise=noise, adversary=adversary)


@pytest.mark.parametrize("adversary", WEAKER)
@pytest.mark.parametrize("method", LABELERS)
def test_an_honest_teacher_is_accused_by_none(method, adversary):
    """Seeds are fixed; a verdict accuses an honest teacher in one run of 1,000 at most."""
    found = attacked(method, adversary, SeededNoise(1), canaries=60 if method == "Ind-KNN" else 300)
    assert not found.violated
    assert found.epsilon_lower <= found.epsilon
    assert found.subject.endswith(f", adversary {adversary}")


@pytest.mark.parametrize("adversary", ["poisoned_private", "no_control"])
def test_a_tenth_of_the_noise_is_found(adversary):
    assert attacked("Private-kNN", adversary, LessNoise(10.0, SeededNoise(1))).violated


class Notes(PrivateKNN):
    """Notes tables and queries, of all its copies."""

    seen: list = []  # noqa: RUF012 - shared by copies

    def __init__(self):
        super().__init__(k=5, sampling_rate=1.0, noise=Gaussian(9.0))

    def fit(self, features, labels, num_classes):
        self.seen.append((features.clone(), labels.clone()))
        super().fit(features, labels, num_classes)

    def label(self, queries, ledger, max_answers=None):
        self.seen.append(queries.clone())
        return super().label(queries, ledger, max_answers)


def seen_of(adversary):
    Notes.seen.clear()
    target = small_target(Notes())
    attack_labeler(target, canaries=8, noise=SeededNoise(3), adversary=adversary)
    tables = {len(one[1]): one for one in Notes.seen if isinstance(one, tuple)}
    (asked,) = torch.unique(torch.stack([one for one in Notes.seen if not isinstance(one, tuple)]), dim=0)
    less, more = (tables[size] for size in sorted(tables))
    assert len(more[1]) == len(less[1]) + 1
    torch.testing.assert_close(more[0][:-1], less[0])
    return target, asked, less, (more[0][-1], int(more[1][-1]))


def test_a_natural_adversary_asks_about_a_record_of_the_table():
    target, asked, (features, labels), (own, label) = seen_of("natural")
    assert bool((asked == own).all())
    (row,) = (target.features == own).all(dim=1).nonzero().flatten().tolist()
    assert label == int(target.labels[row])
    others = torch.arange(len(target.labels)) != row
    assert torch.equal(features, target.features[others])
    assert torch.equal(labels, target.labels[others])


def test_without_control_of_queries_those_of_the_run_are_asked():
    target, asked, (features, _), (own, _) = seen_of("no_control")
    assert torch.equal(asked, target.queries)
    assert torch.equal(features, target.features)
    assert bool((target.public == own).all(dim=1).any())


def test_poisoned_public_examples_are_one_in_ten():
    target, asked, _, (own, _) = seen_of("poisoned_public")
    changed = (asked != target.queries).any(dim=1)
    assert int((asked == own).all(dim=1).sum()) in (2, 3)  # of 20, and the one that was there
    assert int(changed.sum()) <= 2


def test_poisoned_records_lie_at_the_canary_and_share_its_class():
    target, _, (features, labels), (own, label) = seen_of("poisoned_private")
    added = len(labels) - len(target.labels)
    assert added == 2  # half of five neighbors
    assert bool((features[-added:] == own).all())
    assert labels[-added:].tolist() == [label] * added


def test_kernel_votes_are_sums_of_similarities():
    generator = torch.Generator().manual_seed(0)
    features, queries = torch.randn(40, 4, generator=generator), torch.randn(6, 4, generator=generator)
    labels = torch.arange(40) % 3
    labeler = IndKNN(0.3, Gaussian(1.0), budget=Budget(epsilon=1.0), num_queries=10)
    labeler.fit(features, labels, 3)
    cosine = torch.nn.functional.cosine_similarity(queries[:, None].double(), features[None].double(), dim=2)
    kept = torch.where(cosine >= 0.3, cosine, 0.0)
    wanted = kept @ torch.nn.functional.one_hot(labels, 3).double()
    torch.testing.assert_close(labeler.kernel_votes(queries), wanted, rtol=1e-5, atol=1e-5)


def test_adversaries_are_refused_where_they_do_not_fit(capsys):
    with pytest.raises(ValueError, match=r"adversary='natural': ReverseKNN is not a teacher .* leave it out"):
        attack_labeler(small_target(ReverseKNN(budget=Budget(epsilon=1.0))), adversary="natural")
    with pytest.raises(ValueError, match="adversary='strong' must be one of 'worst', 'natural'"):
        attacked("PATE", "strong", SeededNoise(0))
    assert main(["audit", "--attack", "configs/digits_noisy_sgd.yaml", "--adversary", "natural"]) == 2
    assert (
        "--adversary natural applies to labelers, but this configuration trains a model"
        in capsys.readouterr().err
    )
    assert main(["audit", "ledger.sqlite", "--adversary", "natural"]) == 2
    assert "applies to an attack" in capsys.readouterr().err
