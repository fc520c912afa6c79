"""What the rows of a ledger add up to."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pl_privknn.privacy.ledger.renyi_filter import RenyiFilter
from pl_privknn.privacy.ledger.store import GENESIS, LedgerCorrupt
from pl_privknn.privacy.mechanisms.base import (
    SEEDED_NOISE,
    UNSTATED_NOISE,
    Adjacency,
    Charge,
    Guarantee,
    Mechanism,
    check_adjacency,
    merged,
)

Releases = dict[Mechanism, Charge]

#: What a charge row says of the noise that was drawn for it, and how far its guarantee then holds. Rows of
#: earlier versions say nothing.
NOISE_MARKS: dict[str | None, Guarantee] = {
    "cryptographic": Guarantee(),
    "seeded": Guarantee("none", (SEEDED_NOISE,)),
    None: Guarantee("conditional", (UNSTATED_NOISE,)),
}


class RunBalance:
    """Totals of one run.

    Attributes:
        planned: the most that it stated, for each mechanism.
        charged: what it paid for.
        charge_rows: positions of its charges.
        late: positions of its rows that raised the guarantee after the ledger's first charge, of whichever run.
    """

    def __init__(self) -> None:
        self.planned: Releases = {}
        self.charged: Releases = {}
        self.charge_rows: list[int] = []
        self.late: list[int] = []

    @property
    def num_charges(self) -> int:
        """Number of charges."""
        return len(self.charge_rows)

    def guaranteed(self) -> Releases:
        """For each mechanism the larger of planned and charged."""
        return larger(self.planned, self.charged)

    def after(self, charge: Charge) -> Charge | None:
        """All charges of a mechanism with this one, where they go beyond the guarantee so far; else None."""
        total = merged([*self.charged.values(), charge])[charge.mechanism]
        return total if total.count > count_of(self.guaranteed(), charge.mechanism) else None


class Balance:
    """Running totals over a ledger's rows, in their order.

    Attributes:
        opened: whether the opening row was seen.
        origin: its hash, which tells this ledger from others.
        adjacency: neighbouring relation of everything.
        delta: δ of the budget in force.
        max_epsilon: the budget in force; None for none.
        order: Rényi order of the filter.
        runs: the runs in order of appearance.
        late_budgets: positions of budget rows after the first charge.
        num_charges: number of charges of all runs.
        notes: the last note on each topic.
        position: of the last row taken in.
        head: its hash.
    """

    def __init__(self) -> None:
        self.opened = False
        self.origin = GENESIS
        self.adjacency: Adjacency = "add_remove"
        self.delta = 0.0
        self.max_epsilon: float | None = None
        self.order = 2.0
        self.runs: dict[str, RunBalance] = {}
        self.late_budgets: list[int] = []
        self.num_charges = 0
        self.notes: dict[str, str] = {}
        self.position = 0
        self.head = GENESIS

    @property
    def late(self) -> list[int]:
        """Positions of plans and charges that raised the guarantee after the ledger's first charge.

        Whoever wrote them may have seen answers.
        """
        return sorted(position for run in self.runs.values() for position in run.late)

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
                self.opened, self.origin = True, body["hash"]
                self.adjacency = check_adjacency(body["adjacency"])
                self.order = float(body["filter_order"])
                self.delta, self.max_epsilon = body["delta"], body["max_epsilon"]
            elif kind == "budget":
                self._apply_budget(position, body)
            elif kind == "plan":
                self._apply_plan(position, body["run"], merged(map(_charge, body["plan"])))
            elif kind == "charge":
                self._apply_charge(position, body["run"], _charge(body["charge"]).marked(_noise_mark(body)))
            elif kind == "note":
                self.notes[body["topic"]] = body["text"]
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

    def run(self, run_id: str) -> RunBalance:
        """Totals of a run; empty ones if it is not known."""
        return self.runs.get(run_id, RunBalance())

    def guarantee(self, changes: Mapping[str, Releases] | None = None) -> list[Charge]:
        """For each run and mechanism the larger of planned and charged, added over runs.

        Args:
            changes: what some runs would guarantee instead, to try a plan or charge on.
        """
        parts = {name: run.guaranteed() for name, run in self.runs.items()} | dict(changes or {})
        return in_total(parts.values())

    def spent(self) -> list[Charge]:
        """What was charged, added over runs."""
        return in_total(run.charged for run in self.runs.values())

    def _apply_budget(self, position: int, body: Mapping[str, Any]) -> None:
        self.delta, self.max_epsilon = body["delta"], body["max_epsilon"]
        if self.num_charges:  # the filter's order is fixed with the first release
            self.late_budgets.append(position)
        else:
            self.order = float(body.get("filter_order", self.order))

    def _apply_plan(self, position: int, run_id: str, plan: Releases) -> None:
        run = self.runs.setdefault(run_id, RunBalance())
        if beyond(plan, run.guaranteed()):
            self._note_if_late(position, run)
        run.planned = larger(run.planned, plan)

    def _apply_charge(self, position: int, run_id: str, charge: Charge) -> None:
        run = self.runs.setdefault(run_id, RunBalance())
        if run.after(charge) is not None:
            self._note_if_late(position, run)
        run.charged = merged([*run.charged.values(), charge])
        run.charge_rows.append(position)
        self.num_charges += 1

    def _note_if_late(self, position: int, run: RunBalance) -> None:
        if self.num_charges:
            run.late.append(position)


def count_of(releases: Releases, mechanism: Mechanism) -> int:
    """How many releases of a mechanism there are."""
    return releases[mechanism].count if mechanism in releases else 0


def larger(first: Releases, second: Releases) -> Releases:
    """For each mechanism the larger count of the two, with the marks of both."""
    found = dict(first)
    for mechanism, charge in second.items():
        if mechanism in found:
            known = found[mechanism]
            charge = dataclasses.replace(known.marked(charge.mark), count=max(known.count, charge.count))
        found[mechanism] = charge
    return found


def beyond(wanted: Releases, granted: Releases) -> list[Charge]:
    """Those of ``wanted`` whose count is above the one in ``granted``."""
    return [charge for mechanism, charge in wanted.items() if charge.count > count_of(granted, mechanism)]


def in_total(parts: Iterable[Releases]) -> list[Charge]:
    """The sum of some releases."""
    return list(merged(charge for part in parts for charge in part.values()).values())


def _noise_mark(body: Mapping[str, Any]) -> Guarantee:
    noise = body.get("noise")
    if noise not in NOISE_MARKS:
        raise ValueError(f"noise={noise!r} is unknown")
    return NOISE_MARKS[noise]


class _UnknownMechanism(Exception):
    """A record of a mechanism that nobody has registered."""


def _charge(record: dict[str, Any]) -> Charge:
    return _read(json.dumps(record, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Charge:
    record = json.loads(text)
    try:
        return Charge.from_record(record)
    except ValueError as error:
        if isinstance(record, dict) and "is unknown" in str(error):
            raise _UnknownMechanism(str(error)) from error
        raise
