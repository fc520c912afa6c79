"""Audit of a run's folder: ε recomputed from the ledger, and the plan, summary, card and export compared with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pl_privknn.config import get, read_document
from pl_privknn.privacy.accounting.accountant import read_records
from pl_privknn.privacy.holdout import LEDGER as HOLDOUT
from pl_privknn.privacy.mechanisms.base import Charge, merged
from pl_privknn.privacy.run import BEGUN, PLAN, RUN_FILE, SHARED, facts_in
from pl_privknn.privacy.store import LAST_ROW, read_rows
from pl_privknn.privacy.verification import audit_ledger, check_summary, compared

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
    """The content of a JSON or YAML file that holds a mapping; empty where there is no such file.

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
    """Strings under a name, anywhere in settings."""
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
            :func:`~pl_privknn.privacy.verification.audit_ledger`.

    Returns:
        What :func:`~pl_privknn.privacy.verification.audit_ledger` returns; ``ledger``, its path; ``run``; ``checks``,
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
        if (holdout := folder / HOLDOUT).is_file():
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
    """Checks of the configuration's budget, and of the run, plan and ledger to which the run's file belongs."""
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
    """Records of the same releases without the guarantee that they state."""
    found = merged(read_records(list(records))).values()
    return [Charge(charge.mechanism, charge.count).to_record() for charge in found]
