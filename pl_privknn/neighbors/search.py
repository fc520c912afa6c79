"""Exact nearest neighbours by blocked matrix products."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int, check_positive, shape_text
from pl_privknn.neighbors.selection import Smallest, merge, order_candidates, pack, pair_distances, unpack

# 2**26 float32 keys are 256 MB: the most that a search holds at once beside its inputs and its result.
_KEYS_AT_A_TIME = 1 << 26
_QUERIES_AT_A_TIME = 1024
# Records are centred some 8 MB at a time, and selected from while their keys are in the processor's cache.
_VALUES_CENTRED_AT_A_TIME = 1 << 21
_FEWEST_ROWS, _MOST_ROWS = 256, 2048
# Other devices take some 32 MB at a time.
_VALUES_SENT_AT_A_TIME = 1 << 23
_UNIT_ROUNDOFF = 2.0**-24
# Keys of features up to 1e18 can't overflow float32.
_LARGEST_SQUARE = 1e36
# A candidate's index takes 31 bits beside its key, so a longer table is searched in parts, one after another.
_ROWS_OF_A_PART = 2**31 - 1
# Pairs of a block whose keys are compared with their exact values, at least.
_CHECKED_PAIRS = 4096


@torch.no_grad()
def top_k(
    queries: Tensor,
    table: Tensor,
    k: int,
    *,
    block_size: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` nearest records of each query by Euclidean distance, exactly.

    The order is that of distances computed in float64 from the float32 features, ties going to the lower index,
    whatever the block sizes and the device. Whether one record comes before another therefore depends on no
    third record. Beside the arguments and the result it takes some 0.1 GB, and 0.5 GB at most.

    Args:
        queries: floating point, shape ``(m, d)``.
        table: floating point, shape ``(n, d)``; float32 on the CPU is used without a copy.
        k: how many; all records where the table has fewer.
        block_size: records whose distances are held at once; chosen from the memory bound unless given.
        device: where the matrix products run; the table's device unless given.

    Returns:
        ``(distances, indices)``, float32 and int64 of shape ``(m, min(k, n))`` on the CPU, ascending. Distances
        are correct to float32 rounding.

    Raises:
        ValueError: for shapes and dtypes that do not fit, and for features that are not finite.
    """
    found = nearest(queries, table, k, block_size=block_size, device=device)
    rows = torch.arange(len(found)).repeat_interleave(found.shape[1])
    squared = pair_distances(
        _cpu(queries).numpy(), _cpu(table).numpy(), rows.numpy(), found.reshape(-1).numpy()
    )
    return torch.from_numpy(squared).sqrt_().float().view_as(found), found.long()


