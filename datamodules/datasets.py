"""Images with and without labels: the three data sets that every data module holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pl_privknn._checks import check_choice, check_int
from pl_privknn.datamodules.formats.images import ImageStore, TensorImages, as_indices
from pl_privknn.datamodules.formats.targets import TASKS, check_soft, check_targets, known_rows
from pl_privknn.privacy.private_side import privately

ImageShape = tuple[int, int, int]
_COMPARED = 256  # images of which processes compare a digest


class LabeledImages(Dataset[Any]):
    """Images with their labels; an item is ``(image, label)``.

    Args:
        store: the images.
        labels: class indices, shape ``(n,)``, in ``[0, num_classes)``; under ``"multilabel"`` attributes 0 or
            1, shape ``(n, num_classes)``.
        num_classes: number of classes, or of attributes.
        name: what the labels are called in error messages.
        task: ``"multiclass"`` or ``"multilabel"``.

    Attributes:
        labels: int64, shape ``(n,)``, or ``(n, num_classes)`` under ``"multilabel"``.
        task: as given.

    Raises:
        ValueError: if the labels don't fit the images; it shows no label.
    """

    def __init__(
        self,
        store: ImageStore,
        labels: Tensor,
        num_classes: int,
        name: str = "labels",
        task: str = "multiclass",
    ) -> None:
        self.store = store
        self.task = check_choice("task", task, TASKS)
        self.labels = check_targets(name, labels, len(store), check_int("num_classes", num_classes, 2), task)

    @classmethod
    def none(cls, image_shape: ImageShape, num_classes: int, task: str = "multiclass") -> LabeledImages:
        """A set without images, for a part that is not given."""
        labels = torch.empty((0, num_classes) if task == "multilabel" else 0, dtype=torch.int64)
        return cls(TensorImages(torch.empty(0, *image_shape)), labels, num_classes, task=task)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        label = self.labels[index]
        return self.images([index])[0], label if self.task == "multilabel" else int(label)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(image_shape={self.store.shape})"

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width of every image."""
        return self.store.shape

    def images(self, indices: Tensor | Sequence[int] | slice | None = None) -> Tensor:
        """Images as float32 ``(n, channels, height, width)`` in [0, 1]; all of them by default."""
        return self.store.read(as_indices(indices, len(self)))

    def check_same(self, agree: Callable[[bytes], bool]) -> None:
        """Refuse processes of one training that hold different images, where each is to read a share of them.

        Args:
            agree: whether all processes give the same bytes; here a digest of the number of images, of all labels
                and of some images spread over them, as private as these.

        Raises:
            ValueError: where they differ, in every process.
        """
        if not agree(privately(self._digest)):
            raise ValueError(
                "private set: the processes of this training hold different records, or in another order, so that "
                "some would be read by several; seed what splits or shuffles them, or give each process its own file"
            )

    def _digest(self) -> bytes:
        digest = hashlib.sha256(f"{len(self)}|".encode())
        digest.update(self.labels.contiguous().numpy().tobytes())
        if len(self):
            some = torch.arange(min(len(self), _COMPARED)) * len(self) // min(len(self), _COMPARED)
            digest.update(self.images(some).contiguous().numpy().tobytes())
        return digest.digest()


