"""Pairs that are left out change nothing, and where values are smooth nearly all are left out."""

from __future__ import annotations

import numpy as np
import pytest

from pl_privknn.privacy.accounting import exact
from pl_privknn.privacy.accounting.exact import spread, worst_profiles
from pl_privknn.privacy.mechanisms import ExponentialArgmax, NoisyScreening


def random_family(outcomes: int, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that differ a little, each as likely to be the widest one."""
    draw = np.random.default_rng(outcomes)
    q = draw.dirichlet(np.full(outcomes, 5.0), rows)
    p = q * np.exp(0.2 * draw.standard_normal((rows, outcomes)))
    return p / p.sum(axis=1, keepdims=True), q


FAMILIES = {
    "sampled screening": NoisyScreening(60, 42, 17, 10, 0.2).dominating_pairs("add_remove"),
    "rare outcomes": NoisyScreening(40, 24, 6, 10, 0.3).dominating_pairs("add_remove"),
    "arg-max": ExponentialArgmax(scale=20, votes="swap", sampling_rate=0.3).dominating_pairs("add_remove"),
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


@pytest.mark.parametrize("name", ["sampled screening", "coins"])
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
