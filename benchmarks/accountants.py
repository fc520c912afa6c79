"""ε of random plans by other accountants: dp-accounting, and prv-accountant in a separate interpreter.

Each plan has one to three kinds of releases (Gaussian, Laplace, pure; sampled or not), some once and some thousands
of times, and an ε between 0.05 and 10. Stored are ratios of the other figure to ours. prv-accountant has no sampled
Laplace and no pure release; what it has no figure for is left out.

``--plans N`` draws N plans, the first ones equal for equal seeds: what is stored of them is kept, and only new ones
are measured. ``--prv PYTHON`` names an interpreter in whose environment prv-accountant is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.record import Measured, entries, markdown, results
from pl_privknn.privacy import account, read_records

DELTA = 1e-5
# Both ends of what prv-accountant says: it states its own error.
_PRV = """
import json, sys
from prv_accountant import GaussianMechanism, LaplaceMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant
for line in sys.stdin:
    plan = json.loads(line)
    made, counts = [], []
    for r in plan["records"]:
        if r["mechanism"] == "laplace":
            made.append(LaplaceMechanism(mu=r["l1_sensitivity"] / r["scale"]))
        elif r["sampling_rate"] == 1:
            made.append(GaussianMechanism(r["sigma"]))
        else:
            made.append(PoissonSubsampledGaussianMechanism(r["sampling_rate"], r["sigma"]))
        counts.append(r["count"])
    try:
        errors = {"eps_error": plan["error"], "delta_error": plan["delta"] / 1000}
        accountant = PRVAccountant(made, max_self_compositions=counts, **errors)
        low, _, high = accountant.compute_epsilon(plan["delta"], counts)
        print(json.dumps([float(low), float(high)]), flush=True)
    except Exception as error:
        print(json.dumps(str(error)[:80]), flush=True)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`measure`."""
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prv", metavar="PYTHON", help="interpreter that has prv-accountant")


def random_plans(number: int, seed: int) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """Random plans as records, with ε by this package."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < number:
        records = []
        for _ in range(rng.integers(1, 4)):
            kind = str(rng.choice(["gaussian", "laplace", "pure_dp"], p=[0.6, 0.25, 0.15]))
            count = int(np.exp(rng.uniform(0, np.log(3000))))
            rate = 1.0 if rng.random() < 0.4 else float(np.exp(rng.uniform(np.log(0.005), np.log(0.5))))
            noise = float(np.exp(rng.normal(0, 0.7)) * max(0.6, rate * math.sqrt(count) * 2))
            record = {"mechanism": kind, "count": count, "sampling_rate": rate}
            if kind == "gaussian":
                record |= {"sigma": noise, "l2_sensitivity": 1.0}
            elif kind == "laplace":
                record |= {"scale": noise, "l1_sensitivity": 1.0}
            else:
                record |= {"epsilon": 1 / noise}
            records.append(record)
        epsilon = account(read_records(records), delta=DELTA, exact=False).epsilon
        if 0.05 <= epsilon <= 10:
            made += 1
            yield records, epsilon


def by_dp_accounting(records: list[dict[str, Any]], epsilon: float) -> float:
    """ε by dp-accounting's PLD accountant, on a grid fine enough for the number of releases."""
    from dp_accounting.pld import privacy_loss_distribution as library

    total: Any = None
    releases = sum(r["count"] for r in records)
    step = min(1e-4, 2e-4 * epsilon / math.sqrt(releases))
    for r in records:
        rate = {"sampling_prob": r["sampling_rate"], "value_discretization_interval": step}
        if r["mechanism"] == "gaussian":
            one = library.from_gaussian_mechanism(r["sigma"], **rate)
        elif r["mechanism"] == "laplace":
            one = library.from_laplace_mechanism(r["scale"], **rate)
        else:
            one = _pure(r["epsilon"], r["sampling_rate"], step)
        part = one.self_compose(r["count"])
        total = part if total is None else total.compose(part)
    return float(total.get_epsilon_for_delta(DELTA))


def _pure(epsilon: float, rate: float, step: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as library

    likely = 1 / (1 + math.exp(-epsilon))
    without = {0: math.log(1 - likely), 1: math.log(likely)}
    present = {
        0: math.log((1 - rate) * (1 - likely) + rate * likely),
        1: math.log((1 - rate) * likely + rate * (1 - likely)),
    }
    # Its constructor is of one direction, and symmetric by default: both directions are given.
    return library.from_two_probability_mass_functions(
        without, present, value_discretization_interval=step, symmetric=False
    )


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Ratios of other accountants' ε to that of this package."""
    plans = list(random_plans(options.plans, options.seed))
    rows: list[dict[str, Any]] = [{"epsilon": epsilon, "records": len(records)} for records, epsilon in plans]
    known = _stored(options.seed)
    for row, (records, epsilon) in zip(rows, plans, strict=True):
        row.update(known.get(epsilon, {}))
        if "dp_accounting" not in row:
            row["dp_accounting"] = by_dp_accounting(records, epsilon) / epsilon
    if options.prv:
        _ask_prv(options.prv, [(row, records) for row, (records, _) in zip(rows, plans, strict=True)])
    yield Measured({"delta": DELTA, "plans": rows}, [options.seed])


def _ask_prv(python: str, plans: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    """Ratios of both ends of prv-accountant's interval to ε of this package, for plans that it supports."""
    asked = []
    for row, records in plans:
        kinds = {(one["mechanism"], one["sampling_rate"] < 1) for one in records}
        if "prv" not in row and kinds <= {("gaussian", False), ("gaussian", True), ("laplace", False)}:
            asked.append((row, {"records": records, "delta": DELTA, "error": 1e-3 * row["epsilon"]}))
    lines = "".join(json.dumps(plan) + "\n" for _, plan in asked)
    run = subprocess.run([python, "-c", _PRV], input=lines, capture_output=True, text=True)
    for (row, _), line in zip(asked, run.stdout.splitlines(), strict=True):
        found = json.loads(line)
        row["prv"] = found if isinstance(found, str) else [end / row["epsilon"] for end in found]


def _stored(seed: int) -> dict[float, dict[str, Any]]:
    """Stored figures of plans of this seed, by ε of this package; plans with another ε are measured again."""
    stored = entries("accountants").get("all")
    if stored is None or stored["settings"]["seed"] != seed:
        return {}
    return {row["epsilon"]: row for row in stored["results"]["plans"]}


def table() -> str:
    """Table of the differences from this package's ε."""
    plans = results("accountants")["plans"]
    library = [one["dp_accounting"] for one in plans]
    low, high = zip(*(one["prv"] for one in plans if not isinstance(one.get("prv", ""), str)), strict=True)
    inside = sum(ends[0] <= 1 <= ends[1] for ends in zip(low, high, strict=True))
    rows = {
        "dp-accounting, PLD": (library, library, f"{np.median(library):.5f}"),
        "prv-accountant, both ends of its interval": (low, high, f"interval contains this ε in {inside}"),
    }
    lines = (
        [name, len(least), f"{min(least):.5f} to {max(most):.5f}", median]
        for name, (least, most, median) in rows.items()
    )
    return markdown(["accountant", "plans", "its ε / ε of this package", "median"], lines)
