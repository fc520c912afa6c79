"""A run's past: older copies, other ledgers, other data and other runs in its folder are refused, never silent."""

import multiprocessing
import shutil

import pytest
import torch

from pl_privknn.callbacks.label_store import LabelRun, LabelStore, LabelStoreError
from pl_privknn.callbacks.run_files import DurableCheckpointIO, previous, usable_checkpoint
from pl_privknn.labelers import ReverseKNN
from pl_privknn.labelers.base import Release
from pl_privknn.privacy import Budget
from pl_privknn.privacy.folders import FolderInUse, FolderLock, resumed_folder
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.store import RowStore, read_rows
from tests.privacy.ledger.ledger_setup import PROTECTED, G, needs_fork
from tests.setup.small_fit import fit_student

TERMS = {"plan": [Charge(G, 50)], "description": {}, "budget": Budget()}


def opened(folder, public_digest="these", **terms):
    run = LabelRun(folder, public={"public_digest": public_digest}, **TERMS, **terms)
    if run.store.selected(0) is None:
        run.store.select(0, range(10))
    return run


def ask(run, positions):
    """What a labeler's batch does up to its draw; returns the charge's row."""
    run.store.mark_asked(0, positions, run.ledger_run.num_charges)
    return run.ledger_run.charge(G, len(positions), **PROTECTED)


def answer(run, positions):
    run.store.put(0, positions, Release(torch.zeros(len(positions), dtype=torch.int64)))


def test_a_run_goes_on_where_it_was_and_asks_nothing_twice(tmp_path):
    run = opened(tmp_path)
    ask(run, [0, 1, 2])
    answer(run, [0, 1, 2])
    ask(run, [3, 4])  # paid, and lost
    run.store.mark_asked(
        0, [5, 6], run.ledger_run.num_charges
    )  # and then the labeler failed: not lost, not paid
    run.close()
    again = opened(tmp_path)
    assert again.run_id == run.run_id
    assert again.store.open_positions(0, again.ledger_run.num_charges) == [5, 6, 7, 8, 9]
    assert again.store.counts() == {"queried": 5, "answered": 3, "refused": 0, "lost": 2}
    again.close()


@pytest.mark.parametrize(
    ("file", "released", "error", "told"),
    [
        ("ledger.sqlite", False, LedgerCorrupt, r"older copy .* Restore"),
        ("ledger.sqlite", True, LedgerCorrupt, r"older copy .* Restore"),
        ("labels.sqlite", True, LabelStoreError, r"older copy: .* 1 later charges .* cost twice"),
    ],
)
def test_an_older_file_is_refused(tmp_path, file, released, error, told):
    run = opened(tmp_path)
    ask(run, [0])
    answer(run, [0])
    shutil.copy(tmp_path / file, tmp_path / "backup")
    ask(run, [1])
    if released:
        answer(run, [1])
    run.close()
    run.ledger.close()
    shutil.copy(tmp_path / "backup", tmp_path / file)
    with pytest.raises(error, match=told):
        opened(tmp_path)
    charged = Ledger.open_readonly(tmp_path / "ledger.sqlite").report().charged
    assert charged == (Charge(G, 1 if file == "ledger.sqlite" else 2),)


def test_a_new_or_missing_ledger_is_refused(tmp_path):
    run = opened(tmp_path)
    run.close()
    run.ledger.close()
    (tmp_path / "ledger.sqlite").unlink()
    with pytest.raises(FileNotFoundError, match="missing"):
        opened(tmp_path)
    Ledger(tmp_path / "ledger.sqlite").run("another", plan=[Charge(G, 1)])
    with pytest.raises(LedgerCorrupt, match="nothing of this run"):
        opened(tmp_path)


def test_a_kill_between_a_charge_and_its_note_is_survived_once(tmp_path):
    run = opened(tmp_path)
    run.ledger._store.witnesses.clear()
    ask(run, [0, 1])
    run.close()
    again = opened(tmp_path)
    assert again.store.counts()["lost"] == 2
    again.ledger._store.witnesses.clear()
    again.ledger_run.charge(G, 1, **PROTECTED)  # nothing was asked: no kill leaves this
    again.close()
    with pytest.raises(LabelStoreError, match="older copy"):
        opened(tmp_path)


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
    with pytest.raises(LabelStoreError, match="older copy"):
        opened(first, ledger_path=shared)


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


@pytest.mark.parametrize("shared", [False, True])
def test_a_kill_at_any_step_of_the_opening_states_no_second_plan(tmp_path, monkeypatch, shared):
    class Killed(Exception):
        pass

    def opening(folder, steps):
        """Open a run, or be killed before one of the writes to its labels or its ledger."""
        left = iter(range(steps))

        def dying(original):
            def step(self, *given, **named):
                if next(left, None) is None:
                    raise Killed
                return original(self, *given, **named)

            return step

        with monkeypatch.context() as patch:
            for owner, name in ((LabelStore, "note"), (RowStore, "append")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            opened(folder, **places).close()

    places = {"ledger_path": tmp_path / "all.sqlite"} if shared else {}
    for steps in range(20):
        folder = tmp_path / f"run{steps}"
        try:
            opening(folder, steps)
            break
        except Killed:
            opened(folder, **places).close()
    assert 3 < steps < 19
    counts = [
        row["kind"] for row in read_rows(tmp_path / "all.sqlite" if shared else folder / "ledger.sqlite")
    ]
    assert counts == ["open", *["plan"] * (steps + 1 if shared else 1)]


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

    monkeypatch.setattr(LabelStore, "put", lose)
    with pytest.raises(Exception):  # noqa: B017,PT011 - whatever a broken disk says
        fit_student(tmp_path, teacher, 0.1, queries_per_round=20)
    monkeypatch.undo()
    with pytest.raises(LabelStoreError, match=r"20 queries were paid for.* no label is left .* ledger_path="):
        fit_student(tmp_path, teacher, 0.1, queries_per_round=20)
    charged = Ledger.open_readonly(tmp_path / "run" / "ledger.sqlite").report().charged
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
