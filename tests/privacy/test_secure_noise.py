"""Exact draws in integers: distribution against enumeration, cost against literal sums, labelers end to end."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from pl_privknn.labelers import PATE, PrivateKNN
from pl_privknn.labelers.pate import LNMAX, ConfidentGNMAX
from pl_privknn.labelers.private_knn import Screening
from pl_privknn.labelers.voting import secure_noise
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import (
    Charge,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
    PureDP,
)
from pl_privknn.privacy.noise import SeededNoise

ADD_REMOVE = "add_remove"


def literal_pass_probability(count, threshold, sigma):
    x = np.arange(-3000, 3001)
    mass = np.exp(-(x**2) / (2 * sigma**2))
    return mass[count + x >= threshold].sum() / mass.sum()


@pytest.mark.parametrize(("threshold", "sigma"), [(6.0, 2.5), (6.4, 0.7), (0.0, 30.0)])
def test_secure_screening_accounts_for_the_discrete_tail(threshold, sigma):
    screening = NoisyScreening(10, threshold, sigma, 3, secure=True)
    log_p, log_q = screening.log_dominating_pairs(ADD_REMOVE)
    p = [literal_pass_probability(count, threshold, sigma) for count in range(4, 11)]
    expected = [(a, 1 - a, b, 1 - b) for a, b in itertools.pairwise(p)]
    expected += [(b, 1 - b, a, 1 - a) for a, b in itertools.pairwise(p)]
    found = np.exp(np.concatenate([log_p, log_q], axis=1))
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-9, atol=1e-13)


def test_far_tails_keep_their_relative_precision():
    screening = NoisyScreening(200, 200, 4.0, 10, 0.5, secure=True)
    mass = -(np.arange(-2000, 2001) ** 2) / 32.0
    expected = special.logsumexp(mass[2000 + 200 :]) - special.logsumexp(mass)
    # P[N_Z(0, 16) ≥ 200] is about e^−1254, far below what a difference of sums near 1 can hold.
    assert screening.log_outcomes(np.array([0]))[0, 0] == pytest.approx(expected, rel=1e-12)


def test_secure_screening_draws_what_it_accounts():
    screening = NoisyScreening(10, 6.4, 2.0, 3, 0.5, secure=True)
    for count in (2, 6, 9):
        passed = screening.passes(torch.full((20_000,), count), SeededNoise(count)).sum().item()
        p = literal_pass_probability(count, 6.4, 2.0)
        # Three binomial tests at 1e-4 each: an honest sampler fails one time in 3,300.
        assert stats.binomtest(passed, 20_000, p).pvalue > 1e-4


def test_wide_secure_screening_costs_what_continuous_noise_costs():
    parameters = {"k": 300, "threshold": 180, "sigma": 75, "num_classes": 10, "sampling_rate": 0.15}
    secure = account([Charge(NoisyScreening(**parameters, secure=True), 1000)], delta=1e-5, exact=False)
    plain = account([Charge(NoisyScreening(**parameters), 1000)], delta=1e-5, exact=False)
    # Pass probabilities differ by half a vote of shift, which the maximum over the counts takes out again.
    assert secure.epsilon == pytest.approx(plain.epsilon, rel=1e-3)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_exact_choices_have_the_softmax_distribution(scale):
    votes = torch.tensor([3, 0, 5, 4])
    expected = special.softmax(votes.numpy() / scale) * 40_000
    for draw in (
        lambda rows: SeededNoise(7).exponential_choice(rows, scale),
        lambda rows: ExponentialArgmax(scale, secure=True).argmax(rows, SeededNoise(8)),
    ):
        counts = torch.bincount(draw(votes.expand(40_000, 4)), minlength=4).numpy()
        # χ² with 3 degrees of freedom, four tests at 1e-4.
        assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_exact_choices_keep_the_shape_of_the_scores():
    votes = torch.tensor([[[500, 0], [0, 500]], [[0, 500], [500, 0]]])
    assert SeededNoise(0).exponential_choice(votes, 1.0).tolist() == [[0, 1], [1, 0]]


def test_argmax_costs_the_same_either_way():
    by_gumbel = ExponentialArgmax(20.0, sampling_rate=0.2)
    exactly = ExponentialArgmax(20.0, sampling_rate=0.2, secure=True)
    orders = np.array([1.5, 8.0])
    np.testing.assert_array_equal(exactly.rdp(orders, ADD_REMOVE), by_gumbel.rdp(orders, ADD_REMOVE))


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (Gaussian(25.0, math.sqrt(2), 0.1), DiscreteGaussian(25.0, math.sqrt(2), 0.1)),
        (Laplace(20.0, 2.0, 0.1), DiscreteLaplace(20.0, 2, 0.1)),
        (DiscreteLaplace(20.0, 2), DiscreteLaplace(20.0, 2)),
        (ExponentialArgmax(20.0), ExponentialArgmax(20.0, secure=True)),
    ],
    ids=lambda mechanism: mechanism.kind,
)
def test_exact_form_of_each_kind(noise, expected):
    assert secure_noise(noise) == expected


def test_kinds_without_an_exact_form_are_refused():
    with pytest.raises(ValueError, match=r"PureDP.*no exact form.*Gaussian"):
        secure_noise(PureDP(1.0))


def test_records_show_the_switch_only_where_it_is_on():
    assert "secure" not in NoisyScreening(10, 6, 2.0, 3).to_record()
    charge = Charge(NoisyScreening(10, 6, 2.0, 3, secure=True), 5)
    assert charge.to_record()["secure"] is True
    assert Charge.from_record(charge.to_record()) == charge


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: NoisyScreening(10, 6, 2.0, 3, secure="yes"), "secure='yes'"),
        (lambda: NoisyScreening(10, 6, 2e5, 3, secure=True), "sigma=200000.0"),
        (
            lambda: NoisyScreening(10, 6, 2.0, 3, secure=True).passes(torch.ones(2), SeededNoise(0)),
            "max_votes",
        ),
        (lambda: SeededNoise(0).exponential_choice(torch.ones(2, 2), 1.0), "scores"),
        (lambda: PrivateKNN(k=5, secure=1), "secure=1"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def table():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    return torch.nn.functional.one_hot(labels, 3) * 9.0 + torch.rand(90, 3, generator=generator), labels


@pytest.mark.parametrize("noise", [Gaussian(2.5), Laplace(2.0), ExponentialArgmax(2.0)], ids=lambda n: n.kind)
def test_private_knn_answers_and_pays_with_exact_noise(tmp_path, noise):
    features, labels = table()
    labeler = PrivateKNN(
        k=20,
        sampling_rate=0.9,
        screening=Screening(8, 1.0),
        noise=noise,
        secure=True,
        noise_source=SeededNoise(1),
    )
    labeler.fit(features, labels, 3)
    plan = labeler.plan(9, 9, 3)
    run = Ledger(tmp_path / "ledger.sqlite").run("a", plan=plan)
    release = labeler.label(features[:9], run)
    assert release.labels.tolist() == labels[:9].tolist()
    kinds = [charge.mechanism.kind for charge in plan]
    assert kinds[0] == "noisy_screening"
    assert plan[0].mechanism.secure
    assert kinds[1] in ("discrete_gaussian", "discrete_laplace", "exponential_argmax")


def test_aggregators_take_the_switch():
    confident = ConfidentGNMAX(threshold=6, screening_sigma=2, sigma=2, secure=True)
    assert confident.noise == DiscreteGaussian(2.0, math.sqrt(2))
    assert confident.screening_mechanism(10, 3).secure
    assert LNMAX(scale=2, secure=True).noise == DiscreteLaplace(2.0, 2)
    assert PATE(num_teachers=10, aggregator=confident).plan(4, 4, 3)[1].mechanism.kind == "discrete_gaussian"
