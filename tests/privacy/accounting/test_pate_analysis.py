import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from pl_privknn.privacy.accounting.data_dependent import answers_rdp, screening_rdp
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian, Laplace, NoisyScreening

ORDERS = np.array([1.5, 2.0, 3.0, 4.0, 8.0, 16.0])
HISTOGRAMS = [(30, 0, 0), (20, 10, 0), (12, 10, 8), (11, 11, 8)]
NOISES = [
    (lambda scale: Gaussian(scale, math.sqrt(2)), stats.norm),
    (lambda scale: Laplace(scale, 2.0), stats.laplace),
]


def release_probabilities(votes, distribution, scale):
    """P[class i has the most noisy votes], by numerical integration over its noisy count."""
    votes = np.asarray(votes, dtype=np.float64)
    edges = [votes.min() - 45 * scale, *np.unique(votes), votes.max() + 45 * scale]
    nodes, weights = np.polynomial.legendre.leggauss(240)
    x = np.concatenate([(a + b) / 2 + (b - a) / 2 * nodes for a, b in itertools.pairwise(edges)])
    w = np.concatenate([(b - a) / 2 * weights for a, b in itertools.pairwise(edges)])
    below = [distribution.cdf((x - count) / scale) for count in votes]
    own = [w * distribution.pdf((x - count) / scale) / scale for count in votes]
    return np.array([(one * np.prod(below[:i] + below[i + 1 :], axis=0)).sum() for i, one in enumerate(own)])


def renyi(p, q, order):
    return float(np.log(np.sum(np.exp(order * np.log(p) + (1 - order) * np.log(q)))) / (order - 1))


def neighbours(votes):
    """Every histogram after one teacher changed its vote."""
    for i in range(len(votes)):
        for j in range(len(votes)):
            if i != j and votes[i]:
                other = list(votes)
                other[i] -= 1
                other[j] += 1
                yield other


@pytest.mark.parametrize(("votes", "scale"), [*zip(HISTOGRAMS, [1.5, 5.0, 1.5, 5.0], strict=True)])
@pytest.mark.parametrize(("mechanism", "distribution"), NOISES, ids=["gaussian", "laplace"])
def test_bounds_lie_above_direct_integration_and_below_the_independent_curve(
    votes, scale, mechanism, distribution
):
    noise = mechanism(scale)
    here = release_probabilities(votes, distribution, scale)
    assert here.sum() == pytest.approx(1, abs=1e-9)
    there = [release_probabilities(other, distribution, scale) for other in neighbours(votes)]
    # Nothing cancels in the integration, so small probabilities are accurate relative to themselves.
    assert min(p.min() for p in [here, *there]) > 1e-250
    out = np.array([max(renyi(here, q, a) for q in there) for a in ORDERS])
    back = np.array([max(renyi(q, here, a) for q in there) for a in ORDERS])
    histogram = np.array([votes])
    one = answers_rdp(noise, histogram, ORDERS, "one")[0]
    both = answers_rdp(noise, histogram, ORDERS)[0]
    independent = noise.rdp(ORDERS, "replace_one")
    tolerance = 1e-8
    assert (out <= one + tolerance).all()
    assert (np.maximum(out, back) <= both + tolerance).all()
    assert (one <= both + tolerance).all()
    assert (both <= independent).all()
    if votes[0] >= 27 and scale < 2:
        assert both[0] < 0.25 * independent[0]


