"""Our accountant beside others on 20 plans and on selections; docs/reference/golden_values.md lists what agrees."""

import itertools
import math

import gdpnum
import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as theirs
from riskcal import analysis
from scipy.stats import norm

from pl_privknn.privacy import (
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    PureDP,
    delta_for_epsilon,
    trade_off,
)

RATES = np.array([1e-3, 1e-2, 1e-1, 0.5])
LOSSES = np.array([0.0, 0.1, 0.3, 0.5, 0.9])
STEP = 1e-4
#: Votes apart, by number of releases; what rounding up to the grid adds to δ.
STRIDE, ROUNDED = {1: 1, 10: 6}, 1e-4


def plans():
    """Twenty plans: Gaussian and Laplace noise, sampled or not, 1 to 300 releases."""
    rng = np.random.default_rng(0)
    for number in range(20):
        gaussian, rate = number % 2 == 0, 1.0 if number % 4 < 2 else round(10 ** rng.uniform(-2, -0.3), 4)
        count, reach = int(10 ** rng.uniform(0, 2.5)), 10 ** rng.uniform(-0.7, 0.5)
        noise = round(max(math.sqrt(count) / reach * max(rate, 0.2), 0.6), 4)
        yield (Gaussian if gaussian else Laplace)(noise, 1.0, rate), count


def distribution(mechanism, count):
    make = (
        theirs.from_gaussian_mechanism if isinstance(mechanism, Gaussian) else theirs.from_laplace_mechanism
    )
    noise = mechanism.sigma if isinstance(mechanism, Gaussian) else mechanism.scale
    one = make(noise, sampling_prob=mechanism.sampling_rate, value_discretization_interval=STEP)
    return one.self_compose(count)


@pytest.mark.parametrize(("mechanism", "count"), plans())
def test_trade_offs_are_those_of_gdpnum_and_riskcal(mechanism, count):
    ours, pair = trade_off([Charge(mechanism, count)], delta=1e-5), distribution(mechanism, count)
    converter = gdpnum.PLDConverter(pair)
    # The larger of both ways to ask; both packages take the convex hull besides, which no single test reaches.
    both = np.minimum(converter.tradeoff_function(RATES), converter.inverse_tradeoff_function(RATES))
    missed = 1 - ours.true_positive_rate(RATES)
    np.testing.assert_allclose(missed, both, atol=2e-5)
    assert (missed > analysis.get_beta_from_pld(pair, alpha=RATES) - 2e-5).all()
    assert ours.advantage == pytest.approx(analysis.get_advantage_from_pld(pair), abs=2e-5)
    # μ is that of the tests whose error rates are both at least the smallest rate, that rate among them.
    least = ours.smallest_rate
    counted = (converter.alphas >= least) & (converter.betas >= least)
    ends = [float(way(least)) for way in (converter.tradeoff_function, converter.inverse_tradeoff_function)]
    false, miss = (
        np.append(converter.alphas[counted], [least, least]),
        np.append(converter.betas[counted], ends),
    )
    mu = np.max(norm.isf(false) - norm.ppf(miss))
    assert 0.998 * mu <= ours.mu <= 1.005 * mu  # on a coarser grid, from above
    if mechanism.sampling_rate == 1.0:
        assert ours.mu == pytest.approx(converter.get_mu(), rel=1e-3)


@pytest.mark.parametrize(("sigma", "count"), [(3.0, 10), (5.0, 1), (10.0, 40)])
def test_discrete_gaussian_noise_costs_what_gaussian_noise_does(sigma, count):
    """Votes are whole: discrete noise of the same σ has the same profile, up to the width of a vote."""
    discrete = theirs.from_discrete_gaussian_mechanism(
        sigma, value_discretization_interval=STEP
    ).self_compose(count)
    for epsilon in LOSSES:
        ours = delta_for_epsilon([Charge(Gaussian(sigma), count)], float(epsilon))
        assert ours == pytest.approx(discrete.get_delta_for_epsilon(epsilon), abs=5e-4)


def chosen(scores, gain):
    """Probabilities of the exponential mechanism, e^{gain} a vote."""
    weights = np.exp(gain * (scores - scores.max()))
    return weights / weights.sum()


def flipped(scores, gain):
    """Probabilities of permute-and-flip (McKenna, Sheldon 2020), over all orders."""
    heads, found = np.exp(gain * (scores - scores.max())), np.zeros(len(scores))
    for order in itertools.permutations(range(len(scores))):
        left = 1.0
        for place in order:
            found[place] += left * heads[place]
            left *= 1 - heads[place]
    return found / found.sum()


def pairs(rule, gain, step):
    """Outcomes with and without one vote for the first class, for many votes of three classes."""
    for first, second in itertools.product(range(-6, 7, step), repeat=2):
        without = np.array([first, second, 0.0])
        yield rule(without + np.array([1.0, 0.0, 0.0]), gain), rule(without, gain)


def composed(p, q, count):
    lower, upper = ({i: math.log(x) for i, x in enumerate(side)} for side in (q, p))
    one = theirs.from_two_probability_mass_functions(lower, upper, value_discretization_interval=STEP)
    return one.self_compose(count)


@pytest.mark.parametrize("count", [1, 10])
def test_exponential_choices_cost_at_most_what_is_charged_and_nearly_that(count):
    charge, gain = [Charge(ExponentialArgmax(2.0, votes="add"), count)], 0.5
    found = [
        composed(p, q, count).get_delta_for_epsilon(LOSSES) for p, q in pairs(chosen, gain, STRIDE[count])
    ]
    ours = np.array([delta_for_epsilon(charge, float(epsilon)) for epsilon in LOSSES])
    assert (np.max(found, axis=0) <= ours + ROUNDED).all()
    if count == 1:  # of several, the worst pair may change from one to the next
        assert ours[0] == pytest.approx(np.max(found, axis=0)[0], rel=0.03)
    any_pure = common.DifferentialPrivacyParameters(gain, 0)
    pure = theirs.from_privacy_parameters(any_pure, value_discretization_interval=STEP).self_compose(count)
    assert (ours <= np.array(pure.get_delta_for_epsilon(LOSSES)) + ROUNDED).all()


@pytest.mark.parametrize("count", [1, 10])
def test_permute_and_flip_is_pure_and_is_no_exponential_choice(count):
    gain = 0.5
    found = np.max(
        [composed(p, q, count).get_delta_for_epsilon(LOSSES) for p, q in pairs(flipped, gain, STRIDE[count])],
        axis=0,
    )
    stated = [delta_for_epsilon([Charge(PureDP(gain), count)], float(epsilon)) for epsilon in LOSSES]
    assert (found <= np.array(stated) + ROUNDED).all()
    short = [
        delta_for_epsilon([Charge(ExponentialArgmax(2.0, votes="add"), count)], float(epsilon))
        for epsilon in LOSSES
    ]
    assert (found > np.array(short) + 10 * ROUNDED).any()
