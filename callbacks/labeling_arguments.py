"""Arguments of a labelling run: defaults, checks, and the objects that they name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_int, check_path, check_positive, check_switch
from pl_privknn.callbacks.labeling_round import FeatureStore
from pl_privknn.config import as_group
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features.backbone import BackboneFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.features.joined import JoinedFeatures
from pl_privknn.features.public import DefaultFeatures
from pl_privknn.labelers.base import Labeler, MakesModel, check_protects
from pl_privknn.privacy.mechanisms.base import Adjacency, Unit
from pl_privknn.privacy.private_state import table_digest
from pl_privknn.privacy.records import is_ours
from pl_privknn.privacy.verify import COLUMNS

_TRIED = 4  # public examples in a made-up batch
#: Represents the student's backbone in a list of features.
STUDENT = "student"

#: Kinds of devices on which ``device="auto"`` searches; others (Apple's) have no float64, or no full float32.
_FAST = ("cuda",)

#: An extractor, the word ``"student"``, or several of them side by side.
RoundFeatures = Extractor | str | list[Extractor | str]


@dataclasses.dataclass(frozen=True)
class LabelingOptions:
    """Rarely used settings of a labelling: the ledger's file, retraining, memory, seed, device, shards.

    Args:
        ledger_path: a ledger that several runs over the same private data share; by default the run's own, in the
            run's folder.
        retrain: start the student afresh at each later round, as in the paper; False continues it.
        class_prior: shares of the classes where the model is used, one per class, a public constant: probabilities of
            labels and of a teacher's own model move to them by Bayes' rule. None assumes those of the private table,
            as the releases have them. For teachers that release probabilities.
        balanced: the same with equal shares of all classes, so that rare ones count as much as large ones.
        memory: how large a table of private features may get in memory.
        query_batch_size: queries that are paid for and stored together; a kill loses at most one batch.
        seed: for the random choice of queries, a public matter; never for protective noise.
        progress: show a progress bar while labelling.
        device: where features are extracted and neighbours searched for; ``"auto"``: where the trainer is.
        sharded: let each process of the training search a share of the private records, for teachers that can.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.callbacks import LabelingOptions
        >>> LabelingOptions(query_batch_size=50).query_batch_size
        50
    """

    ledger_path: str | Path | None = None
    retrain: bool = True
    class_prior: list[float] | None = None
    balanced: bool = False
    memory: FeatureStore = FeatureStore()
    query_batch_size: int = 256
    seed: int = 0
    progress: bool = True
    device: str = "auto"
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.ledger_path is not None:  # checkpoints hold plain types alone
            object.__setattr__(self, "ledger_path", check_path("ledger_path", self.ledger_path))
        object.__setattr__(self, "memory", as_group("memory", self.memory, FeatureStore()))
        if self.class_prior is not None:
            check_prior(self.class_prior)
            if self.balanced:
                raise ValueError(
                    "balanced=True with class_prior: each states the shares of classes; leave one out"
                )
        check_int("query_batch_size", self.query_batch_size)
        check_int("seed", self.seed, minimum=0)
        check_device(self.device)
        for name in ("retrain", "progress", "sharded", "balanced"):
            check_switch(name, getattr(self, name))

    def prior_of(self, num_classes: int) -> list[float] | None:
        """Class shares in use; None for the shares of the private table."""
        return [1 / num_classes] * num_classes if self.balanced else self.class_prior


def queries_of_rounds(queries: int | Sequence[int], rounds: int) -> list[int]:
    """Number of queries of each round, from one number or one for each.

    Raises:
        ValueError: for a wrong number of numbers, or no query at all.
    """
    counts = list(queries) if isinstance(queries, Sequence) else [queries] * rounds
    if len(counts) != rounds:
        raise ValueError(
            f"queries_per_round={queries!r} must be one number, or one for each of {rounds} rounds"
        )
    counts = [check_int("queries_per_round", count, minimum=0) for count in counts]
    if counts[0] == 0:
        raise ValueError(f"queries_per_round={queries!r}: the first round must ask at least one query")
    return counts


def features_of_rounds(features: Sequence[RoundFeatures] | Extractor | str | None) -> list[RoundFeatures]:
    """Features of each round; the last ones serve all later rounds. By default ``DefaultFeatures``, then the student.

    Raises:
        ValueError: for an empty list, or an item that is neither an extractor nor the word ``"student"``.
    """
    if features is None:
        return [DefaultFeatures(), STUDENT]
    chosen: list[RoundFeatures] = (
        list(features) if isinstance(features, list | tuple) else [features]  # type: ignore[list-item]
    )
    for item in chosen:
        for part in item if isinstance(item, list | tuple) else [item]:
            if part != STUDENT and not callable(part):
                raise ValueError(f"features: {part!r} is neither an extractor nor the word {STUDENT!r}")
        if isinstance(item, list | tuple) and not item:
            raise ValueError("features: an empty list among them must name at least one extractor")
    if not chosen:
        raise ValueError("features=[] must name at least one extractor")
    return chosen


def check_fits(
    labeler: Labeler,
    adjacency: Adjacency,
    features: Sequence[RoundFeatures],
    queries: Sequence[int],
    unit: Unit = "record",
) -> None:
    """Refuse a labeler whose cost does not hold, or whose releases are not valid in all rounds.

    Raises:
        ValueError: for an adjacency or a unit that the labeler does not keep; for rounds that ask about different
            features, two extractors or a student that learns between them, of a labeler whose releases are about one
            kind.
    """
    name = type(labeler).__name__
    if adjacency not in labeler.adjacencies:
        raise ValueError(
            f"adjacency={adjacency!r} is not among those of {name}: {', '.join(labeler.adjacencies)}"
        )
    check_protects(labeler, unit)
    asking = [min(index, len(features) - 1) for index, count in enumerate(queries) if count]
    learns = STUDENT in _parts(features[asking[0]])
    if (
        isinstance(labeler, MakesModel)
        and labeler.releases_once
        and (len(set(asking)) > 1 or (learns and len(asking) > 1))
    ):
        raise ValueError(
            f"features: rounds use different ones, but {name} releases once, about one kind; name one "
            "extractor for all rounds, or ask in the first round alone"
        )


def lasting_extractor(features: Sequence[RoundFeatures]) -> Extractor | None:
    """Extractor of the first round; None where the student is part of it, since it changes."""
    first = features[0]
    return None if STUDENT in _parts(first) else extractor_of(first, nn.Identity())


def _parts(features: RoundFeatures) -> Sequence[Extractor | str]:
    return features if isinstance(features, list | tuple) else [features]


def extractor_of(chosen: RoundFeatures, student: nn.Module) -> Extractor:
    """Extractor of a round; several are concatenated, each scaled to unit length."""
    if isinstance(chosen, list | tuple):
        return JoinedFeatures([extractor_of(part, student) for part in chosen])
    return BackboneFeatures(student) if isinstance(chosen, str) else chosen


def check_prior(class_prior: Sequence[float]) -> None:
    """Raise ``ValueError`` unless shares are of at least two classes, positive and of sum 1.

    Raises:
        ValueError: for others.
    """
    shares = [check_positive("class_prior", share) for share in class_prior]
    if len(shares) < 2 or abs(sum(shares) - 1) > 1e-3:
        raise ValueError(
            f"class_prior={list(class_prior)!r}: expected a share above 0 for each class, 1 in sum"
        )


def check_device(device: str) -> None:
    """Raise ``ValueError`` for a device that is neither ``"auto"`` nor available.

    Raises:
        ValueError: for such a device.
    """
    try:
        kind = "cpu" if device == "auto" else torch.device(device).type
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device={device!r} must be 'auto' or the name of a device, as 'cpu' or 'cuda:0'"
        ) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no such device here; use device='auto'")


def device_of(device: str, trainers: torch.device) -> torch.device:
    """Device of searches and extractors: under ``"auto"`` the trainer's own, or the CPU where that lacks a dtype."""
    if device != "auto":
        return torch.device(device)
    return trainers if trainers.type in _FAST else torch.device("cpu")


