"""Totals, budget and rules of the ledger. Its file is in test_ledger_store.py and test_ledger_processes.py."""

import math
import sqlite3

import pytest

from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.accountant import RenyiFilter, account, best_order
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace, NoisyScreening, RandomizedResponse
from pl_privknn.privacy.mechanisms.stated import Conditional
from tests.privacy.ledger.ledger_setup import PROTECTED

G = Gaussian(20.0)
S = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10, sampling_rate=0.2)


def epsilon(*charges, delta=1e-5):
    return account(charges, delta=delta, exact=False).epsilon


def conversion(order, delta=1e-5):
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


# ------------------------------------------------------------------ totals


def test_plan_is_the_guarantee_and_charges_are_what_was_spent(path):
    ledger = Ledger(path)
    assert ledger.report().epsilon == 0
    run = ledger.run("a", plan=[Charge(S, 100), Charge(G, 40)])
    assert ledger.report().epsilon == pytest.approx(epsilon(Charge(S, 100), Charge(G, 40)))
    assert ledger.report().epsilon_spent == 0
    first, second = run.charge(S, 60, **PROTECTED), run.charge(G, 10, **PROTECTED)
    assert (first, second) == (3, 4)  # after the opening row and the plan
    report = ledger.report()
    assert report.epsilon == pytest.approx(epsilon(Charge(S, 100), Charge(G, 40)))
    assert report.epsilon_spent == pytest.approx(epsilon(Charge(S, 60), Charge(G, 10)))
    assert set(report.guaranteed) == {Charge(S, 100), Charge(G, 40)}
    assert set(report.charged) == {Charge(S, 60), Charge(G, 10)}
    run.charge(G, 31, **PROTECTED)  # one beyond the plan, no budget: the guarantee grows
    assert ledger.report().epsilon == pytest.approx(epsilon(Charge(S, 100), Charge(G, 41)))
    assert run.num_charges == 3


def test_runs_compose_and_each_can_be_seen_alone(path):
    one, two = Ledger(path), Ledger(path)
    a, b = one.run("a", plan=[Charge(G, 40)]), two.run("b", plan=[Charge(G, 60)])
    a.charge(G, 40, **PROTECTED)
    b.charge(G, 10, **PROTECTED)
    assert one.report().epsilon == two.report().epsilon == pytest.approx(epsilon(Charge(G, 100)))
    assert one.report().epsilon_spent == pytest.approx(epsilon(Charge(G, 50)))
    assert b.epsilon == one.run_report("b").epsilon == pytest.approx(epsilon(Charge(G, 60)))
    assert b.epsilon_spent == pytest.approx(epsilon(Charge(G, 10)))
    assert one.runs == ["a", "b"]
    late = one.report(delta=1e-3)
    order = late.filter["order"]
    assert late.epsilon == pytest.approx(epsilon(Charge(G, 100), delta=1e-3))
    assert late.filter["epsilon"] == pytest.approx(100 * order / 800 + conversion(order, 1e-3))
    # The unused part of one run's plan does not pay for another run's overdraft.
    a.charge(G, 5, **PROTECTED)
    assert [(charge.mechanism, charge.count) for charge in one.report().guaranteed] == [(G, 105)]
    with pytest.raises(ValueError, match="run_id='c' is not in the ledger"):
        one.run_report("c")


def test_conditions_of_mechanisms_are_carried(path):
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(Conditional(G, "the partition was public"), 10)])
    report = run.report().guarantee
    assert (report.guarantee, ledger.report().guarantee.guarantee) == ("conditional", "conditional")
    assert "the partition was public" in report.reason
    assert report.epsilon == pytest.approx(epsilon(Charge(G, 10)))


# ------------------------------------------------------------------ budget


