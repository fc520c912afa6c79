"""Empirical audit: a lower bound on ε from many runs on neighbouring inputs, held against the claimed one.

An accountant says what ε may be at most; runs say what it is at least. A run of a release with a record and
one without it must not be told apart better than (ε, δ) allows: for every event E,
P(E) ≤ e^ε·Q(E) + δ and the same with P and Q exchanged. Half of the runs choose the event (a threshold on a
score, above or below it), the other half tests it, so choosing does not bias the test. Probabilities are
bounded by Clopper and Pearson (1934), one-sided, and hold without assumptions on the mechanism.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import account, merge_charges
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, check_adjacency
from pl_privknn.privacy.noise import NoiseSource, default_noise

Floats = NDArray[np.float64]
#: (with the record, runs, noise) -> one score a run, shape ``(runs,)``: larger speaks for the record.
Experiment = Callable[[bool, int, NoiseSource], ArrayLike]
Method = Literal["events", "gaussian_dp"]

# Thresholds that the first half may choose from, and shares of the claimed ε at which the profile is tested.
_THRESHOLDS = 400
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Order at which twice the Rényi divergence over the order stands for the variance of the loss.
_VARIANCE_ORDER = 1.05


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What an audit saw.

    Attributes:
        claimed: ε of the accountant at ``delta``.
        empirical: lower bound on ε at ``delta`` from the runs; 0 if nothing was seen.
        delta: δ of both.
        excess: lower bound on P(E) − e^ε'·Q(E) − δ(ε') for the (E, ε') that the first half chose, δ(·) the
            claimed profile; above 0 the claim is broken, at whatever ε' that is.
        violated: whether ``empirical`` exceeds ``claimed`` or ``excess`` exceeds 0.
        method: ``"gaussian_dp"`` where the claim is that of Gaussian releases, else ``"events"``.
        trials: runs on either side.
        confidence: a true claim is called violated with probability at most 1 − confidence.
    """

    claimed: float
    empirical: float
    delta: float
    excess: float
    violated: bool
    method: Method
    trials: int
    confidence: float

    @property
    def verdict(self) -> str:
        """``OK`` or ``VIOLATED``."""
        return "VIOLATED" if self.violated else "OK"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def audit(
    charges: Sequence[Charge],
    experiment: Experiment,
    *,
    delta: float = 1e-5,
    trials: int = 50_000,
    confidence: float = 0.999,
    adjacency: Adjacency = "add_remove",
    noise: NoiseSource | None = None,
) -> AuditResult:
    """Hold a claim against runs of what it is about.

    Two tests share the allowed error: the bound on ε at ``delta``, and the claimed privacy profile at several
    other ε, where far fewer runs show a fault. For charges that are all exactly Gaussian the bound goes
    through Gaussian DP: from the errors of the test, μ ≥ Φ⁻¹(1 − α) − Φ⁻¹(β) (Nasr et al. 2023), which is
    turned into ε at δ exactly and comes close with few runs.

    Args:
        charges: the claim.
        experiment: runs the release with or without the record and returns one score a run. Any score is
            valid; the log-likelihood ratio sees most.
        delta: δ.
        trials: runs on either side; half of them choose, half test.
        confidence: in (0, 1).
        adjacency: neighbouring relation of the claim.
        noise: where protective randomness comes from; the operating system's generator by default.

    Raises:
        ValueError: for arguments out of range, or scores that are NaN or of another shape.
    """
    delta, adjacency = check_open_unit("delta", delta), check_adjacency(adjacency)
    trials = check_int("trials", trials, minimum=100)
    error = (1 - check_open_unit("confidence", confidence)) / 2
    source = noise if noise is not None else default_noise()
    scores_with, scores_without = (
        _scores(experiment(present, trials, source.stream("audit", int(present))), trials)
        for present in (True, False)
    )
    claimed = account(charges, delta=delta, adjacency=adjacency, exact=False).epsilon
    gaussian = bool(charges) and all(c.mechanism.gaussian_mu(adjacency) is not None for c in charges)
    method: Method = "gaussian_dp" if gaussian else "events"
    bound = mu_lower_bound if gaussian else epsilon_lower_bound
    empirical = bound(scores_with, scores_without, delta=delta, confidence=1 - error)
    reach = claimed if math.isfinite(claimed) else 0.0
    profile = claimed_profile(charges, reach * np.array(_SHARES), adjacency)
    excess = profile_excess(scores_with, scores_without, profile, confidence=1 - error)
    return AuditResult(
        claimed=claimed,
        empirical=empirical,
        delta=delta,
        excess=excess,
        violated=empirical > claimed or excess > 0,
        method=method,
        trials=trials,
        confidence=confidence,
    )


