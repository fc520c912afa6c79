"""Privacy budgets: their limits, and the balance of a ledger under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import check_open_unit, check_positive
from pl_privknn.privacy.accounting.accountant import PrivacyReport, account, total_pure_epsilon
from pl_privknn.privacy.accounting.tradeoff import TradeOff, trade_off
from pl_privknn.privacy.mechanisms.base import (
    Adjacency,
    Charge,
    Guarantee,
    Mechanism,
    Unit,
    check_adjacency,
    check_unit,
    merged,
)

if TYPE_CHECKING:
    pass


import functools
import json
from collections.abc import Iterable, Mapping

from pl_privknn.privacy.accounting.accountant import RenyiFilter
from pl_privknn.privacy.mechanisms.base import (
    SEEDED_NOISE,
    UNSTATED_NOISE,
)
from pl_privknn.privacy.sqlite_file import GENESIS, LedgerCorrupt


@dataclasses.dataclass(frozen=True)
class Budget:
    """Privacy budget: ε and δ, for a neighbouring relation and a unit of privacy.

    Args:
        epsilon: the most ε. What would cost more raises ``BudgetExceeded`` before anything is drawn; a teacher or a
            training without noise of its own uses the least noise that stays within it. None: no limit, ε is only
            stated.
        delta: δ of the guarantee.
        adjacency: neighbouring relation of the guarantee, ``"add_remove"`` or ``"replace_one"``.
        unit: unit of privacy: ``"record"``, or ``"person"`` with all records that the data module's
            ``private_groups`` ascribe to them.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.privacy import Budget
        >>> Budget(epsilon=1.0, delta=1e-6)
        Budget(epsilon=1.0, delta=1e-06, adjacency='add_remove', unit='record')
    """

    epsilon: float | None = None
    delta: float = 1e-5
    adjacency: Adjacency = "add_remove"
    unit: Unit = "record"

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            check_positive("epsilon", self.epsilon)
        check_open_unit("delta", self.delta)
        check_adjacency(self.adjacency)
        check_unit(self.unit)


Releases = dict[Mechanism, Charge]

#: What a charge row says of the noise that was drawn for it, and how far its guarantee then holds. A row
#: that says nothing is not trusted to have had noise of the system's.
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
        """Larger of the planned and the charged count, by mechanism."""
        return larger(self.planned, self.charged)

    def after(self, charge: Charge) -> Charge | None:
        """Sum of a mechanism's charges with this one, where it exceeds the guarantee so far; else None."""
        total = merged([*self.charged.values(), charge])[charge.mechanism]
        return total if total.count > count_of(self.guaranteed(), charge.mechanism) else None


