"""Checkpoints that are whole, or that a resume can do without."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from pl_privknn._lightning import TorchCheckpointIO, rank_zero_warn
from pl_privknn.privacy.files import replaced_durably

#: Where a run's last checkpoint lies in its folder.
CHECKPOINT = Path("checkpoints") / "last.ckpt"


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, syncs it, and moves it there within one file system.

    Lightning writes to the system's folder for temporary files; a move from there to another file system is a copy,
    which a kill leaves half done. The checkpoint before the last one is kept as ``NAME.previous.ckpt``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save, so that ``path`` holds the old or the new checkpoint whenever a crash comes."""
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced_durably(place) as file:
            torch.save(checkpoint, file)
            if place.exists():
                kept = previous(place)
                kept.unlink(missing_ok=True)
                os.link(place, kept)


def previous(checkpoint: Path) -> Path:
    """Where the checkpoint before the last one is kept."""
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
            f"{checkpoint} is damaged and there is none before it: training starts again, on the labels that are kept"
        )
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
