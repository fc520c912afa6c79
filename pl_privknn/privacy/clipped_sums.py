"""Sums of clipped gradients in float64, by compiled loops on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import compiled
from pl_privknn.privacy.mechanisms.steps import clip_factors

# Of norms and sums in float64, whose rounding errors are far smaller.
_SLACK = 1e-9

# Gradients that are added at once, since each addition reads and writes the whole sum, and how many bytes may wait.
_TOGETHER, _BYTES = 4, 1 << 28


@compiled(fastmath={"reassoc", "contract"})
def _squares(rows: Any, norms: Any) -> None:
    """Add the squares of each row, in float64."""
    for i in range(rows.shape[0]):
        total = 0.0
        for j in range(rows.shape[1]):
            value = numba.float64(rows[i, j])
            total += value * value
        norms[i] += total


@compiled(fastmath={"reassoc", "contract"})
def _add_four(total: Any, a: Any, b: Any, c: Any, d: Any, f: float, g: float, h: float, k: float) -> None:
    """Add four rows, each times its factor, in float64."""
    for j in range(total.shape[0]):
        first = f * numba.float64(a[j]) + g * numba.float64(b[j])
        total[j] += first + (h * numba.float64(c[j]) + k * numba.float64(d[j]))


@compiled()
def _add_rows(total: Any, rows: Any, places: Any, factors: Any) -> None:
    """Add rows at some positions, each times its factor, in float64; rows that fill up a four have factor 0."""
    for i in range(0, len(places) - 3, 4):
        a, b, c, d = rows[places[i]], rows[places[i + 1]], rows[places[i + 2]], rows[places[i + 3]]
        _add_four(total, a, b, c, d, factors[i], factors[i + 1], factors[i + 2], factors[i + 3])


class ClippedSum:
    """The sum of gradients, each clipped to an L2 norm over all parameters together.

    Norms and sums are float64. A gradient that is not finite counts as zero: one record must not be able to spoil a
    release, nor be seen by it.

    Args:
        sizes: number of values of each parameter.
        max_grad_norm: bound of each gradient.
        device: of the gradients.

    Attributes:
        total: float64 ``(sum(sizes),)``.
    """

    def __init__(self, sizes: Sequence[int], max_grad_norm: float, device: torch.device) -> None:
        self.sizes, self.max_grad_norm, self.device = list(sizes), max_grad_norm, device
        self.total = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._waiting: list[list[Tensor]] = []
        self._together = max(1, min(_TOGETHER, _BYTES // (4 * max(1, len(self.total)))))

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Clip a batch of gradients, and add them to the sum.

        Args:
            gradients: one tensor a parameter, shape ``(b, …)``.
        """
        rows = [part.detach().reshape(len(part), -1) for part in gradients]
        factors = self.factors(self.norms(rows))
        for part, total in zip(rows, self.total.split(self.sizes), strict=True):
            self.add_rows(total, part, factors)

    def add_one(self, gradient: Sequence[Tensor]) -> None:
        """Clip and add one record's gradient.

        Args:
            gradient: one tensor a parameter.
        """
        self._waiting.append([part.detach().reshape(1, -1) for part in gradient])
        if len(self._waiting) == self._together:
            self.finish()

    def finish(self) -> Tensor:
        """Sum of all gradients that were added."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            factors = self.factors(torch.cat([self.norms(one) for one in waiting]))
            for total, *rows in zip(self.total.split(self.sizes), *waiting, strict=True):
                self.add_rows(total, [row[0] for row in rows], factors)
        return self.total

    def factors(self, norms: Tensor) -> Tensor:
        """Factors that clip gradients of these norms, float64 ``(b,)``; 0 where a norm is not finite."""
        return clip_factors(norms, self.max_grad_norm, _SLACK)

    def norms(self, rows: Sequence[Tensor]) -> Tensor:
        """L2 norms over all parts together, float64 ``(b,)``; not finite for gradients that are not."""
        squares = torch.zeros(len(rows[0]), dtype=torch.float64, device=self.device)
        for part in rows:
            if _is_plain(part):
                _squares(part.contiguous().numpy(), squares.numpy())
            else:
                squares += part.double().square().sum(dim=1)
        return squares.sqrt()

    @staticmethod
    def add_rows(total: Tensor, rows: Sequence[Tensor] | Tensor, factors: Tensor) -> None:
        """Add rows of one parameter to its part of a sum, each by its factor.

        Args:
            total: float64 ``(size,)``, changed in place.
            rows: ``(b, size)``, or ``b`` of shape ``(size,)``; those of factor 0 may hold anything.
            factors: float64 ``(b,)``.
        """
        if not all(_is_plain(part) for part in ([rows] if isinstance(rows, Tensor) else rows)):
            # Without a look at the factors, for which the host would wait.
            whole = rows if isinstance(rows, Tensor) else torch.stack(list(rows))
            total += factors @ torch.where(factors[:, None] != 0, whole, 0).double()
            return
        places = torch.nonzero(factors).flatten()
        if len(places) == 0:
            return
        # A finite row fills the last four.
        filled = np.append(places.numpy(), np.repeat(places[:1].numpy(), -len(places) % 4))
        weights = np.append(factors[places].numpy(), np.zeros(-len(places) % 4))
        if isinstance(rows, Tensor):
            _add_rows(total.numpy(), rows.contiguous().numpy(), filled, weights)
            return
        for start in range(0, len(filled), 4):
            four = [rows[place].contiguous().numpy() for place in filled[start : start + 4]]
            _add_four(total.numpy(), *four, *weights[start : start + 4])


def _is_plain(part: Tensor) -> bool:
    return part.device.type == "cpu" and part.dtype in (torch.float32, torch.float64)
