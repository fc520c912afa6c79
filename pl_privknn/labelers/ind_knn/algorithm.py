"""Algorithm 3 of Ind-KNN: public parameters, kernels, and answers from one table that may change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import (
    InputError,
    check_choice,
    check_int,
    check_non_negative,
    check_open_unit,
    check_positive,
    compiled,
)
from pl_privknn._processes import ALONE, ProcessGroup
from pl_privknn.labelers.base import PayingRun
from pl_privknn.neighbors.hashing import HashIndex, SignProjections, chosen_products
from pl_privknn.neighbors.search import reaching
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.stated import GaussianDPStream
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.record_budgets import BudgetTable, Conversion, Ids, budget_for_epsilon

Floats = NDArray[np.float64]
Kernel = Literal["cosine", "rbf"]
KERNELS: tuple[Kernel, ...] = ("cosine", "rbf")

#: The paper prints ν = e^1.5, but its thresholds for the two kernels fit together only where ν² = e^1.5.
PAPER_BANDWIDTH = math.exp(0.75)
PAPER_MIN_COUNT = 30.0
#: Budgets are counted in quanta, of which one budget holds 2**49 to 2**50: sums in float64 are exact.
_QUANTA_BITS = 50
#: Covers the rounding errors of a cost, and of a contribution that was cut to what its record has left.
_COST_MARGIN = 1 + 1e-14
_CUT_MARGIN = 1 - 1e-12
#: Similarities are float32; records this near to the threshold are looked at in float64.
_SIMILARITY_SLACK = 1e-6


@dataclasses.dataclass(frozen=True)
class IndKNNParameters:
    """Public constants of one stream of answers, for drawing and accounting.

    Attributes:
        threshold: τ in (0, 1): records whose kernel value is at least this are neighbours.
        count_sigma: deviation of the noise on the number of neighbours.
        vote_sigma: deviation of the noise on the votes, in units of the root of that number.
        rho: B of every record; the stream is √(2B)-Gaussian DP.
        kernel: ``"cosine"``, or ``"rbf"`` for exp(−‖x − q‖² / ν²), both on unit vectors.
        bandwidth: ν of the RBF kernel.
        min_count: floor under the noisy number of neighbours.

    Raises:
        ValueError: for values out of range.
    """

    threshold: float
    count_sigma: float
    vote_sigma: float
    rho: float
    kernel: Kernel = "cosine"
    bandwidth: float = PAPER_BANDWIDTH
    min_count: float = PAPER_MIN_COUNT

    def __post_init__(self) -> None:
        check_open_unit("threshold", self.threshold)
        for name in ("count_sigma", "vote_sigma", "rho", "bandwidth", "min_count"):
            check_positive(name, getattr(self, name))
        check_choice("kernel", self.kernel, KERNELS)

    @classmethod
    def for_budget(
        cls,
        budget: Budget,
        *,
        threshold: float,
        noise: Gaussian,
        num_queries: int = 1000,
        count_noise: Gaussian | None = None,
        rho: float | None = None,
        conversion: Conversion = "gdp",
        **others: Any,
    ) -> IndKNNParameters:
        """Parameters from a budget and the user's settings.

        Args:
            budget: ε and δ of the whole stream.
            threshold: τ.
            noise: of the votes, its deviation in units of the root of the noisy number of neighbours.
            num_queries: T, how many queries the budgets should last for; sets σ1 = √(T / (6B)), so that a
                record near a third of them spends its budget on being counted. No limit.
            count_noise: of the number of neighbours, instead of that.
            rho: B of every record, instead of the budget's ε.
            conversion: how ε becomes B, see :func:`~pl_privknn.privacy.record_budgets.budget_for_epsilon`.
            **others: ``kernel``, ``bandwidth``, ``min_count``.

        Raises:
            ValueError: for values out of range, another adjacency than ``"add_remove"``, or neither a budget's ε nor
                ``rho``.
        """
        if budget.adjacency != "add_remove":
            raise ValueError(f"budget.adjacency={budget.adjacency!r}: Ind-KNN counts 'add_remove' alone")
        if rho is None:
            rho = budget_for_epsilon(
                check_positive("budget.epsilon", budget.epsilon), budget.delta, conversion
            )
        for name, given in (("noise", noise), ("count_noise", count_noise)):
            if not isinstance(given, Gaussian) and (given is not None or name == "noise"):
                raise ValueError(f"{name}={given!r} must be Gaussian(sigma)")
        sigma = math.sqrt(check_int("num_queries", num_queries) / (6 * check_positive("rho", rho)))
        count_sigma = sigma if count_noise is None else count_noise.sigma
        return cls(threshold=threshold, count_sigma=count_sigma, vote_sigma=noise.sigma, rho=rho, **others)

    @property
    def total(self) -> GaussianDPStream:
        """Cost of the whole stream, however long it is: one release with μ = √(2B)."""
        return GaussianDPStream(mu=math.sqrt(2 * self.rho))

    @property
    def count_cost(self) -> float:
        """Cost of the noisy number of neighbours for each of them: 1 / (2 σ1²)."""
        return 1 / (2 * self.count_sigma**2)

    @property
    def quantum(self) -> float:
        """Unit of budgets, a power of two, of which they are whole multiples."""
        return math.ldexp(1.0, math.frexp(self.rho)[1] - _QUANTA_BITS)

    def costs(self, amounts: Floats | float) -> Floats:
        """Whole quanta to pay for a cost, rounded up with a margin for rounding errors."""
        return np.ceil(np.asarray(amounts) / self.quantum * _COST_MARGIN)

    def similarity(self, threshold: float) -> float:
        """Cosine at which the kernel value is ``threshold``."""
        if self.kernel == "cosine":
            return threshold
        return 1 + self.bandwidth**2 * math.log(threshold) / 2

    def kernel_values(self, similarities: NDArray[np.float32]) -> Floats:
        """κ from cosines of unit vectors; for the RBF kernel ‖x − q‖² = 2 − 2 cos."""
        cosines = np.minimum(similarities.astype(np.float64), 1.0)
        if self.kernel == "cosine":
            return cosines
        return np.exp((cosines - 1) * (2 / self.bandwidth**2))

    def neighbors(
        self, similarities: NDArray[np.float32], threshold: float
    ) -> tuple[NDArray[np.intp], Floats]:
        """Places with κ >= ``threshold`` and their κ; each place is decided by its own similarity alone.

        Args:
            similarities: float32 cosines, shape ``(n,)``.
            threshold: this query's τ, public.
        """
        least = np.float32(self.similarity(threshold) - _SIMILARITY_SLACK)
        places = np.flatnonzero(similarities >= least)
        kappa = self.kernel_values(similarities[places])
        near = kappa >= threshold
        return places[near], kappa[near]


@dataclasses.dataclass(frozen=True)
class PublicDensity:
    """Threshold per query, from the density of *public* examples around it.

    A fixed threshold finds thousands of neighbours in dense regions and none in sparse ones. Here τ of a
    query is the kernel value of its j-th nearest public example, where j is to the number of public examples
    as ``neighbors`` is to ``private_records``, but never below the fixed threshold. The private records have no part
    in it, so a record's being a neighbour still depends on that record, the query and public data alone,
    which is all that the privacy proof needs.

    Attributes:
        neighbors: how many private neighbours a query should have, if private and public examples are alike.
            As their number is then known roughly, it also makes a good ``min_count``.
        private_records: about how many private records there are; a public constant, not taken from the data.

    Raises:
        ValueError: for numbers below 1, or more neighbours than records.
    """

    neighbors: int
    private_records: int

    def __post_init__(self) -> None:
        if check_int("neighbors", self.neighbors) > check_int("private_records", self.private_records):
            raise ValueError(
                f"neighbors={self.neighbors!r} must be at most private_records={self.private_records!r}"
            )

    def thresholds(self, parameters: IndKNNParameters, similarities: NDArray[np.float32]) -> Floats:
        """Threshold τ of each query.

        Args:
            parameters: kernel and least threshold.
            similarities: float32 cosines of queries and public examples, shape ``(m, r)``. Examples equal to
                the query don't count.

        Returns:
            Float64, shape ``(m,)``.
        """
        floor = np.full(len(similarities), parameters.threshold)
        others = np.where(similarities > 1 - _SIMILARITY_SLACK, -np.inf, similarities)
        if others.shape[1] == 0:
            return floor
        rank = min(max(1, round(self.neighbors / self.private_records * others.shape[1])), others.shape[1])
        nearest = -np.partition(-others, rank - 1, axis=1)[:, rank - 1]
        kappa = parameters.kernel_values(np.maximum(nearest, -1).astype(np.float32))
        return np.maximum(kappa, floor)


@dataclasses.dataclass(frozen=True)
class IndKNNSwitches:
    """Extensions of Algorithm 3 at no privacy cost: public thresholds, reuse of answers, hashing, abstention.

    Args:
        density: :class:`PublicDensity` for a threshold per query; None for the paper's fixed one.
        reuse: let earlier answers take part as public records, while the features stay the same.
        hashing: :class:`~pl_privknn.neighbors.hashing.SignProjections` to look only at records in the same
            bucket; None for all.
        abstain: hold back an answer where the two largest noisy votes differ by less than this many standard
            deviations of that difference's noise; 0 answers every query. Post-processing, free of cost.

    Raises:
        ValueError: if ``abstain`` is negative.
    """

    density: PublicDensity | None = None
    reuse: bool = False
    hashing: SignProjections | None = None
    abstain: float = 0.0

    def __post_init__(self) -> None:
        check_non_negative("abstain", self.abstain)


@dataclasses.dataclass(frozen=True)
class Votes:
    """Noisy results for one query, already charged.

    Attributes:
        count: noisy number of neighbours, at least the floor.
        noisy: noisy votes, float64, shape ``(c,)``.
    """

    count: float
    noisy: Floats


def ask(
    parameters: IndKNNParameters,
    active: int,
    votes: Callable[[float], Floats],
    public_votes: Floats,
    num_public: int,
    noise: NoiseSource,
    processes: ProcessGroup = ALONE,
) -> Votes:
    """One iteration of Algorithm 3. Without neighbours the count and the votes are noise alone.

    Args:
        parameters: public constants.
        active: number of private neighbours that can pay, **private**.
        votes: their votes ``(c,)`` at a noisy number of neighbours, **private**; they pay for it.
        public_votes: sum of κ over earlier answers near the query, by class, shape ``(c,)``.
        num_public: how many of them there are.
        noise: of the number, and then of the votes.
        processes: each calls this, at the count that global rank 0 draws; so are the votes.
    """
    near = torch.tensor([active + num_public], dtype=torch.float64)
    count = processes.from_first(
        lambda: max(float(Gaussian(parameters.count_sigma).add_noise(near, noise)), parameters.min_count)
    )
    exact, release = (
        torch.from_numpy(votes(count) + public_votes),
        Gaussian(parameters.vote_sigma * math.sqrt(count)),
    )
    return processes.from_first(lambda: Votes(count, release.add_noise(exact, noise).numpy()))


@compiled()
def collect(
    owners: NDArray[np.intp],
    kappa: Floats,
    labels: NDArray[np.int64],
    left: Floats,
    num_classes: int,
    count_cost: float,
    deviation: float,
    quantum: float,
) -> Floats:
    """Sum the votes of one query, ``(c,)``, and subtract the cost from the budget ``left`` of each voting owner.

    An owner votes with the sum of the κ of their neighbours, by class, scaled to an L2 norm of 1 at most (that of
    one record at the query's own place), and pays for this norm. Compiled; no sum is reordered.

    Args:
        owners: place in ``left`` of each neighbour's owner; an owner's neighbours follow one another.
        kappa: kernel values of the neighbours.
        labels: their classes.
        left: what owners have left, in quanta; changed in place.
        num_classes: c.
        count_cost: what being counted costs, in quanta; owners with less have no vote.
        deviation: of the noise on the votes.
        quantum: see :attr:`IndKNNParameters.quantum`.
    """
    votes, own = np.zeros(num_classes), np.zeros(num_classes)
    start = 0
    while start < len(owners):
        stop = start + 1
        while stop < len(owners) and owners[stop] == owners[start]:
            stop += 1
        owner = owners[start]
        if left[owner] >= count_cost:
            after_count, norm, scale = left[owner] - count_cost, kappa[start], 1.0
            if stop > start + 1:
                own[:] = 0.0
                for place in range(start, stop):
                    own[labels[place]] += kappa[place]
                norm = math.sqrt((own * own).sum())
                if norm > 1:
                    norm, scale = 1.0, 1 / norm
            share = norm / deviation
            # IndKNNParameters.costs, for one number.
            paid = np.ceil(share * share / 2 / quantum * _COST_MARGIN)
            if paid > after_count:
                # min(f, σ2 √(2 K z)): where the rest z is not enough, the contribution shrinks to what z pays for.
                paid = after_count
                affordable = deviation * math.sqrt(2 * quantum * after_count) * _CUT_MARGIN
                scale *= min(1.0, affordable / norm)
            left[owner] = after_count - paid
            for place in range(start, stop):
                votes[labels[place]] += kappa[place] * scale
        start = stop
    return votes


Rows = NDArray[np.intp]
#: Similarities of one block of queries, at 4 bytes each (128 MiB).
_BLOCK_ENTRIES = 32 * 1024 * 1024
_MOST_QUERIES_AT_ONCE = 512
_ROWS_AT_ONCE = 1024


def unit_rows(rows: Tensor, *, overwrite: bool = False) -> Tensor:
    """Scale each row to length 1, float32; a row of zeros is unchanged.

    No row's result depends on another row: no mean is taken out and no column is scaled. With ``overwrite`` the
    result takes the place of ``rows`` where it can.
    """
    in_place = overwrite and rows.dtype == torch.float32 and rows.is_cpu and rows.is_contiguous()
    result = rows.detach() if in_place else torch.empty(rows.shape, dtype=torch.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE].detach().cpu().double()
        norms = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        result[start : start + len(part)] = part / torch.where(norms > 0, norms, 1.0)
    return result


@dataclasses.dataclass(frozen=True)
class Answers:
    """Releases of a batch of queries; all are differentially private and paid for.

    Attributes:
        labels: int64, shape ``(m,)``; the winning class, -1 where the answer was held back as unsure.
        noisy: float64, shape ``(m, c)``; noisy votes.
        counts: float64, shape ``(m,)``; noisy numbers of neighbours, at least the floor.
    """

    labels: NDArray[np.int64]
    noisy: Floats
    counts: Floats


class IndKNNEngine:
    """Ind-KNN over one table and its budgets.

    Args:
        parameters: public constants.
        switches: what is added to Algorithm 3.
        num_classes: number of classes.
        dimension: of the features.
        budgets: of the records or persons, in quanta of ``parameters``.

    Attributes:
        vectors: of the private records, float32 unit vectors ``(n, dimension)``. **Private**, as the next three.
        labels: int64 ``(n,)``.
        ids: the records' numbers, int64 ``(n,)``.
        owners: the numbers under which they have their budgets, int64 ``(n,)``.
        answered: unit vectors and labels of earlier queries; public, so they take part without a budget.
        reference: unit vectors of public examples, for thresholds by density.
        device: where neighbours are searched for; on the CPU if None.
    """

    def __init__(
        self,
        parameters: IndKNNParameters,
        switches: IndKNNSwitches,
        num_classes: int,
        dimension: int,
        budgets: BudgetTable,
    ) -> None:
        self.parameters, self.switches = parameters, switches
        self.num_classes, self.budgets = num_classes, budgets
        self.vectors = self.reference = torch.empty(0, dimension)
        self.labels, self.ids, self.owners = (np.empty(0, np.int64) for _ in range(3))
        self.answered: tuple[Tensor, NDArray[np.int64]] = (self.vectors, self.labels)
        self.index = None if switches.hashing is None else HashIndex(switches.hashing, dimension)
        self.device: torch.device | None = None
        self._located: tuple[Ids | None, Rows] = (None, np.empty(0, np.intp))

    def add(self, ids: Ids, vectors: Tensor, labels: NDArray[np.int64], owners: Ids) -> None:
        """Add records, with the remaining budgets of their owners.

        Args:
            ids: their numbers, ``(n,)``; none is in the table.
            vectors: of :func:`unit_rows`, ``(n, dimension)``; the first ones are kept, not copied.
            labels: ``(n,)``.
            owners: the numbers under which they have budgets, ``(n,)``.
        """
        self.vectors = torch.cat([self.vectors, vectors]) if len(self.vectors) else vectors
        self.labels = np.concatenate([self.labels, labels])
        self.ids, self.owners = np.concatenate([self.ids, ids]), np.concatenate([self.owners, owners])
        self._located = (None, self._located[1])
        if self.index is not None:
            self.index.append(vectors)

    def remove(self, ids: Ids) -> None:
        """Remove and overwrite records; their spent budgets are kept."""
        kept = ~np.isin(self.ids, ids)
        self._located = (None, self._located[1])
        for name in ("vectors", "labels", "ids", "owners"):
            before = getattr(self, name)
            setattr(self, name, before[kept])
            before[:] = 0
        if self.index is not None:
            self.index.keep(kept)

    @property
    def _places(self) -> Rows:
        """Places of the records' owners in the budgets, which move when budgets are read anew."""
        numbers = self.budgets.numbers
        if self._located[0] is not numbers:
            self._located = (numbers, self.budgets.places(self.owners))
        return self._located[1]

    def remaining(self) -> Floats:
        """Remaining budget of each record, or of its person. **Private**."""
        return self.budgets.left[self._places] * self.parameters.quantum

    # ------------------------------------------------------------------ answering

    def answer(
        self,
        queries: Tensor,
        run: PayingRun,
    ) -> Answers:
        """Answer queries one after another, by Algorithm 3; their cost is on disk when this returns.

        Args:
            queries: float features, shape ``(m, dimension)``.
            run: receives the charge of the whole stream, unless its ledger has it; from its noise each query draws in
                turn. Each of its processes calls this for the same queries, with the engine of its shard.

        Raises:
            BudgetExceeded: as the ledger says; nothing was drawn.
            PrivateStoreError: if the budgets are not the latest of this run, or could not be written; nothing is let
                out.
        """
        vectors, size, known = unit_rows(queries), (len(queries), self.num_classes), self.answered
        processes, ledger = run.processes, run.ledger
        noise = run.noise  # of the batch on global rank 0; on others, which draw nothing, it is not used

        def pay() -> Floats:
            nonlocal noise
            noise = self.budgets.pay_for(self.parameters.total, ledger, run.noise)
            return self._thresholds(vectors)

        thresholds = processes.from_first(pay)
        answers = Answers(np.full(size[0], -1, np.int64), np.empty(size), np.empty(size[0]))
        around = torch.cat([known[0], vectors]) if self.switches.reuse else known[0]
        self.begin(vectors, thresholds)

        def asked(count: float) -> Floats:
            return processes.sum(torch.from_numpy(self.votes(count))).numpy()

        for query, vector in enumerate(vectors):
            votes, number = self._public_votes(
                around, known[1], answers.labels[:query], vector, thresholds[query]
            )
            active = int(processes.sum(torch.tensor(self.turn())))
            released = ask(self.parameters, active, asked, votes, number, noise, processes)
            answers.noisy[query], answers.counts[query] = released.noisy, released.count
            answers.labels[query] = self._decide(released.noisy, released.count)
        # Global rank 0 writes first: it knows of any query that another shard has paid for.
        mark = processes.from_first(lambda: self.pay(self.budgets.next_mark()))
        if processes.rank:
            self.pay(mark)
        processes.sum(torch.zeros(1))  # all have written
        if not processes.rank:
            self.budgets.vouch(ledger, mark)
        if self.switches.reuse:
            kept = answers.labels >= 0
            self.answered = (
                torch.cat([known[0], vectors[torch.from_numpy(kept)]]),
                np.concatenate([known[1], answers.labels[kept]]),
            )
        return answers

    def _public_votes(
        self, around: Tensor, known: Ids, answered: Ids, vector: Tensor, threshold: float
    ) -> tuple[Floats, int]:
        """Votes of earlier answers, of former batches and of this one."""
        labels = np.concatenate([known, answered]) if self.switches.reuse else known
        if not len(labels):
            return np.zeros(self.num_classes), 0
        near, kappa = self.parameters.neighbors((around[: len(labels)] @ vector).numpy(), threshold)
        said = labels[near] >= 0
        votes = np.bincount(labels[near][said], kappa[said], self.num_classes).astype(np.float64)
        return votes, int(said.sum())

    # A record's part in a query depends on the query, on that record, on what its owner has left and on the noisy
    # number of neighbours, which is released: on nothing that other records hold. So records may lie in shards, and
    # what travels are sums.

    def begin(self, vectors: Tensor, thresholds: Floats) -> None:
        """Start a batch of queries that are answered one after another."""
        self._coming = self.neighborhoods(vectors, thresholds)
        self._paying = (np.empty(0, np.intp), np.empty(0))

    def turn(self) -> int:
        """**Private.** Go to the next query; returns the number of its neighbours' owners that can pay."""
        self._settle()
        self._near, self._kappa = next(self._coming)
        owners, _ = self._owners_of(self._near)
        return int(
            np.count_nonzero(self.budgets.left[owners] >= self.parameters.costs(self.parameters.count_cost))
        )

    def pay(self, mark: str) -> str:
        """Write the cost of all queries since :meth:`begin`; returns the mark."""
        self._settle()
        self.budgets.spend(mark)
        return mark

    def votes(self, count: float) -> Floats:
        """**Private.** Votes of the present query, ``(c,)``, at a noisy number of neighbours.

        What they cost is put aside until the next query: they may be asked for again.
        """
        paying, owners = self._owners_of(self._near)
        near, kappa, left = self._near, self._kappa, self.budgets.left[paying]
        if len(paying) < len(near):
            order = np.argsort(owners, kind="stable")
            owners, near, kappa = owners[order], near[order], kappa[order]
        parameters = self.parameters
        votes = collect(
            owners,
            kappa,
            self.labels[near],
            left,
            self.num_classes,
            float(parameters.costs(parameters.count_cost)),
            parameters.vote_sigma * float(np.sqrt(count)),
            parameters.quantum,
        )
        self._paying = (paying, left)
        return votes

    def _owners_of(self, near: Rows) -> tuple[Rows, Rows]:
        """Positions of some records' owners in the budgets, each once, and each record's owner among them."""
        if self.budgets.unit == "record":
            return self._places[near], np.arange(len(near))
        owners, which = np.unique(self._places[near], return_inverse=True)
        return owners, which

    def _settle(self) -> None:
        paying, left = self._paying
        self.budgets.left[paying] = left

    def _decide(self, noisy: Floats, count: float) -> int:
        """The class with the most noisy votes, or -1; uses released values and public constants only."""
        winner = int(noisy.argmax())
        if self.switches.abstain:
            margin = noisy[winner] - np.delete(noisy, winner).max()
            if margin < self.switches.abstain * self.parameters.vote_sigma * np.sqrt(2 * count):
                return -1
        return winner

    # ------------------------------------------------------------------ searching

    def _thresholds(self, vectors: Tensor) -> Floats:
        if self.switches.density is None:
            return np.full(len(vectors), self.parameters.threshold)
        step = max(1, _BLOCK_ENTRIES // max(1, len(self.reference)))
        parts = [
            self.switches.density.thresholds(self.parameters, (part @ self.reference.T).numpy())
            for part in vectors.split(step)
        ]
        return np.concatenate(parts) if parts else np.empty(0)

    def neighborhoods(self, vectors: Tensor, thresholds: Floats) -> Iterator[tuple[Rows, Floats]]:
        """Private neighbours of each query and their κ, independent of budgets; one product per block of queries."""
        step = min(_MOST_QUERIES_AT_ONCE, max(1, _BLOCK_ENTRIES // max(1, len(self.vectors))))
        elsewhere = None if self.device is None or self.device.type == "cpu" else self.device
        for start in range(0, len(vectors), step):
            some, bounds = vectors[start : start + step], thresholds[start : start + step]
            if self.index is None and elsewhere is None:
                for similarities, threshold in zip((some @ self.vectors.T).numpy(), bounds, strict=True):
                    yield self.parameters.neighbors(similarities, float(threshold))
                continue
            if self.index is not None:
                found = self.index.candidates(some)
            else:
                least = np.array([self.parameters.similarity(float(threshold)) for threshold in bounds])
                found = reaching(some, self.vectors, least, elsewhere or torch.device("cpu"))
            for vector, threshold, candidates in zip(some, bounds, found, strict=True):
                similarities = chosen_products(self.vectors.numpy(), candidates, vector.numpy())
                near, kappa = self.parameters.neighbors(similarities, float(threshold))
                yield candidates[near], kappa


def check_queries(queries: Tensor, dimension: int) -> None:
    """Raise ``ValueError`` unless ``queries`` are finite vectors of the table's dimension."""
    if queries.ndim != 2 or queries.shape[1] != dimension or not queries.is_floating_point():
        raise InputError(
            f"queries: shape {tuple(queries.shape)}, {queries.dtype}; expected float of shape (m, {dimension}), "
            "from the same extractor as the private features"
        )
    if not bool(torch.isfinite(queries).all()):
        raise InputError("queries: some are NaN or infinite; leave those examples out")
