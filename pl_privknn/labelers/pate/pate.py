"""PATE: teachers trained on disjoint parts of the private records vote, and the noisy winner is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pl_privknn
from pl_privknn.labelers.base import ChargesLedger, Release, check_table
from pl_privknn.labelers.canaries import Canaries, at_one_place
from pl_privknn.labelers.pate.aggregators import Aggregator, ConfidentGNMAX
from pl_privknn.labelers.pate.cache import PrivateCache
from pl_privknn.labelers.pate.ensemble import TeacherEnsemble, resolve_groups
from pl_privknn.labelers.pate.networks import LinearTeachers
from pl_privknn.labelers.pate.partition import Partitioner, RandomPartition
from pl_privknn.labelers.pate.report import DataDependentReport, data_dependent_report
from pl_privknn.labelers.pate.teachers import Teachers
from pl_privknn.privacy.mechanisms import Adjacency, Charge
from pl_privknn.privacy.private_side import silenced


class PATE(TeacherEnsemble):
    """Private Aggregation of Teacher Ensembles (Papernot et al. 2017, 2018), and Guided PATE (Arora).

    The private records are dealt out to disjoint parts, one teacher is trained on each, and each query gets
    one vote from every teacher. A record is in one part, so it changes one vote at most, at will: that is
    the sensitivity which the aggregator's noise covers. For which neighbours the parts of all *other*
    records stay as they are is the partitioner's statement; where it is conditional, every charge in the
    ledger says so and why.

    Teachers are private. They are kept in memory, left out of copies and pickles, and written only into
    ``private_cache_dir`` if one is named. A resumed run trains them again, on a fresh partition; each batch
    of queries has its guarantee by itself, so that costs nothing.

    Args:
        num_teachers: number of parts and teachers.
        teachers: how teachers are made; :class:`~pl_privknn.labelers.pate.networks.LinearTeachers` by default.
        partitioner: how records are dealt out; :class:`~pl_privknn.labelers.pate.partition.RandomPartition`
            by default, whose guarantee has no condition.
        aggregator: how votes become answers; by default confident GNMAX with σ1 = 0.34, σ2 = 0.16 and a
            threshold of 0.7, each times the number of teachers.
        private_cache_dir: a folder for trained teachers, as sensitive as the private data; None: no cache.
        **kwargs: see :class:`~pl_privknn.labelers.pate.ensemble.TeacherEnsemble`.

    Raises:
        ValueError: for arguments out of range, or a cache for teachers that can't be cached.

    Example:
        >>> from pl_privknn.labelers import GNMAX, PATE
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = PATE(num_teachers=250, aggregator=GNMAX(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    def __init__(
        self,
        num_teachers: int = 250,
        teachers: Teachers | None = None,
        partitioner: Partitioner | None = None,
        aggregator: Aggregator | None = None,
        *,
        private_cache_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        made = teachers if teachers is not None else LinearTeachers()
        super().__init__(num_teachers, made, partitioner, **kwargs)
        if aggregator is None:
            count = self.num_teachers
            aggregator = ConfidentGNMAX(0.7 * count, screening_sigma=0.34 * count, sigma=0.16 * count)
        self.aggregator = aggregator
        self.aggregator.screening_mechanism(self.num_teachers, 2)  # refuses thresholds out of reach at once
        self.cache = None if private_cache_dir is None else PrivateCache(private_cache_dir)
        if self.cache is not None and not self.teachers.cacheable:
            raise ValueError(
                f"private_cache_dir: {type(self.teachers).__name__} can't be cached; leave the folder out, a "
                "resumed run trains them again"
            )

    # A teacher is of one shard, so a record that moved into another one would change two.
    lasting_shards = True

    @property
    def takes_shards(self) -> bool:
        """Whether each record's part is drawn by itself, so that it can be one of its own shard's teachers."""
        return type(self.partitioner) is RandomPartition and self.groups is None

    @property
    def adjacencies_in_shards(self) -> tuple[Adjacency, ...]:
        """A record that replaces another one may belong in another shard: two teachers would change."""
        return ("add_remove",)

    def serve(self, order: Any) -> None:
        """Let this shard's teachers vote; see :meth:`Labeler.serve`."""
        if self.shard is None:
            raise RuntimeError("PATE.serve needs a shard")
        self.shard.exchange.sum(self._own_votes(order))

    def fit(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """Deal out the private table and train the teachers; see :meth:`Labeler.fit`.

        Raises:
            ValueError: also if there are fewer records (or groups) than teachers.
            RuntimeError: if all teachers break, or one does and ``on_failure`` is ``"raise"``.
        """
        check_table(features, labels, num_classes)
        groups = resolve_groups(self.groups, self.private_groups)
        trained = None
        key = ""
        if self.cache is not None:
            settings = f"{pl_privknn.__version__}|{self.partitioner!r}|{self.teachers.settings()}|"
            key = self.cache.key(f"{settings}{self._own_teachers()}|{num_classes}", features, labels, groups)
            if (state := self.cache.load(key)) is not None:
                trained = self.teachers.restore(state, features.shape[1], num_classes)
        if trained is None:
            trained = self._train(features, labels, num_classes, groups)
            if self.cache is not None and (state := trained.state()) is not None:
                self.cache.save(key, state)
        self._keep(trained, num_classes)

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """One screening a query (where there is one) and one noisy arg-max an answer; see the base class."""
        return self.aggregator.plan(
            num_queries, max_answers, self.num_teachers, num_classes, self.partitioner.billed
        )

    def label(self, queries: Tensor, ledger: ChargesLedger, max_answers: int | None = None) -> Release:
        """Let the teachers vote, screen and answer; see :meth:`Labeler.label`.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        votes = self.votes(queries)
        release = self.aggregator.release(votes, self.num_teachers, self.pay(ledger), max_answers)
        self._asked.append(votes)
        self._answered.append(release.answered)
        return release

    # ------------------------------------------------------------------ for the owner of the data alone

    def votes(self, queries: Tensor) -> Tensor:
        """**Private.** Votes of the teachers of all shards, int64 ``(m, c)``; teachers that abstain are left out.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        if self.shard is None:
            return self._own_votes(queries)
        self.shard.exchange.tell(queries.cpu())
        return self.shard.exchange.sum(self._own_votes(queries))

    def _own_votes(self, queries: Tensor) -> Tensor:
        trained = self.trained
        with silenced():
            classes = trained.predict(queries)
        counts = torch.zeros(len(queries), self._num_classes, dtype=torch.int64)
        voting = (classes >= 0).long()
        return counts.scatter_add_(1, classes.clamp_min(0), voting)

    def exact_votes(self, queries: Tensor) -> Tensor:
        """:meth:`votes`."""
        return self.votes(queries)

    def canaries(self, public: Tensor, num_classes: int) -> Canaries:
        """One record, and questions about its place."""
        return at_one_place(public, num_classes)

    def asked_votes(self) -> tuple[Tensor, Tensor]:
        """**Private.** Votes ``(m, c)`` of every query so far, and which of them were answered."""
        if not self._asked:
            return torch.zeros(0, max(self._num_classes, 2), dtype=torch.int64), torch.zeros(
                0, dtype=torch.bool
            )
        return torch.cat(self._asked), torch.cat(self._answered)

    def teacher_report(self) -> dict[str, Any]:
        """**Private.** Number of this process's teachers, and of those that abstain: empty parts, failures."""
        if self._trained is None:
            return {}
        return {
            "teachers": self._trained.num_teachers,
            "empty": int(self._trained.empty.sum()),
            "failed": int(self._trained.failed.sum()),
            "failures": sorted(self._trained.failures),
        }

    def data_dependent_report(self, delta: float) -> DataDependentReport:
        """**Private.** What the queries so far cost for this table alone.

        See :func:`pl_privknn.labelers.pate.report.data_dependent_report`. It is computed from private
        votes, covers the queries that this object was asked (not those of an earlier process), and is
        logged nowhere.
        """
        return data_dependent_report(self, delta)

    def forget_queries(self) -> None:
        """Start :meth:`asked_votes` and :meth:`data_dependent_report` anew."""
        self._asked: list[Tensor] = []
        self._answered: list[Tensor] = []

    def _forget(self) -> None:
        super()._forget()
        self.forget_queries()
