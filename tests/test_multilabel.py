"""Multi-label labelers: sensitivities by brute force, sums by literal sampling, rules, charges, and a fit."""

import importlib.util
import itertools
import json
import math
import pickle
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.callbacks.label_store import LabelStore
from pl_privknn.datamodules import LabeledImages, PublicDataset, TensorImages
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.labelers import (
    FixedThresholds,
    LearnedThresholds,
    LinearAttributeTeachers,
    MLPAttributeTeachers,
    MultiLabelKNN,
    MultiLabelPATE,
    MultiLabelReverseKNN,
    PrivateKNN,
)
from pl_privknn.labelers.base import Release, merge
from pl_privknn.labelers.multilabel import clip_attributes, single_vote_norms, swapped_vote_norms
from pl_privknn.labelers.multilabel_rules import denoised
from pl_privknn.labelers.pate_partition import ClassBalancedPartition, ShufflePartition
from pl_privknn.neighbors import PoissonNeighbors, PoissonSums
from pl_privknn.privacy.accountant import account
from pl_privknn.privacy.mechanisms import Charge, DiscreteGaussian, Gaussian, Laplace
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students import SupervisedStudent


class Payments:
    """Keeps what was charged, as a ledger does."""

    def __init__(self):
        self.rows = []

    def charge(self, mechanism, count=1):
        self.rows.append(Charge(mechanism, count))
        return len(self.rows) - 1


# ---------------------------------------------------------------------------- sensitivities


@pytest.mark.parametrize("attributes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tau", [None, 0.5, 1, 1.5, 2, 2.7, 3, 10])
def test_norms_are_those_of_all_pairs_of_label_vectors(attributes, tau):
    rows = torch.tensor(list(itertools.product([0, 1], repeat=attributes)))
    votes = clip_attributes(rows, tau)
    if tau is not None:
        assert float(votes.sum(dim=1).max()) <= tau + 1e-12
    differences = votes[:, None] - votes[None]
    l1, l2 = swapped_vote_norms(tau, attributes)
    assert l1 == pytest.approx(float(differences.abs().sum(dim=2).max()), rel=1e-12)
    assert l2 == pytest.approx(float((differences**2).sum(dim=2).max().sqrt()), rel=1e-12)
    single_l1, single_l2 = single_vote_norms(tau, attributes)
    assert single_l1 == pytest.approx(float(votes.sum(dim=1).max()), rel=1e-12)
    assert single_l2 == pytest.approx(float(votes.norm(dim=1).max()), rel=1e-12)
    if tau is not None:
        assert l1 <= 2 * tau + 1e-12
        assert l2 <= min(math.sqrt(2 * tau), math.sqrt(attributes)) + 1e-12


def test_paper_sensitivity_and_theorem_5():
    # CelebA: 40 attributes leave room for two rows of τ = 10 ones, so √(2τ) is exact and RDP is α·τ/σ².
    assert swapped_vote_norms(10, 40) == (20.0, pytest.approx(math.sqrt(20.0), rel=1e-15))
    mechanism = MultiLabelKNN(k=800, sampling_rate=1.0, tau=10, noise=Gaussian(50.0)).mechanism(40)
    orders = torch.tensor([2.0, 8.0, 32.0]).double().numpy()
    assert mechanism.rdp(orders, "add_remove") == pytest.approx(orders * 10 / 50**2, rel=1e-12)
    # Without clipping all ten attributes may turn over.
    assert swapped_vote_norms(None, 10)[1] == pytest.approx(math.sqrt(10))


def test_one_record_moves_the_sums_of_neighbours_by_no_more():
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(40):
        table = torch.randn(30, 2, generator=generator)
        labels = (torch.rand(30, 4, generator=generator) < 0.5).long()
        query = torch.randn(5, 2, generator=generator)
        for tau in (1.0, 2.5):
            whole = PoissonSums(table, clip_attributes(labels, tau), 6, 1.0)
            fewer = PoissonSums(table[1:], clip_attributes(labels[1:], tau), 6, 1.0)
            moved = whole.sums(whole.rank(query)) - fewer.sums(fewer.rank(query))
            l1, l2 = swapped_vote_norms(tau, 4)
            assert float(moved.norm(dim=1).max()) <= l2 + 1e-9
            assert float(moved.abs().sum(dim=1).max()) <= l1 + 1e-9
            worst = max(worst, float(moved.norm(dim=1).max()) / l2)
    assert worst > 0.8  # the bound is nearly met, so the comparison says something


