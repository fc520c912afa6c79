import math

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.reverse_knn import ReverseKNN, decide
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.grouped import grouped
from tests.setup.refusals import refusals


def _table(n=200, s=12, c=4, seed=0):
    rng = np.random.default_rng(seed)
    as_float = {"dtype": torch.float32}
    return (
        torch.tensor(rng.normal(size=(n, 5)), **as_float),
        torch.tensor(rng.integers(0, c, n)),
        torch.tensor(rng.normal(size=(s, 5)), **as_float),
    )


@pytest.mark.parametrize("k", [1, 3])
def test_counts_equal_a_literal_loop(k):
    features, labels, queries = _table()
    labeler = ReverseKNN(budget=Budget(epsilon=1.0), k=k)
    labeler.fit(PrivateRecords.of(features, labels, 4))
    literal = np.zeros((len(queries), 4), dtype=int)
    for x, y in zip(features.double().numpy(), labels.numpy(), strict=True):
        for query in np.argsort(((queries.double().numpy() - x) ** 2).sum(1), kind="stable")[:k]:
            literal[query, y] += 1
    assert np.array_equal(labeler.counts(queries).numpy(), literal)


def test_cost_does_not_depend_on_the_number_of_queries():
    labeler = ReverseKNN(k=2, noise=Gaussian(sigma=5.0))
    assert labeler.plan(10, 10, 4, rounds=3) == labeler.plan(5000, 5000, 4, rounds=3)
    assert labeler.plan(10, 10, 4, rounds=3) == [Charge(Gaussian(5.0, 2**0.5), 3)]


@pytest.mark.parametrize(("k", "adjacency", "scale"), [(1, "add_remove", 5.0), (2, "replace_one", 20.0)])
def test_counts_carry_the_charged_noise_and_everything_follows_from_them(k, adjacency, scale):
    features, labels, queries = _table(s=1000)
    settings = {"k": k, "epsilon": 0.2, "abstain": 0.5, "adjacency": adjacency}
    labeler = ReverseKNN(**grouped(ReverseKNN, **settings), noise_source=SeededNoise(4))
    labeler.fit(PrivateRecords.of(features, labels, 4))
    release = labeler.label(queries, FreeLedger())
    noise = (release.scores.double() - labeler.counts(queries)).flatten().numpy()
    # A correct draw fails for one seed in 10,000.
    assert stats.kstest(noise, stats.laplace(scale=scale).cdf).pvalue > 1e-4
    again = decide(release.scores.double(), math.sqrt(2) * scale, 0.5, soft=True)
    assert torch.equal(release.labels, again.labels)
    assert 0 < int((release.labels < 0).sum()) < 1000
    torch.testing.assert_close(release.probabilities, again.probabilities)


def test_decisions():
    noisy = torch.tensor([[9.0, 1.0, -3.0], [4.0, 3.5, 0.0], [-1.0, -2.0, -5.0]], dtype=torch.float64)
    release = decide(noisy, deviation=1.0, abstain=1.0, soft=True)
    assert release.labels.tolist() == [0, -1, -1]
    assert torch.allclose(release.probabilities[0], torch.tensor([0.9, 0.1, 0.0]))
    assert torch.allclose(release.probabilities[2], torch.full((3,), 1 / 3))
    assert decide(noisy, 1.0, 0.0, False).labels.tolist() == [0, 0, 0]
    assert decide(noisy, 1.0, 0.0, False, max_answers=2).labels.tolist() == [0, 0, -1]


def few():
    labeler = ReverseKNN(budget=Budget(epsilon=1), k=5)
    labeler.fit(PrivateRecords.of(*_table()[:2], 4))
    labeler.label(torch.zeros(3, 5), FreeLedger())


test_bad_arguments_are_named = refusals(
    {"k=0": lambda: ReverseKNN(budget=Budget(epsilon=1), k=0), "fewer than k=5": few}
)
