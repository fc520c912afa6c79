"""The released labels of a run, for readers."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

from pl_privknn.callbacks.label_store import LabelStore, LabelStoreError


@dataclasses.dataclass(frozen=True)
class Query:
    """One query of a run.

    Attributes:
        round: the round, from 0.
        example: the public example.
        state: ``"answered"``, ``"refused"``, ``"lost"`` to a crash, or ``"not asked"``.
    """

    round: int
    example: int
    state: str


class StoredLabels(LabelStore):
    """A :class:`~pl_privknn.callbacks.label_store.LabelStore` that is open for reading alone.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is none.
        LabelStoreError: if it is no label store.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        self.path = path
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            self.get_meta("run_id")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise LabelStoreError(f"{path} is not a label store ({error}); give another file") from error

    def queries(self) -> list[Query]:
        """All queries in the order in which they were, or would have been, asked."""
        rows = self._db.execute(
            "SELECT round, example, asked_at IS NOT NULL, released, label >= 0 FROM queries ORDER BY round, position"
        )
        return [
            Query(place, example, _state(bool(asked), bool(released), bool(answered)))
            for place, example, asked, released, answered in rows
        ]


def _state(asked: bool, released: bool, answered: bool) -> str:
    if released:
        return "answered" if answered else "refused"
    return "lost" if asked else "not asked"
