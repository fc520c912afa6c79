"""Whether an event is too likely with a record, for how likely it is without: tests of runs that share nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pl_privknn.privacy.accounting.tradeoff import TradeOff
from pl_privknn.privacy.auditing.lower_bound import lower_probability, upper_probability

Floats = NDArray[np.float64]
# Share of many runs that say where the middle of their scores is.
_FINDING = 0.15
# Shares of the error: that the false-positive rate lies outside its interval, and what is cut off of a binomial.
_OUTSIDE, _CUT = 0.05, 1e-4
# Pieces of the interval, at their narrowest; how many of these the widest holds, and into how many each is split.
_PIECES, _WIDEST, _SPLIT = 128, 16, 4


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
    likely = claim.true_positive_rate(edges)
    allowed = error - 2 * cut - error * _OUTSIDE

    def probable(first: NDArray[np.int64], last: NDArray[np.int64]) -> Floats:
        """Rarer the larger the false-positive rate and the smaller the true-positive rate: by the worst ends."""
        tails = bdtrc(needed - 1, present, likely[last, None])
        return np.asarray((binom.pmf(seen, absent, edges[first, None]) * tails).sum(axis=1))

    # What is too probable at one edge is so in the piece that it begins; what is rare in a wide piece is so in all
    # narrow ones of it. Only what lies between is cut up.
    width = _WIDEST
    pieces = np.arange(0, _PIECES, width)
    if np.any(probable(pieces, pieces) >= allowed):
        return False
    while len(pieces := pieces[probable(pieces, pieces + width) >= allowed]) and width > 1:
        width //= _SPLIT
        pieces = (pieces[:, None] + np.arange(0, _SPLIT * width, width)).ravel()
    return not len(pieces)


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
