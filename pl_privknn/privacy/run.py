"""One run in its folder: lock, id, parameters, plan, ledger rows, and the queries and answers of its rounds."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pl_privknn._checks import check_path
from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import FolderLock, private_folder
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt, LedgerRun
from pl_privknn.privacy.mechanisms.base import Charge, Level, guarantee_rank
from pl_privknn.privacy.sqlite_file import LAST_ROW, RowStore, SQLiteFile, refuse_wal

#: The file of a run in its folder.
RUN_FILE = "run.sqlite"
#: Names of facts: the run's id and parameters, and the shared ledger that it charges.
BEGUN, SHARED = "begun", "ledger_path"
#: Name of the plan among the terms of a labelling; a training has none.
PLAN = "plan"


class RunFileError(RuntimeError):
    """Raised where a run's file is an older copy or can't be read, or where none of its answers is left."""


class StatedRun(Protocol):
    """Protocol of a run, in the process that has its file or in another one of the same fit."""

    @property
    def folder(self) -> Path | None:
        """The run's folder; None where this process does not know it."""
        ...

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; None in a process without it."""
        ...

    def reports(self, exact: bool | None = None) -> tuple[PrivacyReport, PrivacyReport]:
        """Guarantee and spent budget."""
        ...


class StatesPrivacy:
    """Mixin of callbacks and modules that make a run: privacy figures before, during and after a fit."""

    budget: Budget
    asked_dir: Path | None

    @property
    def stated_run(self) -> StatedRun | None:
        """The run, once the fit has started."""
        raise NotImplementedError

    @property
    def epsilon(self) -> float:
        """The guarantee stated beforehand: ε of the ledger's worst case at this δ; 0 before the fit."""
        return 0.0 if self.stated_run is None else self.stated_run.reports()[0].epsilon

    @property
    def epsilon_spent(self) -> float:
        """ε of the releases so far; for information, the guarantee is :attr:`epsilon`."""
        return 0.0 if self.stated_run is None else self.stated_run.reports()[1].epsilon

    @property
    def delta(self) -> float:
        """δ of the guarantee."""
        return self.budget.delta

    @property
    def guarantee(self) -> Level | None:
        """Guarantee level of :attr:`epsilon`: unconditional, conditional or none; None before the fit."""
        return None if self.stated_run is None else self.stated_run.reports()[0].guarantee

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, once the fit has started, in the process that has it (global rank 0)."""
        return None if self.stated_run is None else self.stated_run.ledger

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, once the fit has started; before, the one that is asked for, or None."""
        found = None if self.stated_run is None else self.stated_run.folder
        return self.asked_dir if found is None else found

    @run_dir.setter
    def run_dir(self, folder: str | Path | None) -> None:
        self.asked_dir = None if folder is None else Path(check_path("run_dir", folder))

    def report(self, exact: bool = True) -> PrivacyReport:
        """The guarantee of the run, with the ε of each way of accounting.

        Args:
            exact: also compute the exact worst case, which takes some seconds.

        Raises:
            RuntimeError: before the fit.
        """
        if self.stated_run is None:
            raise RuntimeError("report: there is none before trainer.fit")
        return self.stated_run.reports(exact)[0]

    def privacy_metrics(self) -> dict[str, float]:
        """Logged privacy figures by name; nothing before the fit."""
        if self.stated_run is None:
            return {}
        guarantee, spent = self.stated_run.reports()
        return {
            "privacy/epsilon": guarantee.epsilon,
            "privacy/epsilon_spent": spent.epsilon,
            "privacy/delta": self.delta,
            "privacy/guarantee": float(guarantee_rank(guarantee.guarantee)),
        }


