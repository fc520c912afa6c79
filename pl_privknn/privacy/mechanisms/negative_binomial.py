"""Negative binomial noise on counts, as the sum of shares that many clients send."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_open_unit, check_positive
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.mechanisms.base import Adjacency, Mechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from torch import Tensor

    from pl_privknn.privacy.noise import NoiseSource

Floats = NDArray[np.float64]

# Outcomes are listed up to the quantile that leaves this mass; the rest counts as an infinite loss.
_REST = 1e-30
# The most of them, and of cells whose losses are added.
_MOST = 1 << 22
_MOST_CELLS = 10**4


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
        if not self.mean + 12 * math.sqrt(self.variance) + 70 / (1 - self.ratio) <= _MOST:
            raise ValueError(
                f"shape={self.shape!r}, ratio={self.ratio!r}: noise of mean {self.mean:.3g} is too large to list; "
                f"use less, up to about {_MOST:g}"
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
        return _distribution(self.shape, self.ratio, self.moved, adjacency, discretization)


def _shares(shape: float, ratio: float, cells: int, noise: NoiseSource) -> Tensor:
    import torch
    from scipy.stats import nbinom

    uniform = noise.uniform((cells,)).numpy()
    return torch.from_numpy(nbinom.ppf(uniform, shape, 1 - ratio).astype(np.int64))


@functools.lru_cache(maxsize=64)
def _distribution(
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
