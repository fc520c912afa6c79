"""What scores say of a stated guarantee: lower bounds, a verdict, the smallest breach that would have been found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pl_privknn.attacks import guessing
from pl_privknn.attacks.alone import Alone
from pl_privknn.attacks.events import refutes_at_midpoint
from pl_privknn.attacks.guessing import SHARES, Guesses
from pl_privknn.attacks.many_runs import Sides
from pl_privknn.attacks.one_run import Scored
from pl_privknn.privacy.accounting.tradeoff import TradeOff
from pl_privknn.privacy.auditing.lower_bound import (
    claimed_profile,
    epsilon_lower_bound,
    mu_lower_bound,
    profile_excess,
)
from pl_privknn.privacy.mechanisms import Adjacency, Charge

Floats = NDArray[np.float64]
#: Confidence of a verdict; that of lower bounds is an argument.
VERDICT = 0.999
# Factors by which noise is too small that are tried for the smallest breach.
_FACTORS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
#: Share of attacks that notice what is called the smallest breach. All of 59 resamplings do: 0.95 ** 59 < 0.05.
POWER = 0.95
_RESAMPLINGS = 59
# Standard normal quantile of 95 %, for the least signal that the scores are compatible with.
_QUANTILE = 1.645
# Shares of the stated ε at which the claimed profile is tested.
_PROFILE = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


class Stated(Protocol):
    """A guarantee: releases, δ, neighbouring relation."""

    @property
    def plan(self) -> Sequence[Charge]:
        """What is paid for."""
        ...

    @property
    def delta(self) -> float:
        """δ of the guarantee."""
        ...

    @property
    def adjacency(self) -> Adjacency:
        """Neighbouring relation of the guarantee."""
        ...


def judge_one_run(
    stated: Stated, scored: Scored, epsilon: float, claim: TradeOff, confidence: float
) -> dict[str, Any]:
    """What the scores of many canaries say.

    Args:
        stated: the guarantee.
        scored: the scores.
        epsilon: of the guarantee.
        claim: the trade-off of the guarantee.
        confidence: of the lower bounds.

    Returns:
        Fields of :class:`~pl_privknn.attacks.attack.Attacked`.
    """
    # All tests share the error. Of what is noisy by nature the trade-off refutes with far fewer guesses than ε.
    natural, shared = _noisy_by_nature(stated), bool(np.any(scored.contrast))
    each, inverse = 1 - (1 - VERDICT) / ((1 if natural else 2) * (1 + shared)), _inverse(claim)

    def refuted(guesses: Guesses) -> bool:
        if not natural and guessing.refutes_epsilon(guesses, epsilon, stated.delta, each):
            return True
        return guessing.refutes_trade_off(guesses, inverse, each)

    def lower(scores: Floats, present: NDArray[np.bool_]) -> float | None:
        if not len(scores):
            return None
        return guessing.epsilon_of_guesses(Guesses.of(scores, present), **options)

    options = {"delta": stated.delta, "confidence": confidence}
    seen = Guesses.of(scored.scores, scored.present)
    enough = functools.cache(lambda place, made: _enough(refuted, len(scored.scores), place, made))

    def found(scores: Floats, present: NDArray[np.bool_]) -> bool:
        if scored.apart:
            return refutes_at_midpoint(scores[present], scores[~present], claim, confidence=each)
        guesses = Guesses.of(scores, present)
        return any(
            right >= enough(place, made)
            for place, (made, right) in enumerate(zip(guesses.made, guesses.right, strict=True))
        )

    sized = {"epsilon_estimate": guessing.gaussian_epsilon_of_guesses(seen, **options) if natural else None}
    if scored.alone is not None:
        sized |= _judged_alone(stated, scored, scored.alone, epsilon, claim, confidence)
    else:
        violated = any(
            found(scores, scored.present) for scores in (scored.scores, scored.contrast)[: 1 + shared]
        )
        sized |= {"violated": violated, "smallest_breach": _smallest_of_one_run(scored, found)}
    return {
        "released": scored.released,
        "epsilon_lower": lower(scored.scores, scored.present),
        "epsilon_lower_labels": lower(scored.from_labels, scored.present),
        "epsilon_lower_student": lower(scored.from_students, scored.present[: len(scored.from_students)]),
        **sized,
    }


def _judged_alone(
    stated: Stated, scored: Scored, alone: Alone, epsilon: float, claim: TradeOff, confidence: float
) -> dict[str, Any]:
    """What canaries say that share nothing, neither draws nor noise: each is a run of its own."""
    shared = bool(np.any(scored.contrast))
    each = 1 - (1 - VERDICT) / (1 + shared)

    def noticed(factor: float, random: np.random.Generator) -> bool:
        again, present = alone.again(factor, random)
        return again.refutes(present, epsilon, claim, confidence=each)

    contrast = scored.contrast[scored.present], scored.contrast[~scored.present]
    violated = alone.refutes(scored.present, epsilon, claim, confidence=each)
    return {
        "violated": violated or (shared and refutes_at_midpoint(*contrast, claim, confidence=each)),
        "smallest_breach": _smallest(noticed),
    }


def judge_many_runs(
    stated: Stated, sides: Sides, epsilon: float, claim: TradeOff, confidence: float
) -> dict[str, Any]:
    """What the scores of many runs say; arguments and result as for :func:`judge_one_run`."""
    reach = epsilon if np.isfinite(epsilon) else 0.0
    profile = claimed_profile(stated.plan, reach * _PROFILE, stated.adjacency)
    # All tests share the error: two of each score.
    contrasts = [pair for pair in sides.contrasts if any(bool(np.any(side)) for side in pair)]
    each = 1 - (1 - VERDICT) / (2 * (1 + len(contrasts)))
    options = {"delta": stated.delta, "confidence": confidence}

    def refuted(present: Floats, absent: Floats) -> bool:
        if refutes_at_midpoint(present, absent, claim, confidence=each):
            return True
        return profile_excess(present, absent, profile, confidence=each) > 0

    estimate = mu_lower_bound(sides.present, sides.absent, **options) if _noisy_by_nature(stated) else None
    return {
        "released": sides.released,
        "epsilon_lower": epsilon_lower_bound(sides.present, sides.absent, **options),
        "epsilon_estimate": estimate,
        "epsilon_lower_labels": epsilon_lower_bound(*sides.labels, **options),
        "epsilon_lower_student": epsilon_lower_bound(*sides.student, **options),
        "violated": any(refuted(*pair) for pair in ((sides.present, sides.absent), *contrasts)),
        "smallest_breach": _smallest_of_many(sides.present, sides.absent, refuted),
    }


def _noisy_by_nature(stated: Stated) -> bool:
    return all(np.isinf(charge.mechanism.pure_epsilon(stated.adjacency)) for charge in stated.plan)


def _inverse(claim: TradeOff) -> guessing.Inverse:
    if claim.gaussian is not None:
        return guessing.gaussian_inverse(claim.gaussian)
    # The larger of both ways to ask, whose inverse is its own mirror image; on a grid, each rate rounded down.
    rates = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 4000)])
    false = 1.0 - claim.true_positive_rate(1.0 - rates)
    return lambda rate: float(false[max(int(np.searchsorted(rates, rate, side="right")) - 1, 0)])


def _enough(refuted: Callable[[Guesses], bool], canaries: int, place: int, made: int) -> int:
    """The least number of right guesses of ``made`` that refutes; one more than ``made`` if none does."""
    low, high = made // 2, made + 1
    while high - low > 1:
        middle = (low + high) // 2
        # Of the other shares nothing is known, so nothing is claimed: no guess of theirs is right.
        right = tuple(middle if other == place else 0 for other in range(len(SHARES)))
        sizes = Guesses.of(np.zeros(canaries), np.zeros(canaries, dtype=bool)).made
        low, high = (low, middle) if refuted(Guesses(canaries, sizes, right)) else (middle, high)
    return high


def _smallest_of_one_run(scored: Scored, found: Callable[[Floats, NDArray[np.bool_]], bool]) -> float | None:
    there, away = scored.scores[scored.present], scored.scores[~scored.present]
    if min(len(there), len(away)) < 2:
        return None

    def noticed(factor: float, random: np.random.Generator) -> bool:
        present = random.random(len(scored.present)) < 0.5
        drawn = [random.choice(side - side.mean(), len(present)) for side in (there, away)]
        return found(np.where(present, drawn[0] + factor * _least_signal(there, away), drawn[1]), present)

    return _smallest(noticed)


def _smallest_of_many(
    present: Floats, absent: Floats, refuted: Callable[[Floats, Floats], bool]
) -> float | None:
    def noticed(factor: float, random: np.random.Generator) -> bool:
        drawn = [random.choice(side - side.mean(), len(side)) for side in (present, absent)]
        return refuted(drawn[0] + factor * _least_signal(present, absent), drawn[1])

    return _smallest(noticed)


def _least_signal(there: Floats, away: Floats) -> float:
    """How far scores with a record lie above those without it, at least, with a confidence of 95 %."""
    error = np.sqrt(there.var(ddof=1) / len(there) + away.var(ddof=1) / len(away))
    return max(0.0, float(there.mean() - away.mean() - _QUANTILE * error))


def _smallest(noticed: Callable[[float, np.random.Generator], bool]) -> float | None:
    """The least factor at which noise that is so many times too small is noticed in most attacks like this one.

    Scores are drawn anew from those that were seen, with what a record moves them by at its least and so many times
    larger: the same as so many times less noise. All of 59 such attacks have to notice.
    """
    for factor in _FACTORS:
        random = np.random.default_rng(0)
        if all(noticed(factor, random) for _ in range(_RESAMPLINGS)):
            return factor
    return None
