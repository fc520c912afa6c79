"""Matrix products on any device in true float32, and which rows may reach a bound by them, for the CPU to decide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Other devices than the CPU take some 32 MB at a time.
VALUES_SENT_AT_A_TIME = 1 << 23
_UNIT_ROUNDOFF = 2.0**-24


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in true float32, whatever autocast and ``set_float32_matmul_precision`` say."""
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend: Any = getattr(library, "matmul", None)
    with torch.autocast(device.type, enabled=False):
        if hasattr(backend, "fp32_precision"):
            before = backend.fp32_precision
            backend.fp32_precision = "ieee"
            try:
                yield
            finally:
                backend.fp32_precision = before
        else:  # torch before 2.9
            precision = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(precision)


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
    step = max(256, VALUES_SENT_AT_A_TIME // table.shape[1])
    found = [(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))]
    for start in range(0, len(table), step):
        block = table[start : start + step].to(device)
        with full_precision(device):
            products = left @ block.T
        row, column = (products >= bound[:, None]).cpu().nonzero(as_tuple=True)
        found.append((row, column + start))
    rows, columns = (torch.cat(parts) for parts in zip(*found, strict=True))
    counts = rows.bincount(minlength=len(queries)).tolist()
    return [part.numpy() for part in columns[rows.argsort(stable=True)].split(counts)]
