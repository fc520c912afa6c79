"""Which pairs of a family can be the best one somewhere on the induction's grid: most can't, and are not tried there.

The induction of :mod:`pl_privknn.privacy.accounting.induction` takes, at every grid point and release, the best of
all pairs of a family. Its result does not change by a bit where pairs that provably lose are left out.

**Everywhere.** A pair of two outcomes with likelihood ratios a < 1 < b takes W(r) to the chord of W over [ra, rb], at
r. For convex W a wider interval gives a higher chord, so a pair whose interval lies within another's never counts.

**Near a point.** On the grid r_m = e^{mh} let V be the values, piecewise linear in r, and κ_m ≥ 0 the kink of V at
r_m. A pair turns V(r_i) into Σ_d c(d)·V(r_{i+d}), with Σ c(d) = Σ c(d)e^{dh} = 1. By summation by parts it gains

    Σ_d c(d)·V(r_{i+d}) − V(r_i) = r_i Σ_d κ_{i+d}·t(d),     t(d) = Σ_j c(j)(e^{jh} − e^{dh})₊ − (1 − e^{dh})₊ ≥ 0.

Write v_m = V_{m+1} − V_m − e^h(V_m − V_{m−1}), which is r_m·κ_m·(e^h − 1), and τ(d) = t(d)e^{−dh}/(e^h − 1): the gain
is Σ_d v_{i+d}·τ(d). Where every ratio v_{m+1}/v_m about i lies in [e^α, e^β], v_{i+d}/v_i lies between e^{αd} and
e^{βd}. So pair k loses to pair g at i if Σ_d (τ_g − τ_k)(d)·w(d) > 0, where w(d) is the one of the two that is worse
for g. Values become smooth after some releases: α and β are then close together, and of hundreds of pairs a handful
is left, neighbours of each other in the order of their ratios.

**Rounding.** The v are differences of values: where one is less than 1e-9 of its value nothing is concluded, so their
relative error stays below 1e-6, by which α and β are moved apart. A pair counts as beaten by a margin of 1e-4 of the
gain, and at least 0.01·v_i, far more than the rounding of weights and sums.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pl_privknn._compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Grid points whose ratios are looked at together.
BLOCK = 32
#: Ranges of ln(v_{m+1}/v_m) are 2^c·UNIT wide, c = 0 … CLASSES − 1, and begin at multiples of half their width.
UNIT = 2.0**-12
CLASSES = 12
# Pairs that move ln r by more cells are always tried, and all are where the table of gains would be large.
_WIDEST = 512
_LARGEST = 4_000_000
# Likelihood ratios are hardly more accurate than this.
_SAME = 2e-15


def undominated(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """The pairs that no other one of the family dominates, in the order of their likelihood ratios.

    Args:
        p: probabilities with the record, shape ``(pairs, outcomes)``.
        q: probabilities without it, same shape.

    Returns:
        The rows that are left; all of them, in order, where there are more than two outcomes.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = p / q
    if np.isnan(ratios).any():
        return p, q
    low, high = ratios.min(axis=1), ratios.max(axis=1)
    order = np.lexsort((-high, low))
    if p.shape[1] == 2:
        before = np.concatenate([[0.0], np.maximum.accumulate(high[order])[:-1]])
        order = order[high[order] > before * (1 + _SAME)]
    return p[order], q[order]


def gains(shifts: Ints, near: Floats, far: Floats, spacing: float) -> Floats:
    """τ(d) of the leading pairs, as many as can be left out where they lose.

    Args:
        shifts: grid cells by which an outcome moves ln r, shape ``(pairs, outcomes)``.
        near: weight of the cell's left end, same shape.
        far: weight of its right end.
        spacing: h of the grid.

    Returns:
        Shape ``(n, 2·reach + 1)``, n at most the number of pairs; no rows where nothing may be left out.
    """
    scale = near * np.exp(spacing * shifts) + far * np.exp(spacing * (shifts + 1))
    whole = np.maximum(np.abs((near + far).sum(axis=1) - 1), np.abs(scale.sum(axis=1) - 1)) <= 1e-13
    plain = whole & (np.abs(shifts).max(axis=1) < _WIDEST)
    number = len(plain) if plain.all() else int(np.argmin(plain))
    reach = int(np.abs(shifts[:number]).max(initial=0)) + 1
    if number * (2 * reach + 1) > _LARGEST:
        number = 0
    cells = np.arange(-reach, reach + 1)
    table = np.zeros((number, len(cells)))
    for weight, place in ((near, shifts), (far, shifts + 1)):
        for o in range(shifts.shape[1]):
            apart = np.exp(spacing * place[:number, o])[:, None] - np.exp(spacing * cells)
            # For d < 0 the same sum seen from the other side, without cancellation.
            table += weight[:number, o, None] * np.maximum(np.where(cells < 0, -apart, apart), 0.0)
    return table * np.exp(-spacing * cells) / math.expm1(spacing)


