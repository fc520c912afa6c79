"""The six variants of the sparse vector technique of Lyu, Su, Li (2017, Figure 1), written from the paper.

The testers of DP-Auditorium (Kong et al. 2024) are judged by them. 1 and 2 are ε-DP, 4 is (1 + 6c)/4·ε-DP and was
stated as ε-DP; 3, 5 and 6 have no finite ε. Sensitivity of every query is 1, and the threshold 0.
"""

import numpy as np
import pytest

from pl_privknn.auditing.bounds import Scores, judge
from pl_privknn.privacy import Charge, PureDP

RUNS = 40_000


def sparse_vector(variant, queries, epsilon, c, rng):
    """⊤ (1), ⊥ (0) or not asked (−1) of each query in each run, and the number that variant 3 shows with a ⊤."""
    first = epsilon / 4 if variant == 4 else epsilon / 2
    second = epsilon - first
    threshold_scale = c / first if variant == 2 else 1 / first
    query_scale = {1: 2 * c / second, 2: 2 * c / first, 3: c / second, 4: 1 / second, 5: 0.0, 6: 1 / second}[
        variant
    ]
    threshold = rng.laplace(0, threshold_scale, RUNS)
    answers, shown = np.full((RUNS, len(queries)), -1), np.full((RUNS, len(queries)), np.nan)
    found = np.zeros(RUNS, dtype=int)
    for i, query in enumerate(queries):
        asked = found < c if variant <= 4 else np.ones(RUNS, dtype=bool)
        value = query + (rng.laplace(0, query_scale, RUNS) if query_scale else 0.0)
        above = asked & (value >= threshold)
        answers[asked, i] = above[asked]
        if variant == 3:
            shown[above, i] = (value * np.ones(RUNS))[above]
        found += above
        if variant == 2:  # a fresh threshold after each ⊤
            threshold = np.where(above, rng.laplace(0, c / second, RUNS), threshold)
    return answers, shown


def audited(variant, without, present, epsilon, c, score, seed=0):
    rng = np.random.default_rng(seed)
    seen = [score(*sparse_vector(variant, queries, epsilon, c, rng)) for queries in (present, without)]
    there = np.repeat([True, False], RUNS)
    mixed = rng.permutation(2 * RUNS)
    scores = Scores("many_runs", "answers", there[mixed], np.concatenate(seen).astype(float)[mixed])
    claim = [Charge(PureDP(epsilon))]
    return judge(
        f"variant {variant}", scores, claim, delta=1e-6, adjacency="replace_one", runs=RUNS, breach=False
    )


def halves(answers, _shown):
    """⊤s of the first half less those of the second; what was not asked counts for neither."""
    half = answers.shape[1] // 2
    top = (answers == 1).astype(float)
    return top[:, :half].sum(axis=1) - top[:, half:].sum(axis=1)


def after(number):
    """All ⊥ but the last one, whose shown number is at most 1: so is the threshold, then."""

    def score(answers, shown):
        last = (answers[:, :number] == 0).all(axis=1) & (answers[:, number] == 1)
        return last & ~(shown[:, number] > 1)

    return score


# (without, present, ε, c, score); the neighbours of the paper's counterexamples.
ATTACKS = {
    3: (np.r_[np.ones(6), 0.0], np.r_[np.zeros(6), 1.0], 2.0, 1, after(6)),
    5: (np.array([1.0, 0.0]), np.array([0.0, 1.0]), 1.0, 1, after(1)),
    6: (np.zeros(40), np.r_[np.ones(20), -np.ones(20)], 1.0, 1, halves),
}


@pytest.mark.parametrize("variant", ATTACKS)
def test_variants_that_are_not_private_are_found(variant):
    found = audited(variant, *ATTACKS[variant])
    assert found.verdict == "VIOLATED"
    assert found.epsilon_lower > found.epsilon


def test_variant_4_costs_more_than_was_stated():
    c = 10
    queries = np.r_[np.ones(c), -np.ones(c)]
    found = audited(4, np.zeros(2 * c), queries, 1.0, c, halves)
    assert found.verdict == "VIOLATED"
    assert found.epsilon_lower < (1 + 6 * c) / 4


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("attack", ATTACKS)
def test_variants_that_are_private_pass_the_same_attacks(variant, attack):
    without, present, epsilon, c, score = ATTACKS[attack]
    for asked in {c, 3}:
        assert audited(variant, without, present, epsilon, asked, score).verdict == "OK"
