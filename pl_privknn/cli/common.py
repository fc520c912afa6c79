"""Shared parts of commands: one-line errors (exit status 2, no traceback), ``--set`` options and output.

This module does not import torch, so that commands without torch start at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import re
import shutil
import sqlite3
import sys
import textwrap
import traceback
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from pl_privknn._checks import at_least, at_most, printable
from pl_privknn.config import did_you_mean

_PACKAGE = str(Path(__file__).parents[1])
_CHECKED = (ValueError, TypeError, ArithmeticError, RuntimeError, ImportError)
_DAMAGED = (zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError)


class CommandError(ValueError):
    """Raised for an unknown command or invalid arguments."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser with one-line errors, without the usage text.

    Attributes:
        rare: groups of arguments that only ``--help-all`` shows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rare: list[argparse._ArgumentGroup] = []
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show rarely used options too")

    def format_help(self) -> str:
        """Help text without the rare groups, and without ``--help-all`` if there are none."""
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
        """Raise the message that :func:`argparse.ArgumentParser.error` would print.

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


def user_error(error: BaseException, anywhere: bool = False) -> str | None:
    """One-line message of a user's mistake; None for an error in code, which needs a traceback.

    Mistakes are exceptions defined or raised by this package, and errors of files, disks and memory. An error raised
    by other code, such as a user's own student, is not.

    Args:
        error: the exception that ended the command.
        anywhere: count errors about values from any code, for commands that only compute from given numbers.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        return f"out of memory ({text}); reduce the size of batches, tables or plans"
    if isinstance(error, RecursionError):
        return "the input is nested too deep; flatten it"
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
    """Message shortened to one printable line."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def with_options(text: str, names: Collection[str]) -> str:
    """Message with options of the command line in place of the arguments of Python that they set.

    Args:
        text: as in ``classes= (--classes)``, or ``num_classes=1``.
        names: of the arguments that are options.
    """
    text = re.sub(r"\w+= \((--[\w-]+)\)", r"\1", text)

    def renamed(match: re.Match[str]) -> str:
        option = f"--{match[1].replace('_', '-')}"
        return match[0] if match[1] not in names else f"{option} " if match[2] else option

    return re.sub(r"(?<![\w.-])(\w+)=(?=(['\"\w\[({])|[\s,;.)]|$)", renamed, text)


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


@contextlib.contextmanager
def importable(files: list[str]) -> Iterator[None]:
    """Context in which modules in the folders of YAML files can be imported, after installed ones.

    Other files name no classes, and what lies beside data must not be imported in place of a package.
    """
    before = list(sys.path)
    folders = [str(Path(file).resolve().parent) for file in files if file.endswith((".yaml", ".yml"))]
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    try:
        yield
    finally:
        sys.path[:] = before


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--set``, which may be repeated and takes several values each time."""
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="PATH=VALUE", help=text)


def values_set(option: str, texts: list[str]) -> dict[str, Any]:
    """Parse texts ``PATH=VALUE`` into values by dotted path; a value is YAML.

    Raises:
        ValueError: for texts of another form.
    """
    from pl_privknn.config import read_yaml

    found = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ValueError(f"{option} {text!r} must be PATH=VALUE, as in trainer.max_epochs=2")
        found[path] = read_yaml(value)
    return found


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """Print a report as JSON, or its plain figures, one per line."""
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    figures = {name: value for name, value in report.items() if not isinstance(value, list | dict)}
    width = max(map(len, figures))
    for name, value in figures.items():
        if value not in (None, ""):
            print(f"{name:{width}}  {figure(name, value)}")


def figure(name: str, value: Any) -> str:
    """Text of a named value, with bounds rounded conservatively."""
    if not isinstance(value, float):
        return printable(str(value))
    if name.startswith("epsilon_lower_bound"):
        return at_least(value, 6)
    return at_most(value, 6) if name.startswith(("epsilon", "tpr_", "advantage")) else f"{value:.6g}"


def say(*lines: str) -> None:
    """Print sentences, one on each line; on a terminal lines break between words."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(*(textwrap.fill(line, width) if width else line for line in lines), sep="\n", flush=True)


def suggest(words: str) -> None:
    """Print the usual next command on stderr, except within :func:`without_suggestions`."""
    if not _SILENT:
        print(f"Next: privknn {words}", file=sys.stderr)


@contextlib.contextmanager
def without_suggestions() -> Iterator[None]:
    """Context in which :func:`suggest` prints nothing."""
    _SILENT.append(True)
    try:
        yield
    finally:
        _SILENT.pop()


_SILENT: list[bool] = []
