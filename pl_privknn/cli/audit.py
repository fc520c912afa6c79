"""``privknn audit``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import printable
from pl_privknn.cli.common import figure, importable, print_report

if TYPE_CHECKING:
    from pl_privknn.labelers.base import Labeler
    from pl_privknn.privacy.mechanisms import Adjacency, Charge

_EXITS = (
    "exit status: 0 if all checks pass; 1 if a claim is violated (a figure of the summary does not match the ledger, "
    "the budget is exceeded, an empirical audit or an attack measured more than was claimed); 2 if a file is "
    "missing, damaged or rewritten, or the command line is wrong"
)


def add_audit(commands: Any) -> None:
    """Register ``privknn audit`` with argparse's subparsers."""
    text = "verify a run: recompute ε from its ledger, and compare plan, summary, card and export with it"
    audit = commands.add_parser("audit", help=text, description=text, epilog=_EXITS)
    audit.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a run's folder, whose figures are compared with its ledger; or a ledger, optionally with "
        "the run's summary.json; with --empirical a ledger or a JSON list of records",
    )
    audit.add_argument("--delta", type=float, help="expected δ of the ledger; with --empirical, δ of a list")
    audit.add_argument("--head", help="head hash noted earlier: the ledger must contain it")
    audit.add_argument("--json", action="store_true", help="print one JSON object")
    audit.add_argument("--export", metavar="FILE", help="also write the ledger as JSON")
    audit.add_argument("--adjacency", choices=["add_remove", "replace_one"], help="expected adjacency")
    audit.add_argument("--unit", choices=["record", "person"], help="expected unit of privacy")
    group = audit.add_argument_group("empirical audits: measured lower bounds on ε")
    group.add_argument(
        "--empirical",
        action="store_true",
        help="draw each mechanism of a ledger or a JSON list of records many times, with and without a record",
    )
    group.add_argument(
        "--attack",
        metavar="CONFIG",
        help="attack a configuration's labeler or private training on its own data",
    )
    group.add_argument(
        "--adversary",
        choices=["worst", "natural", "poisoned_private", "poisoned_public", "no_control"],
        default="worst",
        metavar="NAME",
        help="what an attack on Private-kNN, PATE or Ind-KNN controls: worst (default), natural, poisoned_private, "
        "poisoned_public or no_control",
    )
    group.add_argument(
        "--trials", type=int, help="draws of a mechanism with and without the record, each (50000)"
    )
    group.add_argument("--canaries", type=int, help="minimum number of canaries of an attack (3000)")
    group.add_argument("--confidence", type=float, help="confidence of lower bounds (0.95)")
    group.add_argument(
        "--seed", type=int, help="seed for reproducible noise instead of the operating system's"
    )
    audit.rare = [group]
    audit.set_defaults(run=run_audit)


def run_audit(parsed: argparse.Namespace) -> int:
    """Audit a run, ledger or list; returns 1 where a claim is violated."""
    if parsed.attack is not None:
        return _run_attack(parsed)
    if parsed.adversary != "worst":
        raise ValueError(
            f"--adversary {parsed.adversary} applies to an attack; name its configuration with --attack"
        )
    if parsed.empirical:
        return _run_empirical(parsed)
    files = [Path(file) for file in parsed.files]
    if not files:
        raise ValueError("no file given; name a ledger or a run's folder")
    if len(files) > 2:
        raise ValueError(f"found {len(files)} files; give a ledger, and at most one summary.json")
    from pl_privknn.privacy.audit import audit_run, reading
    from pl_privknn.privacy.verification import audit_ledger, export_ledger, is_ledger

    asked = {name: getattr(parsed, name) for name in ("delta", "head", "adjacency", "unit")}
    folder = len(files) == 1 and files[0].is_dir()
    if folder:
        report = audit_run(files[0], **asked)
        ledger, checks = Path(report["ledger"]), report["checks"]
    else:
        summary, ledger = (None, files[0]) if len(files) == 1 else files
        if summary is not None and summary.is_file() and is_ledger(summary):
            summary, ledger = ledger, summary
        with reading(ledger):
            report = audit_ledger(ledger, **asked)
            checks = [] if summary is None else _checked(summary, ledger)
    violated = report["within_budget"] is False or any(check["agrees"] is False for check in checks)
    if len(files) == 2:
        report |= {"summary": checks, "violated": violated}
    if parsed.export is not None:
        text = json.dumps(export_ledger(ledger), indent=2, ensure_ascii=False)
        Path(parsed.export).write_text(text + "\n", encoding="utf-8")
    print_report(report, parsed.json)
    if not parsed.json:
        _print_charges(report["charges"])
        _print_checks(checks, "run" if folder else "summary")
        if folder:
            print("not checked:", *(printable(text) for text in report["not_checked"]), sep="\n  ")
    return int(violated)


def _checked(summary: Path, ledger: Path) -> list[dict[str, Any]]:
    from pl_privknn.privacy.audit import mapping_of
    from pl_privknn.privacy.verification import check_summary

    content = mapping_of(summary)
    if "epsilon" not in content:
        raise ValueError(
            f"{summary} is not a run's summary.json: it has no 'epsilon'; give the one in a run's folder"
        )
    return check_summary(content, ledger)


def _print_charges(charges: list[dict[str, Any]]) -> None:
    from pl_privknn.privacy.verification import parameters_text

    print(f"\n{'row':>5} {'releases':>9}  {'noise':13} {'mechanism':21} parameters")
    for charge in charges:
        record = charge["release"]
        noise = charge["noise"] or "not stated"
        line = f"{noise:13} {record['mechanism']:21} {parameters_text(record)}"
        print(f"{charge['row']:>5} {record['count']:>9}  {printable(line)}")


