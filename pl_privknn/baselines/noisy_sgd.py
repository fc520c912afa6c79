"""Noisy SGD on the private records: the LightningModule."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import nn

from pl_privknn._checks import check_choice, check_int
from pl_privknn.argument_groups import flat_names, plain_groups, read_groups
from pl_privknn.baselines.classifier import Classifier
from pl_privknn.baselines.clipping import ClippedGradients, cross_entropies
from pl_privknn.baselines.heads import FeatureHead
from pl_privknn.baselines.network_checks import CannotRunError
from pl_privknn.baselines.reporting import LeavesFolder, ReportsTraining
from pl_privknn.baselines.settings import Clipping, PoissonBatches, TrainingBudget
from pl_privknn.baselines.trainer_checks import check_data, check_trainer
from pl_privknn.baselines.training_run import TrainingPlan, TrainingRun, run_folder
from pl_privknn.baselines.updates import NoisyOptimization, scheduled
from pl_privknn.features.base import Extractor
from pl_privknn.networks import Normalization
from pl_privknn.networks.base import image_shape
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.noisy_steps import quiet_lr
from pl_privknn.privacy.private_side import privately
from pl_privknn.privacy.settings import RunFiles

BATCH_NORM = ("refuse", "group_norm")


class NoisySGD(ReportsTraining, Classifier):
    """A classifier trained on the private records by noisy SGD (Abadi et al. 2016).

    At each step every private record is drawn with probability ``sampling_rate``, independently; its gradient
    is clipped to ``clip_norm``; noise of deviation ``noise_multiplier · clip_norm`` is added to the sum, which
    is then divided by ``batch_size``, a constant. The trainer's epochs (of ⌈1 / sampling_rate⌉ steps) fix the
    number of steps, and with it ε, before the first one; they are stated as a plan in a ledger. Training ends
    with the plan. Coins and noise come from ``noise_source``. Per-example gradients are Opacus'.

    The data module is a :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`; validation and test are
    the public ones of every student. The training loss and the sizes of batches are private and not logged.

    A resumed run continues its plan: steps that were paid for and lost in a crash count as done. With
    ``fast_dev_run`` no private record is touched.

    Args:
        network: trained as a whole where there is no ``extractor``: a name for
            :func:`~pl_privknn.networks.build_network`, or a module that returns logits.
        num_classes: number of classes.
        in_channels: colour channels of the images.
        image_size: side of square images, or (height, width).
        extractor: train a head on its features instead. They are computed once, centred and scaled by public
            statistics, and those of private images are kept in memory alone. It must not have been trained on
            the private records.
        feature_head: of those features.
        batches: how records are drawn.
        budget: ε and δ, or the noise.
        gradients: how each record's gradient is bounded.
        optimization: what noisy gradients do to the weights.
        normalization: public constants, applied to images before ``network``.
        files: the run's folder and its ledger.
        steps_per_charge: steps paid by one row of the ledger; a crash wastes at most so many.
        batch_norm: ``"refuse"`` networks with batch normalisation, or put ``"group_norm"`` in its place.
        noise_source: of coins and noise; the operating system's generator by default. Seeded ones are for
            tests and benchmarks and protect nothing.
        **flat: arguments of these groups by themselves, for one release more.

    Raises:
        ValueError: for arguments out of range, or a network that can't be trained privately.
    """

    def __init__(
        self,
        network: str | nn.Module = "mnist_cnn",
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        extractor: Extractor | None = None,
        feature_head: FeatureHead = FeatureHead(),
        batches: PoissonBatches = PoissonBatches(),
        budget: TrainingBudget = TrainingBudget(),
        gradients: Clipping = Clipping(),
        optimization: NoisyOptimization = NoisyOptimization(),
        normalization: Normalization = Normalization(),
        files: RunFiles = RunFiles(),
        steps_per_charge: int = 20,
        batch_norm: str = "refuse",
        noise_source: NoiseSource | None = None,
        **flat: Any,
    ) -> None:
        groups = read_groups(
            NoisySGD,
            flat,
            feature_head=feature_head,
            batches=batches,
            budget=budget,
            gradients=gradients,
            optimization=optimization,
            normalization=normalization,
            files=files,
        )
        feature_head, batches, budget, gradients, optimization, normalization, files = groups.values()
        super().__init__(num_classes, normalization)
        budget.check_complete()
        self.budget, self.optimization = budget, optimization
        self.delta = budget.delta
        self.batch_size, self.sampling_rate = batches.batch_size, batches.rate
        self.steps_per_charge = check_int("steps_per_charge", steps_per_charge)
        check_choice("batch_norm", batch_norm, BATCH_NORM)
        objects = ["extractor", "noise_source", *(["network"] if isinstance(network, nn.Module) else [])]
        self.save_hyperparameters(ignore=[*objects, *flat_names(type(self))])
        self.save_hyperparameters(plain_groups(groups))
        self.noise_source = noise_source if noise_source is not None else default_noise()
        self.run_dir, self.ledger_path, self.ledger_head_path = files.paths
        self.make_network(
            network,
            in_channels,
            image_size,
            extractor=extractor,
            head=feature_head,
            group_norm=batch_norm == "group_norm",
        )
        self.automatic_optimization = False  # one optimizer step a Poisson batch, on gradients made here
        self._clipped = ClippedGradients(
            self.network, gradients.clip_norm, gradients.clipping, gradients.physical_batch_size
        )
        # A user's own module may want images of another size than these arguments say; the data will tell.
        with contextlib.suppress(CannotRunError):
            self._clipped.check(self.input_shape(image_shape(in_channels, image_size)))
        self._training_run: TrainingRun | None = None
        self._private: Any = None
        self._loaded: dict[str, Any] | None = None
        self._rate = float(optimization.lr)

    # ------------------------------------------------------------------ private training

    def configure_callbacks(self) -> list[pl.Callback]:
        """The trainer asks for callbacks first, so its arguments are checked here."""
        if self._trainer is not None:
            check_trainer(self.trainer)
        return [LeavesFolder()]

    def setup(self, stage: str) -> None:
        """Make the data module give Poisson batches of private records."""
        if stage != "fit":
            return
        self._clipped.detach()  # hooks of a training that an error ended
        self._training_run = None
        data = check_data(self.trainer)
        self.fit_public(data.public)
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("fast_dev_run: no private record is touched; public images get placeholder labels")
            places = torch.arange(len(data.public))
            data.public.set_labels(places, places % self.num_classes)
            return
        self._private = data.train_privately(self.sampling_rate, self._coins)

    def on_fit_start(self) -> None:
        """Check the network on made-up inputs, state the plan, compute the features of the private records."""
        self._clipped.check(self.input_shape(self.trainer.datamodule.image_shape))  # type: ignore[attr-defined]
        self._clipped.attach()
        if self._private is None:
            return
        resumed = self._loaded if self.trainer.ckpt_path is not None else None
        self._loaded = None
        self._training_run = TrainingRun(
            run_folder(
                self.run_dir,
                resumed,
                self.trainer.ckpt_path,
                self.trainer.log_dir or self.trainer.default_root_dir,
            ),
            self._plan(),
            max_epsilon=self.budget.max_epsilon,
            stop_at_budget=self.budget.on_budget == "stop",
            ledger_path=self.ledger_path,
            steps_per_charge=self.steps_per_charge,
            checkpoint=resumed,
            noise=self.noise_source,
            ledger_head_path=self.ledger_head_path,
        )
        if self._training_run.lost:
            rank_zero_info(f"{self._training_run.lost} paid steps were lost; the training is shorter by them")
        if self.extractor is not None:
            privately(self._private.records.prepare, self.inputs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """End the training where the plan ends."""
        if self._training_run is not None and self._training_run.steps.left == 0:
            self.trainer.should_stop = True
            rank_zero_info(f"all {self._training_run.planned} planned steps are done: the training ends here")
            return -1
        return None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One noisy step, also on an empty batch. Nothing of the private records is logged."""
        optimizer: Any = self.optimizers()
        if self._training_run is None:
            x, y = batch["labeled"]
            gradient = self._clipped.sum(x, y, cross_entropies, self.inputs)
            self._rate = self.optimization.lr
        else:
            # Records of a private batch are images, or vectors that were made of them when the fit began.
            made = None if self.extractor is not None else self.inputs
            self._rate = self._learning_rate(self._training_run)
            total = privately(self._clipped.sum, batch.records, batch.labels, cross_entropies, made)
            gradient = self._training_run.steps.release(total, self.noise_source)
        self._clipped.assign(gradient / self.batch_size)
        for group in optimizer.param_groups:
            group["lr"] = self._rate
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        """The optimizer over the trained parameters; each step sets its learning rate."""
        return self.optimization.over(self._clipped.parameters)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module holds no private record and no open ledger."""
        return {**super().__getstate__(), "_private": None, "_training_run": None}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save where the run's folder is and how far it came; charges stay in the ledger."""
        super().on_save_checkpoint(checkpoint)
        if self._training_run is not None:
            checkpoint["noisy_sgd"] = self._training_run.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the run that a checkpoint belongs to."""
        super().on_load_checkpoint(checkpoint)
        self._loaded = checkpoint.get("noisy_sgd")

    def teardown(self, stage: str) -> None:
        """Take the hooks off and leave the private records and the run's folder."""
        if stage != "fit":
            return
        self.leave_folder()
        self._clipped.detach()
        if self._private is not None:
            self._private = None
            check_data(self.trainer).train_publicly()

    # ------------------------------------------------------------------ work

    def _plan(self) -> TrainingPlan:
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                f"max_epochs={self.trainer.max_epochs}: the number of steps is part of the guarantee; set "
                "max_epochs or max_steps of the trainer"
            )
        return TrainingPlan(
            steps=check_int("steps", steps),
            sampling_rate=self._private.batches.sampling_rate,
            batch_size=self.batch_size,
            clip_norm=self._clipped.clip_norm,
            delta=self.delta,
            noise_multiplier=self.budget.noise_multiplier,
            target_epsilon=self.budget.target_epsilon,
        )

    def _coins(self) -> NoiseSource:
        # A seeded source must not toss the same coins again after a resume; charges only grow.
        place = (
            (0, 0)
            if self._training_run is None
            else (self._training_run.num_charges, self._training_run.steps.left)
        )
        return self.noise_source.stream("batches", *place)

    def _learning_rate(self, run: TrainingRun) -> float:
        chosen = self.optimization
        peak = quiet_lr(chosen.lr, chosen.noise_limit, run.noise_multiplier, run.planned, self.batch_size)
        return scheduled(peak, chosen.scheduler, run.steps.left / run.planned)