# ---------------------------------------------------------------------------- sums over samples


def test_sums_equal_votes_of_one_hot_rows():
    generator = torch.Generator().manual_seed(1)
    table, query = torch.randn(400, 3, generator=generator), torch.randn(20, 3, generator=generator)
    labels = torch.randint(0, 5, (400,), generator=generator)
    rows = torch.nn.functional.one_hot(labels, 5).double()
    votes = PoissonNeighbors(table, labels, 5, 30, 0.2)
    sums = PoissonSums(table, rows, 30, 0.2)
    counted = votes.votes(votes.rank(query), SeededNoise(3).bernoulli)
    assert torch.equal(sums.sums(sums.rank(query), SeededNoise(3).bernoulli), counted.double())


def test_sums_are_those_of_literal_samples():
    generator = torch.Generator().manual_seed(2)
    table, query = torch.randn(60, 2, generator=generator), torch.zeros(1, 2)
    values = torch.rand(60, 3, generator=generator, dtype=torch.float64)
    order = table.norm(dim=1).argsort()
    # list_length=12 is often too short for 8 of a sample at rate ½, so longer lists are walked as well.
    sums = PoissonSums(table, values, 8, 0.5, list_length=12)
    noise, draws = SeededNoise(4), 3000
    walked = sums.sums(sums.rank(query.expand(draws, 2)), noise.bernoulli)
    literal = torch.empty(draws, 3, dtype=torch.float64)
    for i in range(draws):
        drawn = order[torch.rand(60, generator=generator) < 0.5][:8]
        literal[i] = values[drawn].sum(dim=0)
    # Six comparisons at five standard errors: a right implementation fails with probability below 4e-6.
    error = (walked.var(dim=0) / draws + literal.var(dim=0) / draws).sqrt()
    assert bool(((walked.mean(dim=0) - literal.mean(dim=0)).abs() < 5 * error).all())
    spread = literal.var(dim=0)
    assert bool(((walked.var(dim=0) / spread).log().abs() < 5 * math.sqrt(4 / draws)).all())


@pytest.mark.parametrize(
    "values", [torch.zeros(5, 2), torch.zeros(4, 2).long(), torch.zeros(4), torch.tensor([[math.nan]] * 4)]
)
def test_sums_refuse_values_that_do_not_fit(values):
    with pytest.raises(ValueError, match="values"):
        PoissonSums(torch.zeros(4, 2), values, 2, 0.5)


# ---------------------------------------------------------------------------- rules


def test_fixed_threshold_is_the_stated_one():
    sums = torch.tensor([[39.0, 41.0, 0.0]]).double()
    assert FixedThresholds()(sums, 100, 2, 1.0).gt(0.5).tolist() == [[False, False, False]]
    # 100 votes, τ = 2, five attributes expected: 100 · ½ · 2/5 = 20; with a fraction of 1/4, 10.
    assert FixedThresholds(expected_positives=5)(sums, 100, 2, 1.0).gt(0.5).tolist() == [[True, True, False]]
    assert FixedThresholds(fraction=0.4)(sums, 100, None, 1.0).gt(0.5).tolist() == [[False, True, False]]
    probability = FixedThresholds(fraction=0.4)(sums, 100, None, 3.0)[0, 1]
    scale = math.sqrt(3**2 + 10**2)
    assert float(probability) == pytest.approx(0.5 * (1 + math.erf(1 / scale / math.sqrt(2))), rel=1e-12)


def test_totals_of_each_query():
    sums = torch.tensor([[10.0, 2.0], [10.0, 2.0]]).double()
    totals = torch.tensor([10.0, 30.0]).double()
    assert FixedThresholds()(sums, totals, None, 0.1).gt(0.5).tolist() == [[True, False], [False, False]]
    with pytest.raises(ValueError, match="FixedThresholds"):
        LearnedThresholds()(sums, totals, None, 0.1)