def test_budget_refuses_plans_and_charges_before_anything_is_written(path):
    budget = epsilon(Charge(G, 40)) * 1.0001
    ledger = Ledger(path, Budget(epsilon=budget))
    with pytest.raises(BudgetExceeded, match=r"41 × gaussian.* from 0 to .*of the budget") as raised:
        ledger.run("a", plan=[Charge(G, 41)])
    assert raised.value.epsilon == pytest.approx(epsilon(Charge(G, 41)))
    assert raised.value.budget == Budget(epsilon=budget)
    assert ledger.runs == []
    run = ledger.run("a", plan=[Charge(G, 40)])
    run.charge(G, 40, **PROTECTED)
    rows = ledger.report().rows
    with pytest.raises(BudgetExceeded, match=r"1 × gaussian.*nothing was drawn"):
        run.charge(G, 1, **PROTECTED)
    with pytest.raises(BudgetExceeded):
        ledger.run("b", plan=[Charge(Gaussian(1e3), 1)])  # however small: the filter is at its end
    ledger.run("c")  # asks for nothing
    assert ledger.report().rows == rows + 1
    assert ledger.within_budget()


def test_a_plan_may_be_admitted_by_the_exact_figure_alone(path):
    screening = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10)
    exact = account([Charge(screening, 50)], delta=1e-5).epsilon_exact
    budget = (exact + epsilon(Charge(screening, 50))) / 2
    ledger = Ledger(path, Budget(epsilon=budget))
    ledger.run("a", plan=[Charge(screening, 50)])
    assert ledger.report().epsilon > budget > ledger.report(exact=True).epsilon
    assert ledger.within_budget()


def test_plans_before_the_first_charge_are_composed_and_later_ones_filtered(path):
    # Composition admits 40 releases here; the filter, which is looser, would not.
    budget = epsilon(Charge(G, 40)) * 1.0001
    ledger = Ledger(path, Budget(epsilon=budget))
    a = ledger.run("a", plan=[Charge(G, 15)])
    ledger.run("b", plan=[Charge(G, 25)])
    a.charge(G, 15, **PROTECTED)
    report = ledger.report()
    assert report.filter["rule"] == "composition"
    assert report.filter["epsilon"] > budget > report.epsilon
    assert report.guarantee.guarantee == "unconditional"
    with pytest.raises(BudgetExceeded, match="filter"):
        ledger.run("c", plan=[Charge(Gaussian(1e4), 1)])


def test_filter_admits_exactly_what_its_closed_form_admits(path):
    ledger = Ledger(path, Budget(epsilon=1.0))
    run = ledger.run("a", plan=[Charge(G, 5)])
    run.charge(G, 5, **PROTECTED)
    order = ledger.report().filter["order"]
    # The Rényi divergence of n Gaussian releases at order α is nα/(2σ²).
    fits = math.floor((1.0 - conversion(order)) * 2 * 400 / order)
    assert fits > 6
    for number in range(5, fits):
        if number % 2:
            run.charge(G, 1, **PROTECTED)
        else:
            ledger.run(f"run {number}", plan=[Charge(G, 1)])
    with pytest.raises(BudgetExceeded, match="filter"):
        run.charge(G, 1, **PROTECTED)
    with pytest.raises(BudgetExceeded, match="filter"):
        ledger.run("one too many", plan=[Charge(G, 1)])
    report = ledger.report()
    assert report.filter["rule"] == "renyi filter"
    assert report.filter["epsilon"] == pytest.approx(fits * order / 800 + conversion(order))
    # It never admits more than the accountant, whose minimum runs over all orders.
    assert report.filter["epsilon"] >= report.epsilon
    assert len(report.filter["late_rows"]) == fits - 5


def admitted(run, mechanism, most=50):
    """Charges, one by one, until the first is refused."""
    for taken in range(most):
        try:
            run.charge(mechanism, **PROTECTED)
        except BudgetExceeded:
            return taken
    return most


@pytest.mark.parametrize("delta", [1e-12, 1e-6])
@pytest.mark.parametrize(
    ("mechanism", "fits"),
    [
        (Laplace(10.0), 10),
        (RandomizedResponse.for_epsilon(1 / 3), 3),  # whose losses add up to more than 1 by rounding
        (Laplace(10.0 * (1 - 1e-6)), 9),  # beyond the budget by more than rounding
    ],
)
def test_pure_releases_chosen_late_fit_while_their_sum_does(path, mechanism, fits, delta):
    ledger = Ledger(path, Budget(epsilon=1.0, delta=delta))
    assert admitted(ledger.run("a"), mechanism) == fits
    assert ledger.within_budget()
    assert ledger.report().epsilon <= 1 + 1e-12


