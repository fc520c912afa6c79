"""Ind-KNN as a labeler: what it costs, what it answers, groups of records, and a fit."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.auditing import Target
from pl_privknn.config import as_section
from pl_privknn.labelers import IndKNN
from pl_privknn.labelers.base import stated_plan
from pl_privknn.labelers.ind_knn import IndKNNParameters, PublicDensity, RecordBudgets, Records
from pl_privknn.labelers.ind_knn.engine import unit_rows
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy import Budget, Gaussian
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, GaussianDPStream
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.privacy.record_budgets import CONVERSIONS, budget_for_epsilon
from pl_privknn.privacy.record_groups import RecordGroups
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_literal import Literal
from tests.labelers.ind_knn.ind_knn_setup import Draws, draws_of, engine_of, teacher
from tests.setup.refusals import refusals

# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_the_ledger_entry_is_the_stated_epsilon(conversion):
    labeler = teacher(epsilon=1.0, delta=1e-5, num_queries=600, conversion=conversion)
    parameters = labeler.parameters
    assert parameters.sigma1 == pytest.approx(math.sqrt(100 / parameters.rho))
    for queries, answers, rounds in [(1, 1, 1), (10**6, 5, 1), (100, 100, 7)]:
        (charge,) = labeler.plan(queries, answers, 10, rounds)
        assert charge == Charge(GaussianDPStream(math.sqrt(2 * parameters.rho)), 1)
    report = account([charge], delta=1e-5)
    if conversion == "gdp":
        assert 0.9999 < report.epsilon <= 1.0 + 1e-6
    else:
        shown = report.epsilon_rdp if conversion == "rdp" else report.epsilon_rdp_classic
        # The order of the RDP total lies on a grid, so its minimum is slightly above the stated ε.
        assert shown == pytest.approx(1.0, rel=2e-3)
        assert report.epsilon < 0.95


def data(count=60):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 3


def fitted(count=60, **settings):
    labeler = teacher(**{"threshold": 0.3, "epsilon": 2.0, "num_queries": 50, **settings})
    labeler.fit(*data(count), 3)
    return labeler


def test_one_entry_for_all_calls_of_a_ledger():
    labeler, ledgers = fitted(), [FreeLedger(), FreeLedger()]
    for size, ledger in ((5, 0), (1, 0), (60, 0), (2, 1)):
        labeler.label(torch.randn(size, 4), ledgers[ledger])
    # Another run's books must show the stream too.
    assert ledgers[0].rows == ledgers[1].rows == stated_plan(labeler, 66, 66, 3)
    refusing = fitted()
    start = refusing.remaining()
    with pytest.raises(BudgetExceeded):
        refusing.label(torch.randn(5, 4), FreeLedger(limit=0))
    np.testing.assert_array_equal(refusing.remaining(), start)


def test_earlier_answers_serve_as_long_as_the_features_stay():
    labeler = fitted(reuse=True, ids=range(60))
    labeler.label(torch.randn(30, 4), FreeLedger())
    left = labeler.remaining()
    for features, kept in ((data()[0], 30), (torch.randn(60, 9), 0)):
        labeler.fit(features, torch.arange(60) % 3, 3)
        assert len(labeler._engine.answered[1]) == kept
        np.testing.assert_array_equal(labeler.remaining(), left)  # whatever their features


def test_a_new_process_without_a_folder_pays_again(tmp_path):
    plan = fitted().plan(40, 40, 3)
    with_room = Ledger(tmp_path / "a.sqlite", Budget(delta=1e-5)).run("run", plan)
    for _ in range(2):  # the second one stands for the resumed process
        fitted().label(torch.randn(10, 4), with_room)
    assert with_room.num_charges == 2
    one_stream = Ledger(tmp_path / "b.sqlite", Budget(epsilon=2.0, delta=1e-5)).run("run", plan)
    fitted().label(torch.randn(10, 4), one_stream)
    with pytest.raises(BudgetExceeded):
        fitted().label(torch.randn(10, 4), one_stream)


@pytest.mark.parametrize("in_a_folder", [True, False])
def test_a_stream_keeps_to_the_kind_of_noise_that_the_ledger_says_of_it(tmp_path, in_a_folder):
    """Its one entry holds for all answers: a seed that joins later would be seen nowhere."""
    sources = (SystemNoise(), SeededNoise(7))
    for number, (begun, other) in enumerate((sources, sources[::-1])):
        settings = {"state_dir": tmp_path / f"{number}"} if in_a_folder else {}
        ledger = Ledger(tmp_path / f"{number}.sqlite", Budget(delta=1e-5))
        plan = stated_plan(fitted(noise_source=begun), 60, 60, 3)
        labeler = fitted(noise_source=begun, **settings)
        labeler.label(torch.randn(1, 4), ledger.run("run", plan))
        if in_a_folder:
            labeler.close()
            labeler = fitted(noise_source=other, **settings)
        labeler.noise_source = other
        left = labeler.remaining()
        for run in (ledger.run("run", plan), ledger.run("another"), FreeLedger()):
            with pytest.raises(
                ValueError, match=r"noise_source: .* came from .*would now come from .*start a new run"
            ):
                labeler.label(torch.randn(30, 4), run)
        np.testing.assert_array_equal(labeler.remaining(), left)
        assert sum(charge.count for charge in ledger.report().charged) == 1
        labeler.noise_source = begun
        labeler.label(torch.randn(1, 4), ledger.run("run", plan))
        assert ledger.report().guarantee.guarantee == ("none" if number else "unconditional")
        labeler.close()


# ---------------------------------------------------------------- answers


def test_soft_answers_caps_and_held_back_answers():
    labeler = fitted(soft=True, abstain=1.0)
    release = labeler.label(torch.randn(40, 4), FreeLedger(), max_answers=25)
    assert (release.labels[25:] == -1).all()
    assert 0 < release.answered.sum() < 25
    torch.testing.assert_close(release.soft.sum(dim=1), torch.ones(40))
    assert torch.equal(release.soft.argmax(1)[release.answered], release.labels[release.answered])
    everything = fitted().label(torch.randn(40, 4), FreeLedger())
    assert everything.soft is None
    assert everything.answered.all()
    # A margin of m deviations is passed by noise alone with about the normal probability.
    engine = engine_of(IndKNNParameters(0.5, 5.0, 1.0, 1.0), 3, num_classes=2, abstain=2.0)
    held = (engine.answer(torch.ones(5000, 3), SeededNoise(0), FreeLedger()).labels == -1).mean()
    assert held == pytest.approx(1 - 2 * stats.norm.sf(2.0), abs=0.012)  # four standard errors


def test_thresholds_follow_public_density_alone():
    generator = torch.Generator().manual_seed(0)
    # A dense and a sparse region: a fixed threshold can't suit both.
    spread = torch.where(torch.arange(3000) % 2 == 0, 0.1, 1.0)[:, None]
    centre = torch.where(torch.arange(3000)[:, None] % 2 == 0, torch.eye(8)[0], -torch.eye(8)[0])
    rows = centre + spread * torch.randn(3000, 8, generator=generator)
    private, public, queries = rows[:2000], rows[2000:2600], rows[2600:]
    density, near = (
        PublicDensity(neighbors=40, private_records=2000),
        unit_rows(queries) @ unit_rows(private).T,
    )
    parameters = IndKNNParameters(0.01, 10.0, 0.5, 1.0)
    thresholds = density.thresholds(parameters, (unit_rows(queries) @ unit_rows(public).T).numpy())
    sizes = (near >= torch.tensor(thresholds)[:, None]).sum(1).double()
    assert 35 < sizes.mean() < 50
    for half in (sizes[::2], sizes[1::2]):
        assert 30 < half.median() < 55
    labeler = teacher(0.01, epsilon=1.0, density=density)
    labeler.use_public(public)
    labeler.fit(private, torch.arange(2000) % 3, 3)
    np.testing.assert_allclose(labeler._engine._thresholds(unit_rows(queries)), thresholds, rtol=1e-6)
    # Without public examples the queries so far take their place; a query is not its own neighbour.
    alone = teacher(0.01, epsilon=1.0, density=density)
    alone.fit(private, torch.arange(2000) % 3, 3)
    alone.label(queries, FreeLedger())
    assert torch.equal(alone._engine.reference, unit_rows(queries))
    sizes = (near >= torch.tensor(alone._engine._thresholds(unit_rows(queries)))[:, None]).sum(1).double()
    assert 35 < sizes.mean() < 60
    labeler.fit(torch.randn(2000, 5), torch.arange(2000) % 3, 3)
    assert len(labeler._engine.reference) == 0  # other features: those examples can't serve any more


@pytest.mark.parametrize("hashing", [None, SignProjections(6, 3)])
def test_only_a_table_that_nobody_else_looks_at_is_overwritten(hashing):
    answers = []
    for owned, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.float64)):
        labeler, (features, labels) = teacher(0.3, epsilon=2.0, hashing=hashing), data(3000)
        features[7] = 0
        features = features.to(dtype)
        before, overwritten, labeler.owns_table = features.clone(), owned and dtype == torch.float32, owned
        labeler.fit(features, labels, 3)
        assert torch.equal(features, unit_rows(before) if overwritten else before)
        assert (labeler._engine.vectors.data_ptr() == features.data_ptr()) == overwritten
        queries = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
        answers.append([*labeler.label(queries, FreeLedger()).labels, *labeler.remaining()])
    assert answers[0] == answers[1] == answers[2]


def asked(shape, value=0.0):
    return lambda: fitted().label(torch.full(shape, value), FreeLedger())


GOOD = {"threshold": 0.5, "epsilon": 1.0}
WRONG = [
    ("threshold", 0.0), ("threshold", 1.0), ("epsilon", 0.0), ("delta", 1.0),
    ("num_queries", 0), ("kernel", "linear"), ("bandwidth", 0.0), ("min_count", 0.0), ("abstain", -1.0),
    ("conversion", "zcdp"),
]  # fmt: skip
test_bad_arguments_are_named = refusals(
    {
        **{
            f"{name}={value!r}".replace(".", r"\."): functools.partial(teacher, **{**GOOD, name: value})
            for name, value in WRONG
        },
        r"sigma=0\.0": lambda: teacher(sigma2=0.0, epsilon=1.0),
        r"sigma=-1\.0": lambda: teacher(sigma1=-1.0, epsilon=1.0),
        "no noise is set": lambda: teacher().parameters,
        "give exactly one": lambda: teacher(epsilon=1.0, rho=0.1),
        "neighbors=5": lambda: PublicDensity(5, 4),
        "call fit": lambda: teacher(**GOOD).label(torch.randn(2, 4), FreeLedger()),
        r"queries: shape \(2, 5\)": asked((2, 5)),
        "NaN": asked((2, 4), torch.nan),
    }
)


# ---------------------------------------------------------------- groups of records with an ε of their own

COUNT, EPSILONS, DELTA = 60, (0.5, 2.0), 1e-5
MEMBERS = torch.arange(COUNT) % 2
LIMITS = np.array([budget_for_epsilon(epsilon, DELTA) for epsilon in EPSILONS])[MEMBERS.numpy()]
ASKED = torch.rand(600, 4, generator=torch.Generator().manual_seed(2))


def grouped(members=MEMBERS, order=slice(None), epsilons=EPSILONS, ids=None, **settings):
    """A teacher of records in an order, by digests or by numbers."""
    given = {} if members is None else {"groups": RecordGroups(members, epsilons)}
    labeler = teacher(0.2, 1.0, delta=DELTA, ids=ids, **{"num_queries": 200, **given, **settings})
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.rand(COUNT, 4, generator=generator), torch.arange(COUNT) % 3
    try:
        labeler.fit(features[order], labels[order], 3)
    except ValueError:
        labeler.close()
        raise
    return labeler


def test_answers_are_those_of_the_algorithm_with_a_budget_for_each_record():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(COUNT, 4, generator=generator), torch.arange(COUNT).numpy() % 3
    queries = torch.randn(40, 4, generator=generator)
    parameters = IndKNNParameters(0.2, 4.0, 1.0, float(LIMITS.max()), min_count=5.0)
    engine = engine_of(parameters, 4, np.arange(COUNT), x, y, limits=LIMITS)
    literal = Literal(parameters, 3)
    literal.z = dict(enumerate(LIMITS))
    literal.add(range(COUNT), x, y)
    answers = engine.answer(queries, Draws(3), FreeLedger())
    draws = draws_of(Draws(3), 40, 3)
    for query, draw, label, noisy in zip(queries, draws, answers.labels, answers.noisy, strict=True):
        expected, votes, _ = literal.predict(query, draw)
        np.testing.assert_allclose(noisy, votes, atol=1e-5)
        assert label == expected
    np.testing.assert_allclose(LIMITS - engine.remaining(), list(literal.cost.values()), atol=1e-7)
    assert literal.clipped >= 5  # some have spent all that they may


def test_the_stream_costs_the_largest_and_each_record_at_most_its_own():
    labeler = grouped()
    plain = teacher(0.2, 1.0, epsilon=max(EPSILONS), delta=DELTA, num_queries=200)
    assert labeler.plan(10, 10, 3) == plain.plan(10, 10, 3)
    labeler.label(ASKED, FreeLedger())
    assert (labeler.remaining() >= 0).all()
    assert (labeler.remaining() < 0.1 * LIMITS).mean() > 0.8


@pytest.mark.parametrize("by_number", [True, False])
def test_every_record_keeps_its_group_once_something_was_answered(tmp_path, by_number):
    """Members in another order than the records, other ε, or no groups any more: a promise would be broken."""

    def go_on(members=MEMBERS, order=slice(None), **settings):
        ids = np.arange(COUNT)[order] if by_number else None
        labeler = grouped(members, order, ids=ids, state_dir=tmp_path / "state", **settings)
        before = labeler.remaining()
        labeler.label(ASKED[:4], FreeLedger())
        after = labeler.remaining()
        labeler.close()
        return before, after

    left = go_on()[1]
    order = torch.arange(COUNT).roll(1)
    for wrong in (
        {"members": 1 - MEMBERS},
        {"order": order},  # and the members as they were
        {"epsilons": (1.5, 2.0)},
        {"members": None, "epsilon": max(EPSILONS)},
    ):
        with pytest.raises(ValueError, match="groups: some private records are in another group than before"):
            go_on(**wrong)
    # Each keeps its group.
    np.testing.assert_array_equal(go_on(MEMBERS[order], order)[0], left[order.numpy()])


def test_groups_that_do_not_fit_are_refused(tmp_path):
    for words, call in {
        r"budget.epsilon=1.0: .* give exactly one": lambda: grouped(epsilon=1.0),
        r"epsilons: 0.5 does not pay for taking part in one query": lambda: grouped(num_queries=20),
        "members: must be one group a private record": lambda: grouped(MEMBERS[:-1]),
        "members: must be groups from 0 to 1": lambda: RecordGroups([0, 2], EPSILONS),
        r"members='nowhere.npy'": lambda: RecordGroups("nowhere.npy", EPSILONS),
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words) as refused:
            call()
        assert str(COUNT) not in str(refused.value)
    np.save(tmp_path / "members.npy", MEMBERS.numpy())
    assert torch.equal(RecordGroups(tmp_path / "members.npy", EPSILONS).members, MEMBERS)


def test_what_tells_records_apart_stands_in_no_configuration():
    listed = list(range(COUNT))
    noise = {"class_path": "pl_privknn.privacy.mechanisms.gaussian.Gaussian", "init_args": {"sigma": 1.0}}
    for records in (Records(ids=np.arange(COUNT)), Records(ids=listed), {"ids": listed}):
        noted, left_out = as_section(IndKNN(0.2, Gaussian(1.0), budget=Budget(epsilon=1.0), records=records))
        assert noted["init_args"] == {"threshold": 0.2, "noise": noise, "budget": {"epsilon": 1.0}}
        assert left_out == ["records"]
    budgets = RecordBudgets(groups=RecordGroups(MEMBERS, EPSILONS))
    noted, left_out = as_section(IndKNN(0.2, Gaussian(1.0), num_queries=200, record_budgets=budgets))
    assert "record_budgets.groups" in left_out
    assert "members" not in str(noted)
    noted, left_out = as_section(
        IndKNN(0.2, Gaussian(1.0), budget=Budget(epsilon=1.0), records=Records(ids="numbers.npy"))
    )
    assert (noted["init_args"]["records"], left_out) == ({"ids": "numbers.npy"}, [])


def test_an_attack_is_on_what_the_ledger_promises():
    labeler = grouped()
    labeler.close()
    queries, plan = ASKED[:20], labeler.plan(20, 20, 3)
    labels, given = torch.zeros(20).long(), (3, 1, None, plan, DELTA, "add_remove")
    attacked = Target(labeler, queries, labels, queries, queries, *given).fitted(
        SeededNoise(0), queries[:7], labels[:7]
    )
    assert (attacked.groups, len(attacked.remaining())) == (None, 7)
    assert labeler.groups is not None
