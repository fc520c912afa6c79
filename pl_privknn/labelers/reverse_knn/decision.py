"""From noisy counts to labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_privknn.labelers.base import Release


def check_counts(counts: Tensor) -> None:
    """Raise ``ValueError`` unless ``counts`` is a table of counts; the message holds its shape alone."""
    if counts.ndim != 2 or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise ValueError(
            f"counts: shape {tuple(counts.shape)}, {counts.dtype}; want int64 (s, c), none below 0"
        )


def decide(
    noisy: Tensor, deviation: float, abstain: float, soft: bool, max_answers: int | None = None
) -> Release:
    """Turn noisy counts into labels; uses nothing but the released counts and public constants.

    Args:
        noisy: float64, shape ``(s, c)``.
        deviation: standard deviation of the noise on one count.
        abstain: refuse below this many standard deviations between the two largest counts.
        soft: give class probabilities too.
        max_answers: answer at most this many, the first ones.

    Returns:
        The labels, and the counts as they are, for what is to be made of them later.
    """
    released = noisy.float()
    top = noisy.topk(2, dim=1).values
    labels = noisy.argmax(dim=1)
    labels[top[:, 0] - top[:, 1] < abstain * deviation * math.sqrt(2.0)] = -1
    if max_answers is not None:
        labels[torch.nonzero(labels >= 0).flatten()[max_answers:]] = -1
    if not soft:
        return Release(labels, scores=released, score_deviation=deviation)
    positive = noisy.clamp(min=0)
    total = positive.sum(dim=1, keepdim=True)
    uniform = torch.full_like(positive, 1.0 / positive.shape[1])
    shares = torch.where(total > 0, positive / total.clamp(min=1e-12), uniform).float()
    return Release(labels, shares, released, deviation)
