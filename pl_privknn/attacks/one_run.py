"""One run, many canaries: each in the table by its own coin."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.attacks.target import Target, labels_of, ledger, name_of_release, values_of
from pl_privknn.labelers.base import Labeler
from pl_privknn.labelers.canaries import Canaries
from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Scored:
    """What the attacker knows of each canary after some runs.

    Attributes:
        scores: larger speaks for presence, shape ``(m,)``.
        from_labels: the same from labels alone.
        present: the coins, shape ``(m,)``.
        released: what the scores are made of.
    """

    scores: Floats
    from_labels: Floats
    present: NDArray[np.bool_]
    released: str


def score_canaries(target: Target, canaries: Canaries, runs: int, noise: NoiseSource) -> Scored:
    """Run the labeler ``runs`` times with fresh coins, and score every canary of every run.

    Coins and scores of all runs stand one after another: each coin has a say in its own run alone.
    """
    swaps = target.adjacency == "replace_one"
    parts: list[tuple[Floats, Floats, NDArray[np.bool_]]] = []
    released = ""
    for run in range(runs):
        stream = noise.stream("one_run", run)
        present = stream.stream("canaries").bernoulli((len(canaries.labels),), 0.5)
        labels = torch.where(present, canaries.labels, canaries.others) if swaps else canaries.labels
        taken = torch.ones_like(present) if swaps else present
        labeler = target.fitted(
            stream.stream("labeler"),
            torch.cat([target.features, canaries.features[taken]]),
            torch.cat([target.labels, labels[taken]]),
        )
        scores, from_labels, released = _scores(target, labeler, canaries, swaps)
        parts.append((scores, from_labels, present.numpy()))
    found = [np.concatenate(each) for each in zip(*parts, strict=True)]
    return Scored(found[0], found[1], found[2], released)


def _scores(target: Target, labeler: Labeler, canaries: Canaries, swaps: bool) -> tuple[Floats, Floats, str]:
    paying = ledger()
    if getattr(labeler, "trust", "") == "local":
        # Of every client one message; canaries are the last ones.
        told = labeler.told_by_each(canaries.queries, paying)[-len(canaries.labels) :]  # type: ignore[attr-defined]
        places = torch.arange(len(canaries.labels)), canaries.about
        scores = told[(*places, canaries.labels)] - told[(*places, canaries.others)]
        return scores.numpy(), np.zeros(len(scores)), "messages"
    known = _known(target, labeler, canaries)
    rounds = 1 if labeler.releases_once else target.rounds
    total, from_labels = torch.zeros(len(canaries.labels), dtype=torch.float64), torch.zeros(())
    for _ in range(rounds):
        release = labeler.label(canaries.queries, paying)
        total = total + _about(values_of(release, target.num_classes) - known, canaries, swaps)
        from_labels = from_labels + _about(labels_of(release, target.num_classes), canaries, swaps)
    return total.numpy(), from_labels.numpy(), name_of_release(labeler, release)


def _known(target: Target, labeler: Labeler, canaries: Canaries) -> Tensor:
    """What the records say that the attacker knows: all but the canaries."""
    if type(labeler).exact_votes is Labeler.exact_votes:
        return torch.zeros(())
    others = target.fitted(labeler.noise_source.stream("known"), target.features, target.labels)
    votes = others.exact_votes(canaries.queries)
    assert votes is not None
    return votes.double()


def _about(values: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Each canary's own class at its own query, against its other label or the mean of all classes."""
    rows = values.nan_to_num(0.0)[canaries.about]
    own = rows.gather(1, canaries.labels[:, None])[:, 0]
    if swaps:
        return own - rows.gather(1, canaries.others[:, None])[:, 0]
    return own
