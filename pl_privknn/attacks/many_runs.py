"""Many runs with one record and as many without it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.attacks.one_run import Scored
from pl_privknn.attacks.student import train_students
from pl_privknn.attacks.target import Target, labels_of, ledger, name_of_release, values_of
from pl_privknn.labelers.base import HasCanaries, Labeler, Release, votes_of
from pl_privknn.labelers.canaries import Canaries
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.labelers.voting import NeighborVoting
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.testing.ledger import FreeLedger

Floats = NDArray[np.float64]
#: Queries of one call; several runs go into one, where answers have nothing in common but the table.
_AT_ONCE = 20_000
#: Runs on either side from which a student is trained.
STUDENTS = 200
# Samples over which votes are averaged, where records take part by chance.
_SAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Sides:
    """Scores of runs with the record and without it, and what they are made of.

    Attributes:
        present: larger speaks for the record, shape ``(n,)``.
        absent: shape ``(n,)``.
        contrasts: further scores: without what all queries have in common, which sees noise that queries share; where
            records have budgets of their own, from more queries than those last for.
        labels: from labels alone.
        student: from students that were trained on the labels of some of the runs, shape ``(s,)`` each.
        released: what ``present`` and ``absent`` are made of.
    """

    present: Floats
    absent: Floats
    contrasts: Sequence[tuple[Floats, Floats]]
    labels: tuple[Floats, Floats]
    student: tuple[Floats, Floats]
    released: str


@dataclasses.dataclass(frozen=True, repr=False)
class GivenParts(Partitioner):
    """Parts that were dealt out before; the last records, if there are more, join the first part."""

    parts: Tensor

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        return torch.nn.functional.pad(self.parts, (0, len(labels) - len(self.parts)))


def score_runs(target: Target, canaries: Canaries, runs: int, noise: NoiseSource) -> Sides:
    """Run the labeler ``runs`` times on either side.

    The score of a run adds up what it says along the direction in which the record moves the exact votes, which an
    attacker knows who knows everybody else. Where a labeler does not tell its exact votes, that is the record's
    class.
    """
    if isinstance(target.labeler, PATE):
        target = _with_parts(target, noise.stream("parts"))
    without = target.fitted(noise.stream("fit", 0), *_without(target, canaries))
    if target.adjacency == "add_remove":
        canaries = _mislabelled(canaries, without)
    tables = {True: _table(target, canaries), False: _without(target, canaries)}
    labelers = {True: target.fitted(noise.stream("fit", 1), *tables[True]), False: without}
    direction, known = _direction(target, canaries, labelers, noise)
    sides: dict[bool, list[Floats]] = {}
    released, told = "", {}
    for side, labeler in labelers.items():
        # One ledger: seeded noise is a function of its rows, and must not come twice.
        parts, answers, paying = [], [], ledger()
        together = max(1, _AT_ONCE // len(canaries.queries)) if independent(labeler) else 1
        for start in range(0, runs, together):
            count = min(together, runs - start)
            if start and not independent(labeler):
                labeler = target.fitted(noise.stream("run", int(side), start), *tables[side])
            release = _asked(labeler, canaries.queries, count, paying)
            released = name_of_release(labeler, release)
            answered = _answered(target, release, count)
            parts.append(_scores(target, release, answered, direction, known))
            answers.append(torch.where(answered, release.labels.view(count, -1), -1))
        sides[side] = [np.concatenate(each) for each in zip(*parts, strict=True)]
        told[side] = torch.cat(answers)[:STUDENTS]
    students = _of_students(target, canaries, told, direction)
    present, contrast, labels = zip(sides[True], sides[False], strict=True)
    return Sides(*present, [contrast], labels, students, released)


def sides_of(scored: Scored) -> Sides:
    """Canaries that share nothing as so many runs, with the record or without it."""

    def parted(scores: Floats) -> tuple[Floats, Floats]:
        present = scored.present[: len(scores)]
        return scores[present], scores[~present]

    told, students = parted(scored.from_labels), parted(scored.from_students)
    contrasts = [parted(each) for each in np.atleast_2d(scored.contrast)]
    return Sides(*parted(scored.scores), contrasts, told, students, scored.released)


def _direction(
    target: Target, canaries: Canaries, labelers: dict[bool, Labeler], noise: NoiseSource
) -> tuple[Tensor, Tensor]:
    """How the record moves the votes, ``(q, c)``, and what they are without it."""
    votes = [
        labeler.mean_votes(canaries.queries, _SAMPLES, noise.stream("samples"))
        if isinstance(labeler, NeighborVoting) and labeler.sampling_rate < 1
        else votes_of(labeler, canaries.queries)
        for labeler in (labelers[True], labelers[False])
    ]
    if votes[0] is not None and votes[1] is not None:
        known = votes[1].double()
        return votes[0].double() - known, known
    direction = torch.zeros(len(canaries.queries), target.num_classes, dtype=torch.float64)
    direction[:, canaries.labels[0]] = 1.0
    return direction, torch.zeros(())


def _mislabelled(canaries: Canaries, without: Labeler) -> Canaries:
    """The record with the class that has fewest votes where it is."""
    votes = votes_of(without, canaries.queries[canaries.about])
    return canaries if votes is None else dataclasses.replace(canaries, labels=votes.argmin(dim=1))


def _of_students(
    target: Target, canaries: Canaries, told: dict[bool, Tensor], direction: Tensor
) -> tuple[Floats, Floats]:
    together = torch.cat([told[True], told[False]])
    students = train_students(target.public, canaries.queries, together, target.num_classes)
    scores = (students(canaries.queries).double() * direction).sum(dim=(1, 2)).numpy()
    return scores[: len(told[True])], scores[len(told[True]) :]


def _table(target: Target, canaries: Canaries) -> tuple[Tensor, Tensor]:
    return torch.cat([target.features, canaries.features]), torch.cat([target.labels, canaries.labels])


def _without(target: Target, canaries: Canaries) -> tuple[Tensor, Tensor]:
    if target.adjacency == "add_remove":
        return target.features, target.labels
    return torch.cat([target.features, canaries.features]), torch.cat([target.labels, canaries.others])


def _with_parts(target: Target, noise: NoiseSource) -> Target:
    """PATE with all other records' parts held: what one record more does to theirs has tests of its own."""
    made = copy.deepcopy(target.labeler)
    assert isinstance(made, PATE)
    parts = made.partitioner.assign(
        target.features,
        target.labels,
        num_classes=target.num_classes,
        num_parts=made.num_teachers,
        noise=noise,
    )
    made.partitioner = GivenParts(parts)
    return dataclasses.replace(target, labeler=made)


