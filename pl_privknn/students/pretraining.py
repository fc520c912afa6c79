"""Representation learning on public images without any label: an optional first stage that costs no privacy."""

from __future__ import annotations

import abc
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pl_privknn._checks import check_int, check_positive
from pl_privknn.students.augment import StrongAugmentation
from pl_privknn.students.losses import LabelLoss
from pl_privknn.students.module import StudentModule


class PretrainingStudent(StudentModule, abc.ABC):
    """Trains a network's features on unlabelled public images; subclasses say by what task.

    A training batch is ``{"unlabeled": x}``; validation and test batches are ``(x, …)``, of which the task's loss
    is logged. The classifier of ``network`` stays untrained: take the features with
    :class:`~pl_privknn.features.checkpoint.CheckpointFeatures` from the run's last checkpoint.

    Args:
        loss: of labels, not read: the arguments of students that do read labels are taken, so that a
            configuration serves both stages.
        augment: of labelled images, not read either.
        task: of labels, not read either.
        **kwargs: arguments of :class:`~pl_privknn.students.module.StudentModule`.

    Raises:
        TypeError: if the network has no ``features`` method.

    Example:
        >>> from pl_privknn.students import PretrainingStudent, RotationStudent
        >>> issubclass(RotationStudent, PretrainingStudent), RotationStudent.needs_labels
        (True, False)
    """

    #: Read by the data module: batches hold unlabelled images alone.
    needs_labels = False

    def __init__(
        self, loss: LabelLoss = LabelLoss(), augment: str = "none", task: str = "multiclass", **kwargs: Any
    ) -> None:
        super().__init__(loss=loss, **kwargs)
        if not callable(getattr(self.network, "features", None)):
            raise TypeError(
                f"network: {type(self.network).__name__} has no features(x) -> (n, d) to train; use a network by name"
            )
        self._width = int(self.network.feature_size)  # type: ignore[arg-type]

    def raw_features(self, images: Tensor) -> Tensor:
        """Features of the network that is being trained, ``(n, d)``."""
        return cast(Any, self.network).features(self.normalize(images))

    @abc.abstractmethod
    def pretext_loss(self, images: Tensor) -> Tensor:
        """The loss of the task on images ``(n, channels, height, width)``, a scalar."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The task's loss on the unlabelled images; logs ``train/loss``."""
        images = batch["unlabeled"] if isinstance(batch, dict) else batch[0]
        loss = self.pretext_loss(images)
        self.log_training({"loss": loss}, len(images))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the task's loss as ``val/loss``."""
        self.log("val/loss", self.pretext_loss(batch[0]), batch_size=len(batch[0]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the task's loss as ``test/loss``."""
        self.log("test/loss", self.pretext_loss(batch[0]), batch_size=len(batch[0]), sync_dist=True)


class SimCLRStudent(PretrainingStudent):
    """Two strong views of an image attract each other, views of different images repel (Chen et al. 2020).

    Args:
        temperature: of the softmax over similarities.
        projection: width of the two-layer head in whose output views are compared; features are taken before it.
        num_ops: see :class:`~pl_privknn.students.augment.StrongAugmentation`.
        magnitude: likewise.
        photometric: likewise.
        cutout: likewise.
        **kwargs: arguments of :class:`PretrainingStudent`; ``augmentation`` holds for the views.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> from pl_privknn.students import SimCLRStudent
        >>> student = SimCLRStudent(temperature=0.5, in_channels=1, image_size=8)
        >>> student.features(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 128])
    """

    def __init__(
        self,
        temperature: float = 0.5,
        projection: int = 64,
        num_ops: int = 2,
        magnitude: float = 0.7,
        photometric: bool = False,
        cutout: float = 0.4,
        **kwargs: Any,
    ) -> None:
        check_positive("temperature", temperature)
        super().__init__(**kwargs)
        self.views = StrongAugmentation(
            num_ops, magnitude, photometric, cutout, self.weak.shift, self.weak.flip, self.weak.fill
        )
        self.head = _head(self._width, check_int("projection", projection, 2))

    def pretext_loss(self, images: Tensor) -> Tensor:
        """See :func:`contrastive_loss`."""
        both = torch.cat([self.views(images), self.views(images)])
        return contrastive_loss(self.head(self.raw_features(both)), self.hparams["temperature"])

    def configure_optimizers(self) -> Any:
        """The optimizer of the network, and the head in it."""
        return _with_head(super().configure_optimizers(), self.head)


class RotationStudent(PretrainingStudent):
    """Tells by how many quarter turns an image was rotated (Gidaris, Singh and Komodakis 2018).

    Suits images with a natural upright position. Images must be square.

    Args:
        **kwargs: arguments of :class:`PretrainingStudent`.

    Example:
        >>> import torch
        >>> from pl_privknn.students import RotationStudent
        >>> student = RotationStudent(in_channels=1, image_size=8)
        >>> student.features(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 128])
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = nn.Linear(self._width, 4)

    def pretext_loss(self, images: Tensor) -> Tensor:
        """Cross-entropy of the number of turns, over all four of every image."""
        if images.shape[-1] != images.shape[-2]:
            raise ValueError(
                f"images: {images.shape[-2]} x {images.shape[-1]} pixels; quarter turns need square images, use "
                "SimCLRStudent"
            )
        images = self.weak(images)
        turned = torch.cat([torch.rot90(images, turns, dims=(-2, -1)) for turns in range(4)])
        turns = torch.arange(4, device=images.device).repeat_interleave(len(images))
        return functional.cross_entropy(self.head(self.raw_features(turned)), turns)

    def configure_optimizers(self) -> Any:
        """The optimizer of the network, and the head in it."""
        return _with_head(super().configure_optimizers(), self.head)


def contrastive_loss(projected: Tensor, temperature: float) -> Tensor:
    """NT-Xent: each of 2n views has to find its other view among the 2n - 1 others by cosine similarity.

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


def _head(width: int, projection: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))


def _with_head(configured: Any, head: nn.Module) -> Any:
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    # Schedules keep a base rate for each group, so the head joins the only group there is.
    optimizer.param_groups[0]["params"].extend(head.parameters())
    return configured
