"""The privacy card: a run's promise in the terms of NIST SP 800-226, for a model card."""

from __future__ import annotations

import html
import re
from typing import Any

from pl_privknn._checks import at_most, printable
from pl_privknn.report.promise import percent

#: What a run lets out, in words.
RELEASED = {
    "labels": "labels of public images and everything that is computed from them, the student included",
    "statistics": "noisy statistics of the private records, the teacher's own model made of them, labels of public "
    "images and everything that is computed from these, the student included",
    "weights": "weights of a network that was trained on the private records by noisy steps, all of its checkpoints, "
    "and everything that is computed from them",
    "": "whatever the ledger's releases were used for",
}
_PUBLIC = "the choice of the public images, taken to be independent of the private records"
_FLOATS = "rounding, and floating-point noise where a mechanism is not a discrete one"
_OWN: dict[str, tuple[str, ...]] = {
    "labels": (
        "running time and memory of the labelling: strangers must not measure them", _PUBLIC, _FLOATS,
    ),
    "statistics": (
        "running time and memory of the labelling: strangers must not measure them", _PUBLIC,
        "features that were learned on other data than the public images of this run",
    ),
    "weights": (
        "running time, memory and profiles of the training: strangers must not measure them", _FLOATS,
        "weights that the training began with, taken to be independent of the private records",
        "what the code of the network and its callbacks wrote elsewhere while it saw private records",
    ),
}  # fmt: skip
_SEVERAL = (
    "several records of one person: k of them cost up to k·ε, at a larger δ (unit: person protects them all)"
)
#: What no figure here covers, whatever was released; docs/methods/privacy.md has more on each.
EXCLUSIONS = (
    "settings that were chosen by looking at results on the same private records outside this ledger",
    "whoever can rewrite the ledger's file with all its hashes, unless its head was noted elsewhere",
)
_LOCAL = {"randomized response"}
_SHUFFLED = {"shuffle amplification", "negative binomial"}


def card_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The card from a report's facts (see :func:`~pl_privknn.report.page.facts_of`).

    Raises:
        ValueError: where there is no promise to tell of: a comparison, or a run without private records.
    """
    promise = facts.get("promise")
    if promise is None:
        raise ValueError(
            f"{facts['title']}: there is no single ledger, so there is no privacy card; name a run or a ledger"
        )
    mechanisms = [
        {name: release[name] for name in ("mechanism", "count", "parameters", "guarantee")}
        for release in facts["planned"]
    ]
    kinds = {release["mechanism"] for release in mechanisms}
    kind = facts.get("released", "")
    return {
        "standard": "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
        "subject": facts["title"],
        "privacy_definition": "(ε, δ)-differential privacy",
        "epsilon": promise["epsilon"],
        "delta": promise["delta"],
        "unit": promise["unit"],
        "unit_of_privacy": f"one {promise['unit']} of the private set ({promise['protected']})",
        "adjacency": promise["adjacency"],
        "guarantee": promise["guarantee"],
        "reason": promise["reason"],
        "mechanisms": mechanisms,
        "composition": {
            "how": "worst case over adaptive releases: the smallest of Rényi DP, privacy loss distributions and, "
            "where it applies, exact induction",
            "rule": facts["kept"]["rule"],
            "bounds": promise["bounds"],
            "runs": facts["kept"]["runs"],
            "max_epsilon": facts["kept"]["max_epsilon"],
        },
        "trust_model": _trust(kinds),
        "what_is_released": RELEASED[kind],
        "attacker": {name: promise["attacker"][name] for name in ("right_guesses", "rates")},
        "tuning": "What is charged in this ledger is covered. Settings are public constants; this ledger can't tell "
        "whether they were chosen on the same private records elsewhere, and such runs have to be added to it.",
        "known_exclusions": [
            *_OWN.get(kind, (_PUBLIC, _FLOATS)),
            *([_SEVERAL] if promise["unit"] == "record" else []),
            *EXCLUSIONS,
        ],
        "ledger_head": facts["kept"]["head"],
        "versions": facts.get("versions", {}),
    }


def card_markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    rows = {
        "definition": card["privacy_definition"],
        "ε": at_most(card["epsilon"]),
        "δ": f"{card['delta']:g}",
        "unit of privacy": card["unit_of_privacy"],
        "adjacency": card["adjacency"],
        "guarantee": card["guarantee"] + (f" – {card['reason']}" if card["reason"] else ""),
        "trust model": card["trust_model"],
        "released": card["what_is_released"],
        "composition": card["composition"]["how"],
        "budget": "none"
        if card["composition"]["max_epsilon"] is None
        else f"ε ≤ {card['composition']['max_epsilon']:g}",
        "tuning": card["tuning"],
        "ledger head": card["ledger_head"],
    }
    lines = [
        f"# Privacy card: {_cell(card['subject'])}",
        "",
        f"In the terms of {card['standard']}.",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    lines += ["", "## Mechanisms, at most", "", "| mechanism | releases | parameters |", "|---|---|---|"]
    lines += [
        f"| {_cell(m['mechanism'])} | {m['count']} | {_cell(m['parameters'])} |" for m in card["mechanisms"]
    ]
    lines += ["", "## An attacker who knows everything but one " + card["unit"], ""]
    lines += [
        f"* guesses right in at most {percent(card['attacker']['right_guesses'])} of cases (50 % is chance)"
    ]
    for rate in card["attacker"]["rates"]:
        alarms, detected = percent(rate["false_positive_rate"]), percent(rate["true_positive_rate"])
        lines.append(f"* at {alarms} false positives detects at most {detected}")
    lines += ["", "## Not covered", "", *(f"* {text}" for text in card["known_exclusions"]), ""]
    return "\n".join(lines)


def _trust(kinds: set[str]) -> str:
    if kinds & _SHUFFLED:
        return "shuffle model: record owners trust a shuffler to mix their messages"
    if kinds & _LOCAL:
        return "local model: every record owner adds the noise, and trusts nobody"
    return "central model: a trusted data owner holds the records and adds the noise"


def _cell(text: Any) -> str:
    """Text of a stranger's file as text: no line, column, link, emphasis or HTML of its own."""
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", html.escape(printable(str(text)), quote=False))
