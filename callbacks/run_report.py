"""What a run leaves for its reader: ``summary.json`` and a short table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from pl_privknn import __version__
from pl_privknn._files import write_durably
from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.released_head import MODELS, Judged, load_head
from pl_privknn.callbacks.round_settings import lasting_extractor
from pl_privknn.privacy.accounting.tradeoff import attack_in_words
from pl_privknn.privacy.logged import check_declared


class RunReport(pl.Callback):
    """Writes ``summary.json`` into the run's folder when training ends, and again after a test.

    The ε in it is the exact worst case where that applies (see
    :func:`pl_privknn.privacy.accounting.accountant.account`), so it can be a little below the fast figure that was
    logged during training.

    Args:
        run_dir: the folder; default: the trainer's log folder.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.summary: dict[str, Any] = {}
        self._started = time.monotonic()
        self._judged: Judged | None = None

    @property
    def path(self) -> Path | None:
        """Where the summary was written, once it was."""
        return None if self.run_dir is None else self.run_dir / "summary.json"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the summary of the training."""
        if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        if self.run_dir is None:
            self.run_dir = Path(trainer.log_dir or trainer.default_root_dir)
        self.summary = {
            **_privacy(trainer, pl_module),
            "val_accuracy": _metric(trainer, "val/accuracy"),
            "test_accuracy": None,
            "epochs": trainer.current_epoch,
            "seconds": round(time.monotonic() - self._started, 3),
            "student": type(pl_module).__name__,
            "data": type(trainer.datamodule).__name__,  # type: ignore[attr-defined]
            "versions": _versions(),
        }
        self._write()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look for a head to judge beside the student; with several processes none sees all test images."""
        self._judged = None
        labeling = _labeling(trainer)
        if not self.summary or trainer.world_size > 1 or labeling is None or labeling.folder is None:
            return
        extractor = lasting_extractor(labeling.features)
        if labeling.labeler is not None and extractor is not None:
            head = load_head(labeling.folder, labeling.labeler, extractor)
            self._judged = None if head is None else Judged(head)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Judge the head on the batch."""
        if self._judged is not None:
            self._judged.add(pl_module, batch[0], batch[1])

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the accuracy on the test set, if a training of this process came before.

        Where a teacher's releases make a model, that of student, head and their mean too; ``test_accuracy`` is then
        that of the one which :class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler` says is released.
        """
        if not self.summary or not trainer.is_global_zero:
            return
        self.summary["test_accuracy"] = _metric(trainer, "test/accuracy")
        labeling = _labeling(trainer)
        if self._judged is not None and labeling is not None:
            accuracies = self._judged.accuracies(self.summary["test_accuracy"])
            self.summary |= {f"{name}_test_accuracy": value for name, value in accuracies.items()}
            self.summary |= {"released": labeling.released, "test_accuracy": accuracies[labeling.released]}
        self._write()

    def table(self) -> list[tuple[str, str]]:
        """The summary in the few lines that people look for, as (name, value) pairs."""
        summary = self.summary
        rows = []
        if summary.get("epsilon") is not None:
            rows.append(
                ("ε", f"{summary['epsilon']:.4g} at δ = {summary['delta']:g} ({summary['adjacency']})")
            )
            rows.append(("guarantee", summary["guarantee"]))
            if summary["guarantee"] != "unconditional":
                rows.append(
                    ("because" if summary["guarantee"] == "none" else "holds only if", summary["reason"])
                )
            if "advantage" in summary:
                rows.append(("best attack, at most", attack_in_words(summary)))
            rows.append(("spent in fact", f"ε = {summary['epsilon_spent']:.4g}"))
            if "queried" in summary:
                rows.append(("answered", f"{summary['answered']} of {summary['queried']} queries"))
            else:
                rows.append(("noisy steps", f"{summary['steps']} of {summary['steps_planned']}"))
        if summary.get("label_accuracy") is not None:
            rows.append(("label accuracy", f"{summary['label_accuracy']:.3f}"))
        if summary.get("test_accuracy") is not None:
            rows.append(("test accuracy", f"{summary['test_accuracy']:.3f}"))
        for name in MODELS:
            if summary.get(f"{name}_test_accuracy") is not None:
                rows.append((f"… of {name}", f"{summary[f'{name}_test_accuracy']:.3f}"))
        rows.append(("seconds", f"{summary['seconds']:.1f}"))
        return rows

    def _write(self) -> None:
        assert self.path is not None
        check_declared(self.summary, "summary")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, json.dumps(self.summary, indent=2, ensure_ascii=False) + "\n")


def _labeling(trainer: pl.Trainer) -> PrivateLabeler | None:
    found = [part for part in trainer.callbacks if isinstance(part, PrivateLabeler)]  # type: ignore[attr-defined]
    return found[0] if found else None


def _privacy(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PrivateLabeler) and (reports := callback.report(exact=True)) is not None:
            guarantee, spent = reports
            counts = callback.label_counts()
            assert callback.ledger is not None
            whole = callback.ledger.report(guarantee.delta, exact=True)
            return {
                **guarantee.to_dict(),
                **whole.trade_off().to_dict(),
                "epsilon_spent": spent.epsilon,
                "max_epsilon": callback.max_epsilon,
                **counts,
                "label_accuracy": callback.metrics.get("labels/accuracy"),
                "label_accuracy_last_round": callback.metrics.get("labels/accuracy_last_round"),
                "labeler": type(callback.labeler).__name__,
                "ledger_head": whole.head,
            }
    # What trains on the private records itself has its own ledger.
    for owner in (*trainer.callbacks, pl_module):  # type: ignore[attr-defined]
        tells = getattr(owner, "privacy_summary", None)
        if tells is not None and (told := tells()) is not None:
            return dict(told)
    return {"epsilon": None, "guarantee": "none", "reason": "no private labels were used"}


def _metric(trainer: pl.Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return None if value is None else round(float(value), 6)


def _versions() -> dict[str, str]:

    return {"pl_privknn": __version__, "torch": torch.__version__, "pytorch_lightning": pl.__version__}
