"""``check_labeler``: does a labeler keep what it promises?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import Labeler, ProtectsPersons, Release
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import (
    Adjacency,
    Charge,
    Conditional,
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    Mechanism,
    NegativeBinomial,
    NoisyScreening,
    RandomizedResponse,
)
from pl_privknn.privacy.mechanisms.base import merged
from pl_privknn.testing.tables import Makers, Pair, Table, neighbors_of
from pl_privknn.testing.watch import (
    CALLED,
    REFUSED,
    Coins,
    Draw,
    DrawingMethod,
    Entered,
    LabelerCheckError,
    Paid,
    Run,
    Subject,
    coins_of,
    copies_of,
    mechanism_methods,
    named,
    protocol_methods,
)

#: Rounding: relative to the sensitivity, and to the size of the values (sums of float32).
_RELATIVE, _OF_VALUES = 1e-6, 1e-6


@dataclasses.dataclass(frozen=True)
class Move:
    """Distance by which the input of one release moved.

    Attributes:
        what: mechanism and norm.
        amount: how far.
        allowed: how far it may.
        rounding: what sums of rounded numbers may add to that.
        condition: the condition of a conditional charge; empty otherwise.
    """

    what: str
    amount: float
    allowed: float
    rounding: float = 0.0
    condition: str = ""


@dataclasses.dataclass
class Pool:
    """All that was charged for one mechanism, and all that entered it.

    Attributes:
        drawn: the mechanism that draws.
        charged: releases.
        condition: of the charge.
        entered: in order.
        rows: each row of what entered is a release; otherwise all of it together is one.
    """

    drawn: Mechanism
    charged: int = 0
    condition: str = ""
    entered: list[Entered] = dataclasses.field(default_factory=list)
    rows: bool = True
    _by_rows: int = 0

    def take(self, entered: Entered) -> None:
        """One more draw.

        Raises:
            LabelerCheckError: where more was drawn than had been charged.
        """
        self.entered.append(entered)
        self._by_rows += _rows(entered)
        self.rows &= self._by_rows <= self.charged
        if not self.rows and (_single(entered.mechanism) or len(self.entered) > self.charged):
            drawn = self._by_rows if _single(entered.mechanism) else len(self.entered)
            raise LabelerCheckError(
                f"draws more than it charged: {drawn} releases of {self.drawn.kind} drawn, {self.charged} charged "
                "so far. Charge the number of releases before they are drawn"
            )


def pools(events: Sequence[Any]) -> list[Pool]:
    """Match all that entered noise with the charges that came before.

    Raises:
        LabelerCheckError: for a draw that no charge pays for.
    """
    found: dict[Mechanism, Pool] = {}
    for event in events:
        if isinstance(event, Paid):
            _open(found, event.charge)
        elif isinstance(event, Entered):
            _pool_of(found, event.mechanism).take(event)
    return list(found.values())


def moves(first: Sequence[Pool], second: Sequence[Pool]) -> list[Move]:
    """Distance between the releases of two tables at equal answers.

    Raises:
        LabelerCheckError: where the two tables were not asked for the same releases.
    """
    shapes = [
        [(pool.drawn.kind, pool.charged, [tuple(e.values.shape) for e in pool.entered if e.measure is None])
         for pool in side]
        for side in (first, second)
    ]  # fmt: skip
    if shapes[0] != shapes[1]:
        raise LabelerCheckError(
            f"what is charged or released depends on the private table: {shapes[0]} on one, {shapes[1]} on the "
            "other, at equal answers"
        )
    found: list[Move] = []
    for one, other in zip(first, second, strict=True):
        if isinstance(one.drawn, GaussianDPStream):
            found.append(_total(one, other))
            continue
        for a, b in zip(one.entered, other.entered, strict=True):
            amount, allowed, unit = _apart(a, b, one.rows)
            rounding = _OF_VALUES * _norm(a.values, 2) if a.values.is_floating_point() else 0.0
            found.append(Move(f"{one.drawn.kind} ({unit})", amount, allowed, rounding, one.condition))
    return found


def _open(found: dict[Mechanism, Pool], charge: Charge) -> None:
    drawn = charge.mechanism.bare
    pool = found.setdefault(drawn, Pool(drawn))
    pool.charged += charge.count
    if isinstance(charge.mechanism, Conditional):
        pool.condition = charge.mechanism.condition


def _pool_of(found: dict[Mechanism, Pool], mechanism: Mechanism) -> Pool:
    if mechanism in found:
        return found[mechanism]
    streams = [pool for pool in found.values() if isinstance(pool.drawn, GaussianDPStream)]
    if streams and isinstance(mechanism, Gaussian):
        streams[0].charged += 1  # a stream that is paid for as a whole may have any number of releases
        return streams[0]
    charged = ", ".join(repr(known) for known in found) or "nothing"
    raise LabelerCheckError(
        f"draws with {mechanism!r}, which was not charged (charged: {charged}). Draw with the very object that is "
        "charged, after its charge"
    )


def _total(one: Pool, other: Pool) -> Move:
    """Σ(Δ/σ)² of all Gaussian releases of a stream against μ²: what the worst record pays and may pay."""
    assert isinstance(one.drawn, GaussianDPStream)
    paid = 0.0
    for a, b in zip(one.entered, other.entered, strict=True):
        assert isinstance(a.mechanism, Gaussian)
        assert isinstance(b.mechanism, Gaussian)
        paid += _norm(a.values - b.values, 2) ** 2 / min(a.mechanism.sigma, b.mechanism.sigma) ** 2
    return Move("stream of gaussian releases (sum of squares of move / sigma)", paid, one.drawn.mu**2)


def _apart(a: Entered, b: Entered, rows: bool) -> tuple[float, float, str]:
    if a.measure is not None:
        return (*a.measure(a.values, b.values), "answers")
    mechanism, first, second = a.mechanism, a.values.double(), b.values.double()
    moved = first - second
    if not bool(moved.isfinite().all()):
        return math.inf, 0.0, "values that are not finite"
    if isinstance(mechanism, NoisyScreening):
        top = max(float(first.max()), float(second.max()))
        if top > mechanism.k:
            return top, float(mechanism.k), "largest count, above the k that is accounted for"
        return _norm(moved, math.inf), 1.0, "largest count"
    if isinstance(mechanism, ExponentialArgmax):
        spread = moved.amax(dim=-1) - moved.amin(dim=-1)
        return float(spread.max()), 1.0 if mechanism.votes == "add" else 2.0, "range of the votes' moves"
    if isinstance(mechanism, NegativeBinomial):
        ways = max(float(moved.clamp(min=0).sum()), float((-moved).clamp(min=0).sum()))
        return ways, float(mechanism.moved), "counts moved one way"
    if isinstance(mechanism, RandomizedResponse):
        return float((moved != 0).sum()), float(mechanism.differing), "places"
    parts = (
        moved.flatten(1)
        if rows and moved.ndim > 1
        else moved.reshape(-1, 1)
        if rows
        else moved.reshape(1, -1)
    )
    order, allowed = _norm_of(mechanism)
    largest = max((_norm(part, order) for part in parts), default=0.0)
    return largest, allowed, f"L{order}"


def _norm_of(mechanism: Mechanism) -> tuple[int, float]:
    for order in (1, 2):
        stated = getattr(mechanism, f"l{order}_sensitivity", None)
        if stated is not None:
            return order, float(stated)
    raise LabelerCheckError(
        f"can't look inside {mechanism!r}: it states neither l1_sensitivity nor l2_sensitivity, so how far two "
        "tables may be apart is not known. Give check_labeler a DrawingMethod for it, with a measure"
    )


def exceeds(move: Move) -> bool:
    """Whether a move is more than is allowed, beyond rounding."""
    return not move.amount <= move.allowed * (1 + _RELATIVE) + move.rounding


def _norm(values: Tensor, order: float) -> float:
    return float(torch.linalg.vector_norm(values.double(), order)) if values.numel() else 0.0


def _single(mechanism: Mechanism) -> bool:
    """Whether a release is one number or one choice, so that a table of them is many releases."""
    return isinstance(mechanism, NoisyScreening | ExponentialArgmax)


def _rows(entered: Entered) -> int:
    """Releases in what entered, if each row is one."""
    shape = tuple(entered.values.shape)
    if entered.measure is not None or isinstance(entered.mechanism, RandomizedResponse | NegativeBinomial):
        return 1
    if isinstance(entered.mechanism, NoisyScreening):
        return math.prod(shape)
    if isinstance(entered.mechanism, ExponentialArgmax):
        return math.prod(shape[:-1])
    return shape[0] if shape else 1


_ORDERS = np.array([1.5, 2.0, 8.0])
#: Refuse the first charge, the second, …; a labeler with more charges is refused at these.
_REFUSALS = 4
# Enough that whoever counts records finds a person moves more than one of them.
_RECORDS_OF_A_PERSON = 3


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
        if event == CALLED:
            paid_here = stream
        elif isinstance(event, Paid):
            paid_here, charged = True, charged + 1
            stream = stream or isinstance(event.charge.mechanism.bare, GaussianDPStream)
            _check_stated(run, event)
        elif isinstance(event, Draw) and event.place == "label" and not paid_here:
            raise LabelerCheckError(
                f"draws {event.kind} before it charges; get the noise from "
                "self.charge_and_draw(ledger, mechanism, count, key), which charges first"
            )
    if not charged:
        raise LabelerCheckError("label charged nothing; every release has to be paid for")
    pools(run.events)
    own = run.unclaimed()
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
            f"the charge of {kind} states no adjacencies; charge by "
            "self.charge_and_draw(ledger, mechanism, count, key)"
        )
    if event.adjacencies != tuple(run.labeler.adjacencies):
        raise LabelerCheckError(
            f"the charge of {kind} states adjacencies={event.adjacencies}, the labeler "
            f"{tuple(run.labeler.adjacencies)}"
        )
    if event.noise is None or getattr(event.noise, "run", None) is not run:
        raise LabelerCheckError(
            f"the charge of {kind} names {event.noise!r} as its noise and not the labeler's noise_source; charge by "
            "self.charge_and_draw(ledger, mechanism, count, key)"
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
        place = next(number for number, event in enumerate(run.events) if event == REFUSED)
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
    return any(event == REFUSED for event in run.events)


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
                        "whoever sees both answers can subtract it. Get the noise of each release from "
                        "self.charge_and_draw, "
                        "whose stream belongs to the row that was charged"
                    )
    return ""


def check_reproducible(subject: Subject, table: Table) -> str:
    """With the same table and the same noise, the answers are the same: no other randomness is in them."""
    first, second = (Run(subject).fit(table).label(table.queries) for _ in range(2))
    check_same(first.releases, second.releases, "two runs on the same table with the same noise")
    return ""


def check_forgets(subject: Subject, table: Table, others: Sequence[Table]) -> str:
    """Check that what was fitted before has no part in the answers."""
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
    return float(getattr(charge.mechanism.bare, "sampling_rate", 1.0))


@dataclasses.dataclass
class Largest:
    """The largest moves that were seen, and what was passed over.

    Attributes:
        still: nothing may move, because no record is drawn.
        pairs: how many pairs were compared.
        moves: for each mechanism the move that is the largest share of what is allowed.
        conditional: moves beyond what is allowed, of charges that name a condition.
        refused: names of tables that ``fit`` or ``label`` refused.
    """

    still: bool = False
    pairs: int = 0
    moves: dict[str, Move] = dataclasses.field(default_factory=dict)
    conditional: dict[str, Move] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)

    def take(self, found: Iterable[Move]) -> None:
        """One pair's moves.

        Raises:
            LabelerCheckError: for a move that is more than was charged, without a condition.
        """
        self.pairs += 1
        for move in found:
            if self.still and move.amount > move.rounding:
                raise LabelerCheckError(
                    f"a record whose coin shows tails moves {move.what} by {move.amount:.6g}; a record that is not "
                    "in the sample must have no influence"
                )
            if exceeds(move):
                if not move.condition:
                    raise LabelerCheckError(
                        f"one record moves {move.what} by {move.amount:.6g}, and {move.allowed:.6g} was charged. "
                        "State the larger sensitivity, or bound each record's part"
                    )
                self.conditional[move.what] = move
            known = self.moves.get(move.what)
            if known is None or move.amount * known.allowed > known.amount * move.allowed:
                self.moves[move.what] = move

    @property
    def all_moved(self) -> bool:
        """Whether some record moved each of the mechanisms, of which there is one."""
        return bool(self.moves) and all(move.amount > move.rounding for move in self.moves.values())

    def __str__(self) -> str:
        shown = [f"{m.what} at most {m.amount:.4g} of {m.allowed:.4g}" for m in self.moves.values()]
        beyond = [
            f"{m.what} {m.amount:.4g} of {m.allowed:.4g}, covered only if {m.condition}"
            for m in self.conditional.values()
        ]
        refused = [f"refused: {', '.join(dict.fromkeys(self.refused))}"] if self.refused else []
        return "; ".join([f"{self.pairs} pairs", *shown, *beyond, *refused])


def compare(
    subject: Subject, owner: object, pairs: Sequence[Pair], coins: Coins, largest: Largest, check: str
) -> None:
    """Run a labeler on both tables of each pair, with the same coins and the same answers, and measure.

    Args:
        subject: what is run.
        owner: the labeler, for messages.
        pairs: neighbouring tables.
        coins: how coins fall.
        largest: takes the measurements.
        check: name of the check, for messages.
    """
    firsts: dict[int, Run | None] = {}
    for pair in pairs:
        with named(check, owner, f"tables {pair.name}, coins {coins}"):
            key, units = id(pair.first), pair.first.units
            sizes = {"records": units, "each": len(pair.first) // max(1, units)}
            if key not in firsts:
                firsts[key] = _accepted(subject, pair.first, largest, coins=coins, **sizes)
            first = firsts[key]
            if first is None:
                continue
            second = _accepted(
                subject, pair.second, largest,
                coins=coins, removed=pair.removed, after=first, **sizes,
            )  # fmt: skip
            if second is None:
                continue
            check_outcomes(first, second)
            largest.take(moves(pools(first.events), pools(second.events)))


def check_outcomes(first: Run, second: Run) -> None:
    """Raise unless two runs with equal answers of all mechanisms let out the same, at the same charges."""
    rows = [[(row.mechanism, row.count) for row in run.ledger.rows] for run in (first, second)]
    if rows[0] != rows[1]:
        raise LabelerCheckError(
            f"what is charged depends on the private table: {rows[0]} on one, {rows[1]} on the other, at equal "
            "answers"
        )
    if len(first.outcomes) != len(second.outcomes):
        raise LabelerCheckError("draws fewer times on one private table than on the other, at equal answers")
    check_same(
        first.releases,
        second.releases,
        "two private tables for which all noisy values are the same: something private is released without noise",
    )


def check_strangers(subject: Subject, table: Table, others: Sequence[Table]) -> str:
    """Whatever the table, equal answers of the mechanisms give an equal release, at equal charges."""
    for passing in ("all", "half"):
        first = Run(subject, coins="heads", passing=passing, records=len(table)).fit(table)
        first.label(table.queries)
        left = first.left()  # at once: the next run may change what the class holds
        for other in others:
            second = (
                Run(subject, coins="heads", after=first, hold_parts=False).fit(other).label(table.queries)
            )
            check_outcomes(first, second)
            for what, told in second.left().items():
                if told != left[what]:
                    one, two = _different(left[what], told)
                    raise LabelerCheckError(
                        f"{what} differ between private tables: {one[:80]!r} on one, {two[:80]!r} on the other; what "
                        "is private reaches the release alone, by noise"
                    )
    return f"{len(others)} tables"


def _different(*sides: Any) -> tuple[str, ...]:
    """Both sides in words; of tables, the entries that differ."""
    one, two = sides
    if isinstance(one, dict) and isinstance(two, dict):
        sides = tuple({k: v for k, v in side.items() if one.get(k) != two.get(k)} for side in sides)
    return tuple(map(str, sides))


def is_sampled(subject: Subject, queries: int) -> bool:
    """Whether anything in the plan is of a Poisson sample."""
    plan = subject.make().plan(queries, queries, subject.num_classes)
    return any(sampling_rate(charge) < 1 for charge in plan)


def _accepted(subject: Subject, table: Table, largest: Largest, **settings: object) -> Run | None:
    """A run that answers all queries; None where the labeler refuses the table."""
    try:
        run = Run(subject, passing="all", **settings).fit(table)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        largest.refused.append(f"'{table.name}' of {len(table)} records ({type(error).__name__})")
        return None
    try:
        return run.label(table.queries)
    except (ValueError, RuntimeError) as error:
        raise LabelerCheckError(
            f"label raises {type(error).__name__} on a table that fit took ({error}), which tells of the table: let "
            "fit refuse it, for reasons that are public"
        ) from error


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Report of :func:`check_labeler`, all of whose checks passed.

    Attributes:
        labeler: name of the class.
        checks: name of each check and what it saw; tables that were refused, and checks that did not apply, say so.
        largest: for each task and relation, the largest moves that were seen.
    """

    labeler: str
    checks: tuple[tuple[str, str], ...]
    largest: dict[str, Largest]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.checks)
        lines = [f"{name:<{width}}  {seen or 'ok'}" for name, seen in self.checks]
        return "\n".join([f"check_labeler({self.labeler}): all passed", *lines])


