"""What a run tells TensorBoard and Weights & Biases beside its curves: settings, ε beside accuracy, its queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl

from pl_privknn.callbacks.query_table import PicturedQuery, pictured_queries
from pl_privknn.callbacks.reports_run import ReportsRun
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.privacy.logged import check_declared
from pl_privknn.privacy.mechanisms import Charge

_OF_LABELING = (
    "rounds", "epochs_per_round", "queries_per_round", "max_answers", "delta", "max_epsilon", "adjacency", "retrain",
)  # fmt: skip
_COLUMNS = ("example", "round", "state", "label", "truth", "right")


def run_settings(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Labeler, noise, rounds and data of a run: public constants and its plan, by which runs of a sweep are grouped.

    ``noise`` holds each planned mechanism with its parameters by its kind, so that a sweep over σ of the votes can be
    grouped by ``noise.gaussian.sigma``.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    found: dict[str, Any] = {"student": type(module).__name__, "data": {"name": type(data).__name__}}
    if isinstance(data, PrivatePublicDataModule):
        found["data"] |= {"classes": data.num_classes, "public_images": len(data.public), "task": data.task}
    labeling = labeling_of(trainer)
    if labeling is not None and labeling.labeler is not None:
        found["labeler"] = type(labeling.labeler).__name__
        found |= {name: getattr(labeling, name) for name in _OF_LABELING}
    if (spender := spender_of(trainer, module)) is not None:
        report = spender.ledger.report()
        found |= {"noise": _noise(report.guaranteed), "epsilon": report.epsilon}
    return found


def log_settings(trainer: pl.Trainer, settings: dict[str, Any]) -> None:
    """Put settings into the config of W&B runs, where accuracy is then drawn against ε."""
    for logger in told(trainer):
        if _is(logger, "WandbLogger"):
            logger.log_hyperparams(settings)
            for name in ("val", "test"):
                logger.experiment.define_metric(f"tradeoff/{name}_accuracy", step_metric="tradeoff/epsilon")


def log_results(trainer: pl.Trainer, settings: dict[str, Any], part: str, results: dict[str, float]) -> None:
    """Put settings beside results into TensorBoard's table of hyper-parameters.

    The row of the run itself is Lightning's, which knows the student alone, so these have rows of their own.
    """
    for logger in told(trainer):
        if _is(logger, "TensorBoardLogger"):
            logger.experiment.add_hparams(_flat(settings), results, run_name=f"result_{part}")


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Values of nested settings by paths, as TensorBoard takes them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def log_trade_off(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Log ε and accuracy in one row, so that one can be drawn against the other.

    Raises:
        UndeclaredError: for a name that is not declared.
    """
    row = {f"tradeoff/{name}": value for name, value in values.items()}
    check_declared(row)
    for logger in told(trainer):
        logger.log_metrics(row, step=trainer.global_step)


def log_queries(trainer: pl.Trainer, folder: Path) -> None:
    """Log the queries with their public pictures and what was answered."""
    if not (wanted := told(trainer)) or not (rows := pictured_queries(folder)):
        return
    for logger in wanted:
        if _is(logger, "WandbLogger"):
            _wandb_table(logger.experiment, rows)
        else:
            _tensorboard_table(logger.experiment, rows, trainer.global_step)


def labeling_of(trainer: pl.Trainer) -> ReportsRun | None:
    """The trainer's labelling callback."""
    found = [part for part in trainer.callbacks if isinstance(part, ReportsRun)]  # type: ignore[attr-defined]
    return found[0] if found else None


def spender_of(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """What pays in this run: a callback or the module itself, whichever has a ledger; None where nothing does."""
    parts = (*trainer.callbacks, module)  # type: ignore[attr-defined]
    return next((part for part in parts if getattr(part, "ledger", None) is not None), None)


def _noise(charges: tuple[Charge, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for charge in charges:
        record = {**charge.mechanism.to_record(), "count": charge.count}
        kind = str(record.pop("mechanism"))
        number = sum(name.split("-")[0] == kind for name in found)
        found[f"{kind}-{number + 1}" if number else kind] = record
    return found


def _wandb_table(run: Any, rows: list[PicturedQuery]) -> None:
    import wandb

    table = wandb.Table(columns=["picture", *_COLUMNS])
    for row in rows:
        plain = row.plain()
        table.add_data(wandb.Image(row.image), *(plain[name] for name in _COLUMNS))
    run.log({"queries": table})


def _tensorboard_table(writer: Any, rows: list[PicturedQuery], step: int) -> None:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(str(row.plain()[name]) for name in _COLUMNS)} |" for row in rows]
    writer.add_text("queries", "\n".join(lines), step)
    images = np.stack([row.image if row.image.ndim == 3 else row.image[..., None] for row in rows])
    writer.add_images("queries", images, step, dataformats="NHWC")


def told(trainer: pl.Trainer) -> list[Any]:
    """The loggers that are told."""
    return [one for one in trainer.loggers if _is(one, "WandbLogger") or _is(one, "TensorBoardLogger")]


def _is(logger: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(logger).__mro__)
