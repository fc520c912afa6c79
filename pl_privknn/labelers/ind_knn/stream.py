"""What a stream of Ind-KNN answers must not forget between processes, beside its budgets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pl_privknn._files import sync_folder, write_durably
from pl_privknn.labelers.base import ChargesLedger
from pl_privknn.privacy.ledger import LedgerRun
from pl_privknn.privacy.mechanisms import Adjacency, Mechanism
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.per_record.filter import IndividualFilter
from pl_privknn.privacy.per_record.journal import JournalError


class StreamState:
    """A stream's budgets, which runs have paid for it, and the marks by which older copies are found out.

    The file ``state.json`` stands beside the budgets; both are **private** and belong together. Three things
    are refused, each of which would spend the same budgets twice:

    * *an older copy put back*: every batch of answers draws a mark that is written with what it cost, and
      noted in the ledger before the batch is let out. Budgets that don't hold the ledger's last mark are older;
    * *a lost state*: the ledger says that this run has paid for a stream, and the state knows nothing of it;
    * *a second copy*: the folder is not where it was, and the same stream still is there.

    A run is noted here before its ledger is charged, with the number of such charges that it had by then. So the
    ledger alone says whether the stream is paid for, and a crash in between neither forgets nor repeats a charge.

    Args:
        budgets: of the stream; open.
        file: ``state.json``; None keeps the state in memory, and a new process starts a new stream.
        content: what else it holds at first; ``openings`` is how often it has been opened.

    Attributes:
        budgets: as given.
        content: what the file holds.

    Raises:
        JournalError: for a file that is missing, damaged, older than the budgets or a second copy.
    """

    def __init__(self, budgets: IndividualFilter, file: Path | None, **content: Any) -> None:
        self.budgets = budgets
        self.content: dict[str, Any] = {"openings": 0, "runs": {}, **content}
        self._file = file
        self._paid_here: list[ChargesLedger] = []
        self.row = -1
        if file is None:
            return
        if file.exists():
            self._read(file)
        elif budgets.begun:
            raise JournalError(
                f"{file.parent}: the file {file.name!r} is missing; put it back, or start a new run or folder, which "
                "charges a new stream"
            )
        # A number for each opening keeps seeded noise of a resumed run apart from what was drawn before.
        self.content["openings"] += 1
        self.content["place"] = str(file.parent)
        self.save()

    def pay_for(
        self, total: Mechanism, ledger: ChargesLedger, noise: NoiseSource, adjacencies: Sequence[Adjacency]
    ) -> None:
        """Charge the whole stream to a ledger, unless this run has paid for it already.

        Args:
            total: what the stream costs.
            ledger: pays.
            noise: the source that will draw.
            adjacencies: under which ``total`` is stated.

        Raises:
            BudgetExceeded: as the ledger says; nothing was drawn.
            JournalError: if the budgets are not, or are no more, those of the answers that the run has let out.
        """
        if not isinstance(ledger, LedgerRun):
            if not any(ledger is other for other in self._paid_here):
                self.row = ledger.charge(total, 1, noise=noise, adjacencies=adjacencies)
                self._paid_here.append(ledger)
            return
        self.check(total, ledger)
        runs, run, paid = self.content["runs"], self._run(ledger), ledger.charged(total)
        if not self._knows(ledger):
            runs[run] = paid
            self.save()
        if paid <= runs.get(run, 0):
            self.row = ledger.charge(total, 1, noise=noise, adjacencies=adjacencies)

    def check(self, total: Mechanism, ledger: ChargesLedger) -> None:
        """Check that the ledger's run, if it has answered, did so from these budgets, and that they are the latest.

        Args:
            total: what the stream costs.
            ledger: the run's.

        Raises:
            JournalError: if not.
        """
        if not isinstance(ledger, LedgerRun):
            return
        noted = ledger.noted(self._topic)
        if noted is not None and not self.budgets.has_mark(noted):
            raise JournalError(
                f"{self._place} holds an older copy of the budgets than the answers of run {ledger.run_id!r} were "
                "paid from; put back the latest one, or start a new run in a new folder, which charges a new stream"
            )
        if self._file is not None and not self._knows(ledger):
            check_unpaid(self._file.parent, total, ledger)

    def vouch(self, ledger: ChargesLedger) -> None:
        """Note in the ledger how far the stream has come, before its last answers are let out."""
        if isinstance(ledger, LedgerRun) and self._file is not None:
            ledger.note(self._topic, self.budgets.mark)

    def save(self) -> None:
        """Write the file, if there is one."""
        if self._file is not None:
            self.content |= {"stream": self.budgets.name, "mark": self.budgets.mark}
            write_private(self._file, json.dumps(self.content).encode())

    def close(self) -> None:
        """Close the budgets and let others open them."""
        with contextlib.suppress(JournalError, OSError):  # the budgets themselves hold what counts
            self.save()
        self._file = None  # from now on it may be another's
        self.budgets.close()

    @property
    def _topic(self) -> str:
        return f"ind_knn {self.budgets.name}"

    def _run(self, ledger: LedgerRun) -> str:
        return f"{ledger.origin} {ledger.run_id}"  # ledgers may have runs of the same name

    def _knows(self, ledger: LedgerRun) -> bool:
        known = (*self.content["runs"], *self.content.get("paid_runs", ()))
        return self._run(ledger) in known or ledger.run_id in known

    @property
    def _place(self) -> str:
        return self.content.get("place", "the labeler's memory")

    def _read(self, file: Path) -> None:
        stored = read_json(file)
        if not self.budgets.has_mark(stored.get("mark", f"0:{self.budgets.name}")):
            raise JournalError(
                f"{file.parent}: the budgets are an older copy, or those of another stream; put back the latest ones"
            )
        if (other := Path(stored.get("place", file.parent))) != file.parent:
            beside = other / file.name
            separate = beside.is_file() and not beside.samefile(file)
            if separate and read_json(beside).get("stream") == self.budgets.name:
                raise JournalError(
                    f"{file.parent} is a copy of {other}, and each would spend the same budgets; go on there, or "
                    "delete that folder to go on here"
                )
        self.content |= stored


def check_unpaid(folder: Path, total: Mechanism, ledger: ChargesLedger) -> None:
    """Check that a run has paid for no stream, before a folder that knows nothing of it is used, or made.

    Args:
        folder: where the budgets would be.
        total: what the stream costs.
        ledger: the run's.

    Raises:
        JournalError: if it has, and so has answered from other budgets.
    """
    if isinstance(ledger, LedgerRun) and ledger.charged(total):
        raise JournalError(
            f"{folder} does not hold the budgets from which run {ledger.run_id!r} has answered; put that folder "
            "back, or start a new run in a new folder, which charges a new stream"
        )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        JournalError: for anything else.
    """
    try:
        content = json.loads(file.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise JournalError(f"{file} is damaged; put back an undamaged copy that is up to date")
    return content


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, for the owner alone; on disk when this returns.

    Raises:
        JournalError: if it can't be made.
    """
    if folder.is_dir():
        return
    make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"{folder}, where private budgets are to be kept, can't be made ({error.strerror}); name another place "
            "with state_dir"
        ) from None
    sync_folder(folder.parent)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole, durably; readable by its owner only."""
    write_durably(path, data, mode=0o600)
