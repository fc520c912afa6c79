"""Multi-label labelers: what they answer, draw and charge."""

import itertools
import math

import pytest
import torch
from attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from multilabel_setup import clusters
from refusals import refusals

from pl_privknn.labelers.pate_training import ClassBalancedPartition
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian
from pl_privknn.testing import FreeLedger


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
