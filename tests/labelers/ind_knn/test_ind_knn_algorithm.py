"""Ind-KNN: equal to the printed algorithm, and what must not show."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.labelers.base import PayingRun
from pl_privknn.labelers.ind_knn import IndKNNParameters, algorithm
from pl_privknn.labelers.ind_knn.algorithm import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy import Budget, Gaussian
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_literal import Literal
from tests.labelers.ind_knn.ind_knn_setup import Draws, draws_of, engine_of

NUM_CLASSES = 4


def exact_rows(rng, count, dimension=48):
    """Vectors with 16 entries of ±1/4: of length 1, and every product is exact in float32."""
    rows = np.zeros((count, dimension))
    centres = rng.choice([-0.25, 0.25], (NUM_CLASSES, dimension))
    for row in rows:
        places = np.sort(rng.permutation(24)[:16]) + rng.choice([0, 24], p=[0.8, 0.2])
        flips = np.where(rng.random(16) < 0.1, -1, 1)
        row[places] = centres[rng.integers(NUM_CLASSES)][places] * flips
    return rows


def random_rows(rng, count, dimension=12):
    centres = np.random.default_rng(99).normal(size=(NUM_CLASSES, dimension))
    return centres[rng.integers(NUM_CLASSES, size=count)] + 0.8 * rng.normal(size=(count, dimension))


def engine(parameters, dimension, *table, **switches):
    return engine_of(parameters, dimension, *table, num_classes=NUM_CLASSES, **switches)


def answer(made, queries, seed):
    run = PayingRun(FreeLedger(), Draws(seed), ("add_remove",))
    return made.answer(torch.as_tensor(queries, dtype=torch.float32), run)


def compare(parameters, rows, queries, *, batches, rtol, reuse=False, literal_candidates=None, hashing=None):
    """Fast path against the printed loop on the same draws; returns the loop."""
    rng = np.random.default_rng(5)
    labels, ids = rng.integers(NUM_CLASSES, size=len(rows)), 7 * np.arange(len(rows)) + 3
    fast = engine(parameters, rows.shape[1], ids, rows, labels, reuse=reuse, hashing=hashing)
    literal = Literal(parameters, NUM_CLASSES, reuse)
    literal.add(ids, np.float32(rows), labels)
    start = 0
    for number, size in enumerate(batches):
        part = queries[start : start + size]
        answers = answer(fast, part, number)
        draws = draws_of(Draws(number), size, NUM_CLASSES)
        for offset in range(size):
            chosen = None if literal_candidates is None else literal_candidates(start + offset, ids)
            expected, noisy, count = literal.predict(np.float32(part[offset]), draws[offset], chosen)
            assert answers.labels[offset] == expected
            np.testing.assert_allclose(answers.noisy[offset], noisy, rtol=rtol, atol=rtol)
            assert answers.counts[offset] == pytest.approx(count, rel=1e-12)
        left = fast.remaining()
        np.testing.assert_allclose(left, [literal.z[i] for i in ids], atol=rtol * parameters.rho)
        # What the table works with is what is on record.
        written = dict(fast.budgets.read("SELECT id, allowed - spent FROM budgets"))
        assert written == dict(zip(fast.budgets.numbers.tolist(), fast.budgets.left.tolist(), strict=True))
        start += size
    assert start == len(queries)
    assert max(literal.cost.values()) <= parameters.rho * (1 + 1e-9)
    return literal


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("kernel", "threshold"), [("cosine", 0.375), ("rbf", math.exp(-(2 - 2 * 0.375) / 2.25) - 1e-12)]
)
def test_equals_the_printed_algorithm_where_products_are_exact(kernel, threshold, reuse, monkeypatch):
    monkeypatch.setattr(algorithm, "_MOST_QUERIES_AT_ONCE", 13)
    rng = np.random.default_rng(0)
    parameters = IndKNNParameters(threshold, 20.0, 0.4, 0.06, kernel, bandwidth=1.5)
    rows, queries = exact_rows(rng, 220), exact_rows(rng, 400)
    # Ties with the threshold occur, and count as neighbours in both.
    assert ((rows @ queries.T) == 0.375).any()
    literal = compare(parameters, rows, queries, reuse=reuse, batches=[1, 30, 99, 200, 70], rtol=1e-10)
    # Everything happens: whole contributions, cut ones, records that are spent and records that are not.
    spent = np.array([literal.z[i] < 1 / 800 for i in literal.z])
    assert min(literal.clipped, literal.unclipped) > 50
    assert 20 < spent.sum() < 220
    assert not reuse or len(literal.public) == 400


@pytest.mark.parametrize("reuse", [False, True])
def test_equals_the_printed_algorithm_on_random_features(reuse):
    rng = np.random.default_rng(1)
    parameters = IndKNNParameters.for_budget(
        Budget(epsilon=1.0, delta=1e-5), threshold=0.55, noise=Gaussian(0.5), num_queries=60
    )
    rows, queries = random_rows(rng, 250), random_rows(rng, 300)
    everything = np.concatenate([rows, queries])
    everything /= np.linalg.norm(everything, axis=1, keepdims=True)
    assert np.abs(everything @ everything[250:].T - 0.55).min() > 3e-7  # float32 decides as float64 does
    literal = compare(parameters, rows, queries, reuse=reuse, batches=[300], rtol=3e-5)
    assert min(literal.clipped, literal.unclipped) > 100


def test_hashing_is_the_same_algorithm_among_the_candidates():
    rng = np.random.default_rng(2)
    rows, queries = exact_rows(rng, 150), exact_rows(rng, 200)
    options = SignProjections(num_tables=3, num_bits=4, seed=1)
    planes = options.hyperplanes(rows.shape[1]).double().numpy()

    of_rows, of_queries = (((part @ planes) >= 0).reshape(-1, 3, 4) for part in (rows, queries))

    def candidates(query, ids):
        return set(ids[(of_rows == of_queries[query]).all(axis=2).any(axis=1)].tolist())

    parameters = IndKNNParameters(0.375, 20.0, 0.4, 0.06)
    sizes = [len(candidates(query, np.arange(150))) for query in range(200)]
    assert 5 < np.mean(sizes) < 130
    compare(
        parameters, rows, queries, batches=[50, 150], rtol=1e-10,
        literal_candidates=candidates, hashing=options,
    )  # fmt: skip


def test_no_row_depends_on_another():
    rows = torch.randn(50, 7) * torch.logspace(-20, 20, 50)[:, None]
    rows[3] = 0
    together = unit_rows(rows)
    alone = torch.cat([unit_rows(row[None]) for row in rows])
    assert torch.equal(together, alone)
    norms = torch.linalg.vector_norm(together.double(), dim=1)
    assert norms[3] == 0
    assert (norms - 1).abs().sum() == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------- what must not show


def test_nobody_near_goes_through_the_same_noise():
    parameters = IndKNNParameters(0.5, 5.0, 1.0, 1.0)
    queries = torch.eye(3).repeat(500, 1)
    far = engine(parameters, 3, np.arange(100), -torch.ones(100, 3), np.zeros(100))
    first, second = (answer(made, queries, 4) for made in (engine(parameters, 3), far))
    np.testing.assert_array_equal(first.noisy, second.noisy)
    np.testing.assert_array_equal(first.labels, second.labels)
    assert np.isfinite(first.noisy).all()
    # Uniform over classes at a fixed seed: a correct engine fails for one seed in a thousand.
    assert stats.chisquare(np.bincount(first.labels, minlength=NUM_CLASSES)).pvalue > 1e-3
    np.testing.assert_array_equal(far.remaining(), 1.0)


def test_spent_records_give_nothing_away():
    # 500 records of class 2 at the query, until their budgets are spent; afterwards nothing tells of them.
    parameters = IndKNNParameters(0.5, 30.0, 1.0, 0.02)
    made = engine(parameters, 2, np.arange(500), torch.ones(500, 2), np.full(500, 2))
    assert (answer(made, torch.ones(10, 2), 1).labels == 2).all()
    answer(made, torch.ones(400, 2), 2)
    assert made.budgets.left.max() < parameters.costs(parameters.count_cost)
    after, empty = (answer(one, torch.ones(500, 2), 3) for one in (made, engine(parameters, 2)))
    np.testing.assert_array_equal(after.noisy, empty.noisy)
    np.testing.assert_array_equal(after.counts, empty.counts)


@pytest.mark.parametrize("vote_sigma", [1e-3, 1e-12, 1e-200])
def test_costs_beyond_all_whole_numbers_take_what_a_record_has(vote_sigma):
    """The cost of a whole vote is far beyond what fits into 64 bits of quanta, or is infinite."""
    rng = np.random.default_rng(1)
    parameters, rows = IndKNNParameters(0.375, 20.0, vote_sigma, 0.06, min_count=40.0), exact_rows(rng, 100)
    made = engine(parameters, rows.shape[1], np.arange(100), rows, rng.integers(NUM_CLASSES, size=100))
    assert np.isfinite(answer(made, exact_rows(rng, 30), 0).noisy).all()
    left = made.budgets.left
    assert ((left >= 0) & (left == np.floor(left))).all()  # whole quanta
    assert (left == 0).sum() > 20
    if vote_sigma > 1e-200:  # whose square is zero in the loop
        compare(parameters, rows, exact_rows(rng, 30), batches=[30], rtol=1e-9)
