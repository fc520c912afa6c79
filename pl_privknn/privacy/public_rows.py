"""Public rows of a private table: drawn from its released histograms and second moments."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.ledger import LedgerRun
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.mechanisms.steps import noise_for_steps
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.records import persons_of

#: Lowest and highest number of a column.
Bounds = tuple[float, float]
#: Adds a mechanism's noise to private whole numbers, computed when they are wanted, of a step (a power of two); the
#: name identifies the release.
Release = Callable[[str, Gaussian, Callable[[], Tensor], float], Tensor]

#: A record's part in a histogram is counted in steps of 1 / PART (a person's records share one part).
PART = 2**20
_BITS = 14  # coordinates of length 1 are counted in steps of 2^-14
_ROWS_AT_ONCE = 8192
# 181/128 is a little below √2: coordinates stay multiples of a power of two.
_DIAGONAL, _BESIDE, _SCALE = 128, 181, 2.0**-7
# Ranks of the lowest and highest numbers, and the least share of a category.
_LOWEST, _RAREST = 0.005, 1e-4
# Cells of a column in standard deviations of their noise, from which on something is in them.
_SEEN = 4.0
# Share of the prior of a column's shape that the other columns do not tell, and rounds that find it.
_SURPRISE, _ROUNDS = 0.01, 20
# Share of a cell's noise that is added to every cell, so that noise alone empties none.
_FLOOR = 0.05
# Largest factor by which correlations of a category are raised.
_MOST_CUT = 1.6
# Powers of two that bounds are found among, and cells that they are narrowed by.
_LEAST_POWER, _POWERS, _RANGES = -16, 64, 64
# Share of the records that narrower bounds hold.
_NEARLY = 0.95
_RELEASES = ("powers of two", "ranges", "histograms", "second moments")


class PublicRowsLost(RuntimeError):
    """Raised where a release of public rows was paid for and lost; it is not drawn again."""


class DrawnRows(NamedTuple):
    """Public rows, and the bounds of each column of numbers.

    Attributes:
        rows: numbers in [0, 1], −1 where they are missing, and categories; float32 ``(rows, d)``.
        bounds: of the columns' numbers 0 and 1; None for categories.
    """

    rows: Tensor
    bounds: list[Bounds | None]


@dataclasses.dataclass(frozen=True)
class PublicRows:
    """Release of histograms and second moments of a private table, and public rows drawn from them.

    A table has d columns of numbers and of categories 0 … k−1. Two releases are paid for: one histogram of each
    column, and the second moments of the encoded rows (normal scores of numbers, one-hot categories, centred by the
    histograms). Rows are drawn from a Gaussian copula that has both; they take the place of public examples, and
    drawing them is post-processing. Bounds of e columns of numbers that nobody states are found by two more
    histograms: of the powers of two that their numbers lie between, and of 64 parts of what that leaves.

    **Sensitivity.** Under ``add_remove`` a record adds 1 to one cell of each of d (e) histograms: L2 norm √d (√e). An
    encoded row x is divided by R, a public function of the released histograms, and clipped to length 1; of x xᵀ the
    diagonal and √2 times each entry above it are released, whose L2 norm is |x|² ≤ 1. The parts of two records have
    an inner product of at least 0, so that replacing a record moves a sum by at most √2 times as much. A person adds
    the mean of the parts of their records, which is no longer than the longest of them: the same sensitivities hold
    for persons. Sums are exact, in whole numbers of steps; parts and coordinates are rounded towards zero.

    Attributes:
        histograms: share r₁ of the run's μ for the histograms.
        moments: share r₂ for the second moments; √(1 − r₁² − r₂²) of μ is left to the teacher.
        bounds: share r₃ for each of the two histograms that find bounds, where some are not stated.
        rows: number of rows that are drawn; a public constant.
        bins: cells of a column of numbers.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.privacy import Budget, epsilon_for_delta
        >>> settings, budget = PublicRows(), Budget(epsilon=1.0, delta=1e-5)
        >>> round(epsilon_for_delta(settings.plan(budget, columns=14), 1e-5), 3)
        0.333
        >>> round(settings.left(budget).epsilon, 3)
        0.929
    """

    histograms: float = 0.2
    moments: float = 0.3
    bounds: float = 0.3
    rows: int = 4000
    bins: int = 32

    def __post_init__(self) -> None:
        for name in ("histograms", "moments", "bounds"):
            check_open_unit(name, getattr(self, name))
        if self._spent(1) >= 1:
            raise ValueError(
                f"histograms={self.histograms}, moments={self.moments}, bounds={self.bounds}: nothing of μ is left "
                "to the teacher; h² + m² + 2 b² must be less than 1"
            )
        check_int("rows", self.rows, 10)
        check_int("bins", self.bins, 2)

    # ------------------------------------------------------------------ cost

    def mechanisms(self, budget: Budget, columns: int, unbounded: int = 0) -> dict[str, Gaussian]:
        """Mechanisms of the releases, by name, in their order.

        Args:
            budget: of the run, with its ε.
            columns: d.
            unbounded: e.
        """
        moved, mu = 1.0 if budget.adjacency == "add_remove" else math.sqrt(2.0), _mu(budget)
        squares = (unbounded, unbounded, columns, 1)
        shares = (self.bounds, self.bounds, self.histograms, self.moments)
        return {
            name: Gaussian(moved * math.sqrt(square) / (mu * share), moved * math.sqrt(square), 1.0)
            for name, square, share in zip(_RELEASES, squares, shares, strict=True)
            if square
        }

    def plan(self, budget: Budget, columns: int, unbounded: int = 0) -> list[Charge]:
        """Charges of the releases; see :meth:`mechanisms`."""
        return [Charge(mechanism) for mechanism in self.mechanisms(budget, columns, unbounded).values()]

    def left(self, budget: Budget, unbounded: int = 0) -> Budget:
        """Budget that the releases leave to a teacher whose releases are Gaussian."""
        mu = _mu(budget) * math.sqrt(1 - self._spent(unbounded))
        return dataclasses.replace(
            budget, epsilon=epsilon_for_delta([Charge(Gaussian(1 / mu))], budget.delta)
        )

    def _spent(self, unbounded: int) -> float:
        return self.histograms**2 + self.moments**2 + (2 * self.bounds**2 if unbounded else 0.0)

    # ------------------------------------------------------------------ release

    def released(
        self,
        table: Tensor,
        owners: Tensor | None,
        sizes: Sequence[int],
        bounds: Sequence[Bounds | None],
        budget: Budget,
        release: Release,
        unbounded: int | None = None,
    ) -> DrawnRows:
        """Release histograms and second moments, and draw public rows from them.

        Args:
            table: float64 ``(n, d)``: numbers, NaN where there is none, and categories. **Private**.
            owners: person of each record, int64 ``(n,)``, where the unit of privacy is a person. **Private**.
            sizes: of each column the number of its categories, or 0 for numbers.
            bounds: of each column of numbers, None where nobody states them; a number beyond them is clipped.
            budget: of the run.
            release: see :data:`Release`.
            unbounded: number of columns without bounds that the plan has, where it is larger.
        """
        unknown = [place for place, size in enumerate(sizes) if not size and bounds[place] is None]
        planned = len(unknown) if unbounded is None else unbounded
        mechanisms = self.mechanisms(budget, len(sizes), planned)
        parts, known = person_parts(owners, len(table)), list(bounds)

        def counted(name: str, cells: list[tuple[Tensor, int]]) -> list[NDArray[Any]]:
            noisy = release(name, mechanisms[name], lambda: cell_counts(cells, parts), 1 / PART)
            return np.split(noisy.numpy(), np.cumsum([count for _, count in cells])[:-1])

        if unknown:
            numbers = [table[:, place] for place in unknown]
            powers = counted(_RELEASES[0], [(power_cells(column), 2 * _POWERS + 2) for column in numbers])
            wide, others, zero = _between_powers(np.stack(powers), mechanisms[_RELEASES[0]].sigma)
            cells = [
                # Those that are 0 are known by now.
                (torch.where(column == 0, _RANGES, number_cells(scaled(column, of), _RANGES)), _RANGES + 1)
                for column, of in zip(numbers, wide, strict=True)
            ]
            ranges = np.stack(counted(_RELEASES[1], cells))
            narrow = _narrowed(wide, ranges[:, :-1], others, mechanisms[_RELEASES[1]].sigma)
            for place, (low, high), is_held in zip(unknown, narrow, zero, strict=True):
                known[place] = (min(low, 0.0), max(high, 0.0)) if is_held else (low, high)
        columns = [
            column if size else scaled(column, found)
            for column, size, found in zip(table.unbind(1), sizes, known, strict=True)
        ]
        cells = [
            (column.long(), size) if size else (number_cells(column, self.bins), self.bins + 1)
            for column, size in zip(columns, sizes, strict=True)
        ]
        copula = _Copula(self, counted(_RELEASES[2], cells), sizes, mechanisms[_RELEASES[2]].sigma)
        moments = mechanisms[_RELEASES[3]]
        noisy = release(
            _RELEASES[3],
            moments,
            lambda: moment_sums(copula.encoded(columns), parts),
            _SCALE * 4.0**-_BITS,
        )
        return DrawnRows(copula.drawn(noisy.numpy(), moments.sigma), known)


class KeptReleases:
    """The releases of a run's public rows, each drawn once and kept in a file of the run's folder.

    Args:
        path: the file, made with the first release.
        run: pays.
        budget: of the run.
        noise: source of the noise.

    Raises:
        PublicRowsLost: at a release that was paid for and is not in the file.
    """

    def __init__(self, path: Path, run: LedgerRun | None, budget: Budget, noise: NoiseSource) -> None:
        self._path, self._run, self._budget, self._noise = path, run, budget, noise
        self._kept: dict[str, Tensor] = torch.load(path, weights_only=True) if path.is_file() else {}
        self._paid: dict[Gaussian, int] = {}

    def __call__(self, name: str, mechanism: Gaussian, sums: Callable[[], Tensor], step: float) -> Tensor:
        """See :data:`Release`."""
        assert self._run is not None
        before = self._paid[mechanism] = self._paid.get(mechanism, 0) + 1
        if name not in self._kept:
            if self._run.charged(mechanism) >= before:
                raise PublicRowsLost(
                    f"{self._path}: the run paid for its {name}, and a kill or an error came before they were "
                    "kept; they are not drawn again. Start a new run in another folder, with this run's ledger as "
                    "ledger_path"
                )
            row = self._run.charge(
                mechanism,
                1,
                noise=self._noise,
                adjacencies=(self._budget.adjacency,),
                unit=self._budget.unit,
            )
            stream = self._noise.stream("public rows", name, row)
            self._kept[name] = mechanism.add_noise_to_multiples(sums(), step, stream)
            buffer = io.BytesIO()
            torch.save(self._kept, buffer)
            write_durably(self._path, buffer.getvalue())
        return self._kept[name]


# ------------------------------------------------------------------------------- what a record adds


def person_parts(owners: Tensor | None, count: int) -> Tensor:
    """**Private.** Share of each record in its person's contribution, int64 ``(n,)``, in steps of 2^-20."""
    if owners is None:
        return torch.full((count,), PART)
    numbers, _ = persons_of(owners)
    return PART // numbers.bincount()[numbers] if count else numbers


