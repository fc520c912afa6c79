"""ε of files, of lists of records or of ledgers; and the audit of a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger.ledger import Ledger, LedgerReport
from pl_privknn.privacy.ledger.release_files import Releases, read_releases
from pl_privknn.privacy.ledger.store import SQLITE_MAGIC, read_rows
from pl_privknn.privacy.mechanisms.base import SEVERAL_FILES, Adjacency, Charge, Guarantee, check_adjacency

_NO_PARAMETERS = ("mechanism", "count", "guarantee", "reasons")


def epsilon_of_file(
    path: str | Path, delta: float | None = None, adjacency: Adjacency | None = None, exact: bool = True
) -> dict[str, Any]:
    """ε of a JSON or YAML list of records, a plan, or a ledger (told apart by their content).

    Args:
        path: the file; see :func:`~pl_privknn.privacy.ledger.release_files.read_releases` for lists and plans.
        delta: δ; a ledger and a plan have their own, a bare list of records needs one.
        adjacency: neighbouring relation of a bare list of records, ``add_remove`` by default; others know their
            own.
        exact: also compute the exact worst case (seconds).

    Returns:
        the fields of :class:`~pl_privknn.privacy.accounting.accountant.PrivacyReport`; for a ledger also
        ``epsilon_spent``, ``max_epsilon``, ``filter``, ``head``, ``rows`` and ``runs``: for each run alone
        ``epsilon``, ``epsilon_spent``, and the records ``guaranteed`` and ``charged``.

    Raises:
        ValueError: for a bad record, a missing δ, or an adjacency that is not the file's.
        LedgerCorrupt: for a ledger whose rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if delta is not None:
        delta = check_open_unit("delta", delta)
    if not is_ledger(path):
        return total([(path, read_releases(path))], delta, adjacency, exact)
    ledger = Ledger.open_readonly(path)
    try:
        _check_ledger_adjacency(ledger, adjacency)
        return _of_ledger(ledger, ledger.report(delta, exact=exact))
    finally:
        ledger.close()


def epsilon_of_files(
    paths: Sequence[str | Path],
    delta: float | None = None,
    adjacency: Adjacency | None = None,
    exact: bool = True,
) -> dict[str, Any]:
    """ε of several files over the same private data together: ledgers, lists and plans, mixed as they come.

    Of a ledger, what its runs may release at most is counted. The total is ordinary composition, which holds for
    plans that were all fixed before any answer was seen: the guarantee is conditional on that, and on whatever
    the guarantee of each file is conditional on. Runs that share one ledger need no such condition.

    Args:
        paths: the files; one alone is :func:`epsilon_of_file`.
        delta: δ of the total; may be left out where the files agree on one.
        adjacency: see :func:`epsilon_of_file`.
        exact: also compute the exact worst case (seconds).

    Raises:
        ValueError: where files count under different adjacencies, or δ is missing; and as
            :func:`epsilon_of_file`.
    """
    if len(paths) == 1:
        return epsilon_of_file(paths[0], delta, adjacency, exact)
    parts = [(path, releases_of(path)) for path in paths]
    return total(parts, delta, adjacency, exact)


def total(
    parts: Sequence[tuple[str | Path, Releases]],
    delta: float | None,
    adjacency: Adjacency | None,
    exact: bool,
) -> dict[str, Any]:
    """ε of named lists of releases together; see :func:`epsilon_of_files`."""
    stated: dict[str | Path, Adjacency] = {
        name: part.adjacency for name, part in parts if part.adjacency is not None
    }
    if adjacency is not None:
        stated["adjacency="] = check_adjacency(adjacency)
    if len(set(stated.values())) > 1:
        found = ", ".join(f"{name}: {value}" for name, value in stated.items())
        raise ValueError(f"adjacency: {found}; figures under different adjacencies are never composed")
    chosen: Adjacency = next(iter(stated.values()), "add_remove")
    if delta is None:
        deltas = {part.delta for _, part in parts}
        if len(deltas) > 1 or None in deltas:
            raise ValueError(
                f"delta=None: {', '.join(str(name) for name, _ in parts)} state no common δ of their own; pass one"
            )
        delta = deltas.pop()
    assert delta is not None
    charges = [charge for _, part in parts for charge in part.charges]
    if len(parts) > 1:
        charges = [charge.marked(Guarantee("conditional", (SEVERAL_FILES,))) for charge in charges]
    delta = check_open_unit("delta", delta)
    return account(charges, delta=delta, adjacency=chosen, exact=exact).to_dict()


