"""Facts for a page from a ledger: the promise, the releases, ε as it grew."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pl_privknn.privacy.accounting.accountant import RATES, TradeOff, account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms.base import Charge, merged
from pl_privknn.privacy.verification import audit_ledger, parameters_text
from pl_privknn.report.promise import in_words, protected

#: At how many rows ε is computed for the curve, and how many rows are listed.
MOST_POINTS, MOST_ROWS = 12, 400
# False-positive rates of the chart.
_CURVE = np.linspace(0, 1, 201)
_FIGURES = ("epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld", "epsilon_exact")


def ledger_facts(path: Path, exact: bool = True) -> dict[str, Any]:
    """Facts of a ledger, recomputed from its rows alone.

    Raises:
        LedgerCorrupt: if the rows do not fit their hashes.
        FileNotFoundError: if there is no such file.
    """
    audit = audit_ledger(path, exact=exact)
    with contextlib.closing(Ledger.open_readonly(path)) as ledger:
        trade_off = ledger.report(exact=exact).trade_off()
    charges = audit["charges"]
    return {
        "promise": promise_of(audit, trade_off),
        "planned": [described(record) for run in audit["runs"].values() for record in run["guaranteed"]],
        "spent": {
            "epsilon": audit["epsilon_spent"],
            "releases": [described(record) for run in audit["runs"].values() for record in run["charged"]],
            "rows": [_row(row) for row in charges[:MOST_ROWS]],
            "more_rows": max(0, len(charges) - MOST_ROWS),
            "growth": growth(charges, audit["delta"], audit["adjacency"], audit["epsilon_spent"]),
        },
        "kept": {
            "head": audit["head"],
            "rows": audit["rows"],
            "runs": len(audit["runs"]),
            "max_epsilon": audit["max_epsilon"],
            "within_budget": audit["within_budget"],
            "rule": audit["filter"]["rule"],
        },
    }


def promise_of(audit: dict[str, Any], trade_off: TradeOff) -> dict[str, Any]:
    """The promise in numbers and words.

    Args:
        audit: what an audit found.
        trade_off: error rates of attacks on the same releases.
    """
    attacker = {
        "right_guesses": (1 + trade_off.advantage) / 2,
        "rates": [
            {"false_positive_rate": rate, "true_positive_rate": float(found)}
            for rate, found in zip(RATES, trade_off.true_positive_rate(RATES), strict=True)
        ],
        "curve": [
            [float(x), float(y)] for x, y in zip(_CURVE, trade_off.true_positive_rate(_CURVE), strict=True)
        ],
    }
    return {
        **{name: audit[name] for name in ("epsilon", "delta", "adjacency", "unit", "guarantee", "reason")},
        "protected": protected(audit["adjacency"], audit["unit"]),
        "bounds": {name: audit[name] for name in _FIGURES if audit.get(name) is not None},
        "words": in_words(attacker, audit["adjacency"], audit["unit"]),
        "attacker": attacker,
    }


def described(record: dict[str, Any]) -> dict[str, Any]:
    """A release for people: what, how often, and its parameters."""
    return {
        "mechanism": str(record["mechanism"]).replace("_", " "),
        "count": record["count"],
        "parameters": parameters_text(record),
        "guarantee": record.get("guarantee", "unconditional"),
    }


def growth(
    rows: Sequence[dict[str, Any]], delta: float, adjacency: Any, final: float
) -> list[tuple[int, float]]:
    """(releases so far, ε spent) at some rows.

    An earlier state is a part of a later one, so that the later bound holds for it too: each point takes the smaller.

    Args:
        rows: charges of an audit.
        delta: δ.
        adjacency: neighbouring relation.
        final: ε of all of them, computed exactly.
    """
    if not rows:
        return []
    places = sorted({round(i * len(rows) / MOST_POINTS) for i in range(1, MOST_POINTS)} - {0, len(rows)})
    charges = [Charge.from_record(row["release"]) for row in rows]
    counts = [0, *itertools.accumulate(charge.count for charge in charges)]
    parts = [list(merged(charges[:place]).values()) for place in places]
    epsilons = [account(part, delta=delta, adjacency=adjacency, exact=False).epsilon for part in parts]
    least = np.minimum.accumulate([final, *reversed(epsilons), 0.0])[::-1].tolist()
    return [(counts[place], bound) for place, bound in zip([0, *places, len(rows)], least, strict=True)]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"position": row["row"], "noise": row["noise"] or "not stated", **described(row["release"])}