def test_a_release_that_is_not_pure_leaves_pure_ones_to_the_order_alone(path):
    first, pure = Gaussian(40.0), Laplace(10.0)
    ledger = Ledger(path, Budget(epsilon=1.0, delta=1e-6))
    run = ledger.run("a")
    run.charge(first, **PROTECTED)
    order = ledger.report().filter["order"]
    # In closed form: order/(2σ²) of the Gaussian, and the Rényi divergence of Laplace noise (Mironov 2017, table II).
    grown, shrunk = order * math.exp((order - 1) / 10), (order - 1) * math.exp(-order / 10)
    each = math.log((grown + shrunk) / (2 * order - 1)) / (order - 1)
    fits = math.floor((1 - conversion(order, 1e-6) - order / 3200) / each)
    assert admitted(run, pure) == fits < 9


def test_after_pure_releases_beyond_the_order_no_other_release_fits(path):
    ledger = Ledger(path, Budget(epsilon=1.0, delta=1e-6))
    run = ledger.run("a")
    for _ in range(9):
        run.charge(Laplace(10.0), **PROTECTED)
    with pytest.raises(BudgetExceeded, match="filter"):
        run.charge(Gaussian(1e6), **PROTECTED)
    run.charge(Laplace(10.0), **PROTECTED)


def test_parameters_chosen_after_a_release_make_the_figure_conditional(path):
    ledger = Ledger(path, Budget(epsilon=2.0))
    a = ledger.run("a", plan=[Charge(G, 10)])
    a.charge(G, 10, **PROTECTED)
    assert ledger.report().guarantee.guarantee == "unconditional"
    b = ledger.run("b", plan=[Charge(G, 10)])
    report = ledger.report()
    assert report.filter["late_rows"] == [4]
    assert report.guarantee.guarantee == "conditional"
    assert "rows 4" in report.guarantee.reason
    assert "within ε = 2 at δ = 1e-05" in report.guarantee.reason
    assert report.epsilon == pytest.approx(epsilon(Charge(G, 20)))
    # The first run was planned before there was an answer; the other one carries its condition everywhere.
    assert a.report().guarantee.guarantee == "unconditional"
    assert b.report().guarantee.guarantee == "conditional"
    assert b.report().filter["late_rows"] == [4]


def test_without_a_plan_only_the_first_charge_was_chosen_blindly(path):
    run = Ledger(path).run("a")
    run.charge(G, 30, **PROTECTED)
    assert run.report().guarantee.guarantee == "unconditional"
    run.charge(G, 1, **PROTECTED)
    assert run.report().filter["late_rows"] == [4]
    assert run.report().guarantee.guarantee == "conditional"


def test_order_is_the_best_for_a_gaussian_that_spends_the_budget():
    order = best_order(1.0, 1e-5)
    best = (1.0 - conversion(order)) / order  # the α-coefficient B of the Rényi curve αB
    # Independent figure: RDP with the improved conversion admits B = 0.03056 for ε = 1, δ = 1e-5.
    assert best == pytest.approx(0.03056, abs=5e-6)
    # σ = 1/√(2B) spends the budget exactly, by the accountant's minimum over all orders.
    spends = account([Charge(Gaussian((2 * best) ** -0.5))], delta=1e-5, exact=False)
    assert spends.epsilon_rdp == pytest.approx(1.0, rel=1e-4)


def test_filter_is_the_accountants_rdp_at_one_order():
    charges = [Charge(S, 100), Charge(G, 20), Charge(Gaussian(30.0, sampling_rate=0.1), 50)]
    epsilons = [RenyiFilter(order, 1e-5, "add_remove").epsilon(charges) for order in range(2, 60)]
    by_accountant = account(charges, delta=1e-5, exact=False).epsilon_rdp
    assert min(epsilons) == pytest.approx(by_accountant, rel=2e-3)
    assert min(epsilons) >= by_accountant * (1 - 1e-9)
    assert RenyiFilter(8.0, 1e-5, "add_remove").epsilon([]) == 0


