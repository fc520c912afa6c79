"""Private-kNN: noisy votes of the nearest private records in a Poisson sample, of classes, attributes and numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import (
    check_choice,
    check_finite,
    check_int,
    check_open_unit,
    check_positive,
    check_rate,
    shape_text,
)
from pl_privknn.labelers.attributes import Attributes, clip_attributes, sum_noise
from pl_privknn.labelers.base import ChargesLedger, ShardedLabeler, UsesPublicFeatures, check_features
from pl_privknn.labelers.voting import (
    SWAPPED_L1,
    SWAPPED_L2,
    Aggregation,
    Neighbors,
    NeighborVoting,
    Screening,
    vote_noise,
)
from pl_privknn.neighbors import (
    Coins,
    PoissonNeighbors,
    PoissonSums,
    RadiusNeighbors,
    ShardedNeighbors,
    top_k,
)
from pl_privknn.privacy.ledger import charge_and_draw
from pl_privknn.privacy.mechanisms import Charge, ExponentialArgmax, Gaussian, Mechanism, VoteNoise
from pl_privknn.privacy.noise import NoiseSource, default_noise

__all__ = ["PrivateKNN", "PrivateRadius", "PrivateRegression", "Screening"]

#: Of public examples, those among which a radius is looked for.
_EXAMPLES = 2000

STATISTICS = ("mean", "median")


class PrivateKNN(NeighborVoting, ShardedLabeler):
    """Private-kNN (Zhu, Yu, Chandraker and Wang, CVPR 2020).

    For each query the k nearest records of a fresh Poisson sample vote. Screening on one sample decides
    whether the query is answered at all; aggregation on another sample releases the arg-max of the noisy
    votes. The noise is scaled to an L2 sensitivity of √2, not 1: a record that enters the neighbourhood
    pushes another one out, so two counts change.

    Args:
        k: number of neighbours that vote.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`Screening`, or None to answer every query.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
            ``Gaussian(sigma)`` as in the paper; ``Laplace`` or ``ExponentialArgmax``
            (arg-max released by Gumbel noise) where they suit better.
        release_counts: let out all noisy counts of an answered query, at the price of the winner alone, so that
            answers can be smoothed over neighbouring queries. For noise that is added to every count.
        attributes: labels are attributes and not classes: each neighbour adds its clipped attribute vector, every
            query is answered, and one record moves the sums as in
            :func:`~pl_privknn.labelers.attributes.swapped_vote_norms`. The default noise is then σ = 50.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for parameters out of range, or a threshold that k votes can't reach; at :meth:`fit`, without
            sampling, for a table of fewer than ``k`` records, or of ``k`` where there is a screening.

    Example:
        >>> from pl_privknn.labelers import PrivateKNN
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn import Gaussian
        >>> teacher = PrivateKNN(k=300, sampling_rate=1.0, noise=Gaussian(sigma=40.0))
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.926
    """

    most_votes_name = "k"

    def __init__(
        self,
        k: int = 300,
        sampling_rate: float = 0.15,
        screening: Screening | None = None,
        noise: Mechanism | None = None,
        noise_source: NoiseSource | None = None,
        release_counts: bool = False,
        attributes: Attributes | None = None,
    ) -> None:
        self.k = check_int("k", k)
        super().__init__(
            self.k,
            SWAPPED_L1,
            SWAPPED_L2,
            sampling_rate,
            screening,
            noise if noise is not None else Gaussian(sigma=25.0 if attributes is None else 50.0),
            noise_source,
            release_counts,
            attributes,
        )

    @property
    def takes_shards(self) -> bool:
        """Whether classes are voted for: each process searches its own records."""
        return self.attributes is None

    def run_command(self, command: Any) -> None:
        """See :meth:`ShardedLabeler.run_command`."""
        if not isinstance(self._neighbors, ShardedNeighbors):
            raise RuntimeError("PrivateKNN.run_command needs a shard: call fit(features, labels) first")
        self._neighbors.run_command(command)

    def note_row(self, row: int) -> None:
        """Shards learn of the row, so that none tosses the coins of another release; see the base."""
        if isinstance(self._neighbors, ShardedNeighbors):
            self._neighbors.release = row

    def _own_coins(self, release: int) -> Coins:
        # The system's generator is each process's own; seeded streams must differ between shards.
        assert self.shard is not None
        return self.noise_source.stream("shard", self.shard.group.rank, release).bernoulli

    def _units(self, own: int) -> int:
        if self.shard is None:
            return own
        return self.shard.total if self._owners is None else int(self.shard.group.sum(torch.tensor([own]))[0])

    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        # Its guarantee is for exactly k votes, with and without any one record.
        if aggregation.screening is not None:
            aggregation.screening.check_table_size(num_records)
        if num_records < self.k and self.sampling_rate == 1.0:
            raise ValueError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )

    def _find(self, features: Tensor, labels: Tensor, num_classes: int) -> Neighbors:
        if self.attributes is not None:
            values = clip_attributes(labels, self.attributes.tau)
            return PoissonSums(
                features, values, self.k, self.sampling_rate, owners=self._owners, device=self.device
            )
        table = (features, labels, num_classes, self.k, self.sampling_rate)
        if self.shard is not None:
            return ShardedNeighbors(
                *table, self.shard, self._own_coins, owners=self._owners, device=self.device
            )
        return PoissonNeighbors(*table, owners=self._owners, device=self.device)


class PrivateRadius(NeighborVoting, UsesPublicFeatures):
    """Votes of the records within a public radius of each query.

    Beyond the Private-kNN paper. A record more or less changes one count by one and pushes no other record out: the
    L2 sensitivity is 1 where that of the k nearest is √2, and an arg-max by Gumbel noise costs half as much at the
    same noise. The radius comes from public data alone; a query in a thin region has few votes or none.

    Args:
        radius: Euclidean distance in the units of the features; None takes ``public_share``.
        public_share: the radius within which half of the public examples have at least this share of the other
            public examples; found anew in each round from that round's features.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in a release.
        screening: :class:`~pl_privknn.labelers.voting.Screening`, or None to answer every query.
        max_votes: a count above this is cut to it; needed for ``screening``, whose price covers all counts up to it.
        noise: the aggregation mechanism with its noise scale; sensitivity and sampling rate are filled in.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.
        release_counts: let out all noisy counts of an answered query; not with the default ``noise``.

    Raises:
        ValueError: for parameters out of range, both or none of ``radius`` and ``public_share``, or a threshold
            above ``max_votes``.

    Example:
        >>> from pl_privknn.labelers import PrivateKNN, PrivateRadius
        >>> from pl_privknn.privacy import ExponentialArgmax, epsilon_for_delta
        >>> noise = ExponentialArgmax(20.0)
        >>> teachers = PrivateRadius(radius=1.0, sampling_rate=1.0, noise=noise), PrivateKNN(300, 1.0, noise=noise)
        >>> [round(epsilon_for_delta(teacher.plan(50, 50, 10), 1e-5), 3) for teacher in teachers]
        [0.691, 1.468]
    """

    def __init__(
        self,
        radius: float | None = None,
        public_share: float | None = 0.01,
        sampling_rate: float = 0.15,
        screening: Screening | None = None,
        max_votes: int | None = None,
        noise: Mechanism | None = None,
        noise_source: NoiseSource | None = None,
        release_counts: bool = False,
    ) -> None:
        if radius is None and public_share is None:
            raise ValueError("radius=None, public_share=None: give one of them")
        self.radius = None if radius is None else check_positive("radius", radius)
        self.public_share = None if public_share is None else check_open_unit("public_share", public_share)
        if max_votes is not None:
            check_int("max_votes", max_votes)
        noise = noise if noise is not None else ExponentialArgmax(20.0)
        super().__init__(max_votes, 1.0, 1.0, sampling_rate, screening, noise, noise_source, release_counts)
        self._radius = self.radius

    @property
    def uses_public_features(self) -> bool:
        """Whether the radius is found among them."""
        return self.radius is None

    def fit_public(self, features: Tensor) -> None:
        """Find the radius, where none is given; see :meth:`UsesPublicFeatures.fit_public`.

        Raises:
            ValueError: where the public examples are too few or too alike to tell a radius.
        """
        if self.radius is not None or self.public_share is None:
            return
        examples = features[:: max(1, len(features) // _EXAMPLES)]
        others = max(1, round(self.public_share * (len(features) - 1)))
        distances, _ = top_k(examples, features, others + 1, device=self.device)  # the nearest is itself
        found = float(distances[:, -1].median()) if len(features) > 1 else 0.0
        if not found > 0:
            raise ValueError(
                f"public_share={self.public_share}: the {len(features)} public examples tell no radius above 0; give "
                "more or more different ones, or a radius"
            )
        self._radius = found

    def _check_size(self, num_records: int, aggregation: Aggregation) -> None:
        """Any size will do: a query may have no votes."""

    def _find(self, features: Tensor, labels: Tensor, num_classes: int) -> Neighbors:
        if self._radius is None:
            raise RuntimeError(
                "PrivateRadius without a radius needs fit_public(features of the public examples) first"
            )
        return RadiusNeighbors(
            features,
            labels,
            num_classes,
            self._radius,
            self.sampling_rate,
            most_votes=self.most_votes,
            owners=self._owners,
            device=self.device,
        )


class PrivateRegression:
    """Answers queries by the clipped mean, or by a median, of the targets of the k nearest records of a sample.

    The supplement of Private-kNN (Zhu et al., CVPR 2020, section C) suggests both and tries neither. Targets are
    clipped to public bounds [low, high]. As for votes, a record that enters the k nearest pushes another one
    out.

    **Mean.** Each neighbour adds its clipped target less the middle of the bounds, a number in [−R/2, R/2] with
    R = high − low; the sum gets noise and is divided by the public k. One number leaves and another one enters,
    so the sum moves by at most R: that is the L1 and the L2 sensitivity. (A sample of fewer than k records draws
    the answer towards the middle; dividing by its true size would cost.)

    **Median.** A candidate c of a public grid has the score −|#(targets below c) − #(targets above c)|/2 and is
    chosen with probability ∝ e^{score/b}. If a target leaves one side of c and another one joins the other side,
    the difference of the counts moves by 2 and the score by 1; otherwise by less. So every score moves by at
    most 1. That is all that the accounting of
    :class:`~pl_privknn.privacy.mechanisms.ExponentialArgmax` with swapped votes needs: with Z the ratio of the
    normalisers, each outcome has a likelihood ratio e^{(move of its score)/b}/Z in [e^{−1/b}/Z, e^{1/b}/Z], with
    mean 1. For a convex W the mean of W(ratio) is largest where ratios lie at both ends of their interval alone
    (a chord lies above W), which is the two-outcome family that is charged; likewise for the sampled ratio
    1 − γ + γ·ratio, which is linear in it (Dong, Durfee and Rogers 2020 call this bounded range).

    Args:
        low: public lower bound of targets.
        high: public upper bound.
        k: number of neighbours.
        sampling_rate: γ in (0, 1], the probability with which each record takes part in an answer.
        statistic: ``"mean"`` or ``"median"``; the median suffers less from wide bounds.
        noise: for the mean ``Gaussian(sigma)`` or ``Laplace(scale)`` in the units of the **sum** of k targets
            (the answer's noise is 1/k of it), by default σ = 0.1·k·R; for the median
            ``ExponentialArgmax(scale)`` in neighbours, by default 0.1·k. Sensitivity and rate are filled in.
        candidates: points of the median's grid, ends included.
        noise_source: where protective randomness comes from; the operating system's generator by default.

    Raises:
        ValueError: for parameters out of range, or noise that does not fit the statistic.
    """

    def __init__(
        self,
        low: float,
        high: float,
        k: int = 300,
        sampling_rate: float = 0.15,
        statistic: str = "mean",
        noise: Mechanism | None = None,
        candidates: int = 101,
        noise_source: NoiseSource | None = None,
    ) -> None:
        self.low, self.high = check_finite("low", low), check_finite("high", high)
        if self.low >= self.high:
            raise ValueError(f"low={low!r} must be below high={high!r}")
        self.k = check_int("k", k)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.statistic = check_choice("statistic", statistic, STATISTICS)
        width = self.high - self.low
        if statistic == "mean":
            noise = noise if noise is not None else Gaussian(sigma=0.1 * self.k * width)
            self.noise: VoteNoise = sum_noise(noise, width, width, self.sampling_rate)
        else:
            noise = noise if noise is not None else ExponentialArgmax(scale=0.1 * self.k)
            if not isinstance(noise, ExponentialArgmax):
                raise ValueError(f"noise={noise!r} can't choose a median; use ExponentialArgmax(scale)")
            self.noise = vote_noise(noise, SWAPPED_L1, SWAPPED_L2, self.sampling_rate)
        count = check_int("candidates", candidates, 2)
        self.candidates = torch.linspace(self.low, self.high, count, dtype=torch.float64)
        self.noise_source = noise_source if noise_source is not None else default_noise()
        self._aggregation = Aggregation(self.noise, counts=statistic == "mean", key="regression")
        self._neighbors: PoissonSums | None = None

    def fit(self, features: Tensor, targets: Tensor) -> None:
        """Take the private table. May be called again with other features of the same records.

        Args:
            features: float32, shape ``(n, d)``, finite.
            targets: floating point, shape ``(n,)``, finite; clipped to the bounds.

        Raises:
            ValueError: on shapes, dtypes or values that do not fit; also for a table of fewer than ``k`` records
                without sampling.
        """
        check_features(features)
        if targets.shape != features.shape[:1] or not targets.is_floating_point():
            raise ValueError(
                f"targets: shape {shape_text(targets.shape)}, {targets.dtype}; want float of shape (n,), "
                "one for each row of features"
            )
        if not bool(targets.isfinite().all()):
            raise ValueError("targets: some are NaN or infinite; take these records out")
        if len(features) < self.k and self.sampling_rate == 1.0:
            raise ValueError(
                f"the private table holds fewer than k={self.k} records; lower k or collect more records"
            )
        clipped = targets.double().clamp(self.low, self.high)
        if self.statistic == "mean":
            values = (clipped - (self.low + self.high) / 2)[:, None]
        else:
            values = (self.candidates - clipped[:, None]).sign()  # 1 below the candidate, -1 above it
        self._neighbors = PoissonSums(features, values, self.k, self.sampling_rate)

    def plan(self, num_queries: int) -> list[Charge]:
        """Cost of a number of answers."""
        return self._aggregation.plan(num_queries, num_queries)

    def predict(self, queries: Tensor, ledger: ChargesLedger) -> Tensor:
        """Answer queries, paying before noise is drawn.

        Args:
            queries: float32 features of public examples, shape ``(m, d)``.
            ledger: pays.

        Returns:
            float64, shape ``(m,)``, within the bounds.

        Raises:
            RuntimeError: before :meth:`fit`.
            BudgetExceeded: if the charge would pass the budget; nothing was drawn or released.
        """
        neighbors = self._neighbors
        if neighbors is None:
            raise RuntimeError("PrivateRegression needs the private table: call fit(features, targets) first")
        ranked = neighbors.rank(queries)

        def votes(asked: Tensor, noise: NoiseSource) -> Tensor:
            sums = neighbors.votes(ranked[asked], noise.bernoulli)
            return sums if self.statistic == "mean" else -sums.abs() / 2

        def pay(mechanism: Mechanism, count: int, key: str) -> NoiseSource:
            return charge_and_draw(ledger, self.noise_source, mechanism, count, key, ("add_remove",))

        _, released = self._aggregation.ask(len(queries), votes, pay)
        if released is None:
            return torch.empty(0, dtype=torch.float64)
        if self.statistic == "median":
            return self.candidates[released]
        return ((self.low + self.high) / 2 + released[:, 0] / self.k).clamp(self.low, self.high)
