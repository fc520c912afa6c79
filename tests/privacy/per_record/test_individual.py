"""Per-record budgets: conversions, charges, the exact stop against rational arithmetic."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from individual_setup import ALL, opened
from scipy import stats

from pl_privknn.privacy.per_record.budgets import CONVERSIONS, budget_for_epsilon, epsilon_of_budget
from pl_privknn.privacy.per_record.filter import IndividualBudgetExceeded, IndividualFilter

# ---------------------------------------------------------------- (ε, δ) and budgets


@pytest.mark.parametrize(
    ("conversion", "expected"), [("gdp", 0.03593), ("rdp", 0.03056), ("rdp_classic", 0.02082)]
)
def test_budget_of_epsilon_one(conversion, expected):
    state = IndividualFilter.from_epsilon(1.0, 1e-5, conversion)
    assert round(state.budget, 5) == expected
    assert state.mu == math.sqrt(2 * state.budget)
    assert state.epsilon(1e-5, conversion) == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
def test_conversions_round_trip_on_the_safe_side(epsilon, delta):
    found = {}
    for conversion in CONVERSIONS:
        found[conversion] = budget_for_epsilon(epsilon, delta, conversion)
        back = epsilon_of_budget(found[conversion], delta, conversion)
        assert back <= epsilon
        assert back == pytest.approx(epsilon, rel=1e-6)
    assert found["gdp"] > found["rdp"] > found["rdp_classic"]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_budgets_agree_with_other_accountants(epsilon, delta):
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    mu = math.sqrt(2 * budget_for_epsilon(epsilon, delta, "gdp"))
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(delta, rel=1e-5)
    budget = budget_for_epsilon(epsilon, delta, "rdp")
    orders = 1 + np.geomspace(1e-2, 1e5, 4000)
    accountant = rdp_privacy_accountant.RdpAccountant(list(orders))
    accountant.compose(dp_event.GaussianDpEvent(1 / math.sqrt(2 * budget)))
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-5)
    classic = budget_for_epsilon(epsilon, delta, "rdp_classic")
    assert np.min(orders * classic - math.log(delta) / (orders - 1)) == pytest.approx(epsilon, rel=1e-4)


def test_extreme_targets():
    assert epsilon_of_budget(1e-14, 0.5) == 0.0  # total variation below δ: nothing to pay
    assert budget_for_epsilon(500.0, 1e-300) > 0


# ---------------------------------------------------------------- charges


def test_each_record_pays_its_own_cost():
    state = opened(None)
    paid = state.charge([3, 1, 7], [0.25, 0.5, 1.0])
    assert paid.tolist() == [0.25, 0.5, 1.0]
    assert state.remaining([1, 3, 7, 0]).tolist() == [0.5, 0.75, 0.0, 1.0]
    state.charge(torch.tensor([1, 3]), 0.5)
    assert state.remaining([1, 3]).tolist() == [0.0, 0.25]
    assert state.active(0.25).tolist() == [i for i in range(20) if i not in (1, 7)]
    assert 3 not in state.active(0.2500001)
    assert len(state.active(0.0)) == 20
    assert state.active(5.0).tolist() == []


def test_refused_charge_takes_nothing_from_anybody():
    state = opened(None)
    state.charge([2], 0.9)
    with pytest.raises(IndividualBudgetExceeded, match="nothing was charged") as error:
        state.charge([1, 2, 3], 0.2)
    assert "0.9" not in str(error.value)
    assert "2" not in str(error.value)  # neither the record nor an amount is named
    assert state.remaining([1, 3]).tolist() == [1.0, 1.0]
    assert state.remaining([2])[0] == pytest.approx(0.1)


def test_clip_and_exclude():
    state = opened(None)
    state.charge([2], 0.75)
    assert state.charge([1, 2], 0.5, excess="exclude").tolist() == [0.5, 0.0]
    assert state.remaining([1, 2]).tolist() == [0.5, 0.25]
    assert state.charge([1, 2], [0.125, 0.5], excess="clip").tolist() == [0.125, 0.25]
    assert state.remaining([1, 2]).tolist() == [0.375, 0.0]
    assert state.charge([2], 0.5, excess="clip").tolist() == [0.0]


def test_removed_record_keeps_its_spending(tmp_path):
    state = opened(tmp_path / "state")
    state.charge([4, 5], [0.75, 0.25])
    state.remove([4])
    state.remove([4])
    assert 4 not in state.active(0.0)
    assert state.remaining([4]).tolist() == [0.0]
    with pytest.raises(ValueError, match="removed"):
        state.charge([4, 5], 0.1)
    state.close()
    state = IndividualFilter(1.0, tmp_path / "state")
    state.add(ALL)
    assert state.remaining([4, 5]).tolist() == [0.25, 0.75]
    state.add([100, 4])
    assert state.remaining([100, 4]).tolist() == [1.0, 0.25]


def test_ids_may_be_any_whole_numbers():
    ids = np.array([-(2**62), 2**62, 0, 17, 5], np.int64)
    state = opened(None, ids=ids)
    state.add(np.array([9, 3], np.uint8))
    state.charge(ids[[1, 0]], [0.25, 0.5])
    assert state.remaining(ids).tolist() == [0.5, 0.75, 1.0, 1.0, 1.0]
    assert state.active(0.6).tolist() == [0, 3, 5, 9, 17, 2**62]
    state.charge(np.array([], np.int64), np.array([]))
    state.charge([], 0.1)


# ---------------------------------------------------------------- exact stop


amounts = st.one_of(
    st.floats(0, 0.4),
    st.floats(1e-20, 1e-10),
    st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 5e-324, 2.0**-60, 2.0**-61, 2.0**-70]),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), st.sets(st.integers(0, 3), min_size=1), amounts),
        st.tuples(st.just("all"), st.integers(0, 3), st.just(0.0)),
        st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 3), st.just(0.0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from([1.0, 0.1, 0.03592570225550457, 1e-200, 3e150, math.nextafter(0.5, 0)]))
def test_exact_sums_never_pass_the_budget(steps, budget):
    """Against sums of Fractions: never above B, refused only where B less 2**-52 of it would be."""
    state = opened(None, budget, range(4))
    spent = [Fraction(0)] * 4
    charges = [0] * 4
    present = [True] * 4
    for kind, who, share in steps:
        if kind == "add":
            state.add([who])
            present[who] = True
        elif kind == "remove":
            state.remove([who])
            present[who] = False
        elif kind == "all":
            left = state.remaining([who])[0]
            if present[who]:
                state.charge([who], left)  # exactly what remains can always be paid
                spent[who] += Fraction(float(left))
                charges[who] += 1
        else:
            ids = sorted(i for i in who if present[i])
            cost = share * budget
            before = state.remaining(range(4)).tolist()
            try:
                state.charge(ids, cost)
            except IndividualBudgetExceeded:
                # One unit of rounding a charge, and remaining() is a float: both below 2**-52 of B together.
                slack = Fraction(budget) / 2**52
                assert any(spent[i] + Fraction(cost) + slack > budget for i in ids)
                assert state.remaining(range(4)).tolist() == before
            else:
                for i in ids:
                    spent[i] += Fraction(cost)
                    charges[i] += 1
        assert all(total <= Fraction(budget) for total in spent)
        for i in range(4):
            if present[i]:
                exact = Fraction(budget) - spent[i]
                assert Fraction(float(state.remaining([i])[0])) <= exact
                rounding = Fraction(budget) * (charges[i] + 1) / 2**60 + exact / 2**52
                assert exact - Fraction(float(state.remaining([i])[0])) <= rounding


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 0.3), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_order_of_charges_does_not_matter(costs, shuffler):
    shuffled = list(costs)
    shuffler.shuffle(shuffled)
    totals = []
    for order in (costs, shuffled):
        state = opened(None, 4.0, [0])
        for cost in order:
            state.charge([0], cost)
        totals.append(state.remaining([0])[0])
    assert totals[0] == totals[1]


def test_tenths_stop_after_ten():
    # In floats ten times 0.1 adds up to less than 1; exactly, the float 0.1 is more than a tenth.
    state = opened(None)
    for _ in range(9):
        state.charge([0], 0.1)
    with pytest.raises(IndividualBudgetExceeded):
        state.charge([0], 0.1)
    state.charge([0], 0.1 - 2.0**-53)


def test_tiny_costs_are_never_free():
    state = opened(None, 3e150)
    state.charge([0], 5e-324)
    assert state.remaining([0])[0] < 3e150
    assert state.active(3e150).tolist() == list(range(1, 20))


# ---------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, math.inf, "1", None, 1e-250, 1e250])
def test_invalid_budgets(budget, tmp_path):
    with pytest.raises(ValueError, match="budget"):
        IndividualFilter(budget, tmp_path / "state")
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("epsilon", "delta", "conversion", "name"),
    [
        (0, 1e-5, "gdp", "epsilon"),
        (math.inf, 1e-5, "gdp", "epsilon"),
        (1, 0, "gdp", "delta"),
        (1, 1, "rdp", "delta"),
        (1, 1e-5, "zcdp", "conversion"),
    ],
)
def test_invalid_targets(epsilon, delta, conversion, name):
    with pytest.raises(ValueError, match=name):
        IndividualFilter.from_epsilon(epsilon, delta, conversion)


@pytest.mark.parametrize("ids", [[1, 1], [1.0], ["a"], [[1, 2]], [True], [2**64 - 1], [99]])
def test_invalid_ids(ids):
    state = opened(None)
    for call in (lambda: state.charge(ids, 0.1), lambda: state.remaining(ids), lambda: state.remove(ids)):
        with pytest.raises(ValueError, match="ids"):
            call()
    if ids != [99]:
        with pytest.raises(ValueError, match="ids"):
            state.add(ids)


@pytest.mark.parametrize(
    "costs", [[0.1], [0.1, 0.2, 0.3], [-0.1, 0.1], [math.nan, 0], [math.inf, 0], "ab", [True, False], -1.0]
)
def test_invalid_costs(costs):
    state = opened(None)
    with pytest.raises(ValueError, match="costs"):
        state.charge([1, 2], costs)
    assert state.remaining([1, 2]).tolist() == [1.0, 1.0]


def test_invalid_choices():
    state = opened(None)
    with pytest.raises(ValueError, match="excess"):
        state.charge([1], 0.1, excess="ignore")
    for minimum in (-1.0, math.nan):
        with pytest.raises(ValueError, match="minimum"):
            state.active(minimum)
