"""Released difference of the means of private and public features, and its test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pl_privknn.privacy.mechanisms.steps import clip_factors

#: Share of runs on public and private examples of one kind in which a difference of the means is taken for a shift.
ERROR_RATE = 1e-3
#: Distance of the means, beyond chance, above which public examples are of another kind than private ones. Where only
#: shares of classes differ, as between rows and persons, it was 0.37 at most; of images smaller or in other light
#: 0.43 at least.
OTHER_KIND = 0.4


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

    @property
    def distance(self) -> float:
        """Estimated length of the difference, without the part due to noise and sampling."""
        return math.sqrt(max(0.0, float(self.offset.square().sum()) - self.chance_distance**2))

    @property
    def is_other_kind(self) -> bool:
        """Whether the shift is longer than :data:`OTHER_KIND`, and more than one of the shares of classes."""
        return self.is_shift and self.distance > OTHER_KIND

    def __str__(self) -> str:
        if not self.is_other_kind:
            return ""
        return (
            f"public examples are of another kind than private ones (distance {self.distance:.3f}, threshold "
            f"{OTHER_KIND:g}, noise {self.chance_distance:.3f}); private features are centred"
        )


def clipped_differences(unit: Tensor, mean: Tensor) -> Tensor:
    """Differences of vectors ``(n, d)`` from the public mean ``(d,)``, clipped to length 1, one per record."""
    rows = unit - mean
    return rows * clip_factors(rows.norm(dim=1), 1.0)[:, None]


def centre_of(noisy: Tensor, sigma: float, records: int, public: Tensor) -> Centre:
    """Centre of a noisy sum of :func:`clipped_differences`, with the test of its length.

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

    rows = clipped_differences(public, public.mean(dim=0))
    offset = noisy / records - rows.mean(dim=0)
    spread = torch.cov(rows.T, correction=0).view(len(offset), -1) * (1 / records + 1 / len(rows))
    spread.diagonal().add_((sigma / records) ** 2)
    mean, square = float(spread.trace()), float(spread.square().sum())
    if square:
        p_value = float(chi2.sf(float(offset.square().sum()) * mean / square, mean**2 / square))
    else:  # equal public examples and no noise: any difference is none of chance
        p_value = float(not offset.any())
    return Centre(offset, math.sqrt(mean), p_value)


def centre_in(state: Mapping[str, Tensor]) -> Centre | None:
    """Released centre in the learned state of a teacher of sums; None before its release."""
    return Centre(state["offset"], *state["chance"].tolist()) if "offset" in state else None
