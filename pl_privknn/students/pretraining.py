"""Representation learning on public images without any label: an optional first stage that costs no privacy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pl_privknn._checks import check_int, check_positive
from pl_privknn.config import as_group
from pl_privknn.students.augment import StrongAugmentation
from pl_privknn.students.base import StudentModule
from pl_privknn.students.losses import LabelLoss


class SimCLRStudent(StudentModule):
    """SimCLR: features learned from unlabelled public images (Chen et al. 2020).

    Two strong views of an image attract each other, views of different images repel. A training batch is
    ``{"unlabeled": x}``; validation and test batches are ``(x, …)``, of which the loss is logged. The classifier of
    ``network`` stays untrained: take the features with
    :class:`~pl_privknn.features.backbone.CheckpointFeatures` from the run's last checkpoint.

    Args:
        temperature: of the softmax over similarities.
        projection: width of the two-layer head in whose output views are compared; features are taken before it.
        num_ops: see :class:`~pl_privknn.students.augment.StrongAugmentation`.
        magnitude: likewise.
        cutout: likewise.
        loss: of labels, not read: the arguments of students that do read labels are taken, so that a
            configuration serves both stages.
        augment_labeled: of labelled images, not read either.
        task: of labels, not read either.
        **kwargs: arguments of :class:`~pl_privknn.students.base.StudentModule`; ``augmentation`` holds for the
            views.

    Raises:
        ValueError: for an argument out of its range.
        TypeError: if the network has no ``features`` method.

    Example:
        >>> import torch
        >>> from pl_privknn.students import SimCLRStudent
        >>> student = SimCLRStudent(temperature=0.5, in_channels=1, image_size=8)
        >>> student.features(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 128])
    """

    #: Read by the data module: batches hold unlabelled images alone.
    needs_labels = False

    def __init__(
        self,
        temperature: float = 0.5,
        projection: int = 64,
        num_ops: int = 2,
        magnitude: float = 0.7,
        cutout: float = 0.4,
        loss: LabelLoss = LabelLoss(),
        augment_labeled: bool = False,
        task: str = "multiclass",
        **kwargs: Any,
    ) -> None:
        check_positive("temperature", temperature)
        super().__init__(**kwargs)
        self.save_hyperparameters({"loss": asdict(as_group("loss", loss, LabelLoss()))})
        if not callable(getattr(self.network, "features", None)):
            raise TypeError(
                f"network: {type(self.network).__name__} has no features(x) -> (n, d) to train; use a network by name"
            )
        self.views = StrongAugmentation(
            num_ops, magnitude, cutout, self.weak.shift, self.weak.flip, self.weak.fill
        )
        width = int(self.network.feature_size)  # type: ignore[arg-type]
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, check_int("projection", projection, 2))
        )

    def pretext_loss(self, images: Tensor) -> Tensor:
        """See :func:`contrastive_loss`; ``images`` are ``(n, channels, height, width)``."""
        both = torch.cat([self.views(images), self.views(images)])
        features = cast(Any, self.network).features(self.normalize(both))
        return contrastive_loss(self.head(features), self.hparams["temperature"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss on the unlabelled images; logs ``train/loss``."""
        images = batch["unlabeled"] if isinstance(batch, dict) else batch[0]
        loss = self.pretext_loss(images)
        self.log_training({"loss": loss}, len(images))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss as ``val/loss``."""
        self.log("val/loss", self.pretext_loss(batch[0]), batch_size=len(batch[0]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss as ``test/loss``."""
        self.log("test/loss", self.pretext_loss(batch[0]), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """The optimizer of the network, and the head in it."""
        configured: Any = super().configure_optimizers()
        optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        # Schedules keep a base rate for each group, so the head joins the only group there is.
        optimizer.param_groups[0]["params"].extend(self.head.parameters())
        return configured


def contrastive_loss(projected: Tensor, temperature: float) -> Tensor:
    """NT-Xent loss: each of 2n views is matched with its other view among the 2n - 1 others by cosine similarity.

    Args:
        projected: ``(2n, d)``; rows i and n + i are views of one image.
        temperature: divides the similarities.
    """
    unit = functional.normalize(projected.float(), dim=1)
    similarity = unit @ unit.T / temperature
    similarity.fill_diagonal_(-torch.inf)
    half = len(unit) // 2
    partner = torch.arange(len(unit), device=unit.device).roll(half)
    return functional.cross_entropy(similarity, partner)
