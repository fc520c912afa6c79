"""What a run keeps of its public side for a reader: pictures of what was asked, the truth, a confusion matrix."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._files import write_durably

if TYPE_CHECKING:
    from pl_privknn.datamodules.base import PrivatePublicDataModule

#: The file in a run's folder.
PICTURES = "pictures.npz"
#: Pictures that are kept at most, and the length of their longer side.
MOST_PICTURES, LONGEST_SIDE = 240, 96


@dataclasses.dataclass(frozen=True)
class PublicPictures:
    """Public images and facts alone; nothing of it was computed from a private record that was not released.

    Attributes:
        examples: int64 ``(n,)``, the public examples that are pictured, in the order in which they were asked.
        images: uint8 ``(n, height, width, channels)``.
        truth: int64 ``(public,)``, or ``(public, attributes)``; -1 where it isn't known, empty where none is.
        class_names: names of the classes or attributes.
        confusion: int64 ``(classes, classes)``, the student's test images by truth (rows) and prediction; empty where
            it was not tested, or judges attributes.
    """

    examples: NDArray[np.int64]
    images: NDArray[np.uint8]
    truth: NDArray[np.int64]
    class_names: tuple[str, ...]
    confusion: NDArray[np.int64]

    @classmethod
    def read(cls, folder: Path) -> PublicPictures | None:
        """Those of a run's folder; None where it keeps none.

        Raises:
            ValueError: if the file can't be read as such.
        """
        path = folder / PICTURES
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                parts = {name: stored[name] for name in stored.files}
            return cls(**{**parts, "class_names": tuple(map(str, parts["class_names"]))})
        except (ValueError, TypeError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} can't be read as a run's pictures ({error}); take it away") from error

    def write(self, folder: Path) -> None:
        """Keep them in a run's folder."""
        buffer = io.BytesIO()
        # Not compressed: the length of the file then tells nothing of what is in the confusion matrix.
        np.savez(
            buffer,
            examples=self.examples,
            images=self.images,
            truth=self.truth,
            class_names=np.array(self.class_names),
            confusion=self.confusion,
        )
        write_durably(folder / PICTURES, buffer.getvalue())


def pictures_of(
    data: PrivatePublicDataModule, asked: list[int], confusion: Tensor | None = None
) -> PublicPictures:
    """The pictures of a run.

    Args:
        data: the run's data; only its public part is read.
        asked: public examples in the order in which they were asked.
        confusion: see :class:`PublicPictures`.
    """
    examples = torch.tensor(list(dict.fromkeys(asked))[:MOST_PICTURES], dtype=torch.int64)
    truth = data.public.truth
    return PublicPictures(
        examples=examples.numpy(),
        images=_small(data.public.images(examples)) if len(examples) else np.zeros((0, 1, 1, 1), np.uint8),
        truth=(torch.empty(0, dtype=torch.int64) if truth is None else truth).cpu().numpy(),
        class_names=data.class_names,
        confusion=(torch.empty(0, 0, dtype=torch.int64) if confusion is None else confusion).cpu().numpy(),
    )


def _small(images: Tensor) -> NDArray[np.uint8]:
    """float32 ``(n, c, h, w)`` in [0, 1] as uint8 ``(n, h, w, 1 or 3)``, no side longer than the limit."""
    if images.shape[1] not in (1, 3):
        images = images.mean(dim=1, keepdim=True)
    if (longest := max(images.shape[2:])) > LONGEST_SIDE:
        size = [max(1, side * LONGEST_SIDE // longest) for side in images.shape[2:]]
        images = torch.nn.functional.interpolate(images, size=size, mode="area")
    small: NDArray[np.uint8] = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return small


class TestConfusion:
    """Counts a module's predictions on test images, class by class, as its own test runs.

    Args:
        module: whose outputs are logits ``(b, classes)``; others are left alone.
    """

    __test__ = False  # no test, whatever its name

    def __init__(self, module: pl.LightningModule) -> None:
        self.counts: Tensor | None = None
        self._logits: Tensor | None = None
        self._hook = module.register_forward_hook(self._keep)

    def add(self, labels: Tensor) -> None:
        """Take in the batch that went through the module, with int64 labels ``(b,)``, -1 where unknown."""
        logits, self._logits = self._logits, None
        if logits is None or logits.ndim != 2 or labels.ndim != 1 or len(labels) != len(logits):
            return
        classes = logits.shape[1]
        if self.counts is None:
            self.counts = torch.zeros(classes, classes, dtype=torch.int64)
        known = labels >= 0
        cells = labels[known].cpu() * classes + logits[known].argmax(dim=1).cpu()
        self.counts += torch.bincount(cells, minlength=classes**2).reshape(classes, classes)

    def close(self) -> None:
        """Leave the module as it was."""
        self._hook.remove()

    def _keep(self, module: Any, images: Any, outputs: Any) -> None:
        self._logits = outputs.detach() if isinstance(outputs, Tensor) else None
