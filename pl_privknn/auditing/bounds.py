"""Lower bounds on ε from what an attacker saw, and tests of a stated guarantee: of one run or of many.

*Many runs.* A release with a record and one without it must not be told apart better than the claim's trade-off
between both error rates allows, for any event. Half of the runs choose the event, a threshold on a score; the other
half tests it, so choosing does not bias the test. Probabilities are bounded by Clopper and Pearson
(1934) and hold without assumptions on the mechanism.

*One run.* Each of m canaries is in the table by a fair coin of its own. The attacker guesses about those it is surest
of. If the release is (ε, δ)-DP, the number of right guesses is hardly more than that of randomised response (Steinke,
Nasr, Jagielski 2023); if it is f-DP, it obeys a recursion in f (Mahloujifar, Melis, Chaudhuri 2024), which is tighter
for Gaussian releases. Canaries of runs with fresh coins may be pooled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pl_privknn.labelers.canaries import Evidence, SampledEvidence
from pl_privknn.privacy.accounting import pld
from pl_privknn.privacy.accounting.accountant import TradeOff, account, trade_off
from pl_privknn.privacy.mechanisms import Adjacency, Charge, Gaussian

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Form = Literal["one_run", "many_runs"]
#: Smallest false-positive rate of a test with a given true-positive rate.
Inverse = Callable[[float], float]

#: Confidence of lower bounds, where nothing else is asked for, and that of every verdict.
CONFIDENCE, VERDICT = 0.95, 0.999
#: Share of attacks that notice what is called the smallest breach. All of 59 resamplings do: 0.95 ** 59 < 0.05.
POWER = 0.95
#: Shares of canaries that are guessed about; the error is shared among them.
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05)

_RESAMPLINGS = 59
# Factors by which noise is too small that are tried for the smallest breach.
_FACTORS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
# Standard normal quantile of 95 %, for the least signal that the scores are compatible with.
_QUANTILE = 1.645
# Thresholds that the first half may choose from.
_THRESHOLDS = 400
# Share of many runs that say where the middle of their scores is.
_FINDING = 0.15
# Shares of the error: that the false-positive rate lies outside its interval, and what is cut off of a binomial.
_OUTSIDE, _CUT, _PIECES = 0.05, 1e-4, 64
_LARGEST = 64.0


# Log-likelihood ratios of so much of the stated ε say "there", by the stated noise and by half of it: in simulations
# these find most of more draws and steps, and of too little noise.
_LEVELS, _LARGEST_EPSILON = (0.05, 0.2), 50.0


@dataclasses.dataclass(frozen=True)
class IndependentCanaries:
    """Canaries of noisy steps with disjoint directions: log-likelihood ratios, and what they are made of.

    Attributes:
        mechanism: the release of one step, as it is stated.
        lengths: of what each canary would have added to each step, float32 ``(steps, m)``.
        scores: by the stated noise, shape ``(m,)``.
        suspected: by half of it, shape ``(m,)``.
    """

    mechanism: Gaussian
    lengths: Tensor
    scores: Floats
    suspected: Floats

    @classmethod
    def of(cls, runs: Sequence[Sequence[Evidence]]) -> IndependentCanaries | None:
        """Of all runs' rounds; None where their evidence is of another kind."""
        parts = [[each for each in rounds if isinstance(each, SampledEvidence)] for rounds in runs]
        if not parts or not all(parts):
            return None
        lengths = torch.cat([torch.cat([each.lengths for each in rounds]) for rounds in parts], dim=1)
        scores = torch.cat([torch.stack([each.scores() for each in rounds]).sum(dim=0) for rounds in parts])
        half = torch.cat([torch.stack([each.suspected() for each in rounds]).sum(dim=0) for rounds in parts])
        return cls(parts[0][0].mechanism, lengths, scores.numpy(), half.numpy())

    def again(self, factor: float, random: np.random.Generator) -> tuple[IndependentCanaries, Bools]:
        """Canaries like these of noise that is so many times too small, and their coins."""
        count = self.lengths.shape[1]
        present = torch.from_numpy(random.random(count) < 0.5)
        evidence = SampledEvidence(count, self.mechanism)
        for length in self.lengths:
            drawn = torch.from_numpy(random.random(count) < self.mechanism.sampling_rate) & present
            noise = torch.from_numpy(random.standard_normal(count)) * (self.mechanism.sigma / factor)
            evidence.add_step(drawn * length + noise, length)
        scores, half = evidence.scores().numpy(), evidence.suspected().numpy()
        return IndependentCanaries(self.mechanism, self.lengths, scores, half), present.numpy()

    def refutes(self, present: Bools, epsilon: float, claim: TradeOff, *, confidence: float) -> bool:
        """Whether canaries that were there are told from others more often than was stated.

        Args:
            present: the coins, shape ``(m,)``.
            epsilon: stated; says from which score on a canary is taken to be there.
            claim: what was stated.
            confidence: a true claim is refuted with probability at most 1 − confidence.
        """
        each = 1 - (1 - confidence) / len(_LEVELS)
        return any(
            refutes_above(
                scores[present],
                scores[~present],
                level * min(epsilon, _LARGEST_EPSILON),
                claim,
                confidence=each,
            )
            for scores, level in zip((self.scores, self.suspected), _LEVELS, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Scores:
    """Knowledge of an attacker about canaries, or runs; all arrays have shape ``(m,)``.

    Attributes:
        form: ``"one_run"`` where each is a canary with a coin of its own; ``"many_runs"`` where each is a run.
        released: what the scores are made of.
        present: whether the canary, or the run's record, was there.
        scores: larger speaks for presence. Made of what was released alone.
        contrasts: further scores; such as leave out what all queries share see noise that queries share.
        labels: scores from labels alone; None where there are none.
        apart: canaries share neither queries nor noise, so that each counts as a run of its own for the verdict.
        mixture: where canaries share nothing and the scores are log-likelihood ratios: what they are made of.
    """

    form: Form
    released: str
    present: Bools
    scores: Floats
    contrasts: Sequence[Floats] = ()
    labels: Floats | None = None
    apart: bool = False
    mixture: IndependentCanaries | None = None


@dataclasses.dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        subject: what was audited.
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
        confidence: of the lower bounds, each by itself.
        violated: whether the stated guarantee is refuted.
        verdict_confidence: a true guarantee is refuted with probability at most 1 − this.
        canaries: in all runs together; 1 for many runs.
        runs: one-run form: runs whose coins are pooled; else runs on either side.
        smallest_breach: the least factor by which noise would have to be too small for such an audit to notice in
            ``breach_power`` of all cases: found in all of 59 audits whose scores are drawn anew from the seen ones,
            with the least signal that these are compatible with (95 %). None if 16 is not enough, or nobody asked.
        breach_power: the share of audits like this one that would notice ``smallest_breach``, at least.
    """

    subject: str
    form: Form
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
    smallest_breach: float | None
    breach_power: float = POWER

    @property
    def verdict(self) -> str:
        """``OK`` or ``VIOLATED``."""
        return "VIOLATED" if self.violated else "OK"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


def judge(
    subject: str,
    seen: Scores,
    charges: Sequence[Charge],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    confidence: float = CONFIDENCE,
    verdict: float = VERDICT,
    runs: int = 1,
    canaries: int = 1,
    breach: bool = True,
) -> Audit:
    """Hold what was seen against what was stated.

    Args:
        subject: what was audited.
        seen: the scores.
        charges: the claim.
        delta: δ.
        adjacency: neighbouring relation of the claim.
        confidence: of the lower bounds.
        verdict: a true claim is called violated with probability at most 1 − this; all tests share the error.
        runs: see :class:`Audit`.
        canaries: see :class:`Audit`.
        breach: whether to find the smallest breach that would have been noticed.
    """
    options: dict[str, Any] = {"delta": delta, "adjacency": adjacency, "exact": False}
    epsilon, claim = account(charges, **options).epsilon, trade_off(charges, **options)
    noisy = all(np.isinf(charge.mechanism.pure_epsilon(adjacency)) for charge in charges)
    contrasts = [each for each in seen.contrasts if np.any(each)]
    error = (1 - verdict) / (1 + len(contrasts))
    refuted = _tests(seen, noisy, epsilon, claim, delta, error)
    options = {"delta": delta, "confidence": confidence}

    def lower(scores: Floats) -> float:
        if seen.form == "one_run":
            return epsilon_of_guesses(Guesses.of(scores, seen.present), **options)
        return epsilon_lower_bound(*_sides(scores, seen.present), **options)

    estimate = None
    if noisy and seen.form == "one_run":
        mu = gaussian_mu_of_guesses(Guesses.of(seen.scores, seen.present), confidence=confidence)
        estimate = pld.gaussian_epsilon(mu, delta)
    elif noisy:
        estimate = mu_lower_bound(*_sides(seen.scores, seen.present), **options)
    if seen.mixture is not None:
        violated = seen.mixture.refutes(seen.present, epsilon, claim, confidence=1 - error)
    else:
        violated = refuted(seen.scores, seen.present)
    return Audit(
        subject=subject,
        form=seen.form,
        released=seen.released,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        epsilon_lower=lower(seen.scores),
        epsilon_estimate=estimate,
        gaussian=claim.gaussian is not None,
        epsilon_lower_labels=None if seen.labels is None else lower(seen.labels),
        confidence=confidence,
        violated=violated or any(refuted(each, seen.present) for each in contrasts),
        verdict_confidence=verdict,
        canaries=canaries,
        runs=runs,
        smallest_breach=_smallest(seen, refuted, epsilon, claim, error) if breach else None,
    )


def _tests(
    seen: Scores, noisy: bool, epsilon: float, claim: TradeOff, delta: float, error: float
) -> Callable[[Floats, Bools], bool]:
    """The test of scores and coins that suits their form; wrong about a true claim with probability ``error``."""
    if seen.form == "many_runs":

        def of_runs(scores: Floats, present: Bools) -> bool:
            sides = _sides(scores, present)
            return any(
                test(*sides, claim, confidence=1 - error / 2)
                for test in (refutes_at_midpoint, refutes_at_chosen)
            )

        return of_runs
    if seen.apart or seen.mixture is not None:
        return lambda scores, present: refutes_at_midpoint(
            *_sides(scores, present), claim, confidence=1 - error
        )
    # Of what is noisy by nature the trade-off refutes with far fewer guesses than ε.
    inverse, each = _inverse(claim), 1 - error / (1 if noisy else 2)

    def rejects(guesses: Guesses) -> bool:
        if not noisy and refutes_epsilon(guesses, epsilon, delta, each):
            return True
        return refutes_trade_off(guesses, inverse, each)

    enough = functools.cache(lambda size, place: _enough(rejects, size, place))

    def of_canaries(scores: Floats, present: Bools) -> bool:
        right = Guesses.of(scores, present).right
        return any(count >= enough(len(scores), place) for place, count in enumerate(right))

    return of_canaries


def _sides(scores: Floats, present: Bools) -> tuple[Floats, Floats]:
    return scores[present], scores[~present]


def _smallest(
    seen: Scores, refuted: Callable[[Floats, Bools], bool], epsilon: float, claim: TradeOff, error: float
) -> float | None:
    """The least factor at which noise that is so many times too small is noticed in most audits like this one.

    Scores are drawn anew from those that were seen, with what a record moves them by at its least and so many times
    larger: the same as so many times less noise. All of 59 such audits have to notice.
    """
    there, away = _sides(seen.scores, seen.present)
    if min(len(there), len(away)) < 2:
        return None
    spread = np.sqrt(there.var(ddof=1) / len(there) + away.var(ddof=1) / len(away))
    signal = max(0.0, float(there.mean() - away.mean() - _QUANTILE * spread))

    def noticed(factor: float, random: np.random.Generator) -> bool:
        if seen.mixture is not None:
            again, present = seen.mixture.again(factor, random)
            return again.refutes(present, epsilon, claim, confidence=1 - error)
        drawn = [random.choice(side - side.mean(), len(seen.scores)) for side in (there, away)]
        return refuted(np.where(seen.present, drawn[0] + factor * signal, drawn[1]), seen.present)

    for factor in _FACTORS:
        random = np.random.default_rng(0)
        if all(noticed(factor, random) for _ in range(_RESAMPLINGS)):
            return factor
    return None


def _inverse(claim: TradeOff) -> Inverse:
    if claim.gaussian is not None:
        return gaussian_inverse(claim.gaussian)
    # The larger of both ways to ask, whose inverse is its own mirror image; on a grid, each rate rounded down.
    rates = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 4000)])
    false = 1.0 - claim.true_positive_rate(1.0 - rates)
    return lambda rate: float(false[max(int(np.searchsorted(rates, rate, side="right")) - 1, 0)])


# ---------------------------------------------------------------------------- one run


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
    def of(cls, scores: Floats, present: Bools) -> Guesses:
        """Guess "there" for the largest scores and "not there" for the smallest, as many of either.

        Args:
            scores: shape ``(m,)``; larger speaks for presence.
            present: what the coins said, shape ``(m,)``.
        """
        order = np.argsort(scores, kind="stable")
        halves = [min(max(1, round(len(scores) * share / 2)), len(scores) // 2) for share in SHARES]
        right = tuple(int(present[order[-half:]].sum() + (~present[order[:half]]).sum()) for half in halves)
        return cls(len(scores), tuple(2 * half for half in halves), right)


def epsilon_of_guesses(guesses: Guesses, *, delta: float, confidence: float) -> float:
    """Lower bound on ε at ``delta`` (Steinke, Nasr, Jagielski 2023, Theorem 5.2); 0 where nothing was seen.

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
    """Lower bound on μ, for releases of which it is known that they are Gaussian-DP; 0 where nothing was seen."""
    return _largest(lambda mu: refutes_trade_off(guesses, gaussian_inverse(mu), confidence))


def refutes_epsilon(guesses: Guesses, epsilon: float, delta: float, confidence: float) -> bool:
    """Whether so many right guesses are too rare for an (ε, δ)-DP release."""
    error = (1 - confidence) / len(guesses.made)
    return any(
        rarity(guesses.canaries, made, right, epsilon, delta, error) < error
        for made, right in zip(guesses.made, guesses.right, strict=True)
    )


def rarity(
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


def _enough(rejects: Callable[[Guesses], bool], canaries: int, place: int) -> int:
    """The least number of right guesses of a share that refutes; one more than were made if none does."""
    made = Guesses.of(np.zeros(canaries), np.zeros(canaries, dtype=bool)).made
    low, high = made[place] // 2, made[place] + 1
    while high - low > 1:
        middle = (low + high) // 2
        # Of the other shares nothing is known, so nothing is claimed: no guess of theirs is right.
        right = tuple(middle if other == place else 0 for other in range(len(SHARES)))
        low, high = (low, middle) if rejects(Guesses(canaries, made, right)) else (middle, high)
    return high


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


# ---------------------------------------------------------------------------- many runs


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

    def bound(p: Floats, q: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(p > delta, np.log(np.maximum(p - delta, 0.0) / q), 0.0)

    return max(0.0, _chosen_and_tested(scores_with, scores_without, bound, confidence))


def mu_lower_bound(
    scores_with: ArrayLike, scores_without: ArrayLike, *, delta: float, confidence: float
) -> float:
    """Lower bound on ε at ``delta`` by way of μ of Gaussian DP; arguments as :func:`epsilon_lower_bound`.

    From the errors of the test, μ ≥ Φ⁻¹(1 − α) − Φ⁻¹(β) (Nasr et al. 2023). It refutes a claim of μ-Gaussian DP with
    the stated confidence; as a bound on ε it takes the mechanism's trade-off between errors to be a Gaussian one.
    """
    from scipy.special import ndtri

    def bound(p: Floats, q: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(ndtri(p) - ndtri(q), nan=-math.inf)

    mu = _chosen_and_tested(scores_with, scores_without, bound, confidence)
    return pld.gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def lower_probability(hits: ArrayLike, trials: int, error: float) -> Floats:
    """Clopper-Pearson lower bound on a probability, wrong with probability at most ``error``."""
    from scipy.special import betaincinv

    count = np.asarray(hits, dtype=np.float64)
    bound = betaincinv(np.maximum(count, 1.0), trials - np.maximum(count, 1.0) + 1, error)
    return np.where(count > 0, bound, 0.0)


def upper_probability(hits: ArrayLike, trials: int, error: float) -> Floats:
    """Clopper-Pearson upper bound on a probability, wrong with probability at most ``error``."""
    return 1.0 - lower_probability(trials - np.asarray(hits, dtype=np.float64), trials, error)


#: Lower bounds of P(E) and upper ones of Q(E) to what is to be large.
Bound = Callable[[Floats, Floats], Floats]


def _halves(
    scores_with: ArrayLike, scores_without: ArrayLike
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    sides = [np.asarray(scores, dtype=np.float64) for scores in (scores_with, scores_without)]
    for name, scores in zip(("scores_with", "scores_without"), sides, strict=True):
        if scores.ndim != 1 or len(scores) < 100 or np.isnan(scores).any():
            raise ValueError(
                f"{name}: shape {scores.shape}; want at least 100 scores, one a run, none of them NaN"
            )
    with_record, without = sides
    first = with_record[: len(with_record) // 2], without[: len(without) // 2]
    return first, (with_record[len(first[0]) :], without[len(first[1]) :])


def _hits(half: tuple[Floats, Floats], above: bool, at: Floats) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """Counts of the event (a score above, or below for absence) with and without the record, and of all runs."""
    found = []
    for scores in half if above else half[::-1]:
        ordered = np.sort(scores)
        below = np.searchsorted(ordered, at, side="left" if above else "right")
        found.append((len(scores) - below if above else below, len(scores)))
    return found[0], found[1]


def _chosen(half: tuple[Floats, Floats], bound: Bound, error: float) -> tuple[bool, float]:
    """The direction and the threshold with the largest bound."""
    levels = np.quantile(np.concatenate(half), np.linspace(0, 1, _THRESHOLDS), method="nearest")
    # The far ends decide where δ is small.
    levels = np.unique(np.concatenate([levels, np.sort(half[0])[-30:], np.sort(half[1])[:30]]))
    bounds = {above: _bounded(half, above, levels, bound, error) for above in (True, False)}
    above = bool(bounds[True].max() >= bounds[False].max())
    return above, float(levels[int(np.argmax(bounds[above]))])


def _bounded(half: tuple[Floats, Floats], above: bool, at: Floats, bound: Bound, error: float) -> Floats:
    there, away = _hits(half, above, at)
    return bound(lower_probability(*there, error), upper_probability(*away, error))


def _chosen_and_tested(
    scores_with: ArrayLike, scores_without: ArrayLike, bound: Bound, confidence: float
) -> float:
    """The bound on the second half of the runs, of the event with the largest one on the first half."""
    first, second = _halves(scores_with, scores_without)
    error = (1 - confidence) / 2
    above, level = _chosen(first, bound, error)
    return float(_bounded(second, above, np.array([level]), bound, error)[0])


def refutes_at_chosen(present: Floats, absent: Floats, claim: TradeOff, *, confidence: float) -> bool:
    """Whether an event that the first half of the runs chose is too likely on the second: :func:`refutes_event`."""
    first, second = _halves(present, absent)
    above, level = _chosen(first, lambda p, q: p - claim.true_positive_rate(q), (1 - confidence) / 2)
    (there, of_there), (away, of_away) = _hits(second, above, np.array([level]))
    return refutes_event(int(there[0]), of_there, int(away[0]), of_away, claim, confidence=confidence)


def refutes_event(
    there: int, present: int, away: int, absent: int, claim: TradeOff, *, confidence: float
) -> bool:
    """Whether an event is seen too often with a record, for how often it is seen without it.

    The test's statistic is how far the share with the record lies above what the claim allows at the share without
    it. Its distribution is that of two binomials; the claim holds if it does for some false-positive rate, so the
    largest probability counts, over an interval that holds the rate but for a small part of the error (Berger, Boos
    1994). That needs a third fewer deviations than to bound both shares.

    Args:
        there: runs with the record in which the event was seen.
        present: runs with the record.
        away: runs without it in which the event was seen.
        absent: runs without it.
        claim: what was stated.
        confidence: a true claim is refuted with probability at most 1 − confidence, if runs share nothing.
    """
    from scipy.special import bdtrc
    from scipy.stats import binom

    if min(present, absent) == 0:
        return False
    excess = there / present - float(claim.true_positive_rate(np.array([away / absent]))[0])
    if excess <= 0:
        return False
    error = 1 - confidence
    low, high = (
        float(bound(away, absent, error * _OUTSIDE / 2)) for bound in (lower_probability, upper_probability)
    )
    cut = error * _CUT
    seen = np.arange(
        max(0, int(binom.ppf(cut, absent, low))), min(absent, int(binom.isf(cut, absent, high))) + 1
    )
    # As far above the claim, for each number of runs without the record in which the event is seen.
    needed = np.ceil(present * (excess + claim.true_positive_rate(seen / absent)) - 1e-9)
    seen, needed = seen[needed <= present], needed[needed <= present]
    edges = np.linspace(low, high, _PIECES + 1)
    # In each piece of the interval by its worst ends: rarer the larger the false-positive rate and the smaller the
    # true-positive rate.
    tails = bdtrc(needed - 1, present, claim.true_positive_rate(edges)[1:, None])
    probable = (binom.pmf(seen, absent, edges[:-1, None]) * tails).sum(axis=1)
    return bool(np.all(probable < error - 2 * cut - error * _OUTSIDE))


def refutes_above(
    present: Floats, absent: Floats, level: float, claim: TradeOff, *, confidence: float
) -> bool:
    """:func:`refutes_event` of scores above a level that was chosen without them."""
    there, away = (int((side > level).sum()) for side in (present, absent))
    return refutes_event(there, len(present), away, len(absent), claim, confidence=confidence)


def refutes_at_midpoint(present: Floats, absent: Floats, claim: TradeOff, *, confidence: float) -> bool:
    """Whether the score is above the middle too often with the record, for how often it is without.

    Some of the runs say where the middle is; the others are tested.

    Args:
        present: scores with the record.
        absent: scores without it.
        claim: what was stated.
        confidence: a true claim is refuted with probability at most 1 − confidence.
    """
    first = round(len(present) * _FINDING), round(len(absent) * _FINDING)
    middle = (present[: first[0]].mean() + absent[: first[1]].mean()) / 2
    return refutes_above(present[first[0] :], absent[first[1] :], middle, claim, confidence=confidence)
