"""A place for trained teachers that the user has named as private."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn._files import replaced_durably


class PrivateCache:
    """Keeps trained teachers between processes, in a folder that only its owner can read.

    Teachers remember their records: this folder is as sensitive as the private data, and so are its file
    names (hashes of the data). Nothing is written anywhere else. Files are written whole or not at all.

    Args:
        folder: made with access for the owner alone, if it is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def key(self, settings: str, *tables: Tensor | None) -> str:
        """SHA-256 of the settings and of every bit of the private tables."""
        digest = hashlib.sha256(settings.encode())
        for table in tables:
            if table is None:
                digest.update(b"|none")
                continue
            digest.update(f"|{tuple(table.shape)}{table.dtype}".encode())
            digest.update(table.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def load(self, key: str) -> dict[str, Tensor] | None:
        """What was saved under ``key``, or None.

        Raises:
            RuntimeError: if the file can't be read; it names the file and the remedy.
        """
        path = self.folder / f"{key}.pt"
        if not path.exists():
            return None
        try:
            state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise RuntimeError(
                f"{path} can't be read ({type(error).__name__}); delete it to train anew"
            ) from None
        return state

    def save(self, key: str, state: dict[str, Tensor]) -> None:
        """Keep ``state`` under ``key``."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = self.folder / f"{key}.{os.getpid()}.part"  # runs of other processes may keep the same teachers
        with replaced_durably(self.folder / f"{key}.pt", mode=0o600, fresh=own) as file:
            torch.save(state, file)
