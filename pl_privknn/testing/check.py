"""``check_labeler``: privacy checks of a labeler on pairs of neighbouring tables."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import Labeler
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, merged
from pl_privknn.testing.observe import (
    REPEATS,
    LabelerCheckError,
    Move,
    ObservedRun,
    Table,
    copies_of,
    moves,
    neighbors_of,
    sampling_rate,
)

# More records than a branch for small tables is likely to look for.
_MANY = 1500
# Records of rare classes, on both sides of ten; and how many records their table has beyond the others'.
_RARE, _MORE = (10, 9, 11, 1), 36


@dataclasses.dataclass(frozen=True)
class ExampleTables:
    """Tables for one task.

    Args:
        task: ``"multiclass"`` or ``"multilabel"``.
        n: records of the larger tables.
        m: queries about each.
        c: classes or attributes.
        d: dimension of the features.
        generator: of what is drawn at random.
    """

    task: str
    n: int
    m: int
    c: int
    d: int
    generator: torch.Generator

    def clusters(self, name: str, classes: Tensor, records: Sequence[int]) -> Table:
        """Records around one centre per class, and queries around these centres."""
        asked = torch.arange(self.m) % self.c
        features = self._centres[classes] + self._normal(len(classes), self.d)
        queries = self._centres[asked] + self._normal(self.m, self.d)
        return Table(name, features, self._labels(classes), queries, tuple(dict.fromkeys(records)))

    def tied(self) -> Table:
        """Records all at one place, where the queries are too."""
        labels = self._labels(self._shuffled(self.n))
        queries = 5 + 1e-3 * self._normal(self.m, self.d)
        places = (0, self.n // 2, self.n - 1)
        return Table("tied distances", torch.full((self.n, self.d), 5.0), labels, queries, places)

    def all(self) -> list[Table]:
        """Every table, a random one first."""
        random = self.clusters("random", torch.arange(self.n) % self.c, ())
        nearest = int(torch.cdist(random.queries[:1], random.features).argmin())
        first = tuple(dict.fromkeys((*range(min(self.c, self.n)), nearest, self.n - 1)))
        random = dataclasses.replace(random, records=first)
        scattered = self._scattered("no pattern", self.n, range(min(self.n, 4)))
        asked = scattered.features[: self.m]
        labels = self._labels((torch.arange(self.n) == 3).long())
        return [
            random,
            scattered,
            *self._decisive(),
            self.tied(),
            self._duplicates(),
            dataclasses.replace(
                random, name="one query many times", queries=random.queries[:1].repeat(self.m, 1)
            ),
            dataclasses.replace(scattered, name="queries that are records", queries=asked),
            dataclasses.replace(random, name="a class with one record", labels=labels, records=(3,)),
            *(self._scaled(f"a record of norm {factor:g}", factor) for factor in (1e4, 1e9)),
            self._scaled("a record that is not finite", torch.nan),
            *(self._scattered(f"{n} records", n, range(min(n, 4))) for n in (2, 3, self.c)),
            *self._rare(self.n + _MORE),
            dataclasses.replace(large := next(self._rare(_MANY)), records=large.records[:2]),
            self.clusters("many records", torch.arange(_MANY) % self.c, (0,)),
        ]

    def public(self) -> Tensor:
        """Features of public examples."""
        return self._centres.repeat(8, 1) + self._normal(8 * self.c, self.d)

    @functools.cached_property
    def _centres(self) -> Tensor:
        return 2 * self._normal(self.c, self.d)

    def _scattered(self, name: str, n: int, records: Sequence[int]) -> Table:
        """Records of all classes in random order, without clusters."""
        classes = self._shuffled(n)
        features, queries = 2 * self._normal(n, self.d), 2 * self._normal(self.m, self.d)
        return Table(name, features, self._labels(classes), queries, tuple(records))

    def _shuffled(self, n: int) -> Tensor:
        return (torch.arange(n) % self.c)[torch.randperm(n, generator=self.generator)]

    def _scaled(self, name: str, factor: float) -> Table:
        """Table without a pattern, one of whose records is multiplied by a factor."""
        table = self._scattered(name, self.n, (1,))
        table.features[1] *= factor
        return table

    def _duplicates(self) -> Table:
        twice = self.clusters("duplicates", torch.arange(self.n // 2) % self.c, (0, 1, 2))
        labels = torch.stack([twice.labels, twice.labels.roll(1, 0)], 1).flatten(0, 1)
        return dataclasses.replace(twice, features=twice.features.repeat_interleave(2, dim=0), labels=labels)

    def _decisive(self) -> Iterator[Table]:
        """Tables in order of distance whose first record decides: the others have another class, or attributes."""
        line = torch.nn.functional.normalize(torch.ones(self.d), dim=0)
        features = 5 + torch.arange(1, self.n + 1)[:, None] * line
        for mine, theirs in self._kinds():
            queries = 5 + 1e-3 * self._normal(self.m, self.d)
            yield Table(
                "one record decides", features, torch.stack([mine] + [theirs] * (self.n - 1)), queries, (0,)
            )

    def _rare(self, n: int) -> Iterator[Table]:
        """Clusters in no order, some small; the first record and one of each small cluster are removed in turn."""
        for start in range(0, len(_RARE), self.c - 1):
            sizes = torch.tensor(_RARE[start : start + self.c - 1])
            rare = torch.arange(len(sizes)).repeat_interleave(sizes)
            rest = len(sizes) + torch.arange(n - len(rare)) % (self.c - len(sizes))
            classes = torch.cat([rare, rest])[torch.randperm(n, generator=self.generator)]
            one_each = torch.nn.functional.one_hot(classes, self.c)
            name = f"classes of {', '.join(map(str, sizes.tolist()))} records"
            table = self.clusters(name, classes, (0, *one_each.argmax(dim=0)[: len(sizes)].tolist()))
            yield table if self.task == "multiclass" else dataclasses.replace(table, labels=one_each)

    def _kinds(self) -> list[tuple[Tensor, Tensor]]:
        """Label of the deciding record, and label of all others."""
        if self.task == "multiclass":
            return [(torch.tensor(0), torch.tensor(self.c - 1)), (torch.tensor(self.c - 1), torch.tensor(0))]
        kinds = {(self.c, 0), *((s, t) for s in range(1, self.c + 1) for t in (s, self.c - s))}
        first = (torch.arange(self.c) < torch.arange(self.c + 1)[:, None]).long()
        return [(first[mine], first[theirs].flip(0)) for mine, theirs in sorted(kinds)]

    def _labels(self, classes: Tensor) -> Tensor:
        if self.task == "multiclass":
            return classes
        bits = torch.rand(len(classes), self.c, generator=self.generator) < 0.5
        return torch.where(classes[:, None] == 0, 1, bits.long())

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


#: Makes a run of the labeler, with the options of :class:`~pl_privknn.testing.observe.ObservedRun`.
New = Callable[..., ObservedRun]

_ORDERS = np.array([1.5, 2.0, 8.0])
# Refuse the first charge, the second, …; a labeler with more charges is refused at these.
_REFUSALS = 4


def check_source(new: New, labeler: Labeler) -> None:
    """Check that the noise source is the operating system's generator."""
    if not labeler.noise_source.cryptographic:
        raise LabelerCheckError(
            f"noise_source={labeler.noise_source!r} is seeded, so its noise can be subtracted; make the labeler "
            "without it"
        )


