"""Something that is done in processes of its own, which may be killed; they need not import anything again."""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TextIO


def in_child(job: Callable[[], object]) -> int:
    """Do it in a forked process; how that ended: 0, 1 after an exception, negative for a signal."""
    return _ended(_started(job))


def is_killed(job: Callable[[], object]) -> bool:
    """Do it in a forked process; whether that was killed. An exception there is an error here."""
    ended = in_child(job)
    assert ended in (0, -signal.SIGKILL), "the job itself failed"
    return ended != 0


@contextlib.contextmanager
def talking(job: Callable[[Callable[[object], None]], object]) -> Iterator[tuple[int, TextIO]]:
    """Do ``job(say)`` in a forked process; its number, and the lines that it has said."""
    hear, speak = os.pipe()

    def child() -> None:
        os.close(hear)
        job(lambda words: os.write(speak, f"{words}\n".encode()))

    number = _started(child)
    os.close(speak)
    with open(hear, encoding="utf-8") as lines:
        try:
            yield number, lines
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            _ended(number)


def in_group(size: int, job: Callable[[int], object]) -> list[int]:
    """Do ``job(rank)`` in processes that a launcher has told of each other; how they ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def member(rank: int) -> None:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), NODE_RANK="0",
            LOCAL_RANK=str(rank), RANK=str(rank),
        )  # fmt: skip
        job(rank)

    return [_ended(child) for child in [_started(lambda rank=rank: member(rank)) for rank in range(size)]]


def wait_at_most(seconds: float) -> None:
    """Collectives of this process's default group fail after so many seconds from now on."""
    import torch
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def _started(job: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    return child


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
