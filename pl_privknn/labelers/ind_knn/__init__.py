"""Ind-KNN: kernel votes with a budget for every private record."""

from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, IndKNNSwitches, PublicDensity
from pl_privknn.labelers.ind_knn.labeler import IndKNN, RecordBudgets, RecordIdentities, Similarity

__all__ = [
    "IndKNN",
    "IndKNNParameters",
    "IndKNNSwitches",
    "PublicDensity",
    "RecordBudgets",
    "RecordIdentities",
    "Similarity",
]