def check_plan(new: New, table: Table) -> None:
    """Check that the plan is a list of charges, depends on no table, and is defined under the stated adjacencies."""
    queries = len(table.queries)
    run = new()
    labeler, classes = run.labeler, run.num_classes
    if not labeler.adjacencies:
        raise LabelerCheckError("adjacencies is empty; name those under which the plan holds")
    plan = labeler.plan(queries, queries, classes)
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
    if run.fit(table).labeler.plan(queries, queries, classes) != plan:
        raise LabelerCheckError("plan is another one after fit; it must not depend on the private table")


def check_within_plan(run: ObservedRun, queries: int, answers: int, rounds: int = 1) -> None:
    """Check that no mechanism is charged more often than the plan for these queries, answers and rounds states."""
    classes = run.num_classes
    plan = merged(run.labeler.plan(queries, answers, classes, rounds=rounds))
    for mechanism, charge in merged(run.ledger.rows).items():
        planned = plan[mechanism].count if mechanism in plan else 0
        if charge.count > planned:
            raise LabelerCheckError(
                f"charges {charge.count} releases of {mechanism!r}, but plan({queries}, {answers}, {classes}, "
                f"rounds={rounds}) has {planned}"
            )


def check_rounds(new: New, table: Table) -> None:
    """Check that charges of one round, its batches, two rounds, and rounds with few answers stay within the plan."""
    asked, run = len(table.queries), new().fit(table)
    batches = table.queries.split(-(-asked // 2)) if run.labeler.capabilities.in_batches else (table.queries,)
    for batch in batches:
        run.label(batch)
    if not run.ledger.rows:
        raise LabelerCheckError("label charged nothing; every release must be charged")
    check_within_plan(run, asked, asked)
    check_within_plan(run.fit(table).label(table.queries), 2 * asked, 2 * asked, rounds=2)
    for most in (asked // 3, 1, 0):
        run = new().fit(table).label(table.queries, most)
        if (answered := int(run.releases[0].answered.sum())) > most:
            raise LabelerCheckError(
                f"answers {answered} queries with max_answers={most}; refuse the rest with -1"
            )
        check_within_plan(run, asked, most)


def check_refusals(new: New, table: Table) -> str:
    """Check that a refused charge ends the call without a draw, and that a later call pays before it draws."""
    for limit in range(_REFUSALS):
        run = new(limit=limit).fit(table)
        try:
            run.label(table.queries)
        except BudgetExceeded:
            run.ledger.limit = None
            run.label(table.queries)
            continue
        if not run.refused:
            return f"at {limit} charges"
        raise LabelerCheckError(
            f"answers although charge {limit + 1} was refused; let BudgetExceeded pass, and return nothing"
        )
    return f"at the first {_REFUSALS} charges"


def check_fresh_noise(new: New, table: Table) -> None:
    """Check that neither a second call nor a resumed run, with an equal seed and later rows, repeats noise."""
    first = new().fit(table).label(table.queries)
    if first.labeler.capabilities.in_batches:
        first.label(table.queries)
    resumed = new(start=len(first.ledger.rows)).fit(table).label(table.queries)
    if again := first.streams.keys() & resumed.streams.keys():
        raise LabelerCheckError(f"a resumed run {REPEATS.format(min(again, key=str))}")


@dataclasses.dataclass
class Largest:
    """Largest observed moves.

    Attributes:
        pairs: how many pairs of tables were compared.
        moves: for each mechanism the move that is the largest share of what is allowed; beyond that, of charges that
            name a condition.
        refused: tables that ``fit`` refused.
    """

    pairs: int = 0
    moves: dict[str, Move] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)

    def take(self, found: Iterable[Move]) -> None:
        """Take the moves between one pair of tables into account.

        Raises:
            LabelerCheckError: for a move that is more than was charged, without a condition.
        """
        self.pairs += 1
        for move in found:
            if move.exceeds and not move.condition:
                raise LabelerCheckError(
                    f"one record moves {move.what} by {move.amount:.6g}, and {move.allowed:.6g} was charged. "
                    "State the larger sensitivity, or bound each record's part"
                )
            known = self.moves.get(move.what)
            if known is None or move.amount * known.allowed > known.amount * move.allowed:
                self.moves[move.what] = move

    def __str__(self) -> str:
        shown = [
            f"{m.what} at most {m.amount:.4g} of {m.allowed:.4g}"
            + (f", covered only if {m.condition}" if m.exceeds else "")
            for m in self.moves.values()
        ]
        refused = [f"refused: {', '.join(dict.fromkeys(self.refused))}"] if self.refused else []
        return "; ".join([f"{self.pairs} pairs", *shown, *refused])


def check_neighbors(new: New, tables: Sequence[Table], adjacency: Adjacency, largest: Largest) -> str:
    """Check that between neighbouring tables only inputs of noise move, and by at most the charged amount."""
    for table in tables:
        with _named(f"tables '{table.name}' of {len(table)} records"):
            first = _accepted(new, table, largest)
        if first is None:
            continue
        for what, other, removed in neighbors_of(table, adjacency):
            with _named(f"tables '{table.name}' of {len(table)} records {what}"):
                second = _accepted(functools.partial(new, after=first, removed=removed), other, largest)
                if second is not None:
                    largest.take(moves(first.pools.values(), second.pools.values()))
                    check_releases(first, second)
    if not any(move.amount > move.rounding for move in largest.moves.values()):
        raise LabelerCheckError(
            f"nothing that a record could move ever entered noise ({largest}), so the check saw nothing. "
            "Let records have a part in what is charged, or give private_records or tables in which they do"
        )
    return str(largest)


def _accepted(new: New, table: Table, largest: Largest) -> ObservedRun | None:
    """Observed run of a second round; None where the labeler refuses the table."""
    try:
        # Twice, as before a second round: the table of an earlier fit must not be in the answers.
        run = new().fit(table).fit(table)
    except (ValueError, RuntimeError) as error:
        largest.refused.append(f"'{table.name}' of {len(table)} records ({type(error).__name__})")
        return None
    return run.label(table.queries)


def check_samples(new: New, table: Table) -> None:
    """Check that no record has influence when all coins show tails, and that each sampled release tosses n coins."""
    run = new(coins="tails").fit(table).label(table.queries)
    for rate in set(map(sampling_rate, run.ledger.rows)) - {1.0}:
        releases = sum(row.count for row in run.ledger.rows if sampling_rate(row) == rate)
        if run.tossed_coins[rate] < releases * len(table):
            raise LabelerCheckError(
                f"tosses {run.tossed_coins[rate]} coins of probability {rate:g} for {releases} sampled releases of "
                f"{len(table)} records: each release needs a coin for each record, by "
                "noise.bernoulli(shape, sampling_rate); a sample that serves twice, or of fixed size, is not covered"
            )
    for _, other, removed in neighbors_of(table, "add_remove"):
        without = new(coins="tails", after=run, removed=removed).fit(other).label(other.queries)
        if any(move.amount > move.rounding for move in moves(run.pools.values(), without.pools.values())):
            raise LabelerCheckError(
                "a record whose coin shows tails has an influence; only those drawn may have one"
            )


def check_releases(first: ObservedRun, second: ObservedRun) -> None:
    """Check that two runs whose mechanisms give equal answers have equal releases."""
    for one, other in zip(first.releases, second.releases, strict=True):
        for name in ("labels", "probabilities", "scores", "score_deviation"):
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                same = a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
            else:
                same = a is b or a == b
            if not same:
                raise LabelerCheckError(
                    f"{name} differ between private tables for which all noisy values are the same: something "
                    "private, or a draw that is not the noise source's, is released without noise"
                )


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Report of :func:`check_labeler`, all of whose checks passed.

    Attributes:
        labeler: name of the class.
        checks: name of each check and what it saw, with the tables that were refused.
        largest: for each task and relation, the largest moves that were seen.
    """

    labeler: str
    checks: tuple[tuple[str, str], ...]
    largest: dict[str, Largest]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.checks)
        lines = [f"{name:<{width}}  {seen}" for name, seen in self.checks]
        return "\n".join([f"check_labeler({self.labeler}): all passed", *lines])


def check_labeler(
    labeler: Labeler | Callable[[], Labeler],
    *,
    private_records: int | None = None,
    num_queries: int = 12,
    num_classes: int | None = None,
    dimension: int = 6,
    tables: Sequence[Table] = (),
    seed: int = 0,
) -> CheckReport:
    """Check that a labeler charges before it draws, and that its noise covers the influence of one record.

    In the manner of scikit-learn's ``check_estimator``, for authors of teachers. It makes tables, runs copies of the
    labeler on them with watched noise and a ledger that takes notes, and raises at the first promise that is broken:

    * *payment*: nothing is drawn before its charge, nor more than was charged, nor with another mechanism than the
      charged one, nor after a charge was refused; charges stay within the plan; the default noise is cryptographic; a
      resumed run draws no noise again.
    * *answers*: at most ``max_answers``; no error of ``label`` on a table that ``fit`` took, which would reveal it.
    * *sensitivity*: on pairs of neighbouring tables (random, tied distances, duplicates, one query asked many times,
      queries that are records, one record that decides, few records and 1,500, classes with 1, 9, 10 and 11 records,
      records of great norm, rows of many attributes), what enters the noise differs by at most what was charged, and
      by something. The second table gets the first one's noisy answers, as adaptive composition has it; then both
      releases are the same.
    * *samples*: coins have the charged rate, each sampled release has a coin for each record, and a record whose coin
      shows tails has no influence.

    What enters the noise is observed in :meth:`~pl_privknn.privacy.mechanisms.Mechanism.draw`, through which
    ``add_noise``, ``argmax``, ``passes`` and ``randomize`` go, without the labeler's help. A mechanism of your own
    states ``l1_sensitivity`` or ``l2_sensitivity``, or registers with :func:`~pl_privknn.testing.observe.distance`.
    A labeler that draws otherwise can't be looked into: the check says so.

    A check finds faults; it proves nothing. Neighbours that are not among the tables may move more, the unit is a
    record, and the noise of the mechanisms themselves is tested elsewhere.

    Args:
        labeler: one as it would be used, not fitted; it is copied for each run. Or a function that makes one.
        private_records: of the larger tables; more than any number of neighbours or teachers in the labeler. By
            default 24 and twice its ``k`` and ``num_teachers``.
        num_queries: asked about each table.
        num_classes: classes, or attributes for labelers of multi-label data; 5 by default.
        dimension: of the features.
        tables: further tables, whose ``records`` are removed or exchanged in turn.
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
    classes = check_int("num_classes", 5 if num_classes is None else num_classes, 2)
    dimension = check_int("dimension", dimension)
    checks: list[tuple[str, str]] = []
    largest: dict[str, Largest] = {}

    def do(name: str, check: Callable[..., str | None], *arguments: Any) -> None:
        with _named(f"check_labeler({type(owner).__name__}), {name}"):
            checks.append((name, check(new, *arguments) or "ok"))

    with torch.random.fork_rng(devices=[]):
        for task in owner.tasks:
            generator = torch.Generator().manual_seed(seed)
            examples = ExampleTables(task, records, queries, classes, dimension, generator)
            new = functools.partial(ObservedRun, make, classes, examples.public(), seed)
            made = [*examples.all(), *tables]
            do("noise source", check_source, owner)
            do("plan", check_plan, made[0])
            do("payments", check_rounds, made[0])
            do("refused charges", check_refusals, made[0])
            do("fresh noise", check_fresh_noise, made[0])
            for adjacency in owner.adjacencies:
                seen = largest[f"{task}, {adjacency}"] = Largest()
                do(f"sensitivity under {adjacency}", check_neighbors, made, adjacency, seen)
            if any(sampling_rate(charge) < 1 for charge in make().plan(queries, queries, classes)):
                do("samples", check_samples, examples.tied())
    return CheckReport(type(owner).__name__, tuple(checks), largest)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Prefix the message of a failed check."""
    try:
        yield
    except LabelerCheckError as error:
        raise LabelerCheckError(f"{where}: {error}") from error.__cause__
    except Exception as error:
        raise LabelerCheckError(
            f"{where}: raises {type(error).__name__} ({error}). Let fit refuse a table, for reasons that are public, "
            "or give private_records, num_queries, num_classes or dimension that the labeler can work with"
        ) from error
