"""What records add to released sums, in whole numbers: never more than is charged, to the last digit."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from pl_privknn.labelers import linear_models
from pl_privknn.labelers.released_sums import step_for, whole_steps, within
from tests.labelers.statistics.statistics_setup import MADE, exact_sum, fitted, labels_for, table, with_table

LENGTHS = [0.3, 0.999, 1.0, 1.5, 1e-7, 4e5]


def square(counts):
    """Squared length, in whole numbers of any size."""
    return sum(int(count) ** 2 for count in counts.flatten().tolist())


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_are_powers_of_two_below_the_length(length):
    step = step_for(length)
    assert math.frexp(step)[0] == 0.5
    assert Fraction(step) <= Fraction(length) / 2**24 < 2 * Fraction(step)


@pytest.mark.parametrize("length", LENGTHS)
def test_vectors_are_cut_off_towards_zero(length):
    rows = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)).double()
    rows *= 0.999 * length / rows.norm(dim=1, keepdim=True)
    step = step_for(length)
    counts = within(rows, length, step)
    assert torch.equal(counts, counts.round())
    errors = rows - counts * step
    assert bool((errors * counts.sign() >= 0).all())
    assert float(errors.abs().max()) < step
    assert bool((counts.abs().sum(dim=1) > 0).all())


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_too_long_counts_as_none(length):
    step = step_for(length)
    unit = torch.randn(200, 3, generator=torch.Generator().manual_seed(1)).double()
    unit /= unit.norm(dim=1, keepdim=True)
    # By so few last digits that float64 norms can't tell; by much; and without a number.
    rows = torch.cat(
        [unit * length * (1 + 2.0**-52), unit * length * (1 + 2.0**-23), 9 * unit, unit * math.inf]
    )
    rows = torch.cat([rows, torch.tensor([[math.nan] * 3, [1e300] * 3], dtype=torch.float64)])
    most = (Fraction(length) / Fraction(step)) ** 2
    counts = within(rows, length, step)
    assert all(square(row) <= most for row in counts)
    assert not bool(counts[-2:].any())
    uncut = whole_steps(rows[:400], step)
    assert any(square(row) > most for row in uncut)
    for row, kept in zip(uncut, counts[:400], strict=True):
        assert torch.equal(kept, row if square(row) <= most else 0 * row)
    # What is exactly as long as it may be is kept.
    rows = (
        math.floor(Fraction(length) / Fraction(step))
        * step
        * torch.cat([torch.eye(4), -torch.eye(4)]).double()
    )
    assert torch.equal(within(rows, length, step) * step, rows)


@pytest.mark.parametrize(
    ("name", "given"), [*((name, {}) for name in MADE), ("curvature", {"components": 3})]
)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_record_moves_whole_sums_by_more_than_its_sensitivity(name, given, adjacency):
    teacher = fitted(MADE[name](noise_multiplier=1.0, adjacency=adjacency, **given))
    # In all directions, of all lengths; and such that overflow, of which nothing may be left but a number.
    whole = torch.cat([1e-6 * torch.eye(5), 3 * torch.eye(5), -torch.eye(5), table(3, seed=3)[0]])
    features = torch.cat([whole, torch.full((1, 5), 1e30), torch.full((1, 5), 3e38)])
    width = teacher.inputs(features).shape[1]
    weights = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).double()
    for release in range(min(2, teacher.releases)):
        parts = [
            with_table(teacher, row[None], labels_for(teacher, torch.tensor([label]))).private_sum(
                release, weights
            )
            for row, label in itertools.product(features, range(3))
        ]
        assert parts[0].dtype == torch.int64
        if adjacency == "replace_one":
            parts = [one - other for one, other in itertools.combinations(parts, 2)]
        bound = Fraction(teacher.sensitivity(release)) / Fraction(teacher.step(release))
        assert max(square(part) for part in parts) <= bound**2
        # The bound is no larger than it has to be.
        assert max(square(part) for part in parts) > (0.85 * bound) ** 2


@pytest.mark.parametrize("name", MADE)
def test_whole_sums_are_those_of_real_numbers_but_for_a_step_a_record(name):
    teacher = fitted(MADE[name](noise_multiplier=1.0))
    rows, labels = table()
    x = teacher.inputs(rows)
    weights = torch.randn(3, x.shape[1], generator=torch.Generator().manual_seed(0)).double()
    if name.endswith("attributes"):  # (2y − 1)/√a; and of gradients twice the error
        y, scores = labels_for(teacher, labels).double(), x @ weights.T
        outer, error = (2 * y - 1) / math.sqrt(3), 2.0**-13
        gradients = 2 * (1 / (1 + (-scores).exp()) - y) / math.sqrt(3)
    else:
        outer, error = torch.nn.functional.one_hot(labels, 3).double(), 2.0**-23
        gradients = (x @ weights.T).softmax(dim=1) - outer
    if name.startswith("curvature"):
        outer, error = gradients, 2.0**-13
        outer *= (1.0 / (outer.norm(dim=1) * x.norm(dim=1))).clamp(max=1.0)[:, None]
    torch.testing.assert_close(exact_sum(teacher, 0, weights), outer.T @ x, atol=len(rows) * error, rtol=0)


def test_gradients_that_are_not_clipped_count_as_none(monkeypatch):
    teacher = fitted(MADE["curvature"](noise_multiplier=1.0, clip_norms=[0.25, 0.25, 0.25, 0.25]))
    weights = torch.zeros(3, 6).double()
    assert bool(teacher.private_sum(0, weights).any())
    monkeypatch.setattr(linear_models, "clip_factors", lambda norms, clip_norm: torch.ones_like(norms))
    assert not bool(teacher.private_sum(0, weights).any())
