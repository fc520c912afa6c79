"""``privknn epsilon`` and ``privknn plan``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn.cli.common import add_set, print_report, suggest, values_set

if TYPE_CHECKING:
    from pl_privknn.privacy.verification import Releases

_ADJACENCIES = ["add_remove", "replace_one"]
_UNITS = ["record", "person"]


def add_epsilon(commands: Any) -> None:
    """Register ``privknn epsilon`` with argparse's subparsers."""
    parser = commands.add_parser("epsilon", help="compute ε of records, plans, configurations or ledgers")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a ledger, a JSON or YAML list of records, a plan, or a configuration; several files over the same "
        "private data are composed",
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
    from pl_privknn.privacy.verification import epsilon_of_files, releases_of, total

    exact = not parsed.fast
    if parsed.plot is not None and not parsed.tradeoff:
        raise ValueError(f"--plot {parsed.plot} draws the error rates of attacks; give --tradeoff too")
    if parsed.num_classes is not None:
        check_int("--num-classes", parsed.num_classes, minimum=2)
    plans = [_plan_of(file, parsed.num_classes) for file in parsed.files]
    if not any(plans):
        report = epsilon_of_files(parsed.files, parsed.delta, parsed.adjacency, exact, parsed.unit)
    parts = [(file, plan or releases_of(file)) for file, plan in zip(parsed.files, plans, strict=True)]
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
    from pl_privknn.planning import solve

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
