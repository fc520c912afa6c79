"""What multi-label labelers share: clipped attribute votes, how far a record moves them, and their release."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pl_privknn._checks import shape_text
from pl_privknn.labelers.aggregation import Aggregation, Pay, Votes
from pl_privknn.labelers.base import Release
from pl_privknn.privacy.mechanisms import Gaussian, Laplace, Mechanism


def check_attribute_table(features: Tensor, labels: Tensor, num_attributes: int) -> None:
    """Raise ``ValueError`` unless ``features`` and ``labels`` make a table of 0/1 attributes.

    Messages give shapes, dtypes and bounds, never a private value.

    Args:
        features: float, shape ``(n, d)``.
        labels: int64, shape ``(n, num_attributes)``, 0 or 1.
        num_attributes: number of attributes, a public constant.
    """
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(
            f"features: shape {shape_text(features.shape)}, {features.dtype}; want float of shape (n, d)"
        )
    if labels.shape != (len(features), num_attributes) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels: shape {shape_text(labels.shape)}, {labels.dtype}; want int64 of shape "
            f"(n, {num_attributes}), a row of attributes for each row of features. Data with one class a record goes "
            "to PrivateKNN, PATE or ReverseKNN"
        )
    if bool(((labels < 0) | (labels > 1)).any()):
        raise ValueError("labels: some attributes are neither 0 nor 1; fill in what isn't known")
    if not bool(torch.isfinite(features).all()):
        raise ValueError("features: some are NaN or infinite; a distance to them has no meaning")


def clip_attributes(labels: Tensor, tau: float | None) -> Tensor:
    """Each row f scaled by min(τ/|f|₁, 1): the vote of a record or teacher.

    Args:
        labels: 0 or 1, shape ``(…, a)``.
        tau: τ, or None for no clipping.

    Returns:
        float64, shape ``(…, a)``; rows of L1 norm at most τ, entries in [0, 1].
    """
    votes = labels.double()
    if tau is None:
        return votes
    return votes * (tau / votes.sum(dim=-1, keepdim=True).clamp(min=1.0)).clamp(max=1.0)


def single_vote_norms(tau: float | None, num_attributes: int) -> tuple[float, float]:
    """Largest L1 and L2 norm of one clipped vote: how far a vote that comes or goes moves a sum of votes.

    A row of s ones has entries c(s) = min(τ/s, 1), hence L1 norm min(s, τ) and L2 norm √(s·c(s)²). L1 is at most
    τ, and because c² ≤ c the squared L2 norm is at most the L1 norm, so at most τ as well: it is τ for
    s = τ where that is a whole number, and less otherwise. The maximum over s is taken.

    Args:
        tau: τ, or None for no clipping.
        num_attributes: a.
    """
    norms = [(s * c, s * c * c) for s, c in _votes(tau, num_attributes)]
    return max(l1 for l1, _ in norms), math.sqrt(max(squared for _, squared in norms))


@functools.lru_cache(maxsize=64)
def swapped_vote_norms(tau: float | None, num_attributes: int) -> tuple[float, float]:
    """Largest L1 and L2 distance of two clipped votes: how far a sum moves where one vote replaces another.

    Let u and w be the votes of the record that enters the k nearest and of the one that it pushes out (or of
    one teacher before and after), each with entries in [0, 1] and L1 norm at most τ. Then
    ‖u − w‖₁ ≤ 2τ, and since entries are not negative ⟨u, w⟩ ≥ 0, so
    ‖u − w‖₂² ≤ ‖u‖₂² + ‖w‖₂² ≤ ‖u‖₁ + ‖w‖₁ ≤ 2τ: the √(2τ) behind the RDP α·τ/σ² of Theorem 5 (Zhu et al.,
    Private-kNN, CVPR 2020, supplement). Each entry moves by at most 1, so √a is a bound too; without clipping
    it is attained.

    Both bounds are met only where two votes of τ ones fit side by side into a attributes. The votes that exist
    are rows of s ones with the entry c(s) = min(τ/s, 1), and for u with s ones and w with t ones the distance is
    largest where they share as few attributes as possible, o = max(0, s + t − a): moving a common attribute
    of w to a free place adds c(s)² + c(t)² − (c(s) − c(t))² = 2·c(s)c(t) ≥ 0 to the squared L2 distance, and
    c(s) + c(t) − |c(s) − c(t)| ≥ 0 to the L1 distance. So the exact maximum is over pairs (s, t), which this
    function goes through; s = 0 is a vote that comes or goes alone (a sample of fewer than k records, a teacher
    that abstains).

    Args:
        tau: τ, or None for no clipping.
        num_attributes: a.

    Returns:
        The L1 and the L2 sensitivity.
    """
    largest_l1 = largest_squared = 0.0
    for s, first in _votes(tau, num_attributes):
        for t, second in _votes(tau, num_attributes):
            shared = max(0, s + t - num_attributes)
            l1 = s * first + t * second - 2 * shared * min(first, second)
            squared = s * first**2 + t * second**2 - 2 * shared * first * second
            largest_l1, largest_squared = max(largest_l1, l1), max(largest_squared, squared)
    return largest_l1, math.sqrt(largest_squared)


def _votes(tau: float | None, num_attributes: int) -> Iterator[tuple[int, float]]:
    """Numbers of ones in a row, and the entry that clipping leaves for each."""
    for ones in range(num_attributes + 1):
        yield ones, 1.0 if tau is None or ones <= tau else tau / ones


def sum_noise(noise: Mechanism, l1: float, l2: float, rate: float = 1.0) -> Gaussian | Laplace:
    """Fill in the sensitivities of sums of clipped votes.

    Raises:
        ValueError: for noise other than ``Gaussian`` and ``Laplace`` (clipped votes are no whole numbers), or a
            stated sensitivity that differs.
    """
    if not isinstance(noise, Gaussian | Laplace):
        raise ValueError(
            f"noise={noise!r} can't be added to sums of clipped votes; use Gaussian(sigma) or Laplace(scale)"
        )
    return noise.for_votes(l1, l2, rate)


def attribute_answers(mechanism: Gaussian | Laplace) -> Aggregation:
    """Noisy sums of every query, one an attribute: nothing is screened."""
    return Aggregation(mechanism, counts=True, key="attributes")


def release_attributes(
    mechanism: Gaussian | Laplace,
    num_queries: int,
    num_attributes: int,
    votes: Votes,
    decide: Callable[[Tensor, float], Tensor],
    pay: Pay,
    soft: bool,
    max_answers: int | None,
) -> Release:
    """Pay, add noise to sums of clipped votes, and decide every attribute of the first queries.

    Args:
        mechanism: draws the noise.
        num_queries: m.
        num_attributes: a.
        votes: private sums, float64, of the queries that are answered.
        decide: probabilities of attributes, from noisy sums and the standard deviation of their noise.
        pay: charges for the answers and returns their noise.
        soft: give the probabilities too.
        max_answers: answer the first so many; all if None.
    """
    labels = torch.full((num_queries, num_attributes), -1, dtype=torch.int64)
    probabilities = torch.full(labels.shape, 0.5)
    answered, noisy = attribute_answers(mechanism).ask(num_queries, votes, pay, max_answers)
    if noisy is not None:
        decided = decide(noisy, mechanism.deviation)
        labels[answered] = (decided > 0.5).long()
        probabilities[answered] = decided.float()
    return Release(labels, probabilities if soft else None)
