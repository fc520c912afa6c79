"""What noisy SGD logs, and how it leaves its folder."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from pl_privknn.privacy.redaction import check_declared
from pl_privknn.training.reporting import ReportsTraining


class LeavesFolder(pl.Callback):
    """Lets another run use the folder of a training that an error ended."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave it."""
        if isinstance(pl_module, LogsTraining):
            pl_module.session.leave()


class LogsTraining(ReportsTraining, pl.LightningModule):
    """Logs ε of a training, and nothing undeclared; part of :class:`~pl_privknn.baselines.noisy_sgd.NoisySGD`."""

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log a declared metric; this module sees private records, so any other is refused.

        Raises:
            UndeclaredError: see :func:`pl_privknn.privacy.redaction.check_declared`.
        """
        check_declared([name])
        super().log(name, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        """Log ε beside the accuracy."""
        for name, value in self.privacy_metrics().items():
            self.log(name, value, on_epoch=True, batch_size=1)