def cell_counts(cells: Sequence[tuple[Tensor, int]], parts: Tensor) -> Tensor:
    """**Private.** Cells of histograms, one after another, int64, in steps of 2^-20.

    Args:
        cells: of each histogram each record's cell, int64 ``(n,)``, and the number of cells.
        parts: see :func:`person_parts`.
    """
    return torch.cat([torch.zeros(count, dtype=torch.int64).index_add_(0, of, parts) for of, count in cells])


def scaled(numbers: Tensor, bounds: Bounds | None) -> Tensor:
    """Numbers in [0, 1] between bounds, clipped; −1 where they are missing (NaN)."""
    assert bounds is not None
    low, high = bounds
    inside = numbers.clamp(low, high)
    return torch.where(numbers.isnan(), -1.0, ((inside - low) / (high - low)).clamp(0, 1))


def number_cells(numbers: Tensor, bins: int) -> Tensor:
    """Cells of :func:`scaled` numbers, int64; missing numbers are in the last cell."""
    cells = (numbers * bins).floor().clamp(0, bins - 1).long()
    return torch.where(numbers >= 0, cells, bins)


def power_cells(numbers: Tensor) -> Tensor:
    """Cells of numbers by sign and power of two, ascending, int64; 0 in the middle, missing ones in the last."""
    powers = torch.frexp(numbers.nan_to_num(0.0))[1].long() - 1 - _LEAST_POWER
    powers = torch.where(numbers.isinf(), _POWERS, powers).clamp(max=_POWERS - 1)
    cells = torch.where(numbers < 0, _POWERS - 1 - powers, _POWERS + 1 + powers)
    cells = torch.where((numbers == 0) | (powers < 0), _POWERS, cells)
    return torch.where(numbers.isnan(), 2 * _POWERS + 1, cells)


