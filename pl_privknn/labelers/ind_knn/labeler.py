"""Ind-KNN as a teacher of students: kernel votes, with an individual budget for every private record."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_switch
from pl_privknn._processes import ProcessGroup
from pl_privknn.config import as_group
from pl_privknn.labelers.base import (
    Capabilities,
    JoinsRuns,
    PayingRun,
    PrivateRecords,
    Release,
    SpendsBudget,
    nonnegative_shares,
)
from pl_privknn.labelers.ind_knn.algorithm import (
    PAPER_BANDWIDTH,
    PAPER_MIN_COUNT,
    IndKNNEngine,
    IndKNNParameters,
    IndKNNSwitches,
    Kernel,
    check_queries,
    unit_rows,
)
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms.base import Charge
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_state import FILE_NAME, PrivateStoreError
from pl_privknn.privacy.record_budgets import (
    BudgetTable,
    Conversion,
    check_unpaid,
    read_ids,
)


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Similarity that a record needs to vote, and the weight of its vote.

    Args:
        kernel: ``"cosine"``, or ``"rbf"`` for exp(−‖x − q‖² / ν²).
        bandwidth: ν of the RBF kernel.
        min_count: floor under the noisy number of neighbours; 30 as in the paper, or with ``density`` the number
            of neighbours that it aims at, unless given.
    """

    kernel: Kernel = "cosine"
    bandwidth: float = PAPER_BANDWIDTH
    min_count: float | None = None


@dataclasses.dataclass(frozen=True)
class RecordBudgets:
    """Budget of each record in zero-concentrated DP, and the noise of the counts that it pays for.

    Args:
        rho: B of every record, in zero-concentrated DP, instead of the budget's ε.
        count_noise: ``Gaussian`` noise on the number of neighbours, instead of a deviation of √(T / (6B)).
        conversion: how ε becomes B: ``"gdp"``, the tightest, or for comparison with the paper ``"rdp"`` or
            ``"rdp_classic"``.
    """

    rho: float | None = None
    count_noise: Gaussian | None = None
    conversion: Conversion = "gdp"


@dataclasses.dataclass(frozen=True)
class RecordIdentities:
    """Numbers that identify the private records, and the folder that keeps their spent budgets.

    Args:
        ids: lasting whole numbers of the private records, in the data module's order, or the path of a
            ``.npy`` file with them; by default the data module's, if it has any, or else digests. A record must
            always come under the same number, for a second number would give it a second budget.
        state_dir: folder of the budgets, **private**, for this labeler and this data set alone; None keeps them
            next to the run's folder, and in memory where there is none.
    """

    ids: Any = dataclasses.field(default=None, repr=False)  # numbers of people may be private
    state_dir: str | Path | None = None


