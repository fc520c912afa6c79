"""What the process that answers asks of private records in other processes: counts and votes, and that they pay."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._processes import Exchange

Floats = NDArray[np.float64]
# Bytes of a short text that travels as a tensor.
_WIDTH = 64


class Alone:
    """All private records are here: the other shards of a table that has none.

    Attributes:
        active: number of active neighbours of the present query in other shards. **Private**.
        marks: how far the budgets of all shards have come; see
            :attr:`~pl_privknn.privacy.per_record.filter.IndividualFilter.mark`. Public.
    """

    __slots__ = ()  # one object serves all tables

    active = 0
    marks: tuple[str, ...] = ()

    def begin(self, vectors: Tensor, thresholds: Floats) -> None:
        """Queries come: unit vectors, float32 ``(m, d)``, and the τ of each, ``(m,)``."""

    def turn(self) -> None:
        """The next query comes; what the one before cost is final."""

    def votes(self, count: float) -> Floats | float:
        """Votes of other shards for the present query, ``(c,)``, at the noisy number of neighbours. **Private**."""
        return 0.0

    def pay(self, mark: str) -> None:
        """Write what the queries have cost; on the disks of all shards when this returns.

        Args:
            mark: of this process's budgets, which are written already.
        """


#: For every table that lies in one process; it holds nothing.
ALONE = Alone()


class OtherShards(Alone):
    """Private records in other processes, each of which keeps the budgets of its own; for process 0.

    A record's part in a query depends on the query, on that record, on what it has left, and on the noisy number of
    neighbours, which is released: on nothing that other records hold. So each process works its records' parts out,
    and what travels to process 0 are sums: one number, then one a class.

    Args:
        exchange: joins the processes.
        num_classes: number of classes.
    """

    def __init__(self, exchange: Exchange, num_classes: int) -> None:
        self._exchange, self._none = exchange, torch.zeros(num_classes, dtype=torch.float64)

    def begin(self, vectors: Tensor, thresholds: Floats) -> None:
        """See the base."""
        self._exchange.tell(("begin", vectors, thresholds))

    def turn(self) -> None:
        """See the base."""
        self._exchange.tell(("turn",))
        self.active = int(self._exchange.sum(self._none[:1]))

    def votes(self, count: float) -> Floats:
        """See the base. Asked again with another number, the other shards answer anew, and pay for the last one."""
        self._exchange.tell(("votes", count))
        return self._exchange.sum(self._none).numpy()

    def pay(self, mark: str) -> None:
        """See the base.

        Raises:
            RuntimeError: where a process failed or ended; nothing may be released then.
        """
        self._exchange.tell(("pay",))
        self.marks = tuple(texts_of(self._exchange, mark))


def texts_of(exchange: Exchange, own: str) -> list[str]:
    """Short texts of all processes, on process 0; nothing elsewhere."""
    data = own.encode().ljust(_WIDTH)
    parts = exchange.gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [part.numpy().tobytes().decode().strip() for part in parts]
