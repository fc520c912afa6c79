"""Balanced reverse neighbours whose edges are each record's own affair: prices learned from public features."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import check_int, shape_text
from pl_privknn.neighbors.assignment import assign

_STEPS = 300
# Steps shrink geometrically: the first cross whole clusters, the last settle single examples.
_LAST_STEP = 1e-4
_ROWS_AT_A_TIME = 8192


def learn_prices(features: Tensor, queries: Tensor, k: int = 1, *, steps: int = _STEPS) -> Tensor:
    """One price a query, at which the public examples spread evenly over the queries.

    Where every example chooses the ``k`` queries with the smallest squared distance minus price, a query that few
    choose gets a higher price (a discount on its distance) and one that many choose a lower one. The prices are
    the dual variables of the optimal transport of the examples to the queries with equal capacities; they are
    found by ascent on the concave dual ``Σ_x Σ_{k smallest}(|x - q_j|² - p_j) + (k n / s) Σ_j p_j`` with steps
    that shrink, and those of the most even spread seen are returned.

    Learned from **public** features only, they stand in for what the private records would ask for. With prices
    fixed, each private record's choice depends on that record alone, so that one record more or less changes at
    most ``k`` edges and the usual sensitivity holds. (Balancing the private records themselves has no such
    bound.)

    Args:
        features: float public features, shape ``(n, d)``.
        queries: float features of the queries, shape ``(s, d)``.
        k: queries that an example, and later a private record, chooses.
        steps: steps of the ascent.

    Returns:
        float64, shape ``(s,)``, in squared units of the features, with mean zero.

    Raises:
        ValueError: for shapes that do not fit, no features or more neighbours than queries.
    """
    k, steps = check_int("k", k), check_int("steps", steps)
    _check(features, queries, k)
    if not len(features):
        raise ValueError("features: there are none; prices are learned from at least one public example")
    distances = torch.cat(
        [torch.cdist(part.double(), queries.double()).square() for part in features.split(_ROWS_AT_A_TIME)]
    )
    target = k * len(features) / len(queries)
    # No useful price is much larger than how much farther an average query is than the nearest.
    unit = float((distances.mean(dim=1) - distances.min(dim=1).values).mean()) or 1.0
    prices = best = torch.zeros(len(queries), dtype=torch.float64)
    least = torch.inf
    for step in range(steps):
        chosen = (distances - prices).topk(k, dim=1, largest=False).indices
        shortfall = target - torch.bincount(chosen.flatten(), minlength=len(queries)).double()
        imbalance = float(shortfall.square().sum())
        if imbalance < least:
            least, best = imbalance, prices
        # Relative to the target, and bounded, so that one crowded query does not overshoot.
        move = (shortfall / target).clamp(-1.0, 1.0)
        prices = prices + unit * move * _LAST_STEP ** (step / steps)
    return best - best.mean()


def with_prices(queries: Tensor, prices: Tensor) -> Tensor:
    """Queries with one more coordinate, which makes plain squared distances those minus price, plus a constant.

    ``|(x, 0) - (q, √(p_max - p))|² = |x - q|² - p + p_max``: any search for nearest neighbours over records from
    :func:`without_prices` then respects the prices.

    Args:
        queries: float, shape ``(s, d)``.
        prices: float, shape ``(s,)``.

    Returns:
        float32, shape ``(s, d + 1)``.
    """
    if queries.ndim != 2 or prices.shape != queries.shape[:1] or not bool(torch.isfinite(prices).all()):
        raise ValueError(
            f"prices: shape {tuple(prices.shape)} for queries of shape {tuple(queries.shape)}; want one finite "
            "price a query"
        )
    height = (prices.max() - prices.double()).sqrt() if len(prices) else prices
    return torch.cat([queries.float(), height[:, None].float()], dim=1)


def without_prices(records: Tensor) -> Tensor:
    """Records with a zero coordinate in the place of the price, float32 ``(n, d + 1)``; see :func:`with_prices`."""
    return torch.nn.functional.pad(records.float(), (0, 1))


def priced_neighbors(
    records: Tensor,
    queries: Tensor,
    prices: Tensor,
    k: int = 1,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """The ``k`` queries of each record with the smallest squared distance minus price.

    Each row depends on its own record alone (by exact float64 comparison, ties to the lower index), which is what
    the sensitivity of reverse kNN rests on.

    Args:
        records: float, shape ``(n, d)``; private ones, at labelling.
        queries: float, shape ``(s, d)``; public.
        prices: float, shape ``(s,)``; public, for instance from :func:`learn_prices`.
        k: how many.
        device: as in :func:`~pl_privknn.neighbors.assignment.assign`.

    Returns:
        int64, shape ``(n, k)``, the best first.

    Raises:
        ValueError: for shapes that do not fit or more neighbours than queries.
    """
    _check(records, queries, check_int("k", k))
    return assign(without_prices(records), with_prices(queries, prices), k, device=device)


def _check(features: Tensor, queries: Tensor, k: int) -> None:
    if features.ndim != 2 or queries.ndim != 2 or features.shape[1] != queries.shape[1]:
        raise ValueError(
            f"features of shape {shape_text(features.shape)} and queries of shape {tuple(queries.shape)}; want "
            "(n, d) and (s, d) with the same d"
        )
    if len(queries) < k:
        raise ValueError(f"queries: there are {len(queries)}, fewer than k={k}; ask about more or lower k")
