"""A run's ledger and labels while it labels, and its state for a resume and a summary."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn._lightning import rank_zero_warn
from pl_privknn.callbacks.label_store import LabelStore, LabelStoreError
from pl_privknn.init_arguments import HasInitArguments
from pl_privknn.labelers.base import Labeler
from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt, counts_text, counts_topic
from pl_privknn.privacy.mechanisms import Adjacency, Charge
from pl_privknn.privacy.mechanisms.base import Level, strength
from pl_privknn.privacy.store import FolderLock

if TYPE_CHECKING:
    from pl_privknn.callbacks.private_labeler import RoundFeatures
    from pl_privknn.datamodules.datasets import PublicDataset


#: The file of released labels in a run's folder.
LABELS = "labels.sqlite"
_EXAMPLES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTerms:
    """What is fixed before a run asks anything; all of it public.

    Attributes:
        plan: the most that all rounds can cost.
        public_examples: size of the public set.
        public_digest: hash of the public examples; labels belong to these alone.
        num_classes: number of classes.
        delta: δ of the guarantee.
        max_epsilon: budget, or None.
        adjacency: neighbouring relation.
        ledger_path: a ledger that several runs share, or None for the run's own.
        ledger_head_path: see :class:`~pl_privknn.privacy.ledger.Ledger`.
        run_id: the run that a checkpoint belongs to, or None.
        description: public facts about the run, for the reader of the ledger.
    """

    plan: Sequence[Charge]
    public_examples: int
    public_digest: str
    num_classes: int
    delta: float
    max_epsilon: float | None
    adjacency: Adjacency
    ledger_path: Path | None
    ledger_head_path: Path | None
    run_id: str | None
    description: dict[str, Any]

    def fingerprint(self) -> dict[str, Any]:
        """What a store of released labels must agree with."""
        # Charges without their marks: what those say of the noise is in the ledger, and never stops a resume.
        plan = [Charge(charge.mechanism, charge.count).to_record() for charge in self.plan]
        names = ("delta", "adjacency", "public_examples", "public_digest", "num_classes")
        return {"plan": plan, **{name: getattr(self, name) for name in names}}


class LabelRun:
    """Opens, or continues, a run in a folder and states its worst case in the ledger.

    The folder is this run's until :meth:`close`. Ledger and labels vouch for each other: each charge is noted in the
    label store before anything may be drawn.

    Args:
        folder: the run's folder; holds ``labels.sqlite`` and, unless given elsewhere, ``ledger.sqlite``.
        terms: see :class:`RunTerms`.

    Raises:
        FolderInUse: if another run has the folder.
        LabelStoreError: if the folder holds a run with other parameters or public examples, or an older copy.
        LedgerCorrupt: if the ledger is older than the labels, or not this run's.
        BudgetExceeded: if the plan does not fit the budget; nothing was asked.
        FileNotFoundError: if the ledger of a run that has begun is missing.
        ValueError: if the folder holds another run than the checkpoint's.
    """

    def __init__(self, folder: Path, terms: RunTerms) -> None:
        self.delta = terms.delta
        self._lock = FolderLock(folder)
        try:
            self.store = LabelStore(folder / LABELS, terms.fingerprint())
            self.run_id = self._find_run(folder, terms.run_id)
            self.ledger = self._open_ledger(terms.ledger_path or folder / "ledger.sqlite", terms)
            self.ledger_run = self.ledger.run(self.run_id, plan=terms.plan, description=terms.description)
            self.ledger.witness(self.store.note_head)
            self.store.set_meta("planned", True)
            self.store.forget_unpaid(self.ledger_run.num_charges)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another run use the folder; the ledger and the labels stay readable for reports."""
        self._lock.release()

    def _find_run(self, folder: Path, wanted: str | None) -> str:
        stored: str | None = self.store.get_meta("run_id")
        if wanted is not None and stored != wanted:
            raise ValueError(
                f"run_dir={str(folder)!r} holds run {stored}, the checkpoint belongs to run {wanted}; "
                "pass the folder of the checkpoint's run"
            )
        found = stored or uuid.uuid4().hex
        self.store.set_meta("run_id", found)
        return found

    def _open_ledger(self, path: Path, terms: RunTerms) -> Ledger:
        begun = bool(self.store.get_meta("planned"))
        if begun and not path.exists():
            raise FileNotFoundError(
                f"the ledger {path} of this run is missing; without it ε would be wrong. Restore it, or pass "
                "ledger_path with its place"
            )
        ledger = Ledger(
            path,
            adjacency=terms.adjacency,
            delta=terms.delta,
            max_epsilon=terms.max_epsilon,
            head_path=terms.ledger_head_path,
        )
        if begun and self.run_id not in ledger.runs:
            raise LedgerCorrupt(
                f"the ledger {path} holds nothing of this run, which has begun: it is a new one, or another's. "
                "Restore the run's ledger, or pass ledger_path with its place"
            )
        self.store.check_ledger(ledger, self.run_id)
        return ledger

    def note_counts(self) -> None:
        """Note in the ledger how many queries were asked and answered, so that an auditor can check a summary."""
        self.ledger_run.note(counts_topic(self.run_id), counts_text(self.store.counts()))

    def tell_losses(self, labelled: int) -> None:
        """Say what a kill took of the answers that were paid for.

        Args:
            labelled: public examples that have a label all the same.

        Raises:
            LabelStoreError: if there is none.
        """
        if not (lost := self.store.counts()["lost"]):
            return
        what = (
            f"{lost} queries were paid for, and a kill or an error came before their answers were kept. They are not "
            "asked again, and ε stays as it was stated"
        )
        if labelled:
            rank_zero_warn(what)
            return
        raise LabelStoreError(
            f"{what}; no label is left to train on. Start a new run, in another folder, with ledger_path="
            f"{str(self.ledger.path)!r}, so that both runs are counted: asking anew costs anew"
        )

    def reports(self, exact: bool) -> tuple[PrivacyReport, PrivacyReport]:
        """The guarantee stated beforehand and what was spent, of the whole ledger at this run's δ."""
        report = self.ledger.report(delta=self.delta, exact=exact)
        return report.guarantee, report.spent

    def metrics(
        self, truth: Tensor | None, examples: Tensor, labels: Tensor, earlier: Tensor
    ) -> dict[str, float]:
        """What is logged beside the student's accuracy.

        Args:
            truth: int64 classes (or attributes) of all public examples, -1 where they aren't known; for
                evaluation only.
            examples: int64, answered public examples, shape ``(n,)``.
            labels: int64, their released labels, shape ``(n,)``, or attributes ``(n, a)``, of which the
                accuracy is the mean over attributes.
            earlier: int64, public examples that had a label before the last round.
        """
        guarantee, spent = self.reports(exact=False)
        counts = self.store.counts()
        metrics = {
            "privacy/epsilon": guarantee.epsilon,
            "privacy/epsilon_spent": spent.epsilon,
            "privacy/delta": self.delta,
            "privacy/guarantee": float(strength(guarantee.guarantee)),
            "labels/queried": float(counts["queried"]),
            "labels/answered": float(counts["answered"]),
        }
        metrics["labels/labelled"] = float(len(examples))
        if truth is not None and len(examples):
            right, known = truth[examples] == labels, truth[examples] >= 0
            new = ~torch.isin(examples, earlier)
            for name, rows in (("labels/accuracy", slice(None)), ("labels/accuracy_last_round", new)):
                if bool(known[rows].any()):
                    metrics[name] = float(right[rows][known[rows]].double().mean())
        return metrics


