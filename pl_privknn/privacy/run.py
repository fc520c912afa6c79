"""One run in its folder: lock, id, parameters, ledger, plan and the ledger's head."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.folders import FolderLock
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt, LedgerRun
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.settings import Budget

_BEGUN, _HEAD = "begun", "head"


class Facts(Protocol):
    """Protocol of a file that keeps public facts about a run, durably."""

    path: Path

    def fact(self, name: str, otherwise: Any = None) -> Any:
        """Fact that was noted under a name."""
        ...

    def note(self, name: str, value: Any) -> None:
        """Note a JSON value under a name."""
        ...


class FactsFile:
    """Facts in one JSON file, replaced atomically.

    Args:
        path: the file, made with the first fact.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def facts(self) -> dict[str, Any]:
        """All noted facts by name."""
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}

    def fact(self, name: str, otherwise: Any = None) -> Any:
        """Fact that was noted under a name."""
        return self.facts().get(name, otherwise)

    def note(self, name: str, value: Any) -> None:
        """Note a JSON value under a name, durably."""
        write_durably(self.path, json.dumps({**self.facts(), name: value}, indent=2) + "\n")


def noted_run_id(facts: Facts) -> str | None:
    """Id of the run that a file of facts belongs to; None before the run has one."""
    return (facts.fact(_BEGUN) or {}).get("run_id")


def noted_head(facts: Facts) -> str | None:
    """Head of the ledger after the run's last row, or None."""
    return facts.fact(_HEAD)


class Run:
    """One run in a folder: opened or continued, with its plan stated in the ledger.

    The folder is the run's until :meth:`close`. The run has its id on disk before it is in the ledger, so that a
    kill in between states no second plan. After each row the ledger's head is noted before anything may be drawn, so
    that an older copy of the ledger is found out.

    Args:
        folder: the run's folder, made if missing.
        facts: opens the file of the run's facts, once the folder is locked.
        terms: public facts, as JSON, that are fixed when the run begins.
        checkpoint: id of the run that a checkpoint belongs to, or None.
        budget: see :class:`~pl_privknn.privacy.ledger.Ledger`.
        ledger_path: a ledger that several runs share; ``ledger.sqlite`` in the folder if None.

    Attributes:
        facts: the file of the run's facts.
        is_new: whether the run has just got its id.
        noted: position in the ledger of the row whose head was noted last; None before the first.

    Raises:
        FolderInUse: if another run has the folder.
        LedgerCorrupt: if the ledger is older than the run's last row, or not this run's.
        BudgetExceeded: if the plan does not fit the budget; nothing was drawn.
        FileNotFoundError: if the ledger of a run that has begun is missing.
        ValueError: if the folder holds a run with other parameters, or another run than the checkpoint's.
    """

    def __init__(
        self,
        folder: Path,
        facts: Callable[[], Facts],
        terms: Mapping[str, Any],
        checkpoint: str | None = None,
        *,
        budget: Budget,
        ledger_path: str | Path | None = None,
    ) -> None:
        self.folder, self.delta = folder, budget.delta
        self._lock = FolderLock(folder)
        try:
            self.facts = facts()
            known = self._known(json.loads(json.dumps(terms)), checkpoint)
            self.run_id: str = known["run_id"]
            path = Path(ledger_path or folder / "ledger.sqlite")
            if known["stated"] and not path.exists():
                raise FileNotFoundError(
                    f"the ledger {path} of this run is missing; without it ε would be wrong. Restore it, or pass "
                    "ledger_path with its place"
                )
            self.ledger = Ledger(path, budget)
            self._state(known)
        except BaseException:
            self.close()
            raise

    def plan(self) -> tuple[Sequence[Charge], dict[str, Any]]:
        """Plan of the run (the most it may release) and public facts for the reader of the ledger.

        Called once the ledger is open, before anything is stated; raises where the run can't go on.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the folder; the ledger stays readable for reports."""
        self._lock.release()

    def reports(self, exact: bool = False) -> tuple[PrivacyReport, PrivacyReport]:
        """Guarantee and spent budget of the whole ledger at this run's δ."""
        report = self.ledger.report(delta=self.delta, exact=exact)
        return report.guarantee, report.spent

    def note_head(self, head: str) -> None:
        """Note the head of the ledger after a row of this run."""
        self.facts.note(_HEAD, head)

    def _known(self, terms: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
        """Facts of the folder's run, once it has an id."""
        known = self.facts.fact(_BEGUN)
        if checkpoint is not None and (known is None or known["run_id"] != checkpoint):
            raise ValueError(
                f"run_dir={str(self.folder)!r} holds run {known and known['run_id']}, the checkpoint belongs to run "
                f"{checkpoint}; pass the folder of the checkpoint's run"
            )
        self.is_new = known is None
        if known is None:
            known = {"run_id": uuid.uuid4().hex, "terms": terms, "stated": False}
            self.facts.note(_BEGUN, known)
        before = known["terms"]
        if changes := [
            f"{name}={before.get(name)!r} then, {terms.get(name)!r} now"
            for name in sorted({*before, *terms})
            if before.get(name) != terms.get(name)
        ]:
            raise ValueError(
                f"{self.folder} holds a run with other parameters ({'; '.join(changes)}), and ε was stated for "
                "those. Repeat it with its own parameters to continue it, or choose another folder"
            )
        return dict(known)

    def _state(self, known: dict[str, Any]) -> None:
        ledger = self.ledger
        if known["stated"] and self.run_id not in ledger.runs:
            raise LedgerCorrupt(
                f"the ledger {ledger.path} holds nothing of this run, which has begun: it is an older copy, a new "
                "one, or another's. Restore the run's ledger, or pass ledger_path with its place"
            )
        head = noted_head(self.facts)
        self.noted = None if head is None else ledger.check_head(head, str(self.facts.path))
        self.ledger_run = LedgerRun(ledger, self.run_id)
        try:
            ledger.run(self.run_id, *self.plan())
        except BaseException:
            if self.run_id not in ledger.runs:
                self.facts.note(_BEGUN, None)  # nothing is stated: other parameters may come
            raise
        ledger.witness(self.note_head)
        self.facts.note(_BEGUN, {**known, "stated": True})
