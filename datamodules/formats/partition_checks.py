"""Checks of the parts of a data module: loaded, of its task, not empty, and not in two places at once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.formats.images import common_images


def check_part(data: Any, name: str, part: Any, *, may_be_empty: bool = False) -> Any:
    """``part``, if it fits the data module.

    Args:
        data: the data module.
        name: of the part, for messages.
        part: the images and labels.
        may_be_empty: whether it may hold no image.

    Raises:
        ValueError: where it doesn't fit.
    """
    if len(part) == 0 and not may_be_empty:
        raise ValueError(f"{type(data).__name__}: the {name} set is empty; it needs at least one image")
    if part.task != data.task:
        raise ValueError(
            f"{type(data).__name__}: the {name} set was made with task={part.task!r}, the data module is "
            f"{data.task!r}; pass task= to LabeledImages and PublicDataset"
        )
    return part


def check_by_record(name: str, numbers: Tensor | None, records: int) -> None:
    """Raise ``ValueError`` unless there is a number for each private record, or none at all."""
    if numbers is not None and (numbers.shape != (records,) or numbers.dtype != torch.int64):
        raise ValueError(f"{name}: want int64, one number for each private record; got {numbers.dtype}")


def check_overlap(overlap: str, public: PublicDataset, test: LabeledImages) -> None:
    """Warn, or raise ``ValueError``, where an image is both public and in the test set.

    Args:
        overlap: ``"error"``, ``"warn"`` or ``"ignore"`` (not even looked for).
        public: the public part.
        test: the test part.
    """
    if overlap == "ignore" or not (common := common_images(public.store, test.store)):
        return
    message = (
        f"{len(common)} test images are public images too (test image {common[0][1]} is public image "
        f"{common[0][0]}): accuracy on them says nothing about unseen images. Take them out of one of "
        'the two, or set overlap="warn" or overlap="ignore"'
    )
    if overlap == "error":
        raise ValueError(message)
    warnings.warn(message, stacklevel=2)


def known_truth(truth: Tensor | None) -> Tensor:
    """The truth of the public images; ``ValueError`` if it isn't known."""
    if truth is None:
        raise ValueError("train_on_truth=True, but the truth of the public images isn't known; leave it out")
    return truth


def present(name: str, stage: str, part: Any) -> Any:
    """``part``; ``RuntimeError`` if it isn't loaded yet."""
    if part is None:
        raise RuntimeError(f'the {name} data isn\'t loaded; call setup("{stage}") first (a trainer does)')
    return part
