"""Extras for TensorBoard and Weights & Biases: settings, accuracy by ε, pictured queries."""

from __future__ import annotations

import dataclasses
import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn.callbacks.label_run import stored_answers
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.mechanisms.base import Charge

#: The file in a run's folder.
PICTURES = "pictures.npz"
#: Pictures of public and of test examples that are kept at most, and the length of their longer side.
MOST_PICTURES, MOST_TESTED, LONGEST_SIDE = 240, 24, 96
# An untrusted file states its own unpacked size; in files of this package the truth of public examples is largest.
_MOST_PICTURE_BYTES = 1 << 27
_WORDS = {"texts": "U", "class_names": "U", "tested_texts": "U240"}


@dataclasses.dataclass(frozen=True)
class PublicPictures:
    """Pictures of public and test examples with released facts.

    Attributes:
        public: number of public examples; 0 of a run without a public part.
        examples: int64 ``(n,)``, the public examples that are pictured, in the order in which they were asked; none
            of vectors and tables.
        images: uint8 ``(n, height, width, channels)``; none of texts.
        texts: their beginnings, one each, where the public examples are texts.
        truth: int64 ``(public,)``, or ``(public, attributes)``; -1 where it isn't known, empty where none is.
        class_names: names of the classes or attributes.
        confusion: int64 ``(classes, classes)``, the student's test images by truth (rows) and prediction; empty where
            it was not tested, or judges attributes.
        tested: int64 ``(m, 3)``, position, truth and prediction of the test examples to whose class the model gives
            the lowest probabilities.
        tested_images: of these, as ``images``.
        tested_texts: of these, as ``texts``.
    """

    public: int
    examples: NDArray[np.int64]
    images: NDArray[np.uint8]
    texts: tuple[str, ...]
    truth: NDArray[np.int64]
    class_names: tuple[str, ...]
    confusion: NDArray[np.int64]
    tested: NDArray[np.int64]
    tested_images: NDArray[np.uint8]
    tested_texts: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> PublicPictures | None:
        """Read the pictures of a run's folder; None where there are none.

        Raises:
            ValueError: if the file can't be read as such.
        """
        path = folder / PICTURES
        if not path.is_file():
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > _MOST_PICTURE_BYTES:
                raise ValueError(f"{size >> 20} MiB unpacked, of {_MOST_PICTURE_BYTES >> 20} at most")
            with np.load(path, allow_pickle=False) as stored:
                parts = {name: stored[name] for name in stored.files}
            words = {name: tuple(map(str, parts[name])) for name in _WORDS}
            return cls(**{**parts, **words, "public": int(parts["public"])})
        except (ValueError, TypeError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} can't be read as a run's pictures ({error}); remove it") from error

    def write(self, folder: Path) -> None:
        """Write the pictures to a run's folder."""
        buffer = io.BytesIO()
        # Uncompressed, with texts of equal length, so that the file's size does not depend on predictions.
        words = {name: np.array(getattr(self, name), dtype=kind) for name, kind in _WORDS.items()}
        np.savez(buffer, **{**vars(self), **words})
        write_durably(folder / PICTURES, buffer.getvalue())


def pictures_of(
    data: PrivatePublicDataModule,
    asked: list[int],
    confusion: Tensor | None = None,
    tested: Tensor | None = None,
) -> PublicPictures:
    """Collect the public pictures of a run.

    Args:
        data: the run's data; only its public and test parts are read.
        asked: public examples in the order in which they were asked.
        confusion: see :class:`PublicPictures`.
        tested: likewise.
    """
    none = torch.empty(0, 3, dtype=torch.int64)
    asked = list(dict.fromkeys(asked))[:MOST_PICTURES] if data.has_public else []
    examples, tested = torch.tensor(asked, dtype=torch.int64), none if tested is None else tested
    truth = data.public.truth if data.has_public else None
    images, texts = _shown(data, "public", examples)
    tested_images, tested_texts = _shown(data, "test", tested[:, 0])
    return PublicPictures(
        public=len(data.public) if data.has_public else 0,
        examples=examples[: len(images) or len(texts)].numpy(),
        images=images,
        texts=texts,
        truth=(none.flatten() if truth is None else truth).cpu().numpy(),
        class_names=data.class_names,
        confusion=(none[:, :0] if confusion is None else confusion).cpu().numpy(),
        tested=tested[: len(tested_images) or len(tested_texts)].numpy(),
        tested_images=tested_images,
        tested_texts=tested_texts,
    )


