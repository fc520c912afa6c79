"""Pairs that are left out change nothing, and where values are smooth nearly all are left out."""

from __future__ import annotations

import numpy as np
import pytest

from pl_privknn.privacy.accounting import exact
from pl_privknn.privacy.accounting.exact import spread, worst_profiles
from pl_privknn.privacy.mechanisms import ExponentialArgmax, NoisyScreening

GROWTH = np.exp(0.01)


def random_family(outcomes: int, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that differ a little, each as likely to be the widest one."""
    draw = np.random.default_rng(outcomes)
    q = draw.dirichlet(np.full(outcomes, 5.0), rows)
    p = q * np.exp(0.2 * draw.standard_normal((rows, outcomes)))
    return p / p.sum(axis=1, keepdims=True), q


FAMILIES = {
    "screening": NoisyScreening(60, 36, 15, 10).outcome_pairs("add_remove"),
    "sampled screening": NoisyScreening(60, 42, 17, 10, 0.2).outcome_pairs("add_remove"),
    "rare outcomes": NoisyScreening(40, 24, 6, 10, 0.3).outcome_pairs("add_remove"),
    "arg-max": ExponentialArgmax(scale=20, votes="swap", sampling_rate=0.3).outcome_pairs("add_remove"),
    "coins": random_family(2),
    "dice": random_family(3),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_those_of_all_pairs(name, monkeypatch):
    p, q = FAMILIES[name]
    settings = {"spacing": spread(p, q) / 16, "tail": 1e-9}
    found = worst_profiles(p, q, [30, 150], **settings)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "gains", lambda *words: np.zeros((0, 3)))
        everywhere = worst_profiles(p, q, [30, 150], **settings)
    for one, other in zip(found, everywhere, strict=True):
        np.testing.assert_array_equal(one.excess, other.excess)


@pytest.mark.parametrize("name", ["screening", "sampled screening", "coins"])
def test_pairs_of_two_outcomes_that_stay_have_the_envelope_of_all(name):
    p, q = FAMILIES[name]
    kept_p, kept_q = exact.undominated(p, q)
    assert len(kept_p) < len(p)
    shape = (-1, 1, 2)
    for ratio in np.geomspace(0.5, 2, 201):
        everything, kept = (
            np.maximum(ratio * a.reshape(shape) - b.reshape(shape), 0).sum(axis=2).max()
            for a, b in ((p, q), (kept_p, kept_q))
        )
        assert kept == pytest.approx(everything, rel=1e-13, abs=1e-16)


def smooth_values(slope: float, bend: float, points: int = 400) -> np.ndarray:
    """Values whose kinks are e^{slope·m − bend·m²} at the grid points, up to one factor."""
    m = np.arange(points) - points // 2
    # v_m = V_{m+1} − V_m − e^h(V_m − V_{m−1}) solved for V from the left.
    rises = np.zeros(points)
    for i in range(1, points):
        rises[i] = GROWTH * rises[i - 1] + np.exp(slope * m[i] - bend * m[i] ** 2)
    return 1e-3 * np.concatenate([[0.0], np.cumsum(rises)[:-1]])


def test_ratios_are_those_of_the_kinks():
    slope, bend = 0.02, 1e-5
    values = smooth_values(slope, bend)
    least, most = np.zeros(13), np.zeros(13)
    # r = 1 lies outside, where it adds no kink.
    exact.find_ratios(values, -10, 0, len(values), GROWTH, least, most)
    assert (least[0], most[-1]) == (0, np.inf)  # blocks over the ends say nothing
    for block in range(1, 12):
        m = np.arange(32 * block, 32 * block + 32) - 200
        ratios = np.exp(slope - bend * (2 * m + 1))
        assert least[block] == pytest.approx(ratios.min(), rel=1e-6)
        assert most[block] == pytest.approx(ratios.max(), rel=1e-6)


def test_who_stays_holds_the_best_for_every_smooth_value():
    """Kinks drawn between both slopes; the best pair by its gains is always among those that stay."""
    p, q = exact.undominated(*FAMILIES["sampled screening"])
    spacing = spread(p, q) / 16
    wide = int(np.ceil(np.abs(np.log(p / q)).max() / spacing)) + 2
    plan = exact.Stencils.build(p, q, np.ones(p.shape, bool), spacing, 20 * wide, 20 * wide)
    reach = plan.gains.shape[1] // 2
    draw = np.random.default_rng(3)
    known = np.full((exact.CLASSES, int(4 / exact.UNIT) + 4, 2), -1)
    sizes = []
    for middle in np.linspace(-0.05, 0.05, 21):
        for width in (0.0005, 0.004, 0.03):
            first, last = exact.contenders(
                plan.gains, np.exp(middle - width / 2), np.exp(middle + width / 2), known
            )
            sizes.append(last - first)
            ratios = middle + width / 2 * draw.choice([-1, 1], (50, 2 * reach))
            logs = np.concatenate([np.zeros((50, 1)), np.cumsum(ratios, axis=1)], axis=1)
            kinks = np.exp(logs - logs[:, [reach]])
            best = np.argmax(kinks @ plan.gains.T, axis=1)
            assert np.all((first <= best) & (best < last))
    assert min(sizes) <= 5 < len(p) / 10
    # Where nothing is known of the slopes, all stay.
    assert exact.contenders(plan.gains, 0.0, np.inf, known) == (0, len(p))


def test_gains_are_those_of_the_stencils():
    """V = (r − r_j)₊ has one kink: what a pair gains at r_i is read off the stencil itself."""
    p, q = exact.undominated(*FAMILIES["coins"])
    spacing = spread(p, q) / 8
    plan = exact.Stencils.build(p, q, np.ones(p.shape, bool), spacing, 500, 500)
    reach = plan.gains.shape[1] // 2
    for k in range(len(p)):
        for d in range(-reach, reach + 1):
            # r_i = 1, the kink at r_d has size 1 and v_d = r_d (e^h − 1).
            def value(cell, d=d):
                return np.maximum(np.exp(spacing * cell) - np.exp(spacing * d), 0)

            after = plan.near[k] * value(plan.shifts[k]) + plan.far[k] * value(plan.shifts[k] + 1)
            gain = after.sum() - value(0)
            expected = np.exp(spacing * d) * np.expm1(spacing) * plan.gains[k, d + reach]
            assert gain == pytest.approx(expected, abs=1e-12)