@torch.no_grad()
def nearest(
    queries: Tensor,
    table: Tensor,
    k: int,
    *,
    block_size: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The indices of :func:`top_k`, without the cost of exact distances that nobody asked for.

    They are int32, or int64 for a table of 2³¹ records and more.
    """
    records = _Records.of(queries, table, block_size, device)
    k = min(check_int("k", k), len(table))
    if len(table) > _ROWS_OF_A_PART:
        return _nearest_in_parts(queries, records, k)
    # More candidates than k, so that near ties around the k-th place are among them.
    length = min(len(table), k + max(16, k // 50))
    found = torch.empty((len(queries), k), dtype=torch.int32)
    if k:
        for part in _query_blocks(len(queries), length):
            found[part] = _nearest_block(_cpu(queries[part]), records, k, length)
    return found


@torch.no_grad()
def within_radius(
    queries: Tensor,
    table: Tensor,
    radius: float,
    *,
    block_size: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """All records whose Euclidean distance to a query is at most ``radius``, exactly.

    Whether a record is a member is decided by its float64 distance wherever float32 leaves a doubt, so it
    depends on no other record.

    Args:
        queries: floating point, shape ``(m, d)``.
        table: floating point, shape ``(n, d)``.
        radius: a public constant in the units of the features.
        block_size: as in :func:`top_k`.
        device: as in :func:`top_k`.

    Returns:
        Bool, shape ``(m, n)``, on the CPU.

    Raises:
        ValueError: for a radius that is not positive, shapes and dtypes that do not fit, and features that are
            not finite.
    """
    records = _Records.of(queries, table, block_size, device)
    check_positive("radius", radius)
    members = torch.zeros((len(queries), len(table)), dtype=torch.bool)
    for part in _query_blocks(len(queries), 1):
        _mark_members(members[part], _cpu(queries[part]), records, radius)
    return members


class _Records(NamedTuple):
    """The table of one search, where it is needed: whole on the CPU, block by block on ``device``."""

    table: Tensor
    on_cpu: Tensor
    block_size: int | None
    device: torch.device

    @classmethod
    def of(
        cls, queries: Tensor, table: Tensor, block_size: int | None, device: torch.device | str | None
    ) -> _Records:
        _check_pair(queries, table)
        if block_size is not None:
            block_size = check_int("block_size", block_size)
        return cls(
            table, _cpu(table), block_size, torch.device(device if device is not None else table.device)
        )


def _nearest_in_parts(queries: Tensor, records: _Records, k: int) -> Tensor:
    """The nearest records of each part of the table, merged by float64 distance, ties by index: int64, ``(m, k)``."""
    found = torch.empty((len(queries), k), dtype=torch.int64)
    for block in _query_blocks(len(queries), k):
        some = _cpu(queries[block])
        distances, indices = [], []
        for start in range(0, len(records.table), _ROWS_OF_A_PART):
            part = records.table[start : start + _ROWS_OF_A_PART]
            near = nearest(some, part, k, block_size=records.block_size, device=records.device).long()
            rows = torch.arange(len(near)).repeat_interleave(near.shape[1])
            exact = pair_distances(some.numpy(), _cpu(part).numpy(), rows.numpy(), near.view(-1).numpy())
            distances.append(torch.from_numpy(exact).view_as(near))
            indices.append(near + start)
        # Parts follow each other, and each is in order: a stable sort leaves equal distances in order of index.
        order = torch.cat(distances, dim=1).sort(dim=1, stable=True).indices
        found[block] = torch.cat(indices, dim=1).gather(1, order[:, :k])
    return found


def _query_blocks(queries: int, length: int) -> Iterator[slice]:
    step = max(1, min(_QUERIES_AT_A_TIME, _KEYS_AT_A_TIME // (4 * length)))
    return (slice(start, start + step) for start in range(0, queries, step))


def _nearest_block(queries: Tensor, records: _Records, k: int, length: int) -> Tensor:
    """int32 indices, ``(m, k)``, of one block of queries from lists of ``length`` candidates."""
    centre, norms = _centre(queries)
    packed = _candidates(queries, centre, records, length)
    sample = packed[:, :: max(1, length // max(16, _CHECKED_PAIRS // len(queries)))]
    keys, columns = (torch.from_numpy(part) for part in unpack(sample))
    error = _relative_error(keys, columns, queries, norms, records)
    # The k-th candidate is as near as the k-th record, up to the error that the tolerance covers.
    last = torch.from_numpy(unpack(packed[:, k - 1])[0])
    reach = (last.double() + norms**2).clamp_(min=0).sqrt_()
    tolerance = _tolerance(norms, reach, queries.shape[1], error)
    order = order_candidates(queries.numpy(), records.on_cpu.numpy(), packed, tolerance.numpy(), k)
    found, complete = (torch.from_numpy(part) for part in order)
    if length < len(records.table) and not bool(complete.all()):
        # So many near ties around the k-th place that the list does not reach past them: a longer one does.
        again = (~complete).nonzero()[:, 0]
        longer = min(len(records.table), 4 * length)
        for part in _query_blocks(len(again), longer):
            found[again[part]] = _nearest_block(queries[again[part]], records, k, longer)
    return found


def _mark_members(members: Tensor, queries: Tensor, records: _Records, radius: float) -> None:
    """Set ``members``, bool ``(m, n)``, where a record lies within the radius of a query."""
    centre, norms = _centre(queries)
    limit = radius**2 - norms**2
    for first, keys in _key_blocks(queries, centre, records, _KEYS_AT_A_TIME // max(1, len(queries))):
        chosen = torch.arange(0, keys.shape[1], max(1, keys.shape[1] // 64))
        columns = (chosen + first).expand(len(keys), -1)
        error = _relative_error(keys[:, chosen.to(keys.device)].cpu(), columns, queries, norms, records)
        doubt = _tolerance(norms, torch.full_like(norms, radius), queries.shape[1], error)
        inside = (keys <= (limit - doubt).float().to(keys.device)[:, None]).cpu()
        possible = (keys <= (limit + doubt).float().to(keys.device)[:, None]).cpu()
        row, column = (possible & ~inside).nonzero(as_tuple=True)
        exact = pair_distances(queries.numpy(), records.on_cpu.numpy(), row.numpy(), (column + first).numpy())
        inside[row, column] = torch.from_numpy(exact <= radius**2)
        members[:, first : first + inside.shape[1]] = inside


def _candidates(queries: Tensor, centre: Tensor, records: _Records, length: int) -> NDArray[np.int64]:
    """The ``length`` smallest approximate keys of each query, packed with their records, ascending."""
    if records.device.type != "cpu":
        return _sorted_candidates(queries, centre, records, length)
    rows = _FEWEST_ROWS * max(1, _VALUES_CENTRED_AT_A_TIME // (_FEWEST_ROWS * queries.shape[1]))
    width = min(rows, _MOST_ROWS, len(records.table))
    nearest = Smallest(len(queries), length, width)
    for start, keys in _key_blocks(queries, centre, records, width):
        nearest.add(keys.numpy(), start)
    return nearest.packed()


def _sorted_candidates(queries: Tensor, centre: Tensor, records: _Records, length: int) -> NDArray[np.int64]:
    """The same where keys are dear to send and cheap to sort: on another device."""
    best = np.empty((len(queries), 0), dtype=np.int64)
    block_size = max(4 * length, _KEYS_AT_A_TIME // len(queries))
    for start, keys in _key_blocks(queries, centre, records, block_size):
        values, columns = keys.topk(min(length, keys.shape[1]), dim=1, largest=False)
        packed = pack(values.cpu().numpy(), columns.cpu().numpy() + start)
        best = merge(best, packed, length) if start else packed
    return best


def _key_blocks(
    queries: Tensor, centre: Tensor, records: _Records, block_size: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first record, keys)`` for blocks of the table; keys of shape ``(m, block)``, on the device.

    A key is the squared distance less the squared norm of the centred query, ``|p|² - 2 q·p``. Centring by the
    mean of the queries, which are public, keeps the terms small, so that little is lost when they cancel.
    The keys are overwritten by the next block.
    """
    table, device = records.table, records.device
    block_size = min(records.block_size or block_size, max(1, len(table)))
    values = _VALUES_CENTRED_AT_A_TIME if device.type == "cpu" else _VALUES_SENT_AT_A_TIME
    inner = max(_FEWEST_ROWS, values // table.shape[1])
    centre = centre.to(device)
    left = (queries.to(device) - centre).mul_(-2)
    buffer = torch.empty(len(queries) * block_size, device=device)
    memory = torch.empty((min(inner, block_size), table.shape[1]), device=device)
    for start in range(0, len(table), block_size):
        block = table[start : start + block_size]
        keys = buffer[: len(queries) * len(block)].view(len(queries), len(block))
        for first in range(0, len(block), inner):
            some = block[first : first + inner].to(device, torch.float32)
            centred = torch.sub(some, centre, out=memory[: len(some)])
            norms = torch.linalg.vector_norm(centred, dim=1).square_()
            if not bool((norms < _LARGEST_SQUARE).all()):  # false for NaN, too
                raise ValueError(
                    "table: some features are NaN, infinite or above 1e18; leave them out or rescale them"
                )
            with _full_precision(device):
                torch.addmm(norms, left, centred.T, out=keys[:, first : first + inner])
        yield start, keys


def _centre(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the queries, float32 ``(d,)``, and the norms of the centred queries, float64 ``(m,)``; on the CPU."""
    exact = queries.double()
    if not bool((exact.square().sum(dim=1) < _LARGEST_SQUARE).all()):  # false for NaN, too
        raise ValueError(
            "queries: some features are NaN, infinite or above 1e18; leave them out or rescale them"
        )
    centre = exact.mean(dim=0).float()
    return centre, torch.linalg.vector_norm(exact - centre, dim=1)


def _tolerance(norms: Tensor, reach: Tensor, dimensions: int, measured: float) -> Tensor:
    """How far a key may be from its exact value, float32 ``(m,)``, for records within ``reach`` of the query.

    Such a record has a centred norm of at most ``norm + reach``. Rounding errors of a sum of d products add up
    like a random walk, to some ``√d u |q||p|`` at the very most (u = 2⁻²⁴) and far less in practice; the second
    term covers centring, the record's norm and the last addition. Products may be worse than that, where all
    roundings go one way or where the hardware computes more coarsely than asked for: so three times the largest
    error among thousands of measured pairs counts if it is more. (Measured: on image features, random and
    degenerate tables no error came near half of the result.)
    """
    size = norms + reach
    expected = _UNIT_ROUNDOFF * (0.25 * math.sqrt(dimensions) * norms * size + 6.0 * size * size)
    return torch.maximum(expected, 3 * measured * size * size).float()


def _relative_error(
    keys: Tensor, columns: Tensor, queries: Tensor, norms: Tensor, records: _Records
) -> float:
    """Largest error of some keys, ``(m, s)``, relative to the squared size that :func:`_tolerance` uses."""
    rows = torch.arange(len(keys)).repeat_interleave(keys.shape[1])
    exact = torch.from_numpy(
        pair_distances(
            queries.numpy(), records.on_cpu.numpy(), rows.numpy(), columns.contiguous().view(-1).numpy()
        )
    ).view(keys.shape)
    size = norms[:, None] + exact.sqrt()
    error = (keys - (exact - norms[:, None] ** 2)).abs() / (size * size).clamp_min(1e-300)
    return float(error.max())


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
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


def _cpu(features: Tensor) -> Tensor:
    return features.detach().to("cpu", torch.float32).contiguous()


def _check_pair(queries: Tensor, table: Tensor) -> None:
    for name, features in (("queries", queries), ("table", table)):
        if features.ndim != 2 or not features.is_floating_point():
            raise ValueError(
                f"{name}: shape {shape_text(features.shape)}, {features.dtype}; want float of shape (n, d)"
            )
    if queries.shape[1] != table.shape[1] or table.shape[1] == 0:
        raise ValueError(
            f"queries have d={queries.shape[1]} and the table has d={table.shape[1]}; want the same d for both, "
            "at least 1: use one extractor for both"
        )