def moment_sums(rows: Tensor, parts: Tensor) -> Tensor:
    """**Private.** Sum of x xᵀ: the diagonal and 181/128 times the entries above it, int64, in steps of 2^-35.

    Args:
        rows: x, float64 ``(n, D)``; those longer than 1 are clipped.
        parts: see :func:`person_parts`.
    """
    width = rows.shape[1]
    total = torch.zeros(width, width, dtype=torch.int64)
    for some, part in zip(rows.split(_ROWS_AT_ONCE), parts.split(_ROWS_AT_ONCE), strict=True):
        clipped = some / some.norm(dim=1, keepdim=True).clamp(min=1) * (part[:, None] / PART).sqrt()
        steps = (clipped * 2**_BITS).trunc()
        # A row that rounding made too long, or that is not finite, counts as none.
        kept = steps.square().sum(dim=1, keepdim=True) * PART <= part[:, None] * 4.0**_BITS
        steps = torch.where(kept, steps, 0.0)
        total += (steps.T @ steps).long()
    above = torch.triu_indices(width, width, 1)
    return torch.cat([total.diagonal() * _DIAGONAL, total[above[0], above[1]] * _BESIDE])


# ------------------------------------------------------------------------------- what follows from the releases


class _Copula:
    """Gaussian copula of released histograms and second moments: public.

    Args:
        settings: the settings.
        counts: noisy cells of each column.
        sizes: see :meth:`PublicRows.released`.
        sigma: standard deviation of the noise of a cell.
    """

    def __init__(
        self, settings: PublicRows, counts: Sequence[NDArray[Any]], sizes: Sequence[int], sigma: float
    ) -> None:
        self.settings, self.sizes = settings, list(sizes)
        self.records = max(1.0, float(np.mean([column.sum() for column in counts])))
        self.centres = (np.arange(settings.bins) + 0.5) / settings.bins
        self.shares: list[NDArray[Any]] = []
        self.missing: list[float] = []
        self.scores: list[NDArray[Any]] = []
        widths = list[int]()
        floor, means, known, squares = _FLOOR * sigma / self.records, list[float](), list[float](), 0.0
        for column, size in zip(counts, sizes, strict=True):
            share = _on_simplex((column if size else _smoothed(column, sigma)) / self.records)
            self.missing.append(0.0 if size or column[-1] < _SEEN * sigma else float(share[-1]))
            share = (share if size else share[:-1]) + floor
            self.shares.append(share / share.sum())
            self.scores.append(_normal_scores(self.shares[-1].cumsum() - self.shares[-1] / 2))
            widths.append(size or 1 + (self.missing[-1] > 0))
            known.extend([1 - self.missing[-1]] if not size else [1.0] * size)
            if size:
                means.extend(self.shares[-1])
                squares += 1 - float(self.shares[-1] @ self.shares[-1])
                continue
            means.append(float(self.shares[-1] @ self.scores[-1]))
            squares += float(self.shares[-1] @ self.scores[-1] ** 2) - means[-1] ** 2
            if self.missing[-1]:
                means.append(self.missing[-1])
                known.append(1.0)
                squares += self.missing[-1] * (1 - self.missing[-1])
        self.means, self.known = np.array(means), np.array(known)
        column = np.repeat(np.arange(len(sizes)), widths)
        self.same = column[:, None] == column
        density = np.exp(-(_normal_scores(self.means, _RAREST) ** 2) / 2) / math.sqrt(2 * math.pi)
        cut = np.sqrt((self.means * (1 - self.means)).clip(0)) / density
        self.cut = np.where(np.repeat(np.array(sizes) > 0, widths), cut.clip(1, _MOST_CUT), 1.0)
        self.radius = math.sqrt(max(squares, 1e-3))

    def encoded(self, columns: Sequence[Tensor]) -> Tensor:
        """Rows x over R, float64 ``(n, D)``, each from its own record; not yet clipped."""
        found, place = [], 0
        for number, (column, size) in enumerate(zip(columns, self.sizes, strict=True)):
            values = column.numpy()
            if size:
                parts = np.eye(size)[values.astype(int)]
            else:
                scores = np.interp(values, self.centres, self.scores[number])
                parts = np.where(values >= 0, scores, self.means[place])[:, None]
                if self.missing[number]:
                    parts = np.hstack([parts, (values < 0).astype(float)[:, None]])
            found.append(parts)
            place += parts.shape[1]
        return torch.from_numpy((np.hstack(found) - self.means) / self.radius)

    def drawn(self, noisy: NDArray[Any], sigma: float) -> Tensor:
        """Rows of numbers and categories, float32 ``(rows, d)``.

        Args:
            noisy: released second moments, as of :func:`moment_sums`.
            sigma: standard deviation of their noise.
        """
        draw, count, found, place = np.random.default_rng(0), self.settings.rows, [], 0
        values, vectors = np.linalg.eigh(self._correlations(noisy, sigma))
        points = draw.standard_normal((count, len(self.means))) @ (vectors * np.sqrt(values.clip(0))).T
        for size, shares, missing in zip(self.sizes, self.shares, self.missing, strict=True):
            if size:
                scores = _normal_scores(shares, _RAREST) + points[:, place : place + size]
                found.append(scores.argmax(axis=1).astype(float))
                place += size
                continue
            # The cell by its rank, so that a value that many records have stays one.
            edges = _normal_scores(shares.cumsum()[:-1], 0.0)
            numbers = self.centres[np.searchsorted(edges, points[:, place])]
            place += 1
            if missing:
                numbers = np.where(points[:, place] > _normal_scores(np.array(1 - missing)), -1.0, numbers)
                place += 1
            found.append(numbers)
        return torch.tensor(np.stack(found, axis=1), dtype=torch.float32)

    def _correlations(self, noisy: NDArray[Any], sigma: float) -> NDArray[Any]:
        """Correlations of the encoded columns, positive semidefinite.

        Noise alone has eigenvalues up to s√(2 D), s the standard deviation of its diagonal: smaller ones become
        their mean, and larger ones are shrunk as is best for a few of them in such noise (Donoho, Gavish 2014).
        """
        width, scale = len(self.means), self.radius**2 / self.records
        moments = np.diag(noisy[:width] / _DIAGONAL)
        rows, columns = np.triu_indices(width, 1)
        moments[rows, columns] = moments[columns, rows] = noisy[width:] / _BESIDE
        values, vectors = np.linalg.eigh(moments / _SCALE * scale)
        kept = np.sqrt((values.clip(0) ** 2 - 2 * width * (sigma * scale) ** 2).clip(0))
        rest = max(float(values.sum() - kept.sum()) / width, 1e-4)
        moments = (vectors * kept) @ vectors.T + rest * np.eye(width)
        # Missing numbers, which are at the mean, take nothing from the correlation of the others.
        spread = np.sqrt(np.diag(moments) * self.known)
        found = moments / np.outer(spread, spread)
        # Categories are cut from latent normal variables, whose correlations are larger.
        found = np.where(self.same, found, (found * np.outer(self.cut, self.cut)).clip(-1, 1))
        np.fill_diagonal(found, 1.0)
        return found