def probabilities_of(student: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Class probabilities of the student, float32 ``(n, c)`` on the CPU; the student's mode is restored."""
    return BackboneFeatures(_Probabilities(student))(images)


class _Probabilities(nn.Module):
    """Extractor whose features are a student's class probabilities."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.student(images).float().softmax(dim=1)


def placeholders(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Placeholder labels for a run without queries, in the shape of ``labels``."""
    numbers = torch.arange(len(labels))
    return numbers % num_classes if labels.ndim == 1 else (numbers % 2)[:, None].expand_as(labels)


_NARROW = ("bf16-true", "16-true", "64-true")  # precisions of whole students


def check_schedule(trainer: pl.Trainer) -> None:
    """Raise ``ValueError`` for reloaded data, and for precisions in which a student's weights are not float32."""
    if (every := trainer.reload_dataloaders_every_n_epochs) > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"reload_dataloaders_every_n_epochs={every} mis-schedules after a resume; set it to 0, the "
            "data module follows label changes by itself"
        )
    if (precision := str(trainer.precision)) in _NARROW:
        raise ValueError(
            f"precision={precision!r}: public images and labels are float32, and later rounds take features from "
            "the student; use precision='32-true' or 'bf16-mixed'"
        )


def check_student(trainer: pl.Trainer, module: pl.LightningModule, data: PrivatePublicDataModule) -> None:
    """Refuse a student that a training would stop after the first queries are paid for.

    A copy of a module of others takes a made-up training batch.

    Args:
        trainer: with its optimizers set up.
        module: the student.
        data: its data module, set up.

    Raises:
        ValueError: for a ``training_step`` that takes pairs alone, and for monitors of a validation that never runs.
    """
    few = range(min(_TRIED, len(data.public)))
    x = data.public.images(few).to(module.device)
    y = placeholders(data.public.labels[: len(few)].cpu(), data.num_classes).to(module.device)
    if (
        not is_ours(module)
        and not _takes(module, {"labeled": (x, y), "unlabeled": x})
        and _takes(module, (x, y))
    ):
        raise ValueError(
            f'{type(module).__name__}.training_step expects (x, y), but a batch is {{"labeled": (x, y), "unlabeled": '
            'x}; begin it with x, y = batch["labeled"]'
        )
    if trainer.enable_validation and (data.has_validation or _validates_otherwise(data)):
        return
    owners = (*trainer.callbacks, *trainer.lr_scheduler_configs)  # type: ignore[attr-defined]
    for one in owners:
        monitor = getattr(one, "monitor", None) if getattr(one, "reduce_on_plateau", True) else None
        if str(monitor).startswith("val"):
            name = type(getattr(one, "scheduler", one)).__name__
            raise ValueError(
                f"{name}(monitor={monitor!r}): there is no validation; give the module a "
                "validation_step and the data module a validation part (val) or classes of public examples, or "
                "monitor what training_step logs"
            )


