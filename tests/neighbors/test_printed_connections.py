"""Balanced connections as the reverse kNN paper prints them, with which a benchmark compares prices."""

import itertools

import pytest
import torch

from benchmarks import printed_connections as printed


def _points(n, d=3, seed=0, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_as_printed_a_record_moves_edges_of_others():
    similarity = torch.exp(-torch.cdist(_points(40), _points(8, seed=1)))
    for objective in ("minimum", "harmonic"):
        whole = printed.balanced_connections(similarity, 1, objective)

        def moves_others(gone, objective=objective, whole=whole):
            keep = torch.arange(40) != gone
            rest = printed.balanced_connections(similarity[keep], 1, objective)
            return bool((rest != whole[keep]).any())

        assert any(map(moves_others, range(40))), objective


def _value(similarity, edges, objective):
    totals = printed.scores(similarity, edges)
    if objective == "minimum":
        return float(totals.min())
    return float(totals.mean()) if objective == "arithmetic" else float(1 / (1 / totals).mean())


def test_arithmetic_connections_are_the_best_of_all():
    similarity = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) + 0.05
    best = max(
        _value(similarity, torch.tensor(edges)[:, None], "arithmetic")
        for edges in itertools.product(range(3), repeat=6)
    )
    ours = _value(similarity, printed.balanced_connections(similarity, 1, "arithmetic"), "arithmetic")
    assert ours == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_no_single_record_can_improve_the_harmonic_mean(k):
    similarity = torch.rand(30, 5, generator=torch.Generator().manual_seed(1)) + 0.05
    edges = printed.balanced_connections(similarity, k, "harmonic")
    ours = _value(similarity, edges, "harmonic")
    assert ours > _value(similarity, printed.balanced_connections(similarity, k, "arithmetic"), "harmonic")
    for record in range(30):
        for other in itertools.combinations(range(5), k):
            changed = edges.clone()
            changed[record] = torch.tensor(other)
            # The search stops at gains below its guard against empty queries, far below 0.1 %.
            assert _value(similarity, changed, "harmonic") <= ours * 1.001


def test_balance_of_connections():
    similarity = torch.exp(
        -torch.cdist(_points(500), torch.cat([_points(3, seed=1), _points(9, seed=2) * 3]))
    )
    values = {
        objective: printed.balanced_connections(similarity, 2, objective) for objective in printed.OBJECTIVES
    }
    for edges in values.values():
        assert edges.shape == (500, 2)
        assert bool((edges[:, 0] != edges[:, 1]).all())
    least = {objective: _value(similarity, edges, "minimum") for objective, edges in values.items()}
    harmonic = {objective: _value(similarity, edges, "harmonic") for objective, edges in values.items()}
    assert least["minimum"] > least["harmonic"] > least["arithmetic"]
    assert harmonic["harmonic"] > harmonic["arithmetic"]


def test_bad_connections_are_named():
    points = _points(5)
    with pytest.raises(ValueError, match="objective='best'"):
        printed.balanced_connections(points.abs() + 1, 1, "best")
    with pytest.raises(ValueError, match="similarity"):
        printed.balanced_connections(points)
