"""The callback that trains any LightningModule privately."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn._checks import InputError, check_int, check_non_negative, check_positive, check_switch
from pl_privknn._lightning import rank_zero_info
from pl_privknn._processes import ProcessGroup
from pl_privknn.callbacks.run_summary import add_run_report
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.holdout import PaidEvaluation, held_out, release_figures
from pl_privknn.privacy.mechanisms.base import READS_ALONE, STRUCTURE_IS_PUBLIC, Charge, Unit
from pl_privknn.privacy.mechanisms.steps import noise_for_steps, steps_per_epoch, steps_within
from pl_privknn.privacy.noise import default_noise
from pl_privknn.privacy.records import check_evaluated, check_hyperparameters, foreign_loader
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.run import StatesPrivacy
from pl_privknn.training.gradients import RecordGradients, surrogate
from pl_privknn.training.records import PrivateData, Steps, made_up_records
from pl_privknn.training.requirements import (
    check_first_run,
    check_layers,
    check_module,
    check_optimizers,
    check_readers,
    check_resumable,
    check_trainer,
    mark_first_run,
    replace_batch_norms,
    trained_parameters,
)
from pl_privknn.training.shadow import TRANSFERS, hook_owner, replace_method
from pl_privknn.training.traced_step import check_apart
from pl_privknn.training.training_run import (
    FollowedRun,
    TrainingOptions,
    TrainingRun,
    epochs_of,
    mechanism_of,
    opened_run,
    training_guarantee,
)
from pl_privknn.training.trial_epoch import try_epoch

_KEY = "private_training"
_REMEDY = "replace_batch_norm=True"


class PrivateTraining(HasInitArguments, StatesPrivacy, pl.Callback):
    """Callback that trains any LightningModule on private records by noisy SGD (DP-SGD, Abadi et al. 2016).

    At each step every private record is drawn with probability ``expected_batch_size / private_records``,
    independently. The batch hooks and ``training_step`` are traced on fake tensors, and each drawn record goes
    through their graph alone, as a batch of one: whatever the loss does, no record enters the gradient of another.
    Its gradient is clipped to ``max_grad_norm``; noise is added once a step to their sum, which is then divided by
    ``expected_batch_size``. That is the gradient which the module's own optimizer and schedulers see. Parameters
    that need no gradient stay as they are, so that frozen backbones and adapters work.

    The records are those of a :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`'s private part, or of the
    training loader of any data module, module or DataLoader over a map-style dataset, whose sampler is replaced.

    The trainer's epochs (of ⌈private_records / expected_batch_size⌉ steps) fix the number of steps, and with it ε,
    before the first one; they are stated as a plan in a ledger, which pays for every few steps before their noise is
    drawn. A resumed run continues its plan: ε stays what it was. With ``fast_dev_run`` no private record is touched.
    With several processes each draws samples of its share of the records; the first one pays, and draws the noise of
    their sum once. ε is that of one process.

    ``training_step`` sees no private value, so what it logs, prints or keeps is nothing of the records;
    ``privacy/…`` is logged at every step. A record whose step fails counts as zero. See
    ``docs/guides/private_training.md`` for all that is refused.

    Args:
        budget: ε and δ of the whole training, and its unit of privacy. Without ``noise_multiplier`` the least noise
            with which all steps stay within ε is found; with it, training ends before the step that would pass ε.
            Where the unit is a person, with all records that the data module's ``private_groups`` (int64, the person
            of each record) ascribe to them, coins are persons', the mean gradient of a drawn person's records is
            clipped, and ``expected_batch_size`` and ``private_records`` are numbers of persons.
        max_grad_norm: L2 bound of each record's gradient.
        expected_batch_size: what the noisy sum of gradients is divided by, a public constant.
        private_records: about how many private records there are, a public constant that takes the place of their
            number, which is private.
        noise_multiplier: deviation of the noise over ``max_grad_norm``; None where the budget alone decides. 0 trains
            without noise, as a baseline whose ε is infinite and whose guarantee is ``"none"``.
        replace_batch_norm: put group normalisation in the place of batch normalisation, which is refused otherwise.
        evaluate: hold out a share of the records, or persons, and release the confusion matrix on them at the end, at
            the ε of the training. For batches ``(x, y)`` of one class each, and modules that return logits.
        run_dir: the run's folder; by default the trainer's log folder, or a new one in ``runs/`` where it has none.
            Repeating a run in the folder of an interrupted one continues it.
        options: rarely used settings.

    Attributes:
        run: the training in its folder, once the fit has started; in all processes but the first, the facts received.
        private: the records, during the fit; None in a ``fast_dev_run``.
        conditions: what the guarantee rests on.
        way: how records go through the module, once that is known.
        accuracy: figures of the hold-out, their errors and their ε, once released.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn import PrivateTraining
        >>> from pl_privknn.privacy import Budget, Charge, Gaussian, epsilon_for_delta
        >>> training = PrivateTraining(Budget(epsilon=1.0), expected_batch_size=512, private_records=60_000)
        >>> steps = 20 * training.steps_per_epoch
        >>> noise = training.noise_for(steps)
        >>> steps, round(noise, 3)
        (2360, 1.728)
        >>> epsilon_for_delta([Charge(Gaussian(noise, 1.0, 512 / 60_000), steps)], delta=1e-5) <= 1.0
        True
    """

    #: Settings that a plan may calibrate: the first that a configuration states, else the first.
    free_parameters: ClassVar[tuple[str, ...]] = ("budget.epsilon", "noise_multiplier")

    def __init__(
        self,
        budget: Budget = Budget(),
        max_grad_norm: float = 1.0,
        *,
        expected_batch_size: int,
        private_records: int,
        noise_multiplier: float | None = None,
        replace_batch_norm: bool = False,
        evaluate: PaidEvaluation | None = None,
        run_dir: str | Path | None = None,
        options: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__()
        budget = as_group("budget", budget, Budget())
        if budget.epsilon is None and noise_multiplier is None:
            raise ValueError(
                "budget.epsilon=None, noise_multiplier=None: give budget=Budget(epsilon=…), which finds the noise, "
                "or noise_multiplier, or both to train until ε is spent"
            )
        if noise_multiplier == 0 and budget.epsilon is not None:
            raise ValueError(
                "noise_multiplier=0: trains without noise, at an infinite ε; leave budget.epsilon out"
            )
        if noise_multiplier is not None:
            check_non_negative("noise_multiplier", noise_multiplier)
        if budget.adjacency != "add_remove":
            raise ValueError(
                f"budget.adjacency={budget.adjacency!r}: private training counts 'add_remove' alone"
            )
        check_int("expected_batch_size", expected_batch_size)
        if check_int("private_records", private_records) < expected_batch_size:
            raise ValueError(
                f"expected_batch_size={expected_batch_size} is more than private_records={private_records}; "
                "lower it"
            )
        self.options = options = as_group("options", options, TrainingOptions())
        self.replace_batch_norm = check_switch("replace_batch_norm", replace_batch_norm)
        self.evaluate = None if evaluate is None else as_group("evaluate", evaluate, PaidEvaluation())
        self.budget = budget
        self.class_name = type(self).__name__ if type(self).__module__ != __name__ else "PrivateTraining"
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = check_positive("max_grad_norm", max_grad_norm)
        self.expected_batch_size = expected_batch_size
        self.sampling_rate = expected_batch_size / private_records
        self.noise_source = options.noise_source if options.noise_source is not None else default_noise()
        self.run_dir = run_dir
        if self.evaluate is not None and (noise_multiplier == 0 or options.ledger_path is not None):
            raise ValueError(
                "evaluate: the hold-out is charged in parallel with one training of one finite ε; leave "
                "noise_multiplier=0 and options.ledger_path out, or evaluate=None"
            )
        self.conditions: tuple[str, ...] = ()
        self.way = "traced"
        self.accuracy: dict[str, Any] = {}
        self._constants: dict[str, list[int]] = {}
        self._loaded: dict[str, Any] | None = None  # what a checkpoint that is being resumed says of its run
        self.__dict__.update(_outside_fits())

    run: TrainingRun | FollowedRun | None
    private: PrivateData | None
    _processes: ProcessGroup | None
    _owners: Tensor | None  # of this process's records, where the unit is a person
    _records: Callable[[], Any] | None
    _gradients: RecordGradients | None
    _undo: list[Callable[[], None]]
    _made_up: PrivateData | None
    _logged: tuple[int, dict[str, float]]  # the last row of the ledger, and its figures
    _asked: bool  # whether the optimizer asked for this step's gradient

    # ------------------------------------------------------------------ what it costs

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one of the trainer's epochs; it depends on public constants alone."""
        return steps_per_epoch(self.sampling_rate)

    @property
    def unit(self) -> Unit:
        """Unit of privacy."""
        return self.budget.unit

    @property
    def limit(self) -> float | None:
        """Budget of the ledger: where the noise is given, training ends before ε is exceeded."""
        return self.budget.epsilon if self.noise_multiplier is not None else None

    def noise_for(self, steps: int) -> float:
        """Noise multiplier of a training of ``steps`` steps.

        Args:
            steps: of the whole training.
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.budget.epsilon is not None
        return noise_for_steps(self.budget.epsilon, self.delta, self.sampling_rate, steps)

    def plan(self, steps: int) -> list[Charge]:
        """Worst-case charges of a training of ``steps`` steps, from public numbers alone.

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

    @property
    def stated_run(self) -> TrainingRun | FollowedRun | None:
        """The run, once the fit has started."""
        return self.run

    @property
    def planned_steps(self) -> int:
        """Number of steps that the guarantee covers; 0 before the fit."""
        return 0 if self.run is None else self.run.planned

    def privacy_summary(self) -> dict[str, Any] | None:
        """Privacy figures of the run for a summary, in plain types; None before the fit."""
        found = None if self.run is None else self.run.summary()
        if found is None:
            return None
        return {**found, **self.accuracy, **({"constants": self._constants} if self._constants else {})}

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check module, trainer and data, and replace the training data."""
        if stage != "fit":
            return
        self._leave()  # what a training that an error ended may have left
        self.run = None
        check_trainer(trainer, self)
        check_module(pl_module)
        check_resumable(trainer)
        add_run_report(trainer)
        if self.replace_batch_norm:
            replace_batch_norms(pl_module)
        trained_parameters(pl_module)
        source = trainer.fit_loop._data_source  # Lightning has no public name for where batches come from
        records = _records_of(trainer, source)
        if trainer.fast_dev_run:
            rank_zero_info("fast_dev_run: no private record is read; the steps use synthetic ones")
            self.private = None
            self._made_up = PrivateData(made_up_records(records), example=self.options.example)
        else:
            dataset = self._take(records, trainer).dataset
            try:
                self._records = weakref.ref(dataset)
            except TypeError:  # lists have none
                self._records = lambda: dataset
            check_hyperparameters(pl_module, trainer.datamodule, dataset)
            # Before the strategy moves them: a copy on another device shares no memory.
            check_apart(dict((*pl_module.named_parameters(), *pl_module.named_buffers())), dataset)
            if not hasattr(records, "private_in_shards"):  # this package's data modules check their own parts
                validation = trainer.fit_loop.epoch_loop.val_loop._data_source
                if validation.is_defined() and trainer.limit_val_batches:
                    self._check_evaluation("val_dataloader", validation.dataloader())
        kept = source.instance, source.name
        source.instance, source.name = Steps(self.steps_per_epoch).loader(), ""
        self._undo.append(lambda: source.__dict__.update(instance=kept[0], name=kept[1]))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the run that a checkpoint belongs to."""
        self._loaded = checkpoint.get(_KEY)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the run's folder and progress; charges stay in the ledger."""
        if self.run is not None:
            checkpoint[_KEY] = self.run.state()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Trace the step and try it on made-up records, then state the plan and replace training_step."""
        check_optimizers(trainer)
        check_layers(pl_module, _REMEDY)
        data = self.private if self.private is not None else self._made_up
        assert data is not None
        conditions = self._before_gradients(trainer, pl_module, data)
        gradients = redacted(
            lambda: RecordGradients(
                pl_module,
                data,
                self.max_grad_norm,
                options=self.options,
                layers=self.layers_of(pl_module),
                expected_batch_size=self.expected_batch_size,
                trainer=trainer,
                datamodule=trainer.datamodule,
            )
        )
        redacted(gradients.choose)
        if self.evaluate is not None:
            redacted(gradients.try_predictions)
        check_readers(trainer, gradients.logged)
        rank_zero_info(f"PrivateTraining: {gradients.in_words()}")
        of_data = getattr(trainer.datamodule, "conditions", ())
        structure = None if data.structure_is_public else STRUCTURE_IS_PUBLIC
        reading = self._reading(data, trainer)
        self.conditions = tuple(
            filter(None, (*conditions, *of_data, gradients.condition, reading, structure))
        )
        way = gradients.way.name
        self.way = "traced" if way in ("vmap", "loop") else way
        resumed = self._loaded if trainer.ckpt_path is not None else None
        self._loaded, self.accuracy = None, {}
        if self.private is not None:
            assert self._processes is not None
            check_first_run(pl_module, self.options.ledger_path, resumed)
            redacted(gradients.check_epochs, epochs_of(trainer, self.steps_per_epoch))
            self.run = run = opened_run(self, trainer, resumed, self._processes)
            if trainer.world_size == 1:
                redacted(self._hold_out, getattr(trainer.datamodule, "private_groups", None))
                with gradients.randomness():
                    try_epoch(trainer, self._trial_steps)
            mark_first_run(pl_module, run)
        self._gradients, self._logged = gradients, (-1, {})
        if gradients.traced is not None:
            self._constants = {name: list(shape) for name, shape in gradients.traced.constants.items()}
        self._replace_step(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Trace the step for the epoch at which a checkpoint resumes."""
        if self._gradients is not None and trainer.current_epoch:
            self._trace_anew(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Trace the step again, for the module and its epoch as they are now."""
        if self._gradients is not None and self._asked:  # not in the first epoch
            self._trace_anew(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """End the training where the plan ends."""
        self._asked = False
        if self.run is not None and not self.run.steps.left:
            trainer.should_stop = True
            rank_zero_info(f"all {self.run.planned} planned steps are done; training stops")
            trainer.fit_loop.epoch_loop.batch_progress.increment_processed()
            raise StopIteration

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log ε at each step."""
        run = self.run
        if run is not None and run.steps.row != self._logged[0]:  # what was spent grows by rows
            assert self._processes is not None
            reports = self._processes.from_first(run.reports)
            if isinstance(run, FollowedRun):
                run.last_reports = reports
            self._logged = (run.steps.row, self.privacy_metrics())
        for name, value in self._logged[1].items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Release the figures of the hold-out, where the training is complete."""
        run, gradients = self.run, self._gradients
        if self.evaluate is None or not isinstance(run, TrainingRun) or run.steps.left or gradients is None:
            return
        rows, outcomes = redacted(gradients.outcomes)
        names = tuple(getattr(trainer.datamodule, "class_names", ()))
        if len(names) != gradients.num_outputs:
            names = tuple(map(str, range(gradients.num_outputs)))
        owners = trainer.datamodule.private_groups[rows] if self.unit == "person" else None
        self.accuracy = redacted(
            release_figures,
            run.folder,
            run.run_id,
            outcomes,
            owners,
            classes=names,
            budget=dataclasses.replace(self.budget, epsilon=self.report().epsilon),
            noise=self.noise_source,
            conditions=self.conditions,
        )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the module's step, and release the private records and the run's folder."""
        if stage == "fit":
            self._leave()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to test on the records of a training."""
        self._check_evaluation("test_dataloader", trainer.test_dataloaders)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse ``trainer.validate`` on the records of a training; ``setup`` checks validation within a fit."""
        if trainer.state.fn == "validate":
            self._check_evaluation("val_dataloader", trainer.val_dataloaders)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save a checkpoint of the paid steps, restore the module's step and release the folder."""
        if isinstance(self.run, TrainingRun) and self.run.steps.row and trainer.world_size == 1:
            self.run.save_interrupted(trainer)
        self._leave()

    # ------------------------------------------------------------------ work

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, as outside a fit."""
        return {**self.__dict__, **_outside_fits()}

    def _take(self, source: Any, trainer: Any) -> PrivateData:
        """Take the private records, or this process's share of them."""
        self._processes = ProcessGroup.of(trainer)
        share = self._processes.rank, self._processes.size
        in_shards = getattr(source, "private_in_shards", False)
        self.private = private = PrivateData(source, (0, 1) if in_shards else share, self.options.example)
        if self.unit == "record":
            private.check_rows()
        elif in_shards and share[1] > 1:
            raise ValueError(
                "unit='person': private records come in shards, where a person would be counted in each; put them "
                "into one table"
            )
        else:
            self._owners = private.share_by_person(getattr(trainer.datamodule, "private_groups", None), share)
        if share[1] > 1 and not in_shards:
            private.check_same(self._processes.agree)
        return private

    def _hold_out(self, groups: Tensor | None) -> None:
        """Hold out a share of the private records, drawn by the run's coins.

        Args:
            groups: person of each private record, where the unit is a person.

        Raises:
            ValueError: if the run began with another share.
        """
        run, private = self.run, self.private
        assert isinstance(run, TrainingRun)
        assert private is not None
        numbers = torch.arange(len(private)) if self._owners is None else groups
        assert numbers is not None
        records = private.all_rows if private.has_rows else None
        held = held_out(self.evaluate, run.folder, run.run_id, numbers, run.num_charges > 0, records)
        if held is None:
            return
        private.hold_out(held)
        if self._owners is not None:
            self._owners = self._owners[~held]

    def _reading(self, data: PrivateData, trainer: Any) -> str | None:
        """Condition on how records are read; None where only this package reads them."""
        alone = self.options.reads_alone or getattr(trainer.datamodule, "reads_alone", False)
        reader = data.reader or foreign_loader(trainer.datamodule)
        return None if alone or reader is None else READS_ALONE.format(reader)

    def _check_evaluation(self, name: str, loaders: Any) -> None:
        """Refuse to evaluate on private records: no charge covers the exact figure."""
        check_evaluated(name, loaders, None if self._records is None else self._records())

    def layers_of(self, module: Any) -> Any:
        """Network whose layers give per-record gradients, with its input function; see ``RecordGradients``."""
        return None

    def _before_gradients(self, trainer: Any, module: Any, data: PrivateData) -> tuple[str, ...]:
        """Prepare the private records before the first step; returns conditions that this adds to the guarantee."""
        return ()

    def _leave(self) -> None:
        self._restore()
        self._gradients = self._made_up = self.private = self._owners = None
        if self._processes is not None:
            self._processes.close()
        if self.run is not None:
            self.run.close()  # the ledger stays readable

    def _replace_step(self, trainer: Any, module: Any) -> None:
        """Replace ``training_step`` by the noisy one. Batch hooks leave the empty batches of the training alone."""

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            if self._asked:
                raise InputError(
                    f"{type(trainer.optimizers[0]).__name__}: asks for the gradient several times a step, and ε is "
                    "stated for one; use an optimizer that does so once"
                )
            self._asked = True
            return self._noisy_loss(module, batch_idx)

        self._undo.append(replace_method(module, "training_step", training_step))
        for name in TRANSFERS:
            if (owner := hook_owner(name, module, trainer.datamodule)) is not None:
                self._undo.append(
                    replace_method(owner, name, _outside_training(trainer, getattr(owner, name)))
                )

    def _trial_steps(self, twin: Any) -> Callable[[], None]:
        """Let a copied trainer take unpaid steps of random gradients; returns a function that undoes the change."""
        training = next(one for one in twin.callbacks if isinstance(one, PrivateTraining))
        training.run, training._processes = self.run, self._processes

        def random_loss(module: Any, batch_idx: int) -> Tensor:
            parameters = trained_parameters(module)
            size = sum(parameter.numel() for parameter in parameters)
            noise = torch.randn(size, device=parameters[0].device) / self.expected_batch_size
            return surrogate(parameters, noise)

        training._noisy_loss = random_loss  # type: ignore[method-assign]
        training._replace_step(twin, twin.lightning_module)
        return training._restore

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _trace_anew(self, module: Any) -> None:
        check_layers(module, _REMEDY)
        assert self._gradients is not None
        redacted(self._gradients.refresh)

    def _noisy_loss(self, module: Any, batch_idx: int) -> Tensor:
        """Loss of one noisy step: value 0, with the noisy gradient."""
        gradients = self._gradients
        assert gradients is not None
        if [id(p) for p in module.parameters() if p.requires_grad] != [id(p) for p in gradients.parameters]:
            self._trace_anew(module)
        if self.run is None:
            count = min(2, self.expected_batch_size)
            return surrogate(gradients.parameters, redacted(gradients.made_up_sum, count))
        assert self.private is not None
        places = redacted(
            self.run.steps.sample,
            len(self.private),
            self.sampling_rate,
            self.noise_source,
            self._owners,
            self.options.records_per_person,
        )
        noisy = self.release(redacted(self.clipped_sum, places, batch_idx))
        return surrogate(gradients.parameters, noisy)

    def clipped_sum(self, places: Tensor, batch_idx: int = 0) -> Tensor:
        """The sum of the clipped gradients of some private records, float64 ``(p,)``; **private**.

        Args:
            places: of the records, int64 ``(b,)``; of persons with several person by person.
            batch_idx: number of the step.
        """
        assert self._gradients is not None
        several = self._owners is not None and self.options.records_per_person > 1
        persons = self._owners[places].tolist() if several and self._owners is not None else None
        return self._gradients.sum(places.tolist(), batch_idx, persons)

    def release(self, total: Tensor) -> Tensor:
        """Draw the noise of a paid step, once for all processes.

        Args:
            total: float64 sum of the clipped gradients of this process's sample; all zero for an empty one.

        Returns:
            The noisy sum over the expected batch size, a constant: the number of records drawn is private.
        """
        assert self.run is not None
        return self.run.steps.release(total, self.noise_source) / self.expected_batch_size


def _outside_fits() -> dict[str, Any]:
    names = ("run", "private", "_processes", "_owners", "_records", "_gradients", "_made_up")
    return dict.fromkeys(names) | {"_undo": [], "_logged": (-1, {}), "_asked": False}


def _outside_training(trainer: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda batch, *args: batch if trainer.training else hook(batch, *args)


def _records_of(trainer: Any, source: Any) -> Any:
    """Source of the private records: this package's data module, or the trainer's training loader."""
    data = trainer.datamodule
    if hasattr(data, "private_in_shards"):  # of this package
        return data
    return redacted(source.dataloader)
