"""Lower bounds on ε from an attacker's observations, and tests of a stated guarantee.

*One run.* Each of m canaries is included in the table by an independent fair coin. The attacker guesses the coins of
which it is most confident. If the release is (ε, δ)-DP, the number of correct guesses hardly exceeds that of
randomised response (Steinke, Nasr, Jagielski 2023); if it is f-DP, it obeys a recursion in f (Mahloujifar, Melis,
Chaudhuri 2024), which is tighter for Gaussian releases. Canaries of runs with fresh coins may be pooled.

*Independent pairs.* No test may distinguish releases with a record from releases without it better than the claim's
trade-off between both error rates allows. Some of the releases choose the event, a threshold on a
score; the others test it, so that the choice does not bias the test. Probabilities are bounded by Clopper and Pearson
(1934).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import TradeOff, account, trade_off
from pl_privknn.privacy.mechanisms import Adjacency, Charge

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
#: Smallest false-positive rate of a test with a given true-positive rate.
Inverse = Callable[[float], float]
#: Maps lower bounds of P(E) and upper bounds of Q(E) to the quantity to be maximised.
Bound = Callable[[Floats, Floats], Floats]

#: Confidence of lower bounds by default, and that of every verdict.
CONFIDENCE, VERDICT = 0.95, 0.999
#: Shares of canaries that are guessed; the error probability is split among them.
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05)
# Share of independent scores that select the event, number of candidate thresholds, and minimum number of scores.
_CHOOSING, _THRESHOLDS, _FEWEST = 0.35, 400, 10
_LARGEST = 64.0


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of canaries by an attacker; all arrays have shape ``(m,)``.

    Attributes:
        released: what the scores are computed from.
        present: whether the canary was in the table.
        scores: larger values indicate presence. Computed from released values alone.
        contrasts: further scores, with the part common to all queries subtracted, which reveal reused noise.
        labels: scores from labels alone; None where there are none.
        independent: scores of honest releases are independent: canaries are in separate runs, or share neither
            queries nor noise. Verdict and estimate assume it; the lower bound does not.
    """

    released: str
    present: Bools
    scores: Floats
    contrasts: Sequence[Floats] = ()
    labels: Floats | None = None
    independent: bool = False