def _mu(budget: Budget) -> float:
    """Largest μ of Gaussian differential privacy within a budget."""
    assert budget.epsilon is not None
    return 1 / noise_for_steps(budget.epsilon, budget.delta, 1.0, 1)


def _normal_scores(ranks: NDArray[Any], lowest: float = _LOWEST) -> NDArray[Any]:
    return torch.special.ndtri(torch.from_numpy(np.asarray(ranks)).clamp(lowest, 1 - lowest)).numpy()


def _on_simplex(values: NDArray[Any]) -> NDArray[Any]:
    """Project a vector onto the simplex: the nearest non-negative vector of sum 1."""
    falling = np.sort(values)[::-1]
    excess = (falling.cumsum() - 1) / np.arange(1, len(values) + 1)
    return np.clip(values - excess[np.nonzero(falling > excess)[0][-1]], 0, None)


def _smoothed(counts: NDArray[Any], sigma: float) -> NDArray[Any]:
    """Counts of a column of numbers, without what noise can explain in each octave of frequencies (James, Stein)."""
    from scipy.fft import dct, idct

    waves, low = dct(counts[:-1], norm="ortho"), 1
    while low < len(waves):
        octave = waves[low : 2 * low]
        octave *= max(0.0, 1 - len(octave) * sigma**2 / max(float(octave @ octave), 1e-300))
        low *= 2
    return np.append(idct(waves, norm="ortho"), counts[-1])


