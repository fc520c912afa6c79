"""Membership inference by likelihood ratios of shadow runs (LiRA: Carlini et al. 2022).

Many models are trained, each on its own half of the records. An attacker who wants to know whether a record was there
looks at how sure one model is of the record's label, and compares that with all other models: with those that saw it,
and with those that did not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]


def confidences(log_probabilities: ArrayLike) -> Floats:
    """Logits log p − log(1 − p) of probabilities given by logarithms; they spread like Gaussians, p does not."""
    told = np.minimum(np.asarray(log_probabilities, dtype=np.float64), -1e-12)
    return np.asarray(told - np.log(-np.expm1(told)))


def likelihood_ratios(sure: Floats, members: Coins) -> Floats:
    """Log-likelihood ratios of all records in all runs, each from the other runs alone.

    What models say of a record that they saw, and of one that they did not, is taken to be Gaussian, with means of
    the record's own and two variances that all records share (which is better than their own for few runs).

    Args:
        sure: confidences in the records' labels, ``(runs, records)``.
        members: whether the record was in the run's table, ``(runs, records)``.

    Returns:
        ``(runs, records)``; larger speaks for membership.

    Raises:
        ValueError: for a record of which fewer than two runs have, or lack, it.

    Example:
        >>> import numpy as np
        >>> from benchmarks.lira import likelihood_ratios
        >>> members = np.arange(8)[:, None] % 2 == 0
        >>> sure = np.where(members, 1.0, 0.0) + 0.1 * (np.arange(8)[:, None] // 2 % 2)
        >>> bool((likelihood_ratios(sure, members) > 0)[:, 0].tolist() == members[:, 0].tolist())
        True
    """
    sure, members = np.asarray(sure, dtype=np.float64), np.asarray(members, dtype=bool)
    found = np.zeros_like(sure)
    for side, sign in ((members, 1.0), (~members, -1.0)):
        counts = side.sum(axis=0)
        if sure.shape != side.shape or np.any(counts < 2):
            raise ValueError(f"members: shape {side.shape}; want two runs with and two without each record")
        totals = np.where(side, sure, 0.0).sum(axis=0)
        means = totals / counts
        variance = (np.where(side, sure - means, 0.0) ** 2).sum() / (counts - 1).sum()
        # The run itself is left out of its mean.
        others = (totals - np.where(side, sure, 0.0)) / (counts - side)
        found += sign * (-((sure - others) ** 2) / (2 * variance) - 0.5 * np.log(variance))
    return found


def true_positive_rates(scores: ArrayLike, members: ArrayLike, rates: ArrayLike) -> Floats:
    """The share of members above the threshold that lets through each share of the others.

    Args:
        scores: larger speaks for membership; any shape.
        members: bool, of the same shape.
        rates: false-positive rates in [0, 1].
    """
    values, there = np.ravel(scores), np.ravel(members).astype(bool)
    away, here = np.sort(values[~there])[::-1], np.sort(values[there])
    most = np.floor(np.asarray(rates, dtype=np.float64) * len(away)).astype(int)
    limits = np.append(away, -np.inf)[most]
    return np.asarray((len(here) - np.searchsorted(here, limits, side="right")) / len(here))
