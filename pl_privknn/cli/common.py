"""Shared parts of commands: errors in one line (exit status 2, no traceback), options that list values, output.

Nothing here imports torch, so that a command which needs none of it starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import re
import sqlite3
import sys
import traceback
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pl_privknn._checks import at_least, at_most, printable
from pl_privknn.config import did_you_mean

_PACKAGE = str(Path(__file__).parents[1])
_CHECKED = (ValueError, TypeError, ArithmeticError, RuntimeError, ImportError)
_DAMAGED = (zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError)


class CommandError(ValueError):
    """Words that are no command, or arguments that it does not take."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of all arguments.

    Attributes:
        rare: groups of arguments that ``--help`` leaves to ``--help-all``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rare: list[argparse._ArgumentGroup] = []
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="also options that are rarely needed")

    def format_help(self) -> str:
        """Help without the rare groups, and without ``--help-all`` where there are none."""
        hidden = [action for group in self.rare for action in group._group_actions]
        if not hidden:
            hidden = [action for action in self._actions if isinstance(action, _HelpAll)]
        helps = [action.help for action in hidden]
        try:
            for action in hidden:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in zip(hidden, helps, strict=True):
                action.help = text

    def error(self, message: str) -> NoReturn:
        """Raise what :func:`argparse.ArgumentParser.error` would print.

        Raises:
            CommandError: always.
        """
        if match := re.match(r"argument (.+?): invalid choice: '(.+?)' \(choose from (.+)\)", message):
            known = [name.strip(" '") for name in match[3].split(",")]
            message = f"{match[1]} {match[2]!r} is unknown; {did_you_mean(match[2], known)}"
        raise CommandError(message if message.endswith("?") else f"{message}; see {self.prog} --help")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, CommandParser)
        parser.rare = []
        parser.print_help()
        parser.exit()


def mistake(error: BaseException, anywhere: bool = False) -> str | None:
    """The line that tells a user what to change; None where the fault is in code, whose traceback is wanted.

    A mistake is what this package refuses itself (an exception of its own, or one that its own code raises), and
    whatever files, disks and memory refuse. An error that starts in other code, such as a user's own student, is not.

    Args:
        error: what ended the command.
        anywhere: errors about values count wherever they start: for commands that compute from given numbers alone.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        return f"there is not enough memory ({text}); ask for less at a time"
    if isinstance(error, RecursionError):
        return "the input nests too deep; write it flatter"
    if isinstance(error, sqlite3.Error):
        return f"a database can't be read or written ({text}); check the disk and the file"
    if isinstance(error, OSError):
        return text
    if isinstance(error, _DAMAGED):
        return (
            f"a file is damaged ({type(error).__name__}: {shown_text(text)}); restore it, or name another one"
        )
    if type(error).__module__.startswith("pl_privknn."):
        return text
    if not isinstance(error, _CHECKED):
        return None
    if _raised_in(error).startswith(_PACKAGE):
        return text
    return f"{type(error).__name__}: {shown_text(text)}" if anywhere else None


def shown_text(text: str, longest: int = 300) -> str:
    """A message cut to one readable line."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


@contextlib.contextmanager
def importable(files: list[str]) -> Iterator[None]:
    """Let a module that lies beside a configuration be imported, after all that is installed."""
    before = list(sys.path)
    folders = [str(Path(file).resolve().parent) for file in files]
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    try:
        yield
    finally:
        sys.path[:] = before


def add_set(parser: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    """Add ``--set``, which may be repeated and takes several values each time."""
    parser.add_argument(
        "--set", nargs="+", action="extend", required=required, default=[], metavar="PATH=VALUE", help=text
    )


def values_set(option: str, texts: list[str], several: bool = False) -> dict[str, Any]:
    """Dotted paths and values of texts ``PATH=VALUE``; a value is YAML, or a list of ``several`` with commas.

    Raises:
        ValueError: for a text of another form.
    """
    from pl_privknn.config import read_yaml

    found = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path or (several and not value):
            form = "PATH=V1,V2" if several else "PATH=VALUE"
            raise ValueError(f"{option} {text!r} must be {form}, as in trainer.max_epochs=2")
        found[path] = read_yaml(f"[{value}]" if several else value)
    return found


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """Print a report as JSON, or its plain figures, one a line."""
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    figures = {name: value for name, value in report.items() if not isinstance(value, list | dict)}
    width = max(map(len, figures))
    for name, value in figures.items():
        if value not in (None, ""):
            print(f"{name:{width}}  {figure(name, value)}")


def figure(name: str, value: Any) -> str:
    """A named value for people: stated bounds are rounded to their safe side."""
    if not isinstance(value, float):
        return printable(str(value))
    if name.startswith(("epsilon_lower", "empirical")):
        return at_least(value, 6)
    return at_most(value, 6) if name.startswith(("epsilon", "tpr_", "advantage")) else f"{value:.6g}"


def suggest(words: str) -> None:
    """Name the command that usually comes next, on stderr; within :func:`without_suggestions` nothing."""
    if not _SILENT:
        print(f"Next: privknn {words}", file=sys.stderr)


@contextlib.contextmanager
def without_suggestions() -> Iterator[None]:
    """Within: commands that are steps of another one suggest nothing."""
    _SILENT.append(True)
    try:
        yield
    finally:
        _SILENT.pop()


_SILENT: list[bool] = []
