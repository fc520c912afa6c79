"""Releases in a run's private folder, from where they answer every later query."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn._files import write_durably
from pl_privknn.labelers.statistics.audited import Taken

_FILE = "releases.pt"


def write_releases(folder: Path, releases: Mapping[int, Taken], sketch: Tensor | None) -> None:
    """Write releases by their number, and what tells the public examples that they are about from others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(
        {"releases": {number: tuple(taken) for number, taken in releases.items()}, "public": sketch}, buffer
    )
    write_durably(folder / _FILE, buffer.getvalue(), 0o600)


def read_releases(folder: Path) -> tuple[dict[int, Taken], Tensor | None]:
    """What :func:`write_releases` wrote; nothing where there is no file."""
    if not (folder / _FILE).exists():
        return {}, None
    kept = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
    return {number: Taken(*pair) for number, pair in kept["releases"].items()}, kept["public"]
