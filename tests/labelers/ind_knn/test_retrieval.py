"""Retrieval with a budget: neighbours pay for each vote, before anything is handed out."""

import importlib.util
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from pl_privknn.labelers import IndKNNPredictor
from pl_privknn.labelers.ind_knn import IndKNNParameters, IndKNNSwitches, PublicDensity, smoothed_votes
from pl_privknn.privacy import Budget, Gaussian
from pl_privknn.privacy.mechanisms import GaussianDPStream
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.private_store import FILE_NAME, PrivateStoreError
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_setup import PARAMETERS, QUERIES, ByNumber, C, filled, left_of, rows


def most(context):
    return int(np.bincount(context.labels, weights=context.similarities).argmax())


def test_neighbours_that_can_pay_are_found_nearest_first_and_pay_the_same():
    predictor, sigma = filled(), 2.0  # 1/4 of 0.2 is too much for any
    assert len(predictor.retrieve(QUERIES[0], sigma)) == 0
    predictor, sigma = filled(), 4.0  # 1/16: three times
    table = torch.nn.functional.normalize(rows(40)[0], dim=1)
    cosines = table @ torch.nn.functional.normalize(QUERIES[0], dim=0)
    expected = [i for i in cosines.argsort(descending=True).tolist() if cosines[i] >= PARAMETERS.threshold]
    for turn in range(4):
        found = predictor.retrieve(QUERIES[0], sigma)
        assert found.ids.tolist() == (expected if turn < 3 else [])
    found = filled().retrieve(QUERIES[0], sigma)
    np.testing.assert_allclose(found.similarities, cosines[expected], atol=1e-6)
    assert found.labels.tolist() == rows(40)[1][expected].tolist()
    left = left_of(predictor)
    assert all(left[i] == pytest.approx(0.2 - 3 / 16 * (i in expected)) for i in range(40))
    # Several queries pay one after another, as if they were asked so.
    together, apart = filled(), filled()
    found = together.retrieve(QUERIES, sigma)
    assert [one.ids.tolist() for one in found] == [apart.retrieve(q, sigma).ids.tolist() for q in QUERIES]
    assert left_of(together) == left_of(apart)


def test_default_noise_lets_budgets_last_for_the_stated_queries():
    parameters = IndKNNParameters.for_budget(
        Budget(epsilon=2.0), threshold=0.4, noise=Gaussian(0.5), num_queries=600
    )
    for switches, share in [(IndKNNSwitches(), 1 / 3), (IndKNNSwitches(PublicDensity(10, 200)), 0.05)]:
        predictor = filled(parameters=parameters, switches=switches)
        predictor.use_public(rows(30, seed=3)[0])
        before, found = left_of(predictor), predictor.retrieve(rows(40)[0][0])
        paid = before[found.ids[0]] - left_of(predictor)[found.ids[0]]
        assert paid * 600 * share == pytest.approx(parameters.rho, rel=1e-9)


def test_contexts_are_disjoint_and_asked_once():
    ledger, seen = FreeLedger(), []
    predictor = filled(ledger=ledger)
    found = predictor.retrieve(QUERIES[0], 4.0)
    found.vote(lambda context: seen.append(context) or 0, contexts=5)
    assert sorted(np.concatenate([context.ids for context in seen])) == sorted(found.ids)
    assert 1 < len(seen) <= 5
    for context in seen:
        assert (np.diff(context.similarities) <= 0).all()
        assert context.labels.tolist() == rows(40)[1][context.ids].tolist()
    with pytest.raises(RuntimeError, match="paid for one vote, which was released; retrieve again"):
        found.vote(most)
    predictor.predict(QUERIES[:2])  # predictions and retrievals are one entry
    assert [(row.mechanism, row.count) for row in ledger.rows] == [(GaussianDPStream(PARAMETERS.total.mu), 1)]


