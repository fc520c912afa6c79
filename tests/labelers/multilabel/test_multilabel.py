"""Multi-label labelers: what they answer, draw and charge."""

import itertools
import math
import pickle

import pytest
import torch
from attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from multilabel_setup import clusters

from pl_privknn.labelers import (
    FixedThresholds,
    LearnedThresholds,
    LinearTeachers,
)
from pl_privknn.labelers.attributes import clip_attributes, swapped_vote_norms
from pl_privknn.labelers.base import stated_plan
from pl_privknn.labelers.pate_training import ClassBalancedPartition, RandomPartition
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, ExponentialArgmax, Gaussian, Laplace
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


@pytest.mark.parametrize("tau", [None, 1.0, 2.5])
@pytest.mark.parametrize("rule", [LearnedThresholds(), FixedThresholds(expected_positives=3)])
def test_knn_labels_clusters(tau, rule):
    features, labels, queries, truth = clusters()
    teacher = attribute_knn(
        k=20, sampling_rate=0.5, tau=tau, noise=Gaussian(1.0), rule=rule, noise_source=SeededNoise(0)
    )
    teacher.fit(features, labels, 5)
    payments = FreeLedger()
    release = teacher.label(queries, payments, max_answers=70)
    assert payments.rows == stated_plan(teacher, 80, 70, 5)
    assert release.labels.shape == release.soft.shape == (80, 5)
    assert release.answered.tolist() == [True] * 70 + [False] * 10
    assert bool((release.labels[70:] == -1).all())
    # At τ = 1 an attribute has heaps at 20, 10 and 5 votes, and a threshold learned from two heaps misses one.
    enough = 0.9 if tau == 1.0 and rule.learns else 0.98
    assert float((release.labels[:70] == truth[:70]).double().mean()) > enough
    assert torch.equal(release.labels[:70], (release.soft[:70] > 0.5).long())


def test_knn_charges_what_it_draws():
    features, labels, queries, _ = clusters()
    teacher = attribute_knn(k=20, sampling_rate=0.5, tau=2, noise=Gaussian(3.0), noise_source=SeededNoise(0))
    teacher.fit(features, labels, 5)
    payments = FreeLedger()
    teacher.label(queries, payments)
    assert [Charge(row.mechanism, row.count).to_record() for row in payments.rows] == [
        {"mechanism": "gaussian", "sigma": 3.0, "l2_sensitivity": 2.0, "sampling_rate": 0.5, "count": 80}
    ]
    # The record alone gives ε again.
    again = account([Charge.from_record(row.to_record()) for row in payments.rows], delta=1e-5)
    assert again.epsilon == account(teacher.plan(80, 80, 5), delta=1e-5).epsilon > 0


def test_noise_of_the_sums_has_the_charged_deviation():
    # Every record has attribute 0 and no other; τ leaves it whole, so sums are (k, 0) plus noise.
    features, labels = torch.randn(40, 2), torch.tensor([[1, 0]]).expand(40, 2).contiguous()
    seen = []

    class Watch(FixedThresholds):
        def __call__(self, noisy, total, tau, deviation):
            seen.append((noisy, deviation))
            return super().__call__(noisy, total, tau, deviation)

    teacher = attribute_knn(10, 1.0, 1.0, Gaussian(7.0), Watch(), noise_source=SeededNoise(1))
    teacher.fit(features, labels, 2)
    teacher.label(torch.randn(4000, 2), FreeLedger())
    noisy, deviation = seen[0]
    assert deviation == 7.0
    # Five standard errors each: below 1e-5 for a right implementation.
    assert (noisy.mean(dim=0) - torch.tensor([10.0, 0.0])).abs().max() < 5 * 7 / math.sqrt(4000)
    assert (noisy.std(dim=0) / 7).log().abs().max() < 5 / math.sqrt(2 * 4000)


def test_empty_question_costs_nothing():
    features, labels, queries, _ = clusters()
    for teacher in (attribute_knn(k=5, sampling_rate=0.5), attribute_pate(4, progress=False)):
        teacher.fit(features, labels, 5)
        payments = FreeLedger()
        assert teacher.label(queries[:0], payments).labels.shape == (0, 5)
        assert teacher.label(queries, payments, max_answers=0).answered.sum() == 0
        assert payments.rows == teacher.plan(80, 0, 5) == []


@pytest.mark.parametrize(
    "teachers",
    [
        LinearTeachers(steps=200, learning_rate=0.1),
    ],
)
def test_pate_labels_clusters(teachers):
    features, labels, queries, truth = clusters()
    pate = attribute_pate(
        12, teachers, tau=2.5, noise=Gaussian(0.5), progress=False, noise_source=SeededNoise(0)
    )
    pate.fit(features / 9, labels, 5)
    votes = pate.votes(queries / 9)
    assert float(votes.sum(dim=1).max()) <= 12 * 2.5 + 1e-9
    payments = FreeLedger()
    release = pate.label(queries / 9, payments)
    assert payments.rows == stated_plan(pate, 80, 80, 5)
    assert payments.rows[0].mechanism.l2_sensitivity == swapped_vote_norms(2.5, 5)[1]
    assert float((release.labels == truth).double().mean()) > 0.95
    assert pickle.loads(pickle.dumps(pate))._trained is None


