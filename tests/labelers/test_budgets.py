"""Teachers that set their noise from a budget: their own, or that of the run."""

import pytest
from torch import nn

from pl_privknn import ArraysDataModule, PrivateLabeler
from pl_privknn.callbacks import FullSelection
from pl_privknn.labelers import (
    IndKNN,
    LocalReverseKNN,
    NoisySGDTeacher,
    PreconditionedGradients,
    ReverseKNN,
    ShuffledReverseKNN,
    SufficientStatistics,
)
from pl_privknn.privacy import Budget, Gaussian, Ledger, account
from tests.setup.refusals import refusals
from tests.setup.small_fit import easy_images, quiet_trainer, small_student

BOTH, REPLACED, ADDED = ("add_remove", "replace_one"), ("replace_one",), ("add_remove",)
#: A teacher without noise, its adjacencies, the rounds in which it can be asked, and the share of ε that it spends.
TEACHERS = {
    "reverse knn": (lambda **given: ReverseKNN(2, **given), BOTH, 3, 0.0),
    "local": (LocalReverseKNN, REPLACED, 2, 0.0),
    "shuffled": (lambda **given: ShuffledReverseKNN(num_clients=300, **given), REPLACED, 2, 0.0),
    "shares": (
        lambda **given: ShuffledReverseKNN(num_clients=300, randomizer="shares", **given), REPLACED, 2, 0.0,
    ),
    "sgd": (lambda **given: NoisySGDTeacher(0.05, 50, 40, **given), ADDED, 3, 0.99),
    "sums": (SufficientStatistics, BOTH, 1, 0.99),
    "gradients": (lambda **given: PreconditionedGradients(releases=4, **given), BOTH, 1, 0.99),
    "centred": (lambda **given: SufficientStatistics(centre_share=0.3, **given), BOTH, 1, 0.99),
    "ind knn": (lambda **given: IndKNN(0.5, Gaussian(1.0), **given), ADDED, 3, 0.99),
    "ind knn, rdp": (
        lambda **given: IndKNN(0.5, Gaussian(1.0), record_budgets={"conversion": "rdp"}, **given), ADDED, 3, 0.8,
    ),
}  # fmt: skip
CASES = [
    (name, adjacency, rounds)
    for name, (_, adjacencies, most, _) in TEACHERS.items()
    for adjacency in adjacencies
    for rounds in ((1, most) if most == 3 else (most,))
]


def labeling(teacher, budget, rounds=1):
    return PrivateLabeler(teacher, rounds=rounds, queries_per_round=30, budget=budget, features=nn.Flatten())


@pytest.mark.parametrize(("name", "adjacency", "rounds"), CASES)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (8.0, 1e-3)])
def test_the_noise_of_a_budget_keeps_its_ledger(tmp_path, name, adjacency, rounds, epsilon, delta):
    make, _, _, share = TEACHERS[name]
    budget = Budget(epsilon, delta, adjacency)
    handed, own = make(), make(budget=budget)
    for teacher, of_run in ((handed, budget), (own, Budget(delta=delta, adjacency=adjacency))):
        labeling(teacher, of_run, rounds)
        plan = teacher.plan(30 * rounds, 30 * rounds, 5, rounds)
        found = account(plan, delta=delta, adjacency=adjacency)
        assert share * epsilon <= found.epsilon <= epsilon * (1 + 1e-12)  # rounding, as the ledger allows
    Ledger(tmp_path / "ledger.sqlite", budget).run("a", plan=plan)  # refused where it costs more
    assert handed.plan(9, 9, 5, rounds) == own.plan(9, 9, 5, rounds)


@pytest.mark.parametrize("name", TEACHERS)
def test_the_budget_of_a_teacher_has_precedence_over_that_of_its_run(name):
    make, (*_, adjacency), *_ = TEACHERS[name]
    small, large = Budget(0.5, adjacency=adjacency), Budget(4.0, adjacency=adjacency)
    teacher, alone = make(budget=small), make(budget=small)
    labeling(teacher, large)
    assert teacher.plan(30, 30, 5) == alone.plan(30, 30, 5)
    waiting = make()
    labeling(waiting, large)
    assert account(waiting.plan(30, 30, 5), delta=1e-5, adjacency=adjacency, exact=False).epsilon > 0.5


test_budgets_that_do_not_fit_are_refused = refusals(
    {
        r"budget.epsilon=None: ReverseKNN has no noise": lambda: labeling(ReverseKNN(), Budget()),
        r"SufficientStatistics: no noise is set": lambda: SufficientStatistics().plan(5, 5, 3),
        r"budget.epsilon=None: .* give exactly one": lambda: ReverseKNN(budget=Budget(delta=1e-6)),
        r"budget.epsilon=1.0: .* give exactly one": lambda: NoisySGDTeacher(
            budget=Budget(1.0), noise_multiplier=2.0
        ),
        r"adjacency='replace_one' is not among those of NoisySGDTeacher": lambda: labeling(
            NoisySGDTeacher(), Budget(1.0, adjacency="replace_one")
        ),
        r"adjacency='add_remove' is not among those of ReverseKNN": lambda: labeling(
            ReverseKNN(budget=Budget(1.0, adjacency="replace_one")), Budget()
        ),
        r"budget.adjacency='add_remove': senders": lambda: labeling(LocalReverseKNN(), Budget(1.0)),
        r"budget.unit='person' of IndKNN, but the run's is 'record'": lambda: labeling(
            IndKNN(0.5, Gaussian(1.0), Budget(1.0, unit="person")), Budget()
        ),
        r"budget.adjacency='replace_one' is not among those of NoisySGDTeacher": lambda: NoisySGDTeacher(
            budget=Budget(1.0, adjacency="replace_one")
        ),
        r"budget.adjacency='replace_one': Ind-KNN": lambda: IndKNN(
            0.5, Gaussian(1.0), Budget(1.0, adjacency="replace_one")
        ),
        r"budget.epsilon=1.0: IndKNN .* give exactly one": lambda: IndKNN(
            0.5, Gaussian(1.0), Budget(1.0), record_budgets={"rho": 0.1}
        ),
        r"budget=3 must be a group": lambda: SufficientStatistics(budget=3),
    }
)


def test_rounds_that_ask_about_everything_count_whatever_the_number_of_queries():
    teacher = ReverseKNN()
    everything = {"queries_per_round": [5, 0], "selection": FullSelection()}
    PrivateLabeler(teacher, rounds=2, budget=Budget(1.0), features=nn.Flatten(), **everything)
    assert account(teacher.plan(60, 60, 5, 2), delta=1e-5, exact=False).epsilon <= 1.0


def test_each_run_of_a_shared_teacher_has_its_own_noise(tmp_path):
    teacher = ReverseKNN()
    given = {
        "queries_per_round": 30,
        "epochs_per_round": 1,
        "features": nn.Flatten(),
        "options": {"progress": False},
    }
    first = PrivateLabeler(teacher, budget=Budget(4.0), run_dir=tmp_path / "run", **given)
    PrivateLabeler(teacher, budget=Budget(1.0), **given)
    data = ArraysDataModule(*easy_images(300, 60, 30), num_classes=3, batch_size=16)
    quiet_trainer(tmp_path, callbacks=[first]).fit(small_student(), data)
    assert first.epsilon == pytest.approx(4.0, rel=1e-3)
