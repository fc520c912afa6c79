"""Teachers that release statistics: cost, noise and public fits."""

import copy
import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression, Ridge

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.statistics import TARGETS, fit_least_squares, fit_maximum_likelihood
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.statistics.statistics_setup import ATTRIBUTES, MADE, fitted, labels_for, table

NAMES = pytest.mark.parametrize("name", MADE)


def gaussian_delta(mu, epsilon):
    """δ(ε) of N(0, 1) against N(μ, 1) (Balle and Wang 2018, Theorem 8)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("name", ["class sums", "likelihood", "curvature of attributes"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_cost_is_that_of_one_gaussian(name, adjacency):
    teacher = MADE[name](noise_multiplier=3.0, adjacency=adjacency)
    report = account(teacher.plan(100, 100, 3, rounds=5), delta=1e-5, adjacency=adjacency)
    mu = math.sqrt(teacher.releases) / 3.0
    assert gaussian_delta(mu, report.epsilon) <= 1e-5 * (1 + 1e-6)
    assert gaussian_delta(mu, 0.999 * report.epsilon) > 1e-5
    other = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(3.0), teacher.releases))
    assert report.epsilon == pytest.approx(other.get_epsilon(1e-5), rel=1e-3)
    teacher = MADE[name](epsilon=0.5, delta=1e-6, adjacency=adjacency)
    report = account(teacher.plan(100, 100, 3), delta=1e-6, adjacency=adjacency)
    assert 0.995 * 0.5 < report.epsilon <= 0.5
    assert gaussian_delta(math.sqrt(teacher.releases) / teacher.noise_multiplier, 0.5) <= 1e-6


@NAMES
def test_what_enters_the_model_is_the_sum_and_the_charged_noise(name):
    teacher, ledger, residuals = fitted(MADE[name](noise_multiplier=2.5)), FreeLedger(), []
    for seed in range(20):
        copied = copy.deepcopy(teacher)
        copied.noise_source = SeededNoise(seed)
        copied.label(torch.ones(1, 5), ledger)
        for number, taken in copied.noisy_sums.items():
            exact = teacher.exact_sum(number, taken.weights)
            residuals.append(((taken.noisy - exact) / teacher.sensitivity(number) / 2.5).flatten())
    drawn = torch.cat(residuals)
    assert len(residuals) == 20 * teacher.releases == len(ledger.rows)
    # Five standard errors of a mean square: about one in two million.
    assert abs(float(drawn.square().mean()) - 1) < 5 * math.sqrt(2 / len(drawn))
    for charge in ledger.rows:
        assert charge.mechanism.sigma / charge.mechanism.l2_sensitivity == pytest.approx(2.5)


# ---------------------------------------------------------------------------- fits


def logistic(x, attribute, penalty):
    model = LogisticRegression(C=1 / penalty, fit_intercept=False, tol=1e-9, max_iter=5000)
    return model.fit(x.numpy(), attribute.numpy())


def test_fits_are_those_of_scikit_learn():
    x, labels = table(50)
    x, y = x.double(), torch.nn.functional.one_hot(labels, 3).double()
    ridge = Ridge(alpha=0.02 * 50, fit_intercept=False).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(fit_least_squares(x, y.T @ x / 50, 0.02), ridge.coef_, atol=1e-8)
    found = fit_maximum_likelihood(x, y.T @ x / 50, 0.02)
    np.testing.assert_allclose(found, logistic(x, labels, 0.02 * 50).coef_, atol=1e-4)
    y = ATTRIBUTES[labels].double() * (torch.arange(50) % 4 > 0)[:, None]
    found = fit_maximum_likelihood(x, y.T @ x / 50, 0.02, targets=TARGETS["multilabel"])
    for weights, attribute in zip(found, y.T, strict=True):
        np.testing.assert_allclose(weights[None], logistic(x, attribute, 0.02 * 50).coef_, atol=1e-4)


@pytest.mark.parametrize(("name", "releases"), [(name, 3) for name in MADE] + [("curvature", 1)])
def test_without_noise_releases_give_the_model_of_all_labels(name, releases):
    rows, classes = table()
    curved = {"clip_norms": [1.5] * releases, "releases": releases} if "curvature" in name else {}
    teacher = MADE[name](noise_multiplier=1e-9, ridge=1e9, **curved)
    teacher.fit(PrivateRecords.of(rows, labels_for(teacher, classes), 3, public=rows))
    x, y = teacher.inputs(rows), ATTRIBUTES[classes].double()
    penalty = teacher.penalty(3) * 60
    if name == "class sums of attributes":
        expected = Ridge(alpha=penalty, fit_intercept=False).fit(x, y).predict(x).clip(0, 1)
    elif name.endswith("attributes"):
        expected = np.stack([logistic(x, one, penalty).predict_proba(x)[:, 1] for one in y.T], axis=1)
    elif name == "class sums":
        y = torch.nn.functional.one_hot(classes, 3).double()
        expected = Ridge(alpha=penalty, fit_intercept=False).fit(x, y).predict(x).clip(0)
        expected /= expected.sum(axis=1, keepdims=True)
    else:
        expected = logistic(x, classes, penalty).predict_proba(x)
    np.testing.assert_allclose(teacher.label(rows, FreeLedger()).soft.numpy(), expected, atol=2e-3)
