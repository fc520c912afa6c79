"""Privacy amplification by shuffling the messages of many clients."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_positive
from pl_privknn.privacy.accounting import pld, rdp
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Floats = NDArray[np.float64]

# Standard deviations of the binomials that are listed; what lies beyond gets the largest loss there is, ε₀.
_REACH = 9.0
_GROUPS = 300
# ε₀ from which a clone has a probability below 1e-130: shuffling adds nothing to the message itself.
_NO_CLONES = 300.0
# Clients that are counted, at most: more hide a record better, and their outcomes would fill the memory.
_COUNTED = 10**7


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
        measure = _measure(self.local_epsilon, self.num_clients)
        low, masses, _ = measure.on_grid(step)
        used = np.flatnonzero(masses)
        losses: Floats = step * (low + used).astype(np.float64)
        log_p = np.log(masses[used])
        # P and Q are mirror images, so one direction is enough.
        log_q: Floats = log_p - losses
        return rdp.largest_log_moments(orders, losses[:, None], log_q[:, None]) / (orders - 1)

    def pld(self, adjacency: Adjacency, discretization: float) -> PrivacyLossDistribution:
        """PLD of the pair by connect-the-dots."""
        return pld.to_distribution(_measure(self.local_epsilon, self.num_clients), None, discretization)

    def pure_epsilon(self, adjacency: Adjacency) -> float:
        """ε₀: shuffling never increases the loss."""
        return self.local_epsilon


@functools.lru_cache(maxsize=8)
def _measure(local: float, clients: int) -> pld.LossMeasure:
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
