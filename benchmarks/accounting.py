"""Time of the accountant: RDP and PLD (fast) and the exact worst case, against dp-accounting in the same run.

Every timing runs in a fresh process, so no result cached by an earlier one helps; imports do not count, nor
is the one-time compilation of the induction (shown apart). The baseline is dp-accounting's own PLD of the
Gaussian part alone, at a spacing that is good for three digits.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.record import Measured

DELTA = 1e-5
ANSWERS = {"sigma": 20.0, "l2_sensitivity": math.sqrt(2), "sampling_rate": 0.2}
SCREENING = {"k": 300, "threshold": 210, "sigma": 85.0, "num_classes": 10, "sampling_rate": 0.2}
# Label: screenings, answers.
LISTS = {"18,000 screenings + 3,877 answers": (18_000, 3_877), "1,000,000 screenings": (1_000_000, 0)}


def timed(task: str, screenings: int, answers: int) -> tuple[float, float]:
    """Run one task in this process; return (seconds, ε)."""
    from dp_accounting.pld import privacy_loss_distribution

    from pl_privknn.privacy.accounting import induction  # noqa: F401 - compiled code is loaded with the imports
    from pl_privknn.privacy.accounting.accountant import account
    from pl_privknn.privacy.accounting.exact import exact_epsilon
    from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening

    charges = [Charge(NoisyScreening(**SCREENING), screenings)]
    if answers:
        charges.append(Charge(Gaussian(**ANSWERS), answers))
    warm_up = [Charge(NoisyScreening(k=2, threshold=1, sigma=2, num_classes=2, sampling_rate=0.5))]
    started = time.perf_counter()
    if task != "fast":
        exact_epsilon(warm_up, delta=DELTA, work=1e4)
    loaded = time.perf_counter()
    if task == "compile":
        return loaded - started, math.nan
    if task == "baseline":
        single = privacy_loss_distribution.from_gaussian_mechanism(
            ANSWERS["sigma"],
            sensitivity=ANSWERS["l2_sensitivity"],
            value_discretization_interval=1e-4,
            sampling_prob=ANSWERS["sampling_rate"],
        )
        epsilon = single.self_compose(3_877).get_epsilon_for_delta(DELTA)
    elif task == "fast":
        epsilon = account(charges, delta=DELTA, exact=False).epsilon
    else:
        epsilon = exact_epsilon(charges, delta=DELTA) or math.nan
    return time.perf_counter() - loaded, float(epsilon)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--repeat", type=int, default=3, help="runs of each timing; the fastest counts")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Seconds and ε of each list, and times the baseline's seconds."""
    jobs = [
        ("compile or load", "compile", (1, 0)),
        ("baseline: dp-accounting, 3,877 answers", "baseline", (1, 0)),
    ]
    for label, counts in LISTS.items():
        jobs += [(f"RDP + PLD: {label}", "fast", counts), (f"exact: {label}", "exact", counts)]
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    for label, task, counts in track(jobs, description="Timing", console=Console(stderr=True)):
        runs = []
        for _ in range(max(1, options.repeat)):
            with context.Pool(1) as pool:
                runs.append(pool.apply(timed, (task, *counts)))
        seconds, epsilon = min(runs)
        rows.append({"what": label, "seconds": seconds, "epsilon": None if math.isnan(epsilon) else epsilon})
    for row in rows:
        row["times_baseline"] = row["seconds"] / rows[1]["seconds"]
    yield Measured({"delta": DELTA, "rows": rows}, seeds=[])
