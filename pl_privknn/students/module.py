"""The LightningModule under all students: a network, its optimizer and schedule, and its moving average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_int
from pl_privknn.argument_groups import flat_names, plain_groups, read_groups
from pl_privknn.features.backbone import OnFrozenFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.init_arguments import HasInitArguments
from pl_privknn.networks import Normalization, build_network
from pl_privknn.students.augment import WeakAugmentation
from pl_privknn.students.ema import EMA
from pl_privknn.students.optim import StudentOptimization, lr_factor
from pl_privknn.students.reset import fresh_weights


class StudentModule(HasInitArguments, OnFrozenFeatures):
    """Trains a network on public images; subclasses say on what batches, and by what loss.

    In evaluation mode :meth:`forward` and :meth:`features` use the moving average of the weights where
    ``ema_decay`` is set, in training mode always the weights that are being trained. The average is updated
    after each optimizer step, and is part of the checkpoint.

    Args:
        network: a name for :func:`~pl_privknn.networks.build_network`, or a module that returns logits (and
            has ``features(x) -> (n, d)``, where features are asked for).
        num_classes: number of classes, or of attributes.
        in_channels: colour channels of the images; used where ``network`` is a name.
        image_size: side of square images, or (height, width); used where ``network`` is a name.
        optimization: optimizer and learning-rate schedule.
        augmentation: weak augmentation.
        normalization: public constants, applied inside the student.
        ema_decay: decay of the moving average of weights, in (0, 1); none is kept if None.
        extractor: the network sees its features in place of images: centred by their public mean, scaled to a norm
            of √d. It learns from public images and stays as it is; ``network`` is ``"mlp"``, ``"linear_probe"``
            or a module for vectors ``(n, d)``. Without augmentation each image's features are needed once:
            :class:`~pl_privknn.features.RememberedFeatures` keeps them.
        **groups: groups of arguments that a subclass adds, and arguments of groups by themselves, for one release
            more.

    Attributes:
        groups: every group of arguments, by its name.

    Raises:
        ValueError: for an argument out of its range.
    """

    mean: Tensor | None
    std: Tensor | None
    #: Whether the objective asks for gradients at pixels, which features do not pass on.
    perturbs_pixels: ClassVar[bool] = False

    def __init__(
        self,
        network: str | nn.Module = "small_cnn",
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        optimization: StudentOptimization = StudentOptimization(),
        augmentation: WeakAugmentation = WeakAugmentation(),
        normalization: Normalization = Normalization(),
        ema_decay: float | None = None,
        extractor: Extractor | None = None,
        **groups: Any,
    ) -> None:
        super().__init__()
        check_int("num_classes", num_classes, 2)
        self.groups = read_groups(
            type(self),
            groups,
            optimization=optimization,
            augmentation=augmentation,
            normalization=normalization,
        )
        self.optimization: StudentOptimization = self.groups["optimization"]
        self.weak: WeakAugmentation = self.groups["augmentation"]
        # Frames of subclasses are searched as well, so their arguments are saved too.
        whole = ["network"] if isinstance(network, nn.Module) else []
        self.save_hyperparameters(ignore=[*whole, "extractor", *flat_names(type(self))])
        self.save_hyperparameters(plain_groups(self.groups))
        self.num_classes = num_classes
        self._network_name = network if isinstance(network, str) else None
        for name, constants in zip(("mean", "std"), self.groups["normalization"].tensors(), strict=True):
            self.register_buffer(name, constants, persistent=False)
        self._input_shape: tuple[int, int | tuple[int, int]] = (in_channels, image_size)
        if extractor is not None:
            self._check_extractor(extractor)
            self._input_shape = (self.stand_on(extractor, in_channels, image_size), 1)
        # Convolutions and pooling with channels last take about two thirds of the time, on CPUs as well. A network
        # of the user's own may reshape its activations in a way that does not allow it.
        self.network = (
            build_network(network, num_classes, *self._input_shape).to(memory_format=torch.channels_last)
            if isinstance(network, str)
            else network
        )
        self.ema = EMA(self.network, ema_decay) if ema_decay is not None else None
        self._schedule_start = 0
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def setup(self, stage: str) -> None:
        """Begin each training with a schedule of its own; a checkpoint is loaded after this."""
        if stage == "fit":
            self._schedule_start = 0
            self._sums.clear()
            if self.extractor is not None:
                self._learn_publicly()

    def normalize(self, images: Tensor) -> Tensor:
        """What the network sees: images, by public constants where there are any, or features, float32 ``(n, d)``."""
        if self.extractor is not None:
            vectors = self.vectors(images)
            return vectors * math.sqrt(
                vectors.shape[1]
            )  # entries of about 1, as weights at their start expect
        if self.mean is not None and self.std is not None:
            images = (images - self.mean) / self.std
        if self._network_name is not None and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    @property
    def evaluation_network(self) -> nn.Module:
        """The averaged network in evaluation mode (where ``ema_decay`` is set), else the trained one."""
        return self.network if self.training or self.ema is None else self.ema.network

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape ``(n, num_classes)``, of images in [0, 1]."""
        return self.evaluation_network(self.normalize(images))

    def features(self, images: Tensor) -> Tensor:
        """Penultimate activations, shape ``(n, d)``, of images in [0, 1].

        Raises:
            TypeError: if the network has no ``features`` method.
        """
        network: Any = self.evaluation_network
        if not callable(getattr(network, "features", None)):
            raise TypeError(
                f"network: {type(network).__name__} has no features(x) -> (n, d); add one that returns the "
                "penultimate activations, or use a network by name"
            )
        return network.features(self.normalize(images))

    def logits(self, images: Tensor) -> Tensor:
        """Logits of the network that is being trained, in the mode that it is in."""
        return self.network(self.normalize(images))

    def log_training(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Log means over the epoch as ``train/<name>``, at its last batch.

        Args:
            values: means over a batch.
            batch_size: its examples.
        """
        for name, value in values.items():
            if name in self._sums:
                total, examples = self._sums[name]
                self._sums[name] = (total.add_(value.detach(), alpha=batch_size), examples + batch_size)
            else:
                self._sums[name] = (value.detach() * batch_size, batch_size)
        # Lightning's log() at each step would take some half a millisecond.
        if self._trainer is not None and self.trainer.is_last_batch:
            self._log_means(values)

    def on_train_epoch_end(self) -> None:
        """Log what the last batch lacked, and all of an epoch that ``max_steps`` has ended."""
        self._log_means(tuple(self._sums))

    def _log_means(self, names: Iterable[str]) -> None:
        for name in names:
            total, examples = self._sums.pop(name)
            self.log(
                f"train/{name}",
                total / examples,
                on_step=False,
                on_epoch=True,
                prog_bar=name == "loss",
                batch_size=examples,
            )

    def configure_optimizers(self) -> Any:
        """The named optimizer over the trained network, and its schedule per optimizer step."""
        optimizer = self.optimization.over(
            [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        )
        if self.optimization.scheduler == "none" and not self.optimization.warmup_steps:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then move the average: once per optimizer step, also under gradient accumulation."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.network)

    def reinitialize(self) -> None:
        """Draw fresh weights into the same parameter tensors, for retraining between rounds.

        Buffers and the average start again as well, and within a training so do the optimizers' states
        (moments belong to the old weights) and the learning-rate schedule. Pretrained networks by name go
        back to their pretrained weights.

        Raises:
            ValueError: if the network was given as a module with parameters that no ``reset_parameters``
                method draws.
        """
        fresh_weights(self.network, self._rebuild() if self._network_name is not None else None)
        if self.ema is not None:
            self.ema.reset(self.network)
        if self._trainer is None:
            return
        self._schedule_start = self.trainer.global_step
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
        for config in self.trainer.lr_scheduler_configs:
            # The rate of the next step was set under the old schedule.
            for group, base in zip(
                config.scheduler.optimizer.param_groups, config.scheduler.base_lrs, strict=True
            ):
                group["lr"] = base * self._lr_factor(config.scheduler.last_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save where the learning-rate schedule began, and what an extractor learned."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["student_schedule_start"] = self._schedule_start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore where the learning-rate schedule began, and what an extractor learned."""
        super().on_load_checkpoint(checkpoint)
        self._schedule_start = checkpoint.get("student_schedule_start", 0)

    @property
    def progress(self) -> float:
        """Share of the schedule that is done, in [0, 1]; 0 outside a training."""
        if self._trainer is None:
            return 0.0
        return min(1.0, (self.trainer.global_step - self._schedule_start) / max(1.0, self._schedule_length()))

    def _rebuild(self) -> nn.Module:
        return build_network(self.hparams["network"], self.num_classes, *self._input_shape)

    def _check_extractor(self, extractor: Extractor) -> None:
        if not isinstance(extractor, Extractor):
            raise TypeError(f"extractor={type(extractor).__name__}: want an Extractor, such as HOG()")
        if self.perturbs_pixels:
            raise ValueError(
                f"extractor={type(extractor).__name__}: {type(self).__name__} needs gradients at pixels, and "
                "extractors have none; take SupervisedStudent, UDAStudent or FixMatchStudent"
            )
        if self.mean is not None:
            raise ValueError("normalization: an extractor sees images as they are; leave mean and std out")

    def _learn_publicly(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if (public := getattr(data, "public", None)) is not None:
            self.fit_public(public)
        elif self.whitening is not None and not bool(self.whitening.fitted):
            raise ValueError(
                "extractor: its features are centred by those of public images; train with a data module, or call "
                "student.fit_public(public) before"
            )

    def _lr_factor(self, step: int) -> float:
        step -= self._schedule_start
        warmup, scheduler = self.optimization.warmup_steps, self.optimization.scheduler
        if step <= 0 or scheduler == "none":
            # The length isn't asked for at step 0: it would build the loaders before labels exist. No schedule begins
            # differently for it.
            return lr_factor(scheduler, max(0, step), math.inf, warmup)
        return lr_factor(scheduler, step, self._schedule_length(), warmup)

    def _schedule_length(self) -> float:
        if (epochs := self.optimization.schedule_epochs) is not None:
            batches = self.trainer.num_training_batches
            return epochs * math.ceil(batches / self.trainer.accumulate_grad_batches)
        total = self.trainer.estimated_stepping_batches
        if total == math.inf:
            raise ValueError(
                "trainer: max_epochs=-1 gives the schedule no end; set max_epochs or max_steps, or the "
                "student's schedule_epochs"
            )
        return total - self._schedule_start
