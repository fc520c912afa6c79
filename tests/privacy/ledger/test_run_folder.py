"""A run's past: older copies, other ledgers, other data and other runs in its folder are refused, never silent."""

import multiprocessing
import os
import shutil
import sqlite3

import pytest
import torch

from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.callbacks.run_summary import previous, usable_checkpoint
from pl_privknn.callbacks.selection import Selection
from pl_privknn.cli.train import DurableCheckpointIO
from pl_privknn.labelers import ReverseKNN
from pl_privknn.labelers.base import Release
from pl_privknn.privacy import Budget
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.files import FolderInUse, FolderLock, resumed_folder
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.run import RUN_FILE, RunFileError
from pl_privknn.privacy.sqlite_file import read_rows
from tests.privacy.ledger.ledger_setup import PROTECTED, G, needs_fork
from tests.setup.forked import in_child
from tests.setup.small_fit import fit_student

TERMS = {"plan": [Charge(G, 50)], "description": {}, "budget": Budget()}


def opened(folder, public_digest="these", **terms):
    run = LabelRun(folder, public={"public_digest": public_digest}, **TERMS, **terms)
    run.open_round(0, lambda: Selection(torch.arange(10)))
    return run


def ask(run, positions):
    """What a labeler's batch does up to its draw; returns the charge's row."""
    run.mark_asked(0, positions)
    return run.ledger_run.charge(G, len(positions), **PROTECTED)


def answer(run, positions):
    run.put(0, positions, Release(torch.zeros(len(positions), dtype=torch.int64)))


def closed(run):
    run.close()
    run.ledger.close()


@pytest.fixture(params=["own", "shared"])
def places(request, tmp_path):
    """Where a run's ledger is: in the run's file, or in one that other runs share."""
    return {} if request.param == "own" else {"ledger_path": tmp_path / "all.sqlite"}


def test_a_run_goes_on_where_it_was_and_asks_nothing_twice(tmp_path, places):
    run = opened(tmp_path / "run", **places)
    ask(run, [0, 1, 2])
    answer(run, [0, 1, 2])
    ask(run, [3, 4])  # paid, and lost
    run.mark_asked(0, [5, 6])  # and then the labeler failed: not lost, not paid
    run.close()
    again = opened(tmp_path / "run", **places)
    assert again.run_id == run.run_id
    assert again.stored.open_positions(0) == [5, 6, 7, 8, 9]
    assert again.stored.counts() == {"queried": 5, "answered": 3, "refused": 0, "lost": 2}
    again.close()


@pytest.mark.parametrize(
    ("file", "error", "told"),
    [
        ("all.sqlite", LedgerCorrupt, r"older copy .* Restore"),
        ("run/run.sqlite", RunFileError, r"older copy: .* 1 later charges .* cost twice"),
    ],
)
@pytest.mark.parametrize("released", [False, True])
def test_an_older_copy_of_either_file_is_refused(tmp_path, file, released, error, told):
    folder, shared = tmp_path / "run", tmp_path / "all.sqlite"
    run = opened(folder, ledger_path=shared)
    ask(run, [0])
    answer(run, [0])
    shutil.copy(tmp_path / file, tmp_path / "backup")
    ask(run, [1])
    if released:
        answer(run, [1])
    closed(run)
    shutil.copy(tmp_path / "backup", tmp_path / file)
    with pytest.raises(error, match=told):
        opened(folder, ledger_path=shared)
    charged = Ledger.open_readonly(shared).report().charged
    assert charged == (Charge(G, 1 if file == "all.sqlite" else 2),)


def test_a_checkpoint_finds_an_older_copy_of_a_file_that_holds_its_own_ledger(tmp_path):
    run = opened(tmp_path)
    ask(run, [0])
    shutil.copy(tmp_path / RUN_FILE, tmp_path / "backup")
    ask(run, [1])
    checkpoint = run.state()
    closed(run)
    opened(tmp_path, checkpoint=checkpoint).close()
    shutil.copy(tmp_path / "backup", tmp_path / RUN_FILE)
    with pytest.raises(LedgerCorrupt, match=r"noted by the checkpoint.* Restore"):
        opened(tmp_path, checkpoint=checkpoint)


