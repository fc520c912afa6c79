"""One run, many canaries: each in the table by its own coin."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.attacks.alone import Alone
from pl_privknn.attacks.student import train_students
from pl_privknn.attacks.target import Target, labels_of, ledger, name_of_release, values_of
from pl_privknn.labelers.base import HasCanaries, Labeler, MakesModel, votes_of
from pl_privknn.labelers.canaries import Canaries, Evidence
from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]
#: Runs from which a student is trained.
STUDENT_RUNS = 30
# Queries in budgets of a record; a budget that is spent twice shows from twice as many.
_BUDGETS = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class Scored:
    """What the attacker knows of each canary after some runs.

    Attributes:
        scores: larger speaks for presence, shape ``(m,)``.
        contrast: the same, without what all queries have in common; sees noise that queries share. Where records
            have budgets of their own, shape ``(2, m)``: from twice and from four times as many queries as those last
            for.
        from_labels: from labels alone.
        from_students: from students that were trained on the labels alone.
        present: the coins, shape ``(m,)``.
        released: what the scores are made of.
        alone: where canaries share nothing and scores are log-likelihood ratios: what they are made of.
        apart: see :class:`~pl_privknn.labelers.canaries.Canaries`.
    """

    scores: Floats
    contrast: Floats
    from_labels: Floats
    from_students: Floats
    present: NDArray[np.bool_]
    released: str
    alone: Alone | None = None
    apart: bool = False


def score_canaries(target: Target, canaries: Canaries, runs: int, noise: NoiseSource) -> Scored:
    """Run the labeler ``runs`` times with fresh coins, and score every canary of every run.

    Coins and scores of all runs stand one after another: each coin has a say in its own run alone.
    """
    swaps = target.adjacency == "replace_one"
    parts: list[list[Floats]] = []
    told: list[Tensor] = []
    sums: list[list[Evidence]] = []
    released = ""
    for run in range(runs):
        stream = noise.stream("one_run", run)
        present = stream.stream("canaries").bernoulli((len(canaries.labels),), 0.5)
        labels = torch.where(present, canaries.labels, canaries.others) if swaps else canaries.labels
        taken = torch.ones_like(present) if swaps else present
        # In places of their own nobody else has a say, so nobody else need be there.
        others = slice(0, 0) if canaries.spent_after else slice(None)
        labeler = target.fitted(
            stream.stream("labeler"),
            torch.cat([target.features[others], canaries.features[taken]]),
            torch.cat([target.labels[others], labels[taken]]),
        )
        if canaries.spent_after:
            scores, answers, released = _spending(target, labeler, canaries)
        else:
            sums.append([])
            scores, answers, released = _scores(target, labeler, canaries, swaps, sums[-1])
        parts.append([*scores, present.numpy()])
        told.append(answers)
    students = _of_students(target, canaries, torch.stack(told[:STUDENT_RUNS]), swaps)
    found = [np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)]
    coins, alone = found[3].astype(bool), Alone.of(sums)
    return Scored(found[0], found[1], found[2], students, coins, released, alone, canaries.apart)


def _scores(
    target: Target, labeler: Labeler, canaries: Canaries, swaps: bool, sums: list[Evidence]
) -> tuple[tuple[Floats, Floats, Floats], Tensor, str]:
    """Scores of all releases, of what queries do not share, and of labels; the labels; what was released.

    What released sums say is added to ``sums``.
    """
    paying = ledger()
    if getattr(labeler, "trust", "") == "local":
        # Of every client one message; canaries are the last ones. Labels come of all messages.
        told = labeler.told_by_each(canaries.queries, paying)[-len(canaries.labels) :]  # type: ignore[attr-defined]
        places = torch.arange(len(canaries.labels)), canaries.about
        own = (told[(*places, canaries.labels)] - told[(*places, canaries.others)]).double()
        release = labeler.label(canaries.queries, paying)
        seen = _about(labels_of(release, target.num_classes), canaries, swaps)
        return (own.numpy(), np.zeros(len(own)), seen.numpy()), release.labels, "messages"
    rounds = 1 if isinstance(labeler, MakesModel) and labeler.releases_once else target.rounds
    total, contrast, from_labels = torch.zeros(3, len(canaries.labels), dtype=torch.float64)
    known = _known(target, labeler, canaries, swaps)
    votes = None if known is None else votes_of(known, canaries.queries)
    exact = torch.zeros(()) if votes is None else votes.double()
    answers, name = [], ""
    for _ in range(rounds):
        release = labeler.label(canaries.queries, paying)
        answers.append(release.labels)
        evidence = None
        if known is not None and isinstance(labeler, HasCanaries):
            evidence = labeler.evidence(canaries, known)
        if evidence is not None:
            sums.append(evidence)
            total, contrast, name = total + evidence.scores(), contrast + evidence.contrast(), "weights"
            labels = labels_of(release, target.num_classes)
            from_labels = from_labels + _along(labels, canaries, swaps)
            continue
        name = name_of_release(labeler, release)
        rest = values_of(release, target.num_classes) - exact
        total = total + _about(rest, canaries, swaps)
        contrast = contrast + _about(rest - rest.nanmean(dim=0), canaries, swaps)
        from_labels = from_labels + _about(labels_of(release, target.num_classes), canaries, swaps)
    return (total.numpy(), contrast.numpy(), from_labels.numpy()), torch.cat(answers), name


def _spending(
    target: Target, labeler: Labeler, canaries: Canaries
) -> tuple[tuple[Floats, Floats, Floats], Tensor, str]:
    """As :func:`_scores`, of queries that are asked until budgets are spent, and on until four of them would be."""
    asked = max(_BUDGETS) * canaries.spent_after
    release = labeler.label(canaries.queries.repeat(asked, 1), ledger())
    shape = (max(_BUDGETS), canaries.spent_after, len(canaries.queries), target.num_classes)
    values = values_of(release, target.num_classes).nan_to_num(0.0).view(shape).sum(dim=1).cumsum(dim=0)
    told = labels_of(release, target.num_classes).view(shape)[0].sum(dim=0)
    # Less the mean of the run: noise that queries share is in all of them.
    own = [_about(each, canaries, False) for each in (*(values[times - 1] for times in _BUDGETS), told)]
    scores, *further, from_labels = ((each - each.mean()).numpy() for each in own)
    return (
        (scores, np.stack(further), from_labels),
        release.labels[: len(canaries.queries) * canaries.spent_after],
        name_of_release(labeler, release),
    )


def _of_students(target: Target, canaries: Canaries, told: Tensor, swaps: bool) -> Floats:
    """What students say of each canary at its own place; as many as were trained, one run after another."""
    queries = canaries.queries.repeat(told.shape[1] // len(canaries.queries), 1)
    students = train_students(target.public, queries, told, target.num_classes)
    places = torch.arange(len(canaries.labels))
    at = students(canaries.features)
    own = at[:, places, canaries.labels]
    return (own - at[:, places, canaries.others] if swaps else own).double().flatten().numpy()


def _known(target: Target, labeler: Labeler, canaries: Canaries, swaps: bool) -> Labeler | None:
    """The labeler with the records that the attacker knows; None where that would tell nothing."""
    if not isinstance(labeler, HasCanaries):
        return None
    if labeler.knows_votes():
        return target.fitted(labeler.noise_source.stream("known"), target.features, target.labels)
    if not labeler.knows_evidence():
        return None
    more = (canaries.features, canaries.others) if swaps else (canaries.features[:0], canaries.others[:0])
    table = torch.cat([target.features, more[0]]), torch.cat([target.labels, more[1]])
    return target.fitted(labeler.noise_source.stream("known"), *table)


def _along(labels: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """How far answers of each canary's class lie in its direction."""
    centred = canaries.queries.double() - canaries.queries.double().mean(dim=0)
    sums = (labels - labels.mean(dim=0)).T @ centred
    at = sums @ canaries.features.double().T
    places = torch.arange(len(canaries.labels))
    own = at[canaries.labels, places]
    return own - at[canaries.others, places] if swaps else own


def _about(values: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Each canary's own class at its own query, against its other label or the mean of all classes."""
    rows = values.nan_to_num(0.0)[canaries.about]
    own = rows.gather(1, canaries.labels[:, None])[:, 0]
    if swaps:
        return own - rows.gather(1, canaries.others[:, None])[:, 0]
    return own
