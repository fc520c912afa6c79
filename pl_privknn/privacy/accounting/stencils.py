"""One release after the other on the induction's grid: interpolation weights, and the compiled loop over them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from pl_privknn._compiled import compiled
from pl_privknn.privacy.accounting.contenders import (
    BLOCK,
    CLASSES,
    UNIT,
    Floats,
    Ints,
    contenders,
    find_ratios,
    gains,
)

_TILE = 128


@dataclasses.dataclass(frozen=True)
class Stencils:
    """Interpolation weights of every outcome of every pair, and what (r − 1)₊ contributes beside U.

    Attributes:
        shifts: grid cells by which an outcome moves ln r, shape ``(pairs, outcomes)``.
        near: weight of the cell's left end, same shape.
        far: weight of its right end.
        starts: position of the first grid point with a direct contribution, shape ``(pairs,)``.
        stops: position after the last one.
        offsets: where a pair's contributions begin in ``direct``.
        direct: contributions Σ(r·p − q)₊ for r < 1 and Σ(q − r·p)₊ for r ≥ 1, all pairs in a row.
        pad: grid points to keep beyond each end, so that shifted reads stay inside.
        gains: what :func:`~pl_privknn.privacy.accounting.contenders.gains` returned for them.
    """

    shifts: Ints
    near: Floats
    far: Floats
    starts: Ints
    stops: Ints
    offsets: Ints
    direct: Floats
    pad: int
    gains: Floats

    @classmethod
    def build(
        cls, p: Floats, q: Floats, kept: NDArray[np.bool_], spacing: float, left: int, right: int
    ) -> Stencils:
        """Weights of the pairs ``(p, q)`` of shape ``(pairs, outcomes)``, where ``kept``, on −left … right cells."""
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.log(p / q)
        moving = kept & np.isfinite(losses)
        jump = np.where(moving, losses, 0.0)
        shifts = np.floor(jump / spacing).astype(np.int64)
        weight = np.clip(np.expm1(jump - shifts * spacing) / math.expm1(spacing), 0.0, 1.0)
        # Farther than the whole grid: the edge's value, which is not smaller than the value there.
        span = left + right + 2
        outside = np.abs(shifts) > span
        shifts = np.clip(shifts, -span, span)
        weight[outside] = 0.0
        mass = np.where(moving, q, 0.0)

        starts, stops = np.empty(len(p), dtype=np.int64), np.empty(len(p), dtype=np.int64)
        pieces: list[Floats] = []
        for k in range(len(p)):
            which = kept[k] & (p[k] != q[k])
            low = -np.max(losses[k, which], initial=0.0) / spacing
            high = -np.min(losses[k, which], initial=0.0) / spacing
            first = int(max(math.floor(max(low, -left)), -left))
            last = int(min(math.ceil(min(high, right)), right))
            log_r = spacing * np.arange(first, last + 1)
            piece = np.zeros(len(log_r))
            for o in np.flatnonzero(which):
                if p[k, o] == 0:
                    piece += np.where(log_r < 0, 0.0, q[k, o])
                elif q[k, o] == 0:
                    piece += np.where(log_r < 0, p[k, o] * np.exp(np.minimum(log_r, 0.0)), 0.0)
                else:
                    gain = q[k, o] * np.expm1(np.minimum(log_r + losses[k, o], 700.0))
                    piece += np.maximum(np.where(log_r < 0, gain, -gain), 0.0)
            starts[k], stops[k] = first + left, last + 1 + left
            pieces.append(piece)
        lengths = stops - starts
        near, far = mass * (1 - weight), mass * weight
        return cls(
            shifts,
            near,
            far,
            starts,
            stops,
            np.cumsum(lengths) - lengths,
            np.concatenate(pieces),
            int(np.max(np.abs(shifts))) + 2,
            gains(shifts, near, far, spacing),
        )

    def run(self, slack: Floats, left: Ints, right: Ints, wanted: Ints, spacing: float) -> Floats:
        """U after each wanted number of releases, on the largest range.

        Args:
            slack: what is added after each release, at every grid point.
            left: grid points below r = 1 that are computed at each release.
            right: grid points above it.
            wanted: numbers of releases, ascending.
            spacing: h of the grid.

        Returns:
            Shape ``(len(wanted), len(slack))``.
        """
        moves = (self.shifts, self.near, self.far)
        direct = (self.starts, self.stops, self.offsets, self.direct)
        decay = np.exp(-spacing * np.arange(len(slack) + self.pad + 1))
        growth = math.exp(spacing)
        return _run(*moves, *direct, slack, left, right, decay, self.pad, wanted, self.gains, growth)


@compiled(error_model="numpy")
def _run(
    shifts: Ints,
    near: Floats,
    far: Floats,
    starts: Ints,
    stops: Ints,
    offsets: Ints,
    direct: Floats,
    slack: Floats,
    left: Ints,
    right: Ints,
    decay: Floats,
    pad: int,
    wanted: Ints,
    table: Floats,
    growth: float,
) -> Floats:
    pairs, outcomes = shifts.shape
    # The leading pairs are tried where they may be the best, the others everywhere.
    leading, reach = table.shape[0], table.shape[1] // 2
    points = slack.shape[0]
    zero = pad + left[-1]
    current = np.zeros(points + 2 * pad)
    following = np.zeros(points + 2 * pad)
    gain = np.zeros(_TILE)
    result = np.zeros((wanted.shape[0], points))
    blocks = current.shape[0] // BLOCK + 1
    least, most = np.zeros(blocks), np.zeros(blocks)
    known = np.full((CLASSES, int(4 / UNIT) + 4, 2), -1)
    low, high, done = zero, zero, 0
    for step in range(1, wanted[-1] + 1):
        if leading:
            find_ratios(current, zero, low, high, growth, least, most)
        low, high = zero - left[step - 1], zero + right[step - 1] + 1
        for begin in range(low, high, _TILE):
            end = min(begin + _TILE, high)
            size = end - begin
            lowest, highest = np.inf, 0.0
            for block in range((begin - reach) // BLOCK, (end - 1 + reach) // BLOCK + 1):
                lowest, highest = min(lowest, least[block]), max(highest, most[block])
            first, last = contenders(table, lowest, highest, known)
            best = following[begin:end]
            for i in range(size):
                best[i] = 0.0
            for place in range(first, last + pairs - leading):
                k = place if place < last else place - last + leading
                # Two outcomes at a time, so that pass/fail releases touch the buffer once.
                a, b, at = near[k, 0], far[k, 0], begin + shifts[k, 0]
                c, d, to = near[k, 1], far[k, 1], begin + shifts[k, 1]
                one, two = current[at : at + size + 1], current[to : to + size + 1]
                for i in range(size):
                    gain[i] = a * one[i] + b * one[i + 1] + c * two[i] + d * two[i + 1]
                for o in range(2, outcomes):
                    a, b, at = near[k, o], far[k, o], begin + shifts[k, o]
                    one = current[at : at + size + 1]
                    for i in range(size):
                        gain[i] += a * one[i] + b * one[i + 1]
                origin = offsets[k] - starts[k] - pad
                for i in range(max(starts[k] + pad, begin), min(stops[k] + pad, end)):
                    gain[i - begin] += direct[origin + i]
                for i in range(size):
                    best[i] = max(best[i], gain[i])
            for i in range(size):
                best[i] += slack[begin + i - pad]
        for i in range(low):
            following[i] = following[low] * decay[low - i]
        for i in range(high, following.shape[0]):
            following[i] = following[high - 1]
        current, following = following, current
        if step == wanted[done]:
            result[done, :] = current[pad : pad + points]
            done += 1
    return result