def stored_run_id(folder: Path) -> str | None:
    """The run whose labels a folder holds; None where it holds none."""
    return LabelStore.run_id_in(folder / LABELS)


def digest_of(public: PublicDataset) -> str:
    """SHA-256 of the public examples in their order: released labels belong to these alone."""
    digest = hashlib.sha256()
    for part in torch.arange(len(public)).split(_EXAMPLES_AT_ONCE):
        digest.update(public.images(part).contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


class ReportsRun(HasInitArguments, pl.Callback):
    """Reads a run's ledger and labels; part of :class:`~pl_privknn.callbacks.private_labeler.PrivateLabeler`."""

    labeler: Labeler | None
    features: list[RoundFeatures]
    max_epsilon: float | None
    released: str

    def __init__(self) -> None:
        self._run: LabelRun | None = None
        self._metrics: dict[str, float] = {}

    @property
    def epsilon(self) -> float:
        """The guarantee stated beforehand: ε of the ledger's worst case at this δ; 0 before the fit."""
        return self._metrics.get("privacy/epsilon", 0.0)

    @property
    def epsilon_spent(self) -> float:
        """ε of what was released in fact; for information, it is not a promise made beforehand."""
        return self._metrics.get("privacy/epsilon_spent", 0.0)

    @property
    def guarantee(self) -> Level:
        """The word beside :attr:`epsilon`; :meth:`report` has the reasons."""
        report = self.report(exact=False)
        return "unconditional" if report is None else report[0].guarantee

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged: ``privacy/…`` and ``labels/…``."""
        return dict(self._metrics)

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, once the fit has started, on the process that asks (global rank 0)."""
        return None if self._run is None else self._run.ledger

    def report(self, exact: bool = True) -> tuple[PrivacyReport, PrivacyReport] | None:
        """The guarantee and what was spent, or None before the fit; ``exact`` takes some seconds."""
        return None if self._run is None else self._run.reports(exact)

    def privacy_summary(self) -> dict[str, Any] | None:
        """What a report of the run says of its privacy, in plain types; None before the fit."""
        if self._run is None:
            return None
        report = self._run.ledger.report(self._run.delta, exact=True)
        return {
            **report.guarantee.to_dict(),
            **report.trade_off().to_dict(),
            "epsilon_spent": report.spent.epsilon,
            "max_epsilon": self.max_epsilon,
            **self.label_counts(),
            "label_accuracy": self.metrics.get("labels/accuracy"),
            "label_accuracy_last_round": self.metrics.get("labels/accuracy_last_round"),
            "labeler": type(self.labeler).__name__,
            "ledger_head": report.head,
            "run": self.run_id,
        }

    @property
    def folder(self) -> Path | None:
        """The run's folder, once the fit has started, on global rank 0."""
        return None if self._run is None else self._run.store.path.parent

    @property
    def run_id(self) -> str | None:
        """The run's lasting name in its ledger, once the fit has started, on global rank 0."""
        return None if self._run is None else self._run.run_id

    def label_counts(self) -> dict[str, int]:
        """Numbers of queries: queried, answered, refused, lost to a crash."""
        return {} if self._run is None else self._run.store.counts()

    def asked_examples(self) -> list[int]:
        """Public examples of all rounds so far, in the order in which they were asked."""
        if self._run is None:
            return []
        store = self._run.store
        return [example for index in range(store.rounds()) for example in store.selected(index) or []]
