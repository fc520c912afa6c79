"""Ind-KNN predictor that answers users from a private table that may change, stored durably in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pl_privknn._checks import check_int, shape_text
from pl_privknn.features.base import Extractor
from pl_privknn.features.private_records import Extract, check_table, in_full_batches, kept_apart, made_up
from pl_privknn.labelers.base import ChargesLedger, PayingRun, nonnegative_shares
from pl_privknn.labelers.ind_knn.algorithm import (
    IndKNNEngine,
    IndKNNParameters,
    IndKNNSwitches,
    PublicDensity,
    check_queries,
    unit_rows,
)
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.mechanisms.base import Unit, check_unit
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.private_state import FILE_NAME, PrivateStore, PrivateStoreError
from pl_privknn.privacy.record_budgets import (
    BudgetTable,
    Conversion,
    Ids,
    epsilon_of_budget,
    read_ids,
)
from pl_privknn.privacy.records import check_owners

#: The records that are in the table, earlier queries whose answers take part in later ones, and public examples for
#: thresholds by density.
_SCHEMA = "".join(
    f"CREATE TABLE {name} (number INTEGER PRIMARY KEY, owner INTEGER, label INTEGER, vector BLOB NOT NULL);"
    for name in ("records", "answers", "reference")
)


@dataclasses.dataclass(frozen=True)
class NoisyPredictions:
    """Differentially private answers.

    Attributes:
        labels: int64, shape ``(m,)``; -1 where the answer was held back as unsure (``abstain``).
        probabilities: float32, shape ``(m, c)``; the non-negative part of the noisy votes, normalised.
        counts: float64, shape ``(m,)``; noisy numbers of neighbours. Where one is at the floor, the answer may
            be nothing but noise.
    """

    labels: Tensor
    probabilities: Tensor
    counts: Tensor


class IndKNNPredictor(contextlib.AbstractContextManager["IndKNNPredictor"]):
    """Answers users' queries from private records that may come and go (Ind-KNN, Algorithm 3).

    Every record has the same budget, from which it pays for each answer that it has part in; the stream of all
    answers together is √(2B)-Gaussian DP, however many there are and however they are chosen. Adding and removing
    records takes effect at once and trains nothing. A record that comes back comes back with what it had left.

    A new predictor lives in memory, and a crash forgets what was spent, which suits trials. :meth:`save` puts
    it into a folder, and from then on every change is on disk before its method returns; :meth:`open`
    continues it, after a crash at any point. The budgets are written before an answer is returned: budget can
    be wasted, never forgotten. One object at a time has the folder. The folder is **private**: keep it where
    the records may be kept, and don't copy it to answer from both copies, for each would spend the same
    budget: a copy is refused as long as the original is in its place. An older copy that is put back is found out
    where the predictor has a ledger, in which it notes how far it has come before each answer. A removed record's
    features and label are overwritten, in memory and on disk; its number and what it spent stay.

    Methods may be called from several threads and take turns.

    Args:
        parameters: public constants, for instance
            ``IndKNNParameters.for_budget(Budget(1.0), threshold=0.6, noise=Gaussian(0.4), num_queries=2000)``.
        num_classes: number of classes.
        dimension: of the features.
        switches: prediction reuse, hashing, thresholds from public density, held-back answers.
        extractor: turns images into features, where images are given instead of features.
        ledger: charged once, at the first query, with the whole stream; a saved predictor's state is noted there.
        noise_source: where protective randomness comes from; the operating system's generator by default.
        unit: ``"person"`` gives persons one budget for all of their records, see :meth:`add`, and is what
            neighbouring tables differ in.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> from pl_privknn.labelers import IndKNNPredictor
        >>> from pl_privknn.labelers.ind_knn import IndKNNParameters
        >>> from pl_privknn.privacy import Budget, Gaussian
        >>> parameters = IndKNNParameters.for_budget(Budget(1.0), threshold=0.6, noise=Gaussian(0.4))
        >>> round(IndKNNPredictor(parameters, num_classes=10, dimension=128).epsilon(delta=1e-5), 3)
        1.0
    """

    def __init__(
        self,
        parameters: IndKNNParameters,
        num_classes: int,
        dimension: int,
        switches: IndKNNSwitches | None = None,
        extractor: Extractor | None = None,
        ledger: ChargesLedger | None = None,
        noise_source: NoiseSource | None = None,
        unit: Unit = "record",
    ) -> None:
        self.parameters, self.unit = parameters, check_unit(unit)
        self.num_classes = check_int("num_classes", num_classes, minimum=2)
        self.dimension = check_int("dimension", dimension)
        self.switches = switches if switches is not None else IndKNNSwitches()
        self.extractor = extractor
        #: What the separation of images' features rests on, in words; empty unless the extractor can't be traced.
        self.conditions: tuple[str, ...] = ()
        self._extract: dict[tuple[int, ...], Extract] = {}
        self.noise_source = noise_source if noise_source is not None else default_noise()
        self._ledger, self._turn = ledger, threading.RLock()
        self._engine = self._opened(None)

    # ------------------------------------------------------------------ what users get

    def epsilon(self, delta: float, conversion: Conversion = "gdp") -> float:
        """ε of all past and future answers; a public number."""
        return epsilon_of_budget(self.parameters.rho, delta, conversion)

    def predict(self, x: Tensor) -> NoisyPredictions:
        """Answer queries one after another; their cost is on disk before this returns.

        Args:
            x: images, float32 ``(m, channels, height, width)``, or features, float ``(m, dimension)``.

        Raises:
            RuntimeError: where thresholds come from public density and :meth:`use_public` was never called.
            ValueError: for queries of another shape, or not finite, or noise from a source of another kind than that
                of earlier answers.
            PrivateStoreError: if the budgets could not be written, or are not the latest; nothing is returned.
        """
        queries = self._features(x)
        with self._turn:
            engine = self._ready(queries)
            known = len(engine.answered[1])
            run = PayingRun(self._ledger, self.noise_source, ("add_remove",), self.unit)
            answers = engine.answer(queries, run)
            vectors, said = engine.answered
            self._keep("answers", vectors[known:], said[known:])
        labels, counts = torch.from_numpy(answers.labels), torch.from_numpy(answers.counts)
        return NoisyPredictions(labels, nonnegative_shares(torch.from_numpy(answers.noisy)).float(), counts)

    # ------------------------------------------------------------------ for the owner of the data

    def add(self, ids: ArrayLike, x: Tensor, y: Tensor, persons: ArrayLike | None = None) -> None:
        """Add records, from the next query on.

        Args:
            ids: the owner's lasting whole numbers, shape ``(n,)``. A record must always come under the same number,
                for a second number would give it a second budget.
            x: images or features, as in :meth:`predict`.
            y: int64 labels, shape ``(n,)``.
            persons: the owner's lasting whole number of each record's person, shape ``(n,)``, where persons are the
                unit of privacy.

        Raises:
            ValueError: for shapes and values that don't fit, or numbers that are in the table already.
            PrivateStoreError: if they could not be written; they are not admitted then.
        """
        features = self._features(x, private=True)
        check_table(features, y, self.num_classes)
        if features.shape[1] != self.dimension:
            raise ValueError(f"x: {features.shape[1]} features; expected dimension={self.dimension}")
        numbers = read_ids(np.atleast_1d(np.asarray(ids)), len(y))
        if (persons is None) != (self.unit == "record"):
            raise ValueError(
                f"persons: expected the person of each record where the unit is one; it is {self.unit!r}"
            )
        owners = numbers if persons is None else check_owners(torch.as_tensor(persons), len(y)).numpy()
        with self._turn:
            engine = self._engine
            if np.isin(numbers, engine.ids).any():
                raise ValueError("ids: some are in the table already; remove them first")
            vectors, labels = unit_rows(features), y.numpy()
            with engine.budgets.writing():
                engine.budgets.admit(np.unique(owners))
                self._keep("records", vectors, labels, numbers, owners)
            engine.add(numbers, vectors, labels, owners)

    def remove(self, ids: ArrayLike) -> None:
        """Remove and overwrite records, from the next query on.

        Raises:
            ValueError: if some are not in the table.
            PrivateStoreError: if it could not be written; they stay then.
        """
        given = np.atleast_1d(np.asarray(ids))
        numbers = read_ids(given, len(given))
        with self._turn:
            engine = self._engine
            if not np.isin(numbers, engine.ids).all():
                raise ValueError("ids: some are not in the table; leave them out")
            with engine.budgets.writing() as db:
                db.executemany("DELETE FROM records WHERE number = ?", zip(numbers.tolist()))
            engine.remove(numbers)

    def remaining(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of the records in the table, and the remaining budget of each, or of its person. **Private**."""
        with self._turn:
            order = np.argsort(self._engine.ids)
            return self._engine.ids[order], self._engine.remaining()[order]

    def use_public(self, x: Tensor) -> None:
        """Give the public examples from whose density thresholds are taken; replaces earlier ones.

        Args:
            x: images or features, as in :meth:`predict`; of public examples only.
        """
        features = self._features(x)
        check_queries(features, self.dimension)
        with self._turn:
            self._engine.reference = unit_rows(features)
            with self._engine.budgets.writing() as db:
                db.execute("DELETE FROM reference")
                self._keep("reference", self._engine.reference)

    # ------------------------------------------------------------------ the file

    def save(self, folder: str | Path) -> None:
        """Save the predictor in a new folder, which it uses from then on.

        There is no second copy: a predictor that has a folder is always saved; to move it, close it and move that.

        Raises:
            FileExistsError: if the folder exists.
            ValueError: if the predictor has another folder.
        """
        target = Path(folder).resolve() / FILE_NAME
        with self._turn:
            engine = self._engine
            if engine.budgets.path is not None:
                if target != engine.budgets.path:
                    raise ValueError(
                        f"folder={str(folder)!r}: this predictor is stored in {engine.budgets.path.parent}; two "
                        "copies would each spend the same budget. Close it and move the folder"
                    )
                return
            if target.exists():
                raise FileExistsError(
                    f"folder={str(folder)!r} holds a predictor; use open(folder), or choose a new one"
                )
            with engine.budgets.copied_to(target):
                pass
            self._engine = self._opened(target)
            engine.budgets.close()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        extractor: Extractor | None = None,
        noise_source: NoiseSource | None = None,
        ledger: ChargesLedger | None = None,
    ) -> IndKNNPredictor:
        """Continue the predictor in a folder.

        Args:
            folder: what :meth:`save` made.
            extractor: as in the constructor.
            noise_source: as there; of the same kind as that of earlier answers.
            ledger: notes the state, and finds out an older copy; charged, if it has not paid for the stream.

        Raises:
            FileNotFoundError: if there is none.
            PrivateStoreError: if it is damaged, an older or second copy, or in use.
        """
        path = Path(folder).resolve() / FILE_NAME
        if not path.is_file():
            raise FileNotFoundError(f"folder={str(folder)!r} holds no predictor")
        with contextlib.closing(PrivateStore(path)) as store:
            settings = store.fact("settings")
        if settings is None:
            raise PrivateStoreError(f"{path} holds no predictor; name the folder of one")
        switches = settings["switches"]
        for name, kind in (("density", PublicDensity), ("hashing", SignProjections)):
            switches[name] = None if switches[name] is None else kind(**switches[name])
        predictor = cls(
            IndKNNParameters(**settings["parameters"]),
            settings["num_classes"],
            settings["dimension"],
            IndKNNSwitches(**switches),
            extractor,
            ledger,
            noise_source,
            settings["unit"],
        )
        predictor._engine = predictor._opened(path)
        predictor._engine.budgets.check(predictor.parameters.total, ledger)
        return predictor

    def close(self) -> None:
        """Release the folder; the predictor can't be used any more."""
        with self._turn:
            self._engine.budgets.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inner work

    def _opened(self, path: Path | None) -> IndKNNEngine:
        """Content of a file; empty for None."""
        settings = {
            "parameters": dataclasses.asdict(self.parameters),
            "switches": dataclasses.asdict(self.switches),
            "num_classes": self.num_classes,
            "dimension": self.dimension,
            "unit": self.unit,
        }
        parameters = self.parameters
        budgets = BudgetTable(path, parameters.rho, parameters.quantum, _SCHEMA, settings=settings)
        budgets.unit = self.unit
        engine = IndKNNEngine(parameters, self.switches, self.num_classes, self.dimension, budgets)
        try:
            numbers, owners, labels, vectors = _read(budgets, "records", self.dimension)
            engine.add(numbers, vectors, labels, owners)
            _, _, said, asked = _read(budgets, "answers", self.dimension)
            engine.answered, engine.reference = (asked, said), _read(budgets, "reference", self.dimension)[3]
        except BaseException:
            budgets.close()
            raise
        return engine

    def _keep(
        self,
        name: str,
        vectors: Tensor,
        labels: Ids | None = None,
        numbers: Ids | None = None,
        owners: Ids | None = None,
    ) -> None:
        """Write rows of a table of vectors; rows without a number are appended."""
        columns = [
            itertools.repeat(None) if one is None else one.tolist() for one in (numbers, owners, labels)
        ]
        rows = (row.tobytes() for row in vectors.numpy())
        with self._engine.budgets.writing() as db:
            db.executemany(f"INSERT INTO {name} VALUES (?, ?, ?, ?)", zip(*columns, rows, strict=False))

    def _ready(self, queries: Tensor) -> IndKNNEngine:
        check_queries(queries, self.dimension)
        if self.switches.density is not None and not len(self._engine.reference):
            raise RuntimeError("density: there are no public examples yet; call use_public(features) first")
        return self._engine

    def _features(self, x: Tensor, private: bool = False) -> Tensor:
        if x.ndim != 4:
            return x
        if self.extractor is None:
            raise ValueError(
                f"x: images of shape {shape_text(x.shape)}, but there is no extractor; pass one, or give features"
            )
        shape = tuple(x.shape[1:])
        if shape not in self._extract:
            self._extract[shape], self.conditions = kept_apart(self.extractor, made_up(shape))
        extract = self._extract[shape]
        with torch.no_grad():
            return in_full_batches(extract, x) if private and not self.conditions else extract(x)


def _read(budgets: BudgetTable, name: str, dimension: int) -> tuple[Ids, Ids, Ids, Tensor]:
    """Numbers, owners, labels and vectors of a table of vectors."""
    (count,) = budgets.read(f"SELECT COUNT(*) FROM {name}").fetchone()
    columns, vectors = np.empty((3, count), np.int64), np.empty((count, dimension), np.float32)
    rows = budgets.read(
        f"SELECT number, IFNULL(owner, 0), IFNULL(label, -1), vector FROM {name} ORDER BY number"
    )
    for place, (*numbers, vector) in enumerate(rows):
        columns[:, place], vectors[place] = numbers, np.frombuffer(vector, np.float32)
    return columns[0], columns[1], columns[2], torch.from_numpy(vectors)
