"""The ``privknn`` command."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn import __version__
from pl_privknn._checks import check_int
from pl_privknn.cli import compare as cli_compare
from pl_privknn.cli import privacy as cli_privacy
from pl_privknn.cli.audit import add_audit, print_figures
from pl_privknn.cli.completion import add_completion
from pl_privknn.cli.demo import add_demo
from pl_privknn.cli.errors import CommandParser, mistake, shown_text
from pl_privknn.cli.export import add_export
from pl_privknn.cli.init import add_init
from pl_privknn.cli.report import add_report
from pl_privknn.cli.tune import add_tune

if TYPE_CHECKING:
    from pl_privknn.privacy.verification import Releases

_TRAINING = {
    "fit": "train a student on privately released labels (--resume DIR continues an interrupted run)",
    "validate": "evaluate a checkpoint on public images",
    "test": "evaluate a checkpoint on the test set",
    "predict": "class probabilities for the test images",
}
_COMMANDS = (
    "epsilon",
    "plan",
    "compare",
    "tune",
    "audit",
    "report",
    "completion",
    "demo",
    "init",
    "export",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one ``privknn`` command.

    Args:
        args: the words after ``privknn``; those of the process by default.

    Returns:
        The exit status: 0; 1 where the command found that something is wrong, such as a violated claim; 2 for a
        mistake in what it was given, which is told in one line on stderr.
    """
    words = [_shipped(word) for word in (sys.argv[1:] if args is None else args)]
    training = bool(words) and words[0] in _TRAINING
    try:
        return _run_training(words) if training else _run(words)
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        text = mistake(error, anywhere=not training)
        if text is None:
            raise
        name = f"privknn {words[0]}" if words and words[0] in (*_TRAINING, *_COMMANDS) else "privknn"
        print(f"{name}: {shown_text(text, 1500)}", file=sys.stderr)
        return 2


def _shipped(word: str) -> str:
    """A word with ``configs/NAME.yaml`` in it as the package's own file, where the working directory has none."""
    option, equals, name = word.rpartition("=")
    own = Path(__file__).parents[1] / name
    if name.startswith("configs/") and not Path(name).exists() and own.is_file():
        return f"{option}{equals}{own}"
    return word


def _run_training(words: list[str]) -> int:
    from pl_privknn.cli.train import run_training

    return run_training(words)


def _run(words: list[str]) -> int:
    parser = _parser(words)
    parsed = parser.parse_args(words)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0 if not words else 2
    status: int = parsed.run(parsed)
    return status


def _parser(words: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        prog="privknn", description="Train students on privately released labels, with a stated ε."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _TRAINING.items():
        commands.add_parser(name, help=text, add_help=False)

    epsilon = commands.add_parser("epsilon", help="ε of records, plans, configurations or ledgers")
    epsilon.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a ledger, a JSON or YAML list of records, a plan, or a configuration with a labeling section; several "
        "files over the same private data are composed",
    )
    epsilon.add_argument(
        "--delta", type=float, default=None, help="δ, for instance 1e-5; by default the file's own"
    )
    epsilon.add_argument("--adjacency", choices=["add_remove", "replace_one"], default=None)
    epsilon.add_argument(
        "--num-classes", type=int, default=None, help="for a plan of a labeler without a data section"
    )
    epsilon.add_argument("--fast", action="store_true", help="RDP and PLD only, without the exact figure")
    epsilon.add_argument(
        "--bounds", action="store_true", help="also epsilon_lower, below which no accountant can state ε"
    )
    epsilon.add_argument(
        "--tradeoff",
        action="store_true",
        help="also the error rates of the best attack, and μ of Gaussian DP",
    )
    epsilon.add_argument(
        "--plot", metavar="FILE", default=None, help="draw the best attack's error rates; with --tradeoff"
    )
    epsilon.add_argument("--json", action="store_true", help="print one JSON object")
    epsilon.set_defaults(run=_epsilon)

    cli_privacy.add_plan(commands, words)
    cli_compare.add_compare(commands, main)
    add_tune(commands)

    add_audit(commands)
    add_report(commands)
    add_demo(commands, main)
    add_init(commands)
    add_export(commands)
    add_completion(commands, _parser, _TRAINING)
    return parser


def _epsilon(parsed: argparse.Namespace) -> int:
    from pl_privknn.privacy.verification import epsilon_of_files, releases_of, total

    exact = not parsed.fast
    if parsed.plot is not None and not parsed.tradeoff:
        raise ValueError(f"--plot {parsed.plot} draws the error rates of attacks; give --tradeoff too")
    if parsed.num_classes is not None:
        check_int("--num-classes", parsed.num_classes, minimum=2)
    if (plans := _config_plans(parsed.files, parsed.num_classes)) is not None:
        report = total(plans, parsed.delta, parsed.adjacency, exact)
    else:
        report = epsilon_of_files(parsed.files, parsed.delta, parsed.adjacency, exact)
    if parsed.tradeoff or parsed.bounds:
        parts = plans if plans is not None else [(file, releases_of(file)) for file in parsed.files]
        charges = [charge for _, part in parts for charge in part.charges]
        stated = {"delta": report["delta"], "adjacency": report["adjacency"]}
    if parsed.bounds:
        from pl_privknn.privacy.accounting.from_below import epsilon_lower

        report["epsilon_lower"] = epsilon_lower(charges, **stated)
    if parsed.tradeoff:
        from pl_privknn.privacy.accounting.tradeoff import trade_off

        found = trade_off(charges, **stated, exact=exact)
        report |= found.to_dict()
        if parsed.plot is not None:
            found.plot(parsed.plot)
    _print(report, parsed.json)
    return 0


def _config_plans(files: list[str], num_classes: int | None) -> list[tuple[str | Path, Releases]] | None:
    """Plans of configurations, or None where the files are of other kinds."""
    if not all(Path(file).suffix in (".yaml", ".yml") and Path(file).is_file() for file in files):
        return None
    from pl_privknn.documents import read_configuration, read_document
    from pl_privknn.privacy.verification import releases_in

    documents = [(file, read_document(file)) for file in files]
    if not any(_is_config(document) for _, document in documents):
        return None
    from pl_privknn.planning.configuration_plan import plan_of_config

    return [
        (file, plan_of_config(read_configuration(file), file, num_classes))
        if _is_config(document)
        else (file, releases_in(document, file))
        for file, document in documents
    ]


def _is_config(document: Any) -> bool:
    return isinstance(document, dict) and "labeling" in document


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print_figures(report)


if __name__ == "__main__":
    sys.exit(main())
