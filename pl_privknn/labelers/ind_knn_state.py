"""What an Ind-KNN labeler must not forget between processes: budgets, and which runs have paid for them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pl_privknn.labelers.base import ChargesLedger
from pl_privknn.labelers.ind_knn_core import IndKNNParameters
from pl_privknn.privacy.individual import IndividualFilter
from pl_privknn.privacy.journal import JournalError
from pl_privknn.privacy.mechanisms import Adjacency
from pl_privknn.privacy.noise import NoiseSource


class LabelerState:
    """The budgets of one stream and the list of runs whose ledger holds it.

    The folder holds ``budgets`` (the filter's file, locked while it is open) and ``state.json``. A run is
    noted as paid after its ledger has the entry: a crash in between charges twice, never not at all.

    Args:
        parameters: public constants of the stream.
        folder: where the state lives, private; None keeps it in memory, and a new process starts anew.

    Raises:
        JournalError: if the folder is damaged or in use.
        ValueError: if its budgets are of another size.
    """

    def __init__(self, parameters: IndKNNParameters, folder: Path | None) -> None:
        self.parameters = parameters
        self._file = None if folder is None else folder / "state.json"
        self._content: dict[str, Any] = {"records": None, "paid_runs": [], "openings": 0}
        self._paid_here: list[ChargesLedger] = []
        self._row = -1
        if folder is None or self._file is None:
            self.budgets = IndividualFilter(parameters.budget)
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._file.exists() and not (folder / "budgets").exists():
            raise JournalError(
                f"state_dir={str(folder)!r}: the file 'budgets' is missing; put it back, or name a new folder, "
                "which starts and charges a new stream"
            )
        self.budgets = IndividualFilter(parameters.budget, folder / "budgets")
        try:
            if self._file.exists():
                self._content |= json.loads(self._file.read_text())
            # A number for each opening keeps seeded noise of a resumed run apart from what was drawn before.
            self._content["openings"] += 1
            self._save()
        except BaseException:
            self.budgets.close()
            raise

    def check_records(self, fingerprint: str) -> None:
        """Note which records the budgets belong to, or compare.

        Raises:
            ValueError: if they belong to others; it shows nothing of either.
        """
        stored = self._content["records"]
        if stored not in (None, fingerprint):
            raise ValueError(
                "labels: the private records are not those that the budgets belong to (others, or in another "
                "order); restore their order, give every record a lasting number with ids, or use a new labeler "
                "and state_dir"
            )
        if stored is None:
            self._content["records"] = fingerprint
            self._save()

    def pay_for(
        self, ledger: ChargesLedger, noise: NoiseSource, adjacencies: Sequence[Adjacency]
    ) -> tuple[int, int]:
        """Charge the whole stream to a ledger, unless this run has paid for it already.

        Args:
            ledger: pays.
            noise: the source that will draw.
            adjacencies: under which the stream's cost is stated.

        Returns:
            A key for the stream of noise, different for every process.

        Raises:
            BudgetExceeded: as the ledger says; nothing was drawn.
        """
        run = getattr(ledger, "run_id", None)
        paid = run in self._content["paid_runs"] if run is not None else False
        if not paid and not any(ledger is other for other in self._paid_here):
            self._row = ledger.charge(self.parameters.total, 1, noise=noise, adjacencies=adjacencies)
            if run is None:
                self._paid_here.append(ledger)
            else:
                self._content["paid_runs"].append(run)
                self._save()
        return int(self._content["openings"]), self._row + 1

    def close(self) -> None:
        """Close the budgets."""
        self.budgets.close()

    def _save(self) -> None:
        if self._file is not None:
            write_durably(self._file, json.dumps(self._content).encode())


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file as a whole; on disk, old or new, whenever a crash comes. Readable by its owner only."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
