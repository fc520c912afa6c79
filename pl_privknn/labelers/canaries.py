"""Canaries: records that an attack puts into a private table, and about which it then guesses."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

Form = Literal["one_run", "many_runs"]


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Records that are easy to find in what a labeler releases.

    Attributes:
        form: ``"one_run"`` where a run holds about half of them, each by its own coin; ``"many_runs"`` for a single
            record that many pairs of runs are made with and without.
        features: float32, shape ``(m, d)``.
        labels: int64, shape ``(m,)``.
        others: int64, shape ``(m,)``; under ``replace_one`` the label that a canary has where its coin falls the
            other way.
        queries: float32, shape ``(q, d)``; what the attacker asks.
        about: int64, shape ``(m,)``; the query whose answer tells most of each canary.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers.canaries import one_in_each_cell
        >>> canaries = one_in_each_cell(torch.eye(3), num_classes=2)
        >>> len(canaries.labels), canaries.about.tolist()
        (6, [0, 0, 1, 1, 2, 2])
    """

    form: Form
    features: Tensor
    labels: Tensor
    others: Tensor
    queries: Tensor
    about: Tensor


def one_in_each_cell(public: Tensor, num_classes: int) -> Canaries:
    """One canary for each query and class, at the query itself: it is the nearest record of its own cell alone."""
    about = torch.arange(len(public)).repeat_interleave(num_classes)
    labels = torch.arange(num_classes).repeat(len(public))
    return Canaries("one_run", public[about], labels, (labels + 1) % num_classes, public, about)


def own_directions(public: Tensor, num_classes: int, count: int = 500, length: float = 100.0) -> Canaries:
    """Canaries in random directions of their own, at right angles as far as the dimension allows.

    They are ``length`` times as long as a public example, so that what is not clipped shows.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(count, public.shape[1], generator=generator)
    typical = public.norm(dim=1).median().clamp(min=1e-6)
    features = torch.nn.functional.normalize(directions, dim=1) * typical * length
    labels = torch.arange(count) % num_classes
    return Canaries("one_run", features, labels, (labels + 1) % num_classes, features, torch.arange(count))


def hub(public: Tensor, num_classes: int) -> Canaries:
    """One record that reaches every query: the mean of the public features, with some label."""
    features = public.mean(dim=0, keepdim=True)
    label = torch.tensor([num_classes - 1])
    return Canaries("many_runs", features, label, label - 1, public, torch.tensor([0]))
