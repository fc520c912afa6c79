"""Which rule keeps a ledger's budget, and what a ledger reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accounting.accountant import PrivacyReport, account
from pl_privknn.privacy.accounting.tradeoff import TradeOff, trade_off
from pl_privknn.privacy.ledger.balance import Balance, Releases
from pl_privknn.privacy.mechanisms.base import Charge, Guarantee

_ROWS_NAMED = 8


class BudgetExceeded(RuntimeError):
    """A plan or charge would pass ``max_epsilon``. Nothing was written, drawn or released.

    Attributes:
        epsilon: ε that would have been reached.
        max_epsilon: the budget.
        delta: δ of both.

    Example:
        >>> import tempfile
        >>> from pl_privknn.privacy import BudgetExceeded, Charge, Gaussian, Ledger
        >>> plan = [Charge(Gaussian(sigma=4.0))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         Ledger(f"{folder}/ledger.sqlite", max_epsilon=0.5).run("first", plan=plan)
        ...     except BudgetExceeded as error:
        ...         print(f"{error.epsilon:.3f} > {error.max_epsilon}")
        ...
        0.926 > 0.5
    """

    def __init__(self, message: str, epsilon: float, max_epsilon: float, delta: float) -> None:
        super().__init__(message, epsilon, max_epsilon, delta)
        self.epsilon, self.max_epsilon, self.delta = epsilon, max_epsilon, delta

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(frozen=True)
class LedgerReport:
    """The totals of a ledger, or of one of its runs.

    Attributes:
        guarantee: of the worst case stated beforehand: for each run and mechanism the larger of what was
            planned and what was charged.
        spent: of what was charged in fact; for information.
        filter: how the budget is kept (see :class:`~pl_privknn.privacy.ledger.ledger.Ledger`): ``"rule"``,
            ``"composition"`` or ``"renyi filter"``; ``"order"``, the filter's order; ``"epsilon"``, ε of the
            guarantee at that order; ``"late_rows"``, positions of the rows for which the filter is needed.
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
        """ε of what was charged in fact."""
        return self.spent.epsilon

    def trade_off(self) -> TradeOff:
        """What the guarantee means in error rates of an attacker; exact where the report is."""
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
    if late:
        return balance.filter.epsilon(guarantee), f"Rényi filter at order {balance.order:g}"
    epsilon = total(balance, guarantee, balance.delta, exact=False).epsilon
    if balance.max_epsilon is not None and epsilon > balance.max_epsilon:
        epsilon = total(balance, guarantee, balance.delta, exact=True).epsilon
    return epsilon, "composition"


def check_budget(balance: Balance, run_id: str, asked: Sequence[Charge], after: Releases, what: str) -> None:
    """Raise where a run would pass the budget by the rule that applies.

    Args:
        balance: the ledger as it is.
        run_id: the run.
        asked: what it asks for.
        after: what it would guarantee then.
        what: ``asked`` in words.

    Raises:
        BudgetExceeded: if the budget is passed.
        ValueError: if a mechanism is not defined under the ledger's adjacency.
    """
    guarantee, budget = balance.guarantee({run_id: after}), balance.max_epsilon
    if budget is None:
        balance.filter.total(guarantee)  # an undefined mechanism is an error now, not at the report
        return
    # Whatever comes after the first charge may have been chosen in view of its answers.
    late = balance.num_charges > 0
    epsilon, rule = reached(balance, guarantee, late)
    if epsilon <= budget:
        return
    before, _ = reached(balance, balance.guarantee(), late)
    releases = ", ".join(f"{charge.count} × {charge.mechanism.label}" for charge in asked)
    raise BudgetExceeded(
        f"{what} run {run_id!r} ({releases}) would bring ε from {before:.4g} to {epsilon:.4g} at δ={balance.delta:g} "
        f"({rule}), above max_epsilon={budget:g}; nothing was charged and nothing was drawn. Ask fewer queries, cap "
        "the answers (max_answers), add noise, lower the sampling rate, or raise the budget (Ledger(…, "
        "max_epsilon=…, allow_budget_change=True))",
        epsilon,
        budget,
        balance.delta,
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
    delta = balance.delta if delta is None else check_open_unit("delta", delta)
    if late:  # the condition travels with the charges, wherever they go from here
        condition = Guarantee("conditional", (_condition(balance, late),))
        guarantee = [charge.marked(condition) for charge in guarantee]
        spent = [charge.marked(condition) for charge in spent]
    by_filter = dataclasses.replace(balance.filter, delta=delta)
    return LedgerReport(
        guarantee=total(balance, guarantee, delta, exact),
        spent=total(balance, spent, delta, exact),
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


def total(balance: Balance, charges: Sequence[Charge], delta: float, exact: bool) -> PrivacyReport:
    """The accountant's report."""
    return account(charges, delta=delta, adjacency=balance.adjacency, exact=exact)


def _condition(balance: Balance, late: Sequence[int]) -> str:
    rows = ", ".join(map(str, late[:_ROWS_NAMED])) + (", …" if len(late) > _ROWS_NAMED else "")
    text = (
        f"the parameters in rows {rows}, written after the first release, did not depend on earlier answers"
    )
    if balance.max_epsilon is None:
        return f"{text} (no budget was set that would hold otherwise)"
    if balance.late_budgets:
        return (
            f"{text}, nor did the budget that was changed in rows {', '.join(map(str, balance.late_budgets))}"
        )
    return (
        f"{text}; whatever they depended on, the Rényi filter at order {balance.order:g} keeps the ledger within "
        f"ε = {balance.max_epsilon:g} at δ = {balance.delta:g}"
    )
