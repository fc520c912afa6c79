"""What every private training does around its steps: Poisson batches, the plan in the ledger, noise, the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import noise_guarantee
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.noisy_steps import noise_for_steps, step_mechanism, steps_within
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.training.adaptive_clipping import AdaptiveClipping
from pl_privknn.training.correlated_noise import BandedNoise
from pl_privknn.training.group_members import check_members
from pl_privknn.training.paid_accuracy import PaidAccuracy
from pl_privknn.training.privacy_groups import PrivacyGroups
from pl_privknn.training.processes import FollowedRun, Processes
from pl_privknn.training.settings import PoissonBatches, TrainingBudget
from pl_privknn.training.trainer_checks import check_data
from pl_privknn.training.training_plan import TrainingPlan
from pl_privknn.training.training_run import TrainingRun, run_folder


class PrivateSession:
    """One private training in a trainer, whoever computes its gradients.

    With several processes each draws batches of its own share of the records; the first one sums up what they
    clipped, pays, and draws the noise once. ε is that of one process.

    Args:
        kind: what trains, for messages, the ledger and the run's folder: a class's name.
        batches: how records are drawn.
        budget: ε and δ, or the noise.
        files: the run's folder and its ledger.
        steps_per_charge: steps paid by one row of the ledger; a crash wastes at most so many.
        noise_source: of coins and noise; the operating system's generator by default.

    Attributes:
        run: the training in its folder, once the fit has started; in all processes but the first, what they are told.
        private: what the private batches are made of, during the fit; None in a ``fast_dev_run``.
        adaptive_clipping: how the clipping norm moves; part of the plan.
        accuracy: what is released beside the steps; part of the plan.
        groups: of records, each with an ε of its own, or None.
        correlated_noise: how the noise of different steps hangs together, or None; part of the plan.
        loaded: what a checkpoint that is being resumed says of its run, until the fit starts.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self,
        kind: str,
        batches: PoissonBatches,
        budget: TrainingBudget,
        files: RunFiles,
        steps_per_charge: int,
        noise_source: NoiseSource | None,
    ) -> None:
        budget.check_complete()
        self.kind, self.budget = kind, budget
        self.batch_size, self.sampling_rate = batches.batch_size, batches.rate
        self.steps_per_charge = check_int("steps_per_charge", steps_per_charge)
        self.noise_source = noise_source if noise_source is not None else default_noise()
        self.run_dir, self.ledger_path, self.ledger_head_path = files.paths
        self.run: TrainingRun | FollowedRun | None = None
        self.private: Any = None
        self.adaptive_clipping: AdaptiveClipping | None = None
        self.accuracy: PaidAccuracy | None = None
        self.groups: PrivacyGroups | None = None
        self.correlated_noise: BandedNoise | None = None
        self._processes: Processes | None = None
        self.loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds no private record and no open ledger."""
        return {**self.__dict__, "private": None, "run": None, "_processes": None}

    def draw_from(self, data: Any, trainer: pl.Trainer) -> None:
        """Make the data module give Poisson batches of this process's private records."""
        if self.groups is not None and data.private_in_shards:
            raise ValueError(
                "groups: members are of all private records in one table, and these come in shards"
            )
        self._processes = Processes(trainer)
        if self.correlated_noise is not None and (self._processes.count > 1 or data.private_in_shards):
            raise ValueError(
                "correlated_noise: subsets are of all private records in one process, and these are shared among "
                "several, or come in shards; use devices=1 and one table"
            )
        # Where each process loads records of its own, it draws from all of them.
        share = (0, 1) if data.private_in_shards else (self._processes.rank, self._processes.count)
        if share[1] > 1:
            data.private.check_same(self._processes.agree)
            if self.groups is not None and not self._processes.agree(self.groups.members.numpy().tobytes()):
                raise ValueError(
                    "groups: the processes of this training hold different members; read them from one file"
                )
        self.private = data.train_privately(self.sampling_rate, lambda: self.coins("batches"), share)

    def open(self, trainer: pl.Trainer, clip_norm: float) -> None:
        """State the plan in the ledger, or continue that of an interrupted run; nothing where nothing is drawn.

        Raises:
            BudgetExceeded: if the plan does not fit the budget; nothing was drawn.
            ValueError: where the trainer says no number of steps; see also :class:`TrainingRun`.
        """
        resumed = self.loaded if trainer.ckpt_path is not None else None
        self.loaded = None
        if self.private is None:
            return
        assert self._processes is not None
        plan = self._plan(trainer, clip_norm)
        default = trainer.log_dir or trainer.default_root_dir  # asked for by all processes together
        opened: list[TrainingRun] = []

        def open_run() -> dict[str, Any]:
            run = TrainingRun(
                run_folder(self.run_dir, resumed, trainer.ckpt_path, default),
                plan,
                kind=self.kind,
                max_epsilon=self.budget.max_epsilon,
                stop_at_budget=self.budget.on_budget == "stop",
                ledger_path=self.ledger_path,
                steps_per_charge=self.steps_per_charge,
                checkpoint=resumed,
                noise=self.noise_source,
                ledger_head_path=self.ledger_head_path,
            )
            opened.append(run)
            if self.groups is not None:
                records, members = self.private.records.of_all_processes(), self.groups.members
                try:
                    redacted(check_members, run.folder, run.run_id, records, members, run.charged > 0)
                except BaseException:
                    run.close()
                    raise
            return run.told()

        told = self._processes.from_first(open_run)
        self.run = opened[0] if opened else FollowedRun(**told)
        if self.correlated_noise is not None:
            coins = self.noise_source.stream("subsets", self.run.num_charges)
            subsets = self.correlated_noise.subsets(len(self.private.records), coins)
            bands, rate = self.correlated_noise.bands, plan.sampling_rate
            self.private.draw_in_turns(subsets, bands, rate, lambda: self.next_step)
        if self.run.lost:
            rank_zero_info(f"{self.run.lost} paid steps were lost; the training is shorter by them")

    def noise_for(self, steps: int) -> float:
        """The noise multiplier with which so many steps are trained."""
        known, budget = self.budget.noise_multiplier, self.budget
        if known is not None:
            return known
        others = [] if self.accuracy is None else self.accuracy.charges(steps)
        if self.groups is not None:
            return self.groups.noise_for(self.sampling_rate, budget.delta, steps, others)
        assert budget.epsilon is not None
        releases, rate = steps, self.sampling_rate
        if self.correlated_noise is not None:
            releases, rate = self.correlated_noise.releases(steps), self.correlated_noise.rate(rate)
        return noise_for_steps(budget.epsilon, budget.delta, rate, releases, others)

    def plan(self, steps: int) -> list[Charge]:
        """The most that a training of so many steps can cost, by public numbers alone, before there is a run.

        Args:
            steps: of the whole training.

        Raises:
            ValueError: where the target can't be met.
        """
        noise, budget, rate, releases = self.noise_for(steps), self.budget, self.sampling_rate, steps
        others = [] if self.accuracy is None else self.accuracy.charges(steps)
        if self.groups is not None:
            rate = max(self.groups.rates(noise, budget.delta, steps, others))
        if self.correlated_noise is not None:
            releases, rate = self.correlated_noise.releases(steps), self.correlated_noise.rate(rate)
        step = step_mechanism(noise, 1.0, rate)
        charges = [Charge(step, releases), *others]
        limit = budget.max_epsilon if budget.on_budget == "stop" else None
        if limit is not None and epsilon_for_delta(charges, budget.delta) > limit:
            charges = [Charge(step, steps_within(step, releases, limit, budget.delta, others)), *others]
        mark = noise_guarantee(self.noise_source)
        return [charge.with_guarantee(mark) for charge in charges]

    @property
    def next_step(self) -> int:
        """Number of the step to come, of all that were paid for; those that a crash lost count too."""
        return 0 if self.run is None else self.run.planned - self.run.steps.left

    def check_turn(self, step: int | None) -> None:
        """Raise ``RuntimeError`` for a sample that was drawn for another step than the one to come.

        Args:
            step: that it was drawn for.
        """
        if self.correlated_noise is not None and step != self.next_step:
            raise RuntimeError(
                "correlated_noise: a Poisson batch was passed over, and each is drawn for one step; let every batch "
                "of the loader be one step of the optimizer"
            )

    def ended(self, trainer: pl.Trainer) -> bool:
        """Whether all planned steps are done; the trainer is told to stop then."""
        if self.run is None or self.run.steps.left:
            return False
        trainer.should_stop = True
        rank_zero_info(f"all {self.run.planned} planned steps are done: the training ends here")
        return True

    def release(self, total: Tensor) -> Tensor:
        """Pay for a step and draw its noise, once for all processes.

        Args:
            total: sum of clipped gradients of this process's part of a Poisson batch; all zero for an empty one.

        Returns:
            The noisy sum over the expected batch size, a constant: the number of records drawn is private. The same
            in all processes.
        """
        released = self._released(total, lambda run, whole: run.steps.release(whole, self.noise_source))
        return released / self.batch_size

    def release_counts(self, counts: Tensor) -> Tensor:
        """Pay for the counts that an accuracy is made of, and draw their noise, once for all processes.

        Args:
            counts: this process's, int64 ``(2,)``.

        Returns:
            Noisy counts of all processes.
        """
        return self._released(counts, lambda run, whole: run.release_counts(whole, self.noise_source))

    def coins(self, use: str) -> NoiseSource:
        """The source of this process's coins for a Poisson sample that begins now.

        Args:
            use: what the sample is for.
        """
        # A seeded source must not toss the same coins again after a resume; charges only grow.
        place = (0, 0) if self.run is None else (self.run.num_charges, self.run.steps.left)
        rank = 0 if self._processes is None else self._processes.rank
        # Nor must two processes toss the same coins for different records.
        return self.noise_source.stream(use, *place, *(("rank", rank) if rank else ()))

    def leave(self) -> None:
        """Let another run use the folder; the ledger stays readable."""
        if self.run is not None:
            self.run.close()

    def end(self, trainer: pl.Trainer) -> None:
        """Leave the folder and the private records."""
        self.leave()
        if self.private is not None:
            self.private = None
            check_data(trainer, self.kind).train_publicly()

    def _plan(self, trainer: pl.Trainer, clip_norm: float) -> TrainingPlan:
        steps = trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                f"max_epochs={trainer.max_epochs}: the number of steps is part of the guarantee; set max_epochs or "
                "max_steps of the trainer"
            )
        count = check_int("steps", steps)
        rate, noise, target = self.sampling_rate, self.budget.noise_multiplier, self.budget.epsilon
        rates: list[float] | None = None
        if self.groups is not None:
            noise = self.noise_for(count)
            others = [] if self.accuracy is None else self.accuracy.charges(count)
            rates = self.groups.rates(noise, self.budget.delta, count, others)
            # The ledger promises what holds for all: the ε of the records that take part most often.
            rate, target = max(rates), None
            self.private.draw_by_group(self.groups.members, rates)
        if self.correlated_noise is not None:
            rate = self.correlated_noise.rate(rate)
        return TrainingPlan(
            steps=count,
            sampling_rate=rate,
            batch_size=self.batch_size,
            clip_norm=clip_norm,
            delta=self.budget.delta,
            noise_multiplier=noise,
            target_epsilon=target,
            adaptive_clipping=self.adaptive_clipping,
            accuracy=self.accuracy,
            rates=rates,
            correlated_noise=self.correlated_noise,
        )

    def _released(self, values: Tensor, draw: Callable[[TrainingRun, Tensor], Tensor]) -> Tensor:
        """The sum of all processes' ``values``, paid for and with noise by the first one."""
        run, processes = self.run, self._processes
        assert run is not None
        assert processes is not None
        whole = processes.sum(values)
        noisy = [whole]

        def release() -> tuple[int, int, Any]:
            assert isinstance(run, TrainingRun)
            before = run.num_charges if processes.count > 1 else 0
            noisy[0] = draw(run, whole)
            is_news = processes.count > 1 and run.num_charges != before
            return run.steps.left, run.steps.row, run.reports() if is_news else None

        told = processes.from_first(release)
        if isinstance(run, FollowedRun):
            run.hear(*told)
        return processes.tensor_of_first(noisy[0])
