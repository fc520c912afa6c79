"""``privknn plan`` and ``privknn audit --empirical``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_privknn.privacy.accounting.plan import Plan
    from pl_privknn.privacy.mechanisms import Adjacency, Charge

_NOISES = ["gaussian", "discrete_gaussian", "laplace", "discrete_laplace", "exponential_argmax"]
_ADJACENCIES = ["add_remove", "replace_one"]

# Options of each teacher: name, type or choices, help. They are the arguments of its plan_… function.
_Option = tuple[str, Any, str]
_NOISE_SCALE: _Option = ("noise-scale", float, "σ of Gaussian noise, b of the other kinds")
_TEACHERS: dict[str, tuple[str, list[_Option]]] = {
    "private-knn": (
        "leave out one of --noise-scale, --queries and --sampling-rate: it is found",
        [
            _NOISE_SCALE,
            ("queries", int, "queries of all rounds together"),
            ("sampling-rate", float, "γ in (0, 1]"),
            ("k", int, "neighbours that vote (300)"),
            ("answers", int, "the most answers of all rounds together; as many as queries by default"),
            ("answer-share", float, "answers as a share of the queries, instead of --answers"),
            ("num-classes", int, "number of classes (10)"),
            ("noise", _NOISES, "kind of aggregation noise (gaussian)"),
            ("threshold", float, "of the screening, in votes (0.6 k)"),
            ("sigma-ratio", float, "screening noise over aggregation noise (3)"),
            ("rounds", int, "rounds of queries (1)"),
        ],
    ),
    "reverse-knn": (
        "leave out --noise-scale or --rounds: it is found",
        [
            _NOISE_SCALE,
            ("rounds", int, "releases of the whole table of counts"),
            ("k", int, "queries that a record votes for (1)"),
            ("noise", _NOISES[:-1], "kind of noise (laplace)"),
            ("adjacency", _ADJACENCIES, "neighbouring relation (add_remove)"),
        ],
    ),
    "release": (
        "leave out one of --noise-scale, --count and --sampling-rate: it is found",
        [
            _NOISE_SCALE,
            ("count", int, "number of releases"),
            ("sampling-rate", float, "Poisson rate in (0, 1]"),
            ("noise", _NOISES[:-1], "kind of noise (gaussian)"),
            ("sensitivity", float, "L2 for Gaussian kinds, L1 for Laplace kinds (1)"),
            ("adjacency", _ADJACENCIES, "neighbouring relation (add_remove)"),
        ],
    ),
    "noisy-sgd": (
        "leave out --noise-multiplier or --epochs: it is found",
        [
            ("noise-multiplier", float, "noise on the sum of clipped gradients over the clipping norm"),
            ("epochs", int, "passes over the records"),
            ("records", int, "number of private records"),
            ("batch-size", int, "expected size of a Poisson batch"),
        ],
    ),
}
_REQUIRED = {"records", "batch-size"}


def add_plan(commands: Any) -> None:
    """Register ``privknn plan`` with argparse's subparsers."""
    plan = commands.add_parser("plan", help="find the noise, the queries or the sampling rate for an ε")
    teachers = plan.add_subparsers(title="what to plan", metavar="TEACHER", required=True)
    for name, (text, options) in _TEACHERS.items():
        parser = teachers.add_parser(name, help=text, description=text)
        parser.add_argument("--epsilon", type=float, default=None, help="target; without it all is given")
        parser.add_argument("--delta", type=float, required=True, help="δ, for instance 1e-5")
        for option, kind, help_text in options:
            wanted = {"choices": kind} if isinstance(kind, list) else {"type": kind}
            required = option in _REQUIRED
            parser.add_argument(f"--{option}", default=None, help=help_text, required=required, **wanted)
        if name == "private-knn":
            parser.add_argument("--no-screening", action="store_true", help="answer every query")
            parser.add_argument(
                "--exact", action="store_true", help="search on the exact figure too (slower)"
            )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--plot", metavar="FILE", default=None, help="draw ε against the number of queries"
        )
        parser.set_defaults(run=run_plan, teacher=name)


def run_plan(parsed: argparse.Namespace) -> int:
    """Find the plan, print its table and configuration, and draw it."""
    plan = _plan(parsed)
    if parsed.plot is not None:
        plan.plot(parsed.plot)
    if parsed.json:
        print(json.dumps(plan.to_dict(), ensure_ascii=False))
        return 0
    _print_plan(plan)
    return 0


def _plan(parsed: argparse.Namespace) -> Plan:
    from pl_privknn.privacy.accounting import teacher_plans as plans

    functions: dict[str, Callable[..., Plan]] = {
        "private-knn": plans.plan_private_knn,
        "reverse-knn": plans.plan_reverse_knn,
        "release": plans.plan_release,
        "noisy-sgd": plans.plan_noisy_sgd,
    }
    names = [option.replace("-", "_") for option, _, _ in _TEACHERS[parsed.teacher][1]]
    given = {name: value for name in names if (value := getattr(parsed, name)) is not None}
    if "answers" in given:
        given["max_answers"] = given.pop("answers")
    if parsed.teacher == "private-knn":
        given |= {"screening": not parsed.no_screening, "exact_search": parsed.exact}
    if parsed.teacher == "release":
        # Not sampled, unless the rate is what is to be found.
        searched = parsed.epsilon is not None and {"noise_scale", "count"} <= set(given)
        given.setdefault("sampling_rate", None if searched else 1.0)
    return functions[parsed.teacher](epsilon=parsed.epsilon, delta=parsed.delta, **given)


def _print_plan(plan: Plan) -> None:
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
    from pl_privknn.privacy.ledger.audit import epsilon_of_file
    from pl_privknn.privacy.ledger.release_files import read_releases

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
