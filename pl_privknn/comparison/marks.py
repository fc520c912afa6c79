"""How results, tables and plots show how far an ε holds.

The guarantee itself, and how two of them compose, is :class:`~pl_privknn.privacy.mechanisms.base.Guarantee`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.mechanisms.base import (
    LEVELS,
    UNCONDITIONAL,
    Guarantee,
    Level,
    noise_guarantee,
    weakest,
)
from pl_privknn.privacy.noise import SeededNoise

#: What stands behind an ε that holds only under a condition, or not at all.
MARKS: dict[Level, str] = {"unconditional": "", "conditional": "†", "none": "‡"}
#: Of anything whose noise was drawn from a seed.
SEEDED = noise_guarantee(SeededNoise(0))
NOT_RECORDED = "how far this ε holds was not recorded"
_SEPARATOR = "; "


def mark(guarantee: Guarantee) -> str:
    """What stands behind an ε of this guarantee, after a space; nothing for an unconditional one."""
    return f" {MARKS[guarantee.level]}" if MARKS[guarantee.level] else ""


def stated(guarantee: Guarantee) -> dict[str, str]:
    """The fields ``guarantee`` and ``reason`` of a result or summary."""
    return {"guarantee": guarantee.level, "reason": guarantee.reason}


def guarantee_of(values: Mapping[str, Any], releases: Iterable[Charge] = ()) -> Guarantee:
    """The guarantee of a stored result or summary: the weakest that anything in it says.

    Args:
        values: its fields, of which ``guarantee``, ``reason`` and ``noise_seeded`` are read. Without ``guarantee``
            it has none: nobody wrote down how its noise was drawn.
        releases: those of the run, each with its own mark.

    Raises:
        ValueError: for an unknown guarantee, or a reason beside an unconditional one.
    """
    level, reason = values.get("guarantee"), values.get("reason")
    if level is None:
        found = Guarantee("none", (NOT_RECORDED,))
    elif reason:
        found = Guarantee(level, (reason,))
    else:
        found = Guarantee(level, () if level == "unconditional" else ("the reason was not recorded",))
    found &= weakest(charge.guarantee for charge in releases)
    if values.get("noise_seeded") and values.get("epsilon") is not None:
        found &= SEEDED
    # A file holds all reasons in one line: taken apart, one that is there twice is shown once.
    return Guarantee(
        found.level, tuple(dict.fromkeys(found.reason.split(_SEPARATOR))) if found.reason else ()
    )


def footnotes(named: Iterable[tuple[str, Guarantee]]) -> list[str]:
    """What the marks of a table or plot mean: one text for each mark, with the reasons.

    Args:
        named: guarantees of what is shown, with the names of their rows or lines.
    """
    levels: dict[Level, dict[str, Guarantee]] = {level: {} for level in LEVELS}
    for name, guarantee in named:
        rows = levels[guarantee.level]
        rows[name] = rows.get(name, UNCONDITIONAL) & guarantee
    return [_footnote(level, rows) for level, rows in levels.items() if rows and MARKS[level]]


def _footnote(level: Level, rows: Mapping[str, Guarantee]) -> str:
    """Reasons that all rows share first, then those of single ones."""
    shared = [
        reason
        for reason in weakest(rows.values()).reasons
        if all(reason in guarantee.reasons for guarantee in rows.values())
    ]
    text = f"{MARKS[level]} guarantee: {level}{' – ' if shared else ''}{_SEPARATOR.join(shared)}."
    own: dict[str, list[str]] = {}
    for name, guarantee in rows.items():
        if rest := _SEPARATOR.join(reason for reason in guarantee.reasons if reason not in shared):
            own.setdefault(rest, []).append(name)
    return " ".join([text, *(f"{', '.join(names)}: {rest}." for rest, names in own.items())])