def _print_checks(checks: list[dict[str, Any]], what: str) -> None:
    if not checks:
        return
    print(f"\n{what:21} {'stated':>14}  {'ledger':>14}")
    for check in checks:
        words = {True: "agrees", False: "DIFFERS", None: "not in the ledger"}
        name = check["name"]
        stated, found = (
            "–" if check[side] is None else _short(name, check[side]) for side in ("stated", "found")
        )
        print(f"{printable(name):21} {stated:>14}  {found:>14}  {words[check['agrees']]}")
    wrong = [check["name"] for check in checks if check["agrees"] is False]
    if wrong:
        print(f"figures that do not match the ledger: {printable(', '.join(wrong))}")
    else:
        print("all figures match the ledger")


def _short(name: str, value: Any) -> str:
    text = figure(name, value)
    return text if len(text) <= 14 else f"{text[:13]}…"


# ---------------------------------------------------------------------------- empirical audits


def _settings(parsed: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Settings from the named options that were given, and the noise source."""
    from pl_privknn.privacy.noise import SeededNoise

    given = {name: getattr(parsed, name) for name in (*names, "confidence")}
    given["noise"] = None if parsed.seed is None else SeededNoise(parsed.seed)
    return {name: value for name, value in given.items() if value is not None}


def _run_attack(parsed: argparse.Namespace) -> int:
    """Attack the labeler or training of a configuration."""
    if parsed.files or parsed.empirical:
        raise ValueError(
            f"--attack {parsed.attack} takes only a configuration; remove the ledger and --empirical"
        )
    from pl_privknn.auditing.labelers import attack_labeler, target_of_config
    from pl_privknn.auditing.training import attack_training, training_of_config
    from pl_privknn.config import read_document
    from pl_privknn.training.configured import is_training

    document, settings = read_document(parsed.attack), _settings(parsed, "canaries")
    if not isinstance(document, dict):
        raise ValueError(
            f"{parsed.attack}: expected a configuration with a labeling section or a private training"
        )
    with importable([parsed.attack]):
        if is_training(document):
            if parsed.adversary != "worst":
                raise ValueError(
                    f"--adversary {parsed.adversary} applies to labelers, but this configuration trains a model "
                    "privately; leave it out"
                )
            found = attack_training(training_of_config(document, parsed.attack), **settings)
        else:
            target = target_of_config(document, parsed.attack)
            found = attack_labeler(target, adversary=parsed.adversary, **settings)
    print_report(found.to_dict(), parsed.json)
    return int(found.violated)


def _run_empirical(parsed: argparse.Namespace) -> int:
    """Audit the mechanisms of a list or ledger empirically."""
    from pl_privknn.auditing import audit_records

    if parsed.head is not None:
        raise ValueError("--head applies to the audit of a ledger's rows; leave out --head or --empirical")
    if len(parsed.files) != 1:
        raise ValueError(
            f"--empirical takes one file, a ledger or a list of records; got {len(parsed.files)}"
        )
    charges, delta, adjacency = _claims(Path(parsed.files[0]), parsed.delta, parsed.adjacency)
    rows = audit_records(charges, delta=delta, adjacency=adjacency, **_settings(parsed, "trials"))
    violated = any(row.get("violated", False) for row in rows)
    if parsed.json:
        print(json.dumps({"violated": violated, "audits": rows}, ensure_ascii=False))
        return int(violated)
    print(f"{'mechanism':32} {'releases':>14} {'claimed ε':>10} {'empirical ε':>12}  verdict")
    for row in rows:
        size = f"{row['releases']} of {row['recorded']}"
        bound = row.get("epsilon_estimate" if row.get("gaussian") else "epsilon_lower")
        empirical = "" if bound is None else f"{bound:.4f}"
        print(f"{row['subject']:32} {size:>14} {row['epsilon']:10.4f} {empirical:>12}  {row['verdict']}")
    print(f"at δ={rows[0]['delta']:g}, {rows[0].get('adjacency', 'add_remove')}")
    return int(violated)


def labeler_class(given: str) -> type[Labeler]:
    """The labeler class that the last word of ``given`` names: a built-in one, or an import path.

    Raises:
        ValueError: for anything else.
    """
    import importlib

    from pl_privknn import labelers
    from pl_privknn.labelers.base import Labeler

    name = given.split()[-1]
    module, _, attribute = name.rpartition(".")
    with importable(["."]):
        try:
            found = getattr(importlib.import_module(module) if module else labelers, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{given} must be a built-in labeler, such as PrivateKNN, or an import path ({error})"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Labeler)):
        raise ValueError(f"{given} is not a subclass of Labeler")
    return found


def _claims(
    path: Path, delta: float | None, adjacency: Adjacency | None
) -> tuple[list[Charge], float, Adjacency]:
    """Charges of a list of records or a ledger, with δ and adjacency."""
    from pl_privknn.privacy.accounting.accountant import read_records
    from pl_privknn.privacy.verification import epsilon_of_file, read_releases

    # Rejects an invalid file, δ or adjacency as ``privknn epsilon`` does.
    report = epsilon_of_file(path, delta, adjacency, exact=False)
    if "runs" in report:
        records = [record for run in report["runs"].values() for record in run["charged"]]
        charges = read_records(records)
    else:
        charges = list(read_releases(path).charges)
    if not charges:
        raise ValueError(f"{path} holds no charged release; there is nothing to audit")
    return charges, report["delta"], report["adjacency"]
