"""Counting the labels of neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive, check_rate, shape_text
from pl_privknn.neighbors.search import within_radius

#: Tosses coins: (shape, probability) -> bool tensor on the CPU.
Coins = Callable[[tuple[int, ...], float], Tensor]

_MEMBERS_AT_A_TIME = 1 << 22


def first_accepted(accepted: Tensor | None, length: int, need: Tensor) -> Tensor:
    """Which records of ranked lists count: the first accepted ones.

    Args:
        accepted: bool, shape ``(m, length)``, nearest record first: the outcome of each record's coin; None if all
            are accepted.
        length: of the lists.
        need: int64, shape ``(m,)``: how many accepted records count; those after them do not.

    Returns:
        bool, shape ``(m, length)``.
    """
    if accepted is None:
        return torch.arange(length) < need[:, None]
    return accepted & (accepted.cumsum(dim=1, dtype=torch.int32) <= need[:, None])


def radius_votes(
    members: Tensor, labels: Tensor, num_classes: int, sampling_rate: float = 1.0, coins: Coins | None = None
) -> Tensor:
    """Votes of all sampled records among the members of each query's neighbourhood.

    Args:
        members: bool, shape ``(m, n)``, for instance from :func:`~pl_privknn.neighbors.search.within_radius`.
        labels: integer labels of the records, shape ``(n,)``.
        num_classes: number of classes c.
        sampling_rate: probability with which a record takes part, with a coin of its own for each query.
        coins: tosses those coins; not used at a sampling rate of 1.

    Returns:
        int64, shape ``(m, c)``.
    """
    votes = torch.zeros(len(members), num_classes, dtype=torch.int64)
    step = max(1, _MEMBERS_AT_A_TIME // max(1, members.shape[1]))
    for start in range(0, len(members), step):
        part = members[start : start + step]
        if sampling_rate < 1:
            part = part & toss(coins, tuple(part.shape), sampling_rate)
        rows, records = part.nonzero(as_tuple=True)
        votes[start : start + step] = count_votes(rows, labels[records], len(part), num_classes)
    return votes


class RadiusNeighbors:
    """Votes of all sampled records within a public radius, with the methods of ``PoissonNeighbors``.

    Beyond the Private-kNN paper: a record more or less changes one count by one and pushes no other record out,
    so the L2 sensitivity of the votes is 1 where that of the k nearest is √2. The radius must be chosen from
    public data alone, and a query may have any number of votes.

    Args:
        table: features of the private records, floating point, shape ``(n, d)``.
        labels: int64, shape ``(n,)``, values in ``[0, num_classes)``.
        num_classes: number of classes, a public constant.
        radius: Euclidean distance up to which records vote.
        sampling_rate: γ in (0, 1]. A record takes part in a sample at most once.
        block_size: as in :func:`~pl_privknn.neighbors.search.top_k`.
        device: as in :func:`~pl_privknn.neighbors.search.top_k`.

    Raises:
        ValueError: for parameters out of range and tables that do not fit; messages hold no private value.
    """

    def __init__(
        self,
        table: Tensor,
        labels: Tensor,
        num_classes: int,
        radius: float,
        sampling_rate: float = 1.0,
        *,
        block_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.radius = check_positive("radius", radius)
        self.sampling_rate = check_rate("sampling_rate", sampling_rate)
        self.num_classes = check_int("num_classes", num_classes, minimum=2)
        self._table, self._labels = table, compact_labels(labels, len(table), self.num_classes)
        self._block_size, self._device = block_size, device

    def rank(self, queries: Tensor) -> Tensor:
        """Bool, shape ``(m, n)``, private: which records lie within the radius of each query."""
        return within_radius(
            queries, self._table, self.radius, block_size=self._block_size, device=self._device
        )

    def votes(self, ranked: Tensor, coins: Coins | None = None) -> Tensor:
        """Votes of one fresh sample for each query: int64, shape ``(m, num_classes)``, private."""
        return radius_votes(ranked, self._labels, self.num_classes, self.sampling_rate, coins)


def toss(coins: Coins | None, shape: tuple[int, ...], rate: float) -> Tensor:
    """Return ``coins(shape, rate)``.

    Raises:
        ValueError: if there is no source of coins, or it gives another shape or dtype.
    """
    if coins is None:
        raise ValueError(f"coins=None, but sampling_rate={rate} needs a source such as noise.bernoulli")
    drawn = coins(tuple(shape), rate)
    if drawn.dtype != torch.bool or drawn.shape != torch.Size(shape):
        raise ValueError(
            f"coins gave {drawn.dtype} of shape {tuple(drawn.shape)}; want bool of {tuple(shape)}"
        )
    return drawn


def compact_labels(labels: Tensor, records: int, num_classes: int) -> Tensor:
    """Labels of ``records`` records, checked, on the CPU and in the smallest type that holds them.

    Gathering them by the million then works out of the processor's cache.
    """
    if labels.shape != (records,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; want int64 of shape (n,), one for each row "
            "of the table"
        )
    if records and bool(((labels < 0) | (labels >= num_classes)).any()):
        raise ValueError(f"labels: some lie outside [0, num_classes={num_classes}); remap them to 0 … c-1")
    return labels.to("cpu", torch.uint8 if num_classes <= 256 else torch.int64)


def count_votes(rows: Tensor, labels: Tensor, queries: int, num_classes: int) -> Tensor:
    """How often each label stands in each row, int64 ``(queries, num_classes)``."""
    cells = rows * num_classes + labels
    return cells.bincount(minlength=queries * num_classes).view(queries, num_classes)
