"""``privknn plan``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_privknn.planning import Plan


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
