"""Shards of a private table whose processes are played in one; for benchmarks and tests."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn.labelers.base import (
    ChargesLedger,
    JoinsRuns,
    Labeler,
    RecognisesRecords,
    Release,
    ShardedLabeler,
    UsesPublicFeatures,
)
from pl_privknn.neighbors.processes import ProcessGroup, Shard
from pl_privknn.privacy.mechanisms import Charge


def rows_of(records: int, rank: int, size: int) -> range:
    """The records of a shard: one of ``size`` parts of the table, about equally long, one after another."""
    return range(records * rank // size, records * (rank + 1) // size)


class SimulatedGroup:
    """Group that joins the shards of one process; each has an end of it.

    A command is carried out by all other shards, one after another, as soon as process 0 gives it; what they send
    waits until process 0 asks for it. Whatever processes do is a function of commands and of their own records, so
    the outcome is that of processes.

    Args:
        size: number of shards.

    Attributes:
        size: likewise.
        turn: number of the shard that is at work.
        run_command: what carries out a command, for shards 1, 2, …
        waiting: parts that each shard has sent and process 0 has not asked for.
    """

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, 0
        self.run_command: list[Callable[[Any], None]] = []
        self.waiting: list[deque[Tensor]] = [deque() for _ in range(size)]

    def end(self, rank: int) -> SimulatedProcess:
        """The end of one shard."""
        return SimulatedProcess(self, rank)


class SimulatedProcess(ProcessGroup):
    """One shard's end of a :class:`SimulatedGroup`; see :class:`~pl_privknn.neighbors.processes.ProcessGroup`.

    Attributes:
        sent: bytes of what the shard has sent.
    """

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        super().__init__(rank)
        self.group, self.size = group, group.size

    def broadcast(self, value: Any = None) -> Any:
        """Let all shards but the first carry out a command; for process 0."""
        for rank, run in enumerate(self.group.run_command, 1):
            self.group.turn = rank
            try:
                run(pickle.loads(pickle.dumps(value)))  # as it would travel
            finally:
                self.group.turn = 0
        return value

    def gather(self, part: Tensor) -> list[Tensor]:
        """Parts of all shards, for the first one; the others' are kept."""
        self.sent += part.nbytes
        self.group.waiting[self.rank].append(part.clone())
        return [parts.popleft() for parts in self.group.waiting] if self.rank == 0 else []

    def sum(self, part: Tensor) -> Tensor:
        """See :class:`~pl_privknn.neighbors.processes.ProcessGroup`."""
        return sum(self.gather(part), torch.zeros_like(part))


class InShards(UsesPublicFeatures, RecognisesRecords, JoinsRuns):
    """Labelers that hold a share of the private table each, in the place of one that holds it all.

    Args:
        members: a labeler for each shard, made alike; the first one charges and answers.
        removed: position in a larger table of the record that the table lacks, if any: all other records lie in the
            shard in which they would lie there.

    Raises:
        ValueError: for labelers that look at private records in one process.
    """

    def __init__(self, members: Sequence[Labeler], removed: int | None = None) -> None:
        self._members = [member for member in members if isinstance(member, ShardedLabeler)]
        if not self._members or not self._members[0].takes_shards:
            raise ValueError(
                f"shards={len(members)}: {type(members[0]).__name__} with these settings looks at private records in "
                "one process; check it with shards=1"
            )
        self.removed = removed
        super().__init__(self._members[0].noise_source)
        self.adjacencies = self._members[0].adjacencies_in_shards
        self.group = SimulatedGroup(len(self._members))
        self.group.run_command = [member.run_command for member in self._members[1:]]

    def fit_public(self, features: Tensor) -> None:
        """As a run does it: process 0 alone takes public features."""
        if isinstance(self._members[0], UsesPublicFeatures):
            self._members[0].fit_public(features)

    def record_digests(self, images: Tensor, labels: Tensor) -> Tensor | None:
        """Those of each shard, by a key of its own, in the table's order; see the base."""
        found = [
            member.record_digests(images[rows], labels[rows])
            for member, rows in self._dealt(len(labels))
            if isinstance(member, RecognisesRecords)
        ]
        known = [part for part in found if part is not None]
        return torch.cat(known) if known else None

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Deal the table out; see :meth:`Labeler.fit`."""
        digests, self.private_digests = self.private_digests, None
        for member, rows in self._dealt(len(labels)):
            if isinstance(member, RecognisesRecords):
                member.private_digests = None if digests is None else digests[rows]
            member.fit(features[rows].clone(), labels[rows].clone(), num_classes)

    def _dealt(self, records: int) -> Iterator[tuple[ShardedLabeler, slice]]:
        """Each member, one after another at work, and which rows of the table are its own."""
        size, lacks = len(self._members), self.removed
        for rank, member in enumerate(self._members):
            rows = rows_of(records + (lacks is not None), rank, size)
            start, stop = (place - (lacks is not None and lacks < place) for place in (rows.start, rows.stop))
            self.group.turn = rank
            member.noise_source = self.noise_source
            member.shard = Shard(self.group.end(rank), start, 1, records)
            yield member, slice(start, stop)
        self.group.turn = 0

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """That of one process."""
        return self._members[0].plan(num_queries, max_answers, num_classes, rounds=rounds)

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Answers of process 0."""
        return self._members[0].label(queries, ledger, max_answers)

    def join_run(self, folder: Path, ledger: ChargesLedger) -> None:
        """Nothing: members keep what they keep in memory."""

    def leave_run(self) -> None:
        """Close what members opened."""
        for member in self._members:
            if isinstance(member, JoinsRuns):
                member.leave_run()
