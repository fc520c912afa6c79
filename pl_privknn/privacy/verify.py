"""Verification from files alone: ε of ledgers and lists of records, audits of a ledger and of a run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_privknn._checks import check_open_unit, shown
from pl_privknn.config import get, read_document
from pl_privknn.privacy.accounting.accountant import account, read_records
from pl_privknn.privacy.budget import Balance, LedgerReport, make_report
from pl_privknn.privacy.files import HOLDOUT_LEDGER
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms.base import (
    SEVERAL_FILES,
    Adjacency,
    Charge,
    Guarantee,
    Unit,
    check_adjacency,
    check_unit,
    merged,
)
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.stated import NoNoise
from pl_privknn.privacy.run import (
    BEGUN,
    PLAN,
    RUN_FILE,
    SHARED,
    RunFileError,
    facts_in,
    query_counts,
    reading_run,
)
from pl_privknn.privacy.sqlite_file import LAST_ROW, SQLITE_MAGIC, read_rows


@dataclasses.dataclass(frozen=True)
class Releases:
    """Releases stated in a file.

    Attributes:
        charges: the most that may be released.
        delta: δ, where the file states one.
        adjacency: neighbouring relation, where the file states one.
        unit: unit of privacy, where the file states one.
    """

    charges: tuple[Charge, ...]
    delta: float | None = None
    adjacency: Adjacency | None = None
    unit: Unit | None = None


def read_releases(path: str | Path) -> Releases:
    """Read a list of records, or a mapping that holds one.

    A mapping has the records under ``releases`` (what ``privknn plan`` and ``privknn audit --export`` write) or
    ``records`` (``privknn plan --json``), and may state ``delta``, ``adjacency`` and ``unit``.

    Raises:
        ValueError: naming what is wrong with the file, or with which record.
    """
    return releases_in(read_document(path), path)


def releases_in(document: Any, path: str | Path) -> Releases:
    """Releases in a document that :func:`~pl_privknn.config.read_document` read from ``path``."""
    if not isinstance(document, dict):
        return Releases(tuple(read_records(document)))
    names = [name for name in ("releases", "records") if name in document]
    if not names:
        held = ", ".join(shown(name).strip("'") for name in list(document)[:8])
        raise ValueError(
            f"{path} holds {held or 'nothing'}; expected a ledger, a JSON list or YAML plan of "
            "records, or a mapping with the records under 'releases'"
        )
    if len(names) > 1:
        raise ValueError(f"{path} has its records under both {' and '.join(names)}; leave one of them out")
    delta, adjacency, unit = (document.get(name) for name in ("delta", "adjacency", "unit"))
    return Releases(
        tuple(read_records(document[names[0]])),
        None if delta is None else check_open_unit("delta", delta),
        None if adjacency is None else check_adjacency(adjacency),
        None if unit is None else check_unit(unit),
    )


_NO_PARAMETERS = ("mechanism", "count", "guarantee", "reasons")


def epsilon_of_file(
    path: str | Path,
    delta: float | None = None,
    adjacency: Adjacency | None = None,
    exact: bool = True,
    unit: Unit | None = None,
) -> dict[str, Any]:
    """ε of a JSON or YAML list of records, a plan, or a ledger (distinguished by their content).

    Args:
        path: the file; see :func:`~pl_privknn.privacy.verify.read_releases` for lists and plans.
        delta: δ; a ledger and a plan have their own, a bare list of records needs one.
        adjacency: neighbouring relation of a bare list of records, ``add_remove`` by default; others know their
            own.
        exact: also compute the exact worst case (seconds).
        unit: unit of privacy, likewise; ``record`` by default.

    Returns:
        the fields of :class:`~pl_privknn.privacy.accounting.accountant.PrivacyReport`; for a ledger also
        ``epsilon_spent``, ``max_epsilon``, ``filter``, ``ledger_head``, ``rows`` and ``runs``: for each run alone
        ``epsilon``, ``epsilon_spent``, and the records ``guaranteed`` and ``charged``.

    Raises:
        ValueError: for a bad record, a missing δ, or an adjacency or unit that is not the file's.
        LedgerCorrupt: for a ledger whose rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if delta is not None:
        delta = check_open_unit("delta", delta)
    if not is_ledger(path):
        return total([(path, read_releases(path))], delta, adjacency, exact, unit)
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        _check_ledger(ledger, adjacency=adjacency, unit=unit)
        return _of_ledger(ledger, ledger.report(delta, exact=exact))


