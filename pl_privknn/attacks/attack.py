"""The attack that suits a labeler, and what it found."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from pl_privknn._checks import check_int, check_open_unit
from pl_privknn.attacks.many_runs import independent, score_runs, sides_of
from pl_privknn.attacks.one_run import score_canaries
from pl_privknn.attacks.target import Target
from pl_privknn.attacks.training import TrainingTarget, score_training
from pl_privknn.attacks.verdicts import POWER, VERDICT, Stated, judge_many_runs, judge_one_run
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.tradeoff import TradeOff, trade_off
from pl_privknn.privacy.noise import NoiseSource, default_noise

#: Canaries of a one-run attack, over all its runs, and runs on either side of the others.
CANARIES, RUNS = 3000, 3000
#: Runs on either side of a labeler that is fitted for each of them, because its answers spend something.
RUNS_ONE_BY_ONE = 300

# Canaries that are judged as so many runs, half of them on either side.
_FEWEST_ALONE = 500


@dataclasses.dataclass(frozen=True)
class Attacked:
    """What an attack found.

    Attributes:
        labeler: name of the class of the labeler, or of what trains.
        form: ``"one_run"`` or ``"many_runs"``.
        released: what the attacker saw.
        epsilon: the stated one.
        delta: δ of all ε.
        adjacency: neighbouring relation.
        epsilon_lower: measured lower bound, valid with ``confidence`` whatever the mechanism is.
        epsilon_estimate: lower bound under the assumption that the releases' trade-off is a Gaussian one; a bound
            where ``gaussian`` is true, else an estimate. None where the releases are of another kind altogether.
        gaussian: whether the stated releases are exactly Gaussian.
        epsilon_lower_labels: lower bound from labels alone; None where none are released.
        epsilon_lower_student: lower bound from small students that were trained on the labels alone, of up to
            30 runs, or 200 on either side; of a training, from its last weights alone.
        confidence: of the lower bounds, each by itself.
        violated: whether the stated guarantee is refuted.
        verdict_confidence: a true guarantee is refuted with probability at most 1 − this.
        canaries: in all runs together; 1 for many runs.
        runs: one-run form: runs whose coins are pooled; else runs on either side.
        smallest_breach: the least factor by which noise would have to be too small for such an attack to notice in
            ``breach_power`` of all cases: found in all of 59 attacks whose scores are drawn anew from the seen ones,
            with the least signal that these are compatible with (95 %); of noisy SGD whose draws and noise are drawn
            anew. None if 16 is not enough.
        breach_power: the share of attacks like this one that would notice ``smallest_breach``, at least.
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
    epsilon_lower_labels: float | None
    epsilon_lower_student: float
    confidence: float
    violated: bool
    verdict_confidence: float
    canaries: int
    runs: int
    smallest_breach: float | None
    breach_power: float
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
    epsilon, claim = _claim(target)
    if placed.form == "one_run":
        if placed.spent_after:
            check_int("canaries", canaries, minimum=_FEWEST_ALONE)
        times = -(-canaries // len(placed.labels))
        scored = score_canaries(target, placed, times, source)
        if placed.spent_after:  # each is a run of its own: no other record has a say in its place
            found = judge_many_runs(target, sides_of(scored), epsilon, claim, confidence)
        else:
            found = judge_one_run(target, scored, epsilon, claim, confidence)
        found |= {"canaries": len(scored.present), "runs": times}
    else:
        sides = score_runs(target, placed, runs, source)
        found = judge_many_runs(target, sides, epsilon, claim, confidence)
        found |= {"canaries": 1, "runs": runs}
    name = type(target.labeler).__name__
    return _attacked(name, placed.form, target, epsilon, claim, confidence, started, found)


def attack_training(
    target: TrainingTarget,
    *,
    canaries: int = CANARIES,
    confidence: float = 0.95,
    noise: NoiseSource | None = None,
) -> Attacked:
    """Attack a training by noisy SGD from its noisy sums; see :mod:`~pl_privknn.attacks.training`.

    Args:
        target: what is attacked.
        canaries: at least; trainings with fresh coins are added until there are so many.
        confidence: of the lower bounds.
        noise: of trainings and coins; the operating system's generator by default.

    Raises:
        ValueError: for arguments out of range.
    """
    canaries = check_int("canaries", canaries, minimum=2)
    confidence = check_open_unit("confidence", confidence)
    started = time.perf_counter()
    scored, stated, times = score_training(target, canaries, noise if noise is not None else default_noise())
    epsilon, claim = _claim(stated)
    found = judge_one_run(stated, scored, epsilon, claim, confidence)
    found |= {"canaries": len(scored.present), "runs": times}
    return _attacked(target.name, "one_run", stated, epsilon, claim, confidence, started, found)


def _claim(stated: Stated) -> tuple[float, TradeOff]:
    options: dict[str, Any] = {"delta": stated.delta, "adjacency": stated.adjacency, "exact": False}
    return account(stated.plan, **options).epsilon, trade_off(stated.plan, **options)


def _attacked(
    name: str,
    form: str,
    stated: Stated,
    epsilon: float,
    claim: TradeOff,
    confidence: float,
    started: float,
    found: dict[str, Any],
) -> Attacked:
    return Attacked(
        labeler=name,
        form=form,
        epsilon=epsilon,
        delta=stated.delta,
        adjacency=stated.adjacency,
        gaussian=claim.gaussian is not None,
        confidence=confidence,
        verdict_confidence=VERDICT,
        breach_power=POWER,
        seconds=round(time.perf_counter() - started, 2),
        **found,
    )
