"""Teachers that release statistics: cost, noise, public fits, and one release for all rounds."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import NearestCentroid

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.features import HOG, Pixels
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PreconditionedGradients, SufficientStatistics
from pl_privknn.labelers.linear_models import fit_least_squares, fit_maximum_likelihood, fit_nearest_mean
from pl_privknn.labelers.released_sums import TARGETS, ReleaseLostError, write_release
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.statistics.statistics_setup import ATTRIBUTES, MADE, exact_sum, fitted, labels_for, table
from tests.setup.refusals import refusals

NAMES = pytest.mark.parametrize("name", MADE)


@NAMES
def test_what_enters_the_model_is_the_sum_and_the_charged_noise(name):
    teacher, ledger, residuals = fitted(MADE[name](noise_multiplier=2.5)), FreeLedger(), []
    for seed in range(20):
        copied = copy.deepcopy(teacher)
        copied.noise_source = SeededNoise(seed)
        copied.label(torch.ones(1, 5), ledger)
        for number, taken in copied.noisy_sums.items():
            exact = exact_sum(teacher, number, taken.weights)
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


def test_nearest_mean_is_that_of_scikit_learn_with_densities_of_normal_classes():
    rows, labels = table(80)
    x = torch.cat([rows, torch.full((80, 1), 0.3)], dim=1).double()
    sums = torch.nn.functional.one_hot(labels, 3).double().T @ x
    scores = x @ fit_nearest_mean(x, sums, 0.3, 0.0).T
    literal = NearestCentroid().fit(rows.numpy(), labels.numpy())
    assert scores.argmax(dim=1).tolist() == literal.predict(rows.numpy()).tolist()
    squares = ((rows.double()[:, None] - torch.tensor(literal.centroids_)) ** 2).sum(dim=2)
    density = torch.exp(-squares / (2 * squares.amin(dim=1).mean() / 5))
    torch.testing.assert_close(
        scores.softmax(dim=1), density / density.sum(dim=1, keepdim=True), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("seed", range(3))
def test_nearest_mean_finds_a_class_of_three_in_a_hundred(seed):
    generator = torch.Generator().manual_seed(seed)

    def part(count):
        labels = (torch.rand(count, generator=generator) < 0.03).long()
        return torch.randn(count, 32, generator=generator) + 4 * labels[:, None] * torch.eye(32)[0], labels

    (private, public, queries), found = (part(count) for count in (3000, 1500, 2000)), {}
    for fit in ("nearest_mean", "least_squares"):
        teacher = SufficientStatistics(
            budget=Budget(1.0), private_records=3000, fit=fit, noise_source=SeededNoise(seed)
        )
        teacher.fit(PrivateRecords.of(*private, 2, public=public[0]))
        release = teacher.label(queries[0], FreeLedger())
        right = release.labels == queries[1]
        found[fit] = [float(right[queries[1] == label].double().mean()) for label in (0, 1)]
        if fit == "nearest_mean":  # as certain as right, within five standard errors
            certain = release.probabilities.max(dim=1).values.double().mean()
            assert abs(float(certain - right.double().mean())) < 5 * math.sqrt(0.06 * 0.94 / 2000)
    assert min(found["nearest_mean"]) > 0.85
    assert found["least_squares"][1] < 0.2


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
    answers = teacher.label(rows, FreeLedger())
    found = teacher.predict(rows, teacher._model()[0])  # before the scale of its scores
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)
    assert torch.equal(teacher.targets.answers(found), answers.labels)


# ---------------------------------------------------------------------- releases, and what a crash leaves of them


@NAMES
def test_later_queries_are_free_and_a_resumed_run_draws_nothing(tmp_path, name):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    make, queries = MADE[name], table(30, seed=5)[0]
    teacher = fitted(make(noise_multiplier=2.0))
    run = ledger.run("a", plan=teacher.plan(30, 30, 3))
    teacher.join_run(tmp_path / "kept", teacher.paying(run))
    first = teacher.label(queries[:10], run)
    assert run.num_charges == teacher.releases
    teacher.join_run(tmp_path / "kept", teacher.paying(run))
    again = fitted(teacher).label(queries, run)
    torch.testing.assert_close(again.probabilities[:10], first.probabilities)
    teacher.leave_run()
    # Another process.
    handle = ledger.run("a")
    resumed = make(noise_multiplier=2.0)
    resumed.join_run(tmp_path / "kept", resumed.paying(handle))
    torch.testing.assert_close(
        fitted(resumed).label(queries, handle).probabilities, again.probabilities, atol=1e-4, rtol=0
    )
    assert handle.num_charges == teacher.releases
    for path in (tmp_path / "kept", *(tmp_path / "kept").iterdir()):
        assert path.stat().st_mode & 0o077 == 0


@NAMES
def test_the_head_is_the_model_that_answers(tmp_path, name):
    teacher, queries = fitted(MADE[name](noise_multiplier=0.5)), table(30, seed=5)[0]
    assert teacher.head_state() is None
    answers = teacher.label(queries, FreeLedger())
    torch.save(teacher.head_state(), tmp_path / "head.pt")
    state = torch.load(tmp_path / "head.pt", weights_only=True)
    # A labeler of the same settings, which has seen nothing; and the one that has, which goes on.
    for labeler in (MADE[name](noise_multiplier=0.5), teacher):
        head = labeler.head(state)
        torch.testing.assert_close(head(queries).float(), answers.probabilities)
        assert not {"_table", "_records"} & {
            name for name, kept in vars(head.func.__self__).items() if kept is not None
        }


@pytest.mark.parametrize(("releases", "lost"), [(3, 1), (1, 0)])
def test_a_release_that_was_paid_for_and_lost_is_not_drawn_again(tmp_path, monkeypatch, releases, lost):
    ledger, queries = Ledger(tmp_path / "ledger.sqlite"), table(30, seed=5)[0]
    teacher, resumed = (MADE["curvature"](noise_multiplier=2.0, releases=releases) for _ in range(2))
    handle = ledger.run("a", plan=teacher.plan(30, 30, 3))
    teacher.join_run(tmp_path / "kept", teacher.paying(handle))

    def keep(*kept):
        if teacher._charged > lost:
            raise KeyboardInterrupt
        write_release(*kept)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr("pl_privknn.labelers.released_sums.write_release", keep)
        fitted(teacher).label(queries, handle)
    teacher.leave_run()  # as the end of a process does
    handle = ledger.run("a")
    assert handle.num_charges == lost + 1
    if releases == 1:  # the only one was lost
        with pytest.raises(ReleaseLostError, match=r"not drawn again. Start a new run"):
            resumed.join_run(tmp_path / "kept", resumed.paying(handle))
    else:
        resumed.join_run(tmp_path / "kept", resumed.paying(handle))
        fitted(resumed).label(queries, handle)
        assert handle.num_charges == 3
        assert sorted(resumed.noisy_sums) == [0, 2]


def test_releases_that_the_ledger_did_not_pay_for_are_refused(tmp_path):
    teacher = fitted(SufficientStatistics(noise_multiplier=2.0))
    handle = Ledger(tmp_path / "one.sqlite").run("a")
    teacher.join_run(tmp_path / "kept", teacher.paying(handle))
    teacher.label(table()[0], handle)
    teacher.leave_run()
    with pytest.raises(ReleaseLostError, match=r"did not pay for"):
        teacher.join_run(tmp_path / "kept", teacher.paying(Ledger(tmp_path / "two.sqlite").run("a")))


def test_another_ledger_pays_anew():
    teacher, ledgers = fitted(SufficientStatistics(noise_multiplier=2.0)), (FreeLedger(), FreeLedger())
    soft = [teacher.label(table()[0], ledger).probabilities for ledger in ledgers]
    assert [len(ledger.rows) for ledger in ledgers] == [1, 1]
    assert not torch.equal(*soft)


def test_other_features_in_a_later_round_are_refused():
    teacher, ledger = fitted(SufficientStatistics(noise_multiplier=2.0)), FreeLedger()
    teacher.label(table()[0], ledger)
    fitted(teacher, public=-table(40, seed=7)[0])
    with pytest.raises(ReleaseLostError, match=r"same features in all rounds"):
        teacher.label(table()[0], ledger)
    for features in (None, [HOG(), Pixels()]):
        with pytest.raises(
            ValueError, match=r"features: rounds use different ones, but SufficientStatistics"
        ):
            PrivateLabeler(SufficientStatistics(noise_multiplier=2.0), rounds=2, features=features)
    PrivateLabeler(SufficientStatistics(noise_multiplier=2.0), rounds=2, features=[HOG()])
    PrivateLabeler(SufficientStatistics(noise_multiplier=2.0), rounds=2, queries_per_round=[9, 0])


# ---------------------------------------------------------------------------- arguments


test_bad_arguments_are_named = refusals(
    {
        "give exactly one": lambda: SufficientStatistics(Budget(epsilon=1.0), noise_multiplier=2.0),
        "fit='median'": lambda: SufficientStatistics(budget=Budget(epsilon=1.0), fit="median"),
        "fit='nearest_mean' with bias=0": lambda: SufficientStatistics(fit="nearest_mean", bias=0.0),
        "fit='nearest_mean' with bias=0.3, task='multilabel'": lambda: SufficientStatistics(
            fit="nearest_mean", task="multilabel"
        ),
        "private_records=0": lambda: SufficientStatistics(budget=Budget(epsilon=1.0), private_records=0),
        "ridge=0": lambda: SufficientStatistics(budget=Budget(epsilon=1.0), ridge=0.0),
        r"clip_norms=\[1.0\]": lambda: PreconditionedGradients(
            budget=Budget(epsilon=1.0), releases=2, clip_norms=[1.0]
        ),
        "adjacency='none'": lambda: PreconditionedGradients(budget=Budget(epsilon=1.0, adjacency="none")),
        r"noise_multiplier=3000000\.0 must be at most 2": lambda: SufficientStatistics(noise_multiplier=3e6),
        r"call fit\(records\) first": lambda: SufficientStatistics(budget=Budget(epsilon=1.0)).label(
            torch.ones(2, 3), FreeLedger()
        ),
        "records.public=None": lambda: SufficientStatistics(budget=Budget(epsilon=1.0)).fit(
            PrivateRecords.of(torch.ones(2, 3), torch.tensor([0, 1]), 2)
        ),
    }
)
