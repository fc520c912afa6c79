"""Audits of what draws noise: mechanisms on their worst inputs, and whole labelers with their own canaries."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.auditing.bounds import CONFIDENCE, VERDICT, Audit, Floats, IndependentCanaries, Scores, judge
from pl_privknn.labelers.base import (
    HasCanaries,
    Labeler,
    MakesModel,
    ProtectsPersons,
    RecognisesRecords,
    Release,
    UsesPublicFeatures,
    canaries_of,
    check_protects,
)
from pl_privknn.labelers.canaries import Canaries, Evidence
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.pate_training import Partitioner, Teachers, TrainedTeachers
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.privacy.accounting.accountant import account, merge_charges
from pl_privknn.privacy.accounting.rdp import sampled_loss
from pl_privknn.privacy.mechanisms import (
    AdditiveNoise,
    Adjacency,
    Charge,
    ExponentialArgmax,
    Gaussian,
    Laplace,
    NoisyScreening,
    RandomizedResponse,
)
from pl_privknn.privacy.mechanisms.base import Unit, check_adjacency
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.testing import FreeLedger

if TYPE_CHECKING:
    from pl_privknn.features.base import Extractor

#: (with the record, runs, noise) -> one score a run, shape ``(runs,)``: larger speaks for the record.
Experiment = Callable[[bool, int, NoiseSource], ArrayLike]
#: Single releases of mechanisms that one call draws at a time, and that one audit draws on either side.
_RECORDS_OF_A_PERSON = 5
_AT_A_TIME, MAX_DRAWS = 1 << 20, 5_000_000

#: Canaries of a one-run audit, over all its runs, and runs on either side of the others; of a labeler that is fitted
#: for each run, because its answers spend something, fewer.
CANARIES, RUNS, RUNS_ONE_BY_ONE = 3000, 3000, 300
# Canaries that are judged as so many runs, half of them on either side.
_FEWEST_INDEPENDENT = 500
# Queries in budgets of a record; a budget that is spent twice shows from twice as many.
_BUDGETS = 1, 2, 4
#: Queries of one call; several runs go into one, where answers have nothing in common but the table.
_AT_ONCE = 20_000
# Samples over which votes are averaged, where records take part by chance; images of one batch.
_SAMPLES, _BATCH = 200, 1024
# What of a labeler is memory: a copy starts without.
_MEMORIES = ("state_dir", "ids", "cache")


# ---------------------------------------------------------------------------- mechanisms


def audit(
    charges: Sequence[Charge],
    experiment: Experiment,
    *,
    delta: float = 1e-5,
    trials: int = 50_000,
    confidence: float = CONFIDENCE,
    verdict: float = VERDICT,
    adjacency: Adjacency = "add_remove",
    noise: NoiseSource | None = None,
    subject: str = "releases",
) -> Audit:
    """Hold a claim against runs of what it is about.

    Args:
        charges: the claim.
        experiment: runs the release with or without the record and returns one score a run. Any score is
            valid; the log-likelihood ratio sees most.
        delta: δ.
        trials: runs on either side; half of them choose, half test.
        confidence: of the lower bound, in (0, 1).
        verdict: a true claim is called violated with probability at most 1 − this.
        adjacency: neighbouring relation of the claim.
        noise: where protective randomness comes from; the operating system's generator by default.
        subject: what is audited, for the result.

    Raises:
        ValueError: for arguments out of range, or scores that are NaN or of another shape.
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    trials, confidence = check_int("trials", trials, minimum=200), check_open_unit("confidence", confidence)
    source = noise if noise is not None else default_noise()
    sides = []
    for present in (True, False):
        scores = experiment(present, trials, source.stream("audit", int(present)))
        sides.append(np.asarray(scores, dtype=np.float64))
        if sides[-1].shape != (trials,):
            raise ValueError(
                f"experiment: returned shape {sides[-1].shape}; want one score for each of {trials} runs"
            )
    seen = Scores("many_runs", "outcomes", np.arange(2 * trials) < trials, np.concatenate(sides))
    return judge(
        subject, seen, charges, delta=delta, adjacency=adjacency, confidence=confidence, verdict=verdict,
        runs=trials, breach=False,
    )  # fmt: skip


