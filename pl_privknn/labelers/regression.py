"""Private-kNN for numbers: a clipped mean or a private median of the neighbours' targets."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_finite, check_int, check_rate, shape_text
from pl_privknn.labelers.aggregation import Aggregation, vote_noise
from pl_privknn.labelers.base import ChargesLedger
from pl_privknn.labelers.multilabel.votes import sum_noise
from pl_privknn.labelers.private_knn import KNN_VOTES_L1, KNN_VOTES_L2
from pl_privknn.neighbors import PoissonSums
from pl_privknn.privacy.ledger.run import paid
from pl_privknn.privacy.mechanisms import Charge, ExponentialArgmax, Gaussian, Mechanism, VoteNoise
from pl_privknn.privacy.noise import NoiseSource, default_noise

STATISTICS = ("mean", "median")


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
            if not isinstance(noise, ExponentialArgmax) or noise.secure:
                raise ValueError(f"noise={noise!r} can't choose a median; use ExponentialArgmax(scale)")
            self.noise = vote_noise(noise, KNN_VOTES_L1, KNN_VOTES_L2, self.sampling_rate)
        grid = torch.linspace(
            self.low, self.high, check_int("candidates", candidates, 2), dtype=torch.float64
        )
        self.candidates = grid
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
        if features.ndim != 2 or not features.is_floating_point() or not bool(features.isfinite().all()):
            raise ValueError(
                f"features: shape {shape_text(features.shape)}, {features.dtype}; want finite float of shape (n, d)"
            )
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
        """What so many answers cost."""
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
            sums = neighbors.sums(ranked[asked], noise.bernoulli)
            return sums if self.statistic == "mean" else -sums.abs() / 2

        def pay(mechanism: Mechanism, count: int, key: str) -> NoiseSource:
            return paid(ledger, self.noise_source, mechanism, count, key, ("add_remove",))

        _, released = self._aggregation.ask(len(queries), votes, pay)
        if released is None:
            return torch.empty(0, dtype=torch.float64)
        if self.statistic == "median":
            return self.candidates[released]
        return ((self.low + self.high) / 2 + released[:, 0] / self.k).clamp(self.low, self.high)
