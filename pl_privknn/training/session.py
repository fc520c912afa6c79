"""Steps of a private training except its gradients: Poisson samples, the plan in the ledger, noise, the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_path, check_switch
from pl_privknn._lightning import rank_zero_info
from pl_privknn._processes import ProcessGroup
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.folders import trainers_folder
from pl_privknn.privacy.holdout import PaidEvaluation, held_out
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.mechanisms.steps import (
    noise_for_steps,
    poisson_persons,
    poisson_sample,
    steps_within,
)
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.settings import Budget
from pl_privknn.training.gradients import STEPS
from pl_privknn.training.records import PrivateData
from pl_privknn.training.training_run import (
    FollowedRun,
    TrainingPlan,
    TrainingRun,
    mechanism_of,
    run_folder,
    training_guarantee,
)

# Of a fit alone: a copy holds none of them.
_OF_A_FIT = dict.fromkeys(("run", "private", "_processes", "_owners"))


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Rarely used settings of a private training.

    Args:
        ledger_path: a ledger that several runs over the same private data share; by default ``ledger.sqlite`` in the
            run's folder.
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
        steps_per_charge: steps paid by one row of the ledger; a crash wastes at most so many.
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


class PrivateSession:
    """Base class of a private training in a trainer, independent of how its gradients are computed.

    With several processes each draws samples of its share of the records; the first one sums up what they
    clipped, pays, and draws the noise once. ε is that of one process.

    Attributes:
        kind: what trains, for messages and the ledger: a class's name.
        budget: of all steps together; with ``noise_multiplier``, training ends before ε is exceeded.
        noise_multiplier: noise over the clipping norm; None where ε decides.
        max_grad_norm: bound of each record's gradient.
        expected_batch_size: what the noisy sum of gradients is divided by.
        sampling_rate: Poisson rate of a step.
        options: rarely used settings.
        noise_source: of coins and noise.
        run: the training in its folder, once the fit has started; in all processes but the first, the facts received.
        private: the records, during the fit; None in a ``fast_dev_run``.
        conditions: what the guarantee rests on.
        way: how records go through the module, once that is known.
        loaded: what a checkpoint that is being resumed says of its run, until the fit starts.
    """

    kind: str
    budget: Budget
    noise_multiplier: float | None
    max_grad_norm: float
    expected_batch_size: int
    sampling_rate: float
    options: TrainingOptions
    noise_source: NoiseSource
    _run_dir: Path | None

    def __init__(self) -> None:
        self.conditions: tuple[str, ...] = ()
        self.way = "traced"
        self.loaded: dict[str, Any] | None = None
        self.__dict__.update(_OF_A_FIT)
        self._sent_row = 0  # the last row that was sent to other processes

    run: TrainingRun | FollowedRun | None
    private: PrivateData | None
    _processes: ProcessGroup | None
    _owners: Tensor | None  # of this process's records, where the unit is a person

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy, without private records and open ledger."""
        return {**self.__dict__, **_OF_A_FIT}

    def draw_from(self, source: Any, trainer: Any, owners: Tensor | None = None) -> None:
        """Take the private records, or this process's share of them.

        Args:
            source: see :class:`~pl_privknn.training.records.PrivateData`.
            trainer: of the fit.
            owners: person of each private record, where the unit is a person.
        """
        self._processes = ProcessGroup.of(trainer)
        rank, count = self._processes.rank, self._processes.size
        in_shards = getattr(source, "private_in_shards", False)
        self.private = PrivateData(source, (0, 1) if in_shards else (rank, count), self.options.example)
        if self.unit == "record":
            self.private.check_rows()
        if self.unit == "person":
            if in_shards and count > 1:
                raise ValueError(
                    "unit='person': private records come in shards, where a person would be counted in each; put "
                    "them into one table"
                )
            self._owners = self.private.share_by_person(owners, (rank, count))  # type: ignore[arg-type]
        if count > 1 and not in_shards:
            self.private.check_same(self._processes.agree)

    def open(self, trainer: Any) -> None:
        """State the plan in the ledger, or continue that of an interrupted run; nothing in a ``fast_dev_run``.

        Raises:
            BudgetExceeded: if the plan does not fit the budget; nothing was drawn.
            ValueError: where the trainer says no number of steps; see also
                :class:`~pl_privknn.training.training_run.TrainingRun`.
        """
        resumed = self.loaded if trainer.ckpt_path is not None else None
        self.loaded = None
        if self.private is None:
            return
        assert self._processes is not None
        plan = self._plan(trainer)
        place = trainer.log_dir or trainer.default_root_dir  # asked for by all processes together
        new = self._run_dir is None and resumed is None
        opened: list[TrainingRun] = []

        def open_run() -> FollowedRun:
            name = type(trainer.lightning_module).__name__
            default = trainers_folder(trainer, place, name) if new else place
            folder = run_folder(self._run_dir, resumed, trainer.ckpt_path, default)
            run = TrainingRun(
                folder,
                plan,
                resumed,
                kind=self.kind,
                ledger_path=self.options.ledger_path,
                limit=self.limit,
                noise=self.noise_source,
                steps_per_charge=self.options.steps_per_charge,
            )
            opened.append(run)
            rank_zero_info(f"run: {run.folder}")
            return run.followed()

        followed = self._processes.from_first(open_run)
        self.run = opened[0] if opened else followed
        if self.run.lost:
            rank_zero_info(f"{self.run.lost} charged steps were lost; the training has that many fewer")

    def noise_for(self, steps: int) -> float:
        """Noise multiplier of a training of so many steps.

        Args:
            steps: of the whole training.
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.budget.epsilon is not None
        return noise_for_steps(self.budget.epsilon, self.delta, self.sampling_rate, steps)

    def plan(self, steps: int) -> list[Charge]:
        """Worst-case charges of a training of so many steps, from public numbers alone.

        Args:
            steps: of the whole training.

        Raises:
            ValueError: where the target can't be met.
        """
        step = mechanism_of(self.noise_for(steps), 1.0, self.sampling_rate)
        charges = [Charge(step, steps)]
        if self.limit is not None and epsilon_for_delta(charges, self.delta) > self.limit:
            charges = [Charge(step, steps_within(step, steps, self.limit, self.delta))]
        guarantee = training_guarantee(self.conditions, self.noise_source)
        return [charge.with_guarantee(guarantee) for charge in charges]

    def hold_out(self, evaluation: PaidEvaluation | None, owners: Tensor | None) -> None:
        """Hold out a share of the private records, drawn by the run's coins.

        Args:
            evaluation: has the share; None holds out none.
            owners: person of each private record, where the unit is a person.

        Raises:
            ValueError: if the run began with another share.
        """
        run, private = self.run, self.private
        assert isinstance(run, TrainingRun)
        assert private is not None
        numbers = torch.arange(len(private)) if self._owners is None else owners
        assert numbers is not None
        records = private.all_rows if private.has_rows else None
        held = held_out(evaluation, run.folder, run.run_id, numbers, run.num_charges > 0, records)
        if held is None:
            return
        private.hold_out(held)
        if self._owners is not None:
            self._owners = self._owners[~held]

    def ended(self, trainer: Any) -> bool:
        """Whether all planned steps are done; the trainer is stopped then."""
        if self.run is None or self.run.steps.left:
            return False
        trainer.should_stop = True
        rank_zero_info(f"all {self.run.planned} planned steps are done; training stops")
        return True

    def sample(self) -> Tensor:
        """**Private.** Charge the next step where that is due, then draw its sample of this process's records."""
        assert self.private is not None
        assert self.run is not None
        assert self._processes is not None
        if isinstance(self.run, TrainingRun):
            self.run.steps.pay(self.noise_source)
        # A seeded source must not toss the same coins again after a resume; charges only grow. Nor must two processes
        # toss the same coins for different records.
        rank, place = self._processes.rank, (self.run.planned - self.run.steps.left, self.run.num_charges)
        coins = self.noise_source.stream("batches", *place, *(("rank", rank) if rank else ()))
        if self._owners is not None:
            most = self.options.records_per_person
            return poisson_persons(self._owners, self.sampling_rate, most, coins)
        return poisson_sample(len(self.private), self.sampling_rate, coins)

    def persons(self, places: Tensor) -> Tensor | None:
        """**Private.** Person of each drawn record; None where no drawn person has several."""
        return None if self._owners is None or self.options.records_per_person == 1 else self._owners[places]

    def release(self, total: Tensor) -> Tensor:
        """Charge a step where that was not done, and draw its noise, once for all processes.

        Args:
            total: float64 sum of the clipped gradients of this process's sample; all zero for an empty one.

        Returns:
            The noisy sum over the expected batch size, a constant: the number of records drawn is private. The same
            in all processes.
        """
        run, processes = self.run, self._processes
        assert run is not None
        assert processes is not None
        whole = processes.sum(total)

        def release() -> tuple[Tensor, tuple[int, int, Any]]:
            assert isinstance(run, TrainingRun)
            noisy = run.steps.release(whole, self.noise_source)
            is_news = processes.size > 1 and run.steps.row != self._sent_row
            self._sent_row = run.steps.row
            return noisy, (run.steps.left, run.steps.row, run.reports() if is_news else None)

        noisy, progress = processes.from_first(release)
        if isinstance(run, FollowedRun):
            run.hear(*progress)
        return noisy.to(total.device) / self.expected_batch_size

    def leave(self) -> None:
        """Release the folder and the private records; the ledger stays readable."""
        self.private = self._owners = None
        if self._processes is not None:
            self._processes.close()
        if self.run is not None:
            self.run.close()

    @property
    def delta(self) -> float:
        """δ of the guarantee."""
        return self.budget.delta

    @property
    def unit(self) -> Unit:
        """Unit of privacy."""
        return self.budget.unit

    @property
    def limit(self) -> float | None:
        """Budget of the ledger: where the noise is given, training ends before ε is exceeded."""
        return self.budget.epsilon if self.noise_multiplier is not None else None

    def _plan(self, trainer: Any) -> TrainingPlan:
        steps = trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                f"max_epochs={trainer.max_epochs}: the number of steps is part of the guarantee; set max_epochs or "
                "max_steps of the trainer"
            )
        return TrainingPlan(
            steps=check_int("steps", steps),
            sampling_rate=self.sampling_rate,
            expected_batch_size=self.expected_batch_size,
            max_grad_norm=self.max_grad_norm,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            epsilon=self.budget.epsilon if self.noise_multiplier is None else None,
            step=self.way,
            conditions=list(self.conditions) or None,
            unit=self.unit,
            records_per_person=self.options.records_per_person if self.unit == "person" else None,
        )
