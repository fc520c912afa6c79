"""Which rows of a table may reach a bound with a query: found on any device, for the CPU to decide."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.neighbors.search import _VALUES_SENT_AT_A_TIME, _full_precision

_UNIT_ROUNDOFF = 2.0**-24


@torch.no_grad()
def reaching(
    queries: Tensor, table: Tensor, least: NDArray[np.float64], device: torch.device
) -> list[NDArray[np.intp]]:
    """Rows whose scalar product with a query may be at least a bound.

    A float32 product rounds by the device and by where its row lies in the table. So all rows are named that come
    within the largest error of two such products, in any order of summation: none is missed that reaches the bound
    by :func:`~pl_privknn.neighbors.hashing.chosen_products`, which depends on its row alone and has the last word.

    Args:
        queries: float32, shape ``(m, d)``, on the CPU; of length 1 at most, up to rounding.
        table: float32, shape ``(n, d)``, on the CPU; likewise.
        least: a bound for each query, ``(m,)``.
        device: where the products are made, in full float32.

    Returns:
        For each query, rows in ascending order, each once. **Private**.
    """
    # |rounded - exact| <= d u |x||q| for each of the two, and some roundings of lengths and of the bound itself.
    slack = 2 * (table.shape[1] + 16) * _UNIT_ROUNDOFF
    left, bound = queries.to(device), torch.from_numpy(least - slack).float().to(device)
    step = max(256, _VALUES_SENT_AT_A_TIME // table.shape[1])
    found = [(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))]
    for start in range(0, len(table), step):
        block = table[start : start + step].to(device)
        with _full_precision(device):
            products = left @ block.T
        row, column = (products >= bound[:, None]).cpu().nonzero(as_tuple=True)
        found.append((row, column + start))
    rows, columns = (torch.cat(parts) for parts in zip(*found, strict=True))
    counts = rows.bincount(minlength=len(queries)).tolist()
    return [part.numpy() for part in columns[rows.argsort(stable=True)].split(counts)]
