"""Assignment of many records to few public queries by one matrix product.

:func:`~pl_privknn.neighbors.search.nearest` is made for few queries and a large table. Here many rows choose among
few, and each choice must be a function of its row alone: reverse kNN's sensitivity counts on it. Float32 products
round by where a row lies in its block, so whatever lies within their largest possible error of the k-th best is
compared again in float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_int, compiled
from pl_privknn.neighbors.search import _check_pair, _cpu, full_precision, in_threads, squared_distance

# 16 MB of keys at a time: they are read back from the cache.
_KEYS_AT_A_TIME = 1 << 22
_ROWS_AT_A_TIME = 512
_UNIT_ROUNDOFF = 2.0**-24
_LARGEST_NORM = 1e18


@compiled(fastmath={"nnan", "reassoc"})
def _smallest(keys):  # type: ignore[no-untyped-def]
    least = keys[0]
    for i in range(1, len(keys)):
        least = min(least, keys[i])
    return least


@compiled()
def _choose(keys, tolerance, records, queries, k, chosen):  # type: ignore[no-untyped-def]
    """Positions of the k nearest queries of each record, nearest first, ties to the lower position."""
    count = keys.shape[1]
    best = np.empty(k, dtype=np.float32)
    exact = np.empty(k, dtype=np.float64)
    for row in range(len(keys)):
        if k == 1:
            bound = _smallest(keys[row])
        else:
            best[:] = np.inf
            for column in range(count):
                key = keys[row, column]
                if key < best[k - 1]:
                    place = k - 1
                    while place > 0 and best[place - 1] > key:
                        best[place] = best[place - 1]
                        place -= 1
                    best[place] = key
            bound = best[k - 1]
        reach = np.float64(bound) + 2 * tolerance[row]
        possible, last = 0, 0
        for column in range(count):
            if keys[row, column] <= reach:
                possible, last = possible + 1, column
        if possible == 1:
            chosen[row, 0] = last
            continue
        exact[:] = np.inf
        for column in range(count):
            if keys[row, column] <= reach:
                distance = squared_distance(records[row], queries[column])
                if distance < exact[k - 1]:
                    place = k - 1
                    while place > 0 and exact[place - 1] > distance:
                        exact[place], chosen[row, place] = exact[place - 1], chosen[row, place - 1]
                        place -= 1
                    exact[place], chosen[row, place] = distance, column


@torch.no_grad()
def assign(
    records: Tensor, queries: Tensor, k: int = 1, *, device: torch.device | str | None = None
) -> Tensor:
    """The ``k`` nearest queries of each record by Euclidean distance, exactly.

    The order is that of distances computed in float64 from the float32 features, ties going to the lower position,
    wherever a record lies in the table and whatever the device. So a row of the result depends on its record alone.

    Args:
        records: floating point, shape ``(n, d)``; private ones, at labelling.
        queries: floating point, shape ``(s, d)``; public.
        k: how many, at most ``s``.
        device: where the matrix products run; the records' device unless given.

    Returns:
        int64, shape ``(n, k)``, on the CPU, nearest first.

    Raises:
        ValueError: for shapes and dtypes that do not fit, features that are not finite, or ``k`` above ``s``.
    """
    _check_pair(records, queries)
    if check_int("k", k) > len(queries):
        raise InputError(f"k={k} is more than the {len(queries)} queries; ask about more or lower k")
    place = torch.device(device if device is not None else records.device)
    rows, few = _cpu(records), _cpu(queries)
    farthest = float(torch.linalg.vector_norm(few.double(), dim=1).max())
    if not farthest < _LARGEST_NORM:  # true for NaN, too
        raise ValueError(
            "queries: some features are NaN, infinite or above 1e18; leave them out or rescale them"
        )
    # |x - q|² less |x|² and a constant is |q - m|² + 2 m·(q - m) - 2 x·(q - m): moving the queries by their mean m
    # costs nothing and keeps the products, and with them their rounding errors, small.
    centre = few.double().mean(dim=0)
    centred = few.double() - centre
    bias = centred.square().sum(dim=1) + 2 * centred @ centre
    left = (-2 * centred).float().to(place)
    offset = bias.float().to(place)
    longest, highest = float(centred.norm(dim=1).max()), float(bias.abs().max())
    # The bound of a float32 sum of d + 1 products in any order, with room for the roundings of its terms.
    roundings = (rows.shape[1] + 8) * _UNIT_ROUNDOFF
    gamma = roundings / (1 - roundings) if roundings < 0.5 else 1e9
    finest = rows.shape[1] * 2.0**-51
    chosen = torch.empty((len(rows), k), dtype=torch.int64)
    step = max(_ROWS_AT_A_TIME, _KEYS_AT_A_TIME // len(few))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        norms = torch.linalg.vector_norm(block, dim=1)
        if not bool((norms < _LARGEST_NORM).all()):  # false for NaN, too
            raise ValueError(
                "records: some features are NaN, infinite or above 1e18; leave them out or rescale them"
            )
        with full_precision(place):
            keys = torch.addmm(offset, block.to(place), left.T).cpu()
        sizes = 1.01 * norms.double()
        # The last term: where float64 distances can't distinguish two queries, they must decide all the same.
        tolerance = gamma * (2 * longest * sizes + highest) + finest * (sizes + farthest) ** 2
        _choose_block(keys, tolerance, block, few, chosen[start : start + step])
    return chosen


def _choose_block(keys: Tensor, tolerance: Tensor, records: Tensor, queries: Tensor, chosen: Tensor) -> None:
    def work(first: int, last: int) -> None:
        part = slice(first, last)
        _choose(
            keys[part].numpy(),
            tolerance[part].numpy(),
            records[part].numpy(),
            queries.numpy(),
            chosen.shape[1],
            chosen[part].numpy(),
        )

    in_threads(work, len(keys), _ROWS_AT_A_TIME)
