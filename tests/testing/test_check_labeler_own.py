"""The check of labelers with mechanisms, conditions and tables of their authors' own."""

import dataclasses
import doctest
import math
from typing import ClassVar

import broken_labelers as broken
import numpy as np
import pytest
import torch

from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, Conditional, Gaussian, Mechanism
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.testing import (
    FreeLedger,
    LabelerCheckError,
    Pair,
    Table,
    check_labeler,
    distance,
)
from pl_privknn.testing import check as check_module
from pl_privknn.testing import distances as distances_module
from pl_privknn.testing import watch as watch_module
from tests.testing import broken_answers


@dataclasses.dataclass(frozen=True)
class Uniform(Mechanism):
    """Noise that is as good as none, and states no sensitivity."""

    kind: ClassVar[str] = "uniform_of_a_test"
    width: float = 1.0

    def rdp(self, orders, adjacency):
        return np.full(len(orders), math.inf)

    def _draw(self, values, noise):
        return values + self.width * noise.uniform(tuple(values.shape))


class Blurred(broken.Honest):
    def __init__(self, mechanism):
        super().__init__()
        self.mechanism = mechanism

    def decide(self, asked, noise):
        return self.mechanism.draw(self.votes(asked, noise), noise).argmax(dim=1)


def test_a_mechanism_that_states_no_sensitivity_needs_a_distance():
    with pytest.raises(LabelerCheckError, match=r"can't look inside Uniform.*Register pl_privknn"):
        check_labeler(Blurred(Uniform()))


class Measured(Uniform):
    kind: ClassVar[str] = "measured_uniform_of_a_test"


@distance.register
def _(mechanism: Measured, first, second):
    return float((first - second).abs().amax()), mechanism.width, "largest change"


def test_a_distance_of_your_own_is_measured():
    report = check_labeler(Blurred(Measured(1.0)))
    move = report.largest["multiclass, add_remove"].moves["measured_uniform_of_a_test (largest change)"]
    assert move.amount == 1.0
    with pytest.raises(LabelerCheckError, match=r"by 1, and 0.5 was charged"):
        check_labeler(Blurred(Measured(0.5)))


class Assumes(broken_answers.SensitivityOne):
    """Charges less than it needs, and says under which condition that is enough."""

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        plan = super().plan(num_queries, max_answers, num_classes, rounds)
        return [Charge(Conditional(part.mechanism, "neighbours agree"), part.count) for part in plan]

    def charge_and_draw(self, ledger, mechanism, count, key):
        return super().charge_and_draw(ledger, Conditional(mechanism, "neighbours agree"), count, key)


def test_a_condition_is_reported_and_not_taken_for_a_fault():
    report = check_labeler(Assumes())
    assert "gaussian (L2) 1.414 of 1, covered only if neighbours agree" in str(report)


class Trap(broken.Honest):
    """A record at a certain place votes twice; no table of the check has one there."""

    def votes(self, queries, noise):
        votes = super().votes(queries, noise)
        return votes * 2 if bool((self._table[:, 0] == 77).any()) else votes


def test_tables_of_your_own_are_tried_too():
    check_labeler(Trap())
    table = Table("trap", torch.arange(20.0)[:, None].expand(-1, 6), torch.arange(20) % 3, torch.zeros(4, 6))
    other = table.with_other(19, torch.full((6,), 77.0), torch.tensor(0))
    pair = Pair("my own", other, other.without(19), "add_remove", 19)
    with pytest.raises(LabelerCheckError, match=r"tables my own.*moves gaussian \(L2\)"):
        check_labeler(Trap(), pairs=[pair])


# --- the ledger that costs nothing notes what a real one would ----------------------------------------------

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


@pytest.mark.parametrize("module", [check_module, distances_module, watch_module])
def test_examples_are_true(module):
    assert doctest.testmod(module).failed == 0