def independent(labeler: Labeler) -> bool:
    """Whether answers share nothing but the table, so that many runs go into one call."""
    return isinstance(labeler, HasCanaries) and labeler.knows_votes() and labeler.asks_in_batches


def _asked(labeler: Labeler, queries: Tensor, count: int, paying: FreeLedger) -> Release:
    if isinstance(labeler, PATE):
        votes = labeler.votes(queries)  # once: teachers say the same each time
        return labeler.release(votes.repeat(count, 1), paying)
    if isinstance(labeler, NeighborVoting):
        return labeler.label_repeatedly(queries, count, paying)
    return labeler.label(queries.repeat(count, 1), paying)


def _answered(target: Target, release: Release, count: int) -> Tensor:
    answered = release.answered.view(count, -1)
    if target.max_answers is not None:  # what a run would have refused is not looked at
        answered = answered & (answered.cumsum(dim=1) <= target.max_answers)
    return answered


def _scores(
    target: Target, release: Release, answered: Tensor, direction: Tensor, known: Tensor
) -> tuple[Floats, Floats, Floats]:
    shape, seen = (len(answered), -1, target.num_classes), answered[..., None]
    rest = (values_of(release, target.num_classes).view(shape) - known).nan_to_num(0.0) * seen
    common = rest.sum(dim=1, keepdim=True) / seen.sum(dim=1, keepdim=True).clamp(min=1)
    labels = labels_of(release, target.num_classes).view(shape) * seen
    own = direction - direction.mean(dim=0)
    weighed = ((rest, direction), ((rest - common) * seen, own), (labels, direction))
    scores, contrast, from_labels = ((part * by).sum(dim=(1, 2)).numpy() for part, by in weighed)
    # Low bits of floating-point noise are left out, as everywhere in audits.
    return scores.round(9), contrast.round(9), from_labels
