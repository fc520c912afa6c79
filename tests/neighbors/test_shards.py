"""Neighbours in shards against one process that holds the whole table."""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from pl_privknn.neighbors import PoissonNeighbors, ShardedNeighbors
from pl_privknn.neighbors.poisson import PoissonTotals
from pl_privknn.privacy.noise import SeededNoise
from tests.neighbors.shard_setup import by_row, in_order, in_shards

CLASSES = 4


def table(count=90, seed=0):
    """Records many of which are equal, and many at equal distances from many queries: ties cross every border."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(count, 3, generator=generator).mul(3).round()
    return features, torch.randint(CLASSES, (count,), generator=generator)


def queries(count=25):
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(9)).mul(6).round().div(2)


def sharded_votes(shards, features, labels, k, rate, releases=1, coins=None):
    """Votes of each release, ``(releases, m, c)``, and the bytes that the first process sent."""

    def work(shard, rows):
        found = ShardedNeighbors(features[rows], labels[rows], CLASSES, k, rate, shard)
        ranked = found.rank(queries())
        votes = [found.votes(ranked, coins and coins(shard, 1 + one)) for one in range(releases)]
        return torch.stack(votes), shard.group.sent

    return in_shards(shards, work)[0]


PARTS = {
    "one": by_row(90, 1),
    "two by row": by_row(90, 2),
    "four by row": by_row(90, 4),
    "unequal": in_order(1, 60, 29),
    "empty": in_order(0, 50, 0, 40),
    "empty at the end": in_order(90, 0),
    "fewer than k in each": by_row(90, 40),
}


@pytest.mark.parametrize("k", [1, 7, 40, 90, 200])
@pytest.mark.parametrize("parts", ["two by row", "four by row", "unequal", "empty", "empty at the end"])
def test_votes_of_all_records_are_those_of_one_process(parts, k):
    features, labels = table()
    whole = PoissonNeighbors(features, labels, CLASSES, k, 1.0)
    votes, _ = sharded_votes(PARTS[parts], features, labels, k, 1.0)
    assert torch.equal(votes[0], whole.votes(whole.rank(queries())))


def coin(release, rows, records):
    """A coin that is a function of release, query and record alone; true for about 2 of 5."""
    mixed = (release * 7919 + rows[:, None] * 104729 + records.long() * 1299709) % 1000003
    return (mixed * 48271 % 2147483647) % 5 < 2


@pytest.mark.parametrize("parts", list(PARTS))
@pytest.mark.parametrize("k", [3, 20])
def test_with_the_same_coin_for_each_record_samples_vote_as_in_one_process(monkeypatch, parts, k):
    # The coins that are handed on name the release and where the shard's records lie.
    def toss(self, coins, rows, indices):
        release, first, stride = coins
        return coin(release, rows, first + stride * indices.long())

    monkeypatch.setattr(PoissonTotals, "toss", toss)
    features, labels = table()
    whole = PoissonNeighbors(features, labels, CLASSES, k, 0.4)
    ranked = whole.rank(queries())
    expected = torch.stack([whole.votes(ranked, (release, 0, 1)) for release in (1, 2, 3)])

    def named(shard, release):
        return release, shard.first, shard.stride

    votes, _ = sharded_votes(PARTS[parts], features, labels, k, 0.4, 3, named)
    assert torch.equal(votes, expected)
    assert not torch.equal(votes[0], votes[1])


def test_samples_of_shards_have_the_distribution_of_a_poisson_sample():
    """Chi-square against all 2⁷ samples, at an error rate of 1e-4; the seed is fixed."""
    rate, k, releases = 0.3, 2, 300
    features, labels = torch.arange(7.0)[:, None].expand(7, 3) + 5, torch.tensor([0, 1, 0, 2, 1, 3, 0])
    exact = {}
    for taken in itertools.product([False, True], repeat=7):
        chosen = [int(labels[record]) for record in range(7) if taken[record]][:k]
        votes = tuple(chosen.count(label) for label in range(CLASSES))
        weight = rate ** sum(taken) * (1 - rate) ** (7 - sum(taken))
        exact[votes] = exact.get(votes, 0.0) + weight

    def own(shard, release):
        return SeededNoise(5).stream("shard", shard.group.rank, release).bernoulli

    votes, _ = sharded_votes(by_row(7, 3), features, labels, k, rate, releases, own)
    flat = [tuple(row) for row in votes.view(-1, CLASSES).tolist()]
    assert set(flat) <= set(exact)
    counts = [flat.count(votes) for votes in exact]
    assert chisquare(counts, [len(flat) * share for share in exact.values()]).pvalue > 1e-4


def test_no_more_than_sixteen_bytes_a_candidate_travel():
    features, labels = table()
    for k in (1, 20):
        _, sent = sharded_votes(PARTS["four by row"], features, labels, k, 1.0, releases=3)
        assert sent == 3 * 16 * k * len(queries())


def test_too_many_classes_are_refused():
    features, labels = table()
    with pytest.raises(ValueError, match="num_classes=65537"):
        in_shards(by_row(90, 1), lambda shard, rows: ShardedNeighbors(features, labels, 65537, 3, 1.0, shard))
