"""Histograms of oriented gradients on the processor, compiled: an image at a time, all of it in the nearest cache.

The same steps as those on tensors in :mod:`pl_privknn.features.hog`, which other devices run; only the order of sums
differs. Threads are our own, one stretch of images each: between many small parallel regions, other programs that
want the cores would be waited for each time.
"""

from __future__ import annotations

import collections
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from pl_privknn._compiled import compiled

#: Images a stretch: some milliseconds of work.
_STRETCH = 256


def describe(
    images: NDArray[np.float32],
    boundaries: NDArray[np.float64],
    cell: tuple[int, int],
    block: tuple[int, int],
    eps: float,
    features: NDArray[np.float32],
) -> None:
    """Features of images, their blocks normalised by "L2-Hys".

    Args:
        images: shape ``(n, channels, height, width)``, one after the other in memory.
        boundaries: cosine and sine of the angle between each two neighbouring bins, shape ``(orientations − 1, 2)``.
        cell: rows and columns of a cell, in pixels.
        block: rows and columns of a block, in cells.
        eps: what keeps empty blocks from being divided by zero.
        features: where they go, shape ``(n, feature_size)``.
    """

    def work(start: int) -> None:
        part, into = images[start : start + _STRETCH], features[start : start + _STRETCH]
        _describe(part, boundaries, *cell, *block, eps, into)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        collections.deque(pool.map(work, range(0, len(images), _STRETCH)), maxlen=0)  # raises what was raised


@compiled(error_model="numpy")
def _describe(
    images: NDArray[np.float32],
    boundaries: NDArray[np.float64],
    cell_down: int,
    cell_across: int,
    block_down: int,
    block_across: int,
    eps: float,
    features: NDArray[np.float32],
) -> None:
    channels, height, width = images.shape[1], images.shape[2], images.shape[3]
    orientations = len(boundaries) + 1
    down, across = height // cell_down, width // cell_across
    means = np.empty((down, across, orientations))
    values = np.empty(block_down * block_across * orientations)
    rows, columns, sizes = np.empty(width), np.empty(width), np.empty(width, np.float32)
    steep, flat = np.zeros(width, np.float32), np.zeros(width, np.float32)
    bins = np.empty(width, np.int64)
    for n in range(len(images)):
        means[:] = 0.0
        for y in range(down * cell_down):
            for channel in range(channels):
                line = images[n, channel, y]
                if 0 < y < height - 1:
                    above, below = images[n, channel, y - 1], images[n, channel, y + 1]
                    for x in range(width):
                        steep[x] = below[x] - above[x]
                else:
                    steep[:] = 0
                for x in range(1, width - 1):
                    flat[x] = line[x + 1] - line[x - 1]
                if channels == 1:
                    rows[:], columns[:] = steep, flat
                    continue
                for x in range(width):
                    row, column = np.float64(steep[x]), np.float64(flat[x])
                    size = np.float32(math.sqrt(row * row + column * column))
                    if channel == 0 or size > sizes[x]:
                        sizes[x], rows[x], columns[x] = size, row, column
            for x in range(width):
                bins[x] = 0
                if rows[x] < 0 or (rows[x] == 0 and columns[x] < 0):
                    rows[x], columns[x] = -rows[x], -columns[x]
            for boundary in range(orientations - 1):
                cosine, sine = boundaries[boundary, 0], boundaries[boundary, 1]
                for x in range(width):
                    bins[x] += rows[x] * cosine >= columns[x] * sine
            for x in range(width):
                rows[x] = math.sqrt(rows[x] * rows[x] + columns[x] * columns[x])
            for i in range(across):
                sums = means[y // cell_down, i]
                for x in range(i * cell_across, (i + 1) * cell_across):
                    sums[bins[x]] += rows[x]
        means /= cell_down * cell_across
        place = 0
        for top in range(down - block_down + 1):
            for side in range(across - block_across + 1):
                at = 0
                for i in range(block_down):
                    for j in range(block_across):
                        for o in range(orientations):
                            values[at] = means[top + i, side + j, o]
                            at += 1
                values /= math.sqrt((values * values).sum() + eps * eps)
                for i in range(at):
                    if values[i] > 0.2:
                        values[i] = 0.2
                values /= math.sqrt((values * values).sum() + eps * eps)
                features[n, place : place + at] = values
                place += at
