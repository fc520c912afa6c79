"""``privknn plan`` and ``privknn audit --empirical``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_privknn.planning import Plan
    from pl_privknn.privacy.mechanisms import Adjacency, Charge

_ADJACENCIES = ["add_remove", "replace_one"]


def add_plan(commands: Any, words: Sequence[str]) -> None:
    """Register ``privknn plan`` with argparse's subparsers; its own words only where they are wanted."""
    plan = commands.add_parser("plan", help="find the noise, the queries or the sampling rate for an ε")
    if words[:1] != ["plan"]:  # the teachers take a while to import
        return
    from pl_privknn.planning import TEACHERS
    from pl_privknn.planning.options import SEARCHED

    teachers = plan.add_subparsers(title="what to plan", metavar="TEACHER", required=True)
    for name, row in TEACHERS.items():
        free = [option.switch for option in row.options if option.name in row.free]
        text = f"leave out one of {', '.join(free)}: it is found" if len(free) > 1 else f"{free[0]} is found"
        parser = teachers.add_parser(name, help=text, description=f"{row.title}: {text}")
        parser.add_argument("--epsilon", type=float, default=None, help="target; without it all is given")
        parser.add_argument("--delta", type=float, required=True, help="δ, for instance 1e-5")
        for option in row.options:
            wanted: dict[str, Any] = {"type": option.kind, "required": option.required}
            if option.kind is bool:
                wanted = {"action": "store_const", "const": not option.default}
            elif isinstance(option.kind, tuple):
                wanted = {"choices": option.kind}
            parser.add_argument(option.switch, dest=option.name, default=None, help=option.text, **wanted)
        if row.exact:
            parser.add_argument(
                "--exact", action="store_true", help="search on the exact figure too (slower)"
            )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--plot", metavar="FILE", default=None, help="draw ε against the number of queries"
        )
        if name in SEARCHED:
            parser.add_argument(
                "--search",
                action="store_true",
                help="find the best settings at the target ε on stand-in data",
            )
            parser.add_argument("--records", type=int, default=None, help="with --search: private records")
            parser.add_argument(
                "--public", type=int, default=1000, help="with --search: public examples (1000)"
            )
        parser.set_defaults(run=run_plan, teacher=name, exact=False, search=False)

    _add_config(teachers.add_parser("config", help="find one setting of a configuration, of any teacher"))


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="configuration with a labeling section")
    parser.add_argument(
        "--find", metavar="PATH", required=True, help="labeling.labeler.init_args.noise.init_args.sigma, say"
    )
    parser.add_argument("--epsilon", type=float, required=True, help="target")
    parser.add_argument("--delta", type=float, default=None, help="the configuration's own by default")
    parser.add_argument("--low", type=float, default=1e-2, help="smallest value allowed (0.01)")
    parser.add_argument("--high", type=float, default=1e6, help="largest value allowed (1e6)")
    parser.add_argument("--rising", action="store_true", help="ε grows with it, as with queries")
    parser.add_argument("--whole", action="store_true", help="it is a whole number")
    parser.add_argument(
        "--num-classes", type=int, default=None, help="for a configuration without a data section"
    )
    parser.add_argument("--exact", action="store_true", help="search on the exact figure too (slower)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run_config)


def _run_config(parsed: argparse.Namespace) -> int:
    from pl_privknn._checks import check_positive
    from pl_privknn.documents import read_configuration
    from pl_privknn.planning.configuration_plan import plan_with_setting
    from pl_privknn.planning.setting_search import Calibrate

    low, high = check_positive("low", parsed.low), check_positive("high", parsed.high)
    if low >= high:
        raise ValueError(f"low={low:g} must be below high={high:g}")
    wanted = Calibrate(parsed.find, low, high, parsed.rising, parsed.whole, parsed.exact)
    document = read_configuration(parsed.file)
    if not isinstance(document, dict) or "labeling" not in document:
        raise ValueError(f"{parsed.file}: there is no labeling section, so there is nothing to plan")
    found = plan_with_setting(document, parsed.file, wanted, parsed.epsilon, parsed.delta, parsed.num_classes)
    return _show(found, parsed.json)


def run_plan(parsed: argparse.Namespace) -> int:
    """Find the plan, print its table and configuration, and draw it."""
    from pl_privknn.planning import TEACHERS, plan

    if parsed.search:
        return _run_search(parsed)
    names = [option.name for option in TEACHERS[parsed.teacher].options]
    options = {name: getattr(parsed, name) for name in names}
    found = plan(
        parsed.teacher, epsilon=parsed.epsilon, delta=parsed.delta, exact_search=parsed.exact, **options
    )
    if parsed.plot is not None:
        found.plot(parsed.plot)
    return _show(found, parsed.json)


def _run_search(parsed: argparse.Namespace) -> int:
    """Print the best settings, and the plan of the very best."""
    from pl_privknn.planning.vote_search import search_settings

    if parsed.epsilon is None or parsed.records is None:
        raise ValueError(f"epsilon={parsed.epsilon}, records={parsed.records}: --search needs both")
    found = search_settings(
        parsed.teacher,
        epsilon=parsed.epsilon,
        delta=parsed.delta,
        records=parsed.records,
        public=parsed.public,
        num_classes=getattr(parsed, "num_classes", None) or 10,
    )
    if parsed.json:
        rows = [
            {**item.settings, "answers": item.answers, "labels": item.labels, "student": item.student}
            for item in found
        ]
        print(json.dumps({"search": rows, "plan": found[0].plan.to_dict()}, ensure_ascii=False))
        return 0
    print(
        "# tried on scikit-learn's digits, best first: answers, share of right ones, a linear model's accuracy"
    )
    for item in found[:5]:
        said = ", ".join(f"{name}={value}" for name, value in item.settings.items() if name != "num_classes")
        print(f"# {item.answers:5.0f}  {item.labels:.3f}  {item.student:.3f}  {said}")
    _print_plan(found[0].plan)
    return 0


def _show(plan: Plan, as_json: bool) -> int:
    if as_json:
        print(json.dumps(plan.to_dict(), ensure_ascii=False))
    else:
        _print_plan(plan)
    return 0


def _print_plan(plan: Plan) -> None:
    from pl_privknn.planning.utility import hopeless

    report = plan.report
    rows: list[tuple[str, Any, str]] = [
        (name, value, "found" if name == plan.found else "") for name, value in plan.parameters.items()
    ]
    rows += [
        ("delta", report.delta, ""),
        ("adjacency", report.adjacency, ""),
        ("epsilon", report.epsilon, "" if plan.target is None else f"target {plan.target:g}"),
        ("epsilon_rdp", report.epsilon_rdp, ""),
        ("epsilon_rdp_classic", report.epsilon_rdp_classic, ""),
        ("epsilon_pld", report.epsilon_pld, ""),
        ("epsilon_exact", report.epsilon_exact, ""),
    ]
    print(f"# {plan.teacher}")
    width = max(len(name) for name, _, _ in rows)
    for name, value, note in rows:
        if value is not None:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            print(f"# {name:{width}}  {shown:>12}  {note}".rstrip())
    for line in (*map(str, plan.utility), *(f"WARNING {text}" for text in hopeless(plan.utility))):
        print(f"# {line}")
    print(plan.yaml(), end="")


def add_empirical(audit: argparse.ArgumentParser) -> None:
    """Add the options of the empirical audit to ``privknn audit``."""
    group = audit.add_argument_group("empirical audit")
    group.add_argument(
        "--empirical",
        action="store_true",
        help="run each mechanism of a ledger or a JSON list of records many times, with and without a record",
    )
    group.add_argument(
        "--labeler",
        action="append",
        metavar="CLASS",
        help="instead of a ledger: run a whole labeler so, for instance PrivateKNN, or all; may be repeated",
    )
    group.add_argument(
        "--trials",
        type=int,
        default=None,
        help="runs on either side (50000 of a mechanism, 4000 of a labeler)",
    )
    group.add_argument("--confidence", type=float, default=0.999, help="of each verdict (0.999)")
    group.add_argument("--adjacency", choices=_ADJACENCIES, default=None, help="that has to be kept")
    group.add_argument("--seed", type=int, default=None, help="reproducible noise instead of the system's")


def run_empirical(parsed: argparse.Namespace) -> int:
    """Run the empirical audit; 1 where a claim was violated."""
    from pl_privknn.privacy.auditing.worst_pairs import audit_records
    from pl_privknn.privacy.noise import SeededNoise

    if parsed.head is not None:
        raise ValueError("--head belongs to the audit of a ledger's rows; leave it or --empirical out")
    if (parsed.ledger is None) == (parsed.labeler is None):
        raise ValueError("give either a ledger's file or --labeler, for instance --labeler PrivateKNN")
    settings: dict[str, Any] = {
        "confidence": parsed.confidence,
        "noise": None if parsed.seed is None else SeededNoise(parsed.seed),
    }
    if parsed.trials is not None:
        settings["trials"] = parsed.trials
    if parsed.labeler is not None:
        if parsed.adjacency is not None:
            raise ValueError("--adjacency belongs to a ledger or list; labelers are audited under add_remove")
        delta, adjacency = 1e-5 if parsed.delta is None else parsed.delta, "add_remove"
        rows = _audited_labelers(parsed.labeler, delta=delta, **settings)
    else:
        charges, delta, adjacency = _claims(Path(parsed.ledger), parsed.delta, parsed.adjacency)
        rows = audit_records(charges, delta=delta, adjacency=adjacency, **settings)
    violated = any(row.get("violated", False) for row in rows)
    if parsed.json:
        report = {"delta": delta, "adjacency": adjacency, "violated": violated, "audits": rows}
        print(json.dumps(report, ensure_ascii=False))
        return int(violated)
    print(f"{'what':32} {'releases':>12} {'claimed ε':>10} {'empirical ε':>12}  verdict")
    for row in rows:
        name = row.get("mechanism") or f"{row['labeler']}, {row['scene']}"
        releases = f"{row['releases']} of {row.get('recorded', row['releases'])}"
        empirical = f"{row['empirical']:.4f}" if "empirical" in row else ""
        print(f"{name:32} {releases:>12} {row['claimed']:10.4f} {empirical:>12}  {row['verdict']}")
    trials = next((row["trials"] for row in rows if "trials" in row), 0)
    print(f"at δ={delta:g}, {adjacency}; {trials} runs with and without the record")
    return int(violated)


def _audited_labelers(names: list[str], **settings: Any) -> list[dict[str, Any]]:
    from pl_privknn.testing.audit import SCENES, audit_labeler

    kinds = {kind.__name__: kind for kind in SCENES}
    if unknown := [name for name in names if name not in (*kinds, "all")]:
        raise ValueError(f"--labeler {unknown[0]} must be one of {', '.join(kinds)}, or all")
    chosen = list(kinds) if "all" in names else names
    return [row for name in chosen for row in audit_labeler(kinds[name], **settings)]


def _claims(
    path: Path, delta: float | None, adjacency: Adjacency | None
) -> tuple[list[Charge], float, Adjacency]:
    """What a list of records says, or what a ledger has charged."""
    from pl_privknn.privacy.accounting.accountant import read_records
    from pl_privknn.privacy.verification import epsilon_of_file, read_releases

    # A bad file, δ or adjacency is refused here as by ``privknn epsilon``.
    report = epsilon_of_file(path, delta, adjacency, exact=False)
    if "runs" in report:
        records = [record for run in report["runs"].values() for record in run["charged"]]
        charges = read_records(records)
    else:
        charges = list(read_releases(path).charges)
    if not charges:
        raise ValueError(f"{path} holds no charged release, so there is nothing to run")
    return charges, report["delta"], report["adjacency"]
