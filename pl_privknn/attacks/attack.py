"""The attack that suits a labeler, and what it found."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.attacks import guessing
from pl_privknn.attacks.guessing import Guesses
from pl_privknn.attacks.many_runs import Sides, independent, score_runs
from pl_privknn.attacks.one_run import Scored, score_canaries
from pl_privknn.attacks.target import Target
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.tradeoff import TradeOff, trade_off
from pl_privknn.privacy.auditing.lower_bound import (
    claimed_profile,
    epsilon_lower_bound,
    lower_probability,
    mu_lower_bound,
    profile_excess,
    upper_probability,
)
from pl_privknn.privacy.noise import NoiseSource, default_noise

Floats = NDArray[np.float64]
#: Canaries of a one-run attack, over all its runs, and runs on either side of the others.
CANARIES, RUNS = 3000, 3000
#: Runs on either side of a labeler that is fitted for each of them, because its answers spend something.
RUNS_ONE_BY_ONE = 300
#: Confidence of a verdict; that of ``epsilon_lower`` is an argument.
VERDICT = 0.999
# Factors by which noise is too small that are tried for the smallest breach.
_FACTORS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
# Share of many runs that say where the middle of their scores is.
_FINDING = 0.15
# Shares of the stated ε at which the claimed profile is tested.
_SHARES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


@dataclasses.dataclass(frozen=True)
class Attacked:
    """What an attack found.

    Attributes:
        labeler: name of the class.
        form: ``"one_run"`` or ``"many_runs"``.
        released: what the attacker saw.
        epsilon: the stated one.
        delta: δ of all ε.
        adjacency: neighbouring relation.
        epsilon_lower: measured lower bound, valid with ``confidence`` whatever the mechanism is.
        epsilon_estimate: lower bound under the assumption that the releases' trade-off is a Gaussian one; a bound
            where ``gaussian`` is true, else an estimate. None where the releases are of another kind altogether.
        gaussian: whether the stated releases are exactly Gaussian.
        epsilon_lower_labels: lower bound from labels alone.
        epsilon_lower_student: lower bound from small students that were trained on the labels alone, of up to
            30 runs, or 200 on either side.
        confidence: of the lower bounds, each by itself.
        violated: whether the stated guarantee is refuted.
        verdict_confidence: a true guarantee is refuted with probability at most 1 − this.
        canaries: in all runs together; 1 for many runs.
        runs: one-run form: runs whose coins are pooled; else runs on either side.
        smallest_breach: the least factor by which noise would have to be too small for this attack to have noticed,
            from the spread of its own scores; None if 16 is not enough.
        seconds: that it took.
    """

    labeler: str
    form: str
    released: str
    epsilon: float
    delta: float
    adjacency: str
    epsilon_lower: float
    epsilon_estimate: float | None
    gaussian: bool
    epsilon_lower_labels: float
    epsilon_lower_student: float
    confidence: float
    violated: bool
    verdict_confidence: float
    canaries: int
    runs: int
    smallest_breach: float | None
    seconds: float

    @property
    def verdict(self) -> str:
        """``OK`` or ``VIOLATED``."""
        return "VIOLATED" if self.violated else "OK"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def attack_labeler(
    target: Target,
    *,
    canaries: int = CANARIES,
    runs: int | None = None,
    confidence: float = 0.95,
    noise: NoiseSource | None = None,
) -> Attacked:
    """Attack a labeler with the canaries that it supplies.

    Args:
        target: what is attacked.
        canaries: of a one-run attack, at least; runs with fresh coins are added until there are so many.
        runs: on either side, of the other form; half of them choose the event, half test it. 3,000 by default, and
            300 of a labeler that has to be fitted for each.
        confidence: of the lower bounds.
        noise: of labelers and coins; the operating system's generator by default.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries = check_int("canaries", canaries, minimum=2)
    if runs is None:
        runs = RUNS if independent(target.labeler) else RUNS_ONE_BY_ONE
    runs = check_int("runs", runs, minimum=200)
    confidence = check_open_unit("confidence", confidence)
    source = noise if noise is not None else default_noise()
    started = time.perf_counter()
    placed = target.canaries()
    stated = account(target.plan, delta=target.delta, adjacency=target.adjacency, exact=False).epsilon
    claim = trade_off(target.plan, delta=target.delta, adjacency=target.adjacency, exact=False)
    if placed.form == "one_run":
        times = -(-canaries // len(placed.labels))
        scored = score_canaries(target, placed, times, source)
        found = _of_one_run(target, scored, stated, claim, confidence)
        found |= {"canaries": len(scored.present), "runs": times}
    else:
        sides = score_runs(target, placed, runs, source)
        found = _of_many_runs(target, sides, stated, claim, confidence)
        found |= {"canaries": 1, "runs": runs}
    return Attacked(
        labeler=type(target.labeler).__name__,
        form=placed.form,
        epsilon=stated,
        delta=target.delta,
        adjacency=target.adjacency,
        gaussian=claim.gaussian is not None,
        confidence=confidence,
        verdict_confidence=VERDICT,
        seconds=round(time.perf_counter() - started, 2),
        **found,
    )


def _of_one_run(
    target: Target, scored: Scored, stated: float, claim: TradeOff, confidence: float
) -> dict[str, Any]:
    # All tests share the error. Of what is noisy by nature the trade-off refutes with far fewer guesses than ε.
    natural, shared = _noisy_by_nature(target), bool(np.any(scored.contrast))
    each, inverse = 1 - (1 - VERDICT) / ((1 if natural else 2) * (1 + shared)), _inverse(claim)

    def refuted(scores: Floats) -> bool:
        guesses = Guesses.of(scores, scored.present)
        if not natural and guessing.refutes_epsilon(guesses, stated, target.delta, each):
            return True
        return guessing.refutes_trade_off(guesses, inverse, each)

    def lower(scores: Floats, present: NDArray[np.bool_]) -> float:
        return guessing.epsilon_of_guesses(Guesses.of(scores, present), **options)

    options = {"delta": target.delta, "confidence": confidence}
    estimate = None
    if natural:
        seen = Guesses.of(scored.scores, scored.present)
        estimate = guessing.gaussian_epsilon_of_guesses(seen, **options)
    return {
        "released": scored.released,
        "epsilon_lower": lower(scored.scores, scored.present),
        "epsilon_estimate": estimate,
        "epsilon_lower_labels": lower(scored.from_labels, scored.present),
        "epsilon_lower_student": lower(scored.from_students, scored.present[: len(scored.from_students)]),
        "violated": refuted(scored.scores) or (shared and refuted(scored.contrast)),
        "smallest_breach": _smallest(lambda factor: refuted(_clearer(scored, factor))),
    }


def _noisy_by_nature(target: Target) -> bool:
    return all(np.isinf(charge.mechanism.pure_epsilon(target.adjacency)) for charge in target.plan)


def _inverse(claim: TradeOff) -> guessing.Inverse:
    if claim.gaussian is not None:
        return guessing.gaussian_inverse(claim.gaussian)
    # The larger of both ways to ask, whose inverse is its own mirror image; on a grid, each rate rounded down.
    rates = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 4000)])
    false = 1.0 - claim.true_positive_rate(1.0 - rates)
    return lambda rate: float(false[max(int(np.searchsorted(rates, rate, side="right")) - 1, 0)])


