"""Private baseline: an image classifier trained by noisy SGD on the private records."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_choice, check_int, check_non_negative, check_positive, check_switch
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.features.base import Extractor
from pl_privknn.features.frozen import OnFrozenFeatures
from pl_privknn.features.private_records import COMPARED, kept_apart
from pl_privknn.networks import FeatureNetwork, Normalization, build_network, register_network
from pl_privknn.networks.base import Optimization, image_shape, output_size
from pl_privknn.networks.layer_gradients import losses_of, separable
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms.steps import noise_aware_lr
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.run import StatedRun, StatesPrivacy
from pl_privknn.training.private_training import PrivateTraining
from pl_privknn.training.records import PrivateData
from pl_privknn.training.requirements import replace_batch_norms
from pl_privknn.training.training_run import TrainingOptions

if TYPE_CHECKING:
    from torchmetrics.classification import MulticlassAccuracy

HEADS = ("linear", "mlp")


@dataclasses.dataclass(frozen=True)
class FeatureHead:
    """Classifier of frozen features, with their transformations.

    Args:
        head: ``"linear"``, whose weights start at 0, or ``"mlp"``, with one hidden layer of tanh (bounded activations
            suffer less from clipping and noise: Papernot et al. 2021).
        hidden_size: width of the hidden layer of ``"mlp"``.
        components: keep this many principal directions of the public features; all if None.
        whitening: divide each direction by its public standard deviation to this power.
        bias: whether the ``"linear"`` head has one. It takes as much of the clipping norm as the features do,
            and bears no large learning rate; without it few large steps learn more.

    Raises:
        ValueError: for an argument out of its range.
    """

    head: str = "linear"
    hidden_size: int = 128
    components: int | None = None
    whitening: float = 0.5
    bias: bool = True

    def __post_init__(self) -> None:
        check_choice("head", self.head, HEADS)
        check_int("hidden_size", self.hidden_size)
        if self.components is not None:
            check_int("components", self.components)
        check_non_negative("whitening", self.whitening)
        if not check_switch("bias", self.bias) and self.head != "linear":
            raise ValueError(
                f'bias=False: head="{self.head}" has biases; leave bias out, or take head="linear"'
            )

    def build(self, in_features: int, num_classes: int) -> nn.Module:
        """Build the head.

        Args:
            in_features: width of the features.
            num_classes: number of classes.
        """
        if self.head == "mlp":
            return nn.Sequential(
                nn.Linear(in_features, self.hidden_size), nn.Tanh(), nn.Linear(self.hidden_size, num_classes)
            )
        head = nn.Linear(in_features, num_classes, bias=self.bias)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return head


@dataclasses.dataclass(frozen=True)
class NoisyOptimization(Optimization):
    """Optimizer and learning-rate schedule of a private training, for noisy gradients.

    Args:
        optimizer: ``"sgd"`` (with momentum) or ``"adam"``.
        lr: peak learning rate.
        momentum: SGD's momentum, or Adam's first β.
        weight_decay: L2 penalty.
        scheduler: ``"none"``, ``"cosine"`` or ``"linear"`` over the planned steps.
        noise_limit: lower the rate where there is more noise than this, see
            :func:`~pl_privknn.privacy.mechanisms.steps.noise_aware_lr`; None never lowers it.

    Raises:
        ValueError: for an argument out of its range.
    """

    optimizers = ("sgd", "adam")
    nesterov = False

    optimizer: str = "sgd"
    lr: float = 0.5
    noise_limit: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_limit is not None:
            check_positive("noise_limit", self.noise_limit)

    def rate(self, left: float, noise_multiplier: float, steps: int, batch_size: float) -> float:
        """Learning rate when the share ``left`` of the planned steps is left.

        By what is left of the plan, and not by the steps that this process made: after a crash the schedule still
        ends where the training does.

        Args:
            left: of the planned steps, from 1 to 0.
            noise_multiplier: of the training.
            steps: planned.
            batch_size: what noisy sums are divided by.
        """
        peak = noise_aware_lr(self.lr, self.noise_limit, noise_multiplier, steps, batch_size)
        if self.scheduler == "none":
            return peak
        return peak * (left if self.scheduler == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def tanh_cnn(num_classes: int, in_channels: int, image_size: int | tuple[int, int]) -> FeatureNetwork:
    """The small network of Papernot et al. (2021, "Tempered sigmoid activations for deep learning with DP").

    Convolutions of 16 filters (8×8, stride 2) and 32 filters (4×4, stride 2), each with tanh and a 2×2 pooling of
    stride 1, and a dense layer of 32. 26,010 weights at 28×28: noise grows with their number. No normalisation.

    Args:
        num_classes: number of classes.
        in_channels: colour channels of the images.
        image_size: side of square images, or (height, width).

    Raises:
        ValueError: if the image is too small.
    """
    shape = image_shape(in_channels, image_size)
    convolutions = nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    flat = output_size(convolutions, shape, "tanh_cnn")
    return FeatureNetwork(nn.Sequential(convolutions, nn.Linear(flat, 32), nn.Tanh()), 32, num_classes)


register_network("tanh_cnn", tanh_cnn)


class NoisySGD(HasInitArguments, StatesPrivacy, OnFrozenFeatures):
    """Image classifier trained on the private records by noisy SGD (Abadi et al. 2016).

    It is a module for :class:`~pl_privknn.training.private_training.PrivateTraining`, which it brings to
    the trainer: see there for how records are drawn, gradients clipped and steps paid. Sums of clipped gradients come
    from what each layer saw where every layer is on a short list, whose outputs for a record depend on that record
    alone, and from records one by one otherwise.

    The data module is a :class:`~pl_privknn.datamodules.base.PrivatePublicDataModule`; validation and test are
    the public ones of every student. The training loss is private and not logged.

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
        expected_batch_size: what the noisy sum of gradients is divided by.
        optimization: what noisy gradients do to the weights.
        normalization: public constants, applied to images before ``network``.
        options: rarely used settings of the training.
        **training: arguments of :class:`~pl_privknn.training.private_training.PrivateTraining`, such as
            ``budget`` and ``private_records``.

    Attributes:
        network: what is trained: a whole network, or a head on features.
        private_training: the callback that trains it.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn import NoisySGD
        >>> from pl_privknn.privacy import Budget
        >>> module = NoisySGD(budget=Budget(epsilon=1.0), expected_batch_size=512, private_records=60_000)
        >>> module.private_training.steps_per_epoch
        118
    """

    #: Settings that a plan may calibrate: the first that a configuration states, else the first.
    free_parameters: ClassVar[tuple[str, ...]] = ("budget.epsilon", "noise_multiplier")

    mean: Tensor | None
    std: Tensor | None
    network: nn.Module

    def __init__(
        self,
        network: str | nn.Module = "mnist_cnn",
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        extractor: Extractor | None = None,
        feature_head: FeatureHead = FeatureHead(),
        *,
        expected_batch_size: int = 1024,
        optimization: NoisyOptimization = NoisyOptimization(),
        normalization: Normalization = Normalization(),
        options: TrainingOptions = TrainingOptions(),
        **training: Any,
    ) -> None:
        super().__init__()
        self.num_classes = check_int("num_classes", num_classes, 2)
        normalization = as_group("normalization", normalization, Normalization())
        for name, constants in zip(("mean", "std"), normalization.tensors(), strict=True):
            self.register_buffer(name, constants, persistent=False)
        from torchmetrics.classification import MulticlassAccuracy  # takes a second, and a plan needs none

        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=-1)
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=-1)
        feature_head = as_group("feature_head", feature_head, FeatureHead())
        self.optimization = optimization = as_group("optimization", optimization, NoisyOptimization())
        options = as_group("options", options, TrainingOptions())
        groups: dict[str, Any] = {
            "feature_head": feature_head, "optimization": optimization, "normalization": normalization
        }  # fmt: skip
        whole = ["network"] if isinstance(network, nn.Module) else []
        objects = ["extractor", "budget", *whole]  # hold more than plain types
        self.save_hyperparameters(ignore=[*objects, "options", "run_dir", *groups])
        if extractor is not None:
            components, whitening = feature_head.components, feature_head.whitening
            width = self.stand_on(extractor, in_channels, image_size, components, whitening)
            network = feature_head.build(width, num_classes)
        elif isinstance(network, str):
            network = build_network(network, num_classes, in_channels, image_size)
        self.network = network
        self.private_training = _OfClassifier(
            expected_batch_size=expected_batch_size, options=options, **training
        )
        plain = dataclasses.replace(options, augment=None, views=1, noise_source=None, example=None)
        groups |= {"options": plain, "budget": self.private_training.budget}
        self.save_hyperparameters(
            {name: dataclasses.asdict(group) for name, group in groups.items()}
            | {"run_dir": None if self.run_dir is None else str(self.run_dir)}
        )
        if extractor is not None and options.augment is not None:
            raise ValueError(
                "augment: features are computed once, of images as they are; leave augment or extractor out"
            )
        if self.private_training.replace_batch_norm:
            replace_batch_norms(self)
        self._takes_vectors = False

    @property
    def stated_run(self) -> StatedRun | None:
        """The run of the training, once the fit has started."""
        return self.private_training.stated_run

    @property
    def budget(self) -> Budget:  # type: ignore[override]
        """ε and δ of the whole training, and its unit of privacy."""
        return self.private_training.budget

    @property
    def asked_dir(self) -> Path | None:  # type: ignore[override]
        """The folder that was asked for, or None."""
        return self.private_training.asked_dir

    # ------------------------------------------------------------------ the classifier

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape ``(n, num_classes)``, of images in [0, 1]."""
        return self.network(self.inputs(images))

    def inputs(self, images: Tensor) -> Tensor:
        """Network input of images; an image's input depends on that image alone."""
        if self.extractor is None and self.mean is not None and self.std is not None:
            return (images - self.mean) / self.std
        return self.vectors(images)

    def configure_callbacks(self) -> list[pl.Callback]:
        """The callback that trains this module."""
        return [self.private_training]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross-entropy of records."""
        inputs = batch[0] if self._takes_vectors else self.inputs(batch[0])
        return losses_of(self.network(inputs), batch[1]).mean()

    def configure_optimizers(self) -> Any:
        """The optimizer over the trained parameters; each step sets its learning rate."""
        return self.optimization.over([p for p in self.network.parameters() if p.requires_grad])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Set the learning rate by the remaining share of the plan."""
        run, size = self.private_training.run, self.private_training.expected_batch_size
        rate = self.optimization.lr
        if run is not None:  # the step has been released and counts as done
            left = (run.steps.left + 1) / run.planned
            rate = self.optimization.rate(left, run.noise_multiplier, run.planned, size)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val/accuracy`` and ``val/loss``."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test/accuracy`` and ``test/loss``."""
        self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities, float32 ``(n, num_classes)``."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self(images).float().softmax(dim=1)

    def _evaluate(self, batch: Any, stage: str, accuracy: MulticlassAccuracy) -> None:
        x, y = batch[0], batch[1]
        logits = self(x)
        accuracy.update(logits, y)
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(x))
        known = y >= 0
        if bool(known.any()):
            loss = nn.functional.cross_entropy(logits[known], y[known])
            self.log(f"{stage}/loss", loss, batch_size=int(known.sum()))


