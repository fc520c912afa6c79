"""One private training: its folder, its plan in the ledger, the steps that are left."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.accounting.calibration import CalibrationError
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger, charge_and_draw
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.mechanisms.base import noise_guarantee
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import PaidSteps, noise_for_steps, step_mechanism, steps_within
from pl_privknn.privacy.record_groups import group_costs
from pl_privknn.privacy.store import FolderLock, HeadFile, resumed_folder
from pl_privknn.training.correlated_noise import CorrelatedSteps
from pl_privknn.training.training_plan import TrainingPlan

#: Name of the run's own file, for each kind of training.
_FILES = {"NoisySGD": "noisy_sgd.json", "PrivateTraining": "private_training.json"}


def run_folder(
    chosen: Path | None, resumed: dict[str, Any] | None, checkpoint: str | Path | None, default: str | Path
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
        return chosen if chosen is not None else Path(default)
    return resumed_folder(
        Path(resumed["run_dir"]),
        checkpoint,
        lambda folder: any(
            _content(folder / name).get("run_id") == resumed["run_id"] for name in _FILES.values()
        ),
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
        kind: what trains: a class's name.
        max_epsilon: budget of the ledger, or None.
        stop_at_budget: where the plan does not fit the budget, plan as many steps as do fit.
        ledger_path: a ledger that several runs share, or None for the run's own.
        steps_per_charge: steps that are paid by one row.
        checkpoint: what :meth:`state` said when the checkpoint that is being resumed was written, or None.
        noise: the source that will draw; the plan says whether it is cryptographic.
        ledger_head_path: see :class:`~pl_privknn.privacy.ledger.Ledger`.

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
        *,
        kind: str,
        max_epsilon: float | None,
        stop_at_budget: bool,
        ledger_path: Path | None,
        steps_per_charge: int,
        checkpoint: dict[str, Any] | None,
        noise: NoiseSource,
        ledger_head_path: Path | None = None,
    ) -> None:
        self.folder, self.plan, self.kind = folder, plan, kind
        self._file = folder / _FILES[kind]
        self._noise_mark = noise_guarantee(noise)
        self._lock = FolderLock(folder)
        try:
            self._open(
                max_epsilon, stop_at_budget, ledger_path, ledger_head_path, steps_per_charge, checkpoint
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another run use the folder; the ledger stays readable for reports."""
        self._lock.release()

    def _open(
        self,
        max_epsilon: float | None,
        stop_at_budget: bool,
        ledger_path: Path | None,
        ledger_head_path: Path | None,
        steps_per_charge: int,
        checkpoint: dict[str, Any] | None,
    ) -> None:
        folder, plan = self.folder, self.plan
        found = self._read(checkpoint)
        path = ledger_path or folder / "ledger.sqlite"
        if found and not path.exists():
            raise FileNotFoundError(
                f"the ledger {path} of this run is missing; without it ε would be wrong. Restore it, or pass "
                "ledger_path with its place"
            )
        self.run_id: str = found.get("run_id") or uuid.uuid4().hex
        self.noise_multiplier: float = found.get("noise_multiplier") or self._noise()
        self.mechanism: Gaussian = step_mechanism(self.noise_multiplier, plan.clip_norm, plan.sampling_rate)
        self.ledger = Ledger(path, delta=plan.delta, max_epsilon=max_epsilon, head_path=ledger_head_path)
        noted = HeadFile(folder / "ledger.head")
        if found and noted.head is not None:
            self.ledger.check_head(noted.head, str(noted.path))
        self.ledger.witness(noted.note)
        if not found:
            self.planned = self._state_plan(stop_at_budget and max_epsilon is not None)
            self._write()
        else:
            self.planned = int(found["planned"])
        self._run = self.ledger.run(self.run_id)
        before = self.charged
        self._check_progress(checkpoint, before)
        left, correlated = max(0, self.planned - before), plan.correlated_noise
        self.steps = (
            PaidSteps(self._run, self.mechanism, left, steps_per_charge)
            if correlated is None
            else CorrelatedSteps(self._run, self.mechanism, left, steps_per_charge, correlated)
        )
        #: Steps that were paid for and are not in the weights that training starts from.
        self.lost = before - (checkpoint["done"] if checkpoint is not None else 0)

    @property
    def charged(self) -> int:
        """Steps that this run has paid for."""
        charges = self._run.report().charged if self._run.num_charges else ()
        releases = sum(charge.count for charge in charges if charge.mechanism == self.mechanism)
        return self.plan.steps_of(releases, self.planned)

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

    def release_counts(self, counts: Tensor, noise: NoiseSource) -> Tensor:
        """Pay for the counts that an accuracy is made of, then add their noise.

        Args:
            counts: int64 ``(2,)``.
            noise: source of the noise.

        Raises:
            BudgetExceeded: from the ledger; nothing was drawn.
        """
        assert self.plan.accuracy is not None
        mechanism = self.plan.accuracy.mechanism
        return mechanism.add_noise(
            counts, charge_and_draw(self._run, noise, mechanism, 1, "accuracy", ("add_remove",))
        )

    def told(self) -> dict[str, Any]:
        """What other processes of the same training have to know of it."""
        return {
            "planned": self.planned,
            "noise_multiplier": self.noise_multiplier,
            "num_charges": self.num_charges,
            "lost": self.lost,
            "left": self.steps.left,
            "reports": self.reports(),
        }

    def reports(self, exact: bool = False) -> tuple[PrivacyReport, PrivacyReport]:
        """The guarantee stated beforehand and what was spent, of the whole ledger at this run's δ."""
        report = self.ledger.report(delta=self.plan.delta, exact=exact)
        return report.guarantee, report.spent

    def summary(self) -> dict[str, Any]:
        """What a report of the run says of its privacy, in plain types."""
        report = self.ledger.report(delta=self.plan.delta, exact=True)
        return {
            **report.guarantee.to_dict(),
            **report.trade_off().to_dict(),
            "epsilon_spent": report.spent.epsilon,
            "max_epsilon": self.ledger.max_epsilon,
            "steps": self.charged,
            "steps_planned": self.planned,
            "sampling_rate": self.plan.sampling_rate,
            "batch_size": self.plan.batch_size,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.plan.clip_norm,
            **({} if self.plan.correlated_noise is None else {"bands": self.plan.correlated_noise.bands}),
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
        others = plan.accuracies(plan.steps)
        releases = plan.releases(plan.steps)
        return noise_for_steps(plan.target_epsilon, plan.delta, plan.sampling_rate, releases, others)

    def _state_plan(self, stop_at_budget: bool) -> int:
        description = {"training": self.kind, **self.plan.described()}
        charges = self.plan.charges(self.mechanism, self.plan.steps)
        description |= self._of_groups(charges, self.plan.steps)  # the ledger's own ε is the largest group's

        def state(steps: int) -> int:
            charges = self.plan.charges(self.mechanism, steps)
            marked = [dataclasses.replace(charge, mark=self._noise_mark) for charge in charges]
            self.ledger.run(self.run_id, marked, description)
            return steps

        try:
            return state(self.plan.steps)
        except BudgetExceeded as refused:
            if not stop_at_budget:
                raise
            assert self.ledger.max_epsilon is not None
            others = [*self.ledger.report().guaranteed, *self.plan.accuracies(self.plan.steps)]
            try:
                most = self.plan.releases(self.plan.steps)
                fitting = steps_within(
                    self.mechanism, most, self.ledger.max_epsilon, self.ledger.delta, others
                )
            except CalibrationError:
                raise refused from None
            return state(self.plan.steps_of(fitting, self.plan.steps))

    def _read(self, checkpoint: dict[str, Any] | None) -> dict[str, Any]:
        found = _content(self._file)
        if checkpoint is not None and found.get("run_id") != checkpoint["run_id"]:
            raise ValueError(
                f"run_dir={str(self.folder)!r} holds run {found.get('run_id')}, the checkpoint belongs to run "
                f"{checkpoint['run_id']}; pass the folder of the checkpoint's run"
            )
        if not found:
            return {}
        wanted = {**dataclasses.asdict(self.plan), **self.plan.described()}
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
            "plan": self.plan.described(),
            "noise_multiplier": self.noise_multiplier,
            "planned": self.planned,
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