def check_labeler(
    labeler: Labeler | Callable[[], Labeler],
    *,
    num_records: int | None = None,
    num_queries: int = 12,
    num_classes: int | None = None,
    dimension: int = 6,
    pairs: Sequence[Pair] = (),
    methods: Sequence[DrawingMethod] = (),
    seed: int = 0,
) -> CheckReport:
    """Check that a labeler charges before it draws, and that its noise covers what one record can do.

    In the manner of scikit-learn's ``check_estimator``, for authors of teachers. It makes tables, runs copies of the
    labeler on them with watched noise and a ledger that takes notes, and raises at the first promise that is broken:

    * *payment*: nothing is drawn before its charge, nor more than was charged, nor with another mechanism than the
      charged one, nor after a charge was refused; charges stay within the plan and state the noise source and the
      adjacencies; the default noise is cryptographic.
    * *answers*: at most ``max_answers``; of the right shapes and dtypes; the same for the same table and noise;
      independent of tables of earlier fits; a resumed run draws no noise again.
    * *sensitivity*: on pairs of neighbouring tables (random, tied distances, duplicates, one query asked many times,
      one record that decides, few records and 1,500, classes with 1, 9, 10 and 11 records, records of great norm,
      rows of many attributes), what enters the noise differs by at most what was charged, and by something. The pair
      shares coins, and the second table gets the first one's noisy answers, as adaptive composition has it.
    * *nothing else*: tables that have nothing in common give the same release where all noisy answers are the same.
    * *samples*: coins have the charged rate, each sampled release has a coin for each record, and a record whose coin
      shows tails has no influence.

    What enters the noise is seen at the drawing methods of mechanisms (``add_noise``, ``argmax``, ``passes``,
    ``randomize``; also of your own mechanism, if it has ``l1_sensitivity`` or ``l2_sensitivity``), without the
    labeler's help. A labeler that draws otherwise can't be looked into: the check says so, and wants a
    :class:`~pl_privknn.testing.watch.DrawingMethod`.

    A check finds faults; it proves nothing. Neighbours that are not among the tables may move more, and the noise of
    the mechanisms themselves is tested elsewhere.

    Args:
        labeler: one as it would be used, not fitted; it is copied for each run. Or a function that makes one.
        num_records: of the larger tables; more than any number of neighbours or teachers in the labeler. By default
            24 and twice its ``k`` and ``num_teachers``.
        num_queries: asked about each table.
        num_classes: classes, or attributes for labelers of multi-label data; 5 by default.
        dimension: of the features.
        pairs: further neighbouring tables to try.
        methods: further methods through which values enter noise.
        seed: of the tables and of the noise.

    Returns:
        What was checked, with the largest moves that were seen.

    Raises:
        LabelerCheckError: for the first promise that is broken: the check, the tables and the amounts in one line.
        TypeError: for something that is no labeler.

    Example:
        >>> from pl_privknn import PrivateKNN
        >>> report = check_labeler(PrivateKNN(k=5, sampling_rate=1.0))
        >>> report.largest["multiclass, add_remove"].moves["gaussian (L2)"].amount
        1.4142135623730951
    """
    make: Any = copies_of(labeler) if isinstance(labeler, Labeler) else labeler
    owner = make() if callable(make) else None
    if not isinstance(owner, Labeler):
        raise TypeError(f"labeler={labeler!r} must be a Labeler, or a function that makes one")
    if num_records is None:
        num_records = 24 + 2 * max(int(getattr(owner, name, 0)) for name in ("k", "num_teachers"))
    records, queries = check_int("num_records", num_records, 4), check_int("num_queries", num_queries)
    checks: list[tuple[str, str]] = []
    largest: dict[str, Largest] = {}
    adjacencies = owner.adjacencies
    known = [*mechanism_methods(), *protocol_methods(), *methods]
    with torch.random.fork_rng(devices=[]):
        for task in owner.tasks:
            classes = check_int("num_classes", 5 if num_classes is None else num_classes, 2)
            makers = Makers(task, records, queries, classes, check_int("dimension", dimension), seed)
            subject = Subject(make, known, classes, makers.public(), seed)
            examined = _Examined(owner, adjacencies, subject, makers, task, checks)
            examined.contract()
            largest |= examined.neighbors(pairs)
            if isinstance(owner, ProtectsPersons) and owner.protects_persons:
                largest |= examined.neighbors((), each=_RECORDS_OF_A_PERSON)
    if isinstance(labeler, Labeler):
        labeler.checked = True  # which runs of it note
    return CheckReport(type(owner).__name__, tuple(checks), largest)


