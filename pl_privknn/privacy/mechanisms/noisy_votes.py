"""Noise on votes and sums: Gaussian, Laplace, and the exponential mechanism, Poisson-sampled or not."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_choice, check_positive, check_rate
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import (
    STEP,
    UNSTATED,
    AdditiveNoise,
    Adjacency,
    OutcomeMechanism,
    VoteNoise,
    require_unsampled,
)

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]

# ε₀ from which every order's divergence is taken for that of order ∞, of which it falls short by a few dozen nats.
_LARGE = 1e5


@dataclasses.dataclass(frozen=True)
class Gaussian(AdditiveNoise):
    """Release a vector plus independent N(0, σ²) noise on every coordinate.

    With μ = l2_sensitivity / σ and rate γ the worst pair is ((1−γ)·N(0, 1) + γ·N(μ, 1), N(0, 1)), in both
    directions (Mironov, Talwar, Zhang 2019; Zhu, Dong, Wang 2022). Without sampling: ε(α) = αμ²/2.

    Attributes:
        sigma: standard deviation of the noise, in the units of the released vector.
        l2_sensitivity: L2 distance that one record can move the vector under the adjacency of the ledger:
            √2 for votes of the k nearest records, √k for counts of which a record changes k by one, clipping
            norm C for sums of clipped gradients. 1 where it is not stated.
        sampling_rate: Poisson rate in (0, 1] at which records take part; 1 where it is not stated.

    Example:
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> release = Gaussian(sigma=40.0, l2_sensitivity=2**0.5)
        >>> round(epsilon_for_delta([Charge(release, 100)], delta=1e-5), 3)
        1.356
    """

    kind: ClassVar[str] = "gaussian"

    sigma: float
    l2_sensitivity: float = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(l2_sensitivity=1.0, sampling_rate=1.0)
        object.__setattr__(self, "sigma", check_positive("sigma", self.sigma))
        object.__setattr__(self, "l2_sensitivity", check_positive("l2_sensitivity", self.l2_sensitivity))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    @property
    def deviation(self) -> float:
        """σ."""
        return self.sigma

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        if not values.is_floating_point():
            return self._draw_multiples(values.long() * round(1 / STEP), STEP, noise)
        return values.double() + noise.normal(tuple(values.shape), self.sigma).to(values.device)

    def add_noise_to_multiples(self, counts: Tensor, step: float, noise: NoiseSource) -> Tensor:
        """:meth:`add_noise` to whole numbers of a step, as a new float64 tensor of multiples of ``step``.

        Args:
            counts: whole numbers (int64), of which one record moves ``counts * step`` by ``l2_sensitivity`` at most.
            step: a power of two, public; σ / step at most 2**54.
            noise: where the noise comes from.

        Raises:
            ValueError: for other numbers than whole ones, or another step.
        """
        if counts.is_floating_point():
            raise ValueError(f"counts: dtype {counts.dtype}; expected int64 for noise on multiples")
        if math.frexp(check_positive("step", step))[0] != 0.5:
            raise ValueError(f"step={step!r} must be a power of two, so that no product with it is rounded")
        return self.draw(
            counts.long(),
            noise,
            lambda counts, noise: self._draw_multiples(counts, step, noise),
            lambda counts: counts.double() * step,
        )

    def _draw_multiples(self, counts: Tensor, step: float, noise: NoiseSource) -> Tensor:
        drawn = noise.rounded_normal(tuple(counts.shape), self.sigma / step)
        return (counts + drawn.to(counts.device)).double() * step

    def rdp(self, orders: NDArray[np.float64], adjacency: Adjacency) -> NDArray[np.float64]:
        """RDP of one release; see :func:`pl_privknn.privacy.accounting.rdp.gaussian_rdp`."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return rdp.gaussian_rdp(self.l2_sensitivity / self.sigma, self.sampling_rate, orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of one release by connect-the-dots; see :func:`pl_privknn.privacy.accounting.pld.gaussian_losses`."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return _gaussian_distribution(self.l2_sensitivity / self.sigma, self.sampling_rate, discretization)

    def gaussian_mu(self, adjacency: Adjacency) -> float | None:
        """μ, unless the release is sampled."""
        return self.l2_sensitivity / self.sigma if self.sampling_rate == 1.0 else None


@functools.lru_cache(maxsize=32)
def _gaussian_distribution(mu: float, sampling_rate: float, discretization: float) -> PrivacyLossDistribution:
    remove = pld.gaussian_losses(mu, sampling_rate, discretization)
    # N(0, 1) against N(μ, 1) is its own mirror image; the mixture is not.
    return pld.to_distribution(remove, None if sampling_rate == 1.0 else remove.reversed(), discretization)


