"""The ``privknn`` command."""

import contextlib
import ctypes
import os

# Read when torch loads its threads. Threads that spin for long while they wait make a training on a busy machine
# fifteen times slower; threads that sleep at once leave a second core unused where layers are small. GNU's threads,
# which torch has on Linux, spin for some microseconds and then sleep: with two cores 1.5 times the speed of sleeping
# at once on an idle machine, and 0.7 times beside one busy process.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from pl_privknn.cli.main import main

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


keep_freed_memory()

__all__ = ["keep_freed_memory", "main"]
