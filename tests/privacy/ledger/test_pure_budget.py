"""Sums of pure ε and a budget that they fill: the rounding of floats takes no release away and grants none."""

import contextlib

import pytest

from pl_privknn.privacy import Budget, BudgetExceeded, Laplace, Ledger
from pl_privknn.privacy.mechanisms import Charge, PureDP, RandomizedResponse

TENTH = {
    "stated": (PureDP(0.1), "add_remove"),
    "Laplace": (Laplace(10.0, 1.0), "add_remove"),
    "swapped votes": (Laplace(20.0, 2.0), "add_remove"),
    "randomised response": (RandomizedResponse.for_epsilon(0.1), "replace_one"),
}


@pytest.mark.parametrize("name", TENTH)
@pytest.mark.parametrize("how", ["charges", "plan", "runs"])
def test_ten_tenths_fit_and_the_eleventh_does_not(name, how, tmp_path):
    mechanism, adjacency = TENTH[name]
    path = tmp_path / "ledger.sqlite"
    with contextlib.closing(Ledger(path, Budget(epsilon=1.0, delta=1e-12, adjacency=adjacency))) as ledger:
        if how != "runs":
            run = ledger.run("only", plan=[Charge(mechanism, 10)] if how == "plan" else [])
        for number in range(10):
            if how == "runs":
                run = ledger.run(f"run {number}", plan=[Charge(mechanism)])
            run.charge(mechanism)
        with pytest.raises(BudgetExceeded, match="above epsilon=1"):
            run.charge(mechanism)
        with pytest.raises(BudgetExceeded, match="above epsilon=1"):
            ledger.run("one more", plan=[Charge(mechanism)])
        assert ledger.within_budget()
        assert ledger.report().epsilon == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("epsilon", "count"), [(0.2, 5), (0.3, 7), (0.7, 3), (1 / 3, 3), (0.01, 100)])
def test_other_sums_that_floats_round_fit_and_one_more_does_not(epsilon, count, tmp_path):
    mechanism = PureDP(epsilon)
    with contextlib.closing(
        Ledger(tmp_path / "ledger.sqlite", Budget(epsilon=round(epsilon * count, 9), delta=1e-290))
    ) as ledger:
        ledger.run("whole", plan=[Charge(mechanism, count)]).charge(mechanism, count)
        with pytest.raises(BudgetExceeded):
            ledger.run("one more", plan=[Charge(mechanism)])
