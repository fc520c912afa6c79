"""The ``privknn`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from pl_privknn import cli_privacy

_TRAINING = {
    "fit": "train a student on privately bought labels (--resume DIR continues an interrupted run)",
    "validate": "evaluate a checkpoint on public images",
    "test": "evaluate a checkpoint on the test set",
    "predict": "class probabilities for the test images",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one ``privknn`` command.

    Args:
        args: the words after ``privknn``; those of the process by default.

    Returns:
        The exit status: 0, or 1 where the command says that something is wrong.
    """
    words = list(sys.argv[1:] if args is None else args)
    if words and words[0] in _TRAINING:
        from pl_privknn.training_cli import run_training

        return run_training(words)
    parser = _parser()
    parsed = parser.parse_args(words)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0 if not words else 2
    try:
        status: int = parsed.run(parsed)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"privknn {words[0]}: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="privknn", description="Train students on labels bought from private data, with a stated ε."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _TRAINING.items():
        commands.add_parser(name, help=text, add_help=False)

    epsilon = commands.add_parser("epsilon", help="ε of a JSON list of records, or of a ledger")
    epsilon.add_argument("file", help="a JSON list of records, or a ledger")
    epsilon.add_argument("--delta", type=float, required=True, help="δ, for instance 1e-5")
    epsilon.add_argument("--adjacency", choices=["add_remove", "replace_one"], default=None)
    epsilon.add_argument("--fast", action="store_true", help="RDP and PLD only, without the exact figure")
    epsilon.add_argument("--json", action="store_true", help="print one JSON object")
    epsilon.set_defaults(run=_epsilon)

    cli_privacy.add_plan(commands)

    audit = commands.add_parser("audit", help="check a ledger's hash chain and recompute its ε")
    audit.add_argument("ledger", help="the ledger's file; with --empirical also a JSON list of records")
    audit.add_argument("--delta", type=float, default=None, help="δ; the ledger's own by default")
    audit.add_argument("--head", default=None, help="head hash noted earlier: the ledger must contain it")
    audit.add_argument("--json", action="store_true", help="print one JSON object")
    cli_privacy.add_empirical(audit)
    audit.set_defaults(run=_audit)
    return parser


def _epsilon(parsed: argparse.Namespace) -> int:
    from pl_privknn.privacy.report import epsilon_of_file

    report = epsilon_of_file(parsed.file, parsed.delta, adjacency=parsed.adjacency, exact=not parsed.fast)
    _print(report, parsed.json)
    return 0


def _audit(parsed: argparse.Namespace) -> int:
    if parsed.empirical:
        return cli_privacy.run_empirical(parsed)
    from pl_privknn.privacy.report import audit_ledger

    report = audit_ledger(parsed.ledger, delta=parsed.delta, head=parsed.head)
    _print(report, parsed.json)
    return 0


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    width = max(len(name) for name in report)
    for name, value in report.items():
        if not isinstance(value, list | dict):
            print(f"{name:{width}}  {value:.6g}" if isinstance(value, float) else f"{name:{width}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
