"""Figures that other projects publish in their own tests; docs/reference/golden_values.md lists them."""

import math

import numpy as np
import pytest

from pl_privknn.privacy import (
    Charge,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    account,
    delta_for_epsilon,
    epsilon_for_delta,
    trade_off,
)
from pl_privknn.privacy.accounting import rdp

ORDERS = np.array([1.25, 2.0, 2.25, 4.0, 4.5, 10.0, 25.0, 64.0, 128.0])
# autodp, test/test_dp_sgd_poisson_sampling_add_remove.py: RDP of one step by TensorFlow Privacy, of which those for
# more steps are multiples; (rate, σ): a value for each order.
AUTODP = {
    (0.01, 0.1): [
        39.47435359280898, 90.7896596280238, 104.21069366522143, 193.85977308534916, 219.07906690372957,
        494.8831442377909, 1245.2029477229287, 3195.321731874551, 6395.3585686314445,
    ],
    (0.01, 0.25): [
        0.1103603174246269, 6.790784234628705, 9.710698228804564, 25.859773085349214, 30.079066903729597,
        74.883144237791, 195.20294772292905, 507.3217318745518, 1019.3585686314451,
    ],
    (0.01, 0.5): [
        0.0018977736416478479, 0.005345502314345245, 0.0083541177519165, 1.8618755130319669, 3.0791796010526946,
        14.883144237791036, 45.202947722929075, 123.32173187455179, 251.35856863144505,
    ],
    (0.2, 0.5): [
        0.2693155798829554, 1.1454723378159812, 1.7160611134797041, 5.85411562333582, 6.930726961789178,
        18.211735652851, 48.32350217454782, 126.3650154540352, 254.37788934809794,
    ],
    (0.2, 1.0): [
        0.034642316647709226, 0.06647221890559733, 0.08026393760128477, 0.29132308006676827, 0.429697843698239,
        3.212286119795191, 10.82350217470511, 30.365015454035202, 62.37788934809791,
    ],
    (0.2, 2.0): [
        0.006824777906499827, 0.011296964989239926, 0.012858854549446597, 0.02497156532232035, 0.028878485101326103,
        0.09784245743693407, 1.459148041400704, 6.365016041204642,
    ],
}  # fmt: skip


@pytest.mark.parametrize("setting", AUTODP)
def test_rdp_of_the_sampled_gaussian_in_autodp(setting):
    rate, sigma = setting
    want = np.array(AUTODP[setting])
    found = Gaussian(sigma, sampling_rate=rate).rdp(ORDERS[: len(want)], "add_remove")
    np.testing.assert_allclose(found, want, rtol=6e-9)


@pytest.mark.parametrize(
    "mechanism",
    [
        Gaussian(1.0, sampling_rate=0.0),
        Gaussian(1e-9, sampling_rate=0),
        Laplace(1.0, sampling_rate=0.0),
        PureDP(1.0, sampling_rate=0.0),
    ],
)
def test_rate_0_costs_nothing(mechanism):
    """dp-accounting, rdp_privacy_accountant_test.py and pld_privacy_accountant_test.py; autodp's lines of rate 0."""
    report = account([Charge(mechanism, 1000)], delta=1e-10)
    assert (report.epsilon, report.epsilon_rdp, report.epsilon_pld) == (0.0, 0.0, 0.0)
    assert delta_for_epsilon([Charge(mechanism)], 0.0) == 0.0
    assert mechanism.rdp(ORDERS, "add_remove") == pytest.approx(0.0, abs=0.0)
    other = Charge(Gaussian(4.0))
    assert account([other, Charge(mechanism, 7)], delta=1e-5).epsilon == account([other], delta=1e-5).epsilon


def test_gaussian_and_sampled_gaussian_in_dp_accounting():
    """dp-accounting, pld_privacy_accountant_test.py (δ to 1e-3 there) and privacy_loss_distribution_test.py."""
    thrice = [Charge(Gaussian(math.sqrt(3)), 3)]
    assert delta_for_epsilon(thrice, 1.0) == pytest.approx(0.126936, abs=1e-6)
    assert epsilon_for_delta(thrice, 0.126936) == pytest.approx(1.0, abs=1e-5)
    assert trade_off(thrice).true_positive_rate([0.1])[0] == pytest.approx(0.38914, abs=5e-6)
    sampled = [Charge(Gaussian(0.5, sampling_rate=0.2), 3)]
    assert delta_for_epsilon(sampled, 1.0) == pytest.approx(0.15594, abs=1e-5)
    assert epsilon_for_delta(sampled, 0.15594) == pytest.approx(1.0, abs=1e-3)


def test_sampled_gaussian_rdp_in_dp_accounting():
    """dp-accounting, rdp_privacy_accountant_test.py: 50 steps; at half-integer orders its bound is looser."""
    found = 50 * Gaussian(2.5, sampling_rate=0.01).rdp(np.array([1.5, 2.5, 5.0, 50.0, 100.0]), "add_remove")
    want = np.array([6.70579741e-04, 1.08548710e-03, 2.18075656e-03, 2.38460375e-02, 1.67416308e02])
    np.testing.assert_allclose(found[2:], want[2:], rtol=1e-8)
    assert (found[:2] < want[:2]).all()
    assert (found[:2] > 0.96 * want[:2]).all()


