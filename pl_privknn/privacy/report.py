"""ε of a file: of a list of records or of a ledger; and the audit of a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accountant import account, read_records
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.ledger_store import SQLITE_MAGIC
from pl_privknn.privacy.mechanisms.base import Adjacency, check_adjacency


def epsilon_of_file(
    path: str | Path, delta: float, adjacency: Adjacency | None = None, exact: bool = True
) -> dict[str, Any]:
    """ε of a JSON list of records, or of a ledger (told apart by their content).

    Args:
        path: the file.
        delta: δ.
        adjacency: neighbouring relation of a list of records, ``add_remove`` by default; a ledger knows its
            own.
        exact: also compute the exact worst case (seconds).

    Returns:
        the fields of :class:`~pl_privknn.privacy.accountant.PrivacyReport`; for a ledger also
        ``epsilon_spent``, ``filter``, ``head``, ``rows`` and ``runs``.

    Raises:
        ValueError: for a bad record, or an adjacency that is not the ledger's.
        LedgerCorrupt: for a ledger whose rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    delta = check_open_unit("delta", delta)
    with path.open("rb") as file:
        is_ledger = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    if is_ledger:
        return _report(path, delta, adjacency, exact)
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither a ledger nor JSON: {error}") from error
    chosen = check_adjacency(adjacency or "add_remove")
    return account(read_records(records), delta=delta, adjacency=chosen, exact=exact).to_dict()


def audit_ledger(path: str | Path, delta: float | None = None, head: str | None = None) -> dict[str, Any]:
    """Check a ledger's hash chain and recompute its ε from the rows alone.

    Args:
        path: the ledger.
        delta: δ; the budget's by default.
        head: a head hash noted earlier: some row must carry it, or the ledger was rewritten since.

    Returns:
        what :func:`epsilon_of_file` returns for a ledger, with ``max_epsilon`` and ``within_budget``.

    Raises:
        LedgerCorrupt: if a row was changed, taken out, reordered or cut off, or ``head`` is unknown.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no ledger at {path}")
    return _report(path, delta, None, exact=True, head=head, audit=True)


def _report(
    path: Path,
    delta: float | None,
    adjacency: Adjacency | None,
    exact: bool,
    head: str | None = None,
    audit: bool = False,
) -> dict[str, Any]:
    ledger = Ledger.open_readonly(path)
    try:
        if adjacency is not None and adjacency != ledger.adjacency:
            raise ValueError(
                f"adjacency={adjacency!r}, but the ledger {path} counts under {ledger.adjacency!r}; "
                "leave it out"
            )
        if head is not None and not ledger.has_hash(head):
            raise LedgerCorrupt(f"{path}: no row carries the head {head}; the ledger was rewritten since")
        whole = ledger.report(delta, exact=exact)
        runs = {}
        for run_id in ledger.runs:
            alone = ledger.run_report(run_id, delta)
            runs[run_id] = {"epsilon": alone.epsilon, "epsilon_spent": alone.epsilon_spent}
        report = {
            **whole.guarantee.to_dict(),
            "epsilon_spent": whole.epsilon_spent,
            "max_epsilon": ledger.max_epsilon,
            "filter": whole.filter,
            "rows": whole.rows,
            "head": whole.head,
            "runs": runs,
        }
        if audit and ledger.max_epsilon is not None:
            # The budget was stated at the ledger's own δ.
            at_budget = ledger.report(ledger.delta, exact=exact)
            report["within_budget"] = at_budget.epsilon <= ledger.max_epsilon
        return report
    finally:
        ledger.close()
