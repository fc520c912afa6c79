"""Data-dependent Rényi costs of PATE's answers and of screening, as conditional figures.

A data-dependent cost is small where the votes agree. It is a function of the private votes: stating it
reveals something about them, so it is no guarantee that may be published. It never carries over to a random
sample of the records (amplification needs the same bound on every sample): sampled mechanisms are refused.

Where nearly all teachers agree, the answer hardly depends on any one of them, and its cost *for the table in
hand* is far below the worst case over tables. The published theorems bound D_α(M(D) ‖ M(D′)), with D the
table in hand and D′ any neighbour. An adversary who distinguishes D from D′ works in both directions, so the default
here bounds D_α(M(D′) ‖ M(D)) too, by applying the same theorem at the worst neighbour D′;
``directions="one"`` is the published figure.

The numbers are functions of private votes. Publishing them is a release in its own right, which the smooth
sensitivity analysis of Papernot et al. (2018) would pay for; that analysis is not part of this package.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_choice
from pl_privknn.privacy.accounting import rdp
from pl_privknn.privacy.mechanisms.base import Mechanism
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian, Laplace
from pl_privknn.privacy.mechanisms.screening import NoisyScreening

Floats = NDArray[np.float64]
#: Why such a figure is conditional.
REASON = (
    "computed from the private votes (data-dependent RDP, Papernot et al. 2018), so it bounds the cost "
    "of this table only and is itself private; publish the data-independent figure"
)
Directions = Literal["both", "one"]


def answers_rdp(
    mechanism: Mechanism, votes: NDArray[np.int64], orders: Floats, directions: Directions = "both"
) -> Floats:
    """RDP of one noisy arg-max for each histogram, given the histogram.

    Gaussian noise: Theorem 6 and Propositions 7 and 10 of Papernot et al. (2018). Laplace noise: Theorem 3
    and Lemma 4 of Papernot et al. (2017). Never above the data-independent curve; equal to it where the
    theorems don't apply (too little agreement, or too large an order), and for every other mechanism.

    Args:
        mechanism: what draws the noise; not sampled, with the sensitivity of PATE's votes: one vote that
            moves between two classes (√2 in L2, 2 in L1).
        votes: histograms, shape ``(m, c)``.
        orders: Rényi orders above 1, shape ``(n,)``.
        directions: ``"both"``, or ``"one"`` as published; see the module.

    Returns:
        ε(α), shape ``(m, n)``.

    Raises:
        ValueError: for unknown ``directions``, another sensitivity or sampling rate, or votes that are no counts.
    """
    check_choice("directions", directions, ("both", "one"))
    votes = _counts(votes)
    curves = np.tile(mechanism.rdp(orders, "replace_one"), (len(votes), 1))
    if not len(votes) or not isinstance(mechanism, Gaussian | Laplace):
        return curves
    _check_pate(mechanism)
    log_q = log_other_at_worst(mechanism, votes) if directions == "both" else log_other(mechanism, votes)
    # Many queries have the same histogram up to the order of classes.
    values, place = np.unique(log_q, return_inverse=True)
    if isinstance(mechanism, Gaussian):
        given = _gaussian_given_q(values[:, None], mechanism.sigma, orders)
    else:
        given = _pure_given_q(values[:, None], 2 / mechanism.scale, orders)
    return np.minimum(curves, given[place])


def screening_rdp(mechanism: NoisyScreening, max_votes: NDArray[np.int64], orders: Floats) -> Floats:
    """RDP of one screening for each largest count t, given the count: exact, in both directions.

    The neighbours' largest counts are t−1, t and t+1, so four divergences between coins cover them all.

    Args:
        mechanism: the screening; not sampled.
        max_votes: largest counts, shape ``(m,)``.
        orders: Rényi orders above 1, shape ``(n,)``.

    Returns:
        ε(α), shape ``(m, n)``.

    Raises:
        ValueError: for a sampled screening; amplifying a data-dependent cost by sampling is wrong.
    """
    if mechanism.sampling_rate < 1:
        raise ValueError(
            f"sampling_rate={mechanism.sampling_rate!r}: a data-dependent bound does not carry over to random "
            "samples; use sampling_rate=1 or the data-independent cost"
        )
    counts, place = np.unique(np.asarray(max_votes, dtype=np.int64), return_inverse=True)
    curves = np.empty((len(counts), len(orders)))
    for i, count in enumerate(counts):
        coins = mechanism.log_outcomes(count + np.array([0, 1, -1]))
        curves[i] = rdp.pairs_rdp(coins[[0, 0]], coins[1:], orders)
    return curves[place]


def log_other(mechanism: Gaussian | Laplace, votes: NDArray[np.int64]) -> Floats:
    """Log of a bound on P[the noisy arg-max is not the plain one].

    A union bound over the other classes: each beats the winner with a probability that depends on its gap
    alone (Proposition 7 of Papernot et al. 2018 for Gaussian, Lemma 4 of Papernot et al. 2017 for Laplace
    noise), and among c classes the winner wins with probability 1/c at least.

    Args:
        mechanism: what draws the noise.
        votes: histograms, shape ``(m, c)``.

    Returns:
        Shape ``(m,)``.
    """
    gaps = _gaps(votes)
    return np.minimum(_log_sum(_log_beaten(mechanism, gaps)), math.log1p(-1 / (gaps.shape[1] + 1)))


def log_other_at_worst(mechanism: Gaussian | Laplace, votes: NDArray[np.int64]) -> Floats:
    """Log of the bound of :func:`log_other` at the worst neighbour, for the class that wins in this histogram.

    One teacher changes its vote. With the vote moving from the winner to class j, j catches up by 2 votes and the
    others by 1; no other change of one teacher narrows any gap more. Shape ``(m,)``.
    """
    gaps = _gaps(votes)
    towards, others = _log_beaten(mechanism, gaps - 2), _log_beaten(mechanism, gaps - 1)
    moved = np.repeat(others[:, None, :], gaps.shape[1], axis=1)
    diagonal = np.arange(gaps.shape[1])
    moved[:, diagonal, diagonal] = towards
    return np.minimum(_log_sum(moved).max(axis=1), 0.0)


def _gaps(votes: NDArray[np.int64]) -> Floats:
    """Distances of the classes behind the winner, ascending; shape ``(m, c − 1)``."""
    ordered = -np.sort(-np.asarray(votes, dtype=np.float64), axis=1)
    return ordered[:, :1] - ordered[:, 1:]


def _log_beaten(mechanism: Gaussian | Laplace, gaps: Floats) -> Floats:
    """Log of P[a class ``gaps`` votes behind wins]; gaps may be negative."""
    from scipy.special import log_ndtr

    if isinstance(mechanism, Gaussian):
        return np.asarray(log_ndtr(-gaps / (math.sqrt(2) * mechanism.sigma)))
    x = np.abs(gaps) / mechanism.scale
    behind = np.log((2 + x) / 4) - x
    return np.where(gaps >= 0, behind, np.log1p(-np.exp(behind)))


def _gaussian_given_q(log_q: Floats, sigma: float, orders: Floats) -> Floats:
    """Theorem 6 at the two orders of Proposition 10; inf where it does not apply. GNMax has ε(α) = α/σ².

    Args:
        log_q: log of a bound q on the probability of all but one class, shape ``(m, 1)``.
        sigma: standard deviation of the noise.
        orders: shape ``(n,)``.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        second = sigma * np.sqrt(-log_q)
        first = second + 1
        eps_first, eps_second = first / sigma**2, second / sigma**2
        limit = (second - 1) * eps_second - second * (np.log1p(1 / second) + np.log1p(1 / (second - 1)))
        applies = (second > 1) & (orders <= first) & (log_q <= limit) & (-log_q > eps_second)
        log_stay = np.log1p(-np.exp(log_q))
        log_a = log_stay - np.log1p(-np.exp((log_q + eps_second) * (1 - 1 / second)))
        log_b = eps_first - log_q / second
        log_moment = np.logaddexp(log_stay + (orders - 1) * log_a, log_q + (orders - 1) * log_b)
        bound = np.maximum(log_moment, 0.0) / (orders - 1)
    return np.where(applies & np.isfinite(bound), bound, np.inf)


