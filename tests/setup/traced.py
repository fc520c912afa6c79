"""Runs a function in a child that stops at each call that changes a file: it is killed there, or the call fails.

A kill at a random moment seldom falls between two writes of one commit; here every such moment is met.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

needs_trace = pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"), reason="system calls of Linux on x86-64"
)
_TRACE_ME, _READ, _WRITE, _SET_OPTIONS, _CONTINUE_TO_CALL = 0, 3, 6, 0x4200, 24
_EXIT_WITH_PARENT, _MARK_CALLS = 0x100000, 1
#: Offsets in the child's registers, in bytes.
_RESULT, _LENGTH, _SECOND, _FIRST, _CALL = 80, 96, 104, 112, 120
#: Calls that change files, with the register that holds a descriptor or a path.
_OF_DESCRIPTORS = {1: "write", 18: "pwrite", 20: "writev", 74: "fsync", 75: "fdatasync", 77: "ftruncate"}
_OF_PATHS = {82: "rename", 83: "mkdir", 87: "unlink"}
_AT_PATHS = {257: "open", 263: "unlink"}
_CREATES = os.O_CREAT


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens at a call.

    Attributes:
        at: the number of the call that changes a file, from 1.
        kill: "before" the call, "after" it, or "half" way through a write; ``None`` lets the call fail.
        error: errno of the call that fails.
        lasting: whether all later calls fail too.
    """

    at: int
    kill: str | None = None
    error: int = 0
    lasting: bool = False


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the child ended.

    Attributes:
        calls: names of the calls that changed files.
        status: the exit status, negative for a signal.
    """

    calls: tuple[str, ...]
    status: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def traced(task: Callable[[], object], folder: Path, fault: Fault | None = None) -> Ended:
    """Run ``task`` in a forked child; count its calls that change files in ``folder``, and let one go wrong.

    The child's exit status is 1 where ``task`` raises.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _ptrace(_TRACE_ME, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            task()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        pytest.skip("a child may not be traced here")
    _ptrace(_SET_OPTIONS, child, 0, _EXIT_WITH_PARENT | _MARK_CALLS)
    calls: list[str] = []
    pending: str | None = None  # what to do when the call that was entered returns
    entering, passed_on = True, 0
    while True:
        with contextlib.suppress(ProcessLookupError):  # killed already; its status is still to be had
            _ptrace(_CONTINUE_TO_CALL, child, 0, passed_on)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            return Ended(tuple(calls), os.waitstatus_to_exitcode(status))
        stopped_by = os.WSTOPSIG(status)
        passed_on = 0
        if stopped_by != signal.SIGTRAP | 0x80:
            passed_on = stopped_by
            continue
        if entering and (name := _changes(child, folder)):
            calls.append(name)
            if fault and (len(calls) == fault.at or (fault.lasting and len(calls) > fault.at)):
                pending = _enter(child, fault)
        elif not entering and pending:
            if pending == "kill":
                os.kill(child, signal.SIGKILL)
            else:
                _ptrace(_WRITE, child, _RESULT, -fault.error)
            pending = None
        entering = not entering


def _enter(child: int, fault: Fault) -> str:
    if fault.kill is None:
        _ptrace(_WRITE, child, _CALL, -1)  # no such call: nothing is done
        return "fail"
    if fault.kill == "half" and _ptrace(_READ, child, _CALL, 0) in (1, 18):
        _ptrace(_WRITE, child, _LENGTH, _ptrace(_READ, child, _LENGTH, 0) // 2)
    if fault.kill == "before":
        os.kill(child, signal.SIGKILL)
    return "kill"


def _changes(child: int, folder: Path) -> str | None:
    """The name of the call that a child is about to make, if it changes a file in ``folder``."""
    call = _ptrace(_READ, child, _CALL, 0)
    if call in _OF_DESCRIPTORS:
        try:
            path = os.readlink(f"/proc/{child}/fd/{_ptrace(_READ, child, _FIRST, 0)}")
        except OSError:
            return None
        name = _OF_DESCRIPTORS[call]
    elif call in _OF_PATHS:
        path, name = _text(child, _ptrace(_READ, child, _FIRST, 0)), _OF_PATHS[call]
    elif call in _AT_PATHS:
        if call == 257 and not _ptrace(_READ, child, _LENGTH, 0) & _CREATES:
            return None
        path, name = _text(child, _ptrace(_READ, child, _SECOND, 0)), _AT_PATHS[call]
    else:
        return None
    return name if path.startswith(str(folder)) else None


def _text(child: int, address: int) -> str:
    with open(f"/proc/{child}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096).split(b"\0", 1)[0])


def _ptrace(request: int, child: int, address: int, data: int) -> int:
    if request == _READ:  # the library's function returns what it read, and -1 is a value like others
        ctypes.set_errno(0)
    value = _libc.ptrace(request, child, address, data)
    if value == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), f"ptrace request {request}")
    return value
