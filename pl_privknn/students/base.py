"""Students: modules that learn from released labels, with their optimizer, moving average, batches and accuracies."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_choice, check_int, check_open_unit, check_switch
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.features.base import Extractor
from pl_privknn.features.frozen import OnFrozenFeatures
from pl_privknn.networks import Normalization, build_network
from pl_privknn.networks.base import SCHEDULERS, Optimization
from pl_privknn.students.augment import WeakAugmentation
from pl_privknn.students.losses import (
    TASKS,
    LabelLoss,
    balanced_class_weights,
    target_distribution,
    weighted_mean,
)

if TYPE_CHECKING:
    from torchmetrics.classification import MulticlassAccuracy

    from pl_privknn.students.metrics import AttributeAccuracy

# Of a one-cycle schedule: the share of it in which the rate rises, and the first rate over the peak.
_RISING, _FIRST = 0.3, 1 / 25


@dataclasses.dataclass(frozen=True)
class StudentOptimization(Optimization):
    """Optimizer and learning-rate schedule of a student.

    Args:
        optimizer: ``"sgd"`` (with Nesterov momentum), ``"adam"`` or ``"adamw"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty (decoupled for ``"adamw"``).
        scheduler: ``"none"``, ``"cosine"``, ``"linear"`` or ``"one_cycle"``, per optimizer step.
        schedule_epochs: length of the schedule in epochs; the rest of the training if None. The schedule
            starts again at :meth:`~pl_privknn.students.base.Student.reinitialize`.
        decay_vectors: whether weight decay takes in biases, and the scales and shifts of normalisations.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.students import StudentOptimization, VATStudent
        >>> student = VATStudent(image_size=8, optimization=StudentOptimization("sgd", lr=0.1))
        >>> student.optimization.lr, student.optimization.scheduler
        (0.1, 'cosine')
    """

    schedulers: ClassVar[tuple[str, ...]] = (*SCHEDULERS, "one_cycle")

    schedule_epochs: int | None = None
    decay_vectors: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule_epochs is not None:
            check_int("schedule_epochs", self.schedule_epochs)
        check_switch("decay_vectors", self.decay_vectors)

    def over(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer over parameters; see :meth:`Optimization.over`."""
        if self.decay_vectors or not self.weight_decay:
            return super().over(parameters)
        every: list[Any] = list(parameters)
        groups: list[dict[str, Any]] = [
            {"params": [each for each in every if each.ndim > 1]},
            {"params": [each for each in every if each.ndim <= 1], "weight_decay": 0.0},
        ]
        return super().over(groups)


def lr_factor(scheduler: str, step: int, total: float) -> float:
    """Factor on the learning rate at ``step`` of a schedule of ``total`` steps.

    Stays (``"none"``) or falls to zero along half a cosine or a straight line. ``"one_cycle"`` (Smith, Topin 2019)
    rises from a 25th over the first 30 % of the schedule and falls to zero over the rest, both along half a cosine.
    Past the end it stays at zero.

    Args:
        scheduler: one of :attr:`StudentOptimization.schedulers`.
        step: optimizer steps since the schedule began.
        total: length of the schedule in optimizer steps.
    """
    if scheduler == "none":
        return 1.0
    rise = _RISING * total if scheduler == "one_cycle" else 0.0
    if step < rise:
        return 1 - (1 - _FIRST) * _half_cosine(step / rise)
    progress = min(1.0, (step - rise) / max(1.0, total - rise))
    return 1 - progress if scheduler == "linear" else _half_cosine(progress)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