def _takes(module: pl.LightningModule, batch: Any) -> bool:
    """Whether the training step of a module accepts a batch, tried on a copy."""
    hidden = io.StringIO()
    with (
        torch.random.fork_rng(devices=[module.device] if module.device.type == "cuda" else []),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(hidden),
        contextlib.redirect_stderr(hidden),
    ):
        warnings.simplefilter("ignore")
        try:
            copy.deepcopy(module).training_step(batch, 0)
        except Exception:
            return False
    return True


def _validates_otherwise(data: PrivatePublicDataModule) -> bool:
    """Whether a data module defines its own validation loaders."""
    return type(data).val_dataloader is not PrivatePublicDataModule.val_dataloader


def public_facts(data: PrivatePublicDataModule) -> dict[str, Any]:
    """Facts about public examples and classes that are fixed when a run begins, without those that it pays for."""
    rows = torch.arange(0 if data.pays_for_public else len(data.public))
    named = data.names is not None and data.names.classes
    return {
        "public_examples": len(data.public),
        "public_digest": table_digest(map(data.public.images, rows.split(1024))),
        "num_classes": None if named else data.num_classes,
    }


def take_columns(trainer: pl.Trainer, run_dir: Path | None) -> None:
    """Let the data module read rows by the columns of the run whose checkpoint is evaluated.

    Args:
        trainer: of the evaluation.
        run_dir: the folder that was asked for, or None.
    """
    places = [] if trainer.ckpt_path is None else [*Path(trainer.ckpt_path).parents[:2]]
    for place in places if run_dir is None else [run_dir, *places]:
        if (place / COLUMNS).is_file():
            data_module(trainer).take_columns(json.loads((place / COLUMNS).read_text(encoding="utf-8")))
            return


def data_module(trainer: pl.Trainer) -> PrivatePublicDataModule:
    """The trainer's data module.

    Raises:
        TypeError: where it is of another kind.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, PrivatePublicDataModule):
        raise TypeError(
            f"PrivateLabeler needs a PrivatePublicDataModule, got {type(data).__name__}; pass "
            "datamodule=ArraysDataModule(...) or another one of pl_privknn.datamodules to trainer.fit"
        )
    return data


def is_last_epoch(trainer: pl.Trainer) -> bool:
    """Whether the present epoch is the last one."""
    if trainer.should_stop:
        return True
    if trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs:
        return True
    return trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps
