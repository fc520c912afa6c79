"""Tests of private teachers: a free ledger and privacy checks of labelers."""

from pl_privknn.testing.check import CheckReport, check_labeler
from pl_privknn.testing.distances import distance
from pl_privknn.testing.tables import Pair, Table
from pl_privknn.testing.watch import FreeLedger, LabelerCheckError
from pl_privknn.training.gradients import clipped_sum

__all__ = [
    "CheckReport",
    "FreeLedger",
    "LabelerCheckError",
    "Pair",
    "Table",
    "check_labeler",
    "clipped_sum",
    "distance",
]
