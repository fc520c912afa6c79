"""``python -m tests.faults``: which faults of the catalogue do the tests notice?"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from .catalogue import FAULTS
from .fault import Fault
from .runner import Trials


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool; 1 where a fault is not caught, or the catalogue does not fit the code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Put privacy faults into a copy of the package, one at a time, and see whether a test notices.",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault; may be repeated")
    parser.add_argument("--part", metavar="I/N", help="every N-th fault, beginning with the I-th (from 1)")
    parser.add_argument("--processes", type=int, default=2, help="faults at a time (2)")
    parser.add_argument(
        "--list", action="store_true", help="name the faults and what they would do, and stop"
    )
    parsed = parser.parse_args(words)
    faults = chosen(parsed.only, parsed.part)
    if parsed.list:
        print("\n".join(f"{fault.name}\n    {fault.harm}" for fault in faults))
        return 0
    start, caught = time.monotonic(), 0
    width = max(len(fault.name) for fault in faults)
    with Trials(parsed.processes) as trials:
        broken = [outcome.by for outcome in trials.without(faults) if outcome.by != "every test passed"]
        if broken:
            print("without any fault: " + "\n".join(broken))
            return 1
        print(
            f"{len({test for fault in faults for test in fault.tests})} tests pass without a fault",
            flush=True,
        )
        for outcome in trials.of(faults):
            caught += outcome.caught
            word = "caught" if outcome.caught else "NOT CAUGHT"
            print(f"{outcome.name:{width}}  {word:10}  {outcome.seconds:5.1f} s  {outcome.by}", flush=True)
    print(f"{caught} of {len(faults)} faults caught in {time.monotonic() - start:.0f} s")
    return int(caught < len(faults))


def chosen(only: Sequence[str] | None, part: str | None) -> list[Fault]:
    """The faults that were asked for.

    Raises:
        SystemExit: for a name or a part that there is not.
    """
    faults = list(FAULTS)
    if only is not None:
        if unknown := sorted(set(only) - {fault.name for fault in faults}):
            sys.exit(f"--only {unknown[0]}: there is no such fault; --list names them")
        faults = [fault for fault in faults if fault.name in only]
    if part is not None:
        first, _, step = part.partition("/")
        if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step) <= len(faults)):
            sys.exit(f"--part {part} must be I/N with I from 1 to N, for instance 1/3")
        faults = faults[int(first) - 1 :: int(step)]
    return faults


if __name__ == "__main__":
    sys.exit(main())
