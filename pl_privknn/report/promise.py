"""The promise in words, and what it leaves to an attacker."""

from __future__ import annotations

import math
from typing import Any

from pl_privknn.privacy.accounting.accountant import RATES

_UNITS = {"add_remove": "one {} more or less", "replace_one": "one {} replaced by another"}
_BUT = {"record": "one", "person": "one person's"}
_NAMES = {"record": "private record", "person": "person with all of their private records"}


def protected(adjacency: str, unit: str) -> str:
    """Protected unit, in words."""
    return _UNITS[adjacency].format(_NAMES[unit])


def true_positive_rate(fpr: float, epsilon: float, delta: float) -> float:
    """Largest rate at which anybody can detect a record, at a rate of false alarms, under (ε, δ) alone.

    Of (ε, δ)-differential privacy both tests hold, "is it there" and "is it missing" (Kairouz, Oh, Viswanath 2015):
    TPR ≤ e^ε·FPR + δ, and 1 − FPR ≤ e^ε·(1 − TPR) + δ. What is known of the releases beyond (ε, δ) can only lower it.
    """
    if math.isinf(epsilon):
        return 1.0
    by_presence = math.exp(min(epsilon, 700.0)) * fpr + delta
    by_absence = 1.0 - math.exp(-epsilon) * (1.0 - fpr - delta)
    return min(1.0, max(fpr, min(by_presence, by_absence)))


def right_guesses(epsilon: float, delta: float) -> float:
    """Largest share of right guesses where a coin has decided whether the record is there: (e^ε + δ) / (e^ε + 1)."""
    return (1.0 + delta * math.exp(-epsilon)) / (1.0 + math.exp(-epsilon))


def attacker(epsilon: float, delta: float) -> dict[str, Any]:
    """Bounds on an attacker who knows everything but one record, from (ε, δ) alone.

    Where the releases are known, :func:`~pl_privknn.privacy.accounting.accountant.trade_off` says more.
    """
    return {
        "right_guesses": right_guesses(epsilon, delta),
        "rates": [
            {"false_positive_rate": fpr, "true_positive_rate": true_positive_rate(fpr, epsilon, delta)}
            for fpr in RATES
        ],
    }


def in_words(known: dict[str, Any], adjacency: str, unit: str) -> list[str]:
    """The promise for somebody outside the field, in a few sentences.

    Args:
        known: what an attacker reaches, see :func:`attacker`.
        adjacency: neighbouring relation.
        unit: a record or a person.
    """
    at_one = next(r for r in known["rates"] if r["false_positive_rate"] == 0.01)["true_positive_rate"]
    question = (
        f"whether that {unit} was among the private ones at all"
        if adjacency == "add_remove"
        else f"which of two candidates that {unit} was"
    )
    return [
        f"Suppose that somebody knows every private record but {_BUT[unit]}, all settings and the code, sees "
        f"everything that was released, and has unlimited computing power. They want to find out {question}.",
        f"If a coin had decided it, they would guess right in at most {percent(known['right_guesses'])} of cases. "
        "Without any release they guess right in 50 %.",
        f"If they accept a false alarm for 1 in 100 {unit}s that were not there, they detect the {unit} at most "
        f"{percent(at_one)} of the time. Blind guessing detects it 1 % of the time.",
        f"This holds whatever the {unit} is, for every {unit}, and for anything that is made of the releases later.",
    ]


def percent(value: float) -> str:
    """A share for people; never rounded below what it is, nor up to certainty."""
    for digits in (1, 3, 6):
        scale = 10 ** (digits + 2)
        up = math.ceil(value * scale - 1e-9) / scale
        if up < 1.0 or value >= 1.0:
            return f"{100 * up:.{digits}f} %"
    return "100 %"
