"""For tests of private teachers: a free ledger, and a check of what a labeler promises."""

from pl_privknn.testing.check import CheckReport, check_labeler
from pl_privknn.testing.drawing_methods import DrawingMethod, Entered
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.ledger import FreeLedger
from pl_privknn.testing.tables import Pair, Table

__all__ = [
    "CheckReport",
    "DrawingMethod",
    "Entered",
    "FreeLedger",
    "LabelerCheckError",
    "Pair",
    "Table",
    "check_labeler",
]
