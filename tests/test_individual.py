"""Per-record budgets: conversions, exact stop against rational arithmetic, crashes, damage, one writer."""

import copy
import math
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pl_privknn.privacy import journal as journal_module
from pl_privknn.privacy.budgets import CONVERSIONS, budget_for_epsilon, epsilon_of_budget
from pl_privknn.privacy.individual import IndividualBudgetExceeded, IndividualFilter
from pl_privknn.privacy.journal import JournalError

ALL = np.arange(20)


def opened(path, budget=1.0, ids=ALL):
    state = IndividualFilter(budget, path)
    state.add(ids)
    return state


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


# ---------------------------------------------------------------- state on disk


def test_state_is_found_again(tmp_path):
    path = tmp_path / "state"
    with opened(path) as state:
        state.charge([1, 2], [0.25, 0.5])
        with state.batch():
            state.charge([2, 3], 0.25)
            state.charge([3], 0.25)
            assert state.remaining([3]).tolist() == [0.5]
        state.remove([1])
    with IndividualFilter(1.0, path) as state:
        assert state.active(0.0).tolist() == [0, *range(2, 20)]
        assert state.remaining([0, 2, 3]).tolist() == [1.0, 0.25, 0.5]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_batch_is_one_entry_and_survives_an_exception(tmp_path):
    path = tmp_path / "state"
    state = opened(path)
    before = path.stat().st_size
    with state.batch():
        for _ in range(25):
            state.charge([1, 2], 0.015625)
        assert path.stat().st_size == before
    assert path.stat().st_size - before == 28 + 2 * 16

    def interrupted():
        with state.batch():
            for _ in range(25):
                state.charge([1, 2], 0.015625)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert path.stat().st_size - before == 2 * (28 + 2 * 16)
    with pytest.raises(RuntimeError, match="open already"), state.batch(), state.batch():
        pass
    state.close()
    assert IndividualFilter(1.0, path).remaining([1, 3]).tolist() == [1 - 50 / 64, 1.0]


def test_compaction_keeps_everything_and_bounds_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(IndividualFilter, "compact_bytes", 2000)
    path = tmp_path / "state"
    state = opened(path, 1.0, range(10))
    state.remove([9])
    for step in range(400):
        state.charge([step % 9, 8 - step % 9] if step % 9 != 4 else [4], 2.0**-8)
        assert path.stat().st_size < 2200
    wanted = state.remaining(range(9)).tolist()
    assert min(wanted) < 0.7
    state.close()
    state = IndividualFilter(1.0, path)
    assert state.remaining(range(9)).tolist() == wanted
    assert state.active(0.0).tolist() == list(range(9))


