import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.neighbors import PoissonNeighbors, top_k, within_radius
from pl_privknn.privacy.noise import SeededNoise


def _table(n, d=3, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, d)), dtype=torch.float32)


def _distances(queries, table):
    return ((queries.double()[:, None] - table.double()[None]) ** 2).sum(-1).sqrt()


@pytest.mark.parametrize(("n", "k", "block"), [(50, 7, None), (50, 7, 3), (5, 9, None), (300, 299, 10)])
def test_top_k_equals_brute_force(n, k, block):
    queries, table = _table(20, seed=1), _table(n)
    distances, indices = top_k(queries, table, k, block_size=block)
    wanted = _distances(queries, table).sort(dim=1)
    assert distances.shape == (20, min(k, n))
    assert torch.allclose(distances.double(), wanted.values[:, :k], atol=1e-5)
    assert torch.equal(indices, wanted.indices[:, :k])


def test_ties_go_to_the_lower_index():
    table = torch.tensor([[2.0], [1.0], [1.0], [0.0], [1.0], [2.0]])
    for k, wanted in ((1, [3]), (2, [3, 1]), (3, [3, 1, 2]), (5, [3, 1, 2, 4, 0]), (6, [3, 1, 2, 4, 0, 5])):
        assert top_k(torch.zeros(1, 1), table, k)[1].tolist() == [wanted]
    # Removing a record that is not among them leaves the others in their order.
    assert top_k(torch.zeros(1, 1), table[1:], 3)[1].tolist() == [[2, 0, 1]]
    many = torch.zeros(500, 2)
    assert torch.equal(top_k(many[:2], many, 9)[1], torch.arange(9).expand(2, 9))


def test_equal_rows_are_at_distance_zero():
    table = torch.rand(100, 400) + 3
    distances, indices = top_k(table[:10], table, 1)
    assert torch.equal(indices.flatten(), torch.arange(10))
    # The stated error: about 1e-6 of the squared norms, under the root.
    assert float(distances.max()) < (2e-6 * 2 * 400 * 3.6**2) ** 0.5


def test_within_radius():
    queries, table = _table(9, seed=1), _table(40)
    assert torch.equal(within_radius(queries, table, 1.2, block_size=2), _distances(queries, table) <= 1.2)


def test_bad_arguments():
    with pytest.raises(ValueError, match="k=0"):
        top_k(_table(3), _table(3), 0)
    with pytest.raises(ValueError, match="same d"):
        top_k(_table(3, 2), _table(3, 3), 1)
    with pytest.raises(ValueError, match="radius"):
        within_radius(_table(3), _table(3), -1)
    with pytest.raises(ValueError, match="sampling_rate=0"):
        PoissonNeighbors(_table(3), torch.zeros(3, dtype=torch.int64), 2, 1, 0)


def literal_votes(table, labels, query, k, rate, c, rng):
    """Draw the sample, search it by brute force, count."""
    sample = np.flatnonzero(rng.random(len(table)) < rate)
    distance = ((table[sample] - query) ** 2).sum(1)
    return tuple(np.bincount(labels[sample[np.argsort(distance, kind="stable")[:k]]], minlength=c))


CASES = [
    # n, k, rate, list length: plain; fewer than k records in most samples; fewer than k in the table;
    # lists that must be made longer; no sampling
    (30, 4, 0.5, None),
    (12, 6, 0.4, None),
    (3, 5, 0.6, None),
    (30, 4, 0.25, 4),
    (40, 6, 0.1, 6),
    (20, 5, 1.0, None),
]


@pytest.mark.parametrize(("n", "k", "rate", "length"), CASES)
def test_votes_have_the_distribution_of_literal_sampling(n, k, rate, length):
    rng = np.random.default_rng(0)
    c, draws = 2, 8000
    table, query = rng.normal(size=(n, 2)), np.array([0.2, 0.1])
    labels = rng.integers(0, c, n)
    literal = [literal_votes(table, labels, query, k, rate, c, rng) for _ in range(draws)]
    neighbors = PoissonNeighbors(
        torch.tensor(table, dtype=torch.float32), torch.tensor(labels), c, k, rate, list_length=length
    )
    queries = torch.tensor(query, dtype=torch.float32).repeat(draws, 1)
    ranked = neighbors.rank(queries)
    assert length is None or ranked.indices.shape[1] == length
    ours = [tuple(row) for row in neighbors.votes(ranked, SeededNoise(5).bernoulli).tolist()]
    outcomes = sorted({*literal, *ours})
    counts = np.array([[sum(o == outcome for o in who) for outcome in outcomes] for who in (literal, ours)])
    if len(outcomes) == 1:
        return
    # Rare outcomes are pooled. Two-sample chi-square at a fixed seed: a correct walk fails for one seed in
    # a thousand.
    rare = counts.sum(0) < 20
    pooled = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    pooled = pooled[:, pooled.sum(0) > 0]
    assert stats.chi2_contingency(pooled).pvalue > 1e-3


def test_extension_tosses_each_record_once():
    """With coins that all fall heads from the second list on, each record is accepted at most once."""
    n = 32
    table, labels = torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n) % 4
    tossed = []

    def coins(shape, probability):
        tossed.append(shape)
        return torch.full(shape, len(tossed) > 1)

    neighbors = PoissonNeighbors(table, labels, 4, 10, 0.5, list_length=10)
    votes = neighbors.votes(neighbors.rank(torch.zeros(1, 1)), coins)
    assert tossed == [(1, 10), (1, 10)]
    # Ranks 10 to 19 are accepted: labels 2 3 0 1 2 3 0 1 2 3.
    assert votes.tolist() == [[2, 2, 3, 3]]

    def never(shape, probability):
        tossed.append(shape)
        return torch.zeros(shape, dtype=torch.bool)

    tossed.clear()
    assert neighbors.votes(neighbors.rank(torch.zeros(1, 1)), never).sum() == 0
    assert sum(shape[1] for shape in tossed) == n


def test_calls_use_fresh_coins_and_lists_are_long_enough():
    table, labels = _table(2000), torch.arange(2000) % 3
    neighbors = PoissonNeighbors(table, labels, 3, 50, 0.15)
    ranked = neighbors.rank(_table(20, seed=2))
    noise = SeededNoise(0)
    first, second = (neighbors.votes(ranked, noise.bernoulli) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sum(1), torch.full((20,), 50))
    length = neighbors.list_length
    assert stats.binom.cdf(49, length, 0.15) <= 1e-6 < stats.binom.cdf(49, length - 2, 0.15)
    part = neighbors.votes(ranked[torch.tensor([3, 5])], noise.bernoulli)
    assert part.shape == (2, 3)


def test_empty_table_gives_no_votes():
    neighbors = PoissonNeighbors(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 3, 5, 0.5)
    votes = neighbors.votes(neighbors.rank(torch.zeros(4, 2)), SeededNoise(0).bernoulli)
    assert torch.equal(votes, torch.zeros(4, 3, dtype=torch.int64))
