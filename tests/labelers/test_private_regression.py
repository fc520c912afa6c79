"""The regression labeler: accuracy, noise, and what the median costs, by brute force."""

import math

import numpy as np
import pytest
import torch
from refusals import refusals

from pl_privknn.labelers.private_knn import PrivateRegression
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian, Laplace
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


def line(n=3000, seed=0):
    """Targets 10·x with noise, and one record in ten that is far off."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(n, 1, generator=generator)
    targets = 10 * features[:, 0] + 0.3 * torch.randn(n, generator=generator)
    targets[::10] = 1000.0
    return features, targets


@pytest.mark.parametrize(
    ("statistic", "noise", "bias", "largest"),
    # The far tenth is clipped to 20, which moves the mean of targets about 5 by 1.5 (and by up to 4 where a sample
    # holds many of them), and the median by next to nothing.
    [
        ("mean", Gaussian(2.0), 1.5, 4.0),
        ("mean", Laplace(2.0), 1.5, 4.0),
        ("median", ExponentialArgmax(1.0), 0.0, 0.5),
    ],
)
def test_answers_follow_the_targets(statistic, noise, bias, largest):
    model = PrivateRegression(0, 20, 60, 0.5, statistic, noise, 201, SeededNoise(0))
    model.fit(*line())
    queries = torch.linspace(0.1, 0.9, 50)[:, None]
    payments = FreeLedger()
    answers = model.predict(queries, payments)
    assert answers.shape == (50,)
    errors = answers - 10 * queries[:, 0]
    assert float(errors.mean()) == pytest.approx(bias, abs=0.3)
    assert float(errors.abs().max()) < largest
    assert [row.mechanism for row in payments.rows] == [charge.mechanism for charge in model.plan(50)]
    assert payments.rows[0].count == 50
    assert account(payments.rows, delta=1e-5, exact=False).epsilon > 0
    assert model.predict(queries[:0], payments).shape == (0,)
    assert len(payments.rows) == 1


def test_noise_of_the_mean():
    features, targets = torch.zeros(20, 1), torch.full((20,), 3.0)
    model = PrivateRegression(0, 10, 10, 1.0, "mean", Gaussian(5.0), noise_source=SeededNoise(1))
    model.fit(features, targets)
    answers = model.predict(torch.zeros(4000, 1), FreeLedger())
    # 5 of the sum is 0.5 of the mean of ten; five standard errors, below 1e-6 for a right implementation.
    assert abs(float(answers.mean()) - 3) < 5 * 0.5 / math.sqrt(4000)
    assert abs(math.log(float(answers.std()) / 0.5)) < 5 / math.sqrt(2 * 4000)
    assert model.noise.l2_sensitivity == 10.0


def neighbouring_sums(model, trials=40):
    """Sums of a table and of the same table without its first record, at the same queries, without sampling."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(trials):
        features = torch.randn(12, 1, generator=generator)
        targets = 6 * torch.rand(12, generator=generator) - 3  # bounds are [-1, 1]: many lie beyond
        pair = []
        for first in (0, 1):
            model.fit(features[first:], targets[first:])
            queries = torch.randn(6, 1, generator=torch.Generator().manual_seed(3))
            pair.append(model._neighbors.votes(model._neighbors.rank(queries)))
        yield pair


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("scale", [0.4, 2.0])
def test_median_costs_no_more_than_what_is_charged(rate, scale):
    scores = PrivateRegression(-1, 1, 5, 1.0, "median", candidates=9)
    mechanism = PrivateRegression(-1, 1, 5, rate, "median", ExponentialArgmax(scale)).noise
    orders = np.array([1.5, 2.0, 8.0, 32.0])
    bound, pure = mechanism.rdp(orders, "add_remove"), mechanism.pure_epsilon("add_remove")
    largest, largest_loss, largest_move = np.zeros(4), 0.0, 0.0
    for with_record, without in neighbouring_sums(scores):
        first, second = -with_record.abs() / 2, -without.abs() / 2
        largest_move = max(largest_move, float((first - second).abs().max()))
        p, q = (first / scale).softmax(dim=1).numpy(), (second / scale).softmax(dim=1).numpy()
        p = (1 - rate) * q + rate * p
        for upper, lower in ((p, q), (q, p)):
            largest_loss = max(largest_loss, float(np.log(upper / lower).max()))
            for i, order in enumerate(orders):
                moment = (upper**order * lower ** (1 - order)).sum(axis=1)
                largest[i] = max(largest[i], float(np.log(moment).max()) / (order - 1))
    assert largest_move == 1.0  # what the proof says is met
    assert largest_loss <= pure
    assert bool((largest <= bound * (1 + 1e-9)).all())
    assert bool((largest > 0.2 * bound).all())  # and the bound is no empty one


def made(*bounds, **given):
    return lambda: PrivateRegression(*(bounds or (0, 1)), **given)


def fitted(features, targets):
    return lambda: PrivateRegression(0, 1, 5, 0.5).fit(features, targets)


FEATURES, TARGETS = torch.zeros(8, 1), torch.zeros(8)
test_bad_input_is_refused = refusals(
    {
        "low": made(1, 1),
        "statistic": made(statistic="mode"),
        "noise": made(statistic="median", noise=Gaussian(3.0)),
        "votes": made(statistic="median", noise=ExponentialArgmax(3.0, votes="add")),
        "fit": lambda: made()().predict(torch.zeros(2, 1), FreeLedger()),
        "targets: shape": fitted(FEATURES, TARGETS[:7]),
        "targets.*int64": fitted(FEATURES, TARGETS.long()),
        "targets": fitted(FEATURES, TARGETS.index_fill(0, torch.tensor(0), math.nan)),
        "features": fitted(FEATURES[:, 0], TARGETS),
        "k=300": lambda: PrivateRegression(0, 1, sampling_rate=1.0).fit(FEATURES, TARGETS),
    }
)
