"""Privacy card: a run's guarantee in the terms of NIST SP 800-226, for a model card."""

from __future__ import annotations

import datetime
from typing import Any

from pl_privknn._checks import at_most

#: What a run releases, in words.
RELEASED = {
    "labels": "labels of public examples and everything that is computed from them, such as the trained model (the "
    "student)",
    "statistics": "noisy statistics of the private records, the teacher's own model computed from them, labels of "
    "public examples and everything that is computed from these, such as the trained model (the student)",
    "weights": "weights of a network that was trained on the private records by noisy steps, all of its checkpoints, "
    "and everything that is computed from them",
    "": "whatever the ledger's releases were used for",
}
_PUBLIC = "the choice of the public examples, assumed to be independent of the private records"
_FLOATS = "rounding of computer arithmetic in weighted votes and gradients (counted votes get exact noise)"
_OWN: dict[str, tuple[str, ...]] = {
    "labels": (
        "running time and memory of the labelling: outsiders must not be able to measure them", _PUBLIC, _FLOATS,
    ),
    "statistics": (
        "running time and memory of the labelling: outsiders must not be able to measure them", _PUBLIC,
        "features that were learned on other data than the public examples of this run",
    ),
    "weights": (
        "running time, memory and profiles of the training: outsiders must not be able to measure them", _FLOATS,
        "initial weights of the training, assumed to be independent of the private records",
        "side effects of reading a record: a record is one index of the data set, assumed to be read independently",
    ),
}  # fmt: skip
_SEVERAL = "several records of one person together, see the unit above (unit: person protects them all)"
#: What no figure here covers, whatever was released; docs/methods/privacy.md has more on each.
EXCLUSIONS = (
    "people in the public, validation and test parts: ε protects the private records alone",
    "settings that were chosen by looking at results on the same private records outside this ledger "
    "(the file that records every release)",
    "an attacker who can rewrite the ledger with all its hashes, unless its last hash was noted elsewhere",
)
_LOCAL = {"randomized response"}
_SHUFFLED = {"shuffle amplification", "negative binomial"}


def card_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Build a card from a report's facts (see :func:`~pl_privknn.report.page.facts_of`).

    Raises:
        ValueError: without a promise: for a comparison, or a run without private records.
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
        "organisation": "",
        "contact": "",
        "date": datetime.date.today().isoformat(),
        "data_set": facts.get("data", ""),
        "files": facts.get("files", []),
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
        "tuning": "What is charged in this ledger is covered. Settings are public constants; this ledger can't show "
        "whether they were chosen on the same private records elsewhere, and add such runs to it.",
        "known_exclusions": [
            *_OWN.get(kind, (_PUBLIC, _FLOATS)),
            *([_SEVERAL] if promise["unit"] == "record" else []),
            *EXCLUSIONS,
        ],
        "in_words": promise["words"],
        "evaluation": _evaluation(facts.get("student") or {}),
        "remark": (facts.get("student") or {}).get("remark") or "",
        "ledger_head": facts["kept"]["ledger_head"],
        "versions": facts.get("versions", {}),
    }


def _evaluation(student: dict[str, Any]) -> str:
    if not student.get("holdout"):
        return ""
    cost = at_most(student["holdout_epsilon"])
    return f"hold-out accuracy {student['holdout']}, released at ε {cost} (parallel composition)"


def _trust(kinds: set[str]) -> str:
    if kinds & _SHUFFLED:
        return "shuffle model: record owners trust a shuffler to mix their messages"
    if kinds & _LOCAL:
        return "local model: every record owner adds the noise, and needs to trust no one else"
    return "central model: a trusted data owner holds the records and adds the noise"