def test_laplace_in_dp_accounting():
    """dp-accounting, pld_privacy_accountant_test.py and privacy_loss_mechanism_test.py."""
    both = [Charge(Laplace(1.0), 3), Charge(Laplace(2.0), 2)]
    assert epsilon_for_delta(both, 1e-14) == pytest.approx(4.0, abs=1e-6)
    sampled = [Charge(Laplace(0.5, sampling_rate=0.2), 3)]
    assert epsilon_for_delta(sampled, 1e-14) == pytest.approx(2.46964, abs=1e-5)
    # (scale, sensitivity, rate, ε, larger δ of both directions)
    for scale, sensitivity, rate, epsilon, delta in [
        (1.0, 1.0, 1.0, 0.0, 0.39346934),
        (2.0, 4.0, 1.0, 0.5, 0.52763345),
        (2.0, 4.0, 0.8, 0.5, 0.4039564635032081),
        (1.0, 1.0, 0.6, 0.2, 0.1741992102060086),
        (2.0, 2.0, 0.3, 0.0, 0.1180408020862099),
    ]:
        found = delta_for_epsilon([Charge(Laplace(scale, sensitivity, rate))], epsilon)
        assert found == pytest.approx(delta, abs=1e-8)
    # (scale, sensitivity, rate, largest loss)
    for scale, sensitivity, rate, loss in [
        (1.0, 1.0, 0.8, 0.864839725163191),
        (3.0, 3.0, 0.6, 0.7085130668623151),
        (1.0, 2.0, 0.7, 1.699706179357965),
        (1.0, 1.0, 1.0, 1.0),
    ]:
        assert Laplace(scale, sensitivity, rate).pure_epsilon("add_remove") == pytest.approx(loss, abs=1e-12)
    # Scales that dp-accounting finds for an ε of 1: sampled ones are pure 1-DP.
    for rate, scale in [(0.8, 0.8720521537764049), (0.5, 0.671194938966816)]:
        assert Laplace(scale, 1.0, rate).pure_epsilon("add_remove") == pytest.approx(1.0, abs=1e-9)


def test_randomized_response_in_dp_accounting():
    """dp-accounting, pld_privacy_accountant_test.py: noise_parameter 4/(3+e) of 4 values is (1, 0)-DP."""
    # It replaces a value by any of the four, its own too, so that ours flips 3/4 as often.
    release = RandomizedResponse(flip_probability=0.75 * 4 / (3 + math.e), num_values=4)
    assert release.pure_epsilon("replace_one") == pytest.approx(1.0, abs=1e-12)
    assert delta_for_epsilon([Charge(release)], 1.0, "replace_one") == pytest.approx(0.0, abs=1e-12)


def test_conversions_in_dp_accounting():
    """dp-accounting, rdp_privacy_accountant_test.py: ε by hand from 1.1 at orders 2 to 32; a Gaussian."""
    orders = np.arange(2.0, 33.0)
    assert rdp.epsilon_improved(orders, np.full(31, 1.1), 1e-5) == pytest.approx(1.32783806176, abs=1e-11)
    delta = math.exp(float(rdp.log_delta_improved(orders, np.full(31, 1.1), 1.32783806176)))
    assert delta == pytest.approx(1e-5, rel=1e-7)
    gaussian = account([Charge(Gaussian(4.530877117))], delta=1e-6)
    assert gaussian.epsilon_rdp == pytest.approx(1.0, abs=5e-5)


@pytest.mark.parametrize(("sigma", "steps"), [(1.416, 2250), (1.3562, 2000)])
def test_noise_that_opacus_finds_for_epsilon_8(sigma, steps):
    """Opacus, accountants_test.py: σ to four digits by RDP, at rate 0.04 and δ = 1e-5."""
    report = account([Charge(Gaussian(sigma, sampling_rate=0.04), steps)], delta=1e-5)
    assert report.epsilon_rdp == pytest.approx(8.0, rel=1e-3)
    assert report.epsilon_pld < report.epsilon_rdp


def test_epsilon_of_opacus():
    """Opacus, accountants_test.py: ε = 7.32911117143 by RDP at its own orders; PLD figures by its PRV accountant."""
    releases = [Charge(Gaussian(1.5, sampling_rate=0.04), 2250)]
    assert account(releases, delta=1e-5).epsilon_rdp == pytest.approx(7.32911117143, abs=1e-4)
    # The σ of its PRV accountant for ε = 8 after 2,250 and 2,000 steps.
    for sigma, steps in ((1.3477, 2250), (1.2915, 2000)):
        found = account([Charge(Gaussian(sigma, sampling_rate=0.04), steps)], delta=1e-5).epsilon
        assert found == pytest.approx(8.0, rel=3e-3)
