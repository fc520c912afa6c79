"""Public rows that a run pays for: sensitivities by search over rows, cost, and what is drawn."""

import itertools
import math

import numpy as np
import pytest
import torch

from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger, SystemNoise, epsilon_for_delta
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.public_rows import (
    KeptReleases,
    PublicRows,
    PublicRowsLost,
    cell_counts,
    moment_sums,
    number_cells,
    person_parts,
    power_cells,
    scaled,
)

NAN, INF = math.nan, math.inf
BUDGET = Budget(epsilon=1.0)
# A column of numbers with stated bounds, one without, and a category of three.
SIZES, BOUNDS = [0, 0, 3], [(0.0, 1.0), None, None]
CELLS = [
    [0.0, 0.5, 1.0, -7.0, 1e300, INF, -INF, NAN],
    [0.0, 1.0, -1e-30, 1e300, -1e300, INF, -INF, NAN],
    [0.0, 1.0, 2.0],
]
ROWS = [torch.tensor(row, dtype=torch.float64) for row in itertools.product(*CELLS)]
BASE = torch.tensor(
    [[0.1, 3.0, 0.0], [0.4, -2.0, 1.0], [0.9, 700.0, 2.0], [0.2, 0.5, 1.0]], dtype=torch.float64
)


def exact(table, owners=None, budget=BUDGET):
    """Exact sums of all releases, with the copula of the noisy releases held fixed between neighbouring tables."""
    sums = {}

    def release(name, mechanism, private, step):
        sums[name] = private().double() * step / mechanism.l2_sensitivity
        width = len(sums[name])
        # The same public figures for every table: what comes later is compared with what came before held fixed.
        return torch.full((width,), 3.0, dtype=torch.float64) + torch.arange(width) % 5

    PublicRows(rows=20, bins=4).released(table, owners, SIZES, BOUNDS, budget, release)
    return sums


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_record_moves_a_sum_by_more_than_its_sensitivity(adjacency):
    budget = Budget(epsilon=1.0, adjacency=adjacency)
    before = exact(BASE, budget=budget)
    largest = dict.fromkeys(before, 0.0)
    others = [exact(torch.cat([BASE, row[None]]), budget=budget) for row in ROWS]
    pairs = [(before, other) for other in others]
    if adjacency == "replace_one":
        pairs += list(itertools.combinations(others[::5], 2))
    for one, other in pairs:
        for name in before:
            largest[name] = max(largest[name], float((one[name] - other[name]).norm()))
    assert set(largest) == {"powers of two", "ranges", "histograms", "second moments"}
    assert all(moved <= 1 + 1e-12 for moved in largest.values()), largest
    # The bound is reached: less noise would not do.
    assert all(moved > 0.98 for moved in largest.values()), largest


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_person_with_many_records_moves_a_sum_by_no_more_than_one_record(adjacency):
    owners, budget = torch.arange(len(BASE)), Budget(epsilon=1.0, adjacency=adjacency, unit="person")
    before = exact(BASE, owners, budget)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 7, 50):
        for _ in range(10):
            chosen = torch.randint(len(ROWS), (count,), generator=generator).tolist()
            added = torch.stack([ROWS[place] for place in chosen])
            after = exact(torch.cat([BASE, added]), torch.cat([owners, torch.full((count,), 99)]), budget)
            for name, sums in after.items():
                assert float((sums - before[name]).norm()) <= 1 + 1e-12
            if adjacency == "replace_one":  # by the person of before
                before = after


def test_of_a_row_that_is_longer_than_one_the_clipped_one_is_summed():
    parts = person_parts(None, 1)
    for row in ([1e9, 0.0, 0.0], [1.0, 1.0, 1.0], [1e-3, -3.0, 1e200], [INF, 0.0, 0.0], [NAN, 1.0, 0.0]):
        sums = moment_sums(torch.tensor([row], dtype=torch.float64), parts).double() * 2.0**-35
        assert bool(sums.isfinite().all())
        assert float(sums.norm()) <= 1.0


def test_sums_are_those_of_the_rows():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 4, generator=generator, dtype=torch.float64) / 3
    clipped = rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
    wanted, found = clipped.T @ clipped, moment_sums(rows, person_parts(None, 500)).double() * 2.0**-35
    above = torch.triu_indices(4, 4, 1)
    torch.testing.assert_close(found[:4], wanted.diagonal(), atol=0.1, rtol=0)
    torch.testing.assert_close(found[4:], wanted[above[0], above[1]] * 181 / 128, atol=0.1, rtol=0)


def test_cells_are_those_of_a_histogram():
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers[::50] = -1.0
    counts = cell_counts([(number_cells(numbers, 8), 9)], person_parts(None, 1000)) / 2**20
    known = numbers[numbers >= 0].numpy()
    assert counts.tolist() == [*np.histogram(known, bins=8, range=(0, 1))[0].tolist(), 20]


