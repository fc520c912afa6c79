"""Attacks on labelers end to end: canaries in the private table, and guesses which of them were included."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, Audit, Scores, audit_scores
from pl_privknn.auditing.canaries import Canaries, canaries_of, true_votes
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE, IndKNN, Labeler
from pl_privknn.labelers.base import (
    MakesModel,
    Release,
)
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.labelers.reverse_knn import RecordVotes
from pl_privknn.labelers.voting import VotingLabeler
from pl_privknn.privacy.mechanisms import AdditiveNoise, Adjacency, Charge
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.testing import FreeLedger

#: Canaries of an attack, over all its runs.
CANARIES = 3000
# Records of a person, where persons are the unit.
_RECORDS_OF_A_PERSON = 5
# Images of one batch.
_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Target:
    """Labeler under attack, with its data and plan as in a run.

    Attributes:
        labeler: with its settings; only copies of it are fitted.
        features: of the private table, float32 ``(n, d)``.
        labels: int64 ``(n,)``.
        public: features of all public examples, float32 ``(p, d)``.
        queries: features of the run's queries, float32 ``(m, d)``.
        num_classes: number of classes.
        rounds: number of rounds with queries; they repeat the same queries, unless queries are answered one by one.
        max_answers: largest number of answers; None for all.
        plan: planned releases of the run.
        delta: δ of the guarantee.
        adjacency: neighbouring relation of the guarantee.
        unit: with ``person``, each record of the table, and each canary, becomes a person with several equal records.
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
    unit: Unit = "record"

    @property
    def swaps(self) -> bool:
        """Whether neighbouring tables differ by the exchange of a record."""
        return self.adjacency == "replace_one"

    def records(self, rows: Tensor) -> Tensor:
        """Rows of a table, repeated for each record of a unit of privacy."""
        return rows.repeat_interleave(_RECORDS_OF_A_PERSON, dim=0) if self.unit == "person" else rows

    def fitted(self, noise: NoiseSource, features: Tensor, labels: Tensor) -> Labeler:
        """Copy of the labeler fitted to another table, which releases everything that it charges."""
        made = copy.deepcopy(self.labeler)
        made.noise_source = noise
        release_everything(made)
        owners = self.records(torch.arange(len(labels))) if self.unit == "person" else None
        features, labels = self.records(features), self.records(labels)
        records = PrivateRecords.of(
            features,
            labels,
            self.num_classes,
            owners=owners,
            ids=torch.arange(len(labels)),  # saves the identification of records
            public=self.public,
        )
        made.fit(records)
        return made

    def with_canaries(self, noise: NoiseSource, placed: Canaries, present: Tensor) -> Labeler:
        """:meth:`fitted` to the table and the canaries that are ``present``, bool ``(m,)``; see :class:`Canaries`."""
        taken = torch.ones_like(present) if self.swaps else present
        labels = torch.where(present, placed.labels, placed.others) if self.swaps else placed.labels
        return self.fitted(
            noise,
            torch.cat([self.features, placed.features[taken]]),
            torch.cat([self.labels, labels[taken]]),
        )


