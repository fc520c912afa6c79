"""Audit of a run's folder: files compared with the ledger's notes, and ε recomputed from the ledger."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pl_privknn.config import read_document
from pl_privknn.privacy.files import file_digests
from pl_privknn.privacy.holdout import LEDGER as HOLDOUT
from pl_privknn.privacy.ledger import Place, counts_topic, files_topic, note_files
from pl_privknn.privacy.store import read_rows
from pl_privknn.privacy.verification import audit_ledger, check_summary, compared

#: The configuration in a run's folder.
CONFIG = "config.yaml"
#: Where ``privknn export`` puts its files, in a run's folder.
EXPORT = "export"
#: What ``privknn report`` writes into a run's folder.
REPORT = ("report.html", "privacy_card.md", "privacy_card.json", "certificate.json")
#: What no audit of files can find.
NOT_CHECKED = (
    "a ledger rewritten with all its hashes, and all other files with it; compare a head that was noted elsewhere "
    "(--head)",
    "accuracies and seconds: the summary is the one that the run wrote; they are not recomputed",
    "that the noise was drawn and the model trained by this package's own code",
    "the private records: their number, their owners, and runs on them that are charged in other ledgers",
)
_MOST_NOTED = 1 << 16
_MOST_NAMED = 20
# Figures of a summary that the exact worst case has a part in.
_EXACT = ("epsilon", "tpr_at_fpr", "advantage", "gaussian_dp_mu")


#: SHA-256 of each released file of a run by its name; and what its labels hold, ``run``, ``head`` (of the ledger) and
#: ``counts``, or None without labels.
RunContents = tuple[dict[str, str], dict[str, Any] | None]
_Rows = list[dict[str, Any]]


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

    A value ``inf`` is read as the number.

    Raises:
        ValueError: for another content.
    """
    content = read_document(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise NotARun(f"{path} holds {type(content).__name__}, where a run leaves a mapping; restore it")
    return {name: math.inf if value == "inf" else value for name, value in content.items()}


def ledger_of(folder: Path, settings: Mapping[str, Any]) -> Path | None:
    """The run's own ledger, or the one that its settings name; None where there is neither.

    Raises:
        FileNotFoundError: where the named one is missing.
    """
    own = folder / "ledger.sqlite"
    for named in named_values(settings, "ledger_path"):
        for path in (Path(named), folder / Path(named).name):
            if path.is_file():
                return path
        raise FileNotFoundError(
            f"the ledger {named} of this run is missing; run from the folder where it began, or restore it"
        )
    return own if own.is_file() else None


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
    folder: str | Path,
    contents_of: Callable[[Path], RunContents],
    *,
    exact: bool = True,
    writing: Place | None = None,
    **expected: Any,
) -> dict[str, Any]:
    """Recompute ε of a run from its ledger, and compare all files that leave the run with the ledger's notes.

    Args:
        folder: of the run.
        contents_of: reads what the folder holds: :func:`~pl_privknn.callbacks.run_files.contents_of`.
        exact: also compute the exact worst case (seconds).
        writing: a place whose files are about to be written anew, and so are left out.
        expected: ``delta``, ``head``, ``adjacency`` and ``unit`` of
            :func:`~pl_privknn.privacy.verification.audit_ledger`.

    Returns:
        What :func:`~pl_privknn.privacy.verification.audit_ledger` returns; ``ledger``, its path; ``run``; ``checks``,
        of each thing ``name``, ``stated`` (in the folder), ``found`` (in the ledger) and ``agrees``, which is None
        where one of them is missing; ``not_checked``; ``violated``.

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
        ledger = ledger_of(folder, settings)
        if ledger is None:
            raise FileNotFoundError(
                f"{folder}: there is no ledger, so the privacy cost is unknown; restore it"
            )
        report = audit_ledger(ledger, exact=exact, **expected)
        checks = check_summary(summary, ledger, exact) if summary else []
        if not exact and summary.get("epsilon_exact") is not None:  # those are not computed anew
            checks = [{**c, "agrees": None} if c["name"].startswith(_EXACT) else c for c in checks]
        if (holdout := folder / HOLDOUT).is_file():
            paid = audit_ledger(holdout, exact=False)["epsilon"]
            checks.append(compared("holdout_epsilon", summary.get("holdout_epsilon"), paid))
        rows = read_rows(ledger)
        run = summary.get("run") or (next(iter(report["runs"]), None) if len(report["runs"]) == 1 else None)
        if run not in report["runs"]:
            checks.append(compared("run", run, ", ".join(report["runs"]) or "none"))
        digests, labels = contents_of(folder)
        if labels is not None:
            checks += _labels(labels, rows, str(run), bool(summary))
        if not summary and not _note(rows, files_topic(str(run), "files"))[1]:
            digests = {}  # of a run that has not noted any yet
        for place in ("files", "export", "report"):
            if place != writing:
                checks += _files(folder, digests, rows, str(run), place)
        names = {name for name in files_in(folder) if not name.endswith(".lock")}
        unbound = sorted(names - {check["name"] for check in checks} - {ledger.name, HOLDOUT})
        missing = [check["name"] for check in checks if check["agrees"] is None]
    return {
        **report,
        "ledger": str(ledger),
        "run": run,
        "checks": checks,
        "not_checked": [
            *([f"missing, or not listed in the ledger: {', '.join(missing)}"] if missing else []),
            *([f"files not listed in the ledger: {shortened(unbound)}"] if unbound else []),
            *NOT_CHECKED,
        ],
        "violated": report["within_budget"] is False or any(check["agrees"] is False for check in checks),
    }


def shortened(names: list[str]) -> str:
    """The first names of a list and the number of the others."""
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )


def _note(rows: _Rows, topic: str) -> tuple[int, str]:
    """Position and text of the last note on a topic; 0 and no text where there is none."""
    noted = [
        (row["position"], row["text"]) for row in rows if row["kind"] == "note" and row["topic"] == topic
    ]
    position, text = noted[-1] if noted else (0, "")
    if not isinstance(text, str) or len(text) > _MOST_NOTED:
        raise NotARun(f"row {position} of the ledger is not a note of a run")
    return position, text


def _labels(labels: dict[str, Any], rows: _Rows, run: str, finished: bool) -> Iterator[dict[str, Any]]:
    """Checks of the labels' file against the ledger's rows."""
    counts = labels["counts"]
    yield compared("labels: run", labels["run"], run)
    if (head := labels["head"]) is not None:
        known = any(row["hash"] == head for row in rows)
        yield compared("labels: ledger head", head, head if known else None)
    _, noted = _note(rows, counts_topic(run))
    if finished and noted:
        wanted = json.loads(noted.partition(":")[2])
        yield compared("labels: counts", {name: counts.get(name) for name in wanted}, wanted)


def _files(
    folder: Path, digests: dict[str, str], rows: _Rows, run: str, place: Place
) -> Iterator[dict[str, Any]]:
    """Digests of the files in a place, against those that the run noted there last."""
    position, text = _note(rows, files_topic(run, place))
    there: dict[str, str] = json.loads(text or "{}")
    here = digests
    if place != "files":
        exported = {f"{EXPORT}/{name}" for name in files_in(folder / EXPORT)}
        here = file_digests(folder, exported if place == "export" else {*REPORT, *there})
        there = there if here else {}  # deleted as a whole, which misleads no reader
        if any(row["kind"] == "charge" and row["run"] == run for row in rows[position:]):
            there = dict.fromkeys(here, "older than the run's last charge")
    for name in sorted({*here, *there}):
        yield compared(name, here.get(name), there.get(name))


def note_written(audit: Mapping[str, Any], folder: Path, names: Iterable[str], place: Place) -> None:
    """Note in a run's ledger which files were written; one that was mounted for reading keeps no note of them."""
    with contextlib.suppress(OSError):
        note_files(Path(audit["ledger"]), audit["run"], file_digests(folder, names), place)


def files_in(folder: Path) -> list[str]:
    """Names of all files in a folder and the folders in it."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
