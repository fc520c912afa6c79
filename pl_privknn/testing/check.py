"""``check_labeler``: does a labeler keep what it promises?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import Labeler
from pl_privknn.privacy.mechanisms import Adjacency
from pl_privknn.testing import contract, sensitivity
from pl_privknn.testing.drawing_methods import DrawingMethod, mechanism_methods
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.protocol_methods import protocol_methods
from pl_privknn.testing.run import Run, Subject, copies_of, named
from pl_privknn.testing.shards import in_shards
from pl_privknn.testing.tables import Makers, Pair, Table, neighbors_of


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What :func:`check_labeler` looked at; every check in it passed.

    Attributes:
        labeler: name of the class.
        checks: name of each check and what it saw; tables that were refused, and checks that did not apply, say so.
        largest: for each task and relation, the largest moves that were seen.
    """

    labeler: str
    checks: tuple[tuple[str, str], ...]
    largest: dict[str, sensitivity.Largest]

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
    shards: int = 1,
) -> CheckReport:
    """Check that a labeler charges before it draws, and that its noise covers what one record can do.

    In the manner of scikit-learn's ``check_estimator``, for authors of teachers. It makes tables, runs copies of the
    labeler on them with watched noise and a ledger that takes notes, and raises at the first promise that is broken:

    * *payment*: nothing is drawn before its charge, nor more than was charged, nor with another mechanism than the
      charged one, nor after a charge was refused; charges stay within the plan and state the noise source and the
      adjacencies; the default noise is cryptographic.
    * *answers*: at most ``max_answers``; of the right shapes and dtypes; the same for the same table and noise;
      independent of tables of earlier fits; a resumed run draws no noise again.
    * *sensitivity*: on pairs of neighbouring tables (random, tied distances, duplicates, one record that decides, few
      records, a class with one record, records of great norm, rows of many attributes), what enters the noise
      differs by at most what was charged. The pair shares coins, and the second table gets the first one's noisy
      answers, as adaptive composition has it.
    * *nothing else*: tables that have nothing in common give the same release where all noisy answers are the same.
    * *samples*: coins have the charged rate, each sampled release has a coin for each record, and a record whose coin
      shows tails has no influence.

    What enters the noise is seen at the drawing methods of mechanisms (``add_noise``, ``argmax``, ``passes``,
    ``randomize``; also of your own mechanism, if it has ``l1_sensitivity`` or ``l2_sensitivity``), without the
    labeler's help. A labeler that draws otherwise can't be looked into: the check says so, and wants a
    :class:`~pl_privknn.testing.drawing_methods.DrawingMethod`.

    A check finds faults; it proves nothing. Neighbours that are not among the tables may move more, and the noise of
    the mechanisms themselves is tested elsewhere.

    Args:
        labeler: one as it would be used, not fitted; it is copied for each run. Or a function that makes one.
        num_records: of the larger tables; more than any number of neighbours or teachers in the labeler. By default
            24 and twice its ``k`` and ``num_teachers``.
        num_queries: asked about each table.
        num_classes: classes, or attributes for labelers of multi-label data; 3 or 5 by default.
        dimension: of the features.
        pairs: further neighbouring tables to try.
        methods: further methods through which values enter noise.
        seed: of the tables and of the noise.
        shards: check it as a training of so many processes has it, each of which holds a share of the records.

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
    if getattr(owner, "privacy_unit", "record") != "record":
        raise LabelerCheckError(
            f"check_labeler({type(owner).__name__}): its guarantee is by group, and the tables have none; check it "
            "without groups, where each record is a group of one"
        )
    if num_records is None:
        num_records = 24 + 2 * max(int(getattr(owner, name, 0)) for name in ("k", "num_teachers"))
    records, queries = check_int("num_records", num_records, 4), check_int("num_queries", num_queries)
    checks: list[tuple[str, str]] = []
    largest: dict[str, sensitivity.Largest] = {}
    adjacencies = in_shards(lambda: owner, shards).adjacencies
    known = [*mechanism_methods(), *protocol_methods(), *methods]
    with torch.random.fork_rng(devices=[]):
        for task in owner.tasks:
            usual = 5 if task == "multilabel" else 3
            classes = check_int("num_classes", usual if num_classes is None else num_classes, 2)
            makers = Makers(task, records, queries, classes, check_int("dimension", dimension), seed)
            subject = Subject(make, known, classes, makers.public(), seed, shards)
            examined = _Examined(owner, adjacencies, subject, makers, task, checks)
            examined.contract()
            largest |= examined.neighbors(pairs)
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
        self.do("noise source", contract.check_source, subject)
        self.do("plan", contract.check_plan, subject, table)
        self.do("payments", self._rounds, table)
        self.do("max_answers", self._capped, table)
        self.do("refused charges", contract.check_refusals, subject, table)
        self.do("fresh noise", contract.check_fresh_noise, subject, table)
        self.do("same again", contract.check_reproducible, subject, table)
        # Where a replaced record is all that neighbours differ in, the number of records is public.
        strangers = self.makers.strangers(7 if "add_remove" in self.adjacencies else 0)
        self.do("earlier tables", contract.check_forgets, subject, table, strangers)
        self.do("noise alone", sensitivity.check_strangers, subject, table, strangers)
        self.do("samples", contract.check_samples, subject, self.makers.together(), table)

    def neighbors(self, pairs: Sequence[Pair]) -> dict[str, sensitivity.Largest]:
        """Checks on neighbouring tables; the largest moves for each relation."""
        found = {}
        tables = self.makers.all()
        for adjacency in self.adjacencies:
            seen = found[f"{self.task}, {adjacency}"] = sensitivity.Largest()
            made = [pair for table in tables for pair in neighbors_of(table, adjacency)]
            made += [pair for pair in pairs if pair.adjacency == adjacency]
            self._compare(f"sensitivity under {adjacency}", made, "heads", seen)
            if adjacency == "add_remove" and sensitivity.is_sampled(self.subject, self.makers.m):
                few = [
                    pair
                    for table in (tables[0], self.makers.together())
                    for pair in neighbors_of(table, adjacency)
                ]
                self._compare("records not drawn", few, "tails", sensitivity.Largest(still=True))
                n = self.makers.n
                labels = tables[0].labels
                line = self.makers.in_order("records in order", labels, n, (0, 1, n // 2, n - 1))
                self._compare(
                    "same coins", list(neighbors_of(line, adjacency)), "mixed", sensitivity.Largest()
                )
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

    def _compare(self, name: str, pairs: Sequence[Pair], coins: Any, largest: sensitivity.Largest) -> None:
        def check() -> str:
            sensitivity.compare(self.subject, self.owner, pairs, coins, largest, name)
            if not largest.pairs:
                raise LabelerCheckError(f"no pair of tables was accepted ({largest})")
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
                contract.check_release(run.releases[-1], len(batch), len(batch), classes, self.task)
            contract.check_payments(run)
            contract.check_within_plan(run, asked, asked)
            contract.check_payments(run.fit(table).label(table.queries))
            contract.check_within_plan(run, 2 * asked, 2 * asked, rounds=2)
        return ""

    def _capped(self, table: Table) -> str:
        asked = len(table.queries)
        for most in (asked // 3, 1, 0):
            run = Run(self.subject, passing="all").fit(table).label(table.queries, most)
            contract.check_release(run.releases[0], asked, most, self.subject.num_classes, self.task)
            contract.check_within_plan(run, asked, most)
        return ""
