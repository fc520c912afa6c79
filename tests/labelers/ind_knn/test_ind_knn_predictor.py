"""The predictor: budgets under any order of changes, in a file that survives a crash and has no second copy."""

import copy
import itertools
import os
import pickle
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_privknn.labelers import IndKNNPredictor
from pl_privknn.labelers.ind_knn import IndKNNParameters, IndKNNSwitches, PublicDensity
from pl_privknn.labelers.ind_knn.algorithm import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy import sqlite_file
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import GaussianDPStream
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.private_state import FILE_NAME, PrivateStore, PrivateStoreError
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_literal import Literal
from tests.labelers.ind_knn.ind_knn_setup import (
    PARAMETERS,
    QUERIES,
    C,
    D,
    draws_of,
    filled,
    left_of,
    new,
    rows,
)
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import is_killed

RECORDS = rows(12, seed=7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sets(st.integers(0, 11), min_size=1)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 11), min_size=1)),
        st.tuples(st.just("predict"), st.lists(st.integers(0, 8), min_size=1, max_size=12)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(operations, st.sampled_from([0.002, 0.03, 0.5]), st.booleans())
def test_no_record_ever_spends_more_than_its_budget(steps, budget, reuse):
    parameters = IndKNNParameters(0.4, 4.0, 0.5, budget, min_count=3.0)
    predictor = new(parameters, switches=IndKNNSwitches(reuse=reuse))
    literal = Literal(parameters, C, reuse)
    present, calls = set(), 0
    for kind, what in steps:
        if kind == "add":
            ids = np.array(sorted(what - present), np.int64)
            predictor.add(ids, RECORDS[0][ids], RECORDS[1][ids])
            literal.add(ids, unit_rows(RECORDS[0][ids]), RECORDS[1][ids])
            present |= what
        elif kind == "remove":
            ids = np.array(sorted(what & present), np.int64)
            predictor.remove(ids)
            literal.remove(ids)
            present -= what
        else:
            answers = predictor.predict(QUERIES[what])
            draws = draws_of(SeededNoise(0).stream("ind_knn", -1, calls), len(what), C)
            for query, draw, label in zip(what, draws, answers.labels.tolist(), strict=True):
                assert label == literal.predict(QUERIES[query], draw)[0]
            calls += 1
        ids, left = predictor.remaining()
        assert set(ids.tolist()) == present
        assert (left >= 0).all()
        np.testing.assert_allclose(left, [literal.z[i] for i in ids.tolist()], atol=1e-5 * budget)
    # What the releases truly cost a record, over all its comings and goings.
    assert max(literal.cost.values(), default=0.0) <= budget * (1 + 1e-9)
    assert predictor.epsilon(1e-5) == new(parameters).epsilon(1e-5)


@pytest.mark.parametrize("hashing", [None, SignProjections(4, 3)])
def test_changes_leave_no_trace_in_later_answers(hashing):
    switches = IndKNNSwitches(hashing=hashing)
    features, labels = rows(60)
    direct, roundabout = new(switches=switches), new(switches=switches)
    direct.add(np.arange(30), features[:30], labels[:30])
    for part in torch.arange(60).split(7):
        roundabout.add(part.numpy(), features[part], labels[part])
    roundabout.remove(np.r_[45:60, 30])
    roundabout.remove(np.r_[31:45])
    assert torch.equal(direct.predict(QUERIES).labels, roundabout.predict(QUERIES).labels)
    for one, other in zip(direct.remaining(), roundabout.remaining(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    there = roundabout._engine.vectors
    roundabout.remove([0])
    assert float(there.abs().sum()) == 0  # wiped in memory


def test_images_need_an_extractor_and_a_ledger_is_charged_once():
    ledger, images = FreeLedger(), rows(20)[0].reshape(20, 1, 2, 3)
    predictor = new(extractor=torch.nn.Flatten(), ledger=ledger)
    predictor.add(np.arange(20), images, rows(20)[1])
    for _ in range(3):
        predictions = predictor.predict(images)
    assert [(row.mechanism, row.count) for row in ledger.rows] == [(GaussianDPStream(PARAMETERS.total.mu), 1)]
    torch.testing.assert_close(predictions.probabilities.sum(1), torch.ones(20))
    assert (predictions.counts >= 30).all()


def test_bad_arguments_show_no_record():
    predictor, one = filled(), torch.tensor([0])
    unready = filled(switches=IndKNNSwitches(density=PublicDensity(2, 40)))
    for message, call in {
        "some are in the table already": lambda: predictor.add([39, 40], *rows(2)),
        "some are not in the table": lambda: predictor.remove([40]),
        "ids: shape": lambda: predictor.add([50, 50], *rows(2)),
        "5 features; expected dimension=6": lambda: predictor.add([50], torch.ones(1, 5), one),
        "labels: some lie outside": lambda: predictor.add([50], torch.ones(1, D), one + 3),
        "queries: shape": lambda: predictor.predict(torch.ones(2, 5)),
        "no extractor": lambda: predictor.predict(rows(20)[0].reshape(20, 1, 2, 3)),
        "no public examples": lambda: unready.predict(QUERIES),
        "cannot pickle": lambda: copy.deepcopy(predictor),
        "cannot pickle.*": lambda: pickle.dumps(predictor),
    }.items():
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            call()
    assert len(predictor.predict(QUERIES).labels) == 9  # refused changes leave it in order
    assert "40" not in repr(predictor).partition(" at 0x")[0]


def test_threads_take_turns():
    predictor, alone = filled(), filled()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(predictor.predict, [QUERIES] * 8))
    for _ in range(8):
        alone.predict(QUERIES)
    assert left_of(predictor) == left_of(alone)


# ---------------------------------------------------------------- the file


def test_a_saved_predictor_goes_on_as_if_never_closed(tmp_path):
    switches = IndKNNSwitches(PublicDensity(8, 40), reuse=True, hashing=SignProjections(5, 2), abstain=0.1)
    predictor = filled(switches=switches)
    predictor.use_public(rows(30, seed=3)[0])
    predictor.predict(QUERIES)
    left = left_of(predictor)
    predictor.remove([4])
    predictor.save(tmp_path / "p")
    predictor.save(tmp_path / "p")
    with pytest.raises(ValueError, match="two copies would each spend the same budget"):
        predictor.save(tmp_path / "q")
    assert left_of(predictor) == {number: amount for number, amount in left.items() if number != 4}
    predictor.add([77], *rows(1, seed=2))
    predictor.predict(QUERIES)
    predictor.remove([6])
    expected, table = left_of(predictor), predictor._engine
    by_number, answered = np.argsort(table.ids), len(table.answered[1])
    with pytest.raises(PrivateStoreError, match="in use"):
        IndKNNPredictor.open(tmp_path / "p")
    predictor.close()
    with pytest.raises(PrivateStoreError, match="is closed"):
        predictor.predict(QUERIES)
    with IndKNNPredictor.open(tmp_path / "p", noise_source=SeededNoise(0)) as again:
        assert (again.switches, again.parameters) == (switches, PARAMETERS)
        assert left_of(again) == expected
        assert (len(again._engine.answered[1]), len(again._engine.reference)) == (answered, 30)
        np.testing.assert_array_equal(again._engine.vectors, table.vectors[by_number])
        np.testing.assert_array_equal(again._engine.labels, table.labels[by_number])
        again.add([4], *rows(1, seed=4))  # comes back with what it had left
        assert left_of(again)[4] == left[4] < PARAMETERS.rho
        assert len(again.predict(QUERIES).labels) == 9
    PrivateStore(tmp_path / "other" / FILE_NAME).close()
    for error, use, place in (
        (FileExistsError, filled().save, "p"),
        (FileNotFoundError, IndKNNPredictor.open, "nowhere"),
        (PrivateStoreError, IndKNNPredictor.open, "other"),  # which holds no predictor
    ):
        with pytest.raises(error):
            use(tmp_path / place)


def saved(folder, **settings):
    """What records have left in a predictor with a folder, closed after some answers."""
    with filled(**settings) as predictor:
        predictor.predict(QUERIES[:3])
        predictor.save(folder)
        predictor.predict(QUERIES[3:5])
        return left_of(predictor)


def reopened(folder, **settings):
    return IndKNNPredictor.open(folder, **{"noise_source": SeededNoise(0), **settings})


def test_an_older_copy_is_found_out_by_the_ledger(tmp_path):
    run, place = Ledger(tmp_path / "ledger.sqlite").run("users", []), tmp_path / "p" / FILE_NAME
    saved(tmp_path / "p", ledger=run)
    older = place.read_bytes()
    with reopened(tmp_path / "p", ledger=run) as predictor:
        predictor.predict(QUERIES[:1])
        left = left_of(predictor)
    latest = place.read_bytes()
    place.write_bytes(older)
    with pytest.raises(PrivateStoreError, match="an older copy of the budgets"):
        reopened(tmp_path / "p", ledger=run)
    place.write_bytes(latest)
    # Books of their own must show the stream, too; and answers that another folder gave are not this one's.
    other = Ledger(tmp_path / "other.sqlite").run("users", [])
    with reopened(tmp_path / "p", ledger=other) as predictor:
        assert left_of(predictor) == left
        predictor.predict(QUERIES[:1])
    assert other.ledger.report().charged == run.ledger.report().charged
    assert run.num_charges == 1
    saved(tmp_path / "q")
    with pytest.raises(PrivateStoreError, match="not hold the budgets from which run 'users' has answered"):
        reopened(tmp_path / "q", ledger=run)


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
    predictor.close()


def run_until(folder, log, event):
    """Run the scenario in a child that dies before or after its event-th statement of SQL; False if it didn't."""
    counter = 0

    class Dying:
        def __init__(self, db):
            self._db = db

        def __getattr__(self, name):
            found = getattr(self._db, name)

            def call(*given):
                nonlocal counter
                counter += 1
                if counter == event and counter % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = found(*[getattr(one, "_db", one) for one in given])
                if counter == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call if name in ("execute", "executemany", "executescript", "backup") else found

    def live():
        connected = sqlite_file.connected
        sqlite_file.connected = lambda *given: Dying(connected(*given))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        scenario(folder, lambda what, predictor: os.write(descriptor, f"{what}\n".encode()))

    return is_killed(live)


@needs_fork
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 11])
def test_killed_at_any_point_nothing_is_forgotten(tmp_path, every):
    # What each record has left at each milestone of a life without a crash; seeds are the same.
    milestones = {}
    scenario(tmp_path / "whole", lambda what, predictor: milestones.setdefault(what, left_of(predictor)))
    died = 0
    for event in itertools.count(1, every):
        folder, log = tmp_path / f"run{event}", tmp_path / f"log{event}"
        if not run_until(folder, log, event):
            break
        died += 1
        told = log.read_text().split("\n")[:-1]
        assert told == list(milestones)[: len(told)]
        if not told and not (folder / FILE_NAME).exists():
            continue  # died while saving: the predictor lived in memory only
        with reopened(folder) as predictor:
            left = left_of(predictor)
            last = milestones[told[-1] if told else "saved"]
            following = list(milestones)[min(max(len(told), 1), len(milestones) - 1)]
            assert set(left) in (set(last), set(milestones[following]))
            for number in set(left) & set(last):
                assert left[number] <= last[number]
            if "removed" in told:
                held = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
                assert unit_rows(LEAVING).numpy().tobytes() not in held
            for milestone, count in (("saved", 2), ("asked", 5), ("asked again", 7), ("asked at last", 9)):
                assert milestone not in told or len(predictor._engine.answered[1]) >= count
            # It goes on: the next change and the next query work, and the folder opens again.
            predictor.add([99], *rows(1, seed=9))
            predictor.predict(QUERIES)
            expected = left_of(predictor)
        with reopened(folder) as predictor:
            assert left_of(predictor) == expected
        shutil.rmtree(folder)
    assert died > 60 / every
