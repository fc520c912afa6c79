"""Ind-KNN's budgets of records and of persons: what one of them changes is what it pays, however many records."""

import math

import numpy as np
import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import IndKNNPredictor
from pl_privknn.labelers.ind_knn import IndKNNParameters, IndKNNSwitches
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_setup import C, D, Draws, draws_of, new, rows
from tests.labelers.ind_knn.ind_knn_setup import teacher as any_teacher

PARAMETERS = IndKNNParameters(0.2, 4.0, 1.5, 0.3, min_count=2.0)
#: A person with thousands of records has no more than one with one.
PERSONS = np.array([0, 1, 1, 2, 2, 2, *[3] * 9, 4, 5, 6, 6])


def table(seed):
    """A person's records lie near one another, so that together they would say more than one may."""
    generator, count = torch.Generator().manual_seed(seed), len(PERSONS)
    features = torch.randn(7, D, generator=generator)[PERSONS] + 0.4 * torch.randn(
        count, D, generator=generator
    )
    return features, torch.randint(C, (count,), generator=generator)


#: Who leaves, of whom budgets are, and how neighbours are found.
LEAVING = pytest.mark.parametrize("gone", [("person", 1), ("person", 3), ("person", 4), ("record", 7)])
SEARCHED = pytest.mark.parametrize(
    "switches", [IndKNNSwitches(), IndKNNSwitches(hashing=SignProjections(3, 2))]
)


def two_predictors(seed, gone, switches):
    """The same predictor with and without a person or a record, and the owner of each record's budget."""
    (unit, leaver), (features, labels) = gone, table(seed)
    owners, predictors = PERSONS if unit == "person" else np.arange(len(PERSONS)), []
    for kept in (owners >= 0, owners != leaver):
        predictors.append(new(PARAMETERS, unit=unit, switches=switches))
        rows = torch.from_numpy(np.flatnonzero(kept))
        predictors[-1].add(
            rows.numpy(), features[rows], labels[rows], *([owners[kept]] if unit == "person" else [])
        )
    return owners, predictors


@LEAVING
@SEARCHED
def test_nobody_changes_more_than_is_paid(gone, switches):
    """Gaussian releases of count and votes, at equal releases: Σ Δ²/(2σ²) against the leaver's budget."""
    for seed in range(6):
        engines = [made._engine for made in two_predictors(seed, gone, switches)[1]]
        generator = torch.Generator().manual_seed(seed + 50)
        queries = torch.nn.functional.normalize(torch.randn(20, D, generator=generator))
        noise, cost = np.random.default_rng(seed), 0.0
        for engine in engines:
            engine.begin(queries, np.full(20, PARAMETERS.threshold))
        for _ in queries:
            active = [engine.turn() for engine in engines]
            assert abs(active[0] - active[1]) <= 1
            count = max(active[0] + noise.normal(0, 4.0), PARAMETERS.min_count)
            votes = [engine.votes(count) for engine in engines]
            cost += (active[0] - active[1]) ** 2 / (2 * PARAMETERS.count_sigma**2)
            cost += ((votes[0] - votes[1]) ** 2).sum() / (2 * PARAMETERS.vote_sigma**2 * count)
            assert np.linalg.norm(votes[0] - votes[1]) <= 1 + 1e-6  # products of float32
        for engine in engines:
            engine.pay(engine.budgets.next_mark())
        left = [dict(zip(one.owners.tolist(), one.remaining().tolist(), strict=True)) for one in engines]
        assert cost <= (PARAMETERS.rho - left[0].pop(gone[1])) * (1 + 1e-6)  # κ is float32
        assert cost > 0
        assert left[0] == pytest.approx(left[1], abs=1e-6)


def literal(features, labels, queries, draws):
    """The algorithm, person by person, in plain float64."""
    p, unit = PARAMETERS, lambda rows: rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    x, left, answers = unit(features.double().numpy()), dict.fromkeys(PERSONS.tolist(), PARAMETERS.rho), []
    for query, draw in zip(unit(queries.double().numpy()), draws, strict=True):
        kappa = x @ query
        able = [
            z
            for z in left
            if left[z] >= 1 / (2 * p.count_sigma**2) and kappa[z == PERSONS].max() >= p.threshold
        ]
        count, votes = max(len(able) + p.count_sigma * draw[0], p.min_count), np.zeros(C)
        for z in able:
            part = np.zeros(C)
            for row in np.flatnonzero((z == PERSONS) & (kappa >= p.threshold)):
                part[labels[row]] += kappa[row]
            left[z] -= 1 / (2 * p.count_sigma**2)
            norm = np.linalg.norm(part)
            longest = min(norm, 1.0, p.vote_sigma * math.sqrt(2 * count * max(left[z], 0)))
            votes += part * longest / norm
            left[z] -= longest**2 / (2 * p.vote_sigma**2 * count)
        noisy = votes + p.vote_sigma * math.sqrt(count) * draw[1:]
        answers.append(int(noisy.argmax()))
    return answers, left


def test_answers_and_budgets_are_those_of_the_algorithm_person_by_person():
    features, labels = table(3)
    queries = torch.randn(8, D, generator=torch.Generator().manual_seed(9))
    predictor = new(PARAMETERS, unit="person", noise_source=Draws(0))
    predictor.add(range(len(PERSONS)), features, labels, PERSONS)
    draws = draws_of(Draws(0), 8, C)
    answers, left = literal(features, labels, queries, draws)
    assert predictor.predict(queries).labels.tolist() == answers
    np.testing.assert_allclose(predictor.remaining()[1], [left[z] for z in PERSONS.tolist()], atol=1e-6)
    assert min(left.values()) < 1 / 32 < max(left.values())  # some can not pay to be counted any more
    # The teacher of students is the same algorithm.
    labeler = any_teacher(0.2, 1.5, rho=0.3, count_sigma=4.0, min_count=2.0, noise_source=Draws(0))
    ledger = FreeLedger()
    labeler.fit(PrivateRecords.of(features, labels, C, owners=torch.from_numpy(PERSONS)))
    assert labeler.records.unit == "person"
    assert labeler.label(queries, ledger).labels.tolist() == answers
    np.testing.assert_allclose(labeler.remaining(), predictor.remaining()[1], atol=1e-9)


def test_the_ledger_the_file_and_messages_name_the_unit(tmp_path):
    run = Ledger(tmp_path / "ledger.sqlite", Budget(unit="person")).run("users", [])
    predictor = new(PARAMETERS, unit="person", ledger=run)
    predictor.add([1, 2, 3], *rows(3), persons=[7, 7, 8])
    predictor.predict(rows(2)[0])
    assert run.num_charges == 1
    predictor.save(tmp_path / "p")
    left = predictor.remaining()[1]
    assert left[0] == left[1]
    predictor.close()
    with IndKNNPredictor.open(tmp_path / "p", noise_source=SeededNoise(0), ledger=run) as again:
        assert again.unit == "person"
        again.remove([1, 2])
        again.add([9], *rows(1), persons=[7])  # who comes back comes back with what was left
        assert dict(zip(*again.remaining(), strict=True)) == {3: left[2], 9: left[0]}
        with pytest.raises(
            ValueError, match="persons: expected the person of each record where the unit is one"
        ):
            again.add([4], *rows(1))
        with pytest.raises(ValueError, match="some records have no owner"):
            again.add([4], *rows(1), persons=[-1])
