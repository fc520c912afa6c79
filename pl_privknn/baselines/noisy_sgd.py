"""Noisy SGD on the private records: the LightningModule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import nn

from pl_privknn._checks import (
    check_choice,
    check_int,
    check_open_unit,
    check_positive,
)
from pl_privknn.baselines.classifier import Classifier
from pl_privknn.baselines.clipping import ClippedGradients, cross_entropies
from pl_privknn.baselines.heads import build_head
from pl_privknn.baselines.network_checks import CannotRunError
from pl_privknn.baselines.reporting import LeavesFolder, ReportsTraining
from pl_privknn.baselines.trainer_checks import check_data, check_trainer
from pl_privknn.baselines.training_run import TrainingPlan, TrainingRun, public_rate, run_folder
from pl_privknn.baselines.updates import build_optimizer, check_updates, scheduled
from pl_privknn.features.base import Extractor
from pl_privknn.networks.base import image_shape
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.noisy_steps import quiet_lr
from pl_privknn.privacy.private_side import privately

BATCH_NORM = ("refuse", "group_norm")
ON_BUDGET = ("error", "stop")


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
        head: ``"linear"`` or ``"mlp"`` (two layers).
        hidden_size: width of the hidden layer of ``"mlp"``.
        components: keep this many principal directions of the public features.
        whitening: divide each direction by its public standard deviation to this power.
        batch_size: what the noisy sum of gradients is divided by, a public constant; about the expected size of a
            batch.
        sampling_rate: Poisson rate. Give it or ``expected_records``.
        expected_records: about how many private records there are, a public constant that takes the place of
            their number, which is private; the rate is then ``batch_size`` over it.
        target_epsilon: find the least noise with which all steps cost at most this. Give it or
            ``noise_multiplier``.
        noise_multiplier: noise over ``clip_norm``.
        delta: δ of the guarantee.
        max_epsilon: budget of the ledger; None for no limit.
        on_budget: where the plan passes ``max_epsilon``, ``"error"`` raises ``BudgetExceeded`` at once and
            ``"stop"`` trains for as many steps as fit, and then ends the training.
        clip_norm: L2 bound of each record's gradient.
        clipping: ``"flat"`` or ``"ghost"``, see :class:`~pl_privknn.baselines.clipping.ClippedGradients`.
        physical_batch_size: records at once; bounds memory and changes nothing else.
            By default 64 on a CPU, 512 elsewhere.
        steps_per_charge: steps paid by one row of the ledger; a crash wastes at most so many.
        batch_norm: ``"refuse"`` networks with batch normalisation, or put ``"group_norm"`` in its place.
        optimizer: ``"sgd"`` (with momentum) or ``"adam"``, working on noisy gradients.
        lr: peak learning rate.
        noise_limit: lower the rate where there is more noise than this, see
            :func:`~pl_privknn.privacy.noisy_steps.quiet_lr`; None never lowers it.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty.
        scheduler: ``"none"``, ``"cosine"`` or ``"linear"`` over the planned steps.
        mean: public constants, one a channel, subtracted from images before ``network``.
        std: public constants, one a channel, divided by.
        ledger_path: a ledger that other runs over the same private data share; ``ledger.sqlite`` in the run's
            folder by default.
        ledger_head_path: see :class:`~pl_privknn.privacy.ledger.ledger.Ledger`.
        run_dir: the run's folder; the trainer's log folder by default.
        noise_source: of coins and noise; the operating system's generator by default. Seeded ones are for
            tests and benchmarks and protect nothing.

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
        head: str = "linear",
        hidden_size: int = 128,
        components: int | None = None,
        whitening: float = 0.5,
        batch_size: int = 1024,
        sampling_rate: float | None = None,
        expected_records: int | None = None,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        on_budget: str = "error",
        clip_norm: float = 1.0,
        clipping: str = "flat",
        physical_batch_size: int | None = None,
        steps_per_charge: int = 20,
        batch_norm: str = "refuse",
        optimizer: str = "sgd",
        lr: float = 0.5,
        noise_limit: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        scheduler: str = "cosine",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        ledger_path: str | Path | None = None,
        ledger_head_path: str | Path | None = None,
        run_dir: str | Path | None = None,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(num_classes, mean, std)
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                f"target_epsilon={target_epsilon!r}, noise_multiplier={noise_multiplier!r}: give exactly one of them"
            )
        self.target_epsilon = (
            None if target_epsilon is None else check_positive("target_epsilon", target_epsilon)
        )
        # 0 would be no privacy at all, so it is no value of a private training.
        self.noise_multiplier = (
            None if noise_multiplier is None else check_positive("noise_multiplier", noise_multiplier)
        )
        self.delta = check_open_unit("delta", delta)
        self.max_epsilon = None if max_epsilon is None else check_positive("max_epsilon", max_epsilon)
        self.stop_at_budget = check_choice("on_budget", on_budget, ON_BUDGET) == "stop"
        self.batch_size = check_int("batch_size", batch_size)
        self.sampling_rate = public_rate(self.batch_size, sampling_rate, expected_records)
        self.steps_per_charge = check_int("steps_per_charge", steps_per_charge)
        check_choice("batch_norm", batch_norm, BATCH_NORM)
        check_updates(optimizer, lr, momentum, weight_decay, scheduler, noise_limit)
        self.noise_limit = noise_limit
        self.save_hyperparameters(
            ignore=["extractor", "noise_source", *(["network"] if isinstance(network, nn.Module) else [])]
        )
        paths = {"ledger_path": ledger_path, "ledger_head_path": ledger_head_path, "run_dir": run_dir}
        plain = {name: None if path is None else str(path) for name, path in paths.items()}
        self.save_hyperparameters({**self.constants, **plain})
        self.noise_source = noise_source if noise_source is not None else default_noise()
        self.ledger_path = None if ledger_path is None else Path(ledger_path)
        self.ledger_head_path = None if ledger_head_path is None else Path(ledger_head_path)
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.make_network(
            network,
            in_channels,
            image_size,
            extractor=extractor,
            head=lambda width: build_head(head, width, num_classes, hidden_size),
            components=components,
            whitening=whitening,
            group_norm=batch_norm == "group_norm",
        )
        self.automatic_optimization = False  # one optimizer step a Poisson batch, on gradients made here
        self._clipped = ClippedGradients(self.network, clip_norm, clipping, physical_batch_size)
        # A user's own module may want images of another size than these arguments say; the data will tell.
        with contextlib.suppress(CannotRunError):
            self._clipped.check(self.input_shape(image_shape(in_channels, image_size)))
        self._training_run: TrainingRun | None = None
        self._private: Any = None
        self._loaded: dict[str, Any] | None = None
        self._rate = float(lr)

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
            max_epsilon=self.max_epsilon,
            stop_at_budget=self.stop_at_budget,
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
            self._rate = self.hparams["lr"]
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
        hparams = self.hparams
        return build_optimizer(
            hparams["optimizer"],
            self._clipped.parameters,
            hparams["lr"],
            hparams["momentum"],
            hparams["weight_decay"],
        )

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
            noise_multiplier=self.noise_multiplier,
            target_epsilon=self.target_epsilon,
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
        hparams = self.hparams
        peak = quiet_lr(hparams["lr"], self.noise_limit, run.noise_multiplier, run.planned, self.batch_size)
        return scheduled(peak, hparams["scheduler"], run.steps.left / run.planned)
