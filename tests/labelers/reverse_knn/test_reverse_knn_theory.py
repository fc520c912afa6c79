"""The (η, β) bounds hold in simulation, and are not idle."""

import math

import pytest
import torch

from pl_privknn.labelers.reverse_knn.accuracy import (
    central_error,
    collision_error,
    randomized_response_error,
)
from pl_privknn.labelers.reverse_knn.local import Table, make_randomizer, true_counts
from pl_privknn.privacy.noise import SeededNoise


def test_proposition_1_is_the_tail_of_laplace_noise():
    eta = central_error(0.5, 0.05, 10, votes=2)
    assert eta == pytest.approx(2 * 2 / 0.5 * math.log(10 / 0.05))  # as printed: 2kr·log(c/β)/ε
    assert central_error(0.5, 0.05, 10, votes=2, adjacency="add_remove") == pytest.approx(eta / 2)
    noise = SeededNoise(0).laplace((20_000, 10), 8.0)
    beyond = float((noise.abs().max(dim=1).values > eta).double().mean())
    # The union bound is nearly exact for independent tails: β less β²/2.
    assert 0.04 < beyond < 0.055


@pytest.mark.parametrize(
    ("name", "bound"), [("randomized_response", randomized_response_error), ("collision", collision_error)]
)
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_local_errors_stay_below_their_bound_and_come_within_a_factor(name, bound, epsilon):
    table, n, beta = Table(1, 10), 5000, 0.05
    labels = (torch.arange(n) % 17).clamp(max=9)[:, None]
    nearest = torch.zeros(n, 1, dtype=torch.int64)
    true = true_counts(table, nearest, labels).view(1, 10)
    randomizer = make_randomizer(name, epsilon, table)
    worst = torch.tensor(
        [
            float((randomizer.simulate(nearest, labels, SeededNoise(seed)) - true).abs().max())
            for seed in range(400)
        ]
    )
    eta = bound(epsilon, beta, n, 10)
    # 400 runs: a bound that is missed with probability 0.05 is missed 35 times or more with probability 0.002.
    assert int((worst > eta).sum()) < 35
    assert eta < 3 * float(worst.quantile(1 - beta))


def test_bounds_fall_with_epsilon_and_grow_with_the_root_of_clients():
    for bound in (randomized_response_error, collision_error):
        assert bound(2.0, 0.05, 1000, 10) < bound(1.0, 0.05, 1000, 10)
        assert bound(1.0, 0.05, 400_000, 10) == pytest.approx(2 * bound(1.0, 0.05, 100_000, 10), rel=0.02)