def epsilon_of_files(
    paths: Sequence[str | Path],
    delta: float | None = None,
    adjacency: Adjacency | None = None,
    exact: bool = True,
    unit: Unit | None = None,
) -> dict[str, Any]:
    """Total ε of several files over the same private data: any mixture of ledgers, lists and plans.

    Of a ledger, what its runs may release at most is counted. The total is ordinary composition, which holds for
    plans that were all fixed before any answer was seen: the guarantee is conditional on that, and on whatever
    the guarantee of each file is conditional on. Runs that share one ledger need no such condition.

    Args:
        paths: the files; one alone is :func:`epsilon_of_file`.
        delta: δ of the total; may be left out where the files agree on one.
        adjacency: see :func:`epsilon_of_file`.
        exact: also compute the exact worst case (seconds).
        unit: see :func:`epsilon_of_file`.

    Raises:
        ValueError: where files count under different adjacencies or units, or δ is missing; and as
            :func:`epsilon_of_file`.
    """
    if len(paths) == 1:
        return epsilon_of_file(paths[0], delta, adjacency, exact, unit)
    parts = [(path, releases_of(path)) for path in paths]
    return total(parts, delta, adjacency, exact, unit)


def total(
    parts: Sequence[tuple[str | Path, Releases]],
    delta: float | None,
    adjacency: Adjacency | None,
    exact: bool,
    unit: Unit | None = None,
) -> dict[str, Any]:
    """ε of named lists of releases together; see :func:`epsilon_of_files`."""
    relations = {file: part.adjacency for file, part in parts if part.adjacency is not None}
    if adjacency is not None:
        relations["adjacency="] = check_adjacency(adjacency)
    units = {file: part.unit or unit or "record" for file, part in parts}
    if unit is not None:
        units["unit="] = check_unit(unit)
    by_relation, by_unit = _common("adjacency", relations, "add_remove"), _common("unit", units, "record")
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
        charges = [charge.with_guarantee(Guarantee("conditional", (SEVERAL_FILES,))) for charge in charges]
    delta = check_open_unit("delta", delta)
    return account(charges, delta=delta, adjacency=by_relation, exact=exact, unit=by_unit).to_dict()


def _common(name: str, stated: Mapping[str | Path, str], usual: str) -> Any:
    if len(set(stated.values())) > 1:
        found = ", ".join(f"{file}: {value}" for file, value in stated.items())
        raise ValueError(f"{name}: {found}; figures under different ones are never composed")
    return next(iter(stated.values()), usual)


def audit_ledger(
    path: str | Path,
    delta: float | None = None,
    head: str | None = None,
    exact: bool = True,
    adjacency: Adjacency | None = None,
    unit: Unit | None = None,
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
        unit: unit of privacy that it is expected to keep.

    Returns:
        what :func:`epsilon_of_file` returns for a ledger; ``within_budget``: whether the guarantee keeps
        ``max_epsilon`` by the rule in ``filter``, None where there is no budget; where ``head`` is given,
        ``head_found``, the row that carries it; and ``charges``, one a charged row:
        ``row``, ``run``, ``noise`` (None where it is not stated) and the ``release``.

    Raises:
        LedgerCorrupt: if the rows do not fit, or ``head`` is unknown.
        ValueError: if the ledger keeps another δ, adjacency or unit than the expected one.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if delta is not None:
        delta = check_open_unit("delta", delta)
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        _check_ledger(ledger, adjacency=adjacency, unit=unit)
        if delta is not None and delta != ledger.budget.delta:
            raise ValueError(
                f"delta={delta!r}, but the ledger {path} keeps its budget at δ={ledger.budget.delta!r}; "
                f"privknn epsilon states its ε at another δ"
            )
        report = ledger.report(delta, exact=exact)
        found = None if head is None else ledger.check_head(head.strip().lower(), "--head")
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
        return {
            **_of_ledger(ledger, report),
            **({} if found is None else {"head_found": f"row {found} of {report.rows}"}),
            "within_budget": ledger.within_budget(),
            "charges": charges,
        }


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
        "max_epsilon": ledger.budget.epsilon,
        "filter": whole.filter,
        "rows": whole.rows,
        "ledger_head": whole.head,
        "runs": runs,
    }