def audit_records(
    charges: Sequence[Charge],
    *,
    delta: float = 1e-5,
    trials: int = 50_000,
    adjacency: Adjacency = "add_remove",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Audit each mechanism of a list on its worst inputs, and all of them together where there are several.

    Args:
        charges: releases. Of many equal ones as many are run as ``MAX_DRAWS`` allows, against the claim for
            that many.
        delta: δ.
        trials: as in :func:`audit`, for each row.
        adjacency: likewise.
        **settings: further arguments of :func:`audit`.

    Returns:
        One row a mechanism: ``releases`` (that were run), ``recorded`` (in the list) and the fields of
        :class:`~pl_privknn.auditing.bounds.Audit`; ``verdict="NOT DRAWN"`` with a ``reason`` for mechanisms that draw
        nothing. A last row, ``all of them``, if there are several.
    """
    most = max(1, MAX_DRAWS // check_int("trials", trials, minimum=200))
    options: dict[str, Any] = {"delta": delta, "adjacency": adjacency}

    def row(name: str, part: list[Charge], recorded: int) -> dict[str, Any]:
        found = audit(part, experiment_of(part), trials=trials, subject=name, **options, **settings)
        return {"releases": sum(charge.count for charge in part), "recorded": recorded, **found.to_dict()}

    rows, drawn = [], []
    for charge in merge_charges(charges):
        mechanism = charge.mechanism
        if _draw.dispatch(type(mechanism.bare)) is _draw.dispatch(object):
            reason = f"{mechanism.kind} stands for a total or a bound and draws nothing"
            stated = {"subject": mechanism.label, "releases": 0, "recorded": charge.count, "delta": delta}
            epsilon = account([charge], exact=False, **options).epsilon
            rows.append({**stated, "epsilon": epsilon, "verdict": "NOT DRAWN", "reason": reason})
            continue
        drawn.append(Charge(mechanism, min(charge.count, most)))
        rows.append(row(mechanism.label, drawn[-1:], charge.count))
    if len(drawn) > 1:
        rows.append(row("all of them", drawn, sum(charge.count for charge in charges)))
    return rows


def experiment_of(
    charges: Sequence[Charge], coin_rate: float | None = None, digits: int | None = 9
) -> Experiment:
    """An experiment that runs all releases of ``charges`` on worst pairs; scores are log-likelihood ratios.

    Args:
        charges: releases; the coins of sampled ones come from the noise source, fresh for each release.
        coin_rate: rate at which coins are really tossed, where it is not the mechanisms' own: a fault to be
            looked for.
        digits: decimals that scores are rounded to; None looks at the last bit.
    """
    merged = merge_charges(charges)

    def experiment(present: bool, runs: int, noise: NoiseSource) -> Floats:
        scores = np.zeros(runs)
        for number, charge in enumerate(merged):
            source, mechanism = noise.stream(number), charge.mechanism.bare
            rate = float(getattr(charge.mechanism, "sampling_rate", 1.0))
            step = max(1, _AT_A_TIME // charge.count)
            for start in range(0, runs, step):
                shape = (min(step, runs - start), charge.count)
                coins = source.bernoulli(shape, rate if coin_rate is None else coin_rate)
                here = coins if present else torch.zeros_like(coins)
                ratio = sampled_loss(_draw(mechanism, here, source), rate)
                scores[start : start + step] += ratio.sum(axis=1)
        # The low bits of data plus floating-point noise tell more than ideal noise would (Mironov 2012).
        # The claim is about ideal noise, so the score leaves them out; docs/methods/accounting.md says what it means.
        return scores if digits is None else scores.round(digits)

    return experiment


@functools.singledispatch
def _draw(mechanism: Any, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Run single releases on a worst pair of inputs; the log-likelihood ratio of each before sampling.

    ``taking_part`` says in which releases the record is in the sample; the result has its shape.
    """
    raise ValueError(f"{mechanism.kind}: stands for a total or a bound; there is nothing to draw")


@_draw.register
def _gaussian(mechanism: Gaussian, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A release at 0 or at the sensitivity."""
    length = mechanism.l2_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    return (released - length / 2) * length / mechanism.sigma**2


@_draw.register
def _laplace(mechanism: Laplace, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A release at 0 or at the sensitivity, in one coordinate."""
    length = mechanism.l1_sensitivity
    released = mechanism.add_noise(taking_part.double() * length, noise).numpy()
    ratio: Floats = (np.abs(released) - np.abs(released - length)) / mechanism.scale
    return ratio


@_draw.register
def _screening(mechanism: NoisyScreening, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """The count, of those that can occur, at which one vote more tells most; found by comparing all."""
    counts = np.arange(mechanism.lowest, mechanism.k + 1)
    passing, failing = mechanism.log_outcomes(counts).T
    if len(counts) == 1:
        return np.zeros(taking_part.shape)
    for_pass, for_fail = np.diff(passing), np.diff(failing)
    place = int(np.argmax(np.exp(passing[1:]) * for_pass + np.exp(failing[1:]) * for_fail))
    passed = mechanism.passes(taking_part.long() + int(counts[place]), noise).numpy()
    return np.where(passed, for_pass[place], for_fail[place])


@_draw.register
def _argmax(mechanism: ExponentialArgmax, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """Two classes; the record adds a vote to the second, or takes it from the first as well."""
    here, swaps = taking_part.long(), mechanism.votes == "swap"
    votes = torch.stack([1 - here if swaps else torch.zeros_like(here), here], dim=-1)
    chosen = mechanism.argmax(votes, noise).numpy()

    def log_share(gap: float) -> float:
        """Logarithm of the probability of a class that leads by ``gap`` votes."""
        return -math.log1p(math.exp(-gap / mechanism.scale))

    away = -1.0 if swaps else 0.0
    return np.where(chosen == 1, log_share(1.0) - log_share(away), log_share(-1.0) - log_share(-away))


@_draw.register
def _randomized(mechanism: RandomizedResponse, taking_part: Tensor, noise: NoiseSource) -> Floats:
    """A message of zeros or of ones, in as many places as two messages may differ."""
    values = taking_part[..., None].expand(*taking_part.shape, mechanism.differing).long()
    message = mechanism.randomize(values, noise).numpy()
    ratio: Floats = mechanism.loss * ((message == 1).sum(axis=-1) - (message == 0).sum(axis=-1)).astype(float)
    return ratio


# ---------------------------------------------------------------------------- labelers


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
        unit: where it is a person, each record of the table, and each canary, is a person with several like it.
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
        """Whether neighbouring tables have a record exchanged."""
        return self.adjacency == "replace_one"

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
        additive = not hasattr(made, "noise") or isinstance(made.noise, AdditiveNoise)
        for kept in ("soft", "keeps_steps", *(["release_counts"] if additive else [])):
            if hasattr(made, kept):
                setattr(made, kept, True)
        if isinstance(made, IndKNN):
            # Earlier answers take part again: the attacker has them, and would only have to subtract them.
            made.switches = dataclasses.replace(made.switches, reuse=False)
            made.groups = None  # canaries have no owners who chose less than the ε that the ledger promises
        if hasattr(made, "progress"):
            made.progress = False
        return made

    def fitted(
        self, noise: NoiseSource, features: Tensor | None = None, labels: Tensor | None = None
    ) -> Labeler:
        """A fresh copy with the table, or with another one."""
        made = self.fresh(noise)
        features = self.features if features is None else features
        labels = self.labels if labels is None else labels
        if isinstance(made, ProtectsPersons):
            made.private_owners = None
            if self.unit == "person":
                made.private_owners = torch.arange(len(labels)).repeat_interleave(_RECORDS_OF_A_PERSON)
                features, labels = (
                    rows.repeat_interleave(_RECORDS_OF_A_PERSON, dim=0) for rows in (features, labels)
                )
        if isinstance(made, RecognisesRecords):
            made.private_ids = torch.arange(len(labels))  # spares the work of telling records apart
        if isinstance(made, UsesPublicFeatures):
            made.fit_public(self.public)
        made.fit(features, labels, self.num_classes)
        return made


def attack_labeler(
    target: Target,
    *,
    canaries: int = CANARIES,
    runs: int | None = None,
    confidence: float = CONFIDENCE,
    noise: NoiseSource | None = None,
    breach: bool = True,
    subject: str | None = None,
) -> Audit:
    """Attack a labeler with the canaries that it supplies.

    Args:
        target: what is attacked.
        canaries: of a one-run attack, at least; runs with fresh coins are added until there are so many.
        runs: on either side, of the other form; half of them choose the event, half test it. 3,000 by default, and
            300 of a labeler that has to be fitted for each.
        confidence: of the lower bounds.
        noise: of labelers and coins; the operating system's generator by default.
        breach: whether to find the smallest breach that would have been noticed.
        subject: what is audited, for the result; the labeler's class by default.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries = check_int("canaries", canaries, minimum=2)
    if runs is None:
        runs = RUNS if _independent(target.labeler) else RUNS_ONE_BY_ONE
    runs, confidence = check_int("runs", runs, minimum=200), check_open_unit("confidence", confidence)
    source = noise if noise is not None else default_noise()
    placed = target.canaries()
    if placed.form == "one_run":
        if placed.spent_after:
            check_int("canaries", canaries, minimum=_FEWEST_INDEPENDENT)
        runs = -(-canaries // len(placed.labels))
        seen = score_canaries(target, placed, runs, source)
        canaries = len(seen.present)
    else:
        seen, canaries = score_runs(target, placed, runs, source), 1
    found = judge(
        subject or type(target.labeler).__name__, seen, target.plan,
        delta=target.delta, adjacency=target.adjacency, confidence=confidence,
        runs=runs, canaries=canaries, breach=breach,
    )  # fmt: skip
    return dataclasses.replace(found, form=placed.form)


def score_canaries(target: Target, canaries: Canaries, runs: int, noise: NoiseSource) -> Scores:
    """Run the labeler ``runs`` times, each canary in the table by its own coin, and score every canary of every run.

    Coins and scores of all runs stand one after another: each coin has a say in its own run alone.
    """
    parts: list[list[Floats]] = []
    sums: list[list[Evidence]] = []
    released = ""
    for run in range(runs):
        stream = noise.stream("one_run", run)
        present = stream.stream("canaries").bernoulli((len(canaries.labels),), 0.5)
        labels = torch.where(present, canaries.labels, canaries.others) if target.swaps else canaries.labels
        taken = torch.ones_like(present) if target.swaps else present
        # In places of their own nobody else has a say, so nobody else need be there.
        others = slice(0, 0) if canaries.spent_after else slice(None)
        labeler = target.fitted(
            stream.stream("labeler"),
            torch.cat([target.features[others], canaries.features[taken]]),
            torch.cat([target.labels[others], labels[taken]]),
        )
        if not canaries.spent_after:
            sums.append([])
        scores, released = (
            _spending(target, labeler, canaries)
            if canaries.spent_after
            else _scores(target, labeler, canaries, sums[-1])
        )
        parts.append([*(part.numpy() for part in scores), present.numpy()])
    own, from_labels, *contrasts, coins = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Scores(
        "many_runs" if canaries.spent_after else "one_run", released, coins.astype(bool), own, contrasts,
        from_labels, canaries.apart, IndependentCanaries.of(sums),
    )  # fmt: skip


def _scores(
    target: Target, labeler: Labeler, canaries: Canaries, sums: list[Evidence]
) -> tuple[list[Tensor], str]:
    """Scores of all releases, of labels, and of what queries do not share; what was released.

    What released sums say is added to ``sums``.
    """
    paying, classes = FreeLedger(), target.num_classes
    if getattr(labeler, "trust", "") == "local":
        # Of every client one message; canaries are the last ones. Labels come of all messages.
        told = labeler.told_by_each(canaries.queries, paying)[-len(canaries.labels) :]  # type: ignore[attr-defined]
        places = torch.arange(len(canaries.labels)), canaries.about
        own = (told[(*places, canaries.labels)] - told[(*places, canaries.others)]).double()
        seen = labels_of(labeler.label(canaries.queries, paying), classes)
        return [own, _about(seen, canaries, target.swaps), torch.zeros_like(own)], "messages"
    rounds = 1 if isinstance(labeler, MakesModel) and labeler.releases_once else target.rounds
    total, from_labels, contrast = torch.zeros(3, len(canaries.labels), dtype=torch.float64)
    known = _known(target, labeler, canaries)
    votes = None if known is None else known.exact_votes(canaries.queries)
    exact, name = torch.zeros(()) if votes is None else votes.double(), ""
    for _ in range(rounds):
        release = labeler.label(canaries.queries, paying)
        told, evidence = labels_of(release, classes), None
        if known is not None and isinstance(labeler, HasCanaries):
            evidence = labeler.evidence(canaries, known)
        if evidence is not None:
            sums.append(evidence)
            total, contrast, name = total + evidence.scores(), contrast + evidence.contrast(), "weights"
            from_labels = from_labels + _along(told, canaries, target.swaps)
            continue
        name = name_of_release(labeler, release)
        rest = values_of(release, classes) - exact
        total = total + _about(rest, canaries, target.swaps)
        contrast = contrast + _about(rest - rest.nanmean(dim=0), canaries, target.swaps)
        from_labels = from_labels + _about(told, canaries, target.swaps)
    return [total, from_labels, contrast], name


def _spending(target: Target, labeler: Labeler, canaries: Canaries) -> tuple[list[Tensor], str]:
    """As :func:`_scores`, of queries that are asked until budgets are spent, and on until four of them would be."""
    asked = max(_BUDGETS) * canaries.spent_after
    release = labeler.label(canaries.queries.repeat(asked, 1), FreeLedger())
    shape = (max(_BUDGETS), canaries.spent_after, len(canaries.queries), target.num_classes)
    values = values_of(release, target.num_classes).nan_to_num(0.0).view(shape).sum(dim=1).cumsum(dim=0)
    told = labels_of(release, target.num_classes).view(shape)[0].sum(dim=0)
    first, *further = (values[times - 1] for times in _BUDGETS)
    own = [_about(each, canaries, False) for each in (first, told, *further)]
    # Less the mean of the run: noise that queries share is in all of them.
    return [each - each.mean() for each in own], name_of_release(labeler, release)


def _known(target: Target, labeler: Labeler, canaries: Canaries) -> HasCanaries | None:
    """The labeler with the records that the attacker knows; None where that would tell nothing."""
    if not isinstance(labeler, HasCanaries):
        return None
    noise, known = labeler.noise_source.stream("known"), None
    if labeler.knows_votes():
        known = target.fitted(noise)
    elif labeler.knows_evidence():
        more = slice(None) if target.swaps else slice(0, 0)
        table = [
            torch.cat([target.features, canaries.features[more]]),
            torch.cat([target.labels, canaries.others[more]]),
        ]
        known = target.fitted(noise, *table)
    return known if isinstance(known, HasCanaries) else None


def score_runs(target: Target, canaries: Canaries, runs: int, noise: NoiseSource) -> Scores:
    """Run the labeler ``runs`` times with one record, and as often without it.

    The score of a run adds up what it says along the direction in which the record moves the exact votes, which an
    attacker knows who knows everybody else. Where a labeler does not tell its exact votes, that is the record's
    class.
    """
    if isinstance(target.labeler, PATE):
        target = _with_parts(target, noise.stream("parts"))

    def table(own: Tensor | None) -> tuple[Tensor, Tensor]:
        if own is None:
            return target.features, target.labels
        return torch.cat([target.features, canaries.features]), torch.cat([target.labels, own])

    absent = table(canaries.others if target.swaps else None)
    without = target.fitted(noise.stream("fit", 0), *absent)
    own = canaries.labels
    if not target.swaps and isinstance(without, HasCanaries):  # the class that has fewest votes where it is
        votes = without.exact_votes(canaries.queries[canaries.about])
        own = own if votes is None else votes.argmin(dim=1)
    tables = {True: table(own), False: absent}
    labelers = {True: target.fitted(noise.stream("fit", 1), *tables[True]), False: without}
    moved = _direction(target, canaries.queries, own, labelers, noise)
    parts: list[list[Floats]] = []
    released, independent = "", _independent(without)
    together = max(1, _AT_ONCE // len(canaries.queries)) if independent else 1
    for side, labeler in labelers.items():
        paying = FreeLedger()  # one: seeded noise is a function of its rows, and must not come twice
        for start in range(0, runs, together):
            count = min(together, runs - start)
            if start and not independent:
                labeler = target.fitted(noise.stream("run", int(side), start), *tables[side])
            if isinstance(labeler, HasCanaries):
                release = labeler.label_repeatedly(canaries.queries, count, paying)
            else:
                release = labeler.label(canaries.queries.repeat(count, 1), paying)
            released = name_of_release(labeler, release)
            parts.append([np.full(count, side), *_of_runs(target, release, count, *moved)])
    present, scores, from_labels, *contrasts = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Scores("many_runs", released, present, scores, contrasts, from_labels)


def _direction(
    target: Target, queries: Tensor, own: Tensor, labelers: Mapping[bool, Labeler], noise: NoiseSource
) -> tuple[Tensor, Tensor, Tensor]:
    """Movement of the votes by the record, ``(q, c)``; votes without it; movement of the largest vote, ``(q,)``."""
    votes = [
        labeler.mean_votes(queries, _SAMPLES, noise.stream("samples"))
        if isinstance(labeler, HasCanaries)
        else None
        for labeler in (labelers[True], labelers[False])
    ]
    if votes[0] is not None and votes[1] is not None:
        present, absent = votes[0].double(), votes[1].double()
        return present - absent, absent, present.amax(dim=1) - absent.amax(dim=1)
    direction = torch.zeros(len(queries), target.num_classes, dtype=torch.float64)
    direction[:, own[0]] = 1.0
    return direction, torch.zeros(()), torch.zeros(())


def _of_runs(
    target: Target, release: Release, count: int, direction: Tensor, known: Tensor, largest: Tensor
) -> list[Floats]:
    """Scores of so many runs in one call: of all, of labels, of what queries do not share, of refusals."""
    answered = release.answered.view(count, -1)
    if target.max_answers is not None:  # what a run would have refused is not looked at
        answered = answered & (answered.cumsum(dim=1) <= target.max_answers)
    shape, seen = (count, -1, target.num_classes), answered[..., None]
    rest = (values_of(release, target.num_classes).view(shape) - known).nan_to_num(0.0) * seen
    common = rest.sum(dim=1, keepdim=True) / seen.sum(dim=1, keepdim=True).clamp(min=1)
    labels = labels_of(release, target.num_classes).view(shape) * seen
    weighed = [(rest, direction), (labels, direction)]
    weighed.append(((rest - common) * seen, direction - direction.mean(dim=0)))
    weighed.append((answered[..., None].double() - 1, largest[..., None]))
    # Low bits of floating-point noise are left out, as everywhere in audits.
    return [(part * by).sum(dim=(1, 2)).numpy().round(9) for part, by in weighed]


@dataclasses.dataclass(frozen=True, repr=False)
class GivenParts(Partitioner):
    """Parts that were dealt out before; the last records, if there are more, join the first part."""

    takes_groups: ClassVar[bool] = True
    parts: Tensor

    def _deal(
        self, features: Tensor, labels: Tensor, num_classes: int, num_parts: int, noise: NoiseSource
    ) -> Tensor:
        return torch.nn.functional.pad(self.parts, (0, len(labels) - len(self.parts)))


class NearestTeachers(Teachers):
    """Teachers that answer with the label of their nearest record: one record decides the answers around it."""

    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: Any,
    ) -> TrainedTeachers:
        """See :meth:`~pl_privknn.labelers.pate_training.Teachers.train`."""
        empty = torch.bincount(parts, minlength=num_teachers) == 0
        return _Nearest(empty, features, labels, parts)


class _Nearest(TrainedTeachers):
    def __init__(self, empty: Tensor, features: Tensor, labels: Tensor, parts: Tensor) -> None:
        super().__init__(empty, torch.zeros_like(empty))
        self._features, self._labels, self._parts = features, labels, parts

    def predict(self, queries: Tensor) -> Tensor:
        distances = torch.cdist(queries.double(), self._features.double())
        votes = torch.full((len(queries), self.num_teachers), -1)
        for teacher in torch.nonzero(~self.empty).flatten():
            nearest = torch.where(self._parts == teacher, distances, torch.inf).argmin(dim=1)
            votes[:, teacher] = self._labels[nearest]
        return votes


def _with_parts(target: Target, noise: NoiseSource) -> Target:
    """PATE with all other records' parts held: what one record more does to theirs has tests of its own."""
    made = copy.deepcopy(target.labeler)
    assert isinstance(made, PATE)
    settings: dict[str, Any] = {
        "num_classes": target.num_classes,
        "num_parts": made.num_teachers,
        "noise": noise,
    }
    made.partitioner = GivenParts(made.partitioner.assign(target.features, target.labels, **settings))
    return dataclasses.replace(target, labeler=made)


def _independent(labeler: Labeler) -> bool:
    """Whether answers share nothing but the table, so that many runs go into one call."""
    return isinstance(labeler, HasCanaries) and labeler.knows_votes() and labeler.asks_in_batches


def values_of(release: Release, num_classes: int) -> Tensor:
    """The most that a release says of each class, float64 ``(m, c)``: counts, else log-odds, else labels.

    Rows of queries without an answer are NaN.
    """
    if release.scores is not None:
        return release.scores.double()
    soft = release.soft
    told = labels_of(release, num_classes) if soft is None else soft.double().clamp(min=1e-30).log()
    return torch.where((release.labels >= 0)[:, None], told, torch.nan)


def labels_of(release: Release, num_classes: int) -> Tensor:
    """Labels alone as indicators, float64 ``(m, c)``; zeros where refused."""
    return torch.nn.functional.one_hot(release.labels + 1, num_classes + 1)[:, 1:].double()


def name_of_release(labeler: Labeler, release: Release) -> str:
    """Kind of release that the attacker saw, in a word."""
    if release.scores is not None:
        return "counts"
    return "probabilities" if release.soft is not None else "labels"


def _along(labels: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Lengths of the answers of each canary's class along its direction."""
    centred = canaries.queries.double() - canaries.queries.double().mean(dim=0)
    sums = (labels - labels.mean(dim=0)).T @ centred
    at, places = sums @ canaries.features.double().T, torch.arange(len(canaries.labels))
    own = at[canaries.labels, places]
    return own - at[canaries.others, places] if swaps else own


def _about(values: Tensor, canaries: Canaries, swaps: bool) -> Tensor:
    """Each canary's own class at its own query; where labels are exchanged, against its other label."""
    rows = values.nan_to_num(0.0)[canaries.about]
    own = rows.gather(1, canaries.labels[:, None])[:, 0]
    return own - rows.gather(1, canaries.others[:, None])[:, 0] if swaps else own


# ---------------------------------------------------------------------------- what to attack

_TEACHERS = {"num_teachers": 4, "teachers": NearestTeachers(), "progress": False}
_SCREENED = {
    "screening": Screening(1.5, 2.0),
    "noise": Gaussian(1e3),
}  # the other release tells next to nothing
#: Settings at which one record shows, faults included.
SETTINGS: dict[type[Labeler], dict[str, dict[str, Any]]] = {
    PrivateKNN: {
        "counts": {"k": 1, "sampling_rate": 0.25, "noise": Gaussian(2.0)},
        "winners": {"k": 1, "sampling_rate": 1.0, "noise": ExponentialArgmax(2.0)},
        "screening": {"k": 3, "sampling_rate": 1.0, **_SCREENED},
    },
    PATE: {
        "counts": {**_TEACHERS, "noise": Gaussian(10.0)},
        "screening": {**_TEACHERS, "screening": Screening(3.0, 2.0), "noise": Gaussian(1e3)},
    },
    ReverseKNN: {"counts": {"noise": Laplace(1.0)}},
    IndKNN: {"stream": {"threshold": 0.5, "sigma2": 1.0, "epsilon": 2.0, "num_queries": 1000}},
}
_QUERIES, _CLASSES, _RECORDS = 20, 5, 60


def small_target(labeler: Labeler, delta: float = 1e-5, unit: Unit = "record") -> Target:
    """A labeler with a small table: random records, and public examples along the axes."""
    generator = torch.Generator().manual_seed(3)
    public = torch.eye(_QUERIES) + 0.01 * torch.randn(_QUERIES, _QUERIES, generator=generator)
    features = torch.randn(_RECORDS, _QUERIES, generator=generator)
    labels = torch.randint(0, _CLASSES, (_RECORDS,), generator=generator)
    plan, adjacency = labeler.plan(_QUERIES, _QUERIES, _CLASSES, rounds=1), labeler.adjacencies[0]
    settings = (_CLASSES, 1, None, plan, delta, adjacency, unit)
    return Target(labeler, features, labels, public, public, *settings)


def audit_labeler(
    kind: type[Labeler], *, delta: float = 1e-5, unit: Unit = "record", **settings: Any
) -> list[Audit]:
    """Attack a class of labelers on a small table, at settings at which one record shows.

    Real settings hide one record well, faults included. What is wrong in the code is as wrong at these.

    Args:
        kind: a class of the project, one derived from it, or one of your own that needs no arguments.
        delta: δ.
        unit: of the guarantee; canaries are persons with several records where it is a person.
        **settings: further arguments of :func:`attack_labeler`.

    Returns:
        One result for each group of settings.

    Raises:
        ValueError: for arguments out of range, or a class that can't be made without arguments.
    """
    like = [each for each in kind.__mro__ if each in SETTINGS and kind.__init__ is each.__init__]
    known = SETTINGS[like[0]] if like else {"default settings": {}}
    found = []
    for name, arguments in known.items():
        try:
            labeler = kind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}: can't be made without arguments ({error}); give them defaults, or attack a "
                "configuration with --attack"
            ) from error
        check_protects(labeler, unit)
        target = small_target(labeler, delta, unit=unit)
        found.append(attack_labeler(target, subject=f"{kind.__name__}, {name}", **settings))
    return found


def target_of_config(document: dict[str, Any], path: str | Path) -> Target:
    """The labeler of a configuration, its private table in the features of the first round, and its queries.

    Later rounds are attacked as if they asked in those features too: a student is not trained. A data module of one's
    own is not run; attack it in Python, with :class:`Target`.

    Args:
        document: the configuration, with sections ``labeling`` and ``data``.
        path: where it came from, for messages.

    Raises:
        ValueError: for sections that don't parse, or labelers of other data than one class an image.
    """
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.callbacks.labeling_arguments import STUDENT, extractor_of
    from pl_privknn.config import ConfigurationError, instantiate
    from pl_privknn.features.base import learn_publicly
    from pl_privknn.planning import Cost, labeling_plan

    try:
        labeling = instantiate(document, {"labeling": PrivateLabeler}, own_classes=True).labeling
        data = Cost(document.get("data"), path).data
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if labeling.labeler is None or data.task != "multiclass" or labeling.labeler.tasks != ("multiclass",):
        raise ValueError(f"{path}: labeling.labeler must answer one class an image to be attacked")
    data.setup("fit")
    first = labeling.features[0]
    if first == STUDENT:
        raise ValueError(f"{path}: labeling.features begins with the student, which is not trained here")
    extract: Extractor | Callable[[Tensor], Tensor] = extractor_of(first, nn.Identity())
    learn_publicly(extract, data.public.images)
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
        delta=labeling.delta,
        adjacency=labeling.adjacency,
        unit=labeling.unit,
    )


def _queries(labeling: Any, public: Tensor, asking: list[int]) -> Tensor:
    """Of all rounds for teachers that answer queries one by one; else of the first, which later ones repeat."""
    from pl_privknn.callbacks.selection import PublicPool

    count = sum(asking) if labeling.labeler.asks_in_batches else asking[0]
    nobody = torch.full((len(public),), -1)
    pool = PublicPool(nobody, torch.zeros(len(public), dtype=torch.bool), lambda: public)
    generator = torch.Generator().manual_seed(labeling.seed)
    return labeling.select(pool, min(count, len(public)), generator).query_features(public)