def test_crash_during_compaction_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    state = opened(path)
    state.charge([1], 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(IndividualFilter, "compact_bytes", 10)
        patch.setattr(journal_module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        charges = (state.charge([2], 2.0**-10) for _ in range(100))
        with pytest.raises(JournalError, match="could not be written"):
            list(charges)
    (tmp_path / "state.new").write_bytes(b"left over")
    again = IndividualFilter(1.0, path)
    assert again.remaining([1]).tolist() == [0.75]
    assert again.remaining([2])[0] < 1


def test_another_budget_is_refused(tmp_path):
    path = tmp_path / "state"
    opened(path).close()
    for other in (0.5, 2.0, 1.00001):
        with pytest.raises(ValueError, match="budget="):
            IndividualFilter(other, path)
    assert IndividualFilter(1 + 1e-12, path).budget == 1.0  # the stored one holds


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_stops_the_filter(tmp_path, monkeypatch, failure):
    path = tmp_path / "state"
    state = opened(path)
    state.charge([1], 0.25)
    real = os.write

    def half(descriptor, data):
        real(descriptor, bytes(data)[:20])
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", half)
        with pytest.raises((JournalError, KeyboardInterrupt)):
            state.charge([1], 0.5)
    with pytest.raises(JournalError, match="open it again"):
        state.charge([1], 0.125)
    again = IndividualFilter(1.0, path)
    assert again.remaining([1]).tolist() == [0.75]
    again.charge([1], 0.125)
    again.close()
    assert IndividualFilter(1.0, path).remaining([1]).tolist() == [0.625]


def test_file_cut_short_anywhere_is_the_state_before_or_refused(tmp_path):
    path = tmp_path / "state"
    states = []
    state = opened(path, 1.0, range(3))
    for ids, cost in (([0, 1], 0.25), ([1], 0.5), ([0, 1, 2], 0.125)):
        state.charge(ids, cost)
        states.append((path.stat().st_size, state.remaining(range(3)).tolist()))
    state.close()
    data = path.read_bytes()
    for cut in range(states[0][0], len(data) + 1):
        for tail in (b"", b"\0" * 40):
            if tail and cut not in dict(states):
                continue
            path.write_bytes(data[:cut] + tail)
            with IndividualFilter(1.0, path) as again:
                expected = [left for size, left in states if size <= cut][-1]
                assert again.remaining(range(3)).tolist() == expected
                again.charge([2], 0.0625)  # and it can go on
            with IndividualFilter(1.0, path) as again:
                assert again.remaining([2])[0] == expected[2] - 0.0625


def test_damage_anywhere_is_refused(tmp_path):
    path = tmp_path / "state"
    with opened(path, 1.0, range(2)) as state:
        sizes = [path.stat().st_size]
        for _ in range(3):
            state.charge([0, 1], 0.125)
            sizes.append(path.stat().st_size)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(JournalError, match="refused"):
            IndividualFilter(1.0, path)
    first, second = data[sizes[0] : sizes[1]], data[sizes[1] : sizes[2]]
    head, rest = data[: sizes[0]], data[sizes[2] :]
    for changed in (head + second + rest, head + second + first + rest, head + first + first + second + rest):
        path.write_bytes(changed)
        with pytest.raises(JournalError, match="refused"):
            IndividualFilter(1.0, path)
    for text in (b"", b"PRIVKNN\x01", b"hello, this is no state", data[:30]):
        path.write_bytes(text)
        with pytest.raises(JournalError, match="refused"):
            IndividualFilter(1.0, path)
    path.write_bytes(data)
    assert IndividualFilter(1.0, path).remaining([0]).tolist() == [0.625]


# ---------------------------------------------------------------- kill -9

_SPENDER = """
import sys
from pl_privknn.privacy.individual import IndividualFilter
IndividualFilter.compact_bytes = 3000
state = IndividualFilter(1.0, sys.argv[1])
state.add(range(12))
step = 0
while True:
    ids = [step % 12, (step * 5 + 1) % 12]
    ids = sorted(set(ids))
    if sys.argv[2] == "batch":
        with state.batch():
            state.charge(ids, 2.0 ** -20)
            state.charge(ids[:1], 2.0 ** -20)
    else:
        state.charge(ids, 2.0 ** -20)
    # The answer: released only after the charge returned.
    sys.stdout.write(" ".join(map(str, ids)) + "\\n")
    sys.stdout.flush()
    step += 1
"""


@pytest.mark.parametrize("mode", ["single", "batch"])
def test_killed_process_forgets_nothing_that_it_answered(tmp_path, mode):
    path = tmp_path / "state"
    answered = np.zeros(12)
    moment = random.Random(5)
    lives = 3
    for _ in range(lives):
        process = subprocess.Popen(
            [sys.executable, "-c", _SPENDER, str(path), mode], stdout=subprocess.PIPE, text=True
        )
        first = process.stdout.readline()
        assert first
        with pytest.raises(JournalError, match="in use"):
            IndividualFilter(1.0, path)
        lines = [first, *(process.stdout.readline() for _ in range(moment.randrange(50, 400)))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().split("\n")
        process.wait()
        process.stdout.close()
        for line in lines[:-1]:  # the last one may be cut; it is within the slack below
            ids = [int(word) for word in line.split()]
            answered[ids] += 1
            if mode == "batch":
                answered[ids[:1]] += 1
        with IndividualFilter(1.0, path) as state:  # the lock went with the process
            charged = np.round((1 - state.remaining(range(12))) * 2**20)
        assert (charged >= answered).all()
        # Wasted: at most the charge under way and the line that was cut, in each life.
        assert (charged - answered).sum() <= lives * 6
    assert answered.sum() > lives * 50


# ---------------------------------------------------------------- one writer


def test_second_opening_is_refused_and_frees_nothing(tmp_path):
    path = tmp_path / "state"
    state = opened(path)
    link = tmp_path / "alias"
    link.symlink_to(path)
    for name in (path, str(path), link):
        with pytest.raises(JournalError, match="in use"):
            IndividualFilter(1.0, name)
    program = "import sys; from pl_privknn.privacy.individual import *; IndividualFilter(1.0, sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert "in use" in result.stderr
    state.charge([1], 0.5)
    state.close()
    state.close()
    with pytest.raises(JournalError, match="closed"):
        state.charge([1], 0.25)
    assert IndividualFilter(1.0, path).remaining([1]).tolist() == [0.5]


_FORK = """
import os, sys
from pl_privknn.privacy.individual import IndividualFilter
from pl_privknn.privacy.journal import JournalError
state = IndividualFilter(1.0, sys.argv[1])
state.add([1])
child = os.fork()
if child == 0:
    try:
        state.charge([1], 0.5)
    except JournalError:
        state.close()
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    IndividualFilter(1.0, sys.argv[1])
except JournalError:
    print("still locked")
state.charge([1], 0.25)
print(state.remaining([1])[0])
"""


def test_forked_child_cannot_spend_and_does_not_unlock(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", _FORK, str(tmp_path / "state")], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[:2] == ["still locked", "0.75"]


def test_threads_share_one_budget(tmp_path):
    state = opened(tmp_path / "state", 1.0, [0])
    refused = []

    def spend():
        for _ in range(100):
            try:
                state.charge([0], 2.0**-8)
            except IndividualBudgetExceeded:
                refused.append(1)

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 400 - 256
    assert state.remaining([0]).tolist() == [0.0]


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickle.dumps])
def test_filters_are_not_copied(tmp_path, clone):
    for path in (None, tmp_path / "state"):
        with pytest.raises(TypeError, match="copied"):
            clone(IndividualFilter(1.0, path))


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
