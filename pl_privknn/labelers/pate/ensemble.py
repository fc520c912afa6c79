"""What PATE of classes and PATE of attributes share: disjoint parts of the private table, and a teacher on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int
from pl_privknn.labelers.aggregation import Pay
from pl_privknn.labelers.base import ChargesLedger, Labeler
from pl_privknn.labelers.pate.partition import Partitioner, RandomPartition
from pl_privknn.labelers.pate.teachers import Teachers, TrainedTeachers, progress_bar
from pl_privknn.privacy.mechanisms import Adjacency
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_side import silenced


class TeacherEnsemble(Labeler):
    """Deals the private records out to disjoint parts and trains one teacher on each.

    Args:
        num_teachers: number of parts and teachers.
        teachers: how teachers are made.
        partitioner: how records are dealt out; :class:`~pl_privknn.labelers.pate.partition.RandomPartition`
            by default, whose guarantee has no condition.
        groups: one whole number for each private record, in the data module's order, or the path of a
            ``.npy`` file with them, or ``"data"`` for those of the data module. Records with the same number go
            to the same teacher, and the guarantee is for all records of one number together (one person)
            instead of for single records.
        on_failure: what a teacher does whose training breaks (an exception, weights that are not finite):
            ``"abstain"`` never votes, ``"raise"`` stops the run. If all of them break the run stops anyway.
        progress: show a progress bar during training.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`; it also draws the partition.

    Attributes:
        privacy_unit: ``"record"``, or ``"group"`` where ``groups`` are given.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self,
        num_teachers: int,
        teachers: Teachers,
        partitioner: Partitioner | None = None,
        groups: Any = None,
        on_failure: str = "abstain",
        progress: bool = True,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(noise_source)
        self.num_teachers = check_int("num_teachers", num_teachers, minimum=2)
        self.teachers = teachers
        self.partitioner = partitioner if partitioner is not None else RandomPartition()
        self.adjacencies: tuple[Adjacency, ...] = self.partitioner.adjacencies
        self.groups = groups
        if groups is not None and not self.partitioner.takes_groups:
            raise ValueError(
                f"groups: {type(self.partitioner).__name__} deals out single records; use RandomPartition"
            )
        self.privacy_unit = "record" if groups is None else "group"
        self.on_failure = check_choice("on_failure", on_failure, ("abstain", "raise"))
        self.progress = progress
        self._fits = 0
        self._forget()

    @property
    def trained(self) -> TrainedTeachers:
        """**Private.** The teachers.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        if self._trained is None:
            raise RuntimeError(
                f"{type(self).__name__} needs the private table: call fit(features, labels, num_classes) first"
            )
        return self._trained

    def pay(self, ledger: ChargesLedger) -> Pay:
        """Pays with the partition's condition, where it has one."""
        return lambda mechanism, count, key: self.paid(ledger, self.partitioner.billed(mechanism), count, key)

    def __getstate__(self) -> dict[str, Any]:
        """Settings alone, no teachers and no votes; ``groups`` given as an array are a setting."""
        kept = dict(self.__dict__)
        for name in ("_trained", "_asked", "_answered", "private_groups"):
            kept.pop(name, None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._trained: TrainedTeachers | None = None
        self._num_classes = 0

    def _keep(self, trained: TrainedTeachers, num_classes: int) -> None:
        """Check the teachers and take them."""
        kinds = ", ".join(sorted(trained.failures))
        if bool((trained.failed | trained.empty).all()):
            raise RuntimeError(
                f"every teacher of {type(self.teachers).__name__} failed ({kinds}); try its settings on "
                "public data first"
            )
        if self.on_failure == "raise" and bool(trained.failed.any()):
            raise RuntimeError(
                f"teachers of {type(self.teachers).__name__} failed ({kinds}); try its settings on public "
                "data, or set on_failure='abstain' to go on without their votes"
            )
        self._trained, self._num_classes = trained, num_classes
        self._fits += 1

    def _own_teachers(self) -> int:
        """How many of the teachers this process trains, on records of its own."""
        if self.shard is None:
            return self.num_teachers
        rank, size = self.shard.exchange.rank, self.shard.exchange.size
        if self.num_teachers < size:
            raise ValueError(
                f"num_teachers={self.num_teachers} must be at least the number of processes, {size}"
            )
        return len(range(rank, self.num_teachers, size))

    def _train(
        self, features: Tensor, labels: Tensor, num_classes: int, groups: Tensor | None
    ) -> TrainedTeachers:
        teachers, rank = self._own_teachers(), 0 if self.shard is None else self.shard.exchange.rank
        shown = self.progress and not rank
        with progress_bar(f"training {teachers} teachers", shown) as progress, silenced():
            parts = self.partitioner.assign(
                features,
                # Of attributes one column: partitioners that take groups look at the number of records alone.
                labels if labels.ndim == 1 else labels[:, 0],
                num_classes=max(2, num_classes),
                num_parts=teachers,
                noise=self.noise_source.stream("partition", self._fits, *(("rank", rank) if rank else ())),
                groups=groups,
            )
            return self.teachers.train(features, labels, parts, num_classes, teachers, progress)


def resolve_groups(groups: Any, private_groups: Tensor | None) -> Tensor | None:
    """Group of each private record, from what a user said and what the data module knows.

    Args:
        groups: None, an array, the path of a ``.npy`` file, or ``"data"``.
        private_groups: the data module's.

    Raises:
        ValueError: if the file can't be read, or the data module has no groups.
    """
    if groups is None:
        return None
    if isinstance(groups, str) and groups == "data":
        if private_groups is None:
            raise ValueError(
                "groups='data': the data module has no private_groups; give an array or a .npy file"
            )
        return private_groups
    if isinstance(groups, str | Path):
        try:
            groups = np.load(groups, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"groups={str(groups)!r} can't be read ({type(error).__name__}); give the path of a .npy "
                "file with one whole number for each private record"
            ) from None
    return torch.as_tensor(groups)
