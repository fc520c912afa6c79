"""What right guesses about many canaries of one run say of ε.

Each of m canaries is in the table by a fair coin of its own. The attacker guesses about those it is surest of and
abstains from the others. If the release is (ε, δ)-DP, the number of right guesses is hardly more than that of
randomised response (Steinke, Nasr, Jagielski 2023); if it is f-DP, it obeys a recursion in f (Mahloujifar, Melis,
Chaudhuri 2024), which is the tighter one for Gaussian releases. Canaries of runs with fresh coins may be pooled: each
coin has a say in its own run alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting import pld

Floats = NDArray[np.float64]
#: Largest false-positive rate at which a test can have this true-positive rate … of which it is the inverse.
Inverse = Callable[[float], float]

#: Shares of canaries that are guessed about; the error is shared among them.
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05)
_LARGEST = 64.0


@dataclasses.dataclass(frozen=True)
class Guesses:
    """Guesses about canaries.

    Attributes:
        canaries: how many there were.
        made: how many were guessed about, for each of :data:`SHARES`.
        right: how many of these guesses were right.
    """

    canaries: int
    made: tuple[int, ...]
    right: tuple[int, ...]

    @classmethod
    def of(cls, scores: Floats, present: NDArray[np.bool_]) -> Guesses:
        """Guess "there" for the largest scores and "not there" for the smallest, as many of either.

        Args:
            scores: shape ``(m,)``; larger speaks for presence. Made of what was released alone.
            present: what the coins said, shape ``(m,)``.
        """
        order, made, right = np.argsort(scores, kind="stable"), [], []
        for share in SHARES:
            half = max(1, round(len(scores) * share / 2))
            half = min(half, len(scores) // 2)
            made.append(2 * half)
            right.append(int(present[order[-half:]].sum() + (~present[order[:half]]).sum()))
        return cls(len(scores), tuple(made), tuple(right))


def epsilon_of_guesses(guesses: Guesses, *, delta: float, confidence: float) -> float:
    """Lower bound on ε at ``delta`` (Steinke, Nasr, Jagielski 2023, Theorem 5.2); 0 where nothing was seen.

    Args:
        guesses: of one run, or of several with fresh coins.
        delta: δ of one run.
        confidence: probability with which the bound holds.

    Example:
        >>> from pl_privknn.attacks.guessing import Guesses, epsilon_of_guesses
        >>> round(epsilon_of_guesses(Guesses(1000, (1000,), (731,)), delta=0.0, confidence=0.95), 2)
        0.88
    """
    return _largest(lambda value: refutes_epsilon(guesses, value, delta, confidence))


def gaussian_mu_of_guesses(guesses: Guesses, *, confidence: float) -> float:
    """Lower bound on μ, for releases of which it is known that they are Gaussian-DP; 0 where nothing was seen."""
    return _largest(lambda mu: refutes_trade_off(guesses, gaussian_inverse(mu), confidence))


def refutes_epsilon(guesses: Guesses, epsilon: float, delta: float, confidence: float) -> bool:
    """Whether so many right guesses are too rare for an (ε, δ)-DP release."""
    error = (1 - confidence) / len(guesses.made)
    return any(
        _rarity(guesses.canaries, made, right, epsilon, delta, error) < error
        for made, right in zip(guesses.made, guesses.right, strict=True)
    )


def _rarity(
    canaries: int, made: int, right: int, epsilon: float, delta: float, enough: float = math.inf
) -> float:
    """Bound on the probability of ``right`` right guesses or more; where it is ``enough``, perhaps a smaller one."""
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
    """Whether so many right guesses are too rare for an f-DP release (Mahloujifar et al. 2024).

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
    """Whether "``right`` or more with probability ``error``" needs more than all probability there is.

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
    """Of one Gaussian release."""
    from scipy.special import ndtr, ndtri

    return lambda rate: float(ndtr(ndtri(min(max(rate, 0.0), 1.0)) - mu))


def gaussian_epsilon_of_guesses(guesses: Guesses, *, delta: float, confidence: float) -> float:
    """:func:`gaussian_mu_of_guesses` as ε at δ."""
    return pld.gaussian_epsilon(gaussian_mu_of_guesses(guesses, confidence=confidence), delta)


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest value that is refuted, to 1e-3, from below."""
    low, high = 0.0, 0.25
    if not refuted(0.0):
        return 0.0
    while refuted(high) and high < _LARGEST:
        low, high = high, 2 * high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