def test_learned_threshold_finds_where_clipping_moved_the_heaps():
    generator = torch.Generator().manual_seed(3)
    truth = (torch.rand(600, 2, generator=generator) < torch.tensor([0.5, 0.2])).long()
    # Agreement gives 90 where 300 would be expected without clipping: half the votes is never reached.
    sums = 90.0 * truth + 12.0 * torch.randn(600, 2, generator=generator, dtype=torch.float64)
    rule = LearnedThresholds(denoise=False)
    assert float(((rule(sums, 300, 2, 12.0) > 0.5).long() == truth).double().mean()) > 0.99
    assert float(((FixedThresholds()(sums, 300, 2, 12.0) > 0.5).long() == truth).double().mean()) < 0.7
    # Few answers: the public threshold.
    few = rule(sums[:20], 300, 2, 12.0)
    assert torch.equal(few, FixedThresholds()(sums[:20], 300, 2, 12.0))


def test_learned_threshold_keeps_the_public_one_where_there_is_one_heap():
    generator = torch.Generator().manual_seed(4)
    sums = 10.0 * torch.randn(500, 3, generator=generator, dtype=torch.float64)
    # Nobody has the attribute: a threshold between the halves of the noise would give it to many.
    decided = LearnedThresholds()(sums, 100, None, 10.0) > 0.5
    assert float(decided.double().mean()) < 0.01


def test_denoising_comes_nearer_to_the_sums_and_knows_how_near():
    generator = torch.Generator().manual_seed(5)
    basis = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    clean = 50 + 30 * torch.randn(2000, 2, generator=generator, dtype=torch.float64) @ basis
    noisy = clean + 20 * torch.randn(2000, 12, generator=generator, dtype=torch.float64)
    estimate, left = denoised(noisy, 20.0)
    error = ((estimate - clean) ** 2).mean(dim=0).sqrt()
    assert bool((error < 0.6 * 20).all())
    # The optimal linear estimate of the true covariance, and the error it should have.
    covariance = 900 * basis.T @ basis
    optimal = covariance @ torch.linalg.inv(covariance + 400 * torch.eye(12, dtype=torch.float64))
    best = (((noisy - 50) @ optimal.T + 50 - clean) ** 2).mean(dim=0).sqrt()
    assert bool((error < 1.1 * best).all())
    # What the rest of the noise is said to be: within a tenth, but where next to nothing is left.
    assert bool(((left - error).abs() < 0.1 * error + 2).all())
    # Too few rows to learn a covariance from: nothing is changed.
    same, untouched = denoised(noisy[:23], 20.0)
    assert torch.equal(same, noisy[:23])
    assert untouched.tolist() == [20.0] * 12


