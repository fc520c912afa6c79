"""Several processes train together: each reads records of its own, the first one pays and draws the noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed
from torch import Tensor

from pl_privknn.privacy.accounting.accountant import PrivacyReport

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class _Failed:
    what: str


class Processes:
    """The processes of a trainer, ``count`` of them; in a single one nothing is sent.

    Args:
        trainer: of the training.

    Attributes:
        rank: number of this one; 0 is the first, which has the ledger.
        count: how many there are.
    """

    def __init__(self, trainer: Any) -> None:
        options: Any = trainer
        self.rank, self.count = int(options.global_rank), int(options.world_size)
        self._strategy = options.strategy

    def sum(self, total: Tensor) -> Tensor:
        """The sum over all processes, in the first one; what the others get has no meaning."""
        if self.count > 1:
            torch.distributed.reduce(total, dst=0)
        return total

    def agree(self, value: bytes) -> bool:
        """Whether all processes give the same bytes."""
        if self.count == 1:
            return True
        same: bool = self._strategy.reduce_boolean_decision(self._strategy.broadcast(value) == value)
        return same

    def from_first(self, work: Callable[[], Made]) -> Made:
        """Let the first process work, and give its result to all.

        Raises:
            RuntimeError: in the others, where the first one fails; what it raises passes there.
        """
        if self.count == 1:
            return work()
        told: Any = None
        if self.rank > 0:
            told = self._strategy.broadcast(None)
            if isinstance(told, _Failed):
                raise RuntimeError(f"the first process of the training stopped: {told.what}")
            return told
        try:
            told = work()
        except Exception as error:  # the others would wait for ever
            self._strategy.broadcast(_Failed(f"{type(error).__name__}: {error}"))
            raise
        self._strategy.broadcast(told)
        return told

    def tensor_of_first(self, values: Tensor) -> Tensor:
        """The first process's values in all of them; the others give a tensor of their shape to write to."""
        if self.count > 1:
            values = values.contiguous()
            torch.distributed.broadcast(values, src=0)
        return values


@dataclasses.dataclass
class FollowedSteps:
    """Progress of the first process: steps that are left, and the position of the last row paid."""

    left: int
    row: int = 0


@dataclasses.dataclass
class FollowedRun:
    """Facts of a training that the first process, which has the ledger, tells the others.

    Attributes:
        planned: number of steps that the guarantee covers.
        noise_multiplier: noise over the clipping norm.
        num_charges: rows that the run had paid when this process joined it.
        lost: paid steps that are not in the weights.
        steps: how far it is.
        last_reports: the guarantee and what was spent, as they were told last.
    """

    planned: int
    noise_multiplier: float
    num_charges: int
    lost: int
    steps: FollowedSteps
    last_reports: tuple[PrivacyReport, PrivacyReport]

    ledger = folder = None

    def hear(self, left: int, row: int, reports: tuple[PrivacyReport, PrivacyReport] | None) -> None:
        """Something was released; ``reports`` where a row was paid for it."""
        self.steps.left, self.steps.row = left, row
        if reports is not None:
            self.last_reports = reports

    def reports(self, exact: bool = False) -> tuple[PrivacyReport, PrivacyReport]:
        """The guarantee stated beforehand and what was spent, as the first process tells them."""
        return self.last_reports

    def summary(self) -> None:
        """Only the first process has the ledger that a summary is made of."""

    def state(self) -> dict[str, Any]:
        """Only the first process's checkpoint is written."""
        return {}

    def close(self) -> None:
        """Nothing is open."""