class Run:
    """One run in a folder: opened or continued, with its plan stated in the ledger.

    The folder is the run's until :meth:`close`. Its id, its parameters and its plan are written in one transaction.
    Each row that it charges is written with the row's hash in the run's own facts, in one transaction too: so an
    older copy of a shared ledger, or of the run's file beside one, is found out. An older copy of a file that holds
    both is found out by the run's checkpoint.

    Args:
        folder: the run's folder, made if missing.
        terms: public facts, as JSON, that are fixed when the run begins.
        checkpoint: what :meth:`state` said when the checkpoint that is being resumed was written, or None.
        budget: see :class:`~pl_privknn.privacy.ledger.Ledger`.
        ledger_path: a ledger that several runs share; None where the run's file holds its own.

    Attributes:
        private: folder of the run's private state, next to its own.
        is_new: whether the run has just begun.
        file: the run's file, with facts in JSON.
        ledger: the ledger that the run charges.
        ledger_run: its handle, to charge.
        exact: whether the figures that are logged include the exact worst case, which takes some seconds.

    Raises:
        FolderInUse: if another run has the folder.
        LedgerCorrupt: if the ledger is older than the run's last row, or not this run's.
        RunFileError: if the run's file is older than the ledger.
        BudgetExceeded: if the plan does not fit the budget; nothing was drawn.
        FileNotFoundError: if the ledger of a run that has begun is missing.
        ValueError: if the folder holds a run with other parameters, or another run than the checkpoint's.
    """

    exact: ClassVar[bool] = False
    _reported: tuple[str, bool, tuple[PrivacyReport, PrivacyReport]] | None = None

    def __init__(
        self,
        folder: Path,
        terms: Mapping[str, Any],
        checkpoint: Mapping[str, Any] | None = None,
        *,
        budget: Budget,
        ledger_path: str | Path | None = None,
    ) -> None:
        self.folder, self.private, self.delta = folder, private_folder(folder), budget.delta
        self._lock = FolderLock(folder)
        path = folder / RUN_FILE
        ledger = path if ledger_path is None else Path(ledger_path)
        self.is_new = True
        try:
            known = facts_in(path).get(BEGUN) if path.exists() else None
            terms = json.loads(json.dumps(terms))
            self._check_known(known, terms, checkpoint)
            self.is_new = known is None
            if known is not None and not ledger.exists():
                raise FileNotFoundError(
                    f"the ledger {ledger} of this run is missing; without it ε would be wrong. Restore it, or pass "
                    "ledger_path with its place"
                )
            if self.is_new and ledger == path:
                path.unlink(missing_ok=True)  # it states no plan: an opening was interrupted
            self.run_id: str = uuid.uuid4().hex if known is None else known["run_id"]
            self.ledger = Ledger(ledger, budget, run_file=path)
            self.file: RowStore = self.ledger.file
            self.ledger_run = LedgerRun(self.ledger, self.run_id)
            if not self.is_new:
                self._check_copies(checkpoint)
            with self.file.writing():
                self.ledger.run(self.run_id, *self.plan())
                self.file.note(SHARED, None if ledger_path is None else str(ledger_path))
                if self.is_new:
                    self.file.note(BEGUN, {"run_id": self.run_id, "terms": terms})
        except BaseException:
            if self.is_new and hasattr(self, "ledger"):
                self.ledger.close()
                path.unlink(missing_ok=True)  # nothing is stated: other parameters may come
            self.close()
            raise

    def plan(self) -> tuple[Sequence[Charge], dict[str, Any]]:
        """Plan of the run (the most it may release) and public facts for the reader of the ledger.

        Called once the ledger is open, in the transaction that states the plan; raises where the run can't go on.
        """
        raise NotImplementedError

    @property
    def num_charges(self) -> int:
        """Number of rows that the run has paid."""
        return self.ledger_run.num_charges

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the run, its folder, and the last row that it paid."""
        return {"run_id": self.run_id, "run_dir": str(self.folder), LAST_ROW: self.file.fact(LAST_ROW)}

    def reports(self, exact: bool | None = None) -> tuple[PrivacyReport, PrivacyReport]:
        """Guarantee and spent budget of the whole ledger at this run's δ.

        Args:
            exact: also compute the exact worst case; :attr:`exact` if None.
        """
        exact = self.exact if exact is None else exact
        if self._reported is None or self._reported[:2] != (self.ledger.head, exact):
            report = self.ledger.report(delta=self.delta, exact=exact)
            self._reported = report.head, exact, (report.guarantee, report.spent)
        return self._reported[2]

    def summary(self) -> dict[str, Any]:
        """Privacy figures of the run for a summary, in plain types."""
        report = self.ledger.report(delta=self.delta, exact=True)
        return {
            **report.guarantee.to_dict(),
            **report.trade_off().to_dict(),
            "epsilon_spent": report.spent.epsilon,
            "max_epsilon": self.ledger.budget.epsilon,
            "ledger_head": report.head,
            "run": self.run_id,
        }

    def close(self) -> None:
        """Release the folder; the ledger stays readable for reports."""
        self._lock.release()

    def _check_known(
        self, known: dict[str, Any] | None, terms: Mapping[str, Any], checkpoint: Mapping[str, Any] | None
    ) -> None:
        """Raise ``ValueError`` for another run than the checkpoint's, or other parameters."""
        if checkpoint is not None and known is None:
            raise FileNotFoundError(
                f"{self.folder / RUN_FILE}, the file of the checkpoint's run with its ledger, is missing; without it "
                "ε would be wrong. Restore it, or pass run_dir with its place"
            )
        if checkpoint is not None and known is not None and known["run_id"] != checkpoint["run_id"]:
            raise ValueError(
                f"run_dir={str(self.folder)!r} holds run {known['run_id']}, the checkpoint belongs to run "
                f"{checkpoint['run_id']}; pass the folder of the checkpoint's run"
            )
        before = terms if known is None else known["terms"]
        if changes := [
            f"{name}={before.get(name)!r} then, {terms.get(name)!r} now"
            for name in sorted({*before, *terms})
            if before.get(name) != terms.get(name)
        ]:
            raise ValueError(
                f"{self.folder} holds a run with other parameters ({'; '.join(changes)}), and ε was stated for "
                "those. Repeat it with its own parameters to continue it, or choose another folder"
            )

    def _check_copies(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Refuse an older copy of the ledger, or of the run's file."""
        ledger = self.ledger
        if self.run_id not in ledger.runs:
            raise LedgerCorrupt(
                f"the ledger {ledger.path} holds nothing of this run, which has begun: it is an older copy, a new "
                "one, or another's. Restore the run's ledger, or pass ledger_path with its place"
            )
        if checkpoint is not None:
            ledger.check_head(checkpoint[LAST_ROW], "the checkpoint")
        noted = ledger.check_head(self.file.fact(LAST_ROW), str(self.folder / RUN_FILE))
        if unknown := ledger.charges_after(self.run_id, noted):
            raise RunFileError(
                f"{self.folder / RUN_FILE} is an older copy: the ledger {ledger.path} holds {unknown} later charges "
                "of this run, whose answers are not here. Restore the newest copy of the run's folder, or start a "
                "new run with the same ledger_path; asked again from here, the same queries would cost twice"
            )


@contextlib.contextmanager
def reading_run(path: Path) -> Any:
    """Context with a run's file, opened read-only.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is none.
        RunFileError: if it is no run's file.
        LedgerCorrupt: if it is written ahead, so that a part of it may lie elsewhere.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    refuse_wal(path)
    with contextlib.closing(_ReadRun(path, readonly=True)) as file:
        yield file


class _ReadRun(SQLiteFile):
    def failure(self, error: Exception) -> Exception:
        return RunFileError(f"{self.path} can't be read as the file of a run ({error}); restore it")


def facts_in(path: Path) -> dict[str, Any]:
    """Facts in a run's file; see :func:`reading_run`."""
    with reading_run(path) as file:
        return file.facts()


def run_id_in(folder: Path) -> str | None:
    """Id of the run that a folder holds; None where there is none that can be read."""
    with contextlib.suppress(FileNotFoundError, RunFileError):
        return (facts_in(folder / RUN_FILE).get(BEGUN) or {}).get("run_id")
    return None


def is_labelling(folder: Path) -> bool:
    """Whether a folder holds a run that asks queries."""
    path = folder / RUN_FILE
    return path.is_file() and PLAN in (facts_in(path).get(BEGUN) or {}).get("terms", {})


def query_counts(file: SQLiteFile) -> dict[str, int]:
    """Numbers of queries in a run's file: ``queried`` (asked), ``answered``, ``refused`` and ``lost`` to a crash."""
    queried, answered, released = file.read(
        "SELECT COALESCE(SUM(asked_at IS NOT NULL), 0), COALESCE(SUM(released AND label >= 0), 0), "
        "COALESCE(SUM(released), 0) FROM queries"
    ).fetchone()
    return {
        "queried": queried,
        "answered": answered,
        "refused": released - answered,
        "lost": queried - released,
    }
