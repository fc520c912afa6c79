"""Ind-KNN's records in a shard: their part in the answers, and how the shards of one stream find together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pl_privknn._processes import Exchange
from pl_privknn.labelers.base import ChargesLedger
from pl_privknn.labelers.ind_knn.algorithm import Floats, collect, count_active
from pl_privknn.labelers.ind_knn.labeler_budgets import LabelerState
from pl_privknn.labelers.ind_knn.others import texts_of
from pl_privknn.labelers.ind_knn.prediction import IndKNNEngine
from pl_privknn.privacy.per_record.journal import JournalError


class OwnTurns:
    """The part of this process's records in queries that process 0 asks, one after another.

    Args:
        engine: holds the records; charges their budgets at the end.
        exchange: to process 0.
        vectors: queries, unit vectors, float32 ``(m, d)``.
        thresholds: τ of each, ``(m,)``.
    """

    def __init__(self, engine: IndKNNEngine, exchange: Exchange, vectors: Any, thresholds: Floats) -> None:
        self._engine, self._exchange = engine, exchange
        self._before = engine.table.left[: len(engine.table)].copy()
        self._coming = engine.neighborhoods(vectors, thresholds)
        self._next = next(self._coming, None)
        self._near: NDArray[np.intp] = np.empty(0, np.intp)
        self._kappa: Floats = np.empty(0)
        self._left: Floats = np.empty(0)

    def serve(self, kind: str, *given: Any) -> None:
        """Carry out an order of :class:`~pl_privknn.labelers.ind_knn.others.OtherShards`."""
        table = self._engine.table
        if kind == "votes":
            self._exchange.sum(torch.from_numpy(self._votes(*given)))
            if self._next is None:  # while process 0 decides
                self._next = next(self._coming, None)
            return
        table.left[self._near] = self._left
        if kind == "turn":
            assert self._next is not None
            (self._near, self._kappa), self._next = self._next, None
            self._left = table.left[self._near]
            active = count_active(self._engine.parameters, self._near, table.left)
            self._exchange.sum(torch.tensor([active], dtype=torch.float64))
            return
        self._engine.pay(self._before)
        texts_of(self._exchange, self._engine.budgets.mark)

    def _votes(self, count: float) -> Floats:
        """Votes of the present query. What they cost is put aside: process 0 may ask again with another number."""
        table = self._engine.table
        self._left = table.left[self._near]
        places = np.arange(len(self._near))
        return collect(
            self._engine.parameters,
            places,
            self._kappa,
            table.labels[self._near],
            self._left,
            count,
            self._engine.num_classes,
        )


@dataclasses.dataclass(frozen=True)
class Joining:
    """What process 0 tells the others of a stream.

    Attributes:
        folder: of process 0's budgets; each other process has one of its own in it, on a disk that it reaches.
        stream: drawn when process 0's budgets were made.
        names: likewise of all shards' budgets; None where they never came together.
        marks: how far the budgets of all shards had come when the last answers were let out, as the ledger has it.
    """

    folder: Path
    stream: str
    names: list[str] | None
    marks: list[str] | None

    def folder_of(self, rank: int) -> Path:
        """Where the budgets of a shard are."""
        return self.folder / f"shard-{rank:05d}"

    def check_there(self, rank: int) -> None:
        """Raise ``JournalError`` where a shard's budgets should be and are not."""
        if self.names is not None and not (self.folder_of(rank) / "budgets").exists():
            raise JournalError(
                f"{self.folder_of(rank)}: the budgets of this shard are missing; put them back, or start a new run "
                "or state_dir, which charges a new stream"
            )

    def check(self, state: LabelerState, rank: int) -> None:
        """Raise ``JournalError`` unless a shard's budgets are those of this stream, and the latest."""
        known = None if self.names is None else self.names[rank]
        if state.content["leader"] != self.stream or state.budgets.name != (known or state.budgets.name):
            raise JournalError(
                f"{self.folder_of(rank)} does not hold this stream's budgets of the shard; put those back, or start "
                "a new run or state_dir, which charges a new stream"
            )
        if self.marks is not None and not state.budgets.has_mark(self.marks[rank]):
            raise JournalError(
                f"{self.folder_of(rank)} holds an older copy of the budgets than the answers were paid from; put "
                "back the latest one, or start a new run in a new folder, which charges a new stream"
            )


def call_together(state: LabelerState, exchange: Exchange, ledger: ChargesLedger) -> None:
    """Let all shards open their budgets; for process 0, which has opened its own.

    Raises:
        RuntimeError: where one of them can't; its own message says why.
    """
    assert state.folder is not None
    names = state.content.get("members")
    exchange.tell(("join", Joining(state.folder, state.budgets.name, names, state.noted_of_shards(ledger))))
    replies = [reply.split() for reply in texts_of(exchange, _reply(state))]
    state.begun_elsewhere = any(begun == "True" for _, begun in replies)
    if names is None:
        state.content["members"] = [name for name, _ in replies]
        state.save()
    exchange.tell(("joined", state.begun_elsewhere))


def answer_call(state: LabelerState, exchange: Exchange, call: Joining) -> None:
    """Tell process 0 of this shard's budgets, once they are found to be the right ones.

    Raises:
        JournalError: if they are not.
    """
    call.check(state, exchange.rank)
    texts_of(exchange, _reply(state))


def _reply(state: LabelerState) -> str:
    return f"{state.budgets.name} {state.budgets.begun}"
