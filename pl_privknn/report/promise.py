"""The promise in words, and what it leaves to an attacker."""

from __future__ import annotations

import math
from typing import Any

_UNITS = {"add_remove": "one {} more or less", "replace_one": "one {} replaced by another"}
_BUT = {"record": "one", "person": "one person's"}
_NAMES = {"record": "private record", "person": "person with all of their private records"}


def protected(adjacency: str, unit: str) -> str:
    """Protected unit, in words."""
    return _UNITS[adjacency].format(_NAMES[unit])


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