def _pure_given_q(log_q: Floats, pure: float, orders: Floats) -> Floats:
    """Theorem 3 of Papernot et al. (2017), its l being α − 1; inf where it does not apply."""
    applies = log_q < -np.logaddexp(pure, 0.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_stay = np.log1p(-np.exp(log_q))
        log_ratio = log_stay - np.log1p(-np.exp(pure + log_q))
        log_moment = np.logaddexp(log_stay + (orders - 1) * log_ratio, log_q + (orders - 1) * pure)
        bound = np.maximum(log_moment, 0.0) / (orders - 1)
    return np.where(applies & np.isfinite(bound), bound, np.inf)


def _log_sum(values: Floats) -> Floats:
    peak = values.max(axis=-1, keepdims=True)
    total: Floats = np.squeeze(peak, -1) + np.log(np.exp(values - peak).sum(axis=-1))
    return total


def _check_pate(mechanism: Gaussian | Laplace) -> None:
    expected, stated = (
        (math.sqrt(2), mechanism.l2_sensitivity)
        if isinstance(mechanism, Gaussian)
        else (2.0, mechanism.l1_sensitivity)
    )
    if mechanism.sampling_rate < 1 or not math.isclose(expected, stated):
        raise ValueError(
            f"mechanism={mechanism!r}: the data-dependent cost is that of one vote that moves between two "
            f"classes, without sampling; expected a sensitivity of {expected:.6g} and sampling_rate=1"
        )


def _counts(votes: Any) -> NDArray[np.int64]:
    counts = np.asarray(votes)
    if counts.ndim != 2 or counts.shape[1] < 2 or counts.dtype.kind not in "iu":
        raise ValueError(
            f"votes: {counts.dtype} of shape {counts.shape}; expected whole numbers, (queries, classes), with a "
            "column for every class, voted for or not"
        )
    if (counts < 0).any():
        raise ValueError("votes: some counts are negative; give the number of votes of each class")
    return counts.astype(np.int64)
