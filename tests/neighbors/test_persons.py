"""Neighbours that are persons: against samples taken literally, and against all pairs of tables."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from pl_privknn._processes import Shard
from pl_privknn.neighbors import PoissonNeighbors, PoissonSums
from pl_privknn.neighbors.poisson import ShardedNeighbors
from pl_privknn.privacy.noise import SeededNoise
from tests.neighbors.shard_setup import in_shards

# Five persons with 1, 2, 1, 3 and 40 records; the last one has most of the table.
OWNERS = torch.tensor([30] * 1 + [4] * 2 + [7] * 1 + [11] * 3 + [2] * 40)


def table(seed=0, dimension=3):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(OWNERS), generator=generator)
    features = torch.randn(len(OWNERS), dimension, generator=generator)
    return features, torch.randint(0, 3, (len(OWNERS),), generator=generator), OWNERS[order]


def literal_votes(query, features, labels, owners, k, drawn):
    """Votes of the k nearest of the drawn persons, each by their nearest record, one loop at a time."""
    nearest = {}
    for row, owner in enumerate(owners.tolist()):
        distance = float((features[row].double() - query.double()).square().sum())
        if owner in drawn and (owner not in nearest or distance < nearest[owner][0]):
            nearest[owner] = (distance, row)
    votes = [0, 0, 0]
    for _, row in sorted(nearest.values())[:k]:
        votes[int(labels[row])] += 1
    return tuple(votes)


@pytest.mark.parametrize("list_length", [1, None])
@pytest.mark.parametrize("k", [1, 2, 4, 9])
def test_without_sampling_each_of_the_nearest_persons_votes_once(k, list_length):
    features, labels, owners = table()
    queries = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
    neighbors = PoissonNeighbors(features, labels, 3, k, 1.0, list_length=list_length, owners=owners)
    votes = neighbors.votes(neighbors.rank(queries))
    everybody = set(owners.tolist())
    for query, found in zip(queries, votes.tolist(), strict=True):
        assert tuple(found) == literal_votes(query, features, labels, owners, k, everybody)


def test_samples_are_of_persons():
    # All 32 samples of five persons give the distribution exactly; 20,000 draws, chi-square with an error of 1e-4.
    features, labels, owners = table()
    query, rate, draws, k = torch.tensor([[0.2, -0.1, 0.3]]), 0.4, 20_000, 2
    persons, expected = sorted(set(owners.tolist())), {}
    for chosen in itertools.product([0, 1], repeat=len(persons)):
        drawn = {person for person, taken in zip(persons, chosen, strict=True) if taken}
        chance = np.prod([rate if taken else 1 - rate for taken in chosen])
        votes = literal_votes(query[0], features, labels, owners, k, drawn)
        expected[votes] = expected.get(votes, 0.0) + chance
    neighbors = PoissonNeighbors(features, labels, 3, k, rate, list_length=1, owners=owners)
    found = neighbors.votes(neighbors.rank(query.repeat(draws, 1)), SeededNoise(1).bernoulli)
    seen, counts = found.unique(dim=0, return_counts=True)
    counted = {tuple(votes): count for votes, count in zip(seen.tolist(), counts.tolist(), strict=True)}
    assert counted.keys() <= expected.keys()
    statistic = sum((counted.get(v, 0) - draws * p) ** 2 / (draws * p) for v, p in expected.items())
    assert statistic < chi2.isf(1e-4, len(expected) - 1)


@pytest.mark.parametrize("kind", ["knn", "sums"])
def test_a_person_moves_votes_as_one_record_does(kind):
    worst = 0.0
    for seed in range(4):
        features, labels, owners = table(seed)
        queries = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed + 50))

        def votes(kept, features=features, labels=labels, owners=owners, queries=queries):
            if kind == "sums":
                rows = torch.nn.functional.one_hot(labels, 3)[kept].double()
                found = PoissonSums(features[kept], rows, 3, 1.0, owners=owners[kept])
            else:
                found = PoissonNeighbors(features[kept], labels[kept], 3, 3, 1.0, owners=owners[kept])
            return found.votes(found.rank(queries)).double()

        whole = votes(torch.ones(len(owners), dtype=torch.bool))
        for person in owners.unique():
            worst = max(worst, float((whole - votes(owners != person)).norm(dim=1).max()))
    assert worst == pytest.approx(2**0.5)


def test_shards_of_whole_persons_vote_as_one_process():
    features, labels, owners = table()
    queries = torch.randn(10, 3, generator=torch.Generator().manual_seed(9))
    alone = PoissonNeighbors(features, labels, 3, 3, 1.0, owners=owners)
    shards = [(0, 1, (owners % 2 == rank).nonzero().flatten()) for rank in (0, 1)]

    def work(shard, rows):
        shard = Shard(shard.group, 0, 1, len(owners), rows)
        given = features[rows], labels[rows], 3, 3, 1.0, shard
        neighbors = ShardedNeighbors(*given, owners=owners[rows])
        return neighbors.votes(neighbors.rank(queries))

    found = in_shards(shards, work)[0]
    assert torch.equal(found, alone.votes(alone.rank(queries)))
