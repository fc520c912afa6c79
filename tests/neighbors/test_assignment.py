"""Nearest queries of many records: exact, and each row the business of its record alone."""

import numpy as np
import pytest
import torch

from pl_privknn.neighbors import assign, assignment
from tests.setup.refusals import refusals


def literal(records, queries, k):
    """All distances in float64, a stable sort for ties."""
    distances = ((records.double()[:, None] - queries.double()[None]) ** 2).sum(dim=2)
    return torch.from_numpy(np.argsort(distances.numpy(), axis=1, kind="stable")[:, :k])


def draw(n, d, seed, offset=0.0, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + offset


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("d", [1, 40])
@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (100.0, 1.0), (0.0, 1e-6), (-3.0, 1e4)])
def test_equals_all_distances_in_float64(k, d, offset, scale):
    records, queries = draw(700, d, 0, offset, scale), draw(13, d, 1, offset, scale)
    assert torch.equal(assign(records, queries, k), literal(records, queries, k))


def test_near_ties_beyond_float32_are_decided_by_the_distance():
    # Queries that differ in the last bit of one coordinate, seen from records far away on either side.
    base = draw(1, 200, 3)
    queries = base.repeat(2, 1)
    queries[1, 0] = torch.nextafter(queries[1, 0], torch.tensor(torch.inf))
    records = base + 5 * draw(400, 200, 4)
    found = assign(records, queries)[:, 0]
    nearer = (queries[1, 0] > queries[0, 0]) & (records[:, 0].double() > queries.double()[:, 0].mean())
    assert torch.equal(found, nearer.long())
    assert 100 < int(found.sum()) < 300


def test_a_row_depends_on_its_record_alone():
    generator = torch.Generator().manual_seed(5)
    # Whole numbers: very many exact and near ties.
    records = torch.randint(0, 3, (2000, 24), generator=generator).float() + 1000
    queries = torch.randint(0, 3, (40, 24), generator=generator).float() + 1000
    whole = assign(records, queries, 2)
    assert torch.equal(whole, literal(records, queries, 2))
    order = torch.randperm(2000, generator=generator)
    assert torch.equal(assign(records[order], queries, 2), whole[order])
    for rows in (slice(1, None), slice(0, 777), slice(1500, 1501)):
        assert torch.equal(assign(records[rows], queries, 2), whole[rows])


def test_far_records_are_told_by_the_same_rule_wherever_they_lie():
    # So far away that float64 distances lose the queries' differences: still one rule for all places.
    queries = draw(5, 8, 6, scale=1e-6)
    records = draw(300, 8, 7, offset=3e7)
    whole = assign(records, queries)
    assert torch.equal(whole, literal(records, queries, 1))
    assert torch.equal(assign(records[113:], queries), whole[113:])


def test_threads_and_blocks_change_nothing(monkeypatch):
    records, queries = draw(3000, 10, 8), draw(20, 10, 9)
    monkeypatch.setattr(assignment, "_KEYS_AT_A_TIME", 20 * 600)
    torch.set_num_threads(2)
    try:
        assert torch.equal(assign(records, queries), literal(records, queries, 1))
    finally:
        torch.set_num_threads(1)


def assigned(records=None, queries=None, k=1):
    given = [
        torch.zeros(3, 2) if records is None else records,
        torch.zeros(2, 2) if queries is None else queries,
    ]
    return lambda: assign(*given, k)


test_bad_input_is_named = refusals(
    {
        "same d": assigned(queries=torch.zeros(2, 3)),
        "float": assigned(torch.zeros(3, 2, dtype=torch.int64)),
        "k=3": assigned(k=3),
        "k=0": assigned(k=0),
        "NaN": assigned(torch.full((3, 2), torch.nan)),
        "above 1e18": assigned(torch.full((3, 2), 1e30)),
        "queries": assigned(queries=torch.full((2, 2), torch.inf)),
    }
)
