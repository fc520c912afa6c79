"""Redaction of output and exceptions of code that reads private records."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ParamSpec, TextIO, TypeVar

#: Set to 1 it lets texts of the private side through, for the data owner's own screen.
SHOW = "PRIVKNN_SHOW_PRIVATE_ERRORS"

_PACKAGE = __name__.split(".")[0]
_FILES = (1, 2)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class RedactedError(RuntimeError):
    """Raised where code that reads private records failed; it names the type and the place, never the text."""


def redacted(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call a function that reads private records: suppress its output and redact its exceptions.

    What it prints, logs or warns of is dropped (:func:`silenced`). Exceptions of this package's own classes, whose
    texts hold no private value, pass without what lies behind them. Any other exception may quote a record: its type
    and place are shown and its text, its notes, its causes and the frames that hold records are left behind. With the
    environment variable ``PRIVKNN_SHOW_PRIVATE_ERRORS=1`` everything comes through.

    Raises:
        RedactedError: in the place of an exception from elsewhere.
    """
    with _clocked():
        if shows_private_errors():
            return function(*args, **kwargs)
        try:
            with silenced():
                return function(*args, **kwargs)
        except BaseException as error:
            shown = _shown(error)
    try:
        raise shown  # outside of the handler, or the exception itself would be its context
    finally:
        del shown


def private_seconds() -> float:
    """Wall time spent in :func:`redacted` code by this process. **Private**: more records take longer."""
    return _seconds[0]


_seconds = [0.0, 0.0]  # spent, and how deep calls are nested now


@contextlib.contextmanager
def _clocked() -> Iterator[None]:
    started = time.monotonic()
    _seconds[1] += 1
    try:
        yield
    finally:
        _seconds[1] -= 1
        if not _seconds[1]:
            _seconds[0] += time.monotonic() - started


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Suppress output, logs and warnings inside the context, also of child processes and C code.

    For the whole process, so briefly: from the first block of any thread that begins to the last one that ends.
    """
    global _blocks, _undo
    if shows_private_errors():
        yield
        return
    with _turn:
        if not _blocks:
            _undo = _silence()
        _blocks += 1
    try:
        yield
    finally:
        with _turn:
            _blocks -= 1
            if not _blocks:
                _undo.close()


# Blocks of :func:`silenced` that are open, in all threads, and what ends the silence.
_turn, _blocks, _undo = threading.Lock(), 0, contextlib.ExitStack()


def _silence() -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            warnings.catch_warnings(record=True)
        )  # not shown, whatever filters are set inside
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(sys.maxsize)
        null = _null()
        stack.enter_context(descriptors_led_to(null))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        return stack.pop_all()


@contextlib.contextmanager
def terminal() -> Iterator[TextIO]:
    """Stream to the present standard output that :func:`silenced` leaves open, for progress bars."""
    try:
        handle = os.dup(sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # a notebook's, or a test's: no file
        yield sys.stdout
        return
    with open(handle, "w", encoding=sys.stdout.encoding, errors="replace") as stream:
        yield stream


@functools.cache
def _null() -> TextIO:
    """Null stream that stays open: a library may keep it for its messages."""
    return open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)


@functools.cache
def _c_flush() -> Callable[[Any], Any] | None:
    """C's ``fflush``; None where the C library is not found."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        return ctypes.CDLL(None).fflush
    return None


def shows_private_errors() -> bool:
    """Whether the data owner allows messages of code that reads private records."""
    return os.environ.get(SHOW) == "1"


@contextlib.contextmanager
def descriptors_led_to(file: IO[Any]) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 to another file, for child processes and C code."""
    kept = {}
    _flush()
    for descriptor in _FILES:
        with contextlib.suppress(OSError):  # a daemon has none
            kept[descriptor] = os.dup(descriptor)
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        _flush()  # what waits in buffers belongs to the block
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    if (flush := _c_flush()) is not None:
        flush(None)


def _shown(error: BaseException) -> BaseException:
    """Public text about an exception."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    frames = list(_frames(error.__traceback__))
    if _room(type(error).__module__) == _PACKAGE:
        error.__cause__ = error.__context__ = None
        error.__dict__.pop("__notes__", None)
        return error.with_traceback(None)
    where = _place(frames[-1]) if frames else "an unknown place"
    theirs = [frame for frame in frames[:-1] if _is_users(frame)]
    below = f", called from {_place(theirs[-1])}" if theirs and not _is_users(frames[-1]) else ""
    return RedactedError(
        f"{type(error).__name__} at {where}{below}: its text may quote a private record, so it is not shown. Set the "
        f"environment variable {SHOW}=1 (on the data owner's own screen alone) to see it"
    )


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_users(trace: TracebackType) -> bool:
    """True for frames outside installed packages, the standard library and this package."""
    file = trace.tb_frame.f_code.co_filename
    library = "site-packages" in file or file.startswith((sysconfig.get_paths()["stdlib"], "<"))
    return not library and _room(str(trace.tb_frame.f_globals.get("__name__"))) != _PACKAGE


def _room(module: str) -> str:
    return module.split(".")[0]


def _place(trace: TracebackType) -> str:
    frame: Any = trace.tb_frame
    name = frame.f_globals.get("__name__")
    if name in (None, "__main__"):
        name = Path(frame.f_code.co_filename).name
    return f"{name}:{trace.tb_lineno}"
