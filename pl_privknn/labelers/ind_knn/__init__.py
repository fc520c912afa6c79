"""Ind-KNN: kernel votes with a budget for every private record."""

from pl_privknn.labelers.ind_knn.labeler import IndKNN

__all__ = ["IndKNN"]
