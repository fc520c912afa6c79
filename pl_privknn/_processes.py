"""Communication of the processes of one training or labelling: sums, parts and results, while all are alive."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from pl_privknn import _lightning as pl

Result = TypeVar("Result")

#: Seconds between two signs of life of a process that works.
_BEAT = 1.0
# A process that ends closes its connections, which the others notice at once. So long they wait for a sign of life
# from one whose machine has vanished, or whose interpreter is held by a library that lets no other thread run.
_SILENCE = timedelta(minutes=10)
# The answers travel, and shards are searched, for as long as signs of life come.
_NO_LIMIT = timedelta(days=365)
_WORKING, _DONE, _FAILED = range(3)
# Seconds between two looks whether what is awaited has come.
_PAUSE = 0.001

_DEAD = (
    "another process of this training ended, or was not heard of any more; its own message, if it left one, says "
    "why. What was charged is in the ledger, and a resumed run pays for nothing twice"
)


class ProcessLostError(RuntimeError):
    """Raised where another process of a training has failed or ended."""


@dataclasses.dataclass(frozen=True, repr=False)
class Shard:
    """Shard of the private records that this process holds. **Private**, its sizes included.

    Attributes:
        group: joins the processes.
        first: global index of the first record.
        stride: step from a record's global index to that of the next.
        total: number of records of all shards.
        rows: global index of each record where ``first`` and ``stride`` do not give it, int64 ``(n,)``.
    """

    group: ProcessGroup
    first: int
    stride: int
    total: int
    rows: Tensor | None = None

    def index(self, records: Tensor) -> Tensor:
        """Global indices of records of this shard; negative for -1, no record."""
        return self.first + self.stride * records if self.rows is None else self.rows[records]


class ProcessGroup:
    """Processes of a trainer, each with its own records; global rank 0 charges and draws noise.

    They communicate in process groups separate from the trainer's, on the CPU. Outside of :meth:`shared` a process
    waits ten minutes for the others, as in a step of a training. A labelling round may take any time, so within
    :meth:`shared` a thread of each process sends a sign of life every second, and a process that dies or fails is
    known to the others.

    Every process makes it at the same time.

    Args:
        rank: global rank of this process.
        size: number of processes; with one there are no groups and nothing to wait for.

    Raises:
        ValueError: for several processes that ``torch.distributed`` does not join.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.sent = 0  # bytes of what :meth:`gather` and :meth:`sum` let travel from this process
        self._groups: list[Any] = []
        self._trouble: str | None = None
        self._is_shared = False
        if size > 1 and not dist.is_initialized():
            raise ValueError(
                f"devices: torch.distributed does not join the {size} processes; use strategy='ddp'"
            )
        if size > 1:
            self._groups = [dist.new_group(backend="gloo", timeout=limit) for limit in (_SILENCE, _NO_LIMIT)]

    @classmethod
    def of(cls, trainer: pl.Trainer) -> ProcessGroup:
        """Group of a trainer's processes; each process calls this after the strategy has joined them."""
        return cls(trainer.global_rank, trainer.world_size)

    def shared(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` in every process, each on its own part, and return the result of global rank 0 in all of them.

        Raises:
            RuntimeError: where another process failed or ended. An exception of ``work`` itself passes as it is.
        """
        if self.size == 1:
            return work()
        self._trouble, self._state, self._ended = None, _WORKING, threading.Event()
        self._is_shared = True
        beats = threading.Thread(target=self._beat, daemon=True)
        beats.start()
        try:
            result: list[Any] = [work()]
            self._state = _DONE
        except BaseException:
            self._state = _FAILED
            raise
        finally:
            self._ended.set()
            beats.join()
            self._is_shared = False
        self.check()
        return cast(Result, self.broadcast(result[0]))

    @property
    def _group(self) -> Any:
        """Process group of the next collective operation: within :meth:`shared` the one without a timeout."""
        return self._groups[1 if self._is_shared else 0]

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on global rank 0, and return its result, or raise its exception, in every process.

        Charges and draws of noise go through this: ``work`` is called on global rank 0 alone. Its result is public.
        """
        if self.size == 1:
            return work()
        value, error = None, None
        if not self.rank:
            try:
                value = work()
            except Exception as raised:
                error = raised
        value, error = self.broadcast((value, error))
        if error is not None:
            with contextlib.suppress(RuntimeError):
                self.sum(torch.zeros(1))  # a process that fails before all have received this would hide it
            raise error
        return cast(Result, value)

    def broadcast(self, value: Any = None) -> Any:
        """Broadcast of an object from global rank 0 to every process; nothing private."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self._await(dist.broadcast(size, src=0, group=self._group, async_op=True))
        if self.rank:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._await(dist.broadcast(data, src=0, group=self._group, async_op=True))
        return pickle.loads(data.numpy().tobytes()) if self.rank else value

    def gather(self, part: Tensor) -> list[Tensor]:
        """Tensors of all processes, of one shape and dtype, on global rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [part]
        parts = [] if self.rank else [torch.empty_like(part) for _ in range(self.size)]
        self._await(dist.gather(part, parts or None, dst=0, group=self._group, async_op=True))
        self.sent += part.nbytes
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """Sum of the tensors of all processes, of one shape and dtype, in each process."""
        if self.size == 1:
            return part
        total = part.clone().cpu()
        self._await(dist.all_reduce(total, group=self._group, async_op=True))
        self.sent += part.nbytes
        return total.to(part.device)

    def agree(self, value: bytes) -> bool:
        """Return whether all processes give equal bytes, whose number is a multiple of eight."""
        values = torch.zeros(self.size, len(value) // 8, dtype=torch.int64)
        values[self.rank] = torch.frombuffer(bytearray(value), dtype=torch.int64)
        values = self.sum(values)
        return bool((values == values[0]).all())

    def _await(self, work: Any) -> None:
        """Wait for a collective operation; raise where another process has ended."""
        while not work.is_completed():
            self.check()
            time.sleep(_PAUSE)
        try:
            work.wait()
        except RuntimeError:  # a closed connection
            raise ProcessLostError(self._trouble or _DEAD) from None

    def check(self) -> None:
        """Stop between two steps where another process has failed or ended, before further charges.

        Raises:
            RuntimeError: with what is known of it.
        """
        if self._trouble is not None:
            raise ProcessLostError(self._trouble)

    def close(self) -> None:
        """Destroy the groups, without a message to the other processes."""
        while self._groups:
            group = self._groups.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _beat(self) -> None:
        while True:
            states = torch.zeros(self.size, dtype=torch.int64)
            states[self.rank] = mine = self._state
            try:
                dist.all_reduce(states, group=self._groups[0])
            except RuntimeError:  # a closed connection, or the timeout
                self._trouble = _DEAD
                return
            failed = (states == _FAILED).nonzero().flatten().tolist()
            if failed:
                if mine != _FAILED:
                    self._trouble = f"labelling failed on global rank {failed[0]}; its own message says why"
                return
            if bool((states == _DONE).all()):
                return
            self._ended.wait(_BEAT)


#: The single process of a table that is whole.
ALONE = ProcessGroup()
