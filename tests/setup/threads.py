"""Shards of a table in one process, with a thread in place of each process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pl_privknn._processes import ProcessGroup


class Threads:
    """Threads that hold a shard each.

    Args:
        size: number of shards.

    Attributes:
        groups: what joins them, for each thread.
    """

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size), [None] * size
        self.groups = [ThreadGroup(rank, self) for rank in range(size)]

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of ``works``, each called in a thread; raises the first error."""
        failed: list[BaseException] = []

        def guarded(work: Callable[[], Any]) -> Any:
            try:
                return work()
            except BaseException as error:
                failed.append(error)
                self.barrier.abort()
                return None

        with ThreadPoolExecutor(len(works)) as pool:
            found = list(pool.map(guarded, works))
        self.barrier.reset()
        if failed:
            raise failed[0]
        return found


class ThreadGroup(ProcessGroup):
    """Process group of one thread; see :class:`~pl_privknn._processes.ProcessGroup`."""

    def __init__(self, rank: int, threads: Threads) -> None:
        super().__init__(rank)
        self.threads, self.size = threads, len(threads.given)

    def _exchange(self, value: Any) -> list[Any]:
        self.threads.given[self.rank] = value
        self.threads.barrier.wait()
        given = list(self.threads.given)
        self.threads.barrier.wait()
        return given

    def broadcast(self, value: Any = None) -> Any:
        """See the base."""
        sent = self._exchange(pickle.dumps(value))[0]
        return pickle.loads(sent) if self.rank else value

    def gather(self, part: Tensor) -> list[Tensor]:
        """See the base."""
        self.sent += part.nbytes
        parts = self._exchange(part.clone())
        return [] if self.rank else parts

    def sum(self, part: Tensor) -> Tensor:
        """See the base."""
        self.sent += part.nbytes
        return sum(self._exchange(part.clone()), torch.zeros_like(part))
