"""Files of a run's folder, and its summary: configuration, checkpoints, privacy, accuracy, and a table of both."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn import __version__
from pl_privknn import _lightning as pl
from pl_privknn._checks import at_most, check_switch
from pl_privknn._lightning import quiet_lightning, rank_zero_warn
from pl_privknn.callbacks.advice import advice_for
from pl_privknn.callbacks.labeling_round import MODELS, model_for
from pl_privknn.callbacks.loggers import (
    active_loggers,
    labeling_of,
    log_queries,
    log_results,
    log_settings,
    log_trade_off,
    pictures_of,
    run_settings,
    spender_of,
)
from pl_privknn.callbacks.tested_models import TestedModels
from pl_privknn.config import HasInitArguments, as_section, write_yaml
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.labelers.base import MakesModel
from pl_privknn.privacy.accounting.tradeoff import attack_in_words
from pl_privknn.privacy.card import accuracy_text, holdout_text, recall_text
from pl_privknn.privacy.earlier_runs import together, together_in_words
from pl_privknn.privacy.files import write_durably, write_json
from pl_privknn.privacy.redaction import private_seconds
from pl_privknn.privacy.verify import CHECKPOINT, COLUMNS, CONFIG
from pl_privknn.students.losses import TASKS

_ORIGIN = "# Written by a run that Python started."
_LEFT_OUT = "# Only Python knows these: "


def write_config(folder: Path, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Write the configuration of a run started from Python, unless a command has written one.

    A comment names the parts that can't be written, without which the file is not complete.
    """
    path = folder / CONFIG
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, pl.both("cli.SaveConfigCallback")) for callback in callbacks):
        return
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(_ORIGIN):
        return
    trainer_section: dict[str, Any] = {"max_epochs": trainer.max_epochs}
    sections: dict[str, Any] = {"trainer": trainer_section}
    left_out: list[str] = []
    spenders = {
        "labeling" if part is labeling_of(trainer) else "trainer.callbacks": part
        for part in callbacks
        if hasattr(part, "privacy_summary")
    }
    for name, part in {"model": module, "data": trainer.datamodule, **spenders}.items():  # type: ignore[attr-defined]
        if not isinstance(part, HasInitArguments):
            left_out.append(name)
            continue
        section, missing = as_section(part)
        left_out += [f"{name}.{argument}" for argument in missing]
        if name == "trainer.callbacks":
            trainer_section["callbacks"] = [section]
        else:
            sections[name] = section.get("init_args", {}) if name == "labeling" else section
    lines = [_ORIGIN, *([_LEFT_OUT + ", ".join(left_out)] if left_out else []), write_yaml(sections)]
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(path, "\n".join(lines).encode())


def left_out_of(text: str) -> str | None:
    """Names of the parts that a written configuration leaves out; None where it is complete."""
    lines = [line for line in text.splitlines()[:2] if line.startswith(_LEFT_OUT)]
    return lines[0].removeprefix(_LEFT_OUT) if lines else None


def previous(checkpoint: Path) -> Path:
    """Path of the checkpoint that precedes the last one."""
    return checkpoint.with_name(f"{checkpoint.stem}.previous{checkpoint.suffix}")


def usable_checkpoint(checkpoint: Path) -> Path | None:
    """Checkpoint to resume from: the last one, the preceding one where the last is damaged, or None.

    Falling back repeats some training and asks nothing again: labels and charges are not kept in checkpoints.
    """
    if _is_whole(checkpoint):
        return checkpoint
    if _is_whole(kept := previous(checkpoint)):
        rank_zero_warn(f"{checkpoint} is missing or damaged: resuming from {kept.name}, the one before it")
        return kept
    if checkpoint.exists():
        rank_zero_warn(
            f"{checkpoint} is damaged and no earlier one exists: training restarts from the stored labels"
        )
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


