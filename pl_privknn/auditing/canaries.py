"""Canaries for attacks on labelers, and votes of all other records as an attacker knows them.

:func:`canaries_of` and :func:`true_votes` dispatch on the labeler's class; ``register`` adds a class to them.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from pl_privknn.labelers.base import Labeler
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.reverse_knn import RecordVotes
from pl_privknn.labelers.voting import NeighborVoting
from pl_privknn.privacy.noise import NoiseSource

# Neighbours that measure the density of public examples, and examples compared.
_NEAR, _MOST_COMPARED = 20, 2000
# Samples over which votes are averaged, where records take part by chance.
_SAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Records that are easy to detect in a labeler's releases; each is included by an independent coin.

    Attributes:
        features: float32, shape ``(m, d)``.
        labels: int64, shape ``(m,)``. A single canary gets the class with the fewest votes at its place instead.
        others: int64, shape ``(m,)``; under ``replace_one`` the label that a canary has where its coin falls the
            other way.
        queries: float32, shape ``(q, d)``; what the attacker asks.
        about: int64, shape ``(m,)``; the most informative query about each canary.

    Example:
        >>> import torch
        >>> from pl_privknn.auditing.canaries import one_in_each_cell
        >>> canaries = one_in_each_cell(torch.eye(3), num_classes=2)
        >>> len(canaries.labels), canaries.about.tolist()
        (6, [0, 0, 1, 1, 2, 2])
    """

    features: Tensor
    labels: Tensor
    others: Tensor
    queries: Tensor
    about: Tensor


def one_in_each_cell(public: Tensor, num_classes: int) -> Canaries:
    """One canary for each query and class, placed at the query, so that it votes in that cell only."""
    about = torch.arange(len(public)).repeat_interleave(num_classes)
    labels = torch.arange(num_classes).repeat(len(public))
    return Canaries(public[about], labels, (labels + 1) % num_classes, public, about)


def at_one_place(public: Tensor, num_classes: int) -> Canaries:
    """One record at the public example with the closest neighbours, and repeated queries about it.

    There the votes depend least on the sample, so the record is most visible.
    """
    some = public[:_MOST_COMPARED]
    near = torch.cdist(some, some).kthvalue(min(_NEAR, len(some)), dim=1).values
    place = some[[int(near.argmin())]]
    label = torch.tensor([num_classes - 1])
    return Canaries(place, label, label - 1, place.repeat(len(public), 1), torch.tensor([0]))


@functools.singledispatch
def canaries_of(labeler: Labeler, public: Tensor, num_classes: int) -> Canaries:
    """Canaries for a labeler; by default those of :func:`at_one_place`.

    Args:
        labeler: with its settings; decides by its class.
        public: float32 features of the public examples that are asked about, shape ``(m, d)``.
        num_classes: number of classes.
    """
    return at_one_place(public, num_classes)


@canaries_of.register
def _of_record_votes(labeler: RecordVotes, public: Tensor, num_classes: int) -> Canaries:
    cells = one_in_each_cell(public, num_classes)
    if "replace_one" not in labeler.adjacencies:
        return cells
    # Canaries that share no cell after labels are exchanged.
    kept = (cells.labels % 2 == 0) & (cells.labels + 1 < num_classes)
    rows = {name: getattr(cells, name)[kept] for name in ("features", "labels", "others", "about")}
    return dataclasses.replace(cells, **rows)


@functools.singledispatch
def true_votes(labeler: Labeler, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    """**Private.** Votes before noise, ``(m, c)``, for an attacker who knows the table; None if unknown.

    Args:
        labeler: fitted.
        queries: float32 ``(m, d)``.
        noise: of sampling, where records are sampled; the mean over samples is returned.
    """
    return None


@true_votes.register
def _neighbors_votes(labeler: NeighborVoting, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    samples = 1 if labeler.sampling_rate == 1 else _SAMPLES
    votes = labeler.votes(queries.repeat(samples, 1), noise.bernoulli)
    return votes.view(samples, len(queries), -1).double().mean(dim=0)


@true_votes.register(PATE)
def _teachers_votes(labeler: PATE, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    return labeler.votes(queries).double()


@true_votes.register(RecordVotes)
def _counts(labeler: RecordVotes, queries: Tensor, noise: NoiseSource) -> Tensor | None:
    return labeler.counts(queries).double()
