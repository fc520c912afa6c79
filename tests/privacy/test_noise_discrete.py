"""Coins, integers and discrete noise against enumeration and closed forms."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from scripted_noise import Scripted

from pl_privknn.privacy import noise as samplers
from pl_privknn.privacy.noise import SeededNoise

# ---------------------------------------------------------------- coins and integers


@pytest.mark.parametrize("numerator", [0, 1, 7, 128, 255, 256])
def test_coins_of_whole_bytes_by_enumeration(numerator):
    every_byte = np.arange(256, dtype=np.uint8).view(np.uint64)
    assert int(Scripted(every_byte).bernoulli(256, numerator / 256).sum()) == numerator


@pytest.mark.parametrize("p", [0.15, 1 / 3, 1e-4, 2.0**-40, 1e-12, 1 - 2.0**-53, 5e-324])
def test_coin_compares_every_digit_of_p(p):
    exact = Fraction(p)
    byte, rest = divmod(exact * 256, 1)
    word, tail = divmod(rest * 2**64, 1)
    packed = [byte]  # a little-endian word: its first byte is the coin's

    def coin(*words):
        return Scripted(packed + list(words)).bernoulli(1, p).item()

    if word:
        assert coin(word - 1) is True
    assert coin(word + 1) is False
    third = math.floor(tail * 2**64)
    if tail and third:
        assert coin(word, third - 1) is True
        assert coin(word, third + 1) is False
    if not tail:
        assert coin(word) is False


@pytest.mark.parametrize("p", [1e-5, 0.15, 0.5, 0.999])
def test_share_of_true_coins(p):
    n = 3_000_000
    hits = int(SeededNoise(5).bernoulli(n, p).sum())
    # Two-sided binomial test: fails for one seed in 10,000.
    assert stats.binomtest(hits, n, p).pvalue > 1e-4


def test_certain_coins_draw_nothing():
    assert bool(Scripted([]).bernoulli((3, 4), 1.0).all())
    assert not bool(Scripted([]).bernoulli(7, 0.0).any())


@pytest.mark.parametrize("below", [1, 2, 3, 10, 257, 2**63])
def test_integers_are_uniform(below):
    draws = SeededNoise(8).integers(20_000, below)
    assert draws.dtype == torch.int64
    assert int(draws.min()) >= 0
    assert int(draws.max()) < below
    bins = min(below, 16)
    counts = np.bincount((draws.numpy() // -(-below // bins)).astype(int), minlength=1)
    if 1 < below <= 10:
        assert stats.chisquare(counts).pvalue > 1e-4  # fails for one seed in 10,000
    if below == 2**63:
        assert stats.kstest(draws.numpy() / 2.0**63, "uniform").pvalue > 1e-4


def test_integers_have_no_modulo_bias():
    # Three bits for 5 values: every 3-bit word once gives each value once, and 5, 6, 7 are drawn again.
    words = [w << 61 for w in (5, 0, 6, 1, 7, 2, 3, 4, 4, 4, 4)]
    assert sorted(Scripted(words).integers(8, 5).tolist()) == [0, 1, 2, 3, 4, 4, 4, 4]


# ---------------------------------------------------------------- exp(-γ) by enumeration


class _Branch(Exception):
    pass


class _Enumeration:
    """Runs a sampler over every sequence of coin outcomes up to a depth, with exact probabilities."""

    def __init__(self, monkeypatch, depth):
        self.depth = depth
        monkeypatch.setattr(samplers, "coins_by_ratio", self._coin)

    def _coin(self, source, numerators, denominator, which):
        assert len(which) == 1
        p = min(Fraction(numerators[which[0]], denominator), Fraction(1))
        if p in (0, 1):
            return np.array([p == 1])
        if self.used == len(self.path):
            raise _Branch
        outcome = self.path[self.used]
        self.used += 1
        self.weight *= p if outcome else 1 - p
        return np.array([outcome])

    def masses(self, sampler):
        found, undecided = {}, Fraction(0)
        queue = [()]
        while queue:
            self.path, self.used, self.weight = queue.pop(), 0, Fraction(1)
            try:
                value = sampler()
                found[value] = found.get(value, 0) + self.weight
            except _Branch:
                if len(self.path) < self.depth:
                    queue += [(*self.path, False), (*self.path, True)]
                else:
                    undecided += self.weight
        return found, undecided


@pytest.mark.parametrize("gamma", [(0, 1), (1, 1), (1, 2), (2, 7), (3, 2), (2, 1), (41, 17)])
def test_exp_coin_by_enumeration(monkeypatch, gamma):
    numerator, denominator = gamma
    walk = _Enumeration(monkeypatch, depth=15)
    found, undecided = walk.masses(
        lambda: bool(samplers.coins_exp(None, [numerator], denominator, np.zeros(1, np.intp))[0])
    )
    assert sum(found.values()) + undecided == 1
    exact = math.exp(-numerator / denominator)
    assert undecided < 1e-5
    assert float(found.get(True, 0)) <= exact + 1e-15
    assert float(found.get(True, 0) + undecided) >= exact - 1e-15


def test_coins_by_ratio_decides_at_the_digits():
    third = (1 << 64) // 3  # 1/3 in base 2**64 is this digit for ever

    def coin(*words):
        return bool(samplers.coins_by_ratio(Scripted(words), [1], 3, np.zeros(1, np.intp))[0])

    assert coin(third - 1)
    assert not coin(third + 1)
    assert coin(third, third, third - 1)
    assert not coin(third, third, third + 1)
    always = samplers.coins_by_ratio(Scripted([(1 << 64) - 1] * 2), [3, 4], 3, np.arange(2))
    assert always.tolist() == [True, True]


@pytest.mark.parametrize("bits", [70, 200])
def test_coins_by_ratio_of_huge_numbers(bits):
    # Ratios of numbers beyond 64 bits; binomial test, fails for one seed in 10,000.
    denominator = 3**bits
    numerators = [denominator // 5, denominator * 2 // 3]
    which = np.arange(200_000) % 2
    hits = samplers.coins_by_ratio(SeededNoise(2), numerators, denominator, which)
    for group, p in enumerate((0.2, 2 / 3)):
        assert stats.binomtest(int(hits[which == group].sum()), 100_000, p).pvalue > 1e-4


# ---------------------------------------------------------------- discrete noise


def _chi_square(sample, log_mass):
    """P-value of a sample against exp(log_mass(x)) / normaliser, bins of at least 10 expected."""
    support = np.arange(-4000, 4001)
    mass = np.exp(log_mass(support.astype(float)))
    mass /= mass.sum()
    expected = mass * len(sample)
    kept = expected >= 10
    observed = np.array([np.count_nonzero(sample == x) for x in support[kept]])
    rest = len(sample) - observed.sum()
    expected_rest = expected[~kept].sum()
    if expected_rest >= 5:
        observed, kept_expected = np.append(observed, rest), np.append(expected[kept], expected_rest)
    else:
        assert rest <= 25  # Poisson of mean below 5: beyond 25 once in 10**10
        observed, kept_expected = observed, expected[kept] / expected[kept].sum() * observed.sum()
    return stats.chisquare(observed, kept_expected).pvalue


@pytest.mark.parametrize("sigma", [0.3, 1, 3.7, 25])
def test_discrete_gaussian_has_its_mass_function(sigma):
    sample = SeededNoise(21).discrete_gaussian(40_000, sigma)
    assert sample.dtype == torch.int64
    # Fixed seed; fails for one seed in 10,000.
    assert _chi_square(sample.numpy(), lambda x: -(x**2) / (2 * sigma**2)) > 1e-4


@pytest.mark.parametrize("scale", [0.2, 0.95, 1, 1.5, 19.513])
def test_discrete_laplace_has_its_mass_function(scale):
    sample = SeededNoise(22).discrete_laplace(40_000, scale)
    assert sample.dtype == torch.int64
    # Fixed seed; fails for one seed in 10,000.
    assert _chi_square(sample.numpy(), lambda x: -np.abs(x) / scale) > 1e-4


@pytest.mark.parametrize("scale", [1e6, 123456.789, 2.0**40])
def test_wide_discrete_noise_is_close_to_continuous(scale):
    # Steps of 1 are invisible at these scales; fails for one seed in 10,000.
    source = SeededNoise(23)
    assert stats.kstest(source.discrete_gaussian(4000, scale) / scale, "norm").pvalue > 1e-4
    assert stats.kstest(source.discrete_laplace(4000, scale) / scale, "laplace").pvalue > 1e-4


@pytest.mark.parametrize("scale", [1e-300, 1e-3])
def test_vanishing_discrete_noise_is_zero(scale):
    assert not bool(SeededNoise(1).discrete_gaussian(500, scale).any())
    assert not bool(SeededNoise(1).discrete_laplace(500, scale).any())


@pytest.mark.parametrize("sigma", [1, 2.5])
def test_discrete_gaussian_proposals_cancel_exactly(sigma):
    # Proposal mass times the acceptance ratio that the sampler uses is proportional to the target mass:
    # in exponents, |y|/t + (|y| - σ²/t)²/(2σ²) - y²/(2σ²) is the same rational number for every y.
    square = Fraction(sigma) ** 2
    t = math.floor(sigma) + 1
    constants = {
        Fraction(y, t) + (y - square / t) ** 2 / (2 * square) - Fraction(y * y) / (2 * square)
        for y in range(50)
    }
    assert len(constants) == 1
    asked = []

    def spy(source, numerators, denominator, which):
        asked.extend((Fraction(n, denominator), y) for n, y in zip(numerators, values, strict=True))
        return np.ones(len(which), bool)

    values = [0, 1, 2, 7]
    original = samplers.coins_exp, samplers._laplace
    samplers.coins_exp, samplers._laplace = spy, lambda *_: np.array([0, -1, 2, 7])
    try:
        samplers.discrete_gaussian(None, 4, Fraction(sigma))
    finally:
        samplers.coins_exp, samplers._laplace = original
    assert asked == [((y - square / t) ** 2 / (2 * square), y) for gamma, y in asked]