def attack_labeler(
    target: Target,
    *,
    canaries: int = CANARIES,
    confidence: float = CONFIDENCE,
    noise: NoiseSource | None = None,
) -> Audit:
    """Attack a labeler with canaries; see :func:`~pl_privknn.auditing.canaries.canaries_of`.

    Args:
        target: what is attacked.
        canaries: minimum number; runs with fresh coins are added until it is reached.
        confidence: of the lower bound.
        noise: of labelers and coins; the operating system's generator by default.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries, confidence = check_int("canaries", canaries, 2), check_open_unit("confidence", confidence)
    seen, runs = score_labeler(target, canaries, noise or default_noise())
    return audit_scores(
        type(target.labeler).__name__, seen, target.plan,
        delta=target.delta, adjacency=target.adjacency, confidence=confidence, runs=runs,
    )  # fmt: skip


def score_labeler(target: Target, canaries: int, noise: NoiseSource) -> tuple[Scores, int]:
    """Scores of at least ``canaries`` canaries over runs with fresh coins.

    Returns:
        The scores, and the number of runs.
    """
    placed = canaries_of(target.labeler, target.queries, target.num_classes)
    if isinstance(target.labeler, PATE):
        target = _with_parts(target, noise.stream("parts"))
    placed, votes, moves = _known(target, placed, noise.stream("known"))
    reused: dict[bool, Labeler] = {}
    coins, scores, released, runs = [], [], "", -(-canaries // len(placed.labels))
    for run in range(runs):
        stream = noise.stream("run", run)
        present = stream.stream("canaries").bernoulli((len(placed.labels),), 0.5).bool()
        if bool(present[0]) in reused:
            labeler = reused[bool(present[0])]
            labeler.noise_source = stream.stream("labeler")
        else:
            labeler = target.with_canaries(stream.stream("labeler"), placed, present)
        if isinstance(labeler, VotingLabeler) and len(present) == 1:  # runs share the table, and nothing else
            reused[bool(present[0])] = labeler
        released, score = observe(labeler, target, placed, votes, moves)
        # Low bits of data plus floating-point noise reveal more than the ideal noise that is claimed (Mironov 2012).
        scores.append(score.numpy().round(9))
        coins.append(present.numpy())
    return Scores(released, np.concatenate(coins), np.concatenate(scores)), runs


def _known(target: Target, placed: Canaries, noise: NoiseSource) -> tuple[Canaries, Tensor, Tensor | None]:
    """Attacker's knowledge, which is private.

    Returns:
        The canaries, a single one with the class that has the fewest votes at its place; votes of all other records,
        float64 ``(q, c)``, 0 where they are unknown; and the difference that a single canary makes in them, float64
        ``(q, c)``, None for several canaries.
    """
    here = torch.ones(len(placed.labels), dtype=torch.bool)
    labeler = target.with_canaries(noise.stream("without"), placed, ~here)
    votes = true_votes(labeler, placed.queries, noise.stream("samples"))
    if len(here) > 1:
        return placed, torch.zeros(()) if votes is None else votes, None
    if votes is None:
        moves = functional.one_hot(placed.labels, target.num_classes).double()
        return placed, torch.zeros(()), moves.expand(len(placed.queries), -1)
    if not target.swaps:
        placed = dataclasses.replace(placed, labels=votes[placed.about].argmin(dim=1))
    more = target.with_canaries(noise.stream("with"), placed, here)
    moved = true_votes(more, placed.queries, noise.stream("samples"))
    assert moved is not None
    return placed, votes, moved - votes


@dataclasses.dataclass(frozen=True, repr=False)
class FixedPartition(Partitioner):
    """Fixed partition; records beyond its length join the first part."""

    takes_groups: ClassVar[bool] = True
    parts: Tensor

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        return functional.pad(self.parts, (0, len(labels) - len(self.parts)))


def _with_parts(target: Target, noise: NoiseSource) -> Target:
    """PATE with the parts of all other records fixed; one record is taken to change the part that it is in alone."""
    made = copy.deepcopy(target.labeler)
    assert isinstance(made, PATE)
    table, count = (target.features, target.labels), made.num_teachers
    parts = made.partitioner.assign(*table, num_classes=target.num_classes, num_parts=count, noise=noise)
    made.partitioner = FixedPartition(parts)
    return dataclasses.replace(target, labeler=made)


def release_everything(labeler: Labeler) -> None:
    """Make a copy release everything that it charges, and drop its state from other tables."""
    if isinstance(labeler, VotingLabeler):
        labeler.release_counts = isinstance(labeler.noise, AdditiveNoise)
    if isinstance(labeler, PATE):
        labeler.progress = False
    if isinstance(labeler, RecordVotes):
        labeler.soft = True
    if isinstance(labeler, IndKNN):
        labeler.soft = labeler.release_counts = True
        labeler.state_dir = labeler.ids = None
        # Earlier answers take part again: the attacker has them, and would only have to subtract them.
        labeler.switches = dataclasses.replace(labeler.switches, reuse=False)


def observe(
    labeler: Labeler, target: Target, placed: Canaries, votes: Tensor, moves: Tensor | None
) -> tuple[str, Tensor]:
    """Query a fitted labeler as all rounds do, and score the canaries by its releases.

    Args:
        labeler: fitted to a table with some of the canaries.
        target: states rounds and answers.
        placed: the canaries.
        votes: of all other records, as the attacker knows them; see :func:`_known`.
        moves: difference that a single canary makes in them.

    Returns:
        The kind of release, and scores, float64 ``(m,)``.
    """
    paying, batches = FreeLedger(), labeler.asks_in_batches
    once = batches or (isinstance(labeler, MakesModel) and labeler.releases_once)
    name, total = "", torch.zeros(len(placed.labels), dtype=torch.float64)
    for _ in range(1 if once else target.rounds):
        release = labeler.label(placed.queries, paying, target.max_answers if batches else None)
        name, values = values_of(release, target.num_classes)
        rest = (values - votes).nan_to_num(0.0)
        total += _about(rest, placed, target.swaps) if moves is None else (rest * moves).sum()
    return name, total


def values_of(release: Release, num_classes: int) -> tuple[str, Tensor]:
    """Most detailed released values, and their name: counts, else log-probabilities, else one-hot labels.

    Returns:
        The name, and float64 ``(m, c)``; rows of queries without an answer are NaN.
    """
    if release.scores is not None:
        return "counts", release.scores.double()
    if release.soft is not None:
        name, values = "probabilities", release.soft.double().clamp(min=1e-30).log()
    else:
        name, values = "labels", functional.one_hot(release.labels + 1, num_classes + 1)[:, 1:].double()
    return name, torch.where(release.answered[:, None], values, torch.nan)


def _about(values: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Value of each canary's class at its query; where labels are exchanged, minus that of its other label."""
    rows = values[canaries.about]
    own = rows.gather(1, canaries.labels[:, None])[:, 0]
    return own - rows.gather(1, canaries.others[:, None])[:, 0] if swaps else own


