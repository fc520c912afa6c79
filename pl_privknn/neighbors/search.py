"""Exact nearest neighbours: products of blocks, then exact distances of candidates."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import InputError, check_int, compiled, shape_text

_UNIT_ROUNDOFF = 2.0**-24
_PRECISE = threading.RLock()


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
        with full_precision(device):
            products = left @ block.T
        row, column = (products >= bound[:, None]).cpu().nonzero(as_tuple=True)
        found.append((row, column + start))
    rows, columns = (torch.cat(parts) for parts in zip(*found, strict=True))
    counts = rows.bincount(minlength=len(queries)).tolist()
    return [part.numpy() for part in columns[rows.argsort(stable=True)].split(counts)]


Floats = NDArray[np.float32]

# Above every packed candidate.
_LAST = np.iinfo(np.int64).max
_ROWS_AT_A_TIME = 64
_PAIRS_AT_A_TIME = 4096
# What is known of each candidate takes some 30 bytes while they are put in order.
_CANDIDATES_AT_A_TIME = 1 << 20
# Pairs are compared by so many stretches of the table: in tables of fewer records, by the record.
_STRETCHES = 1 << 16


class Smallest:
    """The ``count`` smallest entries of each of many rows, whose columns come block by block.

    Entries are collected, and cut to the smallest ones whenever there are twice as many; from then on the largest of
    these is a bound that further ones must beat. So a block is looked at once, while it is in the processor's cache.

    Args:
        rows: how many.
        count: how many entries of each; at most as many as there will be columns.
        width: columns that are looked at between two cuts.
    """

    def __init__(self, rows: int, count: int, width: int) -> None:
        self._count, self._width = count, width
        self._packed = np.full((rows, 2 * count + width), _LAST, dtype=np.int64)
        self._filled = np.zeros(rows, dtype=np.int64)
        self._bounds = np.full(rows, np.inf, dtype=np.float32)

    def add(self, keys: Floats, first: int = 0) -> None:
        """Take further columns into account.

        Args:
            keys: shape ``(rows, n)``, finite; not changed.
            first: index of the first column, above those that were looked at.
        """
        for start in range(0, keys.shape[1], self._width):
            self._add(keys[:, start : start + self._width], first + start)

    def _add(self, keys: Floats, first: int) -> None:
        def work(start: int, stop: int) -> None:
            packed, filled = self._packed[start:stop], self._filled[start:stop]
            _let_through(keys[start:stop], self._bounds[start:stop], first, packed, filled)
            full = np.flatnonzero(filled > 2 * self._count)
            if len(full):
                cut = packed[full, : filled.max()]
                cut.partition(self._count - 1, axis=1)
                self._bounds[start + full] = unpack(cut[:, self._count - 1])[0]
                cut[:, self._count :] = _LAST
                packed[full, : cut.shape[1]] = cut
                filled[full] = self._count

        in_threads(work, len(keys), _ROWS_AT_A_TIME)

    def packed(self) -> NDArray[np.int64]:
        """The smallest entries, ascending, ties by column; shape ``(rows, count)``, see :func:`unpack`."""
        chosen = np.empty((len(self._packed), self._count), dtype=np.int64)

        def work(start: int, stop: int) -> None:
            part = self._packed[start:stop, : self._filled[start:stop].max()]
            part.partition(self._count - 1, axis=1)
            chosen[start:stop] = part[:, : self._count]
            chosen[start:stop].sort(axis=1)

        in_threads(work, len(chosen), _ROWS_AT_A_TIME)
        return chosen


def merge(left: NDArray[np.int64], right: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The ``count`` smallest of two sets of packed candidates, ascending; fewer if there are no more."""
    both = np.concatenate([left, right], axis=1)
    in_threads(lambda start, stop: both[start:stop].sort(axis=1), len(both), _ROWS_AT_A_TIME)
    return np.ascontiguousarray(both[:, :count])