def audit_ledger(
    path: str | Path,
    delta: float | None = None,
    head: str | None = None,
    exact: bool = True,
    adjacency: Adjacency | None = None,
) -> dict[str, Any]:
    """Check a ledger's hash chain and recompute its ε from the rows alone.

    Rows that were changed, taken out, put in, reordered or cut off are found. Not found, because the file
    holds no secret: a file rewritten with all its hashes, or an older copy put back. ``head`` of an earlier
    report, kept elsewhere, finds those.

    Args:
        path: the ledger.
        delta: δ that the ledger is expected to keep.
        head: a head hash noted earlier: some row must carry it, or the ledger was rewritten or cut since.
        exact: also compute the exact worst case (seconds).
        adjacency: neighbouring relation that the ledger is expected to keep.

    Returns:
        what :func:`epsilon_of_file` returns for a ledger; ``within_budget``: whether the guarantee keeps
        ``max_epsilon`` by the rule in ``filter``, None where there is no budget; and ``charges``, one a charged row:
        ``row``, ``run``, ``noise`` (None where it is not stated) and the ``release``.

    Raises:
        LedgerCorrupt: if the rows do not fit, or ``head`` is unknown.
        ValueError: if the ledger keeps another δ or adjacency than the expected one.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if delta is not None:
        delta = check_open_unit("delta", delta)
    ledger = Ledger.open_readonly(path)
    try:
        _check_ledger_adjacency(ledger, adjacency)
        if delta is not None and delta != ledger.delta:
            raise ValueError(
                f"delta={delta!r}, but the ledger {path} keeps its budget at δ={ledger.delta!r}; "
                f"privknn epsilon states its ε at another δ"
            )
        report = ledger.report(delta, exact=exact)
        if head is not None:
            ledger.check_head(head.strip().lower(), "--head")
        charges = [
            {
                "row": row["position"],
                "run": row["run"],
                "noise": row.get("noise"),
                "release": {"count": 1, **row["charge"]},
            }
            for row in read_rows(path)
            if row["kind"] == "charge"
        ]
        return {**_of_ledger(ledger, report), "within_budget": ledger.within_budget(), "charges": charges}
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


def export_ledger(path: str | Path) -> dict[str, Any]:
    """A ledger as plain JSON types, readable by :func:`epsilon_of_file`.

    Returns:
        ``adjacency``, ``delta``, ``max_epsilon``, ``guarantee``, ``reason``, ``head``, ``rows``, ``releases``
        (records of the most that all runs may release together, each with what weakens its guarantee) and ``runs``
        (records ``guaranteed`` and ``charged`` of each).

    Raises:
        LedgerCorrupt, FileNotFoundError: as :func:`audit_ledger`.
    """
    report = epsilon_of_file(path, exact=False)
    runs = {
        name: {"guaranteed": run["guaranteed"], "charged": run["charged"]}
        for name, run in report["runs"].items()
    }
    return {
        **{
            name: report[name]
            for name in ("adjacency", "delta", "max_epsilon", "guarantee", "reason", "head", "rows")
        },
        "releases": [record for run in runs.values() for record in run["guaranteed"]],
        "runs": runs,
    }


def releases_of(path: str | Path) -> Releases:
    """The releases that a file is about: of a ledger, the most that its runs may release together.

    Raises:
        ValueError: for a bad record.
        LedgerCorrupt: for a ledger whose rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if not is_ledger(path):
        return read_releases(path)
    ledger = Ledger.open_readonly(path)
    try:
        charges = [
            charge for name in ledger.runs for charge in ledger.run_report(name, exact=False).guaranteed
        ]
        return Releases(tuple(charges), ledger.delta, ledger.adjacency)
    finally:
        ledger.close()


def parameters_text(record: dict[str, Any]) -> str:
    """The parameters of a release, for people."""
    shown = {name: value for name, value in record.items() if name not in _NO_PARAMETERS}
    return ", ".join(
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in shown.items()
    )


def is_ledger(path: Path) -> bool:
    """Whether a file is an SQLite one, as ledgers are."""
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def _check_ledger_adjacency(ledger: Ledger, adjacency: Adjacency | None) -> None:
    if adjacency is not None and adjacency != ledger.adjacency:
        raise ValueError(
            f"adjacency={adjacency!r}, but the ledger {ledger.path} counts under {ledger.adjacency!r}; leave it out"
        )


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return path
