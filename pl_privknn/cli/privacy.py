"""``privknn epsilon``, ``plan`` and ``audit``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import printable
from pl_privknn.cli.common import add_set, figure, importable, print_report, suggest, values_set

if TYPE_CHECKING:
    from pl_privknn.privacy.verify import Releases

_ADJACENCIES = ["add_remove", "replace_one"]
_UNITS = ["record", "person"]
_EXITS = (
    "exit status: 0 if all checks pass; 1 if a claim is violated (a figure of the summary does not match the ledger, "
    "the budget is exceeded, an attack measured more than was claimed); 2 if a file is "
    "missing, damaged or rewritten, or the command line is wrong"
)


def add_epsilon(commands: Any) -> None:
    """Register ``privknn epsilon`` with argparse's subparsers."""
    parser = commands.add_parser("epsilon", help="compute ε of records, plans, configurations or ledgers")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a ledger, a JSON or YAML list of records, a plan, a configuration, or a folder of runs; several over "
        "the same private data are composed",
    )
    parser.add_argument("--delta", type=float, help="δ, as 1e-5; by default the file's own")
    parser.add_argument("--adjacency", choices=_ADJACENCIES)
    parser.add_argument(
        "--unit", choices=_UNITS, help="unit of privacy of a bare list; other files state their own"
    )
    parser.add_argument("--num-classes", type=int, help="for a configuration without a data section")
    parser.add_argument("--fast", action="store_true", help="RDP and PLD only, without the exact figure")
    parser.add_argument(
        "--tradeoff",
        action="store_true",
        help="also the error rates of the strongest attack, and μ of Gaussian DP",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="plot the strongest attack's error rates; with --tradeoff"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_epsilon)


def run_epsilon(parsed: argparse.Namespace) -> int:
    """Print ε of the files together."""
    from pl_privknn._checks import check_int
    from pl_privknn.privacy.earlier_runs import ledgers_under
    from pl_privknn.privacy.verify import epsilon_of_files, releases_of, total

    exact = not parsed.fast
    if parsed.plot is not None and not parsed.tradeoff:
        raise ValueError(f"--plot {parsed.plot} draws the error rates of attacks; give --tradeoff too")
    if parsed.num_classes is not None:
        check_int("--num-classes", parsed.num_classes, minimum=2)
    files = [
        one for file in parsed.files for one in (ledgers_under(Path(file)) if Path(file).is_dir() else [file])
    ]
    plans = [_plan_of(str(file), parsed.num_classes) for file in files]
    if not any(plans):
        report = epsilon_of_files(files, parsed.delta, parsed.adjacency, exact, parsed.unit)
    parts = [(file, plan or releases_of(file)) for file, plan in zip(files, plans, strict=True)]
    if any(plans):
        report = total(parts, parsed.delta, parsed.adjacency, exact, parsed.unit)
    charges = [charge for _, part in parts for charge in part.charges]
    stated = {"delta": report["delta"], "adjacency": report["adjacency"]}
    if parsed.tradeoff:
        from pl_privknn.privacy.accounting.tradeoff import trade_off

        found = trade_off(charges, **stated, exact=exact)
        report |= found.to_dict()
        if parsed.plot is not None:
            found.plot(parsed.plot)
    print_report(report, parsed.json)
    return 0


def _plan_of(file: str, num_classes: int | None) -> Releases | None:
    """Planned releases of a configuration; None for files of other kinds."""
    if Path(file).suffix not in (".yaml", ".yml") or not Path(file).is_file():
        return None
    from pl_privknn.config import read_document

    document = read_document(file)
    if not isinstance(document, dict) or not {"labeling", "model"} & document.keys():
        return None
    from pl_privknn.planning import plan_of

    return plan_of(document, file, num_classes)


