"""The file of per-record budgets: crashes, damage, kills, one writer."""

import contextlib
import copy
import functools
import itertools
import os
import pickle
import random
import signal
import stat
import threading

import numpy as np
import pytest
from forked import in_child, talking
from individual_setup import opened
from ledger_setup import needs_fork

from pl_privknn.privacy.per_record import journal as journal_module
from pl_privknn.privacy.per_record.filter import IndividualBudgetExceeded, IndividualFilter
from pl_privknn.privacy.per_record.journal import JournalError

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


def _spend(path, mode, say):
    """Charge two records after another, and say which only after the charge returned, as an answer is."""
    IndividualFilter.compact_bytes = 3000
    state = IndividualFilter(1.0, path)
    state.add(range(12))
    for step in itertools.count():
        ids = sorted({step % 12, (step * 5 + 1) % 12})
        with state.batch() if mode == "batch" else contextlib.nullcontext():
            state.charge(ids, 2.0**-20)
            if mode == "batch":
                state.charge(ids[:1], 2.0**-20)
        say(" ".join(map(str, ids)))


@needs_fork
@pytest.mark.parametrize("mode", ["single", "batch"])
def test_killed_process_forgets_nothing_that_it_answered(tmp_path, mode):
    path = tmp_path / "state"
    answered = np.zeros(12)
    moment = random.Random(5)
    lives = 3
    for _ in range(lives):
        with talking(functools.partial(_spend, path, mode)) as (process, said):
            first = said.readline()
            assert first
            with pytest.raises(JournalError, match="in use"):
                IndividualFilter(1.0, path)
            lines = [first, *(said.readline() for _ in range(moment.randrange(50, 400)))]
            os.kill(process, signal.SIGKILL)
            lines += said.read().split("\n")
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
    with talking(lambda say: say(_refusal(path))) as (_, lines):
        assert "in use" in lines.read()
    state.charge([1], 0.5)
    state.close()
    state.close()
    with pytest.raises(JournalError, match="closed"):
        state.charge([1], 0.25)
    assert IndividualFilter(1.0, path).remaining([1]).tolist() == [0.5]


def _refusal(path):
    try:
        IndividualFilter(1.0, path)
    except JournalError as error:
        return error


@needs_fork
def test_forked_child_cannot_spend_and_does_not_unlock(tmp_path):
    state = IndividualFilter(1.0, tmp_path / "state")
    state.add([1])

    def spend():
        with pytest.raises(JournalError):
            state.charge([1], 0.5)
        state.close()

    assert in_child(spend) == 0
    assert "in use" in str(_refusal(tmp_path / "state"))
    state.charge([1], 0.25)
    assert state.remaining([1])[0] == 0.75


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


# ---------------------------------------------------------------- marks


def test_marks_tell_an_older_copy(tmp_path, monkeypatch):
    path = tmp_path / "state"
    state = opened(path)
    assert not state.begun
    marks, copies = [state.mark], [path.read_bytes()]
    for step in range(6):
        # Also where nobody pays: the number of marks tells nothing of the records.
        state.charge([1, 2] if step % 2 else [], 0.0625, marked=True)
        state.charge([3], 2.0**-10)  # compacted now and then
        marks.append(state.mark)
        copies.append(path.read_bytes())
        assert state.begun
        if step == 3:
            monkeypatch.setattr(IndividualFilter, "compact_bytes", 10)
    with pytest.raises(RuntimeError, match="marked=True"), state.batch():
        state.charge([1], 0.25, marked=True)
    wanted = state.remaining([1, 2, 3]).tolist()
    state.close()
    assert len(set(marks)) == 7
    with IndividualFilter(1.0, path) as again:
        assert again.mark == marks[-1]
        assert again.remaining([1, 2, 3]).tolist() == wanted
        assert all(again.has_mark(mark) for mark in marks)
        assert not any(again.has_mark(mark) for mark in ("", "1:", "x:y", "-1:" + marks[-1][2:], "7:00"))
    for number, copy_ in enumerate(copies):
        path.write_bytes(copy_)
        with IndividualFilter(1.0, path) as older:
            assert [older.has_mark(mark) for mark in marks] == [later <= number for later in range(7)]
            older.charge([1], 0.0, marked=True)  # and one that went on by itself is told from the original
            assert not older.has_mark([*marks, "7:"][number + 1])
    with IndividualFilter(1.0, tmp_path / "other") as other:
        assert not any(other.has_mark(mark) for mark in marks)


def test_a_file_without_marks_is_taken_over(tmp_path):
    path = tmp_path / "state"
    with opened(path, 1.0, range(3)) as state:
        state.charge([1], 0.25)
        body = state._table.snapshot(1.0)[:-8]  # as earlier versions wrote it
    path.unlink()
    journal_module.Journal(path, (0, body)).close()
    with IndividualFilter(1.0, path) as again:
        name = again.name
        assert again.remaining(range(3)).tolist() == [1.0, 0.75, 1.0]
    with IndividualFilter(1.0, path) as again:
        assert again.name == name != ""
