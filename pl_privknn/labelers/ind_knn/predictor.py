"""Ind-KNN for answering users: a private table that changes, in a folder that survives a crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pl_privknn._checks import check_int, shape_text
from pl_privknn._files import sync_folder
from pl_privknn.features.base import Extractor
from pl_privknn.labelers.base import ChargesLedger, check_table
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters
from pl_privknn.labelers.ind_knn.identities import read_ids
from pl_privknn.labelers.ind_knn.prediction import (
    IndKNNEngine,
    IndKNNSwitches,
    Predictions,
    check_queries,
    probabilities,
)
from pl_privknn.labelers.ind_knn.predictor_files import PredictorFolder
from pl_privknn.labelers.ind_knn.private_table import unit_rows
from pl_privknn.labelers.ind_knn.stream import StreamState
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.per_record.budgets import Conversion, epsilon_of_budget
from pl_privknn.privacy.per_record.filter import IndividualFilter


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
            ``IndKNNParameters.for_epsilon(1.0, 1e-5, threshold=0.6, sigma2=0.4, num_queries=2000)``.
        num_classes: number of classes.
        dimension: of the features.
        switches: prediction reuse, hashing, thresholds from public density, held-back answers.
        extractor: turns images into features, where images are given instead of features.
        ledger: charged once, here, with the whole stream; a saved predictor's state is noted there.
        noise_source: where protective randomness comes from; the operating system's generator by default.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> from pl_privknn.labelers import IndKNNPredictor
        >>> from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters
        >>> parameters = IndKNNParameters.for_epsilon(1.0, 1e-5, threshold=0.6, sigma2=0.4, num_queries=2000)
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
    ) -> None:
        self.parameters = parameters
        self.num_classes = check_int("num_classes", num_classes, minimum=2)
        self.dimension = check_int("dimension", dimension)
        self.switches = switches if switches is not None else IndKNNSwitches()
        self.extractor = extractor
        self.noise_source = noise_source if noise_source is not None else default_noise()
        self._folder: PredictorFolder | None = None
        self._ledger = ledger
        self._removed: set[int] = set()
        self._asked = 0
        self._usable = True
        self._turn = threading.RLock()
        self._state = StreamState(IndividualFilter(parameters.budget), None)
        self._pay()
        self._engine = self._new_engine(self._state.budgets)

    # ------------------------------------------------------------------ what users get

    @property
    def mu(self) -> float:
        """√(2B): the stream of all answers is μ-Gaussian DP."""
        return self.parameters.total.mu

    def epsilon(self, delta: float, conversion: Conversion = "gdp") -> float:
        """ε of all answers ever given, past and to come; a public number."""
        return epsilon_of_budget(self.parameters.budget, delta, conversion)

    def predict(self, x: Tensor) -> Predictions:
        """Answer queries one after another; what they cost is on disk before this returns.

        Args:
            x: images, float32 ``(m, channels, height, width)``, or features, float ``(m, dimension)``.

        Raises:
            RuntimeError: where thresholds come from public density and :meth:`use_public` was never called.
            ValueError: for queries of another shape, or not finite.
            JournalError: if the budgets could not be written; nothing is let out.
        """
        queries = self._features(x)
        check_queries(queries, self.dimension)
        with self._my_turn():
            if self.switches.density is not None and not len(self._engine.reference):
                raise RuntimeError(
                    "density: there are no public examples yet; call use_public(features) first"
                )
            with self._changing():
                noise = self.noise_source.stream("ind_knn", self._state.content["openings"], self._asked)
                self._asked += len(queries)
                answers = self._engine.answer(queries, noise)
                if self._folder is not None and self.switches.reuse:
                    self._folder.append_answers(unit_rows(queries), answers.labels)
                if self._ledger is not None:
                    self._state.vouch(self._ledger)
        labels, counts = torch.from_numpy(answers.labels), torch.from_numpy(answers.counts)
        return Predictions(labels, probabilities(answers.noisy), counts)

    # ------------------------------------------------------------------ for the owner of the data

    def add(self, ids: ArrayLike, x: Tensor, y: Tensor) -> None:
        """Admit records, from the next query on.

        Args:
            ids: the owner's lasting whole numbers, shape ``(n,)``. A record must always come under the same number,
                for a second number would give it a second budget.
            x: images or features, as in :meth:`predict`.
            y: int64 labels, shape ``(n,)``.

        Raises:
            ValueError: for shapes and values that don't fit, or numbers that are in the table already.
        """
        features = self._features(x)
        check_table(features, y, self.num_classes)
        if features.shape[1] != self.dimension:
            raise ValueError(f"x: {features.shape[1]} features; want dimension={self.dimension}")
        numbers = read_ids(np.atleast_1d(np.asarray(ids, None if len(y) else np.int64)), len(y))
        with self._my_turn():
            if any(record in self._engine.table for record in numbers.tolist()):
                raise ValueError("ids: some are in the table already; remove them first")
            if not len(numbers):
                return
            with self._changing():
                if self._folder is not None:
                    # First the records, then the filter's word that they count: see PredictorFolder.
                    self._folder.records.add(numbers, y.numpy(), unit_rows(features).numpy())
                self._engine.add(numbers, features, y.numpy())
                self._removed.difference_update(numbers.tolist())

    def remove(self, ids: ArrayLike) -> None:
        """Take records out, from the next query on, and overwrite them.

        Raises:
            ValueError: if some are not in the table.
        """
        given = np.atleast_1d(np.asarray(ids))
        numbers = read_ids(given if given.size else given.astype(np.int64), len(given))
        with self._my_turn():
            if not all(record in self._engine.table for record in numbers.tolist()):
                raise ValueError("ids: some are not in the table; leave them out")
            with self._changing():
                self._engine.remove(numbers)
                if self._folder is not None:
                    self._folder.records.wipe(numbers)
                self._removed.update(numbers.tolist())

    def remaining(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of the records in the table, and what each has left. **Private**: for the owner alone."""
        with self._my_turn():
            ids = np.sort(self._engine.table.ids)
            return ids, self._engine.budgets.remaining(ids)

    def use_public(self, x: Tensor) -> None:
        """Give the public examples from whose density thresholds are taken; replaces earlier ones.

        Args:
            x: images or features, as in :meth:`predict`; of public examples only.
        """
        features = self._features(x)
        check_queries(features, self.dimension)
        with self._my_turn(), self._changing():
            self._engine.reference = unit_rows(features)
            if self._folder is not None:
                self._folder.save_reference(self._engine.reference)

    # ------------------------------------------------------------------ the folder

    def save(self, folder: str | Path) -> None:
        """Put the predictor into a new folder, where it lives from now on.

        There is no second copy: a predictor that has a folder is always saved; to move it, close it and move that.

        Raises:
            FileExistsError: if the folder exists.
            ValueError: if the predictor has another folder.
        """
        target = Path(folder).resolve()
        with self._my_turn():
            if self._folder is not None:
                if target != self._folder.path:
                    raise ValueError(
                        f"folder={str(folder)!r}: this predictor lives in {self._folder.path}; two copies would "
                        "each spend the same budget. Close it and move the folder"
                    )
                return
            if target.exists():
                raise FileExistsError(f"folder={str(folder)!r} exists; use open(folder), or choose a new one")
            partial = target.with_name(target.name + ".partial")
            if partial.exists():
                shutil.rmtree(partial)  # of a process that died while saving: its predictor died with it
            removed = np.array(sorted(self._removed), np.int64)
            PredictorFolder.create(partial, self._engine, removed, self._state.content["runs"])
            with self._changing():
                os.replace(partial, target)
                sync_folder(target.parent)
                self._enter(target)

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
            noise_source: as there.
            ledger: notes the state, and finds out an older copy; charged, if it has not paid for the stream.

        Raises:
            FileNotFoundError: if there is none.
            JournalError: if it is damaged, incomplete, an older or second copy, or in use.
        """
        place = Path(folder).resolve()
        settings = PredictorFolder.read_settings(place)
        predictor = cls(
            settings.parameters,
            settings.num_classes,
            settings.dimension,
            settings.switches,
            extractor=extractor,
            noise_source=noise_source,
        )
        predictor._enter(place)
        predictor._ledger = ledger
        try:
            predictor._pay()
        except BaseException:
            predictor.close()
            raise
        return predictor

    def close(self) -> None:
        """Give the folder back; the predictor can't be used any more."""
        with self._turn:
            self._usable = False
            if self._folder is not None:
                self._folder.close()
            self._state.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an IndKNNPredictor can't be copied or pickled: each copy would spend the same budget"
        )

    def __repr__(self) -> str:
        return f"IndKNNPredictor({self.parameters!r})"

    # ------------------------------------------------------------------ inner work

    def _pay(self) -> None:
        if self._ledger is not None:
            self._state.pay_for(self.parameters.total, self._ledger, self.noise_source, ("add_remove",))

    def _new_engine(self, budgets: IndividualFilter) -> IndKNNEngine:
        return IndKNNEngine(self.parameters, self.switches, self.num_classes, self.dimension, budgets)

    def _enter(self, place: Path) -> None:
        """Read everything from a folder and stay there."""
        self._folder = PredictorFolder(place, self.parameters.budget)
        try:
            engine = self._new_engine(self._folder.state.budgets)
            self._folder.load_into(engine)
        except BaseException:
            self._folder.close()
            raise
        self._engine, self._state = engine, self._folder.state

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        with self._turn:
            if not self._usable:
                raise RuntimeError(
                    "this predictor was closed, or a change of it broke off; close it and open its folder"
                )
            yield

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """After a change that broke off, memory and disk may differ, so nothing more is done."""
        self._usable = False
        yield
        self._usable = True

    def _features(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            return x
        if self.extractor is None:
            raise ValueError(
                f"x: images of shape {shape_text(x.shape)}, but there is no extractor; pass one, or give features"
            )
        with torch.inference_mode():
            return self.extractor(x)
