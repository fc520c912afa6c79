"""The forms in which a training batch may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def split_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Labelled images, their labels and unlabelled images (or None) of a training batch.

    Raises:
        ValueError: if the batch is neither ``{"labeled": (x, y), "unlabeled": x}`` nor ``(x, y)``.
    """
    unlabeled = None
    labeled = batch
    if isinstance(batch, Mapping):
        if "labeled" not in batch:
            raise ValueError(f"batch with keys {sorted(batch)}: want 'labeled': (x, y) and 'unlabeled': x")
        labeled, unlabeled = batch["labeled"], batch.get("unlabeled")
    if not isinstance(labeled, Sequence) or len(labeled) != 2:
        raise ValueError(f"labelled batch of type {type(labeled).__name__}: want a pair (images, labels)")
    if unlabeled is not None and not isinstance(unlabeled, Tensor):
        unlabeled = unlabeled[0]
    return labeled[0], labeled[1], unlabeled
