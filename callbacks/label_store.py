"""Released labels and queries of a run in one SQLite file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn._lightning import rank_zero_warn
from pl_privknn.callbacks.selection import Selection, Spread, label_by_spread
from pl_privknn.labelers.base import Release
from pl_privknn.privacy.audit import LABELS
from pl_privknn.privacy.ledger import counts_text, counts_topic
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import guarantee_rank
from pl_privknn.privacy.run import Run, noted_run_id
from pl_privknn.privacy.settings import Budget
from pl_privknn.privacy.sqlite_file import FACTS, SQLiteFile
from pl_privknn.privacy.store import refuse_wal

_SCHEMA = f"""
{FACTS}
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY,
    assignment TEXT,           -- of each public example the position of the query whose answer it takes, a JSON list
    spread BLOB,
    ask_means INTEGER NOT NULL,
    deviation REAL             -- of the noise on the scores
);
CREATE TABLE IF NOT EXISTS queries (
    round INTEGER NOT NULL,
    position INTEGER NOT NULL,
    example INTEGER NOT NULL,
    asked_at INTEGER,          -- number of the run's ledger charges when the batch was sent, NULL before
    released INTEGER NOT NULL DEFAULT 0,
    label INTEGER NOT NULL DEFAULT -1,
    soft TEXT,
    score TEXT,                -- the released noisy counts, a JSON list
    PRIMARY KEY (round, position)
);
"""


class LabelStoreError(RuntimeError):
    """Raised where the file of labels is an older copy, or can't be read."""


