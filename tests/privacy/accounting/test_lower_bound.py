"""ε from below, against closed forms and against every transcript of small cases."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import binom

from pl_privknn.cli.main import main
from pl_privknn.privacy import (
    Charge,
    Conditional,
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    Laplace,
    NoisyScreening,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
    account,
    epsilon_for_delta,
    epsilon_lower,
)
from pl_privknn.privacy.accounting.exact import exact_epsilon
from pl_privknn.privacy.accounting.lower_bound import _candidates, _pairs
from pl_privknn.privacy.accounting.pld import gaussian_epsilon

DELTA = 1e-5


def epsilon_of(p, q, delta):
    """Literal: δ at each ε over all outcomes, in both directions; bisection."""

    def profile(epsilon):
        ahead, back = np.maximum(p - math.exp(epsilon) * q, 0), np.maximum(q - math.exp(epsilon) * p, 0)
        return max(ahead.sum(), back.sum())

    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if profile(middle) > delta else (low, middle)
    return low


def test_gaussian_compositions_and_laplace_in_closed_form():
    mu = 2.0
    truth = gaussian_epsilon(mu, DELTA)
    releases = [Charge(Gaussian(sigma=8 / mu), 32), Charge(GaussianDPStream(mu=mu / math.sqrt(2)))]
    found = epsilon_lower(releases, delta=DELTA)
    assert 0.998 * truth <= found <= truth
    for scale in (0.4, 3.0):
        pure = 1 / scale + 2 * math.log1p(-DELTA)  # δ(ε) = 1 − e^{(ε − ε₀)/2} of a Laplace release
        assert 0.98 * pure <= epsilon_lower([Charge(Laplace(scale))], delta=DELTA) <= pure
    hidden = [Charge(Conditional(Gaussian(sigma=8 / mu), "so it is"), 64)]
    assert epsilon_lower(hidden, delta=DELTA) == pytest.approx(found)


@pytest.mark.parametrize("count", [1, 400])
def test_coins_against_the_binomial_law(count):
    heads = np.arange(count + 1)
    likely = 1 / (1 + math.exp(-0.2))
    truth = epsilon_of(binom.pmf(heads, count, likely), binom.pmf(heads, count, 1 - likely), DELTA)
    assert truth * 0.998 <= epsilon_lower([Charge(PureDP(0.2), count)], delta=DELTA) <= truth * (1 + 1e-9)


def test_two_families_against_all_transcripts():
    screening = NoisyScreening(k=6, threshold=4, sigma=1.0, num_classes=3)
    argmax = ExponentialArgmax(scale=2.0)
    truth = 0.0
    pairs = [_candidates(*_pairs(mechanism, "add_remove")) for mechanism in (screening, argmax)]
    transcripts = np.array(list(itertools.product((0, 1), repeat=5)))
    for (a, b), (c, d) in itertools.product(*pairs):
        p, q = (
            np.where(transcripts == 1, side, 1 - np.array(side)).prod(axis=1)
            for side in ([a] * 2 + [c] * 3, [b] * 2 + [d] * 3)
        )
        truth = max(truth, epsilon_of(p, q, 0.01))
    charges = [Charge(screening, 2), Charge(argmax, 3)]
    found = epsilon_lower(charges, delta=0.01)
    assert 0.97 * truth <= found <= truth * (1 + 1e-9)
    assert truth <= account(charges, delta=0.01).epsilon


def test_members_of_the_argmax_family_are_real():
    """Votes and Gumbel noise: the winner's share by its closed form, with the record and without it."""
    gain = math.exp(1 / 3.0)
    p, q = _pairs(ExponentialArgmax(scale=3.0, votes="add", sampling_rate=0.25), "add_remove")
    odds = q[:, 0] / q[:, 1]
    assert p[:, 0] == pytest.approx(0.75 * q[:, 0] + 0.25 * odds * gain / (1 + odds * gain))
    assert p.sum(axis=1) == pytest.approx(np.ones(len(p)))


def test_the_command_prints_both(tmp_path, capsys):
    records = tmp_path / "records.json"
    records.write_text(json.dumps([Charge(Gaussian(sigma=4.0)).to_record()]))
    assert main(["epsilon", str(records), "--delta", "1e-5", "--bounds", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.998 * told["epsilon"] <= told["epsilon_lower"] <= told["epsilon"]
    assert epsilon_lower([], delta=DELTA) == 0.0


@pytest.mark.parametrize(("sigma", "rate", "count"), [(20.0, 1.0, 500), (20.0, 0.2, 3000), (5.0, 0.1, 40)])
def test_gaussian_releases_against_the_lower_bound(sigma, rate, count):
    charges = [Charge(Gaussian(sigma=sigma, l2_sensitivity=math.sqrt(2), sampling_rate=rate), count)]
    truth = epsilon_for_delta(charges, DELTA, method="pld")
    assert 0.998 * truth <= epsilon_lower(charges, delta=DELTA) <= truth
    # Another release beside them, and one without a lower bound of its own, which counts as nothing.
    beside = [*charges, Charge(Laplace(1.0))]
    assert truth < epsilon_lower(beside, delta=DELTA) <= epsilon_for_delta(beside, DELTA, method="pld")
    counted = [*charges, Charge(ShuffleAmplification(1.0, 1000))]
    assert epsilon_lower(counted, delta=DELTA) == epsilon_lower(charges, delta=DELTA)


@pytest.mark.long("add", "swap")  # the docs' figure below has both families
@pytest.mark.parametrize(
    ("mechanism", "count", "width"),
    [
        (ExponentialArgmax(scale=19.4924, votes="add", sampling_rate=0.15), 300, 1.004),
        (ExponentialArgmax(scale=19.4924, votes="swap", sampling_rate=0.15), 300, 1.004),
        (NoisyScreening(300, 210, 85, 10, 0.2), 1_000_000, 1.01),
    ],
    ids=["add", "swap", "a million screenings"],
)
def test_the_exact_figure_lies_between_an_adversary_and_a_coarser_grid(mechanism, count, width):
    charges, work = [Charge(mechanism, count)], {"work": 1e9} if count > 300 else {}
    fine, coarse = (exact_epsilon(charges, delta=DELTA, coarsen=grid, **work) for grid in (1.0, 2.0))
    lower = epsilon_lower(charges, delta=DELTA)
    assert lower <= fine <= coarse <= width * lower


def test_two_families_have_the_width_that_the_docs_state():
    charges = [
        Charge(NoisyScreening(300, 180, 75, 10, 0.15), 2000),
        Charge(ExponentialArgmax(scale=19.4924, votes="swap", sampling_rate=0.15), 735),
    ]
    assert epsilon_lower(charges, delta=DELTA) == pytest.approx(0.8086, abs=5e-5)
    assert exact_epsilon(charges, delta=DELTA) == pytest.approx(0.8359, abs=5e-5)


def test_a_hundred_million_coins_beside_other_releases_stay_close_to_the_upper_bound():
    coins, noise = Charge(RandomizedResponse(0.49995), 10**8), Charge(Laplace(20.0), 3)
    choices = Charge(ExponentialArgmax(scale=1e5, votes="add", sampling_rate=0.15), 10**8)
    for releases in ([coins, noise], [coins, choices]):
        stated = account(releases, delta=DELTA).epsilon
        assert 0.99 * stated <= epsilon_lower(releases, delta=DELTA) <= stated
