"""The books of one labelling run: its plan in the ledger, its released labels, its figures."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn.callbacks.label_store import LabelStore
from pl_privknn.privacy.accountant import PrivacyReport
from pl_privknn.privacy.guarantee import strength
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Adjacency, Charge


class LabelRun:
    """Opens, or continues, the books of a run in a folder and states its worst case in the ledger.

    Args:
        folder: the run's folder; holds ``labels.sqlite`` and, unless given elsewhere, ``ledger.sqlite``.
        plan: the most that all rounds can cost.
        public_examples: size of the public set.
        num_classes: number of classes.
        delta: δ of the guarantee.
        max_epsilon: budget, or None.
        adjacency: neighbouring relation.
        ledger_path: a ledger that several runs share, or None for the run's own.
        run_id: the run that a checkpoint belongs to, or None.
        description: public facts about the run, for the reader of the ledger.

    Raises:
        LabelStoreError: if the folder holds a run with other parameters.
        BudgetExceeded: if the plan does not fit the budget; nothing was asked.
        FileNotFoundError: if the ledger of a run that has begun is missing.
        ValueError: if the folder holds another run than ``run_id``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        plan: Sequence[Charge],
        public_examples: int,
        num_classes: int,
        delta: float,
        max_epsilon: float | None,
        adjacency: Adjacency,
        ledger_path: Path | None,
        run_id: str | None,
        description: dict[str, Any],
    ) -> None:
        self.delta = delta
        self.store = LabelStore(
            folder / "labels.sqlite",
            {
                # As it is without marks: what they say of the noise is in the ledger, and never stops a resume.
                "plan": [Charge(charge.mechanism, charge.count).to_record() for charge in plan],
                "delta": delta,
                "adjacency": adjacency,
                "public_examples": public_examples,
                "num_classes": num_classes,
            },
        )
        stored = self.store.get_meta("run_id")
        if run_id is not None and stored != run_id:
            raise ValueError(
                f"run_dir={str(folder)!r} holds run {stored}, the checkpoint belongs to run {run_id}; "
                "pass the folder of the checkpoint's run"
            )
        self.run_id: str = stored or uuid.uuid4().hex
        path = ledger_path or folder / "ledger.sqlite"
        if self.store.get_meta("planned") and not path.exists():
            raise FileNotFoundError(
                f"the ledger {path} of this run is missing; without it ε would be wrong. Restore it, or pass "
                "ledger_path with its place"
            )
        self.store.set_meta("run_id", self.run_id)
        self.ledger = Ledger(path, adjacency=adjacency, delta=delta, max_epsilon=max_epsilon)
        self.ledger_run = self.ledger.run(self.run_id, plan=plan, description=description)
        self.store.set_meta("planned", True)

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
