"""Checks of how a labeler pays, draws and answers, on one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pl_privknn.labelers.base import Release
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, FixedTotal
from pl_privknn.privacy.mechanisms.base import merged
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.moves import inner, pools
from pl_privknn.testing.run import Run, Subject
from pl_privknn.testing.tables import Table
from pl_privknn.testing.watch import Called, Draw, Paid, Refused, coins_of

_ORDERS = np.array([1.5, 2.0, 8.0])
#: Refuse the first charge, the second, …; a labeler with more charges is refused at these.
_REFUSALS = 4


def check_source(subject: Subject) -> str:
    """The noise source is the operating system's generator, and the labeler's own."""
    source = getattr(subject.make(), "noise_source", None)
    if source is None:
        raise LabelerCheckError("has no noise_source; call super().__init__(noise_source) in __init__")
    if not source.cryptographic:
        raise LabelerCheckError(
            f"noise_source={source!r} is seeded: whoever knows the seed can subtract the noise. Make the labeler "
            "without a noise_source, as for a real run (the check puts in sources of its own)"
        )
    return ""


def check_plan(subject: Subject, table: Table) -> str:
    """The plan is a list of charges, depends on no table, and is defined under the stated adjacencies."""
    queries = len(table.queries)
    labeler = subject.make()
    if not labeler.adjacencies:
        raise LabelerCheckError("adjacencies is empty; name those under which the plan holds")
    plan = labeler.plan(queries, queries, subject.num_classes)
    if not isinstance(plan, list) or not plan or not all(isinstance(part, Charge) for part in plan):
        raise LabelerCheckError(f"plan returns {plan!r}; want a list of Charge, at least one")
    for part in plan:
        for adjacency in labeler.adjacencies:
            try:
                part.mechanism.rdp(_ORDERS, adjacency)
            except ValueError as error:
                raise LabelerCheckError(
                    f"adjacencies names {adjacency!r}, under which its plan has no cost: {error}"
                ) from None
    if Run(subject).fit(table).labeler.plan(queries, queries, subject.num_classes) != plan:
        raise LabelerCheckError("plan is another one after fit; it must not depend on the private table")
    return ""


def check_payments(run: Run) -> str:
    """Everything drawn was charged before, by the mechanism that draws; source and adjacencies are stated."""
    paid_here, stream, charged = False, False, 0
    for event in run.events:
        if isinstance(event, Called):
            paid_here = stream
        elif isinstance(event, Paid):
            paid_here, charged = True, charged + 1
            stream = stream or isinstance(inner(event.charge.mechanism), FixedTotal)
            _check_stated(run, event)
        elif isinstance(event, Draw) and event.place == "label" and not paid_here:
            raise LabelerCheckError(
                f"draws {event.kind} before it charges; get the noise from self.paid(ledger, mechanism, count, key), "
                "which charges first"
            )
    if not charged:
        raise LabelerCheckError("label charged nothing; every release has to be paid for")
    pools(run.events)
    own = run.watch.unclaimed()
    if own:
        raise LabelerCheckError(
            f"label draws {own[0].kind} noise by itself, so the check can't look inside: draw with the charged "
            "mechanism's own method (add_noise, argmax, passes, randomize), or give check_labeler a DrawingMethod "
            "for what draws. Coins of a sample are tossed by noise.bernoulli(shape, sampling_rate)"
        )
    rates = {
        rate for event in run.events if isinstance(event, Paid) and (rate := sampling_rate(event.charge)) < 1
    }
    for event in run.events:
        coin = isinstance(event, Draw) and event.place == "label" and event.kind == "bernoulli"
        if coin and not event.through and event.parameter not in rates:
            raise LabelerCheckError(
                f"tosses coins of probability {event.parameter:g}, but what it charged has sampling_rate "
                f"{', '.join(f'{rate:g}' for rate in sorted(rates)) or '1'}; sample at the rate that is charged"
            )
    return ""


def _check_stated(run: Run, event: Paid) -> None:
    kind = event.charge.mechanism.kind
    if event.adjacencies is None:
        raise LabelerCheckError(
            f"the charge of {kind} states no adjacencies; charge by self.paid(ledger, mechanism, count, key)"
        )
    if event.adjacencies != tuple(run.labeler.adjacencies):
        raise LabelerCheckError(
            f"the charge of {kind} states adjacencies={event.adjacencies}, the labeler "
            f"{tuple(run.labeler.adjacencies)}"
        )
    if event.noise is None or getattr(event.noise, "watch", None) is not run.watch:
        raise LabelerCheckError(
            f"the charge of {kind} names {event.noise!r} as its noise and not the labeler's noise_source; charge by "
            "self.paid(ledger, mechanism, count, key)"
        )
    if event.charge.guarantee.level != "none":
        raise LabelerCheckError(
            f"the charge of {kind} has the guarantee {event.charge.guarantee.level!r} with seeded noise"
        )


def check_within_plan(run: Run, queries: int, answers: int, rounds: int = 1) -> str:
    """No mechanism is charged more often than the plan for so many queries, answers and rounds says."""
    classes = run.subject.num_classes
    plan = merged(run.subject.make().plan(queries, answers, classes, rounds=rounds))
    for mechanism, charge in merged(run.ledger.rows).items():
        planned = plan[mechanism].count if mechanism in plan else 0
        if charge.count > planned:
            raise LabelerCheckError(
                f"charges {charge.count} releases of {mechanism!r}, but plan({queries}, {answers}, {classes}, "
                f"rounds={rounds}) has {planned}"
            )
    return ""


def check_release(release: Release, queries: int, answers: int, num_classes: int, task: str) -> str:
    """Labels, probabilities and scores have the shapes, dtypes and values that a release has."""
    if not isinstance(release, Release):
        raise LabelerCheckError(f"label returns {type(release).__name__}; want a Release")
    shape = (queries,) if task == "multiclass" else (queries, num_classes)
    most = num_classes - 1 if task == "multiclass" else 1
    _check_tensor("labels", release.labels, shape, (torch.int64,))
    if len(release.labels) and not -1 <= int(release.labels.min()) <= int(release.labels.max()) <= most:
        raise LabelerCheckError(f"labels lie outside -1 (refused) to {most}")
    answered = int(release.answered.sum())
    if answered > answers:
        raise LabelerCheckError(
            f"answers {answered} of {queries} queries with max_answers={answers}; refuse the rest with -1"
        )
    if release.soft is not None:
        _check_tensor("soft", release.soft, (queries, num_classes), (torch.float32,))
        rows = release.soft[release.answered]
        sums = rows.sum(dim=1)
        if not bool(((rows >= 0) & (rows <= 1)).all()) or (
            task == "multiclass" and not torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
        ):
            raise LabelerCheckError("soft: rows of answered queries are no probabilities")
    if release.scores is not None:
        if release.scores.shape[:1] != (queries,) or not release.scores.is_floating_point():
            raise LabelerCheckError(
                f"scores: shape {tuple(release.scores.shape)}, {release.scores.dtype}; want float, a row a query"
            )
        if release.score_deviation is None or not 0 < release.score_deviation < math.inf:
            raise LabelerCheckError(
                f"score_deviation={release.score_deviation!r} beside scores; state their noise's"
            )
    return ""


def _check_tensor(name: str, value: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> None:
    if tuple(value.shape) != shape or value.dtype not in dtypes:
        raise LabelerCheckError(
            f"{name}: shape {tuple(value.shape)}, {value.dtype}; want {dtypes[0]} of shape {shape}"
        )


def check_refusals(subject: Subject, table: Table) -> str:
    """A refused charge ends the call, with nothing drawn after it; a later call pays before it draws."""
    refused = 0
    for limit in range(_REFUSALS):
        run = Run(subject, passing="all", limit=limit).fit(table)
        try:
            run.label(table.queries)
        except BudgetExceeded:
            pass
        else:
            if len(run.ledger.rows) < limit or not _refused(run):
                break  # it makes no further charge
            raise LabelerCheckError(
                f"answers although charge {limit + 1} was refused; let BudgetExceeded pass, and return nothing"
            )
        place = next(number for number, event in enumerate(run.events) if isinstance(event, Refused))
        if len(run.events) > place + 1:
            raise LabelerCheckError(f"goes on to draw or charge after charge {limit + 1} was refused")
        if limit:
            check_payments(run)
        run.ledger.limit = None
        check_payments(run.label(table.queries))
        refused += 1
    if not refused:
        raise LabelerCheckError("no charge was made that a ledger could refuse")
    return f"at {refused} charges"


def _refused(run: Run) -> bool:
    return any(isinstance(event, Refused) for event in run.events)


def check_fresh_noise(subject: Subject, table: Table) -> str:
    """Neither a second call nor a resumed run, with the same seed and later rows, draws the same noise again."""
    first = Run(subject, passing="all").fit(table).label(table.queries)
    if subject.make().asks_in_batches:
        first.label(table.queries)
    resumed = Run(subject, passing="all", start=len(first.ledger.rows)).fit(table).label(table.queries)
    seen: dict[tuple[int | str, ...], tuple[int, int]] = {}
    for number, run in enumerate((first, resumed)):
        for event in run.events:
            if isinstance(event, Draw) and event.place == "label":
                owner = seen.setdefault(event.path, (number, event.stream))
                if owner != (number, event.stream):
                    raise LabelerCheckError(
                        f"{'a resumed run' if number else 'a later draw'} repeats the noise of stream {event.path}: "
                        "whoever sees both answers can subtract it. Get the noise of each release from self.paid, "
                        "whose stream belongs to the row that was charged"
                    )
    return ""


def check_reproducible(subject: Subject, table: Table) -> str:
    """With the same table and the same noise, the answers are the same: no other randomness is in them."""
    first, second = (Run(subject).fit(table).label(table.queries) for _ in range(2))
    check_same(first.releases, second.releases, "two runs on the same table with the same noise")
    return ""


def check_forgets(subject: Subject, table: Table, others: Sequence[Table]) -> str:
    """What was fitted before has no part in the answers."""
    try:
        runs = [Run(subject).fit(earlier).fit(table).label(table.queries) for earlier in others]
        seen = ""
    except ValueError:  # budgets that belong to records: the same records, in other features
        same = [
            dataclasses.replace(earlier, features=earlier.features[: len(table)], labels=table.labels)
            for earlier in others
        ]
        images = table.features
        runs = [Run(subject).fit(earlier, images).fit(table, images).label(table.queries) for earlier in same]
        seen = "of the same records in other features"
    for run in runs[1:]:
        check_same(runs[0].releases, run.releases, "one table after two different earlier ones")
    return seen


def check_same(first: Sequence[Release], second: Sequence[Release], what: str) -> None:
    """Raise unless two lists of releases are equal."""
    for one, other in zip(first, second, strict=True):
        for name in ("labels", "soft", "scores", "score_deviation"):
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                same = a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
            else:
                same = a is b or a == b
            if not same:
                raise LabelerCheckError(f"{name} differ between {what}")


def check_samples(subject: Subject, table: Table, instead: Table) -> str:
    """Every record's coin is tossed for every sampled release: where all show tails, that takes n coins each.

    Args:
        subject: what is run.
        table: its records lie together, so that all of them are near every query.
        instead: for labelers that refuse such a table.
    """
    try:
        run = Run(subject, coins="tails", passing="all").fit(table).label(table.queries)
    except ValueError:
        table = instead
        run = Run(subject, coins="tails", passing="all").fit(table).label(table.queries)
    wanted: dict[float, int] = {}
    for charge in run.ledger.rows:
        rate = sampling_rate(charge)
        if rate < 1:
            wanted[rate] = wanted.get(rate, 0) + charge.count * len(table)
    for rate, coins in wanted.items():
        tossed = coins_of([event for event in run.events if getattr(event, "place", "") == "label"], rate)
        if tossed < coins:
            raise LabelerCheckError(
                f"tosses {tossed} coins of probability {rate:g} where its charges are of {coins // len(table)} "
                f"sampled releases of {len(table)} records: each release needs a coin for each record, by "
                "noise.bernoulli(shape, sampling_rate); a sample that serves twice, or of fixed size, is not covered"
            )
    return "" if wanted else "nothing is sampled"


def sampling_rate(charge: Charge) -> float:
    """Poisson rate of a charge; 1 where it has none."""
    return float(getattr(inner(charge.mechanism), "sampling_rate", 1.0))
