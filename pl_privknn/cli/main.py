"""The ``privknn`` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pl_privknn import __version__
from pl_privknn.cli.audit import add_audit
from pl_privknn.cli.check import add_check
from pl_privknn.cli.common import CommandParser, mistake, shown_text
from pl_privknn.cli.compare import add_compare, add_tune
from pl_privknn.cli.fit import COMMANDS, add_init, add_training, run_training_command
from pl_privknn.cli.privacy import add_epsilon, add_plan
from pl_privknn.cli.publish import add_demo, add_export, add_predict, add_report


def main(args: Sequence[str] | None = None) -> int:
    """Run one ``privknn`` command.

    Args:
        args: the words after ``privknn``; those of the process by default.

    Returns:
        The exit status: 0; 1 where the command found that something is wrong, such as a violated claim; 2 for a
        mistake in what it was given, which is told in one line on stderr.
    """
    words = [_shipped(word) for word in (sys.argv[1:] if args is None else args)]
    training = bool(words) and words[0] in COMMANDS
    try:
        return _run(words)
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        text = mistake(error, anywhere=not training)
        if text is None:
            raise
        name = f"privknn {words[0]}" if words and words[0] in (*COMMANDS, *_ADDED) else "privknn"
        print(f"{name}: {shown_text(text, 1500)}", file=sys.stderr)
        return 2


def _shipped(word: str) -> str:
    """A word with ``configs/NAME.yaml`` in it as the package's own file, where the working directory has none."""
    option, equals, name = word.rpartition("=")
    own = Path(__file__).parents[1] / name
    if name.startswith("configs/") and not Path(name).exists() and own.is_file():
        return f"{option}{equals}{own}"
    return word


def _run(words: list[str]) -> int:
    if words and words[0] in COMMANDS and "--help-all" in words:
        from pl_privknn.cli.train import run_training

        return run_training(words[0], ["--help"])
    parser = _parser()
    if words and words[0] in COMMANDS:
        return run_training_command(*parser.parse_known_args(words))
    parsed = parser.parse_args(words)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0 if not words else 2
    status: int = parsed.run(parsed)
    return status


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="privknn",
        description="Train models on sensitive labels under differential privacy, with a stated ε.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, add in _ADDED.items():
        if name == "report":  # after what comes before a first run
            for training in COMMANDS:
                add_training(commands, training)
        add(commands)
    return parser


_EXAMPLES = """examples:
  privknn demo
  privknn check --data photos --epsilon 1 --private-records 2000
  privknn init --data photos --epsilon 1 --private-records 2000
  privknn fit --config private_run.yaml

Each command explains itself: privknn COMMAND --help"""

_ADDED: dict[str, Callable[[Any], None]] = {
    "demo": lambda commands: add_demo(commands, main),
    "init": add_init,
    "report": add_report,
    "export": add_export,
    "predict": add_predict,
    "audit": add_audit,
    "epsilon": add_epsilon,
    "plan": add_plan,
    "check": add_check,
    "compare": lambda commands: add_compare(commands, main),
    "tune": add_tune,
}

if __name__ == "__main__":
    sys.exit(main())