@dataclasses.dataclass(frozen=True)
class Laplace(AdditiveNoise):
    """Release a vector plus independent Laplace noise of scale b (not 1/b) on every coordinate.

    With ε₀ = l1_sensitivity / b the worst pair is (Lap(ε₀), Lap(0)), in one coordinate: the likelihood ratio
    is e^u with u in [−ε₀, ε₀], and under Lap(0) u has an atom of ½ at −ε₀, the density ¼e^{−(u+ε₀)/2}, and an
    atom of ½e^{−ε₀} at ε₀. A shift split over several coordinates, ε₀ = a + b, gives a pair with the same
    density inside or more, and less in the two extreme atoms; mass moved inwards from both ends, its
    totals under both distributions kept, is a randomisation of the one-coordinate pair, so that one
    dominates. Sampling replaces the ratio e^u by 1 − γ + γe^u.

    Attributes:
        scale: b, in the units of the released vector; the noise's standard deviation is √2·b.
        l1_sensitivity: L1 distance that one record can move the vector under the adjacency of the ledger.
        sampling_rate: Poisson rate in (0, 1] at which records take part.

    Example:
        >>> from pl_privknn.privacy import Charge, Laplace, epsilon_for_delta
        >>> release = Laplace(scale=20.0, l1_sensitivity=2.0)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.1
    """

    kind: ClassVar[str] = "laplace"

    scale: float
    l1_sensitivity: float = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(l1_sensitivity=1.0, sampling_rate=1.0)
        object.__setattr__(self, "scale", check_positive("scale", self.scale))
        object.__setattr__(self, "l1_sensitivity", check_positive("l1_sensitivity", self.l1_sensitivity))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    @property
    def deviation(self) -> float:
        """√2·b."""
        return math.sqrt(2.0) * self.scale

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        if values.is_floating_point():
            return values.double() + noise.laplace(tuple(values.shape), self.scale).to(values.device)
        drawn = noise.rounded_laplace(tuple(values.shape), self.scale / STEP).to(values.device)
        return (values.long() * round(1 / STEP) + drawn).double() * STEP

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of one release: the atoms' terms plus Gauss-Legendre quadrature of the density's."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return _rdp(self.l1_sensitivity / self.scale, self.sampling_rate, orders)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of one release by connect-the-dots."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return _laplace_distribution(self.l1_sensitivity / self.scale, self.sampling_rate, discretization)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """l1_sensitivity / b, or log(1−γ+γe^that) when sampled."""
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        return float(rdp.sampled_loss(np.array(self.l1_sensitivity / self.scale), self.sampling_rate))


def _rdp(pure: float, rate: float, orders: Floats) -> Floats:
    if pure > _LARGE:
        return np.full(len(orders), float(rdp.sampled_loss(np.array(pure), rate)))
    # Panels halve towards both ends, so that e^{±αu} is resolved wherever it is not negligible.
    halvings = max(2, math.ceil(math.log2(max(pure, 1e-4) / 1e-4)))
    outer = pure * (1 - 0.5 ** np.arange(halvings + 1))
    edges = np.concatenate([[-pure], -outer[:0:-1], outer, [pure]])
    nodes, weights = np.polynomial.legendre.leggauss(48)
    half = np.diff(edges)[:, None] / 2
    u = (edges[:-1, None] + half * (1 + nodes)).ravel()
    log_weight = np.log((half * weights / 4).ravel()) - (u + pure) / 2
    u = np.concatenate([[-pure], u, [pure]])
    log_lower = np.concatenate([[math.log(0.5)], log_weight, [math.log(0.5) - pure]])
    log_ratio = rdp.sampled_loss(u, rate)
    log_ratio, log_lower = log_ratio[:, None], log_lower[:, None]
    curve = rdp.largest_log_moments(orders, log_ratio, log_lower)
    if rate < 1:
        curve = np.maximum(curve, rdp.largest_log_moments(orders, -log_ratio, log_lower + log_ratio))
    return curve / (orders - 1)