class LabelTable(Dataset[Tensor]):
    """Released labels of public images, in shared memory, so that running loader workers see changes.

    ``table[indices]`` gives training targets.

    Args:
        count: number of public images; it never changes.
        num_classes: number of classes, or of attributes.
        task: ``"multiclass"`` or ``"multilabel"``.

    Attributes:
        labels: int64, shape ``(count,)``, or ``(count, num_classes)`` under ``"multilabel"``; -1 where there is
            no label.
        soft: float32, shape ``(count, num_classes)``, or None before the first soft label (or
            :meth:`reserve_soft`).
        soft_rows: bool, shape ``(count,)``; which examples have a soft label.
    """

    def __init__(self, count: int, num_classes: int, task: str = "multiclass") -> None:
        self.num_classes = num_classes
        self.task = check_choice("task", task, TASKS)
        shape = (count, num_classes) if task == "multilabel" else (count,)
        self.labels = torch.full(shape, -1, dtype=torch.int64).share_memory_()
        self.soft: Tensor | None = None
        self.soft_rows = torch.zeros(count, dtype=torch.bool).share_memory_()

    def reserve_soft(self) -> Tensor:
        """Make room for soft labels now: workers that live longer than an epoch can't see later rooms."""
        if self.soft is None:
            self.soft = torch.zeros(len(self.labels), self.num_classes).share_memory_()
        return self.soft

    @property
    def labeled(self) -> Tensor:
        """Bool ``(count,)``: which examples have a label now (of an attribute at least)."""
        return known_rows(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Training targets of labelled examples.

        Returns:
            int64 ``(n,)``; or, as soon as any example has a soft label, float32 ``(n, num_classes)``, where
            examples with a hard label only have it as a one-hot row. Under ``"multilabel"`` ``(n, num_classes)``,
            int64 or (soft) float32, with -1 for attributes that are not known.

        Raises:
            RuntimeError: if one of the examples has no label.
        """
        labels = self.labels[indices]
        if not bool(known_rows(labels).all()):
            raise RuntimeError(
                "a labelled batch was asked for public images without a label; leave the samplers of "
                "train_dataloader() as they are (Trainer(overfit_batches=…) replaces them: use "
                "limit_train_batches instead) and change labels between epochs only"
            )
        if self.soft is None or not bool(self.soft_rows.any()):
            return labels
        if self.task == "multilabel":
            hard = labels.to(torch.float32)
        else:
            hard = torch.nn.functional.one_hot(labels, self.num_classes).to(torch.float32)
        return torch.where(self.soft_rows[indices, None], self.soft[indices], hard)


class PublicDataset(Dataset[Tensor]):
    """Public images of fixed number, the labels that were released for them, and, apart, their truth.

    An item is an image alone. Labels start as -1 and change by :meth:`set_labels`; the data module's
    training loader follows at its next epoch. For training without privacy (upper bounds, baselines),
    ``public.set_labels(indices, public.truth[indices])`` is all that is needed.

    Args:
        store: the images.
        num_classes: number of classes, or of attributes.
        truth: true classes, shape ``(m,)``, -1 where not known; for evaluation only. Training batches are
            made from the store and the label table, neither of which holds it. Under ``"multilabel"`` true
            attributes, shape ``(m, num_classes)``.
        task: ``"multiclass"`` or ``"multilabel"``.

    Attributes:
        task: as given.

    Raises:
        ValueError: if the truth doesn't fit the images.
    """

    def __init__(
        self, store: ImageStore, num_classes: int, truth: Tensor | None = None, task: str = "multiclass"
    ) -> None:
        self.store = store
        self.num_classes = check_int("num_classes", num_classes, 2)
        self.task = check_choice("task", task, TASKS)
        if truth is not None:
            truth = check_targets("public_truth", truth, len(store), num_classes, task, unknown_allowed=True)
        self._truth = truth
        self.table = LabelTable(len(store), num_classes, task)

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Tensor:
        return self.images([index])[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} images, image_shape={self.image_shape})"

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width of every image."""
        return self.store.shape

    @property
    def truth(self) -> Tensor | None:
        """True classes, int64 ``(m,)`` (attributes ``(m, a)``), -1 where not known, or None; for evaluation only."""
        return self._truth

    @property
    def labels(self) -> Tensor:
        """Released labels, int64 ``(m,)`` or ``(m, a)`` in shared memory, -1 where there is none."""
        return self.table.labels

    @property
    def soft_labels(self) -> Tensor | None:
        """Released soft labels, float32 ``(m, num_classes)``, or None where none was ever released.

        Rows that :attr:`soft_mask` doesn't mark have no meaning.
        """
        return self.table.soft if bool(self.soft_mask.any()) else None

    @property
    def soft_mask(self) -> Tensor:
        """Bool ``(m,)``: which images have a soft label."""
        return self.table.soft_rows

    @property
    def labeled_indices(self) -> Tensor:
        """int64: the images that have a label now, in ascending order."""
        return torch.nonzero(self.table.labeled).flatten()

    def images(self, indices: Tensor | Sequence[int] | slice | None = None) -> Tensor:
        """Images as float32 ``(n, channels, height, width)`` in [0, 1]; all of them by default."""
        return self.store.read(as_indices(indices, len(self)))

    def set_labels(
        self,
        indices: Tensor | Sequence[int] | slice,
        labels: Tensor | Sequence[int],
        soft: Tensor | None = None,
    ) -> None:
        """Give labels to some images; call it between epochs.

        Args:
            indices: which images: whole numbers, a bool mask or a slice. Where one occurs twice its last label stays.
            labels: their classes, int64 ``(n,)``; -1 takes a label away, so a release with refused queries
                can be passed as it is. Under ``"multilabel"`` attributes, int64 ``(n, num_classes)``.
            soft: class probabilities, float ``(n, num_classes)``; rows of labelled images sum to one (under
                ``"multilabel"`` each entry is a probability of its own). An image that had a soft label and
                now gets none keeps no soft label.

        Raises:
            IndexError: if an index is out of range.
            ValueError: if shapes, dtypes or values don't fit; nothing was changed then.
        """
        rows = as_indices(indices, len(self))
        values = torch.as_tensor(labels)
        if values.numel() == 0:
            values = values.to(torch.int64).reshape(0, *self.table.labels.shape[1:])
        values = check_targets(
            "labels", values.cpu(), len(rows), self.num_classes, self.task, unknown_allowed=True
        )
        known = known_rows(values)
        if soft is not None:
            soft = check_soft(soft, known, self.num_classes, self.task)
        # Repeated indices: numpy promises that the last one wins, torch doesn't. The views share memory.
        where = rows.numpy()
        self.table.labels.numpy()[where] = values.numpy()
        self.table.soft_rows.numpy()[where] = False
        if soft is not None:
            self.table.reserve_soft().numpy()[where] = soft.numpy()
            self.table.soft_rows.numpy()[where] = known.numpy()

    def clear_labels(self) -> None:
        """Take all labels away, hard and soft."""
        self.table.labels.fill_(-1)
        self.table.soft_rows.fill_(False)
