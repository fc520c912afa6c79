"""Tests of private teachers: a free ledger and privacy checks of labelers."""

from pl_privknn.privacy.ledger import FreeLedger
from pl_privknn.testing.check import CheckReport, check_labeler
from pl_privknn.testing.observe import LabelerCheckError, Table, distance
from pl_privknn.training.gradients import clipped_sum

__all__ = [
    "CheckReport",
    "FreeLedger",
    "LabelerCheckError",
    "Table",
    "check_labeler",
    "clipped_sum",
    "distance",
]
