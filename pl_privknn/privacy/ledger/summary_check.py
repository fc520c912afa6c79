"""Does a run's summary follow from its ledger? For an auditor who has these two files and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pl_privknn.privacy.ledger.balance import Balance
from pl_privknn.privacy.ledger.budget import make_report
from pl_privknn.privacy.ledger.store import read_rows
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.record_groups import group_costs

#: What a run notes in its ledger about its queries: this word and its id, then the counts as JSON behind a colon.
COUNTS = "labels"
# All that such a note may say: whoever forges a summary could also add a note to the ledger.
_COUNTED = ("queried", "answered", "refused", "lost")
_REPORTED = (
    "epsilon", "epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld", "epsilon_exact", "delta", "adjacency",
    "guarantee", "reason", "conditional",
)  # fmt: skip
# Of two computations of one figure on different machines.
_ROUNDING = 1e-6


def counts_topic(run_id: str) -> str:
    """Topic of the note about a run's queries."""
    return f"{COUNTS} {run_id}"


def counts_text(counts: Mapping[str, int]) -> str:
    """Text of that note: numbers of queries, which are released."""
    return f"counts: {json.dumps(dict(counts), sort_keys=True)}"


def check_summary(summary: Mapping[str, Any], ledger: str | Path, exact: bool = True) -> list[dict[str, Any]]:
    """Compare what a summary states with what its ledger says at the row that the summary names.

    ε, δ and the rest of the report are computed anew from the rows up to ``ledger_head``. Numbers of queries and
    answers follow from what the run noted in the ledger; steps and noise of a private training from its plan and its
    charges. What only the training knows (accuracies, seconds, versions) is in no ledger.

    Args:
        summary: content of ``summary.json``.
        ledger: the ledger's file.
        exact: also compute the exact worst case (seconds). Without it a summary that has it can't be followed.

    Returns:
        For each figure ``name``, ``stated``, ``found`` and ``agrees``.

    Raises:
        LedgerCorrupt: if the rows do not fit their hashes.
        ValueError: if the summary states no ε, or a δ outside (0, 1).
        FileNotFoundError: if there is no ledger.
    """
    if summary.get("epsilon") is None or summary.get("delta") is None:
        raise ValueError(
            "the summary states no ε and δ: its run used no private record; give that of a private run"
        )
    rows = read_rows(ledger)
    checks = [_check_head(summary, rows)]
    head = summary.get("ledger_head")
    last = next((row["position"] for row in rows if row["hash"] == head), len(rows))
    balance = Balance()
    for row in rows[:last]:
        balance.apply(row)
    report = make_report(balance, balance.guarantee(), balance.spent(), balance.late, summary["delta"], exact)
    found = {
        **report.guarantee.to_dict(),
        **report.trade_off().to_dict(),
        "delta": balance.delta,
        "epsilon_spent": report.spent.epsilon,
        "max_epsilon": balance.max_epsilon,
        **_of_run(summary, rows[:last], balance),
    }
    wanted = [*_REPORTED, "epsilon_spent", "max_epsilon", *(name for name in found if name in summary)]
    for name in dict.fromkeys(wanted):
        if name in summary or name in ("epsilon_spent", "guarantee", "adjacency"):
            checks.append(_compared(name, summary.get(name), found.get(name)))
    unfounded = [n for n in _COUNTED if n in summary and n not in found]
    checks += [{"name": n, "stated": summary[n], "found": None, "agrees": None} for n in unfounded]
    return checks


def _check_head(summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The head must be a row's, and no later row may be of the same run: a summary is written at the run's end."""
    head, run = summary.get("ledger_head"), summary.get("run")
    known = [row["position"] for row in rows if row["hash"] == head]
    if not known:
        return {"name": "ledger_head", "stated": head, "found": rows[-1]["hash"], "agrees": False}
    later = [
        row for row in rows[known[0] :] if row["kind"] in ("plan", "charge") and run in (None, row["run"])
    ]
    return {
        "name": "ledger_head",
        "stated": head,
        "found": later[-1]["hash"] if later else head,
        "agrees": not later,
    }


def _of_run(summary: Mapping[str, Any], rows: list[dict[str, Any]], balance: Balance) -> dict[str, Any]:
    """What the ledger says of the run itself."""
    run = summary.get("run") or (next(iter(balance.runs)) if len(balance.runs) == 1 else None)
    if run is None:
        return {}
    if run not in balance.runs:
        return {"run": None}
    found: dict[str, Any] = {"run": run}
    totals = balance.run(run)
    described = [row["description"] for row in rows if row["kind"] == "plan" and row["run"] == run]
    if described and "labeler" in described[-1]:
        found["labeler"] = described[-1]["labeler"]
    if (noted := balance.notes.get(counts_topic(run))) is not None:
        counts = json.loads(noted.partition(":")[2])
        found |= {name: counts[name] for name in _COUNTED if name in counts}
    if "steps_planned" in summary:
        found |= _training(totals.planned.values(), totals.charged.values())
        if described and (correlated := described[-1].get("correlated_noise")):
            # A release is for a cycle of steps, of which the last one may be cut off by the plan.
            found["bands"] = bands = correlated["bands"]
            found["steps_planned"] = min(described[-1]["steps"], bands * found["steps_planned"])
            found["steps"] = min(found["steps_planned"], bands * found["steps"])
    if described and (rates := described[-1].get("rates")):
        steps = next(
            c for c in totals.planned.values() if getattr(c.mechanism, "sampling_rate", 0) == max(rates)
        )
        found["rate_of_groups"] = rates
        found["epsilon_of_groups"] = group_costs(rates, steps, balance.guarantee(), summary["delta"])
    return found


def _training(planned: Iterable[Charge], charged: Iterable[Charge]) -> dict[str, Any]:
    """Steps, noise and sampling rate of a private training."""
    # Accuracies that were paid for have discrete noise, and are no steps.
    plan = [charge for charge in planned if isinstance(charge.mechanism, Gaussian)]
    found: dict[str, Any] = {
        "steps": sum(charge.count for charge in charged if isinstance(charge.mechanism, Gaussian)),
        "steps_planned": sum(charge.count for charge in plan),
    }
    if len(plan) == 1 and isinstance(release := plan[0].mechanism, Gaussian):
        found |= {
            "noise_multiplier": release.sigma / release.l2_sensitivity,
            "clip_norm": release.l2_sensitivity,
            "sampling_rate": release.sampling_rate,
        }
    return found


def _compared(name: str, stated: Any, found: Any) -> dict[str, Any]:
    if isinstance(stated, int | float) and isinstance(found, int | float) and not isinstance(stated, bool):
        agrees = stated == found or math.isclose(stated, found, rel_tol=_ROUNDING)
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        pairs = zip(stated, found, strict=True)
        agrees = all(_compared(name, one, other)["agrees"] for one, other in pairs)
    else:
        agrees = stated == found
    return {"name": name, "stated": stated, "found": found, "agrees": agrees}
