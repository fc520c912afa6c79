"""Checks on two tables: what enters the noise differs by at most what was charged, and nothing else differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pl_privknn.testing.contract import check_same, sampling_rate
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.moves import Move, exceeds, moves, pools
from pl_privknn.testing.run import Run, Subject, named
from pl_privknn.testing.tables import Pair, Table
from pl_privknn.testing.watch import Coins


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
            key = id(pair.first)
            if key not in firsts:
                firsts[key] = _accepted(subject, pair.first, largest, coins=coins, records=len(pair.first))
            first = firsts[key]
            if first is None:
                continue
            second = _accepted(
                subject, pair.second, largest,
                coins=coins, records=len(pair.first), removed=pair.removed, after=first,
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
    if len(first.methods.outcomes) != len(second.methods.outcomes):
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
        for other in others:
            second = (
                Run(subject, coins="heads", after=first, hold_parts=False).fit(other).label(table.queries)
            )
            check_outcomes(first, second)
    return f"{len(others)} tables"


def is_sampled(subject: Subject, queries: int) -> bool:
    """Whether anything in the plan is of a Poisson sample."""
    plan = subject.make().plan(queries, queries, subject.num_classes)
    return any(sampling_rate(charge) < 1 for charge in plan)


def _accepted(subject: Subject, table: Table, largest: Largest, **settings: object) -> Run | None:
    """A run that answers all queries; None where the labeler refuses the table."""
    try:
        return Run(subject, passing="all", **settings).fit(table).label(table.queries)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        largest.refused.append(f"'{table.name}' of {len(table)} records ({type(error).__name__})")
        return None
