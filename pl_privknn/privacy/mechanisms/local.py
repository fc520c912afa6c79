"""Releases of many clients: randomised response, shuffled messages, and shares of noise."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, DominatingPair, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]

# Places whose losses are added one by one.
_MOST_DIFFERING = 10**4
# Standard deviations of the binomials that are listed; what lies beyond gets the largest loss there is, ε₀.
_REACH = 9.0
_GROUPS = 300
# ε₀ from which a clone has a probability below 1e-130: shuffling adds nothing to the message itself.
_NO_CLONES = 300.0
# Clients that are counted, at most: more hide a record better, and their outcomes would fill the memory.
_COUNTED = 10**7
# Outcomes are listed up to the quantile that leaves this mass; the rest counts as an infinite loss.
_REST = 1e-30
# The most of them, and of cells whose losses are added.
_MOST_NOISE = 1 << 22
_MOST_CELLS = 10**4


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(DominatingPair):
    """Keep each value with probability 1−f, else send one of the others, uniformly (Warner 1965).

    One value has the losses ±L and 0, L = log((1−f)(n−1)/f); ``differing`` values of a message are noised
    independently, so their losses add up, and the message is pure (differing·L)-DP. A bit that may change
    in ``differing`` = 2kr places gets f = 1/(e^{ε/2kr} + 1) for a message of ε.

    The cost is that of one record's message. Under ``replace_one`` two records' messages are compared; under
    ``add_remove`` an absent record is one that sends its noised null message (all bits zero), so that who
    takes part is no secret. One charge covers all clients, since each record is in one message only.

    Attributes:
        flip_probability: f, from 0 to (n−1)/n, both excluded.
        num_values: n, the values that one place of the message can take; 2 for bits.
        differing: largest number of places in which two neighbouring messages differ.

    Example:
        >>> from pl_privknn.privacy import Charge, RandomizedResponse, epsilon_for_delta
        >>> release = RandomizedResponse(flip_probability=0.25)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        1.099
    """

    kind: ClassVar[str] = "randomized_response"

    flip_probability: float
    num_values: int = 2
    differing: int = 1

    def __post_init__(self) -> None:
        flip = check_open_unit("flip_probability", self.flip_probability)
        object.__setattr__(self, "flip_probability", flip)
        object.__setattr__(self, "num_values", check_int("num_values", self.num_values, minimum=2))
        object.__setattr__(self, "differing", check_int("differing", self.differing, maximum=_MOST_DIFFERING))
        if self.loss <= 0:
            raise ValueError(
                f"flip_probability={self.flip_probability!r} must be below (n-1)/n = "
                f"{1 - 1 / self.num_values:.4g}, where the message would carry no information"
            )

    @classmethod
    def for_epsilon(cls, epsilon: float, num_values: int = 2, differing: int = 1) -> RandomizedResponse:
        """The mechanism whose whole message is pure ε-DP: f = (n−1)/(e^{ε/differing} + n − 1)."""
        others = num_values - 1
        return cls(others / (math.exp(epsilon / differing) + others), num_values, differing)

    @property
    def loss(self) -> float:
        """L, the pure ε of one place of the message."""
        keep, flip = 1 - self.flip_probability, self.flip_probability
        return math.log(keep) + math.log(self.num_values - 1) - math.log(flip)

    def randomize(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Noise every value of ``values`` (whole numbers below ``num_values``, or bool) independently.

        Returns:
            A new tensor of the same shape and dtype.
        """
        return self.draw(values, noise)

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        flipped = noise.bernoulli(tuple(values.shape), self.flip_probability).to(values.device)
        step = noise.integers(tuple(values.shape), self.num_values - 1).to(values.device) + 1
        moved = (values.long() + step) % self.num_values
        return moved.where(flipped, values.long()).to(values.dtype)

    def log_pair(self, adjacency: Adjacency) -> tuple[Floats, Floats]:
        """Distribution of the summed loss, from −differing·L to differing·L in steps of L."""
        keep, flip = 1 - self.flip_probability, self.flip_probability
        other = flip / (self.num_values - 1)
        one = np.array([other, flip - other, keep])
        total = np.ones(1)
        for _ in range(self.differing):
            total = np.convolve(total, one)
        steps = np.arange(-self.differing, self.differing + 1)
        # With two values a loss of 0 occurs only in even sums; outcomes that cannot occur are left out.
        possible = total > 0
        log_p = np.log(total[possible])
        return log_p, log_p - self.loss * steps[possible]

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """differing·L."""
        return self.differing * self.loss