def test_theorems_as_printed_in_high_precision():
    mpmath.mp.dps = 60
    votes, sigma, scale = (225, 20, 5), 40, 10
    q = sum(mpmath.erfc(mpmath.mpf(votes[0] - n) / (2 * sigma)) for n in votes[1:]) / 2
    mu2 = sigma * mpmath.sqrt(-mpmath.log(q))
    mu1 = mu2 + 1
    eps1, eps2 = mu1 / sigma**2, mu2 / sigma**2
    assert q <= mpmath.exp((mu2 - 1) * eps2) * (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** (-mu2)
    big_a = (1 - q) / (1 - (q * mpmath.exp(eps2)) ** ((mu2 - 1) / mu2))
    big_b = mpmath.exp(eps1) / q ** (1 / (mu1 - 1))
    gaussian = [mpmath.log((1 - q) * big_a ** (a - 1) + q * big_b ** (a - 1)) / (a - 1) for a in ORDERS]
    ours = answers_rdp(Gaussian(sigma, math.sqrt(2)), np.array([votes]), ORDERS, "one")[0]
    np.testing.assert_allclose(ours, np.array(gaussian, dtype=float), rtol=1e-6)

    gamma = mpmath.mpf(1) / scale
    gaps = [gamma * (votes[0] - n) for n in votes[1:]]
    q = sum((2 + gap) / (4 * mpmath.exp(gap)) for gap in gaps)
    assert q < (mpmath.exp(2 * gamma) - 1) / (mpmath.exp(4 * gamma) - 1)
    stay = (1 - q) / (1 - mpmath.exp(2 * gamma) * q)
    moments = [mpmath.log((1 - q) * stay**power + q * mpmath.exp(2 * gamma * power)) for power in ORDERS - 1]
    laplace = np.array([m / power for m, power in zip(moments, ORDERS - 1, strict=True)], dtype=float)
    ours = answers_rdp(Laplace(scale, 2.0), np.array([votes]), ORDERS, "one")[0]
    np.testing.assert_allclose(ours, laplace, rtol=1e-6)


def test_no_agreement_and_other_mechanisms_get_the_independent_curve():
    torn = np.array([(84, 83, 83), (100, 90, 60)])
    noise = Gaussian(40.0, math.sqrt(2))
    np.testing.assert_array_equal(answers_rdp(noise, torn, ORDERS), np.tile(ORDERS / 1600, (2, 1)))
    gumbel = ExponentialArgmax(10.0, "swap")
    curves = answers_rdp(gumbel, np.array([(250, 0, 0)]), ORDERS)
    np.testing.assert_array_equal(curves[0], gumbel.rdp(ORDERS, "replace_one"))
    far_apart = answers_rdp(Gaussian(0.5, math.sqrt(2)), np.array([(10_000, 0, 0)]), ORDERS)
    assert (far_apart == 0).all()
    assert answers_rdp(noise, np.zeros((0, 3), dtype=np.int64), ORDERS).shape == (0, len(ORDERS))


def test_screening_given_the_count_is_the_divergence_between_its_two_coins():
    mechanism = NoisyScreening(30, 18.0, 5.0, 3)
    counts = np.array([10, 18, 29, 18])
    ours = screening_rdp(mechanism, counts, ORDERS)
    for row, count in zip(ours, counts, strict=True):
        passes = {t: stats.norm.sf(18.0 - t, scale=5.0) for t in (count - 1, count, count + 1)}
        coins = {t: np.array([p, 1 - p]) for t, p in passes.items()}
        for value, order in zip(row, ORDERS, strict=True):
            worst = max(
                renyi(first, second, order)
                for near in (count - 1, count + 1)
                for first, second in [(coins[count], coins[near]), (coins[near], coins[count])]
            )
            assert value == pytest.approx(worst, rel=1e-9)
    assert (ours <= mechanism.rdp(ORDERS, "add_remove") * (1 + 1e-12)).all()
    with pytest.raises(ValueError, match=r"sampling_rate=0\.5"):
        screening_rdp(NoisyScreening(30, 18.0, 5.0, 3, 0.5), counts, ORDERS)


@pytest.mark.parametrize(
    ("noise", "votes", "named"),
    [
        (Gaussian(4.0, 1.0), [(28, 1, 1)], "one vote that moves"),
        (Gaussian(40.0, math.sqrt(2), 0.1), HISTOGRAMS, r"sampling_rate=0\.1"),  # it is never amplified
        # Labels taken for counts, or classes counted from the votes, would give an analysis of nothing.
        *(
            (Gaussian(40.0, math.sqrt(2)), votes, "votes")
            for votes in ([1, 0, 2], [[0.5, 0.5]], [[3, -1]], [[5]])
        ),
    ],
)
def test_what_the_analysis_does_not_cover_is_refused(noise, votes, named):
    with pytest.raises(ValueError, match=named):
        answers_rdp(noise, np.array(votes), ORDERS)
    with pytest.raises(ValueError, match="directions='some'"):
        answers_rdp(Gaussian(4.0, math.sqrt(2)), np.array([(28, 1, 1)]), ORDERS, "some")