def test_no_answer_is_no_vote_and_a_failure_releases_nothing():
    predictor = filled(noise_source=ByNumber())
    for answer in (lambda _: None, lambda _: C, lambda _: -1, lambda _: "tech", lambda _: 1.0):
        found = predictor.retrieve(QUERIES[0], 100.0)
        found._noise = ByNumber(found.ids.tolist())
        assert found.vote(answer).noisy.tolist() == [0] * C
    found = predictor.retrieve(QUERIES[0], 100.0)
    found._noise = ByNumber(found.ids.tolist())
    with pytest.raises(ZeroDivisionError):
        found.vote(lambda _: 1 // 0)
    with pytest.raises(ValueError, match="contexts=0"):
        found.vote(most, contexts=0)
    released = found.vote(most, contexts=3)
    assert 1 <= int(released.noisy.sum()) <= 3
    assert released.label == int(released.noisy.argmax())


def test_charges_are_in_the_file_before_neighbours_are_handed_out(tmp_path):
    with filled() as predictor:
        predictor.save(tmp_path / "p")
        found = predictor.retrieve(QUERIES[0], 4.0)
        file = f"{(tmp_path / 'p' / FILE_NAME).as_uri()}?mode=ro"
        with sqlite3.connect(file, uri=True) as db:
            spent = dict(db.execute("SELECT id, spent FROM budgets WHERE spent > 0"))
        assert set(spent) == set(found.ids.tolist())
        left = left_of(predictor)
        predictor.remove([found.ids[0]])
        assert found.ids[0] not in predictor.retrieve(QUERIES[0], 4.0).ids
    with IndKNNPredictor.open(tmp_path / "p", noise_source=SeededNoise(0)) as predictor:
        predictor.add([found.ids[0]], *rows(1, seed=2))
        assert left_of(predictor)[found.ids[0]] == left[found.ids[0]] < PARAMETERS.rho
        with sqlite3.connect(file.replace("?mode=ro", ""), uri=True) as db:
            db.execute("DROP TABLE calls")
        with pytest.raises(PrivateStoreError):
            predictor.retrieve(QUERIES[0], 4.0)


def test_votes_have_the_stated_noise_and_are_smoothed_over_near_queries():
    # 3,000 numbers of deviation 4: their mean and deviation are within 5 standard errors (error rate below 1e-5).
    parameters, queries = IndKNNParameters(0.999999, 4.0, 0.5, 1e6), QUERIES[:1].repeat(1000, 1)
    nobody = filled(parameters=parameters, noise_source=SeededNoise(3)).retrieve(queries, 4.0)
    draws = np.concatenate([found.vote(most).noisy.numpy() for found in nobody])
    assert abs(draws.mean()) < 5 * 4 / np.sqrt(3000)
    assert abs(draws.std() - np.sqrt(16 + 1 / 12)) < 5 * 4 / np.sqrt(6000)
    released = [found.vote(most) for found in filled(noise_source=SeededNoise(1)).retrieve(QUERIES, 10.0)]
    noisy = torch.stack([one.noisy for one in released])
    unit = torch.nn.functional.normalize(QUERIES, dim=1)
    near = (unit @ unit.T).argsort(dim=1, descending=True)[:, :4]
    np.testing.assert_array_equal(smoothed_votes(QUERIES, released, 4), noisy[near].sum(dim=1))


def test_bad_queries_cost_nothing():
    predictor = filled()
    for query, sigma, message in [
        (QUERIES[0], 0.0, "sigma=0.0"),
        (QUERIES[0, :4], None, "queries: shape"),
        (QUERIES[0] * torch.nan, None, "queries: some are NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            predictor.retrieve(query, sigma)
    with pytest.raises(RuntimeError, match="no public examples"):
        filled(switches=IndKNNSwitches(density=PublicDensity(2, 40))).retrieve(QUERIES[0])
    assert list(left_of(predictor).values()) == pytest.approx([PARAMETERS.rho] * 40)
    assert "ids" not in repr(predictor.retrieve(QUERIES[0]))


@pytest.mark.long
def test_the_example_answers_from_private_articles(capsys):
    path = Path(__file__).parents[3] / "examples" / "private_retrieval.py"
    spec = importlib.util.spec_from_file_location("private_retrieval", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # 100 queries of five topics: two thirds are far above the 0.23 of the largest topic (error rate below 1e-9).
    accuracy = example.main(
        ["--articles=300", "--queries=100", "--neighbors=40", "--contexts=20", "--epsilon=16"]
    )
    assert accuracy > 0.66
    assert "100 queries to 200 private articles at ε = 16.00" in capsys.readouterr().out
