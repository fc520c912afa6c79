"""Noise sources and continuous noise against closed forms and scripted random words."""

import copy
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from forked import talking
from ledger_setup import needs_fork
from scipy import stats
from scripted_noise import Scripted

from pl_privknn.privacy.noise import NoiseSource, SeededNoise, SystemNoise, default_noise

NAMES = ("normal", "rounded_normal", "laplace", "rounded_laplace")

# ---------------------------------------------------------------- continuous noise


# Fixed seeds: with a correct sampler each Kolmogorov-Smirnov test fails for one seed in 10,000.
@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (lambda s: s.uniform(200_000), stats.uniform()),
        (lambda s: s.normal(200_000, 2.5), stats.norm(scale=2.5)),
        (lambda s: s.laplace(200_000, 0.3), stats.laplace(scale=0.3)),
    ],
    ids=["uniform", "normal", "laplace"],
)
@pytest.mark.parametrize("source", [SeededNoise(11), SystemNoise()], ids=["seeded", "system"])
def test_continuous_noise_has_its_distribution(draw, law, source):
    sample = draw(source)
    assert sample.dtype == torch.float64
    threshold = 1e-4 if isinstance(source, SeededNoise) else 1e-9  # unseeded: fails once in a billion runs
    assert stats.kstest(sample.numpy(), law.cdf).pvalue > threshold


def test_uniform_is_open_and_uses_53_bits():
    top, bottom = (1 << 64) - 1, 1 << 11
    assert Scripted([top, bottom]).uniform(2).tolist() == [1 - 2.0**-53, 2.0**-53]
    assert Scripted([5, bottom * 3]).uniform(1).item() == 3 * 2.0**-53  # the first word is 0 and redrawn
    lattice = SeededNoise(1).uniform(50_000) * 2.0**53
    assert bool((lattice == lattice.round()).all())
    assert 0.45 < (lattice % 2).mean().item() < 0.55  # the last of the 53 bits is in use


@pytest.mark.parametrize("bits", [1, 2, 8, 40, 54, 60, 63, 64, 100, 120])
def test_tails_are_those_of_the_law(bits):
    # A scripted tail probability of 2**-bits (sign bit 0 or 1), against scipy's tail functions.
    def words(sign):
        if bits <= 10:
            return [((1 << (64 - bits)) << 1) - 2 + sign]  # half a step below 2**-bits, lost in rounding
        if bits <= 64:
            return [((1 << (64 - bits)) << 1) + sign, 0]
        return [sign, 1 << (128 - bits)]

    # The last appended bit stands for the middle of its step.
    tail = 2.0**-bits + (2.0**-129 if bits > 10 else 0)
    up, down = Scripted(words(0)), Scripted(words(1))
    assert up.normal(1, 2.0).item() == pytest.approx(2 * stats.norm.isf(tail), rel=1e-12, abs=1e-15)
    assert down.normal(1, 2.0).item() == pytest.approx(-2 * stats.norm.isf(tail), rel=1e-12, abs=1e-15)
    assert Scripted(words(0)).laplace(1, 3.0).item() == pytest.approx(
        3 * stats.laplace.isf(tail), rel=1e-12, abs=1e-15
    )


def test_extreme_words_give_finite_noise():
    top = (1 << 64) - 1
    for words in ([0, 0], [1, 0], [top], [top - 1]):
        for name in ("normal", "laplace"):
            assert math.isfinite(getattr(Scripted(words), name)(1, 1.0).item())


def test_far_tail_of_drawn_normals():
    # P[|x| > 4.5] = 6.795e-6: 27.2 expected in 4 million; 5 to 60 fails for one seed in 100,000.
    beyond = int((SeededNoise(3).normal(4_000_000, 1.0).abs() > 4.5).sum())
    assert 5 <= beyond <= 60


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


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [0, 5, (2, 3), [4, 0], torch.Size([1, 2, 3]), ()])
def test_shapes(name, shape):
    for source in (SeededNoise(1), SystemNoise()):
        wanted = (shape,) if isinstance(shape, int) else tuple(shape)
        result = getattr(source, name)(shape, 2.0)
        assert tuple(result.shape) == wanted
        assert tuple(source.uniform(shape).shape) == wanted
        assert tuple(source.bernoulli(shape, 0.5).shape) == wanted
        assert result.device.type == "cpu"


def test_default_device_does_not_matter():
    torch.set_default_device("meta")
    try:
        source = SeededNoise(1)
        draws = [source.normal(3, 1.0), source.bernoulli(3, 0.5), SystemNoise().rounded_laplace(2, 1.0)]
        pickle.loads(pickle.dumps(source)).normal(3, 1.0)
    finally:
        torch.set_default_device(None)  # "cpu" would leave every later call with a detour
    assert {draw.device.type for draw in draws} == {"cpu"}