class Balance:
    """Running totals over a ledger's rows, in their order.

    Attributes:
        opened: whether the opening row was seen.
        origin: its hash, which identifies this ledger.
        budget: the budget in force.
        order: Rényi order of the filter.
        runs: the runs in order of appearance.
        num_charges: number of charges of all runs.
        notes: the last note on each topic.
        position: of the last row taken in.
        head: its hash.
    """

    def __init__(self) -> None:
        self.opened = False
        self.origin = GENESIS
        self.budget = Budget()
        self.order = 2.0
        self.runs: dict[str, RunBalance] = {}
        self.num_charges = 0
        self.notes: dict[str, str] = {}
        self.position = 0
        self.head = GENESIS

    @property
    def late(self) -> list[int]:
        """Positions of plans and charges that increased the guarantee after the ledger's first charge.

        Their authors may have seen answers.
        """
        return sorted(position for run in self.runs.values() for position in run.late)

    @property
    def filter(self) -> RenyiFilter:
        """Rényi filter of the budget in force."""
        return RenyiFilter(self.order, self.budget.delta, self.budget.adjacency)

    def apply(self, body: Mapping[str, Any]) -> None:
        """Apply one verified row.

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
                self.budget = Budget(body["epsilon"], body["delta"], body["adjacency"], body["unit"])
                self.order = float(body["filter_order"])
            elif kind == "plan":
                self._apply_plan(position, body["run"], merged(map(_charge, body["plan"])))
            elif kind == "charge":
                self._apply_charge(
                    position, body["run"], _charge(body["charge"]).with_guarantee(_noise_mark(body))
                )
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
        """Larger of the planned and the charged count of each run, added over runs, by mechanism.

        Args:
            changes: what some runs would guarantee instead, to try a plan or charge on.
        """
        parts = {name: run.guaranteed() for name, run in self.runs.items()} | dict(changes or {})
        return in_total(parts.values())

    def spent(self) -> list[Charge]:
        """Charges of all runs, added by mechanism."""
        return in_total(run.charged for run in self.runs.values())

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
    """Number of releases of a mechanism."""
    return releases[mechanism].count if mechanism in releases else 0


def larger(first: Releases, second: Releases) -> Releases:
    """Larger count of each mechanism in two sets of releases, with the caveats of both."""
    found = dict(first)
    for mechanism, charge in second.items():
        if mechanism in found:
            known = found[mechanism]
            charge = dataclasses.replace(
                known.with_guarantee(charge.caveat), count=max(known.count, charge.count)
            )
        found[mechanism] = charge
    return found


def beyond(wanted: Releases, granted: Releases) -> list[Charge]:
    """Releases of ``wanted`` whose count exceeds the count in ``granted``."""
    return [charge for mechanism, charge in wanted.items() if charge.count > count_of(granted, mechanism)]


def in_total(parts: Iterable[Releases]) -> list[Charge]:
    """Charges of all parts, merged by mechanism."""
    return list(merged(charge for part in parts for charge in part.values()).values())


def _noise_mark(body: Mapping[str, Any]) -> Guarantee:
    noise = body.get("noise")
    if noise not in NOISE_MARKS:
        raise ValueError(f"noise={noise!r} is unknown")
    return NOISE_MARKS[noise]


class _UnknownMechanism(Exception):
    """Record of a mechanism that is not registered."""


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


_ROWS_NAMED = 8
# A pure ε is a difference of rounded logarithms; a sum may pass the budget by that alone, relative to it.
_ROUNDING = 1e-12


class BudgetExceeded(RuntimeError):
    """Raised where a plan or charge would exceed the budget. Nothing was written, drawn or released.

    Attributes:
        epsilon: ε that would have been reached.
        budget: the budget.

    Example:
        >>> import tempfile
        >>> from pl_privknn.privacy import Budget, BudgetExceeded, Charge, Gaussian, Ledger
        >>> plan = [Charge(Gaussian(sigma=4.0))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         Ledger(f"{folder}/ledger.sqlite", Budget(epsilon=0.5)).run("first", plan=plan)
        ...     except BudgetExceeded as error:
        ...         print(f"{error.epsilon:.3f} > {error.budget.epsilon}")
        ...
        0.926 > 0.5
    """

    def __init__(self, message: str, epsilon: float, budget: Budget) -> None:
        super().__init__(message, epsilon, budget)
        self.epsilon, self.budget = epsilon, budget

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """Totals of a ledger, or of one of its runs.

    Attributes:
        guarantee: of the worst case stated beforehand: for each run and mechanism the larger of what was
            planned and what was charged.
        spent: of what was charged in fact; for information.
        filter: how the budget is kept (see :class:`~pl_privknn.privacy.ledger.Ledger`): ``"rule"``,
            ``"composition"`` or ``"renyi filter"``; ``"order"``, the filter's order; ``"epsilon"``, ε of the
            guarantee at that order, or its sum of pure ε; ``"late_rows"``, positions of the rows for which the
            filter is needed.
        head: hash of the last row; note it elsewhere to detect a ledger that was rewritten as a whole.
        rows: number of rows.
        guaranteed: the charges of ``guarantee``, a list that ``account`` composes to the same ε.
        charged: the charges of ``spent``.
    """

    guarantee: PrivacyReport
    spent: PrivacyReport
    filter: dict[str, Any]
    head: str
    rows: int
    guaranteed: tuple[Charge, ...]
    charged: tuple[Charge, ...]

    @property
    def epsilon(self) -> float:
        """ε of the guarantee."""
        return self.guarantee.epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of the charges so far."""
        return self.spent.epsilon

    def trade_off(self) -> TradeOff:
        """Attacker's error rates that the guarantee allows; exact where the report is."""
        stated = self.guarantee
        exact = stated.epsilon_exact is not None
        return trade_off(self.guaranteed, delta=stated.delta, adjacency=stated.adjacency, exact=exact)


def reached(balance: Balance, guarantee: Sequence[Charge], late: bool) -> tuple[float, str]:
    """ε of ``guarantee`` by the rule that applies, at the budget's δ, and the rule's name.

    Args:
        balance: the ledger; its budget is the one in force.
        guarantee: charges of all runs.
        late: whether some of them were chosen after the first release.

    Raises:
        ValueError: if a mechanism is not defined under the ledger's adjacency.
    """
    budget, pure = balance.budget.epsilon, total_pure_epsilon(guarantee, balance.budget.adjacency)
    if budget is not None and budget < pure <= budget * (1 + _ROUNDING):
        return budget, "sum of pure ε"
    if late:
        return balance.filter.epsilon(guarantee), f"Rényi filter at orders {balance.order:g} and ∞"
    epsilon = _total(balance, guarantee, balance.budget.delta, exact=False).epsilon
    if budget is not None and epsilon > budget:
        epsilon = _total(balance, guarantee, balance.budget.delta, exact=True).epsilon
    return epsilon, "composition"


def check_budget(balance: Balance, run_id: str, asked: Sequence[Charge], after: Releases, what: str) -> None:
    """Raise ``BudgetExceeded`` where a run would exceed the budget by the rule that applies.

    Args:
        balance: the ledger as it is.
        run_id: the run.
        asked: what it asks for.
        after: what it would guarantee then.
        what: ``asked`` in words.

    Raises:
        BudgetExceeded: if the budget is exceeded.
        ValueError: if a mechanism is not defined under the ledger's adjacency.
    """
    guarantee, budget = balance.guarantee({run_id: after}), balance.budget
    if budget.epsilon is None:
        balance.filter.total(guarantee)  # an undefined mechanism is an error now, not at the report
        return
    # Whatever comes after the first charge may have been chosen in view of its answers.
    late = balance.num_charges > 0
    epsilon, rule = reached(balance, guarantee, late)
    if epsilon <= budget.epsilon:
        return
    before, _ = reached(balance, balance.guarantee(), late)
    releases = ", ".join(f"{charge.count} × {charge.mechanism.label}" for charge in asked)
    raise BudgetExceeded(
        f"{what} run {run_id!r} ({releases}) would bring ε from {before:.4g} to {epsilon:.4g} at δ={budget.delta:g} "
        f"({rule}), above epsilon={budget.epsilon:g} of the budget; nothing was charged and nothing was drawn. Ask "
        "fewer queries, cap the answers (max_answers), add noise, or lower the sampling rate",
        epsilon,
        budget,
    )


def make_report(
    balance: Balance,
    guarantee: Sequence[Charge],
    spent: Sequence[Charge],
    late: Sequence[int],
    delta: float | None,
    exact: bool,
) -> LedgerReport:
    """Totals of some charges of a ledger.

    Args:
        balance: the ledger.
        guarantee: what was granted.
        spent: what was charged.
        late: positions of the rows among these charges' that were chosen after the ledger's first charge.
        delta: δ of the report; the budget's by default.
        exact: also compute the exact worst case (seconds).
    """
    delta = balance.budget.delta if delta is None else check_open_unit("delta", delta)
    if late:  # the condition travels with the charges, wherever they go from here
        condition = Guarantee("conditional", (_condition(balance, late),))
        guarantee = [charge.with_guarantee(condition) for charge in guarantee]
        spent = [charge.with_guarantee(condition) for charge in spent]
    by_filter = dataclasses.replace(balance.filter, delta=delta)
    return LedgerReport(
        guarantee=_total(balance, guarantee, delta, exact),
        spent=_total(balance, spent, delta, exact),
        filter={
            "rule": "renyi filter" if late else "composition",
            "order": balance.order,
            "epsilon": by_filter.epsilon(guarantee),
            "late_rows": list(late),
        },
        head=balance.head,
        rows=balance.position,
        guaranteed=tuple(guarantee),
        charged=tuple(spent),
    )


def _total(balance: Balance, charges: Sequence[Charge], delta: float, exact: bool) -> PrivacyReport:
    """Report of the accountant on charges at ``delta``, under the budget's adjacency and unit."""
    kept = balance.budget
    return account(charges, delta=delta, adjacency=kept.adjacency, exact=exact, unit=kept.unit)


def _condition(balance: Balance, late: Sequence[int]) -> str:
    rows = ", ".join(map(str, late[:_ROWS_NAMED])) + (", …" if len(late) > _ROWS_NAMED else "")
    text = (
        f"the parameters in rows {rows}, written after the first release, did not depend on earlier answers"
    )
    if balance.budget.epsilon is None:
        return f"{text} (no budget was set that would hold otherwise)"
    return (
        f"{text}; whatever they depended on, the Rényi filter at orders {balance.order:g} and ∞ keeps the ledger "
        f"within ε = {balance.budget.epsilon:g} at δ = {balance.budget.delta:g}"
    )
