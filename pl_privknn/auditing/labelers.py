"""Attacks on labelers end to end: canaries in the private table, and guesses which of them were included."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pl_privknn._checks import check_choice, check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, Audit, Floats, Scores, audit_scores
from pl_privknn.auditing.canaries import (
    ADVERSARIES,
    AWAY,
    Adversary,
    Canaries,
    Evidence,
    StepEvidence,
    at_one_place,
    canaries_of,
    poison,
    true_votes,
)
from pl_privknn.labelers import PATE, IndKNN, Labeler, LocalReverseKNN, NoisySGDTeacher
from pl_privknn.labelers.base import (
    MakesModel,
    ProtectsPersons,
    RecognisesRecords,
    Release,
    UsesPublicFeatures,
)
from pl_privknn.labelers.noisy_sgd import clipped_factors, clipped_softmax_gradients
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.labelers.reverse_knn import RecordVotes
from pl_privknn.labelers.statistics import StatisticsTeacher
from pl_privknn.labelers.voting import VotingLabeler
from pl_privknn.privacy.mechanisms import AdditiveNoise, Adjacency, Charge
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.testing import FreeLedger

#: Canaries of an attack, over all its runs.
CANARIES = 3000
# Records of a person, where persons are the unit.
_RECORDS_OF_A_PERSON = 5
# Queries of Ind-KNN in units of a record's budget, and most queries of one budget; twice as many reveal a budget
# that is spent twice.
_BUDGETS, _MOST_ASKED = (1, 2, 4), 100
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
        enable_all_releases(made)
        if isinstance(made, ProtectsPersons):
            owners = self.records(torch.arange(len(labels)))
            made.private_owners = owners if self.unit == "person" else None
            features, labels = self.records(features), self.records(labels)
        if isinstance(made, RecognisesRecords):
            made.private_ids = torch.arange(len(labels))  # saves the identification of records
        if isinstance(made, UsesPublicFeatures):
            made.fit_public(self.public)
        made.fit(features, labels, self.num_classes)
        return made

    def with_canaries(self, noise: NoiseSource, placed: Canaries, present: Tensor) -> Labeler:
        """:meth:`fitted` to the table and the canaries that are ``present``, bool ``(m,)``; see :class:`Canaries`."""
        taken = torch.ones_like(present) if self.swaps else present
        labels = torch.where(present, placed.labels, placed.others) if self.swaps else placed.labels
        rest = slice(0, 0) if placed.alone else slice(None)
        return self.fitted(
            noise,
            torch.cat([self.features[rest], placed.features[taken]]),
            torch.cat([self.labels[rest], labels[taken]]),
        )


@dataclasses.dataclass(frozen=True)
class AttackerKnowledge:
    """Knowledge of an attacker who knows all other records. Private.

    Attributes:
        labeler: fitted to the table of these.
        votes: its votes, float64 ``(q, c)``; 0 where they are unknown.
        moves: difference that the only canary makes in them, float64 ``(q, c)``; None where there are several.
    """

    labeler: Labeler
    votes: Tensor
    moves: Tensor | None


def attack_labeler(
    target: Target,
    *,
    canaries: int = CANARIES,
    confidence: float = CONFIDENCE,
    noise: NoiseSource | None = None,
    subject: str | None = None,
    adversary: Adversary = "worst",
) -> Audit:
    """Attack a labeler with canaries; see :func:`~pl_privknn.auditing.canaries.canaries_of`.

    Args:
        target: what is attacked.
        canaries: minimum number; runs with fresh coins are added until it is reached.
        confidence: of the lower bounds.
        noise: of labelers and coins; the operating system's generator by default.
        subject: name in the result; the labeler's class by default.
        adversary: what the attacker controls; adversaries weaker than ``worst`` exist for teachers that answer query
            by query: Private-kNN, PATE and Ind-KNN.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries, confidence = check_int("canaries", canaries, 2), check_open_unit("confidence", confidence)
    check_choice("adversary", adversary, ADVERSARIES)
    seen, runs = score_labeler(
        target, canaries, noise if noise is not None else default_noise(), adversary=adversary
    )
    named = subject or type(target.labeler).__name__
    return audit_scores(
        named if adversary == "worst" else f"{named}, adversary {adversary}", seen, target.plan,
        delta=target.delta, adjacency=target.adjacency, confidence=confidence, runs=runs,
    )  # fmt: skip