def _shown(
    data: PrivatePublicDataModule, part: str, examples: Tensor
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Small pictures, or beginnings of texts, of public or test examples; both empty for vectors."""
    texts = data.shown_texts(part, examples)
    if texts is None and len(examples) and len(data.image_shape) == 3:
        return _small(getattr(data, part).images(examples)), ()
    return np.zeros((0, 1, 1, 1), np.uint8), tuple(texts or ())


def _small(images: Tensor) -> NDArray[np.uint8]:
    """float32 ``(n, c, h, w)`` in [0, 1] as uint8 ``(n, h, w, 1 or 3)``, no side longer than the limit."""
    if images.shape[1] not in (1, 3):
        images = images.mean(dim=1, keepdim=True)
    if (longest := max(images.shape[2:])) > LONGEST_SIDE:
        size = [max(1, side * LONGEST_SIDE // longest) for side in images.shape[2:]]
        images = torch.nn.functional.interpolate(images, size=size, mode="area")
    small: NDArray[np.uint8] = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return small


Pictured = tuple[dict[str, Any], NDArray[np.uint8] | None]


def pictured_queries(folder: Path) -> list[Pictured]:
    """Queries in a run's folder that have a picture, in the order in which they were asked.

    Returns:
        Of each query a dictionary and a picture, uint8 ``(height, width)`` or ``(height, width, 3)``, which is None
        for a text. The dictionary has the public ``example``, the ``round`` from 1, the ``state`` (``"answered"``,
        ``"refused"`` or ``"lost"``), the released ``label`` and the public ``truth`` for people, ``right``, whether
        both agree (each of these three None where it isn't known), the ``margin`` of
        :class:`~pl_privknn.callbacks.label_run.Query`, and the ``text``, empty for a picture.

    Raises:
        ValueError: if a file can't be read as what it is.
    """
    pictures = PublicPictures.read(folder)
    answers = None if pictures is None else stored_answers(folder)
    if pictures is None or answers is None or not (pictures.texts or len(pictures.images)):
        return []
    label_of = dict(zip(answers.examples.tolist(), answers.labels.tolist(), strict=True))
    places = {example: place for place, example in enumerate(pictures.examples.tolist())}
    found: list[Pictured] = []
    for query in answers.queries:
        place = places.get(query.example)
        if place is None or query.state == "not asked":
            continue
        label = label_of.get(query.example) if query.state == "answered" else None
        known = len(pictures.truth) > 0 and bool((pictures.truth[query.example] >= 0).all())
        truth = pictures.truth[query.example].tolist() if known else None
        plain = {
            "example": query.example,
            "round": query.round + 1,
            "state": query.state,
            "label": name_of(label, pictures.class_names),
            "truth": name_of(truth, pictures.class_names),
            "right": None if label is None or truth is None else label == truth,
            "margin": query.margin,
            "text": pictures.texts[place] if pictures.texts else "",
        }
        found.append((plain, picture_of(pictures.images, place)))
    return found


def picture_of(images: NDArray[np.uint8], place: int) -> NDArray[np.uint8] | None:
    """A picture, grey ones without an axis of channels; None where there are none."""
    if not len(images):
        return None
    return images[place, ..., 0] if images.shape[-1] == 1 else images[place]


def name_of(label: int | list[int] | None, names: tuple[str, ...]) -> str | None:
    """Readable name of a class, or of the attributes that are present."""
    if isinstance(label, list):
        return ", ".join(name for name, on in zip(names, label, strict=True) if on == 1) or "none"
    return None if label is None else names[label]


_OF_LABELING = ("rounds", "epochs_per_round", "queries_per_round", "max_answers")
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
        found["budget"] = dataclasses.asdict(labeling.budget)
        found["retrain"] = labeling.options.retrain
    if (spender := spender_of(trainer, module)) is not None:
        report = spender.ledger.report()
        found |= {"noise": _noise(report.guaranteed), "epsilon": report.epsilon}
    return found


def log_settings(trainer: pl.Trainer, settings: dict[str, Any]) -> None:
    """Write settings to the config of W&B runs, and define the chart of accuracy against ε."""
    for logger in active_loggers(trainer):
        if _is(logger, "WandbLogger"):
            logger.log_hyperparams(settings)
            for name in ("val", "test"):
                logger.experiment.define_metric(f"tradeoff/{name}_accuracy", step_metric="tradeoff/epsilon")


def log_results(trainer: pl.Trainer, settings: dict[str, Any], part: str, results: dict[str, float]) -> None:
    """Write settings and results to TensorBoard's table of hyper-parameters.

    The row of the run itself is Lightning's, which knows the student alone, so these are further rows.
    """
    for logger in active_loggers(trainer):
        if _is(logger, "TensorBoardLogger"):
            logger.experiment.add_hparams(_flat(settings), results, run_name=f"result_{part}")


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as a flat dictionary of values that TensorBoard accepts."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def log_trade_off(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Log ε and accuracy in one row, so that one can be drawn against the other."""
    row = {f"tradeoff/{name}": value for name, value in values.items()}
    for logger in active_loggers(trainer):
        logger.log_metrics(row, step=trainer.global_step)


def log_queries(trainer: pl.Trainer, folder: Path) -> None:
    """Log the queries with their public pictures and answers; no text is logged."""
    wanted = active_loggers(trainer)
    rows = (
        [(plain, image) for plain, image in pictured_queries(folder) if image is not None] if wanted else []
    )
    for logger in wanted if rows else []:
        if _is(logger, "WandbLogger"):
            _wandb_table(logger.experiment, rows)
        else:
            _tensorboard_table(logger.experiment, rows, trainer.global_step)


def labeling_of(trainer: pl.Trainer) -> Any:
    """The trainer's ``PrivateLabeler``; None where there is none."""
    parts = trainer.callbacks  # type: ignore[attr-defined]
    return next((part for part in parts if hasattr(part, "asked_examples")), None)


def spender_of(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """Callback or module of this run that has a ledger; None where there is none."""
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


def _wandb_table(run: Any, rows: list[tuple[dict[str, Any], NDArray[np.uint8]]]) -> None:
    import wandb

    table = wandb.Table(columns=["picture", *_COLUMNS])
    for plain, image in rows:
        table.add_data(wandb.Image(image), *(plain[name] for name in _COLUMNS))
    run.log({"queries": table})


def _tensorboard_table(writer: Any, rows: list[tuple[dict[str, Any], NDArray[np.uint8]]], step: int) -> None:
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *([plain[name] for name in _COLUMNS] for plain, _ in rows)]
    writer.add_text("queries", "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines), step)
    images = np.stack([np.atleast_3d(image) for _, image in rows])
    writer.add_images("queries", images, step, dataformats="NHWC")


def finish_wandb(trainer: pl.Trainer, summary: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Write figures to the summary of W&B runs and finish the runs, so that their files are complete.

    Args:
        trainer: whose runs are closed.
        summary: of the run.
        files: what is attached, by the name that it gets: released things alone, such as the ledger, with which a
            reader of the run can audit its ε.
    """
    figures = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
    for run in [logger.experiment for logger in active_loggers(trainer) if _is(logger, "WandbLogger")]:
        run.summary.update(figures)
        for name, file in files.items():
            import wandb

            kind = name.split(".")[0]
            artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
            artifact.add_file(str(file), name=name)
            run.log_artifact(artifact)
        run.finish()


def active_loggers(trainer: pl.Trainer) -> list[Any]:
    """Loggers of a trainer that get the extras: Weights & Biases and TensorBoard."""
    return [one for one in trainer.loggers if _is(one, "WandbLogger") or _is(one, "TensorBoardLogger")]


def _is(logger: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(logger).__mro__)