def test_powers_of_two_are_in_order():
    numbers = torch.tensor([-INF, -3e9, -2.0, -1.5, -1e-9, 0.0, 1e-9, 0.75, 1.0, 1.99, 2.0, 1e300, INF])
    cells = power_cells(numbers.double())
    assert cells.tolist() == sorted(cells.tolist())
    assert int(power_cells(torch.tensor([NAN]))[0]) == 129
    for number in (0.75, 1.0, 1.99, 2.0, 1000.0):
        low = 2.0 ** (int(power_cells(torch.tensor([number]))[0]) - 65 - 16)
        assert low <= number < 2 * low


def test_numbers_are_clipped_to_their_bounds():
    found = scaled(torch.tensor([-INF, 0.0, 5.0, 10.0, 11.0, NAN], dtype=torch.float64), (0.0, 10.0))
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0, -1.0]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("unbounded", [0, 3])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_releases_and_what_they_leave_cost_the_budget(epsilon, unbounded, adjacency):
    settings, budget = PublicRows(), Budget(epsilon=epsilon, delta=1e-6, adjacency=adjacency)
    left = settings.left(budget, unbounded)
    sigma = next(
        s
        for s in np.geomspace(0.01, 1e3, 20_000)
        if epsilon_for_delta([Charge(Gaussian(s))], 1e-6) <= left.epsilon
    )
    whole = [*settings.plan(budget, 14, unbounded), Charge(Gaussian(sigma))]
    assert 0.99 * epsilon <= epsilon_for_delta(whole, 1e-6, adjacency=adjacency) <= epsilon


def test_drawn_rows_have_the_marginals_and_correlations_of_the_table():
    generator = np.random.default_rng(0)
    z = generator.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], 50_000)
    kind = (z[:, 0] + generator.normal(size=50_000) > 0.5).astype(float)
    empty = generator.random(50_000) < 0.2
    table = np.stack([(z[:, 0] / 8 + 0.5).clip(0, 1), np.where(empty, np.nan, z[:, 1]), kind], axis=1)
    noise = SeededNoise(0)

    def release(name, mechanism, private, step):
        return mechanism.add_noise_to_multiples(private(), step, noise.stream(name))

    drawn = PublicRows().released(
        torch.from_numpy(table), None, [0, 0, 2], [(0.0, 1.0), None, None], Budget(epsilon=4.0), release
    )
    rows, (low, high) = drawn.rows.numpy(), drawn.bounds[1]
    assert rows.shape == (4000, 3)
    assert -8 <= low < high <= 8
    assert ((z[:, 1] >= low) & (z[:, 1] <= high)).mean() > 0.94
    assert rows[:, 2].mean() == pytest.approx(kind.mean(), abs=0.03)
    assert (rows[:, 1] < 0).mean() == pytest.approx(0.2, abs=0.03)
    assert rows[:, 0].mean() == pytest.approx(table[:, 0].mean(), abs=0.02)
    full = rows[:, 1] >= 0
    assert np.corrcoef(rows[full, 0], rows[full, 1])[0, 1] == pytest.approx(
        0.8, abs=0.14
    )  # of numbers in cells
    assert np.corrcoef(rows[:, 0], rows[:, 2])[0, 1] == pytest.approx(
        np.corrcoef(table[:, 0], kind)[0, 1], abs=0.1
    )


def test_a_release_is_drawn_once_and_one_that_was_lost_is_refused(tmp_path):
    budget, mechanism = Budget(epsilon=1.0), Gaussian(8.0, 1.0, 1.0)
    ledger = Ledger(tmp_path / "ledger.sqlite", budget)
    run = ledger.run("first", [Charge(mechanism, 2)])
    made = KeptReleases(tmp_path / "kept.pt", run, budget, SystemNoise())
    found = made("one", mechanism, lambda: torch.tensor([5]), 1.0)
    again = KeptReleases(tmp_path / "kept.pt", run, budget, SystemNoise())
    torch.testing.assert_close(again("one", mechanism, lambda: pytest.fail("drawn again"), 1.0), found)
    assert run.num_charges == 1
    with pytest.raises(ZeroDivisionError):
        again("two", mechanism, lambda: 1 // 0, 1.0)
    assert run.num_charges == 2
    late = KeptReleases(tmp_path / "kept.pt", run, budget, SystemNoise())
    late("one", mechanism, lambda: torch.tensor([5]), 1.0)
    with pytest.raises(PublicRowsLost, match="paid for its two"):
        late("two", mechanism, lambda: torch.tensor([5]), 1.0)
    assert run.num_charges == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"histograms": 0.8, "moments": 0.7}, "nothing of μ is left"),
        ({"bounds": 0.7}, "nothing of μ is left"),
        ({"histograms": 1.5}, "histograms=1.5"),
        ({"rows": 3}, "rows=3"),
        ({"bins": 1}, "bins=1"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PublicRows(**arguments)
