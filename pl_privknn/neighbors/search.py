"""Exact nearest neighbours over a feature table, in blocks of bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive

#: Distances of one block: queries at once times table rows, at 4 bytes each (128 MiB).
_BLOCK_ENTRIES = 32 * 1024 * 1024


def squared_distances(queries: Tensor, table: Tensor, table_norms: Tensor | None = None) -> Tensor:
    """Squared Euclidean distances by one matrix product.

    ``‖q‖² − 2qp + ‖p‖²`` in float32: the error is about 1e-6 of ``‖q‖² + ‖p‖²``, so two records whose
    distances differ by less may change places. Results are clamped at zero.

    Args:
        queries: float32, shape ``(m, d)``.
        table: float32, shape ``(n, d)``.
        table_norms: float32, shape ``(n,)``; squared norms of the table where they are known.

    Returns:
        float32, shape ``(m, n)``.
    """
    if table_norms is None:
        table_norms = squared_norms(table)
    # The query's own norm is added too, so that distances of equal rows are zero up to rounding.
    result = torch.addmm(table_norms, queries, table.T, alpha=-2.0)
    return result.add_(squared_norms(queries)[:, None]).clamp_(min=0)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, shape ``(n,)``."""
    return torch.linalg.vector_norm(rows, dim=1).square()


def top_k(queries: Tensor, table: Tensor, k: int, *, block_size: int | None = None) -> tuple[Tensor, Tensor]:
    """The exact k nearest rows of ``table`` for each query, nearest first; ties go to the lower index.

    Args:
        queries: float32, shape ``(m, d)``.
        table: float32, shape ``(n, d)``.
        k: number of neighbours; at most ``n`` are returned.
        block_size: queries at once; chosen to bound memory by default.

    Returns:
        Euclidean distances (float32) and indices (int64), both of shape ``(m, min(k, n))``.

    Raises:
        ValueError: if ``k`` is below 1 or the dimensions differ.
    """
    check_int("k", k)
    _check_dimensions(queries, table)
    wanted = min(k, len(table))
    block = block_size or max(1, _BLOCK_ENTRIES // max(1, len(table)))
    norms = squared_norms(table)
    distances = torch.empty(len(queries), wanted)
    indices = torch.empty(len(queries), wanted, dtype=torch.int64)
    for start in range(0, len(queries), block):
        stop = min(start + block, len(queries))
        # A query's own norm does not change its order: it is added to the few that are kept.
        part = torch.addmm(norms, queries[start:stop], table.T, alpha=-2.0)
        values, places = smallest(part, wanted)
        distances[start:stop] = values.add_(squared_norms(queries[start:stop])[:, None]).clamp_(min=0).sqrt_()
        indices[start:stop] = places
    return distances, indices


def within_radius(queries: Tensor, table: Tensor, radius: float, *, block_size: int | None = None) -> Tensor:
    """Which rows of ``table`` lie within a radius of each query.

    Args:
        queries: float32, shape ``(m, d)``.
        table: float32, shape ``(n, d)``.
        radius: Euclidean; a public constant.
        block_size: queries at once; chosen to bound memory by default.

    Returns:
        Bool, shape ``(m, n)``.
    """
    check_positive("radius", radius)
    _check_dimensions(queries, table)
    block = block_size or max(1, _BLOCK_ENTRIES // max(1, len(table)))
    norms = squared_norms(table)
    near = torch.empty(len(queries), len(table), dtype=torch.bool)
    for start in range(0, len(queries), block):
        part = queries[start : start + block]
        near[start : start + block] = squared_distances(part, table, norms) <= radius * radius
    return near


def smallest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` smallest entries of each row, ascending; among equal ones the lower column first.

    Args:
        values: shape ``(m, n)``.
        count: how many; at most ``n``.

    Returns:
        values and int64 columns, both of shape ``(m, count)``.
    """
    if count >= values.shape[1]:
        ordered = torch.sort(values, dim=1, stable=True)
        return ordered.values, ordered.indices
    found, places = values.topk(count + 1, dim=1, largest=False, sorted=True)
    # topk keeps any of several entries equal to the last that it keeps: choose the lowest columns there.
    tied = torch.nonzero(found[:, count] == found[:, count - 1]).flatten()
    places = places[:, :count]
    for row in tied.tolist():
        bound = found[row, count]
        below = torch.nonzero(values[row] < bound).flatten()
        equal = torch.nonzero(values[row] == bound).flatten()
        places[row] = torch.cat([below, equal])[:count]
    places = places.sort(dim=1).values
    ordered = values.gather(1, places).sort(dim=1, stable=True)
    return ordered.values, places.gather(1, ordered.indices)


def _check_dimensions(queries: Tensor, table: Tensor) -> None:
    if queries.ndim != 2 or table.ndim != 2 or queries.shape[1] != table.shape[1]:
        raise ValueError(
            f"queries of shape {tuple(queries.shape)} and a table of shape {tuple(table.shape)} do not fit; "
            "want (m, d) and (n, d) with the same d"
        )
