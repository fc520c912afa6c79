"""What is attacked: a labeler with its settings, a private table and the queries of a run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn.labelers import IndKNN
from pl_privknn.labelers.base import Labeler, RecognisesRecords, Release, UsesPublicFeatures, canaries_of
from pl_privknn.labelers.canaries import Canaries
from pl_privknn.privacy.mechanisms import AdditiveNoise, Adjacency, Charge
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.testing.ledger import FreeLedger

_MEMORIES = ("state_dir", "ids", "cache")


@dataclasses.dataclass(frozen=True)
class Target:
    """A labeler as a run would use it.

    Attributes:
        labeler: with its settings; never fitted itself, copies are.
        features: of the private table, float32 ``(n, d)``.
        labels: int64 ``(n,)``.
        public: features of all public examples, float32 ``(p, d)``.
        queries: features of what the run asks about, float32 ``(m, d)``.
        num_classes: number of classes.
        rounds: rounds that ask something.
        max_answers: the most answers; None for all.
        plan: what the run states and pays for.
        delta: δ of the guarantee.
        adjacency: neighbouring relation of the guarantee.
    """

    labeler: Labeler
    features: Tensor
    labels: Tensor
    public: Tensor
    queries: Tensor
    num_classes: int
    rounds: int
    max_answers: int | None
    plan: Sequence[Charge]
    delta: float
    adjacency: Adjacency

    def canaries(self) -> Canaries:
        """The labeler's own."""
        return canaries_of(self.labeler, self.queries, self.num_classes)

    def fresh(self, noise: NoiseSource) -> Labeler:
        """A copy that lets out all that it pays for: counts where labels would do, and probabilities."""
        made = copy.deepcopy(self.labeler)
        made.noise_source = noise
        # A copy remembers nothing: neither the budgets of the real records nor teachers of another table.
        for kept in _MEMORIES:
            if hasattr(made, kept):
                setattr(made, kept, None)
        for owner in (made, getattr(made, "aggregator", None)):
            if getattr(owner, "release_counts", None) is False and _adds_noise(owner):
                owner.release_counts = True  # type: ignore[union-attr]
        for kept in ("soft", "keeps_steps"):
            if hasattr(made, kept):
                setattr(made, kept, True)
        if isinstance(made, IndKNN):
            # Earlier answers take part again: the attacker has them, and would only have to subtract them.
            made.switches = dataclasses.replace(made.switches, reuse=False)
            made.groups = None  # canaries have no owners who chose less than the ε that the ledger promises
        if hasattr(made, "progress"):
            made.progress = False
        return made

    def fitted(self, noise: NoiseSource, features: Tensor, labels: Tensor) -> Labeler:
        """A fresh copy with a table."""
        made = self.fresh(noise)
        if isinstance(made, RecognisesRecords):
            made.private_ids = torch.arange(len(labels))  # spares the work of telling records apart
        if isinstance(made, UsesPublicFeatures):
            made.fit_public(self.public)
        made.fit(features, labels, self.num_classes)
        return made


def _adds_noise(owner: object) -> bool:
    return not hasattr(owner, "noise") or isinstance(owner.noise, AdditiveNoise)


def values_of(release: Release, num_classes: int) -> Tensor:
    """The most that a release says of each class, float64 ``(m, c)``: counts, else log-odds, else labels.

    Rows of queries without an answer are NaN.
    """
    if release.scores is not None:
        return release.scores.double()
    if release.soft is not None:
        told = release.soft.double().clamp(min=1e-30).log()
    else:
        told = labels_of(release, num_classes)
    return torch.where((release.labels >= 0)[:, None], told, torch.nan)


def labels_of(release: Release, num_classes: int) -> Tensor:
    """Labels alone as indicators, float64 ``(m, c)``; zeros where refused."""
    return torch.nn.functional.one_hot(release.labels + 1, num_classes + 1)[:, 1:].double()


def name_of_release(labeler: Labeler, release: Release) -> str:
    """What the attacker saw, in a word."""
    if getattr(labeler, "trust", "") == "local":
        return "messages"
    if release.scores is not None:
        return "counts"
    return "probabilities" if release.soft is not None else "labels"


def ledger() -> FreeLedger:
    """Notes charges and asks for nothing: an attack is no release."""
    return FreeLedger()
