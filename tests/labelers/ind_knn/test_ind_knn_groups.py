"""Groups of records with an ε of their own: nobody spends more than the budget of its group."""

import numpy as np
import pytest
import torch
from grouped import grouped
from ind_knn_literal import Literal

from pl_privknn.auditing import Target
from pl_privknn.config import as_section
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.prediction import IndKNNEngine, IndKNNSwitches
from pl_privknn.labelers.ind_knn.settings import RecordBudgets, Records
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.per_record.budgets import budget_for_epsilon
from pl_privknn.privacy.per_record.filter import IndividualFilter
from pl_privknn.privacy.record_groups import RecordGroups
from pl_privknn.testing import FreeLedger

COUNT, CLASSES, EPSILONS, DELTA = 60, 3, (0.5, 2.0), 1e-5
MEMBERS = torch.arange(COUNT) % 2
BUDGETS = np.array([budget_for_epsilon(epsilon, DELTA) for epsilon in EPSILONS])


def made(members=MEMBERS, state_dir=None, **settings):
    groups = RecordGroups(members, EPSILONS)
    labeler = IndKNN(
        **grouped(
            IndKNN,
            **{"threshold": 0.2, "sigma2": 1.0, "delta": DELTA, "num_queries": 200, **settings},
            budgets=RecordBudgets(groups=groups),
            records=Records(ids=np.arange(COUNT), state_dir=state_dir),
            noise_source=SeededNoise(0),
        )
    )
    generator = torch.Generator().manual_seed(0)
    labeler.fit(
        torch.rand(COUNT, 4, generator=generator), torch.randint(0, CLASSES, (COUNT,), generator=generator), 3
    )
    return labeler


def spent(labeler):
    return labeler.parameters.budget - labeler.remaining()


def test_answers_are_those_of_the_algorithm_with_a_budget_for_each_record():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(COUNT, 4, generator=generator), (torch.arange(COUNT) % CLASSES).numpy()
    queries = torch.randn(40, 4, generator=generator)
    parameters = IndKNNParameters(0.2, 4.0, 1.0, float(BUDGETS.max()), min_count=5.0)
    engine = IndKNNEngine(parameters, IndKNNSwitches(), CLASSES, 4, IndividualFilter(parameters.budget))
    limits = BUDGETS[MEMBERS.numpy()]
    engine.add(np.arange(COUNT), x, y, limits)
    literal = Literal(parameters, CLASSES)
    literal.z = dict(enumerate(limits))
    literal.add(range(COUNT), x, y)
    answers = engine.answer(queries, SeededNoise(3))
    draws = SeededNoise(3).normal((40, 1 + CLASSES), 1.0).numpy()
    for query, (label, noisy) in enumerate(zip(answers.labels, answers.noisy, strict=True)):
        expected, votes, _ = literal.predict(queries[query], draws[query])
        np.testing.assert_allclose(noisy, votes, atol=1e-5)
        assert label == expected
    left = engine.budgets.remaining(np.arange(COUNT))
    assert (parameters.budget - left <= limits).all()
    np.testing.assert_allclose(parameters.budget - left, [literal.cost[i] for i in range(COUNT)], atol=1e-7)
    assert literal.clipped >= 5  # some have spent all that they may


def test_the_stream_costs_the_largest_and_each_record_at_most_its_own():
    labeler = made()
    plain = IndKNN(0.2, 1.0, epsilon=max(EPSILONS), delta=DELTA, num_queries=200)
    assert labeler.plan(10, 10, CLASSES) == plain.plan(10, 10, CLASSES)
    labeler.label(torch.rand(600, 4, generator=torch.Generator().manual_seed(2)), FreeLedger())
    limits = BUDGETS[MEMBERS.numpy()]
    assert (spent(labeler) <= limits).all()
    assert (spent(labeler) > 0.9 * limits).mean() > 0.9


def test_a_resumed_stream_goes_on_with_what_each_record_has_left(tmp_path):
    queries = torch.rand(600, 4, generator=torch.Generator().manual_seed(2))
    first, ledger = made(state_dir=tmp_path / "state"), FreeLedger()
    first.label(queries[:5], ledger)
    before = spent(first)
    first.close()
    again = made(state_dir=tmp_path / "state")
    np.testing.assert_array_equal(spent(again), before)
    again.label(queries, ledger)
    assert (spent(again) <= BUDGETS[MEMBERS.numpy()]).all()
    assert (spent(again) > before).any()


