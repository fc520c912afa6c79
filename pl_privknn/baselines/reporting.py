"""What people read of a private training: ε, steps, the ledger."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from pl_privknn.baselines.books import TrainingBooks
from pl_privknn.privacy.guarantee import strength
from pl_privknn.privacy.ledger import Ledger


class LeavesFolder(pl.Callback):
    """Lets another run use the folder of a training that an error ended."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave it."""
        if isinstance(pl_module, ReportsBooks):
            pl_module.leave_folder()


class ReportsBooks(pl.LightningModule):
    """Reads and logs the books of a training; part of :class:`~pl_privknn.baselines.noisy_sgd.NoisySGD`."""

    _books: TrainingBooks | None
    delta: float

    @property
    def epsilon(self) -> float:
        """The guarantee stated beforehand: ε of the ledger's worst case at this δ; 0 before the fit."""
        return 0.0 if self._books is None else self._books.reports()[0].epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of the steps that were paid for so far; for information."""
        return 0.0 if self._books is None else self._books.reports()[1].epsilon

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, once the fit has started."""
        return None if self._books is None else self._books.ledger

    @property
    def planned_steps(self) -> int:
        """Number of steps that the guarantee covers; 0 before the fit."""
        return 0 if self._books is None else self._books.planned

    def privacy_summary(self) -> dict[str, Any] | None:
        """What a report of the run says of its privacy, in plain types; None before the fit."""
        return None if self._books is None else self._books.summary()

    def leave_folder(self) -> None:
        """Let another run use the folder; the ledger stays readable."""
        if self._books is not None:
            self._books.close()

    def on_train_epoch_end(self) -> None:
        """Log ε beside the accuracy."""
        if self._books is None:
            return
        guarantee, spent = self._books.reports()
        self.log("privacy/epsilon", guarantee.epsilon, on_epoch=True, batch_size=1)
        self.log("privacy/epsilon_spent", spent.epsilon, on_epoch=True, batch_size=1)
        self.log("privacy/delta", self.delta, on_epoch=True, batch_size=1)
        self.log("privacy/guarantee", float(strength(guarantee.guarantee)), on_epoch=True, batch_size=1)
