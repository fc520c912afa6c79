"""PATE: teachers on disjoint parts of the private records, their votes and their noisy aggregation."""

from pl_privknn.labelers.pate.pate import PATE

__all__ = ["PATE"]
