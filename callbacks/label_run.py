"""Labelling run: queries of its rounds, their charges, and released answers, in a run's folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from pl_privknn._lightning import rank_zero_warn
from pl_privknn._processes import ALONE, ProcessGroup
from pl_privknn.callbacks.selection import Selection, Spread, label_by_spread
from pl_privknn.labelers.base import Release
from pl_privknn.privacy.accounting.accountant import PrivacyReport
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import private_folder
from pl_privknn.privacy.mechanisms.base import Charge
from pl_privknn.privacy.run import PLAN, RUN_FILE, Run, RunFileError, is_labelling, query_counts, reading_run
from pl_privknn.privacy.sqlite_file import SQLiteFile


@dataclasses.dataclass(frozen=True)
class Query:
    """One query of a run.

    Attributes:
        round: the round, from 0.
        example: the public example.
        state: ``"answered"``, ``"refused"``, ``"lost"`` to a crash, or ``"not asked"``.
        margin: between the two largest released counts, in standard deviations of its noise; None where no counts
            with noise were released.
    """

    round: int
    example: int
    state: str
    margin: float | None = None


class StoredQueries:
    """Queries and answers in a run's file. Public choices and differentially private answers, so it may be shared.

    Args:
        file: of the run.
    """

    def __init__(self, file: SQLiteFile) -> None:
        self._file = file

    def rounds(self) -> int:
        """Number of rounds whose queries have been written down."""
        return int(self._file.read("SELECT COUNT(*) FROM rounds").fetchone()[0])

    def selected(self, round_index: int) -> list[int] | None:
        """The queries of a round in order, or None where the round has not been selected."""
        if self._of_round(round_index, "round") is None:
            return None
        statement = "SELECT example FROM queries WHERE round = ? ORDER BY position"
        return [row[0] for row in self._file.read(statement, (round_index,))]

    def all_selected(self) -> list[int]:
        """The queries of all rounds in order."""
        return [row[0] for row in self._file.read("SELECT example FROM queries ORDER BY round, position")]

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
        row = self._file.read(f"SELECT {column} FROM rounds WHERE round = ?", (round_index,)).fetchone()
        return None if row is None else row[0]

    def _assignment(self, round_index: int) -> list[int] | None:
        stored = self._of_round(round_index, "assignment")
        return None if stored is None else json.loads(stored)

    def open_positions(self, round_index: int) -> list[int]:
        """Positions of a round's queries that may still be asked."""
        statement = "SELECT position FROM queries WHERE round = ? AND asked_at IS NULL ORDER BY position"
        return [row[0] for row in self._file.read(statement, (round_index,))]

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
            rows = self._file.read(
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
        rows = self._file.read(
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
        """See :func:`~pl_privknn.privacy.run.query_counts`."""
        return query_counts(self._file)

    def asked_examples(self) -> set[int]:
        """Public examples that an earlier round selected."""
        return {row[0] for row in self._file.read("SELECT DISTINCT example FROM queries")}

    def queries(self) -> list[Query]:
        """All queries in the order in which they were, or would have been, asked."""
        rows = self._file.read(
            "SELECT round, example, score, deviation, asked_at IS NOT NULL, released, label >= 0 "
            "FROM queries JOIN rounds USING (round) ORDER BY round, position"
        )
        return [
            Query(place, example, _state(*marks), _margin(score, deviation))
            for place, example, score, deviation, *marks in rows
        ]


def _margin(score: str | None, deviation: float | None) -> float | None:
    """Difference of the two largest counts, in standard deviations of the difference's noise."""
    if score is None or not deviation:
        return None
    second, first = sorted(json.loads(score))[-2:]
    return float((first - second) / (deviation * math.sqrt(2)))


def _state(asked: bool, released: bool, answered: bool) -> str:
    if released:
        return "answered" if answered else "refused"
    return "lost" if asked else "not asked"


def _stored(label: Tensor) -> int | str:
    """Encode a class, or a row of attributes as text: SQLite orders every text after -1, which means refused."""
    if label.ndim == 0:
        return int(label)
    return json.dumps(label.tolist()) if bool((label >= 0).any()) else -1


def _restored(stored: Any) -> Any:
    return json.loads(stored) if isinstance(stored, str) else stored


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def collective(
    method: Callable[Concatenate[LabelRun, _Given], _Result],
) -> Callable[Concatenate[LabelRun, _Given], _Result]:
    """Run a method on global rank 0; every process calls it, and gets the result or the exception of rank 0."""

    @functools.wraps(method)
    def called(run: LabelRun, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        return run.processes.from_first(lambda: method(run, *args, **kwargs))

    return called


# Of a budget, what a run keeps for life; the ledger compares ε as well.
_LASTING = ("delta", "adjacency", "unit")


class LabelRun(Run):
    """Labelling in a folder, opened or continued; see :class:`~pl_privknn.privacy.run.Run`.

    Three transactions in the one file make a kill at any point harmless. The queries of a round are written down
    before the first is asked. A batch is marked as asked before the labeler sees it; the labeler pays; its answers
    are written before the next batch. After a kill a batch is unpaid exactly if the run has as many charges as when
    it was marked, and is asked again. A batch that was paid for, but whose answers were not written, is lost: it is
    never asked (and so never paid) a second time.

    Args:
        folder: the run's folder.
        plan: the most that all rounds can cost.
        description: public facts about the run, for the reader of the ledger.
        public: further public facts that are fixed for life, such as the hash of the public examples, to which the
            labels belong.
        checkpoint: see ``Run``, as for the others.

    Attributes:
        stored: queries and answers.
        processes: those that take part in the present round.
        leads: whether this is global rank 0, which has the file; see :meth:`followed`.

    Raises:
        RunFileError: if the folder holds an older copy of the file; for others see ``Run``.
    """

    exact = True
    processes: ProcessGroup = ALONE
    leads = True

    def __init__(
        self,
        folder: Path,
        plan: Sequence[Charge],
        description: dict[str, Any],
        public: dict[str, Any],
        checkpoint: dict[str, Any] | None = None,
        *,
        budget: Budget,
        ledger_path: str | Path | None = None,
    ) -> None:
        self._plan, self._description = plan, description
        # Charges without their marks: what those say of the noise is in the ledger, and never stops a resume.
        bare = [Charge(charge.mechanism, charge.count).to_record() for charge in plan]
        terms = {PLAN: bare, **{name: getattr(budget, name) for name in _LASTING}, **public}
        super().__init__(folder, terms, checkpoint, budget=budget, ledger_path=ledger_path)
        self.stored = StoredQueries(self.file)
        with self.file.writing() as db:  # a batch that was sent and never charged is asked again
            statement = "UPDATE queries SET asked_at = NULL WHERE released = 0 AND asked_at = ?"
            db.execute(statement, (self.num_charges,))

    @classmethod
    def followed(cls, folder: Path, run_id: str) -> LabelRun:
        """Run for a process without the run's file, where only collective methods may be called."""
        run = cls.__new__(cls)
        run.folder, run.private, run.run_id, run.leads = folder, private_folder(folder), run_id, False
        run.ledger = None  # type: ignore[assignment]
        return run

    def hear(self, reports: tuple[PrivacyReport, PrivacyReport]) -> None:
        """Store the guarantee and the spent budget that global rank 0 has sent."""
        self._heard = reports

    def reports(self, exact: bool | None = None) -> tuple[PrivacyReport, PrivacyReport]:
        """Guarantee and spent budget; in a process without the file, as last received from rank 0."""
        return super().reports(exact) if self.leads else self._heard

    def plan(self) -> tuple[Sequence[Charge], dict[str, Any]]:
        """Worst-case plan of all rounds."""
        return self._plan, self._description

    @collective
    def open_round(self, index: int, choose: Callable[[], Selection]) -> tuple[list[int], list[int]]:
        """Write the queries of a round, unless they are written already.

        Args:
            index: the round.
            choose: chooses them, in the order in which they will be asked.

        Returns:
            the public examples in order, and the positions of those that may still be asked.
        """
        examples = self.stored.selected(index)
        if examples is None:
            chosen = choose()
            examples = chosen.examples.tolist()
            rows = [(index, position, example) for position, example in enumerate(examples)]
            places = None if chosen.assignment is None else json.dumps(chosen.assignment.tolist())
            spread = None if chosen.spread is None else chosen.spread.to_bytes()
            with self.file.writing() as db:
                values = (index, places, spread, chosen.ask_means)
                db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, NULL)", values)
                db.executemany("INSERT INTO queries (round, position, example) VALUES (?, ?, ?)", rows)
        return examples, self.stored.open_positions(index)

    @collective
    def mark_asked(self, index: int, positions: Sequence[int]) -> None:
        """Mark a batch as asked, with the run's number of charges, before it is charged."""
        charges = self.num_charges
        with self.file.writing() as db:
            db.executemany(
                "UPDATE queries SET asked_at = ? WHERE round = ? AND position = ?",
                [(charges, index, position) for position in positions],
            )

    @collective
    def answers_left(self, most: int) -> int:
        """Number of answers that may still be given, of ``most`` in the whole run."""
        counts = self.stored.counts()
        # A lost query may have been answered, and paid for, before the crash: it counts as an answer.
        return most - counts["answered"] - counts["lost"]

    def put(self, index: int, positions: Sequence[int], release: Release) -> None:
        """Write the answers of a batch, with their noisy counts where the teacher releases them."""
        nothing: list[str | None] = [None] * len(positions)
        labels = [_stored(label) for label in release.labels]
        soft = (
            nothing
            if release.probabilities is None
            else [json.dumps(row) for row in release.probabilities.tolist()]
        )
        scores = nothing
        if release.scores is not None and release.score_deviation is not None:
            known = torch.isfinite(release.scores).all(dim=1).tolist()
            rows = zip(release.scores.double().tolist(), known, strict=True)
            scores = [json.dumps(row) if finite else None for row, finite in rows]
        with self.file.writing() as db:
            db.executemany(
                "UPDATE queries SET released = 1, label = ?, soft = ?, score = ? WHERE round = ? AND position = ?",
                [(labels[i], soft[i], scores[i], index, place) for i, place in enumerate(positions)],
            )
            if release.scores is not None:
                statement = "UPDATE rounds SET deviation = ? WHERE round = ?"
                db.execute(statement, (release.score_deviation, index))

    def warn_lost(self, labelled: int) -> None:
        """Warn of paid answers that were lost to a crash.

        Args:
            labelled: public examples that have a label all the same.

        Raises:
            RunFileError: if there is none.
        """
        if not (lost := self.stored.counts()["lost"]):
            return
        what = (
            f"{lost} queries were paid for, and a kill or an error came before their answers were kept. They are not "
            "asked again, and ε stays as it was stated"
        )
        if labelled:
            rank_zero_warn(what)
            return
        raise RunFileError(
            f"{what}; no label is left to train on. Start a new run, in another folder, with ledger_path="
            f"{str(self.ledger.path)!r}, so that both runs are counted: repeated queries are charged again"
        )

    def metrics(
        self, truth: Tensor | None, examples: Tensor, labels: Tensor, earlier: Tensor
    ) -> dict[str, float]:
        """Logged figures of the labels.

        Args:
            truth: int64 classes (or attributes) of all public examples, -1 where they aren't known; for
                evaluation only.
            examples: int64, answered public examples, shape ``(n,)``.
            labels: int64, their released labels, shape ``(n,)``, or attributes ``(n, a)``, of which the
                accuracy is the mean over attributes.
            earlier: int64, public examples that had a label before the last round.
        """
        counts = self.stored.counts()
        metrics = {
            "labels/queried": float(counts["queried"]),
            "labels/answered": float(counts["answered"]),
            "labels/labelled": float(len(examples)),
        }
        if truth is not None and len(examples):
            right, known = truth[examples] == labels, truth[examples] >= 0
            new = ~torch.isin(examples, earlier)
            for name, rows in (("labels/accuracy", slice(None)), ("labels/accuracy_last_round", new)):
                if bool(known[rows].any()):
                    metrics[name] = float(right[rows][known[rows]].double().mean())
        return metrics


@dataclasses.dataclass(frozen=True)
class StoredAnswers:
    """Queries of a run and their released answers.

    Attributes:
        queries: in the order in which they were, or would have been, asked.
        counts: see :func:`~pl_privknn.privacy.run.query_counts`.
        examples: public examples that have a label, int64 ``(n,)``.
        labels: their labels; see :meth:`StoredQueries.answers`.
    """

    queries: list[Query]
    counts: dict[str, int]
    examples: Tensor
    labels: Tensor


def stored_answers(folder: Path) -> StoredAnswers | None:
    """Read the queries and answers in a run's folder; None where it holds no labelling.

    Raises:
        RunFileError: if the run's file can't be read.
    """
    if not is_labelling(folder):
        return None
    with reading_run(folder / RUN_FILE) as file:
        stored = StoredQueries(file)
        examples, labels, _ = stored.answers(stored.rounds())
        return StoredAnswers(stored.queries(), stored.counts(), examples, labels)
