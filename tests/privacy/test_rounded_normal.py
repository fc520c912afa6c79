"""Normal noise rounded to whole numbers: distribution, far tails, float64's share and multiple precision's."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scripted_noise import Scripted

from pl_privknn.privacy import Gaussian
from pl_privknn.privacy import noise as samplers
from pl_privknn.privacy.noise import SeededNoise, SystemNoise

PRECISE = mpmath.mp.clone()
PRECISE.prec = 400


def beyond(half, sigma):
    """P[Z > half] of deviation sigma, to 400 binary digits."""
    return PRECISE.erfc(PRECISE.mpf(half) / (PRECISE.mpf(sigma) * PRECISE.sqrt(2))) / 2


# ---------------------------------------------------------------- distribution


@pytest.mark.parametrize("source", [SeededNoise(3), SystemNoise()], ids=["seeded", "system"])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.5])
def test_masses_are_those_of_the_closed_form(sigma, source):
    count = 100_000
    reach = math.ceil(2.5 * sigma)
    # Whole numbers one by one, and what lies beyond on either side.
    edges = np.concatenate([[-np.inf], np.arange(-reach, reach + 2) - 0.5, [np.inf]])
    expected = count * np.diff(stats.norm.cdf(edges / sigma))
    draws = source.rounded_normal(count, sigma).numpy()
    observed = np.histogram(draws, bins=np.clip(edges, -1e9, 1e9))[0]
    kept = expected > 5
    assert observed[~kept].sum() <= 40
    # χ²: fails for one seed in 10,000 each; unseeded, once in a billion runs.
    expected = expected[kept] * (observed[kept].sum() / expected[kept].sum())
    assert stats.chisquare(observed[kept], expected).pvalue > (
        1e-4 if isinstance(source, SeededNoise) else 1e-9
    )


@pytest.mark.parametrize(("exponent", "count"), [(26, 100_000), (35, 20_000), (41, 1500), (54, 100)])
def test_fine_lattices_hold_the_normal_distribution(exponent, count):
    sigma = 2.0**exponent
    draws = SeededNoise(exponent).rounded_normal(count, sigma)
    assert draws.dtype == torch.int64
    # Rounding moves the distribution function by less than 1e-8. False alarm for one seed in 10,000.
    assert stats.kstest(draws.numpy() / sigma, "norm").pvalue > 1e-4
    for side in (draws > 2.5 * sigma, draws < -2.5 * sigma):
        assert stats.binomtest(int(side.sum()), count, stats.norm.sf(2.5)).pvalue > 1e-4


def test_last_digits_are_uniform():
    last = SeededNoise(5).rounded_normal(100_000, 2.0**33 / 3) % 16
    # χ² with 15 degrees of freedom, at 1e-4.
    assert stats.chisquare(np.bincount(last.numpy(), minlength=16)).pvalue > 1e-4


# ---------------------------------------------------------------- what float64 may decide


def test_quantiles_are_a_hundred_times_better_than_the_guard():
    generator = np.random.default_rng(0)
    tails = np.concatenate(
        [
            2.0 ** generator.uniform(0, 63, 1500),
            2.0**63 - 2.0 ** generator.uniform(0, 63, 500),
            generator.uniform(0, 2**63, 1000),
            2.0 ** np.arange(64),
        ]
    ).astype(np.uint64)
    found = samplers._distance(tails, 0.0)
    with PRECISE.workprec(160):
        for tail, z in zip(tails.tolist(), found.tolist(), strict=True):
            density = PRECISE.npdf(z)
            error = (beyond(z, 1.0) - PRECISE.mpf(tail) / 2**64) / density
            assert abs(error) * 100 <= samplers._GUARD * (1 + z)


@pytest.mark.parametrize("sigma", [1e-6, 0.4, 3.0, 2.0**31])
@pytest.mark.parametrize("guard", [2.0**-6, 3.0])
def test_multiple_precision_gives_the_same_numbers(monkeypatch, sigma, guard):
    quick = SeededNoise(2).rounded_normal(200, sigma)
    monkeypatch.setattr(samplers, "_GUARD", guard)
    assert torch.equal(SeededNoise(2).rounded_normal(200, sigma), quick)


@pytest.mark.parametrize(
    ("sigma", "low"), [(1.0, 0), (1.0, 4), (40.0, 17), (2.0**30, 12345), (2.0**40, 2**41)]
)
def test_numbers_next_to_a_border_are_decided_by_further_bits(sigma, low):
    # Digits of P[Z > low + 1/2]: what begins with them is above or below the border by its next word.
    digits = int(PRECISE.floor(beyond(low + 0.5, sigma) * 2**192))
    words = [digits >> 128, digits >> 64 & (2**64 - 1), digits & (2**64 - 1)]
    for sign in (0, 1):

        def draw(*further, sign=sign):
            return Scripted([words[0] << 1 | sign, *further]).rounded_normal(1, sigma).item()

        assert draw(words[1] - 1) == (low + 1) * (1 - 2 * sign)
        assert draw(words[1] + 1) == low * (1 - 2 * sign)
        assert draw(words[1], words[2] - 2**20) == (low + 1) * (1 - 2 * sign)
        assert draw(words[1], words[2] + 2**20) == low * (1 - 2 * sign)


@pytest.mark.parametrize("words", [[0, 2**63], [0, 1], [0, 0, 12345], [2]])
def test_the_far_tail_goes_on(words):
    bits = 64 * len(words)
    tail = sum(word << (bits - 64 * place) for place, word in enumerate(words[1:], start=2))
    tail += words[0] >> 1 << (bits - 64)
    found = Scripted(words).rounded_normal(1, 3.0).item()
    borders = [beyond(found + side, 3.0) * 2**bits for side in (-0.5, 0.5)]
    assert borders[0] >= tail + 1
    assert borders[1] <= tail
    assert found >= 27  # nine deviations


# ---------------------------------------------------------------- the release


@pytest.mark.parametrize("step", [2.0**-24, 1.0, 2.0])
def test_noise_on_multiples_is_that_of_the_mechanism(step):
    counts = torch.arange(-20_000, 20_000).view(4, -1) * 17
    kept = counts.clone()
    mechanism = Gaussian(sigma=3.0, l2_sensitivity=2.0)
    noisy = mechanism.add_noise_to_multiples(counts, step, SeededNoise(1))
    assert torch.equal(counts, kept)
    assert noisy.dtype == torch.float64
    multiples = noisy / step
    assert torch.equal(multiples, multiples.round())
    noise = (multiples.long() - counts).flatten()
    # Rounding adds step²/12 to the variance. Five standard errors: about one seed in two million each.
    variance = (3.0 / step) ** 2 + 1 / 12
    assert abs(float(noise.double().square().mean()) / variance - 1) < 5 * math.sqrt(2 / len(noise))
    assert abs(float(noise.double().mean())) < 5 * math.sqrt(variance / len(noise))
    if step < 1:  # the least digits are noised as well, so that they tell nothing of the counts
        assert stats.chisquare(np.bincount((noise % 16).numpy(), minlength=16)).pvalue > 1e-4


def test_a_release_is_the_rounded_release_of_ideal_noise():
    # Whole numbers come out of rounding, so the noise of counts is that of 0, moved.
    counts = torch.tensor([5, -3, 2**40])
    mechanism, step = Gaussian(sigma=0.7), 2.0**-10
    noisy, alone = (
        mechanism.add_noise_to_multiples(values, step, SeededNoise(9)) for values in (counts, 0 * counts)
    )
    moved = [
        Fraction(one) - Fraction(other) for one, other in zip(noisy.tolist(), alone.tolist(), strict=True)
    ]
    assert moved == [Fraction(count, 1024) for count in counts.tolist()]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Gaussian(1.0).add_noise_to_multiples(torch.ones(2), 1.0, SeededNoise(0)), "counts: dtype"),
        (lambda: Gaussian(1.0).add_noise_to_multiples(torch.ones(2).long(), 0.1, SeededNoise(0)), "step=0.1"),
        (lambda: SeededNoise(0).rounded_normal(2, 2.0**55), r"sigma=.*at most 2\*\*54"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
