"""Noise sources and continuous noise against closed forms and scripted random words."""

import copy
import itertools
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.privacy.noise import SeededNoise, SystemNoise, default_noise
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import talking
from tests.setup.scripted_noise import Scripted

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


@pytest.mark.parametrize("bits", [1, 8, 54, 63, 64, 120])
def test_tails_are_those_of_the_law(bits):
    # A scripted tail probability of 2**-bits (sign bit 0 or 1), against scipy's tail functions.
    def words(sign):
        if bits <= 10:
            return [((1 << (64 - bits)) << 1) - 2 + sign]  # half a step below 2**-bits, lost in rounding
        if bits <= 64:
            return [((1 << (64 - bits)) << 1) + sign, 0]
        return [sign, 1 << (128 - bits)]

    for extreme in ([0, 0], [1, 0], [(1 << 64) - 1], [(1 << 64) - 2]):
        for name in ("normal", "laplace"):
            assert math.isfinite(getattr(Scripted(extreme), name)(1, 1.0).item())
    tail = 2.0**-bits + (2.0**-129 if bits > 10 else 0)
    up, down = Scripted(words(0)), Scripted(words(1))
    assert up.normal(1, 2.0).item() == pytest.approx(2 * stats.norm.isf(tail), rel=1e-12, abs=1e-15)
    assert down.normal(1, 2.0).item() == pytest.approx(-2 * stats.norm.isf(tail), rel=1e-12, abs=1e-15)
    assert Scripted(words(0)).laplace(1, 3.0).item() == pytest.approx(
        3 * stats.laplace.isf(tail), rel=1e-12, abs=1e-15
    )


# ---------------------------------------------------------------- coins and integers


@pytest.mark.parametrize("numerator", [0, 1, 128, 255, 256])
def test_coins_of_whole_bytes_by_enumeration(numerator):
    every_byte = np.arange(256, dtype=np.uint8).view(np.uint64)
    assert int(Scripted(every_byte).bernoulli(256, numerator / 256).sum()) == numerator
    for certain in (0.0, 1.0):  # which draws nothing
        assert bool((Scripted([]).bernoulli((3, 4), certain) == certain).all())


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


@pytest.mark.parametrize("p", [1e-5, 0.15])
def test_share_of_true_coins(p):
    n = 1_000_000
    hits = int(SeededNoise(5).bernoulli(n, p).sum())
    # Two-sided binomial test: fails for one seed in 10,000.
    assert stats.binomtest(hits, n, p).pvalue > 1e-4


@pytest.mark.parametrize("below", [1, 10, 2**63])
def test_integers_are_uniform(below):
    draws = SeededNoise(8).integers(20_000, below)
    assert draws.dtype == torch.int64
    assert (int(draws.min()) >= 0) & (int(draws.max()) < below)
    if below == 10:
        assert stats.chisquare(np.bincount(draws.numpy())).pvalue > 1e-4  # fails for one seed in 10,000
    if below == 2**63:
        assert stats.kstest(draws.numpy() / 2.0**63, "uniform").pvalue > 1e-4


def test_integers_have_no_modulo_bias():
    # Three bits for 5 values: every 3-bit word once gives each value once, and 5, 6, 7 are drawn again.
    words = [w << 61 for w in (5, 0, 6, 1, 7, 2, 3, 4, 4, 4, 4)]
    assert sorted(Scripted(words).integers(8, 5).tolist()) == [0, 1, 2, 3, 4, 4, 4, 4]


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name):
    for source, shape in itertools.product((SeededNoise(1), SystemNoise()), (0, 5, (2, 3), [4, 0], ())):
        draws = [getattr(source, name)(shape, 2.0), source.uniform(shape), source.bernoulli(shape, 0.5)]
        assert {tuple(draw.shape) for draw in draws} == {(shape,) if isinstance(shape, int) else tuple(shape)}


def test_default_device_does_not_matter():
    with torch.device("meta"):
        source = SeededNoise(1)
        draws = [source.normal(3, 1.0), source.bernoulli(3, 0.5), SystemNoise().rounded_laplace(2, 1.0)]
        pickle.loads(pickle.dumps(source)).normal(3, 1.0)
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
def test_copies_continue_on_their_own_and_the_system_has_no_state(clone):
    source = SeededNoise(4)
    source.uniform(10)
    twin = clone(source)
    ahead = twin.uniform(50)
    assert torch.equal(ahead, source.uniform(50))  # drawing from the twin did not move the source
    assert twin.seed == 4
    system = SystemNoise()
    assert vars(clone(system)) == {}
    assert system.stream("row", 3) is system
    assert not torch.equal(system.uniform(4), clone(system).uniform(4))


@needs_fork
def test_system_noise_differs_after_fork_and_between_processes():
    source = SystemNoise()
    source.uniform(3)
    drawn = source.integers(4, 2**62).tolist()
    for _ in range(2):
        with talking(lambda say: say(source.integers(4, 2**62).tolist())) as (_, lines):
            drawn += json.loads(lines.read())
    assert len(set(drawn)) == len(drawn) == 12  # two equal 62-bit values among 12: once in 10**16


def test_many_values_of_the_system_are_drawn_in_blocks_by_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values = SystemNoise().normal((3, 30_000), 2.0)
    finally:
        torch.set_num_threads(before)
    assert values.shape == (3, 30_000)
    assert values.unique().numel() == values.numel()
    assert abs(float(values.std()) - 2.0) < 0.05


def test_default_is_the_cryptographic_source():
    assert isinstance(default_noise(), SystemNoise)
    assert default_noise().cryptographic
    assert not SeededNoise(0).cryptographic


@pytest.mark.parametrize(
    ("call", "values", "named"),
    [
        *(
            (
                lambda s, x, name=name: getattr(s, name)(3, x),
                [0, -1.0, math.nan, math.inf, "2", None, True],
                "sigma" if name == "rounded_normal" else "scale",
            )
            for name in NAMES
        ),
        (lambda s, x: s.bernoulli(3, x), [-0.1, 1.0000001, math.nan, "0.5", None], "p="),
        (lambda s, x: s.bernoulli(x, 0.5), [-1, (2, -3), 2.5, "23", (1.5,), None, True], "shape"),
        (lambda s, x: s.normal(x, 0.5), [-1, 2.5, None], "shape"),
        (lambda s, x: SeededNoise(x), [-1, 2**64, 1.5, "a", None, True], "seed"),
        (lambda s, x: s.stream(*x), [(), (1.5,), (None,), (True,), (b"x",)], "key"),
        (lambda s, x: SystemNoise().stream(*x), [(), (1.5,)], "key"),
        (lambda s, x: s.integers(3, x), [0, -3, 2**63 + 1, 2.5], "below"),
    ],
)
def test_invalid_arguments_are_named(call, values, named):
    for value in values:
        with pytest.raises(ValueError, match=named):
            call(SeededNoise(1), value)
