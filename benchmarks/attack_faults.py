"""Which faults attacks find: every method, every fault that fits it, ε 1 and 2, each with several seeds.

Where a fault of the size that was asked for is not found with all seeds, larger ones are tried until one is. A part
that is stored already is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.faulty import DELTA, FAULTS, METHODS, attack, sizes_of
from benchmarks.record import Measured, entries
from pl_privknn.comparison.marks import SEEDED, stated
from pl_privknn.privacy.noise import SeededNoise

NONE = "none"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`measure`."""
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--canaries", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """One part for each method, fault and ε."""
    torch.set_num_threads(1)
    stored = {} if options.again else entries("attack_faults")
    settings = {"canaries": options.canaries, "runs": options.runs}
    seeds = list(range(1, options.seeds + 1))

    def found(method: str, epsilon: float, fault: str, size: float, seed: int) -> bool:
        name = None if fault == NONE else fault
        return attack(method, epsilon, SeededNoise(seed), name, size, **settings).violated

    for method in options.methods:
        for fault in (NONE, *(name for name, (methods, _) in FAULTS.items() if method in methods)):
            for epsilon in options.epsilons:
                part = f"{method}, {fault}, ε {epsilon:g}"
                if part in stored:
                    continue
                sizes = (1.0,) if fault == NONE else sizes_of(method, fault)
                first = sum(found(method, epsilon, fault, sizes[0], seed) for seed in seeds)
                enough: float | None = sizes[0]
                if fault != NONE and first < len(seeds):
                    enough = next(
                        (
                            size
                            for size in sizes[1:]
                            if all(found(method, epsilon, fault, size, seed) for seed in seeds)
                        ),
                        None,
                    )
                figures = {
                    "method": method,
                    "fault": fault,
                    "epsilon": epsilon,
                    "delta": DELTA,
                    **stated(SEEDED),
                    "size": sizes[0],
                    "found": first,
                    "of": len(seeds),
                    "size_found": enough,
                }
                yield Measured(figures, seeds=seeds, part=part, settings=settings)
