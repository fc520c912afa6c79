"""The folder of an Ind-KNN predictor: private records in segments whose rows can be wiped one by one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn._files import replaced_durably, sync, sync_folder
from pl_privknn.labelers.ind_knn.stream import write_private

#: More segments than this are merged into one.
_MANY_SEGMENTS = 64
_ARRAYS = ("ids", "labels", "alive", "features")

Segment = dict[str, NDArray[Any]]


class RecordStore:
    """Records on disk, added in segments, wiped in place. **Private**, as is everything in its folder.

    A segment is a folder with one ``.npy`` file for each of ``ids`` (int64), ``labels`` (int64), ``alive``
    (uint8) and ``features`` (float32). It is written under another name and renamed when all of it is on disk,
    so there are whole segments or none. Which of their records count is not decided here: the filter of the
    budgets says who is present, and :meth:`load` wipes all others, whose adding or removal a crash cut short.

    Args:
        folder: where the segments are; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._places: dict[int, tuple[str, int]] = {}
        self._next = 0

    def load(self, present: NDArray[np.int64]) -> Iterator[Segment]:
        """All records that are present, segment by segment; others are wiped. Clears up after a crash.

        Args:
            present: numbers of the records that count.
        """
        for leftover in self._folder.glob("*.partial"):
            shutil.rmtree(leftover)
        names = sorted(path.name for path in self._folder.iterdir() if path.is_dir())
        replaced = {old for name in names for old in self._replaces(name)}
        for name in replaced & set(names):
            self._delete(name)
        self._next = 1 + max((int(name) for name in names), default=-1)
        for name in [name for name in names if name not in replaced]:
            segment = {array: np.load(self._folder / name / f"{array}.npy") for array in _ARRAYS}
            counted = np.isin(segment["ids"], present)
            self._wipe(name, np.flatnonzero((segment["alive"] == 1) & ~counted))
            rows = np.flatnonzero((segment["alive"] == 1) & counted)
            self._places.update((int(segment["ids"][row]), (name, int(row))) for row in rows)
            if len(rows):
                yield {array: values[rows] for array, values in segment.items()}
            else:
                self._delete(name)

    def add(self, ids: NDArray[np.int64], labels: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """Write records; they are on disk when this returns."""
        name = self._write(ids, labels, features, replaces=[])
        self._places.update((record, (name, row)) for row, record in enumerate(ids.tolist()))
        segments = {name for name, _ in self._places.values()} if self._next % _MANY_SEGMENTS == 0 else set()
        if len(segments) > _MANY_SEGMENTS // 2:
            self._merge(sorted(segments))

    def wipe(self, ids: NDArray[np.int64]) -> None:
        """Overwrite records with zeros, on disk."""
        rows: dict[str, list[int]] = {}
        for record in ids.tolist():
            name, row = self._places.pop(record)
            rows.setdefault(name, []).append(row)
        for name, places in rows.items():
            self._wipe(name, np.array(places))

    def _wipe(self, name: str, rows: NDArray[np.intp]) -> None:
        if not len(rows):
            return
        # "alive" last: while it says 1, the next opening wipes the rest again.
        for array in ("features", "labels", "alive"):
            path = self._folder / name / f"{array}.npy"
            values = np.load(path, mmap_mode="r+")
            values[rows] = 0
            values.flush()
            descriptor = os.open(path, os.O_RDWR)
            try:
                sync(descriptor)
            finally:
                os.close(descriptor)

    def _write(
        self,
        ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        features: NDArray[np.float32],
        replaces: list[str],
    ) -> str:
        name = f"{self._next:08d}"
        self._next += 1
        partial = self._folder / f"{name}.partial"
        partial.mkdir(mode=0o700)
        alive = np.ones(len(ids), np.uint8)
        for array, values in zip(_ARRAYS, (ids, labels, alive, features), strict=True):
            with replaced_durably(partial / f"{array}.npy", mode=0o600) as file:
                np.save(file, np.ascontiguousarray(values))
        write_private(partial / "replaces.json", json.dumps(replaces).encode())
        os.replace(partial, self._folder / name)
        sync_folder(self._folder)
        return name

    def _replaces(self, name: str) -> list[str]:
        replaced: list[str] = json.loads((self._folder / name / "replaces.json").read_text())
        return replaced

    def _merge(self, names: list[str]) -> None:
        parts = []
        for name in names:
            segment = {array: np.load(self._folder / name / f"{array}.npy") for array in _ARRAYS}
            parts.append({array: values[segment["alive"] == 1] for array, values in segment.items()})
        ids, labels, _, features = (np.concatenate([part[array] for part in parts]) for array in _ARRAYS)
        name = self._write(ids, labels, features, replaces=names)
        self._places.update((record, (name, row)) for row, record in enumerate(ids.tolist()))
        for old in names:
            self._delete(old)

    def _delete(self, name: str) -> None:
        # Renamed first: a crash in between leaves no half segment under its name.
        leftover = self._folder / f"{name}.partial"
        os.replace(self._folder / name, leftover)
        shutil.rmtree(leftover)
