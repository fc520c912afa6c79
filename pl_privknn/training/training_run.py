"""One private training: its plan, its folder, its rows in the ledger, the steps that are left."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pl_privknn.privacy.accounting.accountant import PrivacyReport, epsilon_for_delta
from pl_privknn.privacy.accounting.calibration import CalibrationError
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, NoNoise
from pl_privknn.privacy.mechanisms.base import Guarantee, Unit, noise_guarantee
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import (
    PaidSteps,
    StepMechanism,
    noise_for_steps,
    step_mechanism,
    steps_within,
)
from pl_privknn.privacy.record_groups import group_costs
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.privacy.store import FolderLock, HeadFile, resumed_folder
from pl_privknn.training.processes import FollowedRun, FollowedSteps

_FILE = "private_training.json"


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Public request of a training, before anything is known of the budget.

    Attributes:
        steps: number of steps, known beforehand.
        sampling_rate: Poisson rate of a step.
        expected_batch_size: what the noisy sum of gradients is divided by.
        max_grad_norm: bound of each record's gradient.
        delta: δ of the guarantee.
        noise_multiplier: noise over ``max_grad_norm``, 0 for none; None where ``target_epsilon`` decides.
        target_epsilon: ε that all steps together may cost, or None.
        rates: of groups of records, the largest of which is ``sampling_rate``; None where all have that one.
        step: how records go through the module: ``"traced"``, ``"copies"``, ``"ghost"`` or ``"layers"``.
        conditions: what the guarantee rests on, or None.
        unit: unit of privacy.
        records_per_person: most records of a person in a step, where the unit is a person.
    """

    steps: int
    sampling_rate: float
    expected_batch_size: int
    max_grad_norm: float
    delta: float
    noise_multiplier: float | None
    target_epsilon: float | None
    rates: list[float] | None = None
    step: str = "traced"
    conditions: list[str] | None = None
    unit: Unit = "record"
    records_per_person: int | None = None

    def described(self) -> dict[str, Any]:
        """In plain types, without what was not asked for."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def run_folder(
    chosen: str | Path | None,
    resumed: dict[str, Any] | None,
    checkpoint: str | Path | None,
    default: str | Path,
) -> Path:
    """The run's folder: the chosen one, that of the checkpoint which is being resumed, or the default.

    Args:
        chosen: by the user, or None.
        resumed: what :meth:`TrainingRun.state` said when the checkpoint was written, or None.
        checkpoint: the checkpoint's file.
        default: for a new run.

    Raises:
        FileNotFoundError: if the checkpoint's folder is gone.
    """
    if chosen is not None or resumed is None:
        return Path(default if chosen is None else chosen)
    return resumed_folder(
        Path(resumed["run_dir"]),
        checkpoint,
        lambda folder: _content(folder / _FILE).get("run_id") == resumed["run_id"],
    )


def _content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


class TrainingRun:
    """Opens, or continues, a training in a folder and states its plan in the ledger.

    The plan is the guarantee. Steps are charged before their noise is drawn; what a crash wastes is taken from
    the steps that are left, so ε never grows beyond the plan and never falls below what was drawn.

    Args:
        folder: the run's folder.
        plan: what is asked for.
        checkpoint: what :meth:`state` said when the checkpoint that is being resumed was written, or None.
        kind: what trains, for messages and the ledger: a class's name.
        files: where the ledger is.
        limit: budget of the ledger; without groups, training ends before it is passed.
        noise: the source that will draw.
        steps_per_charge: steps paid by one row of the ledger.

    Raises:
        BudgetExceeded: if the plan does not fit the budget; nothing was drawn.
        FolderInUse: if another run has the folder.
        LedgerCorrupt: if the ledger is older than this run's last charge.
        FileNotFoundError: if the ledger of a run that has begun is missing.
        ValueError: if the folder holds a run with other parameters, or one with no step left that no
            checkpoint continues.
    """

    def __init__(
        self,
        folder: Path,
        plan: TrainingPlan,
        checkpoint: dict[str, Any] | None,
        *,
        kind: str,
        files: RunFiles,
        limit: float | None,
        noise: NoiseSource,
        steps_per_charge: int,
    ) -> None:
        self.folder, self.plan, self.kind = folder, plan, kind
        self._file = folder / _FILE
        self._mark = guarantee_of(plan.conditions, noise)
        self._lock = FolderLock(folder)
        try:
            self._open(files, limit, checkpoint)
            before = self.charged
            self._check_progress(checkpoint, before)
        except BaseException:
            self.close()
            raise
        left = max(0, self.planned - before)
        self.steps = PaidSteps(self._run, self.mechanism, left, steps_per_charge, plan.unit)
        #: Steps that were paid for and are not in the weights that training starts from.
        self.lost = before - (checkpoint["done"] if checkpoint is not None else 0)

    def close(self) -> None:
        """Let another run use the folder; the ledger stays readable for reports."""
        self._lock.release()

    def _open(self, files: RunFiles, limit: float | None, checkpoint: dict[str, Any] | None) -> None:
        folder, plan = self.folder, self.plan
        found = self._read(checkpoint)
        path = Path(files.ledger_path or folder / "ledger.sqlite")
        self._stated = bool(found.get("stated"))
        if self._stated and not path.exists():
            raise FileNotFoundError(
                f"the ledger {path} of this run is missing; without it ε would be wrong. Restore it, or pass "
                "ledger_path with its place"
            )
        self.run_id: str = found.get("run_id") or uuid.uuid4().hex
        self.noise_multiplier: float = found.get("noise_multiplier") or self._noise()
        self.mechanism = mechanism_of(self.noise_multiplier, plan.max_grad_norm, plan.sampling_rate)
        self.ledger = Ledger(
            path,
            delta=plan.delta,
            max_epsilon=limit,
            head_path=files.ledger_head_path,
            unit=plan.unit,
        )
        noted = HeadFile(folder / "ledger.head")
        if self._stated and noted.head is not None:
            self.ledger.check_head(noted.head, str(noted.path))
        self.ledger.witness(noted.note)
        if not found:
            self.planned = self._steps_within(limit is not None and plan.rates is None)
            # The run has its name on disk before it is in the ledger: a kill in between states no second plan.
            self._write()
        else:
            self.planned = int(found["planned"])
        if not self._stated:
            try:
                self._state_plan()
            except BudgetExceeded:
                self._file.unlink()
                raise
            self._stated = True
            self._write()
        self._run = self.ledger.run(self.run_id)

    @property
    def charged(self) -> int:
        """Steps that this run has paid for."""
        charges = self._run.report().charged if self._run.num_charges else ()
        return sum(charge.count for charge in charges if charge.mechanism == self.mechanism)

    @property
    def num_charges(self) -> int:
        """Rows that this run has paid."""
        return self._run.num_charges

    def state(self) -> dict[str, Any]:
        """For a checkpoint: where the run's folder is and how far it came."""
        return {
            "run_id": self.run_id,
            "run_dir": str(self.folder),
            "charged": self.charged,
            "done": self.planned - self.steps.left - self.lost,
        }

    def told(self) -> FollowedRun:
        """Facts that other processes of the same training need."""
        steps = FollowedSteps(self.steps.left)
        return FollowedRun(
            self.planned, self.noise_multiplier, self.num_charges, self.lost, steps, self.reports()
        )

    def reports(self, exact: bool = False) -> tuple[PrivacyReport, PrivacyReport]:
        """The guarantee stated beforehand and what was spent, of the whole ledger at this run's δ."""
        report = self.ledger.report(delta=self.plan.delta, exact=exact)
        return report.guarantee, report.spent

    def summary(self) -> dict[str, Any]:
        """Privacy figures of the run for a summary, in plain types."""
        report = self.ledger.report(delta=self.plan.delta, exact=True)
        return {
            **report.guarantee.to_dict(),
            **report.trade_off().to_dict(),
            "epsilon_spent": report.spent.epsilon,
            "max_epsilon": self.ledger.max_epsilon,
            "steps": self.charged,
            "steps_planned": self.planned,
            "sampling_rate": self.plan.sampling_rate,
            "expected_batch_size": self.plan.expected_batch_size,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.plan.max_grad_norm,
            "step": self.plan.step,
            **self._of_groups(report.guaranteed, self.planned),
            "ledger_head": report.head,
            "run": self.run_id,
        }

    def _of_groups(self, charges: Sequence[Charge], steps: int) -> dict[str, Any]:
        if (rates := self.plan.rates) is None:
            return {}
        costs = group_costs(rates, Charge(self.mechanism, steps), charges, self.plan.delta)
        return {"epsilon_of_groups": costs, "rate_of_groups": rates}

    def _noise(self) -> float:
        plan = self.plan
        if plan.noise_multiplier is not None:
            return plan.noise_multiplier
        assert plan.target_epsilon is not None
        return noise_for_steps(plan.target_epsilon, plan.delta, plan.sampling_rate, plan.steps)

    def _state_plan(self) -> None:
        description = {"training": self.kind, **self.plan.described()}
        charge = Charge(self.mechanism, self.planned)
        description |= self._of_groups([charge], self.planned)  # the ledger's own ε is the largest group's
        self.ledger.run(self.run_id, [charge.with_guarantee(self._mark)], description)

    def _steps_within(self, stop_at_budget: bool) -> int:
        """Number of steps that fit the budget, where fewer will do; all of them otherwise."""
        steps, ledger = self.plan.steps, self.ledger
        if not stop_at_budget:
            return steps
        granted = [*ledger.report().guaranteed]
        assert ledger.max_epsilon is not None
        if epsilon_for_delta([*granted, Charge(self.mechanism, steps)], ledger.delta) <= ledger.max_epsilon:
            return steps
        try:
            return steps_within(self.mechanism, steps, ledger.max_epsilon, ledger.delta, granted)
        except CalibrationError:
            return steps  # the ledger refuses them, with its reason

    def _read(self, checkpoint: dict[str, Any] | None) -> dict[str, Any]:
        found = _content(self._file)
        if checkpoint is not None and found.get("run_id") != checkpoint["run_id"]:
            raise ValueError(
                f"run_dir={str(self.folder)!r} holds run {found.get('run_id')}, the checkpoint belongs to run "
                f"{checkpoint['run_id']}; pass the folder of the checkpoint's run"
            )
        if not found:
            return {}
        wanted = dataclasses.asdict(self.plan)
        if changes := [
            f"{'epsilon' if name == 'target_epsilon' else name}={found['plan'].get(name)!r} then, {value!r} now"
            for name, value in wanted.items()
            if found["plan"].get(name) != value
        ]:
            raise ValueError(
                f"{self.folder} holds a training with other parameters ({'; '.join(changes)}), and ε was stated "
                "for those. Repeat it with its own parameters (the trainer's epochs give the steps) to continue "
                "it, or choose another folder"
            )
        return found

    def _write(self) -> None:
        content = {
            "run_id": self.run_id,
            "training": self.kind,
            "plan": self.plan.described(),
            "noise_multiplier": self.noise_multiplier,
            "planned": self.planned,
            "stated": self._stated,
        }
        write_durably(self._file, (json.dumps(content, indent=2) + "\n").encode())

    def _check_progress(self, checkpoint: dict[str, Any] | None, charged: int) -> None:
        if checkpoint is not None and charged < checkpoint["charged"]:
            raise ValueError(
                f"the ledger {self.ledger.path} holds {charged} paid steps, the checkpoint was written "
                f"after {checkpoint['charged']}: it is an older copy. Restore the ledger of this run"
            )
        if checkpoint is None and charged >= self.planned:
            raise ValueError(
                f"run_dir={str(self.folder)!r}: all {self.planned} steps of this training are paid for, and no "
                "checkpoint continues it. Resume from its checkpoint, or choose another folder for a new "
                "training, which costs anew"
            )


def mechanism_of(noise_multiplier: float, max_grad_norm: float, sampling_rate: float) -> StepMechanism:
    """The release of one step; without noise where the multiplier is 0, which an infinite ε asks for."""
    if noise_multiplier == 0:
        return NoNoise()
    return step_mechanism(noise_multiplier, max_grad_norm, sampling_rate)


def guarantee_of(conditions: Sequence[str] | None, noise: NoiseSource) -> Guarantee:
    """The guarantee of a training's releases.

    Args:
        conditions: what it rests on.
        noise: the source of coins and noise.
    """
    mark = noise_guarantee(noise)
    return mark & Guarantee("conditional", tuple(conditions)) if conditions else mark
