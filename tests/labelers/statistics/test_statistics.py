"""Teachers that release statistics: cost, sensitivity and public fits."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression, Ridge
from statistics_setup import ATTRIBUTES, MADE, fitted, labels_for, table

from pl_privknn.labelers import PreconditionedGradients
from pl_privknn.labelers.statistics import TARGETS, Taken, fit_least_squares, fit_maximum_likelihood
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

NAMES = pytest.mark.parametrize("name", MADE)
BOTH = ("add_remove", "replace_one")


# ---------------------------------------------------------------------------- cost


def gaussian_delta(mu, epsilon):
    """δ(ε) of N(0, 1) against N(μ, 1) (Balle and Wang 2018, Theorem 8)."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@NAMES
@pytest.mark.parametrize("adjacency", BOTH)
def test_cost_is_that_of_one_gaussian(name, adjacency):
    teacher = MADE[name](noise_multiplier=3.0, adjacency=adjacency)
    report = account(teacher.plan(100, 100, 3, rounds=5), delta=1e-5, adjacency=adjacency)
    mu = math.sqrt(teacher.releases) / 3.0
    assert gaussian_delta(mu, report.epsilon) <= 1e-5 * (1 + 1e-6)
    assert gaussian_delta(mu, 0.999 * report.epsilon) > 1e-5
    other = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(3.0), teacher.releases))
    assert report.epsilon == pytest.approx(other.get_epsilon(1e-5), rel=1e-3)


@NAMES
def test_epsilon_is_met_and_not_undershot(name):
    teacher = MADE[name](epsilon=0.5, delta=1e-6)
    report = account(teacher.plan(100, 100, 3), delta=1e-6)
    assert 0.995 * 0.5 < report.epsilon <= 0.5
    mu = math.sqrt(teacher.releases) / teacher.noise_multiplier
    assert gaussian_delta(mu, 0.5) <= 1e-6


@NAMES
@pytest.mark.parametrize("adjacency", BOTH)
def test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity(name, adjacency):
    teacher = MADE[name](noise_multiplier=1.0, adjacency=adjacency)
    # Directions with and against the others, of all lengths, with every class.
    features = [
        sign * length * vector
        for vector in (torch.eye(5)[0], torch.ones(5), table(1, seed=3)[0][0])
        for sign, length in ((1, 1e-6), (1, 3.0), (-1, 3.0), (1, 1e30))
    ]
    records = list(itertools.product(features, range(3)))
    weights = 3 * torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()

    def sums(release, extra):
        rows, labels = table()
        if extra is not None:
            rows, labels = torch.cat([rows, extra[0][None]]), torch.cat([labels, torch.tensor([extra[1]])])
        fitted(teacher, rows, labels)
        x = teacher.inputs(rows[:1])
        return teacher.exact_sum(
            release, weights[:, :1].expand(3, x.shape[1]) * torch.linspace(-1, 1, x.shape[1])
        )

    for release in range(teacher.releases):
        found = [sums(release, record) for record in records]
        if adjacency == "add_remove":
            moves = [float((one - sums(release, None)).norm()) for one in found]
        else:
            moves = [float((one - other).norm()) for one, other in itertools.combinations(found, 2)]
        assert max(moves) <= teacher.sensitivity(release) * (1 + 1e-9)
        # The bound is no larger than it has to be (√2 of nonnegative votes needs votes that share no centre).
        assert max(moves) > (0.7 if name == "soft votes" else 0.85) * teacher.sensitivity(release)


@NAMES
def test_what_enters_the_model_is_the_sum_and_the_charged_noise(name):
    teacher, ledger, residuals = fitted(MADE[name](noise_multiplier=2.5)), FreeLedger(), []
    for seed in range(40):
        copied = copy.deepcopy(teacher)
        copied.noise_source = SeededNoise(seed)
        copied.label(torch.ones(1, 5), ledger)
        for number, taken in copied._taken.items():
            exact = teacher.exact_sum(number, taken.weights)
            residuals.append(((taken.noisy - exact) / teacher.sensitivity(number) / 2.5).flatten())
    drawn = torch.cat(residuals)
    assert len(residuals) == 40 * teacher.releases == len(ledger.rows)
    # Five standard errors of a mean square: about one in two million.
    assert abs(float(drawn.square().mean()) - 1) < 5 * math.sqrt(2 / len(drawn))
    for charge in ledger.rows:
        assert charge.mechanism.sigma / charge.mechanism.l2_sensitivity == pytest.approx(2.5)


