"""One private training: plan, folder, ledger rows and remaining steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_path, check_switch
from pl_privknn._lightning import rank_zero_info
from pl_privknn._processes import ProcessGroup
from pl_privknn.privacy.accounting.accountant import PrivacyReport, epsilon_for_delta
from pl_privknn.privacy.accounting.calibration import CalibrationError
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import resumed_folder, trainers_folder
from pl_privknn.privacy.mechanisms.base import Charge, Guarantee, Unit, noise_guarantee
from pl_privknn.privacy.mechanisms.stated import NoNoise
from pl_privknn.privacy.mechanisms.steps import (
    PaidSteps,
    StepMechanism,
    noise_for_steps,
    step_mechanism,
    steps_within,
)
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.run import Run, run_id_in

# Checkpoint of an interrupted training, in the run's folder.
_INTERRUPTED = "interrupted.ckpt"
STEPS = ("auto", "traced")


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Rarely used settings of a private training.

    Args:
        ledger_path: a ledger that several runs over the same private data share; by default the run's own, in its
            folder.
        step: ``"auto"``; or ``"traced"``, which refuses a module whose step can't be traced. With ``"auto"`` such a
            step runs on one record after another, each with a fresh copy of the module, and the guarantee is
            conditional: the step must keep nothing of a record outside of the module.
        augment: makes views of one image, given as ``views`` copies ``(views, channels, height, width)``, at random
            as it likes. An example's gradient is then the mean over its views, clipped as one, which costs no more
            privacy (augmentation multiplicity: De et al. 2022).
        views: number of views of an example in a step.
        physical_batch_size: records at once; bounds memory and changes nothing else.
        reads_alone: state that reading a record uses that record alone, for data sets and collate functions that are
            not this package's: a data set that mixes records (mixup) or remembers some does not. Without it the
            guarantee has this as a condition.
        example: a public or invented record, as the data set gives them, for data sets that are not one table of
            tensors: the step is traced and tried with its structure (shapes, types, keys). Without it the structure
            of the first private record is used, which the guarantee then has as a condition.
        records_per_person: most records of a drawn person that take part in a step, drawn by private coins.
        steps_per_charge: most steps paid by one row of the ledger; the first rows pay for one, two, four … A crash
            wastes at most one row.
        noise_source: of coins and noise; the operating system's generator by default. Seeded ones are for tests and
            benchmarks and protect nothing.

    Raises:
        ValueError: for an argument out of its range, and several views without ``augment``.

    Example:
        >>> from pl_privknn.training import TrainingOptions
        >>> TrainingOptions(physical_batch_size=4096, records_per_person=2).records_per_person
        2
    """

    ledger_path: str | Path | None = None
    step: str = "auto"
    augment: Callable[[Tensor], Tensor] | None = None
    views: int = 1
    physical_batch_size: int | None = None
    reads_alone: bool = False
    example: Any = dataclasses.field(default=None, compare=False, repr=False)
    records_per_person: int = 1
    steps_per_charge: int = 20
    noise_source: NoiseSource | None = None

    def __post_init__(self) -> None:
        if self.ledger_path is not None:  # checkpoints hold plain types alone
            object.__setattr__(self, "ledger_path", check_path("ledger_path", self.ledger_path))
        check_choice("step", self.step, STEPS)
        for name in ("views", "records_per_person", "steps_per_charge"):
            check_int(name, getattr(self, name))
        if self.physical_batch_size is not None:
            check_int("physical_batch_size", self.physical_batch_size)
        check_switch("reads_alone", self.reads_alone)
        if self.views > 1 and self.augment is None:
            raise ValueError(
                f"views={self.views}: without augment they would all be the same; give augment, or views=1"
            )


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Public parameters of a training, as requested, before the budget is applied.

    Attributes:
        steps: number of steps, known beforehand.
        sampling_rate: Poisson rate of a step.
        expected_batch_size: what the noisy sum of gradients is divided by.
        max_grad_norm: bound of each record's gradient.
        delta: δ of the guarantee.
        noise_multiplier: noise over ``max_grad_norm``, 0 for none; None where ``epsilon`` decides.
        epsilon: ε that all steps together may cost, or None.
        step: how records go through the module: ``"traced"``, ``"copies"`` or ``"layers"``.
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
    epsilon: float | None
    step: str = "traced"
    conditions: list[str] | None = None
    unit: Unit = "record"
    records_per_person: int | None = None

    def described(self) -> dict[str, Any]:
        """The plan as plain types, without unset fields."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def run_folder(
    chosen: str | Path | None,
    resumed: dict[str, Any] | None,
    checkpoint: str | Path | None,
    default: str | Path,
) -> Path:
    """Folder of the run: the chosen one, the resumed checkpoint's, or the default.

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
    return resumed_folder(resumed, checkpoint, run_id_in)


