"""Exact noise for whole numbers: distributions, far tails, float64's share and multiple precision's, labelers."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats

from pl_privknn.privacy import Gaussian, Laplace
from pl_privknn.privacy import noise as samplers
from pl_privknn.privacy.mechanisms.base import STEP
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from tests.setup.refusals import refusals
from tests.setup.scripted_noise import Scripted

PRECISE = mpmath.mp.clone()
PRECISE.prec = 400


def beyond(half, sigma, kind="normal"):
    """P[Z > half] of deviation or scale sigma, to 400 binary digits."""
    value = PRECISE.mpf(half) / PRECISE.mpf(sigma)
    return PRECISE.exp(-value) / 2 if kind == "laplace" else PRECISE.erfc(value / PRECISE.sqrt(2)) / 2


LAWS = {"normal": (samplers.NORMAL, stats.norm), "laplace": (samplers.LAPLACE, stats.laplace)}
by_kind = pytest.mark.parametrize("kind", LAWS)


def rounded(source, kind, *given):
    return getattr(source, f"rounded_{kind}")(*given)


@pytest.mark.parametrize("source", [SeededNoise(3), SystemNoise()], ids=["seeded", "system"])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.5])
@by_kind
def test_masses_are_those_of_the_closed_form(kind, sigma, source):
    count = 100_000
    reach = math.ceil(2.5 * sigma)
    # Whole numbers one by one, and what lies beyond on either side.
    edges = np.concatenate([[-np.inf], np.arange(-reach, reach + 2) - 0.5, [np.inf]])
    expected = count * np.diff(LAWS[kind][1].cdf(edges / sigma))
    draws = rounded(source, kind, count, sigma).numpy()
    observed = np.histogram(draws, bins=np.clip(edges, -1e9, 1e9))[0]
    kept = expected > 5
    assert observed[~kept].sum() <= 40
    # χ²: fails for one seed in 10,000 each; unseeded, once in a billion runs.
    expected = expected[kept] * (observed[kept].sum() / expected[kept].sum())
    assert stats.chisquare(observed[kept], expected).pvalue > (
        1e-4 if isinstance(source, SeededNoise) else 1e-9
    )


@pytest.mark.parametrize(("exponent", "count"), [(26, 50_000), (41, 1000), (54, 100)])
@by_kind
def test_fine_lattices_hold_the_distribution(kind, exponent, count):
    sigma = 2.0**exponent
    draws = rounded(SeededNoise(exponent), kind, count, sigma)
    assert draws.dtype == torch.int64
    # Rounding moves the distribution function by less than 1e-8. False alarm for one seed in 10,000.
    assert stats.kstest(draws.numpy() / sigma, LAWS[kind][1].cdf).pvalue > 1e-4
    for side in (draws > 2.5 * sigma, draws < -2.5 * sigma):
        assert stats.binomtest(int(side.sum()), count, LAWS[kind][1].sf(2.5)).pvalue > 1e-4


# ---------------------------------------------------------------- what float64 may decide


@by_kind
def test_quantiles_are_a_hundred_times_better_than_the_guard(kind):
    generator = np.random.default_rng(0)
    tails = np.concatenate(
        [
            2.0 ** generator.uniform(0, 63, 700),
            2.0**63 - 2.0 ** generator.uniform(0, 63, 300),
            generator.uniform(0, 2**63, 500),
            2.0 ** np.arange(64),
        ]
    ).astype(np.uint64)
    found = LAWS[kind][0].quantile(torch.from_numpy(tails.astype(np.float64) * 2.0**-64)).numpy()
    with PRECISE.workprec(160):
        for tail, z in zip(tails.tolist(), found.tolist(), strict=True):
            density = PRECISE.npdf(z) if kind == "normal" else PRECISE.exp(-PRECISE.mpf(z)) / 2
            error = (beyond(z, 1.0, kind) - PRECISE.mpf(tail) / 2**64) / density
            assert abs(error) * 100 <= samplers._GUARD * (1 + z)


@pytest.mark.parametrize(("sigma", "guard"), [(0.4, 2.0**-6), (3.0, 3.0), (2.0**31, 2.0**-6)])
@by_kind
def test_multiple_precision_gives_the_same_numbers(monkeypatch, kind, sigma, guard):
    quick = rounded(SeededNoise(2), kind, 40, sigma)
    monkeypatch.setattr(samplers, "_GUARD", guard)
    assert torch.equal(rounded(SeededNoise(2), kind, 40, sigma), quick)


@pytest.mark.parametrize(("sigma", "low"), [(1.0, 0), (40.0, 17), (2.0**40, 2**41)])
@by_kind
def test_numbers_next_to_a_border_are_decided_by_further_bits(kind, sigma, low):
    # Digits of P[Z > low + 1/2]: what begins with them is above or below the border by its next word.
    digits = int(PRECISE.floor(beyond(low + 0.5, sigma, kind) * 2**192))
    words = [digits >> 128, digits >> 64 & (2**64 - 1), digits & (2**64 - 1)]
    for sign in (0, 1):

        def draw(*further, sign=sign):
            return rounded(Scripted([words[0] << 1 | sign, *further]), kind, 1, sigma).item()

        assert draw(words[1] - 1) == (low + 1) * (1 - 2 * sign)
        assert draw(words[1] + 1) == low * (1 - 2 * sign)
        assert draw(words[1], words[2] - 2**20) == (low + 1) * (1 - 2 * sign)
        assert draw(words[1], words[2] + 2**20) == low * (1 - 2 * sign)


@pytest.mark.parametrize("words", [[0, 2**63], [0, 0, 12345], [2]])
def test_the_far_tail_goes_on(words):
    bits = 64 * len(words)
    tail = sum(word << (bits - 64 * place) for place, word in enumerate(words[1:], start=2))
    tail += words[0] >> 1 << (bits - 64)
    found = Scripted(words).rounded_normal(1, 3.0).item()
    borders = [beyond(found + side, 3.0) * 2**bits for side in (-0.5, 0.5)]
    assert borders[0] >= tail + 1
    assert borders[1] <= tail
    assert found >= 27  # nine deviations


@pytest.mark.parametrize("guard", [samplers._GUARD, 2.0**-3], ids=["float64", "multiple precision"])
def test_thresholds_and_choices_have_their_probabilities(monkeypatch, guard):
    monkeypatch.setattr(samplers, "_GUARD", guard)
    count = 40_000 if guard < 1e-9 else 500
    # Nine tests at 1e-4 each, fixed seeds: an honest sampler fails one time in 1,100.
    for threshold, scale in ((1.5, 2.0), (-3.0, 2.5), (0.0, 1.0)):
        hits = int(SeededNoise(7).normal_at_least(torch.full((count,), threshold), scale).sum())
        assert stats.binomtest(hits, count, stats.norm.sf(threshold / scale)).pvalue > 1e-4
    for scale in (0.5, 3.0):
        votes = torch.tensor([3, 0, 5, 4])
        chosen = SeededNoise(8).exponential_choice(votes.expand(count, 4), scale)
        expected = special.softmax(votes.numpy() / scale) * count
        kept = expected > 5
        counts = np.bincount(chosen.numpy(), minlength=4)
        expected = expected[kept] * (counts[kept].sum() / expected[kept].sum())
        assert stats.chisquare(counts[kept], expected).pvalue > 1e-4


def test_words_next_to_a_probability_are_decided_by_further_bits():
    edge = int(PRECISE.floor(beyond(1.5, 2.0) * 2**128))
    word, following = edge >> 64, edge & (2**64 - 1)
    thresholds = torch.tensor([1.5])
    assert Scripted([word, following - 2]).normal_at_least(thresholds, 2.0).item()
    assert not Scripted([word, following + 2]).normal_at_least(thresholds, 2.0).item()
    weights = [PRECISE.exp(PRECISE.mpf(score) / 3) for score in (0, 1, 2)]
    for column in (0, 1):
        edge = int(PRECISE.floor(sum(weights[: column + 1]) / sum(weights) * 2**128))
        word, following = edge >> 64, edge & (2**64 - 1)
        for more, chosen in ((-2, column), (2, column + 1)):
            source = Scripted([word, following + more])
            assert source.exponential_choice(torch.tensor([0, 1, 2]), 3.0).item() == chosen


def test_far_apart_scores_and_extreme_words_are_decided():
    votes = torch.tensor([[[500, 0], [0, 500]], [[0, 500], [500, 0]]])
    assert SeededNoise(0).exponential_choice(votes, 1.0).tolist() == [[0, 1], [1, 0]]
    for word in (0, 2**64 - 1):
        assert Scripted([word, 5]).exponential_choice(torch.tensor([0, 10**6]), 1.0).item() == 1
        assert not Scripted([word, 5]).normal_at_least(torch.tensor(1e6), 1.0).item()
        assert Scripted([word, 5]).normal_at_least(torch.tensor(-1e6), 1.0).item()


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


test_bad_arguments_are_named = refusals(
    {
        "counts: dtype": lambda: Gaussian(1.0).add_noise_to_multiples(torch.ones(2), 1.0, SeededNoise(0)),
        "step=0.1": lambda: Gaussian(1.0).add_noise_to_multiples(torch.ones(2).long(), 0.1, SeededNoise(0)),
        r"scale=.*at most 2\*\*54": lambda: SeededNoise(0).rounded_normal(2, 2.0**55),
    }
)


@pytest.mark.parametrize("mechanism", [Gaussian(0.7), Laplace(0.7)], ids=lambda noise: noise.kind)
def test_noisy_votes_are_whole_and_those_of_ideal_noise_rounded(mechanism):
    votes = torch.tensor([[3, 3, 0]]).repeat(20_000, 1)
    noisy = mechanism.add_noise(votes, SeededNoise(1))
    assert torch.equal(noisy, (noisy / STEP).round() * STEP)
    # Rounding moves the distribution function by less than 1e-3: too little for 3,000 draws. One seed in 10,000.
    law = {"gaussian": stats.norm, "laplace": stats.laplace}[mechanism.kind](scale=0.7)
    assert stats.kstest((noisy - votes).flatten()[:3000].numpy(), law.cdf).pvalue > 1e-4
