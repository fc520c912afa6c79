"""Search within public cells: exact among the candidates, and a record decides about itself alone."""

import numpy as np
import pytest
import torch

from pl_privknn.neighbors import CellNeighbors, Cells, PoissonNeighbors
from pl_privknn.privacy.noise import SeededNoise


def draw(n, seed, d=3):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, d)), dtype=torch.float32)


TABLE, QUERIES, PUBLIC = draw(80, 0), draw(15, 1), draw(60, 2)
LABELS = torch.tensor(np.random.default_rng(3).integers(0, 4, size=80))


def neighbors(k, rate, centroids, probes, table=TABLE, labels=LABELS):
    return CellNeighbors(
        table, centroids, probes, lambda rows: PoissonNeighbors(table, labels, 4, k, rate, among=rows)
    )


def candidates(query, table, centroids, probes):
    """Bool, which records lie in the cells around a query's own; in float64 by brute force."""
    centroids = centroids.double()
    own = (centroids - query.double()).square().sum(1).argmin()
    probed = (centroids - centroids[own]).square().sum(1).argsort()[:probes]
    cells = (table.double()[:, None] - centroids).square().sum(2).argmin(dim=1)
    return torch.isin(cells, probed)


def literal(query, table, labels, k, centroids, probes):
    inside = candidates(query, table, centroids, probes).nonzero()[:, 0]
    order = (table[inside].double() - query.double()).square().sum(1).argsort()[:k]
    return labels[inside[order]].bincount(minlength=4)


@pytest.mark.parametrize(("number", "probes"), [(1, 1), (6, 1), (6, 3), (20, 2)])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_votes_are_those_of_the_nearest_candidates(number, probes, k):
    centroids = Cells(number, probes).centroids(PUBLIC)
    cells = neighbors(k, 1.0, centroids, probes)
    votes = cells.votes(cells.rank(QUERIES))
    for query, found in zip(QUERIES, votes, strict=True):
        assert found.tolist() == literal(query, TABLE, LABELS, k, centroids, probes).tolist()


def test_all_cells_are_the_whole_table():
    centroids = Cells(7, 7).centroids(PUBLIC)
    cells, whole = neighbors(5, 1.0, centroids, 7), PoissonNeighbors(TABLE, LABELS, 4, 5, 1.0)
    assert cells.votes(cells.rank(QUERIES)).equal(whole.votes(whole.rank(QUERIES)))


def test_chosen_queries_keep_their_votes_and_their_order():
    cells = neighbors(5, 1.0, Cells(6, 2).centroids(PUBLIC), 2)
    ranked = cells.rank(QUERIES)
    votes = cells.votes(ranked)
    for rows in ([0], [14, 3, 7], list(range(15))):
        assert cells.votes(ranked[torch.tensor(rows)]).equal(votes[rows])


def test_one_record_moves_the_votes_by_root_two_at_most():
    centroids = Cells(6, 2).centroids(PUBLIC)
    cells = neighbors(4, 1.0, centroids, 2)
    votes = cells.votes(cells.rank(QUERIES))
    largest = 0.0
    for left_out in range(len(TABLE)):
        kept = torch.arange(len(TABLE)) != left_out
        fewer = neighbors(4, 1.0, centroids, 2, TABLE[kept], LABELS[kept])
        moved = (fewer.votes(fewer.rank(QUERIES)) - votes).double().norm(dim=1)
        largest = max(largest, float(moved.max()))
    assert largest == pytest.approx(2**0.5)


def test_samples_have_the_stated_rate():
    """Votes of k = all candidates are binomial; a deviation of 4 standard errors has a chance of 6e-5 a query."""
    centroids = Cells(6, 2).centroids(PUBLIC)
    cells = neighbors(80, 0.3, centroids, 2)
    # A query that stands there many times is sampled anew each time.
    times, calls, noise = 100, 20, SeededNoise(0)
    ranked, runs = cells.rank(QUERIES.repeat(times, 1)), times * calls
    found = sum(cells.votes(ranked, noise.bernoulli).sum(dim=1) for _ in range(calls))
    mean = found.view(times, len(QUERIES)).sum(dim=0) / runs
    for query, found in zip(QUERIES, mean, strict=True):
        n = int(candidates(query, TABLE, centroids, 2).sum())
        assert abs(float(found) - 0.3 * n) <= 4 * (0.21 * n / runs) ** 0.5


def test_cells_are_made_of_public_features_and_a_seed_alone():
    assert Cells(6, 2).centroids(PUBLIC).equal(Cells(6, 3).centroids(PUBLIC))
    assert not Cells(6, 2).centroids(PUBLIC).equal(Cells(6, 2, seed=1).centroids(PUBLIC))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1), "cells.number=0"),
        ((4, 5), r"cells.probes=5 is above cells.number=4"),
        ((4, 0), "cells.probes=0"),
        ((4, 2, -1), "cells.seed=-1"),
    ],
)
def test_bad_cells_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        Cells(*arguments)


def test_more_cells_than_public_examples_are_refused():
    with pytest.raises(ValueError, match=r"cells\.number=61 is above the 60 public examples"):
        Cells(61, 2).centroids(PUBLIC)
