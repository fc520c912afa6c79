"""What audits ask of teachers that release statistics: records that show in a sum, and what the sums say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.labelers.canaries import Canaries, Evidence, in_directions
from pl_privknn.privacy.mechanisms import Gaussian

if TYPE_CHECKING:
    from pl_privknn.labelers.statistics.teacher import StatisticsTeacher


class Taken(NamedTuple):
    """A release and the model at which it was taken, both float64 ``(c, p)`` and public."""

    noisy: Tensor
    weights: Tensor


def canaries_of(teacher: StatisticsTeacher, public: Tensor, num_classes: int) -> Canaries:
    """One for each class and direction of what the teacher makes of features; see :meth:`Labeler.canaries`."""
    if teacher.components is None:
        return in_directions(public, num_classes, torch.eye(public.shape[1]))
    kept = min(teacher.components, *public.shape)
    change = PublicWhitening(public.shape[1], kept, teacher.whitening).fit(public)
    return in_directions(public, num_classes, change.directions.T, change.mean)


def evidence_of(
    teacher: StatisticsTeacher, releases: Mapping[int, Taken], canaries: Canaries, known: StatisticsTeacher
) -> Evidence:
    """**Private.** What the releases say of canaries; see :meth:`Labeler.evidence`."""
    found = Evidence(len(canaries.labels))
    num_classes = len(next(iter(releases.values())).noisy) if releases else 2
    rows = list(
        zip(canaries.features.split(1), canaries.labels.split(1), canaries.others.split(1), strict=True)
    )
    for number, taken in releases.items():

        def adds(features: Tensor, labels: Tensor, number: int = number, taken: Taken = taken) -> Tensor:
            alone = known.with_table(features, labels, num_classes)
            return alone.exact_sum(number, taken.weights).flatten()

        each = [adds(features, labels) for features, labels, _ in rows]
        if teacher.adjacency == "replace_one":
            each = [one - adds(row[0], row[2]) for one, row in zip(each, rows, strict=True)]
        rest = taken.noisy - known.exact_sum(number, taken.weights)
        mechanism = teacher.mechanism(number)
        assert isinstance(mechanism, Gaussian)
        found.add(rest.flatten(), torch.stack(each), mechanism.sigma)
    return found
