"""Many runs with one record and as many without it."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.attacks.target import Target, labels_of, ledger, name_of_release, values_of
from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.labelers.canaries import Canaries
from pl_privknn.labelers.pate.partition import Partitioner
from pl_privknn.labelers.pate.pate import PATE
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.testing.ledger import FreeLedger

Floats = NDArray[np.float64]
#: Queries of one call; several runs go into one, where answers have nothing in common but the table.
_AT_ONCE = 20_000


@dataclasses.dataclass(frozen=True)
class Sides:
    """Scores of runs with the record and without it, shape ``(n,)`` each, and what they are made of."""

    present: Floats
    absent: Floats
    labels_present: Floats
    labels_absent: Floats
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
    present = _table(target, canaries)
    tables = {True: present, False: _without(target, canaries)}
    if isinstance(target.labeler, PATE):
        target = _with_parts(target, noise.stream("parts"))
    labelers = {side: target.fitted(noise.stream("fit", int(side)), *table) for side, table in tables.items()}
    there, known = (labelers[side].exact_votes(canaries.queries) for side in (True, False))
    if there is not None and known is not None:
        direction, known = (there - known).double(), known.double()
    else:
        direction = torch.zeros(len(canaries.queries), target.num_classes, dtype=torch.float64)
        direction[:, canaries.labels[0]] = 1.0
        known = torch.zeros(())
    sides: dict[bool, tuple[Floats, Floats]] = {}
    released = ""
    for side, labeler in labelers.items():
        # One ledger: seeded noise is a function of its rows, and must not come twice.
        parts, paying = [], ledger()
        together = max(1, _AT_ONCE // len(canaries.queries)) if independent(labeler) else 1
        for start in range(0, runs, together):
            count = min(together, runs - start)
            if start and not independent(labeler):
                labeler = target.fitted(noise.stream("run", int(side), start), *tables[side])
            release = _asked(labeler, canaries.queries, count, paying)
            released = name_of_release(labeler, release)
            parts.append(_scores(target, release, count, direction, known))
        sides[side] = tuple(np.concatenate(each) for each in zip(*parts, strict=True))  # type: ignore[assignment]
    return Sides(sides[True][0], sides[False][0], sides[True][1], sides[False][1], released)


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
    return type(labeler).exact_votes is not Labeler.exact_votes and labeler.asks_in_batches


def _asked(labeler: Labeler, queries: Tensor, count: int, paying: FreeLedger) -> Release:
    if isinstance(labeler, PATE):
        votes = labeler.votes(queries)  # once: teachers say the same each time
        return labeler.aggregator.release(
            votes.repeat(count, 1),
            labeler.num_teachers,
            labeler.pay(paying),
            None,
        )
    return labeler.label(queries.repeat(count, 1), paying)


def _scores(
    target: Target, release: Release, count: int, direction: Tensor, known: Tensor
) -> tuple[Floats, Floats]:
    shape = (count, -1, target.num_classes)
    answered = release.answered.view(count, -1)
    if target.max_answers is not None:  # what a run would have refused is not looked at
        answered = answered & (answered.cumsum(dim=1) <= target.max_answers)
    values = values_of(release, target.num_classes).view(shape) - known
    values = torch.where(answered[..., None], values.nan_to_num(0.0), 0.0)
    labels = labels_of(release, target.num_classes).view(shape) * answered[..., None]
    scores, from_labels = ((part * direction).sum(dim=(1, 2)).numpy() for part in (values, labels))
    # Low bits of floating-point noise are left out, as everywhere in audits.
    return scores.round(9), from_labels