def claimed_profile(
    charges: Sequence[Charge], epsilons: Floats, adjacency: Adjacency = "add_remove"
) -> list[tuple[float, float]]:
    """(ε, δ(ε)) of a claim, composed by dp-accounting and not by the accountant that is being audited.

    Args:
        charges: the claim; releases in a fixed order.
        epsilons: ε ≥ 0, shape ``(n,)``.
        adjacency: neighbouring relation.
    """
    merged = merge_charges(charges)
    if not merged:
        return [(float(epsilon), 0.0) for epsilon in epsilons]
    gaussian = [charge.mechanism.gaussian_mu(adjacency) for charge in merged]
    if None not in gaussian:
        mu = math.sqrt(sum(c.count * (m or 0.0) ** 2 for c, m in zip(merged, gaussian, strict=True)))
        return [(float(epsilon), pld.gaussian_delta(mu, float(epsilon))) for epsilon in epsilons]
    order = np.array([_VARIANCE_ORDER])
    variance = sum(
        c.count * 2 * float(c.mechanism.rdp(order, adjacency)[0]) / _VARIANCE_ORDER for c in merged
    )
    releases = sum(charge.count for charge in merged)
    step = pld.choose_discretization(variance, releases)
    whole = None
    for charge in merged:
        part = charge.mechanism.pld(adjacency, step).self_compose(charge.count)
        whole = part if whole is None else whole.compose(part)
    assert whole is not None
    return [(float(epsilon), float(whole.get_delta_for_epsilon(float(epsilon)))) for epsilon in epsilons]


def epsilon_lower_bound(
    scores_with: ArrayLike, scores_without: ArrayLike, *, delta: float, confidence: float
) -> float:
    """Lower bound on ε at ``delta``: log((P(E) − δ) / Q(E)) for the event that the first half chose.

    Args:
        scores_with: one score for each run with the record, shape ``(n,)``.
        scores_without: without it, shape ``(m,)``.
        delta: δ.
        confidence: probability with which the bound holds.

    Returns:
        ε, at least 0.
    """
    first, second = _halves(scores_with, scores_without)
    error = (1 - confidence) / 2

    def bound(hits: Floats, size_p: int, misses: Floats, size_q: int) -> Floats:
        p, q = lower_probability(hits, size_p, error), upper_probability(misses, size_q, error)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(p > delta, np.log(np.maximum(p - delta, 0.0) / q), 0.0)

    return max(0.0, _best_then_tested(first, second, bound))


def mu_lower_bound(
    scores_with: ArrayLike, scores_without: ArrayLike, *, delta: float, confidence: float
) -> float:
    """Lower bound on ε at ``delta`` by way of μ of Gaussian DP; arguments as :func:`epsilon_lower_bound`.

    It refutes a claim of μ-Gaussian DP with the stated confidence; as a bound on ε it takes the mechanism's
    trade-off between errors to be a Gaussian one.
    """
    from scipy.special import ndtri

    first, second = _halves(scores_with, scores_without)
    error = (1 - confidence) / 2

    def bound(hits: Floats, size_p: int, misses: Floats, size_q: int) -> Floats:
        p, q = lower_probability(hits, size_p, error), upper_probability(misses, size_q, error)
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(ndtri(p) - ndtri(q), nan=-math.inf)

    mu = _best_then_tested(first, second, bound)
    return pld.gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def profile_excess(
    scores_with: ArrayLike,
    scores_without: ArrayLike,
    profile: Sequence[tuple[float, float]],
    *,
    confidence: float,
) -> float:
    """Lower bound on P(E) − e^ε·Q(E) − δ for the event and the point of the profile that the first half chose.

    Args:
        scores_with: as in :func:`epsilon_lower_bound`.
        scores_without: as in :func:`epsilon_lower_bound`.
        profile: claimed (ε, δ).
        confidence: probability with which the bound holds.
    """
    first, second = _halves(scores_with, scores_without)
    error = (1 - confidence) / 2
    chosen: tuple[float, float] = (-math.inf, 0.0)
    for epsilon, delta in profile:

        def bound(
            hits: Floats,
            size_p: int,
            misses: Floats,
            size_q: int,
            epsilon: float = epsilon,
            delta: float = delta,
        ) -> Floats:
            p, q = lower_probability(hits, size_p, error), upper_probability(misses, size_q, error)
            return p - math.exp(epsilon) * q - delta

        chosen = max(chosen, _best_and_tested(first, second, bound))
    return chosen[1]


