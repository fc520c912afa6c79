"""``check_labeler``: privacy checks of a labeler."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import Labeler, ProtectsPersons, Release
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge, GaussianDPStream
from pl_privknn.privacy.mechanisms.base import merged
from pl_privknn.testing.distances import Move, moves, pools
from pl_privknn.testing.tables import Makers, Pair, Table, neighbors_of
from pl_privknn.testing.watch import (
    CALLED,
    REFUSED,
    Coins,
    Draw,
    Falling,
    LabelerCheckError,
    Paid,
    Run,
    Subject,
    copies_of,
    named,
)

_ORDERS = np.array([1.5, 2.0, 8.0])
#: Refuse the first charge, the second, …; a labeler with more charges is refused at these.
_REFUSALS = 4
# Enough that a labeler which counts records is found where a person moves several of them.
_RECORDS_OF_A_PERSON = 3


def check_source(subject: Subject) -> str:
    """The noise source is the operating system's generator, and the labeler's own."""
    source = getattr(subject.make(), "noise_source", None)
    if source is None:
        raise LabelerCheckError("has no noise_source; call super().__init__(noise_source) in __init__")
    if not source.cryptographic:
        raise LabelerCheckError(
            f"noise_source={source!r} is seeded: with the seed the noise can be subtracted. Make the labeler "
            "without a noise_source, as for a real run (the check provides sources)"
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
        raise LabelerCheckError(f"plan returns {plan!r}; expected a list of Charge, at least one")
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
    paid_here, stream = False, False
    for event in run.events:
        if event == CALLED:
            paid_here = stream
        elif isinstance(event, Paid):
            paid_here = True
            stream = stream or isinstance(event.charge.mechanism.bare, GaussianDPStream)
            _check_stated(run, event)
        elif isinstance(event, Draw | Coins) and not paid_here:
            raise LabelerCheckError(
                "draws before it charges; get the noise from self.charge_and_draw(ledger, mechanism, count, key), "
                "which charges first"
            )
    if not run.ledger.rows:
        raise LabelerCheckError("label charged nothing; every release must be charged")
    pools(run.events)
    if any(isinstance(event, Draw) and not event.through for event in run.events):
        raise LabelerCheckError(
            "label draws noise by itself, so the check can't look inside: draw by the charged mechanism (add_noise, "
            "argmax, passes, randomize, draw). Coins of a sample are those of noise.bernoulli(shape, sampling_rate)"
        )
    rates = set(map(sampling_rate, run.ledger.rows))
    for event in run.events:
        if isinstance(event, Coins) and event.rate not in rates:
            raise LabelerCheckError(
                f"tosses coins of probability {event.rate:g}, but what it charged has sampling_rate "
                f"{', '.join(f'{rate:g}' for rate in sorted(rates))}; sample at the rate that is charged"
            )
    return ""


def _check_stated(run: Run, event: Paid) -> None:
    adjacencies = tuple(run.labeler.adjacencies)
    if event.adjacencies != adjacencies or getattr(event.noise, "run", None) is not run:
        raise LabelerCheckError(
            f"the charge of {event.charge.mechanism.kind} states adjacencies={event.adjacencies} and "
            f"noise={event.noise!r}, and not the labeler's {adjacencies} and noise_source; charge by "
            "self.charge_and_draw(ledger, mechanism, count, key)"
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
    """Labels, probabilities and scores have the shapes, dtypes and values of a release."""
    if not isinstance(release, Release):
        raise LabelerCheckError(f"label returns {type(release).__name__}; expected a Release")
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
            raise LabelerCheckError("soft: rows of answered queries are not probabilities")
    if release.scores is not None:
        if release.scores.shape[:1] != (queries,) or not release.scores.is_floating_point():
            raise LabelerCheckError(
                f"scores: shape {tuple(release.scores.shape)}, {release.scores.dtype}; expected float, a row a query"
            )
        if release.score_deviation is None or not 0 < release.score_deviation < math.inf:
            raise LabelerCheckError(
                f"score_deviation={release.score_deviation!r} with scores; state their noise's"
            )
    return ""


def _check_tensor(name: str, value: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> None:
    if tuple(value.shape) != shape or value.dtype not in dtypes:
        raise LabelerCheckError(
            f"{name}: shape {tuple(value.shape)}, {value.dtype}; expected {dtypes[0]} of shape {shape}"
        )


def check_refusals(subject: Subject, table: Table) -> str:
    """A refused charge ends the call, with nothing drawn after it; a later call pays before it draws."""
    refused = len(list(itertools.takewhile(functools.partial(_refuses, subject, table), range(_REFUSALS))))
    if not refused:
        raise LabelerCheckError("no charge was made that a ledger could refuse")
    return f"at {refused} charges"


def _refuses(subject: Subject, table: Table, limit: int) -> bool:
    """Refuse the charge after the first ``limit`` and check what follows; False where there is no such charge."""
    run, ended = Run(subject, passing="all", limit=limit).fit(table), False
    try:
        run.label(table.queries)
    except BudgetExceeded:
        ended = True
    if REFUSED not in run.events:
        return False
    if not ended:
        raise LabelerCheckError(
            f"answers although charge {limit + 1} was refused; let BudgetExceeded pass, and return nothing"
        )
    if run.events.index(REFUSED) < len(run.events) - 1:
        raise LabelerCheckError(f"continues to draw or charge after charge {limit + 1} was refused")
    if limit:
        check_payments(run)
    run.ledger.limit = None
    check_payments(run.label(table.queries))
    return True


def check_fresh_noise(subject: Subject, table: Table) -> str:
    """Neither a second call nor a resumed run, with the same seed and later rows, draws the same noise again."""
    first = Run(subject, passing="all").fit(table).label(table.queries)
    if subject.make().asks_in_batches:
        first.label(table.queries)
    resumed = Run(subject, passing="all", start=len(first.ledger.rows)).fit(table).label(table.queries)
    seen: dict[tuple[int | str, ...], tuple[int, int]] = {}
    for number, run in enumerate((first, resumed)):
        for event in run.events:
            if isinstance(event, Draw):
                owner = seen.setdefault(event.path, (number, event.stream))
                if owner != (number, event.stream):
                    raise LabelerCheckError(
                        f"{'a resumed run' if number else 'a later draw'} repeats the noise of stream {event.path}: "
                        "it can be subtracted by anyone who sees both answers. Get the noise of each release from "
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
    """Check that tables fitted earlier do not affect the answers."""
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
    rates = {rate for rate in map(sampling_rate, run.ledger.rows) if rate < 1}
    for rate in rates:
        releases = sum(charge.count for charge in run.ledger.rows if sampling_rate(charge) == rate)
        tossed = sum(event.count for event in run.events if isinstance(event, Coins) and event.rate == rate)
        if tossed < releases * len(table):
            raise LabelerCheckError(
                f"tosses {tossed} coins of probability {rate:g} where its charges are of {releases} "
                f"sampled releases of {len(table)} records: each release needs a coin for each record, by "
                "noise.bernoulli(shape, sampling_rate); a sample that serves twice, or of fixed size, is not covered"
            )
    return "" if rates else "nothing is sampled"


def sampling_rate(charge: Charge) -> float:
    """Poisson rate of a charge; 1 where it has none."""
    return float(getattr(charge.mechanism.bare, "sampling_rate", 1.0))


@dataclasses.dataclass
class Largest:
    """Largest observed moves, and skipped checks.

    Attributes:
        still: nothing may move, because no record is drawn.
        pairs: how many pairs were compared.
        moves: for each mechanism the move that is the largest share of what is allowed; beyond that, of charges that
            name a condition.
        refused: names of tables that ``fit`` or ``label`` refused.
    """

    still: bool = False
    pairs: int = 0
    moves: dict[str, Move] = dataclasses.field(default_factory=dict)
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
            if move.exceeds and not move.condition:
                raise LabelerCheckError(
                    f"one record moves {move.what} by {move.amount:.6g}, and {move.allowed:.6g} was charged. "
                    "State the larger sensitivity, or bound each record's part"
                )
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
            for m in self.moves.values()
            if m.exceeds
        ]
        refused = [f"refused: {', '.join(dict.fromkeys(self.refused))}"] if self.refused else []
        return "; ".join([f"{self.pairs} pairs", *shown, *beyond, *refused])


def check_outcomes(first: Run, second: Run) -> None:
    """Raise unless two runs with equal answers of all mechanisms release the same, at the same charges."""
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
    """On any tables, equal answers of the mechanisms give equal releases, at equal charges."""
    for passing in ("all", "half"):
        first = Run(subject, coins="heads", passing=passing, records=len(table)).fit(table)
        first.label(table.queries)
        for other in others:
            second = (
                Run(subject, coins="heads", after=first, hold_parts=False).fit(other).label(table.queries)
            )
            check_outcomes(first, second)
            for what, value in second.left().items():
                if value != first.left()[what]:
                    raise LabelerCheckError(
                        f"{what} differ between private tables; what is private reaches the release alone, by noise"
                    )
    return f"{len(others)} tables"


def _accepted(made: Callable[..., Run], subject: Subject, table: Table, largest: Largest) -> Run | None:
    """A run that answers all queries; None where the labeler refuses the table."""
    try:
        run = made(subject, passing="all").fit(table)
    except (ValueError, RuntimeError) as error:
        largest.refused.append(f"'{table.name}' of {len(table)} records ({type(error).__name__})")
        return None
    try:
        return run.label(table.queries)
    except (ValueError, RuntimeError) as error:
        raise LabelerCheckError(
            f"label raises {type(error).__name__} on a table that fit took ({error}), which reveals the table: let "
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
    private_records: int | None = None,
    num_queries: int = 12,
    num_classes: int | None = None,
    dimension: int = 6,
    pairs: Sequence[Pair] = (),
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

    What enters the noise is observed in :meth:`~pl_privknn.privacy.mechanisms.Mechanism.draw`, through which
    ``add_noise``, ``argmax``, ``passes`` and ``randomize`` go, without the labeler's help. A mechanism of your own
    states ``l1_sensitivity`` or ``l2_sensitivity``, or registers with :func:`~pl_privknn.testing.distances.distance`.
    A labeler that draws otherwise can't be looked into: the check says so.

    A check finds faults; it proves nothing. Neighbours that are not among the tables may move more, and the noise of
    the mechanisms themselves is tested elsewhere.

    Args:
        labeler: one as it would be used, not fitted; it is copied for each run. Or a function that makes one.
        private_records: of the larger tables; more than any number of neighbours or teachers in the labeler. By
            default 24 and twice its ``k`` and ``num_teachers``.
        num_queries: asked about each table.
        num_classes: classes, or attributes for labelers of multi-label data; 5 by default.
        dimension: of the features.
        pairs: further neighbouring tables to try.
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
    if private_records is None:
        private_records = 24 + 2 * max(int(getattr(owner, name, 0)) for name in ("k", "num_teachers"))
    records, queries = check_int("private_records", private_records, 4), check_int("num_queries", num_queries)
    checks: list[tuple[str, str]] = []
    largest: dict[str, Largest] = {}
    with torch.random.fork_rng(devices=[]):
        for task in owner.tasks:
            classes = check_int("num_classes", 5 if num_classes is None else num_classes, 2)
            makers = Makers(task, records, queries, classes, check_int("dimension", dimension), seed)
            subject = Subject(make, classes, makers.public(), seed)
            examined = _Examined(owner, subject, makers, task, checks)
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
        more = 7 if "add_remove" in self.owner.adjacencies else 0
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
        for adjacency in self.owner.adjacencies:
            seen = found[f"{self.task}, {adjacency}{what}"] = Largest()
            made = [pair for table in tables for pair in neighbors_of(table, adjacency)]
            made += [pair for pair in pairs if pair.adjacency == adjacency]
            self._compare(f"sensitivity under {adjacency}{what}", made, "heads", seen)
            if adjacency == "add_remove" and self._is_sampled():
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
        """Run one check and note its result."""
        name = name if len(self.owner.tasks) == 1 else f"{name}, {self.task}"
        with named(name, self.owner):
            try:
                seen = check(*arguments)
            except LabelerCheckError:
                raise
            except Exception as error:
                raise LabelerCheckError(
                    f"raises {type(error).__name__} ({error}). If it is for the table, give private_records, "
                    "num_queries, num_classes or dimension that the labeler can work with"
                ) from error
        self.checks.append((name, seen))

    def _is_sampled(self) -> bool:
        plan = self.subject.make().plan(self.makers.m, self.makers.m, self.subject.num_classes)
        return any(sampling_rate(charge) < 1 for charge in plan)

    def _compare(self, name: str, pairs: Sequence[Pair], coins: Falling, largest: Largest) -> None:
        def check() -> str:
            firsts: dict[int, Run | None] = {}
            for pair in pairs:
                with named(name, self.owner, f"tables {pair.name}, coins {coins}"):
                    self._compare_pair(pair, coins, largest, firsts)
            if not largest.pairs:
                raise LabelerCheckError(f"no pair of tables was accepted ({largest})")
            if coins == "heads" and not largest.all_moved:
                raise LabelerCheckError(
                    f"nothing that a record could move ever entered noise ({largest}), so the check saw nothing. "
                    "Let records have a part in what is charged, or give private_records or pairs in which they do"
                )
            return str(largest)

        self.do(name, check)

    def _compare_pair(
        self, pair: Pair, coins: Falling, largest: Largest, firsts: dict[int, Run | None]
    ) -> None:
        """Run the labeler on both tables, with the same coins and the same answers, and measure."""
        key, units = id(pair.first), pair.first.units
        run = functools.partial(Run, coins=coins, records=units, each=len(pair.first) // max(1, units))
        if key not in firsts:
            firsts[key] = _accepted(run, self.subject, pair.first, largest)
        first = firsts[key]
        if first is None:
            return
        after = functools.partial(run, removed=pair.removed, after=first)
        second = _accepted(after, self.subject, pair.second, largest)
        if second is not None:
            check_outcomes(first, second)
            largest.take(moves(pools(first.events), pools(second.events)))

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