@dataclasses.dataclass
class _Examined:
    """One labeler on the tables of one task."""

    owner: Labeler
    adjacencies: tuple[Adjacency, ...]
    subject: Subject
    makers: Makers
    task: str
    checks: list[tuple[str, str]]

    def contract(self) -> None:
        """Checks on one table."""
        subject, table = self.subject, self.makers.random()
        self.do("noise source", check_source, subject)
        self.do("plan", check_plan, subject, table)
        self.do("payments", self._rounds, table)
        self.do("max_answers", self._capped, table)
        self.do("refused charges", check_refusals, subject, table)
        self.do("fresh noise", check_fresh_noise, subject, table)
        self.do("same again", check_reproducible, subject, table)
        # Where a replaced record is all that neighbours differ in, the number of records is public.
        more = 7 if "add_remove" in self.adjacencies else 0
        strangers = self.makers.strangers(more)
        self.do("earlier tables", check_forgets, subject, table, strangers)
        self.do("noise alone", check_strangers, subject, table, strangers)
        exact, many = self.makers.asked_about_records(), self.makers.many(more)
        self.do("records as queries", check_strangers, subject, *exact)
        self.do("many records", check_strangers, subject, *many)
        self.do("samples", check_samples, subject, self.makers.together(), table)

    def neighbors(self, pairs: Sequence[Pair], each: int = 1) -> dict[str, Largest]:
        """Checks on neighbouring tables; the largest moves for each relation.

        Args:
            pairs: further ones.
            each: neighbours differ in a person with so many records, where there are several.
        """
        found, makers = {}, self.makers
        owned = [makers.random(), makers.scattered(), *makers.decisive(), makers.together()]
        tables = makers.all() if each == 1 else [table.of_persons(each) for table in owned]
        what = "" if each == 1 else ", persons"
        for adjacency in self.adjacencies:
            seen = found[f"{self.task}, {adjacency}{what}"] = Largest()
            made = [pair for table in tables for pair in neighbors_of(table, adjacency)]
            made += [pair for pair in pairs if pair.adjacency == adjacency]
            self._compare(f"sensitivity under {adjacency}{what}", made, "heads", seen)
            if adjacency == "add_remove" and is_sampled(self.subject, self.makers.m):
                few = [
                    pair
                    for table in (tables[0], tables[-1] if each > 1 else makers.together())
                    for pair in neighbors_of(table, adjacency)
                ]
                self._compare(f"records not drawn{what}", few, "tails", Largest(still=True))
                n = makers.n
                labels = tables[0].labels[:n]
                line = makers.in_order("records in order", labels, n, (0, 1, n // 2, n - 1))
                line = line if each == 1 else line.of_persons(each)
                self._compare(f"same coins{what}", list(neighbors_of(line, adjacency)), "mixed", Largest())
        return found

    def do(self, name: str, check: Callable[..., str], *arguments: Any) -> None:
        """Run one check and note what it saw."""
        name = name if len(self.owner.tasks) == 1 else f"{name}, {self.task}"
        with named(name, self.owner):
            try:
                seen = check(*arguments)
            except LabelerCheckError:
                raise
            except Exception as error:
                raise LabelerCheckError(
                    f"raises {type(error).__name__} ({error}). If it is for the table, give num_records, "
                    "num_queries, num_classes or dimension that the labeler can work with"
                ) from error
        self.checks.append((name, seen))

    def _compare(self, name: str, pairs: Sequence[Pair], coins: Any, largest: Largest) -> None:
        def check() -> str:
            compare(self.subject, self.owner, pairs, coins, largest, name)
            if not largest.pairs:
                raise LabelerCheckError(f"no pair of tables was accepted ({largest})")
            if coins == "heads" and not largest.all_moved:
                raise LabelerCheckError(
                    f"nothing that a record could move ever entered noise ({largest}), so the check saw nothing. Let "
                    "records have a part in what is charged, or give num_records or pairs of tables in which they do"
                )
            return str(largest)

        self.do(name, check)

    def _rounds(self, table: Table) -> str:
        """Payments of one round, of its batches, and of two rounds."""
        asked, classes = len(table.queries), self.subject.num_classes
        for passing in ("drawn", "all"):
            run = Run(self.subject, passing=passing).fit(table)
            batches = table.queries.split(-(-asked // 2)) if self.owner.asks_in_batches else (table.queries,)
            for batch in batches:
                run.label(batch)
                check_release(run.releases[-1], len(batch), len(batch), classes, self.task)
            check_payments(run)
            check_within_plan(run, asked, asked)
            check_payments(run.fit(table).label(table.queries))
            check_within_plan(run, 2 * asked, 2 * asked, rounds=2)
        return ""

    def _capped(self, table: Table) -> str:
        asked = len(table.queries)
        for most in (asked // 3, 1, 0):
            run = Run(self.subject, passing="all").fit(table).label(table.queries, most)
            check_release(run.releases[0], asked, most, self.subject.num_classes, self.task)
            check_within_plan(run, asked, most)
        return ""