@functools.lru_cache(maxsize=32)
def _laplace_distribution(pure: float, rate: float, discretization: float) -> PrivacyLossDistribution:
    def mixed(lower: Floats, upper: Floats) -> Floats:
        return (1 - rate) * lower + rate * upper

    ends = np.array([-pure, pure])
    first, u = pld.cell_edges(ends, rate, discretization)
    u = u.clip(-pure, pure)
    # Masses of the density between edges, under Lap(0) and Lap(ε₀); each a difference in its own units.
    widths = np.diff(u)
    lower = -0.5 * np.exp(-(u[:-1] + pure) / 2) * np.expm1(-widths / 2)
    upper = -0.5 * np.exp((u[1:] - pure) / 2) * np.expm1(-widths / 2)
    atoms_lower = 0.5 * np.exp(-(ends + pure) / 2)
    atoms_upper = 0.5 * np.exp((ends - pure) / 2)
    remove = pld.LossMeasure(
        rdp.sampled_loss(ends, rate),
        mixed(atoms_lower, atoms_upper),
        atoms_lower,
        first,
        mixed(lower, upper),
        lower,
    )
    return pld.to_distribution(remove, None if rate == 1.0 else remove.reversed(), discretization)


@dataclasses.dataclass(frozen=True)
class ExponentialArgmax(VoteNoise, OutcomeMechanism):
    """Release class y with probability ∝ e^{votes(y)/b} (the arg-max of votes + Gumbel(b) noise), and no count.

    **Added votes.** The record adds one vote to class j. With s the probability of j without it and
    g = e^{1/b}, j has probability f(s) = sg/(1 + s(g−1)) with it, and all other classes shrink by one common
    factor, so two outcomes (j, the rest) suffice. The family is s in (0, 1).

    **Swapped votes.** The record takes a vote from class i (probability u without it) and gives one to
    j (s). With Z = 1 + s(g−1) − u(1−1/g) the ratios are g/Z on j, 1/(gZ) on i, 1/Z on the rest. Let W be
    convex and keep Z fixed: raising s by h and u by gh, taken from the rest, changes E_q[W(ratio)] by
    h·(W(g/Z) + gW(1/(gZ)) − (1+g)W(1/Z)) ≥ 0, by Jensen. So the worst case has no rest, s + u = 1, for every
    convex W, hence for every divergence, for compositions, and also for the sampled ratio 1−γ+γ·ratio.
    What remains is the two-outcome family above with g² in place of g.

    **One dominating pair.** The points (s, f(s)) form a concave curve with slopes from g to 1/g, so the
    family's envelope is the pair (density f′, uniform) on [0, 1]: a logistic distribution moved by log g.
    The curve is its own mirror image, so this covers both directions. The PLD is that pair's.

    **Finite family.** :meth:`dominating_pairs` cuts (0, 1) into cells [a, b] and gives for each the pair
    whose corner lies where the line from (0, 0) through (a, F(a)) meets the line from (1, 1) through
    (b, F(b)), F(s) = (1−γ)s + γf(s). Its triangle holds the corner (s, F(s)) of every s in the cell, so
    it dominates all of them (Blackwell). Cells are smallest about s = ½, where the losses' variance peaks,
    such that the variance is over-estimated by about 0.1 %.

    Attributes:
        scale: b of the Gumbel noise, in votes.
        votes: ``"add"`` where a record adds one vote and moves no other, ``"swap"`` where a vote leaves one class
            and joins another (the k nearest vote).
        sampling_rate: Poisson rate in (0, 1] at which records enter the sample that votes.

    Example:
        >>> from pl_privknn.privacy import Charge, ExponentialArgmax, epsilon_for_delta
        >>> release = ExponentialArgmax(scale=20.0, votes="swap")
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.098
    """

    kind: ClassVar[str] = "exponential_argmax"

    scale: float
    votes: str = UNSTATED
    sampling_rate: float = UNSTATED

    def __post_init__(self) -> None:
        self.settle(votes="swap", sampling_rate=1.0)
        object.__setattr__(self, "scale", check_positive("scale", self.scale))
        check_choice("votes", self.votes, ("add", "swap"))
        object.__setattr__(self, "sampling_rate", check_rate("sampling_rate", self.sampling_rate, zero=True))

    @property
    def deviation(self) -> float:
        """π/√6·b, of Gumbel noise."""
        return math.pi / math.sqrt(6.0) * self.scale

    def argmax(self, votes: Tensor, noise: NoiseSource) -> Tensor:
        """Choose a class with exactly the stated probabilities; see :meth:`VoteNoise.argmax`.

        Raises:
            ValueError: where a vote is not finite (NaN would win and give its class away).
        """
        if not bool(votes.isfinite().all()):
            raise ValueError("votes: some are NaN or infinite; count votes with finite weights")
        return self.draw(votes, noise)

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        return noise.exponential_choice(values, self.scale)

    def for_votes(self, l1: float, l2: float, rate: float = 1.0) -> ExponentialArgmax:
        """See :meth:`VoteNoise.for_votes`.

        Raises:
            ValueError: also for votes of which one record moves more than one, or one from a class to another.
        """
        if (l1, round(l2 * l2, 9)) not in ((1, 1), (2, 2)):
            raise ValueError(
                f"noise={self!r} covers one vote added or swapped; use for instance Laplace(scale)"
            )
        return self._completed(votes="add" if l1 == 1 else "swap", sampling_rate=rate)

    @property
    def log_gain(self) -> float:
        """Logarithm of g, the factor by which a record changes the odds of the class that it favours."""
        return (1.0 if self.votes == "add" else 2.0) / self.scale

    def log_dominating_pairs(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Two outcomes for each cell of the touched class's probability; see the class."""
        self._check(adjacency)
        return _cell_pairs(self.log_gain, self.sampling_rate, cells())

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """1/b for added votes, 2/b for swapped ones, less when sampled."""
        self._check(adjacency)
        return float(rdp.sampled_loss(np.array(self.log_gain), self.sampling_rate))

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the logistic pair that dominates the family."""
        self._check(adjacency)
        return _argmax_distribution(self.log_gain, self.sampling_rate, discretization)

    def _check(self, adjacency: Adjacency) -> None:
        require_unsampled(self.kind, self.sampling_rate, adjacency)
        if adjacency == "replace_one" and self.votes == "add":
            raise ValueError(
                "votes='add' holds under adjacency='add_remove' only: a replaced record takes its vote from "
                "one class and gives one to another; use votes='swap'"
            )


@functools.lru_cache(maxsize=1)
def cells() -> Floats:
    """Ends of the cells in x, from 0 to 1, symmetric about ½; see :func:`_cell_pairs`."""
    tolerance = 1e-3
    ends = [0.5]
    while ends[-1] > 0.0:
        away = 0.5 - ends[-1]
        # Slack under the peak of the variance, halved so that neighbouring peaks are resolved too.
        width = min(tolerance / 4 + away * away / 2, 0.005)
        ends.append(max(0.0, ends[-1] - width))
    left = np.array(ends[::-1])
    return np.concatenate([left, 1.0 - left[-2::-1]])


def _cell_pairs(log_gain: float, rate: float, ends: Floats) -> tuple[Floats, Floats]:
    """Dominating pair of each cell, as (log p, log q) of shape ``(cells, 2)``.

    Cells are cut in x with s = (g^x − 1)/(g − 1), which is s itself for small log g and resolves both ends
    of (0, 1) for large ones: 1 + s(g−1) = g^x, so f(a)/a = g^{1−x(a)} and (1−f(b))/(1−b) = g^{−x(b)}.
    """
    up, down = log_gain * (1 - ends[:-1]), -log_gain * ends[1:]
    log_ratio = np.stack([rdp.sampled_loss(up, rate), rdp.sampled_loss(down, rate)], axis=1)
    # With ratios 1+rise and 1−fall, q·rise = (1−q)·fall.
    log_rise = math.log(rate) + np.where(up > 30.0, up, np.log(np.expm1(np.minimum(up, 30.0))))
    log_fall = math.log(rate) + np.log(-np.expm1(down))
    total = np.logaddexp(log_rise, log_fall)
    log_q = np.stack([log_fall - total, log_rise - total], axis=1)
    return log_q + log_ratio, log_q


@functools.lru_cache(maxsize=32)
def _argmax_distribution(log_gain: float, rate: float, discretization: float) -> PrivacyLossDistribution:
    first, u = pld.cell_edges(np.array([-log_gain, log_gain]), rate, discretization)
    u = u.clip(-log_gain, log_gain)
    widths = np.diff(u)
    # s(u) = (√g·e^{−u/2} − 1)/(g − 1) is the uniform mass with loss above u; f(s) mirrors it.
    log_gain_less_one = log_gain + math.log(-math.expm1(-log_gain))
    lower = -np.exp((log_gain - u[:-1]) / 2 - log_gain_less_one) * np.expm1(-widths / 2)
    upper = -np.exp((log_gain + u[1:]) / 2 - log_gain_less_one) * np.expm1(-widths / 2)
    remove = pld.LossMeasure(first_cell=first, cell_upper=(1 - rate) * lower + rate * upper, cell_lower=lower)
    return pld.to_distribution(remove, None if rate == 1.0 else remove.reversed(), discretization)