def score_labeler(
    target: Target, canaries: int, noise: NoiseSource, *, adversary: Adversary = "worst"
) -> tuple[Scores, int]:
    """Scores of at least ``canaries`` canaries over runs with fresh coins.

    Returns:
        The scores, and the number of runs.
    """
    if adversary == "worst":
        placed = canaries_of(target.labeler, target.queries, target.num_classes)
    else:
        target, placed = _prepared(target, adversary, noise.stream("adversary"))
    if isinstance(target.labeler, PATE):
        target = _with_parts(target, noise.stream("parts"))
    placed, known = _known(target, placed, noise.stream("known"))
    alone = len(placed.labels) == 1
    reused: dict[bool, Labeler] = {}
    parts: list[list[Floats]] = []
    released, runs = "", -(-canaries // len(placed.labels))
    for run in range(runs):
        stream = noise.stream("run", run)
        present = stream.stream("canaries").bernoulli((len(placed.labels),), 0.5).bool()
        if alone and bool(present) in reused:
            labeler = reused[bool(present)]
            labeler.noise_source = stream.stream("labeler")
        else:
            labeler = target.with_canaries(stream.stream("labeler"), placed, present)
        if isinstance(labeler, VotingLabeler):  # its answers share the table, and nothing else
            reused[bool(present[0])] = labeler
        released, scores = observe(labeler, target, placed, known)
        # Low bits of floating-point noise are left out, as in audits of mechanisms.
        parts.append([present.numpy(), *(score.numpy().round(9) for score in scores)])
    coins, own, from_labels, *contrasts = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Scores(released, coins, own, contrasts, from_labels, alone or placed.apart), runs


def _prepared(target: Target, adversary: Adversary, noise: NoiseSource) -> tuple[Target, Canaries]:
    """Target as modified by an adversary, and its single canary."""
    labeler = target.labeler
    if not isinstance(labeler, VotingLabeler | IndKNN) or getattr(labeler, "attributes", None) is not None:
        raise ValueError(
            f"adversary={adversary!r}: {type(labeler).__name__} is not a teacher of classes that answers query by "
            "query (Private-kNN, PATE, Ind-KNN); leave it out"
        )
    features, labels, asked, classes = target.features, target.labels, target.queries, target.num_classes
    placed = at_one_place(asked, classes)
    own = (asked == placed.features).all(dim=1).nonzero()[0]
    if adversary == "natural":
        row = int(noise.integers(1, len(labels)))
        others = torch.arange(len(labels)) != row
        single = features[[row]], labels[[row]], (labels[[row]] + 1) % classes
        placed = Canaries(*single, features[[row]].repeat(len(asked), 1), torch.tensor([0]), fixed=True)
        target = dataclasses.replace(target, features=features[others], labels=labels[others])
    elif adversary == "poisoned_private":
        placed, more = poison(labeler, placed, features, labels)
        everyone = torch.cat([labels, placed.labels.expand(len(more))])
        target = dataclasses.replace(target, features=torch.cat([features, more]), labels=everyone)
    else:
        asked = asked.clone()
        if adversary == "poisoned_public":
            asked[::AWAY] = placed.features
        placed = dataclasses.replace(placed, queries=asked, about=own)
    return target, placed


def _known(target: Target, placed: Canaries, noise: NoiseSource) -> tuple[Canaries, AttackerKnowledge]:
    """Attacker's knowledge; assigns a single canary the class with the fewest votes at its place."""
    here = torch.ones(len(placed.labels), dtype=torch.bool)
    labeler = target.with_canaries(noise.stream("without"), placed, ~here)
    votes = true_votes(labeler, placed.queries, noise.stream("samples"))
    moves = None
    if len(here) == 1:
        if votes is not None and not (target.swaps or placed.fixed):
            placed = dataclasses.replace(placed, labels=votes[placed.about].argmin(dim=1))
        more = target.with_canaries(noise.stream("with"), placed, here)
        moved = true_votes(more, placed.queries, noise.stream("samples"))
        if moved is None or votes is None:
            moves = functional.one_hot(placed.labels, target.num_classes).double()
            moves = moves.expand(len(placed.queries), -1)
        else:
            moves = moved - votes
    return placed, AttackerKnowledge(labeler, torch.zeros(()) if votes is None else votes, moves)


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
    """PATE with the parts of all other records fixed; the effect of one record on these is tested separately."""
    made = copy.deepcopy(target.labeler)
    assert isinstance(made, PATE)
    settings: dict[str, Any] = {"num_classes": target.num_classes, "num_parts": made.num_teachers}
    parts = made.partitioner.assign(target.features, target.labels, noise=noise, **settings)
    made.partitioner = FixedPartition(parts)
    return dataclasses.replace(target, labeler=made)


# ---------------------------------------------------------------------------- by class of labelers


@functools.singledispatch
def enable_all_releases(labeler: Labeler) -> None:
    """Make a copy release everything that it charges, and drop its state from other tables; by default a no-op."""


@enable_all_releases.register
def _voting(labeler: VotingLabeler) -> None:
    labeler.release_counts = isinstance(labeler.noise, AdditiveNoise)
    if isinstance(labeler, PATE):
        labeler.progress = False


@enable_all_releases.register
def _reverse_knn(labeler: RecordVotes) -> None:
    labeler.soft = True


@enable_all_releases.register
def _ind_knn(labeler: IndKNN) -> None:
    labeler.soft = labeler.release_counts = True
    labeler.state_dir = labeler.ids = None
    # Earlier answers take part again: the attacker has them, and would only have to subtract them.
    labeler.switches = dataclasses.replace(labeler.switches, reuse=False)


@functools.singledispatch
def observe(
    labeler: Labeler, target: Target, placed: Canaries, known: AttackerKnowledge
) -> tuple[str, list[Tensor]]:
    """Query a fitted labeler as all rounds do, and score the canaries by its releases.

    Args:
        labeler: fitted to a table with some of the canaries.
        target: states rounds and answers.
        placed: the canaries.
        known: the attacker's knowledge.

    Returns:
        The kind of release, and scores of shape ``(m,)``: from all of it, from labels alone, and further ones.
    """
    paying, single, total = FreeLedger(), labeler.asks_in_batches, list(torch.zeros(4, len(placed.labels)))
    once = single or (isinstance(labeler, MakesModel) and labeler.releases_once)
    name = ""
    for _ in range(1 if once else target.rounds):
        release = labeler.label(placed.queries, paying, target.max_answers if single else None)
        rest = values_of(release, target.num_classes) - known.votes
        indicators = labels_of(release, target.num_classes)
        name = "labels" if release.soft is None else "probabilities"
        name = name if release.scores is None else "counts"
        if (moves := known.moves) is None:
            found = [rest, indicators, rest - rest.nanmean(dim=0)]
            scores = [_about(each, placed, target.swaps) for each in found]
        else:
            seen = release.answered[:, None]
            common = rest.nan_to_num(0.0).sum(dim=0) / seen.sum().clamp(min=1)
            weighed = [
                (rest, moves),
                (indicators, moves),
                ((rest - common) * seen, moves - moves.mean(dim=0)),
            ]
            scores = [(part.nan_to_num(0.0) * by).sum()[None] for part, by in weighed]
            # Refusals: a record that adds to the largest vote makes them fewer.
            largest = (known.votes + moves).amax(dim=1) - known.votes.expand_as(moves).amax(dim=1)
            scores.append(((seen.double() - 1)[:, 0] * largest).sum()[None])
        total = [sum_ + score for sum_, score in zip(total, scores, strict=False)]
    return name, [part.double() for part in total]


@observe.register
def _messages(
    labeler: LocalReverseKNN, target: Target, placed: Canaries, known: AttackerKnowledge
) -> tuple[str, list[Tensor]]:
    """Scores from one message of each client, without a curator; the canaries' messages are last."""
    if known.moves is not None:
        return observe.dispatch(object)(labeler, target, placed, known)
    counts = messages_of(labeler, placed.queries, target.num_classes)[-len(placed.labels) :]
    places = torch.arange(len(placed.labels)), placed.about
    own = (counts[(*places, placed.labels)] - counts[(*places, placed.others)]).double()
    seen = labels_of(labeler.label(placed.queries, FreeLedger()), target.num_classes)
    return "messages", [own, _about(seen, placed, target.swaps)]


def messages_of(labeler: LocalReverseKNN, queries: Tensor, num_classes: int) -> Tensor:
    """Counts in each client's message, float64 ``(n, s, c)``: the view of a server without a curator."""
    nearest, labels = labeler.votes(queries)
    protocol = labeler.protocol(len(queries), num_classes)
    noise = labeler.charge_and_draw(FreeLedger(), protocol.mechanism, 1, "messages")
    messages = protocol.randomize(nearest, labels, noise)
    return torch.stack([protocol.aggregate(message) for message in messages.split(1)])


@observe.register
def _budgets(
    labeler: IndKNN, target: Target, placed: Canaries, known: AttackerKnowledge
) -> tuple[str, list[Tensor]]:
    """Scores from queries that would spend a canary's budget up to four times."""
    if not placed.apart:  # the queries are the adversary's, or the run's
        return observe.dispatch(object)(labeler, target, placed, known)
    settings = labeler.parameters
    # At its own place κ = 1; it pays for the count and for the votes among the smallest possible number of
    # neighbours.
    cost = settings.count_cost + 1 / (2 * settings.sigma2**2 * settings.min_count)
    times = min(_MOST_ASKED, max(1, int(settings.rho / cost)))
    release = labeler.label(placed.queries.repeat(max(_BUDGETS) * times, 1), FreeLedger())
    shape = (max(_BUDGETS), times, len(placed.queries), target.num_classes)
    values = values_of(release, target.num_classes).nan_to_num(0.0).view(shape).sum(dim=1).cumsum(dim=0)
    indicators = labels_of(release, target.num_classes).view(shape)[0].sum(dim=0)
    first, *further = (values[times - 1] for times in _BUDGETS)
    own = [_about(each, placed, False) for each in (first, indicators, *further)]
    if known.moves is not None:
        return "counts", own
    # Subtract the mean of the run, which contains noise shared between queries.
    return "counts", [each - each.mean() for each in own]


@observe.register
def _statistics(
    labeler: StatisticsTeacher, target: Target, placed: Canaries, known: AttackerKnowledge
) -> tuple[str, list[Tensor]]:
    """Scores from all released sums."""
    indicators = labels_of(labeler.label(placed.queries, FreeLedger()), target.num_classes)
    table, evidence = known.labeler, Evidence(len(placed.labels))
    assert isinstance(table, StatisticsTeacher)
    table.centre = labeler.centre
    for number, taken in labeler.noisy_sums.items():

        def sums(labels: Tensor, number: int = number, weights: Tensor = taken.weights) -> Tensor:
            alone = (
                table.with_table(row[None], label[None], target.num_classes)
                for row, label in zip(placed.features, labels, strict=True)
            )
            return torch.stack([one.exact_sum(number, weights).flatten() for one in alone])

        each = sums(placed.labels) - (sums(placed.others) if target.swaps else 0.0)
        rest = taken.noisy - table.exact_sum(number, taken.weights)
        evidence.add(rest.flatten(), each, labeler.mechanism(number).sigma)
    return "weights", [evidence.scores(), _along(indicators, placed, target.swaps)]


@observe.register
def _steps(
    labeler: NoisySGDTeacher, target: Target, placed: Canaries, known: AttackerKnowledge
) -> tuple[str, list[Tensor]]:
    """Scores from the noisy sums of all steps; the attacker knows all other records, which precede the canaries."""
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    labeler.on_step = lambda *step: steps.append(step)
    evidence, paying = StepEvidence(len(placed.labels), labeler.mechanism), FreeLedger()
    own, constant, norm = placed.features, labeler.constant, labeler.mechanism.l2_sensitivity
    rest, labels = target.records(target.features), target.records(target.labels)
    from_labels = torch.zeros(len(placed.labels), dtype=torch.float64)
    for _ in range(target.rounds):
        steps.clear()
        indicators = labels_of(labeler.label(placed.queries, paying), target.num_classes)
        from_labels = from_labels + _along(indicators, placed, target.swaps)
        change = labeler.whitening_of(placed.queries)
        inputs_of_rest, inputs_of_own = change(rest), change(own)
        for weights, noisy, drawn in steps:
            among = drawn[drawn < len(rest)]
            others = clipped_softmax_gradients(weights, inputs_of_rest[among], labels[among], norm, constant)
            errors, inputs = clipped_factors(weights, inputs_of_own, placed.labels, norm, constant)
            lengths = errors.norm(dim=1) * inputs.norm(dim=1)
            along = torch.einsum("mc,cd,md->m", errors.double(), noisy - others, inputs.double())
            evidence.add(along / lengths.double().clamp(min=1e-12), lengths)
    return "weights", [evidence.scores, from_labels, evidence.contrast()]


# ---------------------------------------------------------------------------- answers


def values_of(release: Release, num_classes: int) -> Tensor:
    """Most detailed released values of each class, float64 ``(m, c)``: counts, else log-probabilities, else labels.

    Rows of queries without an answer are NaN.
    """
    if release.scores is not None:
        return release.scores.double()
    soft = release.soft
    values = labels_of(release, num_classes) if soft is None else soft.double().clamp(min=1e-30).log()
    return torch.where((release.labels >= 0)[:, None], values, torch.nan)


def labels_of(release: Release, num_classes: int) -> Tensor:
    """One-hot labels, float64 ``(m, c)``; zeros where refused."""
    return functional.one_hot(release.labels + 1, num_classes + 1)[:, 1:].double()


def _along(labels: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Projection of the labels of each canary's class onto its direction."""
    centred = canaries.queries.double() - canaries.queries.double().mean(dim=0)
    sums = (labels - labels.mean(dim=0)).T @ centred
    at, places = sums @ canaries.features.double().T, torch.arange(len(canaries.labels))
    own = at[canaries.labels, places]
    return own - at[canaries.others, places] if swaps else own


def _about(values: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Value of each canary's class at its query; where labels are exchanged, minus that of its other label."""
    rows = values.nan_to_num(0.0)[canaries.about]
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
    settings = (_CLASSES, 1, None, plan, delta, adjacency, unit)
    return Target(labeler, features, labels, public, public, *settings)


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
