"""``privknn audit``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pl_privknn.cli import privacy as cli_privacy
from pl_privknn.cli.attack import add_attack, run_attack

_EXITS = (
    "exit status: 0 where everything holds; 1 where a claim is violated (a figure of the summary does not follow "
    "from the ledger, the budget is passed, an empirical audit found more than was claimed); 2 where a file is "
    "missing, damaged or rewritten, or the command line is wrong"
)


def add_audit(commands: Any) -> None:
    """Register ``privknn audit`` with argparse's subparsers."""
    text = "check a ledger's hash chain, recompute its ε, and check a run's summary against it"
    audit = commands.add_parser("audit", help=text, description=text, epilog=_EXITS)
    audit.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="the ledger, and the run's summary.json where it is to be checked; with --empirical also a JSON list of "
        "records, or --labeler",
    )
    audit.add_argument(
        "--delta",
        type=float,
        default=None,
        help="δ that the ledger has to keep; with --empirical, that of a list",
    )
    audit.add_argument("--head", default=None, help="head hash noted earlier: the ledger must contain it")
    audit.add_argument("--json", action="store_true", help="print one JSON object")
    audit.add_argument("--export", metavar="FILE", default=None, help="also write the ledger as JSON")
    cli_privacy.add_empirical(audit)
    add_attack(audit)
    audit.set_defaults(run=run_audit)


def run_audit(parsed: argparse.Namespace) -> int:
    """Audit what was named; 1 where a claim is violated."""
    if parsed.attack is not None:
        return run_attack(parsed)
    files = [Path(file) for file in parsed.files]
    if parsed.empirical:
        if len(files) > 1:
            raise ValueError(f"--empirical takes one file, not {len(files)}; leave {files[1]} out")
        parsed.ledger = str(files[0]) if files else None
        return cli_privacy.run_empirical(parsed)
    if not files or parsed.labeler is not None:
        raise ValueError("name the ledger's file; --labeler belongs to --empirical")
    if len(files) > 2:
        raise ValueError(f"found {len(files)} files; give a ledger, and at most one summary.json")
    from pl_privknn.privacy.verification import audit_ledger, export_ledger, is_ledger

    summary, ledger = (None, files[0]) if len(files) == 1 else files
    if summary is not None and summary.is_file() and is_ledger(summary):
        summary, ledger = ledger, summary
    report = audit_ledger(ledger, delta=parsed.delta, head=parsed.head, adjacency=parsed.adjacency)
    checks = [] if summary is None else _checked(summary, ledger)
    if parsed.export is not None:
        text = json.dumps(export_ledger(ledger), indent=2, ensure_ascii=False)
        Path(parsed.export).write_text(text + "\n", encoding="utf-8")
    violated = report["within_budget"] is False or any(check["agrees"] is False for check in checks)
    if parsed.json:
        found = report if summary is None else {**report, "summary": checks, "violated": violated}
        print(json.dumps(found, ensure_ascii=False))
    else:
        print_figures(report)
        _print_charges(report["charges"])
        _print_checks(checks)
    return int(violated)


def _checked(summary: Path, ledger: Path) -> list[dict[str, Any]]:
    from pl_privknn.documents import read_document
    from pl_privknn.privacy.verification import check_summary

    content = read_document(summary)
    if not isinstance(content, dict) or "epsilon" not in content:
        raise ValueError(
            f"{summary} is no run's summary.json: it has no 'epsilon'; give the file of a run's folder"
        )
    return check_summary(content, ledger)


def print_figures(report: dict[str, Any]) -> None:
    """Print the plain figures of a report, one a line."""
    width = max(len(name) for name in report)
    for name, value in report.items():
        if not isinstance(value, list | dict):
            print(f"{name:{width}}  {value:.6g}" if isinstance(value, float) else f"{name:{width}}  {value}")


def _print_charges(charges: list[dict[str, Any]]) -> None:
    from pl_privknn.privacy.verification import parameters_text

    print(f"\n{'row':>5} {'releases':>9}  {'noise':13} {'mechanism':21} parameters")
    for charge in charges:
        record = charge["release"]
        noise = charge["noise"] or "not stated"
        parameters = parameters_text(record)
        print(f"{charge['row']:>5} {record['count']:>9}  {noise:13} {record['mechanism']:21} {parameters}")


def _print_checks(checks: list[dict[str, Any]]) -> None:
    if not checks:
        return
    print(f"\n{'summary':21} {'stated':>14}  {'ledger':>14}")
    for check in checks:
        words = {True: "agrees", False: "DIFFERS", None: "not in the ledger"}
        found = "–" if check["agrees"] is None else _short(check["found"])
        print(f"{check['name']:21} {_short(check['stated']):>14}  {found:>14}  {words[check['agrees']]}")
    wrong = [check["name"] for check in checks if check["agrees"] is False]
    if wrong:
        print(f"the summary does not follow from the ledger: {', '.join(wrong)}")
    else:
        print("the summary follows from the ledger")


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 14 else f"{text[:13]}…"