@dataclasses.dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        subject: what was audited.
        released: what the attacker saw.
        epsilon: the stated ε.
        delta: δ of all values of ε.
        adjacency: neighbouring relation.
        epsilon_lower: measured lower bound, valid with ``confidence`` for any mechanism.
        epsilon_estimate: lower bound under the assumption that the releases' trade-off is a Gaussian one; a bound
            where ``gaussian`` is true, else an estimate. None where the releases are of another kind altogether.
        gaussian: whether the stated releases are exactly Gaussian.
        epsilon_lower_labels: lower bound from labels alone; None where none are released.
        confidence: of the lower bounds, each by itself.
        violated: whether the stated guarantee is refuted.
        verdict_confidence: a true guarantee is refuted with probability at most 1 − this.
        canaries: number of canaries in all runs.
        runs: number of runs with fresh coins, whose canaries are pooled.
    """

    subject: str
    released: str
    epsilon: float
    delta: float
    adjacency: Adjacency
    epsilon_lower: float
    epsilon_estimate: float | None
    gaussian: bool
    epsilon_lower_labels: float | None
    confidence: float
    violated: bool
    verdict_confidence: float
    canaries: int
    runs: int

    @property
    def verdict(self) -> str:
        """``OK`` or ``VIOLATED``."""
        return "VIOLATED" if self.violated else "OK"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def audit_scores(
    subject: str,
    seen: Scores,
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    confidence: float = CONFIDENCE,
    verdict: float = VERDICT,
    runs: int = 1,
) -> Audit:
    """Audit result of an attacker's scores against the stated releases.

    Args:
        subject: what was audited.
        seen: the scores.
        charges: the claim.
        delta: δ.
        adjacency: neighbouring relation of the claim.
        confidence: of the lower bounds.
        verdict: a true claim is called violated with probability at most 1 − this; all tests share the error.
        runs: see :class:`Audit`.
    """
    options: dict[str, Any] = {"delta": delta, "adjacency": adjacency, "exact": False}
    epsilon, claim = account(charges, **options).epsilon, trade_off(charges, **options)
    noisy = all(np.isinf(charge.mechanism.pure_epsilon(adjacency)) for charge in charges)
    tested = [seen.scores, *(each for each in seen.contrasts if np.any(each))]
    sure = 1 - (1 - verdict) / len(tested)
    inverse = _inverse(claim)

    def refuted(scores: Floats) -> bool:
        if seen.independent:
            return refutes_pairs(*_sides(scores, seen.present), claim, confidence=sure)
        guesses = Guesses.of(scores, seen.present)
        if noisy:  # the trade-off refutes with far fewer guesses than ε
            return refutes_trade_off(guesses, inverse, sure)
        each = 1 - (1 - sure) / 2
        return refutes_epsilon(guesses, epsilon, delta, each) or refutes_trade_off(guesses, inverse, each)

    def lower(scores: Floats) -> float:
        return epsilon_of_guesses(Guesses.of(scores, seen.present), delta=delta, confidence=confidence)

    estimate = None
    if noisy and seen.independent:
        mu = gaussian_mu_of_pairs(*_sides(seen.scores, seen.present), confidence=confidence)
        estimate = pld.gaussian_epsilon(mu, delta)
    elif noisy:
        mu = gaussian_mu_of_guesses(Guesses.of(seen.scores, seen.present), confidence=confidence)
        estimate = pld.gaussian_epsilon(mu, delta)
    return Audit(
        subject=subject,
        released=seen.released,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        epsilon_lower=lower(seen.scores),
        epsilon_estimate=estimate,
        gaussian=claim.gaussian is not None,
        epsilon_lower_labels=None if seen.labels is None else lower(seen.labels),
        confidence=confidence,
        violated=any(map(refuted, tested)),
        verdict_confidence=verdict,
        canaries=len(seen.present),
        runs=runs,
    )


def _sides(scores: Floats, present: Bools) -> tuple[Floats, Floats]:
    return scores[present], scores[~present]


def _inverse(claim: TradeOff) -> Inverse:
    if claim.gaussian is not None:
        return gaussian_inverse(claim.gaussian)
    # The larger of both directions, whose inverse is its mirror image; on a grid, with each rate rounded down.
    rates = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 4000)])
    false = 1.0 - claim.true_positive_rate(1.0 - rates)
    return lambda rate: float(false[max(int(np.searchsorted(rates, rate, side="right")) - 1, 0)])


# ---------------------------------------------------------------------------- one run


@dataclasses.dataclass(frozen=True)
class Guesses:
    """Guesses about canaries.

    Attributes:
        canaries: number of canaries.
        made: number of guesses, for each of :data:`SHARES`.
        right: number of correct guesses among them.
    """

    canaries: int
    made: tuple[int, ...]
    right: tuple[int, ...]

    @classmethod
    def of(cls, scores: Floats, present: Bools) -> Guesses:
        """Guess "present" for the largest scores and "absent" for equally many of the smallest.

        Args:
            scores: shape ``(m,)``; larger values indicate presence.
            present: the coins, shape ``(m,)``.
        """
        # Ties are broken by chance: the order of the canaries may depend on their coins.
        order = np.lexsort((np.random.default_rng(0).permutation(len(scores)), scores))
        halves = [min(max(1, round(len(scores) * share / 2)), len(scores) // 2) for share in SHARES]
        ends = [(order[len(order) - half :], order[:half]) for half in halves]
        right = tuple(int(present[high].sum() + (~present[low]).sum()) for high, low in ends)
        return cls(len(scores), tuple(2 * half for half in halves), right)


def epsilon_of_guesses(guesses: Guesses, *, delta: float, confidence: float) -> float:
    """Lower bound on ε at ``delta`` (Steinke, Nasr, Jagielski 2023, Theorem 5.2); 0 if nothing is refuted.

    Args:
        guesses: of one run, or of several with fresh coins.
        delta: δ of one run.
        confidence: probability with which the bound holds.

    Example:
        >>> from pl_privknn.auditing.bounds import Guesses, epsilon_of_guesses
        >>> round(epsilon_of_guesses(Guesses(1000, (1000,), (731,)), delta=0.0, confidence=0.95), 2)
        0.88
    """
    return _largest(lambda value: refutes_epsilon(guesses, value, delta, confidence))


def gaussian_mu_of_guesses(guesses: Guesses, *, confidence: float) -> float:
    """Lower bound on μ for releases known to be Gaussian-DP; 0 if nothing is refuted."""
    return _largest(lambda mu: refutes_trade_off(guesses, gaussian_inverse(mu), confidence))


def refutes_epsilon(guesses: Guesses, epsilon: float, delta: float, confidence: float) -> bool:
    """Whether this number of correct guesses refutes an (ε, δ)-DP claim."""
    error = (1 - confidence) / len(guesses.made)
    return any(
        rarity(guesses.canaries, made, right, epsilon, delta, error) < error
        for made, right in zip(guesses.made, guesses.right, strict=True)
    )


def rarity(
    canaries: int, made: int, right: int, epsilon: float, delta: float, enough: float = math.inf
) -> float:
    """Upper bound on the probability of ``right`` or more correct guesses; not refined once it reaches ``enough``."""
    from scipy.special import bdtr, bdtrc

    likely = 1 / (1 + math.exp(-epsilon))
    tail = float(bdtrc(right - 1, made, likely)) if right else 1.0
    if delta == 0 or tail >= enough:
        return tail
    steps = np.arange(1, right + 1)
    fewer = np.append(bdtr(right - 1 - steps[:-1], made, likely), 0.0)
    between = float(bdtr(right - 1, made, likely)) - fewer
    return tail + 2 * canaries * delta * float(np.max(between / steps, initial=0.0))


def refutes_trade_off(guesses: Guesses, inverse: Inverse, confidence: float) -> bool:
    """Whether this number of correct guesses refutes an f-DP claim (Mahloujifar et al. 2024).

    Args:
        guesses: see :class:`Guesses`.
        inverse: the smallest false-positive rate of a test with a given true-positive rate.
        confidence: a true claim is refuted with probability at most 1 − confidence.
    """
    error = (1 - confidence) / len(guesses.made)
    return any(
        _contradiction(guesses.canaries, made, right, inverse, error)
        for made, right in zip(guesses.made, guesses.right, strict=True)
    )


def _contradiction(canaries: int, made: int, right: int, inverse: Inverse, error: float) -> bool:
    """Whether ``right`` or more correct guesses with probability ``error`` imply a total probability above 1.

    Going down from ``right``: the mass of right guesses on outcomes with more than i right ones bounds the mass of
    wrong guesses on outcomes with i or more from below, by f; both add up to the number of guesses.
    """
    if right == 0:
        return False
    correct, wrong = error * right / canaries, error * (made - right) / canaries
    everything = made / canaries
    for i in range(right - 1, -1, -1):
        more = max(wrong, inverse(correct))
        correct += i / (made - i) * (more - wrong)
        wrong = more
        if correct + wrong > everything:
            return True
    return False


def gaussian_inverse(mu: float) -> Inverse:
    """Smallest false-positive rate at a true-positive rate, for one Gaussian release."""
    from scipy.special import ndtr, ndtri

    return lambda rate: float(ndtr(ndtri(min(max(rate, 0.0), 1.0)) - mu))


def _largest(refuted: Callable[[float], bool]) -> float:
    """Largest refuted value, by bisection to 1e-3, rounded down."""
    low, high = 0.0, 0.25
    if not refuted(0.0):
        return 0.0
    while refuted(high) and high < _LARGEST:
        low, high = high, 2 * high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


# ---------------------------------------------------------------------------- independent pairs


def gaussian_mu_of_pairs(scores_with: ArrayLike, scores_without: ArrayLike, *, confidence: float) -> float:
    """Lower bound on μ of Gaussian DP: Φ⁻¹(1 − α) − Φ⁻¹(β) by the errors of one test (Nasr et al. 2023).

    Args:
        scores_with: one score for each release with the record, shape ``(n,)``.
        scores_without: without it, shape ``(m,)``.
        confidence: probability with which the bound holds.

    Returns:
        μ, at least 0; 0 where there are too few scores.

    Raises:
        ValueError: for scores of another shape, or NaN.
    """
    from scipy.special import ndtri

    def bound(p: Floats, q: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(ndtri(p) - ndtri(q), nan=-math.inf)

    return max(0.0, _chosen_and_tested(scores_with, scores_without, bound, confidence))


def lower_probability(hits: ArrayLike, trials: int, error: float) -> Floats:
    """Clopper-Pearson lower bound on a probability, wrong with probability at most ``error``."""
    from scipy.special import betaincinv

    count = np.asarray(hits, dtype=np.float64)
    bound = betaincinv(np.maximum(count, 1.0), trials - np.maximum(count, 1.0) + 1, error)
    return np.where(count > 0, bound, 0.0)


def upper_probability(hits: ArrayLike, trials: int, error: float) -> Floats:
    """Clopper-Pearson upper bound on a probability, wrong with probability at most ``error``."""
    return 1.0 - lower_probability(trials - np.asarray(hits, dtype=np.float64), trials, error)


def refutes_pairs(
    scores_with: ArrayLike, scores_without: ArrayLike, claim: TradeOff, *, confidence: float
) -> bool:
    """Hypothesis test of a trade-off from independent releases with and without the record.

    Args:
        scores_with: see :func:`gaussian_mu_of_pairs`.
        scores_without: likewise.
        claim: what was stated.
        confidence: a true claim is refuted with probability at most 1 − confidence.
    """

    def excess(p: Floats, q: Floats) -> Floats:
        return p - claim.true_positive_rate(q)

    return _chosen_and_tested(scores_with, scores_without, excess, confidence) > 0


def _chosen_and_tested(
    scores_with: ArrayLike, scores_without: ArrayLike, bound: Bound, confidence: float
) -> float:
    """Bound on held-out scores for the event that maximises it on the other scores."""
    sides = [np.asarray(scores, dtype=np.float64) for scores in (scores_with, scores_without)]
    for name, scores in zip(("scores_with", "scores_without"), sides, strict=True):
        if scores.ndim != 1 or np.isnan(scores).any():
            raise ValueError(f"{name}: shape {scores.shape}; expected one score a release, none of them NaN")
    if min(map(len, sides)) < _FEWEST:
        return 0.0
    cuts = [round(len(scores) * _CHOOSING) for scores in sides]
    first = [scores[:cut] for scores, cut in zip(sides, cuts, strict=True)]
    second = [scores[cut:] for scores, cut in zip(sides, cuts, strict=True)]
    levels = np.quantile(np.concatenate(first), np.linspace(0, 1, _THRESHOLDS), method="nearest")
    # The tails decide where δ is small.
    levels = np.unique(np.concatenate([levels, np.sort(first[0])[-30:], np.sort(first[1])[:30]]))
    error = (1 - confidence) / 2
    found = [(_bounded(first, above, levels, bound, error), above) for above in (True, False)]
    bounds, above = max(found, key=lambda each: float(each[0].max()))
    return float(_bounded(second, above, levels[[int(np.argmax(bounds))]], bound, error)[0])


def _bounded(half: Sequence[Floats], above: bool, at: Floats, bound: Bound, error: float) -> Floats:
    """Bounds for the events that a score exceeds each level, or falls below it when absence is tested."""
    counts = []
    for scores in half if above else half[::-1]:
        below = np.searchsorted(np.sort(scores), at, side="left" if above else "right")
        counts.append((len(scores) - below if above else below, len(scores)))
    return bound(lower_probability(*counts[0], error), upper_probability(*counts[1], error))