def lower_probability(hits: ArrayLike, trials: int, error: float) -> Floats:
    """Clopper-Pearson lower bound on a probability, wrong with probability at most ``error``."""
    from scipy.special import betaincinv

    count = np.asarray(hits, dtype=np.float64)
    bound = betaincinv(np.maximum(count, 1.0), trials - np.maximum(count, 1.0) + 1, error)
    return np.where(count > 0, bound, 0.0)


def upper_probability(hits: ArrayLike, trials: int, error: float) -> Floats:
    """Clopper-Pearson upper bound on a probability, wrong with probability at most ``error``."""
    return 1.0 - lower_probability(trials - np.asarray(hits, dtype=np.float64), trials, error)


Halves = tuple[tuple[Floats, Floats], tuple[Floats, Floats]]
_Bound = Callable[[Floats, int, Floats, int], Floats]


def _best_then_tested(first: tuple[Floats, Floats], second: tuple[Floats, Floats], bound: _Bound) -> float:
    return _best_and_tested(first, second, bound)[1]


def _best_and_tested(
    first: tuple[Floats, Floats], second: tuple[Floats, Floats], bound: _Bound
) -> tuple[float, float]:
    """The largest bound over thresholds and directions on the first half, and its value on the second."""
    with_record, without = first
    levels = np.unique(np.quantile(np.concatenate(first), np.linspace(0, 1, _THRESHOLDS), method="nearest"))
    # The far ends decide where δ is small.
    edges = np.concatenate([np.sort(with_record)[[*range(-30, 0)]], np.sort(without)[:30]])
    levels = np.unique(np.concatenate([levels, edges]))
    best, tested = -math.inf, -math.inf
    for above in (True, False):
        # Large scores speak for the record: P above the threshold, Q below it.
        sides = (with_record, without) if above else (without, with_record)
        hits, misses = (_count(side, levels, above) for side in sides)
        values = bound(hits, len(sides[0]), misses, len(sides[1]))
        place = int(np.argmax(values))
        if values[place] > best:
            best = float(values[place])
            fresh = second if above else second[::-1]
            hit, miss = (_count(side, levels[place : place + 1], above) for side in fresh)
            tested = float(bound(hit, len(fresh[0]), miss, len(fresh[1]))[0])
    return best, tested


def _count(scores: Floats, levels: Floats, above: bool) -> Floats:
    """How many scores are at least (or at most) each level."""
    ordered = np.sort(scores)
    if above:
        return (len(ordered) - np.searchsorted(ordered, levels, side="left")).astype(np.float64)
    return np.searchsorted(ordered, levels, side="right").astype(np.float64)


def _halves(scores_with: ArrayLike, scores_without: ArrayLike) -> Halves:
    p, q = (np.asarray(scores, dtype=np.float64) for scores in (scores_with, scores_without))
    for name, scores in (("scores_with", p), ("scores_without", q)):
        if scores.ndim != 1 or len(scores) < 100 or np.isnan(scores).any():
            raise ValueError(
                f"{name}: shape {scores.shape}; want at least 100 scores, one a run, none of them NaN"
            )
    return (p[: len(p) // 2], q[: len(q) // 2]), (p[len(p) // 2 :], q[len(q) // 2 :])


def _scores(scores: ArrayLike, trials: int) -> Floats:
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (trials,):
        raise ValueError(
            f"experiment: returned shape {values.shape}; want one score for each of {trials} runs"
        )
    return values
