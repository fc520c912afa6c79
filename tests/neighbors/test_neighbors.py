from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pl_privknn.neighbors import PoissonNeighbors, nearest, search
from pl_privknn.neighbors.search import Smallest, merge, unpack
from tests.setup.refusals import refusals


def _table(n, d=3, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, d)), dtype=torch.float32)


def _distances(queries, table):
    """Brute force in float64, from differences: nothing cancels."""
    return ((queries.double()[:, None] - table.double()[None]) ** 2).sum(-1).sqrt()


def _brute_force(queries, table, k):
    found = _distances(queries, table).sort(dim=1, stable=True)
    return found.values[:, :k], found.indices[:, :k]


def _hard(kind, n=600, d=200):
    """Tables whose order a float32 matrix product gets wrong."""
    rng = np.random.default_rng(2)
    if kind == "close":  # records differ by less than the product's rounding errors
        values = rng.normal(size=d) + 1e-5 * rng.normal(size=(n, d))
    elif kind == "far from the origin":
        values = 1000 + rng.normal(size=(n, d))
    elif kind == "duplicates":
        values = rng.normal(size=(5, d))[rng.integers(0, 5, n)]
    elif kind == "mirrored":  # equal distances from the origin by different sums
        values = rng.permuted(np.tile(rng.normal(size=d), (n, 1)), axis=1)
    else:  # one record dwarfs the others
        values = rng.normal(size=(n, d))
        values[17] *= 1e6
    return torch.tensor(values, dtype=torch.float32)


HARD = ["close", "far from the origin", "duplicates", "mirrored", "outlier"]


@pytest.mark.parametrize("kind", HARD)
def test_order_is_that_of_float64_distances(kind):
    table = _hard(kind)
    queries = torch.cat([table[:8] + 0.01 * _table(8, 200), table[8:12], torch.zeros(1, 200)])
    for k, block in ((40, 2048), (40, 64), (599, 2048)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "_MOST_ROWS", block)
            indices = nearest(queries, table, k)
        wanted = _brute_force(queries, table, k)
        assert indices.dtype == torch.int32
        # Sums of float64 in another order differ in the last digit: where brute force sees (almost) no
        # difference the indices may differ from it, and nowhere else.
        found = _distances(queries, table).gather(1, indices.long())
        torch.testing.assert_close(found, wanted[0], rtol=1e-14, atol=1e-14)
        if kind == "duplicates":
            assert torch.equal(indices.long(), wanted[1])


@pytest.mark.parametrize("kind", HARD)
def test_removing_a_record_does_not_reorder_the_others(kind, monkeypatch):
    """What the sensitivity of votes rests on. A float32 matrix product alone fails it on two of the tables."""
    table, queries = _hard(kind), _table(4, 200) + 1
    whole = nearest(queries, table, len(table))
    for removed in (0, 5, 333, 599):
        rest = torch.arange(len(table)) != removed
        without = torch.arange(len(table))[rest][nearest(queries, table[rest], len(table))]
        assert torch.equal(without, whole[whole != removed].view(4, -1).long())
    # The same for a shorter list, for one query at a time, and for other block sizes.
    assert torch.equal(nearest(queries, table, 50), whole[:, :50])
    monkeypatch.setattr(search, "_MOST_ROWS", 77)
    assert torch.equal(nearest(queries[2:3], table, 50), whole[2:3, :50])


def test_many_queries_and_several_threads_and_blocks(monkeypatch):
    queries, table = _table(100, seed=1), _table(1500)
    wanted = _brute_force(queries, table, 60)[1].int()
    assert torch.equal(nearest(queries, table, 60), wanted)
    monkeypatch.setattr(search, "_KEYS_AT_A_TIME", 1 << 15)
    monkeypatch.setattr(search, "_VALUES_CENTRED_AT_A_TIME", 1000)
    torch.set_num_threads(2)
    try:
        assert torch.equal(nearest(queries, table, 60), wanted)
    finally:
        torch.set_num_threads(1)


