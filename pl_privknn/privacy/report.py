"""ε of a file, of a list of records or of a ledger; and the audit of a ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accountant import account, read_records
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt, LedgerReport
from pl_privknn.privacy.ledger_store import SQLITE_MAGIC
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency


def epsilon_of_file(
    path: str | Path, delta: float | None = None, adjacency: Adjacency | None = None, exact: bool = True
) -> dict[str, Any]:
    """ε of a JSON list of records, or of a ledger (told apart by their content).

    Args:
        path: the file.
        delta: δ; a ledger has its own, a list of records needs one.
        adjacency: neighbouring relation of a list of records, ``add_remove`` by default; a ledger knows its
            own.
        exact: also compute the exact worst case (seconds).

    Returns:
        the fields of :class:`~pl_privknn.privacy.accountant.PrivacyReport`; for a ledger also
        ``epsilon_spent``, ``max_epsilon``, ``filter``, ``head``, ``rows`` and ``runs``: for each run alone
        ``epsilon``, ``epsilon_spent``, and the records ``guaranteed`` and ``charged``.

    Raises:
        ValueError: for a bad record, a missing δ, or an adjacency that is not the ledger's.
        LedgerCorrupt: for a ledger whose rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if delta is not None:
        delta = check_open_unit("delta", delta)
    with path.open("rb") as file:
        is_ledger = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    if is_ledger:
        ledger = Ledger.open_readonly(path)
        try:
            if adjacency is not None and adjacency != ledger.adjacency:
                raise ValueError(
                    f"adjacency={adjacency!r}, but the ledger {path} counts under {ledger.adjacency!r}; leave it out"
                )
            return _of_ledger(ledger, ledger.report(delta, exact=exact))
        finally:
            ledger.close()
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is neither a ledger nor a JSON list of records: {error}") from error
    if delta is None:
        raise ValueError(f"delta=None: {path} is a list of records, which has no δ of its own; pass one")
    chosen = check_adjacency(adjacency or "add_remove")
    return account(read_records(records), delta=delta, adjacency=chosen, exact=exact).to_dict()


def audit_ledger(
    path: str | Path, delta: float | None = None, head: str | None = None, exact: bool = True
) -> dict[str, Any]:
    """Check a ledger's hash chain and recompute its ε from the rows alone.

    Rows that were changed, taken out, put in, reordered or cut off are found. Not found, because the file
    holds no secret: a file rewritten with all its hashes, or an older copy put back. ``head`` of an earlier
    report, kept elsewhere, finds those.

    Args:
        path: the ledger.
        delta: δ; the budget's by default.
        head: a head hash noted earlier: some row must carry it, or the ledger was rewritten or cut since.
        exact: also compute the exact worst case (seconds).

    Returns:
        what :func:`epsilon_of_file` returns for a ledger, and ``within_budget``: whether the guarantee keeps
        ``max_epsilon`` by the rule in ``filter``; None where there is no budget.

    Raises:
        LedgerCorrupt: if the rows do not fit, or ``head`` is unknown.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if delta is not None:
        delta = check_open_unit("delta", delta)
    ledger = Ledger.open_readonly(path)
    try:
        report = ledger.report(delta, exact=exact)
        if head is not None and not ledger.has_hash(head.strip().lower()):
            raise LedgerCorrupt(
                f"{path}: no row carries the head {head}; since it was noted the ledger was rewritten, cut, or "
                "replaced by an older copy"
            )
        return {**_of_ledger(ledger, report), "within_budget": ledger.within_budget()}
    finally:
        ledger.close()


def _of_ledger(ledger: Ledger, whole: LedgerReport) -> dict[str, Any]:
    runs, names = {}, ledger.runs
    # The exact figure of every single run would take too long; of an only run it is known already.
    exact = whole.guarantee.epsilon_exact is not None and len(names) == 1
    for run_id in names:
        alone = ledger.run_report(run_id, whole.guarantee.delta, exact)
        runs[run_id] = {
            "epsilon": alone.epsilon,
            "epsilon_spent": alone.epsilon_spent,
            "guaranteed": _records(alone.guaranteed),
            "charged": _records(alone.charged),
        }
    return {
        **whole.guarantee.to_dict(),
        "epsilon_spent": whole.epsilon_spent,
        "max_epsilon": ledger.max_epsilon,
        "filter": whole.filter,
        "rows": whole.rows,
        "head": whole.head,
        "runs": runs,
    }


def _records(charges: Iterable[Charge]) -> list[dict[str, Any]]:
    return [charge.to_record() for charge in charges]


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return path
