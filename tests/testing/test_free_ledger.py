"""The ledger that costs nothing notes what a real one would."""

import doctest
import math

import pytest

from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.testing import FreeLedger, check, watch

G = Gaussian(3.0)


def test_charges_are_marked_as_in_a_real_ledger(tmp_path):
    for number, stated in enumerate(
        (
            {"noise": SystemNoise(), "adjacencies": ("add_remove",)},
            {"noise": SeededNoise(0), "adjacencies": ("add_remove", "replace_one")},
            {"noise": SystemNoise()},
            {"adjacencies": ("add_remove",)},
        )
    ):
        free, real = FreeLedger(), Ledger(tmp_path / f"{number}.sqlite")
        run = real.run("a", plan=[Charge(G, 7)])
        for count in (2, 5):
            free.charge(G, count, **stated)
            run.charge(G, count, **stated)
        assert [charge.count for charge in free.rows] == [2, 5]
        (total,) = real.report(exact=False).charged
        assert [row.guarantee for row in free.rows] == 2 * [total.guarantee]


def test_rows_go_on_from_the_start_and_stop_at_the_limit():
    ledger = FreeLedger(limit=2, start=7)
    assert [ledger.charge(G), ledger.charge(G, 3)] == [7, 8]
    with pytest.raises(BudgetExceeded, match="takes no more charges") as refused:
        ledger.charge(G)
    assert math.isnan(refused.value.epsilon)
    assert len(ledger.rows) == 2


def test_what_a_real_ledger_refuses_is_refused():
    for call, named in (
        (lambda: FreeLedger().charge(G, 0), "count"),
        (lambda: FreeLedger().charge(Charge(G)), "must be a Mechanism"),
        (lambda: FreeLedger(limit=-1), "limit=-1"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.parametrize("module", [check, watch])
def test_examples_are_true(module):
    assert doctest.testmod(module).failed == 0
