"""Sums of private records that lie in shards: each process adds up its own, and one all-reduce makes the whole."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from pl_privknn.labelers.protocols import ShardedLabeler


class SumsOverShards(ShardedLabeler):
    """A teacher that looks at private records through sums alone, in one process or in many.

    Process 0 gives the order for a sum, with the model and all that was learned from public examples, so that every
    record enters by the same function, whoever holds it. It alone pays, draws noise, and keeps what is released.
    """

    @abc.abstractmethod
    def private_sum(self, release: int, weights: Tensor) -> Tensor:
        """The exact sum of the records of this process, **private**, ``(c, p)``: in steps, int64, if it gets noise.

        Args:
            release: its number.
            weights: the model before it, 0 at first.
        """

    def step(self, release: int) -> float:
        """The public power of two of which :meth:`private_sum` counts multiples."""
        return 1.0

    def exact_sum(self, release: int, weights: Tensor) -> Tensor:
        """**Private.** :meth:`private_sum` in the units of the released sum, float64 ``(c, p)``."""
        return self.private_sum(release, weights).double() * self.step(release)

    @abc.abstractmethod
    def learned(self) -> dict[str, Tensor]:
        """What was learned from public examples, as tensors."""

    @abc.abstractmethod
    def relearn(self, learned: dict[str, Tensor]) -> None:
        """Take what :meth:`learned` gave."""

    def public_basis(self) -> dict[str, Tensor]:
        """What :meth:`private_sum` needs of public examples."""
        return self.learned()

    def take_basis(self, basis: dict[str, Tensor]) -> None:
        """Take what :meth:`public_basis` of another process gave."""
        self.relearn(basis)

    def partial(self, order: Any) -> Tensor:
        """:meth:`private_sum` by what process 0 learned from public examples."""
        release, weights, basis = order
        self.take_basis(basis)
        return self.private_sum(release, weights)

    def whole_sum(self, release: int, weights: Tensor) -> Tensor:
        """:meth:`private_sum` of all records, on process 0. Whole numbers are the same in any number of shards."""
        return self.merged((release, weights, self.public_basis()))
