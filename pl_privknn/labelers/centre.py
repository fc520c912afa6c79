"""Released centre: difference of private and public mean features, and a test whether it exceeds noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pl_privknn.privacy.mechanisms.steps import clip_factors

#: Share of runs on public and private examples of one kind that are taken for runs on two kinds.
ERROR_RATE = 1e-3


class Centre(NamedTuple):
    """Released difference of the private and the public mean, with its test: post-processing.

    Attributes:
        offset: the difference, float64 ``(d,)``, noisy.
        chance_distance: length that noise and sampling alone give the difference (root mean square).
        p_value: probability of such a length or more where both means are the same.
    """

    offset: Tensor
    chance_distance: float
    p_value: float

    @property
    def is_shift(self) -> bool:
        """Whether the difference is significant at :data:`ERROR_RATE`; otherwise it is not subtracted."""
        return self.p_value < ERROR_RATE

    def __str__(self) -> str:
        figures = f"(distance {float(self.offset.norm()):.3f}, noise {self.chance_distance:.3f})"
        if self.is_shift:
            return f"public examples are of another kind than private ones {figures}; private features are centred"
        return f"no shift between public and private examples was found {figures}; nothing is subtracted"


def differences(unit: Tensor, mean: Tensor) -> Tensor:
    """Differences of vectors ``(n, d)`` from the public mean ``(d,)``, clipped to length 1: a record's part."""
    rows = unit - mean
    return rows * clip_factors(rows.norm(dim=1), 1.0)[:, None]


def centre_of(noisy: Tensor, sigma: float, records: int, public: Tensor) -> Centre:
    """Centre of a noisy sum of :func:`differences`, with the test of its length.

    Where private and public examples have one distribution, the difference of the means is about normal with
    covariance K = (σ/N)² + Σ (1/N + 1/m), Σ of public differences. Its squared length is compared with the scaled
    χ² of the same mean and variance (Satterthwaite), of which traces of K are all that has to be estimated.

    Args:
        noisy: released sum, float64 ``(d,)``.
        sigma: standard deviation of its noise.
        records: N, public constant by which it is divided.
        public: unit vectors of the public examples, float64 ``(m, d)``.
    """
    from scipy.stats import chi2

    rows = differences(public, public.mean(dim=0))
    offset = noisy / records - rows.mean(dim=0)
    spread = torch.cov(rows.T, correction=0).view(len(offset), -1) * (1 / records + 1 / len(rows))
    spread.diagonal().add_((sigma / records) ** 2)
    mean, square = float(spread.trace()), float(spread.square().sum())
    if square:
        p_value = float(chi2.sf(float(offset.square().sum()) * mean / square, mean**2 / square))
    else:  # equal public examples and no noise: any difference is none of chance
        p_value = float(not offset.any())
    return Centre(offset, math.sqrt(mean), p_value)
