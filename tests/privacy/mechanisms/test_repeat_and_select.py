"""The best of a random number of runs: its ε beside dp-accounting's, and beside the exact one of a small example."""

import json

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.rdp import ORDERS
from pl_privknn.privacy.mechanisms import Charge, Conditional, Gaussian, RepeatAndSelect
from pl_privknn.privacy.noise import SeededNoise


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "score", "mean"), [(1.2, 0.02, 300, 30.0, 3.0), (5.0, 1.0, 10, 100.0, 20.0)]
)
def test_epsilon_is_that_of_dp_accounting(noise, rate, steps, score, mean):
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
    candidate = dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(step, steps), dp_event.GaussianDpEvent(score)]
    )
    theirs = RdpAccountant(ORDERS[::2])  # slow for orders that are no whole numbers
    theirs.compose(dp_event.RepeatAndSelectDpEvent(candidate, mean, 1.0))
    charges = (Charge(Gaussian(noise, 1.0, rate), steps), Charge(Gaussian(score, 1.0, 1.0)))
    report = account([Charge(RepeatAndSelect(charges, mean))], delta=1e-5)
    assert report.epsilon_rdp == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    assert report.epsilon >= account(list(charges), delta=1e-5).epsilon * 0.99


@pytest.mark.parametrize("mean", [2.0, 8.0])
def test_the_largest_of_several_noisy_counts_costs_no_more_than_stated(mean):
    sigma, reach = 2.0, 60
    points = np.arange(-reach, reach + 1)

    def largest(shift):
        """Logarithms of probabilities of the largest of K counts, by E[F^K] of the geometric distribution."""
        weights = np.exp(-((points - shift) ** 2) / (2 * sigma**2))
        own = weights / weights.sum()
        below, chance = np.cumsum(own), 1 / mean
        left = 1 - (1 - chance) * np.append(0.0, below)
        return np.log(chance * own / (left[1:] * left[:-1]))  # a difference, without cancellation

    with_record, without = largest(1), largest(0)
    stated = RepeatAndSelect((Charge(Gaussian(sigma, 1.0, 1.0)),), mean)
    for order in (1.5, 2.0, 4.0, 16.0):
        bound = stated.rdp(np.array([order]), "add_remove")[0]
        for p, q in ((with_record, without), (without, with_record)):
            exact = np.logaddexp.reduce(order * p + (1 - order) * q) / (order - 1)
            assert 0 < exact <= bound


def test_counts_are_geometric():
    mechanism, noise = RepeatAndSelect((Charge(Gaussian(1.0, 1.0, 1.0)),), 4.0), SeededNoise(0)
    counts = np.array([mechanism.draw_count(noise) for _ in range(1500)])
    assert counts.min() == 1
    assert counts.mean() == pytest.approx(4.0, abs=5 * 12**0.5 / 1500**0.5)  # 5 standard errors
    for k in (1, 2, 5):
        share = 0.25 * 0.75 ** (k - 1)
        assert np.mean(counts == k) == pytest.approx(share, abs=5 * (share / 1500) ** 0.5)


def test_it_reads_back_from_its_record_and_refuses_what_it_can_t_be():
    charges = (Charge(Gaussian(1.2, 1.0, 0.02), 300), Charge(Gaussian(30.0, 1.0, 1.0)))
    mechanism = RepeatAndSelect(charges, 3)
    record = json.loads(json.dumps(Charge(mechanism, 2).to_record()))
    assert Charge.from_record(record) == Charge(mechanism, 2)
    for candidate, mean, message in (
        ((), 3.0, "candidate: want"),
        (5, 3.0, "candidate=5: want a list"),
        (charges, 0.5, r"mean=0\.5"),
        ((Charge(Conditional(Gaussian(1.0, 1.0, 1.0), "if so")),), 3.0, "candidate: want"),
    ):
        with pytest.raises(ValueError, match=message):
            RepeatAndSelect(candidate, mean)