# ---------------------------------------------------------------------------- what to attack

_QUERIES, _CLASSES, _RECORDS = 20, 5, 60


def small_target(labeler: Labeler, delta: float = 1e-5, unit: Unit = "record") -> Target:
    """Attack target with a small table: random records, and public examples along the axes.

    Large tables hide the effect of one record, and faults with it; a small table reveals faults of the code.
    """
    generator = torch.Generator().manual_seed(3)
    public = torch.eye(_QUERIES) + 0.01 * torch.randn(_QUERIES, _QUERIES, generator=generator)
    features = torch.randn(_RECORDS, _QUERIES, generator=generator)
    labels = torch.randint(0, _CLASSES, (_RECORDS,), generator=generator)
    plan, adjacency = labeler.plan(_QUERIES, _QUERIES, _CLASSES, rounds=1), labeler.adjacencies[0]
    return Target(labeler, features, labels, public, public, _CLASSES, 1, None, plan, delta, adjacency, unit)


def target_of_config(document: dict[str, Any], path: str | Path) -> Target:
    """Attack target of a configuration: its labeler, private table in the features of the first round, and queries.

    Later rounds are attacked as if they used those features too, since no student is trained. A user's own data
    module is not run; attack it in Python, with :class:`Target`.

    Args:
        document: the configuration, with sections ``labeling`` and ``data``.
        path: where it came from, for messages.

    Raises:
        ValueError: for sections that don't parse, or labelers of other data than one class an image.
    """
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.callbacks.labeling_arguments import STUDENT, extractor_of
    from pl_privknn.callbacks.labeling_round import public_extractor
    from pl_privknn.config import ConfigurationError, instantiate
    from pl_privknn.planning import labeling_plan
    from pl_privknn.training.configured import made_data

    try:
        labeling = instantiate(document, {"labeling": PrivateLabeler}, own_classes=True).labeling
        data = made_data(document.get("data"), own_classes=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if labeling.labeler is None or data.task != "multiclass" or labeling.labeler.tasks != ("multiclass",):
        raise ValueError(f"{path}: labeling.labeler must answer one class per example to be attacked")
    data.setup("fit")
    first = labeling.features[0]
    if first == STUDENT:
        raise ValueError(
            f"{path}: labeling.features starts with the student, which is not trained here; start with an extractor"
        )
    extract, _ = public_extractor(extractor_of(first, nn.Identity()), data, torch.device("cpu"))
    everything = torch.arange(len(data.public)).split(_BATCH)
    public = torch.cat([extract(data.public.images(part)) for part in everything]).float()
    tables = [(extract(images), labels) for images, labels in data.private_batches(_BATCH)]
    asking = [count for count in labeling.queries_per_round if count] or [len(public)]
    return Target(
        labeler=labeling.labeler,
        features=torch.cat([features for features, _ in tables]).float(),
        labels=torch.cat([labels for _, labels in tables]),
        public=public,
        queries=_queries(labeling, public, asking),
        num_classes=data.num_classes,
        rounds=len(asking),
        max_answers=labeling.max_answers,
        plan=labeling_plan(labeling, data.num_classes, len(public)),
        delta=labeling.budget.delta,
        adjacency=labeling.budget.adjacency,
        unit=labeling.budget.unit,
    )


def _queries(labeling: Any, public: Tensor, asking: list[int]) -> Tensor:
    """Queries of all rounds for teachers that answer one by one; else of the first round, which later ones repeat."""
    from pl_privknn.callbacks.selection import PublicPool

    count = sum(asking) if labeling.labeler.asks_in_batches else asking[0]
    unlabelled = torch.full((len(public),), -1)
    pool = PublicPool(unlabelled, torch.zeros(len(public), dtype=torch.bool), lambda: public)
    generator = torch.Generator().manual_seed(labeling.options.seed)
    return labeling.select(pool, min(count, len(public)), generator).query_features(public)