def test_a_new_or_missing_ledger_is_refused(tmp_path):
    folder, shared = tmp_path / "run", tmp_path / "all.sqlite"
    closed(opened(folder, ledger_path=shared))
    shared.unlink()
    with pytest.raises(FileNotFoundError, match="missing"):
        opened(folder, ledger_path=shared)
    Ledger(shared).run("another", plan=[Charge(G, 1)])
    with pytest.raises(LedgerCorrupt, match="nothing of this run"):
        opened(folder, ledger_path=shared)
    with pytest.raises(LedgerCorrupt, match=r"a ledger elsewhere; give that ledger \(ledger_path\)"):
        opened(folder)


def test_a_file_that_is_no_runs_is_left_as_it_is(tmp_path):
    for content in (b"", b"notes" * 100):
        (tmp_path / RUN_FILE).write_bytes(content)
        with pytest.raises(RunFileError, match="restore it"):
            opened(tmp_path)
        assert (tmp_path / RUN_FILE).read_bytes() == content
    (tmp_path / RUN_FILE).unlink()
    Ledger(tmp_path / RUN_FILE).run("another", plan=[Charge(G, 1)])
    with pytest.raises(RunFileError, match="no such table"):
        opened(tmp_path)
    assert Ledger.open_readonly(tmp_path / RUN_FILE).runs == ["another"]


def test_a_refused_plan_leaves_nothing_behind(tmp_path, places):
    terms = {**TERMS, "budget": Budget(epsilon=0.1), "public": {}}
    with pytest.raises(BudgetExceeded):
        LabelRun(tmp_path / "run", **terms, **places)
    assert not (tmp_path / "run" / RUN_FILE).exists()
    shared = {**places, "ledger_path": tmp_path / "other.sqlite"} if places else {}
    LabelRun(tmp_path / "run", **{**terms, "budget": Budget(epsilon=100.0)}, **shared).close()


def test_a_copied_folder_goes_on_in_itself_and_a_shared_ledger_serves_one_of_both(tmp_path):
    first, copy, shared = tmp_path / "first", tmp_path / "copy", tmp_path / "shared.sqlite"
    run = opened(first, ledger_path=shared)
    ask(run, [0])
    answer(run, [0])
    run.close()
    shutil.copytree(first, copy)
    twin = opened(copy, ledger_path=shared)
    ask(twin, [1])
    answer(twin, [1])
    twin.close()
    with pytest.raises(RunFileError, match="older copy"):
        opened(first, ledger_path=shared)


def labelled(folder, places, kill_at=None):
    """A labelling of two batches, killed at a statement that writes."""
    run = opened(folder, **places)
    if kill_at is not None:
        left = iter(range(kill_at))

        def count(statement):
            if statement.split()[0] in ("BEGIN", "INSERT", "UPDATE", "COMMIT") and next(left, None) is None:
                os._exit(9)

        run.file._db.set_trace_callback(count)
    while positions := run.stored.open_positions(0)[:5]:
        ask(run, positions)
        answer(run, positions)


@needs_fork
def test_a_kill_at_any_write_pays_at_most_the_plan_and_loses_one_batch(tmp_path, places):
    for kill_at in range(100):
        folder, ledger = tmp_path / f"run{kill_at}", places and {"ledger_path": tmp_path / f"all{kill_at}"}
        killed = in_child(lambda: labelled(folder, ledger, kill_at))  # noqa: B023
        again = opened(folder, **ledger)
        lost = again.stored.counts()["lost"]
        assert lost in (0, 5)
        while positions := again.stored.open_positions(0)[:5]:
            ask(again, positions)
            answer(again, positions)
        charged = again.ledger.report().charged
        assert sum(charge.count for charge in charged) == 10
        assert again.stored.counts() == {"queried": 10, "answered": 10 - lost, "refused": 0, "lost": lost}
        closed(again)
        if killed == 0:
            break
    assert 20 < kill_at < 99


def test_a_batch_takes_three_transactions_in_one_file(tmp_path, places):
    run, commits = opened(tmp_path / "run", **places), []
    run.file._db.set_trace_callback(
        lambda statement: commits.append(statement) if statement == "COMMIT" else None
    )
    ask(run, [0, 1])
    answer(run, [0, 1])
    assert len(commits) == 3


