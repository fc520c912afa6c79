"""Budgets of single records: conversions, who is who, and a table whose sums are exact and never pass a budget."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pl_privknn.privacy.private_state import PrivateStoreError
from pl_privknn.privacy.record_budgets import (
    BudgetTable,
    RecordKey,
    as_bytes,
    budget_for_epsilon,
    changed_numbers,
    epsilon_of_budget,
    read_ids,
)

# ---------------------------------------------------------------- (ε, δ) and budgets


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-3, 1e-3), (0.1, 1e-10), (1.0, 1e-5), (50.0, 1e-5)])
def test_conversions_round_trip_on_the_safe_side(epsilon, delta):
    found = [budget_for_epsilon(epsilon, delta, conversion) for conversion in ("gdp", "rdp", "rdp_classic")]
    assert found == sorted(found, reverse=True)
    for conversion, budget in zip(("gdp", "rdp", "rdp_classic"), found, strict=True):
        back = epsilon_of_budget(budget, delta, conversion)
        assert epsilon * (1 - 1e-6) <= back <= epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-6), (8.0, 1e-6)])
def test_budgets_agree_with_other_accountants(epsilon, delta):
    mu = math.sqrt(2 * budget_for_epsilon(epsilon, delta, "gdp"))
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(delta, rel=1e-5)
    budget, orders = budget_for_epsilon(epsilon, delta, "rdp"), 1 + np.geomspace(1e-2, 1e5, 4000)
    accountant = RdpAccountant(list(orders))
    accountant.compose(dp_event.GaussianDpEvent(1 / math.sqrt(2 * budget)))
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-5)
    classic = budget_for_epsilon(epsilon, delta, "rdp_classic")
    assert np.min(orders * classic - math.log(delta) / (orders - 1)) == pytest.approx(epsilon, rel=1e-4)


def test_extreme_and_invalid_targets():
    assert epsilon_of_budget(1e-14, 0.5) == 0.0  # total variation below δ: nothing to pay
    assert budget_for_epsilon(500.0, 1e-300) > 0
    for target, name in [((0, 1e-5), "epsilon"), ((1, 1), "delta"), ((1, 1e-5, "zcdp"), "conversion")]:
        with pytest.raises(ValueError, match=name):
            budget_for_epsilon(*target)


# ---------------------------------------------------------------- who is who

KEY = RecordKey(bytes(range(32)))


def test_a_digest_is_of_one_record_alone_and_of_all_of_it():
    rows = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6) % 3
    digests = KEY.digests(rows, labels)
    assert digests.shape == (6, 16)
    assert len(set(as_bytes(digests))) == 6
    order = torch.tensor([3, 0, 5])
    assert torch.equal(KEY.digests(rows[order], labels[order]), digests[order])
    others = [
        (rows[:1], labels[:1] + 1),
        (rows[:1] + 2.0**-20, labels[:1]),
        (rows[:1].reshape(1, 4, 1, 4), labels[:1]),
        (rows[:1].double(), labels[:1]),
    ]
    for row, label in others:
        assert not torch.equal(KEY.digests(row, label), digests[:1])
    other = RecordKey(bytes(32)).digests(rows, labels)
    assert not set(as_bytes(other)) & set(as_bytes(digests))
    assert repr(KEY.key) not in repr(KEY)
    assert len(KEY.digests(rows[:0], labels[:0])) == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=12), st.randoms(use_true_random=False))
def test_equal_records_have_as_many_numbers_as_copies_in_any_order(which, shuffler):
    def numbers(chosen):
        place = torch.tensor(chosen, dtype=torch.int64)
        return KEY.numbers(KEY.digests(torch.eye(6)[place], place))

    first, following = numbers(which)
    assert len(set(first.tolist())) == len(which)
    assert set(numbers(shuffler.sample(which, len(which)))[0].tolist()) == set(first.tolist())
    for chosen in set(which):
        copies = {number for number, record in zip(first.tolist(), which, strict=True) if record == chosen}
        assert set(numbers([chosen] * len(copies))[0].tolist()) == copies
        (one_more,) = set(numbers([chosen] * (len(copies) + 1))[0].tolist()) - copies
        assert one_more in following


@pytest.mark.parametrize(
    ("known", "now", "changed"),
    [
        ({1: b"a", 2: b"b"}, {2: b"b"}, False),
        ({1: b"a", 2: b"b"}, {1: b"c", 2: b"d"}, False),  # other preprocessing
        ({1: b"a", 2: b"b"}, {1: b"a", 2: b"b", 3: b"a"}, False),  # an equal record came
        ({1: b"a", 2: b"a"}, {2: b"a", 1: b"a"}, False),
        ({}, {1: b"a"}, False),
        ({1: b"a", 2: b"b"}, {1: b"b", 2: b"a"}, True),
        ({1: b"a", 2: b"b"}, {1: b"b"}, True),
        ({1: b"a", 2: b"b"}, {3: b"a"}, True),  # a second number for a known record
        ({1: b"a", 2: b"a"}, {1: b"a", 3: b"a"}, True),
    ],
)
def test_changed_numbers(known, now, changed):
    assert changed_numbers(known, now) is changed


@pytest.mark.parametrize(
    "ids", [[1, 2], [1, 2, 2], [[1, 2, 3]], [1.0, 2.0, 3.0], [True, False, True], [2**63, 1, 2]]
)
def test_bad_ids_are_refused_without_a_number(ids):
    with pytest.raises(ValueError, match="ids: shape and numbers") as error:
        read_ids(np.array(ids), 3)
    assert not any(character.isdigit() for character in str(error.value).replace("64", ""))


def test_ids_may_lie_in_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_ids(tmp_path / "ids.npy", 3)
    for content in (b"", b"PK\x03\x04", b"1, 2, 3"):
        (tmp_path / "ids.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"ids='.*' can't be read as an array; write it with numpy.save"):
            read_ids(str(tmp_path / "ids.npy"), 3)
    np.save(tmp_path / "ids.npy", np.array([7, -3, 2], np.int16))
    assert read_ids(tmp_path / "ids.npy", 3).tolist() == read_ids([7, -3, 2], 3).tolist() == [7, -3, 2]


# ---------------------------------------------------------------- the table

QUANTUM = 2.0**-49


def table(path=None, budget=1.0, ids=range(5), **facts):
    made = BudgetTable(path, budget, QUANTUM, **facts)
    made.admit(np.array(ids, np.int64))
    return made


def spend(budgets, ids, *quanta):
    budgets.left[budgets.places(np.array(ids, np.int64))] -= np.array(quanta, float)
    mark = budgets.next_mark()
    budgets.spend(mark)
    return mark


def left(budgets, *ids):
    written = dict(budgets.read("SELECT id, allowed - spent FROM budgets"))
    return [written[number] for number in ids]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 2**49)), max_size=25),
    st.sampled_from([1.0, 0.1, 0.03592570225550457, math.nextafter(0.5, 0)]),
)
def test_sums_are_exact_and_no_record_spends_more_than_its_budget(steps, budget):
    budgets, whole = table(budget=budget, ids=range(4)), int(budget / QUANTUM)
    spent = [0] * 4
    for who, amount in steps:
        ids = sorted(who)
        if any(spent[i] + amount > whole for i in ids):
            with pytest.raises(PrivateStoreError, match="constraint failed") as error:
                spend(budgets, ids, *[amount] * len(ids))
            assert not any(character.isdigit() for character in str(error.value))
            budgets._load()
        else:
            spend(budgets, ids, *[amount] * len(ids))
            spent = [have + amount * (i in who) for i, have in enumerate(spent)]
        assert left(budgets, 0, 1, 2, 3) == [whole - have for have in spent]


def test_budgets_are_found_again_with_what_was_spent(tmp_path):
    path, numbers = tmp_path / "store", [-(2**62), 2**62, 0, 17]
    with_facts = {"shard": "0 of 2"}
    budgets = table(path, ids=numbers, **with_facts)
    assert not budgets.begun
    marks = [spend(budgets, numbers[:2], 4, 5), spend(budgets, [])]  # also where nobody pays
    assert [mark.split(":")[0] for mark in marks] == ["1", "2"]
    budgets.close()
    for wrong in (0.5, 2.0, 1.00001):
        with pytest.raises(ValueError, match="budget="):
            BudgetTable(path, wrong, QUANTUM)
    with pytest.raises(
        PrivateStoreError, match="holds the budgets of shard 0 of 2, and this is shard 1 of 2"
    ):
        table(path, shard="1 of 2")
    again = table(path, 1 + 1e-12, numbers, **with_facts)
    assert again.begun
    assert left(again, *numbers) == [2**49 - 4, 2**49 - 5, 2**49, 2**49]
    for mark in marks:
        again.check_mark(mark, "run")
    for mark in ("1:00", "3:" + marks[1][2:], "x"):
        with pytest.raises(PrivateStoreError, match="an older copy of the budgets than the answers of run"):
            again.check_mark(mark, "run")
