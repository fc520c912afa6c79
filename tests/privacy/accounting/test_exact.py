from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from pl_privknn.privacy.accounting import exact, pld, rdp
from pl_privknn.privacy.accounting.accountant import account, delta_for_epsilon
from pl_privknn.privacy.accounting.exact import (
    BlockPlan,
    adaptive_losses,
    exact_compositions,
    exact_epsilon,
    spread,
    worst_profiles,
)
from pl_privknn.privacy.mechanisms import (
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    Mechanism,
    NoisyScreening,
)
from pl_privknn.privacy.mechanisms.base import envelope
from tests.privacy.accounting.lower_bound_setup import epsilon_lower_bound
from tests.setup.refusals import refusals

DELTA = 1e-5
SAMPLED = Charge(NoisyScreening(k=30, threshold=18, sigma=6, num_classes=10, sampling_rate=0.3), 60)

# Two coins, told apart by opposite faces, and a third in between.
COINS_P = np.array([[0.06, 0.94], [0.51, 0.49], [0.30, 0.70]])
COINS_Q = np.array([[0.53, 0.47], [0.13, 0.87], [0.45, 0.55]])
DICE_P = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
DICE_Q = np.array([[0.4, 0.3, 0.3], [0.5, 0.2, 0.3]])


@dataclasses.dataclass(frozen=True)
class Pairs(Mechanism):
    """A family (or, with ``fixed``, a single pair) given by its probabilities."""

    p: tuple[tuple[float, ...], ...]
    q: tuple[tuple[float, ...], ...]
    fixed: bool = False

    def rdp(self, orders, adjacency):
        with np.errstate(divide="ignore"):
            return rdp.pairs_rdp(np.log(self.p), np.log(self.q), orders)

    def pld(self, adjacency, discretization):
        p, q = np.array(self.p), np.array(self.q)
        return pld.to_distribution(envelope(p, q), envelope(q, p), discretization)

    def dominating_pairs(self, adjacency):
        return None if self.fixed else (np.array(self.p), np.array(self.q))


def family(p: np.ndarray, q: np.ndarray, *, fixed: bool = False) -> Pairs:
    return Pairs(tuple(map(tuple, p.tolist())), tuple(map(tuple, q.tolist())), fixed)


def strategies(options: list[list[tuple[np.ndarray, np.ndarray]]]):
    """Every strategy for releases whose pairs come from ``options[0]``, ``options[1]``, … in this order.

    Yields transcript distributions (P, Q): the pair of each release is a function of all earlier outcomes.
    """
    if not options:
        yield np.ones(1), np.ones(1)
        return
    later = list(strategies(options[1:]))
    for p, q in options[0]:
        for branches in itertools.product(later, repeat=len(p)):
            yield (
                np.concatenate([a * branch[0] for a, branch in zip(p, branches, strict=True)]),
                np.concatenate([b * branch[1] for b, branch in zip(q, branches, strict=True)]),
            )


def worst(options, epsilon: float) -> float:
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in strategies(options))


def rows(p: np.ndarray, q: np.ndarray):
    return list(zip(p, q, strict=True))


def compose(parts: list[tuple[pld.LossMeasure, int]], step: float) -> pld.Composition:
    return pld.compose([(pld.to_distribution(m, m.reversed(), step), n) for m, n in parts], DELTA)


@pytest.mark.parametrize(
    ("p", "q", "steps"),
    [(COINS_P, COINS_Q, 1), (COINS_P, COINS_Q, 2), (COINS_P[:2], COINS_Q[:2], 3), (DICE_P, DICE_Q, 2)],
    ids=["coins 1", "coins 2", "coins 3", "dice 2"],
)
def test_induction_finds_the_best_of_all_adaptive_strategies(p, q, steps):
    everything = list(strategies([rows(p, q)] * steps))
    for a, b, sign in ((p, q, 1), (q, p, -1)):
        profile = worst_profiles(a, b, [steps], spacing=spread(a, b) / 400, tail=1e-12)[0]
        epsilons, deltas = profile.delta()
        for i in np.linspace(0, len(epsilons) - 1, 41).astype(int):
            x = math.exp(epsilons[i])
            sides = (pair[::sign] for pair in everything)
            truth = max(float(np.maximum(upper - x * lower, 0).sum()) for upper, lower in sides)
            assert truth <= deltas[i] * (1 + 1e-12) + 1e-15
            assert deltas[i] <= truth + 2e-5 * (1 + x)


def test_outcomes_that_exclude_one_side():
    # Outcome 0 never comes without the record in the first pair, outcome 1 never with it in the second.
    p, q = np.array([[0.1, 0.5, 0.4], [0.7, 0.0, 0.3]]), np.array([[0.0, 0.6, 0.4], [0.6, 0.05, 0.35]])
    parts = adaptive_losses(p, q, 2, delta=1e-9)
    total = compose(parts, 2.0**-12)
    for epsilon in (0.0, 0.3, 1.0, 4.0):
        for direction, pairs in ((total.remove, rows(p, q)), (total.add, rows(q, p))):
            truth = worst([pairs] * 2, epsilon)
            assert truth <= float(direction.delta(np.array([epsilon]))[0]) <= truth + 1e-4
    assert worst([rows(p, q)] * 2, 60.0) > 0.18  # infinite losses are there
    assert exact_epsilon([Charge(family(p, q), 2)], delta=0.1) == math.inf


