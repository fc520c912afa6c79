"""The ``privknn`` command."""

import os

# Read when torch loads its threads. Threads that spin while they wait make a training on a busy machine fifteen times
# slower; threads that sleep cost a quarter on an idle one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pl_privknn.cli.main import main

__all__ = ["main"]
