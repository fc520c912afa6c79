"""Memory that a process frees and will ask for again."""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let GNU's C library keep up to a gigabyte of what is freed, in blocks of less than 32 MB.

    By itself it gives the tensors of a training step back to the system, which fills them with zeros for the next
    one: a seventh of a small network's step on a CPU. Nothing changes where the environment sets the allocator up
    (``MALLOC_…``, ``GLIBC_TUNABLES``), nor under other C libraries.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no such function, or no such library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # the largest that it takes
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