def _clearer(scored: Scored, factor: float) -> Floats:
    """Scores of runs whose noise was so many times smaller, made of the scores' own residuals."""
    there, away = float(scored.scores[scored.present].mean()), float(scored.scores[~scored.present].mean())
    means = np.where(scored.present, there, away)
    return scored.scores - means + np.where(scored.present, factor * (there - away), 0.0)


def _of_many_runs(
    target: Target, sides: Sides, stated: float, claim: TradeOff, confidence: float
) -> dict[str, Any]:
    reach = stated if np.isfinite(stated) else 0.0
    profile = claimed_profile(target.plan, reach * _SHARES, target.adjacency)
    # All tests share the error: two of each score.
    shared = bool(np.any(sides.contrast[0] != sides.contrast[1]))
    each = 1 - (1 - VERDICT) / (2 * (1 + shared))
    options = {"delta": target.delta, "confidence": confidence}

    def refuted(present: Floats, absent: Floats) -> bool:
        if refutes_at_midpoint(present, absent, claim, confidence=each):
            return True
        return profile_excess(present, absent, profile, confidence=each) > 0

    def clearer(factor: float) -> bool:
        there, away = float(sides.present.mean()), float(sides.absent.mean())
        return refuted(sides.present + (factor - 1) * (there - away), sides.absent)

    estimate = mu_lower_bound(sides.present, sides.absent, **options) if _noisy_by_nature(target) else None
    return {
        "released": sides.released,
        "epsilon_lower": epsilon_lower_bound(sides.present, sides.absent, **options),
        "epsilon_estimate": estimate,
        "epsilon_lower_labels": epsilon_lower_bound(*sides.labels, **options),
        "epsilon_lower_student": epsilon_lower_bound(*sides.student, **options),
        "violated": refuted(sides.present, sides.absent) or (shared and refuted(*sides.contrast)),
        "smallest_breach": _smallest(clearer),
    }


def refutes_at_midpoint(present: Floats, absent: Floats, claim: TradeOff, *, confidence: float) -> bool:
    """Whether the score is above the middle too often with the record, and too seldom without it.

    Some of the runs say where the middle is; in the others the event's probabilities are bounded, each with half of
    the error, and held against the best true-positive rate that the claim allows.

    Args:
        present: scores with the record.
        absent: scores without it.
        claim: what was stated.
        confidence: a true claim is refuted with probability at most 1 − confidence.
    """
    first, error = round(len(present) * _FINDING), (1 - confidence) / 2
    middle = (present[:first].mean() + absent[:first].mean()) / 2
    told = [side[first:] > middle for side in (present, absent)]
    there = float(lower_probability(told[0].sum(), len(told[0]), error))
    away = float(upper_probability(told[1].sum(), len(told[1]), error))
    return there > float(claim.true_positive_rate(np.array([away]))[0])


def _smallest(refuted: Any) -> float | None:
    return next((factor for factor in _FACTORS if refuted(factor)), None)
