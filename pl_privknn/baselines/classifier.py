"""What a private baseline is when it is not being trained: a classifier of images, whole or on features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn._checks import check_int
from pl_privknn.baselines.heads import FeatureHead, build_head
from pl_privknn.features.backbone import OnFrozenFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.networks import Normalization, build_network
from pl_privknn.training.layer_checks import with_group_norm


class Classifier(OnFrozenFeatures):
    """Images in [0, 1] to logits, and the evaluation on public and test images that every student has.

    Args:
        num_classes: number of classes.
        normalization: public constants, applied to images before a whole network.

    Attributes:
        network: what is trained: a whole network, or a head on features.

    Raises:
        ValueError: for arguments out of range.
    """

    mean: Tensor | None
    std: Tensor | None
    network: nn.Module

    def __init__(self, num_classes: int, normalization: Normalization) -> None:
        super().__init__()
        self.num_classes = check_int("num_classes", num_classes, 2)
        for name, constants in zip(("mean", "std"), normalization.tensors(), strict=True):
            self.register_buffer(name, constants, persistent=False)
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=-1)
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=-1)

    def make_network(
        self,
        network: str | nn.Module,
        in_channels: int,
        image_size: int | tuple[int, int],
        *,
        extractor: Extractor | None,
        head: FeatureHead,
        group_norm: bool,
    ) -> None:
        """Build :attr:`network`, and what stands before it.

        Args:
            network: name or module; used where there is no extractor.
            in_channels: colour channels of the images.
            image_size: side of square images, or (height, width).
            extractor: see the class.
            head: of features.
            group_norm: put group normalisation in the place of batch normalisation.
        """
        if extractor is not None:
            width = self.stand_on(extractor, in_channels, image_size, head.components, head.whitening)
            network = build_head(head.head, width, self.num_classes, head.hidden_size, head.bias)
        elif isinstance(network, str):
            network = build_network(network, self.num_classes, in_channels, image_size)
        self.network = with_group_norm(network) if group_norm else network

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape ``(n, num_classes)``, of images in [0, 1]."""
        return self.network(self.inputs(images))

    def inputs(self, images: Tensor) -> Tensor:
        """What :attr:`network` sees of images; an image's input depends on that image alone."""
        if self.extractor is None and self.mean is not None and self.std is not None:
            return (images - self.mean) / self.std
        return self.vectors(images)

    def input_shape(self, images: Sequence[int]) -> tuple[int, ...]:
        """Shape of one input of :attr:`network`, for images of a shape."""
        return tuple(images) if self.whitening is None else (self.whitening.out_features,)

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
