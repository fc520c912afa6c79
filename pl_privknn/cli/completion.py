"""``privknn completion``: a script with which a shell completes commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_SHELLS = ("bash", "zsh", "tcsh")


def add_completion(commands: Any, parser_of: Callable[[list[str]], Any], training: Iterable[str]) -> None:
    """Register ``privknn completion`` with argparse's subparsers.

    Args:
        commands: the subparsers.
        parser_of: the command's parser for some words.
        training: the commands whose options are Lightning's parser's.
    """
    parser = commands.add_parser("completion", help="print what lets a shell complete privknn's words")
    parser.add_argument("shell", choices=_SHELLS, help='as in: eval "$(privknn completion bash)"')
    parser.set_defaults(run=lambda parsed: _print(parsed.shell, parser_of, list(training)))


def _print(shell: str, parser_of: Callable[[list[str]], Any], training: list[str]) -> int:
    try:
        import shtab
    except ImportError:
        raise RuntimeError("completion needs the package shtab; install it: pip install shtab") from None
    from pl_privknn.cli.train import options_of

    parser = parser_of(["plan"])  # with the teachers that can be planned
    for name, command in _commands_of(parser).items():
        if name in training:
            for options, text in options_of(name):
                command.add_argument(*options, help=text.replace("%", "%%"))
    print(shtab.complete(parser, shell=shell))
    return 0


def _commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    (found,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)
