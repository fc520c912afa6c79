"""What a private training reports: ε, steps, the ledger; and the summary that a run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pl_privknn import _lightning as pl
from pl_privknn._lightning import quiet_lightning
from pl_privknn.config import HasInitArguments
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms.base import guarantee_rank
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.training.session import PrivateSession


class ReportsTraining(HasInitArguments):
    """Reports ε of a training; part of whatever holds its session."""

    session: PrivateSession

    @property
    def delta(self) -> float:
        """δ of the guarantee."""
        return self.session.budget.delta

    @property
    def noise_source(self) -> NoiseSource:
        """The source of coins and noise."""
        return self.session.noise_source

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, as it was asked for; may be set until the fit."""
        return self.session.run_dir

    @run_dir.setter
    def run_dir(self, folder: str | Path) -> None:
        self.session.run_dir = Path(folder)

    @property
    def epsilon(self) -> float:
        """The guarantee stated beforehand: ε of the ledger's worst case at this δ; 0 before the fit."""
        return 0.0 if self.session.run is None else self.session.run.reports()[0].epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of the steps that were paid for so far; for information."""
        return 0.0 if self.session.run is None else self.session.run.reports()[1].epsilon

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, once the fit has started."""
        return None if self.session.run is None else self.session.run.ledger

    @property
    def folder(self) -> Path | None:
        """The run's folder, once the fit has started."""
        return None if self.session.run is None else self.session.run.folder

    @property
    def planned_steps(self) -> int:
        """Number of steps that the guarantee covers; 0 before the fit."""
        return 0 if self.session.run is None else self.session.run.planned

    def privacy_summary(self) -> dict[str, Any] | None:
        """What a report of the run says of its privacy, in plain types; None before the fit."""
        return None if self.session.run is None else self.session.run.summary()

    def privacy_metrics(self) -> dict[str, float]:
        """What is logged of the privacy: declared names and values; nothing before the fit."""
        if self.session.run is None:
            return {}
        guarantee, spent = self.session.run.reports()
        return {
            "privacy/epsilon": guarantee.epsilon,
            "privacy/epsilon_spent": spent.epsilon,
            "privacy/delta": self.delta,
            "privacy/guarantee": float(guarantee_rank(guarantee.guarantee)),
        }


def leave_report(trainer: pl.Trainer) -> None:
    """Give the trainer a :class:`~pl_privknn.callbacks.run_summary.RunReport`, unless it has one."""
    from pl_privknn.callbacks.run_summary import RunReport  # which knows everything that reports

    quiet_lightning()
    if not any(isinstance(callback, RunReport) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        trainer.callbacks.append(RunReport())  # type: ignore[attr-defined]