class EMA(nn.Module):
    """Exponential moving average of a network, saved with it.

    After update ``t`` (counted from 0) the average moves by ``1 - min(decay, (1 + t) / (10 + t))`` towards
    the network: the warm-up keeps a short training from being evaluated near its random start. Floating-point
    buffers (batch-norm statistics) are averaged as weights are, since they belong to the averaged weights;
    integer buffers are copied. Tarvainen & Valpola (2017) show the use in semi-supervised learning.

    Args:
        network: the network to follow; the average starts as a copy of it.
        decay: how much of the average stays at each update, in (0, 1).

    Attributes:
        network: the averaged network, without gradients; to be used in evaluation mode.
        updates: int64 scalar, number of updates so far.

    Raises:
        ValueError: if ``decay`` is not in (0, 1).
    """

    updates: Tensor

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = check_open_unit("ema_decay", decay)
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Move the average towards ``network``, which has the structure of the one at construction."""
        # A tensor, not a number: reading the counter would make an accelerator wait at every step.
        step = 1 - ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        for averages, values in (
            (self.network.parameters(), network.parameters()),
            (self.network.buffers(), network.buffers()),
        ):
            for average, value in zip(averages, values, strict=True):
                if average.is_floating_point():
                    average.lerp_(value, step.to(average.dtype))
                else:
                    average.copy_(value)
        self.updates += 1

    @torch.no_grad()
    def reset(self, network: nn.Module) -> None:
        """Start again as a copy of ``network``."""
        self.network.load_state_dict(network.state_dict())
        self.updates.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the averaged network."""
        return self.network(images)


@torch.no_grad()
def fresh_weights(network: nn.Module, fresh: nn.Module | None = None) -> None:
    """Overwrite parameters and buffers of ``network`` in place.

    Args:
        network: what to overwrite; its tensors stay the same objects.
        fresh: a new network of the same structure to copy from. If None, every module's
            ``reset_parameters`` draws.

    Raises:
        ValueError: if there is no ``fresh`` and a parameter belongs to a module without ``reset_parameters``.
    """
    if fresh is not None:
        network.load_state_dict(fresh.state_dict())
        return
    modules = dict(network.named_modules())
    resets = {name for name, module in modules.items() if callable(getattr(module, "reset_parameters", None))}
    for name, _ in network.named_parameters():
        owners = name.split(".")[:-1]
        if not any(".".join(owners[:depth]) in resets for depth in range(len(owners) + 1)):
            raise ValueError(
                f"network: no reset_parameters() draws parameter {name!r}; add that method to its module, or "
                "use a network by name"
            )
    for name, module in modules.items():
        if name in resets:
            module.reset_parameters()


