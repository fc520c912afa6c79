"""The ``privknn`` command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pl_privknn import __version__
from pl_privknn.cli import compare as cli_compare
from pl_privknn.cli import privacy as cli_privacy
from pl_privknn.cli.audit import add_audit
from pl_privknn.cli.demo import add_demo
from pl_privknn.cli.errors import CommandParser, mistake, shown_text
from pl_privknn.cli.export import add_export
from pl_privknn.cli.init import add_init
from pl_privknn.cli.report import add_report
from pl_privknn.cli.tune import add_tune

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
    parser = _parser()
    parsed = parser.parse_args(words)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0 if not words else 2
    status: int = parsed.run(parsed)
    return status


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="privknn", description="Train students on privately released labels, with a stated ε."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _TRAINING.items():
        commands.add_parser(name, help=text, add_help=False)

    cli_privacy.add_epsilon(commands)
    cli_privacy.add_plan(commands)
    cli_compare.add_compare(commands, main)
    add_tune(commands)

    add_audit(commands)
    add_report(commands)
    add_demo(commands, main)
    add_init(commands)
    add_export(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