class IndKNN(JoinsRuns, SpendsBudget):
    """Teacher by kernel votes, with a privacy budget for every record (Ind-KNN: Zhu, Zhao, Guo and Wang 2023).

    Private records whose kernel value with the query reaches a public threshold vote with that value. Their
    number is released with noise of deviation σ1, the votes with noise of deviation σ2 √(noisy number), and
    the class with most noisy votes is the answer. Each record pays for its own part in both from a budget of
    its own, and takes no part once that is spent. So the privacy of the whole stream is fixed beforehand,
    as one Gaussian release with μ = √(2B), and **doesn't depend on the number of queries**; what declines
    with their number is accuracy.

    *In the ledger* the stream is one entry, charged when the first query is asked. *After a crash* the budgets
    must not start afresh under the same entry, so they are on disk before any answer leaves: in ``state_dir``, or
    within ``trainer.fit`` in a private folder next to the run's, ``<run_dir>.private``. A resumed run continues them
    at no further charge, with noise from a source of the same kind. An older copy of that folder, a second one, or
    none is refused. In other uses without a
    ``state_dir`` they live in memory, and a new process starts a new stream, for which it charges a whole entry
    more: honest, and more than a budget for one stream allows.

    *Budgets belong to records*, whatever their position in the table: by the owner's numbers (``ids``), or else by
    keyed digests of what the records hold. Within ``trainer.fit`` that is a record's image and label, so that
    rounds may differ in their features; in other uses its features and label. Once a query was answered, records
    with unknown digests are refused, for under other preprocessing every record would look new and get a second
    budget; with ``ids``, numbers that are unknown are new records. Equal records have budgets of their own and are
    either all there or none of them, unless ``ids`` distinguish them.

    *Persons.* Where the unit of privacy is a person, budgets belong to persons, by the data module's numbers of them,
    which must last as ``ids`` must. A person counts as one neighbour, votes with the sum of the κ of all their
    neighbours, by class, scaled to the norm of one record's vote at most, and pays for the norm of that.

    *In shards* each process keeps the budgets of its records, in a separate folder within the first one's, and
    its records neither come nor go once a query was answered; ``ids`` are numbers of all records.

    Features are scaled to unit length, each by itself; nothing is centred by private data.

    Args:
        threshold: τ in (0, 1): records with κ >= τ are neighbours. With ``density``, the least threshold.
        noise: ``Gaussian`` noise on the votes, σ2 in units of the root of the noisy number of neighbours.
        budget: ε and δ of the whole stream; by default the budget of the run.
        num_queries: T, how many queries the budgets should last for; sets σ1 = √(T / (6B)). No limit.
        similarity: the kernel, and the floor under the noisy number of neighbours.
        record_budgets: how ε becomes a budget of each record, or that budget itself.
        switches: thresholds from public density, answers as public records, hashing, held-back answers. Public
            examples for ``density`` are all of those in the data module (``records.public``), or else the queries
            asked so far.
        identities: which record is which, and where their budgets are kept.
        soft: release class probabilities too: the non-negative part of the noisy votes, normalised.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        release_counts: release the noisy votes of answered queries, over √K so that their noise is alike, to be
            smoothed over neighbouring queries; they are paid for anyway.

    Raises:
        ValueError: for values out of range, or both a budget's ε and ``record_budgets.rho``.

    Example:
        >>> from pl_privknn.labelers import IndKNN
        >>> from pl_privknn.privacy import Budget, Gaussian, epsilon_for_delta
        >>> teacher = IndKNN(threshold=0.6, noise=Gaussian(sigma=0.5), budget=Budget(epsilon=1.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        1.0
    """

    free_parameters = ("record_budgets.rho",)
    _parameters: IndKNNParameters | None = None
    _asked_refer = False  # whether density is that of the queries asked so far
    _budgets: BudgetTable | None = None
    _run_folder: Path | None = None
    _engine: IndKNNEngine | None = None

    def __init__(
        self,
        threshold: float,
        noise: Gaussian,
        budget: Budget | None = None,
        num_queries: int = 1000,
        similarity: Similarity = Similarity(),
        record_budgets: RecordBudgets = RecordBudgets(),
        switches: IndKNNSwitches = IndKNNSwitches(),
        identities: RecordIdentities = RecordIdentities(),
        soft: bool = False,
        noise_source: NoiseSource | None = None,
        release_counts: bool = False,
    ) -> None:
        record_budgets = as_group("record_budgets", record_budgets, RecordBudgets())
        super().__init__(budget, record_budgets.rho, noise_source)
        similarity = as_group("similarity", similarity, Similarity())
        switches = as_group("switches", switches, IndKNNSwitches())
        identities = as_group("identities", identities, RecordIdentities())
        min_count = similarity.min_count
        if min_count is None:
            min_count = PAPER_MIN_COUNT if switches.density is None else float(switches.density.neighbors)
        self._settings: dict[str, Any] = {
            "threshold": threshold,
            "noise": noise,
            "num_queries": num_queries,
            "kernel": similarity.kernel,
            "bandwidth": similarity.bandwidth,
            "count_noise": record_budgets.count_noise,
            "conversion": record_budgets.conversion,
            "min_count": min_count,
        }
        self._rho = record_budgets.rho
        self.switches = switches
        self.soft = check_switch("soft", soft)
        self.release_counts = check_switch("release_counts", release_counts)
        self.ids, folder = identities.ids, identities.state_dir
        self.state_dir = None if folder is None else Path(folder)
        self._begin()

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: persons, with one budget each; shards, since a query needs only sums over records."""
        return Capabilities(persons=True, shards=("add_remove",))

    @property
    def parameters(self) -> IndKNNParameters:
        """Public constants of the stream.

        Raises:
            ValueError: before a budget has set them.
        """
        return self.set_by_budget(self._parameters)

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set the budget of every record for the whole stream, independent of the number of rounds; see the base."""
        self._parameters = IndKNNParameters.for_budget(budget, rho=self._rho, **self._settings)

    # ------------------------------------------------------------------ the labeler's contract

    def learn(self, records: PrivateRecords) -> None:
        """Take the private records; see :meth:`Labeler.learn`.

        Budgets belong to records, not to features: they go on when other features of the same records come, where
        ``ids`` or the data module identify records.

        Raises:
            ValueError: also where it is not certain that every record keeps its own budget.
            PrivateStoreError: if the budgets' folder is damaged, incomplete, an older or second copy, or in use.
        """
        shard, labels = records.shard, records.labels
        if shard is not None and self.state_dir is not None and self._run_folder is None:
            raise RuntimeError("state_dir: budgets of shards are opened together; call join_run first")
        budgets = self._open_budgets(records.processes)
        digests = records.digests(budgets.key.digests)
        features = records.table(fresh=True)
        rows, total = np.arange(len(labels)), len(labels)
        if shard is not None:
            rows, total = shard.index(torch.from_numpy(rows)).numpy(), shard.total
        given = records.ids if self.ids is None else read_ids(self.ids, total)[rows]
        if records.owners is None:
            ids = budgets.recognise(
                None if given is None else read_ids(given, len(labels)),
                digests,
                (features, labels),
                is_shard=shard is not None,
            )
            owned_by = ids
        else:
            ids, owned_by = rows, records.owners.numpy()
            persons, here = np.unique(owned_by), shard is not None
            budgets.recognise(persons, None, (features, labels), is_shard=here, unit="person")
        engine = IndKNNEngine(self.parameters, self.switches, records.num_classes, features.shape[1], budgets)
        engine.device = records.device
        engine.add(ids, unit_rows(features, overwrite=True), labels.cpu().numpy(), owned_by)
        if (then := self._engine) is not None and len(ids) and torch.equal(then.vectors, engine.vectors):
            engine.answered, engine.reference = then.answered, then.reference
        public = None if self.switches.density is None else records.public
        if public is not None:
            check_queries(public, features.shape[1])
            engine.reference = unit_rows(public)
        self._asked_refer = public is None
        self._engine = engine

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """Plan of one charge for the whole stream, independent of the arguments; see :meth:`Labeler.plan`."""
        return [Charge(self.parameters.total, 1)]

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Answer the first ``max_answers`` queries one after another; see :meth:`Labeler.answer`.

        Raises:
            ValueError: for queries of another dimension, or not finite, or noise from a source of another kind than
                that of earlier answers.
            PrivateStoreError: if the budgets could not be written, or are not those from which this run has answered;
                nothing is returned.
        """
        engine = self._fitted()
        check_queries(queries, engine.vectors.shape[1])
        labels = torch.full((len(queries),), -1, dtype=torch.int64)
        soft = torch.full((len(queries), engine.num_classes), 1 / engine.num_classes) if self.soft else None
        scores = torch.full((len(queries), engine.num_classes), torch.nan, dtype=torch.float64)
        asked = queries[:max_answers]
        if len(asked):
            if self.switches.density is not None and self._asked_refer:
                engine.reference = torch.cat([engine.reference, unit_rows(asked)])
            answers = engine.answer(asked, run)
            labels[: len(asked)] = torch.from_numpy(answers.labels)
            # Votes for K neighbours have noise of deviation vote_sigma·√K; K was released, so all get one scale.
            scores[: len(asked)] = torch.from_numpy(answers.noisy / np.sqrt(answers.counts)[:, None])
            if soft is not None:
                soft[: len(asked)] = nonnegative_shares(torch.from_numpy(answers.noisy)).float()
        if not self.release_counts:
            return Release(labels, soft)
        return Release(labels, soft, scores, self.parameters.vote_sigma)

    def remaining(self) -> NDArray[np.float64]:
        """Remaining budget of each private record of this process. **Private**: for the owner of the data alone."""
        return self._fitted().remaining()

    # ------------------------------------------------------------------ runs and shards

    def join_run(self, folder: Path, run: PayingRun) -> None:
        """Keep the budgets in ``folder``, unless there is a ``state_dir``; see :meth:`JoinsRuns.join_run`.

        In shards every process keeps those of its records, in a separate folder.

        Raises:
            PrivateStoreError: if the budgets' folder is damaged, incomplete, an older or second copy, in use, or not
                the one from which the run has answered.
        """
        place = (self.state_dir or folder).resolve()
        processes = run.processes
        joined = processes.from_first(lambda: self._join_first(place, run))
        if processes.rank:
            self._join(place, processes, *joined)
        processes.sum(torch.zeros(1))  # nothing is paid before all have joined

    def _join_first(self, place: Path, run: PayingRun) -> tuple[str, bool, str | None]:
        """Open the budgets of the first shard; returns their stream, whether it began, and its last mark."""
        self._move_to(place)
        if not (place / FILE_NAME).exists():
            check_unpaid(place, self.parameters.total, run.ledger)
        budgets = self._open_budgets(run.processes)
        budgets.check(self.parameters.total, run.ledger)
        return budgets.name, budgets.begun, budgets.noted(run.ledger)

    def leave_run(self) -> None:
        """Close the budgets; see :meth:`JoinsRuns.leave_run`."""
        if self._budgets is not None:
            self._budgets.close()
        self._budgets = self._run_folder = None

    def close(self) -> None:
        """Delete the table from memory and release ``state_dir``."""
        self.leave_run()
        self._engine = None

    def _join(
        self, folder: Path, processes: ProcessGroup, stream: str, begun: bool, noted: str | None
    ) -> None:
        """Open the budgets of this shard, after checking that they match the budgets of the first shard."""
        own = folder / f"shard-{processes.rank:05d}"
        self._move_to(own)
        if begun and not (own / FILE_NAME).exists():
            raise PrivateStoreError(
                f"{own}: the budgets of this shard are missing; put them back, or start a new run or state_dir, "
                "which charges a new stream"
            )
        budgets = self._open_budgets(processes, stream)
        budgets.check_mark(noted, "this run")
        budgets.begun_elsewhere = begun

    def _move_to(self, place: Path) -> None:
        """Keep the budgets in a folder from now on."""
        if self._budgets is None or self._budgets.path != place / FILE_NAME:
            self.close()
            self._run_folder = place

    def _open_budgets(self, processes: ProcessGroup, stream: str | None = None) -> BudgetTable:
        if self._budgets is None:
            folder = self._run_folder or self.state_dir
            facts = {"shard": f"{processes.rank} of {processes.size}"}
            if stream is not None:
                facts["stream"] = stream
            path = None if folder is None else folder / FILE_NAME
            self._budgets = BudgetTable(path, self.parameters.rho, self.parameters.quantum, **facts)
        return self._budgets

    def _fitted(self) -> IndKNNEngine:
        if self._engine is None:
            raise RuntimeError("IndKNN needs the private table: call fit(records) first")
        return self._engine
