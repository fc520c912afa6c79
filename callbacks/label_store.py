"""The released labels of one run, durable as soon as they exist."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn.labelers.base import Release

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS queries (
    round INTEGER NOT NULL,
    position INTEGER NOT NULL,
    example INTEGER NOT NULL,
    asked_at INTEGER,          -- number of the run's ledger charges when the batch was sent, NULL before
    released INTEGER NOT NULL DEFAULT 0,
    label INTEGER NOT NULL DEFAULT -1,
    soft TEXT,
    PRIMARY KEY (round, position)
);
"""


class LabelStoreError(RuntimeError):
    """The folder holds the labels of another run, or a store that can't be read."""


class LabelStore:
    """Which public examples were asked about, and what came back; one SQLite file per run.

    Everything in it is a public choice or a differentially private answer, so the file may be kept and
    shared. Its order of events makes a kill at any point harmless: the queries of a round are written down
    before the first is asked, a batch is marked as asked before the labeler sees it, and its answers are
    committed before the next batch starts. A batch that was asked and paid for, but whose answers never
    arrived here, is lost: it stays refused and is never asked (and so never paid) a second time.

    Args:
        path: the file; made with its folder if missing.
        fingerprint: the parameters of the run as JSON-compatible data. A store written under other
            parameters is refused.

    Raises:
        LabelStoreError: if the file is not a label store or belongs to a run with other parameters.
    """

    def __init__(self, path: str | Path, fingerprint: dict[str, Any]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise LabelStoreError(
                f"{self.path} is not a label store ({error}); use another folder"
            ) from error
        self._claim(fingerprint)

    def _claim(self, fingerprint: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(fingerprint))
        stored = self.get_meta("fingerprint")
        if stored is None:
            self.set_meta("fingerprint", wanted)
            return
        differing = [key for key in {**stored, **wanted} if stored.get(key) != wanted.get(key)]
        if differing:
            changes = "; ".join(
                f"{key}={stored.get(key)!r} then, {wanted.get(key)!r} now" for key in sorted(differing)
            )
            raise LabelStoreError(
                f"{self.path.parent} holds a run with other parameters ({changes}). "
                "Repeat the run with its own parameters to continue it, or choose another folder."
            )

    def get_meta(self, key: str) -> Any:
        """The value stored under ``key``, or None."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        """Store a JSON-compatible value under ``key``, durably."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def rounds(self) -> int:
        """Number of rounds whose queries have been written down."""
        return int(self._db.execute("SELECT COUNT(DISTINCT round) FROM queries").fetchone()[0])

    def select(self, round_index: int, examples: Sequence[int], assignment: Tensor | None = None) -> None:
        """Write down the queries of a round, in the order in which they will be asked.

        Args:
            round_index: the round.
            examples: public examples to ask about.
            assignment: int64, shape ``(n,)``; position of the query whose answer each public example takes
                over, -1 for none. None: every query keeps its answer to itself.
        """
        rows = [(round_index, position, int(example)) for position, example in enumerate(examples)]
        with self._transaction():
            self._db.executemany("INSERT INTO queries (round, position, example) VALUES (?, ?, ?)", rows)
            if assignment is not None:
                self.set_meta(f"assignment {round_index}", assignment.tolist())

    def selected(self, round_index: int) -> list[int] | None:
        """The queries of a round in order, or None where the round has not been selected."""
        rows = self._db.execute(
            "SELECT example FROM queries WHERE round = ? ORDER BY position", (round_index,)
        ).fetchall()
        return [row[0] for row in rows] or None

    def open_positions(self, round_index: int, charges_now: int) -> list[int]:
        """Positions of a round that may still be asked.

        Args:
            round_index: the round.
            charges_now: number of the run's charges in the ledger at this moment. A batch that was marked
                as asked when the ledger held as many was never paid for, so it may be asked again.
        """
        rows = self._db.execute(
            "SELECT position FROM queries WHERE round = ? AND released = 0 "
            "AND (asked_at IS NULL OR asked_at = ?) ORDER BY position",
            (round_index, charges_now),
        ).fetchall()
        return [row[0] for row in rows]

    def mark_asked(self, round_index: int, positions: Sequence[int], charges_now: int) -> None:
        """Note durably that a batch is about to be asked."""
        with self._transaction():
            self._db.executemany(
                "UPDATE queries SET asked_at = ? WHERE round = ? AND position = ?",
                [(charges_now, round_index, position) for position in positions],
            )

    def put(self, round_index: int, positions: Sequence[int], release: Release) -> None:
        """Commit the answers of a batch."""
        soft: list[str | None] = [None] * len(positions)
        if release.soft is not None:
            soft = [json.dumps([float(value) for value in row]) for row in release.soft]
        labels = [int(label) for label in release.labels]
        with self._transaction():
            self._db.executemany(
                "UPDATE queries SET released = 1, label = ?, soft = ? WHERE round = ? AND position = ?",
                [(labels[i], soft[i], round_index, position) for i, position in enumerate(positions)],
            )

    def answers(self, rounds: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Labels of public examples after the first ``rounds`` rounds; a later round overrides an earlier.

        Returns:
            examples (int64, ascending, shape ``(a,)``), labels (int64, shape ``(a,)``) and soft labels
            (float32, shape ``(a, c)``) or None. Refused and lost queries are left out.
        """
        found: dict[int, tuple[int, str | None]] = {}
        for index in range(rounds):
            rows = self._db.execute(
                "SELECT position, example, label, soft FROM queries "
                "WHERE released = 1 AND label >= 0 AND round = ?",
                (index,),
            ).fetchall()
            assignment = self.get_meta(f"assignment {index}")
            if assignment is None:
                found.update({example: (label, soft) for _, example, label, soft in rows})
            else:
                answer = {position: (label, soft) for position, _, label, soft in rows}
                found.update({i: answer[query] for i, query in enumerate(assignment) if query in answer})
        examples = sorted(found)
        labels = torch.tensor([found[example][0] for example in examples], dtype=torch.int64)
        soft = None
        if examples and all(found[example][1] is not None for example in examples):
            soft = torch.tensor([json.loads(found[example][1] or "") for example in examples])
        return torch.tensor(examples, dtype=torch.int64), labels, soft

    def counts(self) -> dict[str, int]:
        """Numbers of queries: ``queried`` (asked), ``answered``, ``refused`` and ``lost`` to a crash."""
        queried, answered, released = self._db.execute(
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
        return {row[0] for row in self._db.execute("SELECT DISTINCT example FROM queries")}

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """``BEGIN IMMEDIATE`` … ``COMMIT``, or ``ROLLBACK`` on an error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