class StudentModule(HasInitArguments, OnFrozenFeatures):
    """Base class of modules that train a network on public images; subclasses define batches and loss.

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
            or a module for vectors ``(n, d)``. Where the objective needs no views of images (:attr:`trains_on_rows`),
            batches of a fit hold vectors of public images, which are computed once.

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
    ) -> None:
        super().__init__()
        check_int("num_classes", num_classes, 2)
        self.optimization = as_group("optimization", optimization, StudentOptimization())
        self.weak = as_group("augmentation", augmentation, WeakAugmentation())
        normalization = as_group("normalization", normalization, Normalization())
        # Frames of subclasses are searched as well, so their arguments are saved too.
        whole = ["network"] if isinstance(network, nn.Module) else []
        self.save_hyperparameters(ignore=[*whole, "extractor"])
        self.save_hyperparameters(
            {
                "optimization": dataclasses.asdict(self.optimization),
                "augmentation": dataclasses.asdict(self.weak),
                "normalization": dataclasses.asdict(normalization),
            }
        )
        self.num_classes = num_classes
        self._network_name = network if isinstance(network, str) else None
        for name, constants in zip(("mean", "std"), normalization.tensors(), strict=True):
            self.register_buffer(name, constants, persistent=False)
        self._input_shape: tuple[int, int | tuple[int, int]] = (in_channels, image_size)
        if extractor is not None:
            self._check_extractor(extractor)
            self._input_shape = (self.stand_on(extractor, in_channels, image_size), 1)
        if isinstance(network, str):
            network = build_network(network, num_classes, *self._input_shape)
        self.network = network
        self.ema = EMA(self.network, ema_decay) if ema_decay is not None else None
        self._schedule_start = 0

    def setup(self, stage: str) -> None:
        """Start each training with a new schedule; a checkpoint is loaded after this."""
        if stage == "fit":
            self._schedule_start = 0
            if self.extractor is not None and not self._waits_for_rows:
                self._learn_publicly()

    def on_fit_start(self) -> None:
        """Learn from public examples that the run has paid for, where it does."""
        if self.extractor is not None and self._waits_for_rows:
            self._learn_publicly()

    @property
    def _waits_for_rows(self) -> bool:
        """Whether public examples are drawn by a callback, before this module's ``on_fit_start``."""
        return bool(getattr(getattr(self.trainer, "datamodule", None), "pays_for_public", False))

    def normalize(self, images: Tensor) -> Tensor:
        """Network input: images, by public constants where there are any, or features, float32 ``(n, d)``."""
        if self.extractor is not None:
            vectors = self.vectors(images)
            return vectors * math.sqrt(
                vectors.shape[1]
            )  # entries of about 1, as weights at their start expect
        if self.mean is not None and self.std is not None:
            images = (images - self.mean) / self.std
        # Convolutions and pooling with channels last take about two thirds of the time, on CPUs as well. A network
        # of the user's own may reshape its activations in a way that does not allow it. One channel is contiguous in
        # both formats, and the strides decide.
        if self._network_name is not None and images.ndim == 4 and images.stride(1) != 1:
            images = images.clone(memory_format=torch.channels_last)
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
        """Logits of the trained network in its present mode."""
        return self.network(self.normalize(images))

    def log_training(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Log means over the epoch as ``train/<name>``.

        Args:
            values: means over a batch.
            batch_size: its examples.
        """
        if self._trainer is None:
            return
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
        if self.optimization.scheduler == "none":
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
        """Save the start of the learning-rate schedule, and an extractor's learned state."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["student_schedule_start"] = self._schedule_start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the start of the learning-rate schedule, and an extractor's learned state."""
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
            raise TypeError(f"extractor={type(extractor).__name__}: expected an Extractor, such as HOG()")
        if self.perturbs_pixels:
            raise ValueError(
                f"extractor={type(extractor).__name__}: {type(self).__name__} needs gradients at pixels, and "
                "extractors have none; take SupervisedStudent, UDAStudent or FixMatchStudent"
            )
        if self.mean is not None:
            raise ValueError("normalization: an extractor sees images as they are; leave mean and std out")

    def _learn_publicly(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if self.extractor is not None and getattr(data, "public_is_blank", False):
            raise ValueError(
                f"data: {type(data).__name__} has no public rows that extractor could learn from, and no run has "
                "paid for them; pass public=, or train with PrivateLabeler"
            )
        if (public := getattr(data, "public", None)) is not None:
            self.fit_public(public)
        elif self.whitening is not None and not bool(self.whitening.fitted):
            raise ValueError(
                "extractor: its features are centred by those of public images; train with a data module, or call "
                "student.fit_public(public) before"
            )

    def _lr_factor(self, step: int) -> float:
        step -= self._schedule_start
        if step <= 0:
            # The length isn't asked for at step 0: it would build the loaders before labels exist. No schedule begins
            # differently for it.
            return lr_factor(self.optimization.scheduler, 0, math.inf)
        return lr_factor(self.optimization.scheduler, step, self._schedule_length())

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


def split_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Labelled images, their labels and unlabelled images (or None) of a training batch.

    Raises:
        ValueError: if the batch is neither ``{"labeled": (x, y), "unlabeled": x}`` nor ``(x, y)``.
    """
    unlabeled = None
    labeled = batch
    if isinstance(batch, Mapping):
        if "labeled" not in batch:
            raise ValueError(
                f"batch with keys {sorted(batch)}: expected 'labeled': (x, y) and 'unlabeled': x"
            )
        labeled, unlabeled = batch["labeled"], batch.get("unlabeled")
    if not isinstance(labeled, Sequence) or len(labeled) != 2:
        raise ValueError(f"labelled batch of type {type(labeled).__name__}: expected a pair (images, labels)")
    if unlabeled is not None and not isinstance(unlabeled, Tensor):
        unlabeled = unlabeled[0]
    return labeled[0], labeled[1], unlabeled


@contextlib.contextmanager
def deterministic(network: nn.Module) -> Iterator[None]:
    """Context in which all modules but batch normalisation are in evaluation mode (no dropout or stochastic depth).

    Args:
        network: whose modules change mode; they get their own back.
    """
    modes = [(module, module.training) for module in network.modules()]
    try:
        for module, training in modes:
            module.training = training and isinstance(module, _BatchNorm)
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Context in which batch normalisation in training mode keeps its running statistics.

    Bitwise: a momentum of 0 would still count batches, and would turn an infinite activation into NaN.

    Args:
        network: whose running statistics are kept.
    """
    norms = [
        module
        for module in network.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]
    try:
        for norm in norms:
            norm.track_running_stats = False
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


class Student(StudentModule, abc.ABC):
    """Base class of classifiers trained on public images and released labels; subclasses define the objective.

    A training batch is ``{"labeled": (x, y), "unlabeled": x}``, or without ``"unlabeled"``, or a plain
    ``(x, y)``. ``x`` is float32 ``(n, channels, height, width)`` in [0, 1]; ``y`` is int64 ``(n,)`` with -1
    for "no label", or float ``(n, num_classes)`` with rows that sum to one. Validation and test batches are
    ``(x, y)``, prediction batches ``x`` or ``(x, …)``.

    Under ``task="multilabel"`` each output is an attribute with a separate probability: ``y`` is
    ``(n, num_classes)``, int64 0 or 1 or float probabilities, -1 where not known; losses are binary, means over
    attributes; ``val/accuracy`` and ``test/accuracy`` are mean attribute accuracies, and each attribute's own is
    logged in addition as ``val/accuracy_<name>``, by the names that the data module gives.

    Args:
        *args: arguments of :class:`~pl_privknn.students.base.StudentModule`, in its order.
        loss: the loss on labels.
        augment_labeled: move (and mirror) labelled images in training, each by a separate draw.
        task: ``"multiclass"`` or ``"multilabel"``.
        **kwargs: arguments of :class:`~pl_privknn.students.base.StudentModule`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.students import Student, VATStudent
        >>> student = VATStudent(image_size=8)
        >>> isinstance(student, Student), sorted(student.objective.__annotations__)
        (True, ['return', 'unlabeled', 'x', 'y'])
    """

    def __init__(
        self,
        *args: Any,
        loss: LabelLoss = LabelLoss(),
        augment_labeled: bool = False,
        task: str = "multiclass",
        **kwargs: Any,
    ) -> None:
        check_choice("task", task, tuple(TASKS))
        check_switch("augment_labeled", augment_labeled)
        super().__init__(*args, **kwargs)
        self.task, self.outputs = task, TASKS[task]
        self.loss = as_group("loss", loss, LabelLoss())
        if self.loss.balanced and task == "multilabel":
            raise ValueError(
                "loss.balanced=True with task='multilabel': attributes have no shares; leave it out"
            )
        self._class_weights: Tensor | None = None
        self.save_hyperparameters({"loss": dataclasses.asdict(self.loss)})
        if pl.waits():
            return
        from pl_privknn.students.metrics import accuracy_metric  # takes a second

        self.val_accuracy = accuracy_metric(task, self.num_classes)
        self.test_accuracy = accuracy_metric(task, self.num_classes)

    @abc.abstractmethod
    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None) -> dict[str, Tensor]:
        """Weighted parts of the training loss, which is their sum; each is logged as ``train/<name>``.

        Args:
            x: labelled images, ``(n, channels, height, width)``.
            y: their labels, int64 ``(n,)`` or float ``(n, num_classes)``.
            unlabeled: images without labels, or None where the batch holds none.
        """

    def label_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean loss on labels, with the student's smoothing, robustness and weighting.

        Args:
            logits: ``(n, c)``.
            y: labels, int64 ``(n,)`` or float ``(n, c)``; attributes ``(n, c)``.
        """
        loss = self.loss
        losses = self.outputs.losses(logits, y, loss.label_smoothing, loss.label_robustness)
        weights = self.outputs.known(logits, y)
        if loss.confidence_weighting:
            confidence = self.outputs.confidence(logits, y)
            weights = weights * confidence ** (loss.confidence_weighting * self.progress)
        if self._class_weights is not None:
            targets = target_distribution(y, logits.shape[1])
            weights = weights * (targets @ self._class_weights.to(targets))
        return weighted_mean(losses, weights)

    def on_train_epoch_start(self) -> None:
        """Weigh classes by their shares of the labels of this epoch, where the loss is balanced."""
        if self.loss.balanced:
            public = getattr(getattr(self.trainer, "datamodule", None), "public", None)
            if public is None:
                raise ValueError(
                    "loss.balanced=True: shares of classes are those of a data module's released labels; train with "
                    "a PrivatePublicDataModule, or leave it out"
                )
            targets = public.table[public.table.labeled.nonzero().flatten()]
            self._class_weights = balanced_class_weights(targets, self.num_classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Sum of the objective's parts; logs ``train/loss`` and each part."""
        x, y, unlabeled = split_batch(batch)
        if self.hparams["augment_labeled"]:
            x = self.weak(x)
        parts = self.objective(x, y, unlabeled)
        loss = torch.stack(list(parts.values())).sum()
        self.log_training({"loss": loss, **parts}, len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val/accuracy`` and ``val/loss``."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test/accuracy`` and ``test/loss``."""
        self._evaluate(batch, "test", self.test_accuracy)

    def on_validation_epoch_end(self) -> None:
        """Log the accuracy of each attribute, where there are attributes."""
        self._log_attributes("val", self.val_accuracy)

    def on_test_epoch_end(self) -> None:
        """Log the accuracy of each attribute, where there are attributes."""
        self._log_attributes("test", self.test_accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probabilities of classes, or of attributes, float32 ``(n, num_classes)``."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.outputs.probabilities(self(images))

    def _log_attributes(self, stage: str, accuracy: MulticlassAccuracy | AttributeAccuracy) -> None:
        if self.task == "multiclass":
            return
        each = accuracy.compute()
        accuracy.reset()
        names = getattr(getattr(self.trainer, "datamodule", None), "attribute_names", ())
        if len(names) != len(each):
            names = tuple(map(str, range(len(each))))
        self.log(f"{stage}/accuracy", each.nanmean(), prog_bar=True)
        for name, value in zip(names, each, strict=True):
            if bool(value.isfinite()):
                self.log(f"{stage}/accuracy_{name}", value)

    def _evaluate(self, batch: Any, stage: str, accuracy: MulticlassAccuracy | AttributeAccuracy) -> None:
        x, y = batch[0], batch[1]
        logits = self(x)
        if self.task == "multiclass" and y.ndim == 2:
            y = y.argmax(dim=1)
        accuracy.update(logits, y)
        loss = weighted_mean(self.outputs.losses(logits, y), self.outputs.known(logits, y))
        if self.task == "multiclass":  # of attributes, see _log_attributes
            self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(x))
        self.log(f"{stage}/loss", loss, batch_size=len(x), sync_dist=True)


class SupervisedStudent(Student):
    """Student that trains on labelled images and ignores unlabelled ones.

    Args:
        **kwargs: arguments of :class:`~pl_privknn.students.base.Student`.

    Example:
        >>> import torch
        >>> from pl_privknn.students import SupervisedStudent
        >>> student = SupervisedStudent(network="small_cnn", num_classes=10, image_size=8)
        >>> student(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    @property
    def trains_on_rows(self) -> bool:
        """Whether labelled images are used without augmentation."""
        return not self.hparams["augment_labeled"]

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """The loss on labels."""
        return {"supervised": self.label_loss(self.logits(x), y)}
