"""The folder of a run from the shell: its name, and the place of checkpoints and loggers in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from pl_privknn import _lightning as pl

#: Where a run's last checkpoint lies in its folder.
CHECKPOINT = Path("checkpoints") / "last.ckpt"


def _name_of(config: Namespace) -> str:
    """The stem of the first config file, or the student's name where there is none."""
    files = [str(path) for path in (config.get("config") or [])]
    if files:
        return Path(files[0]).stem
    return str(config.model.class_path).rsplit(".", 1)[-1]


def new_folder(config: Namespace) -> Path:
    """``runs/NAME/NUMBER`` with the first number that is free; in the trainer's root, where one was given."""
    return new_number(Path(config.trainer.default_root_dir or "runs") / _name_of(config))


def new_number(folder: Path) -> Path:
    """A new folder in this one: the first number that is free."""
    number = 0
    while True:
        new = folder / str(number)
        try:
            new.mkdir(parents=True)
            return new
        except FileExistsError:
            number += 1


def run_loggers(chosen: Any, folder: Path) -> list[Namespace]:
    """The CSV logger, whose file every run leaves, and those that the user chose, all in the run's folder."""
    csv = Namespace(
        class_path="pytorch_lightning.loggers.CSVLogger",
        init_args=Namespace(
            save_dir=str(folder), name="", version="", prefix="", flush_logs_every_n_steps=100
        ),
    )
    others = [] if chosen in (None, True) else chosen if isinstance(chosen, list) else [chosen]
    for logger in others:
        arguments = logger.get("init_args")
        if arguments is not None and str(arguments.get("save_dir")) in (".", "None"):
            arguments.save_dir = str(folder)
    return [csv, *[logger for logger in others if "CSVLogger" not in logger.class_path]]


def keep_last_checkpoint(trainer: pl.Trainer, folder: Path) -> None:
    """Make the trainer's own default checkpoint one that a resume can rely on; a user's stays as it is."""
    kind = pl.package_of(trainer).callbacks.ModelCheckpoint
    for place, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        if type(callback) is kind and callback.dirpath is None and callback.monitor is None:
            trainer.callbacks[place] = kind(  # type: ignore[attr-defined]
                dirpath=folder / CHECKPOINT.parent,
                filename=CHECKPOINT.stem,
                enable_version_counter=False,
                save_on_train_epoch_end=True,
            )