@pytest.mark.parametrize("by_number", [True, False])
def test_every_record_keeps_its_group_once_something_was_answered(tmp_path, by_number):
    """Members in another order than the records, other ε, or no groups any more: a promise would be broken."""
    state = tmp_path / "state"

    def go_on(members=MEMBERS, order=slice(None), epsilons=EPSILONS, **settings):
        ids = np.arange(COUNT)[order] if by_number else None
        groups = None if members is None else RecordGroups(members, epsilons)
        labeler = IndKNN(
            0.2,
            1.0,
            **grouped(
                IndKNN,
                num_queries=200,
                delta=DELTA,
                noise_source=SeededNoise(0),
                budgets=RecordBudgets(groups=groups),
                records=Records(ids=ids, state_dir=state),
                **settings,
            ),
        )
        generator = torch.Generator().manual_seed(0)
        features, labels = torch.rand(COUNT, 4, generator=generator), torch.arange(COUNT) % CLASSES
        try:
            labeler.fit(features[order], labels[order], CLASSES)
            labeler.label(features[:4], FreeLedger())
        finally:
            labeler.close()

    go_on()
    noted = state / "limits.npz"
    assert noted.stat().st_mode & 0o77 == 0
    order = torch.arange(COUNT).roll(1)
    for wrong in (
        {"members": 1 - MEMBERS},
        {"order": order},  # and the members as they were
        {"epsilons": (1.5, 2.0)},
        {"members": None, "epsilon": max(EPSILONS)},
    ):
        with pytest.raises(ValueError, match="groups: some private records are in another group than before"):
            go_on(**wrong)
    go_on(MEMBERS[order], order)  # each keeps its group
    noted.unlink()
    with pytest.raises(ValueError, match="began without or with groups"):
        go_on()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"epsilon=1.0: groups have an ε of their own"):
        made(epsilon=1.0)
    with pytest.raises(ValueError, match=r"epsilons: 0.5 does not pay for taking part in one query"):
        made(num_queries=20)
    with pytest.raises(ValueError, match="members: must be one group a private record") as refused:
        made(MEMBERS[:-1])
    assert str(COUNT) not in str(refused.value)
    with pytest.raises(ValueError, match="members: must be groups from 0 to 1"):
        RecordGroups([0, 2], EPSILONS)
    with pytest.raises(FileNotFoundError, match=r"members='nowhere.npy'"):
        RecordGroups("nowhere.npy", EPSILONS)


def test_members_may_come_from_a_file(tmp_path):
    np.save(tmp_path / "members.npy", MEMBERS.numpy())
    assert torch.equal(RecordGroups(tmp_path / "members.npy", EPSILONS).members, MEMBERS)


def test_what_tells_records_apart_stands_in_no_configuration():
    for ids in (np.arange(COUNT), list(range(COUNT))):
        noted, left_out = as_section(IndKNN(0.2, 1.0, epsilon=1.0, records=Records(ids=ids)))
        assert (noted["init_args"], left_out) == (
            {"threshold": 0.2, "sigma2": 1.0, "epsilon": 1.0},
            ["records"],
        )
    noted, left_out = as_section(made())
    assert "budgets" in left_out
    assert "members" not in str(noted)
    noted, left_out = as_section(IndKNN(0.2, 1.0, epsilon=1.0, records=Records(ids="numbers.npy")))
    assert noted["init_args"]["records"] == {"ids": "numbers.npy"}
    assert not left_out


def test_an_attack_is_on_what_the_ledger_promises():
    labeler = made()
    labeler.close()
    queries = torch.rand(20, 4, generator=torch.Generator().manual_seed(2))
    plan = labeler.plan(20, 20, CLASSES)
    subject = Target(
        labeler, queries, torch.zeros(20).long(), queries, queries, 3, 1, None, plan, DELTA, "add_remove"
    )
    attacked = subject.fitted(SeededNoise(0), queries[:7], torch.zeros(7).long())
    assert (attacked.groups, len(attacked.remaining())) == (None, 7)
    assert labeler.groups is not None
