"""The LightningModule that every student is."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_choice, check_int
from pl_privknn.argument_groups import flat_names, plain_groups, read_groups
from pl_privknn.networks import Normalization, build_network
from pl_privknn.students.augment import WeakAugmentation
from pl_privknn.students.batch import split_batch
from pl_privknn.students.ema import EMA
from pl_privknn.students.evaluation import EvaluatedModule
from pl_privknn.students.losses import LabelLoss, weighted_mean
from pl_privknn.students.optim import StudentOptimization, lr_factor
from pl_privknn.students.output_types import TASKS, accuracy_metric
from pl_privknn.students.reset import fresh_weights

AUGMENT = ("none", "weak")


class Student(EvaluatedModule, abc.ABC):
    """A classifier trained on public images and released labels; subclasses say by what objective.

    A training batch is ``{"labeled": (x, y), "unlabeled": x}``, or without ``"unlabeled"``, or a plain
    ``(x, y)``. ``x`` is float32 ``(n, channels, height, width)`` in [0, 1]; ``y`` is int64 ``(n,)`` with -1
    for "no label", or float ``(n, num_classes)`` with rows that sum to one. Validation and test batches are
    ``(x, y)``, prediction batches ``x`` or ``(x, …)``.

    Under ``task="multilabel"`` each output is an attribute with a probability of its own: ``y`` is
    ``(n, num_classes)``, int64 0 or 1 or float probabilities, -1 where not known; losses are binary, means over
    attributes; ``val/accuracy`` and ``test/accuracy`` are mean attribute accuracies, and each attribute's own is
    logged beside them as ``val/accuracy_<name>``, by the names that the data module gives.

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
        loss: the loss on labels.
        augmentation: weak augmentation.
        augment: ``"weak"`` moves (and mirrors) labelled images in training, each by a draw of its own.
        normalization: public constants, applied inside the student.
        ema_decay: decay of the moving average of weights, in (0, 1); none is kept if None.
        task: ``"multiclass"`` or ``"multilabel"``.
        **flat: arguments of these groups by themselves, for one release more.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.students import Student, VATStudent
        >>> student = VATStudent(image_size=8)
        >>> isinstance(student, Student), sorted(student.objective.__annotations__)
        (True, ['return', 'unlabeled', 'x', 'y'])
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        network: str | nn.Module = "small_cnn",
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        optimization: StudentOptimization = StudentOptimization(),
        loss: LabelLoss = LabelLoss(),
        augmentation: WeakAugmentation = WeakAugmentation(),
        augment: str = "none",
        normalization: Normalization = Normalization(),
        ema_decay: float | None = None,
        task: str = "multiclass",
        **flat: Any,
    ) -> None:
        super().__init__()
        self.task = check_choice("task", task, tuple(TASKS))
        self.outputs = TASKS[task]
        check_int("num_classes", num_classes, 2)
        check_choice("augment", augment, AUGMENT)
        groups = read_groups(
            Student,
            flat,
            optimization=optimization,
            loss=loss,
            augmentation=augmentation,
            normalization=normalization,
        )
        self.optimization, self.loss, self.weak, normalization = groups.values()
        # Frames of subclasses are searched as well, so their arguments are saved too.
        whole = ["network"] if isinstance(network, nn.Module) else []
        self.save_hyperparameters(ignore=[*whole, *flat_names(type(self))])
        self.save_hyperparameters(plain_groups(groups))
        self.num_classes = num_classes
        self._network_name = network if isinstance(network, str) else None
        # Convolutions and pooling with channels last take about two thirds of the time, on CPUs as well. A network
        # of the user's own may reshape its activations in a way that does not allow it.
        self.network = (
            build_network(network, num_classes, in_channels, image_size).to(memory_format=torch.channels_last)
            if isinstance(network, str)
            else network
        )
        self.ema = EMA(self.network, ema_decay) if ema_decay is not None else None
        for name, constants in zip(("mean", "std"), normalization.tensors(), strict=True):
            self.register_buffer(name, constants, persistent=False)
        self.val_accuracy = accuracy_metric(task, num_classes)
        self.test_accuracy = accuracy_metric(task, num_classes)
        self._schedule_start = 0

    def setup(self, stage: str) -> None:
        """Begin each training with a schedule of its own; a checkpoint is loaded after this."""
        if stage == "fit":
            self._schedule_start = 0

    @abc.abstractmethod
    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None) -> dict[str, Tensor]:
        """Weighted parts of the training loss, which is their sum; each is logged as ``train/<name>``.

        Args:
            x: labelled images, ``(n, channels, height, width)``.
            y: their labels, int64 ``(n,)`` or float ``(n, num_classes)``.
            unlabeled: images without labels, or None where the batch holds none.
        """

    def normalize(self, images: Tensor) -> Tensor:
        """``(images - mean) / std`` with the public constants, or ``images`` where there are none."""
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

    def label_loss(self, logits: Tensor, y: Tensor, keep: Tensor | None = None) -> Tensor:
        """Mean loss on labels, with the smoothing, robustness and weighting that the student was given.

        Args:
            logits: ``(n, c)``.
            y: labels, int64 ``(n,)`` or float ``(n, c)``; attributes ``(n, c)``.
            keep: bool ``(n,)``, which examples of classes count; all that have a label if None.
        """
        loss = self.loss
        losses = self.outputs.losses(logits, y, loss.label_smoothing, loss.label_robustness)
        weights = self.outputs.known(logits, y)
        if keep is not None:
            weights = weights * keep
        if loss.confidence_weighting:
            confidence = self.outputs.confidence(logits, y)
            weights = weights * confidence ** (loss.confidence_weighting * self.progress)
        return weighted_mean(losses, weights)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Sum of the objective's parts; logs ``train/loss`` and each part."""
        x, y, unlabeled = split_batch(batch)
        if self.hparams["augment"] == "weak":
            x = self.weak(x)
        parts = self.objective(x, y, unlabeled)
        loss = torch.stack(list(parts.values())).sum()
        self.log_training({"loss": loss, **parts}, len(x))
        return loss

    def log_training(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Log means over the epoch as ``train/<name>``."""
        for name, value in values.items():
            self.log(
                f"train/{name}",
                value.detach(),
                on_step=False,
                on_epoch=True,
                prog_bar=name == "loss",
                batch_size=batch_size,
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
        """Save where the learning-rate schedule began."""
        checkpoint["student_schedule_start"] = self._schedule_start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore where the learning-rate schedule began."""
        self._schedule_start = checkpoint.get("student_schedule_start", 0)

    @property
    def progress(self) -> float:
        """Share of the schedule that is done, in [0, 1]; 0 outside a training."""
        if self._trainer is None:
            return 0.0
        return min(1.0, (self.trainer.global_step - self._schedule_start) / max(1.0, self._schedule_length()))

    def _rebuild(self) -> nn.Module:
        hparams = self.hparams
        return build_network(
            hparams["network"], hparams["num_classes"], hparams["in_channels"], hparams["image_size"]
        )

    def _lr_factor(self, step: int) -> float:
        step -= self._schedule_start
        warmup, scheduler = self.optimization.warmup_steps, self.optimization.scheduler
        if step <= 0 or scheduler == "none":
            # The length isn't asked for at step 0: it would build the loaders before labels exist.
            return lr_factor("none", max(0, step), 0.0, warmup)
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