class RunReport(pl.Callback):
    """Callback that writes ``summary.json`` and prints a table when training ends, and after a test its new rows.

    Whatever spends ε in a trainer (:class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler`,
    :class:`~pl_privknn.training.private_training.PrivateTraining`,
    :class:`~pl_privknn.training.noisy_sgd.NoisySGD`) adds one to the trainer, unless it has one. With the
    summary it writes ``pictures.npz``, public images and their truth for ``privknn report`` (see
    :class:`~pl_privknn.callbacks.loggers.PublicPictures`), and ``config.yaml`` (see
    :mod:`pl_privknn.callbacks.run_summary`).

    The ε in it is the exact worst case where that applies (see
    :func:`pl_privknn.privacy.accounting.accountant.account`).

    Args:
        run_dir: the folder; by default the one that holds the ledger's run, else the trainer's log folder.
        show: print the table, on the first process.

    Example:
        >>> import pytorch_lightning as pl
        >>> report = RunReport("runs/first", show=False)
        >>> trainer = pl.Trainer(callbacks=[report], logger=False, enable_checkpointing=False)
        >>> report.summary  # filled when training ends
        {}
    """

    def __init__(self, run_dir: str | Path | None = None, show: bool = True) -> None:
        self._chosen = None if run_dir is None else Path(run_dir)
        self.run_dir = self._chosen
        self.show = check_switch("show", show)
        self.summary: dict[str, Any] = {}
        self._started = _public_seconds()
        self._tested: TestedModels | None = None
        self._advice, self._asks = "", True
        self._settings: dict[str, Any] = {}
        self._shown: list[tuple[str, str]] = []

    @property
    def path(self) -> Path | None:
        """Path of the summary, once it is written."""
        return None if self.run_dir is None else self.run_dir / "summary.json"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ignore warnings that users can't act on, and start the clock."""
        quiet_lightning()
        if stage == "fit":
            self.summary, self.run_dir, self._advice, self._shown = {}, None, "", []
            self._started = _public_seconds()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the summary of the training."""
        if not self._find_folder(trainer, pl_module):
            return
        assert self.run_dir is not None
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.summary = {
            **_privacy(trainer, pl_module),
            "label_baseline": largest_share(getattr(getattr(data, "public", None), "truth", None)),
            "val_accuracy": _metric(trainer, "val/accuracy"),
            "test_accuracy": None,
            "epochs": trainer.current_epoch,
            # Without work on private records, whose duration reveals their number.
            "seconds": round(_public_seconds() - self._started, 3),
            "student": type(pl_module).__name__,
            "data": getattr(data, "name", None) or type(data).__name__,
            "versions": _versions(trainer),
        }
        if getattr(labeling := labeling_of(trainer), "released", "") == "auto":
            head, outputs = labeling.load_head(self.run_dir), TASKS[data.task]
            self.summary["released"] = model_for("auto", head, pl_module, data.public, outputs)
        with errors_as_warnings("ε of earlier runs on these records"):
            self.summary |= together(self.run_dir)
        self._finish(trainer, "val")
        with errors_as_warnings("the checkpoint in the run's folder"):
            self._keep_checkpoint(trainer)
        with errors_as_warnings("the log of the queries"):
            log_queries(trainer, self.run_dir)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Print what a run stopped by Ctrl-C has spent and kept, and how to resume it."""
        spender = spender_of(trainer, pl_module)
        if (
            not (self.show and isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero)
            or spender is None
        ):
            return
        place = next(iter(_saved_checkpoints(trainer)), None)
        again = f"run_dir={str(spender.run_dir)!r}" if place is None else f"ckpt_path={str(place)!r}"
        how = "the same trainer.fit" if place else "the same settings"
        print(
            interruption(spender, spender.run_dir, place is not None, f"{how} and {again}"), file=sys.stderr
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the run's folder, write the configuration there, and log the settings."""
        if not self._find_folder(trainer, pl_module):
            return
        assert self.run_dir is not None
        write_config(self.run_dir, trainer, pl_module)
        if active_loggers(trainer):
            self._settings = run_settings(trainer, pl_module)
            log_settings(trainer, self._settings)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log ε with the accuracy of the epoch."""
        accuracy = trainer.callback_metrics.get("val/accuracy")
        spender = spender_of(trainer, pl_module)
        if accuracy is None or spender is None or not trainer.is_global_zero:
            return
        # What the labeler logged before it asked for the next epoch, whose accuracy is not known yet.
        logged = trainer.callback_metrics.get("privacy/epsilon_spent")
        if logged is None or spender is not labeling_of(trainer):
            logged = spender.epsilon_spent
        log_trade_off(
            trainer,
            {"epsilon": spender.epsilon, "epsilon_spent": float(logged), "val_accuracy": float(accuracy)},
        )

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load a head to test with the student, in a single process, which sees all test images."""
        self._tested = None
        if not self.summary or trainer.world_size > 1:
            return
        labeling = labeling_of(trainer)
        begun = labeling is not None and labeling.ledger is not None
        head = labeling.load_head(labeling.run_dir) if begun else None
        self._tested = TestedModels(pl_module, head, trainer.datamodule)  # type: ignore[attr-defined]

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count correct predictions of the student and the head on a batch."""
        if self._tested is not None:
            self._tested.add(batch)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the accuracy on the test set, if a training of this process came before.

        Where a teacher's releases make a model, that of student, head and their mean too; ``test_accuracy`` is then
        that of the one which :class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler` says is released.
        """
        if not self.summary or not trainer.is_global_zero:
            return
        self.summary["test_accuracy"] = _metric(trainer, "test/accuracy")
        labeling = labeling_of(trainer)
        if self._tested is not None and self._tested.head is not None and labeling is not None:
            accuracies = self._tested.accuracies(self.summary["test_accuracy"])
            self.summary |= {f"{name}_test_accuracy": value for name, value in accuracies.items()}
            released = self.summary.setdefault("released", labeling.released)
            self.summary["test_accuracy"] = accuracies[released]
        data = trainer.datamodule  # type: ignore[attr-defined]
        truth = getattr(getattr(data, "test", None), "labels", None)
        self.summary |= {
            "test_baseline": largest_share(truth),
            "test_examples": None if truth is None else len(truth),
        }
        if (confusion := self._confusion()) is not None:
            self.summary |= figures_by_class(confusion, getattr(data, "class_names", ()))
            assert self._tested is not None
            self.summary |= reliability_figures(
                self._tested.reliability[self.summary.get("released", "student")]
            )
        self._finish(trainer, "test")

    def _keep_checkpoint(self, trainer: pl.Trainer) -> None:
        """Copy the checkpoint to the name that commands read, unless it has that name or is the folder's only one."""
        assert self.run_dir is not None
        saved, target = _saved_checkpoints(trainer), (self.run_dir / CHECKPOINT).resolve()
        kept = [*target.parent.glob("*.ckpt"), *self.run_dir.resolve().glob("*.ckpt")]
        if saved and target not in saved and kept != saved[:1] and saved[0].is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(saved[0], target)

    def _confusion(self) -> Tensor | None:
        """Confusion matrix of the released model on the test set, where there is one."""
        confusions = {} if self._tested is None else self._tested.confusions
        return confusions.get(self.summary.get("released", "student"))

    def _finish(self, trainer: pl.Trainer, part: str) -> None:
        """Write, log and print the summary; a failing part does not stop the others."""
        labeling = labeling_of(trainer)
        self._advice = advice_for(trainer, labeling, self.summary)
        # The model of a teacher that releases one labels public examples: nothing is asked.
        self._asks = not isinstance(getattr(labeling, "labeler", None), MakesModel)
        with errors_as_warnings("summary.json"):
            self._write()
        with errors_as_warnings("pictures for the report"):
            self._keep_pictures(trainer)
        with errors_as_warnings("a logger"):
            self._log_results(trainer, part)
        if self.show:
            self.print_table()

    def _find_folder(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Find the run's folder; returns whether this process writes there."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        default = Path(trainer.log_dir or trainer.default_root_dir)  # asked for by all processes
        # In the process that has the ledger, the run's own folder, wherever it is.
        self.run_dir = self._chosen or getattr(spender_of(trainer, pl_module), "run_dir", None) or default
        return trainer.is_global_zero

    def _log_results(self, trainer: pl.Trainer, part: str) -> None:
        """Log a row of TensorBoard's table and, after a test, the point (ε, accuracy)."""
        summary, accuracy = self.summary, self.summary.get(f"{part}_accuracy")
        if summary.get("epsilon") is None or accuracy is None:
            return
        results = {"epsilon": summary["epsilon"], f"{part}_accuracy": accuracy}
        if part == "test":
            log_trade_off(trainer, results)
        log_results(trainer, self._settings, part, results)

    def _keep_pictures(self, trainer: pl.Trainer) -> None:
        """Keep public pictures for the report; after a test with the released model's confusion matrix."""
        counts, tested = self._confusion(), None
        if self._tested is not None:
            tested = self._tested.furthest.get(self.summary.get("released", "student"))
            self._tested.close()
            self._tested = None
        data, labeling = trainer.datamodule, labeling_of(trainer)  # type: ignore[attr-defined]
        if isinstance(data, PrivatePublicDataModule) and self.run_dir is not None:
            data.setup("validate")  # the public part, where a test alone did not load it
            asked = [] if labeling is None else labeling.asked_examples()
            pictures_of(data, asked, counts, None if tested is None else tested[:, :3].long()).write(
                self.run_dir
            )
            if (columns := data.columns()) is not None:
                write_durably(self.run_dir / COLUMNS, json.dumps(columns, ensure_ascii=False))

    def table(self) -> list[tuple[str, str]]:
        """Main figures of the summary, as (name, value) pairs."""
        summary, rows = self.summary, []
        if summary.get("epsilon") is not None:
            about = f"({summary['adjacency']}, a {summary['unit']})"
            rows.append(("ε", f"{at_most(summary['epsilon'])} at δ = {summary['delta']:g} {about}"))
            rows.append(("guarantee", summary["guarantee"]))
            if summary["guarantee"] != "unconditional":
                why = "because" if summary["guarantee"] == "none" else "holds only if"
                rows.append((why, summary["reason"]))
            if "advantage" in summary:
                rows.append(("strongest attack", attack_in_words(summary, summary["unit"])))
            rows.append(("ε spent", at_most(summary["epsilon_spent"])))
            if "queried" in summary and self._asks:
                rows.append(("queries answered", f"{summary['answered']} of {summary['queried']}"))
            elif "steps" in summary:
                rows.append(("noisy steps", f"{summary['steps']} of {summary['steps_planned']}"))
            if said := together_in_words(summary):
                rows.append(("in all", said))
            if "remark" in summary:
                rows.append(("finding", summary["remark"]))
        if summary.get("holdout_accuracy") is not None:
            cost = f"released at ε {at_most(summary['holdout_epsilon'])}"
            rows.append(("hold-out accuracy", f"{holdout_text(summary)}, {cost}"))
            if "holdout_recall" in summary:
                errors = summary["holdout_recall_deviation"]
                rows.append(("hold-out recall", recall_text(summary["holdout_recall"], errors)))
        models = {f"test accuracy, {model}": f"{model}_test_accuracy" for model in MODELS}
        for title, name in {
            "label accuracy": "label_accuracy",
            "test accuracy": "test_accuracy",
            **models,
        }.items():
            if summary.get(name) is not None:
                rows.append((title, accuracy_text(summary, name)))
        if "test_recall" in summary:
            rows.append(("balanced accuracy", f"{summary['test_balanced_accuracy']:.3f}"))
            rows.append(("calibration error", f"{summary['test_calibration_error']:.3f}"))
            rows.append(("recall", recall_text(summary["test_recall"])))
        rows.append(("time", f"{summary['seconds']:.1f} s, work on private records excluded"))
        if self._advice:
            rows.append(("low accuracy", self._advice))
        return rows

    def print_table(self) -> None:
        """Print the rows of the table that were not printed since the fit."""
        rows = [row for row in self.table() if row not in self._shown]
        self._shown += rows
        if not rows:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(
                name, Text(value)
            )  # text would lose what stands in brackets, such as an extra's name
        Console().print(table)

    def _write(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.summary)


def _saved_checkpoints(trainer: pl.Trainer) -> list[Path]:
    """Checkpoints that the trainer's callbacks saved last, and as the best, in the order of the callbacks."""
    names = ("last_model_path", "best_model_path")
    saved = (getattr(callback, name, "") for callback in trainer.checkpoint_callbacks for name in names)
    return [Path(place).resolve() for place in saved if place]


def add_run_report(trainer: Any) -> None:
    """Add a :class:`RunReport` to a trainer that has none."""
    quiet_lightning()
    if not any(isinstance(callback, RunReport) for callback in trainer.callbacks):
        trainer.callbacks.append(RunReport())


@contextlib.contextmanager
def errors_as_warnings(what: str) -> Iterator[None]:
    """Convert errors after a charged training into warnings, so that its result is kept and shown."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        rank_zero_warn(f"{what} failed ({type(error).__name__}: {said}); the training's result is kept")


def largest_share(labels: Any) -> float | None:
    """Accuracy of always predicting the most frequent class, or each attribute's more frequent value.

    Args:
        labels: int64 ``(n,)`` or ``(n, a)``, -1 where unknown; None or nothing known gives None.
    """
    if not isinstance(labels, Tensor) or not bool((labels >= 0).any()):
        return None
    if labels.ndim == 1:
        counts = labels[labels >= 0].bincount()
        return round(float(counts.max() / counts.sum()), 6)
    yes, known = (labels > 0).sum(dim=0).double(), (labels >= 0).sum(dim=0)
    return round(float((torch.maximum(yes, known - yes) / known).nanmean()), 6)


def figures_by_class(confusion: Tensor, names: Any) -> dict[str, Any]:
    """Balanced accuracy, the mean recall of the classes that have test examples, and recall by class name."""
    if len(names) != len(confusion):
        names = tuple(map(str, range(len(confusion))))
    recalls = confusion.diagonal() / confusion.sum(dim=1)
    each = zip(names, recalls.tolist(), strict=True)
    return {
        "test_balanced_accuracy": round(float(recalls.nanmean()), 6),
        "test_recall": {name: None if math.isnan(recall) else round(recall, 6) for name, recall in each},
    }


def reliability_figures(counts: Tensor) -> dict[str, Any]:
    """Expected calibration error on the test set, and its bins: examples, mean probability, accuracy."""
    from pl_privknn.students.metrics import expected_calibration_error

    bins = counts[counts[:, 0] > 0]
    rows = torch.cat([bins[:, :1], bins[:, 1:] / bins[:, :1]], dim=1)
    return {
        "test_calibration_error": round(expected_calibration_error(counts), 6),
        "test_reliability": [
            [int(count), round(mean, 4), round(share, 4)] for count, mean, share in rows.tolist()
        ],
    }


def interruption(spender: Any, folder: Path, saved: bool, again: str) -> str:
    """Message about a run stopped by Ctrl-C: what it has spent and kept, and how to resume it.

    Args:
        spender: callback of the run that has its ledger.
        folder: of the run.
        saved: whether there is a checkpoint.
        again: what continues it.
    """
    kept, report = ["the ledger"], spender.ledger.report()
    if hasattr(spender, "label_counts"):
        kept.append(f"labels of {spender.label_counts()['answered']} queries")
    if saved:
        kept.append("a checkpoint of the last full epoch")
    return (
        f"interrupted. ε spent: {at_most(report.spent.epsilon)} of the stated "
        f"{at_most(report.guarantee.epsilon)}, at δ {report.spent.delta:g}. Kept in {folder}: {', '.join(kept)}; "
        f"continuing does not charge them again. Continue with: {again}"
    )


def _privacy(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    for owner in (*trainer.callbacks, pl_module):  # type: ignore[attr-defined]
        summary_of = getattr(owner, "privacy_summary", None)
        if summary_of is not None and (found := summary_of()) is not None:
            return dict(found)
    return {"epsilon": None, "guarantee": "none", "reason": "no private labels were used"}


def _metric(trainer: pl.Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return None if value is None else round(float(value), 6)


def _public_seconds() -> float:
    """Seconds of a clock that stops during work on private records."""
    return time.monotonic() - private_seconds()


def _versions(trainer: pl.Trainer) -> dict[str, str]:
    package = pl.package_of(trainer)
    versions = {
        "pl_privknn": __version__,
        "torch": torch.__version__,
        package.__name__: package.__version__,
        "python": platform.python_version(),
    }
    return versions if (commit := source_commit()) is None else {**versions, "commit": commit}


@functools.cache
def source_commit() -> str | None:
    """The checkout's commit, with ``-dirty`` behind it where files differ; None for an installed package."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # a repository around an installation is another project's
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
