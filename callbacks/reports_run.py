"""What a labelling run says of itself while it goes on and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.callbacks.round_settings import RoundFeatures
from pl_privknn.init_arguments import HasInitArguments
from pl_privknn.labelers.base import Labeler
from pl_privknn.privacy.accounting.privacy_report import PrivacyReport
from pl_privknn.privacy.guarantee import Level
from pl_privknn.privacy.ledger.ledger import Ledger


class ReportsRun(HasInitArguments, pl.Callback):
    """Reads a run's ledger and labels; part of :class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler`."""

    labeler: Labeler | None
    features: list[RoundFeatures]
    max_epsilon: float | None
    released: str

    def __init__(self) -> None:
        self._run: LabelRun | None = None
        self._metrics: dict[str, float] = {}

    @property
    def epsilon(self) -> float:
        """The guarantee stated beforehand: ε of the ledger's worst case at this δ; 0 before the fit."""
        return self._metrics.get("privacy/epsilon", 0.0)

    @property
    def epsilon_spent(self) -> float:
        """ε of what was released in fact; for information, it is not a promise made beforehand."""
        return self._metrics.get("privacy/epsilon_spent", 0.0)

    @property
    def guarantee(self) -> Level:
        """The word beside :attr:`epsilon`; :meth:`report` has the reasons."""
        report = self.report(exact=False)
        return "unconditional" if report is None else report[0].guarantee

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged: ``privacy/…`` and ``labels/…``."""
        return dict(self._metrics)

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, once the fit has started, on the process that asks (global rank 0)."""
        return None if self._run is None else self._run.ledger

    def report(self, exact: bool = True) -> tuple[PrivacyReport, PrivacyReport] | None:
        """The guarantee and what was spent, or None before the fit; ``exact`` takes some seconds."""
        return None if self._run is None else self._run.reports(exact)

    def privacy_summary(self) -> dict[str, Any] | None:
        """What a report of the run says of its privacy, in plain types; None before the fit."""
        if self._run is None:
            return None
        report = self._run.ledger.report(self._run.delta, exact=True)
        return {
            **report.guarantee.to_dict(),
            **report.trade_off().to_dict(),
            "epsilon_spent": report.spent.epsilon,
            "max_epsilon": self.max_epsilon,
            **self.label_counts(),
            "label_accuracy": self.metrics.get("labels/accuracy"),
            "label_accuracy_last_round": self.metrics.get("labels/accuracy_last_round"),
            "labeler": type(self.labeler).__name__,
            "ledger_head": report.head,
            "run": self.run_id,
        }

    @property
    def folder(self) -> Path | None:
        """The run's folder, once the fit has started, on global rank 0."""
        return None if self._run is None else self._run.store.path.parent

    @property
    def run_id(self) -> str | None:
        """The run's lasting name in its ledger, once the fit has started, on global rank 0."""
        return None if self._run is None else self._run.run_id

    def label_counts(self) -> dict[str, int]:
        """Numbers of queries: queried, answered, refused, lost to a crash."""
        return {} if self._run is None else self._run.store.counts()

    def asked_examples(self) -> list[int]:
        """Public examples of all rounds so far, in the order in which they were asked."""
        if self._run is None:
            return []
        store = self._run.store
        return [example for index in range(store.rounds()) for example in store.selected(index) or []]
