"""Histograms of oriented gradients for batches of images, equal to scikit-image's one-image function."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_choice, check_installed, check_int, compiled, shape_text
from pl_privknn.features.base import Extractor
from pl_privknn.neighbors.search import in_threads

BLOCK_NORMS = ("L1", "L1-sqrt", "L2", "L2-Hys")

_EPS = 1e-5
_PIXELS_AT_A_TIME = 1 << 24
# Images that a thread takes at once: some milliseconds of work.
_STRETCH = 256


class HOG(Extractor):
    """Histograms of oriented gradients (Dalal & Triggs 2005), an Extractor.

    Gives the same vectors as ``skimage.feature.hog`` for each image: centred differences with zero borders, the
    channel with the largest gradient at each pixel, unsigned orientations in hard bins, means over cells, and
    normalised overlapping blocks. The defaults suit 28 x 28 images (1,296 values). With the block norm ``"L2-Hys"``
    and without ``transform_sqrt`` many images are computed at a time, by a compiled kernel on the CPU and by tensors
    elsewhere and in exported models; with other settings scikit-image computes them one after another, and a model
    can't be exported.

    Args:
        orientations: number of orientation bins in 180 degrees.
        pixels_per_cell: rows and columns of a cell; one number for square cells.
        cells_per_block: rows and columns of a block, in cells; one number for square blocks.
        block_norm: ``"L1"``, ``"L1-sqrt"``, ``"L2"`` or ``"L2-Hys"``.
        transform_sqrt: take the square root of each pixel first; images must not be negative.

    Raises:
        ImportError: for a HOG of scikit-image where that is not installed.
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> HOG()(torch.rand(5, 1, 28, 28)).shape
        torch.Size([5, 1296])
    """

    def __init__(
        self,
        orientations: int = 9,
        pixels_per_cell: int | Sequence[int] = (4, 4),
        cells_per_block: int | Sequence[int] = (2, 2),
        block_norm: str = "L2-Hys",
        transform_sqrt: bool = False,
    ) -> None:
        self.orientations = check_int("orientations", orientations)
        self.pixels_per_cell = _pair("pixels_per_cell", pixels_per_cell)
        self.cells_per_block = _pair("cells_per_block", cells_per_block)
        self.block_norm = check_choice("block_norm", block_norm, BLOCK_NORMS)
        self.transform_sqrt = bool(transform_sqrt)
        if not self._compiles:
            check_installed("HOG with another block_norm, or transform_sqrt,", "papers", "skimage")

    @property
    def _compiles(self) -> bool:
        """Whether the kernel of this module computes it; scikit-image does otherwise."""
        return self.block_norm == "L2-Hys" and not self.transform_sqrt

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """Number of values per image.

        Args:
            image_shape: ``(channels, height, width)`` or ``(height, width)``, in pixels.

        Raises:
            ValueError: if the image is smaller than one block.
        """
        blocks_down, blocks_across = self._blocks(tuple(image_shape)[-2:])
        return blocks_down * blocks_across * math.prod(self.cells_per_block) * self.orientations

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features of a batch of images.

        Args:
            images: floating point, shape ``(n, channels, height, width)``, values in [0, 1].

        Returns:
            float32, shape ``(n, feature_size)``, on the device of ``images``; for each image the order is that
            of ``skimage.feature.hog``: block row, block column, cell row, cell column, orientation.

        Raises:
            ValueError: if ``images`` has another shape or dtype, is smaller than one block, or is negative
                where ``transform_sqrt`` is set.
        """
        if images.ndim != 4 or not images.is_floating_point() or images.shape[1] < 1:
            raise ValueError(
                f"images: shape {shape_text(images.shape)}, {images.dtype}; expected float32 in [0, 1] of shape "
                "(n, channels, height, width). Divide whole numbers by 255, give a single image as image[None]"
            )
        if self.transform_sqrt and bool((images < 0).any()):
            raise ValueError("images: some values are negative, transform_sqrt=True needs values in [0, 1]")
        features = images.new_empty((len(images), self.feature_size(images.shape[1:])), dtype=torch.float32)
        # Work on some 16 million pixels at a time, so that the peak does not grow with the number of images.
        step = max(1, _PIXELS_AT_A_TIME // math.prod(images.shape[1:]))
        for start in range(0, len(images), step):
            batch = images[start : start + step].float()
            if not self._compiles:
                features[start : start + step] = self._one_by_one(batch)
            # A file that is exported has torch alone.
            elif batch.device.type == "cpu" and not torch.compiler.is_compiling():
                self._compiled(batch, features[start : start + step])
            else:
                features[start : start + step] = self._batch(batch)
        return features

    def _one_by_one(self, images: Tensor) -> Tensor:
        from skimage.feature import hog

        if torch.compiler.is_compiling():
            raise ValueError(
                "block_norm, transform_sqrt: HOG can be exported with 'L2-Hys' and False, the defaults, alone"
            )
        found = [
            hog(
                image,
                self.orientations,
                self.pixels_per_cell,
                self.cells_per_block,
                self.block_norm,
                transform_sqrt=self.transform_sqrt,
                channel_axis=0,
            )
            for image in images.cpu().numpy()
        ]
        return torch.from_numpy(np.array(found, dtype=np.float32))

    def _compiled(self, images: Tensor, features: Tensor) -> None:
        boundaries = [_cosine_and_sine(i, self.orientations) for i in range(1, self.orientations)]
        _describe_all(
            images.detach().contiguous().numpy(),
            np.array(boundaries, dtype=np.float64).reshape(-1, 2),
            self.pixels_per_cell,
            self.cells_per_block,
            _EPS,
            features.numpy(),
        )

    def _batch(self, images: Tensor) -> Tensor:
        rows, columns = _gradients(images)
        magnitude = torch.hypot(rows, columns)
        bins = _orientation_bins(rows, columns, self.orientations)
        histograms = self._cell_means(magnitude, bins)
        (down, across), (block_down, block_across) = self._blocks(images.shape[-2:]), self.cells_per_block
        # unfold gives (n, blocks down, blocks across, orientations, cells down, cells across)
        blocks = histograms.unfold(1, block_down, 1).unfold(2, block_across, 1)
        flat = blocks.permute(0, 1, 2, 4, 5, 3).reshape(len(images), down, across, -1)
        return _normalize(flat).flatten(1)

    def _cell_means(self, magnitude: Tensor, bins: Tensor) -> Tensor:
        """Mean magnitude per cell and orientation: ``(n, cells down, cells across, orientations)``."""
        (cell_down, cell_across), (height, width) = self.pixels_per_cell, magnitude.shape[-2:]
        down, across = height // cell_down, width // cell_across
        inside = (slice(None), slice(down * cell_down), slice(across * cell_across))
        magnitude, bins = magnitude[inside], bins[inside]
        means = magnitude.new_empty((len(magnitude), down, across, self.orientations))
        for orientation in range(self.orientations):
            # One masked sum per bin instead of a scatter: the same order of summation on every device and run.
            share = magnitude * (bins == orientation)
            cells = share.reshape(-1, down, cell_down, across, cell_across).sum(dim=2).sum(dim=-1)
            means[..., orientation] = cells / (cell_down * cell_across)
        return means

    def _blocks(self, size: Sequence[int]) -> tuple[int, int]:
        """Numbers of blocks that fit, down and across."""
        counts = [
            int(pixels) // cell - block + 1
            for pixels, cell, block in zip(size, self.pixels_per_cell, self.cells_per_block, strict=True)
        ]
        if min(counts) < 1:
            least = [c * b for c, b in zip(self.pixels_per_cell, self.cells_per_block, strict=True)]
            raise ValueError(
                f"images of {size[0]} x {size[1]} pixels are smaller than one block of {least[0]} x {least[1]} "
                f"(pixels_per_cell={self.pixels_per_cell} times cells_per_block={self.cells_per_block}): "
                "choose smaller cells or blocks, or enlarge the images"
            )
        return counts[0], counts[1]


def _gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    """Centred differences, zero at borders, of the channel with the largest gradient at each pixel.

    float32 differences like scikit-image's, returned in float64, each of shape ``(n, height, width)``.
    """
    rows, columns = torch.zeros_like(images), torch.zeros_like(images)
    if images.shape[-2] > 2:
        rows[..., 1:-1, :] = images[..., 2:, :] - images[..., :-2, :]
    if images.shape[-1] > 2:
        columns[..., 1:-1] = images[..., 2:] - images[..., :-2]
    rows, columns = rows.double(), columns.double()
    if images.shape[1] == 1:
        return rows[:, 0], columns[:, 0]
    # Rounded to float32 before the comparison, so that channels tie exactly where they tie for scikit-image;
    # the first of them wins. (Where arg-max finds ties its choice is not documented, hence the loop.)
    magnitude = torch.hypot(rows, columns).float()
    best, best_rows, best_columns = magnitude[:, 0], rows[:, 0], columns[:, 0]
    for channel in range(1, images.shape[1]):
        larger = magnitude[:, channel] > best
        best = torch.where(larger, magnitude[:, channel], best)
        best_rows = torch.where(larger, rows[:, channel], best_rows)
        best_columns = torch.where(larger, columns[:, channel], best_columns)
    return best_rows, best_columns


def _orientation_bins(rows: Tensor, columns: Tensor, orientations: int) -> Tensor:
    """Index of the bin that holds each gradient's direction modulo 180 degrees; uint8 or int16.

    A direction is at or past the angle θ when ``row cos θ - column sin θ >= 0`` in the upper half-plane. Only
    products and comparisons: 45 degrees, which real images are full of, falls into the right bin exactly, which
    an arc tangent with a rounding error does not guarantee.
    """
    below = (rows < 0) | ((rows == 0) & (columns < 0))
    rows = torch.where(below, -rows, rows)
    columns = torch.where(below, -columns, columns)
    bins = torch.zeros_like(rows, dtype=torch.uint8 if orientations < 256 else torch.int16)
    for boundary in range(1, orientations):
        cosine, sine = _cosine_and_sine(boundary, orientations)
        bins += rows * cosine >= columns * sine
    return bins


def _cosine_and_sine(boundary: int, orientations: int) -> tuple[float, float]:
    """Cosine and sine of ``boundary / orientations`` half turns, exact at 90 and symmetric about 45 degrees."""
    if 2 * boundary > orientations:
        cosine, sine = _cosine_and_sine(orientations - boundary, orientations)
        return -cosine, sine
    if 4 * boundary > orientations:
        angle = math.pi * (orientations - 2 * boundary) / (2 * orientations)
        return math.sin(angle), math.cos(angle)
    if 4 * boundary == orientations:
        return math.sqrt(0.5), math.sqrt(0.5)
    angle = math.pi * boundary / orientations
    return math.cos(angle), math.sin(angle)


def _normalize(blocks: Tensor) -> Tensor:
    """Normalise along the last dimension by "L2-Hys", as scikit-image does."""
    scaled = blocks / ((blocks * blocks).sum(dim=-1, keepdim=True) + _EPS**2).sqrt()
    clipped = scaled.clamp(max=0.2)
    return clipped / ((clipped * clipped).sum(dim=-1, keepdim=True) + _EPS**2).sqrt()


def _pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    numbers = (value, value) if isinstance(value, int) else tuple(value)
    if len(numbers) != 2:
        raise ValueError(f"{name}={value!r} must be one whole number or two, (rows, columns)")
    return check_int(name, numbers[0]), check_int(name, numbers[1])


def _describe_all(
    images: NDArray[np.float32],
    boundaries: NDArray[np.float64],
    cell: tuple[int, int],
    block: tuple[int, int],
    eps: float,
    features: NDArray[np.float32],
) -> None:
    """HOG features of images, with blocks normalised by "L2-Hys"; one image at a time, so that it stays in the cache.

    Threads are our own, one stretch of images each: between many small parallel regions, other programs that want the
    cores would be waited for each time.

    Args:
        images: shape ``(n, channels, height, width)``, one after the other in memory.
        boundaries: cosine and sine of the angle between each two neighbouring bins, shape ``(orientations − 1, 2)``.
        cell: rows and columns of a cell, in pixels.
        block: rows and columns of a block, in cells.
        eps: what keeps empty blocks from being divided by zero.
        features: where they go, shape ``(n, feature_size)``.
    """

    def work(start: int, stop: int) -> None:
        _describe_stretch(images[start:stop], boundaries, *cell, *block, eps, features[start:stop])

    in_threads(work, len(images), _STRETCH)


@compiled(error_model="numpy")
def _describe_stretch(
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
