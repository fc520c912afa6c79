"""What the rows of a ledger add up to."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pl_privknn.privacy.ledger_store import GENESIS, LedgerCorrupt
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Mechanism, check_adjacency
from pl_privknn.privacy.renyi_filter import RenyiFilter

Counts = dict[Mechanism, int]


class RunBooks:
    """Totals of one run.

    Attributes:
        planned: the most that it stated, for each mechanism.
        charged: what it paid for.
        num_charges: number of its charges.
        late: positions of rows that raised its guarantee after its own first charge.
    """

    def __init__(self) -> None:
        self.planned: Counts = {}
        self.charged: Counts = {}
        self.num_charges = 0
        self.late: list[int] = []

    def guaranteed(self) -> Counts:
        """For each mechanism the larger of planned and charged."""
        return {
            mechanism: max(self.planned.get(mechanism, 0), self.charged.get(mechanism, 0))
            for mechanism in {**self.planned, **self.charged}
        }

    def unplanned(self, charge: Charge) -> int:
        """How many releases of ``charge`` would go beyond the guarantee so far."""
        after = self.charged.get(charge.mechanism, 0) + charge.count
        return max(0, after - self.guaranteed().get(charge.mechanism, 0))


class Books:
    """Running totals over a ledger's rows, in their order.

    Attributes:
        opened: whether the opening row was seen.
        adjacency: neighbouring relation of everything.
        delta: δ of the budget in force.
        max_epsilon: the budget in force; None for none.
        order: Rényi order of the filter.
        runs: the runs in order of appearance.
        late: positions of plans and charges that raised the guarantee after the ledger's first charge, so
            that whoever wrote them may have seen answers.
        late_budgets: positions of budget rows after the first charge.
        num_charges: number of charges of all runs.
        position: of the last row taken in.
        head: its hash.
    """

    def __init__(self) -> None:
        self.opened = False
        self.adjacency: Adjacency = "add_remove"
        self.delta = 0.0
        self.max_epsilon: float | None = None
        self.order = 2.0
        self.runs: dict[str, RunBooks] = {}
        self.late: list[int] = []
        self.late_budgets: list[int] = []
        self.num_charges = 0
        self.position = 0
        self.head = GENESIS

    @property
    def filter(self) -> RenyiFilter:
        """The filter of the budget in force."""
        return RenyiFilter(self.order, self.delta, self.adjacency)

    def apply(self, body: Mapping[str, Any]) -> None:
        """Take one verified row in.

        Raises:
            LedgerCorrupt: for a row that no ledger writes.
            ValueError: for a mechanism that is not known here; import what defines it.
        """
        try:
            kind, position = body["kind"], body["position"]
            if (kind == "open") == self.opened:
                raise ValueError("a ledger has one opening row, its first")
            if kind == "open":
                self.opened = True
                self.adjacency = check_adjacency(body["adjacency"])
                self.order = float(body["filter_order"])
                self.delta, self.max_epsilon = body["delta"], body["max_epsilon"]
            elif kind == "budget":
                self._apply_budget(position, body)
            elif kind == "plan":
                self._apply_plan(position, body["run"], merged(map(_charge, body["plan"])))
            elif kind == "charge":
                self._apply_charge(position, body["run"], _charge(body["charge"]))
            else:
                raise ValueError(f"kind={kind!r} is unknown")
            self.position, self.head = position, body["hash"]
        except _UnknownMechanism as error:
            raise ValueError(
                f"row {body.get('position')}: {error}; if a package of your own defines it, import that first"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerCorrupt(
                f"row {body.get('position')} is not one that a ledger writes: {error}"
            ) from error

    def run(self, run_id: str) -> RunBooks:
        """Totals of a run; empty ones if it is not known."""
        return self.runs.get(run_id, RunBooks())

    def guarantee(self, changes: Mapping[str, Counts] | None = None) -> list[Charge]:
        """For each run and mechanism the larger of planned and charged, added over runs.

        Args:
            changes: what some runs would guarantee instead, to try a plan or charge on.
        """
        parts = {name: run.guaranteed() for name, run in self.runs.items()} | dict(changes or {})
        return charges_of(*parts.values())

    def spent(self) -> list[Charge]:
        """What was charged, added over runs."""
        return charges_of(*(run.charged for run in self.runs.values()))

    def _apply_budget(self, position: int, body: Mapping[str, Any]) -> None:
        self.delta, self.max_epsilon = body["delta"], body["max_epsilon"]
        if self.num_charges:  # the filter's order is fixed with the first release
            self.late_budgets.append(position)
        else:
            self.order = float(body.get("filter_order", self.order))

    def _apply_plan(self, position: int, run_id: str, plan: Counts) -> None:
        run = self.runs.setdefault(run_id, RunBooks())
        before = run.guaranteed()
        if any(count > before.get(mechanism, 0) for mechanism, count in plan.items()):
            self._note_if_late(position, run)
        run.planned = {m: max(run.planned.get(m, 0), plan.get(m, 0)) for m in {**run.planned, **plan}}

    def _apply_charge(self, position: int, run_id: str, charge: Charge) -> None:
        run = self.runs.setdefault(run_id, RunBooks())
        if run.unplanned(charge):
            self._note_if_late(position, run)
        run.charged[charge.mechanism] = run.charged.get(charge.mechanism, 0) + charge.count
        run.num_charges += 1
        self.num_charges += 1

    def _note_if_late(self, position: int, run: RunBooks) -> None:
        if self.num_charges:
            self.late.append(position)
        if run.num_charges:
            run.late.append(position)


def merged(charges: Iterable[Charge]) -> Counts:
    """Counts of each mechanism."""
    counts: Counts = {}
    for charge in charges:
        counts[charge.mechanism] = counts.get(charge.mechanism, 0) + charge.count
    return counts


def charges_of(*parts: Counts) -> list[Charge]:
    """The sum of some counts as charges."""
    return [
        Charge(mechanism, count)
        for mechanism, count in merged(Charge(m, n) for part in parts for m, n in part.items()).items()
    ]


class _UnknownMechanism(Exception):
    """A record of a mechanism that nobody has registered."""


def _charge(record: dict[str, Any]) -> Charge:
    return _read(json.dumps(record, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Charge:
    # Records name built-in mechanisms by kind alone: whoever reads them needs all of those registered.
    import pl_privknn.privacy.mechanisms  # noqa: F401

    record = json.loads(text)
    try:
        return Charge.from_record(record)
    except ValueError as error:
        if isinstance(record, dict) and "is unknown" in str(error):
            raise _UnknownMechanism(str(error)) from error
        raise