def add_plan(commands: Any) -> None:
    """Register ``privknn plan`` with argparse's subparsers."""
    text = "solve for the noise, or another setting, at a target ε"
    parser = commands.add_parser("plan", help=text, description=text)
    parser.add_argument("config", help="configuration of a teacher, of NoisySGD or of PrivateTraining")
    parser.add_argument("--epsilon", type=float, required=True, help="target ε")
    parser.add_argument(
        "--find",
        metavar="PATH",
        help="the setting to find, as in labeling.queries_per_round (the one that the teacher's class names)",
    )
    parser.add_argument("--unit", choices=_UNITS, help="unit of privacy, overriding the configuration's")
    parser.add_argument("--low", type=float, help="smallest value allowed")
    parser.add_argument("--high", type=float, help="largest value allowed")
    parser.add_argument(
        "--tie",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH=FACTOR",
        help="settings proportional to the one found, as the noise of a screening",
    )
    add_set(parser, "replace values of the configuration, as in labeling.queries_per_round=500")
    parser.add_argument("--num-classes", type=int, help="for a configuration without a data section")
    parser.add_argument("--fast", action="store_true", help="skip the exact accountant (slightly more noise)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_plan)


def run_plan(parsed: argparse.Namespace) -> int:
    """Calibrate the setting, and print the cost of the configuration."""
    from pl_privknn.config import put, read_document

    document = read_document(parsed.config)
    if not isinstance(document, dict):
        raise ValueError(
            f"{parsed.config} is not a configuration; give one of a teacher or a private training"
        )
    for path, value in values_set("--set", parsed.set).items():
        put(document, path, value)
    if parsed.unit is not None:
        where = "labeling.budget.unit" if "labeling" in document else "model.init_args.unit"
        put(document, where, parsed.unit)
        parsed.set.append(f"{where}={parsed.unit}")
    from pl_privknn.planning import solve

    plan = solve(
        document,
        parsed.find,
        parsed.epsilon,
        source=parsed.config,
        low=parsed.low,
        high=parsed.high,
        tied=values_set("--tie", parsed.tie),
        exact=not parsed.fast,
        num_classes=parsed.num_classes,
    )
    if parsed.json:
        print(json.dumps(plan.to_dict(), ensure_ascii=False))
        return 0
    print_report({**plan.values, "target": plan.target, **plan.report.to_dict()}, False)
    changes = [*parsed.set, *(f"{path}={value:.10g}" for path, value in plan.values.items())]
    suggest(f"fit --config {parsed.config} {' '.join(f'--{change}' for change in changes)}")
    return 0


# ---------------------------------------------------------------------------- audit


def add_audit(commands: Any) -> None:
    """Register ``privknn audit`` with argparse's subparsers."""
    text = "verify a run: recompute ε from its ledger, and compare plan, summary, card and export with it"
    audit = commands.add_parser("audit", help=text, description=text, epilog=_EXITS)
    audit.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a run's folder, whose figures are compared with its ledger; or a ledger, optionally with the run's "
        "summary.json",
    )
    audit.add_argument("--delta", type=float, help="expected δ of the ledger")
    audit.add_argument("--head", help="head hash noted earlier: the ledger must contain it")
    audit.add_argument("--json", action="store_true", help="print one JSON object")
    audit.add_argument("--export", metavar="FILE", help="also write the ledger as JSON")
    audit.add_argument("--adjacency", choices=_ADJACENCIES, help="expected adjacency")
    audit.add_argument("--unit", choices=_UNITS, help="expected unit of privacy")
    group = audit.add_argument_group("attacks: a measured lower bound on ε")
    group.add_argument(
        "--attack",
        metavar="CONFIG",
        help="attack a configuration's labeler or private training on its own data",
    )
    group.add_argument("--canaries", type=int, help="minimum number of canaries of an attack (3000)")
    group.add_argument("--confidence", type=float, help="confidence of the lower bound (0.95)")
    group.add_argument(
        "--seed", type=int, help="seed for reproducible noise instead of the operating system's"
    )
    audit.rare = [group]
    audit.set_defaults(run=run_audit)


def run_audit(parsed: argparse.Namespace) -> int:
    """Audit a run or a ledger, or attack a configuration; returns 1 where a claim is violated."""
    if parsed.attack is not None:
        return _run_attack(parsed)
    files = [Path(file) for file in parsed.files]
    if not files:
        raise ValueError("no file given; name a ledger or a run's folder")
    if len(files) > 2:
        raise ValueError(f"found {len(files)} files; give a ledger, and at most one summary.json")
    from pl_privknn.privacy.verify import audit_ledger, audit_run, export_ledger, is_ledger, reading

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
    from pl_privknn.privacy.verify import check_summary, mapping_of

    content = mapping_of(summary)
    if "epsilon" not in content:
        raise ValueError(
            f"{summary} is not a run's summary.json: it has no 'epsilon'; give the one in a run's folder"
        )
    return check_summary(content, ledger)


def _print_charges(charges: list[dict[str, Any]]) -> None:
    from pl_privknn.privacy.verify import parameters_text

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


def _run_attack(parsed: argparse.Namespace) -> int:
    """Attack the labeler or training of a configuration."""
    if parsed.files:
        raise ValueError(f"--attack {parsed.attack} takes only a configuration; remove the ledger")
    from pl_privknn.auditing.attack import (
        attack_labeler,
        attack_training,
        target_of_config,
        training_of_config,
    )
    from pl_privknn.config import read_document
    from pl_privknn.planning import is_training
    from pl_privknn.privacy.noise import SeededNoise

    document = read_document(parsed.attack)
    settings = {name: getattr(parsed, name) for name in ("canaries", "confidence")}
    settings["noise"] = None if parsed.seed is None else SeededNoise(parsed.seed)
    settings = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(document, dict):
        raise ValueError(
            f"{parsed.attack}: expected a configuration with a labeling section or a private training"
        )
    with importable([parsed.attack]):
        if is_training(document):
            found = attack_training(training_of_config(document, parsed.attack), **settings)
        else:
            found = attack_labeler(target_of_config(document, parsed.attack), **settings)
    print_report(found.to_dict(), parsed.json)
    return int(found.violated)