def _records(charges: Iterable[Charge]) -> list[dict[str, Any]]:
    return [charge.to_record() for charge in charges]


def export_ledger(path: str | Path) -> dict[str, Any]:
    """A ledger as plain JSON types, readable by :func:`epsilon_of_file`.

    Returns:
        ``adjacency``, ``unit``, ``delta``, ``max_epsilon``, ``guarantee``, ``reason``, ``ledger_head``, ``rows``,
        ``releases`` (records of the most that all runs may release together, each with what weakens its guarantee)
        and ``runs`` (records ``guaranteed`` and ``charged`` of each).

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
            for name in (
                "adjacency",
                "unit",
                "delta",
                "max_epsilon",
                "guarantee",
                "reason",
                "ledger_head",
                "rows",
            )
        },
        "releases": [record for run in runs.values() for record in run["guaranteed"]],
        "runs": runs,
    }


def releases_of(path: str | Path) -> Releases:
    """Releases in a file; of a ledger, the most that its runs may release together.

    Raises:
        ValueError: for a bad record.
        LedgerCorrupt: for a ledger whose rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    path = _existing(path)
    if not is_ledger(path):
        return read_releases(path)
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        charges = [
            charge for name in ledger.runs for charge in ledger.run_report(name, exact=False).guaranteed
        ]
        return Releases(tuple(charges), ledger.budget.delta, ledger.budget.adjacency, ledger.budget.unit)


def parameters_text(record: dict[str, Any]) -> str:
    """Parameters of a release as readable text."""
    shown = {name: value for name, value in record.items() if name not in _NO_PARAMETERS}
    return ", ".join(
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in shown.items()
    )


def is_ledger(path: Path) -> bool:
    """Whether a file is an SQLite one, as ledgers are."""
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def _check_ledger(ledger: Ledger, **expected: str | None) -> None:
    for name, value in expected.items():
        if value is not None and value != (known := getattr(ledger.budget, name)):
            raise ValueError(
                f"{name}={value!r}, but the ledger {ledger.path} counts under {known!r}; leave it out"
            )


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return path


_COUNTED = ("queried", "answered", "refused", "lost")
_REPORTED = (
    "epsilon", "epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld", "epsilon_exact", "delta", "adjacency",
    "unit", "guarantee", "reason", "conditional",
)  # fmt: skip
# Figures that the exact worst case has a part in.
_EXACT = ("epsilon", "tpr_at_fpr", "advantage", "gaussian_dp_mu")
# Of two computations of one figure on different machines.
_ROUNDING = 1e-6