def likeliest_shapes(
    counts: NDArray[Any], records: NDArray[Any], shapes: NDArray[Any], sigma: float
) -> NDArray[np.intp]:
    """Most probable shape of each column, whose other columns tell how frequent each shape is.

    Args:
        counts: noisy cells ``(e, k)``.
        records: in these cells ``(e,)``.
        shapes: shares of the cells ``(s, k)``.
        sigma: standard deviation of the noise.
    """
    from scipy.special import softmax

    of = records[:, None]
    fits = (of * (counts @ shapes.T) - of**2 / 2 * np.square(shapes).sum(axis=1)) / sigma**2
    found = softmax(fits, axis=1)
    for _ in range(_ROUNDS if len(counts) > 1 else 0):
        others = (found.sum(axis=0) - found) / (len(counts) - 1)
        prior = (1 - _SURPRISE) * others + _SURPRISE / len(shapes)
        found = softmax(fits + np.log(prior), axis=1)
    return found.argmax(axis=1)


def _between_powers(
    counts: NDArray[Any], sigma: float
) -> tuple[list[Bounds], NDArray[Any], NDArray[np.bool_]]:
    """Bounds of each column's numbers, how many of them are not 0, and whether some are.

    The bounds are those of the likeliest shape (one power of two, or all up to one alike, of either sign or both),
    and of all cells with something in them.
    """
    zeros, records = counts[:, _POWERS], max(1.0, float(counts.sum(axis=1).mean()))
    others = (records - zeros - counts[:, -1]).clip(sigma, max(records, sigma))
    one, none = np.eye(_POWERS), np.zeros((_POWERS, _POWERS + 1))
    alike = np.tril(2.0 ** (np.arange(_POWERS) - np.arange(_POWERS)[:, None]))
    alike /= alike.sum(axis=1, keepdims=True)
    above = [np.hstack([none, shape]) for shape in (one, alike)]
    below = [shape[:, ::-1] for shape in above]
    shapes = np.concatenate([*above, *below, (above[1] + below[1]) / 2])
    edges = 2.0 ** (np.arange(_POWERS + 1) + _LEAST_POWER)
    tops, ends, bounds = edges[1:], np.concatenate([-edges[::-1], edges]), list[Bounds]()
    lows, highs = np.repeat([0, 0, -1, -1, -1], _POWERS), np.repeat([1, 1, 0, 0, 1], _POWERS)
    for shape, column in zip(
        likeliest_shapes(counts[:, :-1], others, shapes, sigma), counts[:, :-1], strict=True
    ):
        held, top = np.nonzero(column > _SEEN * sigma)[0], tops[shape % _POWERS]
        low, high = lows[shape] * top, highs[shape] * top
        if len(held):
            low, high = min(low, ends[held[0]]), max(high, ends[held[-1] + 1])
        bounds.append((float(low), float(high)))
    return bounds, others, zeros > _SEEN * sigma


def _narrowed(
    bounds: Sequence[Bounds], counts: NDArray[Any], records: NDArray[Any], sigma: float
) -> list[Bounds]:
    """Bounds of the likeliest parts, of others until nearly all records are held, and of one more at each end."""
    widths = [2**power for power in range(_RANGES.bit_length())]
    parts = [
        (first, width) for width in widths for first in range(0, _RANGES - width + 1, max(1, width // 4))
    ]
    within = np.arange(_RANGES)
    shapes = np.stack([((within >= first) & (within < first + width)) / width for first, width in parts])
    found = list[Bounds]()
    for column, shape, wanted, (low, high) in zip(
        counts, likeliest_shapes(counts, records, shapes, sigma), records, bounds, strict=True
    ):
        first, last = parts[shape][0], sum(parts[shape])
        padded = np.concatenate([[-np.inf], column, [-np.inf]])
        while last - first < _RANGES and column[first:last].sum() < _NEARLY * wanted - 2 * sigma * math.sqrt(
            last - first
        ):
            first, last = (first - 1, last) if padded[first] > padded[last + 1] else (first, last + 1)
        step = (high - low) / _RANGES
        found.append((float(low + max(first - 1, 0) * step), float(low + min(last + 1, _RANGES) * step)))
    return found
