"""Shards of a table in threads of one process, which speak as processes do."""

import threading
from concurrent.futures import ThreadPoolExecutor

from pl_privknn.neighbors import Shard


class ThreadExchange:
    """One thread's end of an exchange."""

    def __init__(self, rank, slots, barrier):
        self.rank, self._slots, self._barrier = rank, slots, barrier
        self.sent = 0

    def _all(self, value):
        self._slots[self.rank] = value
        self._barrier.wait(60)
        values = list(self._slots)
        self._barrier.wait(60)
        return values

    def tell(self, order=None):
        return self._all(order)[0]

    def gather(self, part):
        self.sent += part.nbytes
        parts = self._all(part)
        return parts if self.rank == 0 else []

    def sum(self, part):
        return sum(self._all(part))


def by_row(count, size):
    """``(first, stride, rows)`` of shards of every so many-th record."""
    return [(rank, size, list(range(rank, count, size))) for rank in range(size)]


def in_order(*counts):
    """``(first, stride, rows)`` of shards one after another."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [
        (start, 1, list(range(start, start + count))) for start, count in zip(starts, counts, strict=True)
    ]


def in_shards(shards, lead, follow):
    """``lead(shard, rows)`` in the first thread, ``follow(shard, rows)`` in the others; what the first returns.

    ``follow`` returns what carries out an order.
    """
    total = sum(len(rows) for _, _, rows in shards)
    slots, barrier = [None] * len(shards), threading.Barrier(len(shards))

    def member(rank):
        first, stride, rows = shards[rank]
        exchange = ThreadExchange(rank, slots, barrier)
        shard = Shard(exchange, first, stride, total)
        try:
            if rank == 0:
                result = lead(shard, rows)
                exchange.tell(None)
                return result
            serve = follow(shard, rows)
            while (order := exchange.tell()) is not None:
                serve(order)
        except BaseException:
            barrier.abort()
            raise
        return None

    with ThreadPoolExecutor(len(shards)) as pool:
        ended = [pool.submit(member, rank) for rank in range(len(shards))]
    errors = [error for one in ended if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return ended[0].result()
