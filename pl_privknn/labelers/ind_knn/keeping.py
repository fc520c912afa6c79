"""Where the budgets of an Ind-KNN labeler are: in memory, in a folder, or those of each shard with its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pl_privknn.labelers.base import ChargesLedger, JoinsRuns, RecognisesRecords, ShardedLabeler
from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters
from pl_privknn.labelers.ind_knn.labeler_budgets import LabelerState
from pl_privknn.labelers.ind_knn.prediction import IndKNNEngine
from pl_privknn.labelers.ind_knn.shards import OwnTurns, answer_call, call_together
from pl_privknn.labelers.ind_knn.stream import check_unpaid


class KeepsBudgets(ShardedLabeler, JoinsRuns, RecognisesRecords):
    """A labeler whose records have budgets that must survive the process.

    In shards every process keeps those of its own records, in a folder of its own. Process 0 asks, pays into the
    ledger and draws noise.

    Attributes:
        parameters: public constants of the stream.
        state_dir: folder of the budgets, **private**, or None.
    """

    parameters: IndKNNParameters
    state_dir: Path | None = None
    _run_folder: Path | None = None
    _state: LabelerState | None = None
    _engine: IndKNNEngine | None = None
    _turns: OwnTurns | None = None

    def join_run(self, folder: Path, ledger: ChargesLedger) -> None:
        """Keep the budgets in ``folder``, unless there is a ``state_dir``; see :meth:`JoinsRuns.join_run`.

        Raises:
            JournalError: if the budgets' folder is damaged, incomplete, an older or second copy, in use, or not the
                one from which the run has answered.
        """
        place = (self.state_dir or folder).resolve()
        self._move_to(place)
        if not place.exists():
            check_unpaid(place, self.parameters.total, ledger)
        state = self._open_state()
        state.check(self.parameters.total, ledger)
        if self.shard is not None:
            call_together(state, self.shard.exchange, ledger)

    def leave_run(self) -> None:
        """Close the budgets; see :meth:`JoinsRuns.leave_run`."""
        if self._state is not None:
            self._state.close()
        self._state = self._run_folder = None

    @property
    def takes_shards(self) -> bool:
        """Always: a record's part in an answer depends on the query, on itself and on what was released."""
        return True

    def serve(self, order: Any) -> None:
        """Answer for the records of this shard, which keeps their budgets; see :meth:`ShardedLabeler.serve`.

        Raises:
            JournalError: if the shard's budgets are missing, damaged, another shard's, or an older or second copy.
        """
        if self.shard is None:
            raise RuntimeError("IndKNN.serve needs a shard")
        kind, *given = order
        exchange = self.shard.exchange
        if kind == "join":
            (call,) = given
            self._move_to(call.folder_of(exchange.rank))
            call.check_there(exchange.rank)
            answer_call(self._open_state(call.stream), exchange, call)
        elif kind == "joined":
            self._open_state().begun_elsewhere = given[0]
        elif kind == "begin":
            if self._engine is None:
                raise RuntimeError("IndKNN.serve needs the private table: call fit(features, labels) first")
            self._turns = OwnTurns(self._engine, exchange, *given)
        else:
            assert self._turns is not None
            self._turns.serve(kind, *given)

    def record_digests(self, images: Tensor, labels: Tensor) -> Tensor:
        """Keyed digests of private records; see :meth:`RecognisesRecords.record_digests`."""
        return self._open_state().key.digests(images, labels)

    def close(self) -> None:
        """Forget the table and let others open ``state_dir``."""
        self.leave_run()
        self._engine = self._turns = None

    def _move_to(self, place: Path) -> None:
        """Keep the budgets in a folder from now on."""
        if self._state is None or self._state.folder != place:
            self.close()
            self._run_folder = place

    def _open_state(self, leader: str | None = None) -> LabelerState:
        if self._state is None:
            # Seeded noise in a run's own folder is what it is in memory, whose opening is number 0.
            first = -1 if self.state_dir is None and self._run_folder is not None else 0
            folder, shard = self._run_folder or self.state_dir, self.shard
            if shard is None:
                self._state = LabelerState(self.parameters, folder, first)
                return self._state
            if folder is not None and self._run_folder is None:
                raise RuntimeError("state_dir: budgets of shards are opened together; call join_run first")
            place = (shard.exchange.rank, shard.exchange.size)
            self._state = LabelerState(self.parameters, folder, first, place, leader)
        return self._state