def test_fixed_releases_belong_first_in_time():
    """Interleaved releases can beat the order that puts the fixed pair last; the bound covers all orders."""
    p, q = COINS_P[:2], COINS_Q[:2]
    fixed_p, fixed_q = np.array([[0.76, 0.24]]), np.array([[0.44, 0.56]])
    adaptive, fixed = rows(p, q), rows(fixed_p, fixed_q)
    epsilon = 0.7
    first = worst([fixed, adaptive, adaptive], epsilon)
    between = worst([adaptive, fixed, adaptive], epsilon)
    last = worst([adaptive, adaptive, fixed], epsilon)
    charges = [Charge(family(p, q), 2), Charge(family(fixed_p, fixed_q, fixed=True))]
    found = float(exact_compositions(charges, delta=0.5, work=1e8)[0].remove.delta(np.array([epsilon]))[0])
    assert max(first, between) <= found <= 1.001 * first
    # An accountant with the fixed pair in the final value would promise `last`: ten percent too little for
    # the order in which releases really come.
    assert between > 1.09 * last


@pytest.mark.parametrize("count", [1, 400])
def test_one_pair_is_binomial_composition(count):
    p, q = 0.52, 0.48
    heads = np.arange(count + 1)
    upper, lower = binom.pmf(heads, count, p), binom.pmf(heads, count, q)
    parts = adaptive_losses(np.array([[p, 1 - p]]), np.array([[q, 1 - q]]), count, delta=DELTA)
    total = compose(parts, 2.0**-12)
    for epsilon in (0.0, 0.1, 1.0, 2.5):
        truth = float(np.maximum(upper - math.exp(epsilon) * lower, 0).sum())
        found = float(total.delta(np.array([epsilon]))[0])
        assert truth * (1 - 1e-9) <= found <= 1.01 * truth + (1e-4 if count == 1 else 1e-8)


def test_blocks_only_add_and_longer_ones_add_less():
    count, epsilon = 300, []
    mechanism = NoisyScreening(k=30, threshold=18, sigma=6, num_classes=10)
    p, _ = mechanism.dominating_pairs("add_remove")
    for size in (1, 10, 64, 300):
        work = 1.001 * len(p) * 17 * 2 / 3 * 16 * size**1.5
        plan = BlockPlan.choose(count, *p.shape, work)
        assert plan.size <= size
        assert plan.blocks * plan.size + plan.rest == count
        epsilon.append(exact_epsilon([Charge(mechanism, count)], delta=DELTA, work=work))
    assert epsilon == sorted(epsilon, reverse=True)
    lower = epsilon_lower_bound([Charge(mechanism, count)], delta=DELTA)
    assert lower <= epsilon[-1] <= 1.01 * lower
    assert epsilon[2] <= 1.03 * lower
    # Blocks of one release are the envelope that the ordinary PLD composes.
    by_pld = account([Charge(mechanism, count)], delta=DELTA, exact=False).epsilon_pld
    assert epsilon[0] == pytest.approx(by_pld, rel=0.005)
    assert epsilon[0] > 1.1 * epsilon[-1]


def exact_delta(charges, epsilon, work):
    """Upper bound on δ at ``epsilon``, from compositions made near the δ in question."""
    near, best = delta_for_epsilon(charges, epsilon), 1.0
    for _ in range(4):
        found = exact_compositions(charges, delta=min(max(near, 1e-250), 0.5), work=work)
        best = min(best, *(float(total.delta(np.array([epsilon]))[0]) for total in found))
        if best > near / 4:
            break
        near = best
    return best


def test_two_families_interleaved():
    """Every order of two releases of one family and one of another, against the bound."""
    first, second = (COINS_P[:2], COINS_Q[:2]), (COINS_P[1:], COINS_Q[1:])
    a, b = rows(*first), rows(*second)
    charges = [Charge(family(*first), 2), Charge(family(*second), 1)]
    for epsilon in (0.2, 0.8, 2.0):
        truth = max(
            worst(order, epsilon)
            for pair in (0, 1)
            for order in itertools.permutations(
                [[(x, y)[:: 1 - 2 * pair] for x, y in part] for part in (a, a, b)]
            )
        )
        found = exact_delta(charges, epsilon=epsilon, work=1e8)
        assert truth <= found <= 1.0
    answers = Charge(ExponentialArgmax(scale=20, votes="swap", sampling_rate=0.3), 60)
    together = exact_epsilon([SAMPLED, answers], delta=DELTA, work=1e8)
    apart = [exact_epsilon([charge], delta=DELTA / 2, work=1e8) for charge in (SAMPLED, answers)]
    assert max(apart) < together < sum(apart)
    assert together < account([SAMPLED, answers], delta=DELTA, exact=False).epsilon_pld