class LabelStore(SQLiteFile):
    """Store of queries and their answers; one SQLite file per run.

    Everything in it is a public choice or a differentially private answer, so the file may be kept and
    shared. Its order of events makes a kill at any point harmless: the queries of a round are written down
    before the first is asked, a batch is marked as asked before the labeler sees it, and its answers are
    committed before the next batch starts. A batch that was asked and paid for, but whose answers never
    arrived here, is lost: it stays refused and is never asked (and so never paid) a second time.

    Args:
        path: the file; made with its folder if missing.

    Raises:
        LabelStoreError: if the file is not a label store.
    """

    path: Path

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        super().__init__(path)
        with self._translated():
            self._db.executescript(_SCHEMA)

    def failure(self, error: sqlite3.DatabaseError) -> Exception:
        """SQLite's errors with what to do."""
        if isinstance(error, sqlite3.OperationalError):  # disk, permissions, locks
            return LabelStoreError(f"{self.path} can't be read or written: {error}")
        return LabelStoreError(f"{self.path} is not a label store ({error}); use another folder")

    def rounds(self) -> int:
        """Number of rounds whose queries have been written down."""
        return int(self.read("SELECT COUNT(*) FROM rounds").fetchone()[0])

    def select(
        self,
        round_index: int,
        examples: Sequence[int],
        assignment: Tensor | None = None,
        spread: Spread | None = None,
        ask_means: bool = False,
    ) -> None:
        """Write down the queries of a round, in the order in which they will be asked.

        Args:
            round_index: the round.
            examples: public examples to ask about.
            assignment: int64, shape ``(n,)``; position of the query whose answer each public example takes
                over, -1 for none. None: every query keeps its answer to itself.
            spread: see :class:`~pl_privknn.callbacks.selection.Selection`.
            ask_means: likewise.
        """
        rows = [(round_index, position, int(example)) for position, example in enumerate(examples)]
        stored = None if assignment is None else json.dumps(assignment.tolist())
        blob = None if spread is None else spread.to_bytes()
        with self.writing() as db:
            db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, NULL)", (round_index, stored, blob, ask_means))
            db.executemany("INSERT INTO queries (round, position, example) VALUES (?, ?, ?)", rows)

    def selected(self, round_index: int) -> list[int] | None:
        """The queries of a round in order, or None where the round has not been selected."""
        if self._of_round(round_index, "round") is None:
            return None
        statement = "SELECT example FROM queries WHERE round = ? ORDER BY position"
        return [row[0] for row in self.read(statement, (round_index,))]

    def selections(self, rounds: int) -> tuple[Selection, ...]:
        """Queries of the first ``rounds`` rounds, without their spreads."""
        found = []
        for index in range(rounds):
            examples = torch.tensor(self.selected(index) or [], dtype=torch.int64)
            assignment = self._assignment(index)
            places = None if assignment is None else torch.tensor(assignment, dtype=torch.int64)
            found.append(Selection(examples, places, ask_means=bool(self._of_round(index, "ask_means"))))
        return tuple(found)

    def _of_round(self, round_index: int, column: str) -> Any:
        row = self.read(f"SELECT {column} FROM rounds WHERE round = ?", (round_index,)).fetchone()
        return None if row is None else row[0]

    def _assignment(self, round_index: int) -> list[int] | None:
        stored = self._of_round(round_index, "assignment")
        return None if stored is None else json.loads(stored)

    def open_positions(self, round_index: int, charges_now: int) -> list[int]:
        """Positions of a round that may still be asked.

        Args:
            round_index: the round.
            charges_now: number of the run's charges in the ledger at this moment. A batch that was marked
                as asked when the ledger held as many was never paid for, so it may be asked again.
        """
        rows = self.read(
            "SELECT position FROM queries WHERE round = ? AND released = 0 "
            "AND (asked_at IS NULL OR asked_at = ?) ORDER BY position",
            (round_index, charges_now),
        ).fetchall()
        return [row[0] for row in rows]

    def forget_unpaid(self, charges_now: int) -> None:
        """Reset the mark of a batch that was sent and never charged: it is asked again."""
        statement = "UPDATE queries SET asked_at = NULL WHERE released = 0 AND asked_at = ?"
        with self.writing() as db:
            db.execute(statement, (charges_now,))

    def mark_asked(self, round_index: int, positions: Sequence[int], charges_now: int) -> None:
        """Note durably that a batch is about to be asked."""
        with self.writing() as db:
            db.executemany(
                "UPDATE queries SET asked_at = ? WHERE round = ? AND position = ?",
                [(charges_now, round_index, position) for position in positions],
            )
            self.note("in_flight", True)

    def put(self, round_index: int, positions: Sequence[int], release: Release) -> None:
        """Commit the answers of a batch, with their noisy counts where the teacher releases them."""
        nothing: list[str | None] = [None] * len(positions)
        labels = [_stored(label) for label in release.labels]
        soft = nothing if release.soft is None else [json.dumps(row) for row in release.soft.tolist()]
        scores = nothing
        if release.scores is not None and release.score_deviation is not None:
            known = torch.isfinite(release.scores).all(dim=1).tolist()
            rows = zip(release.scores.double().tolist(), known, strict=True)
            scores = [json.dumps(row) if finite else None for row, finite in rows]
        with self.writing() as db:
            self.note("in_flight", False)
            db.executemany(
                "UPDATE queries SET released = 1, label = ?, soft = ?, score = ? WHERE round = ? AND position = ?",
                [(labels[i], soft[i], scores[i], round_index, place) for i, place in enumerate(positions)],
            )
            if release.scores is not None:
                statement = "UPDATE rounds SET deviation = ? WHERE round = ?"
                db.execute(statement, (release.score_deviation, round_index))

    def answers(self, rounds: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Labels of public examples after the first ``rounds`` rounds; a later round overrides an earlier.

        Returns:
            examples (int64, ascending, shape ``(n,)``), labels (int64, shape ``(n,)``, or ``(n, a)`` where
            attributes were released) and soft labels (float32, shape ``(n, c)``) or None. Refused and lost
            queries are left out.
        """
        found: dict[int, tuple[Any, Any]] = {}
        for index in range(rounds):
            spread = self._spread(index)
            if spread is not None and (spread_answers := self._spread_answers(index, spread)):
                found.update(spread_answers)
                continue
            rows = self.read(
                "SELECT position, example, label, soft FROM queries "
                "WHERE released = 1 AND label >= 0 AND round = ?",
                (index,),
            )
            read = [(*row[:2], _restored(row[2]), _restored(row[3])) for row in rows]
            assignment = self._assignment(index)
            if assignment is None:
                found.update({example: (label, soft) for _, example, label, soft in read})
            else:
                answer = {position: (label, soft) for position, _, label, soft in read}
                found.update({i: answer[query] for i, query in enumerate(assignment) if query in answer})
        examples = sorted(found)
        labels = torch.tensor([found[example][0] for example in examples], dtype=torch.int64)
        rows_of = [found[example][1] for example in examples]
        soft = torch.tensor(rows_of) if rows_of and None not in rows_of else None
        return torch.tensor(examples, dtype=torch.int64), labels, soft

    def has_spread(self, round_index: int) -> bool:
        """Whether a round's labels follow from noisy counts (its own and earlier ones)."""
        return self._spread(round_index) is not None

    def _spread(self, round_index: int) -> Spread | None:
        stored = self._of_round(round_index, "spread")
        return None if stored is None else Spread.from_bytes(stored)

    def _spread_answers(self, round_index: int, spread: Spread) -> dict[int, tuple[int, list[float]]]:
        """Label and probabilities of each public example, from the noisy counts of the rounds up to this one."""
        rows = self.read(
            "SELECT score, deviation FROM queries JOIN rounds USING (round) WHERE round <= ? "
            "ORDER BY round, position",
            (round_index,),
        ).fetchall()
        if not (known := [place for place, (score, _) in enumerate(rows) if score is not None]):
            return {}
        values = torch.tensor([json.loads(rows[place][0]) for place in known], dtype=torch.float64)
        scores = torch.full((len(rows), values.shape[1]), torch.nan, dtype=torch.float64)
        scores[known] = values
        deviations = torch.tensor([1.0 if sigma is None else sigma for _, sigma in rows], dtype=torch.float64)
        labels, soft = label_by_spread(spread, scores, deviations)
        answers = zip(labels.tolist(), soft.tolist(), strict=True)
        return {i: (label, row) for i, (label, row) in enumerate(answers) if label >= 0}

    def counts(self) -> dict[str, int]:
        """Numbers of queries: ``queried`` (asked), ``answered``, ``refused`` and ``lost`` to a crash."""
        queried, answered, released = self.read(
            "SELECT COALESCE(SUM(asked_at IS NOT NULL), 0), COALESCE(SUM(released AND label >= 0), 0), "
            "COALESCE(SUM(released), 0) FROM queries"
        ).fetchone()
        return {
            "queried": queried,
            "answered": answered,
            "refused": released - answered,
            "lost": queried - released,
        }

    def asked_examples(self) -> set[int]:
        """Public examples that some round has selected already."""
        return {row[0] for row in self.read("SELECT DISTINCT example FROM queries")}


def _stored(label: Tensor) -> int | str:
    """Encode a class, or a row of attributes as text: SQLite orders every text after -1, which means refused."""
    if label.ndim == 0:
        return int(label)
    return json.dumps(label.tolist()) if bool((label >= 0).any()) else -1


def _restored(stored: Any) -> Any:
    return json.loads(stored) if isinstance(stored, str) else stored


@dataclasses.dataclass(frozen=True)
class Query:
    """One query of a run.

    Attributes:
        round: the round, from 0.
        example: the public example.
        state: ``"answered"``, ``"refused"``, ``"lost"`` to a crash, or ``"not asked"``.
    """

    round: int
    example: int
    state: str


class StoredLabels(LabelStore):
    """Read-only :class:`~pl_privknn.callbacks.label_store.LabelStore`.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is none.
        LabelStoreError: if it is no label store.
        LedgerCorrupt: if it is written ahead, so that a part of it may lie elsewhere.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        refuse_wal(path)
        SQLiteFile.__init__(self, path, readonly=True)
        try:
            noted_run_id(self)
        except LabelStoreError:
            self.close()
            raise

    def queries(self) -> list[Query]:
        """All queries in the order in which they were, or would have been, asked."""
        rows = self.read(
            "SELECT round, example, asked_at IS NOT NULL, released, label >= 0 FROM queries ORDER BY round, position"
        )
        return [Query(place, example, _state(*marks)) for place, example, *marks in rows]


def _state(asked: bool, released: bool, answered: bool) -> str:
    if released:
        return "answered" if answered else "refused"
    return "lost" if asked else "not asked"


# Of a budget, what a run keeps for life; the ledger compares ε as well.
_LASTING = ("delta", "adjacency", "unit")


class LabelRun(Run):
    """Labelling in a folder, opened or continued; see :class:`~pl_privknn.privacy.run.Run`.

    Ledger and labels vouch for each other: each charge is noted in the label store before anything may be drawn.

    Args:
        folder: the run's folder; holds ``labels.sqlite`` and, unless given elsewhere, ``ledger.sqlite``.
        plan: the most that all rounds can cost.
        description: public facts about the run, for the reader of the ledger.
        public: further public facts that are fixed for life, such as the hash of the public examples, to which the
            labels belong.
        checkpoint: id of the run that a checkpoint belongs to, or None.
        budget: see ``Run``, as for the others.

    Raises:
        LabelStoreError: if the folder holds an older copy of the labels; for others see ``Run``.
    """

    facts: LabelStore

    def __init__(
        self,
        folder: Path,
        plan: Sequence[Charge],
        description: dict[str, Any],
        public: dict[str, Any],
        checkpoint: str | None = None,
        *,
        budget: Budget,
        **ledger: Any,
    ) -> None:
        self._plan, self._description = plan, description
        # Charges without their marks: what those say of the noise is in the ledger, and never stops a resume.
        bare = [Charge(charge.mechanism, charge.count).to_record() for charge in plan]
        terms = {"plan": bare, **{name: getattr(budget, name) for name in _LASTING}, **public}
        super().__init__(
            folder, lambda: LabelStore(folder / LABELS), terms, checkpoint, budget=budget, **ledger
        )

    @property
    def store(self) -> LabelStore:
        """Queries and their answers."""
        return self.facts

    def plan(self) -> tuple[Sequence[Charge], dict[str, Any]]:
        """Worst-case plan of all rounds, after checking that labels and ledger match."""
        self.check_ledger()
        self.store.forget_unpaid(self.ledger_run.num_charges)
        return self._plan, self._description

    def check_ledger(self) -> None:
        """Check that the ledger holds at most one charge unknown to the labels, left by a kill before its note.

        Raises:
            LabelStoreError: if the labels are older than the ledger.
        """
        if self.noted is None:  # nothing was stated yet
            return
        unknown = self.ledger.charges_after(self.run_id, self.noted)
        if unknown > self.store.fact("in_flight", False):
            raise LabelStoreError(
                f"{self.store.path} is an older copy: the ledger {self.ledger.path} holds {unknown} later charges of "
                "this run, whose answers are not here. Restore the newest copy of the run's folder, or start a new "
                "run with the same ledger_path; asked again from here, the same queries would cost twice"
            )
        with self.store.writing():  # one without the other, after a kill, would look like an older copy
            self.note_head(self.ledger.head)
            self.store.note("in_flight", False)

    def note_counts(self) -> None:
        """Note in the ledger how many queries were asked and answered, so that an auditor can check a summary."""
        self.ledger_run.note(counts_topic(self.run_id), counts_text(self.store.counts()))

    def warn_lost(self, labelled: int) -> None:
        """Warn of paid answers that were lost to a crash.

        Args:
            labelled: public examples that have a label all the same.

        Raises:
            LabelStoreError: if there is none.
        """
        if not (lost := self.store.counts()["lost"]):
            return
        what = (
            f"{lost} queries were paid for, and a kill or an error came before their answers were kept. They are not "
            "asked again, and ε stays as it was stated"
        )
        if labelled:
            rank_zero_warn(what)
            return
        raise LabelStoreError(
            f"{what}; no label is left to train on. Start a new run, in another folder, with ledger_path="
            f"{str(self.ledger.path)!r}, so that both runs are counted: repeated queries are charged again"
        )

    def metrics(
        self, truth: Tensor | None, examples: Tensor, labels: Tensor, earlier: Tensor
    ) -> dict[str, float]:
        """Metrics that are logged with the student's accuracy.

        Args:
            truth: int64 classes (or attributes) of all public examples, -1 where they aren't known; for
                evaluation only.
            examples: int64, answered public examples, shape ``(n,)``.
            labels: int64, their released labels, shape ``(n,)``, or attributes ``(n, a)``, of which the
                accuracy is the mean over attributes.
            earlier: int64, public examples that had a label before the last round.
        """
        guarantee, spent = self.reports(exact=True)  # one ε everywhere: the summary's, from the first step on
        counts = self.store.counts()
        metrics = {
            "privacy/epsilon": guarantee.epsilon,
            "privacy/epsilon_spent": spent.epsilon,
            "privacy/delta": self.delta,
            "privacy/guarantee": float(guarantee_rank(guarantee.guarantee)),
            "labels/queried": float(counts["queried"]),
            "labels/answered": float(counts["answered"]),
        }
        metrics["labels/labelled"] = float(len(examples))
        if truth is not None and len(examples):
            right, known = truth[examples] == labels, truth[examples] >= 0
            new = ~torch.isin(examples, earlier)
            for name, rows in (("labels/accuracy", slice(None)), ("labels/accuracy_last_round", new)):
                if bool(known[rows].any()):
                    metrics[name] = float(right[rows][known[rows]].double().mean())
        return metrics


def stored_run_id(folder: Path) -> str | None:
    """Id of the run whose labels a folder holds; None where there are none that can be read."""
    try:
        with contextlib.closing(StoredLabels(folder / LABELS)) as store:
            return noted_run_id(store)
    except (FileNotFoundError, LabelStoreError):
        return None