@compiled(error_model="numpy")
def find_ratios(
    values: Floats, zero: int, first: int, last: int, growth: float, least: Floats, most: Floats
) -> None:
    """Smallest and largest v_{m+1}/v_m of each block of grid points; 0 and infinity where they say nothing.

    Args:
        values: U at all grid points; V = U + (r − 1)₊.
        zero: place of r = 1.
        first: place of the first value that is not extrapolated.
        last: place after the last one.
        growth: e^h.
        least: where the smallest go, shape ``(blocks,)``.
        most: where the largest go.
    """
    for block in range(least.shape[0]):
        begin = block * BLOCK
        least[block], most[block] = 0.0, np.inf
        if begin <= first or begin + BLOCK + 1 >= last - 1:
            continue
        low, high, sound = np.inf, 0.0, True
        kink = values[begin + 1] - values[begin] - growth * (values[begin] - values[begin - 1])
        if begin == zero:
            kink += growth - 1
        for m in range(begin, begin + BLOCK):
            following = values[m + 2] - values[m + 1] - growth * (values[m + 1] - values[m])
            if m + 1 == zero:
                following += growth - 1
            sound = sound and kink > 1e-9 * values[m] and following > 1e-9 * values[m + 1]
            ratio = following / kink
            low, high = min(low, ratio), max(high, ratio)
            kink = following
        if sound:
            least[block], most[block] = low, high


@compiled(error_model="numpy")
def contenders(table: Floats, low: float, high: float, known: Ints) -> tuple[int, int]:
    """First and last + 1 of the leading pairs that may be the best where all ratios lie in [low, high].

    Args:
        table: what :func:`gains` returned.
        low: smallest ratio.
        high: largest one.
        known: ranges found before, shape ``(CLASSES, 4 / UNIT + 4, 2)``; −1 to begin with.
    """
    pairs = table.shape[0]
    if not (low > 0.4 and high < 2.5):
        return 0, pairs
    bottom, top = math.log(low) - 1e-6, math.log(high) + 1e-6
    width, kind = UNIT, 0
    start = math.floor(bottom / (width / 2))
    while start * width / 2 + width < top:
        width, kind = 2 * width, kind + 1
        if kind == CLASSES:
            return 0, pairs
        start = math.floor(bottom / (width / 2))
    place = int(start + 2 / width) + 1
    if known[kind, place, 0] < 0:
        found = _unbeaten(table, start * width / 2, start * width / 2 + width)
        known[kind, place, 0], known[kind, place, 1] = found
    return known[kind, place, 0], known[kind, place, 1]


@compiled(error_model="numpy")
def _unbeaten(table: Floats, low: float, high: float) -> tuple[int, int]:
    pairs, cells = table.shape
    reach = cells // 2
    middle = np.exp((low + high) / 2 * (np.arange(cells) - reach))
    champion, best = 0, -1.0
    for k in range(pairs):
        gain = 0.0
        for d in range(cells):
            gain += table[k, d] * middle[d]
        if gain > best:
            champion, best = k, gain
    first, last = pairs, 0
    for k in range(pairs):
        ahead = 0.0
        for d in range(cells):
            difference = table[champion, d] - table[k, d]
            slope = low if (difference > 0) == (d > reach) else high
            ahead += difference * math.exp(slope * (d - reach))
        if ahead <= max(1e-4 * best, 0.01):
            first, last = min(first, k), k + 1
    return first, last
