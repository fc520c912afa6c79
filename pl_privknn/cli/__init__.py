"""The ``privknn`` command."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pl_privknn import __version__, _lightning
from pl_privknn.cli.common import CommandParser, shown_text, user_error, with_options
from pl_privknn.cli.compare import add_compare
from pl_privknn.cli.fit import COMMANDS, add_check, add_init, add_training, data_options, run_training_command
from pl_privknn.cli.privacy import add_audit, add_epsilon, add_plan
from pl_privknn.cli.publish import add_demo, add_export, add_predict, add_report

__all__ = ["main"]

# Read when torch loads its threads. Threads that spin for long while they wait make a training on a busy machine
# fifteen times slower; threads that sleep at once leave a second core unused where layers are small. GNU's threads,
# which torch has on Linux, spin for some microseconds and then sleep: with two cores 1.5 times the speed of sleeping
# at once on an idle machine, and 0.7 times next to one busy process.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(args: Sequence[str] | None = None) -> int:
    """Run one ``privknn`` command.

    Args:
        args: the arguments after ``privknn``; those of the process by default.

    Returns:
        The exit status: 0 on success; 1 if the command detected a problem, such as a violated claim; 2 for invalid
        input, with a one-line message on stderr.
    """
    if args is None:  # a process of its own, in which Lightning is needed by few commands
        _lightning.defer()
    words = [_shipped(word) for word in (sys.argv[1:] if args is None else args)]
    training = bool(words) and words[0] in COMMANDS
    try:
        return _run(words)
    except BrokenPipeError:  # the reader of the output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        text = user_error(error, anywhere=not training)
        if text is None:
            raise
        if any(word.partition("=")[0] == "--data" for word in words):
            text = with_options(text, data_options())
        name = f"privknn {words[0]}" if words and words[0] in _COMMANDS else "privknn"
        print(f"{name}: {shown_text(text, 1500)}", file=sys.stderr)
        return 2


def _shipped(word: str) -> str:
    """Replace ``configs/NAME.yaml`` by the built-in file, unless the working directory has one."""
    option, equals, name = word.rpartition("=")
    own = Path(__file__).parents[1] / name
    if name.startswith("configs/") and not Path(name).exists() and own.is_file():
        return f"{option}{equals}{own}"
    return word


def _run(words: list[str]) -> int:
    if words and words[0] in COMMANDS and "--help-all" in words:
        from pl_privknn.cli.train import run_training

        return run_training(words[0], ["--help"])
    parser = _parser(words[0] if words and words[0] in _COMMANDS else None)
    if words and words[0] in COMMANDS:
        return run_training_command(*parser.parse_known_args(words))
    parsed = parser.parse_args(words)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return 0 if not words else 2
    status: int = parsed.run(parsed)
    return status


def _parser(command: str | None) -> CommandParser:
    """Parser of one command, or of all."""
    parser = CommandParser(
        prog="privknn",
        description="Train models on sensitive labels under differential privacy, with a stated ε.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, add in _COMMANDS.items():
        if command in (name, None):
            add(commands)
    return parser


_EXAMPLES = """examples:
  privknn demo
  privknn check --data photos --epsilon 1 --private-records 2000
  privknn init --data photos --epsilon 1 --private-records 2000
  privknn fit --config private_run.yaml

Options of a command: privknn COMMAND --help"""

_COMMANDS: dict[str, Callable[[Any], None]] = {
    "demo": lambda commands: add_demo(commands, main),
    "init": add_init,
    **{name: functools.partial(add_training, name=name) for name in COMMANDS},
    "report": add_report,
    "export": add_export,
    "predict": add_predict,
    "audit": add_audit,
    "epsilon": add_epsilon,
    "plan": add_plan,
    "check": add_check,
    "compare": lambda commands: add_compare(commands, main),
}