def test_seeded_noise_is_reproducible_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    assert torch.equal(SeededNoise(7).normal(100, 1.0), SeededNoise(7).normal(100, 1.0))
    assert not torch.equal(SeededNoise(7).normal(100, 1.0), SeededNoise(8).normal(100, 1.0))
    assert torch.equal(state, torch.get_rng_state())
    source = SeededNoise(7)
    assert not torch.equal(source.normal(100, 1.0), source.normal(100, 1.0))


def test_stream_depends_on_seed_and_key_alone():
    source = SeededNoise(7)
    before = source.stream("row", 12).normal(10, 1.0)
    source.normal(1000, 1.0)
    assert torch.equal(before, source.stream("row", 12).normal(10, 1.0))
    assert torch.equal(before, SeededNoise(7).stream("row", 12).normal(10, 1.0))
    assert torch.equal(before, SeededNoise(source.stream("row", 12).seed).normal(10, 1.0))
    others = [
        SeededNoise(8).stream("row", 12),
        source.stream("row", 13),
        source.stream("row", "12"),
        source.stream("row1", 2),
        source.stream(12, "row"),
        source.stream("row").stream(12),
        source,
    ]
    firsts = {tuple(other.normal(10, 1.0).tolist()) for other in others}
    assert len(firsts) == len(others)
    assert tuple(before.tolist()) not in firsts


def test_streams_are_many_and_independent():
    source = SeededNoise(0)
    rows = torch.stack([source.stream(row).normal(64, 1.0) for row in range(1000)])
    assert len(torch.unique(rows[:, 0])) == 1000
    # Correlations of consecutive streams are normal with deviation 1/8: fails for one seed in 10,000.
    correlations = (rows[1:] * rows[:-1]).sum(1) / 8
    assert stats.kstest((correlations.mean() * math.sqrt(999)).item(), "norm").pvalue > 1e-4
    assert stats.kstest(rows.flatten().numpy(), "norm").pvalue > 1e-4
    assert max(source.stream(row).seed for row in range(64)) >= 2**32  # more than 32 bits tell streams apart


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_of_seeded_noise_continue_on_their_own(clone):
    source = SeededNoise(4)
    source.uniform(10)
    twin = clone(source)
    ahead = twin.uniform(50)
    assert torch.equal(ahead, source.uniform(50))  # drawing from the twin did not move the source
    assert twin.seed == 4


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_system_noise_has_no_state(clone):
    source = SystemNoise()
    assert vars(clone(source)) == {}
    assert source.stream("row", 3) is source
    assert not torch.equal(source.uniform(4), clone(source).uniform(4))


@needs_fork
def test_system_noise_differs_after_fork_and_between_processes():
    source = SystemNoise()
    source.uniform(3)
    drawn = source.integers(4, 2**62).tolist()
    for _ in range(2):
        with talking(lambda say: say(source.integers(4, 2**62).tolist())) as (_, lines):
            drawn += json.loads(lines.read())
    assert len(set(drawn)) == len(drawn) == 12  # two equal 62-bit values among 12: once in 10**16


def test_default_is_the_cryptographic_source():
    assert isinstance(default_noise(), SystemNoise)
    assert default_noise().cryptographic
    assert not SeededNoise(0).cryptographic


def test_sources_are_configurable():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--noise", type=NoiseSource)
    config = parser.parse_args(
        ["--noise=pl_privknn.privacy.noise.SeededNoise", "--noise.seed=3", "--noise.seed=5"]
    )
    assert parser.instantiate_classes(config).noise.seed == 5
    config = parser.parse_args(["--noise=pl_privknn.privacy.noise.SystemNoise"])
    assert isinstance(parser.instantiate_classes(config).noise, SystemNoise)


# ---------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "2", None, True])
def test_invalid_scales(name, scale):
    argument = "sigma" if name == "rounded_normal" else "scale"
    with pytest.raises(ValueError, match=argument):
        getattr(SeededNoise(1), name)(3, scale)


@pytest.mark.parametrize("p", [-0.1, 1.0000001, math.nan, "0.5", None])
def test_invalid_probabilities(p):
    with pytest.raises(ValueError, match="p="):
        SeededNoise(1).bernoulli(3, p)


@pytest.mark.parametrize("shape", [-1, (2, -3), 2.5, "23", (1.5,), None, True])
def test_invalid_shapes(shape):
    for name in ("normal", "bernoulli"):
        with pytest.raises(ValueError, match="shape"):
            getattr(SeededNoise(1), name)(shape, 0.5)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "a", None, True])
def test_invalid_seeds(seed):
    with pytest.raises(ValueError, match="seed"):
        SeededNoise(seed)


@pytest.mark.parametrize("key", [(), (1.5,), (None,), (True,), (b"x",)])
@pytest.mark.parametrize("source", [SeededNoise(1), SystemNoise()])
def test_invalid_keys(source, key):
    with pytest.raises(ValueError, match="key"):
        source.stream(*key)


@pytest.mark.parametrize("below", [0, -3, 2**63 + 1, 2.5])
def test_invalid_bounds(below):
    with pytest.raises(ValueError, match="below"):
        SeededNoise(1).integers(3, below)