def test_a_checkpoint_is_resumed_in_the_folder_that_it_lies_in(tmp_path):
    for name in ("first", "copy"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    first, copy = tmp_path / "first", tmp_path / "copy"
    ours = {first: "ours", copy: "ours"}

    def resumed(stored, checkpoint):
        return resumed_folder({"run_id": "ours", "run_dir": str(stored)}, checkpoint, ours.get)

    found = resumed(first, copy / "checkpoints" / "last.ckpt")
    assert found == copy
    assert resumed(first, tmp_path / "elsewhere.ckpt") == first
    with pytest.raises(FileNotFoundError, match="run_dir"):
        resumed(tmp_path / "gone", tmp_path / "elsewhere.ckpt")


@needs_fork
def test_a_kill_at_any_step_of_the_opening_states_no_second_plan(tmp_path, places):
    def opening(folder, ledger, steps):
        """Open a run, or be killed before one of the changes to its files."""
        left, original = iter(range(steps)), sqlite3.connect

        def connect(*given, **named):
            db = original(*given, **named)
            changes = ("BEGIN", "INSERT", "CREATE", "COMMIT", "ATTACH")
            db.set_trace_callback(
                lambda said: os._exit(9) if said.split()[0] in changes and next(left, None) is None else None
            )
            return db

        sqlite3.connect = connect
        opened(folder, **ledger).close()

    for steps in range(100):
        folder, ledger = tmp_path / f"run{steps}", places and {"ledger_path": tmp_path / f"all{steps}"}
        ended = in_child(lambda: opening(folder, ledger, steps))  # noqa: B023
        run = opened(folder, **ledger)
        kinds = [row["kind"] for row in read_rows(run.ledger.path)]
        assert kinds == ["open", "plan"]
        closed(run)
        if ended == 0:
            break
    assert 15 < steps < 99


def test_other_public_examples_are_refused(tmp_path):
    opened(tmp_path).close()
    with pytest.raises(ValueError, match="public_digest='these' then, 'others' now"):
        opened(tmp_path, public_digest="others")


def take(folder):
    FolderLock(folder).release()


@needs_fork
def test_one_run_at_a_time_has_a_folder(tmp_path):
    # Forked before the folder is taken, so that nothing but the file tells it of that.
    with multiprocessing.get_context("fork").Pool(1) as other:
        run = opened(tmp_path)
        with pytest.raises(FolderInUse, match="run_dir"):
            opened(tmp_path)
        with pytest.raises(FolderInUse):
            other.apply(take, (tmp_path,))
        run.close()
        run.close()
        other.apply(take, (tmp_path,))
    # A command holds the folder for the run that it starts, and for no second one.
    with FolderLock(tmp_path, shared=True):
        run = opened(tmp_path)
        with pytest.raises(FolderInUse):
            opened(tmp_path)
        run.close()


def test_lost_answers_are_said_and_never_bought_again_silently(tmp_path, monkeypatch):
    teacher = ReverseKNN(budget=Budget(epsilon=1.0), noise_source=SeededNoise(0))

    def lose(*_):
        raise KeyError("no disk")

    monkeypatch.setattr(LabelRun, "put", lose)
    with pytest.raises(Exception):  # noqa: B017,PT011 - whatever a broken disk says
        fit_student(tmp_path, teacher, 0.1, queries_per_round=20)
    monkeypatch.undo()
    with pytest.raises(RunFileError, match=r"20 queries were paid for.* no label is left .* ledger_path="):
        fit_student(tmp_path, teacher, 0.1, queries_per_round=20)
    charged = Ledger.open_readonly(tmp_path / "run" / "run.sqlite").report().charged
    assert [charge.count for charge in charged] == [1]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    last, io = tmp_path / "last.ckpt", DurableCheckpointIO()
    assert usable_checkpoint(last) is None
    for epoch in range(3):
        io.save_checkpoint({"epoch": epoch}, last)
    assert usable_checkpoint(last) == last
    assert io.load_checkpoint(last)["epoch"] == 2
    whole = last.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"epoch", b"EPOCH"), b""):
        last.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"resuming from last\.previous\.ckpt"):
            found = usable_checkpoint(last)
        assert found == previous(last)
        assert io.load_checkpoint(found)["epoch"] == 1
    previous(last).write_bytes(b"")
    with pytest.warns(UserWarning, match="training restarts"):
        assert usable_checkpoint(last) is None
