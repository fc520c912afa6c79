"""Class probabilities from noisy counts whose noise is known: post-processing, free of privacy cost."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_privknn._checks import check_choice

#: Kinds of noise whose likelihood :func:`class_posterior` knows; discrete noise of the same scale is close to them.
NOISES = ("gaussian", "laplace")

_EM_STEPS = 30
# Shares of a query's records that a class may have: zero, and 60 steps from a thousandth to all of them.
_SHARES = torch.cat([torch.zeros(1), torch.logspace(-3, 0, 60)]).double()
# The prior is learned from at most this many rows: more change it by nothing that matters.
_ROWS_FOR_PRIOR = 5000
_ROWS_AT_A_TIME = 4096


def nonnegative_shares(scores: Tensor) -> Tensor:
    """The non-negative part of noisy counts, each row scaled to sum to one; a row without one is uniform.

    Args:
        scores: float, shape ``(m, c)``.

    Returns:
        float64, shape ``(m, c)``.
    """
    positive = scores.double().clamp(min=0)
    total = positive.sum(dim=1, keepdim=True)
    uniform = torch.full_like(positive, 1.0 / positive.shape[1])
    return torch.where(total > 0, positive / total.clamp(min=torch.finfo(torch.float64).tiny), uniform)


def class_posterior(scores: Tensor, deviation: Tensor | float, noise: str = "gaussian") -> Tensor:
    """Expected share of each class among a query's records, given its noisy counts.

    The count of class ``c`` at a query is modelled as ``t · p_c + noise`` with the known noise, ``t`` the query's
    number of records (its noisy total, drawn to the mean of all) and ``p_c`` drawn from a prior over shares in
    [0, 1]. The prior is learned from the noisy counts of all queries together by expectation maximisation on a
    grid (empirical Bayes; Laird 1978), so it knows for instance that most classes are absent from most queries.
    Classes are treated one by one, and their expected shares scaled to sum to one. Uses released values and public
    constants only.

    Args:
        scores: noisy counts, or weighted sums of them, float, shape ``(m, c)``.
        deviation: standard deviation of the noise on each score, a number or float of shape ``(m,)``, above zero.
        noise: ``"gaussian"``, which also suits sums over several queries, or ``"laplace"``.

    Returns:
        float64, shape ``(m, c)``; rows sum to one.

    Raises:
        ValueError: for shapes or values that do not fit.
    """
    check_choice("noise", noise, NOISES)
    if scores.ndim != 2 or not scores.is_floating_point() or not bool(torch.isfinite(scores).all()):
        raise ValueError(
            f"scores: shape {tuple(scores.shape)}, {scores.dtype}; want finite floats of shape (m, c)"
        )
    spread = torch.as_tensor(deviation, dtype=torch.float64).expand(len(scores))
    if not bool(((spread > 0) & torch.isfinite(spread)).all()):
        raise ValueError("deviation: must be finite and above 0; counts without noise need no posterior")
    values = scores.double()
    totals = _totals(values, spread)
    chosen = slice(None, None, max(1, -(-len(values) // _ROWS_FOR_PRIOR)))
    log_prior = _learn_prior(_log_likelihood(values[chosen], totals[chosen], spread[chosen], noise))
    parts = []
    for start in range(0, len(values), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        likelihood = _log_likelihood(values[rows], totals[rows], spread[rows], noise)
        parts.append(((likelihood + log_prior).softmax(dim=-1) * _SHARES).sum(dim=-1))
    shares = torch.cat(parts) if parts else values
    total = shares.sum(dim=1, keepdim=True)
    uniform = torch.full_like(shares, 1.0 / scores.shape[1])
    return torch.where(total > 0, shares / total.clamp(min=torch.finfo(torch.float64).tiny), uniform)


def _totals(values: Tensor, spread: Tensor) -> Tensor:
    """Records of each query: its noisy total, drawn to the mean total by as much as the noise deserves.

    The linear empirical-Bayes estimate: ``mean + (total - mean) · between / (between + noise)`` for the variances
    between queries and of the noise.
    """
    totals, variance = values.sum(dim=1), values.shape[1] * spread.square()
    if len(totals) > 1:
        mean = totals.mean()
        between = (totals.var() - variance.mean()).clamp(min=0)
        totals = mean + (totals - mean) * between / (between + variance)
    # Shares are of something: no total may be lost in the noise of one count.
    return torch.maximum(totals, spread)


def _log_likelihood(values: Tensor, totals: Tensor, spread: Tensor, noise: str) -> Tensor:
    """Of each share on the grid, up to a constant a score: float64, shape ``(m, c, shares)``."""
    z = (values[:, :, None] - totals[:, None, None] * _SHARES) / spread[:, None, None]
    return -0.5 * z * z if noise == "gaussian" else -math.sqrt(2.0) * z.abs()


def _learn_prior(log_likelihood: Tensor) -> Tensor:
    """Log of the grid's prior by expectation maximisation, from a uniform start; shape ``(shares,)``."""
    log_prior = torch.full((len(_SHARES),), -math.log(len(_SHARES)), dtype=torch.float64)
    if log_likelihood.shape[0] == 0:
        return log_prior
    for _ in range(_EM_STEPS):
        log_prior = (log_likelihood + log_prior).softmax(dim=-1).mean(dim=(0, 1)).clamp(min=1e-12).log()
    return log_prior
