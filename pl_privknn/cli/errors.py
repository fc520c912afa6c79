"""What the command line says of a user's mistake: one line, exit status 2, and no traceback."""

from __future__ import annotations

import argparse
import re
import sqlite3
import traceback
from pathlib import Path
from typing import NoReturn

from pl_privknn.config import did_you_mean

_PACKAGE = str(Path(__file__).parents[1])
_CHECKED = (ValueError, TypeError, ArithmeticError, RuntimeError)


class CommandError(ValueError):
    """Words that are no command, or arguments that it does not take."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of all arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise what :func:`argparse.ArgumentParser.error` would print.

        Raises:
            CommandError: always.
        """
        if match := re.match(r"argument (.+?): invalid choice: '(.+?)' \(choose from (.+)\)", message):
            known = [name.strip(" '") for name in match[3].split(",")]
            message = f"{match[1]} {match[2]!r} is unknown; {did_you_mean(match[2], known)}"
        raise CommandError(message if message.endswith("?") else f"{message}; see {self.prog} --help")


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
    if type(error).__module__.startswith("pl_privknn."):
        return text
    if not isinstance(error, _CHECKED):
        return None
    if _raised_in(error).startswith(_PACKAGE):
        return text
    return f"{type(error).__name__}: {shown_text(text)}" if anywhere else None


def shown_text(text: str, longest: int = 300) -> str:
    """A message cut to one readable line."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""