@dataclasses.dataclass(frozen=True)
class ShuffleAmplification(Mechanism):
    """n clients send one ε₀-locally-private message each through an anonymous shuffler.

    Every other client acts as a clone of the record in question with probability e^{−ε₀}: with
    C ~ Bin(n−1, e^{−ε₀}), A ~ Bin(C, ½), D ~ Bern(e^{ε₀}/(e^{ε₀}+1)) the shuffled messages randomise
    P = (A + D, C − A + 1 − D) or Q = (A + 1 − D, C − A + D) (Feldman, McMillan, Talwar 2021, Theorem 3.2).
    That pair is used itself, for PLD and RDP: it is tighter than the closed form of their Theorem 3.1
    and composes. More clones are a further randomisation, so values of C are
    grouped downwards, and outcomes beyond 9 standard deviations get the largest possible loss, ε₀.

    The pair is that of a replaced record. It holds under ``add_remove`` too where an absent client still
    sends a message, of a null record; the number of clients is public either way.

    Attributes:
        local_epsilon: ε₀ of each message, pure local DP; no client may use a larger one.
        num_clients: n, messages shuffled together.

    Example:
        >>> from pl_privknn.privacy import Charge, ShuffleAmplification, epsilon_for_delta
        >>> release = ShuffleAmplification(local_epsilon=1.0, num_clients=1000)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5, adjacency="replace_one"), 3)
        0.154
    """

    kind: ClassVar[str] = "shuffle_amplification"

    local_epsilon: float
    num_clients: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "local_epsilon", check_positive("local_epsilon", self.local_epsilon))
        object.__setattr__(self, "num_clients", check_int("num_clients", self.num_clients, minimum=2))

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """RDP of the pair, from its connect-the-dots distribution on a fine grid (an upper bound)."""
        step = 2.0 ** math.floor(math.log2(self.local_epsilon / 4000))
        measure = _shuffled_measure(self.local_epsilon, self.num_clients)
        low, masses, _ = measure.on_grid(step)
        used = np.flatnonzero(masses)
        losses: Floats = step * (low + used).astype(np.float64)
        log_p = np.log(masses[used])
        # P and Q are mirror images, so one direction is enough.
        log_q: Floats = log_p - losses
        return rdp.largest_log_moments(orders, losses[:, None], log_q[:, None]) / (orders - 1)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the pair by connect-the-dots."""
        return pld.to_distribution(
            _shuffled_measure(self.local_epsilon, self.num_clients), None, discretization
        )

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """ε₀: shuffling never increases the loss."""
        return self.local_epsilon


@functools.lru_cache(maxsize=8)
def _shuffled_measure(local: float, clients: int) -> pld.LossMeasure:
    from scipy.stats import binom

    clients = min(clients, _COUNTED)
    if local > _NO_CLONES:
        wrong = 1 / (1 + math.exp(min(local, 700.0)))
        bits = np.array([1 - wrong, wrong])
        return pld.LossMeasure(np.array([local, -local]), bits, bits[::-1])
    clone = math.exp(-local)
    mean, spread = (clients - 1) * clone, math.sqrt((clients - 1) * clone * (1 - clone))
    low = max(0, math.floor(mean - _REACH * spread - 2))
    high = min(clients - 1, math.ceil(mean + _REACH * spread + 2))
    starts = np.unique(np.linspace(low, high + 1, min(_GROUPS, high - low + 1) + 1).astype(np.int64))[:-1]
    # Mass of each group of C, all of it given to the group's smallest C; the last takes the upper tail.
    at_least = binom.sf(starts - 1, clients - 1, clone)
    group_mass = np.append(-np.diff(at_least), at_least[-1])
    losses, upper = [], []
    kept = 0.0
    true_bit = 1 / (1 + math.exp(-local))
    ranges = []
    for count in starts.tolist():
        width = math.ceil(_REACH * math.sqrt(count) / 2 + 2)
        ranges.append(np.arange(max(0, count // 2 - width), min(count + 1, count // 2 + 2 + width) + 1))
    # All groups at once: a call of SciPy's costs more than what it computes for one.
    sizes = [len(a) for a in ranges]
    counts, every = np.repeat(starts, sizes), np.concatenate(ranges)
    heads, tails = binom.pmf(every - 1, counts, 0.5), binom.pmf(every, counts, 0.5)
    masses = np.split(true_bit * heads + (1 - true_bit) * tails, np.cumsum(sizes)[:-1])
    for count, mass, a, p in zip(starts.tolist(), group_mass.tolist(), ranges, masses, strict=True):
        # Ratio (e^{ε₀}·a + b)/(a + e^{ε₀}·b) of the two counts a and b = count + 1 − a.
        b = count + 1 - a
        losses.append(np.log(a + clone * b) - np.log(clone * a + b))
        upper.append(mass * p)
        kept += mass * float(p.sum())
    losses.append(np.array([local]))
    upper.append(np.array([max(0.0, 1.0 - kept)]))
    all_losses, all_upper = np.concatenate(losses), np.concatenate(upper)
    return pld.LossMeasure(all_losses, all_upper, all_upper * np.exp(-all_losses))


@dataclasses.dataclass(frozen=True)
class NegativeBinomial(Mechanism):
    """Release counts plus NB(shape, ratio) noise, P(x) = C(x+shape−1, x)·(1−ratio)^shape·ratio^x, in every cell.

    In the multi-message shuffle model each of n clients sends one message for each cell that it votes for and
    NB(shape/n, ratio) more for **every** cell; the shares of a cell add up to NB(shape, ratio), and a shuffled
    multiset of messages reveals the noisy counts and nothing else (after Ghazi, Golowich, Kumar, Manurangsi, Pagh
    2020). Noise is never negative, so that all messages say "plus one". (A discrete Laplace sum would need
    messages of both signs, and the two numbers would be visible one by one, which the difference alone does not
    cover.)

    A replaced record takes its vote from ``moved`` cells and gives it to ``moved`` others. One cell compares NB with
    1 + NB: loss log(ratio·(x+shape−1)/x) at x, infinite at 0, where the noise is 0. Cells are independent, so
    the loss is the sum over ``moved`` such pairs and ``moved`` mirrored ones; the PLD is that of the pair itself, by
    connect-the-dots. There is no finite RDP.

    The guarantee counts the noise of ``num_clients`` clients: those that send, the record in question not needed.
    Fewer clients mean less noise, so the number stated must be one that is surely reached.

    Attributes:
        shape: shape of the whole noise of one cell, above 0.
        ratio: in (0, 1); the noise has mean shape·ratio/(1−ratio) and variance shape·ratio/(1−ratio)².
        moved: cells that a record votes for; ``replace_one`` moves twice as many.

    Example:
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn.privacy.mechanisms import Charge, NegativeBinomial
        >>> release = NegativeBinomial(shape=300.0, ratio=0.9)
        >>> round(epsilon_for_delta([Charge(release)], delta=1e-5), 3)
        0.018
    """

    kind: ClassVar[str] = "negative_binomial"

    shape: float
    ratio: float
    moved: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_positive("shape", self.shape))
        object.__setattr__(self, "ratio", check_open_unit("ratio", self.ratio))
        object.__setattr__(self, "moved", check_int("moved", self.moved, maximum=_MOST_CELLS))
        # The tail of a Gaussian near the mean, and beyond it that of a geometric distribution.
        if not self.mean + 12 * math.sqrt(self.variance) + 70 / (1 - self.ratio) <= _MOST_NOISE:
            raise ValueError(
                f"shape={self.shape!r}, ratio={self.ratio!r}: noise of mean {self.mean:.3g} is too large to list; "
                f"use less, up to about {_MOST_NOISE:g}"
            )

    @property
    def mean(self) -> float:
        """Mean of the noise of one cell."""
        return self.shape * self.ratio / (1 - self.ratio)

    @property
    def variance(self) -> float:
        """Variance of the noise of one cell."""
        return self.mean / (1 - self.ratio)

    def share(self, cells: int, clients: int, noise: NoiseSource) -> Tensor:
        """One client's number of extra messages for each cell, int64 ``(cells,)``.

        Args:
            cells: number of cells.
            clients: n; the noise of so many clients adds up to the whole.
            noise: the client's own randomness.
        """
        return _shares(self.shape / check_int("clients", clients), self.ratio, cells, noise)

    def _draw(self, values: Tensor, noise: NoiseSource) -> Tensor:
        """Counts, int64 ``(cells,)``, plus the whole noise of each cell: the sum of all clients' shares."""
        return values + _shares(self.shape, self.ratio, len(values), noise)

    def loss_scale(self, adjacency: Adjacency) -> tuple[float, float]:
        """Cells' losses are independent; each is at most log(1/ratio) one way and log(ratio·shape) the other."""
        cells = self.moved * (2 if adjacency == "replace_one" else 1)
        largest = max(-math.log(self.ratio), math.log(max(self.ratio * self.shape, 1.0)))
        return cells / self.variance, cells * largest

    def rdp(self, orders: Floats, adjacency: Adjacency) -> Floats:
        """Infinite: an outcome with loss ∞ has a small probability."""
        return np.full(len(orders), math.inf)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the product pair; under ``add_remove`` only ``moved`` cells change, all in one direction."""
        return _counts_distribution(self.shape, self.ratio, self.moved, adjacency, discretization)


def _shares(shape: float, ratio: float, cells: int, noise: NoiseSource) -> Tensor:
    import torch
    from scipy.stats import nbinom

    uniform = noise.uniform((cells,)).numpy()
    return torch.from_numpy(nbinom.ppf(uniform, shape, 1 - ratio).astype(np.int64))


@functools.lru_cache(maxsize=64)
def _counts_distribution(
    shape: float, ratio: float, moved: int, adjacency: Adjacency, discretization: float
) -> PrivacyLossDistribution:
    from scipy.stats import nbinom

    top = int(nbinom.isf(_REST, shape, 1 - ratio)) + 2
    x = np.arange(1, top, dtype=np.float64)
    log_without = nbinom.logpmf(x, shape, 1 - ratio)
    log_with = nbinom.logpmf(x - 1, shape, 1 - ratio)
    without, with_vote = np.exp(log_without), np.exp(log_with)
    none = float(nbinom.pmf(0, shape, 1 - ratio))
    # At 0 the vote is seen to be missing; beyond the list both sides give all to the worst case.
    one = pld.LossMeasure(
        np.concatenate([[-math.inf], log_with - log_without, [math.inf]]),
        np.concatenate([[0.0], with_vote, [2 * _REST]]),
        np.concatenate([[none + 2 * _REST], without, [0.0]]),
    )
    up = pld.to_distribution(one, one.reversed(), discretization)
    total = up.self_compose(moved) if moved > 1 else up
    if adjacency == "add_remove":
        return total
    down = pld.to_distribution(one.reversed(), one, discretization)
    return total.compose(down.self_compose(moved) if moved > 1 else down)
