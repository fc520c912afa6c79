"""Files of a run's folder: configuration and checkpoints."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from pl_privknn import _lightning as pl
from pl_privknn._lightning import rank_zero_warn
from pl_privknn.callbacks.loggers import labeling_of
from pl_privknn.config import HasInitArguments, as_section, write_yaml
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.verify import CONFIG

_ORIGIN = "# Written by a run that Python started."
_LEFT_OUT = "# Only Python knows these: "


def write_config(folder: Path, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Write the configuration of a run that Python started, unless the folder has that of a command.

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
    """Parts that a written configuration leaves out, as its comment names them; None where it is whole."""
    lines = [line for line in text.splitlines()[:2] if line.startswith(_LEFT_OUT)]
    return lines[0].removeprefix(_LEFT_OUT) if lines else None


def previous(checkpoint: Path) -> Path:
    """Path of the checkpoint before the last one."""
    return checkpoint.with_name(f"{checkpoint.stem}.previous{checkpoint.suffix}")


def usable_checkpoint(checkpoint: Path) -> Path | None:
    """The checkpoint to resume from: the last one, the one before where that is damaged, or None.

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
