"""Error rates of the best attack, against closed forms and against all tests there are."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from pl_privknn.cli import main
from pl_privknn.privacy import Budget, Charge, Gaussian, Laplace, Ledger, NoisyScreening, PureDP, trade_off
from pl_privknn.privacy.accounting.accountant import compose_charges
from pl_privknn.privacy.accounting.tradeoff import RATES, TradeOff

GRID = np.array([1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99])


def best_tests(p, q, fpr):
    """Neyman and Pearson literally: outcomes in order of their ratio, the last one by a coin.

    Of several pairs (rows) the attacker may take one by a coin, too: the concave hull of all corners.
    """
    corners = [np.zeros((1, 2)), np.ones((1, 2))]
    for a, b in zip(np.atleast_2d(p), np.atleast_2d(q), strict=True):
        order = np.argsort(-(np.log(a) - np.log(b)))
        corners.append(np.stack([np.cumsum(b[order]), np.cumsum(a[order])], axis=1))
    false, true = np.concatenate(corners).T
    ends = np.unique(false)
    highest = np.array([true[false == end].max() for end in ends])
    hull = [0]
    for i in range(1, len(ends)):
        while len(hull) > 1 and (
            (highest[hull[-1]] - highest[hull[-2]]) * (ends[i] - ends[hull[-2]])
            <= (highest[i] - highest[hull[-2]]) * (ends[hull[-1]] - ends[hull[-2]])
        ):
            hull.pop()
        hull.append(i)
    return np.interp(fpr, ends[hull], highest[hull])


def both_ways(p, q, fpr):
    return np.maximum(best_tests(p, q, fpr), best_tests(q, p, fpr))


@pytest.mark.parametrize("mu", [0.2, 4.0])
def test_gaussian_releases_in_closed_form_and_on_a_grid(mu):
    charges = [Charge(Gaussian(sigma=10 / mu), 100)]
    truth = ndtr(ndtri(GRID) + mu)
    closed = trade_off(charges)
    assert closed.true_positive_rate(GRID) == pytest.approx(truth, rel=1e-12)
    assert closed.mu == pytest.approx(mu, rel=1e-12)
    assert closed.advantage == pytest.approx(2 * ndtr(mu / 2) - 1, rel=1e-9)
    gridded = TradeOff((compose_charges(charges, 0.01, "add_remove"),), None, 1e-5)
    found = gridded.true_positive_rate(GRID)
    assert np.all(found >= truth - 1e-12)
    assert found == pytest.approx(truth, rel=1e-4)
    assert mu <= gridded.mu <= mu * 1.001
    assert -1e-12 <= gridded.advantage - closed.advantage <= 1e-4


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_pure_privacy_is_that_of_randomised_response(epsilon):
    found = trade_off([Charge(PureDP(epsilon))])
    truth = np.minimum(math.exp(epsilon) * GRID, 1 - math.exp(-epsilon) * (1 - GRID))
    assert found.true_positive_rate(GRID) == pytest.approx(truth, rel=1e-9)
    assert found.advantage == pytest.approx(math.tanh(epsilon / 2), rel=1e-9)
    assert found.mu == pytest.approx(2 * ndtri(1 / (1 + math.exp(-epsilon))), rel=1e-9)


def test_several_coins_against_every_transcript():
    outcomes = np.array([math.exp(0.5), 1.0]) / (1 + math.exp(0.5))
    transcripts = list(itertools.product((0, 1), repeat=7))
    p = np.array([np.prod([outcomes[o] for o in t]) for t in transcripts])
    q = np.array([np.prod([outcomes[1 - o] for o in t]) for t in transcripts])
    found = trade_off([Charge(PureDP(0.5), 7)])
    truth = both_ways(p, q, GRID)
    assert np.all(found.true_positive_rate(GRID) >= truth - 1e-12)
    assert found.true_positive_rate(GRID) == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_sampled_release_differs_by_direction(rate):
    """A threshold test in either direction; the pair is not symmetric, so that the larger counts."""
    mu, x = 2.0, np.linspace(-9, 12, 200_001)
    false = ndtr(-x)
    true = (1 - rate) * ndtr(-x) + rate * ndtr(mu - x)
    there = np.interp(GRID, false[::-1], true[::-1])
    absent = np.interp(GRID, 1 - true, 1 - false)
    found = trade_off([Charge(Gaussian(sigma=1 / mu, sampling_rate=rate))]).true_positive_rate(GRID)
    truth = np.maximum(there, absent)
    assert np.any(np.abs(there - absent) > 1e-3)
    assert np.all(found >= truth - 1e-6)
    assert found == pytest.approx(truth, rel=1e-3)


def test_a_family_is_bounded_by_its_worst_pair():
    screening = NoisyScreening(k=10, threshold=6, sigma=1.0, num_classes=3)
    p, q = screening.dominating_pairs("add_remove")
    truth = both_ways(p, q, GRID)
    loose = trade_off([Charge(screening)], exact=False).true_positive_rate(GRID)
    tight = trade_off([Charge(screening)]).true_positive_rate(GRID)
    assert np.all(loose >= truth - 1e-9)
    assert np.all((tight >= truth - 1e-9) & (tight <= loose + 1e-12))
    assert tight == pytest.approx(truth, rel=0.002)


def test_nothing_and_everything():
    nothing, everything = trade_off([]), trade_off([Charge(Laplace(1e-6), 10)])
    assert nothing.true_positive_rate(GRID) == pytest.approx(GRID)
    assert (nothing.advantage, nothing.mu) == (0.0, 0.0)
    assert everything.true_positive_rate(GRID).tolist() == [1.0] * len(GRID)
    assert everything.advantage == pytest.approx(1.0)
    assert everything.mu == math.inf
    with pytest.raises(ValueError, match=r"fpr=1.5 must lie in \[0, 1\]"):
        nothing.true_positive_rate(1.5)


def test_the_command_says_it_for_lists_and_ledgers(tmp_path, capsys):
    charges = [Charge(Gaussian(sigma=20.0), 30), Charge(PureDP(0.2), 3)]
    records, path = tmp_path / "records.json", tmp_path / "ledger.sqlite"
    records.write_text(json.dumps([charge.to_record() for charge in charges]))
    with_ledger = Ledger(path, Budget(delta=1e-5))
    with_ledger.run("one", plan=charges)
    said = with_ledger.report(exact=True).trade_off().to_dict()
    with_ledger.close()
    plot = tmp_path / "rates.svg"
    for words in ([str(records), "--delta", "1e-5", "--plot", str(plot)], [str(path)]):
        assert main(["epsilon", *words, "--tradeoff", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {name: told[name] for name in said} == pytest.approx(said)
    assert said.keys() == {*(f"tpr_at_fpr_{rate}" for rate in RATES), "advantage", "gaussian_dp_mu"}
    assert said["tpr_at_fpr_0.01"] > 0.01
    assert plot.read_text().startswith("<?xml")
    assert main(["epsilon", str(records), "--delta", "1e-5", "--plot", str(plot)]) == 2
    assert "--tradeoff" in capsys.readouterr().err