def pack(keys: Floats, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack keys with indices below 2**31, element by element."""
    bits = np.ascontiguousarray(keys).view(np.int32)
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    return (ordered.astype(np.int64) << 32) | indices


def unpack(packed: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int32]]:
    """Keys and indices of packed candidates."""
    ordered = (packed >> 32).astype(np.int32)
    bits = ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))
    return bits.view(np.float32), (packed & 0x7FFFFFFF).astype(np.int32)


def order_candidates(
    queries: Floats, table: Floats, packed: NDArray[np.int64], tolerance: Floats, k: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Put the leading candidates of each query into their exact order.

    Args:
        queries: shape ``(m, d)``.
        table: shape ``(n, d)``.
        packed: ascending candidates, shape ``(m, length)``; a key is a squared distance plus a constant of its query.
        tolerance: shape ``(m,)``; no key of a query is further than this from its exact value.
        k: how many leading candidates matter, at most ``length``.

    Returns:
        ``(indices, complete)`` of shapes ``(m, k)`` and ``(m,)``. Where ``complete`` is False the list ends too
        early to say which records are the first ``k`` (unless it holds the whole table: then it is right).
    """
    chosen = np.empty((len(packed), k), dtype=np.int32)
    complete = np.empty(len(packed), dtype=np.bool_)
    step = max(1, _CANDIDATES_AT_A_TIME // packed.shape[1])
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        keys, indices = unpack(packed[rows])
        _order_rows(queries[rows], table, keys, indices, tolerance[rows], k, complete[rows])
        chosen[rows] = indices[:, :k]
    return chosen, complete


def _order_rows(
    queries: Floats,
    table: Floats,
    keys: Floats,
    indices: NDArray[np.int32],
    tolerance: Floats,
    k: int,
    complete: NDArray[np.bool_],
) -> None:
    """Sort each row of ``indices`` in place, and write to ``complete`` whether the row reaches past its near ties."""
    ends = np.zeros(keys.shape, dtype=np.int32)

    def find(start: int, stop: int) -> None:
        _find_groups(keys[start:stop], tolerance[start:stop], k, ends[start:stop], complete[start:stop])

    in_threads(find, len(keys), _ROWS_AT_A_TIME)
    exact = np.empty(keys.shape, dtype=np.float64)
    places = np.flatnonzero(ends)
    exact.reshape(-1)[places] = pair_distances(
        queries, table, places // keys.shape[1], indices.reshape(-1)[places]
    )
    in_threads(
        lambda start, stop: _sort_groups(exact[start:stop], indices[start:stop], ends[start:stop], k),
        len(keys),
        _ROWS_AT_A_TIME,
    )


def pair_distances(
    queries: Floats, table: Floats, rows: NDArray[np.int64], columns: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Squared distances of the pairs ``(queries[rows[i]], table[columns[i]])``; shape ``(len(rows),)``."""
    # Many queries ask about the same records: each is read from memory once for all of them.
    order = _by_stretch(columns, max(0, (len(table) - 1).bit_length() - _STRETCHES.bit_length() + 1))
    rows, columns = rows[order], columns[order].astype(np.int64, copy=False)  # compiled once
    ordered = np.empty(len(rows), dtype=np.float64)

    def work(start: int, stop: int) -> None:
        _pairs(queries, table, rows[start:stop], columns[start:stop], ordered[start:stop])

    in_threads(work, len(rows), _PAIRS_AT_A_TIME)
    out = np.empty_like(ordered)
    out[order] = ordered
    return out


@compiled()
def _let_through(keys, bounds, first, packed, filled):  # type: ignore[no-untyped-def]
    """Append the entries below each row's bound; among equal entries lower columns come first."""
    columns = keys.shape[1]
    bits = keys.view(np.int32)
    found = np.empty(columns + 1, dtype=np.int32)
    for row in range(keys.shape[0]):
        bound, total = bounds[row], 0
        for column in range(columns):  # without a branch: which entries pass can't be predicted
            found[total] = column
            total += keys[row, column] < bound
        place = filled[row]
        for i in range(total):
            value = bits[row, found[i]]
            ordered = value ^ ((value >> 31) & np.int32(0x7FFFFFFF))
            packed[row, place + i] = (np.int64(ordered) << 32) | (found[i] + first)
        filled[row] = place + total


@compiled(fastmath={"reassoc", "contract"})
def squared_distance(query, record):  # type: ignore[no-untyped-def]
    """Squared distance of two rows of one length, float64; a function of the two rows alone."""
    # "reassoc" lets the compiler sum in vector lanes; the order still depends on the length alone.
    total = 0.0
    for i in range(query.shape[0]):
        difference = np.float64(query[i]) - np.float64(record[i])
        total += difference * difference
    return total


@compiled()
def _sort_group(exact, indices, first, last):  # type: ignore[no-untyped-def]
    """Shell sort of ``[first, last)`` by ``(exact, index)``; most groups have two or three members."""
    gap = 1
    while gap < (last - first) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(first + gap, last):
            value, index = exact[i], indices[i]
            j = i - gap
            while j >= first and (exact[j] > value or (exact[j] == value and indices[j] > index)):
                exact[j + gap], indices[j + gap] = exact[j], indices[j]
                j -= gap
            exact[j + gap], indices[j + gap] = value, index
        gap //= 3


@compiled()
def _find_groups(keys, tolerance, k, ends, complete):  # type: ignore[no-untyped-def]
    """Write to each place of a group of keys too close to be ordered the place after the group's last one."""
    length = keys.shape[1]
    for row in range(len(keys)):
        first = 0
        while first < k:
            last = first + 1
            while last < length and keys[row, last] - keys[row, last - 1] <= 2 * tolerance[row]:
                last += 1
            if last - first > 1:
                ends[row, first:last] = last
            # A group cut off by the list's end may lack members that lie nearer than those it has.
            complete[row] = last < length
            first = last


@compiled()
def _by_stretch(columns, shift):  # type: ignore[no-untyped-def]
    """Positions in the order of the stretches of 2**shift records that ``columns`` fall into."""
    starts = np.zeros(_STRETCHES + 1, dtype=np.int64)
    for column in columns:
        starts[(column >> shift) + 1] += 1
    for i in range(_STRETCHES):
        starts[i + 1] += starts[i]
    order = np.empty(len(columns), dtype=np.int64)
    for i in range(len(columns)):
        stretch = columns[i] >> shift
        order[starts[stretch]] = i
        starts[stretch] += 1
    return order


@compiled()
def _sort_groups(exact, indices, ends, k):  # type: ignore[no-untyped-def]
    for row in range(len(ends)):
        first = 0
        while first < k:
            last = max(ends[row, first], first + 1)
            if last - first > 1:
                _sort_group(exact[row], indices[row], first, last)
            first = last


@compiled()
def _pairs(queries, table, rows, columns, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = squared_distance(queries[rows[i]], table[columns[i]])


def in_threads(work: Callable[[int, int], None], total: int, step: int, threads: int | None = None) -> None:
    """Run ``work(start, stop)`` over ``range(total)`` on some threads, by default as many as torch uses.

    Threads of our own: torch's parallel regions wait for every thread at their ends.
    """
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    threads = min(threads or torch.get_num_threads(), len(spans))
    if threads <= 1:
        for start, stop in spans:
            work(start, stop)
        return
    left = iter(spans)

    def pull() -> None:
        for start, stop in left:
            work(start, stop)

    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(pull) for _ in range(threads - 1)]
        pull()
        for other in others:
            other.result()


# 2**26 float32 keys are 256 MB: the most that a search holds at once besides its inputs and its result.
_KEYS_AT_A_TIME = 1 << 26
_QUERIES_AT_A_TIME = 1024
# A product of fewer rows runs slower; the most bounds the memory.
_FEWEST_QUERIES, _MOST_WORKERS = 200, 4
# Records are centred some 8 MB at a time, and selected from while their keys are in the processor's cache.
_VALUES_CENTRED_AT_A_TIME = 1 << 21
_FEWEST_ROWS, _MOST_ROWS = 256, 2048
# Other devices take some 32 MB at a time.
_VALUES_SENT_AT_A_TIME = 1 << 23
# Keys of features up to 1e18 can't overflow float32.
_LARGEST_SQUARE = 1e36
# A candidate's index takes 31 bits next to its key.
_MOST_RECORDS = 2**31 - 1
# Pairs of a block whose keys are compared with their exact values, at least.
_CHECKED_PAIRS = 4096


@torch.no_grad()
def nearest(
    queries: Tensor,
    table: Tensor,
    k: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """The ``k`` nearest records of each query by Euclidean distance, exactly.

    The order is that of distances computed in float64 from the float32 features, ties going to the lower index,
    whatever the block sizes and the device. Whether one record comes before another therefore depends on no
    third record. Besides the arguments and the result it takes some 0.1 GB, and 0.5 GB at most.

    Args:
        queries: floating point, shape ``(m, d)``.
        table: floating point, shape ``(n, d)``; float32 on the CPU is used without a copy.
        k: how many; all records where the table has fewer.
        device: where the matrix products run; the table's device unless given.

    Returns:
        int32 indices, shape ``(m, min(k, n))``, on the CPU, nearest first.

    Raises:
        ValueError: for shapes and dtypes that do not fit, for features that are not finite, and for more than 2³¹ − 1
            records: several processes hold those in shards.
    """
    _check_pair(queries, table)
    if len(table) > _MOST_RECORDS:
        raise InputError("table: more records than one search can number; hold them in shards")
    place = torch.device(device if device is not None else table.device)
    records = _Records(_near(table, place), _cpu(table), place)
    k = min(check_int("k", k), len(table))
    # More candidates than k, so that near ties around the k-th place are among them.
    length = min(len(table), k + max(16, k // 50))
    found = torch.empty((len(queries), k), dtype=torch.int32)

    @torch.inference_mode()  # a setting of each thread
    def search(start: int, stop: int) -> None:
        found[start:stop] = _nearest_block(_cpu(queries[start:stop]), records, k, length)

    if k:
        together = min(_queries_at_a_time(length), max(1, len(queries)))
        most = together // _FEWEST_QUERIES if records.device.type == "cpu" else 1
        with full_precision(records.device), _workers(most) as workers:
            in_threads(search, len(queries), -(-together // workers), workers)
    return found


class _Records(NamedTuple):
    """The table of one search: on the CPU, and where its blocks are read from for ``device``."""

    table: Tensor
    on_cpu: Tensor
    device: torch.device


def _near(table: Tensor, device: torch.device) -> Tensor:
    """Copy of the table on a GPU that has room for it, so that it is sent once per search; else the table."""
    values = table.numel() * 4
    if (
        device.type != "cuda"
        or not torch.cuda.is_available()
        or 2 * values > torch.cuda.mem_get_info(device)[0]
    ):
        return table
    return table.to(device, torch.float32)


def _queries_at_a_time(length: int) -> int:
    return max(1, min(_QUERIES_AT_A_TIME, _KEYS_AT_A_TIME // (4 * length)))


@contextlib.contextmanager
def _workers(most: int) -> Iterator[int]:
    """Number of threads that search side by side; they share torch's threads among their products meanwhile.

    Threads of one product wait for each other at its end, and keep a processor busy with that while a compiled
    function would need it.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(threads, most, _MOST_WORKERS))
    torch.set_num_threads(threads // workers)
    try:
        yield workers
    finally:
        torch.set_num_threads(threads)


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
        for part in again.split(_queries_at_a_time(longer)):
            found[part] = _nearest_block(queries[part], records, k, longer)
    return found


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
    """Candidates by sorting on another device, where sending keys is slow and sorting them is fast."""
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
    The keys are overwritten by the next block. Products need :func:`full_precision` around them.
    """
    table, device = records.table, records.device
    block_size = min(block_size, max(1, len(table)))
    values = _VALUES_CENTRED_AT_A_TIME if device.type == "cpu" else _VALUES_SENT_AT_A_TIME
    inner = max(_FEWEST_ROWS, values // table.shape[1])
    centre = centre.to(device)
    left = (queries.to(device) - centre).mul_(-2)
    buffer = torch.empty(len(queries) * block_size, device=device)
    memory = torch.empty((min(inner, block_size), table.shape[1]), device=device)
    sound = torch.ones((), dtype=torch.bool, device=device)
    for start in range(0, len(table), block_size):
        block = table[start : start + block_size]
        keys = buffer[: len(queries) * len(block)].view(len(queries), len(block))
        for first in range(0, len(block), inner):
            some = block[first : first + inner].to(device, torch.float32)
            centred = torch.sub(some, centre, out=memory[: len(some)])
            norms = torch.linalg.vector_norm(centred, dim=1).square_()
            sound &= (norms < _LARGEST_SQUARE).all()  # false for NaN, too
            torch.addmm(norms, left, centred.T, out=keys[:, first : first + inner])
        yield start, keys
    if not bool(sound):  # once, since another device waits where it is looked at
        raise ValueError(
            "table: some features are NaN, infinite or above 1e18; leave them out or rescale them"
        )


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
    """Bound on a key's distance from its exact value, float32 ``(m,)``, for records within ``reach`` of the query.

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
def full_precision(device: torch.device, autocast: bool = False) -> Iterator[None]:
    """Context with deterministic products and convolutions in true float32, whatever precision a training has set.

    Settings are the process's, as is the number of torch's threads: one thread at a time is in such a block, on
    behalf of all that work for it.

    Args:
        device: of the tensors.
        autocast: keep the precision that a training has set by ``torch.autocast``.
    """
    settings: list[tuple[Any, str, Any]] = []
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        parts = [torch.backends.cuda.matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)]
        settings += [(cudnn, "deterministic", True), (cudnn, "benchmark", False)]
        if parts[1] is None:  # torch before 2.9
            settings.append((cudnn, "allow_tf32", False))
    else:
        parts = [getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn")]
    settings += [(part, "fp32_precision", "ieee") for part in parts if hasattr(part, "fp32_precision")]
    mixed = contextlib.nullcontext() if autocast else torch.autocast(device.type, enabled=False)
    with _PRECISE, mixed, contextlib.ExitStack() as restored:
        if not hasattr(parts[0], "fp32_precision"):  # torch before 2.9
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        for owner, name, value in settings:
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _cpu(features: Tensor) -> Tensor:
    return features.detach().to("cpu", torch.float32).contiguous()


def _check_pair(queries: Tensor, table: Tensor) -> None:
    for name, features in (("queries", queries), ("table", table)):
        if features.ndim != 2 or not features.is_floating_point():
            raise ValueError(
                f"{name}: shape {shape_text(features.shape)}, {features.dtype}; expected float of shape (n, d)"
            )
    if queries.shape[1] != table.shape[1] or table.shape[1] == 0:
        raise ValueError(
            f"queries have d={queries.shape[1]} and the table has d={table.shape[1]}; expected the same d for both, "
            "at least 1: use one extractor for both"
        )
