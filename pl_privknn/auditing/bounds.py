"""Lower bounds on ε from an attacker's guesses, and tests of a stated guarantee.

Each of m canaries is included in the table by an independent fair coin. The attacker guesses the coins of
which it is most confident. If the release is (ε, δ)-DP, the number of correct guesses hardly exceeds that of
randomised response (Steinke, Nasr, Jagielski 2023); if it is f-DP, it obeys a recursion in f (Mahloujifar, Melis,
Chaudhuri 2024), which is tighter for Gaussian releases. Canaries of runs with fresh coins may be pooled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.pld import bisect
from pl_privknn.privacy.accounting.tradeoff import TradeOff, trade_off
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
#: Smallest false-positive rate of a test with a given true-positive rate.
Inverse = Callable[[float], float]

#: Confidence of lower bounds by default, and that of every verdict.
CONFIDENCE, VERDICT = 0.95, 0.999
#: Shares of canaries that are guessed; the error probability is split among them.
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05)
_LARGEST = 64.0


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of canaries by an attacker; both arrays have shape ``(m,)``.

    Attributes:
        released: what the scores are computed from.
        present: whether the canary was in the table.
        scores: larger values indicate presence. Computed from released values alone.
    """

    released: str
    present: Bools
    scores: Floats


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """Result of an attack.

    Attributes:
        subject: what was attacked.
        released: what the attacker saw.
        epsilon: the stated ε.
        delta: δ of both values of ε.
        adjacency: neighbouring relation.
        epsilon_lower_bound: measured lower bound, valid with ``confidence`` for any mechanism.
        confidence: of the lower bound.
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
    epsilon_lower_bound: float
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
    runs: int = 1,
) -> AttackResult:
    """Result of an attacker's scores against the stated releases.

    A true claim is called violated with probability at most 1 − :data:`VERDICT`.

    Args:
        subject: what was attacked.
        seen: the scores.
        charges: the claim.
        delta: δ.
        adjacency: neighbouring relation of the claim.
        confidence: of the lower bound.
        runs: see :class:`AttackResult`.
    """
    options: dict[str, Any] = {"delta": delta, "adjacency": adjacency, "exact": False}
    epsilon, inverse = account(charges, **options).epsilon, _inverse(trade_off(charges, **options))
    guesses = Guesses.of(seen.scores, seen.present)
    return AttackResult(
        subject=subject,
        released=seen.released,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        epsilon_lower_bound=epsilon_of_guesses(guesses, delta=delta, confidence=confidence),
        confidence=confidence,
        # The trade-off refutes with far fewer guesses than ε, whose test pays m·δ.
        violated=refutes_trade_off(guesses, inverse, VERDICT),
        verdict_confidence=VERDICT,
        canaries=len(seen.present),
        runs=runs,
    )


def _inverse(claim: TradeOff) -> Inverse:
    if claim.gaussian is not None:
        return gaussian_inverse(claim.gaussian)
    # The larger of both directions, whose inverse is its mirror image; on a grid, with each rate rounded down.
    rates = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 4000)])
    false = 1.0 - claim.true_positive_rate(1.0 - rates)
    return lambda rate: float(false[max(int(np.searchsorted(rates, rate, side="right")) - 1, 0)])


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
    return bisect(refuted, low, high, absolute=1e-3)
