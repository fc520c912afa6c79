"""The callback that trains any LightningModule privately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_open_unit, check_positive, check_switch
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import steps_per_epoch
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.training.adaptive_clipping import AdaptiveClipping, MovingNorm
from pl_privknn.training.clipping import CLIPPING
from pl_privknn.training.correlated_noise import BandedNoise
from pl_privknn.training.layer_checks import replace_batch_norms
from pl_privknn.training.module_checks import check_module, check_readers
from pl_privknn.training.module_guard import ModuleGuard
from pl_privknn.training.paid_accuracy import PaidAccuracy, accuracy_of, check_predictions, right_and_wrong
from pl_privknn.training.privacy_groups import PrivacyGroups
from pl_privknn.training.reporting import ReportsTraining, leave_report
from pl_privknn.training.session import PrivateSession
from pl_privknn.training.settings import PoissonBatches, TrainingBudget
from pl_privknn.training.step_checks import made_up_labels, step_loss
from pl_privknn.training.step_gradients import StepGradients
from pl_privknn.training.trainer_checks import check_data, check_precision, check_trainer

_KIND = "PrivateTraining"
_KEY = "private_training"
_NORM = "private_training_norm"


class PrivateTraining(ReportsTraining, pl.Callback):
    """Trains any LightningModule on the private records by noisy SGD (Abadi et al. 2016), by its own training_step.

    In place of the data module's training batches come Poisson samples of its private part, tuples
    ``(images, labels)``: at each step every record is drawn with probability
    ``expected_batch_size / expected_records``, independently. ``training_step`` gives the mean loss of a part of the
    sample; each example's gradient of it (by Opacus' hooks, without wrapping the module) is clipped to
    ``max_grad_norm``; noise is added once a step to their sum, which is then divided by ``expected_batch_size``. That
    is the gradient which the module's own optimizer and schedulers see. Parameters that need no gradient stay as they
    are, so that frozen backbones and adapters work.

    The trainer's epochs (of ⌈expected_records / expected_batch_size⌉ steps) fix the number of steps, and with it ε,
    before the first one; they are stated as a plan in a ledger, which pays for every few steps before their noise is
    drawn. A resumed run continues its plan: ε stays what it was. With ``fast_dev_run`` no private record is touched.

    Checked by value on made-up batches, before anything is paid or read: the loss is the mean over examples, no
    example sees another one, the clipping takes the whole gradient of each, nothing of a batch stays on the module.
    What ``training_step`` logs is dropped with a warning, and metrics that it updates are emptied; ``privacy/…`` is
    logged at every step. See ``docs/guides/private_training.md`` for all that is refused.

    Args:
        epsilon: ε that the whole training may cost. Without ``noise_multiplier`` the least noise with which all steps
            stay within it is found; with it, training ends before the step that would pass it.
        delta: δ of the guarantee.
        max_grad_norm: L2 bound of each record's gradient.
        expected_batch_size: what the noisy sum of gradients is divided by, a public constant.
        expected_records: about how many private records there are, a public constant that takes the place of their
            number, which is private.
        noise_multiplier: deviation of the noise over ``max_grad_norm``; None where ``epsilon`` alone decides.
        clipping: ``"flat"``, ``"ghost"`` or ``"per_layer"``; see
            :class:`~pl_privknn.training.clipping.ClippedGradients`.
        augment: makes views of one image, given as ``views`` copies ``(views, channels, height, width)``, at random
            as it likes. An example's gradient is then the mean over its views, clipped as one, which costs no more
            privacy (augmentation multiplicity: De et al. 2022).
        views: number of views of an example in a step.
        physical_batch_size: records at once; bounds memory and changes nothing else.
        replace_batch_norm: put group normalisation in the place of batch normalisation, which is refused otherwise.
        adaptive_clipping: let the bound follow a quantile of the gradients' norms, from ``max_grad_norm`` on.
        accuracy: release the accuracy on the private records at times; ``epsilon`` is for all together.
        groups: of records that have an ε of their own, in the place of ``epsilon``.
        correlated_noise: let a step's noise take back part of that of the steps before it (DP-FTRL).
        files: the run's folder and its ledger.
        steps_per_charge: steps paid by one row of the ledger; a crash wastes at most so many.
        noise_source: of coins and noise; the operating system's generator by default. Seeded ones are for tests and
            benchmarks and protect nothing.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn import PrivateTraining
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> training = PrivateTraining(1.0, 1e-5, expected_batch_size=512, expected_records=60_000)
        >>> steps = 20 * training.steps_per_epoch
        >>> noise = training.noise_for(steps)
        >>> steps, round(noise, 3)
        (2360, 1.728)
        >>> epsilon_for_delta([Charge(Gaussian(noise, 1.0, 512 / 60_000), steps)], delta=1e-5) <= 1.0
        True
    """

    #: What a plan looks for: the first that a configuration states, else the first.
    free_parameters: ClassVar[tuple[str, ...]] = ("epsilon", "noise_multiplier")

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float = 1e-5,
        max_grad_norm: float = 1.0,
        *,
        expected_batch_size: int,
        expected_records: int,
        noise_multiplier: float | None = None,
        clipping: str = "flat",
        augment: Callable[[Tensor], Tensor] | None = None,
        views: int = 1,
        physical_batch_size: int | None = None,
        replace_batch_norm: bool = False,
        adaptive_clipping: AdaptiveClipping | None = None,
        accuracy: PaidAccuracy | None = None,
        groups: PrivacyGroups | None = None,
        correlated_noise: BandedNoise | None = None,
        files: RunFiles = RunFiles(),
        steps_per_charge: int = 20,
        noise_source: NoiseSource | None = None,
    ) -> None:
        if groups is not None:
            epsilon = groups.largest(epsilon)
        if epsilon is None and noise_multiplier is None:
            raise ValueError(
                "epsilon=None, noise_multiplier=None: give epsilon, which finds the noise, or noise_multiplier, or "
                "both to train until epsilon is spent"
            )
        for name, value in (("epsilon", epsilon), ("noise_multiplier", noise_multiplier)):
            if value is not None:
                check_positive(name, value)
        self.max_grad_norm = check_positive("max_grad_norm", max_grad_norm)
        check_int("expected_batch_size", expected_batch_size)
        if check_int("expected_records", expected_records) < expected_batch_size:
            raise ValueError(
                f"expected_batch_size={expected_batch_size} is more than expected_records={expected_records}; "
                "lower it"
            )
        self.clipping = check_choice("clipping", clipping, CLIPPING)
        self.augment, self.views = augment, check_int("views", views)
        if views > 1 and augment is None:
            raise ValueError(
                f"views={views}: without augment they would all be the same; give augment, or views=1"
            )
        if augment is not None and clipping == "ghost":
            raise ValueError(
                'augment: clipping="ghost" has norms of views and not of examples; use clipping="flat"'
            )
        if adaptive_clipping is not None and clipping == "per_layer":
            raise ValueError(
                'adaptive_clipping: it moves one norm, and clipping="per_layer" has one a layer; use clipping="flat"'
            )
        if physical_batch_size is not None:
            check_int("physical_batch_size", physical_batch_size)
        self.physical_batch_size = physical_batch_size
        self.replace_batch_norm = check_switch("replace_batch_norm", replace_batch_norm)
        known = noise_multiplier is not None
        budget = TrainingBudget(
            delta=check_open_unit("delta", delta),
            max_epsilon=epsilon if known else None,
            epsilon=None if known else epsilon,
            noise_multiplier=noise_multiplier,
            on_budget="stop" if known and groups is None else "error",
        )
        batches = PoissonBatches(batch_size=expected_batch_size, expected_records=expected_records)
        self.session = PrivateSession(_KIND, batches, budget, files, steps_per_charge, noise_source)
        self.session.adaptive_clipping, self.session.accuracy = adaptive_clipping, accuracy
        self.session.groups = groups
        if correlated_noise is not None:
            correlated_noise.check_beside(batches.rate, groups=groups, adaptive_clipping=adaptive_clipping)
        self.session.correlated_noise = correlated_noise
        self._norm: MovingNorm | None = None
        self._reached: float | None = None
        self._guard: ModuleGuard | None = None
        self._gradients: StepGradients | None = None
        self._logged: tuple[int, dict[str, float]] = (-1, {})

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one of the trainer's epochs; it depends on public constants alone."""
        return steps_per_epoch(self.session.sampling_rate)

    def noise_for(self, steps: int) -> float:
        """The noise multiplier with which so many steps are trained.

        Args:
            steps: of the whole training.
        """
        return self.session.noise_for(steps)

    def plan(self, steps: int) -> list[Charge]:
        """The most that a training of so many steps can cost; see :meth:`Labeler.plan`.

        Args:
            steps: of the whole training.
        """
        return self.session.plan(steps)

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what private training would go wrong with; draw batches from the private part."""
        if stage != "fit":
            return
        self._leave()  # what a training that an error ended may have left
        self.session.run = None
        check_trainer(trainer, _KIND, "expected_batch_size", "max_grad_norm")
        check_precision(trainer, self.clipping)
        check_module(trainer, pl_module, self)
        data = check_data(trainer, _KIND)
        leave_report(trainer)
        if self.replace_batch_norm:
            replace_batch_norms(pl_module)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("fast_dev_run: no private record is touched; public images get placeholder labels")
            data.public.set_labels(slice(None), made_up_labels(data, len(data.public)))
        else:
            self.session.draw_from(data, trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the run that a checkpoint belongs to, and the clipping norm."""
        self.session.loaded = checkpoint.get(_KEY)
        self._reached = checkpoint.get(_NORM)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save where the run's folder is and how far it came; charges stay in the ledger."""
        if self.session.run is not None:
            checkpoint[_KEY] = self.session.run.state()
        if self._norm is not None:
            checkpoint[_NORM] = self._norm.value

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the module on made-up batches, then state the plan and take the place of its training_step."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        gradients = StepGradients(pl_module, self.max_grad_norm, self.clipping, self.physical_batch_size)
        logged = gradients.check_step(pl_module, tuple(data.image_shape), made_up_labels(data, 3))
        check_readers(trainer, logged)
        if self.session.accuracy is not None:
            check_predictions(pl_module, data)
        self.session.open(trainer, gradients.clip_norm)
        self._norm = self._moving_norm(gradients.clip_norm)
        gradients.augment, gradients.views = self.augment, self.views
        self._gradients = gradients
        self._gradients.attach()
        self._logged = (-1, {})
        self._guard = ModuleGuard(pl_module, self._step, lambda: self.session.ended(trainer))
        self._guard.tell(logged)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log ε on the axis of steps, and tell of what was dropped."""
        assert self._guard is not None
        self._guard.tell()
        if self.session.run is None:
            return
        row = self.session.run.steps.row
        if row != self._logged[0]:  # what was spent grows by rows
            self._logged = (row, self.privacy_metrics())
        logged = dict(self._logged[1])
        if self._norm is not None:
            logged["privacy/max_grad_norm"] = self._norm.value
        if (accuracy := self._accuracy(pl_module)) is not None:
            logged["private/accuracy"] = accuracy
        for name, value in logged.items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its methods back, and leave the private records and the run's folder."""
        if stage == "fit":
            self._leave()
            self.session.end(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give the module its methods back, and let another run use the folder."""
        self._leave()

    # ------------------------------------------------------------------ work

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not in a fit."""
        return {**self.__dict__, "_guard": None, "_gradients": None, "_norm": None}

    def _leave(self) -> None:
        if self._guard is not None:
            self._guard.take_off()
            self._guard = None
        if self._gradients is not None:
            self._gradients.detach()
            self._gradients = None
        self.session.leave()

    def _step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """One noisy step: a loss that has the noisy gradient, and nothing else in it."""
        assert self._gradients is not None
        assert self._guard is not None
        self._gradients.check_same(self._guard.module)
        if self.session.run is None:  # public images
            images, labels = batch["labeled"]
            total = self._private_sum(images, labels, batch_idx)
            return {"loss": self._gradients.surrogate(total / self.session.batch_size)}
        self.session.check_turn(batch.step)
        images, labels = batch.taken()
        total = redacted(self._private_sum, images, labels, batch_idx)
        released = self.session.release(total)
        return {
            "loss": self._gradients.surrogate(released if self._norm is None else self._norm.parted(released))
        }

    def _private_sum(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        assert self._gradients is not None
        assert self._guard is not None
        guard, norms = self._guard, [torch.zeros(0)]
        self._gradients.observe = None if self._norm is None else norms.append
        if self._norm is not None:
            self._gradients.clip_norm = self._norm.value
        try:
            with guard.private_step():
                total = self._gradients.sum_of(
                    images, labels, lambda x, y: step_loss(guard.module, guard.moved((x, y)), batch_idx)
                )
        finally:
            self._gradients.observe = None
        return total if self._norm is None else self._norm.joined(total, torch.cat(norms[1:] or norms))

    def _moving_norm(self, unit: float) -> MovingNorm | None:
        chosen, run = self.session.adaptive_clipping, self.session.run
        start, self._reached = self._reached or unit, None
        if chosen is None or run is None:
            return None
        return MovingNorm(chosen, start, unit, run.noise_multiplier, self.session.batch_size)

    def _accuracy(self, module: pl.LightningModule) -> float | None:
        """The accuracy, where one is due after this step."""
        chosen, run, guard = self.session.accuracy, self.session.run, self._guard
        if chosen is None or run is None or (run.planned - run.steps.left) % chosen.every_n_steps:
            return None
        assert guard is not None
        coins = self.session.coins("accuracy")

        def count() -> Tensor:
            with guard.private_step(), module.trainer.precision_plugin.forward_context():
                return right_and_wrong(
                    module, self.session.private.records, chosen.sampling_rate, coins, guard.moved
                )

        noisy = self.session.release_counts(redacted(count))
        self._logged = (-1, {})  # more was spent
        return accuracy_of(noisy)