def test_nothing_to_do():
    assert exact_epsilon([], delta=DELTA) is None
    assert exact_epsilon([Charge(Gaussian(sigma=5), 10), Charge(Laplace(3.0))], delta=DELTA) is None
    assert exact_compositions([Charge(Gaussian(sigma=5), 10)], delta=DELTA) == []
    # With one vote and no sampling the count is always 1 and screening tells nothing.
    silent = Charge(NoisyScreening(k=1, threshold=1, sigma=1, num_classes=2), 1000)
    assert exact_epsilon([silent], delta=DELTA) == 0
    gaussian = Charge(Gaussian(sigma=50), 10)
    assert exact_epsilon([silent, gaussian], delta=DELTA) == pytest.approx(
        account([gaussian], delta=DELTA, exact=False).epsilon_pld, rel=1e-4
    )


test_refusals_name_the_argument = refusals(
    {
        "delta=0": lambda: exact_epsilon([SAMPLED], delta=0),
        "work=0": lambda: exact_epsilon([SAMPLED], delta=DELTA, work=0),
        "adjacency='add_remove'": lambda: exact_epsilon([SAMPLED], delta=DELTA, adjacency="replace_one"),
    }
)


def test_replaced_records_follow_the_family():
    """Without sampling the screening family is the same under both adjacencies."""
    charge = Charge(NoisyScreening(k=30, threshold=18, sigma=6, num_classes=10), 50)
    replaced = exact_epsilon([charge], delta=DELTA, adjacency="replace_one", work=1e8)
    assert replaced == exact_epsilon([charge], delta=DELTA, work=1e8)


@pytest.mark.parametrize(
    ("sigma", "rate", "count"), [(0.3, 1.0, 200), (2000.0, 1.0, 5000), (0.3, 1e-4, 500), (20.0, 1e-5, 10**6)]
)
@pytest.mark.filterwarnings("error")
def test_extreme_noise(sigma, rate, count):
    """Probabilities down to 1e-300, losses from 1e-9 to hundreds, rare outcomes of large loss."""
    charges = [Charge(NoisyScreening(40, 24, sigma, 10, rate), count)]
    found = exact_epsilon(charges, delta=DELTA, work=2e8)
    lower = epsilon_lower_bound(charges, delta=DELTA)
    assert 0 <= lower <= found <= 1.05 * lower + 1e-9


# Whole runs, some two seconds each. Columns: screening, Gaussian or None, floor and value of the worst case
# computed elsewhere with the Gaussian releases last, on a coarser grid.
CASES = {
    "8192 sampled screenings": (((300, 210, 85, 10, 0.25), 8192), None, 0.77115, 0.7756),
    "mnist": (((300, 180, 75, 10, 0.15), 2000), ((25, math.sqrt(2), 0.15), 735), 0.88806, 0.8926),
    "svhn": (((800, 480, 200, 10, 0.03), 6000), ((60, math.sqrt(2), 0.03), 2939), 0.1236, 0.1263),
    "cifar, sensitivity 1": (((300, 210, 85, 10, 0.2), 18000), ((20, 1, 0.2), 3877), 2.76713, 2.791),
}


def charges_of(case: str) -> list[Charge]:
    (screening, screenings), answers, _, _ = CASES[case]
    charges = [Charge(NoisyScreening(*screening), screenings)]
    if answers:
        charges.append(Charge(Gaussian(*answers[0]), answers[1]))
    return charges


@pytest.mark.long("8192 sampled screenings", "mnist", "svhn")
@pytest.mark.parametrize("case", CASES)
def test_papers_parameters(case):
    *_, floor, value = CASES[case]
    charges = charges_of(case)
    found = exact_epsilon(charges, delta=DELTA)
    assert floor <= found <= 1.01 * value
    lower = epsilon_lower_bound(charges, delta=DELTA)
    assert lower <= found <= 1.002 * lower
    assert found < account(charges, delta=DELTA, exact=False).epsilon


@pytest.mark.long("add", "swap")
@pytest.mark.parametrize(
    ("mechanism", "count", "width"),
    [
        (ExponentialArgmax(scale=19.4924, votes="add", sampling_rate=0.15), 300, 1.004),
        (ExponentialArgmax(scale=19.4924, votes="swap", sampling_rate=0.15), 300, 1.004),
        (NoisyScreening(300, 210, 85, 10, 0.2), 1_000_000, 1.01),
    ],
    ids=["add", "swap", "a million screenings"],
)
def test_the_exact_figure_lies_between_an_adversary_and_a_coarser_grid(mechanism, count, width):
    charges, work = [Charge(mechanism, count)], {"work": 1e9} if count > 300 else {}
    fine, coarse = (exact_epsilon(charges, delta=DELTA, coarsen=grid, **work) for grid in (1.0, 2.0))
    lower = epsilon_lower_bound(charges, delta=DELTA)
    assert lower <= fine <= coarse <= width * lower


# Pairs that are left out change nothing, and where values are smooth nearly all are left out.


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