# ------------------------------------------------------------------ continuing


def test_same_plan_continues_and_another_is_refused(path):
    ledger = Ledger(path)
    ledger.run("a", plan=[Charge(G, 10)], description={"queries": 10})
    rows = ledger.report().rows
    for plan in ([Charge(G, 4), Charge(G, 6)], []):
        assert ledger.run("a", plan=plan).report().guaranteed == (Charge(G, 10),)
    assert Ledger(path).run("a", plan=[Charge(G, 10)]).num_charges == 0
    assert ledger.report().rows == rows
    for other in ([Charge(G, 11)], [Charge(G, 9)], [Charge(G, 9), Charge(S, 1)]):
        with pytest.raises(ValueError, match="another plan"):
            ledger.run("a", plan=other)
    assert ledger.report().rows == rows


def test_bad_input_charges_nothing(path):
    ledger, replaced = (
        Ledger(path, Budget(epsilon=1.0)),
        Ledger(path.with_name("r.sqlite"), Budget(adjacency="replace_one")),
    )
    run = ledger.run("a")
    other = path.with_name("other.sqlite")
    for call, named in (
        *((lambda count=count: run.charge(G, count, **PROTECTED), "count") for count in (0, -1, 1.5, True)),
        (lambda: run.charge("gaussian"), "mechanism='gaussian'"),
        *((lambda name=name: ledger.run(name), "run_id") for name in ("", 3)),
        *((lambda x=x: ledger.run("b", description={"x": x}), "description") for x in (math.nan, object())),
        *((lambda delta=delta: Ledger(other, Budget(delta=delta)), "delta") for delta in (0.0, 1.0)),
        *((lambda most=most: Ledger(other, Budget(epsilon=most)), "epsilon") for most in (0.0, math.inf)),
        (lambda: ledger.report(delta=2), "delta=2"),
        # Under replacement a sampled release has no cost.
        (lambda: replaced.run("a").charge(S), r"replace_one|add_remove"),
        (lambda: replaced.run("b", plan=[Charge(S, 5)]), "add_remove"),
        # What a ledger began with stays.
        (lambda: Ledger(path, Budget(epsilon=1.0, adjacency="replace_one")), "adjacency='replace_one'"),
        (lambda: Ledger(path, Budget(epsilon=2.0)), r"epsilon=2.*epsilon=1"),
        (lambda: Ledger(path), "epsilon=None"),
        (lambda: Ledger(path, Budget(epsilon=1.0, delta=1e-3)), r"delta=0\.001"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert not other.exists()
    assert (ledger.report().rows, replaced.report().charged) == (2, ())


def test_a_charge_is_on_disk_when_it_returns(path):
    run = Ledger(path).run("a", plan=[Charge(G, 3)])
    for expected in (3, 4, 5):
        position = run.charge(G, **PROTECTED)
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            assert db.execute("SELECT MAX(position) FROM rows").fetchone() == (position,) == (expected,)


def test_notes_are_durable_and_cost_nothing(path):
    ledger = Ledger(path, Budget(epsilon=1.0))
    run, other = ledger.run("a", plan=[Charge(G, 5)]), ledger.run("b", plan=[Charge(G, 7)])
    before = ledger.report()
    assert run.noted("state") is None
    for topic, text in (("state", "1:aa"), ("elsewhere", "x"), ("state", "2:bb"), ("state", "2:bb")):
        run.note(topic, text)  # the last was said already
    assert ledger.report().rows == before.rows + 3
    after = Ledger.open_readonly(path).report()
    assert (after.guarantee, after.charged, after.filter) == (before.guarantee, (), before.filter)
    assert (ledger.runs, run.num_charges) == (["a", "b"], 0)
    run.charge(G, 2, **PROTECTED)
    assert (run.charged(G), run.charged(Gaussian(21.0)), other.charged(G)) == (2, 0, 0)
    assert other.noted("state") == Ledger(path, Budget(epsilon=1.0)).run("b").noted("state") == "2:bb"
