"""What spends ε in a trainer sees to it that the run leaves its report, whoever started it."""

from __future__ import annotations

from pl_privknn import _lightning as pl
from pl_privknn._lightning import quiet_lightning


def leave_report(trainer: pl.Trainer) -> None:
    """Give the trainer a :class:`~pl_privknn.callbacks.run_summary.RunReport`, unless it has one."""
    from pl_privknn.callbacks.run_summary import RunReport  # which knows everything that reports

    quiet_lightning()
    if not any(isinstance(callback, RunReport) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        trainer.callbacks.append(RunReport())  # type: ignore[attr-defined]
