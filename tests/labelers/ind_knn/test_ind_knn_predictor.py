"""The predictor: budgets under any order of changes, one call at a time."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ind_knn_literal import Literal
from ind_knn_setup import PARAMETERS, QUERIES, C, D, filled, new, rows

from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn.prediction import IndKNNSwitches
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.ind_knn.private_table import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.mechanisms import FixedTotal
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

RECORDS = rows(12, seed=7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sets(st.integers(0, 11), min_size=1)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 11), min_size=1)),
        st.tuples(st.just("predict"), st.lists(st.integers(0, 8), min_size=1, max_size=12)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(operations, st.sampled_from([0.002, 0.03, 0.5]), st.booleans())
def test_no_record_ever_spends_more_than_its_budget(steps, budget, reuse):
    parameters = IndKNNParameters(0.4, 4.0, 0.5, budget, min_count=3.0)
    switches = IndKNNSwitches(reuse=reuse)
    predictor = new(parameters=parameters, switches=switches)
    literal = Literal(parameters, C, reuse)
    present, asked = set(), 0
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
            stream = SeededNoise(0).stream("ind_knn", 0, asked)
            draws = stream.normal((len(what), 1 + C), 1.0).numpy()
            for query, draw, label in zip(what, draws, answers.labels.tolist(), strict=True):
                assert label == literal.predict(QUERIES[query], draw)[0]
            asked += len(what)
        ids, left = predictor.remaining()
        assert set(ids.tolist()) == present
        assert (left >= 0).all()
        np.testing.assert_allclose(left, [literal.z[i] for i in ids.tolist()], atol=1e-5 * budget)
    # What the releases truly cost a record, over all its comings and goings.
    assert max(literal.cost.values(), default=0.0) <= budget * (1 + 1e-9)
    assert predictor.epsilon(1e-5) == new(parameters=parameters).epsilon(1e-5)


def test_a_record_that_comes_back_has_what_it_had_left():
    predictor = filled()
    predictor.predict(QUERIES)
    left = dict(zip(*predictor.remaining(), strict=True))
    predictor.remove([3, 5])
    assert len(predictor.remaining()[0]) == 38
    predictor.add([5, 100], *rows(2))
    now = dict(zip(*predictor.remaining(), strict=True))
    assert now[5] == left[5] < PARAMETERS.budget == now[100]


@pytest.mark.parametrize("hashing", [None, SignProjections(4, 3)])
def test_changes_leave_no_trace_in_later_answers(hashing):
    def answers(predictor):
        return predictor.predict(QUERIES).labels, predictor.remaining()

    switches = IndKNNSwitches(hashing=hashing)
    features, labels = rows(60)
    direct = new(switches=switches)
    direct.add(np.arange(30), features[:30], labels[:30])
    roundabout = new(switches=switches)
    for part in torch.arange(60).split(7):
        roundabout.add(part.numpy(), features[part], labels[part])
    roundabout.remove(np.r_[45:60, 30])
    roundabout.remove(np.r_[31:45])
    first, second = answers(direct), answers(roundabout)
    assert torch.equal(first[0], second[0])
    np.testing.assert_array_equal(first[1][0], second[1][0])
    np.testing.assert_allclose(first[1][1], second[1][1], rtol=1e-5)
    removed = roundabout._engine.table
    assert float(removed._vectors[len(removed) :].abs().sum()) == 0  # wiped in memory


def test_images_need_an_extractor_and_a_ledger_is_charged_once():
    ledger = FreeLedger()
    images = rows(20)[0].reshape(20, 1, 2, 3)
    predictor = IndKNNPredictor(PARAMETERS, C, D, extractor=torch.nn.Flatten(), ledger=ledger)
    predictor.add(np.arange(20), images, rows(20)[1])
    for _ in range(3):
        predictions = predictor.predict(images)
    assert [(row.mechanism, row.count) for row in ledger.rows] == [(FixedTotal(PARAMETERS.total.mu), 1)]
    torch.testing.assert_close(predictions.probabilities.sum(1), torch.ones(20))
    assert (predictions.counts >= 30).all()
    with pytest.raises(ValueError, match="no extractor"):
        new().predict(images)


def test_bad_arguments_show_no_record():
    predictor = filled()
    with pytest.raises(ValueError, match="some are in the table already"):
        predictor.add([39, 40], *rows(2))
    with pytest.raises(ValueError, match="some are not in the table"):
        predictor.remove([40])
    with pytest.raises(ValueError, match="ids: shape"):
        predictor.add([50, 50], *rows(2))
    with pytest.raises(ValueError, match=r"5 features; want dimension=6"):
        predictor.add([50], torch.ones(1, 5), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="labels: some lie outside"):
        predictor.add([50], torch.ones(1, D), torch.tensor([3]))
    with pytest.raises(ValueError, match="queries: shape"):
        predictor.predict(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="no public examples"):
        filled(switches=IndKNNSwitches(density=PublicDensity(2, 40))).predict(QUERIES)
    for forbidden in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied"):
            forbidden(predictor)
    assert len(predictor.predict(QUERIES).labels) == 9  # refused changes leave it in order
    assert "40" not in repr(predictor)


def test_threads_take_turns():
    predictor, seen = filled(), []
    workers = [
        threading.Thread(target=lambda: seen.extend(predictor.predict(QUERIES).labels.tolist()))
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(seen) == 72
    alone = filled()
    for _ in range(8):
        alone.predict(QUERIES)
    np.testing.assert_array_equal(predictor.remaining()[1], alone.remaining()[1])
