"""The files of an Ind-KNN predictor, and the order in which they are written."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._files import sync_folder
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, PublicDensity
from pl_privknn.labelers.ind_knn.prediction import IndKNNEngine, IndKNNSwitches
from pl_privknn.labelers.ind_knn.record_store import RecordStore
from pl_privknn.labelers.ind_knn.stream import StreamState, write_private
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.per_record.filter import IndividualFilter
from pl_privknn.privacy.per_record.journal import Journal, JournalError

_ANSWERS = 0
_STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class PredictorSettings:
    """The public constants of a predictor, as its folder keeps them.

    Attributes:
        parameters: of the stream.
        switches: what is added to Algorithm 3.
        num_classes: number of classes.
        dimension: of the features.
    """

    parameters: IndKNNParameters
    switches: IndKNNSwitches
    num_classes: int
    dimension: int


class PredictorFolder:
    """An open folder. **Private**, except for ``settings.json``, ``answers`` and ``public.npy``.

    * ``budgets``: the filter's file; the lock of the folder; it alone says which records are present.
    * ``state.json``: see :class:`~pl_privknn.labelers.ind_knn.stream.StreamState`.
    * ``records/``: their features and labels. Written before the filter admits them, wiped after it has let
      them go, so that a crash leaves no record that counts and isn't there, and those that are there and don't
      count are wiped at the next opening.
    * ``answers``: earlier queries and answers, with prediction reuse. Written after the budgets that they
      cost.
    * ``public.npy``: public examples for thresholds from public density.

    Args:
        path: the folder.
        budget: B of every record.

    Attributes:
        state: the stream's state; its ``openings`` is how often the folder has been opened, this time included.

    Raises:
        JournalError: if the folder is damaged, incomplete or a second copy, or in use by another object or process.
    """

    def __init__(self, path: Path, budget: float) -> None:
        self.path = path
        self._answers: Journal | None = None
        budgets = IndividualFilter(budget, path / "budgets")
        try:
            self.records = RecordStore(path / "records")
            earlier = path / "openings"  # all that the state was, in an earlier version
            if earlier.exists() and not (path / _STATE).exists():
                write_private(path / _STATE, json.dumps({"openings": int(earlier.read_text())}).encode())
            self.state = StreamState(budgets, path / _STATE)
            earlier.unlink(missing_ok=True)
        except BaseException:
            budgets.close()
            raise

    @classmethod
    def create(
        cls, path: Path, engine: IndKNNEngine, removed: NDArray[np.int64], runs: dict[str, int]
    ) -> None:
        """Write all of an engine that lives in memory into a new folder, spent budgets included.

        Args:
            path: the folder to make.
            engine: it is left as it was.
            removed: numbers of records that were removed; what they spent must not be forgotten either.
            runs: those that have paid for the stream, as in :class:`~pl_privknn.labelers.ind_knn.stream.StreamState`.
        """
        path.mkdir(mode=0o700, parents=True)
        settings = {
            "format": 1,
            "parameters": dataclasses.asdict(engine.parameters),
            "switches": dataclasses.asdict(engine.switches),
            "num_classes": engine.num_classes,
            "dimension": engine.table.dimension,
        }
        write_private(path / "settings.json", json.dumps(settings, indent=1).encode())
        if len(engine.reference):
            _save_array(path / "public.npy", engine.reference)
        parameters, old, table = engine.parameters, engine.budgets, engine.table
        old.add(removed)  # a removed record shows nothing of what it has left
        ids = np.concatenate([table.ids, removed])
        left = parameters.quanta(old.remaining(ids))
        old.remove(removed)
        spent = (parameters.quanta(np.array(old.budget)) - left) * parameters.quantum
        with IndividualFilter(old.budget, path / "budgets") as budgets:
            state = StreamState(budgets, path / _STATE, openings=-1, runs=runs)
            budgets.add(ids)
            budgets.charge(ids, spent)
            budgets.remove(removed)
            state.close()
        store = RecordStore(path / "records")
        if len(table):
            store.add(table.ids, table.labels, table.vectors.numpy())
        if engine.switches.reuse:
            earlier = _pack(engine.answered.vectors, engine.answered.labels)
            Journal(path / "answers", (_ANSWERS, earlier)).close()
        sync_folder(path)

    @classmethod
    def read_settings(cls, path: Path) -> PredictorSettings:
        """The public constants in a folder.

        Raises:
            FileNotFoundError: if the folder holds no predictor, or its budgets are missing.
        """
        if not (path / "settings.json").exists() or not (path / "budgets").exists():
            raise FileNotFoundError(f"folder={str(path)!r} holds no predictor, or not all of it")
        stored = json.loads((path / "settings.json").read_text())
        switches = stored["switches"]
        density, hashing = switches.pop("density"), switches.pop("hashing")
        return PredictorSettings(
            IndKNNParameters(**stored["parameters"]),
            IndKNNSwitches(
                density=None if density is None else PublicDensity(**density),
                hashing=None if hashing is None else SignProjections(**hashing),
                **switches,
            ),
            stored["num_classes"],
            stored["dimension"],
        )

    def load_into(self, engine: IndKNNEngine) -> None:
        """Fill an engine that uses this folder's budgets; clears up what a crash left undone.

        Raises:
            JournalError: if records are missing.
        """
        present = self.state.budgets.active(0.0)
        for segment in self.records.load(present):
            engine.add(segment["ids"], torch.from_numpy(segment["features"]), segment["labels"])
        if len(engine.table) != len(present):
            raise JournalError(f"{self.path}: some records are missing; put back an undamaged folder")
        if (self.path / "public.npy").exists():
            engine.reference = torch.from_numpy(np.load(self.path / "public.npy"))
        if engine.switches.reuse:
            dimension = engine.table.dimension
            self._answers = Journal(self.path / "answers", (_ANSWERS, _pack(torch.empty(0, dimension), [])))
            for _, body in self._answers.entries:
                vectors, labels = _unpack(body, dimension)
                kept = labels >= 0
                engine.answered.append(vectors[torch.from_numpy(kept)], labels[kept])
            self._answers.entries.clear()

    def append_answers(self, vectors: Tensor, labels: NDArray[np.int64]) -> None:
        """Note released answers; they are on disk when this returns."""
        if self._answers is None:
            raise JournalError(f"{self.path}: the answers are not open; open the folder again")
        self._answers.append(_ANSWERS, _pack(vectors, labels))

    def save_reference(self, vectors: Tensor) -> None:
        """Replace the public examples."""
        _save_array(self.path / "public.npy", vectors)

    def close(self) -> None:
        """Give the folder back."""
        if self._answers is not None:
            self._answers.close()
        self.state.close()


def _pack(vectors: Tensor, labels: Any) -> bytes:
    numbers = np.asarray(labels, np.int64)
    return len(numbers).to_bytes(8, "little") + numbers.tobytes() + vectors.numpy().tobytes()


def _unpack(body: bytes, dimension: int) -> tuple[Tensor, NDArray[np.int64]]:
    count = int.from_bytes(body[:8], "little")
    labels = np.frombuffer(body, np.int64, count, 8).copy()
    vectors = np.frombuffer(body, np.float32, count * dimension, 8 + 8 * count)
    return torch.from_numpy(vectors.reshape(count, dimension).copy()), labels


def _save_array(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    np.save(buffer, values.numpy())
    write_private(path, buffer.getvalue())
