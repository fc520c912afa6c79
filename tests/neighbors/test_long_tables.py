"""Tables of more records than a candidate's index can name: searched in parts, here of 50 records, or of 7."""

import pytest
import torch

from pl_privknn.neighbors import PoissonNeighbors, PoissonSums, assign, nearest, search
from pl_privknn.privacy.noise import SeededNoise

CLASSES = 4


def drawn(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# Many records are equal and many at equal distances from a query: ties cross every border.
TABLE = drawn(180, 3).mul(3).round()
LABELS = torch.arange(180) % CLASSES
QUERIES = torch.cat([drawn(15, 3, seed=1).mul(3), drawn(15, 3, seed=2).mul(6).round().div(2)])


def poisson_votes(k, rate, **options):
    def votes():
        neighbors = PoissonNeighbors(TABLE, LABELS, CLASSES, k, rate, **options)
        ranked = neighbors.rank(QUERIES)
        return torch.stack([neighbors.votes(ranked, SeededNoise(seed).bernoulli) for seed in range(5)])

    return votes


def poisson_sums():
    sums = PoissonSums(TABLE, drawn(180, 5, seed=3), 9, 0.4)
    return sums.votes(sums.rank(QUERIES), SeededNoise(0).bernoulli)


SEARCHES = {
    "some": lambda: nearest(QUERIES, TABLE, 60).long(),
    "all": lambda: nearest(QUERIES, TABLE, 180).long(),
    "one": lambda: nearest(QUERIES, TABLE, 1).long(),
    "no query": lambda: nearest(QUERIES[:0], TABLE, 3).long(),
    "assign": lambda: assign(TABLE, QUERIES, 3),
    "votes": poisson_votes(9, 0.4),
    "votes of all": poisson_votes(9, 1.0),
    "lists that are too short": poisson_votes(20, 0.3, list_length=21),
    "samples of fewer than k": poisson_votes(170, 0.5),
    "sums": poisson_sums,
}  # fmt: skip


@pytest.mark.parametrize("rows", [50, 17])
@pytest.mark.parametrize("name", SEARCHES)
def test_parts_change_nothing(monkeypatch, name, rows):
    wanted = SEARCHES[name]()
    monkeypatch.setattr(search, "_ROWS_OF_A_PART", rows)
    found = SEARCHES[name]()
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_records_of_a_later_part_are_checked_too(monkeypatch):
    monkeypatch.setattr(search, "_ROWS_OF_A_PART", 50)
    broken = TABLE.clone()
    broken[170, 1] = torch.nan
    with pytest.raises(ValueError, match="table: some features are NaN"):
        nearest(QUERIES, broken, 3)
