"""Ind-KNN: kernel votes with a budget for every private record."""

from pl_privknn.labelers.ind_knn.algorithm import PublicDensity
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.prediction import IndKNNSwitches
from pl_privknn.labelers.ind_knn.settings import RecordBudgets, Records, Similarity
from pl_privknn.privacy.record_groups import RecordGroups

__all__ = [
    "IndKNN",
    "IndKNNSwitches",
    "PublicDensity",
    "RecordBudgets",
    "RecordGroups",
    "Records",
    "Similarity",
]
