"""Ind-KNN within ``trainer.fit``: killed anywhere and resumed, a run ends at the ε that it promised."""

import os
import shutil
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import IndKNN
from pl_privknn.privacy import Budget, Gaussian
from pl_privknn.privacy.ledger import Ledger, LedgerRun
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.private_state import FILE_NAME, PrivateStore, PrivateStoreError
from pl_privknn.privacy.record_budgets import BudgetTable
from tests.labelers.ind_knn.ind_knn_setup import amounts
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import is_killed
from tests.setup.small_fit import fit_student

BUDGET = Budget(epsilon=1.0)
PROMISE = {"budget": BUDGET, "queries_per_round": 30, "query_batch_size": 6}


def teacher(**settings):
    return IndKNN(0.6, Gaussian(3.0), budget=Budget(epsilon=1.0), num_queries=300, **settings)


def fit(folder, **settings):
    return fit_student(folder, teacher(**settings), 0.15, private=120, **PROMISE)[0]


def charges(callback):
    return callback.ledger.run(callback.run_id).num_charges


def killed(folder, cls, name, call, before, **settings):
    """Fit in a child that dies before or after a call of a method; True if it got there."""
    method, calls = getattr(cls, name), 0

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        result = None if calls == call and before else method(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def run():
        setattr(cls, name, dying)
        fit(folder, **settings)

    return is_killed(run)


def private_files(folder):
    """The only run's private files."""
    (run,) = (folder / "run.private").iterdir()
    return run


@needs_fork
@pytest.mark.parametrize(
    ("cls", "name", "call", "before"),
    [
        (LedgerRun, "charge", 1, True),
        (LedgerRun, "charge", 1, False),
        (BudgetTable, "spend", 2, False),
        (LedgerRun, "note", 1, True),
        (LabelRun, "put", 3, True),
    ],
)
def test_a_killed_run_ends_at_its_promise(tmp_path, cls, name, call, before):
    folder = tmp_path / "first"
    assert killed(folder, cls, name, call, before)
    (run,) = Ledger.open_readonly(folder / "run" / "run.sqlite").runs
    assert private_files(folder).name == run
    left = amounts(private_files(folder), teacher().parameters)
    answered = cls is LabelRun or name in ("spend", "note")
    folder = folder.rename(tmp_path / "moved")  # the run's folder, with the private one beside it
    callback = fit(folder)
    assert 0.9999 < callback.epsilon <= 1.0
    assert callback.epsilon_spent == callback.epsilon
    assert charges(callback) == 1
    counts = callback.label_counts()
    assert counts["answered"] + counts["lost"] == 30
    assert counts["lost"] <= 6
    after = amounts(private_files(folder), teacher().parameters)
    if answered:  # nobody got anything back
        assert all(after[number] <= left[number] for number in left)
        assert after.keys() == left.keys()
    if cls is LabelRun:
        assert killed(folder, cls, name, 100, before) is False  # all is there: nothing is asked again
        assert charges(callback) == 1


@needs_fork
def test_a_run_whose_private_folder_is_lost_or_older_is_refused(tmp_path):
    assert killed(tmp_path, LabelRun, "put", 1, True)
    private = private_files(tmp_path)
    shutil.copytree(private, tmp_path / "older")
    shutil.move(private, tmp_path / "lost")
    with pytest.raises(PrivateStoreError, match="does not hold the budgets from which run"):
        fit(tmp_path)
    shutil.move(tmp_path / "lost", private)
    assert killed(tmp_path, LabelRun, "put", 2, True)
    latest = shutil.move(private, tmp_path / "latest")
    shutil.move(tmp_path / "older", private)
    with pytest.raises(PrivateStoreError, match="an older copy of the budgets"):
        fit(tmp_path)
    shutil.rmtree(private)
    shutil.move(latest, private)
    with pytest.raises(ValueError, match="noise_source: the noise of this stream came from the operating"):
        fit(tmp_path, noise_source=SeededNoise(7))
    assert charges(fit(tmp_path)) == 1
    # A copy of the whole run would spend the same budgets a second time, as long as the first is there.
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    with pytest.raises(PrivateStoreError, match="does not hold the budgets"):
        again(tmp_path / "copy")
    shutil.copytree(tmp_path / "run.private", tmp_path / "copy" / "run.private")
    with pytest.raises(PrivateStoreError, match="is a copy of"):
        again(tmp_path / "copy")


def again(folder):
    """Join a finished run in its folder, as one does that has queries left."""
    ledger = Ledger(folder / "run" / "run.sqlite", BUDGET)
    (run,) = ledger.runs
    joining = teacher()
    joining.join_run(folder / "run.private" / run, joining.paying(ledger.run(run)))


def test_the_private_folder_is_beside_the_run_and_nothing_of_it_inside(tmp_path):
    before = os.umask(0)
    try:
        callback = fit(tmp_path)
    finally:
        os.umask(before)
    private = private_files(tmp_path)
    assert private.name == callback.run_id
    for path in (private, private.parent, *private.iterdir()):
        assert path.stat().st_mode & 0o77 == 0
    left, store = amounts(private, teacher().parameters), PrivateStore(private / FILE_NAME)
    key = store.fact("key")
    store.close()
    assert len(left) == 120
    secret = [key.encode(), bytes.fromhex(key)]
    for number, amount in left.items():
        secret += [str(number).encode(), np.int64(number).tobytes()]
        secret += [str(amount).encode(), np.float64(amount).tobytes()] if amount else []
    for path in (tmp_path / "run").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [text for text in secret if text in content], path


def test_every_run_has_a_stream_of_its_own_or_charges_for_the_one_that_it_shares(tmp_path):
    labeler = teacher()
    labeler.fit(PrivateRecords.of(torch.rand(9, 4), torch.arange(9) % 3, 3))  # it was used before
    for name in ("a", "a"):
        shutil.rmtree(tmp_path / "a" / "run", ignore_errors=True)  # another run in the same place
        callback, _ = fit_student(tmp_path / name, labeler, 0.15, private=120, **PROMISE)
        assert charges(callback) == 1
        assert 0.9999 < callback.epsilon <= 1.0
        left = amounts(tmp_path / name / "run.private" / callback.run_id, labeler.parameters)
        np.testing.assert_allclose(np.sort(labeler.remaining()), np.sort(list(left.values())))
    assert len(list((tmp_path / "a" / "run.private").iterdir())) == 2
    for name in ("c", "d"):
        callback = fit(tmp_path / name, identities={"state_dir": tmp_path / "state"})
        assert charges(callback) == 1  # each run's own ledger must show the stream
        assert not (tmp_path / name / "run.private").exists()


def test_a_run_that_fails_lets_go_of_its_state(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LabelRun, "put", Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            fit(tmp_path)
    assert charges(fit(tmp_path)) == 1
