"""Single releases: privacy loss distributions and monotone costs.

Laws of the noise are tested at its source (``test_exact_noise``) and at the labels (``test_pate``).
"""

import dataclasses

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as dp_pld

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import (
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    Mechanism,
    NoisyScreening,
)
from pl_privknn.privacy.noise import SeededNoise
from tests.privacy.mechanisms.mechanism_setup import ADD_REMOVE, ALL, argmax_pairs, deltas_of


def hockey_stick(p, q, eps):
    return np.maximum(p[..., None, :] - np.exp(eps)[:, None] * q[..., None, :], 0).sum(-1)


@pytest.mark.parametrize(
    "ours", [Gaussian(2.0), Gaussian(1.1, 1.5, 0.1), Laplace(2.0), Laplace(0.9, 1.3, 0.2)], ids=repr
)
def test_plds_equal_dp_accountings(ours):
    step = 2.0**-9
    given = {"value_discretization_interval": step, "sampling_prob": ours.sampling_rate}
    if isinstance(ours, Gaussian):
        other = dp_pld.from_gaussian_mechanism(ours.sigma, ours.l2_sensitivity, **given)
    else:
        other = dp_pld.from_laplace_mechanism(ours.scale, ours.l1_sensitivity, **given)
    mine, eps = ours.pld(ADD_REMOVE, step), np.linspace(0, 4, 100)
    for mine_pmf, other_pmf in ((mine._pmf_remove, other._pmf_remove), (mine._pmf_add, other._pmf_add)):
        np.testing.assert_allclose(deltas_of(mine_pmf, eps), deltas_of(other_pmf, eps), atol=1e-12)


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_a_pld_sums_to_one_and_dominates_at_any_grid(mechanism):
    eps = np.linspace(0, 1.5, 40)
    fine = deltas_of(mechanism.pld(ADD_REMOVE, 2.0**-14), eps)
    for step in (2.0**-6, 2.0**-10):
        coarse = mechanism.pld(ADD_REMOVE, step)
        assert np.all(deltas_of(coarse, eps) >= fine - 1e-13)
        for pmf in (coarse._pmf_remove, coarse._pmf_add):
            assert pmf._probs.sum() + pmf._infinity_mass == pytest.approx(1, abs=1e-12)
            assert (pmf._probs >= 0).all()


@pytest.mark.parametrize(
    "mechanism", [m for m in ALL if m.dominating_pairs(ADD_REMOVE) is not None], ids=repr
)
def test_the_envelope_is_the_maximum_of_the_hockey_sticks(mechanism):
    p, q = mechanism.dominating_pairs(ADD_REMOVE)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(q.sum(1), 1, rtol=1e-12)
    loss = np.abs(np.log(p / q)).max()
    eps = np.linspace(0, loss, 33)
    step = 2.0**-16
    ours = mechanism.pld(ADD_REMOVE, step)
    for pmf, upper, lower in ((ours._pmf_remove, p, q), (ours._pmf_add, q, p)):
        envelope = hockey_stick(upper, lower, eps).max(0)
        # The arg-max family is cut into cells that dominate it, so its own curve lies a little lower.
        slack = 1e-12 if isinstance(mechanism, NoisyScreening) else 1e-2 * envelope[0]
        deltas = deltas_of(pmf, eps)
        assert np.all(deltas >= envelope - slack)
        assert np.all(deltas <= envelope + step)


@pytest.mark.parametrize("votes", ["add", "swap"])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_argmax_pld_and_pairs_dominate_every_member(votes, rate):
    scale = 2.0
    mechanism = ExponentialArgmax(scale, votes, rate)
    eps = np.linspace(0, 1.0, 21)
    dominating = mechanism.pld(ADD_REMOVE, 2.0**-12)
    p_rows, q_rows = mechanism.dominating_pairs(ADD_REMOVE)
    rows = hockey_stick(p_rows, q_rows, eps).max(0), hockey_stick(q_rows, p_rows, eps).max(0)
    remove, add = deltas_of(dominating._pmf_remove, eps), deltas_of(dominating._pmf_add, eps)
    for p, q in argmax_pairs(np.random.default_rng(1), scale, votes, rate, 60):
        for whole, row, member in (
            (remove, rows[0], hockey_stick(p, q, eps)),
            (add, rows[1], hockey_stick(q, p, eps)),
        ):
            assert np.all(whole >= member - 1e-12)
            assert np.all(row >= member - 1e-12)


@dataclasses.dataclass(frozen=True)
class KnownByOrders(Mechanism):
    """A Gaussian release of which the RDP alone is stated."""

    def rdp(self, orders, adjacency):
        return Gaussian(1.5).rdp(orders, adjacency)


def test_a_mechanism_that_states_its_rdp_alone_costs_what_that_says():
    charges = [Charge(KnownByOrders(), 3), Charge(Laplace(5.0))]
    report = account(charges, delta=1e-5)
    assert report.epsilon_pld == np.inf
    same = [Charge(Gaussian(1.5), 3), Charge(Laplace(5.0))]
    assert report.epsilon == report.epsilon_rdp == account(same, delta=1e-5).epsilon_rdp


def test_a_vote_that_is_no_number_never_wins():
    with pytest.raises(ValueError, match="votes"):
        ExponentialArgmax(2.0).argmax(torch.tensor([[3.0, float("nan"), 1.0]]), SeededNoise(0))