def test_changed_part_changes_one_teacher():
    features, labels, queries, _ = clusters()
    seen = []
    for changed in (False, True):
        # The same draws, one record's label turned over.
        other = labels.clone()
        if changed:
            other[7] = 1 - other[7]
        pate = attribute_pate(
            6,
            LinearTeachers(steps=30),
            RandomPartition(),
            progress=False,
            noise_source=SeededNoise(2),
        )
        pate.fit(features, other, 5)
        seen.append(pate._trained.predict(queries))
    differing = (seen[0] != seen[1]).any(dim=0).any(dim=1)
    assert int(differing.sum()) <= 1
    distance = clip_attributes(seen[0], 2).sum(dim=1) - clip_attributes(seen[1], 2).sum(dim=1)
    assert float(distance.norm(dim=1).max()) <= swapped_vote_norms(2, 5)[1] + 1e-9


def test_pate_deals_out_persons():
    features, labels, _, _ = clusters()
    dealt = []

    class Watched(LinearTeachers):
        def train(self, features, labels, parts, *rest):
            dealt.append(parts)
            return super().train(features, labels, parts, *rest)

    pate = attribute_pate(5, Watched(steps=2), progress=False)
    pate.private_owners = torch.arange(240) // 6
    pate.fit(features, labels, 5)
    assert all(len(part.unique()) == 1 for part in dealt[0].split(6))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("k", [1, 2])
def test_reverse_knn_moves_within_its_sensitivity(adjacency, k):
    generator = torch.Generator().manual_seed(6)
    queries = torch.randn(6, 2, generator=generator)
    rows = torch.tensor(list(itertools.product([0, 1], repeat=3)))
    places = torch.randn(16, 2, generator=generator)
    for tau in (None, 1.0, 1.5):
        teacher = attribute_reverse_knn(k=k, tau=tau, epsilon=2.0, adjacency=adjacency)
        mechanism = teacher.mechanism(3)
        alone = []
        for place in places:
            for row in rows:
                teacher.fit(place[None], row[None], 3)
                alone.append(teacher.counts(queries).flatten())
        alone = torch.stack(alone)
        moved = alone if adjacency == "add_remove" else (alone[:, None] - alone[None]).flatten(0, 1)
        l1 = float(moved.abs().sum(dim=1).max())
        assert l1 <= mechanism.l1_sensitivity + 1e-9
        assert l1 > 0.99 * mechanism.l1_sensitivity
        gaussian = attribute_reverse_knn(k=k, tau=tau, noise=Gaussian(1.0), adjacency=adjacency).mechanism(3)
        l2 = float(moved.norm(dim=1).max())
        assert l2 <= gaussian.l2_sensitivity + 1e-9
        assert l2 > 0.99 * gaussian.l2_sensitivity
        assert mechanism.pure_epsilon(adjacency) == pytest.approx(2.0)


def test_reverse_knn_labels_clusters():
    features, labels, queries, truth = clusters(per_cluster=2000)
    teacher = attribute_reverse_knn(tau=4.0, epsilon=1.0, abstain=2.0, noise_source=SeededNoise(0))
    teacher.fit(features, labels, 5)
    payments = FreeLedger()
    release = teacher.label(queries, payments, max_answers=60)
    assert payments.rows == stated_plan(teacher, 80, 60, 5, rounds=1)
    assert 30 <= int(release.answered.sum()) <= 60
    right = release.labels[release.answered] == truth[release.answered]
    assert float(right.double().mean()) > 0.95
    # A query that no record is near to is refused.
    far = torch.cat([queries, torch.full((1, 2), 500.0)])
    assert int(teacher.label(far, FreeLedger()).labels[-1, 0]) == -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: attribute_knn(5, 0.5),
        lambda: attribute_pate(3, progress=False),
        lambda: attribute_reverse_knn(epsilon=1.0),
    ],
)
def test_tables_that_do_not_fit_are_refused(make):
    features, labels, queries, _ = clusters()
    for bad in (labels[:, 0], labels[:, :4], labels.float(), labels * 2):
        with pytest.raises(ValueError, match="labels"):
            make().fit(features, bad, 5)
    with pytest.raises(ValueError, match="features"):
        make().fit(features * math.nan, labels, 5)
    with pytest.raises(RuntimeError, match="private table"):
        make().label(queries, FreeLedger())


def test_parameters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="noise"):
        attribute_knn(noise=ExponentialArgmax(5.0))
    with pytest.raises(ValueError, match="tau"):
        attribute_knn(tau=0)
    with pytest.raises(ValueError, match="l2_sensitivity"):
        attribute_knn(tau=2, noise=Gaussian(5.0, 1.4)).plan(5, 5, 10)
    with pytest.raises(ValueError, match="k=300"):
        attribute_knn(sampling_rate=1.0).fit(*clusters()[:2], 5)
    with pytest.raises(ValueError, match="partitioner"):
        attribute_pate(partitioner=ClassBalancedPartition())
    with pytest.raises(ValueError, match="epsilon"):
        attribute_reverse_knn()
    with pytest.raises(ValueError, match="epsilon"):
        attribute_reverse_knn(epsilon=1.0, noise=Laplace(1.0))
    teacher = attribute_reverse_knn(k=3, epsilon=1.0)
    teacher.fit(*clusters()[:2], 5)
    with pytest.raises(ValueError, match="fewer than k=3"):
        teacher.label(torch.zeros(2, 2), FreeLedger())
