import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.neighbors import PoissonNeighbors, poisson
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.refusals import refusals


def _table(n, d=3, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, d)), dtype=torch.float32)


def _literal_sample(n, rate, rng):
    return np.flatnonzero(rng.random(n) < rate)


def literal_votes(table, labels, query, k, rate, c, rng):
    """Draw the sample, search it by brute force, count."""
    sample = _literal_sample(len(table), rate, rng)
    distance = ((table[sample] - query) ** 2).sum(1)
    return tuple(np.bincount(labels[sample[np.argsort(distance, kind="stable")[:k]]], minlength=c))


def _same_distribution(literal, ours):
    """Two-sample chi-square at a fixed seed: a correct sampler fails for one seed in a thousand.

    Outcomes seen fewer than 20 times are pooled.
    """
    outcomes = sorted({*literal, *ours})
    counts = np.array([[who.count(outcome) for outcome in outcomes] for who in (literal, ours)])
    rare = counts.sum(0) < 20
    pooled = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    pooled = pooled[:, pooled.sum(0) > 0]
    return pooled.shape[1] == 1 or stats.chi2_contingency(pooled).pvalue > 1e-3


CASES = [
    # n, k, rate, list length: plain; fewer than k records in most samples; fewer than k in the table;
    # lists that must be made longer, once and several times; hardly any sampling; none
    (30, 4, 0.5, None),
    (12, 6, 0.4, None),
    (3, 5, 0.6, None),
    (30, 4, 0.25, 4),
    (40, 6, 0.1, 6),
    (40, 3, 0.9, 3),
    (20, 5, 1.0, None),
]


@pytest.mark.parametrize(("n", "k", "rate", "length"), CASES)
def test_votes_have_the_distribution_of_literal_sampling(n, k, rate, length):
    rng, draws, classes = np.random.default_rng(0), 8000, 4
    table, query = rng.normal(size=(n, 2)).astype(np.float32), np.array([0.2, 0.1], dtype=np.float32)
    table[1::7] = table[0]  # some records tie
    labels = rng.integers(0, classes, n)
    literal = [literal_votes(table, labels, query, k, rate, classes, rng) for _ in range(draws)]
    neighbors = PoissonNeighbors(
        torch.tensor(table), torch.tensor(labels), classes, k, rate, list_length=length
    )
    ranked = neighbors.rank(torch.tensor(query).repeat(draws, 1))
    assert length is None or ranked.indices.shape[1] == length
    ours = [tuple(row) for row in neighbors.votes(ranked, SeededNoise(5).bernoulli).tolist()]
    assert _same_distribution(literal, ours)


@pytest.mark.parametrize("length", [None, 3])
def test_a_record_votes_at_most_once_and_the_nearest_first(length):
    """Every record is a class of its own here, so its multiplicity in a sample can be read off."""
    n, k = 60, 3
    table, labels = torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n)
    neighbors = PoissonNeighbors(table, labels, n, k, 0.1, list_length=length)
    votes = neighbors.votes(neighbors.rank(torch.full((2000, 1), -1.0)), SeededNoise(3).bernoulli)
    assert votes.max() == 1
    assert votes.sum(1).max() == k
    # Record i takes part if its coin falls heads and fewer than k before it did: exact probabilities. Sixty
    # frequencies at 4.5 deviations: fails for one seed in 2,000.
    probability = 0.1 * stats.binom.cdf(k - 1, np.arange(n), 0.1)
    deviation = np.sqrt(probability * (1 - probability) / 2000)
    assert (np.abs(votes.double().mean(0).numpy() - probability) < 4.5 * deviation).all()


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


def test_coins_are_tossed_in_blocks(monkeypatch):
    table, labels = _table(100), torch.arange(100) % 3
    neighbors = PoissonNeighbors(table, labels, 3, 5, 0.5)
    ranked = neighbors.rank(_table(50, seed=2))
    monkeypatch.setattr(poisson, "_COINS_AT_A_TIME", 100)
    blocks = neighbors.votes(ranked, lambda shape, p: torch.ones(shape, dtype=torch.bool))
    assert torch.equal(blocks, PoissonNeighbors(table, labels, 3, 5, 1.0).votes(ranked))


def test_labels_outside_are_refused_without_saying_which():
    with pytest.raises(ValueError, match=r"labels: some lie outside \[0, num_classes=2\)") as error:
        PoissonNeighbors(_table(3), torch.tensor([0, 1, 77]), 2, 1, 0.5)
    assert "77" not in str(error.value)


LABELS = torch.tensor([0, 1, 1])


def asked(*coins):
    neighbors = PoissonNeighbors(_table(3), LABELS, 2, 1, 0.5)
    ranked = neighbors.rank(_table(2))
    assert repr(ranked) == "RankedLists(queries=2, length=3)"
    return lambda: neighbors.votes(ranked, *coins)


test_bad_arguments_are_named = refusals(
    {
        "sampling_rate=0": lambda: PoissonNeighbors(_table(3), LABELS, 2, 1, 0),
        r"labels: shape \(n,\), torch.float32": lambda: PoissonNeighbors(
            _table(3), LABELS.float(), 2, 1, 1.0
        ),
        "coins=None": asked(),
        r"coins gave torch\.float32": asked(lambda shape, p: torch.ones(shape)),
    }
)
