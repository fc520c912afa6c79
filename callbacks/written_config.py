"""``config.yaml`` of a run that Python started: labeler, data and student, as far as a configuration can say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import SaveConfigCallback

from pl_privknn._files import write_durably
from pl_privknn.callbacks.reports_run import ReportsRun
from pl_privknn.documents import write_yaml
from pl_privknn.init_arguments import HasInitArguments, as_section
from pl_privknn.training.reporting import ReportsTraining

#: The file in a run's folder.
CONFIG = "config.yaml"
_ORIGIN = "# Written by a run that Python started."
_LEFT_OUT = "# Only Python knows these: "


def write_config(folder: Path, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Write what a run is made of, unless its folder has the configuration of a command.

    What the shell reads as it stands is complete; else a comment names what it leaves out.
    """
    path = folder / CONFIG
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, SaveConfigCallback) for callback in callbacks):
        return
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(_ORIGIN):
        return
    sections: dict[str, Any] = {"trainer": {"max_epochs": trainer.max_epochs}}
    left_out: list[str] = []
    parts: list[tuple[str, Any]] = [("model", module), ("data", trainer.datamodule)]  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ReportsRun):
            parts.append(("labeling", callback))
        elif isinstance(callback, ReportsTraining):
            parts.append(("trainer.callbacks", callback))
    for name, part in parts:
        if not isinstance(part, HasInitArguments):
            left_out.append(name)
            continue
        section, missing = as_section(part)
        left_out += [f"{name}.{argument}" for argument in missing]
        if name == "labeling":
            sections[name] = section.get("init_args", {})
        elif name == "trainer.callbacks":
            sections["trainer"]["callbacks"] = [section]
        else:
            sections[name] = section
    lines = [_ORIGIN, *([_LEFT_OUT + ", ".join(left_out)] if left_out else []), write_yaml(sections)]
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(path, "\n".join(lines).encode())


def left_out_of(text: str) -> str | None:
    """What a written configuration leaves out, as its comment names it; None where it is whole."""
    lines = [line for line in text.splitlines()[:2] if line.startswith(_LEFT_OUT)]
    return lines[0].removeprefix(_LEFT_OUT) if lines else None
