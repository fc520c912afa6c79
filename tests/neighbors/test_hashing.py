"""Sign random projections: candidates against brute force, through any order of changes."""

import numpy as np
import pytest
import torch

from pl_privknn.neighbors import hashing
from pl_privknn.neighbors.hashing import HashIndex, SignProjections, chosen_products
from tests.setup.refusals import refusals


def brute_force(options, rows, queries):
    planes = options.hyperplanes(rows.shape[1])

    def buckets(vectors):
        return (vectors @ planes >= 0).view(len(vectors), options.num_tables, options.num_bits)

    of_rows, of_queries = buckets(rows), buckets(queries)
    shared = (of_rows[None] == of_queries[:, None]).all(dim=3).any(dim=2)
    return [np.flatnonzero(row) for row in shared.numpy()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("tables", "bits"), [(1, 1), (5, 3), (30, 8), (2, 31)])
def test_candidates_are_those_in_the_same_bucket_of_any_table(tables, bits):
    options = SignProjections(tables, bits, seed=4)
    rows, queries = torch.randn(300, 9), torch.randn(40, 9)
    queries[:10] = rows[:10]
    index = HashIndex(options, 9)
    index.append(rows)
    found = index.candidates(queries)
    assert_same(found, brute_force(options, rows, queries))
    assert all(row in candidates for row, candidates in enumerate(found[:10]))


@pytest.mark.parametrize("many", [0, 40, 10**6])
def test_candidates_after_changes_are_those_of_a_fresh_index(monkeypatch, many):
    monkeypatch.setattr(hashing, "_MANY_CHANGES", many)
    rng = np.random.default_rng(0)
    options, queries = SignProjections(6, 4), torch.randn(15, 5)
    index, rows = HashIndex(options, 5), torch.empty(0, 5)
    for step in range(60):
        if step % 3 == 2:
            kept = rng.random(len(rows)) < rng.random()
            index.keep(kept)
            rows = rows[kept]
        else:
            added = torch.randn(int(rng.integers(0, 30)), 5)
            index.append(added)
            rows = torch.cat([rows, added])
        assert len(index) == len(rows)
        assert_same(index.candidates(queries), brute_force(options, rows, queries))


def test_chosen_products_are_scalar_products():
    table, vector = torch.randn(50, 33), torch.randn(33)
    rows = np.array([3, 3, 49, 0])
    expected = (table[torch.from_numpy(rows)].double() @ vector.double()).numpy()
    np.testing.assert_allclose(chosen_products(table.numpy(), rows, vector.numpy()), expected, atol=1e-5)
    alone = chosen_products(table[49:].numpy(), np.array([0]), vector.numpy())
    assert alone[0] == chosen_products(table.numpy(), rows, vector.numpy())[2]


test_bad_arguments_are_named = refusals(
    {
        "num_bits=32": lambda: SignProjections(3, 32),
        "num_tables=0": lambda: SignProjections(0),
        "seed=-1": lambda: SignProjections(seed=-1),
    }
)
