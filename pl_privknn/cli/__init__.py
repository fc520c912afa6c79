"""The ``privknn`` command."""

import os

# Read when torch loads its threads. Threads that spin for long while they wait make a training on a busy machine
# fifteen times slower; threads that sleep at once leave a second core unused where layers are small. GNU's threads,
# which torch has on Linux, spin for some microseconds and then sleep: with two cores 1.5 times the speed of sleeping
# at once on an idle machine, and 0.7 times next to one busy process.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from pl_privknn.cli.main import main

__all__ = ["main"]
