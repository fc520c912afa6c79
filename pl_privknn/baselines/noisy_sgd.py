"""Noisy SGD on the private records: the LightningModule."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import nn

from pl_privknn._checks import check_choice
from pl_privknn.baselines.classifier import Classifier
from pl_privknn.baselines.heads import FeatureHead
from pl_privknn.baselines.reporting import LeavesFolder, LogsTraining
from pl_privknn.baselines.updates import NoisyOptimization, scheduled
from pl_privknn.config import as_group
from pl_privknn.features.base import Extractor
from pl_privknn.networks import Normalization
from pl_privknn.networks.base import image_shape
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import noise_aware_lr, steps_per_epoch
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.training.clipping import ClippedGradients, cross_entropies
from pl_privknn.training.network_checks import CannotRunError
from pl_privknn.training.processes import FollowedRun
from pl_privknn.training.reporting import leave_report
from pl_privknn.training.session import PrivateSession
from pl_privknn.training.settings import Clipping, PoissonBatches, TrainingBudget
from pl_privknn.training.trainer_checks import check_data, check_precision, check_trainer
from pl_privknn.training.training_run import TrainingRun

_KIND = "NoisySGD"
BATCH_NORM = ("refuse", "group_norm")


class NoisySGD(LogsTraining, Classifier):
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

    Raises:
        ValueError: for arguments out of range, or a network that can't be trained privately.
    """

    #: What a plan looks for: the first that a configuration states, else the first.
    free_parameters: ClassVar[tuple[str, ...]] = ("budget.epsilon", "budget.noise_multiplier")

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
    ) -> None:
        feature_head = as_group("feature_head", feature_head, FeatureHead())
        batches = as_group("batches", batches, PoissonBatches())
        budget = as_group("budget", budget, TrainingBudget())
        gradients = as_group("gradients", gradients, Clipping())
        optimization = as_group("optimization", optimization, NoisyOptimization())
        normalization = as_group("normalization", normalization, Normalization())
        files = as_group("files", files, RunFiles())
        super().__init__(num_classes, normalization)
        self.session = PrivateSession(_KIND, batches, budget, files, steps_per_charge, noise_source)
        self.optimization = optimization
        check_choice("batch_norm", batch_norm, BATCH_NORM)
        objects = ["extractor", "noise_source", *(["network"] if isinstance(network, nn.Module) else [])]
        self.save_hyperparameters(ignore=objects)
        self.save_hyperparameters(
            {
                "feature_head": asdict(feature_head),
                "batches": asdict(batches),
                "budget": asdict(budget),
                "gradients": asdict(gradients),
                "optimization": asdict(optimization),
                "normalization": asdict(normalization),
                "files": asdict(files),
            }
        )
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
        self._rate = float(optimization.lr)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one of the trainer's epochs; it depends on public constants alone."""
        return steps_per_epoch(self.session.sampling_rate)

    def plan(self, steps: int) -> list[Charge]:
        """The most that a training of so many steps can cost; see :meth:`Labeler.plan`.

        Args:
            steps: of the whole training.
        """
        return self.session.plan(steps)

    # ------------------------------------------------------------------ private training

    def configure_callbacks(self) -> list[pl.Callback]:
        """The trainer asks for callbacks first, so its arguments are checked here."""
        if self._trainer is not None:
            check_trainer(self.trainer, _KIND, "batch_size", "clip_norm")
            check_precision(self.trainer, self._clipped.method)
        return [LeavesFolder()]

    def setup(self, stage: str) -> None:
        """Make the data module give Poisson batches of private records."""
        if stage != "fit":
            return
        self._clipped.detach()  # hooks of a training that an error ended
        self.session.run = None
        data = check_data(self.trainer, _KIND)
        if (task := getattr(data, "task", "multiclass")) != "multiclass":
            raise ValueError(f"task={task!r}: NoisySGD trains classifiers of one class an image")
        leave_report(self.trainer)
        self.fit_public(data.public)
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("fast_dev_run: no private record is touched; public images get placeholder labels")
            places = torch.arange(len(data.public))
            data.public.set_labels(places, places % self.num_classes)
            return
        self.session.draw_from(data, self.trainer)

    def on_fit_start(self) -> None:
        """Check the network on made-up inputs, state the plan, compute the features of the private records."""
        self._clipped.check(self.input_shape(self.trainer.datamodule.image_shape))  # type: ignore[attr-defined]
        self._clipped.attach()
        self.session.open(self.trainer, self._clipped.clip_norm)
        if self.extractor is not None and self.session.private is not None:
            redacted(self.session.private.records.prepare, self.inputs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """End the training where the plan ends."""
        return -1 if self.session.ended(self.trainer) else None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One noisy step, also on an empty batch. Nothing of the private records is logged."""
        optimizer: Any = self.optimizers()
        if self.session.run is None:
            x, y = batch["labeled"]
            gradient = self._clipped.sum(x, y, cross_entropies, self.inputs) / self.session.batch_size
            self._rate = self.optimization.lr
        else:
            # Records of a private batch are images, or vectors that were made of them when the fit began.
            made = None if self.extractor is not None else self.inputs
            self._rate = self._learning_rate(self.session.run)
            total = redacted(self._clipped.sum, batch.records, batch.labels, cross_entropies, made)
            gradient = self.session.release(total)
        self._clipped.assign(gradient)
        for group in optimizer.param_groups:
            group["lr"] = self._rate
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        """The optimizer over the trained parameters; each step sets its learning rate."""
        return self.optimization.over(self._clipped.parameters)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save where the run's folder is and how far it came; charges stay in the ledger."""
        super().on_save_checkpoint(checkpoint)
        if self.session.run is not None:
            checkpoint["noisy_sgd"] = self.session.run.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the run that a checkpoint belongs to."""
        super().on_load_checkpoint(checkpoint)
        self.session.loaded = checkpoint.get("noisy_sgd")

    def teardown(self, stage: str) -> None:
        """Take the hooks off and leave the private records and the run's folder."""
        if stage != "fit":
            return
        self._clipped.detach()
        self.session.end(self.trainer)

    # ------------------------------------------------------------------ work

    def _learning_rate(self, run: TrainingRun | FollowedRun) -> float:
        chosen = self.optimization
        batch_size = self.session.batch_size
        peak = noise_aware_lr(chosen.lr, chosen.noise_limit, run.noise_multiplier, run.planned, batch_size)
        return scheduled(peak, chosen.scheduler, run.steps.left / run.planned)
