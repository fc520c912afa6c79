"""What the rows of a ledger add up to, and the filter that guards a budget."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pl_privknn.privacy.ledger_store import LedgerCorrupt
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, check_adjacency


class Books:
    """Running totals over a ledger's rows, in their order."""

    def __init__(self) -> None:
        self.opened = False
        self.adjacency: Adjacency = "add_remove"
        self.delta = 0.0
        self.max_epsilon: float | None = None
        self.order = 2.0
        self.planned: dict[str, dict[Mechanism, int]] = {}
        self.charged: dict[str, dict[Mechanism, int]] = {}
        self.num_charges: dict[str, int] = {}
        self.num_plans = 0
        self.plan_was_first = True
        self.position = 0
        self.head = ""

    def copy(self) -> Books:
        """Independent books, to try a row on."""
        return copy.deepcopy(self)

    def apply(self, body: dict[str, Any]) -> None:
        """Take one verified row in.

        Raises:
            LedgerCorrupt: for a row that no ledger writes.
        """
        try:
            kind = body["kind"]
            if (kind == "open") == self.opened:
                raise ValueError("a ledger has one opening row, its first")
            if kind == "open":
                self.opened = True
                self.adjacency = check_adjacency(body["adjacency"])
                self.order = float(body["filter_order"])
                self.delta, self.max_epsilon = body["delta"], body["max_epsilon"]
            elif kind == "budget":
                self.delta, self.max_epsilon = body["delta"], body["max_epsilon"]
            elif kind == "plan":
                self.apply_plan(body["run"], _counts(_charge(record) for record in body["plan"]))
            elif kind == "charge":
                self.apply_charge(body["run"], _charge(body["charge"]))
            else:
                raise ValueError(f"kind={kind!r} is unknown")
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerCorrupt(
                f"row {body.get('position')} is not one that a ledger writes: {error}"
            ) from error

    def apply_plan(self, run_id: str, plan: dict[Mechanism, int]) -> None:
        """A run states its worst case."""
        self.plan_was_first &= not self.num_charges
        self.num_plans += 1
        self.planned[run_id] = plan

    def apply_charge(self, run_id: str, charge: Charge) -> None:
        """A run pays."""
        run = self.charged.setdefault(run_id, {})
        run[charge.mechanism] = run.get(charge.mechanism, 0) + charge.count
        self.num_charges[run_id] = self.num_charges.get(run_id, 0) + 1

    def run_ids(self) -> list[str]:
        """Runs in order of appearance."""
        return list({**self.planned, **self.charged})

    @property
    def planned_in_one_go(self) -> bool:
        """Whether all parameters were fixed, in one plan, before anything was released."""
        if self.num_plans > 1 or not self.plan_was_first:
            return False
        return all(
            count <= self.planned.get(run_id, {}).get(mechanism, 0)
            for run_id, run in self.charged.items()
            for mechanism, count in run.items()
        )

    def guarantee(self, run_id: str | None = None) -> list[Charge]:
        """For each run and mechanism the larger of planned and charged, added over runs."""
        total: dict[Mechanism, int] = {}
        for name in [run_id] if run_id is not None else self.run_ids():
            planned, charged = self.planned.get(name, {}), self.charged.get(name, {})
            for mechanism in {**planned, **charged}:
                count = max(planned.get(mechanism, 0), charged.get(mechanism, 0))
                total[mechanism] = total.get(mechanism, 0) + count
        return [Charge(mechanism, count) for mechanism, count in total.items()]

    def spent(self, run_id: str | None = None) -> list[Charge]:
        """What was charged, added over runs."""
        total: dict[Mechanism, int] = {}
        for name, run in self.charged.items():
            if run_id in (None, name):
                for mechanism, count in run.items():
                    total[mechanism] = total.get(mechanism, 0) + count
        return [Charge(mechanism, count) for mechanism, count in total.items()]


def filter_order(max_epsilon: float, delta: float) -> float:
    """The Rényi order at which a Gaussian mechanism that spends (ε, δ) exactly has its best conversion.

    It is fixed when a ledger is made: a filter that could choose its order after the fact is not covered by
    the proof.
    """
    orders = 1 + np.geomspace(1e-3, 1e4, 4000)
    conversion = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    # ε(α) = αρ for a Gaussian; the largest ρ that still fits the budget, over orders, names the order.
    return float(orders[np.argmax((max_epsilon - conversion) / orders)])


def filter_epsilon(charges: Sequence[Charge], order: float, delta: float, adjacency: Adjacency) -> float:
    """ε at ``delta`` of the charges' Rényi total at one order, improved conversion (Canonne et al. 2020)."""
    if not charges:
        return 0.0
    orders = np.array([order])
    total = sum(float(charge.mechanism.rdp(orders, adjacency)[0]) * charge.count for charge in charges)
    epsilon = total + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
    return max(0.0, epsilon)


def _charge(record: dict[str, Any]) -> Charge:
    return _read(json.dumps(record, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Charge:
    return Charge.from_record(json.loads(text))


def _counts(charges: Iterable[Charge]) -> dict[Mechanism, int]:
    counts: dict[Mechanism, int] = {}
    for charge in charges:
        counts[charge.mechanism] = counts.get(charge.mechanism, 0) + charge.count
    return counts