class _OfClassifier(PrivateTraining):
    """Private training of :class:`NoisySGD`, which extracts features of its records once."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fit the extractor to public features; see the base class."""
        data = trainer.datamodule
        if stage == "fit":
            if not hasattr(data, "private_in_shards"):
                raise TypeError(
                    f"NoisySGD needs a PrivatePublicDataModule, got {type(data).__name__}; pass "
                    "datamodule=ArraysDataModule(…) or another one of pl_privknn.datamodules to trainer.fit"
                )
            if (task := getattr(data, "task", "multiclass")) != "multiclass":
                raise ValueError(f"task={task!r}: NoisySGD trains classifiers of one class per example")
            if getattr(data, "public_is_blank", False):
                raise ValueError(
                    f"data: {type(data).__name__} has no public rows, and NoisySGD pays for none; pass public=, or "
                    "train with PrivateLabeler"
                )
            pl_module.fit_public(data.public)
        super().setup(trainer, pl_module, stage)

    def _before_gradients(self, trainer: Any, module: Any, data: PrivateData) -> tuple[str, ...]:
        module._takes_vectors = module.extractor is not None and self.private is not None
        if not module._takes_vectors:
            return ()
        public = trainer.datamodule.public
        some = public.images(torch.arange(min(COMPARED, len(public))))
        alone, conditions = kept_apart(module.extractor, some)
        own = alone is module.extractor
        redacted(data.prepare, module.inputs if own else lambda images: module.whitening(alone(images)))
        return conditions

    def layers_of(self, module: Any) -> Any:
        """The network, where its layers process records independently; see the base class."""
        if type(module) is not NoisySGD or "training_step" in vars(module) or not separable(module.network):
            return None
        own = {id(parameter) for parameter in module.network.parameters()}
        if any(parameter.requires_grad and id(parameter) not in own for parameter in module.parameters()):
            return None
        return module.network, module.inputs