@pytest.mark.parametrize(
    "bad", [{"fraction": 0.0}, {"fraction": 1.0}, {"expected_positives": 0}, {"denoise": 1}]
)
def test_rules_refuse_bad_parameters(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        FixedThresholds(**bad)


# ---------------------------------------------------------------------------- labelers


def clusters(per_cluster=60, seed=0):
    """Four far clusters, each with its own attributes (1 to 4 of 5), and queries near them."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    attributes = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 0], [0, 1, 1, 1, 1]])
    which = torch.arange(4).repeat(per_cluster)
    features = centres[which] + torch.randn(len(which), 2, generator=generator)
    asked = torch.arange(4).repeat(20)
    queries = centres[asked] + torch.randn(80, 2, generator=generator)
    return features, attributes[which], queries, attributes[asked]


@pytest.mark.parametrize("tau", [None, 1.0, 2.5])
@pytest.mark.parametrize("rule", [LearnedThresholds(), FixedThresholds(expected_positives=3)])
def test_knn_labels_clusters(tau, rule):
    features, labels, queries, truth = clusters()
    teacher = MultiLabelKNN(
        k=20, sampling_rate=0.5, tau=tau, noise=Gaussian(1.0), rule=rule, noise_source=SeededNoise(0)
    )
    teacher.fit(features, labels, 5)
    payments = Payments()
    release = teacher.label(queries, payments, max_answers=70)
    assert payments.rows == teacher.plan(80, 70, 5)
    assert release.labels.shape == release.soft.shape == (80, 5)
    assert release.answered.tolist() == [True] * 70 + [False] * 10
    assert bool((release.labels[70:] == -1).all())
    # At τ = 1 an attribute has heaps at 20, 10 and 5 votes, and a threshold learned from two heaps misses one.
    enough = 0.9 if tau == 1.0 and rule.learns else 0.98
    assert float((release.labels[:70] == truth[:70]).double().mean()) > enough
    assert torch.equal(release.labels[:70], (release.soft[:70] > 0.5).long())


def test_knn_charges_what_it_draws():
    features, labels, queries, _ = clusters()
    teacher = MultiLabelKNN(k=20, sampling_rate=0.5, tau=2, noise=Gaussian(3.0), noise_source=SeededNoise(0))
    teacher.fit(features, labels, 5)
    payments = Payments()
    teacher.label(queries, payments)
    assert [row.to_record() for row in payments.rows] == [
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

    teacher = MultiLabelKNN(10, 1.0, 1.0, Gaussian(7.0), Watch(), noise_source=SeededNoise(1))
    teacher.fit(features, labels, 2)
    teacher.label(torch.randn(4000, 2), Payments())
    noisy, deviation = seen[0]
    assert deviation == 7.0
    # Five standard errors each: below 1e-5 for a right implementation.
    assert (noisy.mean(dim=0) - torch.tensor([10.0, 0.0])).abs().max() < 5 * 7 / math.sqrt(4000)
    assert (noisy.std(dim=0) / 7).log().abs().max() < 5 / math.sqrt(2 * 4000)


def test_empty_question_costs_nothing():
    features, labels, queries, _ = clusters()
    for teacher in (MultiLabelKNN(k=5, sampling_rate=0.5), MultiLabelPATE(4, progress=False)):
        teacher.fit(features, labels, 5)
        payments = Payments()
        assert teacher.label(queries[:0], payments).labels.shape == (0, 5)
        assert teacher.label(queries, payments, max_answers=0).answered.sum() == 0
        assert payments.rows == teacher.plan(80, 0, 5) == []


@pytest.mark.parametrize(
    "teachers",
    [
        LinearAttributeTeachers(steps=200, learning_rate=0.1),
        MLPAttributeTeachers(hidden=16, steps=150, learning_rate=0.02),
    ],
)
def test_pate_labels_clusters(teachers):
    features, labels, queries, truth = clusters()
    pate = MultiLabelPATE(
        12, teachers, tau=2.5, noise=Gaussian(0.5), progress=False, noise_source=SeededNoise(0)
    )
    pate.fit(features / 9, labels, 5)
    votes = pate.votes(queries / 9)
    assert float(votes.sum(dim=1).max()) <= 12 * 2.5 + 1e-9
    payments = Payments()
    release = pate.label(queries / 9, payments)
    assert payments.rows == pate.plan(80, 80, 5)
    assert payments.rows[0].mechanism.l2_sensitivity == swapped_vote_norms(2.5, 5)[1]
    assert float((release.labels == truth).double().mean()) > 0.95
    assert pickle.loads(pickle.dumps(pate))._trained is None


def test_changed_part_changes_one_teacher():
    features, labels, queries, _ = clusters()
    seen = []
    for changed in (False, True):
        # ShufflePartition under replace_one: the same draws, one record's label turned over.
        other = labels.clone()
        if changed:
            other[7] = 1 - other[7]
        pate = MultiLabelPATE(
            6,
            LinearAttributeTeachers(steps=30),
            ShufflePartition(),
            progress=False,
            noise_source=SeededNoise(2),
        )
        pate.fit(features, other, 5)
        seen.append(pate._trained.predict(queries))
    differing = (seen[0] != seen[1]).any(dim=0).any(dim=1)
    assert int(differing.sum()) <= 1
    distance = clip_attributes(seen[0], 2).sum(dim=1) - clip_attributes(seen[1], 2).sum(dim=1)
    assert float(distance.norm(dim=1).max()) <= swapped_vote_norms(2, 5)[1] + 1e-9


def test_pate_groups_of_the_data_module():
    features, labels, _, _ = clusters()
    pate = MultiLabelPATE(5, LinearAttributeTeachers(steps=2), groups="data", progress=False)
    with pytest.raises(ValueError, match="private_groups"):
        pate.fit(features, labels, 5)
    dealt = []

    class Watched(LinearAttributeTeachers):
        def train(self, features, labels, parts, *rest):
            dealt.append(parts)
            return super().train(features, labels, parts, *rest)

    pate = MultiLabelPATE(5, Watched(steps=2), groups="data", progress=False)
    pate.private_groups = torch.arange(240) // 6
    pate.fit(features, labels, 5)
    assert all(len(part.unique()) == 1 for part in dealt[0].split(6))
    assert pate.privacy_unit == "group"


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("k", [1, 2])
def test_reverse_knn_moves_within_its_sensitivity(adjacency, k):
    generator = torch.Generator().manual_seed(6)
    queries = torch.randn(6, 2, generator=generator)
    rows = torch.tensor(list(itertools.product([0, 1], repeat=3)))
    places = torch.randn(16, 2, generator=generator)
    for tau in (None, 1.0, 1.5):
        teacher = MultiLabelReverseKNN(k=k, tau=tau, epsilon=2.0, adjacency=adjacency)
        mechanism = teacher.mechanism(3)
        alone = []
        for place in places:
            for row in rows:
                teacher.fit(place[None], row[None], 3)
                alone.append(teacher.sums(queries).flatten())
        alone = torch.stack(alone)
        moved = alone if adjacency == "add_remove" else (alone[:, None] - alone[None]).flatten(0, 1)
        l1 = float(moved.abs().sum(dim=1).max())
        assert l1 <= mechanism.l1_sensitivity + 1e-9
        assert l1 > 0.99 * mechanism.l1_sensitivity
        gaussian = MultiLabelReverseKNN(k=k, tau=tau, noise=Gaussian(1.0), adjacency=adjacency).mechanism(3)
        l2 = float(moved.norm(dim=1).max())
        assert l2 <= gaussian.l2_sensitivity + 1e-9
        assert l2 > 0.99 * gaussian.l2_sensitivity
        assert mechanism.pure_epsilon(adjacency) == pytest.approx(2.0)


def test_reverse_knn_labels_clusters():
    features, labels, queries, truth = clusters(per_cluster=2000)
    teacher = MultiLabelReverseKNN(tau=4.0, epsilon=1.0, abstain=2.0, noise_source=SeededNoise(0))
    teacher.fit(features, labels, 5)
    payments = Payments()
    release = teacher.label(queries, payments, max_answers=60)
    assert payments.rows == teacher.plan(80, 60, 5, rounds=1)
    assert 30 <= int(release.answered.sum()) <= 60
    right = release.labels[release.answered] == truth[release.answered]
    assert float(right.double().mean()) > 0.95
    # A query that no record is near to is refused.
    far = torch.cat([queries, torch.full((1, 2), 500.0)])
    assert int(teacher.label(far, Payments()).labels[-1, 0]) == -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiLabelKNN(5, 0.5),
        lambda: MultiLabelPATE(3, progress=False),
        lambda: MultiLabelReverseKNN(epsilon=1.0),
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
        make().label(queries, Payments())


def test_parameters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="noise"):
        MultiLabelKNN(noise=DiscreteGaussian(5.0))
    with pytest.raises(ValueError, match="tau"):
        MultiLabelKNN(tau=0)
    with pytest.raises(ValueError, match="l2_sensitivity"):
        MultiLabelKNN(tau=2, noise=Gaussian(5.0, 1.4)).plan(5, 5, 10)
    with pytest.raises(ValueError, match="k=300"):
        MultiLabelKNN(sampling_rate=1.0).fit(*clusters()[:2], 5)
    with pytest.raises(ValueError, match="partitioner"):
        MultiLabelPATE(partitioner=ClassBalancedPartition())
    with pytest.raises(ValueError, match="epsilon"):
        MultiLabelReverseKNN()
    with pytest.raises(ValueError, match="epsilon"):
        MultiLabelReverseKNN(epsilon=1.0, noise=Laplace(1.0))
    teacher = MultiLabelReverseKNN(k=3, epsilon=1.0)
    teacher.fit(*clusters()[:2], 5)
    with pytest.raises(ValueError, match="fewer than k=3"):
        teacher.label(torch.zeros(2, 2), Payments())


# ---------------------------------------------------------------------------- the label store and a fit


def test_store_keeps_rows_of_attributes(tmp_path):
    store = LabelStore(tmp_path / "labels.sqlite", {"plan": 1})
    store.select(0, [5, 3, 9])
    store.mark_asked(0, [0, 1, 2], 0)
    labels = torch.tensor([[1, 0, 1], [-1, -1, -1], [0, 0, 0]])
    soft = torch.tensor([[0.9, 0.1, 0.8], [0.5, 0.5, 0.5], [0.2, 0.3, 0.4]])
    store.put(0, [0, 1, 2], Release(labels, soft))
    examples, kept, kept_soft = store.answers(1)
    assert examples.tolist() == [5, 9]
    assert kept.tolist() == [[1, 0, 1], [0, 0, 0]]
    torch.testing.assert_close(kept_soft, soft[[0, 2]])
    assert store.counts() == {"queried": 3, "answered": 2, "refused": 1, "lost": 0}
    joined = merge([Release(labels[:1], soft[:1]), Release(labels[1:], soft[1:])])
    assert torch.equal(joined.labels, labels)
    assert joined.answered.tolist() == [True, False, True]


class Clusters(PrivatePublicDataModule):
    """2×1 images whose pixels are the features of :func:`clusters`."""

    def __init__(self, **kwargs):
        super().__init__(
            num_classes=5,
            image_shape=(1, 2, 1),
            class_names="abcde",
            task="multilabel",
            overlap="ignore",
            **kwargs,
        )

    @staticmethod
    def images(features):
        return TensorImages(((features + 4) / 17).clamp(0, 1).view(-1, 1, 2, 1))

    def load_private(self):
        features, labels, _, _ = clusters()
        self.private_groups = torch.arange(len(labels))
        return LabeledImages(self.images(features), labels, 5, task="multilabel")

    def load_public(self):
        _, _, queries, truth = clusters()
        truth = truth.clone()
        truth[::7, 2] = -1
        return PublicDataset(self.images(queries), 5, truth, task="multilabel")

    def load_test(self):
        _, _, queries, truth = clusters(seed=1)
        return LabeledImages(self.images(queries), truth, 5, task="multilabel")


def fit(folder, labeler, data=None, **kwargs):
    callback = PrivateLabeler(
        labeler, rounds=2, epochs_per_round=1, queries_per_round=30, delta=1e-5, run_dir=folder, progress=False,
        features=torch.nn.Flatten(), **kwargs,
    )  # fmt: skip
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)
    )
    student = SupervisedStudent(network=network, num_classes=5, task="multilabel", lr=0.05)
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[callback] if labeler else [], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    data = data or Clusters(batch_size=16)
    trainer.fit(student, data)
    return callback, data, trainer, student


def test_two_rounds_of_a_fit(tmp_path):
    labeler = MultiLabelKNN(k=20, sampling_rate=0.5, tau=4, noise=Gaussian(2.0), noise_source=SeededNoise(0))
    callback, data, trainer, student = fit(tmp_path, labeler)
    assert labeler.private_groups is data.private_groups
    assert callback.label_counts() == {"queried": 60, "answered": 60, "refused": 0, "lost": 0}
    assert int(data.public.table.labeled.sum()) == 60
    assert callback.epsilon == account(labeler.plan(60, 60, 5), delta=1e-5, exact=False).epsilon
    known = data.public.truth[data.public.labeled_indices] >= 0
    right = (data.public.labels == data.public.truth)[data.public.labeled_indices]
    assert callback.metrics["labels/accuracy"] == pytest.approx(float(right[known].double().mean()))
    assert callback.metrics["labels/accuracy"] > 0.95
    metrics = trainer.validate(student, data, verbose=False)[0]
    each = [metrics[f"val/accuracy_{name}"] for name in "abcde"]
    assert metrics["val/accuracy"] == pytest.approx(sum(each) / 5)
    # Asked again in the same folder, the run restores its labels and asks nothing.
    again, other, _, _ = fit(tmp_path, MultiLabelKNN(20, 0.5, 4, Gaussian(2.0), noise_source=SeededNoise(9)))
    assert torch.equal(other.public.labels, data.public.labels)
    assert again.epsilon_spent == callback.epsilon_spent


def test_labeler_of_another_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match="MultiLabelKNN"):
        fit(tmp_path, PrivateKNN(k=5))


def test_truth_as_labels_is_the_bound_without_privacy(tmp_path):
    callback, data, trainer, _ = fit(tmp_path, None, Clusters(batch_size=16, train_on_truth=True))
    assert torch.equal(data.public.labels, data.public.truth)
    assert callback.epsilon == 0
    assert "val/accuracy" in trainer.callback_metrics


# ---------------------------------------------------------------------------- documentation

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_the_rendered_ones():
    path = ROOT / "benchmarks" / "multilabel_rules.py"
    spec = importlib.util.spec_from_file_location("multilabel_rules", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.table(json.loads(script.RESULT.read_text(encoding="utf-8"))) in page
    assert script.rendered(page) == page  # else: benchmarks/multilabel_rules.py --render


def test_example_of_the_documentation_runs(capsys):
    page = (ROOT / "docs" / "multilabel.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL).group(1), {})
    assert capsys.readouterr().out == "1.0\n"
