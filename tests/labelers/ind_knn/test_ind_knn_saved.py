"""The predictor's folder: saved, merged, and killed at every point."""

import itertools
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from forked import is_killed, talking
from ind_knn_literal import Literal
from ind_knn_setup import PARAMETERS, QUERIES, C, D, filled, rows
from ledger_setup import needs_fork

from pl_privknn.labelers.ind_knn import record_store as ind_knn_store
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn.prediction import IndKNNSwitches
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.ind_knn.private_table import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.per_record.journal import Journal, JournalError

# ---------------------------------------------------------------- the folder


@pytest.fixture
def _no_waiting(monkeypatch):
    """A killed process loses nothing that it has written, synced or not; waiting for the disk only takes time."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)


def test_a_saved_predictor_goes_on_as_if_never_closed(tmp_path):
    switches = IndKNNSwitches(PublicDensity(8, 40), reuse=True, hashing=SignProjections(5, 2), abstain=0.1)
    predictor = filled(switches=switches)
    predictor.use_public(rows(30, seed=3)[0])
    predictor.predict(QUERIES)
    left = dict(zip(*predictor.remaining(), strict=True))
    predictor.remove([4])
    predictor.save(tmp_path / "p")
    predictor.save(tmp_path / "p")
    with pytest.raises(ValueError, match="two copies would each spend the same budget"):
        predictor.save(tmp_path / "q")
    predictor.add([77], *rows(1, seed=2))
    predictor.predict(QUERIES)
    predictor.remove([6])
    expected, answered = predictor.remaining(), len(predictor._engine.answered)
    with pytest.raises(JournalError, match="in use"):
        IndKNNPredictor.open(tmp_path / "p")
    predictor.close()
    with pytest.raises(RuntimeError, match="was closed"):
        predictor.predict(QUERIES)
    again = IndKNNPredictor.open(tmp_path / "p", noise_source=SeededNoise(0))
    assert again.switches == switches
    assert again.parameters == PARAMETERS
    for before, now in zip(expected, again.remaining(), strict=True):
        np.testing.assert_array_equal(before, now)
    assert len(again._engine.answered) == answered > 0
    assert len(again._engine.reference) == 30
    again.add([4], *rows(1, seed=4))
    assert dict(zip(*again.remaining(), strict=True))[4] == left[4] < PARAMETERS.budget
    assert len(again.predict(QUERIES).labels) == 9
    with pytest.raises(FileExistsError):
        filled().save(tmp_path / "p")
    with pytest.raises(FileNotFoundError):
        IndKNNPredictor.open(tmp_path / "nowhere")


def test_a_predictor_that_was_never_saved_still_works_after_a_failed_save(tmp_path, monkeypatch):
    predictor = filled()
    predictor.predict(QUERIES)
    predictor.remove([1])
    left = predictor.remaining()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises((OSError, JournalError)):
        predictor.save(tmp_path / "p")
    monkeypatch.undo()
    np.testing.assert_array_equal(predictor.remaining()[1], left[1])
    predictor.save(tmp_path / "p")
    np.testing.assert_array_equal(predictor.remaining()[1], left[1])


@pytest.mark.usefixtures("_no_waiting")
def test_many_small_changes_are_merged(tmp_path):
    predictor = filled(0)
    predictor.save(tmp_path / "p")
    for record in range(140):
        predictor.add([record], *rows(1, seed=record))
        if record % 3 == 0:
            predictor.remove([record])
    assert len(list((tmp_path / "p" / "records").iterdir())) < 70
    expected = predictor._engine.table
    predictor.close()
    again = IndKNNPredictor.open(tmp_path / "p")
    order, ordered = np.argsort(expected.ids), np.argsort(again._engine.table.ids)
    np.testing.assert_array_equal(expected.ids[order], again._engine.table.ids[ordered])
    np.testing.assert_array_equal(expected.vectors[order], again._engine.table.vectors[ordered])
    np.testing.assert_array_equal(expected.labels[order], again._engine.table.labels[ordered])


def test_missing_records_are_noticed(tmp_path):
    predictor = filled()
    predictor.save(tmp_path / "p")
    predictor.close()
    shutil.rmtree(tmp_path / "p" / "records")
    with pytest.raises(JournalError, match="records are missing"):
        IndKNNPredictor.open(tmp_path / "p")


# ---------------------------------------------------------------- crashes


LEAVING = torch.full((1, D), 1.0) + torch.arange(D) / 7  # its bytes occur nowhere else


def scenario(folder, note):
    """A life of a predictor; ``note`` is told of each change after it has returned."""
    predictor = filled(12, switches=IndKNNSwitches(reuse=True))
    predictor.predict(QUERIES[:2])
    predictor.save(folder)
    note("saved", predictor)
    predictor.add([50, 51], torch.cat([LEAVING, QUERIES[:1]]), torch.tensor([1, 2]))
    note("added", predictor)
    predictor.predict(QUERIES[2:5])
    note("asked", predictor)
    predictor.remove([50, 3])
    note("removed", predictor)
    predictor.predict(QUERIES[5:7])
    note("asked again", predictor)
    predictor.add([3], *rows(1, seed=3))
    note("back", predictor)
    predictor.predict(QUERIES[7:])
    note("asked at last", predictor)


def run_until(folder, log, event):
    """Run the scenario in a child that dies at the event-th call of the system; False if it didn't."""
    counter = 0

    def dying(name, function):
        def call(*args, **kwargs):
            nonlocal counter
            counter += 1
            if counter != event:
                return function(*args, **kwargs)
            try:
                if name == "write":
                    function(args[0], bytes(args[1])[: len(args[1]) // 2])
                elif counter % 2:
                    function(*args, **kwargs)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    def live():
        tell = os.write
        for name in ("fsync", "fdatasync", "replace", "write", "mkdir", "rename", "rmdir", "unlink"):
            setattr(os, name, dying(name, getattr(os, name)))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        scenario(folder, lambda what, predictor: tell(descriptor, f"{what}\n".encode()))

    return is_killed(live)


@pytest.mark.long("1")
@pytest.mark.usefixtures("_no_waiting")
@needs_fork
@pytest.mark.parametrize("every", [1, 7])
def test_killed_at_any_point_nothing_is_forgotten(tmp_path, monkeypatch, every):
    monkeypatch.setattr(ind_knn_store, "_MANY_SEGMENTS", 2)  # so that merging is among what is cut short
    # What each record has left at each milestone of a life without a crash; seeds are the same.
    milestones = {}
    scenario(
        tmp_path / "whole",
        lambda what, predictor: milestones.setdefault(what, dict(zip(*predictor.remaining(), strict=True))),
    )
    died = 0
    for event in itertools.count(1, every):
        folder, log = tmp_path / f"run{event}", tmp_path / f"log{event}"
        if not run_until(folder, log, event):
            break
        died += 1
        told = log.read_text().split("\n")[:-1]
        assert told == list(milestones)[: len(told)]
        if not told and not folder.exists():
            continue  # died while saving: the predictor lived in memory only
        with IndKNNPredictor.open(folder, noise_source=SeededNoise(0)) as predictor:
            left = dict(zip(*predictor.remaining(), strict=True))
            last = milestones[told[-1] if told else "saved"]
            following = list(milestones)[min(max(len(told), 1), len(milestones) - 1)]
            assert set(left) in (set(last), set(milestones[following]))
            for number in set(left) & set(last):
                assert left[number] <= last[number]
            if "removed" in told:
                held = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
                assert unit_rows(LEAVING).numpy().tobytes() not in held
            for milestone, count in (("saved", 2), ("asked", 5), ("asked again", 7), ("asked at last", 9)):
                assert milestone not in told or len(predictor._engine.answered) >= count
            # It goes on: the next change and the next query work, and the folder opens again.
            predictor.add([99], *rows(1, seed=9))
            predictor.predict(QUERIES)
            expected = predictor.remaining()
        if died % 5 == 0:
            with IndKNNPredictor.open(folder) as predictor:
                np.testing.assert_array_equal(predictor.remaining()[1], expected[1])
        shutil.rmtree(folder)
    assert died > 60 / every


@needs_fork
def test_killed_while_answering_every_answer_was_paid_for(tmp_path):
    parameters = IndKNNParameters(0.4, 20.0, 2.0, 2.0)
    predictor = filled(parameters=parameters)
    predictor.save(tmp_path / "p")
    predictor.close()

    def answer(say):
        with IndKNNPredictor.open(tmp_path / "p", noise_source=SeededNoise(0)) as predictor:
            while True:
                say(len(predictor.predict(QUERIES[:1]).labels))

    with talking(answer) as (child, said):
        lines = [said.readline() for _ in range(30)]
        os.kill(child, signal.SIGKILL)
        lines += said.readlines()
    answered = sum(line == "1\n" for line in lines)
    assert answered >= 30
    literal = Literal(parameters, C)
    literal.add(np.arange(40), unit_rows(rows(40)[0]), rows(40)[1])
    after = []
    for query in range(answered + 1):
        draws = SeededNoise(0).stream("ind_knn", 2, query).normal((1, 1 + C), 1.0).numpy()[0]
        literal.predict(QUERIES[0], draws)
        after.append(np.array([literal.z[i] for i in range(40)]))
    with IndKNNPredictor.open(tmp_path / "p") as reopened:
        left = reopened.remaining()[1]
    # Paid for what was answered, and perhaps for one more that was under way.
    assert any(np.allclose(left, state, atol=1e-5) for state in after[-2:])


def test_nothing_comes_out_when_the_budgets_cannot_be_written(tmp_path, monkeypatch):
    predictor = filled(switches=IndKNNSwitches(reuse=True))
    predictor.save(tmp_path / "p")
    known = len(predictor._engine.answered)

    def full(self, kind, body):
        self.close()
        raise JournalError("no space left")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(JournalError, match="no space left"):
        predictor.predict(QUERIES)
    assert len(predictor._engine.answered) == known
    with pytest.raises(RuntimeError, match="broke off"):
        predictor.predict(QUERIES)
    monkeypatch.undo()
    predictor.close()
    with IndKNNPredictor.open(tmp_path / "p") as again:
        assert (again.remaining()[1] == PARAMETERS.budget).all()