class TrainingRun(Run):
    """Training in a folder, opened or continued; see :class:`~pl_privknn.privacy.run.Run`.

    The plan is the guarantee. Steps are charged before their noise is drawn; what a crash wastes is taken from
    the steps that are left, so ε never grows beyond the plan and never falls below what was drawn.

    Args:
        folder: the run's folder.
        asked: what is asked for.
        checkpoint: what :meth:`state` said when the checkpoint that is being resumed was written, or None.
        class_name: class of the training, for messages and the ledger.
        ledger_path: a ledger that several runs share, or None.
        limit: budget of the ledger; training ends before it is exceeded.
        noise: the source that will draw.

    Attributes:
        left: steps that were not paid when it was opened.
        lost: steps that were paid for and are not in the weights that training starts from.
        steps: the steps of this process; set by the training.

    Raises:
        ValueError: if the folder holds a run with no step left that no checkpoint continues; for others see ``Run``.
    """

    steps: PaidSteps

    def __init__(
        self,
        folder: Path,
        asked: TrainingPlan,
        checkpoint: dict[str, Any] | None,
        *,
        class_name: str,
        ledger_path: str | Path | None,
        limit: float | None,
        noise: NoiseSource,
    ) -> None:
        self.asked, self._class_name, self._checkpoint = asked, class_name, checkpoint
        self._mark = training_guarantee(asked.conditions, noise)
        super().__init__(
            folder,
            asked.described(),
            checkpoint,
            budget=Budget(limit, asked.delta, unit=asked.unit),
            ledger_path=ledger_path,
        )
        before = self.charged
        self.left = max(0, self.planned - before)
        self.lost = before - (checkpoint["done"] if checkpoint is not None else 0)

    def plan(self) -> tuple[Sequence[Charge], dict[str, Any]]:
        """Plan of all steps, fixed when the run begins: noise, and as many steps as fit the budget."""
        decided = None if self.is_new else self.file.fact("decided")
        self.noise_multiplier: float = self._noise() if decided is None else decided["noise_multiplier"]
        self.mechanism = mechanism_of(
            self.noise_multiplier, self.asked.max_grad_norm, self.asked.sampling_rate
        )
        if decided is None:
            decided = {"noise_multiplier": self.noise_multiplier, "planned": self._steps_within()}
            self.file.note("decided", decided)
        self.planned: int = decided["planned"]
        self._check_progress()
        charge = Charge(self.mechanism, self.planned)
        description = {"training": self._class_name, **self.asked.described()}
        return [charge.with_guarantee(self._mark)], description

    @property
    def charged(self) -> int:
        """Steps that this run has paid for."""
        charges = self.ledger_run.report().charged if self.num_charges else ()
        return sum(charge.count for charge in charges if charge.mechanism == self.mechanism)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the run, its folder and progress."""
        return {**super().state(), "done": self.planned - self.steps.left - self.lost}

    def save_interrupted(self, trainer: Any) -> None:
        """Save a checkpoint that continues after the steps that were paid for, whole or not at all."""
        path, part = self.folder / _INTERRUPTED, self.folder / f"{_INTERRUPTED}.part"
        try:
            trainer.save_checkpoint(part)
            part.replace(path)
        except Exception as error:  # as where the disk is full
            part.unlink(missing_ok=True)
            rank_zero_info(
                f"no checkpoint of the interrupted training could be saved: {type(error).__name__}"
            )
        else:
            rank_zero_info(f"interrupted; continue the training with ckpt_path={str(path)!r}")

    def followed(self) -> FollowedRun:
        """Facts of the run for the other processes of the training."""
        return FollowedRun(
            self.planned, self.left, self.lost, self.noise_multiplier, self.mechanism, self.reports()
        )

    def summary(self) -> dict[str, Any]:
        """Privacy figures of the run for a summary, in plain types."""
        return {
            **super().summary(),
            "steps": self.charged,
            "steps_planned": self.planned,
            "sampling_rate": self.asked.sampling_rate,
            "expected_batch_size": self.asked.expected_batch_size,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.asked.max_grad_norm,
            "step": self.asked.step,
        }

    def _noise(self) -> float:
        plan = self.asked
        if plan.noise_multiplier is not None:
            return plan.noise_multiplier
        assert plan.epsilon is not None
        return noise_for_steps(plan.epsilon, plan.delta, plan.sampling_rate, plan.steps)

    def _steps_within(self) -> int:
        """Number of steps that fit the budget, where fewer will do; all of them otherwise."""
        steps, ledger, budget = self.asked.steps, self.ledger, self.ledger.budget
        if budget.epsilon is None:
            return steps
        granted = [*ledger.report().guaranteed]
        if epsilon_for_delta([*granted, Charge(self.mechanism, steps)], budget.delta) <= budget.epsilon:
            return steps
        try:
            return steps_within(self.mechanism, steps, budget.epsilon, budget.delta, granted)
        except CalibrationError:
            return steps  # the ledger refuses them, with its reason

    def _check_progress(self) -> None:
        if self._checkpoint is None and self.charged >= self.planned:
            raise ValueError(
                f"run_dir={str(self.folder)!r}: all {self.planned} steps of this training are paid for, and no "
                "checkpoint continues it. Resume from its checkpoint, or choose another folder for a new "
                "training, which is charged again"
            )


def opened_run(
    training: Any, trainer: Any, checkpoint: dict[str, Any] | None, processes: ProcessGroup
) -> TrainingRun | FollowedRun:
    """State the plan of a training in the ledger, or continue an interrupted run; one run for all processes.

    Args:
        training: a :class:`~pl_privknn.training.private_training.PrivateTraining`.
        trainer: of the fit.
        checkpoint: what the checkpoint that is being resumed says of its run, or None.
        processes: of the training.

    Raises:
        BudgetExceeded: if the plan does not fit the budget; nothing was drawn.
        ValueError: where the trainer says no number of steps; see also :class:`TrainingRun`.
    """
    steps, options, unit = trainer.estimated_stepping_batches, training.options, training.unit
    if not math.isfinite(steps):
        raise ValueError(
            f"max_epochs={trainer.max_epochs}: the number of steps is part of the guarantee; set max_epochs or "
            "max_steps of the trainer"
        )
    plan = TrainingPlan(
        steps=check_int("steps", steps),
        sampling_rate=training.sampling_rate,
        expected_batch_size=training.expected_batch_size,
        max_grad_norm=training.max_grad_norm,
        delta=training.delta,
        noise_multiplier=training.noise_multiplier,
        epsilon=training.budget.epsilon if training.noise_multiplier is None else None,
        step=training.way,
        conditions=list(training.conditions) or None,
        unit=unit,
        records_per_person=options.records_per_person if unit == "person" else None,
    )
    chosen = training.asked_dir
    place = trainer.log_dir or trainer.default_root_dir  # asked for by all processes together
    opened: list[TrainingRun] = []

    def open_run() -> FollowedRun:
        name = type(trainer.lightning_module).__name__
        default = trainers_folder(trainer, place, name) if chosen is None and checkpoint is None else place
        run = TrainingRun(
            run_folder(chosen, checkpoint, trainer.ckpt_path, default),
            plan,
            checkpoint,
            class_name=training.class_name,
            ledger_path=options.ledger_path,
            limit=training.limit,
            noise=training.noise_source,
        )
        opened.append(run)
        rank_zero_info(f"run: {run.folder}")
        return run.followed()

    followed = processes.from_first(open_run)
    run = opened[0] if opened else followed
    most = options.steps_per_charge
    run.steps = PaidSteps(run.ledger_run, run.mechanism, run.left, most, unit, processes)
    if run.lost:
        rank_zero_info(f"{run.lost} charged steps were lost; the training has that many fewer")
    return run


def epochs_of(trainer: Any, steps_per_epoch: int) -> int:
    """Number of epochs that a trainer will begin; 0 where it says none."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    known = [] if epochs in (None, -1) else [epochs]
    return min([*known, -(-steps // steps_per_epoch)] if steps > 0 else known, default=0)


def mechanism_of(noise_multiplier: float, max_grad_norm: float, sampling_rate: float) -> StepMechanism:
    """Mechanism of one step; without noise where the multiplier is 0, as for an infinite ε."""
    if noise_multiplier == 0:
        return NoNoise()
    return step_mechanism(noise_multiplier, max_grad_norm, sampling_rate)


def training_guarantee(conditions: Sequence[str] | None, noise: NoiseSource) -> Guarantee:
    """Guarantee level of a training's releases.

    Args:
        conditions: what it rests on.
        noise: the source of coins and noise.
    """
    guarantee = noise_guarantee(noise)
    return guarantee & Guarantee("conditional", tuple(conditions)) if conditions else guarantee


@dataclasses.dataclass
class FollowedRun:
    """Facts of a training that the first process, which has the ledger, sends to the others.

    Attributes:
        planned: number of steps that the guarantee covers.
        left: those that were left when this process joined.
        lost: paid steps that are not in the weights.
        noise_multiplier: noise over the clipping norm.
        mechanism: of one step.
        last_reports: the guarantee and the spent budget, as received last.
    """

    planned: int
    left: int
    lost: int
    noise_multiplier: float
    mechanism: StepMechanism
    last_reports: tuple[PrivacyReport, PrivacyReport]
    steps: PaidSteps = dataclasses.field(init=False)

    ledger = ledger_run = folder = None

    def reports(self, exact: bool | None = None) -> tuple[PrivacyReport, PrivacyReport]:
        """Guarantee and spent budget, as received from the first process."""
        return self.last_reports

    def summary(self) -> None:
        """None: only the first process has the ledger of a summary."""

    def state(self) -> dict[str, Any]:
        """Empty: only the first process's checkpoint is written."""
        return {}

    def close(self) -> None:
        """Do nothing: no file is open."""
