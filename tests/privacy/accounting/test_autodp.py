"""Totals against autodp, an independent accountant, where it is installed."""

import numpy as np
import pytest

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.rdp import ORDERS
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace, PureDP, RandomizedResponse

pytest.importorskip("autodp", reason="autodp is not installed; `pip install autodp` adds this cross-check")


@pytest.mark.parametrize("scale", [0.7, 5.0, 40.0])
@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("kind", ["Gaussian", "Laplace"])
def test_unsampled_totals_agree(kind, scale, count):
    from autodp import mechanism_zoo, transformer_zoo

    theirs = getattr(mechanism_zoo, f"{kind}Mechanism")(scale)
    wanted = transformer_zoo.Composition()([theirs], [count]).get_approxDP(1e-5)
    mechanism = Gaussian(scale) if kind == "Gaussian" else Laplace(scale)
    report = account([Charge(mechanism, count)], delta=1e-5)
    # Both convert the same RDP curve; theirs also knows that pure DP ends at its largest loss.
    assert min(report.epsilon_rdp, mechanism.pure_epsilon("add_remove") * count) == pytest.approx(
        wanted, rel=2e-3
    )
    assert report.epsilon <= wanted * 1.001


@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_sampled_gaussian_is_below_the_general_bound(rate):
    from autodp import rdp_acct, rdp_bank

    accountant = rdp_acct.anaRDPacct()
    accountant.compose_poisson_subsampled_mechanisms1(
        lambda order: rdp_bank.RDP_gaussian({"sigma": 2.0}, order), rate, coeff=100
    )
    report = account([Charge(Gaussian(2.0, 1.0, rate), 100)], delta=1e-5)
    # The general bound covers every mechanism with this curve, the Gaussian's own one is tighter.
    assert report.epsilon_rdp <= accountant.get_eps(1e-5)


def test_curves_of_pure_and_randomised_response_agree():
    from autodp import rdp_bank

    orders = ORDERS[(ORDERS > 1.1) & (ORDERS < 60)]
    ours = RandomizedResponse(0.25).rdp(orders, "replace_one")
    theirs = [rdp_bank.RDP_randresponse({"p": 0.75}, order) for order in orders]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    worst = PureDP(0.4).rdp(orders, "add_remove")
    bound = [rdp_bank.RDP_pureDP({"eps": 0.4}, order) for order in orders]
    assert (worst <= np.array(bound) * (1 + 1e-9)).all()
