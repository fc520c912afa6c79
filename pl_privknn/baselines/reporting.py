"""What a private training reports: ε, steps, the ledger."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from pl_privknn.baselines.training_run import TrainingRun
from pl_privknn.privacy.guarantee import strength
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.logged import check_declared


class LeavesFolder(pl.Callback):
    """Lets another run use the folder of a training that an error ended."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave it."""
        if isinstance(pl_module, ReportsTraining):
            pl_module.leave_folder()


class ReportsTraining(pl.LightningModule):
    """Reports and logs ε of a training; part of :class:`~pl_privknn.baselines.noisy_sgd.NoisySGD`."""

    _training_run: TrainingRun | None
    delta: float

    @property
    def epsilon(self) -> float:
        """The guarantee stated beforehand: ε of the ledger's worst case at this δ; 0 before the fit."""
        return 0.0 if self._training_run is None else self._training_run.reports()[0].epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of the steps that were paid for so far; for information."""
        return 0.0 if self._training_run is None else self._training_run.reports()[1].epsilon

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, once the fit has started."""
        return None if self._training_run is None else self._training_run.ledger

    @property
    def planned_steps(self) -> int:
        """Number of steps that the guarantee covers; 0 before the fit."""
        return 0 if self._training_run is None else self._training_run.planned

    def privacy_summary(self) -> dict[str, Any] | None:
        """What a report of the run says of its privacy, in plain types; None before the fit."""
        return None if self._training_run is None else self._training_run.summary()

    def leave_folder(self) -> None:
        """Let another run use the folder; the ledger stays readable."""
        if self._training_run is not None:
            self._training_run.close()

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log a declared metric; this module sees private records, so any other is refused.

        Raises:
            UndeclaredError: see :func:`pl_privknn.privacy.logged.check_declared`.
        """
        check_declared([name])
        super().log(name, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        """Log ε beside the accuracy."""
        if self._training_run is None:
            return
        guarantee, spent = self._training_run.reports()
        self.log("privacy/epsilon", guarantee.epsilon, on_epoch=True, batch_size=1)
        self.log("privacy/epsilon_spent", spent.epsilon, on_epoch=True, batch_size=1)
        self.log("privacy/delta", self.delta, on_epoch=True, batch_size=1)
        self.log("privacy/guarantee", float(strength(guarantee.guarantee)), on_epoch=True, batch_size=1)
