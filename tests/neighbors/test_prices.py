import pytest
import torch

from pl_privknn.neighbors.prices import learn_prices, priced_neighbors


def _points(n, d=3, seed=0, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def _degrees(edges, queries):
    return torch.bincount(edges.flatten(), minlength=queries)


@pytest.mark.parametrize("k", [1, 3])
def test_priced_neighbors_equal_brute_force(k):
    records, queries = _points(300), _points(17, seed=1)
    prices = torch.rand(17, generator=torch.Generator().manual_seed(2)).double() * 4
    found = priced_neighbors(records, queries, prices, k)
    for record, chosen in zip(records.double(), found, strict=True):
        cost = [
            float(((record - query) ** 2).sum() - price)
            for query, price in zip(queries.double(), prices, strict=True)
        ]
        assert chosen.tolist() == sorted(range(17), key=lambda j: cost[j])[:k]


def test_equal_prices_are_plain_neighbors():
    records, queries = _points(200), _points(9, seed=1)
    plain = torch.cdist(records.double(), queries.double()).argmin(dim=1)
    assert torch.equal(priced_neighbors(records, queries, torch.full((9,), 3.0))[:, 0], plain)


@pytest.mark.parametrize("k", [1, 2])
def test_prices_balance_public_and_fresh_degrees(k):
    # Most queries lie where few examples are: plain degrees are very uneven.
    queries = torch.cat([_points(4, seed=1), _points(16, seed=2, scale=3.0)])
    public, private = _points(2000, seed=3), _points(4000, seed=4)
    prices = learn_prices(public, queries, k)
    assert prices.shape == (20,)
    assert abs(float(prices.mean())) < 1e-9

    def unevenness(records, prices):
        degrees = _degrees(priced_neighbors(records, queries, prices, k), 20).double()
        return float(degrees.std() / degrees.mean())

    flat = torch.zeros(20)
    assert unevenness(public, flat) > 0.5
    assert unevenness(public, prices) < 0.05
    # Fresh records of the same distribution: 4,000 k / 20 each, so chance alone gives some 7 %.
    assert unevenness(private, flat) > 0.5
    assert unevenness(private, prices) < 0.15


def test_prices_reach_the_optimal_assignment():
    from scipy.optimize import linear_sum_assignment

    # 40 examples on 8 queries with 5 places each: at balanced prices the chosen edges are a cheapest assignment.
    public, queries = _points(40, d=2, seed=5), _points(8, d=2, seed=6)
    edges = priced_neighbors(public, queries, learn_prices(public, queries, steps=4000))[:, 0]
    cost = torch.cdist(public.double(), queries.double()).square()
    rows, columns = linear_sum_assignment(cost.repeat_interleave(5, dim=1).numpy())
    best = float(cost[rows, columns // 5].sum())
    ours = float(cost[torch.arange(40), edges].sum())
    degrees = _degrees(edges, 8)
    assert int((degrees - 5).abs().sum()) <= 4
    assert abs(ours - best) < 0.1 * best


@pytest.mark.parametrize("k", [1, 3])
def test_a_record_moves_only_its_own_edges(k):
    records, queries, public = _points(60), _points(12, seed=1), _points(200, seed=2)
    prices = learn_prices(public, queries, k)
    whole = priced_neighbors(records, queries, prices, k)
    counts = _degrees(whole, 12)
    for gone in range(60):
        keep = torch.arange(60) != gone
        rest = priced_neighbors(records[keep], queries, prices, k)
        assert torch.equal(rest, whole[keep])
        assert int((_degrees(rest, 12) - counts).abs().sum()) == k


def test_bad_arguments_are_named():
    points = _points(5)
    with pytest.raises(ValueError, match="fewer than k=6"):
        learn_prices(points, points, 6)
    with pytest.raises(ValueError, match="same d"):
        learn_prices(points, points[:, :2])
    with pytest.raises(ValueError, match="one finite"):
        priced_neighbors(points, points, torch.zeros(4))