def check_summary(
    summary: Mapping[str, Any], ledger: str | Path, exact: bool = True, run_file: Path | None = None
) -> list[dict[str, Any]]:
    """Compare a summary's figures with its ledger at the row that the summary names.

    ε, δ and the rest of the report are computed anew from the rows up to ``ledger_head``. Numbers of queries and
    answers are counted in the run's file; steps and noise of a private training from its plan and its
    charges. What only the training knows (accuracies, seconds, versions) is in no ledger.

    Args:
        summary: content of ``summary.json``.
        ledger: the ledger's file.
        exact: also compute the exact worst case where the summary has it (seconds).
        run_file: the run's file, where the ledger is a shared one.

    Returns:
        For each figure ``name``, ``stated``, ``found`` and ``agrees``, which is None where nothing is computed to
        compare it with.

    Raises:
        LedgerCorrupt: if the rows do not fit their hashes.
        ValueError: if the summary states no ε, or a δ outside (0, 1).
        FileNotFoundError: if there is no ledger.
    """
    if summary.get("epsilon") is None or summary.get("delta") is None:
        raise ValueError(
            "the summary states no ε and δ: its run used no private record; give that of a private run"
        )
    rows = read_rows(ledger)
    checks = [_check_head(summary, rows)]
    head = summary.get("ledger_head")
    last = next((row["position"] for row in rows if row["hash"] == head), len(rows))
    balance = Balance()
    for row in rows[:last]:
        balance.apply(row)
    has_exact = summary.get("epsilon_exact") is not None
    report = make_report(
        balance,
        balance.guarantee(),
        balance.spent(),
        balance.late,
        summary["delta"],
        exact=exact and has_exact,
    )
    found = {
        **report.guarantee.to_dict(),
        **report.trade_off().to_dict(),
        "delta": balance.budget.delta,
        "epsilon_spent": report.spent.epsilon,
        "max_epsilon": balance.budget.epsilon,
        **_of_run(summary, rows[:last], balance, Path(run_file or ledger)),
    }
    wanted = [*_REPORTED, "epsilon_spent", "max_epsilon", *(name for name in found if name in summary)]
    for name in dict.fromkeys(wanted):
        if name in summary or name in ("guarantee", "adjacency", "unit"):
            checks.append(compared(name, summary.get(name), found.get(name)))
    unfounded = [n for n in _COUNTED if n in summary and n not in found]
    checks += [compared(name, summary[name], None) for name in unfounded]
    skipped = _EXACT if has_exact and not exact else ()
    return [
        {**c, "agrees": None} if c["name"] in unfounded or c["name"].startswith(skipped) else c
        for c in checks
    ]


