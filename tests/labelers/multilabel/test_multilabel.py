"""Multi-label labelers: what they answer, draw and charge."""

import itertools
import math

import pytest
import torch
from attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from multilabel_setup import clusters
from refusals import refusals

from pl_privknn.labelers import FixedThresholds, LinearTeachers
from pl_privknn.labelers.attributes import clip_attributes, swapped_vote_norms
from pl_privknn.labelers.pate_training import ClassBalancedPartition, RandomPartition
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


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


def test_changed_part_changes_one_teacher_and_parts_are_of_persons():
    features, labels, queries, _ = clusters()
    seen, dealt = [], []

    class Watched(LinearTeachers):
        def train(self, features, labels, parts, *rest):
            dealt.append(parts)
            return super().train(features, labels, parts, *rest)

    changed = labels.clone()
    changed[7] = 1 - labels[7]  # the same draws, one record's label turned over
    for given, owners in ((labels, None), (changed, None), (labels, torch.arange(240) // 6)):
        teachers, settings = Watched(steps=30), {"progress": False, "noise_source": SeededNoise(2)}
        pate = attribute_pate(6, teachers, RandomPartition(), **settings)
        pate.private_owners = owners
        pate.fit(features, given, 5)
        seen.append(pate._trained.predict(queries))
    assert int((seen[0] != seen[1]).any(dim=0).any(dim=1).sum()) <= 1
    distance = clip_attributes(seen[0], 2).sum(dim=1) - clip_attributes(seen[1], 2).sum(dim=1)
    assert float(distance.norm(dim=1).max()) <= swapped_vote_norms(2, 5)[1] + 1e-9
    assert all(len(part.unique()) == 1 for part in dealt[2].split(6))
    assert not all(len(part.unique()) == 1 for part in dealt[0].split(6))


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


MAKERS = [
    lambda: attribute_knn(5, 0.5),
    lambda: attribute_pate(3, progress=False),
    lambda: attribute_reverse_knn(epsilon=1.0),
]


@pytest.mark.parametrize("make", MAKERS)
def test_tables_that_do_not_fit_are_refused(make):
    features, labels, queries, _ = clusters()
    for bad in (labels[:, 0], labels[:, :4], labels.float(), labels * 2):
        with pytest.raises(ValueError, match="labels"):
            make().fit(features, bad, 5)
    with pytest.raises(ValueError, match="features"):
        make().fit(features * math.nan, labels, 5)
    with pytest.raises(RuntimeError, match="private table"):
        make().label(queries, FreeLedger())


def few():
    teacher = attribute_reverse_knn(k=3, epsilon=1.0)
    teacher.fit(*clusters()[:2], 5)
    teacher.label(torch.zeros(2, 2), FreeLedger())


test_parameters_that_do_not_fit_are_refused = refusals(
    {
        "noise": lambda: attribute_knn(noise=ExponentialArgmax(5.0)),
        "tau": lambda: attribute_knn(tau=0),
        "l2_sensitivity": lambda: attribute_knn(tau=2, noise=Gaussian(5.0, 1.4)).plan(5, 5, 10),
        "k=300": lambda: attribute_knn(sampling_rate=1.0).fit(*clusters()[:2], 5),
        "partitioner": lambda: attribute_pate(partitioner=ClassBalancedPartition()),
        "epsilon": attribute_reverse_knn,
        "fewer than k=3": few,
    }
)