def test_threads_that_search_side_by_side_change_no_setting():
    queries, table = _table(500, 64, seed=1), _table(800, 64)
    wanted = nearest(queries, table, 20)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), ThreadPoolExecutor(3) as pool:
            assert torch.equal(nearest(queries.requires_grad_(), table.requires_grad_(), 20), wanted)
            with torch.inference_mode():
                assert torch.equal(nearest(queries, table.clone(), 20), wanted)
            # Searches at the same time, of which one has several threads.
            for found in pool.map(lambda _: nearest(queries, table, 20), range(6)):
                assert torch.equal(found, wanted)
        with pytest.raises(ValueError, match="table: some features are NaN"):
            nearest(queries, table * torch.nan, 20)
        assert torch.get_num_threads() == 2
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", HARD)
def test_order_on_a_device_is_the_same(kind, monkeypatch):
    """The code of another device, on tensors of this one."""
    table, queries = _hard(kind), _table(30, 200) + 1
    wanted = nearest(queries, table, 50)
    monkeypatch.setattr(search, "_candidates", search._sorted_candidates)
    for keys in (1 << 26, 30 * 500, 1):
        monkeypatch.setattr(search, "_KEYS_AT_A_TIME", keys)
        assert torch.equal(nearest(queries, table, 50), wanted)


def test_coarse_products_change_nothing(monkeypatch):
    """Hardware may give bfloat16 whatever is asked for."""
    queries, table = _table(64, 256, seed=1), _table(512, 256)
    wanted, blocks = nearest(queries, table, 30), search._key_blocks

    def coarse(*args, **kwargs):
        for start, keys in blocks(*args, **kwargs):
            keys.copy_(keys.bfloat16())
            yield start, keys

    monkeypatch.setattr(search, "_key_blocks", coarse)
    assert torch.equal(nearest(queries, table, 30), wanted)


test_bad_arguments_are_named = refusals(
    {
        "k=0": lambda: nearest(_table(3), _table(3), 0),
        "same d": lambda: nearest(_table(3, 2), _table(3, 3), 1),
        r"table: shape \(n,\)": lambda: nearest(_table(3), _table(3)[0], 1),
    }
)


def test_a_table_of_more_records_than_a_search_can_number_is_refused(monkeypatch):
    monkeypatch.setattr(search, "_MOST_RECORDS", 4)
    assert len(nearest(_table(2), _table(4), 1)) == 2
    with pytest.raises(ValueError, match="hold them in shards"):
        nearest(_table(2), _table(5), 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_features_that_are_no_numbers_are_refused_and_not_shown(value):
    broken = _table(5)
    broken[2, 1] = value
    with pytest.raises(ValueError, match="table: some features are NaN") as error:
        nearest(_table(2), broken, 1)
    assert "38" not in str(error.value)
    with pytest.raises(ValueError, match="queries: some features are NaN"):
        nearest(broken, _table(2), 1)


def test_empty_sides():
    assert nearest(_table(4), _table(0), 3).shape == (4, 0)
    assert nearest(_table(0), _table(4), 3).shape == (0, 3)
    neighbors = PoissonNeighbors(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 3, 1, 1.0)
    assert torch.equal(neighbors.votes(neighbors.rank(torch.zeros(4, 2))), torch.zeros(4, 3).long())
    # Fewer records than neighbours, and all of them in the same place.
    assert torch.equal(nearest(_table(9), _table(5), 9).long(), _brute_force(_table(9), _table(5), 9)[1])
    assert torch.equal(
        nearest(torch.zeros(2, 2), torch.zeros(5000, 2), 9), torch.arange(9).int().expand(2, 9)
    )


ROWS = {
    "random": lambda rng: rng.normal(size=(40, 5000)),
    "ascending": lambda rng: np.tile(np.arange(5000.0), (40, 1)),
    "descending": lambda rng: np.tile(-np.arange(5000.0), (40, 1)),
    "equal": lambda rng: np.zeros((40, 5000)),
    "few levels": lambda rng: rng.integers(-2, 3, size=(40, 5000)),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (30, 64), (2000, 300), (4999, 5000), (5000, 777)])
def test_selection_equals_a_stable_sort(kind, count, width):
    keys = ROWS[kind](np.random.default_rng(0)).astype(np.float32)
    order = np.argsort(keys, axis=1, kind="stable")[:, :count]
    whole, left, right = (Smallest(40, count, width) for _ in range(3))
    whole.add(keys[:, :1234], first=7)
    whole.add(keys[:, 1234:], first=1241)
    values, columns = unpack(whole.packed())
    np.testing.assert_array_equal(values, np.take_along_axis(keys, order, axis=1))
    np.testing.assert_array_equal(columns, order + 7)
    if count <= 2500:
        left.add(keys[:, :2500])
        right.add(keys[:, 2500:], first=2500)
        np.testing.assert_array_equal(unpack(merge(left.packed(), right.packed(), count))[1], order)