@NAMES
def test_the_model_is_made_of_releases_and_public_constants(name):
    found = []
    for count in (20, 60):
        teacher = fitted(MADE[name](noise_multiplier=2.0), *table(count))
        # The noise on a moment of attributes is 2/√3 times smaller for it.
        scale = 2 / math.sqrt(3) if teacher.tasks == ("multilabel",) else 1.0
        assert teacher.penalty(3) == pytest.approx(0.4 * 2.0 / math.sqrt(teacher.releases) / 60 / scale)
        width = teacher.inputs(table(1)[0]).shape[1]
        same = torch.randn(3, width, generator=torch.Generator().manual_seed(1)).double()
        releases = {number: Taken(same * (1 + number), same / 9) for number in range(teacher.releases)}
        found.append(teacher.model(teacher.inputs(table(40, seed=7)[0]), releases))
    assert torch.equal(*found)


@NAMES
def test_features_that_overflow_count_as_none(name):
    rows, labels = table()
    # Features that overflow have no directions; where none are asked for, they can still be scaled.
    few = {"components": 3} if name == "curvature" else {}
    teacher = fitted(
        MADE[name](noise_multiplier=1.0, **few),
        torch.cat([rows, torch.full((1, 5), 3e38)]),
        torch.cat([labels, labels[:1]]),
    )
    weights = torch.zeros(3, teacher.inputs(rows).shape[1]).double()
    # Numbers that are none would become the least whole number.
    assert float(teacher.exact_sum(0, weights).abs().max()) < 62 * teacher.sensitivity(0)


# ---------------------------------------------------------------------------- fits


def test_least_squares_is_ridge_regression():
    x, labels = table(50)
    x, y = x.double(), torch.nn.functional.one_hot(labels, 3).double()
    found = fit_least_squares(x, y.T @ x / 50, 0.02)
    expected = Ridge(alpha=0.02 * 50, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-8)


def test_maximum_likelihood_is_logistic_regression():
    x, labels = table(50)
    x, y = x.double(), torch.nn.functional.one_hot(labels, 3).double()
    found = fit_maximum_likelihood(x, y.T @ x / 50, 0.02)
    model = LogisticRegression(C=1 / (0.02 * 50), fit_intercept=False, tol=1e-9, max_iter=2000)
    np.testing.assert_allclose(found.numpy(), model.fit(x.numpy(), labels.numpy()).coef_, atol=1e-4)


def test_maximum_likelihood_of_attributes_is_a_logistic_regression_each():
    x, labels = table(50)
    x, y = x.double(), ATTRIBUTES[labels].double() * (torch.arange(50) % 4 > 0)[:, None]
    found = fit_maximum_likelihood(x, y.T @ x / 50, 0.02, targets=TARGETS["multilabel"])
    for weights, attribute in zip(found, y.T, strict=True):
        model = LogisticRegression(C=1 / (0.02 * 50), fit_intercept=False, tol=1e-9, max_iter=2000)
        np.testing.assert_allclose(weights[None], model.fit(x, attribute).coef_, atol=1e-4)


@pytest.mark.parametrize("name", ["class sums", "likelihood", "curvature"])
def test_without_noise_attributes_give_the_model_of_all_labels(name):
    rows, classes = table()
    given = {"clip_norms": [1.5] * 4} if name == "curvature" else {}
    teacher = MADE[f"{name} of attributes"](noise_multiplier=1e-9, ridge=1e9, **given)
    teacher.fit_public(rows)  # the public examples are the private ones
    teacher.fit(rows, labels_for(teacher, classes), 3)
    x, y = teacher.inputs(rows), ATTRIBUTES[classes].double()
    if name == "class sums":
        alpha = teacher.penalty(3) * 60
        expected = Ridge(alpha=alpha, fit_intercept=False).fit(x, y).predict(x).clip(0, 1)
    else:
        C = 1 / (teacher.penalty(3) * 60)
        models = [LogisticRegression(C=C, fit_intercept=False, tol=1e-9, max_iter=5000) for _ in range(3)]
        fits = [model.fit(x, attribute) for model, attribute in zip(models, y.T, strict=True)]
        expected = np.stack([fit.predict_proba(x)[:, 1] for fit in fits], axis=1)
    soft = teacher.label(rows, FreeLedger()).soft
    np.testing.assert_allclose(soft.numpy(), expected, atol=2e-3)


def test_without_noise_and_clipping_releases_give_the_model_of_all_labels():
    rows, labels = table()
    for clip_norms in ([1.5], [1.5, 1.5, 1.5]):
        teacher = PreconditionedGradients(
            noise_multiplier=1e-9,
            expected_records=60,
            releases=len(clip_norms),
            clip_norms=clip_norms,
            ridge=1e9,
        )
        teacher.fit_public(rows)  # the public examples are the private ones
        teacher.fit(rows, labels, 3)
        release = teacher.label(rows, FreeLedger())
        x = teacher.inputs(rows)
        moment = torch.nn.functional.one_hot(labels, 3).double().T @ x / 60
        expected = (x @ fit_maximum_likelihood(x, moment, teacher.penalty(3)).T).softmax(dim=1)
        torch.testing.assert_close(release.soft.double(), expected, atol=1e-4, rtol=0)