def _check_head(summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Check that the head is the hash of a row, and that the run has no later row: the summary comes last."""
    head, run = summary.get("ledger_head"), summary.get("run")
    known = [row["position"] for row in rows if row["hash"] == head]
    if not known:
        return compared("ledger_head", head, rows[-1]["hash"])
    later = [
        row for row in rows[known[0] :] if row["kind"] in ("plan", "charge") and run in (None, row["run"])
    ]
    return compared("ledger_head", head, later[-1]["hash"] if later else head)


def _of_run(
    summary: Mapping[str, Any], rows: list[dict[str, Any]], balance: Balance, run_file: Path
) -> dict[str, Any]:
    """Facts of the run from its ledger and its file."""
    run = summary.get("run") or (next(iter(balance.runs)) if len(balance.runs) == 1 else None)
    if run is None:
        return {}
    if run not in balance.runs:
        return {"run": None}
    found: dict[str, Any] = {"run": run}
    totals = balance.run(run)
    described = [row["description"] for row in rows if row["kind"] == "plan" and row["run"] == run]
    if described and "labeler" in described[-1]:
        found["labeler"] = described[-1]["labeler"]
    with contextlib.suppress(RunFileError), reading_run(run_file) as file:  # a ledger alone counts no queries
        if file.fact(BEGUN, {}).get("run_id") == run and "queried" in summary:
            found |= query_counts(file)
    if "steps_planned" in summary:
        found |= _training(totals.planned.values(), totals.charged.values())
    return found


def _training(planned: Iterable[Charge], charged: Iterable[Charge]) -> dict[str, Any]:
    """Steps, noise and sampling rate of a private training."""
    # Accuracies that were paid for have discrete noise, and are no steps.
    plan = [charge for charge in planned if isinstance(charge.mechanism, Gaussian | NoNoise)]
    found: dict[str, Any] = {
        "steps": sum(charge.count for charge in charged if isinstance(charge.mechanism, Gaussian | NoNoise)),
        "steps_planned": sum(charge.count for charge in plan),
    }
    if len(plan) == 1 and isinstance(release := plan[0].mechanism, Gaussian):
        found |= {
            "noise_multiplier": release.sigma / release.l2_sensitivity,
            "max_grad_norm": release.l2_sensitivity,
            "sampling_rate": release.sampling_rate,
        }
    return found


def compared(name: str, stated: Any, found: Any) -> dict[str, Any]:
    """Stated and recomputed value, and whether they agree; figures up to rounding."""
    if isinstance(stated, int | float) and isinstance(found, int | float) and not isinstance(stated, bool):
        agrees = stated == found or math.isclose(stated, found, rel_tol=_ROUNDING)
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        pairs = zip(stated, found, strict=True)
        agrees = all(compared(name, one, other)["agrees"] for one, other in pairs)
    else:
        agrees = stated == found
    return {"name": name, "stated": stated, "found": found, "agrees": agrees}


#: Files of a run's folder: the releases that public rows are drawn from, and the columns of these rows.
RELEASES, COLUMNS = "public_rows.pt", "columns.json"
#: The configuration in a run's folder.
CONFIG = "config.yaml"
#: Where ``privknn export`` puts its files, in a run's folder.
EXPORT = "export"
#: The last checkpoint, and the model that a teacher's releases make, in a run's folder.
CHECKPOINT, HEAD = Path("checkpoints") / "last.ckpt", "head.pt"
#: What no audit of files can find.
NOT_CHECKED = (
    "a ledger rewritten with all its hashes, and all other files with it; compare a head that was noted elsewhere "
    "(--head)",
    "the content of released labels, checkpoints, models, pictures and curves",
    "accuracies and seconds: the summary is the one that the run wrote; they are not recomputed",
    "that the noise was drawn and the model trained by this package's own code",
    "the private records: their number, their owners, and runs on them that are charged in other ledgers",
)
_RELEASED = ("privacy_card.json", f"{EXPORT}/privacy_card.json", f"{EXPORT}/summary.json")


class NotARun(ValueError):
    """Raised where a folder's files can't be read as those of a run."""


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert any error of reading a damaged file into one line.

    Raises:
        NotARun: in place of errors that no reader raises by itself.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, MemoryError):
        raise  # a reader's own words, and what the system refuses
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        raise NotARun(
            f"{path}: a file in it is damaged, or not what its name says ({type(error).__name__}: {what})"
        ) from error


def mapping_of(path: Path) -> dict[str, Any]:
    """Content of a JSON or YAML file that holds a mapping; empty where the file doesn't exist.

    A value ``inf`` is read as the number, as :func:`~pl_privknn.privacy.files.write_json` writes it.

    Raises:
        ValueError: for another content.
    """
    content = read_document(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise NotARun(f"{path} holds {type(content).__name__}, where a run leaves a mapping; restore it")
    return _numbers(content)


def _numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.inf if value == "inf" else value for name, value in content.items()}


def ledger_of(folder: Path) -> Path | None:
    """The ledger that a run charged: its own file, or the shared one that this names; None where there is no run.

    Raises:
        FileNotFoundError: where the named one is missing.
        RunFileError: where the run's file can't be read.
    """
    own = folder / RUN_FILE
    if not own.is_file():
        return None
    if (named := facts_in(own).get(SHARED)) is None:
        return own
    for path in (Path(named), folder / Path(named).name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the ledger {named} of this run is missing; run from the folder where it began, or restore it"
    )


def named_values(settings: Any, name: str, depth: int = 0) -> Iterator[str]:
    """Strings under this key, at any depth of settings."""
    if depth > 12:
        return
    if isinstance(settings, Mapping):
        if isinstance(found := settings.get(name), str):
            yield found
        settings = list(settings.values())
    for part in settings if isinstance(settings, list) else []:
        yield from named_values(part, name, depth + 1)


def audit_run(
    folder: str | Path, *, exact: bool = True, released: bool = True, **expected: Any
) -> dict[str, Any]:
    """Recompute ε of a run from its ledger, and compare plan, summary, card and export with it.

    Args:
        folder: of the run.
        exact: also compute the exact worst case (seconds).
        released: compare the card and the export too; not where they are about to be written anew.
        expected: ``delta``, ``head``, ``adjacency`` and ``unit`` of
            :func:`~pl_privknn.privacy.verify.audit_ledger`.

    Returns:
        What :func:`~pl_privknn.privacy.verify.audit_ledger` returns; ``ledger``, its path; ``run``; ``checks``,
        of each figure ``name``, ``stated`` (in the folder), ``found`` (in the ledger) and ``agrees``, which is None
        where the ledger has no such figure; ``not_checked``; ``violated``.

    Raises:
        LedgerCorrupt: for a ledger whose rows do not fit.
        ValueError: for a folder that is no private run's.
        FileNotFoundError: if the ledger, or the folder, is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    with reading(folder):
        summary, settings = mapping_of(folder / "summary.json"), mapping_of(folder / CONFIG)
        ledger = ledger_of(folder)
        if ledger is None:
            raise FileNotFoundError(
                f"{folder}: there is no ledger, so the privacy cost is unknown; restore it"
            )
        report = audit_ledger(ledger, exact=exact, **expected)
        run = summary.get("run") or (next(iter(report["runs"]), None) if len(report["runs"]) == 1 else None)
        checks = check_summary(summary, ledger, exact, folder / RUN_FILE) if summary else []
        if run not in report["runs"]:
            checks.append(compared("run", run, ", ".join(report["runs"]) or "none"))
        if (holdout := folder / HOLDOUT_LEDGER).is_file():
            paid = audit_ledger(holdout, exact=False)["epsilon"]
            checks.append(compared("holdout_epsilon", summary.get("holdout_epsilon"), paid))
        checks += _plan(facts_in(folder / RUN_FILE), ledger, run, settings, report)
        for name in _RELEASED if released else ():
            if stated := mapping_of(folder / name):
                bounds = _numbers(get(stated, "composition.bounds") or {})  # of a card
                found = check_summary({**stated, **bounds, "run": run}, ledger, exact, folder / RUN_FILE)
                checks += [{**check, "name": f"{name}: {check['name']}"} for check in found]
    return {
        **report,
        "ledger": str(ledger),
        "run": run,
        "checks": checks,
        "not_checked": list(NOT_CHECKED),
        "violated": report["within_budget"] is False or any(check["agrees"] is False for check in checks),
    }


def _plan(
    facts: Mapping[str, Any], ledger: Path, run: Any, settings: Mapping[str, Any], report: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Check the configuration's budget, and the run, plan and ledger to which the run's file belongs."""
    teaches = get(settings, "labeling.labeler") is not None
    budget = (get(settings, "labeling.budget") or {}) if teaches else {}
    for name in ("epsilon", "delta", "adjacency", "unit"):
        if name in budget:
            kept = report["max_epsilon" if name == "epsilon" else name]
            yield compared(f"{CONFIG}: {name}", budget[name], kept)
    rows, begun, head = read_rows(ledger), facts[BEGUN], facts[LAST_ROW]
    planned = [row["plan"] for row in rows if row["kind"] == "plan" and row["run"] == run]
    yield compared(f"{RUN_FILE}: run", begun["run_id"], run)
    if PLAN in begun["terms"]:
        yield compared(
            f"{RUN_FILE}: plan", _bare(begun["terms"][PLAN]), _bare(planned[-1] if planned else [])
        )
    known = any(row["hash"] == head for row in rows)
    yield compared(f"{RUN_FILE}: ledger head", head, head if known else None)


def _bare(records: Iterable[Any]) -> list[dict[str, Any]]:
    """Copies of records without the guarantee that they state."""
    found = merged(read_records(list(records))).values()
    return [Charge(charge.mechanism, charge.count).to_record() for charge in found]
