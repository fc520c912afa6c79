"""PATE: teachers trained on disjoint parts of the private records vote, and the noisy winner is released."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_int, check_open_unit
from pl_privknn._processes import ProcessGroup
from pl_privknn._progress import progress_bars
from pl_privknn.labelers.attributes import Attributes, attributes_of, clip_attributes
from pl_privknn.labelers.base import Capabilities, PayingRun, PrivateRecords, Release, stated_plan
from pl_privknn.labelers.partitions import Partitioner, RandomPartition
from pl_privknn.labelers.teachers import LinearTeachers, StackedTeachers, Teachers, TrainedTeachers
from pl_privknn.labelers.voting import Aggregation, Screening, VotingLabeler
from pl_privknn.privacy.accounting import rdp
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.data_dependent import REASON, answers_rdp, screening_rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Guarantee, Mechanism, weakest
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.redaction import silenced


class TeachersFailedError(RuntimeError):
    """Raised where no teacher of an ensemble could be trained."""


class PATE(VotingLabeler):
    """Private Aggregation of Teacher Ensembles (Papernot et al. 2017, 2018), and Guided PATE (Arora).

    The private records are dealt out to disjoint parts, one teacher is trained on each, and each query gets
    one vote from every teacher. A record is in one part, so it changes one vote at most, at will: that moves the
    histogram by √2 in L2 and 2 in L1, and the largest count by at most 1. An abstention is one more choice of a
    teacher and moves less; the screening takes a largest count that abstentions leave below ⌈k/c⌉ for ⌈k/c⌉
    (:class:`~pl_privknn.privacy.mechanisms.NoisyScreening`). For which neighbours the parts of all *other*
    records stay as they are is the partitioner's statement; where it is conditional, every charge in the
    ledger says so and why.

    **The papers' names.** ``Laplace(scale)`` is LNMax (2017), pure 2/b differential privacy an answer; the papers' γ
    is 1/b, so "noise 0.1" is scale 10. ``Gaussian(sigma)`` is GNMax (2018), RDP α/σ² an answer, and with
    ``screening`` Confident-GNMax (Algorithm 1), with σ1 = ``screening.noise.sigma`` and σ2 = ``noise.sigma``.

    **Attributes.** A teacher's vote is the attribute vector that it gives to a query, clipped as in
    :class:`~pl_privknn.labelers.attributes.Attributes`; one vote that changes at will moves the sums as one that is
    replaced (:func:`~pl_privknn.labelers.attributes.swapped_vote_norms`), an abstention, a vote of zeros, included.

    **Persons.** Where the unit of privacy is a person, all of a person's records go to one teacher.

    A teacher whose training breaks (its weights are not finite) never votes; that one broke is private, so the run
    goes on. Where all break it stops.

    Teachers are private: kept in memory, left out of copies and pickles, and written nowhere. A resumed run trains
    them again, on a fresh partition; each batch of queries has its guarantee by itself, so that costs nothing.

    Args:
        num_teachers: number of parts and teachers.
        teachers: how teachers are made; :class:`~pl_privknn.labelers.teachers.LinearTeachers` by default.
        partitioner: how records are dealt out; :class:`~pl_privknn.labelers.partitions.RandomPartition`
            by default, whose guarantee has no condition.
        noise: the aggregation mechanism with its noise scale, in votes; the sensitivity is filled in. ``Gaussian``,
            ``Laplace`` or ``ExponentialArgmax``, of attributes one of the first two; by default ``Gaussian`` with
            σ = 0.16 times the number of teachers, of attributes 0.2 times.
        screening: :class:`~pl_privknn.labelers.voting.Screening`, or None to answer every query; a threshold of 0.6
            to 0.8 of the teachers is usual.
        release_counts: release all noisy counts of an answered query, at the price of the winner alone, so that
            answers can be smoothed over neighbouring queries. Data-dependent figures, which are of the winner
            alone, are then not to be had.
        task: ``"multiclass"``, or ``"multilabel"``: labels are attributes, and every query is answered.
        attributes: settings of ``task="multilabel"``.
        progress: show a progress bar during training.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`; it also draws the partition.

    Raises:
        ValueError: for arguments out of range, or that don't suit attributes.

    Example:
        >>> from pl_privknn.labelers import PATE, Screening
        >>> from pl_privknn.privacy import Gaussian, Laplace, epsilon_for_delta
        >>> screening = Screening(threshold=200, noise=Gaussian(sigma=150.0))
        >>> choices = [{"noise": Laplace(100.0)}, {"noise": Gaussian(40.0)}, {"screening": screening}]
        >>> plans = [PATE(num_teachers=250, **choice).plan(100, 50, 10) for choice in choices]
        >>> [round(epsilon_for_delta(plan, 1e-5), 3) for plan in plans]
        [0.483, 0.926, 0.96]
    """

    most_votes_name = "num_teachers"
    _trained: TrainedTeachers | None

    def __init__(
        self,
        num_teachers: int = 250,
        teachers: Teachers | None = None,
        partitioner: Partitioner | None = None,
        *,
        noise: Mechanism | None = None,
        screening: Screening | None = None,
        release_counts: bool = False,
        task: str = "multiclass",
        attributes: Attributes | None = None,
        progress: bool = True,
        noise_source: NoiseSource | None = None,
    ) -> None:
        count = self.num_teachers = check_int("num_teachers", num_teachers, minimum=2)
        attributes = attributes_of(task, attributes)
        super().__init__(
            count,
            1.0,
            screening,
            noise if noise is not None else Gaussian((0.16 if attributes is None else 0.2) * count),
            noise_source,
            release_counts,
            attributes,
        )
        self.teachers = teachers if teachers is not None else LinearTeachers()
        self.partitioner = partitioner if partitioner is not None else RandomPartition()
        self.adjacencies: tuple[Adjacency, ...] = self.partitioner.adjacencies
        self.progress = progress
        if attributes is not None and not self.partitioner.takes_groups:
            raise ValueError(
                f"partitioner={type(self.partitioner).__name__} deals out single records by their classes; use "
                "RandomPartition with attributes"
            )
        if attributes is not None and not isinstance(self.teachers, StackedTeachers):
            raise ValueError(
                f"teachers: {type(self.teachers).__name__} answer with one class; use LinearTeachers"
            )
        self._fits = 0
        self._forget()

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: persons, if a part takes all their records; shards, if parts are drawn record by record.

        A teacher is of one shard, so a record that moves into another one changes two teachers, and so may one that
        replaces another.
        """
        alone = type(self.partitioner) is RandomPartition and self.attributes is None
        return dataclasses.replace(
            super().capabilities,
            persons=self.partitioner.takes_groups,
            shards=("add_remove",) if alone else (),
            lasting_shards=True,
        )

    def learn(self, records: PrivateRecords) -> None:
        """Partition the private records and train the teachers; see :meth:`Labeler.learn`.

        Raises:
            ValueError: also if there are fewer records (or persons) than teachers.
            TeachersFailedError: if all teachers break.
        """
        trained = self._train(records)
        if bool((trained.failed | trained.empty).all()):
            kinds = ", ".join(sorted(trained.failures))
            raise TeachersFailedError(
                f"every teacher of {type(self.teachers).__name__} failed ({kinds}); try its settings on "
                "public data first"
            )
        self._trained = trained
        self._fits += 1

    def _train(self, records: PrivateRecords) -> TrainedTeachers:
        teachers, rank = self._own_teachers(records.processes), records.processes.rank
        features, labels, num_classes = records.table(), records.labels, records.num_classes
        shown = self.progress and not rank
        with progress_bars(shown) as show, silenced():
            parts = self.partitioner.assign(
                features,
                # Of attributes one column: partitioners that take groups look at the number of records alone.
                labels if labels.ndim == 1 else labels[:, 0],
                num_classes=max(2, num_classes),
                num_parts=teachers,
                noise=self.noise_source.stream("partition", self._fits, *(("rank", rank) if rank else ())),
                groups=records.owners,
            )

            def progress(fraction: float) -> None:
                # In percent of teachers and their steps, whose numbers are public.
                show(f"training {teachers} teachers", round(100 * fraction), 100)

            if records.device is not None and isinstance(self.teachers, StackedTeachers):
                self.teachers.follow(records.device)
            return self.teachers.train(features, labels, parts, num_classes, teachers, progress)

    def _own_teachers(self, processes: ProcessGroup) -> int:
        """Number of teachers that this process trains on its records."""
        rank, size = processes.rank, processes.size
        if self.num_teachers < size:
            raise InputError(
                f"num_teachers={self.num_teachers} must be at least the number of processes, {size}"
            )
        return len(range(rank, self.num_teachers, size))

    def aggregation(self, num_classes: int) -> Aggregation:
        """Mechanism of answers, whose charges state the condition of the partition; see the base class."""
        return dataclasses.replace(super().aggregation(num_classes), condition=self.partitioner.condition)

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Count the teachers' votes, screen and answer; see :meth:`Labeler.answer`."""
        votes = self.votes(queries)
        release = self.release(votes, run, max_answers)
        if self.attributes is None and not run.processes.rank:
            self._asked.append(votes)
            self._answered.append(release.answered)
        return release

    def release(self, votes: Tensor, run: PayingRun, max_answers: int | None = None) -> Release:
        """Screen and answer by counted votes, charging before each draw; see :meth:`votes`."""
        aggregation = self.aggregation(votes.shape[1])
        return aggregation.release(len(votes), lambda asked, _: votes[asked], run, max_answers)

    # ------------------------------------------------------------------ for the owner of the data alone

    @property
    def trained(self) -> TrainedTeachers:
        """**Private.** Trained teachers.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        if self._trained is None:
            raise RuntimeError("PATE needs the private table: call fit(records) first")
        return self._trained

    def votes(self, queries: Tensor) -> Tensor:
        """**Private.** Votes of the teachers of all shards, int64 ``(m, c)``; teachers that abstain are left out.

        Of attributes sums of clipped votes, float64 ``(m, a)``.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        return self.records.processes.sum(self._own_votes(queries.cpu()))

    def _own_votes(self, queries: Tensor) -> Tensor:
        trained, classes = self.trained, self.records.num_classes
        with silenced():
            if self.attributes is not None:
                sums = torch.zeros(len(queries), classes, dtype=torch.float64)
                for rows in torch.arange(len(queries)).split(256):
                    said = trained.predict(queries[rows]).clamp(min=0)
                    sums[rows] = clip_attributes(said, self.attributes.tau).sum(dim=1)
                return sums
            answers = trained.predict(queries)
        counts = torch.zeros(len(queries), classes, dtype=torch.int64)
        return counts.scatter_add_(1, answers.clamp_min(0), (answers >= 0).long())

    def asked_votes(self) -> tuple[Tensor, Tensor]:
        """**Private.** Votes ``(m, c)`` of every query so far, and which of them were answered."""
        if not self._asked:
            return torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
        return torch.cat(self._asked), torch.cat(self._answered)

    def data_dependent_report(self, delta: float) -> DataDependentReport:
        """**Private.** Data-dependent cost of the queries so far; see :class:`DataDependentReport`.

        It is computed from private votes, covers the queries that this object was asked (not those of an earlier
        process), and is logged nowhere. The number of answers is taken as it came out, as the papers do: it is an
        outcome for the table in hand, which is one more reason why the figure is no guarantee stated beforehand.

        Raises:
            ValueError: for a δ outside (0, 1), or teachers whose noisy counts are released or that answer with
                attributes: the bounds are of winners alone.
        """
        delta = check_open_unit("delta", delta)
        if self.attributes is not None:
            raise ValueError("attributes: data-dependent bounds are of winners among classes")
        if self.release_counts:
            raise ValueError(
                "release_counts=True: data-dependent bounds hold where the winner alone is released; set "
                "release_counts=False for this figure, or use the data-independent epsilon"
            )
        votes, answered = self.asked_votes()
        if not len(votes):
            return DataDependentReport(0.0, 0.0, 0.0, delta, 0, 0)
        charges = stated_plan(self, len(votes), int(answered.sum()), votes.shape[1])
        guarantee = weakest([Guarantee("conditional", (REASON,)), *(charge.guarantee for charge in charges)])
        counts = votes.numpy()
        orders = rdp.ORDERS
        curve = np.zeros(len(orders))
        aggregation, chosen = self.aggregation(votes.shape[1]), counts[answered.numpy()]
        noise, screening = aggregation.noise, aggregation.screening
        if screening is not None:
            curve += screening_rdp(screening, counts.max(axis=1).clip(screening.lowest), orders).sum(axis=0)
        both = curve + answers_rdp(noise, chosen, orders, "both").sum(axis=0)
        one = curve + answers_rdp(noise, chosen, orders, "one").sum(axis=0)
        independent = account(charges, delta=delta, adjacency=self.adjacencies[0], exact=False).epsilon
        return DataDependentReport(
            epsilon=min(independent, rdp.epsilon_improved(orders, both, delta)),
            epsilon_one_direction=min(independent, rdp.epsilon_improved(orders, one, delta)),
            epsilon_independent=independent,
            delta=delta,
            queries=len(votes),
            answers=len(chosen),
            guarantee=guarantee.level,
            reason=guarantee.reason,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickled state: settings alone, without teachers and votes."""
        kept = dict(self.__dict__)
        for name in ("_records", "_trained", "_asked", "_answered"):
            kept.pop(name, None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._trained = None
        self._asked: list[Tensor] = []
        self._answered: list[Tensor] = []


@dataclasses.dataclass(frozen=True)
class DataDependentReport:
    """Cost of the queries so far for the private table in hand. **Private**: computed from private votes.

    Attributes:
        epsilon: data-dependent RDP in both directions, improved conversion; conditional.
        epsilon_one_direction: as published (one direction), improved conversion.
        epsilon_independent: what the same screenings and answers cost for any table (the valid figure).
        delta: δ of all of them.
        queries: screenings, or questions where nothing is screened.
        answers: questions that were answered.
        guarantee: ``"conditional"``, or ``"none"`` where the noise came from a seed.
        reason: why; the condition of the partition, where there is one, included.
    """

    epsilon: float
    epsilon_one_direction: float
    epsilon_independent: float
    delta: float
    queries: int
    answers: int
    guarantee: str = "conditional"
    reason: str = REASON

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return dataclasses.asdict(self)
